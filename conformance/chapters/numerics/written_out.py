"""Functions beside their documented formulas, written out in sums, products, exponentials and indexing alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .drawn_ops import Draws


@dataclass(frozen=True)
class WrittenOut:
    """A call of operands, and its formula: float64 operands, which may need gradients, with a float64 result.

    `fixed` are integers and masks, which no type changes; they follow the operands.
    """

    name: str
    call: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    operands: tuple[Tensor, ...]
    fixed: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def described(self) -> str:
        """Return the call in words."""
        shapes = ", ".join(str(tuple(one.shape)) for one in self.operands)
        return f"{self.name} of {shapes} {self.options or ''}".strip()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product as a sum of products."""
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)


def _softmax(x: Tensor, dim: int) -> Tensor:
    powers = (x - x.detach().amax(dim, keepdim=True)).exp()
    return powers / powers.sum(dim, keepdim=True)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if enable_gqa:
        heads = torch.arange(q.shape[-3], device=q.device) // (q.shape[-3] // k.shape[-3])
        k, v = k[..., heads, :, :], v[..., heads, :, :]
    scores = _product(q, k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        rows, columns = (torch.arange(size, device=q.device) for size in scores.shape[-2:])
        mask = columns <= rows[:, None]
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return _product(_softmax(scores, -1), v)


def attention(d: Draws) -> Iterator[WrittenOut]:
    """Yield attention with each of its options, and values of another size than keys."""
    call = F.scaled_dot_product_attention
    chosen: tuple[dict[str, Any], ...] = ({}, {"is_causal": True}, {"scale": 0.5})
    for size, options in itertools.product((16, 8, 24), chosen):
        operands = d.normal(2, 3, 5, 16), d.normal(2, 3, 7, 16), d.normal(2, 3, 7, size)
        yield WrittenOut("attention", call, _attention, operands, options=options)
    for heads, queries, keys in (*itertools.product((1, 2), (1, 5), (6, 96)), (2, 1, 1024)):
        operands = d.normal(2, 4, queries, 16), d.normal(2, heads, keys, 16), d.normal(2, heads, keys, 16)
        yield WrittenOut("attention", call, _attention, operands, options={"enable_gqa": True})
    for shape in ((5, 7), (2, 1, 5, 7), (1, 3, 5, 7), (2, 3, 1, 7)):
        operands = d.normal(2, 3, 5, 16), d.normal(2, 3, 7, 16), d.normal(2, 3, 7, 16)
        seen = (d.normal(*shape) > -1).index_fill(-1, torch.tensor(0), True)
        yield WrittenOut("attention", call, _attention, operands, (seen,))


def _normal(x: Tensor, dims: tuple[int, ...], eps: float, centred: bool = True) -> Tensor:
    moved = x - x.mean(dims, keepdim=True) if centred else x
    return moved / (moved.square().mean(dims, keepdim=True) + eps).sqrt()


def _of_channels(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    shape = (1, -1, *[1] * (x.dim() - 2))
    return x * weight.view(shape) + bias.view(shape)


def normalizations(d: Draws) -> Iterator[WrittenOut]:
    """Yield normalizations of rows, images and volumes, in training and in evaluation."""
    for size in (8, 40):
        rows, weight, bias = d.normal(5, size), d.positive(size), d.normal(size)
        yield WrittenOut(
            "layer_norm",
            lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-3),
            lambda x, w, b: _normal(x, (-1,), 1e-3) * w + b,
            (rows, weight, bias),
        )
        yield WrittenOut(
            "rms_norm",
            lambda x, w: F.rms_norm(x, w.shape, w, 1e-3),
            lambda x, w: _normal(x, (-1,), 1e-3, centred=False) * w,
            (rows, weight),
        )
        yield WrittenOut("rms_norm without a weight", lambda x: F.rms_norm(x, x.shape[-1:], None, 1e-3),
                         lambda x: _normal(x, (-1,), 1e-3, centred=False), (rows,))  # fmt: skip
        yield WrittenOut("normalize", F.normalize, lambda x: x / x.square().sum(1, keepdim=True).sqrt(), (rows,))
    for places in ((6,), (3, 5), (2, 3, 3)):
        x, weight, bias = d.normal(4, 6, *places), d.positive(6), d.normal(6)
        spatial = tuple(range(2, x.dim()))
        yield WrittenOut(
            "batch_norm in training",
            lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
            lambda x, w, b, dims=(0, *spatial): _of_channels(_normal(x, dims, 1e-5), w, b),
            (x, weight, bias),
        )
        yield WrittenOut(
            "batch_norm in evaluation",
            lambda x, w, b, mean, var: F.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), w, b),
            lambda x, w, b, mean, var: _of_channels(x, w / (var + 1e-5).sqrt(), b - mean * w / (var + 1e-5).sqrt()),
            (x, weight, bias),
            (d.normal(6), d.positive(6)),
        )
        yield WrittenOut(
            "instance_norm",
            lambda x, w, b: F.instance_norm(x, None, None, w, b),
            lambda x, w, b, dims=spatial: _of_channels(_normal(x, dims, 1e-5), w, b),
            (x, weight, bias),
        )
        for groups in (1, 3):
            yield WrittenOut(
                "group_norm",
                lambda x, w, b, groups=groups: F.group_norm(x, groups, w, b),
                lambda x, w, b, groups=groups: _of_channels(
                    _normal(x.reshape(x.shape[0], groups, -1), (-1,), 1e-5).reshape(x.shape), w, b
                ),
                (x, weight, bias),
                options={"groups": groups},
            )


def _window(
    x: Tensor, kernel: tuple[int, int], stride: int, padding: int, dilation: int = 1, fill: float = 0.0
) -> Tensor:
    """Return the elements of each window of images: N, C, rows, columns, taps."""
    high, wide = x.shape[-2:]
    framed = x.new_full((*x.shape[:-2], high + 2 * padding, wide + 2 * padding), fill)
    framed[..., padding : padding + high, padding : padding + wide] = x
    rows, columns = (
        torch.arange(0, size + 2 * padding - dilation * (taps - 1), stride, device=x.device)[:, None]
        + dilation * torch.arange(taps, device=x.device)
        for size, taps in zip((high, wide), kernel, strict=True)
    )
    return framed[..., rows[:, None, :, None], columns[None, :, None, :]].flatten(-2)


def _conv2d(
    x: Tensor, weight: Tensor, *, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1
) -> Tensor:
    taps = _window(x, (weight.shape[2], weight.shape[3]), stride, padding, dilation)
    n, _, high, wide, size = taps.shape
    taps = taps.reshape(n, groups, 1, -1, high, wide, size)
    kernels = weight.reshape(1, groups, weight.shape[0] // groups, -1, 1, 1, size)
    return (taps * kernels).sum((3, 6)).reshape(n, weight.shape[0], high, wide)


def _transposed(x: Tensor, weight: Tensor, *, stride: int, groups: int) -> Tensor:
    """Return what each element adds to its window of the result."""
    n, channels, high, wide = x.shape
    rows, columns = weight.shape[2:]
    parts = x.reshape(n, groups, channels // groups, 1, high, wide, 1, 1)
    kernels = weight.reshape(1, groups, channels // groups, -1, 1, 1, rows, columns)
    added = (parts * kernels).sum(2).flatten(1, 2)
    whole = x.new_zeros(n, added.shape[1], (high - 1) * stride + rows, (wide - 1) * stride + columns)
    down, across = torch.meshgrid(
        torch.arange(high, device=x.device) * stride, torch.arange(wide, device=x.device) * stride, indexing="ij"
    )
    places = (
        (down[..., None, None] + torch.arange(rows, device=x.device)[:, None]).expand(high, wide, rows, columns),
        (across[..., None, None] + torch.arange(columns, device=x.device)).expand(high, wide, rows, columns),
    )
    flat = (places[0] * whole.shape[3] + places[1]).flatten()
    return whole.flatten(2).index_add(2, flat, added.flatten(2)).reshape(whole.shape)


def convolutions(d: Draws) -> Iterator[WrittenOut]:
    """Yield convolutions of one and several taps, in groups, of channels alone, and transposed ones."""
    for kernel, stride, groups in itertools.product(((1, 1), (3, 2)), (1, 2), (1, 2, 4)):
        options: dict[str, Any] = {"stride": stride, "groups": groups}
        operands = d.normal(2, 4, 6, 7), d.normal(8, 4 // groups, *kernel)
        yield WrittenOut("conv2d", F.conv2d, _conv2d, operands, options=options)
        operands = d.normal(2, 4, 3, 4), d.normal(4, 3, *kernel)
        yield WrittenOut("conv_transpose2d", F.conv_transpose2d, _transposed, operands, options=options)
    for channels, stride in itertools.product((8, 16, 24), (1, 2)):
        options = {"stride": stride, "padding": 1, "groups": channels}
        operands = d.normal(2, channels, 6, 6), d.normal(channels, 1, 3, 3)
        yield WrittenOut("conv2d of channels alone", F.conv2d, _conv2d, operands, options=options)
    for padding, dilation in itertools.product((0, 1), (1, 2)):
        options = {"padding": padding, "dilation": dilation}
        operands = d.normal(2, 3, 8, 7), d.normal(5, 3, 3, 3)
        yield WrittenOut("conv2d", F.conv2d, _conv2d, operands, options=options)


def pictures(d: Draws) -> Iterator[WrittenOut]:
    """Yield pools of windows and resizings by whole factors."""
    for stride, padding in ((1, 0), (2, 0), (2, 1)):
        options = {"stride": stride, "padding": padding}
        x = d.distinct(2, 3, 6, 7)
        yield WrittenOut(
            "max_pool2d",
            lambda x, **options: F.max_pool2d(x, 3, **options),
            lambda x, stride, padding: _window(x, (3, 3), stride, padding, fill=-torch.inf).amax(-1),
            (x,),
            options=options,
        )
        yield WrittenOut(
            "avg_pool2d",
            lambda x, **options: F.avg_pool2d(x, 3, **options),
            lambda x, stride, padding: _window(x, (3, 3), stride, padding).mean(-1),
            (x,),
            options=options,
        )
    for factor in (0.25, 0.5, 2.0, 3.0):
        resized = {"scale_factor": factor, "mode": "nearest"}
        yield WrittenOut("interpolate", F.interpolate, _nearest, (d.normal(2, 3, 8, 8),), options=resized)
    yield WrittenOut("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), lambda x: x.reshape(2, 3, 2, 2, 4, 5).permute(
        0, 1, 4, 2, 5, 3).reshape(2, 3, 8, 10), (d.normal(2, 12, 4, 5),))  # fmt: skip
    yield WrittenOut("reflected", lambda x: F.pad(x, (2, 1), mode="reflect"), lambda x: x[..., [2, 1, 0, 1, 2, 3, 2]],
                     (d.normal(2, 3, 4),))  # fmt: skip


def _nearest(x: Tensor, *, scale_factor: float, mode: str) -> Tensor:
    high, wide = (int(size * scale_factor) for size in x.shape[-2:])
    rows, columns = (torch.arange(size, device=x.device) for size in (high, wide))
    rows, columns = (torch.div(one, scale_factor, rounding_mode="floor").long() for one in (rows, columns))
    return x[..., rows[:, None], columns]


def rows(d: Draws) -> Iterator[WrittenOut]:
    """Yield softmax and its relatives, sums and products along each dimension."""
    for shape, dim in itertools.product(((4, 6), (3, 5, 40)), (0, -1)):
        x = d.normal(*shape)
        options = {"dim": dim}
        for name, call, formula in (
            ("softmax", torch.softmax, _softmax),
            ("softmin", F.softmin, lambda x, dim: _softmax(-x, dim)),
            ("log_softmax", torch.log_softmax, lambda x, dim: x - _logsumexp(x, dim, keepdim=True)),
            ("logsumexp", torch.logsumexp, _logsumexp),
            ("cumsum", torch.cumsum, lambda x, dim: torch.stack(_running(x.unbind(dim)), dim)),
            ("glu", F.glu, lambda x, dim: (lambda a, b: a / (1 + (-b).exp()))(*x.chunk(2, dim))),
            ("var", torch.var, lambda x, dim: _moved(x, dim).square().sum(dim) / (x.shape[dim] - 1)),
            ("norm", lambda x, dim: torch.linalg.vector_norm(x, dim=dim), lambda x, dim: x.square().sum(dim).sqrt()),
        ):
            if name != "glu" or shape[dim] % 2 == 0:
                yield WrittenOut(name, call, formula, (x,), options=options)
        factors = d.positive(*shape[:1], 4) if dim == -1 else d.positive(4, 3)
        yield WrittenOut("prod", torch.prod, _multiplied, (factors,), options=options)
    for count in (1, 3):
        yield WrittenOut("prod of zeros and numbers", torch.prod, _multiplied, (torch.arange(count).double(),),
                         options={"dim": 0})  # fmt: skip


def _running(parts: tuple[Tensor, ...]) -> list[Tensor]:
    return list(itertools.accumulate(parts, torch.add))


def _multiplied(x: Tensor, dim: int) -> Tensor:
    found = torch.ones_like(x.select(dim, 0))
    for part in x.unbind(dim):
        found = found * part
    return found


def _moved(x: Tensor, dim: int) -> Tensor:
    return x - x.mean(dim, keepdim=True)


def _logsumexp(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    largest = x.detach().amax(dim, keepdim=True)
    found = (x - largest).exp().sum(dim, keepdim=True).log() + largest
    return found if keepdim else found.squeeze(dim)


def _stopped(x: Tensor, source: Tensor, at: Tensor, reduce: str) -> Tensor:
    return x.detach().scatter(0, at, source.detach(), reduce=reduce) + 0 * x


def places(d: Draws) -> Iterator[WrittenOut]:
    """Yield reads and writes at places that are named once, twice or not at all."""
    index = torch.tensor([[0, 2, 2], [1, 1, 0], [3, 2, 2], [0, 0, 0]])

    def each(x: Tensor, source: Tensor, at: Tensor, merge: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        found = {(i, j): x[i, j] for i, j in itertools.product(*map(range, x.shape))}
        for i, j in itertools.product(*map(range, at.shape)):
            place = (int(at[i, j]), j)
            found[place] = merge(found[place], source[i, j])
        return torch.stack(list(found.values())).view(x.shape)

    x, source = d.positive(4, 3), d.positive(4, 3)
    for name, call, merge in (
        ("scatter_add", lambda x, s, at: x.scatter_add(0, at, s), torch.add),
        ("scatter_reduce, sum", lambda x, s, at: x.scatter_reduce(0, at, s, "sum"), torch.add),
        ("scatter_reduce, prod", lambda x, s, at: x.scatter_reduce(0, at, s, "prod"), torch.mul),
        ("scatter with add", lambda x, s, at: _stopped(x, s, at, "add"), torch.add),
        ("scatter with multiply", lambda x, s, at: _stopped(x, s, at, "multiply"), torch.mul),
    ):

        def formula(
            x: Tensor, s: Tensor, at: Tensor, merge: Callable[[Tensor, Tensor], Tensor] = merge, name: str = name
        ) -> Tensor:
            if "with" in name:  # which has no gradients
                return each(x.detach(), s.detach(), at, merge) + 0 * x
            return each(x, s, at, merge)

        yield WrittenOut(name, call, formula, (x, source), (index,))
    many = torch.tensor([2, 0, 2, 3])
    yield WrittenOut("index_add", lambda x, s, at: x.index_add(0, at, s, alpha=0.5), lambda x, s, at: torch.stack(
        [x[i] + 0.5 * sum((s[j] for j in range(4) if int(at[j]) == i), torch.zeros_like(s[0])) for i in range(4)]
    ), (x, source), (many,))  # fmt: skip
    yield WrittenOut("embedding", lambda w, at: F.embedding(at, w), lambda w, at: w[at], (d.normal(5, 7),), (index,))
    yield WrittenOut("embedding_bag", lambda w, at: F.embedding_bag(at, w, mode="mean"),
                     lambda w, at: w[at].mean(1), (d.normal(5, 7),), (index,))  # fmt: skip


def _phi(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def _softplus(x: Tensor, beta: float = 1.0) -> Tensor:
    return (1 + (beta * x).exp()).log() / beta


def activations(d: Draws) -> Iterator[WrittenOut]:
    """Yield activations of numbers up to about three and away from their kinks."""
    for name, call, formula in (
        ("gelu", F.gelu, lambda x: x * _phi(x)),
        ("gelu, tanh", lambda x: F.gelu(x, approximate="tanh"), lambda x: 0.5 * x * (
            1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))),
        ("silu", F.silu, lambda x: x * _sigmoid(x)),
        ("mish", F.mish, lambda x: x * torch.tanh(_softplus(x))),
        ("softplus", lambda x: F.softplus(x, 2.0), lambda x: _softplus(x, 2.0)),
        ("sigmoid", torch.sigmoid, _sigmoid),
        ("logsigmoid", F.logsigmoid, lambda x: -_softplus(-x)),
        ("elu", lambda x: F.elu(x, 0.5), lambda x: torch.where(x > 0, x, 0.5 * (x.exp() - 1))),
        ("celu", lambda x: F.celu(x, 2.0), lambda x: torch.where(x > 0, x, 2 * ((x / 2).exp() - 1))),
        ("leaky_relu", lambda x: F.leaky_relu(x, 0.25), lambda x: torch.where(x > 0, x, 0.25 * x)),
        ("hardswish", F.hardswish, lambda x: x * (x + 3).clamp(0, 6) / 6),
        ("softsign", F.softsign, lambda x: x / (1 + x.abs())),
        ("tanhshrink", F.tanhshrink, lambda x: x - torch.tanh(x)),
        ("softshrink", lambda x: F.softshrink(x, 0.25), lambda x: x - x.clamp(-0.25, 0.25)),
    ):  # fmt: skip
        yield WrittenOut(name, call, formula, (d.normal(40) * 1.5,))


def _nll(x: Tensor, weight: Tensor, at: Tensor) -> Tensor:
    rows = torch.arange(len(at), device=x.device)
    return -x[rows, at] * weight[at]


def losses(d: Draws) -> Iterator[WrittenOut]:
    """Yield losses of each element or row, and weighted means of them."""
    x, y = d.normal(6, 5), d.normal(6, 5)
    at = torch.tensor([0, 3, 2, 2, 1, 4])
    for name, call, formula in (
        ("mse_loss", F.mse_loss, lambda x, y: (x - y).square()),
        ("l1_loss", F.l1_loss, lambda x, y: (x - y).abs()),
        ("smooth_l1_loss", lambda x, y, reduction: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.5),
         lambda x, y: torch.where((x - y).abs() < 0.5, (x - y).square(), (x - y).abs() - 0.25)),
        ("huber_loss", lambda x, y, reduction: F.huber_loss(x, y, reduction=reduction, delta=0.5),
         lambda x, y: torch.where((x - y).abs() < 0.5, (x - y).square() / 2, 0.5 * ((x - y).abs() - 0.25))),
        ("soft_margin_loss", lambda x, y, reduction: F.soft_margin_loss(x, y.detach().sign(), reduction=reduction),
         lambda x, y: _softplus(-x * y.detach().sign())),
        ("binary_cross_entropy_with_logits", lambda x, y, reduction: F.binary_cross_entropy_with_logits(
            x, y.sigmoid(), reduction=reduction), lambda x, y: _softplus(x) - x * _sigmoid(y)),
        ("poisson_nll_loss", lambda x, y, reduction: F.poisson_nll_loss(x, y.abs(), reduction=reduction),
         lambda x, y: x.exp() - y.abs() * x),
    ):  # fmt: skip
        for reduction in ("none", "mean", "sum"):
            merge = {"none": lambda z: z, "mean": torch.mean, "sum": torch.sum}[reduction]
            yield WrittenOut(
                name,
                call,
                lambda x, y, reduction, formula=formula, merge=merge: merge(formula(x, y)),
                (x, y),
                options={"reduction": reduction},
            )
    for smoothing, ignored in itertools.product((0.0, 0.25), (-100, 2)):
        yield WrittenOut(
            "cross_entropy",
            lambda x, w, at, **options: F.cross_entropy(x, at, w.detach(), **options),
            _cross_entropy,
            (x, d.positive(5)),
            (at,),
            {"label_smoothing": smoothing, "ignore_index": ignored},
        )


def _cross_entropy(x: Tensor, weight: Tensor, at: Tensor, label_smoothing: float, ignore_index: int) -> Tensor:
    logs, weight = x - _logsumexp(x, 1, keepdim=True), weight.detach()
    counted = at != ignore_index
    smoothed = -(logs * weight).sum(1) / x.shape[1]
    each = (1 - label_smoothing) * _nll(logs, weight, at) + label_smoothing * smoothed
    return each[counted].sum() / weight[at][counted].sum()


def products(d: Draws) -> Iterator[WrittenOut]:
    """Yield products of matrices in several spellings, distances, and a cell of each recurrent kind."""
    a, b, bias = d.normal(5, 9), d.normal(9, 4), d.normal(4)
    yield WrittenOut("matmul", torch.matmul, _product, (a, b))
    yield WrittenOut("bmm", torch.bmm, _product, (d.normal(3, 5, 9), d.normal(3, 9, 4)))
    yield WrittenOut("addmm", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
                     lambda c, a, b: 0.5 * c + 2 * _product(a, b), (bias, a, b))  # fmt: skip
    yield WrittenOut("linear", lambda x, w, b: F.linear(x, w.t(), b), lambda x, w, b: _product(x, w) + b, (a, b, bias))
    yield WrittenOut("einsum", lambda a, b: torch.einsum("ik,kj->ji", a, b), lambda a, b: _product(a, b).t(), (a, b))
    yield WrittenOut("cdist", torch.cdist, lambda a, b: (a[:, None] - b).square().sum(-1).sqrt(),
                     (d.normal(5, 6), d.normal(4, 6)))  # fmt: skip
    yield WrittenOut("cosine_similarity", F.cosine_similarity, lambda x, y: (x * y).sum(1) / (
        x.square().sum(1) * y.square().sum(1)).sqrt(), (d.normal(5, 6), d.normal(5, 6)))  # fmt: skip
    yield WrittenOut("lerp", lambda x, y: torch.lerp(x, y, 0.25), lambda x, y: x + 0.25 * (y - x), (a, d.normal(5, 9)))
    operands = tuple(d.normal(*shape) * 0.5 for shape in ((2, 3), (2, 4), (12, 3), (12, 4), (12,), (12,)))
    yield WrittenOut("a GRU cell", torch.gru_cell, _gru, operands)


def _gru(x: Tensor, h: Tensor, w: Tensor, v: Tensor, b: Tensor, c: Tensor) -> Tensor:
    given, kept = (_product(x, w.t()) + b).chunk(3, 1), (_product(h, v.t()) + c).chunk(3, 1)
    reset, update = (_sigmoid(one + other) for one, other in zip(given[:2], kept[:2], strict=True))
    new = torch.tanh(given[2] + reset * kept[2])
    return (1 - update) * new + update * h


FAMILIES: dict[str, Callable[[Draws], Iterator[WrittenOut]]] = {
    "attention": attention,
    "normalizations": normalizations,
    "convolutions": convolutions,
    "pictures": pictures,
    "rows": rows,
    "places": places,
    "activations": activations,
    "losses": losses,
    "products": products,
}
"""Calls of drawn operands that round nowhere over a kink, by what they do."""
