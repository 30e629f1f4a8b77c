"""A run uses the processors by itself: workers for what may run side by side, then one process for what is timed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from conformance.harness import options, parallel
from tests.conftest import Outcome, Toy

_CHECKS = """
import os, time
from conformance.harness.check import alone, timed

@contract("AMP-API-001")
@pytest.mark.parametrize("number", range(6))
def test_a(case: Case, target: Target, rng: torch.Generator, number: int) -> None:
    time.sleep(0.05)
    case.note("random numbers", torch.rand(2, generator=rng).tolist())
    case.note("process", os.getpid())
    case.note("ended", time.monotonic())
    case.equal("number", number % 3 == 0, False)

def test_of_somebody_else() -> None:
    with open("somebody-else", "a") as stream:
        stream.write("ran")

@contract("AMP-NUMERICS-001", on="cpu")
@alone
def test_large(case: Case, target: Target) -> None:
    case.true("ran", True)
    case.note("process", os.getpid())
    case.note("began", time.monotonic())

@contract("AMP-SPEED-001", on="cpu")
@timed
def test_time(case: Case, target: Target) -> None:
    case.note("process", os.getpid())
    case.note("began", time.monotonic())
    case.true("an allowance", case.allowance > 0)
"""
_TWO_PROCESSORS = """
from conformance.harness import parallel
parallel.WORTHWHILE = {"quick": 2, "standard": 2, "full": 2}
parallel.processors = lambda: 2
"""

Start = Callable[..., Outcome]


@pytest.fixture
def start(toy: Toy) -> Start:
    """Run the toy suite in a process of its own, on what it takes for a machine of two processors."""
    toy.contract("AMP-API-001")
    toy.contract("AMP-NUMERICS-001")
    toy.contract("AMP-SPEED-001")
    toy.checks(_CHECKS)
    return functools.partial(toy.spawn, _TWO_PROCESSORS)


def test_tests_without_a_contract_run_once(start: Start, toy: Toy) -> None:
    start()

    assert (toy.path / "somebody-else").read_text() == "ran"


def _noted(outcome: Outcome, name: str) -> dict[str, Any]:
    return {
        case["id"]: evidence["measured"]
        for case in outcome.report["cases"]
        for evidence in case["evidence"]
        if evidence["name"] == name
    }


def test_workers_share_the_run_and_the_controller_runs_what_has_to_be_alone_last(start: Start) -> None:
    outcome = start()
    processes, ended = _noted(outcome, "process"), _noted(outcome, "ended")
    began = _noted(outcome, "began")

    assert outcome.report["header"]["options"]["workers"] == 2
    assert len(began) == 2
    assert len({processes[id] for id in ended}) == 2
    assert len({processes[id] for id in began} - {processes[id] for id in ended}) == 1
    assert min(began.values()) > max(ended.values())
    assert "processes: 2, then one for what is timed" in outcome.output
    assert "automatically disabled" not in outcome.output


def test_the_report_is_that_of_one_process(start: Start) -> None:
    spread, alone = start(), start("-n", "0", report="alone")

    assert alone.report["header"]["options"]["workers"] == 0
    assert list(spread.verdicts().items()) == list(alone.verdicts().items())
    assert set(spread.verdicts().values()) == {"PASS", "FAIL"}
    assert _noted(spread, "random numbers") == _noted(alone, "random numbers")
    assert spread.report["footer"]["contracts"] == alone.report["footer"]["contracts"]
    assert spread.report["footer"]["totals"] == alone.report["footer"]["totals"]
    assert spread.status == alone.status == 1


def test_workers_that_are_given_nothing_are_no_error(start: Start) -> None:
    outcome = start("-k", "nothing_of_this_name")

    assert outcome.status == 5
    assert outcome.report["footer"]["problems"] == []
    assert "nothing was executed" in outcome.output


@pytest.mark.parametrize(
    "arguments",
    ["-s", "--benchmark-verbose", "--benchmark-skip", "--pdb", "--lf", "--collect-only", "-n 0", "-n 3", "-p no:xdist"],
)
def test_options_that_need_one_process_or_say_how_many_are_respected(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)

    assert parallel.possible(pytester.parseconfig())
    assert not parallel.possible(pytester.parseconfig(*arguments.split()))


def test_a_run_inside_a_worker_of_another_run_is_one_process(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")

    assert not parallel.possible(pytester.parseconfig())


@pytest.mark.parametrize(
    ("arguments", "count", "contracts", "processes"),
    [
        ("", 2, 700, 2),
        ("", 64, 700, 8),
        ("--gpu", 16, 700, 4),
        ("--device cuda:1", 16, 700, 4),
        ("--device cpu --device fake:cuda", 16, 700, 8),
        ("", 1, 700, None),
        ("", 2, 19, None),
        ("--level quick", 2, 99, None),
        ("--level quick", 2, 100, 2),
    ],
)
def test_number_of_workers(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    count: int,
    contracts: int,
    processes: int | None,
) -> None:
    monkeypatch.setattr(parallel, "processors", lambda: count)
    config = pytester.parseconfig("-p", "conformance.harness.plugin", *arguments.split())

    parallel.engage(config, options.read(config), contracts)

    assert config.option.numprocesses == processes


def test_without_xdist_the_heading_says_how_to_use_all_processors(start: Start) -> None:
    outcome = start("-p", "no:xdist")

    assert outcome.report["header"]["options"]["workers"] == 0
    assert "processes: 1 of 2; with pytest-xdist installed a long run uses all (pip install pytest-xdist)" in (
        outcome.output
    )


def test_a_run_that_stops_at_a_failure_leaves_out_what_is_timed(start: Start) -> None:
    outcome = start("-x")

    assert (outcome.status, outcome.report["footer"]["overall"]) == (1, "NOT CONFORMANT")
    assert not _noted(outcome, "began")
    assert outcome.report["footer"]["contracts"]["AMP-SPEED-001"]["verdict"] is None


def test_a_run_of_which_nothing_is_timed_ends_with_its_workers(start: Start) -> None:
    outcome = start("-n", "2", "--contract", "AMP-API-001")

    assert (outcome.status, len(outcome.verdicts())) == (1, 6)
    assert "INTERNALERROR" not in outcome.output
