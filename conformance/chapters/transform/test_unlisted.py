"""Check that transforms and autograd do in a region what they do outside, where no op is listed."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.error_bounds import normwise_distance
from .unlisted_programs import PROGRAMS, SLOW

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch compiles its first jvp with it
]
SHAPE = (3, 2)
ROUNDINGS = 8


def _seen(program: str, given: tuple[torch.Tensor, ...], around: AbstractContextManager[object]) -> list[Any]:
    with around:
        found = tree_leaves(PROGRAMS[program](*(one.clone() for one in given)), is_leaf=lambda one: one is None)
    return [one.detach().clone().requires_grad_(one.requires_grad) if _is_tensor(one) else one for one in found]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _difference(seen: Any, wanted: Any, own: torch.dtype) -> str | None:
    if not _is_tensor(seen) or not _is_tensor(wanted):
        return None if seen is wanted or (not _is_tensor(seen) and seen == wanted) else f"{seen} in place of {wanted}"
    kinds = [(one.dtype, tuple(one.shape), one.requires_grad) for one in (seen, wanted)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} in place of {kinds[1]}"
    if torch.equal(seen, wanted):
        return None
    if not wanted.is_floating_point():
        return "other values"
    # An accelerator's backward adds up in an order of its own.
    far = normwise_distance(seen.detach(), wanted.detach())
    return None if far <= ROUNDINGS * torch.finfo(own).eps else f"values that are off by {far:.2g}"


@contract("AMP-TRANSFORM-018")
@pytest.mark.parametrize(
    "program",
    [
        deep("standard", name, id=name.replace(" ", "_"))
        if name in SLOW
        else pytest.param(name, id=name.replace(" ", "_"))
        for name in PROGRAMS
    ],
)
def test_programs_without_listed_ops(case: Case, target: Target, rng: torch.Generator, program: str) -> None:
    for dtype in case.supported(target):
        for own in (torch.float32, dtype):
            given = tuple(torch.randn(SHAPE, generator=rng).to(target.device, own) for _ in range(2))
            outside = partial(_seen, program, given, contextlib.nullcontext())
            case.require_call(target, f"run {program} in {own}", outside)
            wanted, seen = outside(), _seen(program, given, target.autocast(dtype))
            case.equal(f"{own} in a region of {dtype}: results", len(seen), len(wanted))
            differing = {
                number: difference
                for number, pair in enumerate(zip(seen, wanted, strict=True))
                if (difference := _difference(*pair, own)) is not None
            }
            case.equal(f"{own} in a region of {dtype}: results that are not those outside", differing, {})
