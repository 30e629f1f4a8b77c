"""Check that storing numbers in 16 bits and arithmetic on 16-bit tensors round once, to nearest."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.precision import computes_in
from ...oracles.numbers.formats import BF16, FORMATS, FP16, FP32, Format, midpoints, rounded, tensor_of
from .bit_patterns import all_patterns, narrowed, unsigned_zeros, widened

# What stores numbers of one type in another, beyond the ways of AMP-NUMERICS-001.
STORES: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "to": lambda source, dtype: source.to(dtype),
    "type": lambda source, dtype: source.type(dtype),
    "method": lambda source, dtype: source.half() if dtype is torch.float16 else source.bfloat16(),
    "strided": lambda source, dtype: torch.stack([source, source], 1)[:, 1].to(dtype),
    "copy_": lambda source, dtype: _empty(source, dtype).copy_(source),
    "copy_ across": lambda source, dtype: torch.stack([_empty(source, dtype)] * 2, 1)[:, 0].copy_(source),
    "setitem": lambda source, dtype: operator.setitem(store := _empty(source, dtype), slice(None), source) or store,
    "new_tensor": lambda source, dtype: torch.as_tensor(source, dtype=dtype, device=source.device),
    "masked_scatter": lambda source, dtype: _empty(source, dtype).masked_scatter_(
        torch.ones_like(source, dtype=torch.bool), source.to(dtype)
    ),
    "out=": lambda source, dtype: torch.mul(source, torch.ones_like(source), out=_empty(source, dtype)),
    "add_": lambda source, dtype: torch.zeros_like(source, dtype=dtype).sub_(source).neg_(),
    "sum": lambda source, dtype: source.unsqueeze(0).sum(0, dtype=dtype),
    "expand": lambda source, dtype: source.unsqueeze(-1).expand(*source.shape, 3).to(dtype)[..., 2],
}
# How the numbers lie in memory that are stored.
SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda source: source,
    "every second one": lambda source: source.repeat_interleave(2)[::2],
    "transposed": lambda source: source.unflatten(0, (-1, 2)).t().contiguous().t(),
}


DIRECT = ("to", "strided", "copy_", "setitem")


def _empty(source: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(source.shape, dtype=dtype, device=source.device)


def _other(form: Format) -> Format:
    return BF16 if form is FP16 else FP16


@contract("AMP-NUMERICS-002")
def test_stores_at_the_midpoints(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    case.require_subnormals(target, amp_dtype)
    form = FORMATS[amp_dtype]
    patterns = midpoints(form, case.samples(quick=151, standard=13, full=1))
    patterns = patterns[: len(patterns) // 2 * 2]  # pairs, to be transposed
    source, expected = tensor_of(patterns, FP32), narrowed(torch.tensor(patterns), form)
    for lie, laid_out in SOURCES.items():
        given = laid_out(source.to(target.device))
        for way, store in STORES.items():
            seen = store(given, amp_dtype).flatten()
            what = f"{way}, {lie}: {len(patterns)} fp32 numbers at and next to a tie"
            case.identical(what, unsigned_zeros(seen), unsigned_zeros(expected))


@contract("AMP-NUMERICS-002")
def test_numbers_at_the_midpoints(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    """Python numbers, which arrive in double precision, one at a time."""
    case.require_subnormals(target, amp_dtype)
    form = FORMATS[amp_dtype]
    patterns = midpoints(form, case.samples(quick=2003, standard=401, full=61))
    numbers = tensor_of(patterns, FP32).tolist()
    expected = narrowed(torch.tensor(patterns), form)
    where = {"dtype": amp_dtype, "device": target.device}
    for way, made in (
        ("torch.tensor", torch.tensor(numbers, **where)),
        ("torch.full", torch.stack([torch.full((), number, **where) for number in numbers])),
        ("fill_", torch.stack([torch.empty((), **where).fill_(number) for number in numbers])),
        ("new_full", torch.stack([torch.empty(0, **where).new_full((), number) for number in numbers])),
    ):
        case.identical(f"{way}: {len(numbers)} numbers at and next to a tie", made, expected)


# Lengths around those of vectors and blocks, with a tail behind the last whole one.
ENDS = (1, 31, 65, 70, 255)


@contract("AMP-NUMERICS-042")
def test_between_the_formats(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    form = FORMATS[amp_dtype]
    case.require(target, _other(form).dtype)
    source = all_patterns(_other(form)).to(target.device)
    expected = narrowed(widened(_other(form)), form)
    for way in ("to", "method", "strided", "copy_", "copy_ across", "setitem", "type"):
        case.identical(f"{way}: all 65536 patterns of {_other(form).name}", STORES[way](source, amp_dtype), expected)
        for end in ENDS:  # the last ones of the positive finite numbers, which are no whole vectors
            part = slice(0x7C00 - end, 0x7C00)
            case.identical(f"{way}: {end} patterns", STORES[way](source[part], amp_dtype), expected[part])


def _either(case: Case, what: str, seen: Tensor, exact: Tensor, form: Format) -> None:
    """Hold a store of float64 numbers to the nearest 16-bit number, or to the one nearest to the fp32 number."""
    once, twice = rounded(exact, form), rounded(rounded(exact, FP32), form)
    found = seen.cpu().double()
    case.equal(f"{what}: dtype", seen.dtype, form.dtype)
    wrong = ~((found == once) | (found == twice) | (found.isnan() & exact.isnan()))
    first = int(wrong.nonzero()[0]) if bool(wrong.any()) else -1
    place = "" if first < 0 else f"; the first, {exact[first].item()!r}: {found[first].item()!r}"
    case.equal(f"{what}: {len(exact)} numbers, wrong results", f"{int(wrong.sum())}{place}", "0")
    case.note(f"{what}: numbers rounded to fp32 first", int(((found != once) & (found == twice)).sum()))


@contract("AMP-NUMERICS-042")
def test_from_float64(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    case.require_subnormals(target, amp_dtype)
    if not computes_in(target.device, torch.float64):
        case.unsupported("the device has no float64")
    form = FORMATS[amp_dtype]
    count = case.samples(quick=3000, standard=20_000, full=200_000)
    low = torch.randint(0, form.infinity - 1, (count,), generator=rng)
    ends = [tensor_of((low + step).tolist(), form).double() for step in (0, 1)]
    ties = (ends[0] + ends[1]) / 2
    # Next to a tie by a difference that fp32 holds (2^-20), and by ones that fp32 rounds to the tie.
    near_ties = [ties * (1 + side * 2.0**-digits) for digits in (20, 30, 45) for side in (-1, 1)]
    limits = torch.tensor([form.overflow, form.overflow * (1 - 2.0**-40), form.smallest / 2, 1e300, 5e-324, math.inf])
    source = torch.cat([ties, *near_ties, limits.double(), torch.tensor([math.nan], dtype=torch.float64)])
    source = torch.cat([source, -source])
    for way in DIRECT:
        _either(case, way, STORES[way](source.to(target.device), amp_dtype), source, form)


@contract("AMP-NUMERICS-042")
def test_from_integers(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    form = FORMATS[amp_dtype]
    powers = 2 ** torch.arange(8, 52)
    near = torch.cat([powers + step for step in (-1, 0, 1)] + [powers + powers // 2048, powers + powers // 256 + 1])
    large = torch.cat([torch.arange(-70_000, 70_000, 7), torch.randint(-(2**50), 2**50, (999,), generator=rng), near])
    for dtype, source in (
        (torch.int64, large),
        (torch.int32, large[large.abs() < 2**31]),
        (torch.int16, torch.arange(-(2**15), 2**15, 3)),
        (torch.int8, torch.arange(-128, 128)),
        (torch.uint8, torch.arange(256)),
        (torch.bool, torch.tensor([0, 1] * 37)),
    ):
        for way in DIRECT:
            seen = STORES[way](source.to(dtype).to(target.device), amp_dtype)
            _either(case, f"{way}, {dtype}", seen, source.double(), form)


# --- sums, products and quotients -------------------------------------------------------------------------------

Binary = Callable[[Tensor, Tensor], Tensor]

# Each op in all forms of the call: function, method, operator, in place, with out=.
ARITHMETIC: dict[str, tuple[Binary, dict[str, Binary]]] = {
    "sum": (
        operator.add,
        {
            "torch.add": lambda a, b: torch.add(a, b),
            "+": lambda a, b: a + b,
            "Tensor.add": lambda a, b: a.add(b),
            "add_": lambda a, b: a.clone().add_(b),
            "+=": lambda a, b: operator.iadd(a.clone(), b),
            "out=": lambda a, b: torch.add(a, b, out=torch.empty_like(a)),
            "alpha": lambda a, b: torch.add(a, -b, alpha=-1),
            "strided": lambda a, b: torch.stack([a, a], 1)[:, 0] + torch.stack([b, b], 1)[:, 1],
        },
    ),
    "difference": (
        operator.sub,
        {
            "torch.sub": lambda a, b: torch.sub(a, b),
            "-": lambda a, b: a - b,
            "sub_": lambda a, b: a.clone().sub_(b),
            "rsub": lambda a, b: torch.rsub(b, a),
            "out=": lambda a, b: torch.sub(a, b, out=torch.empty_like(a)),
        },
    ),
    "product": (
        operator.mul,
        {
            "torch.mul": lambda a, b: torch.mul(a, b),
            "*": lambda a, b: a * b,
            "mul_": lambda a, b: a.clone().mul_(b),
            "out=": lambda a, b: torch.mul(a, b, out=torch.empty_like(a)),
            "strided": lambda a, b: torch.stack([a, a], 1)[:, 0] * b,
        },
    ),
    "quotient": (
        operator.truediv,
        {
            "torch.div": lambda a, b: torch.div(a, b),
            "/": lambda a, b: a / b,
            "div_": lambda a, b: a.clone().div_(b),
            "out=": lambda a, b: torch.div(a, b, out=torch.empty_like(a)),
        },
    ),
}


def _pairs(rng: torch.Generator, form: Format, count: int) -> tuple[Tensor, Tensor]:
    """Return pairs of random patterns, and of numbers whose sum lies on a tie or next to it."""
    patterns = torch.randint(0, 2**16, (2, count), generator=rng)
    low = torch.randint(form.fraction_bits + 2 << form.fraction_bits, form.infinity, (count,), generator=rng)
    # Half a place of `low`: a power of two that many exponents below, and its neighbours.
    half = ((low >> form.fraction_bits) - form.fraction_bits - 1) << form.fraction_bits
    half += torch.randint(-1, 2, (count,), generator=rng)
    signs = torch.randint(0, 2, (2, count), generator=rng) << 15
    left = torch.cat([patterns[0], low | signs[0]])
    right = torch.cat([patterns[1], half | signs[1]])
    return tensor_of(left.tolist(), form), tensor_of(right.tolist(), form)


# MPS is left out: Metal flushes subnormal numbers of fp32, which those of bf16 are.
@contract("AMP-NUMERICS-043", on=("cpu", "cuda", "xpu"))
@pytest.mark.parametrize("op", ARITHMETIC)
def test_arithmetic(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str) -> None:
    case.require_subnormals(target, amp_dtype)
    form, (exact, calls) = FORMATS[amp_dtype], ARITHMETIC[op]
    left, right = _pairs(rng, form, case.samples(quick=4099, standard=40_009, full=400_009))
    expected = rounded(exact(left.double(), right.double()), form).to(amp_dtype)
    for name, call in calls.items():
        seen = call(left.to(target.device), right.to(target.device))
        case.identical(f"{op} ({name}) of {len(left)} pairs", seen, expected)


@contract("AMP-NUMERICS-043", on=("cpu", "cuda", "xpu"))
@pytest.mark.parametrize("number", [3.0, deep("standard", 0.1), deep("standard", -1 / 3), deep("standard", 2.0**-20)])
def test_arithmetic_with_a_number(case: Case, target: Target, amp_dtype: torch.dtype, number: float) -> None:
    case.require_subnormals(target, amp_dtype)
    for op in ARITHMETIC:
        _with_a_number(case, target, FORMATS[amp_dtype], op, number)


def _with_a_number(case: Case, target: Target, form: Format, op: str, number: float) -> None:
    exact, source = ARITHMETIC[op][0], all_patterns(form)
    # torch takes the number in the type of the tensor or in fp32, op by op, and CUDA divides by multiplying with the
    # number's reciprocal (aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu).
    ways = [rounded(torch.tensor(number, dtype=torch.float64), kind) for kind in (FP32, form)]
    exacts = [exact(source.double(), way) for way in ways]
    if op == "quotient":
        exacts += [source.double() * rounded(1 / way, FP32) for way in ways]
    results = [rounded(rounded(each, FP32), form).to(form.dtype) for each in exacts]
    for what, seen in (
        ("tensor first", exact(source.to(target.device), number)),
        ("in place", _in_place(op, source.to(target.device), number)),
        ("in a tensor", exact(source.to(target.device), torch.tensor(number, device=target.device))),
        ("in a 16-bit tensor", exact(source.to(target.device), torch.tensor(number).to(target.device, form.dtype))),
    ):
        found = seen.cpu()
        fits = [(found.view(torch.int16) == way.view(torch.int16)) | (found.isnan() & way.isnan()) for way in results]
        wrong = ~torch.stack(fits).any(0)
        case.equal(f"{op} with {number:g}, {what}: dtype", seen.dtype, form.dtype)
        case.equal(f"{op} with {number:g}, {what}: wrong results for 65536 inputs", int(wrong.sum()), 0)


def _in_place(op: str, source: Tensor, number: float) -> Tensor:
    name = {"sum": "add_", "difference": "sub_", "product": "mul_", "quotient": "div_"}[op]
    changed: Tensor = getattr(source.clone(), name)(number)
    return changed


# --- scaling ----------------------------------------------------------------------------------------------------


@contract("AMP-NUMERICS-027")
def test_unscaling_in_every_layout(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    values = all_patterns(FORMATS[amp_dtype]).float()
    # Finite, and neither below the normal numbers of fp32 nor beyond them at the scale.
    values = values[(values.abs() < 2.0**100) & ((values.abs() >= FP32.smallest_normal) | (values == 0))]
    square = math.isqrt(len(values))
    for exponent in (16, case.samples(quick=3, standard=24, full=24)):
        scaled = (values.double() * 2.0**exponent).float().to(target.device)
        # More than 65,536 elements, where kernels share the work; columns; every second element; many small ones.
        gradients = [
            scaled.repeat(5),
            scaled[: square**2].view(square, square).t(),
            torch.stack([scaled, -scaled], 1)[:, 0],
            *scaled[:64].unbind(),
        ]
        expected = [gradient.cpu().double().mul(2.0**-exponent).float() for gradient in gradients]
        parameters = [torch.nn.Parameter(torch.empty_like(gradient)) for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone(memory_format=torch.preserve_format)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**exponent)
        scaler.scale(torch.ones((), device=target.device))
        scaler.unscale_(torch.optim.SGD(parameters, lr=1.0))
        for at, (parameter, wanted) in enumerate(zip(parameters, expected, strict=True)):
            case.identical(f"gradient {at} of {len(gradients)} at 2^{exponent}, unscaled", parameter.grad, wanted)


# --- on the fp32 list -------------------------------------------------------------------------------------------

# Products of factors that 16 bits hold, and do not: every order of multiplication is exact in fp32.
_FACTORS = (3.0, 5.0, 7.0, 11.0, 13.0, 1.0, 17.0, 0.5)
PRODUCTS_OF_ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "Tensor.prod of all": lambda x: x.prod(),
    "torch.prod of all": lambda x: torch.prod(x),
    "along a dimension": lambda x: x.prod(0),
    "along a dimension, kept": lambda x: torch.prod(x, 0, keepdim=True).squeeze(0),
}


@contract("AMP-NUMERICS-024", on=("cpu", "cuda"))
def test_prod_in_every_form(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    factors = torch.tensor(_FACTORS, dtype=amp_dtype, device=target.device)
    for form, call in PRODUCTS_OF_ALL.items():
        with target.autocast(amp_dtype):
            seen = call(factors)
        case.equal(f"{form}: dtype", seen.dtype, torch.float32)
        case.equal(f"{form}: product of {_FACTORS}", float(seen), math.prod(_FACTORS))
    stored = float(torch.tensor(math.prod(_FACTORS)).to(amp_dtype))
    case.true("control: 16 bits do not hold it", stored != math.prod(_FACTORS), stored)
