"""Error bounds for reductions (sums, means, products, norms, variances): formulas with the error of fp32 arithmetic.

Kinds of data: `plain` (Gaussian), `same_sign` (nothing cancels: what is lost at each step adds up), `cancelling` (pairs
whose sum is a thousandth of them), `wide` (rows and columns scaled by 2^-10 to 2^10), `grid` (integers whose partial
sums are all numbers of fp32, so that fp32 does not round at all, while 16 bits do), `off_grid` (fp32 numbers 0.45
spacings above one of 16 bits, which lowering rounds all to the same side), `mean_heavy` (mean thousands of deviations).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ...oracles.numbers.formats import FP16, FP32, Format, rounded
from ...oracles.numbers.running_error import ELEMENTARY, TINY, UNIT, Rounded
from .op_error import Op, Store, either, kept, total

ROWS, LENGTH = 7, 261
"""No multiple of a vector: whole ones and a tail."""


def plain(form: Format, rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng).double()


def same_sign(form: Format, rng: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=rng).double() + 0.5


def cancelling(form: Format, rng: torch.Generator, *shape: int) -> Tensor:
    """Return x and -x (1 + 2^-10 r): sums a thousandth of their terms (in bf16 some are 2^-7, most vanish)."""
    half = torch.randn((*shape[:-1], (shape[-1] + 1) // 2), generator=rng).double()
    other = -half * (1 + 2.0**-10 * torch.rand(half.shape, generator=rng).double())
    both = torch.cat([half, other], -1)[..., : shape[-1]]
    return both[..., torch.randperm(shape[-1], generator=rng)]


def wide(form: Format, rng: torch.Generator, *shape: int) -> Tensor:
    powers = torch.randint(-5, 6, (*shape[:-1], 1), generator=rng) + torch.randint(-5, 6, shape[-1:], generator=rng)
    return torch.ldexp(plain(form, rng, *shape), powers)


def grid(form: Format, rng: torch.Generator, *shape: int) -> Tensor:
    """Return integers, mostly positive: in fp32 8 j + 1 up to 8001, which 16 bits round to 8 j, else odd ones."""
    if form is FP32:
        return 8.0 * torch.randint(-128, 1001, shape, generator=rng).double() + 1
    top = int(0.5 / form.unit_roundoff)
    return 2.0 * torch.randint(-top // 8, top // 2, shape, generator=rng).double() + 1


def off_grid(form: Format, rng: torch.Generator, *shape: int) -> Tensor:
    """fp32 numbers 0.43 and 0.45 spacings above one of bf16 and of fp16; 16-bit ones from 1 to 2."""
    values = rounded(torch.rand(shape, generator=rng).double() + 1, FP16)
    return torch.floor(values * 2**7) / 2**7 + 3.45 * 2**-10 if form is FP32 else values


def mean_heavy(form: Format, rng: torch.Generator, *shape: int) -> Tensor:
    """A mean of 4096 deviations in fp32; of as many as leave some 16-bit numbers within a deviation otherwise."""
    mean = 4096.0 if form is FP32 else 0.125 / form.unit_roundoff
    return mean + 4.0 ** (form is not FP32) * plain(form, rng, *shape)


DATA: dict[str, Callable[..., Tensor]] = {
    one.__name__: one for one in (plain, same_sign, cancelling, wide, grid, off_grid, mean_heavy)
}


def _drawn(*shape: int) -> Callable[[str, Format, torch.Generator], tuple[Tensor, ...]]:
    return lambda kind, form, rng: (DATA[kind](form, rng, *shape),)


def _tail(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(-1)


def _spread(seed: Rounded, x: Rounded) -> Rounded:
    """Return the seed of a row for each of its elements."""
    return seed.view(lambda tensor: _tail(tensor).expand(x.value.shape))


# --- sums


def _sum(store: Store, x: Rounded) -> Rounded:
    return total(x, -1)


def _sum_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    return (_spread(seed, x),)


def _sum_all(store: Store, x: Rounded) -> Rounded:
    return total(x)


def _sum_all_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    return (seed.view(lambda tensor: tensor.expand(x.value.shape)),)


def _mean(store: Store, x: Rounded) -> Rounded:
    return total(x, -1) / float(x.value.shape[-1])


def _mean_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    return (_spread(seed / float(x.value.shape[-1]), x),)


def _running(terms: Rounded) -> Rounded:
    """Return cumulative sums over the last dimension: each is a sum in any order, and so is its error."""
    value, size = terms.value.cumsum(-1), (terms.value.detach().abs() + terms.error).cumsum(-1)
    count = torch.arange(terms.value.shape[-1], dtype=torch.float64)
    return Rounded(value, terms.error.cumsum(-1) + count * UNIT * size)


def _cumsum(store: Store, x: Rounded) -> Rounded:
    return _running(x)


def _flipped(terms: Rounded) -> Rounded:
    return terms.view(lambda tensor: tensor.flip(-1))


def _cumsum_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    return (_flipped(_running(_flipped(seed))),)


# --- products


def _prod(store: Store, x: Rounded) -> Rounded:
    value = x.value.prod(-1)
    return Rounded(value, x.value.shape[-1] * UNIT * value.detach().abs() + TINY)


def _prod_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    return (_spread(store(seed * store(_prod(store, x))), x) / x,)


def _prod_all(store: Store, x: Rounded) -> Rounded:
    return _prod(store, x.view(lambda tensor: tensor.flatten()))


def _prod_all_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    through = store(seed * store(_prod_all(store, x)))
    return (through.view(lambda tensor: tensor.expand(x.value.shape)) / x,)


# --- norms


def _norm(order: float) -> Callable[..., Rounded]:
    def formula(store: Store, x: Rounded) -> Rounded:
        if order == 1:
            return total(x.abs(), -1)
        if order == math.inf:
            value = x.value.abs().amax(-1)
            return Rounded(value, torch.zeros_like(value).detach())
        return total(x * x, -1).sqrt()

    return formula


def _norm_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    norm = store(_norm(2)(store, x))
    # grad * (x / norm), as torch's FunctionsManual.cpp has it, or x * (grad / norm).
    row = _spread(norm, x)
    return (either(_spread(seed, x) * store(x / row), x * store(_spread(seed, x) / row)),)


def _norm_one_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    return (_spread(seed, x) * Rounded.exact(x.value.detach().sign()),)


# --- variances


def _centred(x: Rounded) -> Rounded:
    return x - kept(x, -1) / float(x.value.shape[-1])


def _var(store: Store, x: Rounded) -> Rounded:
    centred = _centred(x)
    return total(centred * centred, -1) / float(x.value.shape[-1] - 1)


def _var_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    centred = store(x - store(kept(x, -1) / float(x.value.shape[-1])))
    return (_spread(store(seed * (2.0 / (x.value.shape[-1] - 1))), x) * centred,)


def _std(store: Store, x: Rounded) -> Rounded:
    return _var(store, x).sqrt()


def _std_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    through = store(store(seed) / store(store(_std(store, x)) * 2.0))
    return _var_gradient(store, through, x)


# --- exponentials


def _logsumexp(store: Store, x: Rounded) -> Rounded:
    top = x.value.detach().amax(-1, keepdim=True)
    powers = store(store(x - Rounded.exact(top)).exp())
    return store(store(total(powers, -1)).log()) + Rounded.exact(top.squeeze(-1))


def _logsumexp_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    result = store(_logsumexp(store, x))
    return (_spread(seed, x) * store(store(x - result.view(_tail)).exp()),)


def _softplus(store: Store, x: Rounded) -> Rounded:
    """log(1 + e^x), x itself beyond 20 (torch.nn.Softplus, threshold): off by e^-20, which is 2^-29."""
    result = x.clamp_min(0.0) + (-x.abs()).exp().log1p()
    # The logarithm of the formula is the whole result, and need not be taken apart so.
    return Rounded(result.value, result.error + ELEMENTARY * result.value.detach().abs())


def _softplus_gradient(store: Store, seed: Rounded, x: Rounded) -> tuple[Rounded]:
    return (seed / ((-x).exp() + 1.0),)


# --- cosine similarity


def _cosine(store: Store, a: Rounded, b: Rounded) -> Rounded:
    """sum(ab) / sqrt(sum(aa) sum(bb)), in whichever order; torch clamps norms at 1e-8."""
    one, other = (store(total(x * x, -1).sqrt()) for x in (a, b))
    first, second = (store(x / norm.view(_tail)) for x, norm in ((a, one), (b, other)))
    return total(store(first * second), -1)


def _cosine_gradient(store: Store, seed: Rounded, a: Rounded, b: Rounded) -> tuple[Rounded, Rounded]:
    def by(x: Rounded, y: Rounded) -> Rounded:
        one, other = (store(total(z * z, -1).sqrt()).view(_tail) for z in (x, y))
        first, second = store(x / one), store(y / other)
        cosine = store(total(store(first * second), -1)).view(_tail)
        through = store(second - store(first * cosine))
        return store(_spread(seed, x) * through) / one

    return by(a, b), by(b, a)


def _logits(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    """`large`: near 1000 with a spread of 8, where exponentials without a shift overflow; else Gaussian times 4."""
    noise = plain(form, rng, ROWS, LENGTH)
    return (1000 + 8 * noise if kind == "large" else 4 * noise,)


def _factors(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    """Return factors near 1, so that 74 of them neither overflow nor vanish."""
    if kind == "off_grid":
        return (DATA[kind](form, rng, ROWS, 37) * 2.0 ** -(torch.arange(37) % 2),)
    return (1 + (plain(form, rng, ROWS, 37) / 16).clamp(-0.5, 0.5),)


def _few(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    return (_factors(kind, form, rng)[0][:2],)


def _pair(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    return DATA[kind](form, rng, 129, 33), DATA[kind](form, rng, 129, 33)


_SUMS = ("grid", "off_grid", "cancelling", "wide", "same_sign", "plain")
_WHOLE = _drawn(ROWS, LENGTH)

REDUCTIONS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("sum", lambda x: x.sum(-1), _WHOLE, _sum, _sum_gradient, _SUMS, "sum"),
        Op("sum of all", lambda x: x.sum(), _WHOLE, _sum_all, _sum_all_gradient, _SUMS, "sum"),
        Op("sum of columns", lambda x: x.t().sum(0), _WHOLE, _sum, _sum_gradient, ("grid", "plain"), "sum"),
        Op("mean", lambda x: x.mean(-1), _WHOLE, _mean, _mean_gradient, _SUMS, "mean"),
        Op(
            "cumsum",
            lambda x: x.cumsum(-1),
            _drawn(ROWS, 65),
            _cumsum,
            _cumsum_gradient,
            ("off_grid", "plain"),
            "cumsum",
            # tools/autograd/derivatives.yaml: cumsum_backward(grad.to(self.scalar_type()), dim); CUDA scans in the
            # type of what it scans (aten/src/ATen/native/cuda/ScanUtils.cuh).
            narrows=True,
        ),
        Op(
            "prod of all",
            lambda x: x.prod(),
            _few,
            _prod_all,
            _prod_all_gradient,
            ("off_grid", "plain"),
            "prod",
        ),
        Op("prod", lambda x: x.prod(-1), _factors, _prod, _prod_gradient, ("off_grid", "plain"), "prod"),
        Op("norm", lambda x: x.norm(dim=-1), _WHOLE, _norm(2), _norm_gradient, _SUMS[1:], "norm"),
        Op(
            "vector_norm",
            lambda x: torch.linalg.vector_norm(x, dim=-1),
            _WHOLE,
            _norm(2),
            _norm_gradient,
            ("off_grid", "plain"),
            "linalg_vector_norm",
        ),
        Op(
            "norm of order 1",
            lambda x: x.norm(1, dim=-1),
            _WHOLE,
            _norm(1),
            _norm_one_gradient,
            ("plain", "grid"),
            "norm",
        ),
        Op(
            "norm of order inf",
            lambda x: x.norm(math.inf, dim=-1),
            _WHOLE,
            _norm(math.inf),
            None,
            ("off_grid", "plain"),
            "norm",
        ),
        Op("var", lambda x: x.var(-1), _drawn(ROWS, 33), _var, _var_gradient, ("mean_heavy", "plain", "wide"), "var"),
        Op("std", lambda x: x.std(-1), _drawn(ROWS, 33), _std, _std_gradient, ("mean_heavy", "plain"), "std"),
        Op(
            "logsumexp",
            lambda x: x.logsumexp(-1),
            _logits,
            _logsumexp,
            _logsumexp_gradient,
            ("large", "plain"),
            "logsumexp",
        ),
        Op("softplus", lambda x: F.softplus(x), _logits, _softplus, _softplus_gradient, ("large", "plain"), "softplus"),
        Op(
            "cosine_similarity",
            lambda a, b: F.cosine_similarity(a, b),
            _pair,
            _cosine,
            _cosine_gradient,
            ("plain", "same_sign", "wide"),
            "cosine_similarity",
            composed=True,
        ),
    )
}
