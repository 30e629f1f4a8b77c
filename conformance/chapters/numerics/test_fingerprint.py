"""Check the numerics fingerprint of the device, its reproducibility, and the bounds that it implies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure import fingerprint
from ...measure.precision import full_precision
from ...measure.summation import (
    NEAREST_EVEN,
    SIDE,
    TERMS,
    Accumulator,
    Irregular,
    Product,
    Swamping,
    bits_read,
    result_rounding,
    spread,
    sums,
)
from ...measure.threads import one_thread
from ...oracles.numbers import exact
from ...oracles.numbers.error_bounds import accumulation
from ...oracles.numbers.formats import FORMATS
from .support import by_kernel

FP32 = torch.float32

# Each through another op, as a product of (64, k) and (k, 64).
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda left, right: torch.mm(left, right),
    "linear": lambda left, right: F.linear(left, right.t().contiguous()),
    "addmm": lambda left, right: torch.addmm(torch.zeros((), dtype=left.dtype, device=left.device), left, right),
    "bmm": lambda left, right: torch.bmm(left.expand(2, *left.shape), right.expand(2, *right.shape))[1],
    "conv2d": lambda left, right: F.conv2d(left[..., None, None], right.t()[..., None, None].contiguous()).flatten(1),
}


def _on(target: Target, op: str) -> Product:
    return lambda left, right: OPS[op](left.to(target.device), right.to(target.device))


def _dtypes(case: Case, target: Target) -> tuple[torch.dtype, ...]:
    return (*(dtype for dtype in case.amp_dtypes if target.supports(dtype)), FP32)


@contract("AMP-NUMERICS-090")
def test_the_fingerprint(case: Case, target: Target) -> None:
    case.fingerprint(fingerprint.fingerprint(target.device, _dtypes(case, target)))


@contract("AMP-NUMERICS-091")
def test_the_fingerprint_stays(case: Case, target: Target) -> None:
    product = fingerprint.matrix_product(target.device)
    with full_precision(target.device_type):
        for dtype in _dtypes(case, target):
            measured = [
                fingerprint.product_rows(product, dtype) | fingerprint.repeats(product, dtype)
                for _ in range(case.samples(quick=2, standard=3, full=20))
            ]
            flickering = {
                row: sorted({str(one.get(row)) for one in measured})
                for row in dict.fromkeys(row for one in measured for row in one)
                if len({one.get(row) for one in measured}) > 1
            }
            case.equal(f"{dtype}: rows that differ in {len(measured)} measurements", flickering, {})
            case.equal(f"{dtype}: the same product, four times", measured[0]["repeated"], "the same bits")


@contract("AMP-NUMERICS-092")
@pytest.mark.parametrize("op", OPS)
def test_the_implied_bound(case: Case, target: Target, rng: torch.Generator, op: str) -> None:
    lengths = (33, TERMS, 257, 1024, 8192)[: case.samples(quick=2, standard=4, full=5)]
    for dtype in _dtypes(case, target):
        plain = fingerprint.accumulator_of(_on(target, "mm"), target.device_type, dtype)
        case.note(f"{dtype}: accumulator", f"{plain[0]}, {plain[1]} added at once")
        for terms in lengths:
            found, block = plain
            if _takes_other_units(target, dtype):
                found, block = fingerprint.accumulator_of(_on(target, op), target.device_type, dtype, terms)
                case.note(f"{dtype}, {op} over {terms} terms: accumulator", f"{found}, {block} added at once")
            # Terms that are aligned to be added at once are cut before the sum is rounded.
            if found.bits is None or found.at_least or found.rounding != NEAREST_EVEN or block > 1:
                continue
            # What is seen here may tighten the bound that a plain product implies, and never loosen it. A product that
            # sums in float64 implies nothing for the others.
            bits = min(max(found.bits, plain[0].bits or 0), fingerprint.BITS[FP32])
            try:
                with full_precision(target.device_type):
                    worst, where = _worst_share(_on(target, op), dtype, terms, bits, rng)
            except Irregular as irregular:
                # Another algorithm than a sum, which the bound is not about; AMP-NUMERICS-012 holds there.
                case.note(f"{dtype}, {op} over {terms} terms: no order of summation", str(irregular))
                continue
            case.at_most(f"{dtype}, {op} over {terms} terms: error over the bound, {where}", worst, 1.0)


def _takes_other_units(target: Target, dtype: torch.dtype) -> bool:
    """Return whether a library may run a 16-bit product of other sizes on other units: those for matrices may truncate.

    cuBLAS chooses by size and alignment; tensor cores round sums toward zero, ordinary units to nearest.
    """
    return dtype is not FP32 and bool(target.probe["tensor_cores"])


def _worst_share(
    product: Product, dtype: torch.dtype, terms: int, bits: int, rng: torch.Generator
) -> tuple[float, str]:
    """Return the greatest ratio of an error to its bound, and where in the sum it arose.

    A large term X at one place and -X at another, all others positive, of a place of X or less. No partial sum is
    above X + the rest; those that hold X are as many as the swamping of FPRev counts, L - 1 additions, so that
    (4.3) of Higham 2002 comes to u ((L - 1) (X + rest) + (K - 1) rest), and the rounding of the result to its type.
    Half a place is the worst for rounding to nearest, which loses it each time: 1 of the bound. Truncation loses
    63/64 of a place: 1.97 of the bound.
    """
    form, unit, base = FORMATS[dtype], 2.0**-bits, 2.0**10
    pairs = [(0, terms - 1), (terms // 3, terms - 1)]
    pairs += [
        (int(first), int(last))
        for first, last in torch.randint(0, terms, (6, 2), generator=rng).tolist()
        if first != last
    ]
    place = 2 * unit * base
    absorbed = Swamping(product, dtype, terms).absorbed(pairs)
    found = []
    for share in (0.5, 0.75, 0.984375):
        rows = spread([{first: base, last: -base} for first, last in pairs], terms, share * place)
        rest = (terms - 2) * share * place
        for pair, size, seen in zip(pairs, absorbed, sums(product, dtype, rows), strict=True):
            error = unit * ((size - 1) * (base + rest) + (terms - 1) * rest)
            bound = error + form.unit_roundoff * (rest + error) + form.smallest / 2
            found.append((abs(seen - rest) / bound, f"{share:g} of a place between places {pair[0]} and {pair[1]}"))
    return max(found)


@contract("AMP-NUMERICS-092")
def test_cancelling_sums_keep_the_implied_bound(case: Case, target: Target, rng: torch.Generator) -> None:
    """|C - AB| <= u |AB| + (1 + u) g |A||B| + half a subnormal, g what the fingerprint implies, on sums that cancel."""
    for dtype in _dtypes(case, target):
        form = FORMATS[dtype]
        with full_precision(target.device_type), one_thread():
            found = fingerprint.summation(fingerprint.matrix_product(target.device), dtype)
        left, right = (
            tensor.to(dtype) for tensor in _cancelling(rng, case.samples(quick=128, standard=500, full=4000))
        )
        terms = left.shape[1]
        in_fp32 = Accumulator(fingerprint.BITS[FP32], NEAREST_EVEN).error(terms) or 0.0
        case.note(f"{dtype}: implied share of n 2^-22", found.error(terms) / accumulation(terms))
        exact_sum, size = exact.product_and_size(left, right)
        for op in OPS:
            share = max(found.error(terms), in_fp32)
            if _takes_other_units(target, dtype):
                own, _ = fingerprint.accumulator_of(_on(target, op), target.device_type, dtype, terms)
                share = share if own == found.accumulator else accumulation(terms)
            bound = form.unit_roundoff * exact_sum.abs() + (1 + form.unit_roundoff) * share * size + form.smallest / 2
            with full_precision(target.device_type):
                seen = _on(target, op)(left, right).cpu().double()
            worst = float(((seen - exact_sum).abs() / bound).max())
            case.at_most(f"{dtype}, {op} over {terms} terms: worst error over its bound", worst, 1.0)


def _cancelling(rng: torch.Generator, half: int) -> tuple[Tensor, Tensor]:
    """(64, 2 half + 16) and its factor: products in pairs of opposite sign, and a rest of a hundredth of their size."""
    left, right = torch.randn(SIDE, half, generator=rng), torch.randn(half, SIDE, generator=rng)
    rest, factor = torch.randn(SIDE, 16, generator=rng), torch.randn(16, SIDE, generator=rng)
    # Nothing is subnormal in fp16, which some devices flush.
    small = [torch.where(part.abs() < 2.0**-6, 2.0**-6, part) for part in (left, right, rest, factor)]
    order = torch.randperm(2 * half + 16, generator=rng)
    rows = torch.cat([small[0], -small[0], small[2] / 16], 1)
    columns = torch.cat([small[1], small[1], small[3] / 16], 0)
    return rows[:, order], columns[order]


@contract("AMP-NUMERICS-093")
@pytest.mark.parametrize("op", OPS)
def test_results_round_to_nearest(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    bits = fingerprint.BITS[amp_dtype]
    with full_precision(target.device_type):
        seen = {result_rounding(_on(target, op), amp_dtype, terms, bits) for terms in (16, TERMS)}
    case.equal(f"{op}: results of sums are rounded", sorted(seen), [NEAREST_EVEN])


@contract("AMP-NUMERICS-022")
@pytest.mark.parametrize("op", OPS)
def test_fp32_operands_are_read_in_full(case: Case, target: Target, op: str) -> None:
    with full_precision(target.device_type):
        seen = bits_read(_on(target, op), FP32, 24)
    case.equal(f"{op}: bits of the left and the right fp32 operand that take part", list(seen), [24, 24])


# What stands where in (1, 2, 5, 16) queries, keys and values, and which rows of the result it is in.
SPOILED = {
    "nan-key": ("key", float("nan"), slice(None)),
    "nan-value": ("value", float("nan"), slice(None)),
    "inf-value": ("value", float("inf"), slice(None)),
    "inf-query": ("query", float("inf"), slice(3, 4)),
    "nan-query": ("query", float("nan"), slice(3, 4)),
}
# Fewer keys than a vector has elements, and whole vectors with a rest; the signs that the logits of an infinite query
# have: both in each vector, or one in the first half and the other in the second.
KEYS = ((4, "in turn"), (33, "in turn"), (33, "in halves"))


@contract("AMP-NUMERICS-094")
@pytest.mark.parametrize("what", SPOILED)
def test_attention_hands_on_what_is_not_finite(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, what: str
) -> None:
    for keys, signs in KEYS:
        _check_spoiled(case, target, amp_dtype, rng, what, keys, signs)


def _check_spoiled(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, what: str, keys: int, signs: str
) -> None:
    name, value, rows = SPOILED[what]
    sources = {part: torch.randn(1, 2, 5 if part == "query" else keys, 16, generator=rng) for part in _PARTS}
    # Logits of both signs in each row, so that an infinite query is not a row that is masked throughout.
    places = torch.arange(keys)
    sources["key"][..., 5] = torch.where(places % 2 == 0 if signs == "in turn" else places < keys // 2, 1.0, -1.0)
    sources[name][0, 0, 3, 5] = value

    def run() -> tuple[Tensor, list[bool]]:
        leaves = [sources[part].to(target.device).requires_grad_() for part in _PARTS]
        with full_precision(target.device_type):
            with target.autocast(amp_dtype):
                seen = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2])
            seen.float().sum().backward()
        finite = [bool(leaf.grad.isfinite().all()) for leaf in leaves if leaf.grad is not None]
        return seen.detach().cpu().isfinite(), finite

    ran = by_kernel(case, target, rng, run)
    for kernel, (finite, gradients) in ran.items():
        where = f"{kernel}, {keys} keys, signs {signs}"
        untouched = torch.ones_like(finite[0, 0])
        untouched[rows] = False
        whole = bool((finite[0, 1]).all() and finite[0, 0][untouched].all())
        case.true(f"{where}: the other head and the other rows are finite", whole)
        hidden = bool(finite[0, 0][rows].all(-1).any())
        case.equal(f"{where}: rows that come out finite although it is in them", hidden, False)
        case.true(f"{where}: a gradient is not finite, so that the scaler sees it", not all(gradients), gradients)


_PARTS = ("query", "key", "value")
