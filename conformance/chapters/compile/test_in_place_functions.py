"""Check gradients through custom autograd functions that write to what they are given, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .support import compiling

Call: TypeAlias = Callable[[Tensor], Tensor]


class _Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class _Rectifying(torch.autograd.Function):
    """A ReLU that keeps its result for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.relu_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * (result > 0)


class _Squaring(torch.autograd.Function):
    """A square that keeps a copy of what it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.clone())
        return x.square_()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (before,) = ctx.saved_tensors
        return gradient * 2 * before


FUNCTIONS: dict[str, Call] = {
    "doubled": _Doubling.apply,
    "rectified": _Rectifying.apply,
    "squared": _Squaring.apply,
    "multiplied": lambda x: x.mul_(3),
}


def _of_the_result(call: Call) -> Call:
    return lambda x: call(x)


def _of_what_was_written(call: Call) -> Call:
    def run(x: Tensor) -> Tensor:
        call(x)
        return x

    return run


def _of_a_copy(call: Call) -> Call:
    return lambda x: call(x.clone())


def _of_a_copy_that_was_written(call: Call) -> Call:
    def run(x: Tensor) -> Tensor:
        copy = x.clone()
        call(copy)
        return copy

    return run


def _of_several(call: Call) -> Call:
    return lambda x: call(x) + call(x * 3)


def _of_nothing(call: Call) -> Callable[[Tensor], None]:
    def run(x: Tensor) -> None:
        call(x)

    return run


USES: dict[str, Callable[[Call], Callable[[Tensor], Tensor | None]]] = {
    "no result": _of_nothing,
    "the result": _of_the_result,
    "what was written to": _of_what_was_written,
    "the result of a copy": _of_a_copy,
    "a copy that was written to": _of_a_copy_that_was_written,
    "two results": _of_several,
}


def _observed(
    program: Callable[[Tensor], Tensor | None], factor: Tensor, target: Target, dtype: torch.dtype, region: bool
) -> list[Tensor]:
    """Return what a program makes of a 16-bit product, the product after it, and the gradient of its float32 factor.

    What a program without a result makes is the product.
    """
    leaf = factor.clone().requires_grad_()
    with target.autocast(dtype):
        product = leaf @ torch.eye(4, device=leaf.device)
        if region:
            out = program(product)
    if not region:
        out = program(product)
    out = product if out is None else out
    (out.float() * torch.arange(16.0, device=out.device).view(4, 4)).sum().backward()
    assert leaf.grad is not None
    return [out.detach(), product.detach(), leaf.grad]


def _judge(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    factor = torch.randint(-3, 4, (4, 4), generator=rng).float().to(target.device)
    supported = case.supported(target)
    with compiling(case, backend):
        for number, (of, use) in enumerate(USES.items()):
            for at, (name, call) in enumerate(FUNCTIONS.items()):
                turn = number + at + case.seed
                dtype, region = supported[turn // 2 % len(supported)], bool(turn % 2)
                where = f"{of}, {name}, in {dtype}, {'in a region' if region else 'after a region'}"
                program = use(call)
                right = _observed(program, factor, target, dtype, region)
                torch._dynamo.reset()
                try:
                    seen = _observed(torch.compile(program, backend=backend), factor, target, dtype, region)
                except RuntimeError as error:
                    case.equal(f"{where}: what compiled code raises", str(error).splitlines()[0][:100], "")
                    continue
                case.identical(f"{where}: values", seen[0], right[0])
                case.identical(f"{where}: values of what was given", seen[1], right[1])
                case.identical(f"{where}: gradient", seen[2], right[2])


@contract("AMP-COMPILE-092")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", deep("standard", "aot_eager_decomp_partition")])
def test_in_place_functions(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    _judge(case, target, rng, backend)


@contract("AMP-COMPILE-092")
@needs("compiled kernels")
@pytest.mark.parametrize("backend", [deep("full", "inductor")])
def test_in_place_functions_in_kernels(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    _judge(case, target, rng, backend)
