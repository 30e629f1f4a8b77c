"""Draw calls of the ops that models are made of: sizes around those of vectors and blocks, and options together."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...oracles.relations.programs import Program, module_program, program

# Around the widths of vectors, blocks and tiles of kernels, and what is left behind the last whole one.
SIZES = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 24, 31, 33, 40)
BATCHES = (1, 2, 3, 15, 16, 17, 33, 64, 65, 130)
MANY = 2600  # more than float16 and bfloat16 count in ones
FEW = 5
A_BINADE = 128  # numbers of bfloat16
FEW_ROWS = 200  # whose sums in 16 bits are still near
DISTINCT = 2 * 29 * A_BINADE - 1  # zero, and the binades from 2**-13 to 2**15 with either sign


class Draws:
    """Numbers, choices and tensors from one seed."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(32))

    def one(self, choices: Sequence[Any]) -> Any:
        return self.random.choice(choices)

    def yes(self) -> bool:
        return self.random.random() < 0.5

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def size(self, most: int = 40) -> int:
        return int(self.one([size for size in SIZES if size <= most]))

    def sizes(self, count: int, most: int = 40, numbers: int = 6000) -> tuple[int, ...]:
        """Return so many sizes of a tensor of at most so many numbers."""
        found: tuple[int, ...] = ()
        for _ in range(count):
            found += (self.size(max(1, min(most, numbers))),)
            numbers //= found[-1]
        return found

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) + 0.5

    def distinct(self, *shape: int) -> Tensor:
        """Return numbers of which no two are equal in either 16-bit type, in a drawn order; at most DISTINCT."""
        count = torch.Size(shape).numel()
        if count > DISTINCT:
            raise ValueError(f"{count} numbers, of which the 16-bit types share {DISTINCT}")
        patterns = torch.randperm(count, generator=self.generator) - count // 2
        # From a small binade of float16 on.
        steps = patterns.abs().double()
        exponents = (steps / A_BINADE).floor() - 13
        return (patterns.sign() * torch.exp2(exponents) * (1 + steps % A_BINADE / A_BINADE)).float().view(shape)

    def index(self, count: int, *shape: int) -> Tensor:
        return torch.randint(0, count, shape, generator=self.generator)

    def maybe(self, tensor: Tensor) -> Tensor | None:
        return tensor if self.yes() else None

    def order(self, count: int) -> list[int]:
        """Return a drawn selection of dimensions, at least one."""
        return sorted(self.random.sample(range(count), self.number(1, count)))


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    return program(getattr(function, "__name__", "call"), function, args, kwargs)


def softmax(d: Draws) -> Program:
    shape = d.sizes(d.number(1, 4))
    dim = d.number(0, len(shape) - 1)
    shape = (*shape[:dim], max(shape[dim], 2), *shape[dim + 1 :])
    x = d.normal(*shape) * d.one((1, 4))
    # The CPU's logsumexp, and its log_softmax of the last dimension, are not near (AMP-NUMERICS-119).
    functions: list[Callable[..., Tensor]] = [torch.softmax, F.softmin]
    return _call(d.one(functions if dim == len(shape) - 1 else [*functions, torch.log_softmax]), x, dim)


def normalization(d: Draws) -> Program:
    kind = d.one(("layer", "layer", "rms", "group", "batch", "batch", "batch", "instance", "local"))
    eps = d.one((1e-5, 1e-3))
    if kind in ("layer", "rms"):
        inner = d.sizes(d.number(1, 3), numbers=2000)
        if inner == (1,) * len(inner):
            inner = (*inner[:-1], 8)
        x = d.normal(*d.sizes(d.number(1, 2), 17, 6000 // torch.Size(inner).numel()), *inner)
        if kind == "rms":
            return _call(F.rms_norm, x, inner, d.maybe(d.positive(*inner)), eps)
        given = (x, inner, d.maybe(d.positive(*inner)), d.maybe(d.normal(*inner)), eps)
        rows = x.numel() // torch.Size(inner).numel()
        return program("layer_norm of hundreds of rows" if rows > FEW_ROWS else "layer_norm", F.layer_norm, given, {})
    places = d.sizes(d.number(1, 3), 9, 200)
    if torch.Size(places).numel() < 2:
        places = (*places[:-1], 4)
    if kind == "group":
        groups = d.one((1, 2, 4))
        size = d.one((1, 2, 8, 9))
        channels = groups * size
        if size > 1 and d.yes():
            places = d.one(((), (1,), (1, 1)))
        x = d.normal(d.number(1, 3), channels, *places)
        return _call(F.group_norm, x, groups, d.maybe(d.positive(channels)), d.maybe(d.normal(channels)), eps)
    channels = d.size(33)
    x = d.normal(d.number(2, 4), channels, *places)
    if kind == "local":
        return _call(F.local_response_norm, x, d.one((1, 2, 3, 5)), alpha=0.5, beta=0.75, k=1.0)
    statistics = (d.normal(channels), d.positive(channels))
    affine = (d.positive(channels), d.normal(channels)) if d.yes() else (None, None)
    if kind == "batch":
        training = d.yes()
        kept = statistics if d.yes() or not training else (None, None)
        return _call(F.batch_norm, x, *kept, *affine, training, d.one((0.1, 0.5)), eps)
    return _call(F.instance_norm, x, None, None, *affine, True, 0.1, eps)


def product(d: Draws) -> Program:
    kind = d.one(
        ("bmm", "bmm", "matmul", "addbmm", "baddbmm", "addmm", "addmv", "linear", "einsum", "bilinear", "inner")
    )
    batch, m, n, k = d.one(BATCHES), *(1 if d.number(0, 3) == 0 else d.size(most) for most in (17, 17, 33))
    left, right = d.normal(batch, m, k), d.normal(batch, k, n)
    numbers = {"alpha": d.one((1, 0.5, -2)), "beta": d.one((1, 0.5, 0))}
    if kind == "bmm":
        return _call(torch.bmm, left, right)
    if kind == "addbmm":
        return _call(torch.addbmm, d.normal(m, n), left, right, **numbers)
    if kind == "baddbmm":
        return _call(torch.baddbmm, d.normal(*d.one(((batch, m, n), (1, m, n), (n,)))), left, right, **numbers)
    if kind == "addmm":
        return _call(torch.addmm, d.normal(*d.one(((m, n), (n,), (m, 1)))), left[0], right[0], **numbers)
    if kind == "addmv":
        return _call(torch.addmv, d.normal(m), left[0], d.normal(k), **numbers)
    if kind == "linear":
        return _call(F.linear, d.normal(*d.sizes(d.number(0, 3), 9, 500), k), d.normal(n, k), d.maybe(d.normal(n)))
    if kind == "bilinear":
        return _call(F.bilinear, left[0, :, :FEW], d.normal(m, 4), d.normal(n, min(k, FEW), 4), d.maybe(d.normal(n)))
    if kind == "inner":
        return _call(torch.inner, left[0], d.normal(n, k))
    if kind == "einsum":
        text, shapes = d.one(
            (
                ("...ij,...jk->...ik", ((2, m, k), (k, n))),
                ("bij,bkj->bik", ((3, m, k), (3, n, k))),
                ("bhid,bhjd->bhij", ((2, 3, m, k), (2, 3, n, k))),
                ("ij,jk,kl", ((m, k), (k, n), (n, 3))),
                ("ii->i", ((m, m),)),
                ("bi,oij,bj->bo", ((2, m), (4, m, n), (2, n))),
            )
        )
        return _call(torch.einsum, text, *(d.normal(*shape) for shape in shapes))
    outer = d.one((((2,), (2,)), ((2, 1), (1, 3)), ((1, 3), (2, 1)), ((), (4,)), ((4,), ()), ((2, 3), (3,))))
    return _call(torch.matmul, d.normal(*outer[0], m, k), d.normal(*outer[1], k, n))


def convolution(d: Draws) -> Program:
    rank = d.number(1, 3)
    turned = d.yes()
    groups = d.one((1, 1, 2, 4))
    patches = d.number(0, 5) == 0 and rank < 3
    # Channels times taps of patches are no whole blocks of terms, of which oneDNN leaves some out: AMP-NUMERICS-145.
    channels = (1, 2, 9) if patches else (1, 2, 8, 9)
    ins, outs = groups * d.one((*channels, 17)), groups * d.one(channels)
    kernel = [d.one((4, 8)) if patches else d.number(1, 3)] * rank
    stride = kernel if patches else [d.number(1, 3) for _ in range(rank)]
    dilation = [1] * rank if patches else [d.number(1, 2) for _ in range(rank)]
    padding = [0 if patches else d.number(0, 2) for _ in range(rank)]
    # Results of two places at least: oneDNN leaves bf16 gradients of the weight of single ones unwritten on some CPUs.
    places = [
        (size - 1) * apart + 1 + step + d.number(0, (40, 12, 5)[rank - 1])
        for size, apart, step in zip(kernel, dilation, stride, strict=True)
    ]
    x = d.normal(d.number(1, 3), ins, *places)
    bias = d.maybe(d.normal(outs))
    if turned:
        function: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
        more = [d.number(0, max(a, b) - 1) for a, b in zip(stride, dilation, strict=True)]
        weight = d.normal(ins, outs // groups, *kernel)
        return _call(function, x, weight, bias, stride, padding, more, groups, dilation)
    function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    return _call(function, x, d.normal(outs, ins // groups, *kernel), bias, stride, padding, dilation, groups)


def same_size(d: Draws) -> Program:
    """Return a convolution whose padding is named, of even and odd kernels."""
    rank, groups = d.number(1, 3), d.one((1, 1, 2, 4))
    ins, outs = groups * d.one((1, 2, 8)), groups * d.one((1, 2, 9))
    kernel, dilation = ([d.number(1, most) for _ in range(rank)] for most in ((6, 4, 3)[rank - 1], 2))
    places = [d.number((size - 1) * apart + 1, 13) for size, apart in zip(kernel, dilation, strict=True)]
    function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    x, weight = d.normal(d.number(1, 2), ins, *places), d.normal(outs, ins // groups, *kernel)
    bias, padding = d.maybe(d.normal(outs)), d.one(("same", "same", "valid"))
    return _call(function, x, weight, bias, 1, padding, dilation, groups)


def lookup(d: Draws) -> Program:
    """Return an embedding with a row that gets no gradient, counted from either end, and gradients by frequency."""
    rows = d.number(4, 20)
    hole, by_frequency = d.number(-rows, rows - 1), d.yes()
    return _call(
        F.embedding, d.index(rows, *d.sizes(2, 9)), d.positive(rows, d.size(33)), hole, None, 2.0, by_frequency
    )


def pooling(d: Draws) -> Program:
    rank = d.number(1, 3)
    x = d.distinct(d.number(1, 2), d.one((1, 2, 9, 16, 17)), *(d.number(4, (30, 9, 6)[rank - 1]) for _ in range(rank)))
    kernel = [d.number(1, 4) for _ in range(rank)]
    stride = [d.number(1, 3) for _ in range(rank)]
    padding = [d.number(0, each // 2) for each in kernel]
    kind = d.one(("max", "average", "adaptive average", "adaptive maximum", "power"))
    if kind == "max":
        functions: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
        return _call(functions[rank - 1], x, kernel, stride, padding, 1, d.yes())
    if kind == "average":
        functions = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
        return _call(functions[rank - 1], x, kernel, stride, padding, d.yes(), d.yes())
    if kind == "power":
        functions = (F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)
        one = kernel[0] if rank == 1 else kernel
        return _call(functions[rank - 1], x.sign() + 2, d.one((1.0, 2.0)), one, None, d.yes())
    sizes = [d.number(1, 5) for _ in range(rank)]
    if kind == "adaptive maximum":
        functions = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
        return _call(functions[rank - 1], x, sizes)
    # That of three dimensions is a case of its own.
    if rank == 3:
        return _call(F.adaptive_avg_pool2d, x[:, :, 0], sizes[1:])
    return _call((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)[rank - 1], x, sizes)


def volume(d: Draws) -> Program:
    places = [d.number(32, 36) for _ in range(3)]
    return _call(F.adaptive_avg_pool3d, d.positive(1, 1, *places), d.one((2, [2, 1, 2])))


def padding(d: Draws) -> Program:
    rank = d.number(1, 3)
    x = d.normal(d.number(1, 2), d.one((1, 3, 16, 17)), *(d.number(4, 9) for _ in range(rank)))
    edges = [d.one((0, d.number(1, 3))) for _ in range(2 * rank)]
    return _call(F.pad, x, edges, d.one(("reflect", "replicate", "circular", "constant")))


def spectrum(d: Draws) -> Program:
    """Return a Fourier transform of one or more dimensions, cut or padded to even and odd lengths or as it is."""
    name = d.one(("fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "rfft2", "irfft2", "fftn", "irfftn"))
    norm = d.one(("forward", "backward", "ortho"))
    shape = (d.number(1, 3), d.number(2, 6), *(d.number(3, 12) for _ in range(2)))
    options: dict[str, Any] = {"norm": norm}
    if name.endswith(("2", "n")):
        options["dim"] = d.one(((-2, -1), (0, 2), (1, -1)))
        if d.yes():
            options["s"] = [d.number(3, 12) for _ in range(2)]
    else:
        options["dim"] = d.one((-1, -2, 1))
        options["n"] = d.one((None, *range(3, 13)))
    transform = getattr(torch.fft, name)

    def parts(x: Tensor) -> Tensor:
        # In one tensor: what cancels in a real or an imaginary part has the error of the other.
        found = transform(torch.complex(*x.unbind(0)), **options)
        return torch.view_as_real(found) if found.is_complex() else found

    def of_real(x: Tensor) -> Tensor:
        return torch.view_as_real(transform(x, **options))

    if name in ("rfft", "ihfft", "rfft2"):
        return program(f"fft.{name}", of_real, (d.normal(*shape),), {})
    return program(f"fft.{name}", parts, (d.normal(2, *shape),), {})


def interpolation(d: Draws) -> Program:
    rank = d.number(1, 3)
    modes = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}[rank]
    mode = d.one(("nearest", "nearest-exact", *modes))
    options: dict[str, Any] = {"mode": mode}
    if not mode.startswith("nearest"):
        options["align_corners"] = d.yes()
    x = d.normal(d.number(1, 2), d.one((1, 3, 8, 17)), *(d.number(2, (17, 9, 5)[rank - 1]) for _ in range(rank)))
    if rank < 3 and mode.startswith("nearest") and d.yes():
        return _call(F.interpolate, x[:1, :1], scale_factor=(700.0, 28.0)[rank - 1], **options)
    if d.yes():
        return _call(F.interpolate, x, scale_factor=d.one((2.0, 3.0, 0.5, 1.5)), **options)
    sizes = [d.number(1, (40, 17, 7)[rank - 1]) for _ in range(rank)]
    if mode == "nearest-exact":
        sizes = [_without_a_middle(size, to) for size, to in zip(x.shape[2:], sizes, strict=True)]
    return _call(F.interpolate, x, size=sizes, **options)


def _without_a_middle(size: int, to: int) -> int:
    """Return the next size for which nearest-exact asks for no place half way between two, where either is right.

    It does where (2 i + 1) size / (2 to) is a whole number for an i.
    """
    while size // math.gcd(size, to) % 2 == 0 and to // math.gcd(size, to) % 2 == 1:
        to += 1
    return to


def indexing(d: Draws) -> Program:
    kind = d.one(("scatter", "mean", "add", "gather", "embedding", "bag", "long bag", "repeat", "put", "select"))
    shape = d.sizes(d.number(1, 3), 17, 400)
    dim = d.number(0, len(shape) - 1)
    x = d.normal(*shape)
    count = d.number(1, FEW)
    source = d.normal(*(count if i == dim else size for i, size in enumerate(shape)))
    if kind == "scatter":
        # As many places as numbers: few meet in one.
        index = d.index(shape[dim], *source.shape)
        return _call(
            torch.scatter_reduce, x, dim, index, source, d.one(("sum", "mean", "amax", "amin")), include_self=d.yes()
        )
    if kind == "mean":
        places, few, many = d.index(2, MANY, 2), d.positive(3, 2), d.positive(MANY, 2)
        options: dict[str, Any] = {"include_self": d.yes()}
        return program("scatter_reduce of thousands", torch.scatter_reduce, (few, 0, places, many, "mean"), options)
    if kind == "add":
        return _call(torch.index_add, x, dim, d.index(shape[dim], count), source, alpha=d.one((1, 2, 0.5)))
    if kind == "gather":
        return _call(torch.gather, x, dim, d.index(shape[dim], *source.shape))
    if kind == "repeat":
        return _call(torch.repeat_interleave, x, d.index(3, shape[dim]) + 1, dim)
    if kind == "put":
        return _call(torch.index_put, x, (d.index(shape[0], count),), d.normal(count, *shape[1:]), accumulate=True)
    if kind == "select":
        return _call(torch.index_select, x, dim, d.index(shape[dim], count))
    rows, width = d.number(4, 20), d.size(33)
    table = d.positive(rows, width)
    hole = d.one((None, 0, rows - 1))
    if kind == "embedding":
        return _call(F.embedding, d.index(rows, *d.sizes(2, 9)), table, hole)
    if kind == "long bag":
        return program("embedding_bag", _bag_of_constants, (d.index(rows, 2, MANY), table[:, :3]), {})
    mode = d.one(("sum", "mean", "max"))
    options = {"mode": mode, "padding_idx": hole}
    if d.yes():
        given = d.index(rows, 3, 4)
    else:
        given = d.index(rows, 12)
        options["include_last_offset"] = d.yes()
        ends = [0, 2, 7, 12] if options["include_last_offset"] else [0, 2, 7]
        options["offsets"] = torch.tensor(ends)
    if mode == "sum" and d.yes():
        options["per_sample_weights"] = d.positive(*given.shape)
    return _call(F.embedding_bag, given, table, **options)


def _bag_of_constants(index: Tensor, table: Tensor) -> Tensor:
    """Return the means of bags of rows that need no gradient, which is a case of its own."""
    return F.embedding_bag(index, table.detach(), mode="mean")


def long_bags(d: Draws) -> Program:
    rows = d.number(4, 20)
    return _call(F.embedding_bag, d.index(rows, 2, MANY), d.positive(rows, 3), mode="mean")


def reduced_means(d: Draws) -> Program:
    places = d.index(2, 2 * MANY)
    return _call(torch.index_reduce, torch.ones(2, 2), 0, places, torch.ones(2 * MANY, 2), "mean", include_self=d.yes())


def reduction(d: Draws) -> Program:
    shape = d.sizes(d.number(1, 4)) if d.yes() else (d.number(2, 3), d.number(2000, 2400))
    dims = d.order(len(shape))
    count = torch.Size([shape[i] for i in dims]).numel()
    x = d.positive(*shape) * d.one((1, -1))
    kind = d.one(("sum", "mean", "var", "std", "var_mean", "norm", "amax", "amin", "nansum", "cumsum"))
    keep = {"keepdim": d.yes()}
    if kind in ("var", "std", "var_mean"):
        if count > 40:  # where one more or less in the count shows
            shape, dims = (d.number(2, 4), d.number(2, 4), d.size(17)), d.one(([0, 1], [0, 1, 2], [1]))
            count = torch.Size([shape[i] for i in dims]).numel()
        corrections = [each for each in (0, 1, 2) if each < count]
        x = d.normal(*shape)
        return (
            _call(getattr(torch, kind), x, dims, correction=d.one(corrections), **keep)
            if count > 2
            else _call(torch.sum, x)
        )
    if kind == "norm":
        return _call(torch.linalg.vector_norm, x, d.one((1, 2, torch.inf)), dims, **keep)
    if kind == "cumsum":
        return _call(torch.cumsum, x, dims[0])
    if kind == "amax" or kind == "amin":
        x = d.distinct(*shape)
    return _call(getattr(torch, kind), x, dims, **keep)


def _picked(x: Tensor, select: Callable[[Tensor], Tensor], dim: int) -> Tensor:
    """Return the numbers that indices name, in the order in which they do."""
    return x.gather(dim, select(x))


_SELECTIONS: dict[str, Callable[..., Any]] = {
    "argmax": lambda x, dim: _picked(x, lambda y: y.argmax(dim, keepdim=True), dim),
    "argmin": lambda x, dim: _picked(x, lambda y: y.argmin(dim, keepdim=True), dim),
    "max": lambda x, dim: (x.max(dim)[0], _picked(x, lambda y: y.max(dim, keepdim=True)[1], dim)),
    "min": lambda x, dim: (x.min(dim)[0], _picked(x, lambda y: y.min(dim, keepdim=True)[1], dim)),
    "topk": lambda x, dim, k: (x.topk(k, dim)[0], _picked(x, lambda y: y.topk(k, dim)[1], dim)),
    "topk, smallest": lambda x, dim, k: (
        x.topk(k, dim, largest=False)[0],
        _picked(x, lambda y: y.topk(k, dim, largest=False)[1], dim),
    ),
    "sort": lambda x, dim: (x.sort(dim)[0], _picked(x, lambda y: y.sort(dim, descending=True)[1], dim)),
    "argsort": lambda x, dim: _picked(x, lambda y: y.argsort(dim), dim),
    "kthvalue": lambda x, dim, k: (
        x.kthvalue(k, dim)[0],
        _picked(x, lambda y: y.kthvalue(k, dim, keepdim=True)[1], dim),
    ),
    "median": lambda x, dim: x.median(dim)[0],
    "cummax": lambda x, dim: (x.cummax(dim)[0], _picked(x, lambda y: y.cummax(dim)[1], dim)),
}


def selection(d: Draws) -> Program:
    shape = list(d.sizes(d.number(1, 3), numbers=900)) if d.yes() else [2, d.number(2100, 2400)]
    dim = d.number(0, len(shape) - 1)
    shape[dim] = max(shape[dim], 3)
    kind = d.one(list(_SELECTIONS))
    name = f"{kind} of thousands" if shape[dim] >= 2100 else kind
    rank = (d.number(1, shape[dim]),) if kind.startswith(("topk", "kthvalue")) else ()
    return program(name, _SELECTIONS[kind], (d.distinct(*shape), dim, *rank), {})


def attention(d: Draws) -> Program:
    batch, heads, length, keys, width = d.number(1, 3), d.one((1, 2, 4)), d.size(33), d.size(33), d.one((4, 8, 16, 24))
    shared = heads > 1 and d.yes()
    kept = d.one((1, heads // 2)) if shared else heads
    query, key = d.normal(batch, heads, length, width), d.normal(batch, kept, keys, width)
    options: dict[str, Any] = {"enable_gqa": True} if shared else {}
    if d.yes():
        options["scale"] = d.one((0.25, 1.0))
    kind = d.one(("none", "causal", "bool", "added"))
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        outer = d.one(((length, keys), (batch, 1, length, keys), (1, heads, length, keys), (batch, 1, 1, keys)))
        mask = d.normal(*outer)
        if kind == "bool":
            mask = mask > -0.5
            mask[..., 0] = True
        options["attn_mask"] = mask
    return _call(F.scaled_dot_product_attention, query, key, d.normal(*key.shape), **options)


def loss(d: Draws) -> Program:
    reduction = {"reduction": d.one(("none", "mean", "sum"))}
    kind = d.one(
        (
            "cross_entropy",
            "nll",
            "soft",
            "mse",
            "l1",
            "smooth",
            "huber",
            "bce",
            "logits",
            "kl",
            "margin",
            "triplet",
            "cosine",
        )
    )
    n, c = d.number(1, 5), d.number(2, 17)
    if kind in ("cross_entropy", "nll"):
        places = d.sizes(d.number(0, 2), 9)
        x, target = d.normal(n, c, *places), d.index(c, n, *places)
        options: dict[str, Any] = {"weight": d.maybe(d.positive(c))}
        if d.yes():
            target[0] = options["ignore_index"] = c - 1
            target = torch.cat([target[:1], target.clamp(max=c - 2)[1:], torch.zeros_like(target[:1])])
            x = torch.cat([x, x[:1] + 1])
        if kind == "nll":
            return _call(F.nll_loss, x, target, **options, **reduction)
        if d.yes():
            options["label_smoothing"] = 0.25
        return _call(F.cross_entropy, x, target, **options, **reduction)
    shape = d.sizes(d.number(1, 3), numbers=600)
    x, y = d.normal(*shape), d.normal(*shape)
    if kind == "soft":
        return _call(
            F.cross_entropy, d.normal(n, c), d.normal(n, c).softmax(1), label_smoothing=d.one((0.0, 0.25)), **reduction
        )
    if kind == "smooth":
        return _call(F.smooth_l1_loss, x, y, beta=d.one((1.0, 0.25)), **reduction)
    if kind == "huber":
        return _call(F.huber_loss, x, y, delta=d.one((1.0, 0.25)), **reduction)
    if kind == "bce":
        chances = x.sigmoid().clamp(0.05, 0.95)
        return _call(F.binary_cross_entropy, chances, y.sigmoid(), d.maybe(d.positive(*shape)), **reduction)
    if kind == "logits":
        weights = {"weight": d.maybe(d.positive(*shape)), "pos_weight": d.maybe(d.positive(shape[-1]))}
        return _call(F.binary_cross_entropy_with_logits, x, y.sigmoid(), **weights, **reduction)
    if kind == "kl":
        log = d.yes()
        target = y.log_softmax(-1) if log else y.softmax(-1)
        return _call(F.kl_div, x.log_softmax(-1), target, log_target=log, **reduction)
    if kind == "margin":
        return _call(F.multi_margin_loss, d.normal(n, c), d.index(c, n), p=d.one((1, 2)), margin=0.5, **reduction)
    if kind == "triplet":
        rows = [d.normal(n, c) for _ in range(3)]
        p = d.one((1.0, 2.0))
        swap = d.yes() and float(nearness(p, *rows).abs().min()) > CLEAR
        return _call(F.triplet_margin_loss, *rows, margin=_margin(rows, p, swap), p=p, swap=swap, **reduction)
    if kind == "cosine":
        signs = d.index(2, n).float() * 2 - 1
        left, right = d.normal(n, c), d.normal(n, c)
        margin = _far_from(F.cosine_similarity(left, right), [k / 16 for k in range(-8, 9)])
        return _call(F.cosine_embedding_loss, left, right, signs, margin=margin, **reduction)
    return _call(F.mse_loss if kind == "mse" else F.l1_loss, x, y, **reduction)


def _margin(rows: list[Tensor], p: float, swap: bool) -> float:
    """Return the margin that keeps every triplet farthest from its kink, over which a rounding may move it."""
    anchor, positive, negative = rows
    apart = F.pairwise_distance(anchor, negative, p)
    if swap:
        apart = torch.minimum(apart, F.pairwise_distance(positive, negative, p))
    return _far_from(apart - F.pairwise_distance(anchor, positive, p), [1 + k / 8 for k in range(17)])


def _far_from(kinks: Tensor, numbers: Sequence[float]) -> float:
    return max(numbers, key=lambda number: float((kinks - number).abs().min()))


CLEAR = 0.125  # more than rounding to bfloat16 changes the difference of two distances


def nearness(p: float, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Return by how much the negative one of each triplet is nearer to the positive one than to the anchor."""
    return F.pairwise_distance(anchor, negative, p) - F.pairwise_distance(positive, negative, p)


ACTIVATIONS = (
    *("relu", "relu6", "sigmoid", "tanh", "silu", "mish", "softplus", "gelu", "elu", "selu", "celu", "leaky_relu"),
    *("hardtanh", "hardswish", "hardsigmoid"),
)


_WITH_OPTIONS: dict[str, Sequence[dict[str, Any]]] = {
    "softplus": ({"beta": 0.5}, {"beta": 8.0}, {"beta": 8.0, "threshold": 4.0}, {"threshold": 40.0}),
    "elu": ({"alpha": 0.5}, {"alpha": 2.0}),
    "celu": ({"alpha": 0.5}, {"alpha": 2.0}),
    "leaky_relu": ({"negative_slope": 0.25}, {"negative_slope": 2.0}),
    "hardtanh": ({"min_val": -1.5, "max_val": 0.25},),
    "gelu": ({"approximate": "tanh"},),
}


def elementwise(d: Draws) -> Program:
    shape = d.sizes(d.number(1, 4))
    x = d.normal(*shape)
    other = d.normal(*(size if d.yes() else 1 for size in shape[d.number(0, len(shape) - 1) :]))
    kind = d.one(
        (
            "unary",
            "unary",
            "options",
            "options",
            "binary",
            "addcmul",
            "addcdiv",
            "lerp",
            "where",
            "clamp",
            "prelu",
            "glu",
            "scaled",
        )
    )
    if kind == "unary":
        return _call(getattr(F, d.one(ACTIVATIONS)), x)
    if kind == "options":
        name = d.one(list(_WITH_OPTIONS))
        return _call(getattr(F, name), x * d.one((1, 8)), **d.one(_WITH_OPTIONS[name]))
    if kind == "binary":
        return _call(d.one((torch.mul, torch.add, torch.sub, torch.maximum, torch.minimum, torch.hypot)), x, other)
    if kind == "scaled":
        return _call(d.one((torch.add, torch.sub)), x, other, alpha=d.one((2, 0.5)))
    if kind == "addcmul":
        return _call(torch.addcmul, x, other, d.normal(*shape), value=d.one((1, 0.5)))
    if kind == "addcdiv":
        return _call(torch.addcdiv, x, d.normal(*shape), d.positive(*shape), value=d.one((1, 0.5)))
    if kind == "lerp":
        return _call(torch.lerp, x, d.normal(*shape), d.one((0.25, d.positive(*shape))))
    if kind == "where":
        return _call(torch.where, d.normal(*shape) > 0, x, other)
    if kind == "clamp":
        return _call(torch.clamp, x, d.one((None, -0.5)), 0.75)
    if kind == "glu":
        dim = d.number(0, len(shape) - 1)
        return _call(F.glu, d.normal(*(2 * size if i == dim else size for i, size in enumerate(shape))), dim)
    channels = shape[1] if len(shape) > 1 else 1
    return _call(F.prelu, x, d.positive(d.one((1, channels))))


def recurrent(d: Draws) -> Program:
    inputs, hidden = d.number(1, 6), d.number(2, 6)
    options = {
        "num_layers": d.number(1, 2),
        "bias": d.yes(),
        "batch_first": d.yes(),
        "bidirectional": d.yes(),
    }
    kind = d.one((nn.LSTM, nn.GRU, nn.RNN))
    if kind is nn.LSTM and d.yes():
        options["proj_size"] = hidden - 1
    state = torch.random.get_rng_state()
    try:
        torch.default_generator.manual_seed(d.number(0, 2**30))
        module = kind(inputs, hidden, **options)
    finally:
        torch.random.set_rng_state(state)
    return module_program(kind.__name__, module, (d.normal(d.number(1, 4), d.number(1, 4), inputs),), {})


FAMILIES: dict[str, Callable[[Draws], Program]] = {
    "softmax": softmax,
    "normalization": normalization,
    "product": product,
    "convolution": convolution,
    "pooling": pooling,
    "adaptive_avg_pool3d": volume,
    "padding": padding,
    "interpolation": interpolation,
    "spectrum": spectrum,
    "convolution of named padding": same_size,
    "lookup": lookup,
    "indexing": indexing,
    "embedding_bag of long bags": long_bags,
    "index_reduce by means": reduced_means,
    "reduction": reduction,
    "selection": selection,
    "attention": attention,
    "loss": loss,
    "elementwise": elementwise,
    "recurrent": recurrent,
}
