"""Error bounds for softmax and for layer, group, batch, instance and RMS norm, forward and backward.

Kinds of data beyond those of `bounds_reduction`: `large` logits (near 1000, where exponentials overflow without a
shift), `apart` logits (one of 128, far above the rest: logarithms of -128 are kept where probabilities vanish), `flat`
logits (a thousand like ones: a sum of their exponentials that is kept in 16 bits stands still), `equal` logits (as many
as a language has words: the sum of their exponentials is their number, which fp32 has and no 16-bit type).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ...oracles.numbers.formats import Format
from ...oracles.numbers.running_error import Rounded
from .bounds_reduction import DATA, plain
from .op_error import Op, Store, either, kept, loosened, total

EPS = 1e-5
CHANNELS, GROUPS, SIDE = 6, 2, 7


# --- softmax


def _logits(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    if kind == "flat":
        return (plain(form, rng, 2, 1025) / 4,)
    if kind == "equal":
        return (torch.full((2, 50_001), 0.5, dtype=torch.float64),)
    x = 3 * plain(form, rng, 7, 133)
    if kind == "large":
        return (x + 1000,)
    if kind == "apart":
        x[:, 5] = 128.0
    return (x,)


def _shifted(x: Rounded) -> Rounded:
    return x - Rounded.exact(x.value.detach().amax(-1, keepdim=True))


def _softmax(store: Store, x: Rounded) -> Rounded:
    powers = _shifted(x).exp()
    return powers / kept(powers, -1)


def _softmax_of_columns(store: Store, x: Rounded) -> Rounded:
    """The CPU's kernel writes the exponentials down in the result, in its type (vec_softmax, SoftMaxKernel.cpp)."""
    powers = store(_shifted(x).exp())
    return powers / store(kept(powers, -1))


def _softmax_of_columns_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    p = store(_softmax_of_columns(store, x))
    return (either(p * (seed - store(kept(seed * p, -1))), p * seed - p * kept(p * seed, -1)),)


def _softmax_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    """p (g - sum(gp)), from the p that the forward stored."""
    p = store(_softmax(store, x))
    return (either(p * (seed - kept(seed * p, -1)), p * seed - p * kept(p * seed, -1)),)


def _log_softmax(store: Store, x: Rounded) -> Rounded:
    """x - max - log(sum), or x - (max + log(sum)), which rounds numbers of the size of the logits.

    The CPU's kernel keeps the sum of a row and its logarithm in the type of the tensor (vec_log_softmax_lastdim,
    aten/src/ATen/native/cpu/SoftMaxKernel.cpp).
    """
    shifted = _shifted(x)
    straight = shifted - store(store(kept(shifted.exp(), -1)).log())
    return loosened(straight, x.value.abs().amax(-1, keepdim=True), 1)


def _log_softmax_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    return (seed - store(_log_softmax(store, x)).exp() * store(kept(seed, -1)),)


# --- normalization of (rows, elements), the affine part of shape (1, elements)


def _statistics(x: Rounded, dims: tuple[int, ...], eps: float = EPS) -> tuple[Rounded, Rounded]:
    """Return x less its mean and the reciprocal deviation: in two passes or by updates, never as E[x^2] - E[x]^2.

    T. F. Chan, G. H. Golub, R. J. LeVeque, Algorithms for computing the sample variance (Amer. Statist. 37, 1983):
    two passes and updates lose n kappa u of a variance, one pass n kappa^2 u, kappa being sqrt(1 + mean^2 / variance).
    """
    count = float(torch.Size(x.value.shape[dim] for dim in dims).numel())
    centred = x - kept(x, *dims) / count
    variance = kept(centred * centred, *dims) / count
    return centred, Rounded.constant(1.0) / (variance + eps).sqrt()


def _normal_gradient(seed: Rounded, hat: Rounded, scale: Rounded, dims: tuple[int, ...]) -> Rounded:
    """scale (g - mean(g) - hat mean(g hat)), g being the incoming gradient times the weight.

    Kernels take hat apart into x, mean and deviation; what is lost then is at most that of hat written out once more.
    """
    count = float(torch.Size(seed.value.shape[dim] for dim in dims).numel())
    return scale * (seed - kept(seed, *dims) / count - hat * (kept(seed * hat, *dims) / count))


def _layer_norm(store: Store, x: Rounded, weight: Rounded, bias: Rounded) -> Rounded:
    centred, scale = _statistics(x, (-1,))
    return centred * scale * weight + bias


def _layer_norm_gradient(
    store: Store, seed: Rounded, x: Rounded, weight: Rounded, bias: Rounded
) -> tuple[Rounded, Rounded, Rounded]:
    centred, scale = _statistics(x, (-1,))
    hat = centred * scale
    return _normal_gradient(seed * weight, hat, scale, (-1,)), total(seed * hat, 0), total(seed, 0)


def _rows(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    return DATA[kind](form, rng, 9, 65), 1 + plain(form, rng, 65) / 4, plain(form, rng, 65)


def _rms_norm(store: Store, x: Rounded, weight: Rounded) -> Rounded:
    scale = Rounded.constant(1.0) / (kept(x * x, -1) / float(x.value.shape[-1]) + EPS).sqrt()
    return x * scale * weight


def _rms_norm_gradient(store: Store, seed: Rounded, x: Rounded, weight: Rounded) -> tuple[Rounded, Rounded]:
    count = float(x.value.shape[-1])
    scale = Rounded.constant(1.0) / (kept(x * x, -1) / count + EPS).sqrt()
    hat, through = x * scale, seed * weight
    return scale * (through - hat * (kept(through * hat, -1) / count)), total(seed * hat, 0)


# --- normalization of images (samples, channels, height, width), and of what has other dimensions after the channels


def _image(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    return images(kind, form, rng, 3, CHANNELS, SIDE, SIDE)


def images(kind: str, form: Format, rng: torch.Generator, *shape: int) -> tuple[Tensor, ...]:
    """Draw an image of a shape (samples, channels, ...), a weight and a bias."""
    return DATA[kind](form, rng, *shape), 1 + plain(form, rng, shape[1]) / 4, plain(form, rng, shape[1])


def _last(image: Tensor) -> Tensor:
    return image.contiguous(memory_format=torch.channels_last)


def _channel(row: Rounded, x: Rounded) -> Rounded:
    """A number of each channel, to be broadcast over an image."""
    return row.view(lambda tensor: tensor.view(1, -1, *_ones(x)))


def _ones(x: Rounded) -> list[int]:
    return [1] * (x.value.dim() - 2)


def _space(x: Rounded) -> tuple[int, ...]:
    return tuple(range(2, x.value.dim()))


def _batch(x: Rounded) -> tuple[int, ...]:
    return 0, *_space(x)


def _grouped(x: Rounded) -> Rounded:
    return x.view(lambda tensor: tensor.reshape(len(tensor), GROUPS, -1, *tensor.shape[2:]))


def _like(grouped: Rounded, x: Rounded) -> Rounded:
    return grouped.view(lambda tensor: tensor.reshape(x.value.shape))


def _group_norm(store: Store, x: Rounded, weight: Rounded, bias: Rounded) -> Rounded:
    """(x - mean) rstd w + b, or x (rstd w) + (b - mean rstd w), whose terms cancel where the mean is large."""
    grouped = _grouped(x)
    centred, scale = _statistics(grouped, _space(grouped))
    straight = _like(centred * scale, x) * _channel(weight, x) + _channel(bias, x)
    apart = _sizes(x, _group_mean(grouped, x).value, _per_channel(scale, x).value, weight)
    return loosened(straight, apart + _channel(bias, x).value.abs())


def _sizes(x: Rounded, mean: Tensor, scale: Tensor, weight: Rounded) -> Tensor:
    """(|x| + |mean|) rstd |w|."""
    return (x.value.abs() + mean.abs()) * scale * _channel(weight, x).value.abs()


def _group_mean(grouped: Rounded, x: Rounded) -> Rounded:
    dims = _space(grouped)
    return _per_channel(kept(grouped, *dims) / float(grouped.value[0, 0].numel()), x)


def _per_channel(of_group: Rounded, x: Rounded) -> Rounded:
    """(samples, groups, 1, ...) as (samples, channels, 1, ...)."""
    samples, channels = x.value.shape[:2]
    return of_group.view(
        lambda tensor: tensor.reshape(samples, GROUPS, *_ones(x)).repeat_interleave(channels // GROUPS, 1)
    )


def _group_norm_gradient(
    store: Store, seed: Rounded, x: Rounded, weight: Rounded, bias: Rounded
) -> tuple[Rounded, Rounded, Rounded]:
    """Return the gradient of a normalization; the kernels sum gx and g apart, and centre after the sums.

    dx = g rstd w + c2 x + c3, c2 = (db mean - ds) rstd^3 / n, c3 = -c2 mean - db rstd / n, ds = sum(gwx), db = sum(gw)
    (aten/src/ATen/native/cpu/group_norm_kernel.cpp): sums of n terms of the size of x, not of x - mean, and c2 x.
    """
    grouped = _grouped(x)
    dims = _space(grouped)
    centred, scale = _statistics(grouped, dims)
    count = grouped.value[0, 0].numel()
    hat, through = centred * scale, _grouped(seed * _channel(weight, x))
    straight = _normal_gradient(through, hat, scale, dims)
    mean = grouped.value.mean(dims, keepdim=True).abs()
    sums = (through.value.abs() * (grouped.value.abs() + mean)).sum(dims, keepdim=True)
    c2 = scale.value**3 / count * sums
    of_x = loosened(straight, c2 * (count * centred.value.abs() + grouped.value.abs() + mean))
    size = seed.value.abs() * (x.value.abs() + _group_mean(grouped, x).value.abs()) * _per_channel(scale, x).value
    of_weight = loosened(total(seed * _like(hat, x), *_batch(x)), x.value[0, 0].numel() * size.sum(_batch(x)))
    return _like(of_x, x), of_weight, total(seed, *_batch(x))


Over = Callable[[Rounded], tuple[int, ...]]


def _by_channel(over: Over, store: Store, x: Rounded, weight: Rounded, bias: Rounded) -> Rounded:
    """(x - mean) rstd w + b, or x (rstd w) + (b - mean rstd w), as the CPU's kernels have it."""
    dims = over(x)
    centred, scale = _statistics(x, dims)
    straight = centred * scale * _channel(weight, x) + _channel(bias, x)
    apart = _sizes(x, x.value.mean(dims, keepdim=True), scale.value, weight)
    return loosened(straight, apart + _channel(bias, x).value.abs())


def _by_channel_gradient(
    over: Over, store: Store, seed: Rounded, x: Rounded, weight: Rounded, bias: Rounded
) -> tuple[Rounded, Rounded, Rounded]:
    dims = over(x)
    centred, scale = _statistics(x, dims)
    hat = centred * scale
    of_x = _normal_gradient(seed * _channel(weight, x), hat, scale, dims)
    return of_x, total(seed * hat, *_batch(x)), total(seed, *_batch(x))


# Statistics of each channel over all samples, and over each sample by itself.
_batch_norm, _instance_norm = (functools.partial(_by_channel, over) for over in (_batch, _space))
_batch_norm_gradient, _instance_norm_gradient = (
    functools.partial(_by_channel_gradient, over) for over in (_batch, _space)
)


def running_statistics(image: Tensor, mean: Tensor, variance: Tensor, momentum: float = 0.1) -> tuple[Rounded, Rounded]:
    """Return what a training batch norm makes of its running mean and variance (torch.nn.BatchNorm2d, momentum).

    Sums that were kept of an fp32 image have the error of n terms in any order; the variance is the unbiased one.
    """
    x = Rounded.exact(image)
    dims, count = _batch(x), float(image[:, 0].numel())
    centred, _ = _statistics(x, dims)
    kept_mean = total(x, *dims) / count
    kept_variance = total(centred * centred, *dims) / (count - 1)
    old, new = Rounded.constant(1 - momentum), Rounded.constant(momentum)
    return (
        Rounded.exact(mean) * old + kept_mean * new,
        Rounded.exact(variance) * old + kept_variance * new,
    )


def _running_image(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    return running_images(kind, form, rng, 3, CHANNELS, SIDE, SIDE)


def running_images(kind: str, form: Format, rng: torch.Generator, *shape: int) -> tuple[Tensor, ...]:
    """Draw what `images` does, a running mean and a running variance."""
    drawn = images(kind, form, rng, *shape)
    return *drawn, plain(form, rng, shape[1]), 0.5 + torch.rand(shape[1], generator=rng).double()


def _running_norm(
    store: Store, x: Rounded, weight: Rounded, bias: Rounded, mean: Rounded, variance: Rounded
) -> Rounded:
    scale = Rounded.constant(1.0) / (_channel(variance, x) + EPS).sqrt()
    straight = (x - _channel(mean, x)) * scale * _channel(weight, x) + _channel(bias, x)
    apart = _sizes(x, _channel(mean, x).value, scale.value, weight)
    return loosened(straight, apart + _channel(bias, x).value.abs())


def _running_norm_gradient(
    store: Store, seed: Rounded, x: Rounded, weight: Rounded, bias: Rounded, mean: Rounded, variance: Rounded
) -> tuple[Rounded | None, ...]:
    scale = Rounded.constant(1.0) / (_channel(variance, x) + EPS).sqrt()
    terms = seed * (x - _channel(mean, x)) * scale
    return seed * _channel(weight, x) * scale, total(terms, *_batch(x)), total(seed, *_batch(x)), None, None


def _evaluate(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return F.batch_norm(x, mean.detach(), variance.detach(), weight, bias, training=False)


_HEAVY = ("mean_heavy", "same_sign", "plain", "wide", "off_grid")

NORMALIZATIONS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            "softmax",
            lambda x: x.softmax(-1),
            _logits,
            _softmax,
            _softmax_gradient,
            ("equal", "apart", "flat", "large", "plain"),
            "softmax",
        ),
        Op(
            "log_softmax",
            lambda x: x.log_softmax(-1),
            _logits,
            _log_softmax,
            _log_softmax_gradient,
            ("equal", "apart", "flat", "large", "plain"),
            "log_softmax",
        ),
        # Another kernel: the classes are not what lies side by side, as in images.
        Op(
            "softmax of columns",
            lambda x: x.t().contiguous().softmax(0).t(),
            _logits,
            _softmax_of_columns,
            _softmax_of_columns_gradient,
            ("equal", "flat", "large", "plain"),
            "softmax",
        ),
        Op(
            "log_softmax of columns",
            lambda x: x.t().contiguous().log_softmax(0).t(),
            _logits,
            _log_softmax,
            _log_softmax_gradient,
            ("equal", "apart", "flat", "large", "plain"),
            "log_softmax",
        ),
        Op(
            "layer_norm",
            lambda x, w, b: F.layer_norm(x, (65,), w, b, EPS),
            _rows,
            _layer_norm,
            _layer_norm_gradient,
            _HEAVY,
            "layer_norm",
            (1, 2),
        ),
        Op(
            "group_norm",
            lambda x, w, b: F.group_norm(x, GROUPS, w, b, EPS),
            _image,
            _group_norm,
            _group_norm_gradient,
            _HEAVY,
            "group_norm",
            (1, 2),
        ),
        # Another kernel: the channels lie side by side.
        Op(
            "group_norm of channels last",
            lambda x, w, b: F.group_norm(_last(x), GROUPS, w, b, EPS),
            _image,
            _group_norm,
            _group_norm_gradient,
            ("same_sign", "plain", "wide", "off_grid"),
            "group_norm",
            (1, 2),
        ),
        # A case of its own, as the CPU's kernel for channels last takes the variance in one pass.
        Op(
            "group_norm of channels last and a large mean",
            lambda x, w, b: F.group_norm(_last(x), GROUPS, w, b, EPS),
            _image,
            _group_norm,
            _group_norm_gradient,
            ("mean_heavy",),
            "group_norm",
            (1, 2),
        ),
        Op(
            "batch_norm",
            lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
            _image,
            _batch_norm,
            _batch_norm_gradient,
            ("plain", "wide", "off_grid"),
            "batch_norm",
            (1, 2),
        ),
        Op(
            "batch_norm of running statistics",
            _evaluate,
            _running_image,
            _running_norm,
            _running_norm_gradient,
            ("plain", "wide"),
            "batch_norm",
            (1, 2, 3, 4),
        ),
        Op(
            "instance_norm",
            lambda x, w, b: F.instance_norm(x, None, None, w, b),
            _image,
            _instance_norm,
            _instance_norm_gradient,
            ("plain", "wide", "off_grid"),
            "instance_norm",
            (1, 2),
        ),
        Op(
            "rms_norm",
            lambda x, w: F.rms_norm(x, (65,), w, EPS),
            lambda kind, form, rng: _rows(kind, form, rng)[:2],
            _rms_norm,
            _rms_norm_gradient,
            ("plain", "wide", "off_grid"),
            "rms_norm",
            (1,),
        ),
    )
}
