"""Differences between the steps that ranks saw and those of one process, named by rank, step and tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...oracles.numbers.bits import equal_elements
from .programs import Step


def differences(seen: Sequence[Sequence[Step]], expected: Sequence[Sequence[Step]]) -> list[str]:
    """Name each loss, gradient, parameter and scale whose bits differ, by rank and step."""
    found = []
    for rank, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        if len(ours) != len(theirs):
            found.append(f"rank {rank}: {len(ours)} steps in place of {len(theirs)}")
        for number, (step, wanted) in enumerate(zip(ours, theirs, strict=False)):
            found += [f"rank {rank}, step {number}: {one}" for one in _of_step(step, wanted)]
    return found


def apart(seen: Sequence[Sequence[Step]]) -> list[str]:
    """Name each parameter and scale that differs between rank 0 and another rank after a step."""
    found = []
    for rank, steps in enumerate(seen[1:], 1):
        for number, (ours, first) in enumerate(zip(steps, seen[0], strict=True)):
            where = f"rank {rank}, step {number}: "
            found += [where + one for one in _of_tensors("parameter", ours.parameters, first.parameters)]
            found += [where + one for one in _of_scales(ours.scale, first.scale)]
    return found


def _of_step(step: Step, wanted: Step) -> list[str]:
    found = []
    for number, (loss, theirs) in enumerate(zip(step.losses, wanted.losses, strict=True)):
        found += _of_tensors("loss", {str(number): loss}, {str(number): theirs})
    found += _of_tensors("gradient", step.gradients, wanted.gradients)
    found += _of_tensors("parameter", step.parameters, wanted.parameters)
    return found + _of_scales(step.scale, wanted.scale)


def _of_scales(seen: float, wanted: float) -> list[str]:
    return [] if seen == wanted else [f"scale {seen:g} in place of {wanted:g}"]


def _of_tensors(kind: str, seen: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    found = [f"{kind} {name} is missing" for name in wanted if name not in seen]
    found += [f"{kind} {name} is not of one process" for name in seen if name not in wanted]
    for name in wanted:
        if name in seen and (how := _difference(seen[name], wanted[name])) is not None:
            found.append(f"{kind} {name}: {how}")
    return found


def _difference(seen: torch.Tensor, wanted: torch.Tensor) -> str | None:
    if (seen.dtype, seen.shape) != (wanted.dtype, wanted.shape):
        return f"{seen.dtype} {tuple(seen.shape)} in place of {wanted.dtype} {tuple(wanted.shape)}"
    equal = equal_elements(seen, wanted)
    if equal is None:
        return None
    at = int((~equal).flatten().nonzero()[0])
    pair = f"{seen.flatten()[at].item()!r} in place of {wanted.flatten()[at].item()!r}"
    return f"{int((~equal).sum())} of {equal.numel()} elements, the first {pair}"


def unlike(seen: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Name each tensor that is missing or has other bits than expected."""
    return _of_tensors("tensor", seen, expected)


def all_of(tensor: Any) -> Any:
    """Return all of a tensor of which each rank may hold a part; every rank must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
