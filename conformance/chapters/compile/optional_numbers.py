"""Ops that compilers take apart, each with an argument that is not the default, of 16-bit numbers at no kink."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS, COLUMNS = 8, 8


def operand(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """Return odd sixteenths between -4 and 4: the arguments of the ops are quarters, so that none is at a kink."""
    return ((2 * torch.randint(-32, 32, (ROWS, COLUMNS), generator=generator) + 1) / 16).to(device, dtype)


def _goal(x: Tensor) -> Tensor:
    """Return eighths, from which the numbers differ by odd sixteenths."""
    return ((torch.arange(x.numel(), device=x.device) * 5 % 31 - 15) / 8).reshape(x.shape).to(x.dtype)


def _labels(x: Tensor) -> Tensor:
    return torch.arange(ROWS, device=x.device) * 3 % COLUMNS


def _weights(x: Tensor) -> Tensor:
    return ((torch.arange(COLUMNS, device=x.device) % 4 + 1) / 4).to(x.dtype)


def _shares(x: Tensor) -> Tensor:
    return ((torch.arange(x.numel(), device=x.device) % 7 + 1) / 8).reshape(x.shape).to(x.dtype)


def _signs(x: Tensor) -> Tensor:
    return (1 - 2 * (torch.arange(x.numel(), device=x.device) % 2)).reshape(x.shape).to(x.dtype)


def _pictures(x: Tensor) -> Tensor:
    return x[None, None]


def _share(x: Tensor) -> Tensor:
    """Return numbers between 0 and 1."""
    return x / 8 + 0.5


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu of alpha": lambda x: F.elu(x, 0.25),
    "celu of alpha": lambda x: F.celu(x, 0.25),
    "softplus of beta": lambda x: F.softplus(x, 2.0),
    "softplus of a threshold": lambda x: F.softplus(x, 0.5, 1.0),
    "leaky_relu of a slope": lambda x: F.leaky_relu(x, 0.25),
    "rrelu for inference": lambda x: F.rrelu(x, 0.25, 0.75, training=False),
    "hardtanh of bounds": lambda x: F.hardtanh(x, -0.5, 1.75),
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "threshold of a value": lambda x: F.threshold(x, 0.5, -2.0),
    "threshold below zero": lambda x: F.threshold(x, -1.25, 3.0),
    "softshrink of a bound": lambda x: F.softshrink(x, 1.25),
    "hardshrink of a bound": lambda x: F.hardshrink(x, 1.25),
    "logit of eps": lambda x: torch.logit(_share(x), 0.25),
    "glu of rows": lambda x: F.glu(x, 0),
    "softmax of columns": lambda x: F.softmax(x, 0),
    "log_softmax of columns": lambda x: F.log_softmax(x, 0),
    "prelu of weights": lambda x: F.prelu(x, _weights(x)),
    "clamp of bounds": lambda x: x.clamp(-1.25, 0.75),
    "clamp from below": lambda x: x.clamp(min=0.75),
    "nan_to_num": lambda x: torch.nan_to_num(x, 1.0, 2.0, 3.0),
}

_LOSSES: dict[str, Callable[..., Tensor]] = {
    "huber_loss of delta": lambda x, **of: F.huber_loss(x, _goal(x), delta=0.75, **of),
    "huber_loss of a large delta": lambda x, **of: F.huber_loss(x, _goal(x), delta=2.5, **of),
    "smooth_l1_loss of beta": lambda x, **of: F.smooth_l1_loss(x, _goal(x), beta=0.25, **of),
    "smooth_l1_loss of a large beta": lambda x, **of: F.smooth_l1_loss(x, _goal(x), beta=2.5, **of),
    "smooth_l1_loss of no beta": lambda x, **of: F.smooth_l1_loss(x, _goal(x), beta=0.0, **of),
    "mse_loss": lambda x, **of: F.mse_loss(x, _goal(x), **of),
    "l1_loss": lambda x, **of: F.l1_loss(x, _goal(x), **of),
    "soft_margin_loss": lambda x, **of: F.soft_margin_loss(x, _signs(x), **of),
    "hinge_embedding_loss of a margin": lambda x, **of: F.hinge_embedding_loss(x, _signs(x), 0.5, **of),
    "margin_ranking_loss of a margin": lambda x, **of: F.margin_ranking_loss(x, _goal(x), _signs(x), 0.5, **of),
    "kl_div of logarithms": lambda x, **of: F.kl_div(x, _goal(x), log_target=True, **of),
    "poisson_nll_loss of rates": lambda x, **of: F.poisson_nll_loss(
        x.abs(), _shares(x), log_input=False, full=True, eps=0.5, **of
    ),
    "binary_cross_entropy of weights": lambda x, **of: F.binary_cross_entropy(_share(x), _shares(x), _weights(x), **of),
    "binary_cross_entropy_with_logits of weights": lambda x, **of: F.binary_cross_entropy_with_logits(
        x, _shares(x), _weights(x), pos_weight=2 * _weights(x), **of
    ),
    "cross_entropy of weights": lambda x, **of: F.cross_entropy(x, _labels(x), _weights(x), **of),
    "cross_entropy that ignores a class": lambda x, **of: F.cross_entropy(x, _labels(x), ignore_index=3, **of),
    "cross_entropy, smoothed": lambda x, **of: F.cross_entropy(x, _labels(x), label_smoothing=0.25, **of),
    "nll_loss of weights": lambda x, **of: F.nll_loss(x, _labels(x), _weights(x), ignore_index=3, **of),
    "multilabel_soft_margin_loss of weights": lambda x, **of: F.multilabel_soft_margin_loss(
        x, _shares(x), _weights(x), **of
    ),
}

_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm of eps": lambda x: F.layer_norm(x, (COLUMNS,), _weights(x), -_weights(x), 0.5),
    "rms_norm of eps": lambda x: F.rms_norm(x, (COLUMNS,), _weights(x), 0.5),
    "group_norm of eps": lambda x: F.group_norm(x, 2, _weights(x), -_weights(x), 0.5),
    "batch_norm of eps": lambda x: F.batch_norm(x, None, None, _weights(x), -_weights(x), True, eps=0.5),
    "batch_norm of statistics": lambda x: F.batch_norm(x, _weights(x), 2 * _weights(x), eps=0.5),
    "instance_norm of eps": lambda x: F.instance_norm(x[None], eps=0.5),
    "normalize of order and eps": lambda x: F.normalize(x, 1.0, 0, 32.0),
    "cosine_similarity of eps": lambda x: F.cosine_similarity(x, _goal(x), 0, 64.0),
    "pairwise_distance of order and eps": lambda x: F.pairwise_distance(x, _goal(x), 1.0, 0.5, True),
    "local_response_norm": lambda x: F.local_response_norm(x[None], 3, 0.5, 0.5, 2.0),
    "norm of order 1": lambda x: torch.linalg.vector_norm(x, 1, dim=0, keepdim=True),
    "norm of order 3": lambda x: torch.linalg.vector_norm(x, 3, dim=-1),
    "var, corrected by 2": lambda x: x.var(0, correction=2, keepdim=True),
    "std, biased": lambda x: x.std(1, correction=0),
    "logsumexp of all": lambda x: x.logsumexp((0, 1), keepdim=True),
    "mean of columns": lambda x: x.mean(0, keepdim=True),
    "sum of an other type": lambda x: x.sum(0, dtype=torch.float32),
    "cumsum of columns": lambda x: x.cumsum(0),
    "renorm": lambda x: torch.renorm(x, 1, 0, 4.0),
    "diff of order 2": lambda x: torch.diff(x, 2, 0),
}

_PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool1d, ceil_mode": lambda x: F.avg_pool1d(x[None], 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg_pool2d, ceil_mode": lambda x: F.avg_pool2d(_pictures(x), 3, 2, 1, ceil_mode=True),
    "avg_pool2d without its padding": lambda x: F.avg_pool2d(_pictures(x), 3, 2, 1, count_include_pad=False),
    "avg_pool2d of a divisor": lambda x: F.avg_pool2d(_pictures(x), (2, 3), divisor_override=4),
    "max_pool2d, ceil_mode": lambda x: F.max_pool2d(_pictures(x), 3, 2, 1, ceil_mode=True),
    "max_pool2d, dilated": lambda x: F.max_pool2d(_pictures(x), 2, 1, dilation=3),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(_pictures(x), (3, 5)),
    "lp_pool2d": lambda x: F.lp_pool2d(_pictures(x.abs()), 1.0, 2, 1),
    "interpolate, bilinear": lambda x: F.interpolate(_pictures(x), (5, 11), mode="bilinear", align_corners=True),
    "interpolate, linear by a factor": lambda x: F.interpolate(x[None], scale_factor=1.5, mode="linear"),
    "affine_grid": lambda x: F.affine_grid(x[:, :6].reshape(8, 2, 3), [8, 1, 9, 12], align_corners=False),
    "affine_grid of volumes": lambda x: F.affine_grid(
        x.ravel()[:60].view(5, 3, 4), [5, 1, 5, 6, 7], align_corners=True
    ),
    "pad of a value": lambda x: F.pad(x, (1, 2), value=-1.25),
    "unfold": lambda x: F.unfold(_pictures(x), 2, 1, 1, 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 4, 4), 2),
    "embedding with padding": lambda x: F.embedding(_labels(x), x, padding_idx=3),
    "grid_sample": lambda x: F.grid_sample(
        _pictures(x), torch.stack([_goal(x), _goal(x).t()], -1)[None] / 2, padding_mode="border", align_corners=True
    ),
}

_ARITHMETIC: dict[str, Callable[[Tensor], Tensor]] = {
    "add of alpha": lambda x: torch.add(x, _goal(x), alpha=-1.75),
    "sub of alpha": lambda x: torch.sub(x, _goal(x), alpha=0.75),
    "rsub of alpha": lambda x: torch.rsub(x, _goal(x), alpha=0.75),
    "addcmul of a value": lambda x: torch.addcmul(x, _goal(x), x, value=-0.75),
    "addcdiv of a value": lambda x: torch.addcdiv(x, _goal(x), 1 + x.abs(), value=-0.75),
    "lerp of a weight": lambda x: torch.lerp(x, _goal(x), 0.75),
    "lerp of a small weight": lambda x: torch.lerp(x, _goal(x), 0.25),
    "addmm of beta and alpha": lambda x: torch.addmm(x, x, _goal(x), beta=0.5, alpha=-2),
    "addmv of beta and alpha": lambda x: torch.addmv(x[0], x, _weights(x), beta=0.5, alpha=-2),
    "addr of beta and alpha": lambda x: torch.addr(x, _weights(x), x[0], beta=0.5, alpha=-2),
    "baddbmm of beta and alpha": lambda x: torch.baddbmm(x[None], x[None], _goal(x)[None], beta=0.5, alpha=-2),
    "index_add of alpha": lambda x: x.index_add(0, _labels(x)[:3], x[:3], alpha=-2),
    "addbmm of beta and alpha": lambda x: torch.addbmm(x, x[None], _goal(x)[None], beta=0.5, alpha=-2),
}

REDUCTIONS = ("mean", "sum", "none")
OPS: Mapping[str, Callable[[Tensor], Tensor]] = {
    **_ACTIVATIONS,
    **{
        f"{name}, {how}": lambda x, loss=loss, how=how: loss(x, reduction=how)  # type: ignore[misc]
        for name, loss in _LOSSES.items()
        for how in REDUCTIONS
    },
    **_NORMS,
    **_PLACES,
    **_ARITHMETIC,
}
"""The ops by name; those of losses end with the reduction."""


def every(names: tuple[str, ...], *operands: Tensor) -> tuple[Tensor, ...]:
    """Return the result of each of these ops on its operand."""
    return tuple(OPS[name](x) for name, x in zip(names, operands, strict=True))
