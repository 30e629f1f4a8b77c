"""Calls of ops on rows and numbers, over all combinations of their options, on small operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...oracles.relations.programs import Program, module_program, program
from .drawn_ops import CLEAR, Draws, nearness
from .option_grids import combinations

REDUCTIONS = ("none", "mean", "sum")
FAR = 0.03  # eight roundings to bfloat16 of 1


def products(d: Draws) -> Iterator[Program]:
    """Yield products that are added to something, with every kind of factor and shape of what they are added to."""
    m, k, n = 5, 9, 4
    shape: tuple[int, ...]
    for alpha, beta in itertools.product((1, 0, -2, 0.5), repeat=2):
        numbers = {"alpha": alpha, "beta": beta}
        left, right, lefts, rights = d.normal(m, k), d.normal(k, n), d.normal(3, m, k), d.normal(3, k, n)
        for shape in ((m, n), (n,), (m, 1), (1, n), ()):
            yield program("addmm", torch.addmm, (d.normal(*shape), left, right), numbers)
            yield program("addbmm", torch.addbmm, (d.normal(*shape), lefts, rights), numbers)
        for shape in ((3, m, n), (1, m, n), (m, n), (3, 1, 1), (n,)):
            yield program("baddbmm", torch.baddbmm, (d.normal(*shape), lefts, rights), numbers)
        for shape in ((m,), (1,), ()):
            yield program("addmv", torch.addmv, (d.normal(*shape), left, d.normal(k)), numbers)
        for shape in ((m, n), (n,), (m, 1)):
            yield program("addr", torch.addr, (d.normal(*shape), d.normal(m), d.normal(n)), numbers)
    for sizes in itertools.product((1, 2, 7), repeat=3):
        m, k, n = sizes
        for left, right in itertools.product(((), (2,), (3, 1)), ((), (2,))):
            yield program("matmul", torch.matmul, (d.normal(*left, m, k), d.normal(*right, k, n)), {})
        for outer, moved in itertools.product(((), (m,), (2, m), (2, 1, m)), (False, True)):
            given = (d.normal(*outer, k), d.normal(n, k), d.normal(n) if moved else None)
            yield program("linear", F.linear, given, {})
        bias = d.normal(n) if k > 1 else None
        yield program("bilinear", F.bilinear, (d.normal(4, m), d.normal(4, k), d.normal(n, m, k), bias), {})


def normalizations(d: Draws) -> Iterator[Program]:
    """Yield normalizations with and without each of their tensors."""
    for places, weighted, moved, eps in itertools.product(
        ((), (6,), (3, 4)), (False, True), (False, True), (1e-5, 0.1)
    ):
        weight, bias = d.positive(8) if weighted else None, d.normal(8) if moved else None
        for groups in (1, 2, 4):
            yield program("group_norm", F.group_norm, (d.normal(2, 8, *places), groups, weight, bias, eps), {})
        for training, kept in ((True, True), (True, False), (False, True)):
            statistics = (d.normal(8), d.positive(8)) if kept else (None, None)
            given = (d.normal(6, 8, *places), *statistics, weight, bias, training, 0.3, eps)
            yield program("batch_norm", F.batch_norm, given, {})
            if places and weighted == moved:
                yield program("instance_norm", F.instance_norm, given, {})
    for inner, weighted, moved, eps in itertools.product(
        ((8,), (3, 4), (1, 6)), (False, True), (False, True), (1e-5, 0.1)
    ):
        weight, bias = d.positive(*inner) if weighted else None, d.normal(*inner) if moved else None
        for outer in ((), (5,), (2, 3)):
            x = d.normal(*outer, *inner)
            yield program("layer_norm", F.layer_norm, (x, inner, weight, bias, eps), {})
            if not moved:
                yield program("rms_norm", F.rms_norm, (x, inner, weight, eps), {})


def _sets(count: int) -> Iterator[tuple[int, ...]]:
    for size in range(1, count + 1):
        yield from itertools.combinations(range(count), size)


def statistics(d: Draws) -> Iterator[Program]:
    """Yield what is told of numbers along every set of dimensions, which are counted from either end."""
    for dims, keepdim, back in itertools.product(_sets(3), (False, True), (False, True)):
        dim = [i - 3 if back else i for i in dims]
        for correction in (0, 1, 2):
            for op in (torch.var, torch.std, torch.var_mean, torch.std_mean):
                options = {"correction": correction, "keepdim": keepdim}
                yield program(op.__name__, op, (d.normal(3, 4, 5), dim), options)
        for order in (0, 0.5, 1, 2, 3, torch.inf, -torch.inf):
            x = d.normal(3, 4, 5) if isinstance(order, int) or order == 0.5 else d.distinct(3, 4, 5)
            yield program("vector_norm", torch.linalg.vector_norm, (x, order, dim), {"keepdim": keepdim})
        for reduced in (torch.sum, torch.mean, torch.amax, torch.amin, torch.logsumexp, torch.nansum, torch.nanmean):
            yield program(reduced.__name__, reduced, (d.distinct(3, 4, 5), dim), {"keepdim": keepdim})


def _scattered(reduce: str) -> Callable[..., Tensor]:
    """Return scatter with a reduction, which has no gradient by its source."""
    return lambda x, dim, places, source: torch.scatter(x, dim, places, source.detach(), reduce=reduce)


def scattering(d: Draws) -> Iterator[Program]:
    """Yield what is written to places named once, twice or not at all, is read from them, or runs along a dimension."""
    x = (4, 3, 5)
    given: tuple[Any, ...]
    shape: tuple[int, ...]
    for dim in range(-3, 3):
        along = x[dim]
        places = torch.tensor([0, 2, 2, along - 1])
        source = tuple(4 if i == dim % 3 else size for i, size in enumerate(x))
        shown = places.view([4 if i == dim % 3 else 1 for i in range(3)]).expand(source)
        for reduce, kept in itertools.product(("sum", "prod", "mean", "amax", "amin"), (False, True)):
            options = {"include_self": kept}
            numbers = d.positive if reduce == "prod" else d.distinct
            given = (numbers(*x), dim, shown, numbers(*source), reduce)
            yield program(f"scatter_reduce by {reduce}", torch.scatter_reduce, given, options)
            if reduce != "sum":
                given = (d.positive(*x), dim, places, d.positive(*source), reduce)
                yield program(f"index_reduce by {reduce}", torch.index_reduce, given, options)
        for alpha in (1, 2, -0.5):
            given = (d.normal(*x), dim, places, d.normal(*source))
            yield program("index_add", torch.index_add, given, {"alpha": alpha})
        yield program("scatter_add", torch.scatter_add, (d.normal(*x), dim, shown, d.normal(*source)), {})
        for reduce in ("add", "multiply"):
            given = (d.positive(*x), dim, shown, d.positive(*source).detach())
            yield program(f"scatter by {reduce}", _scattered(reduce), given, {})
        yield program("gather", torch.gather, (d.normal(*x), dim, shown), {})
        yield program("index_select", torch.index_select, (d.normal(*x), dim, places), {})
        yield program("take_along_dim", torch.take_along_dim, (d.normal(*x), shown, dim), {})
        yield program("index_fill", torch.index_fill, (d.normal(*x), dim, places, 0.5), {})
        counts = torch.arange(1, along + 1) % 3
        yield program("repeat_interleave", torch.repeat_interleave, (d.normal(*x), counts, dim), {})
        yield program("cumulative sum", torch.cumsum, (d.normal(*x), dim), {})
        yield program("cumulative product", torch.cumprod, (d.positive(*x), dim), {})
        yield program("logcumsumexp", torch.logcumsumexp, (d.normal(*x), dim), {})
        yield program("difference", torch.diff, (d.normal(*x), 1, dim), {})
        yield program("renorm", torch.renorm, (d.positive(*x), 2, dim, 1.5), {})
    for accumulate, shape in itertools.product((False, True), ((3, 5), (5,), (1, 5), ())):
        places = torch.tensor([0, 2, 1] if not accumulate else [0, 2, 2])
        values = d.normal(3, *shape) if len(shape) == 2 else d.normal(*shape)
        given = (d.normal(*x), (places,), values, accumulate)
        yield program("index_put", torch.index_put, given, {})
    for mask in ((4, 3, 5), (3, 5), (4, 1, 1)):
        chosen = d.normal(*mask) > 0
        yield program("masked_fill", torch.masked_fill, (d.normal(*x), chosen, 0.5), {})
        yield program("where", torch.where, (chosen, d.normal(*x), d.normal(5)), {})
        yield program("masked_scatter", torch.masked_scatter, (d.normal(*x), chosen.expand(x), d.normal(60)), {})


def activations(d: Draws) -> Iterator[Program]:
    """Yield activations with each of their numbers, of small and large operands."""
    options: tuple[tuple[Callable[..., Tensor], Iterator[dict[str, Any]]], ...] = (
        (F.elu, combinations(alpha=(0.3, 1.0, 2.0))),
        (F.celu, combinations(alpha=(0.3, 1.0, 2.0))),
        (F.leaky_relu, combinations(negative_slope=(0.01, 0.25, 2.0))),
        (F.softplus, combinations(beta=(0.5, 1.0, 4.0), threshold=(2.0, 20.0))),
        (F.hardtanh, combinations(min_val=(-1.5, -0.25), max_val=(0.25, 1.5))),
        (F.threshold, combinations(threshold=(-0.375, 0.375), value=(-2.0, 0.0, 2.0))),
        (F.hardshrink, combinations(lambd=(0.25, 0.5, 1.0))),
        (F.softshrink, combinations(lambd=(0.25, 0.5, 1.0))),
        (F.gelu, combinations(approximate=("none", "tanh"))),
        (F.rrelu, combinations(lower=(0.1, 0.25), upper=(0.25, 0.5), training=(False,))),
        (torch.clamp, combinations(min=(None, -0.375), max=(0.75,))),
        (torch.nan_to_num, combinations(nan=(0.0, 2.0), posinf=(None, 3.0))),
        (F.relu6, combinations()),
        (F.selu, combinations()),
        (F.mish, combinations()),
        (F.hardswish, combinations()),
        (F.logsigmoid, combinations()),
        (F.softsign, combinations()),
    )
    for function, numbers in options:
        for named, size in itertools.product(numbers, (1.0, 6.0)):
            yield program(function.__name__, function, (d.normal(37) * size,), named)
    for dim in range(-3, 3):
        x = d.normal(4, 2, 6)
        for rows in (F.glu, F.softmax, F.log_softmax, F.softmin):
            yield program(rows.__name__, rows, (x, dim), {})
        for norm, eps in itertools.product((1.0, 2.0, 3.0), (1e-12, 5.0)):
            # The gradient of a norm of order 3 divides by its square, which leaves fp16 below 1/32 (AMP-NUMERICS-081).
            # No norm is near the bound, over which a rounding would move it.
            bound = eps if eps < 1 else 32.0
            yield program("normalize", F.normalize, (x + x.sign() / 4, norm, dim, bound), {})
            yield program("cosine_similarity", F.cosine_similarity, (x, d.normal(4, 2, 6), dim, eps), {})
    shape: tuple[int, ...]
    for shape, count in (((5,), 1), ((3, 4), 1), ((3, 4), 4), ((2, 3, 4), 3), ((2, 3, 2, 2), 3)):
        yield program("prelu", F.prelu, (d.normal(*shape), d.positive(count)), {})
    for value in (1, 0, -2, 0.5):
        for shape in ((4, 5), (5,), (4, 1), ()):
            given = (d.normal(4, 5), d.normal(*shape), d.positive(4, 5))
            yield program("addcmul", torch.addcmul, given, {"value": value})
            yield program("addcdiv", torch.addcdiv, given, {"value": value})
            yield program("add", torch.add, given[:2], {"alpha": value})
            yield program("sub", torch.sub, given[:2], {"alpha": value})
            yield program("rsub", torch.rsub, given[:2], {"alpha": value})
            yield program("lerp", torch.lerp, (given[0], given[1], value), {})
            yield program("lerp by a number of float64", _between(value), given[:2], {})


def _between(weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return lerp by a tensor of one number of float64, whatever the type of the others."""
    return lambda x, y: torch.lerp(x, y, torch.tensor(weight, dtype=torch.float64, device=x.device))


def _behind(classes: Tensor, scores: Tensor) -> Tensor:
    """Return how far each score is behind that of its row's class."""
    return scores.gather(1, classes[:, None]) - scores


def _far_from_kinks(
    draw: Callable[[], tuple[Tensor, ...]], function: Callable[..., Tensor], kink: float, far: float = FAR
) -> tuple[Tensor, ...]:
    """Return drawn tensors of which a rounding moves no value of a function over the place of a kink."""
    while True:
        drawn = draw()
        if float((function(*drawn) - kink).abs().min()) > far:
            return drawn


def pairs(d: Draws) -> Iterator[Program]:
    """Yield losses of pairs of numbers or rows, and distances, with each of their options."""
    x, y = (d.normal(6, 5) for _ in range(2))
    given: tuple[Any, ...]
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0])
    for reduction in REDUCTIONS:
        reduced = {"reduction": reduction}
        yield program("mse_loss", F.mse_loss, (x, y), reduced)
        yield program("l1_loss", F.l1_loss, (x, y), reduced)
        yield program("soft_margin_loss", F.soft_margin_loss, (x, d.normal(6, 5).sign()), reduced)
        for size in (0.1, 1.0, 3.0):
            yield program("smooth_l1_loss", F.smooth_l1_loss, (x, y), {"beta": size, **reduced})
            yield program("huber_loss", F.huber_loss, (x, y), {"delta": size, **reduced})
        for weighted in (False, True):
            weight = d.positive(6, 5) if weighted else None
            chances = (d.positive(6, 5) * 0.5, d.positive(6, 5) * 0.5)
            yield program("binary_cross_entropy", F.binary_cross_entropy, (*chances, weight), reduced)
            per_class = d.positive(5) if weighted else None
            given = (d.normal(6, 5), (d.normal(6, 5) > 0).float(), per_class)
            yield program("multilabel_soft_margin_loss", F.multilabel_soft_margin_loss, given, reduced)
            for p, margin in itertools.product((1, 2), (0.5, 2.0)):
                classes = torch.tensor([0, 3, 2, 2, 1, 4])
                apart = partial(_behind, classes)
                (scores,) = _far_from_kinks(lambda: (d.normal(6, 5),), apart, margin)
                given = (scores, classes, p, margin, per_class)
                yield program("multi_margin_loss", F.multi_margin_loss, given, reduced)
        for log_target in (False, True):
            target = y.log_softmax(1) if log_target else y.softmax(1)
            yield program("kl_div", F.kl_div, (x.log_softmax(1), target), {"log_target": log_target, **reduced})
        for log_input, full in itertools.product((False, True), repeat=2):
            given = (d.normal(6, 5) if log_input else d.positive(6, 5), d.positive(6, 5) * 3)
            options = {"log_input": log_input, "full": full, **reduced}
            yield program("poisson_nll_loss", F.poisson_nll_loss, given, options)
        for full, spread in itertools.product((False, True), ((6, 5), (6, 1), (6,))):
            given = (d.normal(6, 5), d.normal(6, 5), d.positive(*spread))
            yield program("gaussian_nll_loss", F.gaussian_nll_loss, given, {"full": full, **reduced})
        for margin in (-0.5, 0.0, 0.5):
            options = {"margin": margin, **reduced}
            rows = _far_from_kinks(lambda: (d.normal(6, 5), d.normal(6, 5)), F.cosine_similarity, margin)
            yield program("cosine_embedding_loss", F.cosine_embedding_loss, (*rows, signs), options)
            numbers = _far_from_kinks(lambda: (d.normal(6), d.normal(6)), lambda a, b: (a - b) * signs, margin)
            yield program("margin_ranking_loss", F.margin_ranking_loss, (*numbers, signs), options)
            given = (d.normal(6), signs, margin + 1)
            yield program("hinge_embedding_loss", F.hinge_embedding_loss, given, reduced)
        for p, swap in itertools.product((1, 2), (False, True)):
            options = {"p": p, "swap": swap, "margin": 9.0, **reduced}
            rows = _far_from_kinks(lambda: tuple(d.normal(6, 5) for _ in range(3)), partial(nearness, p), 0.0, CLEAR)
            yield program("triplet_margin_loss", F.triplet_margin_loss, rows, options)
    for order, keepdim in itertools.product((0.5, 1.0, 2.0, 3.0, torch.inf), (False, True)):
        rows = (d.normal(6, 5), d.normal(6, 5))
        yield program("pairwise_distance", F.pairwise_distance, rows, {"p": order, "keepdim": keepdim})
        if not keepdim:
            yield program("cdist", torch.cdist, (d.normal(2, 6, 5), d.normal(2, 4, 5)), {"p": order})
            yield program("pdist", F.pdist, (d.normal(6, 5), order), {})


def recurrences(d: Draws) -> Iterator[Program]:
    """Yield recurrent modules of every form, with and without a state to begin with."""
    for kind in (nn.RNN, nn.GRU, nn.LSTM):
        for options in combinations(
            num_layers=(1, 2), bias=(True, False), batch_first=(False, True), bidirectional=(False, True)
        ):
            for size in (0, 2) if kind is nn.LSTM else (0,):
                module = kind(3, 4, **options, **({"proj_size": size} if size else {}))
                for parameter in module.parameters():
                    parameter.data = d.normal(*parameter.shape) * 0.5
                layers = options["num_layers"] * (2 if options["bidirectional"] else 1)
                state = d.normal(layers, 2, size or 4)
                begun = (state, d.normal(layers, 2, 4)) if kind is nn.LSTM else state
                x = d.normal(2, 5, 3) if options["batch_first"] else d.normal(5, 2, 3)
                for given in ((x,), (x, begun)):
                    yield module_program(kind.__name__, module, given, {})


NUMBER_GRIDS: Mapping[str, Callable[[Draws], Iterator[Program]]] = {
    "products": products,
    "normalizations": normalizations,
    "statistics": statistics,
    "scattering": scattering,
    "activations": activations,
    "pairs": pairs,
    "recurrences": recurrences,
}
"""Programs of float32 operands, by what they do."""
