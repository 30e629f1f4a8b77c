"""The stack of regions follows written-out states, and the telling product names the type it was computed in."""

from __future__ import annotations

import pytest
import torch

from conformance.oracles.region.stack_model import (
    Region,
    RegionStack,
    Setting,
    State,
    fresh,
    observe,
    probe_product,
    product_in,
)

CPU_AND_XPU = fresh({"cpu": torch.bfloat16, "xpu": torch.float16})


def test_entering_and_leaving() -> None:
    stack = RegionStack(CPU_AND_XPU)

    stack.enter(Region("cpu", torch.float16, cache_enabled=False))
    stack.enter(Region("cpu", enabled=False))
    inside = stack.state
    stack.leave()
    between = stack.state
    stack.leave()

    xpu = Setting(False, torch.float16)
    assert inside == State({"cpu": Setting(False, torch.float16), "xpu": xpu}, cache_enabled=False, depth=2)
    assert between == State({"cpu": Setting(True, torch.float16), "xpu": xpu}, cache_enabled=False, depth=1)
    assert stack.state == CPU_AND_XPU


def test_none_keeps_what_is_in_force() -> None:
    stack = RegionStack(CPU_AND_XPU)

    stack.enter(Region("xpu"))

    assert stack.state.settings == {"cpu": Setting(False, torch.bfloat16), "xpu": Setting(True, torch.float16)}
    assert stack.state.cache_enabled


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (State({"cpu": Setting(True, torch.bfloat16)}, True, 0), ["enabled for cpu is False, not True"]),
        (
            State({"cpu": Setting(False, torch.float16)}, True, 0),
            ["dtype for cpu is torch.bfloat16, not torch.float16"],
        ),
        (State({"cpu": Setting(False, torch.bfloat16)}, False, 0), ["cache enabled is True, not False"]),
        (State({"cpu": Setting(False, torch.bfloat16)}, True, 3), ["nesting depth is 0, not 3"]),
        (State({"cpu": Setting(False, torch.bfloat16)}, True, 0), []),
    ],
    ids=["enabled", "dtype", "cache", "depth", "equal"],
)
def test_differences(other: State, found: list[str]) -> None:
    assert CPU_AND_XPU.differences(other) == found


def test_observing_changes_nothing() -> None:
    before = observe()

    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        inside = observe()

    assert (inside.depth - before.depth, inside.cache_enabled) == (1, False)
    assert inside.settings["cpu"] == Setting(True, torch.float16)
    assert observe() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_product_tells_its_type(dtype: torch.dtype) -> None:
    column = product_in(torch.float32)

    assert torch.equal(column.to(dtype), product_in(dtype))
    assert all(not torch.equal(column, product_in(other).float()) for other in (torch.float16, torch.bfloat16))
    assert not torch.equal(product_in(torch.float16).float(), product_in(torch.bfloat16).float())


def test_product_survives_tf32() -> None:
    bits = product_in(torch.float32).view(torch.int32)

    # TF32 keeps the upper ten of float32's 23 fraction bits.
    assert torch.equal(bits & ~0x1FFF, bits)
    assert torch.equal(probe_product("cpu"), product_in(torch.float32))
