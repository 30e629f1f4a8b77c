"""Check 16-bit convolutions: exact on integers, rounding error, sums over batch and overlaps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract, deep, per_target
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers import error_bounds, exact
from ...oracles.numbers.formats import FORMATS
from . import value_error
from .bit_patterns import unsigned_zeros
from .bounds_convolution import Convolution
from .convolution_sums import BATCH_SUMS, CONVOLUTION_SUMS, QUICK_BATCH_SUMS, SUMS, BatchSum
from .matmul_ops import gaussians
from .matmul_spellings import integers
from .support import leaves_on, within_window, without_kernels

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
        # Kernels of their own in libraries: patches that do not overlap, the first layer of networks, wide windows.
        Convolution("patches", F.conv2d, (2, 3, 32, 48), (8, 3, 16, 16), {"stride": 16}),
        Convolution("stem", F.conv2d, (2, 3, 21, 19), (16, 3, 7, 7), {"stride": 2, "padding": 3}),
        Convolution("wide-depthwise", F.conv2d, (2, 16, 13, 15), (16, 1, 7, 7), {"groups": 16, "padding": 3}),
        Convolution("samples", F.conv1d, (2, 1, 410), (8, 1, 80), {"stride": 40}),
        # One place in the last dimension, which kernels made for rows of them treat apart.
        Convolution("column1d", F.conv1d, (4, 40, 4), (48, 40, 3), {"stride": 3}),
        Convolution("column2d", F.conv2d, (4, 40, 7, 4), (48, 40, 3, 3), {"stride": 3}),
        Convolution("column3d", F.conv3d, (4, 40, 6, 8, 4), (48, 40, 3, 3, 3), {"stride": 3}),
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


@contract("AMP-NUMERICS-047")
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
    leaves = leaves_on(target, *sources)
    seen = _convolve(target, amp_dtype, convolution, *leaves)
    expected = convolution.expected(*sources).detach().to(amp_dtype)
    case.identical(f"{name} of integers", unsigned_zeros(seen), unsigned_zeros(expected))


@contract("AMP-NUMERICS-047")
@pytest.mark.parametrize("op", ["conv1d", "conv2d", "conv3d"])
def test_convolutions_of_ones_count_the_kernel(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    dimensions = int(op[4])
    # Up to 3 channels * 4^3 taps, which bf16 holds. On a card a kernel of 3 may be computed by Winograd's transform.
    wrong = {}
    for channels in (1, 2, 3):
        for side in (1, 2, 3, 4) if target.device_type == "cpu" else (1, 2, 4):
            for samples in (1, 2):
                image, weight = (torch.ones(n, channels, *(side,) * dimensions) for n in (samples, 1))
                leaves = leaves_on(target, image, weight)
                with full_precision(target.device_type):
                    with target.autocast(amp_dtype):
                        seen = getattr(F, op)(*leaves)
                    seen.backward(torch.ones_like(seen))
                found = [sorted({*tensor.detach().flatten().tolist()}) for tensor in (seen, *(x.grad for x in leaves))]
                if found != [[float(channels * side**dimensions)], [1.0], [float(samples)]]:
                    wrong[f"{samples} of {channels} channels, a side of {side}"] = found
    case.equal(f"{op} of ones: wrong counts of products, gradients of image and weight", wrong, {})


@contract("AMP-NUMERICS-020")
@pytest.mark.parametrize("name", [deep("standard" if "column" in name else "quick", name) for name in CONVOLUTIONS])
def test_convolutions_run_in_sixteen_bits(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str
) -> None:
    convolution, form = CONVOLUTIONS[name], FORMATS[amp_dtype]
    sources = gaussians(rng, convolution.image, convolution.weight, (convolution.channels,))
    leaves = leaves_on(target, *sources)
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
        within_window(case, what, tensor, reference, window, form.unit_roundoff)
        elements = min(math.prod(convolution.image), math.prod(convolution.weight), seen.numel())
        gain = abs(error_bounds.gain_error(tensor, reference))
        bound = error_bounds.gain_bound(form, elements, additions, winograd=winograd)
        case.at_most(f"{what}: systematic scale error", gain, bound)


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


@contract("AMP-NUMERICS-085")
@pytest.mark.parametrize("op", BATCH_SUMS)
def test_convolution_gradients_add_up_every_sample(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    form = FORMATS[amp_dtype]
    kinds = [kind for kind in BATCH_SUMS[op] if case.level != "quick" or kind in QUICK_BATCH_SUMS]
    # Not every library of a card computes dilated ones.
    asked = {kind: BATCH_SUMS[op][kind] for kind in kinds if target.device_type == "cpu" or "dilated" not in kind}

    def alone(one: BatchSum) -> Callable[[], object]:
        return lambda: one.gradients(amp_dtype, target.device, torch.Generator(), contextlib.nullcontext())

    for kind in case.with_kernels(target, {kind: alone(one) for kind, one in asked.items()}):
        with full_precision(target.device_type):
            found = asked[kind].gradients(amp_dtype, target.device, rng, target.autocast(amp_dtype))
        for what, (seen, expected) in found.items():
            off = ((seen.detach().cpu().double() - expected).abs() / expected).nan_to_num(nan=math.inf)
            name = (
                f"{op}: gradient of the {what}{without_kernels(target, amp_dtype)}, worst error of an element ({kind})"
            )
            case.at_most(name, float(off.max()) / form.unit_roundoff, value_error.BACKWARD_ROUNDINGS, "roundings")


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


def _sums(target: Target) -> Iterator[object]:
    """Yield the sums of a target: on a card those over channels alone, which matrix units keep in fp32."""
    for id, one in CONVOLUTION_SUMS.items():
        if target.device_type == "cpu" or one.place == "channels":
            yield id if one.dimensions == 2 else deep("standard", id)


@contract("AMP-NUMERICS-106")
@per_target("op", _sums)
def test_partial_sums_of_convolutions_may_leave_the_range(case: Case, target: Target, op: str) -> None:
    case.require(target, torch.float16)
    one = CONVOLUTION_SUMS[op]
    for what, (first, second, expected) in SUMS.items():
        seen = {}
        for layout in one.layouts:
            with full_precision(target.device_type):
                found = one.seen(first, second, layout, target.device, target.autocast(torch.float16))
            values = found.cpu().double().unique().tolist()
            seen[str(layout).removeprefix("torch.")] = [str(number) for number in values]
        case.equal(f"{op}: sum that is {what}", seen, {layout: [str(expected)] for layout in seen})


SPREADING = ("conv2d", "depthwise", "transposed2d")
# What depends on an element of each operand, and the one of them that stays within some slices of an axis.
DEPENDS = {
    "image": ("result", "gradient of the weight"),
    "weight": ("result", "gradient of the image"),
    "incoming gradient": ("gradient of the image", "gradient of the weight"),
}
WITHIN = {"image": ("result", 0), "weight": ("result", 1), "incoming gradient": ("gradient of the image", 0)}


def _spreading() -> list[object]:
    """The convolutions by name, each in its layouts."""
    found: list[object] = []
    for name, one in CONVOLUTIONS.items():
        layouts = [torch.contiguous_format]
        if (spatial := len(one.image) - 2) > 1:
            layouts.append(torch.channels_last if spatial == 2 else torch.channels_last_3d)
        for layout in layouts:
            id = f"{name}-{str(layout).removeprefix('torch.')}"
            found.append(deep("quick" if name in SPREADING else "standard", (name, layout), id=id))
    return found


def _computed(call: Callable[..., Tensor], image: Tensor, weight: Tensor, seed: Tensor) -> dict[str, Tensor]:
    image, weight = image.requires_grad_(), weight.requires_grad_()
    seen = call(image, weight)
    seen.backward(seed.to(seen.dtype))
    found = {"result": seen, "gradient of the image": image.grad, "gradient of the weight": weight.grad}
    return {what: tensor.detach().cpu() for what, tensor in found.items() if tensor is not None}


@contract("AMP-NUMERICS-106")
@pytest.mark.parametrize("pair", _spreading())
def test_sums_beyond_the_range_are_infinite(case: Case, target: Target, pair: tuple[str, torch.memory_format]) -> None:
    case.require(target, torch.float16)
    name, layout = pair
    convolution = CONVOLUTIONS[name]

    def alone(image: Tensor, weight: Tensor) -> Tensor:
        return convolution.call(image, weight, **convolution.options)

    def in_a_region(image: Tensor, weight: Tensor) -> Tensor:
        with full_precision(target.device_type), target.autocast(torch.float16):
            return alone(image, weight)

    sizes = [convolution.image, convolution.weight]
    sizes.append(tuple(alone(*(torch.zeros(size) for size in sizes)).shape))
    wrong: dict[float, dict[str, int]] = {math.inf: {}, -math.inf: {}}
    # Each product of two of them is beyond the range by itself.
    for signs in ((1, 1, 1), (1, -1, 1), (-1, 1, 1)):
        sources = [torch.full(size, 300.0 * sign) for size, sign in zip(sizes, signs, strict=True)]
        sums = _computed(alone, *(source.double() for source in sources))
        laid = [source.contiguous(memory_format=layout).to(target.device) for source in sources]
        for what, tensor in _computed(in_a_region, *laid).items():
            for infinity, found in wrong.items():
                beyond = sums[what].sign() == math.copysign(1, infinity)
                if missing := int((beyond & (tensor != infinity)).sum()):
                    found[what] = found.get(what, 0) + missing
    for infinity, found in wrong.items():
        case.equal(f"{name}: elements beyond the range that are not {infinity}", found, {})


@contract("AMP-NUMERICS-087")
@pytest.mark.parametrize("pair", _spreading())
def test_convolutions_pass_on_inf_and_nan(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, pair: tuple[str, torch.memory_format]
) -> None:
    name, layout = pair
    convolution = CONVOLUTIONS[name]

    def alone(image: Tensor, weight: Tensor) -> Tensor:
        return convolution.call(image, weight, **convolution.options)

    def in_a_region(image: Tensor, weight: Tensor) -> Tensor:
        with full_precision(target.device_type), target.autocast(amp_dtype):
            return alone(image, weight)

    sizes = [convolution.image, convolution.weight]
    sizes.append(tuple(alone(*(torch.zeros(size) for size in sizes)).shape))
    specials = (math.nan, math.inf, -math.inf)
    lost: dict[float, dict[str, int]] = {special: {} for special in specials}
    spread = {}
    for index, (operand, (what, axis)) in enumerate(WITHIN.items()):
        last = math.prod(sizes[index]) - 1
        for place, special in zip((0, last // 2, last), specials, strict=True):
            marks = [torch.ones(size, dtype=torch.double) for size in sizes]
            marks[index].zero_().view(-1)[place] = 1
            depends = {key: tensor != 0 for key, tensor in _computed(alone, *marks).items()}
            sources = [torch.randint(1, 3, size, generator=rng).float() for size in sizes]
            sources[index].view(-1)[place] = special
            laid = [source.contiguous(memory_format=layout).to(target.device) for source in sources]
            wrong = {key: ~tensor.isfinite() for key, tensor in _computed(in_a_region, *laid).items()}
            for key in DEPENDS[operand]:
                if missing := int((depends[key] & ~wrong[key]).sum()):
                    lost[special][f"place {place} of the {operand}: {key}"] = missing
            others = [other for other in range(wrong[what].dim()) if other != axis]
            if beyond := int((wrong[what].amax(others) & ~depends[what].amax(others)).sum()):
                spread[f"{special} in place {place} of the {operand}: {what}, axis {axis}"] = beyond
    for special, found in lost.items():
        case.equal(f"finite elements that depend on one that is {special}", found, {})
    case.equal("slices beyond those that depend on it, with elements that are not finite", spread, {})
