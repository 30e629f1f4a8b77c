"""Ops that add up a row of numbers, and ops whose gradient adds up what comes in for an element that they repeat.

A sum has many spellings: reductions, products with ones, pools, bags, segments, scattered additions. Each keeps a
partial sum somewhere, and in a 16-bit type a partial sum stops growing at 2048 (fp16) or 256 (bf16) ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .value_ops import Call

ROWS, LONG = 3, 20_000


@dataclass(frozen=True)
class Spelling:
    """A way to add up each row of a tensor of ROWS rows of LONG numbers that are not negative.

    `of` is how many numbers the result is divided by: an average is as good as a sum. `rows` is how many of them it
    adds up. `on_cards` is false where the kernel of a card is not known to keep its sums in float32.
    """

    call: Call
    of: int = 1
    rows: int = ROWS
    on_cards: bool = True


def _ones(x: Tensor, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=x.dtype, device=x.device)


def _none(x: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=x.dtype, device=x.device)


def _first(x: Tensor) -> Tensor:
    """Return the same index for each number of a row."""
    return torch.zeros(LONG, dtype=torch.long, device=x.device)


def _image(x: Tensor) -> Tensor:
    return x.reshape(1, ROWS, 100, 200)


def _volume(x: Tensor) -> Tensor:
    return x.reshape(1, ROWS, 10, 10, 200)


def _last(x: Tensor) -> Tensor:
    return _image(x).contiguous(memory_format=torch.channels_last)


def _last_3d(x: Tensor) -> Tensor:
    return _volume(x).contiguous(memory_format=torch.channels_last_3d)


def _twice(x: Tensor) -> Tensor:
    return x.repeat(1, 2)


def _halves(x: Tensor) -> Tensor:
    """Return what an op gives for both copies of a row, which are as good as one."""
    return x.reshape(ROWS, 2)


def _bag(x: Tensor, mode: str, *, weighted: bool = False) -> Tensor:
    index, start = torch.arange(LONG, device=x.device), torch.zeros(1, dtype=torch.long, device=x.device)
    weights = _ones(x, LONG) if weighted else None
    return F.embedding_bag(index, x.t().contiguous(), start, mode=mode, per_sample_weights=weights)


def _segment(x: Tensor, reduce: str) -> Tensor:
    lengths = torch.tensor([LONG], device=x.device)
    return torch.segment_reduce(x.t().contiguous(), reduce, lengths=lengths, axis=0)


def _sparse(x: Tensor) -> Tensor:
    """Return a COO tensor that has its first row LONG times."""
    return torch.sparse_coo_tensor(_first(x)[None], x.t().contiguous(), (2, ROWS))


_PRODUCTS: dict[str, Spelling] = {
    "matmul with ones": Spelling(lambda x: x @ _ones(x, LONG, 2)),
    "mm with ones": Spelling(lambda x: torch.mm(x, _ones(x, LONG, 2))),
    "mv with ones": Spelling(lambda x: torch.mv(x, _ones(x, LONG))),
    "dot with ones": Spelling(lambda x: torch.dot(x[0], _ones(x, LONG)), rows=1),
    "vdot with ones": Spelling(lambda x: torch.vdot(x[0], _ones(x, LONG)), rows=1),
    "inner with ones": Spelling(lambda x: torch.inner(x, _ones(x, LONG))),
    "vecdot with ones": Spelling(lambda x: torch.linalg.vecdot(x, _ones(x, LONG))),
    "linear with ones": Spelling(lambda x: F.linear(x, _ones(x, 4, LONG))),
    "addmm with ones": Spelling(lambda x: torch.addmm(_none(x, ROWS, 2), x, _ones(x, LONG, 2))),
    "addmv with ones": Spelling(lambda x: torch.addmv(_none(x, ROWS), x, _ones(x, LONG))),
    "bmm with ones": Spelling(lambda x: torch.bmm(x[None], _ones(x, 1, LONG, 2))[0]),
    "baddbmm with ones": Spelling(lambda x: torch.baddbmm(_none(x, 1, ROWS, 2), x[None], _ones(x, 1, LONG, 2))[0]),
    "addbmm of 1000 batches": Spelling(
        lambda x: torch.addbmm(
            _none(x, ROWS, 2), x.reshape(ROWS, 1000, -1).transpose(0, 1), _ones(x, 1000, LONG // 1000, 2)
        ),
        on_cards=False,
    ),
    "einsum": Spelling(lambda x: torch.einsum("ij->i", x)),
    "einsum with ones": Spelling(lambda x: torch.einsum("ij,j->i", x, _ones(x, LONG))),
    "tensordot with ones": Spelling(lambda x: torch.tensordot(x, _ones(x, LONG), 1)),
    "multi_dot with ones": Spelling(lambda x: torch.linalg.multi_dot([x, _ones(x, LONG, 2), torch.eye(2).to(x)])),
    "bilinear with ones": Spelling(lambda x: F.bilinear(x, _ones(x, ROWS, 1), _ones(x, 2, LONG, 1))),
    "conv1d": Spelling(lambda x: F.conv1d(x.reshape(ROWS, 200, 100), _ones(x, 2, 200, 100))[..., 0]),
    "conv2d": Spelling(lambda x: F.conv2d(x.reshape(ROWS, 200, 10, 10), _ones(x, 2, 200, 10, 10)).flatten(1)),
    "conv3d": Spelling(
        lambda x: F.conv3d(x.reshape(ROWS, 20, 10, 10, 10), _ones(x, 2, 20, 10, 10, 10)).flatten(1), on_cards=False
    ),
    "conv2d depthwise": Spelling(
        lambda x: F.conv2d(_image(x), _ones(x, ROWS, 1, 100, 200), groups=ROWS).flatten(), on_cards=False
    ),
    "conv1d grouped": Spelling(
        lambda x: F.conv1d(x.reshape(1, ROWS * 200, 100), _ones(x, ROWS, 200, 100), groups=ROWS).flatten(),
        on_cards=False,
    ),
    "conv_transpose1d": Spelling(
        lambda x: F.conv_transpose1d(x.reshape(ROWS, LONG, 1), _ones(x, LONG, 2, 1))[..., 0], on_cards=False
    ),
    "conv_tbc of 1000 taps": Spelling(
        lambda x: torch.conv_tbc(
            x.reshape(ROWS, 1000, -1).transpose(0, 1).contiguous(), _ones(x, 1000, LONG // 1000, 2), _none(x, 2)
        )[0],
        on_cards=False,
    ),
    "attention to each key alike": Spelling(
        lambda x: F.scaled_dot_product_attention(
            _none(x, 1, 1, 1, ROWS), _none(x, 1, 1, LONG, ROWS), x.t()[None, None]
        ).flatten(),
        of=LONG,
    ),
    "cdist of order 1": Spelling(lambda x: torch.cdist(x, torch.zeros_like(x[:1]), p=1.0)[:, 0]),
    "sparse.addmm with ones": Spelling(
        lambda x: torch.sparse.addmm(_none(x, ROWS, 2), x.to_sparse(), _ones(x, LONG, 2)), on_cards=False
    ),
    "sparse.mm with ones": Spelling(lambda x: torch.sparse.mm(x.to_sparse(), _ones(x, LONG, 2)), on_cards=False),
}
_REDUCTIONS: dict[str, Spelling] = {
    "sum": Spelling(lambda x: x.sum(-1)),
    "sum of columns": Spelling(lambda x: x.t().contiguous().sum(0)),
    "sum of a vector": Spelling(lambda x: x[0].sum(), rows=1),
    "sum of a matrix": Spelling(lambda x: x[:1].reshape(100, 200).sum(), rows=1),
    "mean": Spelling(lambda x: x.mean(-1), of=LONG),
    "mean of columns": Spelling(lambda x: x.t().contiguous().mean(0), of=LONG),
    "mean of two dimensions": Spelling(lambda x: _image(x).mean((-2, -1)).flatten(), of=LONG),
    "mean of a vector": Spelling(lambda x: x[0].mean(), of=LONG, rows=1),
    "mean of a matrix": Spelling(lambda x: x[:1].reshape(100, 200).mean(), of=LONG, rows=1),
    "nansum": Spelling(lambda x: x.nansum(-1)),
    "nanmean": Spelling(lambda x: x.nanmean(-1), of=LONG),
    "masked.sum": Spelling(lambda x: torch.masked.sum(x, -1)),
    "masked.mean": Spelling(lambda x: torch.masked.mean(x, -1), of=LONG),
    "cumsum": Spelling(lambda x: x.cumsum(-1)[:, -1]),
    "cumsum of a vector": Spelling(lambda x: x[0].cumsum(0)[-1:], rows=1),
    "cumsum of columns": Spelling(lambda x: x.t().contiguous().cumsum(0)[-1]),
    "norm of order 1": Spelling(lambda x: x.norm(1, dim=-1)),
    "norm of order 1 of columns": Spelling(lambda x: x.t().contiguous().norm(1, dim=0)),
    "vector_norm of order 1": Spelling(lambda x: torch.linalg.vector_norm(x, 1, dim=-1)),
    "vector_norm of order 1 of a vector": Spelling(lambda x: torch.linalg.vector_norm(x[0], 1), rows=1),
    "matrix_norm of order inf": Spelling(lambda x: torch.linalg.matrix_norm(x[:1], float("inf")), rows=1),
    "dist of order 1": Spelling(lambda x: torch.dist(x[0], torch.zeros_like(x[0]), p=1), rows=1),
    "trapezoid": Spelling(lambda x: torch.trapezoid(F.pad(x, (1, 1)))),
    "l1_loss": Spelling(lambda x: F.l1_loss(x[0], torch.zeros_like(x[0]), reduction="sum"), rows=1),
    "mean of l1_loss": Spelling(lambda x: F.l1_loss(x[0], torch.zeros_like(x[0])), of=LONG, rows=1),
    "smooth_l1_loss": Spelling(
        lambda x: F.smooth_l1_loss(x[0], torch.zeros_like(x[0]), beta=0.0, reduction="sum"), rows=1
    ),
    "nll_loss": Spelling(lambda x: -F.nll_loss(x[:1].t(), _first(x), reduction="sum"), rows=1),
    "mean of nll_loss": Spelling(lambda x: -F.nll_loss(x[:1].t(), _first(x)), of=LONG, rows=1),
    "nll_loss of pictures": Spelling(
        lambda x: -F.nll_loss(x[:1].reshape(1, 1, 100, 200), _first(x).reshape(1, 100, 200), reduction="sum"), rows=1
    ),
    "kl_div": Spelling(lambda x: F.kl_div(-x[0], _ones(x, LONG), reduction="sum"), rows=1),
    "hinge_embedding_loss": Spelling(lambda x: F.hinge_embedding_loss(x[0], _ones(x, LONG), reduction="sum"), rows=1),
    "margin_ranking_loss": Spelling(
        lambda x: F.margin_ranking_loss(-x[0], torch.zeros_like(x[0]), _ones(x, LONG), reduction="sum"), rows=1
    ),
    "sparse.sum": Spelling(lambda x: torch.sparse.sum(x.to_sparse(), 1).to_dense(), on_cards=False),
}
_POOLS: dict[str, Spelling] = {
    "avg_pool1d": Spelling(lambda x: F.avg_pool1d(x, LONG), of=LONG),
    "avg_pool2d": Spelling(lambda x: F.avg_pool2d(_image(x), (100, 200)).flatten(), of=LONG),
    "avg_pool2d channels last": Spelling(lambda x: F.avg_pool2d(_last(x), (100, 200)).flatten(), of=LONG),
    "avg_pool3d": Spelling(lambda x: F.avg_pool3d(_volume(x), (10, 10, 200)).flatten(), of=LONG, on_cards=False),
    "avg_pool3d channels last": Spelling(
        lambda x: F.avg_pool3d(_last_3d(x), (10, 10, 200)).flatten(), of=LONG, on_cards=False
    ),
    "avg_pool2d divided by 1": Spelling(lambda x: F.avg_pool2d(_image(x), (100, 200), divisor_override=1).flatten()),
    "adaptive_avg_pool1d": Spelling(lambda x: F.adaptive_avg_pool1d(x, 1), of=LONG),
    "adaptive_avg_pool2d": Spelling(lambda x: F.adaptive_avg_pool2d(_image(x), 1).flatten(), of=LONG),
    "adaptive_avg_pool2d channels last": Spelling(lambda x: F.adaptive_avg_pool2d(_last(x), 1).flatten(), of=LONG),
    "adaptive_avg_pool3d": Spelling(lambda x: F.adaptive_avg_pool3d(_volume(x), 1).flatten(), of=LONG, on_cards=False),
    "adaptive_avg_pool3d channels last": Spelling(
        lambda x: F.adaptive_avg_pool3d(_last_3d(x), 1).flatten(), of=LONG, on_cards=False
    ),
    "adaptive_avg_pool1d of two places": Spelling(lambda x: _halves(F.adaptive_avg_pool1d(_twice(x), 2)), of=LONG),
    "adaptive_avg_pool2d of two places": Spelling(
        lambda x: _halves(F.adaptive_avg_pool2d(_image(x).repeat(1, 1, 1, 2), (1, 2))), of=LONG
    ),
    "adaptive_avg_pool3d of two places": Spelling(
        lambda x: _halves(F.adaptive_avg_pool3d(_volume(x).repeat(1, 1, 1, 1, 2), (1, 1, 2))), of=LONG, on_cards=False
    ),
    "lp_pool1d of order 1": Spelling(lambda x: F.lp_pool1d(x, 1.0, LONG)),
    "interpolate area": Spelling(lambda x: F.interpolate(_image(x), size=1, mode="area").flatten(), of=LONG),
}
_PLACES: dict[str, Spelling] = {
    "index_add": Spelling(lambda x: _none(x, 2, ROWS).index_add(0, _first(x), x.t())[0], on_cards=False),
    "index_add of columns": Spelling(lambda x: _none(x, ROWS, 2).index_add(1, _first(x), x)[:, 0], on_cards=False),
    "index_add of one row": Spelling(lambda x: _none(x, 2).index_add(0, _first(x), x[0])[:1], rows=1, on_cards=False),
    "scatter_add": Spelling(
        lambda x: _none(x, ROWS, 2).scatter_add(1, _first(x).expand(ROWS, LONG), x)[:, 0], on_cards=False
    ),
    "scatter_add of columns": Spelling(
        lambda x: _none(x, 2, ROWS).scatter_add(0, _first(x)[:, None].expand(LONG, ROWS), x.t())[0], on_cards=False
    ),
    "scatter_reduce": Spelling(
        lambda x: _none(x, ROWS, 2).scatter_reduce(1, _first(x).expand(ROWS, LONG), x, "sum")[:, 0], on_cards=False
    ),
    "scatter_reduce mean": Spelling(
        lambda x: _none(x, ROWS, 2).scatter_reduce(1, _first(x).expand(ROWS, LONG), x, "mean", include_self=False)[
            :, 0
        ],
        of=LONG,
        on_cards=False,
    ),
    "index_reduce mean": Spelling(
        lambda x: _none(x, ROWS, 2).index_reduce(1, _first(x), x, "mean", include_self=False)[:, 0],
        of=LONG,
        on_cards=False,
    ),
    "index_put": Spelling(
        lambda x: _none(x, 2, ROWS).index_put((_first(x),), x.t(), accumulate=True)[0], on_cards=False
    ),
    "index_put of one row": Spelling(
        lambda x: _none(x, 2).index_put((_first(x),), x[0], accumulate=True)[:1], rows=1, on_cards=False
    ),
    "put": Spelling(lambda x: _none(x, 2).put(_first(x), x[0], accumulate=True)[:1], rows=1, on_cards=False),
    "segment_reduce": Spelling(lambda x: _segment(x, "sum"), on_cards=False),
    "segment_reduce mean": Spelling(lambda x: _segment(x, "mean"), of=LONG, on_cards=False),
    "embedding_bag": Spelling(lambda x: _bag(x, "sum"), on_cards=False),
    "embedding_bag mean": Spelling(lambda x: _bag(x, "mean"), of=LONG, on_cards=False),
    "embedding_bag weighted": Spelling(lambda x: _bag(x, "sum", weighted=True), on_cards=False),
    "sparse_coo_tensor to_dense": Spelling(lambda x: _sparse(x).to_dense()[0], on_cards=False),
    "sparse_coo_tensor coalesce": Spelling(lambda x: _sparse(x).coalesce().to_dense()[0], on_cards=False),
    "add of a sparse_coo_tensor": Spelling(lambda x: _none(x, 2, ROWS).add_(_sparse(x))[0], on_cards=False),
    "fold": Spelling(
        lambda x: F.fold(x[:, : 100 * 200].reshape(ROWS, LONG, 1), (1, LONG), (1, LONG)).sum(-1).flatten(),
        on_cards=False,
    ),
}
SPELLINGS: dict[str, Spelling] = {**_REDUCTIONS, **_PRODUCTS, **_POOLS, **_PLACES}


# --- what is repeated forward is added up backward

FEW = 8
MANY = 10_000
"""Samples: more than fp16 adds up one by one."""


@dataclass(frozen=True)
class Repeat:
    """An op that uses each element of a tensor of ROWS rows of FEW thousands of times. `on_cards` as in `Spelling`."""

    call: Call
    on_cards: bool = True


def _column(x: Tensor) -> Tensor:
    return x[0, :4]


def _square(x: Tensor) -> Tensor:
    return x[:, :4].reshape(1, ROWS, 2, 2)


def _resized(mode: str, size: tuple[int, int] = (200, 100), *, last: bool = False, **options: bool) -> Call:
    def resize(x: Tensor) -> Tensor:
        square = _square(x).contiguous(memory_format=torch.channels_last) if last else _square(x)
        return F.interpolate(square, size=size, mode=mode, **options)

    return resize


_INDEXING: dict[str, Repeat] = {
    "expand": Repeat(lambda x: x.unsqueeze(-1).expand(ROWS, FEW, LONG // 4)),
    "repeat": Repeat(lambda x: x.repeat(1, LONG // FEW)),
    "repeat_interleave": Repeat(lambda x: x.repeat_interleave(LONG, 1), on_cards=False),
    "index_select": Repeat(lambda x: x.index_select(1, _first(x)), on_cards=False),
    "gather": Repeat(lambda x: x.gather(1, _first(x).expand(ROWS, LONG)), on_cards=False),
    "take": Repeat(lambda x: x.take(_first(x)), on_cards=False),
    "take_along_dim": Repeat(lambda x: x.take_along_dim(_first(x).expand(ROWS, LONG), 1), on_cards=False),
    "index by a tensor": Repeat(lambda x: x[0][_first(x)], on_cards=False),
    "index rows by a tensor": Repeat(lambda x: x[_first(x)], on_cards=False),
    "embedding": Repeat(lambda x: F.embedding(_first(x), x), on_cards=False),
    "embedding_bag": Repeat(lambda x: F.embedding_bag(_first(x).view(-1, 2), x, mode="sum"), on_cards=False),
    "embedding_bag mean": Repeat(lambda x: F.embedding_bag(_first(x).view(-1, 2), x, mode="mean"), on_cards=False),
    "embedding_bag weights": Repeat(
        lambda x: F.embedding_bag(
            torch.zeros(ROWS, FEW, dtype=torch.long, device=x.device),
            _ones(x, 2, LONG),
            mode="sum",
            per_sample_weights=x,
        ),
        on_cards=False,
    ),
    "maximum": Repeat(lambda x: torch.maximum(x[:, :1], _none(x, ROWS, LONG) - 100)),
    "where": Repeat(lambda x: torch.where(_ones(x, ROWS, LONG) > 0, x[:, :1], _none(x, ROWS, LONG))),
    "mul": Repeat(lambda x: x[:, :1] * _ones(x, ROWS, LONG)),
    "addcmul": Repeat(lambda x: torch.addcmul(_none(x, ROWS, LONG), x[:, :1], _ones(x, ROWS, LONG))),
    "copy_": Repeat(lambda x: _none(x, ROWS, LONG).copy_(x[:, :1])),
    "outer": Repeat(lambda x: torch.outer(x[0], _ones(x, LONG))),
    "kron": Repeat(lambda x: torch.kron(x[0], _ones(x, LONG))),
    "meshgrid": Repeat(lambda x: torch.meshgrid(x[0], _none(x, LONG), indexing="ij")[0]),
    "unfold": Repeat(lambda x: F.unfold(F.pad(x[:1], (599, 599))[:, None, None], (1, 600)), on_cards=False),
    "Tensor.unfold": Repeat(lambda x: F.pad(x[:1], (599, 599)).unfold(1, 600, 1), on_cards=False),
    "pad replicate": Repeat(lambda x: F.pad(_square(x), (100, 100, 50, 50), mode="replicate"), on_cards=False),
    "mse_loss": Repeat(lambda x: F.mse_loss(x[:1].expand(LONG, FEW), _none(x, LONG, FEW), reduction="sum")),
}
_PARAMETERS: dict[str, Repeat] = {
    "bias that is added": Repeat(lambda x: _none(x, 5000, 4) + _column(x)),
    "bias of linear": Repeat(lambda x: F.linear(_none(x, LONG, 2), _none(x, 4, 2), _column(x))),
    "bias of addmm": Repeat(lambda x: torch.addmm(_column(x), _none(x, LONG, 2), _none(x, 2, 4))),
    "bias of conv1d": Repeat(lambda x: F.conv1d(_none(x, 100, 2, 200), _none(x, 4, 2, 1), _column(x))),
    "bias of conv2d": Repeat(lambda x: F.conv2d(_none(x, 50, 2, 20, 20), _none(x, 4, 2, 1, 1), _column(x))),
    "bias of conv_transpose2d": Repeat(
        lambda x: F.conv_transpose2d(_none(x, 50, 2, 20, 20), _none(x, 2, 4, 1, 1), _column(x))
    ),
    "weight of linear": Repeat(lambda x: F.linear(_ones(x, LONG, FEW), x)),
    "weight of matmul": Repeat(lambda x: _ones(x, 400, 50, FEW) @ x.t()),
    "weight of bmm": Repeat(lambda x: torch.bmm(_ones(x, 400, 50, FEW), x.t().expand(400, FEW, ROWS))),
    "weight of einsum": Repeat(lambda x: torch.einsum("bni,oi->bno", _ones(x, 400, 50, FEW), x)),
    "weight of bilinear": Repeat(
        lambda x: F.bilinear(_ones(x, MANY, 2), _ones(x, MANY, 4), x.reshape(ROWS, 2, 4)), on_cards=False
    ),
    "keys and values of attention": Repeat(
        lambda x: F.scaled_dot_product_attention(_ones(x, 1, 1, MANY, FEW) / 8, x[None, None], x[None, None])
    ),
    "weight of rms_norm": Repeat(lambda x: F.rms_norm(_ones(x, LONG, 4), [4], _column(x)), on_cards=False),
    "bias of instance_norm": Repeat(
        lambda x: F.instance_norm(_none(x, 100, 4, 200), None, None, _ones(x, 4), _column(x))
    ),
    "bias of group_norm": Repeat(lambda x: F.group_norm(_none(x, 100, 4, 200), 2, _ones(x, 4), _column(x))),
    "bias of group_norm without a weight": Repeat(
        lambda x: F.group_norm(_none(x, 100, 4, 200), 2, None, _column(x)), on_cards=False
    ),
    "bias of batch_norm": Repeat(
        lambda x: F.batch_norm(_none(x, 100, 4, 200), None, None, _ones(x, 4), _column(x), training=True)
    ),
    "weight of prelu": Repeat(lambda x: F.prelu(-_ones(x, 1000, 4, 20), _column(x))),
}


def _convolved(call: Callable[..., Tensor], samples: Sequence[int], weight: Sequence[int], **options: int) -> Repeat:
    """Return a convolution of ones by a weight of the numbers of x. Cards have no library for all dilated ones."""
    return Repeat(lambda x: call(_ones(x, *samples), x.reshape(*weight), **options), on_cards="dilation" not in options)


# Each weight is used for each sample, or for each place of one sample.
_CONVOLUTIONS: dict[str, Repeat] = {
    "weight of conv1d": _convolved(F.conv1d, (50, FEW, 400), (ROWS, FEW, 1)),
    "weight of conv1d over samples": _convolved(F.conv1d, (MANY, FEW, 1), (ROWS, FEW, 1)),
    "weight of conv1d over space": _convolved(F.conv1d, (1, FEW, LONG), (ROWS, FEW, 1)),
    "weight of conv2d over samples": _convolved(F.conv2d, (MANY, 2, 2, 2), (ROWS, 2, 2, 2)),
    "weight of conv2d over space": _convolved(F.conv2d, (1, 2, 142, 142), (ROWS, 2, 2, 2)),
    "weight of conv2d channels last over samples": Repeat(
        lambda x: F.conv2d(
            _ones(x, MANY, 2, 2, 2).contiguous(memory_format=torch.channels_last), x.reshape(ROWS, 2, 2, 2)
        )
    ),
    "weight of grouped conv2d over samples": _convolved(F.conv2d, (MANY, 6, 2, 2), (ROWS, 2, 2, 2), groups=ROWS),
    "weight of depthwise conv2d over samples": _convolved(F.conv2d, (MANY, 3, 2, 4), (ROWS, 1, 2, 4), groups=ROWS),
    "weight of depthwise conv2d over space": _convolved(F.conv2d, (1, 3, 142, 142), (ROWS, 1, 2, 4), groups=ROWS),
    "weight of dilated conv2d over samples": _convolved(F.conv2d, (MANY, 2, 3, 3), (ROWS, 2, 2, 2), dilation=2),
    "weight of conv3d over samples": _convolved(F.conv3d, (MANY, 1, 2, 2, 2), (ROWS, 1, 2, 2, 2)),
    "weight of conv3d over space": _convolved(F.conv3d, (1, 1, 28, 28, 28), (ROWS, 1, 2, 2, 2)),
    "weight of conv_transpose1d over samples": _convolved(F.conv_transpose1d, (MANY, ROWS, 1), (ROWS, 4, 2)),
    "weight of conv_transpose2d over samples": _convolved(F.conv_transpose2d, (MANY, ROWS, 1, 1), (ROWS, 2, 2, 2)),
    "weight of conv_transpose2d over space": _convolved(F.conv_transpose2d, (1, ROWS, 142, 142), (ROWS, 2, 2, 2)),
    "weight of conv_transpose3d over samples": _convolved(
        F.conv_transpose3d, (MANY, ROWS, 1, 1, 1), (ROWS, 1, 2, 2, 2)
    ),
    "weight of conv_tbc": Repeat(
        lambda x: torch.conv_tbc(_ones(x, 50, 400, 4), x.reshape(2, 4, ROWS), _none(x, ROWS)), on_cards=False
    ),
}
_RESAMPLING: dict[str, Repeat] = {
    "interpolate nearest": Repeat(_resized("nearest"), on_cards=False),
    "interpolate nearest-exact": Repeat(_resized("nearest-exact"), on_cards=False),
    "interpolate nearest channels last": Repeat(_resized("nearest", last=True), on_cards=False),
    "interpolate bilinear": Repeat(_resized("bilinear"), on_cards=False),
    "interpolate bilinear aligned": Repeat(_resized("bilinear", align_corners=True), on_cards=False),
    "interpolate bilinear channels last": Repeat(_resized("bilinear", last=True), on_cards=False),
    "interpolate bicubic": Repeat(_resized("bicubic"), on_cards=False),
    **{
        f"interpolate {mode} to {rows} rows": Repeat(_resized(mode, (rows, LONG // rows)), on_cards=False)
        for mode in ("nearest", "bilinear", "bicubic")
        for rows in (2, LONG // 2)
    },
    "interpolate linear": Repeat(lambda x: F.interpolate(x[:, :2][None], size=LONG, mode="linear"), on_cards=False),
    "interpolate trilinear": Repeat(
        lambda x: F.interpolate(x.reshape(1, ROWS, 2, 2, 2), size=(20, 20, 50), mode="trilinear"), on_cards=False
    ),
    "interpolate nearest of volumes": Repeat(
        lambda x: F.interpolate(x.reshape(1, ROWS, 2, 2, 2), size=(20, 20, 50), mode="nearest"), on_cards=False
    ),
    "adaptive_avg_pool2d": Repeat(lambda x: F.adaptive_avg_pool2d(_square(x), (200, 100)), on_cards=False),
    "adaptive_avg_pool2d channels last": Repeat(
        lambda x: F.adaptive_avg_pool2d(_square(x).contiguous(memory_format=torch.channels_last), (200, 100)),
        on_cards=False,
    ),
    "adaptive_avg_pool3d": Repeat(
        lambda x: F.adaptive_avg_pool3d(x.reshape(1, ROWS, 2, 2, 2), (20, 20, 50)), on_cards=False
    ),
    "adaptive_max_pool2d": Repeat(lambda x: F.adaptive_max_pool2d(_square(x), (200, 100)), on_cards=False),
    "max_pool2d": Repeat(
        lambda x: F.max_pool2d(F.pad(_square(x) + 100, (29, 29, 29, 29)), 30, stride=1), on_cards=False
    ),
    "grid_sample": Repeat(
        lambda x: F.grid_sample(_square(x), _none(x, 1, 200, 100, 2), align_corners=False), on_cards=False
    ),
    "grid_sample of volumes": Repeat(
        lambda x: F.grid_sample(x.reshape(1, ROWS, 2, 2, 2), _none(x, 1, 20, 20, 50, 3), align_corners=False),
        on_cards=False,
    ),
}
REPEATS: dict[str, Repeat] = {**_INDEXING, **_PARAMETERS, **_CONVOLUTIONS, **_RESAMPLING}

ROWS_OF_NUMBERS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "numbers up to 3": lambda rng: torch.randint(0, 4, (ROWS, LONG), generator=rng).double(),
    "the last one alone": lambda rng: F.pad(torch.ones(ROWS, 1, dtype=torch.float64), (LONG - 1, 0)),
    "the first one alone": lambda rng: F.pad(torch.ones(ROWS, 1, dtype=torch.float64), (0, LONG - 1)),
}
"""What is added up: no sum of any part is beyond what float32 holds exactly."""
AVERAGED: dict[str, Callable[[torch.Generator], Tensor]] = {
    "numbers of 8 to 16": lambda rng: torch.randint(8, 17, (ROWS, LONG), generator=rng).double(),
}
"""What averages add up as well: the sum is beyond fp16, the average is not."""

QUICK = {
    *("sum of a vector", "mean of a vector", "cumsum of a vector"),
    *("sum", "mean", "cumsum of columns", "norm of order 1", "mm with ones", "linear with ones", "bmm with ones"),
    *("einsum with ones", "conv2d", "avg_pool2d", "adaptive_avg_pool2d channels last", "index_add of one row"),
    *("scatter_add", "scatter_reduce mean", "index_put", "segment_reduce", "embedding_bag", "sparse.sum", "l1_loss"),
    *(
        "expand",
        "gather",
        "index by a tensor",
        "embedding",
        "mul",
        "bias of linear",
        "bias of conv2d",
        "weight of linear",
        "weight of conv2d over samples",
        "weight of conv2d over space",
    ),
    *("bias of group_norm", "bias of batch_norm", "interpolate bilinear", "adaptive_avg_pool2d"),
}
"""Spellings and repeats of the depth `quick`."""
QUICK_OUTSIDE = (
    "sum",
    "mean",
    "mean of a vector",
    "adaptive_avg_pool2d of two places",
    "adaptive_avg_pool3d of two places",
)
"""Spellings of the depth `quick` outside of regions."""
