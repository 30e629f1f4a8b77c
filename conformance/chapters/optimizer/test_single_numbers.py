"""Check that counters and running products of an optimizer do not depend on the types of its parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from .parameter_kinds import Draw
from .support import ALL

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Beside what bf16 and fp16 count to.
STARTS = (0, 255, 2047)
STEPS = 2
ROUNDED = 8 * 2.0**-24
"""What products and quotients of single numbers may differ by, relative: two roundings to float32 a step, twice."""


@contract("AMP-OPTIMIZER-140")
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_single_numbers(case: Case, target: Target, rng: torch.Generator, implementation: str) -> None:
    """Compare them over parameters of each type, alone and beside the others, with those over a float32 one."""
    draw = Draw(rng, target.device, matrices=True)
    dtypes = [dtype for dtype in FLOATS if target.computes_in(dtype)]
    found: dict[str, Any] = {}
    wrong: dict[str, Any] = {}
    for kind in ALL:
        if kind.implementation != implementation or kind.gradients == "sparse" or not kind.first:
            continue
        if not kind.promised_on(target.device_type):
            continue
        exact: Any = None
        for held in (*((dtype,) for dtype in dtypes), dtypes, dtypes[::-1]):
            pairs = [(draw.value((3, 2), dtype), draw.gradient((3, 2), dtype)) for dtype in held]
            parameters = [torch.nn.Parameter(value) for value, _ in pairs]
            optimizer = kind.make(parameters)
            numbers = _numbers(optimizer, parameters, [slope for _, slope in pairs])
            exact = numbers[0] if exact is None else exact
            for dtype, seen in zip(held, numbers, strict=True):
                if not _alike(seen, exact):
                    beside = f" beside {len(held) - 1} others" if len(held) > 1 else ""
                    wrong[f"{kind.optimizer} over {dtype}{beside}"] = (seen, exact)
        found[kind.optimizer] = sorted(exact[0])
        narrow = {
            name: one for name, one in exact[0].items() if one[0] not in ("torch.float32", "torch.float64", "int")
        }
        if narrow:
            wrong[f"{kind.optimizer} over {FLOATS[0]}"] = narrow
    if not found:
        case.unsupported(f"no {implementation} optimizer is promised on {target.device_type}")
    case.note("single numbers of each optimizer", found)
    case.true("control: some optimizer counts its steps", any("step" in names for names in found.values()))
    case.equal("single numbers that depend on the types of the parameters", wrong, {})


def _numbers(optimizer: Any, parameters: list[torch.nn.Parameter], slopes: list[torch.Tensor]) -> list[Any]:
    """Return, for each parameter, type and value of the single numbers of its state after steps from each start."""
    found: list[Any] = [[] for _ in parameters]
    for start in STARTS:
        for parameter in parameters if start else ():
            state = optimizer.state[parameter]
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].fill_(start)
            elif "step" in state:
                state["step"] = start
        for _ in range(STEPS):
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter.grad = slope.clone()
            optimizer.step()
        for kept, parameter in zip(found, parameters, strict=True):
            state = optimizer.state[parameter]
            kept.append({name: _number(value) for name, value in state.items() if _single(value)})
    return found


def _single(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _number(value: Any) -> tuple[str, float]:
    kind = str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
    return kind, float(value)


def _alike(seen: list[dict[str, tuple[str, float]]], exact: list[dict[str, tuple[str, float]]]) -> bool:
    """Return whether types and counters are the same, and products and quotients but for their roundings."""
    return len(seen) == len(exact) and all(
        one.keys() == other.keys()
        and all(
            one[name][0] == kind and math.isclose(one[name][1], value, rel_tol=0 if name == "step" else ROUNDED)
            for name, (kind, value) in other.items()
        )
        for one, other in zip(seen, exact, strict=True)
    )
