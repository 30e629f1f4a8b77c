"""Error bounds for softmax and for layer, group, batch and RMS norm, forward and backward.

Kinds of data beyond those of `bounds_reduction`: `large` logits (near 1000, where exponentials overflow without a
shift), `apart` logits (one of 128, far above the rest: logarithms of -128 are kept where probabilities vanish), `flat`
logits (a thousand like ones: a sum of their exponentials that is kept in 16 bits stands still).
"""

from __future__ import annotations

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


# --- normalization of images (samples, channels, height, width)


def _image(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    image = DATA[kind](form, rng, 3, CHANNELS, SIDE, SIDE)
    return image, 1 + plain(form, rng, CHANNELS) / 4, plain(form, rng, CHANNELS)


def _last(image: Tensor) -> Tensor:
    return image.contiguous(memory_format=torch.channels_last)


def _channel(row: Rounded) -> Rounded:
    return row.view(lambda tensor: tensor.view(1, CHANNELS, 1, 1))


def _grouped(x: Rounded) -> Rounded:
    return x.view(lambda tensor: tensor.reshape(3, GROUPS, CHANNELS // GROUPS, SIDE, SIDE))


def _imaged(x: Rounded) -> Rounded:
    return x.view(lambda tensor: tensor.reshape(3, CHANNELS, SIDE, SIDE))


def _group_norm(store: Store, x: Rounded, weight: Rounded, bias: Rounded) -> Rounded:
    """(x - mean) rstd w + b, or x (rstd w) + (b - mean rstd w), whose terms cancel where the mean is large."""
    grouped = _grouped(x)
    centred, scale = _statistics(grouped, (2, 3, 4))
    straight = _imaged(centred * scale) * _channel(weight) + _channel(bias)
    apart = _sizes(x.value, _group_mean(grouped).value, _per_channel(scale).value, weight.value)
    return loosened(straight, apart + bias.value.abs().view(1, CHANNELS, 1, 1))


def _sizes(x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """(|x| + |mean|) rstd |w|."""
    return (x.abs() + mean.abs()) * scale * weight.abs().view(1, CHANNELS, 1, 1)


def _group_mean(grouped: Rounded) -> Rounded:
    return _per_channel(kept(grouped, 2, 3, 4) / float(CHANNELS // GROUPS * SIDE**2))


def _per_channel(of_group: Rounded) -> Rounded:
    """(samples, groups, 1, 1, 1) as (samples, channels, 1, 1)."""
    return of_group.view(lambda tensor: tensor.reshape(3, GROUPS, 1, 1).repeat_interleave(CHANNELS // GROUPS, 1))


def _group_norm_gradient(
    store: Store, seed: Rounded, x: Rounded, weight: Rounded, bias: Rounded
) -> tuple[Rounded, Rounded, Rounded]:
    """Return the gradient of a normalization; the kernels sum gx and g apart, and centre after the sums.

    dx = g rstd w + c2 x + c3, c2 = (db mean - ds) rstd^3 / n, c3 = -c2 mean - db rstd / n, ds = sum(gwx), db = sum(gw)
    (aten/src/ATen/native/cpu/group_norm_kernel.cpp): sums of n terms of the size of x, not of x - mean, and c2 x.
    """
    grouped = _grouped(x)
    centred, scale = _statistics(grouped, (2, 3, 4))
    count = CHANNELS // GROUPS * SIDE**2
    hat, through = centred * scale, _grouped(seed * _channel(weight))
    straight = _normal_gradient(through, hat, scale, (2, 3, 4))
    mean = grouped.value.mean((2, 3, 4), keepdim=True).abs()
    sums = (through.value.abs() * (grouped.value.abs() + mean)).sum((2, 3, 4), keepdim=True)
    c2 = scale.value**3 / count * sums
    of_x = loosened(straight, c2 * (count * centred.value.abs() + grouped.value.abs() + mean))
    by_channel = (seed.value.abs() * (x.value.abs() + _group_mean(grouped).value.abs())).sum((2, 3), keepdim=True)
    of_weight = loosened(
        total(seed * _imaged(hat), *_BATCH), SIDE**2 * (by_channel * _per_channel(scale).value).sum(_BATCH)
    )
    return _imaged(of_x), of_weight, total(seed, *_BATCH)


_BATCH = (0, 2, 3)


def _batch_norm(store: Store, x: Rounded, weight: Rounded, bias: Rounded) -> Rounded:
    """(x - mean) rstd w + b, or x (rstd w) + (b - mean rstd w), as the CPU's kernels have it."""
    centred, scale = _statistics(x, _BATCH)
    straight = centred * scale * _channel(weight) + _channel(bias)
    apart = _sizes(x.value, x.value.mean(_BATCH, keepdim=True), scale.value, weight.value)
    return loosened(straight, apart + bias.value.abs().view(1, CHANNELS, 1, 1))


def _batch_norm_gradient(
    store: Store, seed: Rounded, x: Rounded, weight: Rounded, bias: Rounded
) -> tuple[Rounded, Rounded, Rounded]:
    centred, scale = _statistics(x, _BATCH)
    hat = centred * scale
    through = seed * _channel(weight)
    return _normal_gradient(through, hat, scale, _BATCH), total(seed * hat, *_BATCH), total(seed, *_BATCH)


def running_statistics(image: Tensor, mean: Tensor, variance: Tensor, momentum: float = 0.1) -> tuple[Rounded, Rounded]:
    """Return what a training batch norm makes of its running mean and variance (torch.nn.BatchNorm2d, momentum).

    Sums that were kept of an fp32 image have the error of n terms in any order; the variance is the unbiased one.
    """
    x, count = Rounded.exact(image), float(image.numel() // CHANNELS)
    centred, _ = _statistics(x, _BATCH)
    kept_mean = total(x, *_BATCH) / count
    kept_variance = total(centred * centred, *_BATCH) / (count - 1)
    old, new = Rounded.constant(1 - momentum), Rounded.constant(momentum)
    return (
        Rounded.exact(mean) * old + kept_mean * new,
        Rounded.exact(variance) * old + kept_variance * new,
    )


def _running_image(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    return *_image(kind, form, rng), plain(form, rng, CHANNELS), 0.5 + torch.rand(CHANNELS, generator=rng).double()


def _running_norm(
    store: Store, x: Rounded, weight: Rounded, bias: Rounded, mean: Rounded, variance: Rounded
) -> Rounded:
    scale = Rounded.constant(1.0) / (_channel(variance) + EPS).sqrt()
    straight = (x - _channel(mean)) * scale * _channel(weight) + _channel(bias)
    apart = _sizes(x.value, _channel(mean).value, scale.value, weight.value)
    return loosened(straight, apart + bias.value.abs().view(1, CHANNELS, 1, 1))


def _running_norm_gradient(
    store: Store, seed: Rounded, x: Rounded, weight: Rounded, bias: Rounded, mean: Rounded, variance: Rounded
) -> tuple[Rounded | None, ...]:
    scale = Rounded.constant(1.0) / (_channel(variance) + EPS).sqrt()
    terms = seed * (x - _channel(mean)) * scale
    return seed * _channel(weight) * scale, total(terms, *_BATCH), total(seed, *_BATCH), None, None


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
            ("flat", "apart", "large", "plain"),
            "softmax",
        ),
        Op(
            "log_softmax",
            lambda x: x.log_softmax(-1),
            _logits,
            _log_softmax,
            _log_softmax_gradient,
            ("flat", "apart", "large", "plain"),
            "log_softmax",
        ),
        # Another kernel: the classes are not what lies side by side, as in images.
        Op(
            "softmax of columns",
            lambda x: x.t().contiguous().softmax(0).t(),
            _logits,
            _softmax_of_columns,
            _softmax_of_columns_gradient,
            ("flat", "large", "plain"),
            "softmax",
        ),
        Op(
            "log_softmax of columns",
            lambda x: x.t().contiguous().log_softmax(0).t(),
            _logits,
            _log_softmax,
            _log_softmax_gradient,
            ("flat", "apart", "large", "plain"),
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
