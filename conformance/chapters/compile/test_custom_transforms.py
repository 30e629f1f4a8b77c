"""Check that custom autograd functions keep their own derivatives in transforms inside compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .support import compiling, dtypes_of

BACKWARD, FORWARD, EACH = 7.0, 5.0, 3.0
"""What the derivatives of the function, and its results under vmap, are multiplied by: autograd would find others."""


class Own(torch.autograd.Function):
    """The square, whose derivatives and whose rule under vmap are its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * BACKWARD

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0] * FORWARD

    @staticmethod
    def vmap(info: Any, dims: tuple[int, ...], x: Tensor) -> tuple[Tensor, int]:
        return x * EACH, dims[0]


def _own(x: Tensor) -> Tensor:
    return Own.apply(x)


def _total(x: Tensor) -> Tensor:
    return _own(x).sum()


TRANSFORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "grad": lambda x: torch.func.grad(_total)(x),
    "value and gradient": lambda x: torch.func.grad_and_value(_total)(x)[0],
    "vjp": lambda x: torch.func.vjp(_own, x)[1](torch.ones_like(x))[0],
    "jvp": lambda x: torch.func.jvp(_own, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda x: torch.func.jacrev(_own)(x),
    "jacfwd": lambda x: torch.func.jacfwd(_own)(x),
    "vmap": lambda x: torch.vmap(_own)(x),
    "vmap of apply": lambda x: torch.vmap(Own.apply)(x),
    "vmap of grad": lambda x: torch.vmap(torch.func.grad(_total))(x),
    "none": _own,
}
SHOWN = ("grad", "vmap", "none")


def _seen(call: Callable[[Tensor], Tensor], x: Tensor, *, backward: bool) -> list[Tensor]:
    leaf = x.clone().requires_grad_(backward)
    result = call(leaf)
    return [result, *torch.autograd.grad(result.float().sum(), leaf)] if backward else [result]


@contract("AMP-COMPILE-098")
@pytest.mark.parametrize("name", [name if name in SHOWN else deep("standard", name) for name in TRANSFORMS])
@pytest.mark.parametrize("backend", ["aot_eager", deep("standard", "eager")])
def test_transforms_of_custom_functions(
    case: Case, target: Target, rng: torch.Generator, backend: str, name: str
) -> None:
    x = torch.randint(1, 5, (4, 4), generator=rng).float().to(target.device)
    backward = name == "none"
    for dtype in dtypes_of(case, target):

        def program(x: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            with torch.autocast(x.device.type, dtype=dtype):
                return torch.mm(TRANSFORMS[name](x).reshape(-1, 4), x)

        expected = _seen(program, x, backward=backward)
        with compiling(case, backend):
            found = _seen(torch.compile(program, backend=backend), x, backward=backward)
        for what, seen, right in zip(("result", "gradient"), found, expected, strict=False):
            case.identical(f"{dtype}: {what}", seen, right)
