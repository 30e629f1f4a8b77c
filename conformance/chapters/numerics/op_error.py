"""Error of an op against a float64 reference, in units of its derived error bound.

Each output tensor has three figures. `error`: the worst element, divided by the maximum error of fp32 arithmetic in any
order (`Rounded`) plus one rounding to the stored type. `gain`: the systematic scale error, divided by the maximum for
independent roundings. Both are within bounds up to 1. `share` (products): the share of the operands' own rounding to 16
bits in the result: 1 if the operands were rounded, 0 if the op ran in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...oracles.numbers.formats import FORMATS, FP32, Format, binades, rounded
from ...oracles.numbers.running_error import CONFIDENCE, UNIT, Rounded

Region = Callable[[], AbstractContextManager[object]]
Store = Callable[[Rounded], Rounded]
Layout = Callable[[Tensor], Tensor]

ORDER = 2.0
"""A kernel may evaluate an equivalent formula in another order; each rounding of this formula then stands
for up to two of the kernel's (as in `loss_reference`)."""

SAME_SIGN = ("same_sign", "flat")
"""Kinds of data all of one sign, whose incoming gradients are so too."""

ROUNDING = 1 / math.sqrt(3)
"""Standard deviation of one rounding in units of half a spacing: uniform, which is sub-Gaussian with its own variance
(J. Arbel, O. Marchal, H. D. Nguyen, On strict sub-Gaussianity, ESAIM: Prob. Stat. 24, 2020). That roundings behave so:
N. J. Higham, T. Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41, 2019."""


@dataclass(frozen=True)
class Measured:
    """One output tensor: its name, its dtype, and its figures in units of their bounds."""

    what: str
    dtype: torch.dtype
    error: float
    gain: float = 0.0
    operand: int | None = None
    """The operand whose gradient it is; None: the result."""
    share: float | None = None
    """Distance of the share of the operands' rounding from 1, over what the result's own rounding may add."""
    size: float | None = None
    """Normwise error over 0.3 u of the 16-bit type: at least 1 where the op ran in it."""

    @property
    def worst(self) -> float:
        """The greatest of what holds up to 1."""
        return max(self.error, self.gain, self.share or 0.0)


_SLACK = 1 + 2.0**-40
"""What float64 may lose of a bound, which a tie meets exactly."""


def half_spacing(size: Tensor, form: Format) -> Tensor:
    """Return half the distance of neighbours of `form` at float64 magnitudes: what rounding to nearest may cost.

    Zero, where a sum cancels, counts as a half.
    """
    half = binades(size).clamp_min_(form.smallest_normal).mul_(form.unit_roundoff)
    return half.masked_fill_(size == 0, form.unit_roundoff / 2)


def allowed(reference: Rounded, form: Format) -> Tensor:
    """Return by element how far a tensor of `form` may be from the float64 value: arithmetic and one rounding."""
    error = ORDER * reference.error
    # fp32's own rounding is among those that were tracked.
    return error if form is FP32 else error + half_spacing(reference.value.detach().abs() + error, form)


def error_ratio(seen: Tensor, reference: Rounded, form: Format | None = None) -> float:
    """Return the worst |seen - value| over what is `allowed`; infinite where a special value is lost or made.

    A result beyond the range may be infinite where rounding, with the error that is allowed, leads there. `form` is the
    type that the result was rounded to, where it is not the one that it came out in (gradients that were widened).
    """
    form = form or FORMATS[seen.dtype]
    there, value = seen.detach().cpu().double(), reference.value.detach()
    bound = allowed(reference, form) * _SLACK
    off = (there - value).abs_()
    worst = float((off / bound).masked_fill_(off == 0, 0.0).max()) if off.numel() else 0.0
    if math.isfinite(worst):
        return worst
    over = torch.isinf(there) & (value.abs() + bound >= form.overflow) & (there.sign() == value.sign())
    # inf - inf; and 0 of 0 is no error.
    right = (there == value) | (there.isnan() & value.isnan()) | over
    return float((off / bound).nan_to_num_(nan=math.inf).masked_fill_(right, 0.0).max())


def gain_ratio(
    seen: Tensor, reference: Rounded, form: Format | None = None, noise: float = 0.0, before: Tensor | None = None
) -> float:
    """Return the systematic scale error <seen, value> / <value, value> - 1 over its bound.

    `CONFIDENCE` standard deviations of a sum of independent roundings to the stored type, and every error of the
    arithmetic pointing the same way. `noise` is the relative deviation of other independent errors, `before` half a
    spacing of what was rounded on the way.
    """
    form = form or FORMATS[seen.dtype]
    there, value = seen.detach().cpu().double().flatten(), reference.value.detach().flatten()
    error = ORDER * reference.error.flatten()
    spent = torch.zeros_like(value) if before is None else before.flatten()
    if not bool((value + there).isfinite().all()):
        keep = value.isfinite() & there.isfinite()
        there, value, error, spent = there[keep], value[keep], error[keep], spent[keep]
    power = value.square().sum()
    if not power:
        return 0.0
    bound = (error * value.abs()).sum()
    if form is not FP32:
        # Equal significands are rounded alike: all that share one are a single rounding.
        value_size = value.abs()
        kinds, order = torch.frexp(value_size)[0].sort()
        fresh = kinds[1:] != kinds[:-1]
        size = ((half_spacing(value_size, form) + spent) * ROUNDING + noise * value_size) * value_size
        if not bool(fresh.all()):
            member = torch.cat([fresh.new_zeros(1), fresh]).cumsum(0)
            size = torch.zeros_like(kinds).index_add(0, member, size[order])
        bound = bound + torch.minimum(CONFIDENCE * size.square().sum().sqrt(), size.sum() / ROUNDING)
        # Nearly equal ones are as well, such as the sums of one large term with small ones: the roundings themselves.
        spacing = 2 * half_spacing(value_size, form)
        bound = bound + (((value / spacing).round_() * spacing - value) * value).sum().abs()
    off = ((there - value) * value).sum().abs()
    return float(off / (bound * _SLACK)) if off else 0.0


def judged(what: str, seen: Tensor, reference: Rounded, operand: int | None = None) -> Measured:
    """Measure one tensor."""
    return Measured(what, seen.dtype, error_ratio(seen, reference), gain_ratio(seen, reference), operand)


_FRACTION = 2**52 - 1


def lowest_bit(tensor: Tensor) -> int:
    """Return the exponent of the lowest bit of any element: all of them are multiples of 2 to that power."""
    bits = tensor.contiguous().view(torch.int64)
    # Less one in the last place that is set; of a power of two no bit of the fraction is.
    rest = (bits & (bits - 1)).view(torch.float64)
    lowest = torch.where(bits & _FRACTION == 0, tensor, tensor - rest).abs()
    smallest = float(lowest.masked_fill_(lowest == 0, math.inf).min()) if tensor.numel() else math.inf
    return 0 if smallest == math.inf else math.frexp(smallest)[1] - 1


def is_exact_in_any_order(terms: Tensor, dims: Sequence[int]) -> bool:
    """Return whether every partial sum of float64 `terms` over `dims` is a number of fp32, so that no order rounds.

    All terms are multiples of one power of two, 2^24 of which the sum of their sizes does not exceed.
    """
    return float(terms.abs().sum(tuple(dims)).max()) <= 2.0 ** (24 + lowest_bit(terms))


def total(terms: Rounded, *dims: int) -> Rounded:
    """Add fp32 numbers along `dims` (all without any) in any order: without error where none rounds."""
    axes = dims or tuple(range(terms.value.dim()))
    if not terms.error.any() and is_exact_in_any_order(terms.value.detach(), axes):
        value = terms.value.sum(axes)
        return Rounded(value, torch.zeros_like(value).detach())
    return terms.sum(*dims)


def kept(terms: Rounded, *dims: int) -> Rounded:
    """`total`, the dimensions kept as ones."""
    result = total(terms, *dims)
    shape = [1 if d in [dim % terms.value.dim() for dim in dims] else s for d, s in enumerate(terms.value.shape)]
    return result.view(lambda tensor: tensor.reshape(shape))


def either(one: Rounded, other: Rounded) -> Rounded:
    """Return a value that may be computed in two ways, with the larger error of the two."""
    return Rounded(one.value, torch.maximum(one.error, other.error))


def loosened(value: Rounded, size: Tensor, roundings: int = 4) -> Rounded:
    """Allow for an equivalent formula that goes through numbers of `size`, which cancel: so many more roundings."""
    return Rounded(value.value, value.error + roundings * UNIT * size.detach().abs())


def stored_in(form: Format) -> Store:
    """Return what writing an intermediate result to memory in `form` does to it: one more rounding."""
    if form is FP32:
        return lambda value: value
    return lambda value: Rounded(
        value.value, value.error + half_spacing(value.value.detach().abs() + value.error, form)
    )


@dataclass(frozen=True)
class Op:
    """An op, its data, its formula and the formula of its gradients.

    `draw(kind, form, generator)` gives float64 operands. `formula(store, *operands)` evaluates the op with the error of
    fp32; `store` is what the type that results are kept in does to those that an implementation writes down. `gradient`
    does the same for the operands' gradients, given the incoming one before the operands (None: not differentiable).
    `wide` operands (the parameters of a layer) stay fp32. `policy` is the op's name on the op lists.
    """

    name: str
    call: Callable[..., Tensor]
    draw: Callable[[str, Format, torch.Generator], tuple[Tensor, ...]]
    formula: Callable[..., Rounded]
    gradient: Callable[..., Sequence[Rounded | None]] | None
    kinds: tuple[str, ...]
    policy: str = ""
    wide: tuple[int, ...] = ()
    composed: bool = False
    """Composed of many ops, so that its gradients in a 16-bit type have no bound: too many results are stored in it."""
    narrows: bool = False
    """Its backward casts the incoming gradient to the operand's type and adds up in that, so that the gradient of a
    16-bit operand has no bound where the op is listed as fp32."""
    incoming: Layout = lambda gradient: gradient
    """The memory layout that the incoming gradient gets, and equal values where several share their memory."""


def operands(op: Op, kind: str, form: Format, generator: torch.Generator) -> list[Tensor]:
    """Draw the operands of `op` as CPU tensors of `form`, those that are wide in fp32, integers as they are."""
    return [
        tensor
        if not tensor.is_floating_point()
        else rounded(tensor, FP32 if place in op.wide else form).to(FP32.dtype if place in op.wide else form.dtype)
        for place, tensor in enumerate(op.draw(kind, form, generator))
    ]


def measure(
    op: Op,
    kind: str,
    form: Format,
    generator: torch.Generator,
    device: torch.device,
    region: Region,
    *,
    backward: bool = True,
) -> list[Measured]:
    """Run `op` in `region` on operands of `form`, forward and, if `backward`, backward; measure the results."""
    inputs = operands(op, kind, form, generator)
    leaves = [
        tensor.clone().to(device).requires_grad_(op.gradient is not None and tensor.is_floating_point())
        for tensor in inputs
    ]
    with region():
        seen = op.call(*leaves)
    exact = [Rounded.exact(tensor) if tensor.is_floating_point() else tensor for tensor in inputs]
    out = FORMATS[seen.dtype]
    store = stored_in(out)
    what = f"{op.name} of {form.name}, {kind.replace('_', ' ')}"
    found = [judged(what, seen, op.formula(store, *exact))]
    unbounded = (op.composed and out is not FP32) or (op.narrows and out is not form)
    if not backward or op.gradient is None or unbounded:
        return found
    seed = torch.randn(seen.shape, generator=generator).double()
    # Where nothing cancels in the forward, nothing does in the backward.
    seed = op.incoming(rounded(seed.abs() + 0.5 if kind in SAME_SIGN else seed, out))
    seen.backward(op.incoming(seed.to(out.dtype).to(device)))
    gradients = op.gradient(store, Rounded.exact(seed), *exact)
    for place, (leaf, reference) in enumerate(zip(leaves, gradients, strict=True)):
        if reference is not None and leaf.grad is not None:
            found.append(judged(f"{what}: gradient {place}", leaf.grad, reference, place))
    return found


def lowered(op: Op, kind: str, form: Format, generator: torch.Generator) -> float:
    """Return the error of `op`, in units of its fp32 bound, had it rounded fp32 operands to `form` first."""
    inputs = operands(op, kind, FP32, generator)
    narrow = [rounded(x.double(), form) if x.is_floating_point() else x for x in inputs]
    exact, other = ([Rounded.exact(x) if x.is_floating_point() else x for x in some] for some in (inputs, narrow))
    return error_ratio(op.formula(stored_in(FP32), *other).value, op.formula(stored_in(FP32), *exact), FP32)


def worst(found: Sequence[Measured], figure: Callable[[Measured], float | None]) -> tuple[float, str]:
    """Return the greatest of a figure, and of what it is; 0 where none has it."""
    present = [(value, one.what) for one in found if (value := figure(one)) is not None]
    return max(present, default=(0.0, "nothing"))
