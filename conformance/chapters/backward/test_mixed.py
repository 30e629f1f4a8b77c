"""Check gradients of operands that broadcast against 16-bit ones, and in-place changes of saved tensors."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.generators import seed_torch

Meet = Callable[[Tensor, Tensor], Tensor]
# Of a 16-bit tensor and a float32 one, both positive; those that a device refuses outside of regions are left out.
MEETINGS: dict[str, Meet] = {
    "mul": torch.mul,
    "x * g": operator.mul,
    "g * x": lambda x, g: g * x,
    "g.mul(x)": lambda x, g: g.mul(x),
    "add": torch.add,
    "x + g": operator.add,
    "add, alpha": lambda x, g: torch.add(x, g, alpha=0.75),
    "x - g": operator.sub,
    "g - x": lambda x, g: g - x,
    "rsub": lambda x, g: torch.rsub(x, g),
    "x / g": operator.truediv,
    "g / x": lambda x, g: g / x,
    "x ** g": operator.pow,
    "g ** x": lambda x, g: g**x,
    "maximum": torch.maximum,
    "minimum": lambda x, g: torch.minimum(g, x),
    "hypot": torch.hypot,
    "where": lambda x, g: torch.where(x > 1, x, g),
    "where, g first": lambda x, g: torch.where(x > 1, g, x),
    "addcmul": lambda x, g: torch.addcmul(x, x, g, value=0.5),
    "addcmul of g": lambda x, g: torch.addcmul(g, x, x),
    "addcdiv": lambda x, g: torch.addcdiv(x, x, g),
    "lerp": lambda x, g: torch.lerp(x, 2 * x, g),
    "lerp of g": lambda x, g: torch.lerp(x.to(g.dtype), g, 0.3),
    "x of its type * g": lambda x, g: x.to(g.dtype) * g,
    "x * g + g": lambda x, g: x * g + g,
    "mul_ of a copy": lambda x, g: (x + 0 * g).mul_(g),
    "expanded": lambda x, g: x * g.expand(x.shape),
    "clamp": lambda x, g: torch.clamp(x, max=g),
    "stack": lambda x, g: torch.stack([x, g.expand(x.shape)]),
    "cat": lambda x, g: torch.cat([x, g.expand(x.shape)]),
    "dist": lambda x, g: (x - g).square(),
}
SHAPES = ((6,), (40, 1), (1, 6), (3, 1, 6), (40, 6))
FP32_ROUNDINGS = 8 + 40 * 3  # of a chain of four ops and their sums over 120 terms, each half a unit roundoff


@contract("AMP-BACKWARD-053")
@pytest.mark.parametrize("kind", ["parameter", "leaf"])
def test_broadcast_operands(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, kind: str
) -> None:
    make = torch.nn.Parameter if kind == "parameter" else lambda x: x.requires_grad_()
    low = (torch.rand(40, 6, generator=rng) + 0.5).to(amp_dtype)
    judged, fine, wrong, coarse = 0, 0, {}, {}
    for name, meet in MEETINGS.items():
        for shape in SHAPES:
            number = torch.rand(shape, generator=rng) + 0.5
            weights = torch.rand(3, 40, 6, generator=rng) + 0.5

            def slope(
                x: Tensor, g: Tensor, region: Any, meet: Meet = meet, weights: Tensor = weights
            ) -> tuple[Tensor, Tensor]:
                with region():
                    met = meet(x, g)
                used = weights.to(met.device, met.dtype).expand(3, *met.shape[-2:])
                used = used[: met.shape[0]] if met.dim() == 3 else used[0]
                (found,) = torch.autograd.grad(met, g, used.expand_as(met))
                return met, found

            try:
                plain, _ = slope(low.to(target.device), make(number.to(target.device)), contextlib.nullcontext)
            except (RuntimeError, NotImplementedError):
                continue
            value, exact = slope(low.double(), number.double().requires_grad_(), contextlib.nullcontext)
            wide = partial(target.autocast, amp_dtype)
            for learns in (False, True):
                x = low.to(target.device).requires_grad_(learns)
                met, seen = slope(x, make(number.to(target.device)), wide)
                if met.dtype != torch.float32:
                    continue
                judged += 1
                for place, each in (("outside", plain), ("in", met)):
                    apart = (each.detach().cpu().double() - value).abs() / value.abs().clamp(min=value.abs().mean())
                    if not float(apart.max()) <= FP32_ROUNDINGS * 2.0**-24:
                        coarse[f"{name}, {shape}, {place}"] = f"relative error {float(apart.max()):.1e}"
                found = seen.detach().cpu()
                fine += not torch.equal(found.to(amp_dtype).float(), found)
                error = float(((found.double() - exact).abs() / exact.abs().clamp(min=exact.abs().mean())).max())
                if found.dtype != torch.float32 or not error <= FP32_ROUNDINGS * 2.0**-24:
                    wrong[f"{name}, {shape}, x learns: {learns}"] = f"{found.dtype}, relative error {error:.1e}"
    case.equal("results of a 16-bit and a float32 operand that are not float32's", dict(list(coarse.items())[:6]), {})
    case.equal("gradients of float32 operands that are not float32's", dict(list(wrong.items())[:6]), {})
    case.at_least("gradients judged", judged, 40)
    case.at_least("gradients that no 16-bit tensor holds (control)", fine, 40)


# What saves its result, or its operand, for its backward.
SAVES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "tanh, its result": lambda x, w: (lambda y: (y, y + 0))(torch.tanh(x)),
    "sigmoid, its result": lambda x, w: (lambda y: (y, y + 0))(torch.sigmoid(x)),
    "relu, its result": lambda x, w: (lambda y: (y, y * 1))(torch.relu(x)),
    "exp, its result": lambda x, w: (lambda y: (y, y + 0))(torch.exp(x)),
    "mul, an operand": lambda x, w: (lambda y: (y, y * x))(x + 0),
    "square": lambda x, w: (lambda y: (y, y.square()))(x + 0),
    "gelu": lambda x, w: (lambda y: (y, F.gelu(y)))(x + 0),
    "mm": lambda x, w: (lambda y: (y, torch.mm(y, w)))(x + 0),
    "linear": lambda x, w: (lambda y: (y, F.linear(y, w)))(x + 0),
    "linear, its weight": lambda x, w: (lambda y: (y, F.linear(x, y)))(w + 0),
    "conv1d": lambda x, w: (lambda y: (y, F.conv1d(y[None], w[..., None])))(x + 0),
    "div": lambda x, w: (lambda y: (y, x / y))(w + 2),
    "layer_norm": lambda x, w: (lambda y: (y, F.layer_norm(y, (3,))))(x + 0),
}
# In place, by each spelling, and of a view; what changes nothing saved is the control.
CHANGES: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda y: y.add_(1),
    "add_ of a tensor": lambda y: y.add_(torch.ones_like(y)),
    "+=": lambda y: operator.iadd(y, 1),
    "sub_": lambda y: y.sub_(1),
    "mul_": lambda y: y.mul_(2),
    "*= of a tensor": lambda y: operator.imul(y, torch.full_like(y, 2)),
    "div_": lambda y: y.div_(2),
    "copy_": lambda y: y.copy_(torch.zeros(y.shape, device=y.device)),
    "zero_": lambda y: y.zero_(),
    "fill_": lambda y: y.fill_(1),
    "y[0] = 0": lambda y: operator.setitem(y, 0, 0),
    "y[mask] = 0": lambda y: operator.setitem(y, y > -9, 0),
    "y[:, 1:] += 1": lambda y: y[:, 1:].add_(1),
    "masked_fill_": lambda y: y.masked_fill_(y > -9, 0),
    "clamp_": lambda y: y.clamp_(0, 1),
    "relu_": lambda y: y.relu_(),
    "tanh_": lambda y: y.tanh_(),
    "F.dropout": lambda y: F.dropout(y, 0.5, inplace=True),
    "t_().add_": lambda y: y.t().add_(1),
    "detach().add_": lambda y: y.detach().add_(1),
    "addcmul_": lambda y: y.addcmul_(y.detach().clone(), y.detach().clone()),
    "lerp_": lambda y: y.lerp_(torch.ones_like(y), 0.5),
    "scatter_": lambda y: y.scatter_(0, torch.zeros(1, 3, dtype=torch.long, device=y.device), 1.0),
    "index_add_": lambda y: y.index_add_(0, torch.tensor([0], device=y.device), torch.ones_like(y[:1])),
    "_foreach_add_": lambda y: torch._foreach_add_([y], 1),
    "nothing": lambda y: y.add(1),
}


def _in_place(saves: str, change: str, x: Tensor, w: Tensor, given: torch.dtype, region: Any) -> tuple[Any, ...]:
    """Return by how much the version grew, how the backward ended, and whether the op took a cast copy."""
    with region:
        y, used = SAVES[saves](x.to(given), w.to(given))
        before = y._version
        try:
            CHANGES[change](y)
        except (RuntimeError, NotImplementedError) as error:
            return "refused", type(error).__name__, False
        grown = y._version - before
    try:
        used.float().sum().backward()
    except RuntimeError as error:
        ending = "in-place" if "modified by an inplace operation" in str(error) else type(error).__name__
        return grown, ending, used.dtype != y.dtype
    return grown, "gradients", used.dtype != y.dtype


QUICK = ("tanh, its result", "linear")


def _by_depth() -> Iterator[Any]:
    for name in SAVES:
        word = name.replace(", ", "-").replace(" ", "_")
        yield pytest.param(name, id=word) if name in QUICK else deep("standard", name, id=word)


@contract("AMP-BACKWARD-082")
@pytest.mark.parametrize("saves", list(_by_depth()))
def test_changes_of_saved_tensors(case: Case, target: Target, amp_dtype: torch.dtype, saves: str) -> None:
    region = partial(target.autocast, amp_dtype)
    wrong: dict[str, str] = {}
    errors = judged = 0
    for given in (amp_dtype, torch.float32):
        for change in CHANGES:

            def ended(around: Any, given: torch.dtype = given, change: str = change) -> tuple[Any, ...]:
                seed_torch(0)
                x, w = (torch.rand(3, 3, device=target.device, requires_grad=True) for _ in range(2))
                return _in_place(saves, change, x, w, given, around)

            outside, inside = ended(contextlib.nullcontext()), ended(region())
            if outside[0] == "refused":
                continue
            judged += 1
            errors += inside[1] == "in-place"
            # Of a cast copy that autocast saves in its place, a change is no error.
            cast = inside[2] and inside[1] == "gradients"
            if inside[0] != outside[0] or (inside[1] != outside[1] and not cast):
                wrong[f"{change} of {given}"] = f"{inside} in place of {outside}"
            if change != "nothing" and not outside[0]:
                wrong[f"{change} of {given}, outside"] = "no new version"
    case.equal("changes that are another error, or none, in a region", wrong, {})
    case.at_least("changes judged", judged, 20)
    case.at_least("changes that raised in a region (control)", errors, 10)
