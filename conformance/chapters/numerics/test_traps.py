"""Check long sums that need an accumulator wider than 16 bits, integer convolutions, and one-hot attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers import exact
from ...oracles.numbers.formats import FORMATS, Format, rounded
from .matmul_spellings import BIASED, PLACES, PLAIN, Product, through
from .support import by_kernel

# Lengths of the inner dimension around those at which kernels split it; the last is 65,536 and a tail.
LENGTHS = (67, 259, 1027, 4099, 16_387, 65_539)

# How the large terms lie: so that every part of the sum is large and odd, so that the sum climbs to millions before it
# comes back, and so that each term is next to the one that cancels it.
ORDERS = ("scattered", "climbing", "alternating")


def _over_taps(left: Tensor, right: Tensor, bias: Tensor) -> Tensor:
    """Return the product as a convolution of one place, with 7 or 13 taps where they divide the length.

    A stride of 2 forbids Fourier's transform.
    """
    taps = next((taps for taps in (7, 13) if left.shape[1] % taps == 0), 1)
    return F.conv1d(left.unflatten(1, (-1, taps)), right.t().unflatten(1, (-1, taps)), stride=2).flatten(1)


TRAPPED: dict[str, Product] = {
    "torch.mm": PLAIN["functions"]["torch.mm"],
    "F.linear": PLAIN["functions"]["F.linear"],
    "bmm": PLAIN["batched"]["Tensor.bmm"],
    "torch.addmm": BIASED["torch.addmm"],
    "baddbmm": BIASED["baddbmm"],
    "conv1d": PLAIN["convolutions"]["conv1d"],
    "conv2d": PLAIN["convolutions"]["conv2d"],
    "conv over taps": _over_taps,
}


def _trap(rng: torch.Generator, m: int, length: int, n: int, order: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers (m, length) and (length, n) and their product, small where the sums on the way are not.

    [X, X + D, E] times [Y; -Y; Z] is E Z - D Y, D having one 1 in a row. X and Y are odd and as large as both types
    hold (255) and as keeps the sum of all sizes below 2^24: exact in fp32 in any order. In 16 bits few parts are.
    """
    half = (length - 3) // 2
    odd = min(128, (math.isqrt(2**24 // length) - 1) // 2)
    x, y = (2 * torch.randint(0, odd, shape, generator=rng) + 1.0 for shape in ((m, half), (half, n)))
    if order == "scattered":
        x = x * (2 * torch.randint(0, 2, x.shape, generator=rng) - 1)
    places = torch.randint(0, half, (m, 1), generator=rng)
    other = x.scatter_add(1, places, torch.ones(places.shape))
    rest = length - 2 * half
    ends = (
        torch.randint(-5, 6, (m, rest), generator=rng).float(),
        torch.randint(-5, 6, (rest, n), generator=rng).float(),
    )
    left, right = torch.cat([x, other, ends[0]], 1), torch.cat([y, -y, ends[1]])
    if order == "scattered":
        shuffle = torch.randperm(length, generator=rng)
        left, right = left[:, shuffle], right[shuffle]
    elif order == "alternating":
        pairs = torch.cat([torch.stack([torch.arange(half), torch.arange(half) + half], 1).flatten()])
        shuffle = torch.cat([pairs, torch.arange(2 * half, length)])
        left, right = left[:, shuffle], right[shuffle]
    return left, right, exact.product(*ends) - y[places[:, 0]].double()


@contract("AMP-NUMERICS-016")
@pytest.mark.parametrize("op", TRAPPED, ids=lambda op: op.replace(" ", "_"))
def test_sums_are_wide_wherever_they_are_split(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    form = FORMATS[amp_dtype]
    # A convolution's weight gradient, summed over the batch, is a matter of AMP-NUMERICS-033.
    places = PLACES[:2] if op.startswith("conv") else PLACES
    lengths: tuple[int, ...] = LENGTHS[1:5:3] if case.level == "quick" else LENGTHS
    if op.startswith("conv"):
        # More channels than 65,535 are beyond the grids of some kernels.
        lengths = tuple(length for length in lengths if length < 2**16)
    for length in lengths:
        for order in ORDERS[: case.samples(quick=2, standard=3, full=3)]:
            left, right, expected = _trap(rng, 3, length, 5, order)
            _control(case, form, left, right, expected, f"{length} terms, {order}")
            for place in places:
                with full_precision(target.device_type):
                    seen = through(
                        TRAPPED[op],
                        place,
                        left.to(target.device),
                        right.to(target.device),
                        lambda: target.autocast(amp_dtype),
                    )
                what = f"{op}: {place}, {length} terms, {order}"
                case.identical(what, seen.to(amp_dtype) + 0.0, expected.to(amp_dtype) + 0.0)


def _control(case: Case, form: Format, left: Tensor, right: Tensor, expected: Tensor, what: str) -> None:
    """Show that the two halves of each sum, rounded to 16 bits before they are added, give another result."""
    if "alternating" in what:
        return
    terms = left.double().unsqueeze(2) * right.double()
    halves = [part.sum(1) for part in terms.tensor_split(2, 1)]
    wrong = rounded(rounded(halves[0], form) + rounded(halves[1], form), form) != rounded(expected, form)
    case.true(f"control: {what}, two halves rounded: some results differ", bool(wrong.any()), int(wrong.sum()))


# --- convolutions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Windows:
    """A convolution that needs no transform (Winograd, Fourier) and so is exact on integers: strided or dilated."""

    dims: int
    channels: int
    outputs: int
    space: int
    taps: int
    options: dict[str, int]
    transposed: bool = False


WINDOWS = {
    "conv1d": Windows(1, 6, 8, 41, 5, {"stride": 2, "padding": 2}),
    "conv2d": Windows(2, 6, 8, 17, 3, {"stride": 2, "padding": 1}),
    "conv2d dilated": Windows(2, 6, 8, 17, 3, {"dilation": 2}),
    "conv2d grouped": Windows(2, 12, 8, 13, 3, {"stride": 2, "groups": 4}),
    "depthwise": Windows(2, 16, 16, 13, 3, {"stride": 2, "groups": 16}),
    "conv3d": Windows(3, 4, 6, 9, 3, {"stride": 2, "padding": 1}),
    "transposed1d": Windows(1, 6, 8, 21, 3, {"stride": 2}, transposed=True),
    "transposed2d": Windows(2, 6, 8, 9, 3, {"stride": 2, "padding": 1}, transposed=True),
    "transposed3d": Windows(3, 4, 6, 5, 3, {"stride": 2}, transposed=True),
}
MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda image: image,
    "channels last": lambda image: image.contiguous(
        memory_format={4: torch.channels_last, 5: torch.channels_last_3d}.get(image.dim(), torch.contiguous_format)
    ),
    "batch of one": lambda image: image[:1],
    "batch of one, channels last": lambda image: MEMORY["channels last"](image[:1]),
    "turned": lambda image: image.transpose(-1, 1).contiguous().transpose(-1, 1),
}


def _few(rng: torch.Generator, shape: tuple[int, ...], size: int, entries: int) -> Tensor:
    """Return zeros with some integers up to `size`, among them the first and the last element."""
    flat = torch.zeros(math.prod(shape))
    at = torch.cat([torch.tensor([0, len(flat) - 1]), torch.randint(0, len(flat), (entries,), generator=rng)])
    flat[at] = torch.randint(1, size + 1, (len(at),), generator=rng).float()
    return flat.reshape(shape)


@contract("AMP-NUMERICS-047")
@pytest.mark.parametrize("name", WINDOWS, ids=lambda name: name.replace(" ", "_"))
def test_convolutions_and_their_gradients(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str
) -> None:
    window = WINDOWS[name]
    groups = window.options.get("groups", 1)
    channels = (
        (window.channels, window.outputs // groups)
        if window.transposed
        else (
            window.outputs,
            window.channels // groups,
        )
    )
    call = getattr(F, f"conv{'_transpose' if window.transposed else ''}{window.dims}d")
    reference = exact.transposed_convolution if window.transposed else exact.convolution
    for memory in MEMORY:
        image = torch.randint(-2, 3, (3, window.channels, *[window.space] * window.dims), generator=rng).float()
        weight = _few(rng, (*channels, *[window.taps] * window.dims), 2, 24)
        images, weights = (
            [source.requires_grad_() for source in (image.clone(), image.double())] for image in (image, weight)
        )
        bias = torch.randint(-9, 10, (window.outputs,), generator=rng).float()
        biases = [source.requires_grad_() for source in (bias.clone(), bias.double())]
        with full_precision(target.device_type):
            moved = [images[0].to(target.device), weights[0].to(target.device)]
            with target.autocast(amp_dtype):
                seen = call(MEMORY[memory](moved[0]), moved[1], biases[0].to(target.device), **window.options)
            seed = _few(rng, tuple(seen.shape), 2, 30)
            seen.backward(seed.to(target.device, seen.dtype))
        expected = reference(MEMORY[memory](images[1]), weights[1], biases[1], **window.options)
        expected.backward(seed.double())
        for what, ours, theirs in (
            ("result", seen, expected.detach().to(amp_dtype)),
            ("gradient of the input", images[0].grad, images[1].grad.float()),
            ("gradient of the weight", weights[0].grad, weights[1].grad.float()),
            ("gradient of the bias", biases[0].grad, biases[1].grad.float()),
        ):
            largest = float(theirs.abs().max())
            case.between(f"{name}, {memory}: {what}: largest integer, of those that bf16 holds", largest, 1.0, 256.0)
            case.identical(f"{name}, {memory}: {what}", ours + 0.0, theirs + 0.0)


# --- attention --------------------------------------------------------------------------------------------------

# One logit so far above the others that softmax is 1 and 0: exp(-2 * 256 / 4) is nothing in fp32. And not so far that
# the rounding of a logit of 1024 times log2(e), which fused kernels subtract unrounded, shows in 1: it is 2^-14.
_HEAD, _PEAK = 16, 256.0


def _signatures(count: int) -> Tensor:
    """Return `count` different rows of _HEAD signs."""
    return torch.tensor([[1.0 if row >> bit & 1 else -1.0 for bit in range(_HEAD)] for row in range(count)])


ATTENTION_LAYOUTS = {
    "heads first": lambda part: part,
    "heads inside": lambda part: part.transpose(1, 2).contiguous().transpose(1, 2),
    "every second": lambda part: torch.stack([part, -part], -1)[..., 0],
}


@contract("AMP-NUMERICS-048")
@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS, ids=lambda layout: layout.replace(" ", "_"))
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_attention_points_at_one_key(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, layout: str, is_causal: bool
) -> None:
    heads = (2, 3)
    # More keys than a block of a fused kernel has, at quick as well.
    shapes = ((261, 261), (65, 65), (128, 128)) if is_causal else ((5, 257), (33, 67), (64, 64), (1, 31))
    for queries, keys in shapes[: case.samples(quick=1, standard=4, full=4)]:
        choices = torch.randint(0, keys, (*heads, queries), generator=rng)
        if is_causal:
            choices = torch.minimum(choices, torch.arange(queries))
        signs = _signatures(keys)
        query, key = _PEAK * signs[choices], signs.expand(*heads, -1, -1)
        value = torch.randint(1, 200, (*heads, keys, _HEAD), generator=rng).float()
        seed = torch.randint(-3, 4, (*heads, queries, _HEAD), generator=rng).float()

        def run(sources: tuple[Tensor, ...] = (query, key, value), seed: Tensor = seed) -> list[Tensor]:
            leaves = [source.clone().to(target.device).requires_grad_() for source in sources]
            with full_precision(target.device_type):
                with target.autocast(amp_dtype):
                    placed = [ATTENTION_LAYOUTS[layout](leaf) for leaf in leaves]
                    seen = F.scaled_dot_product_attention(placed[0], placed[1], placed[2], is_causal=is_causal)
                seen.backward(seed.to(target.device, seen.dtype))
            return [seen.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

        ran = by_kernel(case, target, rng, run)
        index = choices.unsqueeze(-1).expand(-1, -1, -1, _HEAD)
        expected = value.gather(2, index).to(amp_dtype)
        reached = rounded(torch.zeros_like(value).scatter_add(2, index, seed).double(), FORMATS[amp_dtype]).float()
        for kernel, (seen, of_queries, of_keys, of_values) in ran.items():
            what = f"{kernel}: {queries} queries, {keys} keys"
            case.identical(f"{what}: each result is one value", seen, expected)
            case.identical(f"{what}: gradient of the values", of_values + 0.0, reached)
            for name, gradient in (("queries", of_queries), ("keys", of_keys)):
                case.equal(f"{what}: largest gradient of the {name}", float(gradient.abs().max()), 0.0)


# --- batches ----------------------------------------------------------------------------------------------------


@contract("AMP-NUMERICS-050")
def test_rows_alone_and_in_a_batch(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    weight, kernel = torch.randn(96, 512, generator=rng), torch.randn(16, 8, 3, 3, generator=rng)
    sources = {
        "linear": (torch.randn(64, 512, generator=rng), lambda rows: F.linear(rows, weight.to(rows))),
        "conv2d": (torch.randn(64, 8, 9, 9, generator=rng), lambda images: F.conv2d(images, kernel.to(images))),
        "attention": (
            torch.randn(64, 4, 17, 32, generator=rng),
            lambda heads: F.scaled_dot_product_attention(heads, heads, heads),
        ),
    }
    for name, (source, call) in sources.items():
        rows = source.to(target.device)
        with full_precision(target.device_type), target.autocast(amp_dtype):
            whole = call(rows)
            for size in (1, 8):
                parts = torch.cat([call(part) for part in rows.split(size)])
                same = (parts == whole).flatten(1).all(1)
                case.note(f"{name}: rows with the same bits in batches of {size} and of 64", int(same.sum()), "of 64")
