"""What a device's driver counts before and after a run, and what of it makes the run a failure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.harness import reporting
from conformance.measure import health
from conformance.measure.health import Watch
from conformance.report import checklist, document
from tests.conftest import Toy
from tests.simulation import nvml_fake

CUDA = torch.device("cuda", 0)
CARD = nvml_fake.card("H100", 9, 0, 132)
SOUND = {
    ("TotalEccErrors", 0, 0): 3,
    ("TotalEccErrors", 1, 0): 0,
    "RemappedRows": (0, 1, False, False),
    "CurrentClocksEventReasons": 1,
}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    return nvml_fake.install(monkeypatch, CARD, dict(SOUND))


def _watched(answers: dict[Any, Any], **changes: Any) -> Watch:
    watch = Watch.begin("cuda:0", CUDA)
    assert watch is not None
    answers.update(changes)
    watch.finish()
    return watch


def test_a_sound_device_is_reported_without_a_problem(answers: dict[Any, Any]) -> None:
    watch = _watched(answers)

    assert list(watch.problems()) == []
    assert watch.before == watch.after
    assert watch.before["corrected ECC errors"] == 3
    assert watch.before[health.REMAPPED] == 1
    assert health.RETIRED not in watch.before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({("TotalEccErrors", 1, 0): 2}, "uncorrected ECC errors rose from 0 to 2"),
        ({"RemappedRows": (0, 2, True, False)}, "rows remapped after uncorrected errors rose from 1 to 2"),
        ({"RemappedRows": (0, 1, False, True)}, "row remappings that failed rose from 0 to 1"),
        ({"xids": [31, 79]}, "Xid 79 during the run (the device has fallen off the bus)"),
    ],
)
def test_what_breaks_meanwhile_is_a_problem(answers: dict[Any, Any], change: dict[Any, Any], said: str) -> None:
    watch = Watch.begin("cuda:0", CUDA)
    assert watch is not None
    answers.update(change)
    watch.finish()

    problems = list(watch.problems())
    assert len(problems) == 1
    assert said in problems[0]
    assert problems[0].startswith("cuda:0: ")


def test_retired_pages_of_older_cards(answers: dict[Any, Any]) -> None:
    answers["RetiredPages"] = [1]
    watch = _watched(answers, RetiredPages=[1, 7])

    assert [problem.partition(" rose")[0] for problem in watch.problems()] == [f"cuda:0: {health.RETIRED}"]


def test_what_programs_and_single_bits_do_is_none(answers: dict[Any, Any]) -> None:
    answers[("TotalEccErrors", 0, 0)] = 4
    watch = _watched(answers, xids=[13, 31, 43, 45])

    assert watch.xids == (13, 31, 43, 45)
    assert list(watch.problems()) == []


def test_without_the_library_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml_fake.install(monkeypatch, CARD)
    assert Watch.begin("cuda:0", CUDA) is None

    nvml_fake.install(monkeypatch, CARD, {})
    assert Watch.begin("cuda:0", CUDA) is None


def test_a_device_that_falls_silent_is_no_rise(answers: dict[Any, Any]) -> None:
    watch = Watch.begin("cuda:0", CUDA)
    assert watch is not None
    answers.clear()
    watch.finish()

    assert watch.after == {}
    assert list(watch.problems()) == []


@pytest.mark.parametrize(("errors", "status"), [(0, 0), (1, 1)])
def test_a_run_says_what_its_device_counted(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, answers: dict[Any, Any], errors: int, status: int
) -> None:
    right = Watch.begin

    def begin(name: str, device: torch.device) -> Watch | None:
        watch = right(name, CUDA)
        answers["TotalEccErrors", 1, 0] = errors
        return watch

    monkeypatch.setattr(reporting.Watch, "begin", begin)
    toy.contract("AMP-API-001")
    toy.checks(
        "@contract('AMP-API-001')\ndef test_it(case: Case, target: Target) -> None:\n    case.equal('x', 1, 1)\n"
    )

    outcome = toy.run("--device", "cpu")

    assert outcome.status == status
    (row,) = outcome.report["footer"]["health"]
    assert (row["target"], row["before"][health.UNCORRECTED], row["after"][health.UNCORRECTED]) == ("cpu", 0, errors)
    assert ("rose from 0 to 1 during the run" in outcome.output) is bool(errors)
    written = checklist.render(document.read(toy.path / "report"), with_annex=True)
    assert f"| {health.UNCORRECTED} | 0 | {errors} |" in written
