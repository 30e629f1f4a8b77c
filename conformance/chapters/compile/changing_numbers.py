"""Ops of a matrix and a Python number whose results are exact, and the places from which a program gets the number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Number: TypeAlias = float | int
Op: TypeAlias = Callable[[Tensor, Tensor, Number], Tensor]
Program: TypeAlias = Callable[[Tensor, Tensor, Number], list[Tensor]]

SIZE = 4

SEQUENCES: Mapping[str, Sequence[Number]] = {"float": (2.0, 4.0, 0.5, 8.0), "int": (2, 4, 3, 8)}
"""Numbers of calls in turn: compilers take the first as a constant, and the second as a sign that it varies."""

_COMPUTED: Mapping[str, Op] = {
    "x * n": lambda x, y, n: x * n,
    "n - x": lambda x, y, n: n - x,
    "x / n": lambda x, y, n: x / (2 * n),
    "arithmetic of n": lambda x, y, n: x * (n * n - 1),
}
"""What a graph can compute of the number as a tensor."""

_GIVEN: Mapping[str, Op] = {
    "add with alpha": lambda x, y, n: torch.add(x, y, alpha=n),
    "add_ with alpha": lambda x, y, n: x.clone().add_(y, alpha=n),
    "addcmul": lambda x, y, n: torch.addcmul(x, x, y, value=n),
    "addcdiv_": lambda x, y, n: x.clone().addcdiv_(x, y, value=n),
    "lerp": lambda x, y, n: torch.lerp(x, y, n),
    "addmm": lambda x, y, n: torch.addmm(x, x, y, beta=n, alpha=n),
    "clamp": lambda x, y, n: x.clamp(-n, n),
    "where": lambda x, y, n: torch.where(x > 0, x, n),
    "masked_fill": lambda x, y, n: x.masked_fill(x > 0, n),
    "full_like": lambda x, y, n: torch.full_like(x, n),
    "pad": lambda x, y, n: functional.pad(x, (1, 1), value=n),
    "comparison": lambda x, y, n: (x * 2 > n).to(x.dtype),
    "leaky_relu": lambda x, y, n: functional.leaky_relu(x, n),
    "list with alpha": lambda x, y, n: torch._foreach_add([x, y], [y, x], alpha=n)[1],
    "list times n": lambda x, y, n: torch._foreach_mul([x, y], n)[0],
    "list by quotients": lambda x, y, n: torch._foreach_addcdiv([x], [x], [y], n)[0],
}
"""What takes the number as an argument."""

FEW = ("x * n", "add_ with alpha", "full_like")
SOME = ("x * n", "add_ with alpha", "addcdiv_", "clamp", "full_like", "list by quotients")
OPS: Mapping[str, Op] = {**_COMPUTED, **_GIVEN}


def operands(device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a matrix of integers from -2 to 2 that needs gradients, and one of ones, signed."""
    x = torch.randint(-2, 3, (SIZE, SIZE), generator=generator).float()
    y = 1 - 2 * torch.randint(0, 2, (SIZE, SIZE), generator=generator).float()
    return x.to(device).requires_grad_(), y.to(device)


def program(names: Sequence[str]) -> Program:
    """Return a function of `operands` and a number: each op of the float32 matrix, and of its product with the unit."""

    def call(x: Tensor, y: Tensor, n: Number) -> list[Tensor]:
        low = torch.mm(x, torch.eye(SIZE, device=x.device))
        signs = y.to(low.dtype)
        return [OPS[name](*pair, n) for pair in ((x, y), (low, signs)) for name in names]

    return call


class _Holding(torch.nn.Module):
    """A program whose number is an attribute."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.n = program, 0.0

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return self.program(x, y, self.n)


Compile: TypeAlias = Callable[[Callable[..., list[Tensor]]], Callable[..., list[Tensor]]]


def _as_argument(program: Program, compiled: Compile) -> Program:
    return compiled(program)


def _in_a_dict(program: Program, compiled: Compile) -> Program:
    made = compiled(lambda x, y, options: program(x, y, options["n"]))
    return lambda x, y, n: made(x, y, {"n": n, "other": 1.0})


def _as_attribute(program: Program, compiled: Compile) -> Program:
    module = _Holding(program)
    made = compiled(module)

    def call(x: Tensor, y: Tensor, n: Number) -> list[Tensor]:
        module.n = n
        return made(x, y)

    return call


def _of_the_enclosing_function(program: Program, compiled: Compile) -> Program:
    number: Number = 0.0
    made = compiled(lambda x, y: program(x, y, number))

    def call(x: Tensor, y: Tensor, n: Number) -> list[Tensor]:
        nonlocal number
        number = n
        return made(x, y)

    return call


def _of_a_tensor(program: Program, compiled: Compile) -> Program:
    made = compiled(lambda x, y, n: program(x, y, n.item()))
    return lambda x, y, n: made(x, y, torch.tensor(n))


PLACES: Mapping[str, Callable[[Program, Compile], Program]] = {
    "argument": _as_argument,
    "item": _of_a_tensor,
    "attribute": _as_attribute,
    "dict": _in_a_dict,
    "variable": _of_the_enclosing_function,
}
"""Places of the number: each makes a function of operands and a number of a program and of what compiles it."""
