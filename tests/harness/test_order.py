"""Any order, any number of workers and a second run in one process give the same verdicts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conformance.harness import collection, keys
from conformance.harness.catalogue import load
from tests.conftest import Toy

_CHECKS = (
    "@pytest.mark.parametrize('number', range(6))\n"
    "@contract('AMP-API-001')\n"
    "def test_a(case: Case, target: Target, rng: torch.Generator, number: int) -> None:\n"
    "    case.note('random', torch.rand(2, generator=rng).tolist()); case.true('ran', True)\n"
    "    case.equal('number', number % 3 == 0, False)\n"
)


def _suite(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.contract("AMP-API-002")
    toy.checks(_CHECKS)


def _essence(report: dict[str, Any]) -> dict[str, Any]:
    return {case["id"]: (case["verdict"], case["evidence"]) for case in report["cases"]}


def test_second_run_in_one_process(toy: Toy) -> None:
    _suite(toy)

    assert _essence(toy.run().report) == _essence(toy.run().report)


def test_random_order(toy: Toy) -> None:
    _suite(toy)
    expected = toy.run()

    shuffled = toy.run(shuffled=True)

    assert _essence(shuffled.report) == _essence(expected.report)


class Item:
    """What the plugin's order looks at; only modules of the suite itself have a chapter."""

    config = SimpleNamespace(stash={keys.RUN: SimpleNamespace(catalogue=load())})

    def __init__(
        self, name: str, line: int = 1, index: int = 0, timed: bool = False, contract: str = "AMP-SPEED-001"
    ) -> None:
        self.path = collection.CHAPTERS / name
        self.location = (name, line, "")
        self.callspec = SimpleNamespace(indices={"size": index}, params={}, id=str(index))
        self.name = f"{name}:{line}:{index}"
        self.stash = pytest.Stash()
        mark = pytest.mark.contract(contract, on=("real",), dtypes=("fp16",)).mark
        self._marks = [mark, *([pytest.mark.timed.mark] if timed else [])]

    def iter_markers(self) -> list[pytest.Mark]:
        return self._marks


def _ordered(items: list[Item]) -> list[str]:
    return [item.name for item in sorted(items, key=collection._lateness)]  # type: ignore[arg-type]


def test_speed_and_memory_run_last() -> None:
    names = ["speed/test_a.py", "cast/test_a.py", "memory/test_a.py", "api/test_a.py"]

    ordered = _ordered([Item(name) for name in names])

    expected = ("cast/test_a.py", "api/test_a.py", "memory/test_a.py", "speed/test_a.py")
    assert ordered == [f"{name}:1:0" for name in expected]


def test_what_shares_a_deadline_runs_in_the_order_of_the_files() -> None:
    places = [
        ("speed/test_b.py", 9, 0),
        ("speed/test_a.py", 20, 1),
        ("speed/test_a.py", 20, 0),
        ("speed/test_a.py", 5, 0),
    ]

    ordered = _ordered([Item(*place, timed=True) for place in places])

    assert ordered == ["speed/test_a.py:5:0", "speed/test_a.py:20:0", "speed/test_a.py:20:1", "speed/test_b.py:9:0"]


def test_what_is_judged_runs_before_information() -> None:
    recorded, judged = "AMP-SPEED-030", "AMP-SPEED-031"
    items = [
        Item("speed/test_a.py", 5, timed=True, contract=recorded),
        Item("speed/test_a.py", 20, timed=True, contract=judged),
        Item("memory/test_a.py", 9, timed=True, contract=recorded),
    ]

    assert _ordered(items) == ["memory/test_a.py:9:0", "speed/test_a.py:20:0", "speed/test_a.py:5:0"]
