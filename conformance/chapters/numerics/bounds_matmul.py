"""Error bounds for matrix products, at the sizes and on the data where kernels differ.

Every reference is the float64 result of the operands as autocast rounds them, so that what is left is the accumulation
and one rounding; that the operands were rounded at all is measured by the share of their rounding in the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ...oracles.numbers import exact
from ...oracles.numbers.error_bounds import accumulation, normwise_error
from ...oracles.numbers.formats import FP32, Format, rounded
from ...oracles.numbers.running_error import CONFIDENCE, Rounded
from .bounds_reduction import off_grid
from .op_error import (
    ORDER,
    ROUNDING,
    Measured,
    Region,
    error_ratio,
    gain_ratio,
    half_spacing,
    is_exact_in_any_order,
    lowest_bit,
)


@dataclass(frozen=True)
class Product:
    """An op that multiplies (m, k) by (k, n), both perhaps in a batch, and adds a bias of (n,) or (m, n)."""

    name: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    batch: int = 0
    bias: str = "none"


def _sliced(matrix: Tensor) -> Tensor:
    """Return the same numbers in every second column of a wider matrix: neither dimension is contiguous."""
    return torch.stack([matrix, matrix], -1)[..., 0]


PRODUCTS: dict[str, Product] = {
    one.name: one
    for one in (
        Product("mm", lambda a, b, c: torch.mm(a, b)),
        Product("matmul", lambda a, b, c: a @ b),
        Product("mm of transposed", lambda a, b, c: torch.mm(a.t().contiguous().t(), b.t().contiguous().t())),
        Product("mm of slices", lambda a, b, c: torch.mm(_sliced(a), _sliced(b))),
        Product("linear", lambda a, b, c: F.linear(a, b.t(), c), bias="row"),
        Product("linear without bias", lambda a, b, c: F.linear(a, b.t())),
        Product("linear of three dimensions", lambda a, b, c: F.linear(a.unsqueeze(0), b.t()).squeeze(0)),
        Product("addmm", lambda a, b, c: torch.addmm(c, a, b), bias="full"),
        Product("bmm", lambda a, b, c: torch.bmm(a, b), batch=2),
        Product("bmm of one", lambda a, b, c: torch.bmm(a, b), batch=1),
        # The layouts of a stored weight and of attention scores: kernels are chosen by which operands are transposed.
        Product("linear of a stored weight", lambda a, b, c: F.linear(a, b.t().contiguous(), c), bias="row"),
        Product("bmm of a transposed right", lambda a, b, c: torch.bmm(a, b.mT.contiguous().mT), batch=2),
        Product("bmm of a transposed left", lambda a, b, c: torch.bmm(a.mT.contiguous().mT, b), batch=2),
        Product("baddbmm", lambda a, b, c: torch.baddbmm(c, a, b), batch=2, bias="full"),
        Product("einsum", lambda a, b, c: torch.einsum("bik,bkj->bij", a, b), batch=2),
    )
}

# m, k, n: long sums, long sums in the weight's gradient, one row, one column, tails of every tile, whole tiles.
SHAPES = {
    "long": (5, 4096, 3),
    "tall": (4096, 7, 5),
    "row": (1, 300, 65),
    "column": (65, 300, 1),
    "odd": (33, 65, 67),
    "tiles": (48, 64, 48),
}
KINDS = ("plain", "grid", "grid_same_sign", "wide", "cancelling", "near_overflow", "subnormal")
LONGER = {"longer": (3, 16384, 2), "longest": (2, 65536, 2), "taller": (16384, 5, 3)}


def _gaussian(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng).double()


def _grid(low: int, high: int) -> Callable[..., Tensor]:
    """Integers over 64: sums of 65536 products are multiples of 2^-12 below 2^12, which fp32 adds without error."""
    return lambda rng, *shape: torch.randint(low, high + 1, shape, generator=rng).double() / 64


def product_operands(
    product: Product, kind: str, shape: tuple[int, int, int], form: Format, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return left, right, bias and the incoming gradient as float64 numbers of fp32; `form` is what they are cast to.

    `plain`: Gaussian. `grid` and `grid_same_sign`: operands whose sums fp32 holds in any order, so that fp32 adds no
    error at all while partial sums kept or passed on in 16 bits do. `wide`: rows and columns scaled by 2^-10 to 2^10.
    `cancelling`: results a thousandth of their terms. `bias`: on the grid, a bias that nearly cancels the product, so
    that a product rounded before the bias is added shows. `near_overflow`: results up to the largest number.
    `off_grid` (for fp32): positive numbers that 16 bits and TF32 all round down, which no sum averages out.
    `subnormal`: results and gradients on either side of the smallest normal number.
    """
    m, k, n = shape
    batch = (product.batch,) if product.batch else ()
    draw = _gaussian
    if kind in ("grid", "bias", "subnormal"):
        draw = _grid(-15, 15)
    elif kind == "grid_same_sign":
        draw = _grid(1, 15)
    elif kind == "off_grid":
        draw = functools.partial(off_grid, FP32)
    left, right, seed = draw(rng, *batch, m, k), draw(rng, *batch, k, n), draw(rng, *batch, m, n)
    bias = draw(rng, *{"none": (1,), "row": (n,), "full": (*batch, m, n)}[product.bias])
    if kind == "wide":
        left, right = _scaled(left, rng, -2), _scaled(right, rng, -1)
    elif kind == "cancelling":
        half = k // 2
        right[..., half : 2 * half, :] = -right[..., :half, :] * (1 + 2.0**-6)
        left[..., half : 2 * half] = left[..., :half]
    elif kind == "bias":
        result = exact.product(left, right)
        bias = -rounded(result, form) if product.bias == "full" else -rounded(result[..., 0, :], form)
    elif kind == "subnormal":
        # Half of the operands' exponents each, so that none of them is subnormal itself.
        tiny = 2.0 ** (form.min_exponent // 2)
        left, right, bias, seed = (x * tiny for x in (left, right, bias * tiny, seed))
    elif kind == "near_overflow":
        # Sums on the way stay below fp32's largest number, which is about bf16's own.
        largest, size = (float(part.abs().max()) for part in exact.product_and_size(left, right))
        top = min(0.9 * form.largest / largest, 2.0**126 / size) ** 0.5
        left, right, bias = left * top, right * top, bias * top
    if kind != "subnormal":
        left, right, seed = (_normal(matrix, form) for matrix in (left, right, seed))
    return left.float().double(), right.float().double(), bias.float().double(), seed.float().double()


def _normal(matrix: Tensor, form: Format) -> Tensor:
    """Keep every number but zero out of the subnormal range, which matrix units may flush (MI200's do)."""
    size = matrix.abs().clamp_min_(2 * form.smallest_normal).masked_fill_(matrix == 0, 0.0)
    return size.copysign_(matrix)


def _scaled(matrix: Tensor, rng: torch.Generator, dim: int) -> Tensor:
    """Scale each row (-2) or column (-1) by a power of two."""
    size = [1] * matrix.dim()
    size[dim] = matrix.shape[dim]
    return torch.ldexp(matrix, torch.randint(-5, 6, size, generator=rng))


def _product_reference(left: Tensor, right: Tensor, added: Tensor | None, form: Format) -> Rounded:
    """left @ right + added; no error where no order of summation rounds, else `accumulation` of every term.

    fp32 products are promised in IEEE arithmetic, not on matrix units: gamma_n (Higham 2002, section 3.1).
    """
    (value, size), terms = exact.product_and_size(left, right), left.shape[-1]
    if added is not None:
        value, size, terms = value + added, size + added.abs(), terms + 1
    unit = lowest_bit(left) + lowest_bit(right)
    whole = float(size.max()) <= 2.0 ** (24 + unit) and (added is None or lowest_bit(added) >= unit)
    lost = (terms + 1) * FP32.unit_roundoff if form is FP32 else accumulation(terms)
    return Rounded(value, torch.zeros_like(size) if whole else lost * size / ORDER)


def _rounding_of_product(left: Tensor, right: Tensor, form: Format) -> Tensor:
    """Return what it costs to round left @ right to `form` before a bias is added: half a spacing by element."""
    value, size = exact.product_and_size(left, right)
    return half_spacing(value.abs() + accumulation(left.shape[-1]) * size, form)


def share_ratio(
    seen: Tensor,
    without: Tensor,
    reference: Rounded,
    form: Format,
    noise: float = 0.0,
    before: Tensor | None = None,
) -> float | None:
    """Return how far the share of an operand's rounding in the result is from 1, over its bound; None: nothing to see.

    `without` is the float64 result had the operand not been rounded, `reference` that with it rounded. Where it was
    not, the share is 0, and the ratio 1 over the bound. Independent roundings of the result add `CONFIDENCE` standard
    deviations (and `noise`, the relative error of a kernel that is not direct, and `before`, half a spacing of what was
    rounded on the way). So does the arithmetic, twice: whatever its errors e are, truncation too, their product with
    the effect of an operand's rounding is a sum over that operand's independent roundings, whose deviation is at most
    |e| |B|_2, about twice sqrt(sum (e D)^2).
    """
    made = (reference.value - without).flatten()
    power = made.square().sum()
    if not power:
        return None
    off = ((seen.detach().cpu().double().flatten() - reference.value.flatten()) * made).sum().abs()
    size = half_spacing(reference.value.abs().flatten(), form) * ROUNDING + noise * reference.value.abs().flatten()
    if before is not None:
        size = size + before.flatten() * ROUNDING
    error = 2 * ORDER * reference.error.flatten()
    bound = CONFIDENCE * ((size * made).square().sum().sqrt() + (error * made).square().sum().sqrt())
    return float(off / bound) if bound < power / 2 else None


def measure_product(
    product: Product,
    kind: str,
    shape: tuple[int, int, int],
    form: Format,
    rng: torch.Generator,
    device: torch.device,
    region: Region,
    *,
    result: bool = True,
    backward: bool = True,
    rounds_sum: bool = False,
) -> list[Measured]:
    """Run a product of fp32 operands in `region`, where it is promised to compute in `form`, forward and backward.

    `result` and `backward` say which of the two is measured, `rounds_sum` whether the sum of products may be rounded
    before the bias is added.
    """
    full = product_operands(product, kind, shape, form, rng)
    left, right, bias, seed = (rounded(operand, form) for operand in full)
    leaves = [operand.float().to(device).requires_grad_() for operand in full[:3]]
    with region():
        seen = product.call(*leaves)
    what = f"{product.name} {'x'.join(map(str, shape))}, {kind.replace('_', ' ')}"
    added, plain = None if product.bias == "none" else bias, kind == "plain"
    before = _rounding_of_product(left, right, form) if rounds_sum and added is not None else None
    found = [_result(what, seen, full, (left, right, added), form, before, plain=plain)] if result else []
    if not backward:
        return found
    seen.backward(seed.to(seen.dtype).to(device))
    gradients = [(seed, right.mT, full[1].mT, 1), (left.mT, seed, full[0].mT, 0)]
    for place, (one, other, unrounded, operand) in enumerate(gradients):
        leaf, reference = leaves[place], _product_reference(one, other, None, form)
        measured = _judged(f"{what}: gradient {place}", leaf.grad, reference, form, place, gain=plain)
        if form is not FP32 and plain:
            without = exact.product(seed, unrounded) if operand else exact.product(unrounded, seed)
            measured = replace(measured, share=share_ratio(leaf.grad, without, reference, form))
        found.append(measured)
    if added is not None:
        rows = seed.sum(0) if product.bias == "row" else seed
        sizes = seed.abs().sum(0) if product.bias == "row" else seed.abs()
        exactly = product.bias == "full" or is_exact_in_any_order(seed, (0,))
        error = torch.zeros_like(rows) if exactly else seed.shape[0] * FP32.unit_roundoff * sizes / ORDER
        found.append(_judged(f"{what}: gradient 2", leaves[2].grad, Rounded(rows, error), form, 2, gain=plain))
    return found


def _result(
    what: str,
    seen: Tensor,
    full: tuple[Tensor, Tensor, Tensor, Tensor],
    narrow: tuple[Tensor, Tensor, Tensor | None],
    form: Format,
    before: Tensor | None,
    *,
    plain: bool,
) -> Measured:
    """Measure the result of `narrow`, which `full` was rounded to."""
    left, right, added = narrow
    reference = _product_reference(left, right, added, form)
    measured = _judged(what, seen, reference, form, gain=plain, before=before)
    if form is FP32 or not plain:
        return measured
    plus, whole = (0, 0) if added is None else (added, full[2])
    others = [exact.product(full[0], right) + plus, exact.product(left, full[1]) + plus]
    ratios = (share_ratio(seen, other, reference, form, before=before) for other in others)
    shares = [share for share in ratios if share is not None]
    size = normwise_error(seen, exact.product(full[0], full[1]) + whole) / form.unit_roundoff / 0.3
    return replace(measured, share=max(shares, default=None), size=size)


def _judged(
    what: str,
    seen: Tensor,
    reference: Rounded,
    form: Format,
    operand: int | None = None,
    *,
    gain: bool = True,
    before: Tensor | None = None,
) -> Measured:
    """Measure what was rounded to `form`, though a gradient comes back widened to fp32.

    `gain`: whether the roundings are independent, which they are not where scaled rows and few terms repeat numbers.
    `before`: half a spacing of what was rounded on the way.
    """
    scale = gain_ratio(seen, reference, form, before=before) if gain else 0.0
    if before is not None:
        reference = Rounded(reference.value, reference.error + before / ORDER)
    return Measured(what, seen.dtype, error_ratio(seen, reference, form), scale, operand)
