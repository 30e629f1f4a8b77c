"""Provide inputs, surrounding autocast states and comparisons for several checks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ...harness.check import Case
from ...harness.targets import Target
from ...oracles.numbers.formats import OTHER
from .op_chains import CHAINS, Chain

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

Forward = Callable[..., Any]

around_backward = pytest.mark.parametrize("around", ["outside", "other-dtype", "disabled"])
by_chain = pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)


def normal(rng: torch.Generator) -> Callable[[tuple[int, ...]], torch.Tensor]:
    return lambda shape: torch.randn(shape, generator=rng)


def small_integers(rng: torch.Generator) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Return a generator of -1, 0 and 1, whose products and short sums are exact in every floating-point dtype."""
    return lambda shape: torch.randint(-1, 2, shape, generator=rng).float()


def cotangent(output: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(output.shape, generator=rng).to(output.device, output.dtype)


def backward_from(output: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Run backward from a gradient of the output that differs by element, and return that gradient."""
    gradient = cotangent(output, rng)
    output.backward(gradient)
    return gradient


def forward(chain: Chain, leaves: Mapping[str, torch.Tensor], target: Target, dtype: torch.dtype) -> torch.Tensor:
    with target.autocast(dtype):
        return chain.autocast(leaves)


def plain(part: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call a part of a model without a checkpoint."""
    result: torch.Tensor = part(x)
    return result


def gradients(leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of the leaves and reset them to None."""
    taken = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = None
    return taken


def same_gradients(
    case: Case, what: str, seen: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    case.equal(f"{what}: leaves with a gradient", sorted(seen), sorted(expected))
    for name, gradient in expected.items():
        case.identical(f"{what}: gradient of {name}", seen[name], gradient)


def ambient(target: Target, state: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    """Return the context around backward: no region, a region of the other 16-bit dtype, a disabled one."""
    if state == "outside":
        return contextlib.nullcontext()
    return target.autocast(OTHER[dtype], enabled=state == "other-dtype")


def integers(rng: torch.Generator, target: Target, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return -1, 0 and 1, requiring grad: their products and short sums are exact in 16 bit."""
    return torch.randint(-1, 2, shape, generator=rng).to(target.device, dtype).requires_grad_()


@dataclass(frozen=True)
class Around:
    """The autocast state around a call; `dtype` None means no region."""

    dtype: torch.dtype | None
    enabled: bool = True

    def open(self, target: Target) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.dtype is None else target.autocast(self.dtype, enabled=self.enabled)

    def __str__(self) -> str:
        return "no region" if self.dtype is None else f"{self.dtype}, enabled {self.enabled}"


def surroundings(dtypes: tuple[torch.dtype, ...]) -> list[Around]:
    regions = [Around(dtype, enabled) for dtype, enabled in itertools.product(dtypes, (True, False))]
    return [Around(None), *regions]


@contextlib.contextmanager
def unlike_elsewhere(target: Target, enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    """Set the opposite flag and another dtype for every other device type, to detect a read of the wrong one."""
    others = [kind for kind in ("cpu", "cuda", "xpu", "mps") if kind != target.device_type]
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in others]
    try:
        for kind in others:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        yield
    finally:
        for kind, was, had in before:
            torch.set_autocast_enabled(kind, was)
            torch.set_autocast_dtype(kind, had)


def state(target: Target) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(target.device_type), torch.get_autocast_dtype(target.device_type)


class Product(torch.autograd.Function):
    """The matrix product of the AMP examples; its subclasses decorate it."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Doc of forward."""
        ctx.save_for_backward(left, right)
        return left.mm(right)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Doc of backward."""
        left, right = ctx.saved_tensors
        return gradient.mm(right.t()), left.t().mm(gradient)


def decorated(forward: Callable[[Forward], Forward], backward: Callable[[Forward], Forward]) -> Any:
    """Return the product with `forward` and `backward` as its decorators."""
    return type(
        "Decorated",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward(Product.forward)), "backward": staticmethod(backward(Product.backward))},
    )
