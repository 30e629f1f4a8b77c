"""Timed checks: alone on the machine, within the deadline of their chapter, and benchmarks where that is installed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from conformance.harness import measuring
from conformance.harness.catalogue import load
from conformance.harness.check import Allotment, Case
from conformance.harness.endings import Inconclusive, Untestable
from tests.conftest import Toy

CHECKS = """
from conformance.harness.check import timed

@contract("AMP-SPEED-001", on="cpu")
@timed
@pytest.mark.parametrize("size", ["small", "large"])
def test_time(case: Case, target: Target, size: str) -> None:
    case.progress("1 of 3 pairs")
    case.at_least("allowance", case.allowance, 0, "s")
    case.timings([0.25, 0.5, 1.0], {"ratio": 2.5, "interval": [2.0, 3.0]})

@contract("AMP-SPEED-002")
def test_count(case: Case) -> None:
    case.equal("one", 1, 1)
"""


@pytest.fixture
def timed(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Toy:
    # By this pytest-benchmark knows one of xdist's workers, which these tests may run in and their runs do not.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    toy.contract("AMP-SPEED-001", level="should", authority="engineering")
    toy.contract("AMP-SPEED-002")
    toy.checks(CHECKS, "test_speed")
    return toy


def test_times_are_benchmarks(timed: Toy) -> None:
    outcome = timed.run("--benchmark-json", "times.json")

    assert outcome.status == 0
    written = json.loads((timed.path / "times.json").read_text())
    assert [each["stats"]["data"] for each in written["benchmarks"]] == [[0.25, 0.5, 1.0]] * 2
    assert written["benchmarks"][0]["extra_info"] == {"ratio": 2.5, "interval": [2.0, 3.0]}
    assert [each["target"] for each in written["machine_info"]["conformance"]["targets"]] == ["cpu"]
    assert "hz_actual" not in written["machine_info"]["cpu"]


def test_a_case_without_times_is_no_benchmark(timed: Toy) -> None:
    timed.checks(CHECKS.replace("case.timings", "(lambda *_: None)"), "test_speed")
    outcome = timed.run("--benchmark-json", "times.json")

    assert outcome.status == 0
    assert "not used at all" not in outcome.output


def test_saved_times_are_compared(timed: Toy) -> None:
    timed.run("--benchmark-save", "first")
    outcome = timed.run("--benchmark-compare", "--benchmark-compare-fail", "median:5%")

    assert outcome.status == 0
    assert "Comparing against benchmarks from" in outcome.output
    assert "machine_info is different" not in outcome.output


def test_the_table_is_shown_to_who_asks(timed: Toy) -> None:
    assert "Rounds" not in timed.run().output
    assert "Rounds" in timed.run("--benchmark-verbose").output


@pytest.mark.parametrize("option", ["--benchmark-disable", "-pno:benchmark"])
def test_without_benchmarks_nothing_is_lost(timed: Toy, option: str) -> None:
    outcome = timed.run(option)

    assert outcome.status == 0
    assert set(outcome.verdicts().values()) == {"PASS"}


@pytest.mark.parametrize(("option", "left"), [("--benchmark-only", 2), ("--benchmark-skip", 1)])
def test_selections_of_benchmarks_leave_the_others_out(timed: Toy, option: str, left: int) -> None:
    outcome = timed.run(option)

    assert outcome.status == 0
    assert list(outcome.verdicts().values()) == ["PASS"] * left


@pytest.mark.parametrize("watch", ["settrace", "setprofile"])
def test_under_a_profiler_times_are_untestable(timed: Toy, watch: str) -> None:
    set_watch = getattr(sys, watch)
    before = getattr(sys, watch.replace("set", "get"))()
    set_watch(lambda *_: None)
    try:
        outcome = timed.run()
    finally:
        set_watch(before)

    assert outcome.status == 0
    verdicts = {case["id"]: (case["verdict"], case["reason"]) for case in outcome.report["cases"]}
    verdict, reason = verdicts["AMP-SPEED-001[time:device-small]"]
    assert verdict == "UNTESTABLE"
    assert "profiler, debugger or coverage tool" in reason
    assert verdicts["AMP-SPEED-002[count]"] == ("PASS", "")


def test_the_deadline_is_shared(timed: Toy) -> None:
    outcome = timed.run("--level", "standard")

    facts = [case["evidence"][0] for case in outcome.report["cases"]]
    first, second = sorted(fact["measured"] for fact in facts if fact["unit"])
    seconds = measuring.DEADLINES["cpu"]["standard"]
    assert first == pytest.approx(seconds / 2, rel=0.1)
    assert second == pytest.approx(seconds, rel=0.1)  # the first left its half unused


# A contract that is judged, one of information, and one of another chapter.
JUDGED, RECORDED, OTHER = (load().contracts[id] for id in ("AMP-SPEED-001", "AMP-SPEED-030", "AMP-MEMORY-013"))


def test_past_the_deadline_cases_are_inconclusive() -> None:
    now = [0.0]
    deadlines = measuring.Deadlines("quick", now=lambda: now[0])
    deadlines.plan([(JUDGED, "cuda")] * 3 + [(OTHER, "cuda")])
    seconds = measuring.DEADLINES["accelerator"]["quick"]

    assert deadlines.begin(JUDGED) == pytest.approx(seconds / 3)
    now[0] = 0.9 * seconds
    assert deadlines.begin(JUDGED) == pytest.approx(0.95 * seconds)
    now[0] = seconds
    with pytest.raises(Inconclusive, match="were spent before"):
        deadlines.begin(JUDGED)
    assert deadlines.begin(OTHER) == pytest.approx(2 * seconds)


def test_information_has_what_is_judged_leaves() -> None:
    now = [0.0]
    deadlines = measuring.Deadlines("quick", now=lambda: now[0])
    deadlines.plan([(JUDGED, "cuda")] * 2 + [(RECORDED, "cuda")] * 100)
    seconds = measuring.DEADLINES["accelerator"]["quick"]

    assert deadlines.begin(JUDGED) == pytest.approx(seconds / 2)
    assert deadlines.begin(RECORDED) == pytest.approx(seconds / 101)
    assert deadlines.begin(JUDGED) == pytest.approx(seconds)
    now[0] = seconds
    with pytest.raises(Untestable, match="were spent before"):
        deadlines.begin(RECORDED)


def test_what_information_takes_beyond_its_part_is_not_taken_from_what_is_judged() -> None:
    now = [0.0]
    deadlines = measuring.Deadlines("quick", now=lambda: now[0])
    deadlines.plan([(JUDGED, "cuda")] * 2 + [(RECORDED, "cuda")] * 2)
    seconds = measuring.DEADLINES["accelerator"]["quick"]

    ends = deadlines.begin(RECORDED)
    now[0] = ends + seconds
    deadlines.end(RECORDED, ends)
    left = (2 * seconds - now[0]) / 2
    assert deadlines.begin(JUDGED) == pytest.approx(now[0] + left)
    with pytest.raises(Untestable, match="were spent before"):
        deadlines.begin(RECORDED)

    ends = deadlines.begin(JUDGED)
    now[0] = 2 * seconds
    deadlines.end(JUDGED, ends)  # of one that is judged it is
    with pytest.raises(Inconclusive, match="were spent before"):
        deadlines.begin(JUDGED)


@pytest.mark.parametrize(
    ("told", "waited"), [("7000000000 2500000000 40\n", 2.5), ("0 0 1\n", 0.0), ("", 0.0), (None, 0.0)]
)
def test_waiting_for_a_processor_takes_nobody_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str | None, waited: float
) -> None:
    schedstat = tmp_path / "schedstat"
    if told is not None:
        schedstat.write_text(told)
    monkeypatch.setattr(measuring, "Path", lambda _: schedstat)
    monkeypatch.setattr(measuring.time, "monotonic", lambda: 100.0)
    assert measuring.attended() == pytest.approx(100.0 - waited)


def test_a_case_counts_its_time_as_its_deadline_does() -> None:
    case = Case(load().contracts["AMP-SPEED-050"], level="quick", seed=0, substitutions={})
    assert case.now is time.monotonic
    deadlines = measuring.Deadlines("quick")
    deadlines.plan([(case.contract, "cpu")])
    case.allotment = Allotment(deadlines.begin(case.contract), lambda words: None, lambda *_: None, deadlines.now)
    assert case.now is measuring.attended
    assert 0 < case.allowance <= measuring.DEADLINES["cpu"]["quick"]
