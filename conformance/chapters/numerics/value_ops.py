"""Ops whose 16-bit results and gradients are compared with those of the same operands in float64.

Each op is a function of one tensor of a few rows, of 33 numbers or thousands, and makes what else it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

Call = Callable[[Tensor], Tensor]

LONG = {torch.float16: 66_000, torch.bfloat16: 6_000}
"""Numbers of a long row: more than the largest number of fp16, so that a count of them is none, and more than twenty
times as many as bf16 adds up one by one."""


@dataclass(frozen=True)
class ValueOp:
    """An op and the ways in which its results are compared.

    `long` ops add up more where rows are longer; `empty` ones have a result for rows of none, `single` ones for rows of
    one. `wide` ones are taken at magnitudes near the ends of the range too. `size` bounds the numbers that go into an
    element beyond what its derivative shows, such as weights that cancel. `smooth` ones have a gradient that operands a
    rounding apart do not change; of `centred` ones that goes for operands around zero, since a mean that their gradient
    is made of may have been saved in the 16-bit type. `scale_free` ones have a gradient of zero where a row has one
    element, which roundings hide.
    """

    name: str
    call: Call
    long: bool = True
    empty: bool = False
    single: bool = False
    wide: bool = True
    size: Callable[[Tensor], float] | None = None
    smooth: bool = True
    centred: bool = False
    scale_free: bool = False


def image(x: Tensor) -> Tensor:
    """Return each row as a channel of one picture, three lines high."""
    return x.reshape(1, x.shape[0], 3, -1)


def volume(x: Tensor) -> Tensor:
    """Return each row as a channel of one volume."""
    return image(x).unsqueeze(-1)


def last(x: Tensor) -> Tensor:
    return image(x).contiguous(memory_format=torch.channels_last)


def three_last(x: Tensor) -> Tensor:
    """Return each row as a channel of three pictures of one line, channels last."""
    return x.reshape(x.shape[0], 3, 1, -1).transpose(0, 1).contiguous(memory_format=torch.channels_last)


def last_3d(x: Tensor) -> Tensor:
    return volume(x).contiguous(memory_format=torch.channels_last_3d)


def other(x: Tensor) -> Tensor:
    """Return a tensor of like size that no element of `x` equals, and that has no gradient."""
    return (0.75 * x.detach()).flip(-1).roll(1, 0)


def classes(count: int, x: Tensor, among: int) -> Tensor:
    return torch.arange(count, device=x.device) % among


def half(x: Tensor) -> Tensor:
    return torch.full_like(x, 0.5)


def _everything(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _one(x: Tensor) -> float:
    return 1.0


_REDUCTIONS: dict[str, Call] = {
    "sum": lambda x: x.sum(-1),
    "sum of columns": lambda x: x.t().sum(0),
    "sum of all": lambda x: x.sum(),
    "mean": lambda x: x.mean(-1),
    "mean of columns": lambda x: x.t().mean(0),
    "nansum": lambda x: x.nansum(-1),
    "nanmean": lambda x: x.nanmean(-1),
    "masked.sum": lambda x: torch.masked.sum(x, -1, mask=_everything(x)),
    "masked.mean": lambda x: torch.masked.mean(x, -1, mask=_everything(x)),
    "logsumexp": lambda x: x.logsumexp(-1),
    "logsumexp of columns": lambda x: x.t().logsumexp(0),
    "norm": lambda x: x.norm(dim=-1),
    "norm of columns": lambda x: x.t().norm(dim=0),
    "norm of all": lambda x: x.norm(),
    "norm of order 1": lambda x: x.norm(1, dim=-1),
    "norm of order 1 of columns": lambda x: x.t().norm(1, dim=0),
    "norm of order 0": lambda x: x.norm(0, dim=-1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x),
    "vecdot": lambda x: torch.linalg.vecdot(x, half(x)),
    "einsum": lambda x: torch.einsum("ij,ij->i", x, half(x)),
    "inner": lambda x: torch.inner(x, half(x)),
    "tensordot": lambda x: torch.tensordot(x, half(x), ([1], [1])),
}
_DEVIATIONS: dict[str, Call] = {
    "var": lambda x: x.var(-1),
    "var of columns": lambda x: x.t().var(0),
    "std": lambda x: x.std(-1),
    "var_mean": lambda x: torch.var_mean(x, -1)[0],
    "std_mean": lambda x: torch.std_mean(x, -1)[0],
    "masked.var": lambda x: torch.masked.var(x, -1, unbiased=True, mask=_everything(x)),
    "masked.norm": lambda x: torch.masked.norm(x, 2, -1, mask=_everything(x)),
    "norm of order 3": lambda x: x.norm(3, dim=-1),
    "norm of order inf": lambda x: x.norm(math.inf, dim=-1),
    "trapezoid": lambda x: torch.trapezoid(x),
    "cumulative_trapezoid": lambda x: torch.cumulative_trapezoid(x),
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum of columns": lambda x: x.t().cumsum(0),
    "masked.cumsum": lambda x: torch.masked.cumsum(x, -1, mask=_everything(x)),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "cov": lambda x: torch.cov(x),
    "corrcoef": lambda x: torch.corrcoef(x),
    "prod": lambda x: (1 + x[:, :40] / 8).prod(-1),
    "cumprod": lambda x: (1 + x[:, :40] / 8).cumprod(-1),
    "renorm": lambda x: x.renorm(2, 0, 5.0),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "normalize of order 1": lambda x: F.normalize(x, p=1.0, dim=-1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, other(x)),
    "pairwise_distance": lambda x: F.pairwise_distance(x, other(x)),
    "dist": lambda x: torch.dist(x, other(x)),
    "cdist": lambda x: torch.cdist(x, other(x)),
}
_SELECTIONS: dict[str, Call] = {
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
    "aminmax": lambda x: torch.stack(tuple(torch.aminmax(x, dim=-1))),
    "max": lambda x: x.max(-1).values,
    "median": lambda x: x.median(-1).values,
    "kthvalue": lambda x: x.kthvalue(3, -1).values,
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(3, -1).values,
    "cummax": lambda x: x.cummax(-1).values,
    "max_pool1d": lambda x: F.max_pool1d(x[None], 3),
    "max_pool2d": lambda x: F.max_pool2d(image(x), (3, 2)),
    "max_pool2d channels last": lambda x: F.max_pool2d(last(x), (3, 2)),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(image(x), (1, 2)),
}


def affine(channels: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight and a bias as the parameters of a model in a region have them, wider than its 16-bit inputs."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return tuple(torch.linspace(*ends, channels, dtype=wide, device=x.device) for ends in ((0.5, 1.5), (-1.0, 2.0)))


_NORMALIZATIONS: dict[str, Call] = {
    "softmax": lambda x: x.softmax(-1),
    "softmax of columns": lambda x: x.t().softmax(0),
    "log_softmax": lambda x: x.log_softmax(-1),
    "log_softmax of columns": lambda x: x.t().log_softmax(0),
    "softmin": lambda x: F.softmin(x, -1),
    "masked.softmax": lambda x: torch.masked.softmax(x, -1, mask=_everything(x)),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x: F.rms_norm(x, list(x.shape[1:]), eps=1e-5),
    "group_norm": lambda x: F.group_norm(image(x), 1),
    "group_norm channels last": lambda x: F.group_norm(last(x), 1),
    "group_norm of vectors": lambda x: F.group_norm(x, 1, *affine(x.shape[1], x)),
    "layer_norm of vectors": lambda x: F.layer_norm(x, x.shape[1:], *affine(x.shape[1], x)),
    "instance_norm": lambda x: F.instance_norm(image(x)),
    "batch_norm": lambda x: F.batch_norm(image(x), None, None, training=True),
    "batch_norm of features": lambda x: F.batch_norm(x.t(), None, None, training=True),
    "batch_norm channels last": lambda x: F.batch_norm(last(x), None, None, training=True),
    "batch_norm of three images channels last": lambda x: F.batch_norm(three_last(x), None, None, training=True),
    "local_response_norm": lambda x: F.local_response_norm(image(x), 3),
    "local_response_norm of signals": lambda x: F.local_response_norm(x[None], 2),
}
_POOLS: dict[str, Call] = {
    "avg_pool1d": lambda x: F.avg_pool1d(x[None], x.shape[1]),
    "avg_pool2d": lambda x: F.avg_pool2d(image(x), image(x).shape[2:]),
    "avg_pool2d channels last": lambda x: F.avg_pool2d(last(x), image(x).shape[2:]),
    "avg_pool3d": lambda x: F.avg_pool3d(volume(x), volume(x).shape[2:]),
    "avg_pool3d channels last": lambda x: F.avg_pool3d(last_3d(x), volume(x).shape[2:]),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x[None], 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(image(x), (1, 3)),
    "adaptive_avg_pool2d of one": lambda x: F.adaptive_avg_pool2d(image(x), 1),
    "adaptive_avg_pool1d of one": lambda x: F.adaptive_avg_pool1d(x[None], 1),
    "adaptive_avg_pool3d of one": lambda x: F.adaptive_avg_pool3d(volume(x), 1),
    "adaptive_avg_pool2d channels last": lambda x: F.adaptive_avg_pool2d(last(x), (1, 3)),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(volume(x), (1, 2, 1)),
    "adaptive_avg_pool3d channels last": lambda x: F.adaptive_avg_pool3d(last_3d(x), (1, 2, 1)),
    "lp_pool1d": lambda x: F.lp_pool1d(x[None], 2.0, x.shape[1]),
    "lp_pool2d": lambda x: F.lp_pool2d(image(x), 2.0, tuple(image(x).shape[2:])),
    "interpolate area": lambda x: F.interpolate(image(x), size=(1, 3), mode="area"),
}
_LOSSES: dict[str, Call] = {
    "mse_loss": lambda x: F.mse_loss(x, other(x)),
    "l1_loss": lambda x: F.l1_loss(x, other(x)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, other(x)),
    "huber_loss": lambda x: F.huber_loss(x, other(x)),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, half(x)),
    "cross_entropy": lambda x: F.cross_entropy(x, classes(len(x), x, x.shape[1])),
    "cross_entropy of columns": lambda x: F.cross_entropy(x.t(), classes(x.shape[1], x, len(x))),
    "cross_entropy smoothed": lambda x: F.cross_entropy(x.t(), classes(x.shape[1], x, len(x)), label_smoothing=0.125),
    "cross_entropy of probabilities": lambda x: F.cross_entropy(x.t(), (half(x) / 4).t()),
    "nll_loss": lambda x: F.nll_loss(x.t(), classes(x.shape[1], x, len(x))),
    "nll_loss of pictures": lambda x: F.nll_loss(image(x), classes(x.shape[1], x, len(x)).view(image(x)[:, 0].shape)),
    "kl_div": lambda x: F.kl_div(x, half(x), reduction="batchmean"),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, half(x)),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, other(x), torch.ones_like(x)),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, torch.ones_like(x)),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, torch.ones_like(x)),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x, other(x), torch.ones_like(x)),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, other(x), -x),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, other(x), torch.ones(len(x), device=x.device)),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, classes(len(x), x, x.shape[1])),
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, torch.ones_like(x)),
}


def _at(x: Tensor) -> Tensor:
    """Return the first of two places for each column."""
    return torch.zeros(x.shape[1], dtype=torch.long, device=x.device)


def _none(x: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=x.dtype, device=x.device)


def _bags(x: Tensor, mode: str, weighted: bool = False) -> Tensor:
    """Return the bags of the columns of `x`: all but two, none, and two."""
    ends = torch.tensor([0, x.shape[1] - 2, x.shape[1] - 2], device=x.device)
    weights = torch.ones(x.shape[1], dtype=x.dtype, device=x.device) if weighted else None
    indices = torch.arange(x.shape[1], device=x.device)
    return F.embedding_bag(indices, x.t().contiguous(), ends, mode=mode, per_sample_weights=weights)


def _bags_to_ends(x: Tensor, mode: str) -> Tensor:
    """Return bags of the first two and of the last two columns of `x`, whose ends are given, the last one's too."""
    columns = torch.arange(x.shape[1], device=x.device)
    few = min(2, len(columns) // 2)
    ends = torch.tensor([0, few, 2 * few], device=x.device)
    indices = torch.cat([columns[:few], columns[len(columns) - few :]])
    return F.embedding_bag(indices, x.t().contiguous(), ends, mode=mode, include_last_offset=True)


def _segments(x: Tensor, reduce: str) -> Tensor:
    lengths = torch.tensor([x.shape[1] - 2, 2], device=x.device)
    return torch.segment_reduce(x.t().contiguous(), reduce, lengths=lengths, axis=0)


_PLACES: dict[str, Call] = {
    "scatter_reduce mean": lambda x: _none(x, len(x), 2).scatter_reduce(
        1, _at(x).expand(x.shape), x, "mean", include_self=False
    ),
    "index_reduce mean": lambda x: _none(x, len(x), 2).index_reduce(1, _at(x), x, "mean", include_self=False),
    "segment_reduce mean": lambda x: _segments(x, "mean"),
    "segment_reduce max": lambda x: _segments(x, "max"),
    "embedding_bag sum": lambda x: _bags(x, "sum"),
    "embedding_bag mean": lambda x: _bags(x, "mean"),
    "embedding_bag max": lambda x: _bags(x, "max"),
    "embedding_bag weighted": lambda x: _bags(x, "sum", weighted=True),
    "embedding_bag mean to the end": lambda x: _bags_to_ends(x, "mean"),
}


def _small(x: Tensor, *shape: int) -> Tensor:
    """Return weights that add up to one over all but the first dimension."""
    return torch.full(shape, 1 / (math.prod(shape[1:]) or 1), dtype=x.dtype, device=x.device)


def _attention(x: Tensor, *, mask: bool = False, causal: bool = False) -> Tensor:
    """Return self-attention among four heads of eight of the numbers of each row."""
    heads = x[:, :32].reshape(1, len(x), 4, 8).transpose(1, 2)
    allowed = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).tril() if mask else None
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=allowed, is_causal=causal)


def _cell(x: Tensor, kind: str) -> Tensor:
    gates = {"gru_cell": 3, "lstm_cell": 4}.get(kind, 1)
    weight, recurrent = _small(x, 8 * gates, x.shape[1]), _small(x, 8 * gates, 8)
    bias, hidden = _none(x, 8 * gates), _none(x, len(x), 8)
    if kind == "lstm_cell":
        return torch.lstm_cell(x, (hidden, hidden), weight, recurrent, bias, bias)[0]
    call: Callable[..., Tensor] = getattr(torch, kind)
    return call(x, hidden, weight, recurrent, bias, bias)


_PRODUCTS: dict[str, Call] = {
    "linear": lambda x: F.linear(x, _small(x, 4, x.shape[1])),
    "matmul": lambda x: x @ _small(x, 4, x.shape[1]).t(),
    "bmm": lambda x: torch.bmm(x[None], _small(x, 4, x.shape[1]).t()[None]),
    "addmm": lambda x: torch.addmm(x[:, :4], x, _small(x, 4, x.shape[1]).t()),
    "mv": lambda x: torch.mv(x, _small(x, 1, x.shape[1])[0]),
    "dot": lambda x: torch.dot(x[0], _small(x, 1, x.shape[1])[0]),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, _small(x, 4, x.shape[1]).t(), _small(x, 4, 4)]),
    "conv1d": lambda x: F.conv1d(x[None], _small(x, 2, len(x), 5), stride=2),
    "conv2d": lambda x: F.conv2d(image(x), _small(x, 2, len(x), 3, 2), stride=2),
    "conv3d": lambda x: F.conv3d(volume(x), _small(x, 2, len(x), 3, 2, 1), stride=2),
    "conv2d dilated": lambda x: F.conv2d(image(x), _small(x, 2, len(x), 2, 2), dilation=2),
    "conv2d depthwise": lambda x: F.conv2d(image(x), _small(x, len(x), 1, 3, 2), stride=2, groups=len(x)),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x[None], _small(x, 2, len(x), 5).transpose(0, 1), stride=2),
    "conv_transpose2d": lambda x: F.conv_transpose2d(image(x), _small(x, 2, len(x), 3, 2).transpose(0, 1), stride=2),
    "scaled_dot_product_attention": _attention,
    "scaled_dot_product_attention causal": lambda x: _attention(x, causal=True),
    "scaled_dot_product_attention masked": lambda x: _attention(x, mask=True),
    "cross": lambda x: torch.linalg.cross(x[:3, :6].t(), other(x)[:3, :6].t()),
    "matrix_exp": lambda x: torch.matrix_exp(x[:2, :2] / 4),
}
_CELLS: dict[str, Call] = {
    kind: partial(_cell, kind=kind) for kind in ("rnn_tanh_cell", "rnn_relu_cell", "gru_cell", "lstm_cell")
}
_RESAMPLING: dict[str, Call] = {
    "interpolate linear": lambda x: F.interpolate(x[None], size=50, mode="linear"),
    "interpolate bilinear": lambda x: F.interpolate(image(x), size=(7, 5), mode="bilinear"),
    "interpolate bilinear channels last": lambda x: F.interpolate(last(x), size=(7, 5), mode="bilinear"),
    "interpolate bicubic": lambda x: F.interpolate(image(x), size=(7, 5), mode="bicubic"),
    "interpolate trilinear": lambda x: F.interpolate(volume(x), size=(5, 7, 3), mode="trilinear"),
    "interpolate nearest": lambda x: F.interpolate(image(x), size=(7, 5), mode="nearest"),
    "interpolate nearest-exact": lambda x: F.interpolate(image(x), size=(7, 5), mode="nearest-exact"),
    "grid_sample": lambda x: F.grid_sample(image(x), _small(x, 2, 2, 2)[None].expand(1, 2, 2, 2), align_corners=False),
    "pixel_shuffle": lambda x: F.pixel_shuffle(image(x[:4]), 2),
    "fold": lambda x: F.fold(x[:, :32].reshape(len(x), 4, 8), (1, 11), (1, 4)),
    "unfold": lambda x: F.unfold(image(x), (2, 3)),
    "pad replicate": lambda x: F.pad(x, (3, 2), mode="replicate"),
    "pad reflect": lambda x: F.pad(x, (3, 2), mode="reflect"),
    "pad circular": lambda x: F.pad(x, (3, 2), mode="circular"),
}
# Forward: one op of the derivative alone would not do, because it goes through numbers of another size.
_SIZES: dict[str, Callable[[Tensor], float]] = {
    **dict.fromkeys(_RESAMPLING, _largest),
    **dict.fromkeys(_CELLS, _one),
    **dict.fromkeys(("corrcoef", "layer_norm", "instance_norm", "group_norm", "batch_norm"), _one),
    "cov": lambda x: float(x.abs().max()) ** 2,
}
_SPREADS = {name for name in _DEVIATIONS if name.startswith(("var", "std", "cov", "corr", "masked.var"))}
NO_GRADIENT = {"norm of order 0", "aminmax"}
_EDGES = {
    "norm of order 0",
    "norm of order inf",
    "segment_reduce max",
    "embedding_bag max",
    "l1_loss",
    "margin_ranking_loss",
}
# No more numbers go into an element of these where rows are longer.
_SHORT = {
    *(name for name in _PRODUCTS if name.startswith(("conv", "scaled"))),
    *(
        "cross",
        "matrix_exp",
        "local_response_norm",
        "local_response_norm of signals",
        "kthvalue",
        "sort",
        "topk",
        "cummax",
        "median",
    ),
    *(name for name in _SELECTIONS if "pool" in name),
}
_SINGLE = {
    *("softmax", "softmax of columns", "log_softmax", "log_softmax of columns", "softmin", "masked.softmax"),
    *(
        "layer_norm",
        "rms_norm",
        "normalize",
        "cumsum",
        "logcumsumexp",
        "amax",
        "max",
        "median",
        "sort",
        "cosine_similarity",
    ),
    *("pairwise_distance", "mse_loss", "huber_loss", "binary_cross_entropy_with_logits", "linear", "matmul", "bmm"),
}
_EMPTY = {*_REDUCTIONS, "linear", "matmul", "bmm", "mv"} - {
    "sum of all",
    "norm of all",
    "matrix_norm",
    "inner",
    "tensordot",
}


# What other devices are not asked: kernels of which none has been seen to do better than those of the CPU, which fail,
# and compositions that fail as well where each part runs as on CUDA (seen on the emulated card).
OFF_CARDS = {
    *_PLACES,
    *("logcumsumexp", "matrix_exp", "logit", "nll_loss of pictures"),
    *("local_response_norm", "local_response_norm of signals"),
    *("avg_pool3d", "avg_pool3d channels last", "adaptive_avg_pool3d", "adaptive_avg_pool3d channels last"),
    "adaptive_avg_pool3d of one",
    *("corrcoef", "cov", "masked.mean", "masked.var", "nanmean", "multilabel_soft_margin_loss"),
}
LARGE_OFF_CARDS = OFF_CARDS | {"lp_pool1d", "lp_pool2d"}
LARGE_GRADIENTS_OFF_CARDS = OFF_CARDS | {"atan2", "cosine_similarity", "norm of order 3", "sinc", "std", "std_mean"}
OPPOSED_OFF_CARDS = OFF_CARDS | {
    *("batch_norm", "batch_norm of features", "cross_entropy", "cross_entropy of columns", "cross_entropy smoothed"),
    "batch_norm of three images channels last",
    *("cumulative_trapezoid", "fold", "trapezoid"),
}
OPPOSED_GRADIENTS_OFF_CARDS = OFF_CARDS | {
    *("gaussian_nll_loss", "norm of order 3", "pairwise_distance"),
    *("std", "std_mean", "var", "var_mean", "var of columns"),
}
RESULTS_OFF_CARDS = OFF_CARDS | {"layer_norm", "lp_pool1d", "lp_pool2d", "normalize of order 1"}
GRADIENTS_OFF_CARDS = OFF_CARDS | {
    *("avg_pool1d", "avg_pool2d", "avg_pool2d channels last", "batch_norm", "batch_norm channels last"),
    "batch_norm of three images channels last",
    *("batch_norm of features", "cosine_similarity", "cumulative_trapezoid", "lp_pool1d", "lp_pool2d"),
    *("normalize of order 1", "log_softmax"),
}


def _table() -> dict[str, ValueOp]:
    groups = {
        **_REDUCTIONS, **_DEVIATIONS, **_SELECTIONS, **_NORMALIZATIONS, **_POOLS, **_LOSSES, **_PLACES,
        **_PRODUCTS, **_CELLS, **_RESAMPLING,
    }  # fmt: skip
    return {
        name: ValueOp(
            name,
            call,
            long=name not in _RESAMPLING and name not in _CELLS and name not in _SHORT,
            empty=name in _EMPTY,
            single=name in _EMPTY or name in _SINGLE,
            size=_SIZES.get(name),
            smooth=name not in _SELECTIONS and name not in _EDGES,
            centred=("norm" in name and name in _NORMALIZATIONS) or name in _SPREADS,
            scale_free=name in ("layer_norm", "rms_norm", "normalize", "cosine_similarity"),
            # The gradient of the last one is at the very end of the range where operands are tiny: some are lost.
            wide=name not in ("cross", "matrix_exp", "normalize of order 1"),
        )
        for name, call in groups.items()
    }


OPS: dict[str, ValueOp] = _table()


def named(name: str) -> Callable[..., Tensor]:
    """Return a function of tensors, looked up when it is called, so that a user's own torch is judged."""
    return lambda *given: getattr(F if hasattr(F, name) else torch, name)(*given)


# One result for each element: their values and gradients are the matter of AMP-NUMERICS-045, 046 and 100, but not for
# operands of these sizes.
FUNCTIONS: dict[str, Call] = {
    **{
        name: named(name)
        for name in (
            *("gelu", "silu", "mish", "softplus", "logsigmoid", "elu", "celu", "selu", "hardswish", "hardsigmoid"),
            *(
                "hardtanh",
                "leaky_relu",
                "relu6",
                "softsign",
                "tanhshrink",
                "softshrink",
                "sigmoid",
                "tanh",
                "erf",
                "exp",
            ),
            *("expm1", "log1p", "sqrt", "rsqrt", "reciprocal", "square", "sinc", "asinh", "atan", "cos", "sin", "exp2"),
            *("abs", "relu"),
        )
    },
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "log": lambda x: x.abs().log(),
    "logit": lambda x: torch.logit(x, eps=1e-3),
    "glu": lambda x: F.glu(x[:, :32]),
    "pow 2": lambda x: x**2,
    "pow 3": lambda x: x**3,
    "pow 0.5": lambda x: x.abs() ** 0.5,
    "pow -1": lambda x: x**-1,
    "hypot": lambda x: torch.hypot(x, other(x)),
    "atan2": lambda x: torch.atan2(x, other(x)),
    "logaddexp": lambda x: torch.logaddexp(x, other(x)),
    "logaddexp2": lambda x: torch.logaddexp2(x, other(x)),
    "xlogy": lambda x: torch.xlogy(x, other(x).abs()),
    "lerp": lambda x: torch.lerp(x, other(x), 0.25),
    "addcmul": lambda x: torch.addcmul(x, x, other(x), value=1e-3),
    "addcdiv": lambda x: torch.addcdiv(x, x, other(x), value=3.0),
    "add with alpha": lambda x: torch.add(x, other(x), alpha=-0.5),
    "mul by a number": lambda x: x * 1e-3,
    "div by a number": lambda x: x / 3.0,
    "div": lambda x: x / other(x),
    "clamp": lambda x: x.clamp(-1, 1),
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "prelu": lambda x: F.prelu(x, _small(x, 2, 1)[:1].reshape(1)),
}

OF_TWO = {
    *("hypot", "atan2", "logaddexp", "logaddexp2", "xlogy", "lerp", "addcmul", "addcdiv", "add with alpha", "div"),
}
"""Functions of two elements, whose intermediate results leave the range where neither operand does."""

# What a model meets most, and kernels of their own that the rest is written with.
QUICK = {
    *("sum", "mean", "logsumexp", "norm", "masked.mean", "var", "std", "cumsum", "cosine_similarity", "amax"),
    *("softmax", "log_softmax of columns", "layer_norm", "group_norm", "batch_norm", "avg_pool2d", "lp_pool2d"),
    "normalize",
    *("adaptive_avg_pool2d", "mse_loss", "cross_entropy", "scatter_reduce mean", "embedding_bag mean", "linear"),
    *("conv2d", "gru_cell", "scaled_dot_product_attention", "interpolate bilinear", "gelu", "silu", "hardswish"),
    *("logit", "matrix_exp", "renorm", "lerp", "adaptive_avg_pool3d of one"),
}
