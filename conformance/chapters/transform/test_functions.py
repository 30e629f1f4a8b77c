"""Check custom autograd functions under transforms in a region."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.trace.ops import OpTrace
from .derivatives import PLACES, wide_products
from .exact_programs import TAIL

pytestmark = pytest.mark.usefixtures("one_thread")


class Product(torch.autograd.Function):
    """A matrix product whose vmap torch derives from its forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return torch.mm(gradient, b.mT.to(gradient.dtype)), torch.mm(a.mT.to(gradient.dtype), gradient)


class OwnRule(Product):
    """The same with a rule for vmap of its own."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], a: Tensor, b: Tensor) -> tuple[Tensor, int]:
        a, b = (
            one.expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0)
            for one, dim in zip((a, b), dims, strict=True)
        )
        return torch.bmm(a, b), 0


_TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], Tensor, Tensor], Tensor]] = {
    "grad": lambda f, a, b: torch.func.grad(lambda b: f(a, b).float().sum())(b),
    "vjp": lambda f, a, b: torch.func.vjp(lambda b: f(a, b).float(), b)[1](torch.ones(2, 2, device=a.device))[0],
    "jacrev": lambda f, a, b: torch.func.jacrev(lambda b: f(a, b))(b).sum((0, 1)),
    "vmap": lambda f, a, b: torch.func.vmap(f)(a[None], b[None])[0],
    "vmap-weight": lambda f, a, b: torch.func.vmap(f, in_dims=(0, None))(a[None], b)[0],
}


@contract("AMP-TRANSFORM-015")
@pytest.mark.parametrize("transform", _TRANSFORMS)
@pytest.mark.parametrize("function", [Product, OwnRule])
def test_functions(case: Case, target: Target, function: type[torch.autograd.Function], transform: str) -> None:
    a = torch.tensor([[1.0, -1.0], [1.0, 1.0]], device=target.device) * (1.0 + TAIL)
    b = a.flip(0)
    mapped = transform.startswith("vmap")
    for dtype in case.supported(target):
        value = torch.mm(a.sign(), b.sign()).to(dtype)
        gradient = torch.mm(a.sign().mT, torch.ones_like(a))
        for place in ("around", "inside"):
            applied, outer = PLACES[place](function.apply, functools.partial(target.autocast, dtype))
            with outer(), OpTrace() as trace:
                seen = _TRANSFORMS[transform](applied, a, b)
            case.identical(f"{dtype}, region {place}: {transform}", seen, value if mapped else gradient)
            if mapped or place == "around":
                case.equal(f"{dtype}, region {place}: products in another type", wide_products(trace, dtype), None)
