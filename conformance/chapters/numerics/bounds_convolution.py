"""Error bounds for convolutions (normwise) and attention (elementwise), forward and backward.

A convolution has no bound by element: libraries go through Winograd's or Fourier's transform, which mix elements of
different size. Its norm is taken for each output channel, each sample, each filter by itself, so that one wrong one of
many shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from ...oracles.numbers import exact
from ...oracles.numbers.error_bounds import accumulation
from ...oracles.numbers.formats import Format, rounded
from ...oracles.numbers.running_error import CONFIDENCE, Rounded
from .bounds_matmul import share_ratio
from .op_error import ORDER, ROUNDING, Measured, Region, error_ratio, gain_ratio, half_spacing, total


@dataclass(frozen=True)
class Convolution:
    """A convolution of `image` with `weight` (shapes) and a bias; `arranged` changes strides and no value."""

    name: str
    call: Callable[..., Tensor]
    image: tuple[int, ...]
    weight: tuple[int, ...]
    options: dict[str, int] = field(default_factory=dict)
    transposed: bool = False
    arranged: Callable[[Tensor], Tensor] = lambda image: image

    @property
    def taps(self) -> int:
        """How many partial results a kernel that goes through columns adds up in the output's type."""
        return math.prod(self.weight[2:])

    @property
    def channels(self) -> int:
        """Output channels, the length of the bias."""
        return self.weight[1] * self.options.get("groups", 1) if self.transposed else self.weight[0]

    @property
    def winograd(self) -> bool:
        """Whether a library may go through Winograd's transform: taps of 3 or 5 a side, side by side.

        cuDNN's takes both (CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED), MIOpen's strides as well.
        """
        return set(self.weight[2:]) in ({3}, {5}) and "dilation" not in self.options

    def expected(self, image: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        reference = exact.transposed_convolution if self.transposed else exact.convolution
        return reference(image, weight, bias, **self.options)


def _channels_last(image: Tensor) -> Tensor:
    return image.contiguous(memory_format=torch.channels_last)


def _every_second(image: Tensor) -> Tensor:
    return torch.stack([image, image], -1)[..., 0]


CONVOLUTIONS: dict[str, Convolution] = {
    one.name: one
    for one in (
        Convolution("channels last", F.conv2d, (2, 16, 9, 11), (8, 16, 3, 3), {"padding": 1}, arranged=_channels_last),
        Convolution("not contiguous", F.conv2d, (2, 9, 9, 11), (8, 9, 5, 5), {"padding": 2}, arranged=_every_second),
        Convolution("one sample", F.conv2d, (1, 16, 16, 16), (16, 16, 3, 3), {"padding": 1}),
        Convolution("many channels", F.conv2d, (2, 257, 5, 5), (12, 257, 3, 3), {}),
        Convolution("strided", F.conv2d, (3, 6, 17, 15), (8, 6, 5, 3), {"stride": 2, "padding": 2}),
        Convolution("dilated", F.conv2d, (3, 6, 15, 13), (8, 6, 3, 3), {"dilation": 3, "padding": 3}),
        Convolution("grouped", F.conv2d, (3, 12, 9, 11), (8, 3, 3, 3), {"groups": 4, "padding": 1}),
        Convolution("depthwise", F.conv2d, (3, 16, 9, 11), (16, 1, 3, 3), {"groups": 16, "padding": 1}),
        Convolution("pointwise", F.conv2d, (3, 129, 5, 7), (17, 129, 1, 1), arranged=_channels_last),
        Convolution("one dimension", F.conv1d, (3, 33, 65), (16, 33, 5), {"padding": 2}),
        Convolution("three dimensions", F.conv3d, (2, 6, 5, 6, 7), (6, 6, 3, 2, 3), {"padding": 1}),
        Convolution("transposed", F.conv_transpose2d, (3, 9, 7, 9), (9, 8, 3, 3), {"stride": 2, "padding": 1}, True),
        Convolution("transposed grouped", F.conv_transpose2d, (2, 8, 7, 9), (8, 4, 4, 4), {"groups": 2}, True),
    )
}


def _by_slice(
    seen: Tensor,
    value: Tensor,
    power: Tensor,
    form: Format,
    dim: int,
    additions: int,
    winograd: bool,
    before: Tensor | None,
) -> float:
    """Return the worst norm of an error over its bound, of the slices along `dim`.

    Half a spacing of every element at most; two roundings of each of the `additions` partial results that a kernel may
    add up in 16 bits, and one of what a bias is added to (half a spacing of which is `before`), which are independent,
    so that the norm of N of them exceeds its root mean square by a factor of 1 + `CONFIDENCE` / sqrt(N) at most; and
    8 u for Winograd's transform (`normwise_window`). All but the first are relative to what is added up: the result or,
    where it cancels, the root of `power`, the sum of products squared.
    """
    first = torch.zeros_like(value) if before is None else before
    off, exactly, squares, first = (
        tensor.transpose(0, dim).flatten(1) for tensor in (seen.detach().cpu().double() - value, value, power, first)
    )
    size = torch.maximum(exactly.abs(), squares.sqrt())
    deviation = (2 * additions * _norm(half_spacing(size, form)) ** 2 + _norm(first) ** 2).sqrt() * ROUNDING
    transform = (8 * winograd + 2.0**-6) * form.unit_roundoff * _norm(size)
    scatter = deviation * (1 + CONFIDENCE / exactly.shape[1] ** 0.5)
    ratio = _norm(off) / (_norm(half_spacing(exactly.abs(), form)) + scatter + transform)
    return float(ratio.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _norm(rows: Tensor) -> Tensor:
    return rows.square().sum(1).sqrt()


def convolution_operands(convolution: Convolution, kind: str, rng: torch.Generator) -> list[Tensor]:
    """Return image, weight, bias in fp32; `wide`: samples and filters scaled by 2^-3 to 2^3."""
    image, weight = (torch.randn(shape, generator=rng) for shape in (convolution.image, convolution.weight))
    bias = torch.randn(convolution.channels, generator=rng)
    if kind == "same_sign":
        image, weight = image.abs() + 0.25, weight.abs() + 0.25
    elif kind == "wide":
        image = _scaled(image, rng)
        weight = _scaled(weight, rng)
    return [image, weight, bias]


def _scaled(tensor: Tensor, rng: torch.Generator) -> Tensor:
    return torch.ldexp(tensor, torch.randint(-3, 4, (len(tensor), *[1] * (tensor.dim() - 1)), generator=rng))


def measure_convolution(
    convolution: Convolution,
    kind: str,
    form: Format,
    rng: torch.Generator,
    device: torch.device,
    region: Region,
    *,
    rounds_sum: bool = False,
) -> list[Measured]:
    """Run a convolution of fp32 operands in `region`, where it is promised to compute in `form`, both ways.

    `rounds_sum`: whether the sum of products may be rounded before the bias is added.
    """
    full = convolution_operands(convolution, kind, rng)
    leaves = [operand.clone().to(device).requires_grad_() for operand in full]
    with region():
        seen = convolution.call(convolution.arranged(leaves[0]), *leaves[1:], **convolution.options)
    seed = rounded(torch.randn(seen.shape, generator=rng).double(), form)
    seen.backward(seed.to(seen.dtype).to(device))
    narrow = [rounded(operand.double(), form).requires_grad_() for operand in full]
    value = convolution.expected(*narrow)
    value.backward(seed)
    squares = [operand.detach().square().requires_grad_() for operand in narrow]
    power = convolution.expected(*squares)
    power.backward(seed.square())
    winograd = convolution.winograd and device.type != "cpu"
    before = _before_the_bias(value.detach(), narrow[2].detach(), form) if rounds_sum else None
    what = f"convolution, {convolution.name}, {kind.replace('_', ' ')}"
    samples = convolution.image[0]
    slices = 1 if convolution.transposed else 0
    found = []
    for place, tensor, exactly, sizes, dim, additions in (
        (
            None,
            seen,
            value.detach(),
            power.detach(),
            0 if convolution.transposed or kind == "wide" else 1,
            convolution.taps * convolution.transposed,
        ),
        (0, leaves[0].grad, narrow[0].grad, squares[0].grad, 0, convolution.taps),
        (1, leaves[1].grad, narrow[1].grad, squares[1].grad, slices if kind != "wide" else 0, samples),
    ):
        assert tensor is not None
        assert exactly is not None
        assert sizes is not None
        first = before if place is None else None
        error = _by_slice(tensor, exactly, sizes, form, dim, additions, winograd, first)
        noise = (0.6 * additions**0.5 + 8 * winograd) * form.unit_roundoff
        reference = Rounded(exactly, torch.zeros_like(exactly))
        gain = gain_ratio(tensor, reference, form, noise, first) if kind == "plain" else 0.0
        share = (
            _shares(convolution, full, narrow, tensor, reference, form, noise, first)
            if place is None and kind == "plain"
            else None
        )
        found.append(
            Measured(what if place is None else f"{what}: gradient {place}", tensor.dtype, error, gain, place, share)
        )
    of_bias = _bias_gradient(seed, form, in_16_bits=convolution.options.get("dilation", 1) > 1)
    found.append(
        Measured(f"{what}: gradient 2", leaves[2].grad.dtype, error_ratio(leaves[2].grad, of_bias, form), operand=2)
    )
    return found


def _before_the_bias(value: Tensor, bias: Tensor, form: Format) -> Tensor:
    """Return half a spacing of a result without its bias, which torch adds to what cuDNN has rounded.

    `output.add_(reshape_bias(input.dim(), bias))` of ConvBackend::Cudnn in aten/src/ATen/native/Convolution.cpp. All
    elements of a channel are multiples of one power of two then, so that this addition rounds them alike.
    """
    return half_spacing((value - bias.view(-1, *[1] * (value.dim() - 2))).abs(), form)


def _bias_gradient(seed: Tensor, form: Format, *, in_16_bits: bool) -> Rounded:
    """Return the sum of the incoming gradient by channel.

    `in_16_bits`: dilated convolutions add the samples' sums up in the type of the tensor, with a rounding of the sum
    and one of the addition each (aten/src/ATen/native/NaiveDilatedConvolution.cpp).
    """
    reference = total(Rounded.exact(seed.transpose(0, 1).flatten(1)), 1)
    if not in_16_bits:
        return reference
    partial = seed.flatten(2).sum(2).abs().sum(0)
    return Rounded(reference.value, reference.error + 2 * len(seed) * half_spacing(partial, form) / ORDER)


def _shares(
    convolution: Convolution,
    full: list[Tensor],
    narrow: list[Tensor],
    seen: Tensor,
    reference: Rounded,
    form: Format,
    noise: float,
    before: Tensor | None,
) -> float | None:
    """Return the worst share of the image's and the weight's rounding."""
    image, weight, bias = (tensor.detach() for tensor in narrow)
    found = [
        share_ratio(seen, convolution.expected(*others).detach(), reference, form, noise, before)
        for others in ((full[0].double(), weight, bias), (image, full[1].double(), bias))
    ]
    return max((share for share in found if share is not None), default=None)


def measure_one_rounding(
    convolution: Convolution, form: Format, rng: torch.Generator, device: torch.device, region: Region
) -> tuple[float, float]:
    """Return the norm of the error of a result over that of one rounding to `form`, and so of a sum in two halves.

    Roundings of N elements are independent and uniform within half a spacing: their norm is its root mean square, and
    exceeds that by a factor of 1 + `CONFIDENCE` / sqrt(N) at most. The halves are the first and the other taps, each
    rounded before they are added.
    """
    full = convolution_operands(convolution, "plain", rng)
    with region():
        seen = convolution.call(*(operand.to(device) for operand in full), **convolution.options)
    image, weight, bias = (rounded(operand.double(), form) for operand in full)
    value = convolution.expected(image, weight, bias)
    power = convolution.expected(image.square(), weight.square(), bias.square())
    spread = 1 + CONFIDENCE / value.numel() ** 0.5
    sums = accumulation(math.prod(convolution.weight[1:]) + 1) * power.sqrt().norm()
    bound = half_spacing(value.abs(), form).norm() * ROUNDING * spread + sums
    first = torch.zeros_like(weight)
    first[..., 0] = weight[..., 0]
    halves = (
        convolution.expected(image, first, bias),
        convolution.expected(image, weight - first, torch.zeros_like(bias)),
    )
    lowered = rounded(rounded(halves[0], form) + rounded(halves[1], form), form)
    return float((seen.cpu().double() - value).norm() / bound), float((lowered - value).norm() / bound)


# --- attention


@dataclass(frozen=True)
class Attention:
    """Shapes (batch, heads, queries, keys, size of a head) of attention, and what is masked."""

    name: str
    shape: tuple[int, int, int, int, int]
    mask: str = "none"


ATTENTIONS: dict[str, Attention] = {
    one.name: one
    for one in (
        Attention("long", (1, 2, 7, 2048, 16)),
        Attention("one query", (1, 3, 1, 129, 16)),
        Attention("causal", (2, 2, 65, 65, 16), "causal"),
        Attention("boolean mask", (1, 2, 17, 45, 16), "boolean"),
        Attention("additive mask", (1, 2, 17, 45, 16), "additive"),
    )
}


def _mask(attention: Attention, rng: torch.Generator) -> Tensor | None:
    """Return a boolean mask (true: takes part; the first key always does), or None."""
    _, _, queries, keys, _ = attention.shape
    if attention.mask == "causal":
        return torch.ones(queries, keys, dtype=torch.bool).tril()
    if attention.mask == "none":
        return None
    mask = torch.rand(queries, keys, generator=rng) < 0.7
    mask[:, 0] = True
    return mask


def measure_attention(
    attention: Attention,
    form: Format,
    rng: torch.Generator,
    device: torch.device,
    region: Region,
    *,
    flushes: bool = False,
) -> list[Measured]:
    """Run attention on numbers of `form` whose logits, up to 40, need more bits than 16-bit types have.

    Queries are integers up to 15, keys multiples of 2^-5 up to 2, the scale is 1/4 (its root 1/2): every logit is a
    number of fp32, whatever the order. A logit that is stored in 16 bits is off by up to 2^-3 in bf16, 2^-6 in
    fp16, and so is its probability, relatively; rounded probabilities and results are off by a few u. `flushes`: the
    device is known to take subnormal operands for zero.
    """
    batch, heads, queries, keys, size = attention.shape
    query = torch.randint(-15, 16, (batch, heads, queries, size), generator=rng).double()
    key = torch.randint(-64, 65, (batch, heads, keys, size), generator=rng).double() / 32
    value = rounded(torch.randn(batch, heads, keys, size, generator=rng).double(), form)
    mask = _mask(attention, rng)
    leaves = [part.float().to(device).requires_grad_() for part in (query, key, value)]
    added = mask
    if mask is not None and attention.mask == "additive":
        added = torch.zeros(mask.shape, dtype=form.dtype).masked_fill(~mask, float("-inf"))
    causal = attention.mask == "causal"
    with region():
        seen = F.scaled_dot_product_attention(
            leaves[0],
            leaves[1],
            leaves[2],
            attn_mask=None if added is None or causal else added.to(device),
            is_causal=causal,
        )
    seed = rounded(torch.randn(seen.shape, generator=rng).double(), form)
    seen.backward(seed.to(seen.dtype).to(device))
    found = attention_references(
        query, key, value, mask, seed, form, form.smallest_normal if flushes else form.smallest
    )
    what = f"attention, {attention.name}"
    names = (None, 0, 1, 2)
    return [
        Measured(
            what if place is None else f"{what}: gradient {place}",
            tensor.dtype,
            error_ratio(tensor, reference, form),
            operand=place,
        )
        for place, tensor, reference in zip(names, (seen, *(leaf.grad for leaf in leaves)), found, strict=True)
    ]


def attention_references(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor,
    form: Format,
    floor: float,
    *,
    scale: float | None = None,
    shift: float = 0.0,
) -> list[Rounded]:
    """Return result and gradients with what four 16-bit roundings on the way and the sums in fp32 may lose of each.

    P is rounded before it multiplies the values, dS before it multiplies keys and queries, the result before it goes
    into D = sum(dO O) (T. Dao, D. Fu, S. Ermon, A. Rudra, C. Re, FlashAttention, NeurIPS 2022, algorithm 4); kernels
    that normalise after the product round numbers in other proportions, hence 4 u in the place of 2.

    `shift` is added to every logit, which changes no probability but the size of what fp32 holds: logit, maximum,
    logarithm of the sum, and its product with log2 e, are rounded once each, to 2^-24 of their size.
    """
    unit, scale = 4 * form.unit_roundoff, query.shape[-1] ** -0.5 if scale is None else scale
    logits = exact.product(query, key.mT) * scale
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    p = exact.softmax(logits)
    # Exponentials and sums in fp32: softmax_bound's factor; logits themselves are exact.
    spread = (logits.amax(-1, keepdim=True) - logits).masked_fill(p == 0, 0.0)
    loss = (logits.shape[-1] + 2 * spread + 12 + 4 * abs(shift)) * 2.0**-24 + unit
    result, size = exact.product(p, value), exact.product(p * loss + 2 * floor, value.abs())
    result_error = size + accumulation(logits.shape[-1]) * exact.product(p, value.abs())
    dp, dp_size = exact.product_and_size(seed, value.mT)
    delta = (seed * result).sum(-1, keepdim=True)
    delta_error = (seed.abs() * (result_error + form.unit_roundoff * result.abs())).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    # What lies below the smallest number of the type is lost of either matrix.
    p_error = p * loss + 2 * floor
    ds_error = p_error * (dp.abs() + delta.abs()) + p * (unit * dp_size * 2.0**-6 + delta_error) + 2 * floor
    grow = 1 + accumulation(max(logits.shape[-2:]))
    return [
        Rounded(result, result_error / 2),
        Rounded(exact.product(ds, key) * scale, exact.product(ds_error * grow, key.abs()) * scale / 2),
        Rounded(exact.product(ds.mT, query) * scale, exact.product(ds_error.mT * grow, query.abs()) * scale / 2),
        Rounded(exact.product(p.mT, seed), exact.product(p_error.mT * grow, seed.abs()) / 2),
    ]
