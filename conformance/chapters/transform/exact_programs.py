"""Programs whose values and derivatives are exact in 16 bits where their inputs were cast, and only there.

Each input is 1 or -1 with 2^-12 added to its size. The cast to float16 or bfloat16 rounds that to 1 or -1: half a unit
in the last place of 1 is 2^-11 and 2^-8. All later values are integers below 256, which bfloat16 holds, so that every
order of operations gives the same bits. An op that keeps its float32 operands carries the 2^-12 into its result.

One program has an input that no op casts. Its derivatives are multiples of 2^12 + 1, which float32 holds and neither
16-bit type, so that a derivative that was rounded to 16 bits on its way differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

TAIL = 2.0**-12
# One bit more than float16 holds, and five more than bfloat16.
WIDE = 2.0**12 + 1.0
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class ExactProgram:
    """A function of tensors of these shapes; inputs that are not `kept` enter ops of the lower precision list only.

    `float32` means that it ends in float32, and not in an op of the lower precision list. The second derivatives of a
    program with `kept` are not exact: they are squares of the first, which do not fit into float32.
    """

    name: str
    function: Function
    shapes: tuple[tuple[int, ...], ...]
    float32: bool = False
    kept: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        return self.name

    def signs(self) -> tuple[Tensor, ...]:
        """Return the inputs as the casts round them, in float64 on the CPU."""
        generator = torch.Generator().manual_seed(sum(map(sum, self.shapes)))
        return tuple(2.0 * torch.randint(0, 2, shape, generator=generator).double() - 1.0 for shape in self.shapes)

    def inputs(self, device: torch.device, *, batch: int | None = None) -> tuple[Tensor, ...]:
        """Return the float32 inputs; with `batch` so many of each, which are not the same."""
        made = (one * (1.0 + TAIL) for one in self.signs())
        if batch is None:
            return tuple(one.float().to(device) for one in made)
        return tuple(
            torch.stack([one * (-1.0) ** (index * place) for index in range(batch)]).float().to(device)
            for place, one in enumerate(made, start=1)
        )

    def run(self, device: torch.device) -> Tensor:
        """Compute the gradients on the device, outside of any region."""
        inputs = [one.requires_grad_() for one in self.inputs(device)]
        output = self.function(*inputs)
        torch.autograd.grad(output, inputs, torch.ones_like(output))
        return output


def _mlp(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    hidden = F.relu(F.linear(x, first))
    output = F.linear(hidden, second)
    return F.mse_loss(output, torch.zeros_like(output), reduction="sum")


def _attention(x: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return ((x @ query) @ (x @ key).mT) @ x


def _residual(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return F.linear(x, first) + F.linear(x, second)


def _float32_term(x: Tensor, weight: Tensor, term: Tensor) -> Tensor:
    return F.linear(x, weight).float() + WIDE * term


PROGRAMS = (
    ExactProgram("mm", torch.mm, ((2, 3), (3, 2))),
    ExactProgram("matmul", torch.matmul, ((2, 2, 3), (3, 2))),
    ExactProgram("bmm", torch.bmm, ((2, 2, 3), (2, 3, 2))),
    ExactProgram("einsum", lambda a, b: torch.einsum("bij,bjk->bik", a, b), ((2, 2, 3), (2, 3, 2))),
    ExactProgram("linear", F.linear, ((2, 3), (2, 3))),
    ExactProgram("linear-bias", F.linear, ((2, 3), (2, 3), (2,))),
    ExactProgram("baddbmm", torch.baddbmm, ((2, 2, 2), (2, 2, 3), (2, 3, 2))),
    ExactProgram("conv1d", F.conv1d, ((1, 2, 4), (2, 2, 2))),
    ExactProgram("conv2d-bias", F.conv2d, ((1, 2, 3, 3), (2, 2, 2, 2), (2,))),
    ExactProgram("conv_transpose1d", F.conv_transpose1d, ((1, 2, 3), (2, 2, 2))),
    ExactProgram("attention", _attention, ((2, 2), (2, 2), (2, 2))),
    ExactProgram("residual", _residual, ((2, 3), (2, 3), (2, 3))),
    ExactProgram("mlp", _mlp, ((2, 3), (3, 3), (2, 3)), float32=True),
    ExactProgram("float32-term", _float32_term, ((2, 3), (2, 3), (2, 2)), float32=True, kept=(2,)),
)
BY_NAME = {one.name: one for one in PROGRAMS}


@dataclass(frozen=True)
class Derivatives:
    """The value of a program and its derivatives at its rounded inputs, in float64, flattened.

    `jacobian` has a row for each element of the output and a column for each element of the inputs; `hessian` is that
    of the sum of the squares of the output.
    """

    output: Tensor
    jacobian: Tensor
    hessian: Tensor


@functools.cache
def exact(name: str) -> Derivatives:
    """Return the exact derivatives of a program: float64 backward, one element at a time, without transforms."""
    program = BY_NAME[name]
    leaves = [one.requires_grad_() for one in program.signs()]
    output = program.function(*leaves).reshape(-1)
    jacobian = torch.stack([_row(one, leaves) for one in output])
    total = output.pow(2).sum()
    gradient = torch.cat([one.reshape(-1) for one in torch.autograd.grad(total, leaves, create_graph=True)])
    hessian = torch.stack([_row(one, leaves) for one in gradient])
    return Derivatives(output.detach(), jacobian, hessian)


def _row(value: Tensor, leaves: list[Tensor]) -> Tensor:
    if not value.requires_grad:
        return torch.cat([torch.zeros_like(one).reshape(-1) for one in leaves])
    found = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
    return torch.cat([one.reshape(-1) for one in found])
