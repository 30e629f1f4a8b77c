"""Check that setters of autocast's state and of the default dtype do in a compiled function what they do in eager."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.state import kept
from ...harness.targets import Target
from .support import compiler, default_type, dtypes_of, inner_type

Program: TypeAlias = Callable[[Tensor], tuple[Tensor, ...]]


def programs(kind: str, other: torch.dtype) -> dict[str, Program]:
    """Return functions that call setters, by what they set; what they make has the types of that."""

    def enabled(x: Tensor) -> tuple[Tensor, ...]:
        torch.set_autocast_enabled(kind, True)
        return (x @ x,)

    def enabled_and_disabled(x: Tensor) -> tuple[Tensor, ...]:
        torch.set_autocast_enabled(kind, True)
        y = x @ x
        torch.set_autocast_enabled(kind, False)
        return y, x @ x

    def cache(x: Tensor) -> tuple[Tensor, ...]:
        torch.set_autocast_cache_enabled(False)
        return (x + 1,)

    def dtype(x: Tensor) -> tuple[Tensor, ...]:
        torch.set_autocast_dtype(kind, other)
        return (x + 1,)

    def enabled_in_a_dtype(x: Tensor) -> tuple[Tensor, ...]:
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_dtype(kind, other)
        return (x @ x,)

    def default(x: Tensor) -> tuple[Tensor, ...]:
        torch.set_default_dtype(other)
        return torch.ones(2), x.long() / 2

    def default_and_back(x: Tensor) -> tuple[Tensor, ...]:
        torch.set_default_dtype(other)
        y = torch.ones(2)
        torch.set_default_dtype(torch.float32)
        return y, torch.ones(2), x / 2

    return {
        "autocast enabled": enabled,
        "autocast enabled, then disabled": enabled_and_disabled,
        "autocast cache disabled": cache,
        "autocast dtype": dtype,
        "autocast enabled, in another dtype": enabled_in_a_dtype,
        "default dtype": default,
        "default dtype, and back": default_and_back,
    }


def state(kind: str) -> dict[str, Any]:
    """Return what the setters set."""
    return {
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache": torch.is_autocast_cache_enabled(),
        "default": torch.get_default_dtype(),
    }


def outcome(call: Program, x: Tensor, kind: str, region: torch.dtype | None) -> dict[str, Any]:
    """Return the types of results, and the state in the region after the call and the state in the end."""
    found: dict[str, Any] = {}
    # A failed call may leave regions open, too.
    with kept(), default_type(torch.float32):
        try:
            with torch.autocast(kind, dtype=region) if region else contextlib.nullcontext():
                found["types"] = [one.dtype for one in call(x)]
                found["after the call"] = state(kind)
            found["in the end"] = state(kind)
        except Exception as error:
            found["raised"] = type(error).__name__
    return found


@contract("AMP-COMPILE-081", on="cpu")
@pytest.mark.parametrize("backend", [deep("standard", "eager"), deep("standard", "aot_eager")])
def test_setters(case: Case, target: Target, backend: str) -> None:
    kind = target.device_type
    x = torch.ones(4, 4, device=target.device)
    for dtype in dtypes_of(case, target):
        for name, program in programs(kind, inner_type(target, dtype)).items():
            for region in (None, dtype):
                expected = outcome(program, x, kind, region)
                with compiler(case):
                    compiled = torch.compile(program, backend=backend)
                    for number in ("first", "second"):
                        seen = outcome(compiled, x, kind, region)
                        where = "in a region" if region else "outside of regions"
                        wrong = [f"{key}: {one}" for key, one in seen.items() if one != expected.get(key)]
                        case.equal(f"{name}, {where}, {number} call: what is not as in eager", wrong, [])
