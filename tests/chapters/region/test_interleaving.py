"""Schedules of regions: the model of a written-out one, the source that is shown, and that a broken region is seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conformance.chapters.region.interleaving import Stage, Step, random_steps, simpler, source
from conformance.oracles.region.programs import Machine
from conformance.oracles.region.stack_model import Region, observe

CPU = Region("cpu", torch.bfloat16)
CROSSED = [Step(0, "enter", CPU), Step(1, "enter", CPU), Step(0, "close", CPU), Step(1, "leave", CPU)]
KINDS = ("generator", "coroutine", "thread")


@pytest.fixture(params=KINDS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    base = observe()
    with Stage(request.param, Machine(torch.device("cpu"), base, base)) as made:
        yield made


def test_crossed_regions_are_as_predicted(stage: Stage) -> None:
    before = observe()

    assert stage.mismatch(CROSSED) is None
    assert stage.mismatch([Step(0, "enter", CPU), Step(0, "throw", CPU), Step(2, "enter", CPU)]) is None
    assert observe() == before


def test_a_region_that_stays_on_departs(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    leave = torch.autocast.__exit__

    def stay(self: Any, *error: Any) -> Any:
        returned = leave(self, *error)
        torch.set_autocast_enabled("xpu", True)
        return returned

    monkeypatch.setattr(torch.autocast, "__exit__", stay)
    found = stage.mismatch(CROSSED)

    assert found is not None
    assert found.startswith("after step 2, a.close():")
    assert "enabled for xpu is True, not False" in found


@pytest.mark.parametrize("kind", ["generator", "coroutine"])
def test_the_source_shows_what_was_found(kind: str) -> None:
    names: dict[str, Any] = {}
    before = observe()
    exec(source(kind, CROSSED[:3]), names)

    assert torch.is_autocast_enabled("cpu") is False
    names["b"].close()
    assert torch.is_autocast_enabled("cpu") is True
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", before.settings["cpu"].dtype)
    assert observe() == before


def test_simpler_steps_end() -> None:
    import random

    steps = random_steps(random.Random(0), [Region("cpu", torch.float16, False, False)], length=30)

    assert all(other != step for step in steps for other in simpler(step))
    assert simpler(Step(0, "enter", Region("cpu"))) == []
