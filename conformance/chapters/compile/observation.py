"""Run a program and its backward, and keep what it returned, its gradients and what it wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ...oracles.numbers.error_bounds import normwise_distance
from .programs import Tensors

Around: TypeAlias = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Observed:
    """Named tensors of one run: outputs, gradients, and the arguments after it. None where there is no gradient."""

    values: dict[str, torch.Tensor | None]

    def types(self) -> dict[str, str]:
        """Return the dtype of each tensor by its name."""
        return {name: "none" if each is None else str(each.dtype) for name, each in self.values.items()}


def copies(leaves: Tensors) -> Tensors:
    """Return equal leaves that share nothing with these."""
    return tuple(leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves)


def observed(
    call: Callable[..., Any],
    leaves: Tensors,
    *,
    around: Around = contextlib.nullcontext,
    around_backward: Around = contextlib.nullcontext,
    watch: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Observed:
    """Call a program on copies of `leaves`, then its backward, each inside what `around` opens.

    Every output gets a gradient of its own dtype, with the same values in every run. `watch` opens something around
    the "forward" and the "backward".
    """
    given = copies(leaves)
    with around(), watch("forward"):
        outputs = call(*given)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
    differentiable = [output for output in outputs if output.requires_grad]
    wanted = [leaf for leaf in given if leaf.requires_grad]
    seeds = [_seed(output) for output in differentiable]
    gradients: Sequence[torch.Tensor | None] = ()
    with around_backward(), watch("backward"):
        if differentiable:
            gradients = torch.autograd.grad(differentiable, wanted, seeds, allow_unused=True)
    values: dict[str, torch.Tensor | None] = {
        f"output {number}": output.detach() for number, output in enumerate(outputs)
    }
    values |= {f"gradient {number}": gradient for number, gradient in enumerate(gradients)}
    values |= {f"argument {number}": leaf.detach() for number, leaf in enumerate(given)}
    return Observed(values)


def _seed(output: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(1, output.numel() + 1, dtype=torch.float64).mul(0.7).sin()
    return numbers.reshape(output.shape).to(output.device, output.dtype)


def distances(seen: Observed, expected: Observed) -> dict[str, float]:
    """Return the normwise distance of each floating tensor from the expected one of the same name.

    Where both are NaN, or the same infinity, they are not apart.
    """
    found = {}
    for name, ours in expected.values.items():
        if ours is not None and ours.is_floating_point() and (theirs := seen.values[name]) is not None:
            alike = (ours.isnan() & theirs.isnan()) | (ours.isinf() & (ours == theirs))
            found[name] = normwise_distance(theirs.masked_fill(alike, 0.0), ours.masked_fill(alike, 0.0))
    return found
