"""Numerics: how 16-bit numbers are rounded, multiplied and summed, and what fp32 is kept for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...data import fixture, read_toml
from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers import error_bounds, exact
from ...oracles.numbers.formats import FORMATS, FP16, FP32, Format, midpoints, rounded, tensor_of
from .bit_patterns import all_patterns, narrowed, widened
from .bounds_convolution import Convolution
from .matmul_spellings import integers
from .support import by_kernel, compare

# --- casts ------------------------------------------------------------------------------------------------------


@functools.cache
def _hand_written_casts() -> dict[str, Any]:
    return read_toml(fixture("casts.toml"))


# Each way runs another kernel: whole vectors and their tail, single elements, a copy into place, a lone number.
CASTS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "to": lambda source, dtype: source.to(dtype),
    "strided": lambda source, dtype: torch.stack([source, source], 1)[:, 0].to(dtype),
    "copy_": lambda source, dtype: torch.empty(source.shape, dtype=dtype, device=source.device).copy_(source),
    "scalar": lambda source, dtype: torch.stack([item.to(dtype) for item in source]),
}

# (m, k) times (k, n), each through another op that casts its operands under autocast.
OPS_THAT_CAST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda left, right: torch.mm(left, right),
    "linear": lambda left, right: F.linear(left, right.t()),
    "bmm": lambda left, right: torch.bmm(left.unsqueeze(0), right.unsqueeze(0)).squeeze(0),
    "conv1d": lambda left, right: F.conv1d(left[..., None], right.t()[..., None]).flatten(1),
    "conv2d": lambda left, right: F.conv2d(left[..., None, None], right.t()[..., None, None]).flatten(1),
    "conv_transpose1d": lambda left, right: F.conv_transpose1d(left[..., None], right[..., None]).flatten(1),
}


@functools.cache
def _midpoints(form: Format, stride: int) -> tuple[int, ...]:
    return tuple(midpoints(form, stride))


def _bits(number: float) -> int:
    """Return the fp32 pattern of a number."""
    return int(torch.tensor(number, dtype=torch.float32).view(torch.int32).item())


def _cast(patterns: Sequence[int], form: Format) -> tuple[Tensor, Tensor]:
    """Return fp32 numbers of these patterns and what integer arithmetic makes of them in `form`."""
    return tensor_of(patterns, FP32), narrowed(torch.tensor(patterns, dtype=torch.int64), form)


def _hand_written(case: Case, target: Target, dtype: torch.dtype, way: str, group: str) -> None:
    """Hold one way of casting against the rows of `group` in the table that was worked out by hand."""
    form = FORMATS[dtype]
    rows = [row for row in _hand_written_casts()[form.name] if row["group"] == group]
    source = torch.tensor([float.fromhex(row["value"]) for row in rows], dtype=torch.float32)
    # Repeated, so that both a vector loop and its tail see every row.
    seen = CASTS[way](source.repeat(3).to(target.device), dtype).cpu().view(form.storage)
    patterns = [pattern & 0xFFFF for pattern in seen.tolist()]
    for at, row in enumerate(rows):
        found = sorted({f"0x{pattern:04X}" for pattern in patterns[at :: len(rows)]})
        case.equal(f"{way}: pattern of {row['value']} ({row['why']})", found, [f"0x{row['pattern']:04X}"])


@contract("AMP-NUMERICS-001")
@pytest.mark.parametrize("way", CASTS)
def test_casts_round_ties_to_even(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    _hand_written(case, target, amp_dtype, way, "rounding")


@contract("AMP-NUMERICS-002")
def test_casts_at_the_midpoints(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    form = FORMATS[amp_dtype]
    # Odd strides meet ties below even and odd neighbours in turn.
    patterns = _midpoints(form, case.samples(quick=61, standard=7, full=1))
    source, expected = _cast(patterns, form)
    for way in ("to", "strided"):
        seen = CASTS[way](source.to(target.device), amp_dtype)
        case.identical(f"{way}: {len(patterns)} fp32 numbers at and beside a tie", seen, expected)


@contract("AMP-NUMERICS-002")
def test_casts_of_arbitrary_patterns(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    count = case.samples(quick=3001, standard=20_001, full=200_001)
    source, expected = _cast(torch.randint(0, 2**32, (count,), generator=rng).tolist(), FORMATS[amp_dtype])
    # Repeated past the sizes from which kernels share the work among threads (32,768 on a CPU).
    copies = -(-100_000 // count)
    for way in ("to", "copy_"):
        seen = CASTS[way](source.repeat(copies).to(target.device), amp_dtype)
        case.identical(f"{way}: {count} random fp32 patterns, {copies} times", seen, expected.repeat(copies))


@contract("AMP-NUMERICS-003")
@pytest.mark.parametrize("way", CASTS)
def test_cast_overflow_threshold(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    _hand_written(case, target, amp_dtype, way, "overflow")


@contract("AMP-NUMERICS-004")
@pytest.mark.parametrize("way", CASTS)
def test_cast_subnormals(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    _hand_written(case, target, amp_dtype, way, "subnormal")


@contract("AMP-NUMERICS-005")
@pytest.mark.parametrize("way", CASTS)
def test_casts_keep_infinity_nan_and_signed_zero(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    _hand_written(case, target, amp_dtype, way, "special")
    # Payloads in the lowest bits only: a cast that cuts them off makes an infinity.
    payloads = [0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF, 0xFF80_0001, 0xFFC0_0001, 0x7F80_FFFF, 0x7FA0_0000]
    seen = CASTS[way](tensor_of(payloads * 5, FP32).to(target.device), amp_dtype)
    case.equal(f"{way}: NaNs left of {len(seen)}", int(torch.isnan(seen).sum()), len(seen))


@contract("AMP-NUMERICS-006")
@pytest.mark.parametrize("way", ["to", "strided", "copy_"])
def test_widening_is_exact(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    form = FORMATS[amp_dtype]
    seen = CASTS[way](all_patterns(form).to(target.device), torch.float32)
    patterns = widened(form)
    expected = torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)
    case.identical(f"{way}: all 65536 patterns in fp32", seen, expected)


@contract("AMP-NUMERICS-006")
def test_round_trip_is_exact(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    form = FORMATS[amp_dtype]
    numbers = all_patterns(form)
    case.identical("all 65536 patterns there and back", numbers.to(target.device).float().to(amp_dtype), numbers)


@contract("AMP-NUMERICS-007")
@pytest.mark.parametrize("way", CASTS)
def test_fraction_bits(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    _hand_written(case, target, amp_dtype, way, "precision")


@contract("AMP-NUMERICS-007")
def test_arithmetic_has_the_fraction_bits(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    form = FORMATS[amp_dtype]
    one = torch.ones(17, dtype=amp_dtype, device=target.device)
    spacing = 2 * form.unit_roundoff
    kept, lost = one + one * spacing, one + one * form.unit_roundoff
    case.equal("1 + spacing", kept.cpu().double().unique().tolist(), [1 + spacing])
    case.equal("1 + half a spacing", lost.cpu().double().unique().tolist(), [1.0])


@contract("AMP-NUMERICS-008")
def test_finfo_states_the_format(case: Case, amp_dtype: torch.dtype) -> None:
    form, seen = FORMATS[amp_dtype], torch.finfo(amp_dtype)
    for name, expected in (
        ("bits", form.width),
        ("eps", 2 * form.unit_roundoff),
        ("max", form.largest),
        ("min", -form.largest),
        ("tiny", form.smallest_normal),
        ("smallest_normal", form.smallest_normal),
    ):
        case.equal(f"finfo.{name}", getattr(seen, name), expected)


def _ties_among_normal_numbers(form: Format, stride: int) -> list[int]:
    """Return every `stride`-th tie and its neighbours, without what products of subnormals may flush."""
    low, high = (_bits(number) for number in (2 * form.smallest_normal, form.largest))
    return [pattern for pattern in _midpoints(form, stride) if low <= pattern & 0x7FFF_FFFF <= high]


@contract("AMP-NUMERICS-009")
@pytest.mark.parametrize("op", OPS_THAT_CAST)
def test_autocast_rounds_to_nearest(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    patterns = _ties_among_normal_numbers(FORMATS[amp_dtype], case.samples(quick=101, standard=101, full=7))
    patterns += torch.randint(0x3800_0000, 0x4700_0000, (499,), generator=rng).tolist()
    source, expected = _cast(patterns, FORMATS[amp_dtype])
    source, expected = source.unsqueeze(1), expected.unsqueeze(1)
    # Each element alone: 1 * NaN or infinity stays where it is.
    with target.autocast(amp_dtype):
        seen = OPS_THAT_CAST[op](source.to(target.device), torch.ones(1, 1, device=target.device))
    case.identical(f"{op}: {len(source)} fp32 numbers times 1", seen, expected)


@contract("AMP-NUMERICS-009")
@pytest.mark.parametrize("op", OPS_THAT_CAST)
def test_autocast_rounds_before_the_product(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    # Numbers just above 1 round to 1; cast first, 16 of them less 16 ones are exactly nothing.
    above = 1 + 0.9 * FORMATS[amp_dtype].unit_roundoff
    numbers = torch.cat([torch.full((16,), above), torch.ones(16)])
    signs = torch.cat([torch.ones(16), -torch.ones(16)])
    for what, left, right in (
        ("left", numbers.repeat(3, 1), signs.unsqueeze(1).repeat(1, 5)),
        ("right", signs.repeat(3, 1), numbers.unsqueeze(1).repeat(1, 5)),
    ):
        left, right = _leaves(target, left, right)
        with full_precision(target.device_type), target.autocast(amp_dtype):
            seen = OPS_THAT_CAST[op](left, right)
        case.equal(f"{op}, {what} operand just above 1: results", seen.cpu().double().unique().tolist(), [0.0])
    # The backward multiplies by the operand that the forward cast.
    left, right = _leaves(target, numbers.unsqueeze(1), torch.ones(1, 5))
    with full_precision(target.device_type):
        with target.autocast(amp_dtype):
            seen = OPS_THAT_CAST[op](left, right)
        seen.backward(signs.unsqueeze(1).expand(32, 5).to(target.device, amp_dtype))
    case.equal(f"{op}: gradients of the right operand", right.grad.cpu().double().unique().tolist(), [0.0])


# --- products ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """An op that autocast runs in 16 bits and that multiplies (..., m, k) by (..., k, n), plus a bias for some."""

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    batch: tuple[int, ...] = ()
    bias: str = "none"
    vector: bool = False
    """n is 1: a matrix times a vector."""

    def operands(self, m: int, k: int, n: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of left, right and bias."""
        n = 1 if self.vector else n
        bias = {"none": (1,), "row": (n,), "full": (*self.batch, m, n)}[self.bias]
        return (*self.batch, m, k), (*self.batch, k, n), bias

    def expected(self, left: Tensor, right: Tensor, bias: Tensor) -> Tensor:
        result = exact.product(left, right)
        return result if self.bias == "none" else result + bias.double()


PRODUCTS = {
    "mm": Product(lambda left, right, bias: torch.mm(left, right)),
    "matmul": Product(lambda left, right, bias: left @ right),
    "linear": Product(lambda left, right, bias: F.linear(left, right.t(), bias), bias="row"),
    "bmm": Product(lambda left, right, bias: torch.bmm(left, right), batch=(3,)),
    "addmm": Product(lambda left, right, bias: torch.addmm(bias, left, right), bias="full"),
    "baddbmm": Product(lambda left, right, bias: torch.baddbmm(bias, left, right), batch=(2,), bias="full"),
    "broadcast": Product(lambda left, right, bias: torch.matmul(left, right), batch=(2, 3)),
    "mv": Product(lambda left, right, bias: torch.matmul(left, right.squeeze(-1)).unsqueeze(-1), vector=True),
    "transposed": Product(lambda left, right, bias: torch.mm(left.t().contiguous().t(), right.t().contiguous().t())),
}

# No dimension is a multiple of a vector or a tile, some are 1; the last one is what tiles are made for.
SHAPES = ((7, 33, 5), (1, 127, 9), (31, 257, 1), (3, 1, 5), (1, 5, 1), (64, 64, 64))


def _leaves(target: Target, *sources: Tensor) -> list[Tensor]:
    return [source.detach().clone().to(target.device).requires_grad_() for source in sources]


def _run(target: Target, dtype: torch.dtype, product: Product, *operands: Tensor) -> Tensor:
    with full_precision(target.device_type), target.autocast(dtype):
        return product.call(*operands)


def _cancelling_integers(
    rng: torch.Generator, product: Product, shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return integer operands whose partial sums reach tens of thousands and whose results stay within 209.

    [X, X + D, E] times [Y; -Y; Z] is EZ - DY, D having one 1 in a row: both types hold every operand (up to 101)
    and result exactly (bf16 holds integers up to 256), none holds the sums on the way, and fp32 holds all of them
    (below 2^24), in any order.
    """
    (*batch, m, k), (*_, n), bias = product.operands(*shape)
    half = (k - 1) // 2
    x, y = integers(rng, 100, *batch, m, half), integers(rng, 100, *batch, half, n)
    rest = k - 2 * half
    if half:
        place = torch.randint(0, half, (*batch, m, 1), generator=rng)
        other = x.scatter_add(-1, place, torch.ones(place.shape))
        x, y = torch.cat([x, other], -1), torch.cat([y, -y], -2)
    left = torch.cat([x, integers(rng, 5, *batch, m, rest)], -1)
    right = torch.cat([y, integers(rng, 5, *batch, rest, n)], -2)
    order = torch.randperm(k, generator=rng)
    return left[..., order], right[..., order, :], integers(rng, 20, *bias)


@contract("AMP-NUMERICS-010")
@pytest.mark.parametrize("op", PRODUCTS)
def test_integer_products_are_exact(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    product = PRODUCTS[op]
    for shape in SHAPES:
        for _ in range(case.samples(quick=1, standard=3, full=20)):
            operands = _cancelling_integers(rng, product, shape)
            seen = _run(target, amp_dtype, product, *(operand.to(target.device) for operand in operands))
            expected = product.expected(*operands).to(amp_dtype)
            case.identical(f"{op} of integers, m k n {shape}", _unsigned(seen), _unsigned(expected))


@contract("AMP-NUMERICS-011")
@pytest.mark.parametrize("op", PRODUCTS)
def test_integer_gradients_are_exact(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    product = PRODUCTS[op]
    for shape in SHAPES:
        sources = [integers(rng, 3, *size) for size in product.operands(*shape)]
        left, right, bias = _leaves(target, *sources)
        seen = _run(target, amp_dtype, product, left, right, bias)
        seed = integers(rng, 1, *seen.shape)
        with full_precision(target.device_type):
            seen.backward(seed.to(target.device, amp_dtype))
        expected = {
            "left": (left, _transpose_product(seed, sources[1])),
            "right": (right, _transpose_product(sources[0].mT, seed.mT)),
        }
        if product.bias != "none":
            expected["the bias"] = (bias, seed.sum(0) if product.bias == "row" else seed)
        for name, (leaf, gradient) in expected.items():
            what = f"{op}: gradient of {name}, m k n {shape}"
            case.identical(what, _unsigned(leaf.grad), _unsigned(gradient.float()))


def _transpose_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right' in float64."""
    return exact.product(left, right.mT)


def _unsigned(zeros: Tensor) -> Tensor:
    """Return the tensor with every -0.0 made 0.0: the sign of a sum of nothing but zeros is left free."""
    return zeros + 0.0


def _gaussians(rng: torch.Generator, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, generator=rng) for shape in shapes]


def _worst(seen: Tensor, expected: Tensor, bound: Tensor) -> float:
    """Return the greatest ratio of an error to its own bound."""
    return float(((seen.detach().cpu().double() - expected).abs() / bound).max())


@contract("AMP-NUMERICS-012")
@pytest.mark.parametrize("op", PRODUCTS)
def test_products_are_within_the_bound(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    product, form = PRODUCTS[op], FORMATS[amp_dtype]
    for shape in SHAPES:
        for _ in range(case.samples(quick=1, standard=3, full=20)):
            operands = _gaussians(rng, *product.operands(*shape))
            seen = _run(target, amp_dtype, product, *(operand.to(target.device) for operand in operands))
            case.equal(f"{op}: dtype", seen.dtype, amp_dtype)
            left, right, bias = (rounded(operand.double(), form) for operand in operands)
            bound = error_bounds.rounded_product_bound(left, right, form, None if product.bias == "none" else bias)
            worst = _worst(seen, product.expected(left, right, bias), bound)
            case.at_most(f"{op}, m k n {shape}: worst error over its bound", worst, 1.0)


@contract("AMP-NUMERICS-013")
@pytest.mark.parametrize("op", PRODUCTS)
def test_gradients_are_within_the_bound(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    product, form = PRODUCTS[op], FORMATS[amp_dtype]
    for shape in SHAPES:
        operands = _gaussians(rng, *product.operands(*shape))
        left, right, bias = _leaves(target, *operands)
        seen = _run(target, amp_dtype, product, left, right, bias)
        seed = rounded(torch.randn(seen.shape, generator=rng).double(), form)
        with full_precision(target.device_type):
            seen.backward(seed.to(amp_dtype).to(target.device))
        a, b = (rounded(operand.double(), form) for operand in operands[:2])
        for name, leaf, factors in (("left", left, (seed, b.mT)), ("right", right, (a.mT, seed))):
            case.equal(f"{op}: dtype of the gradient of {name}", leaf.grad.dtype, torch.float32)
            bound = error_bounds.rounded_product_bound(*factors, form)
            worst = _worst(leaf.grad, exact.product(*factors), bound)
            case.at_most(f"{op}, gradient of {name}, m k n {shape}: worst error over its bound", worst, 1.0)


def _window(case: Case, what: str, seen: Tensor, expected: Tensor, window: tuple[float, float], unit: float) -> None:
    """Hold the normwise error, in units of the type's roundoff, against both ends of `window`."""
    error = error_bounds.normwise_error(seen, expected) / unit
    case.between(f"{what}: normwise error", error, window[0] / unit, window[1] / unit, "u")


@contract("AMP-NUMERICS-014")
@pytest.mark.parametrize("op", PRODUCTS)
def test_products_run_in_sixteen_bits(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    product, form = PRODUCTS[op], FORMATS[amp_dtype]
    window = error_bounds.normwise_window(form)
    shape = (701, 33, 1) if product.vector else (49, 65, 45)
    operands = _gaussians(rng, *product.operands(*shape))
    left, right, bias = _leaves(target, *operands)
    seen = _run(target, amp_dtype, product, left, right, bias)
    _window(case, op, seen, product.expected(*operands), window, form.unit_roundoff)
    seed = torch.randn(seen.shape, generator=rng)
    with full_precision(target.device_type):
        seen.backward(seed.to(target.device, amp_dtype))
    gradients = {"left": (left.grad, _transpose_product(seed, operands[1]))}
    if not product.vector:
        gradients["right"] = (right.grad, _transpose_product(operands[0].mT, seed.mT))
    for name, (gradient, expected) in gradients.items():
        _window(case, f"{op}: gradient of {name}", gradient, expected, window, form.unit_roundoff)
        stored = gradient.cpu().double()
        share = float((rounded(stored, form) == stored).double().mean())
        case.equal(f"{op}: share of the gradient of {name} that are numbers of {form.name}", share, 1.0)


@contract("AMP-NUMERICS-015")
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "addmm"])
def test_products_have_no_gain(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    product, form = PRODUCTS[op], FORMATS[amp_dtype]
    operands = _gaussians(rng, *product.operands(96, 64, 80))
    left, right, bias = _leaves(target, *operands)
    seen = _run(target, amp_dtype, product, left, right, bias)
    seed = torch.randn(seen.shape, generator=rng)
    with full_precision(target.device_type):
        seen.backward(seed.to(target.device, amp_dtype))
    # The fewest independent roundings are those of the smallest operand.
    bound = error_bounds.gain_bound(form, 64 * 80)
    for what, tensor, expected in (
        (op, seen, product.expected(*operands)),
        (f"{op}: gradient of left", left.grad, _transpose_product(seed, operands[1])),
        (f"{op}: gradient of right", right.grad, _transpose_product(operands[0].mT, seed.mT)),
    ):
        case.at_most(f"{what}: systematic scale error", abs(error_bounds.gain_error(tensor, expected)), bound)


# --- accumulation -----------------------------------------------------------------------------------------------

TERMS = 4097


def _swamping(form: Format, *shape: int) -> Tensor:
    """Return ones along the last dimension behind one number to which the type adds a single one in vain."""
    source = torch.ones(*shape, TERMS)
    source[..., 0] = 1 / form.unit_roundoff
    return source


# Long sums of one large number and 4096 ones, in every place where AMP sums products.
LONG_SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "mm": lambda row: torch.mm(row.expand(5, -1).contiguous(), torch.ones(TERMS, 3, device=row.device)),
    "mm tall": lambda row: torch.mm(row.expand(64, -1).contiguous(), torch.ones(TERMS, 1, device=row.device)),
    "mm one": lambda row: torch.mm(row.unsqueeze(0), torch.ones(TERMS, 1, device=row.device)),
    "mm reversed": lambda row: torch.mm(
        row.flip(0).expand(5, -1).contiguous(), torch.ones(TERMS, 3, device=row.device)
    ),
    "linear": lambda row: F.linear(row.expand(5, -1).contiguous(), torch.ones(3, TERMS, device=row.device)),
    "linear vector": lambda row: F.linear(row, torch.ones(3, TERMS, device=row.device)),
    "addmm": lambda row: torch.addmm(
        torch.zeros(5, 3, device=row.device), row.expand(5, -1).contiguous(), torch.ones(TERMS, 3, device=row.device)
    ),
    "bmm": lambda row: torch.bmm(row.expand(2, 5, -1).contiguous(), torch.ones(2, TERMS, 3, device=row.device)),
    "mv": lambda row: torch.matmul(row.expand(5, -1).contiguous(), torch.ones(TERMS, device=row.device)),
    "dot": lambda row: torch.matmul(row, torch.ones(TERMS, device=row.device)),
    "conv1d": lambda row: F.conv1d(row.reshape(1, -1, 1), torch.ones(4, TERMS, 1, device=row.device)),
    "conv2d": lambda row: F.conv2d(
        row.reshape(1, -1, 1, 1).expand(2, -1, 3, 3), torch.ones(4, TERMS, 1, 1, device=row.device)
    ),
}


@contract("AMP-NUMERICS-016")
@pytest.mark.parametrize("op", LONG_SUMS, ids=lambda op: op.replace(" ", "_"))
def test_long_sums_are_not_swamped(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    form = FORMATS[amp_dtype]
    total = 1 / form.unit_roundoff + TERMS - 1
    narrow_sum = exact.sixteen_bit_sum(1 / form.unit_roundoff, 1.0, TERMS - 1, form.unit_roundoff)
    case.at_most("control: the same sum, rounded to 16 bits after each addition", narrow_sum, 0.75 * total)
    with full_precision(target.device_type), target.autocast(amp_dtype):
        seen = LONG_SUMS[op](_swamping(form).to(target.device))
    case.equal(f"{op}: dtype", seen.dtype, amp_dtype)
    case.equal(f"{op}: all sums of {TERMS} terms", seen.cpu().double().unique().tolist(), [form.nearest(total)])


@contract("AMP-NUMERICS-016")
def test_long_gradient_sums_are_not_swamped(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    form = FORMATS[amp_dtype]
    layer = torch.nn.Linear(2, 3).to(target.device)
    with full_precision(target.device_type):
        with target.autocast(amp_dtype):
            seen = layer(torch.ones(TERMS, 2, device=target.device))
        seen.backward(_swamping(form, 3).t().to(target.device, amp_dtype))
    expected = [form.nearest(1 / form.unit_roundoff + TERMS - 1)]
    for name, parameter in layer.named_parameters():
        case.equal(
            f"gradient of the {name} over {TERMS} rows", parameter.grad.cpu().double().unique().tolist(), expected
        )


@contract("AMP-NUMERICS-016")
def test_attention_over_many_keys_is_not_swamped(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    form, keys = FORMATS[amp_dtype], 4096
    query, key = torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, keys, 16)
    value = torch.ones(1, 2, keys, 16)
    value[:, :, 0] = 16 / form.unit_roundoff
    mean = (16 / form.unit_roundoff + keys - 1) / keys

    def run() -> float:
        with full_precision(target.device_type), target.autocast(amp_dtype):
            seen = F.scaled_dot_product_attention(*(part.to(target.device) for part in (query, key, value)))
        return float((seen.cpu().double() / mean - 1).abs().max()) / form.unit_roundoff

    worst = by_kernel(case, target, rng, run)
    what = "mean of one large and many small values: relative error"
    compare(case, what, worst, "u")
    for kernel, error in worst.items():
        case.at_most(f"{kernel}: {what}", error, 2.0, "u")


@contract("AMP-NUMERICS-017")
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "addmm", "baddbmm", "mv"])
def test_partial_sums_may_leave_the_range(case: Case, target: Target, op: str) -> None:
    product = PRODUCTS[op]
    left_shape, right_shape, bias_shape = product.operands(5, 33, 3)
    # 300 * 300 = 90000 is beyond fp16; in pairs that cancel, 16 * 90000 - 16 * 90000 + 7 * 3 is 21.
    left = torch.full(left_shape, 300.0)
    left[..., 16:32], left[..., 32] = -300.0, 7.0
    right = torch.full(right_shape, 300.0)
    right[..., 32, :] = 3.0
    operands = [operand.to(target.device) for operand in (left, right, torch.zeros(bias_shape))]
    seen = _run(target, torch.float16, product, *operands)
    case.equal(f"{op}: 16 products of 90000, 16 of -90000 and one of 21", seen.cpu().double().unique().tolist(), [21.0])


@contract("AMP-NUMERICS-018")
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "addmm", "conv2d"])
def test_results_beyond_the_range(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    form = FORMATS[amp_dtype]
    for factors, name in (((256.0, 255.875), "65504"), ((256.0, 256.0), "65536"), ((-256.0, 256.0), "-65536")):
        left, right = torch.full((3, 1), factors[0]), torch.full((1, 5), factors[1])
        exact_result = form.nearest(form.nearest(factors[0]) * form.nearest(factors[1]))
        with full_precision(target.device_type), target.autocast(amp_dtype):
            if op == "conv2d":
                seen = F.conv2d(left.to(target.device)[..., None, None], right.t().to(target.device)[..., None, None])
            else:
                product = PRODUCTS[op]
                (*batch, _, _), _, bias = product.operands(3, 1, 5)
                batched = (left.expand(*batch, 3, 1), right.expand(*batch, 1, 5), torch.zeros(bias))
                seen = product.call(*(operand.to(target.device) for operand in batched))
        case.equal(f"{op}: {name} in {form.name}", seen.cpu().double().unique().tolist(), [exact_result])


@contract("AMP-NUMERICS-018")
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "conv1d"])
def test_range_of_results(case: Case, target: Target, op: str) -> None:
    both = torch.bfloat16, torch.float16
    case.require(target, *both)
    for value, factor, terms in ((1e38, 1.0, 3), (300.0, 300.0, 1), (-1e30, 1e7, 5), (7e4, 1.0, 1)):
        left, right = torch.full((7, terms), value), torch.full((terms, 3), factor)
        for dtype in both:
            form = FORMATS[dtype]
            expected = math.copysign(math.inf, value)
            if dtype is torch.bfloat16:
                expected = form.nearest(terms * form.nearest(value) * form.nearest(factor))
            with full_precision(target.device_type), target.autocast(dtype):
                seen = OPS_THAT_CAST[op](left.to(target.device), right.to(target.device))
            what = f"{op} in {form.name}: {terms} times {value:g} times {factor:g}"
            case.identical(what, seen, torch.full((7, 3), expected, dtype=torch.float64).to(dtype))


# --- convolution and attention ----------------------------------------------------------------------------------


CONVOLUTIONS = {
    one.name: one
    for one in (
        Convolution("conv1d", F.conv1d, (4, 9, 45), (8, 9, 3), {"padding": 1}),
        Convolution("conv2d", F.conv2d, (3, 9, 15, 13), (10, 9, 3, 3), {"padding": 1}),
        Convolution("pointwise", F.conv2d, (3, 33, 9, 11), (17, 33, 1, 1)),
        Convolution("strided", F.conv2d, (3, 6, 17, 15), (8, 6, 5, 3), {"stride": 2, "padding": 2}),
        Convolution("grouped", F.conv2d, (3, 12, 15, 13), (8, 6, 3, 3), {"groups": 2, "dilation": 2, "padding": 2}),
        Convolution("depthwise", F.conv2d, (3, 16, 15, 13), (16, 1, 3, 3), {"groups": 16, "padding": 1}),
        Convolution("conv3d", F.conv3d, (2, 4, 7, 8, 9), (6, 4, 3, 2, 3), {"padding": 1}),
        Convolution("transposed1d", F.conv_transpose1d, (4, 9, 33), (9, 8, 3), {"stride": 2}, True),
        Convolution("transposed2d", F.conv_transpose2d, (3, 9, 9, 11), (9, 8, 3, 3), {"stride": 2, "padding": 1}, True),
        Convolution("transposed3d", F.conv_transpose3d, (2, 4, 5, 6, 5), (4, 5, 3, 2, 3), transposed=True),
    )
}
# The ones that no kernel computes through Winograd's or Fourier's transform, which are not exact on integers.
DIRECT_CONVOLUTIONS = ("pointwise", "strided", "grouped", "depthwise", "transposed1d", "transposed2d")


def _convolve(target: Target, dtype: torch.dtype, convolution: Convolution, *operands: Tensor) -> Tensor:
    with full_precision(target.device_type), target.autocast(dtype):
        return convolution.call(*operands, **convolution.options)


@contract("AMP-NUMERICS-019")
@pytest.mark.parametrize("name", DIRECT_CONVOLUTIONS)
def test_integer_convolutions_are_exact(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str
) -> None:
    convolution = CONVOLUTIONS[name]
    # At most 33 channels * 15 taps / groups products of up to 3 keep every sum within 256: what bf16 holds exactly.
    terms = convolution.taps * (
        convolution.weight[0] // convolution.options.get("groups", 1)
        if convolution.transposed
        else convolution.weight[1]
    )
    sources = [
        integers(rng, 255 // terms, *convolution.image),
        integers(rng, 1, *convolution.weight),
        torch.zeros(convolution.channels),
    ]
    leaves = _leaves(target, *sources)
    seen = _convolve(target, amp_dtype, convolution, *leaves)
    expected = convolution.expected(*sources).detach().to(amp_dtype)
    case.identical(f"{name} of integers", _unsigned(seen), _unsigned(expected))


@contract("AMP-NUMERICS-020")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_run_in_sixteen_bits(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str
) -> None:
    convolution, form = CONVOLUTIONS[name], FORMATS[amp_dtype]
    sources = _gaussians(rng, convolution.image, convolution.weight, (convolution.channels,))
    leaves = _leaves(target, *sources)
    seen = _convolve(target, amp_dtype, convolution, *leaves)
    seed = torch.randn(seen.shape, generator=rng)
    with full_precision(target.device_type):
        seen.backward(seed.to(target.device, amp_dtype))
    references = [source.double().requires_grad_() for source in sources]
    expected = convolution.expected(*references)
    expected.backward(seed.double())
    case.equal(f"{name}: dtype", seen.dtype, amp_dtype)
    samples, winograd = convolution.image[0], convolution.winograd and target.device_type != "cpu"
    for what, tensor, reference, additions in (
        (name, seen, expected, convolution.taps * convolution.transposed),
        (f"{name}: gradient of the input", leaves[0].grad, references[0].grad, convolution.taps),
        (f"{name}: gradient of the weight", leaves[1].grad, references[1].grad, samples),
    ):
        window = error_bounds.normwise_window(form, additions, winograd=winograd)
        _window(case, what, tensor, reference, window, form.unit_roundoff)
        elements = min(math.prod(convolution.image), math.prod(convolution.weight))
        gain = abs(error_bounds.gain_error(tensor, reference))
        bound = error_bounds.gain_bound(form, elements, additions, winograd=winograd)
        case.at_most(f"{what}: systematic scale error", gain, bound)


ATTENTION = {
    "square": ((2, 3, 33, 32), (2, 3, 33, 32), False),
    "causal": ((2, 3, 33, 32), (2, 3, 33, 32), True),
    "tails": ((2, 3, 17, 16), (2, 3, 45, 16), False),
    "odd heads": ((2, 3, 17, 20), (2, 3, 45, 20), False),  # padded by kernels that want multiples of 8
}


@contract("AMP-NUMERICS-021")
@pytest.mark.parametrize("shape", ATTENTION, ids=lambda shape: shape.replace(" ", "_"))
def test_attention_runs_in_sixteen_bits(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, shape: str
) -> None:
    queries, keys, is_causal = ATTENTION[shape]
    form = FORMATS[amp_dtype]
    sources = _gaussians(rng, queries, keys, keys)
    seed = torch.randn(queries, generator=rng)

    def run() -> list[Tensor]:
        leaves = _leaves(target, *sources)
        with full_precision(target.device_type):
            with target.autocast(amp_dtype):
                seen = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=is_causal)
            seen.backward(seed.to(target.device, seen.dtype))
        return [seen.detach(), *(leaf.grad for leaf in leaves)]

    ran = by_kernel(case, target, rng, run)
    references = [source.double().requires_grad_() for source in sources]
    expected = exact.attention(*references, is_causal=is_causal)
    expected.backward(seed.double())
    expectations = [expected.detach(), *(reference.grad for reference in references)]
    windows = [error_bounds.attention_window(form), *[error_bounds.attention_window(form, stages=2)] * 3]
    names = ("attention", "gradient of the query", "gradient of the key", "gradient of the value")
    for place, name in enumerate(names):
        errors = {kernel: _in_units(tensors[place], expectations[place], form) for kernel, tensors in ran.items()}
        compare(case, f"{name}: normwise error", errors, "u")
    for kernel, tensors in ran.items():
        case.equal(f"{kernel}: dtype", tensors[0].dtype, amp_dtype)
        for name, tensor, reference, window in zip(names, tensors, expectations, windows, strict=True):
            _window(case, f"{kernel}: {name}", tensor, reference, window, form.unit_roundoff)


def _in_units(seen: Tensor, expected: Tensor, form: Format) -> float:
    return error_bounds.normwise_error(seen, expected) / form.unit_roundoff


@contract("AMP-NUMERICS-021")
@pytest.mark.parametrize("operand", ["query", "key", "value"])
def test_attention_rounds_its_operands(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, operand: str
) -> None:
    # As in the products: numbers just above 1 round to 1, and less as many ones they are exactly nothing.
    unit = FORMATS[amp_dtype].unit_roundoff
    above = 1 + 0.9 * unit
    query, key, value = torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 2, 16), torch.ones(1, 1, 2, 16)
    value[..., 1, :] = -1.0
    if operand == "value":
        value[..., 0, :] = above
    else:
        # A logit of 1/u times (1 - 1): both keys weigh the same, unless the 1 was not rounded.
        differing, factor = torch.tensor([above, -1.0]), torch.full((2,), 1 / unit)
        query[..., :2], key[..., 0, :2] = (differing, factor) if operand == "query" else (factor, differing)

    def run() -> list[float]:
        with full_precision(target.device_type), target.autocast(amp_dtype):
            seen = F.scaled_dot_product_attention(*(part.to(target.device) for part in (query, key, value)))
        return [float(result) for result in seen.cpu().double().unique()]

    for kernel, results in by_kernel(case, target, rng, run).items():
        case.equal(f"{kernel}: {operand} just above 1: results", results, [0.0])


# --- what fp32 is kept for --------------------------------------------------------------------------------------


@contract("AMP-NUMERICS-022")
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "conv2d"])
# Libraries take matrix units, and with them TF32, where all sizes are multiples of 8 or more.
@pytest.mark.parametrize("terms", [65, 128], ids=["odd", "aligned"])
def test_disabled_region_computes_in_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str, terms: int
) -> None:
    if op == "conv2d":
        left, right = _gaussians(rng, (64, terms, 1, 1), (48, terms, 1, 1))
        expected = _transpose_product(left.flatten(1), right.flatten(1))
    else:
        left, right, bias = _gaussians(rng, *PRODUCTS[op].operands(64, terms, 48))
        expected = PRODUCTS[op].expected(left, right, bias)
    left, right = left.to(target.device), right.to(target.device)
    with full_precision(target.device_type), target.autocast(amp_dtype), target.autocast(amp_dtype, enabled=False):
        seen = F.conv2d(left, right).flatten(1) if op == "conv2d" else PRODUCTS[op].call(left, right, bias.to(left))
    case.equal(f"{op}: dtype", seen.dtype, torch.float32)
    window = error_bounds.fp32_product_window(terms)
    _window(case, f"{op} with autocast disabled", seen, expected, window, FP32.unit_roundoff)


@contract("AMP-NUMERICS-023")
def test_softmax_of_fp32_logits_is_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    # Logits around 1000 that 16 bits tell apart by 0.5 (fp16) or 4 (bf16) only.
    logits = 1000 + 3 * torch.randn(13, 129, generator=rng)
    with target.autocast(amp_dtype):
        seen = torch.softmax(logits.to(target.device), -1)
        logarithms = torch.log_softmax(logits.to(target.device), -1)
    expected, bound = exact.softmax(logits), error_bounds.softmax_bound(logits)
    case.equal("dtypes", [seen.dtype, logarithms.dtype], [torch.float32] * 2)
    case.at_most("softmax: worst error over its bound", _worst(seen, expected, bound), 1.0)
    # The error of a logarithm is the relative error of its argument, plus the rounding of the shifted logit.
    tolerance = bound / expected + 4 * FP32.unit_roundoff * (expected.log().abs() + 1)
    case.at_most("log_softmax: worst error over its bound", _worst(logarithms, expected.log(), tolerance), 1.0)
    through = exact.softmax(rounded(logits.double(), FORMATS[amp_dtype]))
    case.at_least("control: logits rounded to 16 bits, error over the bound", _worst(through, expected, bound), 10.0)


@contract("AMP-NUMERICS-023")
def test_layer_norm_of_fp32_rows_is_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    rows = 100 + torch.randn(9, 65, generator=rng)
    with target.autocast(amp_dtype):
        seen = F.layer_norm(rows.to(target.device), (65,))
    case.equal("dtype", seen.dtype, torch.float32)
    expected, bound = exact.layer_norm(rows), error_bounds.layer_norm_bound(rows)
    case.at_most("mean 100, deviation 1: normwise error", error_bounds.normwise_error(seen, expected), bound)
    through = exact.layer_norm(rounded(rows.double(), FORMATS[amp_dtype]))
    case.at_least(
        "control: rows rounded to 16 bits, normwise error", error_bounds.normwise_error(through, expected), 5 * bound
    )


@contract("AMP-NUMERICS-023")
def test_sum_of_fp32_terms_is_fp32(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    terms = torch.rand(5, 3001, generator=rng)
    with target.autocast(amp_dtype):
        seen = terms.to(target.device).sum(-1)
    case.equal("dtype", seen.dtype, torch.float32)
    expected = terms.double().sum(-1)
    case.at_most("worst error over its bound", _worst(seen, expected, error_bounds.sum_bound(terms)), 1.0)


# On the target's fp32 list: a 16-bit input comes out in fp32, and in value as well. Relative bounds in u of fp32:
# the roundings on the way times the condition, elementary functions being good to 4 ulp (CUDA C++ Programming Guide).
FP32_LIST: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "prod": (lambda values: values.prod(-1), 64.0),
    "mse_loss": (lambda values: F.mse_loss(values, torch.zeros_like(values), reduction="none"), 2.0),
    "avg_pool3d": (lambda values: F.avg_pool3d(values.reshape(1, 8, 2, 2, 2), 2), 16.0),
    "cdist": (lambda values: torch.cdist(values, -values), 32.0),
    "softmax": (lambda values: values.softmax(-1), 64.0),
    "sum": (lambda values: values.sum(-1), 64.0),
    "cumsum": (lambda values: values.cumsum(-1), 64.0),
    "cumprod": (lambda values: values.cumprod(-1), 64.0),
    "norm": (lambda values: values.norm(dim=-1), 64.0),
    "exp": (lambda values: values.exp(), 8.0),
    "log": (lambda values: (values * 4).log(), 8.0),  # times 4, which 16 bits hold: plus 4 would round before the op
    "pow": (lambda values: values.pow(3), 8.0),
    "reciprocal": (lambda values: values.reciprocal(), 4.0),
    "rsqrt": (lambda values: values.rsqrt(), 8.0),
}


def _computes_in_fp32(case: Case, target: Target, dtype: torch.dtype, rng: torch.Generator, op: str) -> None:
    form, (call, bound) = FORMATS[dtype], FP32_LIST[op]
    values = rounded(1 + torch.rand(8, 8, generator=rng).double() / 4, form)
    with target.autocast(dtype):
        seen = call(values.to(dtype).to(target.device))
    expected = call(values)
    case.equal(f"{op} of a 16-bit input: dtype", seen.dtype, torch.float32)
    worst = float((seen.cpu().double() / expected - 1).abs().max()) / FP32.unit_roundoff
    case.at_most(f"{op}: worst relative error", worst, bound, "u of fp32")
    stored = float((rounded(expected, form) / expected - 1).abs().max()) / FP32.unit_roundoff
    case.at_least(f"control: the exact {op} stored in 16 bits", stored, bound, "u of fp32")


@contract("AMP-NUMERICS-024", on="cpu")
@pytest.mark.parametrize("op", ["prod", "mse_loss", "avg_pool3d", "cdist"])
def test_fp32_list_of_the_cpu(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    _computes_in_fp32(case, target, amp_dtype, rng, op)


@contract("AMP-NUMERICS-024", on="cuda")
@pytest.mark.parametrize(
    "op",
    [
        "prod",
        "mse_loss",
        "cdist",
        "softmax",
        "sum",
        "cumsum",
        "cumprod",
        "norm",
        "exp",
        "log",
        "pow",
        "reciprocal",
        "rsqrt",
    ],
)
def test_fp32_list_of_cuda(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str) -> None:
    _computes_in_fp32(case, target, amp_dtype, rng, op)


@contract("AMP-NUMERICS-025")
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sums_of_sixteen_bit_tensors_are_wide(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    form = FORMATS[amp_dtype]
    total = 1 / form.unit_roundoff + TERMS - 1
    narrow_sum = exact.sixteen_bit_sum(1 / form.unit_roundoff, 1.0, TERMS - 1, form.unit_roundoff)
    case.at_most("control: the same sum, rounded to 16 bits after each addition", narrow_sum, 0.75 * total)
    terms = _swamping(form, 3).to(target.device, amp_dtype)
    with target.autocast(amp_dtype):
        seen = getattr(terms, op)(-1)
    expected = total if op == "sum" else total / TERMS
    worst = float((seen.cpu().double() / expected - 1).abs().max())
    case.at_most(f"{op} of {TERMS} 16-bit terms: relative error", worst / form.unit_roundoff, 1.01, "u")


# --- training arithmetic ----------------------------------------------------------------------------------------


@contract("AMP-NUMERICS-026")
@pytest.mark.parametrize("share", [4, deep("standard", 16)])
def test_master_weights_keep_small_updates(case: Case, target: Target, amp_dtype: torch.dtype, share: int) -> None:
    # A fraction of half the spacing of a 16-bit weight of 1: that weight never moves, however often it is updated.
    update = FORMATS[amp_dtype].unit_roundoff / share
    ones = torch.ones(3, 5, device=target.device)
    moved = {}
    for dtype in (torch.float32, amp_dtype):
        weight = torch.nn.Parameter(ones.to(dtype, copy=True))
        optimizer = torch.optim.SGD([weight], lr=update)
        for _ in range(64):
            optimizer.zero_grad()
            with target.autocast(amp_dtype):
                seen = F.linear(ones[:1], weight)
            # The gradient of every entry is exactly 1.
            seen.sum().backward()
            optimizer.step()
        case.equal(f"dtypes of the {dtype} weight and its gradient", [weight.dtype, weight.grad.dtype], [dtype] * 2)
        moved[dtype] = weight.detach()
    expected = torch.full((3, 5), 1 - 64 * update)
    case.identical(f"fp32 weight of 1 after 64 updates of {update}", moved[torch.float32], expected)
    case.identical("control: 16-bit weight after as many", moved[amp_dtype], torch.ones(3, 5, dtype=amp_dtype))


def _representable(form: Format, limit: float) -> Tensor:
    """Return as fp32 every finite number of `form`, of either sign, that is normal in fp32 and finite times `limit`."""
    values = tensor_of(form.finite_patterns(), form).float()
    values[1::2] *= -1
    size = values.abs()
    return values[(size < FP32.largest / limit) & ((size >= FP32.smallest_normal) | (size == 0))]


@contract("AMP-NUMERICS-027")
@pytest.mark.parametrize("exponent", [16, 0, 10, deep("standard", 1), deep("standard", 24), deep("standard", 60)])
def test_unscaling_by_powers_of_two_is_exact(case: Case, target: Target, amp_dtype: torch.dtype, exponent: int) -> None:
    form, scale = FORMATS[amp_dtype], 2.0**exponent
    values = _representable(form, scale)
    parameter = torch.nn.Parameter(torch.zeros(len(values), device=target.device))
    # Multiplied on the CPU in float64 and checked there to be exact in fp32.
    scaled = values.double() * scale
    case.equal("inputs are fp32 numbers", bool((scaled.float().double() == scaled).all()), True)
    parameter.grad = scaled.float().to(target.device)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=scale)
    scaler.scale(torch.ones((), device=target.device))
    scaler.unscale_(torch.optim.SGD([parameter], lr=1.0))
    case.identical(f"{len(values)} gradients at 2^{exponent}, unscaled", parameter.grad, values)


@contract("AMP-NUMERICS-027")
@pytest.mark.parametrize("exponent", [16, 0, 10, deep("standard", 1), deep("standard", 24), deep("standard", 60)])
def test_scaling_by_powers_of_two_is_exact(case: Case, target: Target, amp_dtype: torch.dtype, exponent: int) -> None:
    values = _representable(FORMATS[amp_dtype], 2.0**exponent)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**exponent)
    seen = scaler.scale(values.to(target.device))
    case.identical(f"{len(values)} losses times 2^{exponent}", seen, (values.double() * 2.0**exponent).float())


@contract("AMP-NUMERICS-028")
@pytest.mark.parametrize("exponent", [8, deep("standard", 4), deep("standard", 10)])
def test_gradients_do_not_depend_on_the_scale(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, exponent: int
) -> None:
    # Everything is positive, so that nothing cancels, and no gradient comes near the ends of fp16's normal range.
    rows = 1 + torch.rand(8, 12, generator=rng)
    sources = [(0.5 + torch.rand(*shape, generator=rng)) / shape[1] for shape in ((10, 12), (6, 10))]
    gradients = {}
    for scale in (2.0**exponent, 2.0 ** (exponent + 1)):
        weights = _leaves(target, *sources)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=scale)
        with target.autocast(amp_dtype):
            hidden = F.relu(F.linear(rows.to(target.device), weights[0]))
            loss = (F.linear(hidden, weights[1]).float() + 1).pow(2).sum() / 8
        scaler.scale(loss).backward()
        size = torch.cat([weight.grad.abs().flatten() for weight in weights]).cpu()
        case.between(f"scale {scale}: smallest gradient", float(size.min()), 2.0**-12, 2.0**15)
        case.at_most(f"scale {scale}: largest gradient", float(size.max()), 2.0**15)
        scaler.unscale_(torch.optim.SGD(weights, lr=1.0))
        gradients[scale] = [weight.grad for weight in weights]
    first, second = gradients.values()
    for layer in range(2):
        case.identical(f"layer {layer}: gradients at 2^{exponent} and twice that", first[layer], second[layer])


# --- what passes through ----------------------------------------------------------------------------------------


@contract("AMP-NUMERICS-029")
@pytest.mark.parametrize("op", PRODUCTS)
def test_autocast_adds_nothing_but_the_casts(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    product = PRODUCTS[op]
    sources = _gaussians(rng, *product.operands(9, 65, 7))
    ours, theirs = _leaves(target, *sources), _leaves(target, *sources)
    seen = _run(target, amp_dtype, product, *ours)
    with full_precision(target.device_type):
        expected = product.call(*(leaf.to(amp_dtype) for leaf in theirs))
        seed = torch.randn(seen.shape, generator=rng).to(target.device, amp_dtype)
        seen.backward(seed)
        expected.backward(seed)
    case.identical(f"{op}: under autocast and cast by hand", seen, expected)
    for name, leaf, reference in zip(("left", "right", "bias"), ours, theirs, strict=True):
        if reference.grad is not None:
            case.identical(f"{op}: gradient of {name}", leaf.grad, reference.grad)


@contract("AMP-NUMERICS-030", dtypes=("fp16",))
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "addmm"])
def test_products_keep_subnormals(case: Case, target: Target, op: str) -> None:
    if str(target.probe["capability"]).startswith("gfx90a"):
        case.unsupported("the matrix units of MI200 flush fp16 subnormals (torch's notes on numerical accuracy)")
    product, steps = PRODUCTS[op], torch.arange(1, 18).double() * FP16.smallest
    for what, left, right in (
        ("subnormal operand times 1", steps, 1.0),
        ("subnormal operand times 1024", steps, 1024.0),
        ("normal operands, subnormal result", torch.arange(1, 18).double() * 2.0**-12, 2.0**-12),
    ):
        (*batch, _, _), _, bias = product.operands(17, 1, 1)
        operands = (
            left.float().unsqueeze(1).expand(*batch, 17, 1),
            torch.full((*batch, 1, 1), right),
            torch.zeros(bias),
        )
        seen = _run(target, torch.float16, product, *(operand.to(target.device) for operand in operands))
        expected = (left * right).unsqueeze(1).expand(*batch, 17, 1)
        case.identical(f"{op}: {what}", seen, expected.to(torch.float16))


@contract("AMP-NUMERICS-031")
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "addmm", "baddbmm", "mv"])
def test_products_pass_on_inf_and_nan(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str, special: float
) -> None:
    product = PRODUCTS[op]
    left, right, bias = (source.abs() + 1 for source in _gaussians(rng, *product.operands(7, 33, 5)))
    # In the last place of the last row, where a kernel's tail is.
    left[..., -1, -1] = special
    seen = _run(target, amp_dtype, product, *(operand.to(target.device) for operand in (left, right, bias)))
    last = seen[..., -1, :].cpu().double()
    kind = torch.isnan(last) if math.isnan(special) else last == special
    case.equal(f"{op}: share of the row that is {special}", float(kind.double().mean()), 1.0)
    case.equal(f"{op}: control: the other rows are finite", bool(torch.isfinite(seen[..., :-1, :]).all()), True)


@contract("AMP-NUMERICS-031")
def test_backward_passes_on_inf_and_nan(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    for special in (math.inf, -math.inf, math.nan):
        layer = torch.nn.Linear(5, 3).to(target.device)
        torch.nn.init.ones_(layer.weight)
        with target.autocast(amp_dtype):
            seen = layer(torch.ones(4, 5, device=target.device))
        seed = torch.ones_like(seen)
        seed[-1, -1] = special
        seen.backward(seed)
        for name, parameter in layer.named_parameters():
            rows = parameter.grad.cpu().double().reshape(3, -1)
            kind = torch.isnan(rows[-1]) if math.isnan(special) else rows[-1] == special
            case.equal(f"{name}: the gradient's last row is {special}", bool(kind.all()), True)
            case.equal(f"{name}: control: its other rows", rows[:-1].unique().tolist(), [4.0])


@contract("AMP-NUMERICS-032")
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "addmm"])
def test_products_repeat(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str) -> None:
    product = PRODUCTS[op]
    sources = _gaussians(rng, *product.operands(65, 129, 33))
    runs = []
    for _ in range(2):
        left, right, bias = _leaves(target, *sources)
        seen = _run(target, amp_dtype, product, left, right, bias)
        seen.backward(torch.ones_like(seen))
        runs.append((seen, left.grad, right.grad))
    for what, first, second in zip(("result", "gradient of left", "gradient of right"), *runs, strict=True):
        case.identical(f"{op}: {what}, twice", first, second)


@contract("AMP-NUMERICS-033")
def test_convolution_sums_across_the_batch(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    form, samples = FORMATS[amp_dtype], 257
    weight = torch.ones(3, 2, 1, 1, device=target.device, requires_grad=True)
    with full_precision(target.device_type):
        with target.autocast(amp_dtype):
            seen = F.conv2d(torch.ones(samples, 2, 1, 1, device=target.device), weight)
        seed = torch.ones_like(seen)
        seed[0] = 1 / form.unit_roundoff
        seen.backward(seed)
    case.note("exact sum over the batch", 1 / form.unit_roundoff + samples - 1)
    case.note("gradient of a convolution's weight", float(weight.grad.max()))
    case.note(
        "the same sum, rounded to 16 bits each time",
        exact.sixteen_bit_sum(1 / form.unit_roundoff, 1.0, samples - 1, form.unit_roundoff),
    )


@contract("AMP-NUMERICS-033")
def test_transposed_convolution_sums_overlaps(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    form, side = FORMATS[amp_dtype], case.samples(quick=16, standard=16, full=32)
    image = torch.ones(1, 1, side, side)
    image[0, 0, 0, 0] = 1 / form.unit_roundoff
    with full_precision(target.device_type), target.autocast(amp_dtype):
        seen = F.conv_transpose2d(image.to(target.device), torch.ones(1, 1, side, side, device=target.device))
    # Every input lands on the middle of the output.
    case.note("exact sum of the overlaps", 1 / form.unit_roundoff + side**2 - 1)
    case.note("the same sum in a transposed convolution", float(seen[0, 0, side - 1, side - 1]))
