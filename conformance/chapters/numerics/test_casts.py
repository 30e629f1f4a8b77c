"""Check the rounding of casts between fp32 and 16 bits, by Tensor methods and by autocast."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...data import fixture, read_toml
from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers.formats import FORMATS, FP32, Format, midpoints, tensor_of
from .bit_patterns import all_patterns, narrowed, widened
from .support import leaves_on


@functools.cache
def _tabulated_casts() -> dict[str, Any]:
    return read_toml(fixture("casts.toml"))


def _in_shape(*shape: int) -> Callable[[Tensor, torch.dtype], Tensor]:
    return lambda source, dtype: source.reshape(shape).to(dtype).flatten()


def _into_a_slice(source: Tensor, dtype: torch.dtype) -> Tensor:
    whole = torch.zeros(source.numel() + 5, dtype=dtype, device=source.device)
    whole[3:-2] = source
    return whole[3:-2]


def _channels_last(source: Tensor, dtype: torch.dtype) -> Tensor:
    image = F.pad(source, (0, -len(source) % 6)).view(1, 3, -1, 2)
    return image.to(dtype, memory_format=torch.channels_last).flatten()[: len(source)]


# Each kind of cast runs another kernel: whole vectors and their remainder, single elements, copies, single numbers.
# Backends have kernels by rank as well.
CASTS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "to": lambda source, dtype: source.to(dtype),
    "strided": lambda source, dtype: torch.stack([source, source], 1)[:, 0].to(dtype),
    "copy_": lambda source, dtype: torch.empty(source.shape, dtype=dtype, device=source.device).copy_(source),
    "slice": _into_a_slice,
    "one-step": lambda source, dtype: source.cpu().to(source.device, dtype),
    "from-host": lambda source, dtype: torch.empty(source.shape, dtype=dtype, device=source.device).copy_(source.cpu()),
    "to-host": lambda source, dtype: source.to("cpu", dtype),
    "type": lambda source, dtype: source.type(dtype),
    "type_as": lambda source, dtype: source.type_as(torch.empty(0, dtype=dtype, device=source.device)),
    "copy": lambda source, dtype: source.to(dtype, non_blocking=True, copy=True),
    "channels-last": _channels_last,
    "transposed": lambda source, dtype: (
        F.pad(source, (0, len(source) % 2)).view(2, -1).t().to(dtype).t().flatten()[: len(source)]
    ),
    "scalar": lambda source, dtype: torch.stack([item.to(dtype) for item in source]),
    "matrix": _in_shape(1, -1),
    "sequence": _in_shape(1, -1, 1),
    "image": _in_shape(1, 1, -1, 1),
    "volume": _in_shape(1, 1, 1, -1, 1),
}


# Into part of a tensor, and from and to the host, with the dtype in the same step.
BETWEEN = ("slice", "one-step", "from-host", "to-host")


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
    """Return the fp32 numbers of these patterns and their rounding to `form` by integer arithmetic."""
    return tensor_of(patterns, FP32), narrowed(torch.tensor(patterns, dtype=torch.int64), form)


def _check_tabulated(case: Case, target: Target, dtype: torch.dtype, way: str, group: str) -> None:
    """Check one kind of cast against the rows of `group` in fixtures/casts.toml."""
    form = FORMATS[dtype]
    rows = [row for row in _tabulated_casts()[form.name] if row["group"] == group]
    source = torch.tensor([float.fromhex(row["value"]) for row in rows], dtype=torch.float32)
    # Repeated, so that both a vector loop and its remainder process every row.
    seen = CASTS[way](source.repeat(3).to(target.device), dtype).cpu().view(form.storage)
    patterns = [pattern & 0xFFFF for pattern in seen.tolist()]
    for at, row in enumerate(rows):
        found = sorted({f"0x{pattern:04X}" for pattern in patterns[at :: len(rows)]})
        case.equal(f"{way}: pattern of {row['value']} ({row['why']})", found, [f"0x{row['pattern']:04X}"])


@contract("AMP-NUMERICS-001")
@pytest.mark.parametrize("way", CASTS)
def test_casts_round_ties_to_even(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    _check_tabulated(case, target, amp_dtype, way, "rounding")


@contract("AMP-NUMERICS-002")
def test_casts_at_the_midpoints(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    form = FORMATS[amp_dtype]
    # Odd strides alternate between ties below even and odd neighbours.
    patterns = _midpoints(form, case.samples(quick=61, standard=7, full=1))
    source, expected = _cast(patterns, form)
    for way in ("to", "strided", *BETWEEN):
        seen = CASTS[way](source.to(target.device), amp_dtype)
        case.identical(f"{way}: {len(patterns)} fp32 numbers at and next to a tie", seen, expected)


@contract("AMP-NUMERICS-002")
def test_casts_of_arbitrary_patterns(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    count = case.samples(quick=3001, standard=20_001, full=200_001)
    source, expected = _cast(torch.randint(0, 2**32, (count,), generator=rng).tolist(), FORMATS[amp_dtype])
    # Repeated past the sizes from which kernels share the work among threads (32,768 on a CPU).
    copies = -(-100_000 // count)
    for way in ("to", "copy_", *BETWEEN):
        seen = CASTS[way](source.repeat(copies).to(target.device), amp_dtype)
        case.identical(f"{way}: {count} random fp32 patterns, {copies} times", seen, expected.repeat(copies))


@contract("AMP-NUMERICS-003")
@pytest.mark.parametrize("way", CASTS)
def test_cast_overflow_threshold(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    _check_tabulated(case, target, amp_dtype, way, "overflow")


@contract("AMP-NUMERICS-004")
@pytest.mark.parametrize("way", CASTS)
def test_cast_subnormals(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    _check_tabulated(case, target, amp_dtype, way, "subnormal")


@contract("AMP-NUMERICS-005")
@pytest.mark.parametrize("way", CASTS)
def test_casts_keep_infinity_nan_and_signed_zero(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    _check_tabulated(case, target, amp_dtype, way, "special")
    # Payloads in the lowest bits only: a cast that truncates them makes an infinity.
    payloads = [0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF, 0xFF80_0001, 0xFFC0_0001, 0x7F80_FFFF, 0x7FA0_0000]
    seen = CASTS[way](tensor_of(payloads * 5, FP32).to(target.device), amp_dtype)
    case.equal(f"{way}: NaNs left of {len(seen)}", int(torch.isnan(seen).sum()), len(seen))


@contract("AMP-NUMERICS-006")
@pytest.mark.parametrize("way", ["to", "strided", "copy_", *BETWEEN])
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
    _check_tabulated(case, target, amp_dtype, way, "precision")


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
    """Return every `stride`-th tie and its neighbours, except those that products of subnormals may flush."""
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
    # Each element separately, so that 1 * NaN or infinity affects one result.
    with target.autocast(amp_dtype):
        seen = OPS_THAT_CAST[op](source.to(target.device), torch.ones(1, 1, device=target.device))
    case.identical(f"{op}: {len(source)} fp32 numbers times 1", seen, expected)


@contract("AMP-NUMERICS-009")
@pytest.mark.parametrize("op", OPS_THAT_CAST)
def test_autocast_rounds_before_the_product(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    # Numbers just above 1 round to 1; cast first, 16 of them minus 16 ones are exactly 0.
    above = 1 + 0.9 * FORMATS[amp_dtype].unit_roundoff
    numbers = torch.cat([torch.full((16,), above), torch.ones(16)])
    signs = torch.cat([torch.ones(16), -torch.ones(16)])
    for what, left, right in (
        ("left", numbers.repeat(3, 1), signs.unsqueeze(1).repeat(1, 5)),
        ("right", signs.repeat(3, 1), numbers.unsqueeze(1).repeat(1, 5)),
    ):
        left, right = leaves_on(target, left, right)
        with full_precision(target.device_type), target.autocast(amp_dtype):
            seen = OPS_THAT_CAST[op](left, right)
        case.equal(f"{op}, {what} operand just above 1: results", seen.cpu().double().unique().tolist(), [0.0])
    # The backward multiplies by the operand that the forward cast.
    left, right = leaves_on(target, numbers.unsqueeze(1), torch.ones(1, 5))
    with full_precision(target.device_type):
        with target.autocast(amp_dtype):
            seen = OPS_THAT_CAST[op](left, right)
        seen.backward(signs.unsqueeze(1).expand(32, 5).to(target.device, amp_dtype))
    case.equal(f"{op}: gradients of the right operand", right.grad.cpu().double().unique().tolist(), [0.0])


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
