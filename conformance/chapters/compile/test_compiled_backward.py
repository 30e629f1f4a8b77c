"""Check that the backward pass of regions has eager's types and gradients where compiled autograd runs it."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .observation import Observed, copies
from .support import compiler, dtypes_of, same, whole_numbers

Forward = Callable[[Tensor, Tensor], Any]


class Plain(torch.autograd.Function):
    """A product whose backward computes in the types of the region around backward, so gradients may be of 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return incoming[0].float() @ weight.t(), x.t() @ incoming[0].float()


def _decorated(device_type: str) -> Forward:
    """Return a product whose backward computes in the types of the region around forward."""

    class Decorated(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device_type)
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        @torch.amp.custom_bwd(device_type=device_type)
        def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return incoming[0] @ weight.t(), x.t() @ incoming[0]

    return Decorated.apply


def _checkpointed(x: Tensor, weight: Tensor) -> Any:
    return checkpoint(lambda *given: linear(*given).relu(), x, weight, use_reentrant=False)


def _forwards(device_type: str) -> dict[str, Forward]:
    def island(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(device_type, enabled=False):
            return x @ weight

    return {
        "layer": lambda x, weight: linear(x, weight).relu(),
        "shared-weight": lambda x, weight: (x @ weight) @ weight,
        "custom-function": Plain.apply,
        "decorated-function": _decorated(device_type),
        "checkpoint": _checkpointed,
        "disabled-region": island,
    }


NAMES = tuple(_forwards("cpu"))


@contract("AMP-COMPILE-082")
@pytest.mark.parametrize("backend", [deep("standard", "eager"), deep("full", "aot_eager")])
@pytest.mark.parametrize("name", NAMES)
def test_backward_of_regions(case: Case, target: Target, rng: torch.Generator, name: str, backend: str) -> None:
    """Small whole numbers, of which every sum is exact."""
    forward = _forwards(target.device_type)[name]
    leaves = tuple(whole_numbers(rng, target).requires_grad_() for _ in range(3))
    for dtype, around in itertools.product(dtypes_of(case, target), (False, True)):

        def gradients(
            backward: Callable[[Tensor], None], dtype: torch.dtype = dtype, around: bool = around
        ) -> Observed:
            x, weight, other = given = copies(leaves)
            region = torch.autocast(target.device_type, dtype=dtype)
            with region:
                loss = (forward(x, weight) @ other).float().sum()
            with region if around else contextlib.nullcontext():
                backward(loss)
            return Observed({f"gradient {number}": leaf.grad for number, leaf in enumerate(given)})

        what = f"{dtype}, backward {'inside' if around else 'outside'}"
        expected = gradients(torch.Tensor.backward)
        with compiler(case):
            counters = importlib.import_module("torch._dynamo.utils").counters["compiled_autograd"]
            before = counters["captures"]
            with torch._dynamo.config.patch(compiled_autograd=True):
                seen = gradients(torch.compile(lambda loss: loss.backward(), backend=backend))
            case.equal(f"{what}: backward passes that were captured (control)", counters["captures"] - before, 1)
        same(case, what, seen, expected)
