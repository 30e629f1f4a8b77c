"""Points where a function has a kink, a tie, a pole or operands that are no numbers, in small numbers of every type."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence

INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Point:
    """A call and its operands.

    `picks` says that which of equal elements gets the gradient is written nowhere. Of one that `rounds`, which of the
    results and gradients are infinite, and which are no numbers, is the same in every type; the finite ones are not.
    `skips_nan` leaves out the gradient by an element that is NaN, which whole vectors and the rest of a row have apart.
    """

    call: Callable[..., Tensor]
    operands: tuple[Tensor, ...]
    picks: bool = False
    rounds: bool = False
    skips_nan: bool = False


def _numbers(*values: float, shape: tuple[int, ...] = (-1,)) -> Tensor:
    return torch.tensor([float(value) for value in values]).view(shape)


def _point(call: Callable[..., Tensor], *operands: Tensor, picks: bool = False, rounds: bool = False) -> Point:
    return Point(call, operands, picks, rounds)


_ROW, _OTHER = _numbers(2, 2, 1, 2, -1, -1), _numbers(2, 1, 1, 3, -1, 0)
_TIES = _numbers(1, 3, 3, -2, 3, 0, -2, -2, shape=(2, 4))
_IMAGE = _numbers(1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, shape=(1, 1, 4, 4))
_VOLUME, _SIGNAL = _IMAGE.view(1, 1, 2, 2, 4), _IMAGE.view(1, 1, 16)
_PLACES = torch.tensor([0, 0, 1])
_ORIGIN, _PAIR = _numbers(0, 0), _numbers(1, 2)
_THREE = (_numbers(1, 3, -1), _numbers(3, -2, 1), _numbers(1, 2, -4))
_MARGINS = (_numbers(1, 2, 0, 5), _numbers(1, 1, 1, 1))
# A NaN that arithmetic makes has its sign set on some processors.
_SPOILED = torch.cat([_numbers(1, -INF, 3), -_numbers(NAN).abs(), _numbers(2, NAN), _numbers(INF, -1)]).view(2, 4)


def _weighted(result: Tensor) -> Tensor:
    """Return each element times another number, so that a gradient tells which one it came from."""
    return result * torch.arange(1.0, 1.0 + result.numel(), device=result.device).to(result.dtype).view_as(result)


def _on(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device, dtype=like.dtype)


def _at_limits(x: Tensor) -> Tensor:
    """Return 1 for the largest finite number of the type, -1 for the smallest, 0 for others."""
    limits = torch.finfo(x.dtype)
    return (x == limits.max).float() - (x == limits.min).float()


def _among(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device)


def _order(x: Tensor, select: Callable[[Tensor], Tensor]) -> Tensor:
    return select(x).to(torch.float32)


def _too_long(x: Tensor, *, zero: bool) -> Tensor:
    """Return the losses of two targets in three steps, the first of which needs four."""
    targets = _among([1, 1, 2, 1, 2, 3], x).view(2, 3)
    return F.ctc_loss(x - 1, targets, (3, 3), (3, 2), reduction="none", zero_infinity=zero)


def _certain(x: Tensor) -> Tensor:
    """Return the loss of a variance below eps, and the variance, which is left as it is."""
    variance = torch.zeros_like(x)
    return torch.cat([F.gaussian_nll_loss(x, x.detach(), variance, reduction="none") * 0, variance])


def _fake_quantized(x: Tensor, axis: int) -> Tensor:
    """Return numbers on the grids of two channels, which reach from -1 to 2.5 and from 0 to 7."""
    scales, zeros = torch.tensor([0.5, 1.0], device=x.device), torch.tensor([2, 0], device=x.device, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x, scales, zeros, axis, 0, 7)


TIES: dict[str, Point] = {
    "amax over a dimension": _point(lambda x: x.amax(1), _TIES),
    "amin over all dimensions": _point(lambda x: x.amin((0, 1)), _TIES),
    "max of all": _point(torch.max, _TIES),
    "min of all": _point(torch.min, _TIES),
    "max over a dimension": _point(lambda x: x.max(1)[0], _TIES, picks=True),
    "min over a dimension": _point(lambda x: x.min(0)[0], _TIES, picks=True),
    "median": _point(torch.median, _ROW, picks=True),
    "kthvalue": _point(lambda x: x.kthvalue(2, 1)[0], _TIES, picks=True),
    "topk": _point(lambda x: x.topk(2, 1)[0], _TIES, picks=True),
    "mode": _point(lambda x: x.mode(1)[0], _TIES, picks=True),
    "stable sort": _point(lambda x: _weighted(torch.sort(x, dim=1, stable=True)[0]), _TIES),
    "maximum": _point(torch.maximum, _ROW, _OTHER),
    "minimum": _point(torch.minimum, _ROW, _OTHER),
    "fmax": _point(torch.fmax, _ROW, _OTHER),
    "fmin": _point(torch.fmin, _ROW, _OTHER),
    "max_pool1d": _point(lambda x: F.max_pool1d(x, 3, 2), _SIGNAL),
    "max_pool2d": _point(lambda x: _weighted(F.max_pool2d(x, 2, 1)), _IMAGE),
    "max_pool3d": _point(lambda x: F.max_pool3d(x, 2, 1), _VOLUME),
    "adaptive_max_pool2d": _point(lambda x: F.adaptive_max_pool2d(x, 3), _IMAGE),
    "scatter_reduce, amax": _point(
        lambda x, y: x.scatter_reduce(0, _PLACES.to(x.device), y, "amax"), _numbers(1, 2), _numbers(1, 1, 2)
    ),
    "index_reduce, amin": _point(
        lambda x, y: x.index_reduce(0, _PLACES.to(x.device), y, "amin"), _numbers(1, 2), _numbers(1, 1, 2)
    ),
    "segment_reduce, max": _point(lambda x: torch.segment_reduce(x, "max", lengths=_among([3, 3], x)), _ROW),
    "embedding_bag, max": _point(
        lambda x: F.embedding_bag(_among([0, 1, 2], x).view(1, 3), x, mode="max"),
        _numbers(1, 2, 1, 2, 0, 2, shape=(3, 2)),
        picks=True,
    ),
    "vector_norm of ord inf": _point(lambda x: torch.linalg.vector_norm(x, INF), _numbers(2, -2, 1)),
    "vector_norm of ord -inf": _point(lambda x: torch.linalg.vector_norm(x, -INF), _numbers(2, -2, 4)),
}
# Neither 16-bit type counts as far as these: one count, or one of each row.
MANY_TIES: dict[str, Point] = {
    "amax of all": _point(lambda x: x.amax(0), torch.ones(70_000)),
    "amin of all": _point(torch.amin, torch.ones(70_000)),
    "max of all": _point(torch.max, torch.ones(70_000)),
    "min of all": _point(torch.min, torch.ones(70_000)),
}
MANY_TIES_IN_ROWS: dict[str, Point] = {
    "amax": _point(lambda x: x.amax(1), torch.ones(2, 70_000)),
    "amin": _point(lambda x: x.amin(1, keepdim=True), torch.ones(2, 70_000)),
    "vector_norm": _point(lambda x: torch.linalg.vector_norm(x, torch.inf, 1), torch.ones(2, 70_000)),
}


def _sampled(picture: Tensor, grid: Tensor, **options: object) -> Tensor:
    sampled: Tensor = F.grid_sample(picture, grid, **options)
    return sampled


def _grids() -> Iterator[tuple[str, Point]]:
    """Yield samples of a picture within it, on its border and beyond, with gradients by the picture and the grid."""
    inside, beyond = (-0.375, 0.125, 0.5, -0.125), (1.5, -1.75, 0.125, 2.5, -3.0, 0.25, 1.25, 1.75)
    picture = _numbers(*range(16), shape=(1, 1, 4, 4))
    for padding in ("zeros", "border", "reflection"):
        for mode in ("bilinear", "nearest"):
            for aligned in (False, True):
                call = partial(_sampled, mode=mode, padding_mode=padding, align_corners=aligned)
                for where, places in (("inside", inside), ("beyond", beyond)):
                    grid = _numbers(*places, shape=(1, 1, -1, 2))
                    yield f"grid_sample {mode}, {padding}, {where}{', aligned' * aligned}", _point(call, picture, grid)


BOUNDS: dict[str, Point] = {
    "clamp": _point(lambda x: x.clamp(-1, 2), _numbers(-1, 2, 3, 0)),
    "clamp with tensors": _point(torch.clamp, _numbers(-1, 2, 3, 0), _numbers(-1, -1, -1, 0), _numbers(2, 2, 2, 0)),
    "clamp with crossed bounds": _point(torch.clamp, _numbers(0, 3), _numbers(2, 2), _numbers(1, 1)),
    "clamp between equal tensors": _point(lambda x, a: torch.clamp(x, a, a), _numbers(0, 2, 1), _numbers(1, 1, 1)),
    "clamp from a tensor on": _point(lambda x, a: torch.clamp(x, min=a), _numbers(1, 2, 0), _numbers(1, 1, 1)),
    "clamp up to a tensor": _point(lambda x, a: torch.clamp(x, max=a), _numbers(1, 2, 0), _numbers(1, 1, 1)),
    "clamp_min with a tensor": _point(torch.clamp_min, _numbers(1, 2, 0), _numbers(1, 1, 1)),
    "l1_loss": _point(partial(F.l1_loss, reduction="sum"), _numbers(1, 2, 3), _numbers(1, 1, 4)),
    "smooth_l1_loss": _point(partial(F.smooth_l1_loss, reduction="sum"), *_MARGINS),
    "smooth_l1_loss, beta 0": _point(partial(F.smooth_l1_loss, beta=0.0, reduction="sum"), *_MARGINS),
    "huber_loss": _point(partial(F.huber_loss, reduction="sum"), *_MARGINS),
    "hinge_embedding_loss": _point(
        lambda x: F.hinge_embedding_loss(x, _among([1, -1, -1, -1], x), reduction="sum"), _numbers(1, 1, 2, 0)
    ),
    "margin_ranking_loss": _point(
        lambda x, y: F.margin_ranking_loss(x, y, _on([1.0, 1.0, -1.0], x), margin=1.0, reduction="sum"),
        _numbers(1, 2, 0),
        _numbers(0, 2, 1),
    ),
    "multi_margin_loss": _point(
        lambda x: F.multi_margin_loss(x, _among([0, 1], x), reduction="sum"), _numbers(1, 0, 2, 1, shape=(2, 2))
    ),
    "multilabel_margin_loss": _point(
        lambda x: F.multilabel_margin_loss(x, _among([0, -1, 1], x), reduction="sum"), _numbers(1, 0, 2)
    ),
    "triplet_margin_loss": _point(
        partial(F.triplet_margin_loss, eps=0.0, reduction="sum"),
        *(_numbers(each, 0, shape=(1, 2)) for each in (0, 1, 2)),
    ),
    "relu6": _point(F.relu6, _numbers(0, 6, 7)),
    "hardtanh": _point(F.hardtanh, _numbers(-1, 1, 0)),
    "hardswish": _point(F.hardswish, _numbers(-3, 3, 0)),
    "hardsigmoid": _point(F.hardsigmoid, _numbers(-3, 3)),
    "softshrink": _point(F.softshrink, _numbers(-0.5, 0.5, 1)),
    "hardshrink": _point(F.hardshrink, _numbers(-0.5, 0.5, 1)),
    "threshold": _point(lambda x: F.threshold(x, 1.0, 5.0), _numbers(1, 2)),
    "softplus": _point(lambda x: F.softplus(x, threshold=2.0), _numbers(2, 3)),
    "fmod": _point(torch.fmod, _numbers(4, -4, 3, 0), _numbers(2, 2, -2, 4)),
    "remainder": _point(torch.remainder, _numbers(4, -4, 3, 0), _numbers(2, 2, -2, 4)),
    "floored division": _point(partial(torch.div, rounding_mode="floor"), _numbers(4, -3), _numbers(2, 2)),
    "round": _point(torch.round, _numbers(0.5, 1.5, -0.5)),
    "frac": _point(torch.frac, _numbers(1, -1.5)),
    "fake_quantize_per_tensor": _point(
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.5, 2, 0, 7), _numbers(-2, -1, 0.25, 0.75, 2.5, 3)
    ),
    "fake_quantize_per_tensor of tensors": _point(
        lambda x: torch.fake_quantize_per_tensor_affine(
            x, torch.tensor(0.5, device=x.device), torch.tensor(2, device=x.device, dtype=torch.int32), 0, 7
        ),
        _numbers(-2, -1, 0.25, 0.75, 2.5, 3),
    ),
    "fake_quantize_per_channel": _point(
        partial(_fake_quantized, axis=1), _numbers(-2, -4, -1, 0, 0.25, 0.5, 0.75, 1.5, 2.5, 7, 3, 8, shape=(6, 2))
    ),
    "renorm": _point(lambda x: x.renorm(2, 0, 5.0), _numbers(3, 4, 6, 8, 0, 0, shape=(3, 2))),
    "lerp to an end": _point(lambda x, y: torch.lerp(x, y, 1.0), _numbers(2**15, -(2**15)), _numbers(2**-12, 2**-12)),
    "lerp to an end by a tensor": _point(
        lambda x, y: torch.lerp(x, y, torch.ones_like(x)), _numbers(2**15, -(2**15)), _numbers(2**-12, 2**-12)
    ),
    "lerp": _point(torch.lerp, _numbers(1, 2, 3), _numbers(3, 2, 1), _numbers(0, 0.5, 1)),
    **dict(_grids()),
}
# Functions that write over their operand, whose derivative is one of the result.
IN_PLACE: dict[str, Point] = {
    name: _point(lambda x, call=call: _weighted(call(x * 1)), _numbers(-1, -0.5, 0.25, 1))
    for name, call in {
        "elu": lambda x: F.elu(x, inplace=True),
        "elu of another alpha": lambda x: F.elu(x, alpha=2.0, inplace=True),
        "celu": lambda x: F.celu(x, alpha=0.5, inplace=True),
        "selu": lambda x: F.selu(x, inplace=True),
        "leaky_relu": lambda x: F.leaky_relu(x, negative_slope=0.25, inplace=True),
        "rrelu in inference": lambda x: F.rrelu(x, lower=0.25, upper=0.5, inplace=True),
        "relu": lambda x: F.relu(x, inplace=True),
        "relu6": lambda x: F.relu6(x, inplace=True),
        "hardtanh": lambda x: F.hardtanh(x, inplace=True),
        "hardswish": lambda x: F.hardswish(x, inplace=True),
        "hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
        "silu": lambda x: F.silu(x, inplace=True),
        "mish": lambda x: F.mish(x, inplace=True),
        "threshold": lambda x: F.threshold(x, 0.5, 4.0, inplace=True),
        "tanh": torch.Tensor.tanh_,
        "sigmoid": torch.Tensor.sigmoid_,
        "exp": torch.Tensor.exp_,
        "sqrt": lambda x: x.abs_().sqrt_(),
        "clamp": lambda x: x.clamp_(-0.75, 0.5),
        "masked_fill": lambda x: x.masked_fill_(x > 0, 3.0),
        "index_fill": lambda x: x.index_fill_(0, _among([1, 3], x), 3.0),
    }.items()
}
ZEROS: dict[str, Point] = {
    "relu": _point(F.relu, _numbers(0, -0.0, 1)),
    "leaky_relu": _point(F.leaky_relu, _numbers(0, -1)),
    "elu": _point(F.elu, _numbers(0, 1)),
    "celu": _point(F.celu, _numbers(0, 1)),
    "prelu": _point(F.prelu, _numbers(0, -1, 1), _numbers(0.5)),
    "abs": _point(torch.abs, _numbers(0, -0.0, -1)),
    "sgn": _point(torch.sgn, _numbers(0, -1)),
    "copysign": _point(torch.copysign, _numbers(0, -1, 1), _numbers(-1, 0.0, -0.0)),
    "sinc": _point(torch.sinc, _numbers(0, 0)),
    "prod with one zero": _point(torch.prod, _numbers(2, 0, 4)),
    "prod with two zeros": _point(torch.prod, _numbers(0, 0, 4)),
    "prod of one zero": _point(lambda x: x.prod(0), _numbers(0)),
    "prod of columns of one": _point(lambda x: x.prod(0), _numbers(2, 0, 4, shape=(1, 3))),
    "prod of rows": _point(lambda x: x.prod(1), _numbers(2, 0, 4, 0, 0, 8, shape=(2, 3))),
    "cumprod": _point(lambda x: x.cumprod(0), _numbers(2, 0, 4, 0, 8)),
    "scatter_reduce, prod": _point(
        lambda x, y: x.scatter_reduce(0, _PLACES.to(x.device), y, "prod"), _numbers(1, 0), _numbers(0, 2, 0)
    ),
    **{
        f"vector_norm of ord {order}": _point(partial(torch.linalg.vector_norm, ord=order), _numbers(0, 0, 0))
        for order in (1, 2, 3, INF)
    },
    **{
        f"vector_norm of ord {order} of both signs": _point(
            lambda x, order=order: torch.linalg.vector_norm(x, order), _numbers(-1, 2, -4, 0.5)
        )
        for order in (1, 1.5, 2, 3, 4, INF)
    },
    "vector_norm of ord 0": _point(lambda x: torch.linalg.vector_norm(x, 0), _numbers(0, -1, 2)),
    "vector_norm of ord 1 with a zero": _point(lambda x: torch.linalg.vector_norm(x, 1), _numbers(0, -1, 2)),
    "var of equal numbers": _point(torch.var, _numbers(1, 1, 1)),
    "std of equal numbers": _point(torch.std, _numbers(1, 1, 1)),
    "dist": _point(torch.dist, _PAIR, _PAIR),
    "cdist": _point(torch.cdist, _PAIR.view(1, 2), _numbers(1, 2, 1, 3, shape=(2, 2))),
    "cdist, p 1": _point(partial(torch.cdist, p=1.0), _PAIR.view(1, 2), _numbers(1, 2, 1, 3, shape=(2, 2))),
    "pdist": _point(F.pdist, _numbers(1, 2, 1, 2, 1, 3, shape=(3, 2))),
    "pairwise_distance": _point(partial(F.pairwise_distance, eps=0.0), _PAIR.view(1, 2), _PAIR.view(1, 2)),
    "hypot": _point(torch.hypot, _numbers(0, 3), _numbers(0, 4)),
    "atan2": _point(torch.atan2, _numbers(0, 0, 1), _numbers(0, -1, 0)),
    "pow of tensors": _point(torch.pow, _numbers(0, 0, 2, -2), _numbers(0, 2, 0, 2)),
    "square": _point(lambda x: x**2, _numbers(0, -1)),
    "pow 0": _point(lambda x: x**0, _numbers(0, -1)),
    "pow of 0": _point(lambda y: torch.pow(0.0, y), _numbers(0, 1, 2)),
    "xlogy": _point(torch.xlogy, _numbers(0, 0, 1), _numbers(0, 2, 1)),
    "xlog1py": _point(torch.special.xlog1py, _numbers(0, 0, 1), _numbers(-1, 1, 0)),
    "entr": _point(torch.special.entr, _numbers(0, 1)),
    "ldexp": _point(lambda x: torch.ldexp(x, _among([1, 2], x)), _numbers(0, 1)),
    "embedding with a padding row": _point(
        lambda x: F.embedding(_among([0, 1, 1], x), x, padding_idx=0), _numbers(1, 2, 3, 4, shape=(2, 2))
    ),
}
POLES: dict[str, Point] = {
    "sqrt": _point(torch.sqrt, _numbers(0, 4)),
    "pow 1/2": _point(lambda x: x**0.5, _numbers(0, 4)),
    "rsqrt": _point(torch.rsqrt, _numbers(0, 4)),
    "log": _point(torch.log, _numbers(0, 1)),
    "log1p": _point(torch.log1p, _numbers(-1, 0)),
    "reciprocal": _point(torch.reciprocal, _numbers(0, -0.0, 2)),
    "division by zero": _point(torch.div, _numbers(1, 0, -1), _numbers(0, 0, -0.0)),
    "addcdiv": _point(torch.addcdiv, _numbers(1, 1), _ORIGIN + _numbers(0, 1), _ORIGIN),
    "var_mean of two": _point(lambda x: torch.stack(torch.var_mean(x, 0, correction=0)), _numbers(-1, 3)),
    "std_mean of two": _point(lambda x: torch.stack(torch.std_mean(x, 0, correction=0)), _numbers(-1, 3)),
    "acos": _point(torch.acos, _numbers(1, -1)),
    "asin": _point(torch.asin, _numbers(1, -1)),
    "atanh": _point(torch.atanh, _numbers(1, -1)),
    "acosh": _point(torch.acosh, _numbers(1, 2)),
    "logit": _point(torch.logit, _numbers(0, 1, 0.5)),
    "logit with an eps": _point(lambda x: torch.logit(x, 0.125), _numbers(0, 1, 0.5), rounds=True),
    "std of one number": _point(lambda x: x.std(correction=0), _numbers(3)),
    "vector_norm of ord 1/2": _point(lambda x: torch.linalg.vector_norm(x, 0.5), _numbers(0, 1, 4)),
    "logsumexp of -inf": _point(lambda x: x.logsumexp(0), _numbers(-INF, -INF)),
    "logsumexp with one -inf": _point(lambda x: x.logsumexp(0), _numbers(-INF, 0)),
    "logsumexp with inf": _point(lambda x: x.logsumexp(0), _numbers(INF, 0)),
    "logaddexp": _point(torch.logaddexp, _numbers(-INF, -INF, 0), _numbers(-INF, 0, -INF)),
    "softmax with one -inf": _point(lambda x: _weighted(x.softmax(0)), _numbers(-INF, 0, 0)),
    "softmax of -inf": _point(lambda x: x.softmax(0), _numbers(-INF, -INF)),
    "logsigmoid": _point(F.logsigmoid, _numbers(-INF, INF, 0)),
    "softplus": _point(F.softplus, _numbers(-INF, INF)),
    "tanh": _point(torch.tanh, _numbers(-INF, INF, 0)),
    "sigmoid": _point(torch.sigmoid, _numbers(-INF, INF, 0)),
    "cross_entropy with one -inf": _point(
        lambda x: F.cross_entropy(x, _among([1], x)), _numbers(-INF, 0, 0, shape=(1, 3))
    ),
    "binary_cross_entropy_with_logits": _point(
        lambda x: F.binary_cross_entropy_with_logits(x, _on([0.0, 1.0, 0.5], x), reduction="sum"), _numbers(0, 0, 0)
    ),
    **{
        f"ctc_loss of targets that are too long, zero_infinity={zero}": Point(
            partial(_too_long, zero=zero), (torch.zeros(3, 2, 4),), rounds=True
        )
        for zero in (False, True)
    },
    "gaussian_nll_loss of no variance": _point(_certain, _numbers(1, -2)),
    "logcumsumexp after -inf": _point(lambda x: x.logcumsumexp(0), _numbers(-INF, -INF, 0, 0)),
    "logcumsumexp with gradients of both signs": _point(
        lambda x: x.logcumsumexp(0) * _on([-4.0, 1.0, -2.0, 1.0], x), _numbers(0, -INF, -INF, -INF)
    ),
    "logcumsumexp of -inf": _point(lambda x: x.logcumsumexp(0), _numbers(0, -INF, -INF)),
    "kl_div": _point(lambda x: F.kl_div(x, _on([0.0, 1.0], x), reduction="sum"), _ORIGIN),
}
# An eps that keeps from a pole and that no 16-bit type holds beside 1, or, of losses, float16 at all.
SMALL_EPS: dict[str, Point] = {
    "logit": _point(lambda x: torch.logit(x, 1e-6), _numbers(0, 1, 0.5), rounds=True),
}
SATURATED: dict[str, Point] = {
    f"binary_cross_entropy of targets that are {which}": _point(
        lambda x, t=targets: F.binary_cross_entropy(x, _on(t, x), reduction="sum"), _numbers(0, 1, 0.5), rounds=True
    )
    for which, targets in (("reached", [0.0, 1.0, 1.0]), ("missed", [1.0, 0.0, 0.0]))
}
SATURATED["binary_cross_entropy_with_logits"] = _point(
    lambda x: F.binary_cross_entropy_with_logits(x, _on([0.0, 1.0, 0.0], x), reduction="sum"), _numbers(200, 200, -200)
)
# Ops that move numbers and round none: sequences of several lengths, and places that repeat.
_FIRST, _SECOND, _THIRD = _numbers(1, 2, 3), _numbers(4), _numbers(5, 6)


def _repacked(*sequences: Tensor, ordered: bool) -> Tensor:
    """Return sequences that were packed and padded again, each number weighted, with a value of its own as padding."""
    given = sorted(sequences, key=len, reverse=True) if ordered else sequences
    packed = pack_sequence([sequence.unsqueeze(1) for sequence in given], enforce_sorted=ordered)
    padded, lengths = pad_packed_sequence(packed, batch_first=True, padding_value=-7.0, total_length=5)
    return _weighted(padded) + lengths.to(padded).view(-1, 1, 1)


def _placed_pairs(x: Tensor, *, accumulate: bool) -> Tensor:
    """Return numbers put at pairs of places, of which two are the same if they are added up."""
    rows, columns = _among([0, 0, 2, 1] if accumulate else [0, 1, 2, 1], x), _among([1, 1, 0, 2], x)
    return x.new_ones(3, 3).index_put((rows, columns), x, accumulate=accumulate)


def _renormed(x: Tensor, call: Callable[..., Tensor]) -> Tensor:
    """Return a table, of which a look-up renormalizes the rows that it takes, and no other."""
    table = x.detach().clone()
    call(_among([1, 1, 3], x).view(1, 3), table, max_norm=2.5)
    return table


def _rows(x: Tensor) -> Tensor:
    """Return a mask of the second and the fourth row, with one column for all."""
    return torch.tensor([[False], [True], [False], [True]], device=x.device)


MOVES: dict[str, Point] = {
    **{
        f"{call.__name__} with max_norm": _point(
            partial(_renormed, call=call), _numbers(0, 5, 3, 4, 6, 8, 30, 40, 0, 0, shape=(5, 2))
        )
        for call in (F.embedding, F.embedding_bag)
    },
    **{
        f"pad_sequence on the {side}": _point(
            lambda *x, side=side: _weighted(pad_sequence(x, True, 7.0, side)), _FIRST, _SECOND, _THIRD
        )
        for side in ("left", "right")
    },
    **{
        f"sequences that were packed, enforce_sorted={ordered}": _point(
            partial(_repacked, ordered=ordered), _SECOND, _FIRST, _THIRD
        )
        for ordered in (False, True)
    },
    **{
        f"index_put of pairs, accumulate={accumulate}": _point(
            lambda x, accumulate=accumulate: _weighted(_placed_pairs(x, accumulate=accumulate)), _numbers(1, 2, 3, 4)
        )
        for accumulate in (False, True)
    },
    "indexing by pairs that repeat": _point(lambda x: _weighted(x[_among([0, 0, 1], x), _among([1, 1, 3], x)]), _TIES),
    "indexing by pairs with a slice between": _point(
        lambda x: _weighted(x.view(2, 2, 2)[_among([0, 0, 1], x), :, _among([1, 1, 0], x)]), _TIES
    ),
    "indexing by negative places": _point(lambda x: _weighted(x[_among([-1, -2, 0, -1], x)]), _FIRST),
    "indexing by negative pairs": _point(lambda x: _weighted(x[_among([0, -1, -2], x), _among([-1, -1, 2], x)]), _TIES),
    **{
        f"index_put of negative places, accumulate={accumulate}": _point(
            lambda x, y, accumulate=accumulate: _weighted(x.index_put((_among([-1, 0, -2], x),), y, accumulate)),
            _numbers(1, 2, 3, 4, 5),
            _numbers(6, 7, 8),
        )
        for accumulate in (False, True)
    },
    "indexing by a mask": _point(lambda x: _weighted(x[x > 0]), _TIES),
    "take of places that repeat": _point(lambda x: _weighted(x.take(_among([7, 0, 7, 7], x))), _TIES),
    "put, accumulate": _point(
        lambda x, y: _weighted(x.put(_among([7, 0, 7], x), y, accumulate=True)), _TIES, _numbers(1, 2, 3)
    ),
    "masked_scatter": _point(lambda x, y: _weighted(x.masked_scatter(x > 2, y)), _TIES, _numbers(4, 5, 6)),
    **{
        f"masked_scatter of {kind}": _point(
            lambda x, y, chosen=chosen: _weighted(x.masked_scatter(chosen(x), y)),
            _TIES.view(4, 2),
            _numbers(4, 5, 6, 7),
        )
        for kind, chosen in (("rows", _rows), ("expanded rows", lambda x: _rows(x).expand_as(x)))
    },
    "masked_fill of rows": _point(lambda x: _weighted(x.masked_fill(_rows(x), 7.0)), _TIES.view(4, 2)),
    "repeat_interleave": _point(lambda x: _weighted(x.repeat_interleave(_among([2, 0, 3], x))), _FIRST),
    "roll and flip": _point(lambda x: _weighted(x.roll((1, 1), (0, 1)).flip(1)), _TIES),
    "diag_embed and tril": _point(lambda x: _weighted(torch.diag_embed(x, 1).tril(1)), _TIES),
    "unfold of a tensor": _point(lambda x: _weighted(x.unfold(1, 3, 1)), _TIES),
    "fold of blocks apart": _point(
        lambda x: _weighted(F.fold(x.view(1, 4, 16), (8, 8), 2, stride=2)), _numbers(*range(64))
    ),
    "fold of blocks that overlap": _point(
        lambda x: _weighted(F.fold(x.view(1, 4, 16), (7, 7), 2, stride=2, dilation=2, padding=1)), _numbers(*range(64))
    ),
    "clone of a transposed matrix": _point(
        lambda x: _weighted(x.t().contiguous() * 1), _numbers(*(i % 13 for i in range(70 * 66)), shape=(66, 70))
    ),
}
_TALL, _BIAS = _numbers(*range(-6, 6), shape=(4, 3)), _numbers(1, -2, 3)
_FILTERS = _numbers(*(i % 5 - 2 for i in range(3 * 2 * 8)), shape=(3, 2, 8))
# Matrix products and convolutions of small integers, which no type rounds, with weights and biases in any layout.
PRODUCTS: dict[str, Point] = {
    "addcdiv of a factor": _point(lambda x, y, z: torch.addcdiv(x, y, z, value=-2.0), *_THREE),
    "addcmul of a factor": _point(lambda x, y, z: torch.addcmul(x, y, z, value=-2.0), *_THREE),
    "add of a factor": _point(lambda x, y: torch.add(x, y, alpha=-2.0), *_THREE[:2]),
    "sub of a factor": _point(lambda x, y: torch.sub(x, y, alpha=-2.0), *_THREE[:2]),
    "lerp by a tensor": _point(torch.lerp, *_THREE),
    "linear": _point(F.linear, _TIES, _TALL.t(), _BIAS),
    "linear of a vector": _point(F.linear, _numbers(1, 2, 0, -1), _TALL.t(), _BIAS),
    "linear of batches": _point(lambda x, w, b: F.linear(x.view(2, 1, 4), w, b), _TIES, _TALL.t(), _BIAS),
    "addmm": _point(torch.addmm, _BIAS, _TIES, _TALL),
    "addmm of a matrix": _point(torch.addmm, _numbers(1, 2, 3, 4, 5, 6, shape=(2, 3)), _TIES, _TALL),
    "addmv": _point(torch.addmv, _BIAS, _TALL.t(), _numbers(1, 2, 0, -1)),
    "addr": _point(torch.addr, _TALL, _numbers(1, 2, 0, -1), _BIAS),
    "mv and dot": _point(lambda x, y: torch.dot(torch.mv(x, y), y[:2]), _TIES, _numbers(1, 2, 0, -1)),
    "baddbmm": _point(
        lambda b, x, w: torch.baddbmm(b, x.view(2, 1, 4), w.expand(2, 4, 3)), _BIAS.view(1, 1, 3), _TIES, _TALL
    ),
    "bilinear": _point(F.bilinear, _TIES[:, :2], _TIES[:, 1:], _numbers(*range(-6, 12), shape=(3, 2, 3)), _BIAS),
    "conv1d": _point(F.conv1d, _numbers(*range(-8, 8), shape=(1, 2, 8)), _FILTERS[..., :3], _BIAS),
    "conv2d": _point(F.conv2d, _IMAGE.expand(1, 2, 4, 4), _FILTERS.view(3, 2, 4, 2)[..., :2, :], _BIAS),
    "conv3d": _point(F.conv3d, _VOLUME.expand(1, 2, 2, 2, 4), _FILTERS.view(3, 2, 2, 2, 2), _BIAS),
    "conv2d, depthwise": _point(
        partial(F.conv2d, groups=3), _IMAGE.expand(1, 3, 4, 4), _FILTERS.view(6, 1, 4, 2)[:3, :, :2], _BIAS
    ),
    "conv_transpose2d": _point(
        F.conv_transpose2d, _IMAGE.expand(1, 2, 4, 4), _FILTERS.view(2, 3, 4, 2)[..., :2, :], _BIAS
    ),
}
# torch docs, torch.addmm: if beta is 0, the content of input is ignored, and nan and inf in it are not propagated.
_ABSENT = {
    "addmm": ((2, 3), (2, 4), (4, 3)),
    "addmv": ((2,), (2, 4), (4,)),
    "addr": ((2, 3), (2,), (3,)),
    "addbmm": ((2, 3), (5, 2, 4), (5, 4, 3)),
    "baddbmm": ((5, 2, 3), (5, 2, 4), (5, 4, 3)),
}
_OVER_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.max(0)[0],
    "min": lambda x: x.min(0)[0],
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(0),
    "cummax": lambda x: x.cummax(0)[0],
    "cummin": lambda x: x.cummin(0)[0],
    "order of argmax": lambda x: _order(x, lambda y: y.argmax(0)),
    "sum": lambda x: x.sum(0),
    "prod": lambda x: x.prod(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "norm": lambda x: x.norm(dim=0),
}


def _absent(name: str) -> Point:
    """Return a product to which beta=0 adds none of an input of NaNs and infinities."""
    given, *factors = _ABSENT[name]
    input = _numbers(NAN, INF, -INF, 1, 2, NAN).repeat(5)[: math.prod(given)].view(given)
    ones = [torch.ones(shape) for shape in factors]

    def call(input: Tensor, left: Tensor, right: Tensor) -> Tensor:
        product: Tensor = getattr(torch, name)(input, left, right, beta=0, alpha=2)
        return product

    return _point(call, input, *ones)


NOT_NUMBERS: dict[str, Point] = {
    **{f"{name} without its input": _absent(name) for name in _ABSENT},
    **{f"{name} over rows": _point(call, _SPOILED) for name, call in _OVER_ROWS.items()},
    "relu": _point(F.relu, _SPOILED),
    "clamp": _point(lambda x: x.clamp(-2, 2), _SPOILED),
    "clamp with a NaN": _point(torch.clamp, _numbers(1, 2), _numbers(NAN, 0), _numbers(2, NAN)),
    "sign": _point(torch.sign, _SPOILED),
    "amax": _point(lambda x: x.amax(1), _SPOILED),
    "max over a dimension": _point(lambda x: x.max(1)[0], _SPOILED),
    "minimum": _point(torch.minimum, _numbers(NAN, 1, NAN), _numbers(1, NAN, NAN)),
    "fmax": _point(torch.fmax, _numbers(NAN, 1, NAN), _numbers(1, NAN, NAN)),
    "nansum": _point(torch.nansum, _numbers(NAN, 1, 2)),
    "nanmean": _point(torch.nanmean, _numbers(NAN, 1, 3)),
    "median": _point(torch.median, _SPOILED, picks=True),
    "nanmedian": _point(torch.nanmedian, _numbers(NAN, 1, 2, 3)),
    "max_pool2d": _point(lambda x: F.max_pool2d(x, 2), _SPOILED.view(1, 1, 2, 4)),
    "adaptive_max_pool2d": _point(lambda x: F.adaptive_max_pool2d(x, 2), _SPOILED.view(1, 1, 2, 4)),
    "avg_pool2d": _point(lambda x: F.avg_pool2d(x, 2), _SPOILED.view(1, 1, 2, 4)),
    "order of sort": _point(lambda x: _order(x, lambda y: y.sort(dim=1, stable=True)[1]), _SPOILED),
    "order of a falling sort": _point(
        lambda x: _order(x, lambda y: y.sort(dim=1, stable=True, descending=True)[1]), _SPOILED
    ),
    "order of argmax": _point(lambda x: _order(x, lambda y: y.argmax(1)), _SPOILED),
    "order of topk": _point(lambda x: _order(x, lambda y: y.topk(1, 1)[1]), _SPOILED),
    "order of the smallest of topk": _point(lambda x: _order(x, lambda y: y.topk(2, 1, largest=False)[1]), _SPOILED),
    "order of kthvalue": _point(lambda x: _order(x, lambda y: y.kthvalue(4, 1)[1]), _SPOILED),
    "cummax": _point(lambda x: x.cummax(1)[0], _SPOILED),
    "cumsum": _point(lambda x: x.cumsum(1), _SPOILED),
    "softmax": _point(lambda x: x.softmax(1), _SPOILED),
    "isclose": _point(lambda x: torch.isclose(x, x).float(), _SPOILED),
    "equality": _point(lambda x: (x == x).float(), _SPOILED),
    "where": _point(lambda x: torch.where(x < 2, x, -x), _SPOILED),
    "masked_fill": _point(lambda x: x.masked_fill(x.isnan(), 0.0), _SPOILED),
    "nan_to_num": _point(lambda x: x.nan_to_num(4.0, 5.0, 6.0), _SPOILED),
    "limits of nan_to_num": _point(lambda x: _at_limits(x.nan_to_num()), _SPOILED),
    "limits of nan_to_num_": _point(lambda x: _at_limits(x.clone().nan_to_num_()), _SPOILED),
    "product with zero": _point(lambda x: x * 0.0, _SPOILED),
    "mean": _point(torch.mean, _SPOILED),
    "matmul": _point(torch.matmul, _SPOILED, _numbers(0, 1, 2, 0, shape=(4, 1))),
    "linear": _point(F.linear, _SPOILED, _numbers(1, 1, 1, 1, shape=(1, 4))),
    "layer_norm": _point(lambda x: F.layer_norm(x, (4,)), _SPOILED),
    "logsumexp": _point(lambda x: x.logsumexp(1), _SPOILED),
    "huber_loss": _point(partial(F.huber_loss, reduction="none"), _SPOILED, torch.zeros(2, 4)),
    "hardtanh": _point(F.hardtanh, _SPOILED),
    "hardswish": _point(F.hardswish, _SPOILED),
    "silu": _point(F.silu, _SPOILED.nan_to_num(NAN, 4.0, -4.0)),
    "mish": _point(F.mish, _SPOILED.nan_to_num(NAN, 4.0, -4.0)),
    "gelu": _point(F.gelu, _SPOILED.nan_to_num(NAN, 4.0, -4.0)),
}


# --- pictures, volumes and signals, of more channels than a vector has numbers, and some that no whole vector takes

CHANNELS = 35


def _picture(*places: int) -> Tensor:
    """Return two samples of small numbers with ties, in which the first, a middle and the last channel have others."""
    count = 2 * CHANNELS * math.prod(places)
    numbers = (torch.arange(count) * 7919 % 11 % 5 - 1.0).view(2, CHANNELS, -1)
    for place, channel in enumerate((0, CHANNELS // 2, CHANNELS - 1)):
        numbers[place % 2, channel, place] = NAN
        numbers[place % 2, channel, -1] = (-INF, INF, NAN)[place]
        numbers[1 - place % 2, channel, 1] = (INF, -INF, 0.0)[place]
    return numbers.view(2, CHANNELS, *places)


_OF: dict[str, Tensor] = {"1d": _picture(24), "2d": _picture(4, 6), "3d": _picture(2, 4, 4)}
_EACH = torch.arange(CHANNELS) % 3 + 1.0  # a number for each channel


def _stepped(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the call with each element of its result times one of three numbers, in no order of channels or places."""

    def stepped(*given: Tensor) -> Tensor:
        result = call(*given)
        steps = torch.arange(result.numel(), device=result.device) % 3 + 1
        return result * steps.to(result.dtype).view(result.shape)

    return stepped


def _pools(rank: str) -> Iterator[tuple[str, Point]]:
    """Yield pools and their variants of signals, pictures or volumes."""
    picture, pool = _OF[rank], lambda name: getattr(F, f"{name}{rank}")
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "max_pool": lambda x: pool("max_pool")(x, 2),
        "max_pool that overlaps": lambda x: pool("max_pool")(x, 3, 1, 1),
        "max_pool, dilated": lambda x: pool("max_pool")(x, 2, 1, 1, 2),
        "max_pool, ceil_mode": lambda x: pool("max_pool")(x, 3, 2, 1, ceil_mode=True),
        "avg_pool": lambda x: pool("avg_pool")(x, 2),
        "avg_pool, padded": lambda x: pool("avg_pool")(x, 2, 1, 1, count_include_pad=False),
        "adaptive_max_pool": lambda x: pool("adaptive_max_pool")(x, 2),
        "adaptive_avg_pool": lambda x: pool("adaptive_avg_pool")(x, 2),
        "adaptive_max_pool to one": lambda x: pool("adaptive_max_pool")(x, 1),
        "adaptive_avg_pool to one": lambda x: pool("adaptive_avg_pool")(x, 1),
        "lp_pool": lambda x: pool("lp_pool")(x, 1.0, 2),
    }
    for name, call in calls.items():
        yield name, _point(_stepped(call), picture, rounds="avg" in name or "lp" in name)  # not every sum is of 8 bits
    if rank != "1d":
        divided = _point(_stepped(lambda x: pool("avg_pool")(x, 2, 2, divisor_override=2)), picture)
        yield "avg_pool with another divisor", divided
    yield (
        "places of max_pool",
        _point(lambda x: _order(x, lambda y: pool("max_pool")(y, 2, return_indices=True)[1]), picture),
    )
    yield (
        "places of adaptive_max_pool",
        _point(lambda x: _order(x, lambda y: pool("adaptive_max_pool")(y, 2, return_indices=True)[1]), picture),
    )


def _norms(rank: str) -> Iterator[tuple[str, Point]]:
    """Yield norms over places, channels or samples."""

    def around(call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Point:
        return _point(_stepped(call), _OF[rank], _EACH, -_EACH, rounds=True)

    def mean(x: Tensor) -> Tensor:
        return torch.ones(CHANNELS, device=x.device, dtype=x.dtype)

    yield "batch_norm", around(lambda x, w, b: F.batch_norm(x, None, None, w, b, True))
    yield "batch_norm of running statistics", around(lambda x, w, b: F.batch_norm(x, mean(x), 4 * mean(x), w, b))
    yield "instance_norm", around(lambda x, w, b: F.instance_norm(x, None, None, w, b))
    yield "group_norm", around(lambda x, w, b: F.group_norm(x, 5, w, b))
    yield "local_response_norm", _point(_stepped(lambda x: F.local_response_norm(x, 3)), _OF[rank], rounds=True)
    yield "normalize over channels", _point(_stepped(lambda x: F.normalize(x, dim=1)), _OF[rank], rounds=True)


def _softmaxes(rank: str) -> Iterator[tuple[str, Point]]:
    yield "softmax over channels", _point(_stepped(lambda x: x.softmax(1)), _OF[rank], rounds=True)
    yield "log_softmax over channels", _point(_stepped(lambda x: x.log_softmax(1)), _OF[rank], rounds=True)


def _elementwise(rank: str) -> Iterator[tuple[str, Point]]:
    """Yield activations and sums, which go through a picture in the order of its memory."""
    picture = _OF[rank]
    exact = (F.relu, F.relu6, F.hardtanh, F.leaky_relu, F.softshrink, F.hardshrink, torch.abs, torch.sign)
    for call in (*exact, F.elu, F.hardswish, F.hardsigmoid, F.silu, F.mish, F.softplus, F.logsigmoid):
        yield call.__name__, Point(_stepped(call), (picture,), rounds=call not in exact, skips_nan=True)
    yield "gelu", Point(_stepped(F.gelu), (picture.nan_to_num(NAN, 4.0, -4.0),), rounds=True, skips_nan=True)
    yield "clamp", _point(_stepped(lambda x: x.clamp(0, 2)), picture)
    yield "prelu", _point(_stepped(F.prelu), picture, _EACH)
    yield "sum of channels", _point(_stepped(lambda x: x.sum(1)), picture, rounds=True)
    yield "mean of places", _point(_stepped(lambda x: x.flatten(2).mean(2)), picture, rounds=True)
    yield "amax of channels", _point(_stepped(lambda x: x.amax(1)), picture, rounds=True)
    yield "maximum of samples", _point(_stepped(lambda x: torch.maximum(x[:1], x[1:])), picture)
    yield "cat of channels", _point(_stepped(lambda x: torch.cat([x, -x], 1)), picture)
    yield "where", _point(_stepped(lambda x: torch.where(x < 2, x, -x)), picture)
    yield "nan_to_num", _point(_stepped(lambda x: x.nan_to_num(4.0, 5.0, 6.0)), picture)


def _reshaped(rank: str) -> Iterator[tuple[str, Point]]:
    """Yield paddings, interpolations and rearrangements."""
    picture, dimensions = _OF[rank], int(rank[0])
    modes = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}[dimensions]
    for mode in ("nearest", "nearest-exact", *modes):
        for factor in (2, 0.5):
            yield (
                f"interpolate {mode} by {factor}",
                _point(_stepped(partial(F.interpolate, scale_factor=factor, mode=mode)), picture, rounds=True),
            )
    for mode in modes[: 2 * (dimensions == 2)]:
        call = partial(F.interpolate, scale_factor=0.5, mode=mode, antialias=True)
        yield f"interpolate {mode} by 0.5, antialias", _point(_stepped(call), picture, rounds=True)
    for mode in ("constant", "reflect", "replicate", "circular"):
        yield f"pad {mode}", _point(_stepped(partial(F.pad, pad=(1,) * 2 * dimensions, mode=mode)), picture)
    yield (
        "max_unpool",
        _point(
            _stepped(
                lambda x: getattr(F, f"max_unpool{rank}")(*getattr(F, f"max_pool{rank}")(x, 2, return_indices=True), 2)
            ),
            picture,
            picks=True,
        ),
    )
    if dimensions == 2:
        yield "pixel_unshuffle", _point(_stepped(lambda x: F.pixel_unshuffle(x, 2)), picture)
        yield "pixel_shuffle", _point(_stepped(lambda x: F.pixel_shuffle(torch.cat([x, x[:, :1]], 1), 2)), picture)
        yield "channel_shuffle", _point(_stepped(lambda x: F.channel_shuffle(x, 5)), picture)
        yield "unfold", _point(_stepped(lambda x: F.unfold(x, 2)), picture)


OF_PICTURES: dict[str, dict[str, Point]] = {
    f"{kind} of {pictures}": dict(points(rank))
    for rank, pictures in (("1d", "signals"), ("2d", "pictures"), ("3d", "volumes"))
    for kind, points in (
        ("pools", _pools),
        ("norms", _norms),
        ("softmaxes", _softmaxes),
        ("activations", _elementwise),
        ("sizes", _reshaped),
    )
}
FAMILIES = {
    "ties": TIES,
    "many ties": MANY_TIES,
    "rows of many ties": MANY_TIES_IN_ROWS,
    "bounds": BOUNDS,
    "zeros": ZEROS,
    "poles": POLES,
    "small eps": SMALL_EPS,
    "saturated probabilities": SATURATED,
    "moves": MOVES,
    "products": PRODUCTS,
    "in place": IN_PLACE,
    "not numbers": NOT_NUMBERS,
    **OF_PICTURES,
}


# --- strides of the operands, which change no value


def _stored(x: Tensor, order: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a copy whose memory has the order of another view, one that gives its own argument when it is repeated."""
    return order(order(x).contiguous())


def _transposed(x: Tensor) -> Tensor:
    return _stored(x, lambda y: y.transpose(-1, -2)) if x.dim() > 1 else x


def _every_second(x: Tensor) -> Tensor:
    return torch.stack([x, -x], -1)[..., 0] if x.dim() else x


def _channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": _channels_last,
    "transposed": _transposed,
    "every second": _every_second,
}


def layouts(*operands: Tensor) -> list[str]:
    """Return the layouts that differ for these operands, the contiguous one first."""
    most = max((operand.dim() for operand in operands), default=0)
    return ["contiguous", *["channels last"] * (most > 2), *["transposed"] * (most > 1), *["every second"] * (most > 0)]


_EQUAL = _numbers(3, 3, 3)
# Where torch's page on gradients of functions that have none says which one there is: that of least norm of functions
# that are convex there, and the limit otherwise.
LEAST: dict[str, tuple[Point, Tensor]] = {
    "norm of zeros": (_point(torch.norm, _numbers(0, 0, 0)), _numbers(0, 0, 0)),
    "norm of order 3 of zeros": (_point(lambda x: x.norm(3), _numbers(0, 0, 0)), _numbers(0, 0, 0)),
    "vector_norm of rows of zeros": (
        _point(lambda x: torch.linalg.vector_norm(x, dim=-1), _numbers(0, 0, 3, 4, shape=(2, 2))),
        _numbers(0, 0, 0.6, 0.8, shape=(2, 2)),
    ),
    "dist of equal": (_point(lambda x: torch.dist(x, x.detach()), _EQUAL), _numbers(0, 0, 0)),
    **{
        f"cdist of equal points, {mode}": (
            _point(lambda x, mode=mode: torch.cdist(x, x.detach(), compute_mode=mode), _numbers(0, 0, 3, 4).view(2, 2)),
            _numbers(-0.6, -0.8, 0.6, 0.8).view(2, 2),
        )
        for mode in ("use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")
    },
    "std of equal": (_point(lambda x: x.std(), _EQUAL), _numbers(0, 0, 0)),
    "std of rows, one of them equal": (
        _point(lambda x: x.std(-1, correction=0), _numbers(1, 1, 1, -1, shape=(2, 2))),
        _numbers(0, 0, 0.5, -0.5, shape=(2, 2)),
    ),
    "var of equal": (_point(lambda x: x.var(), _EQUAL), _numbers(0, 0, 0)),
    "std_mean of equal": (_point(lambda x: torch.std_mean(x)[0], _EQUAL), _numbers(0, 0, 0)),
    "abs of zero": (_point(torch.abs, _numbers(0, -2, 2)), _numbers(0, -1, 1)),
    "relu of zero": (_point(torch.relu, _numbers(0, -2, 2)), _numbers(0, 0, 1)),
    "l1_loss of equal": (
        _point(lambda x: F.l1_loss(x, torch.full_like(x, 3), reduction="sum"), _EQUAL),
        _numbers(0, 0, 0),
    ),
    "sqrt of zero": (_point(torch.sqrt, _numbers(0, 4)), _numbers(INF, 0.25)),
    "amax of equal": (_point(lambda x: x.amax(), _numbers(3, 1, 3)), _numbers(0.5, 0, 0.5)),
    "amin of equal": (_point(lambda x: x.amin(), _numbers(3, 1, 1)), _numbers(0, 0.5, 0.5)),
}
