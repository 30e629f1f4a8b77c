"""Cases that need what the machine cannot have are not collected, and listed as not applicable here."""

from __future__ import annotations

import pytest

from conformance.__main__ import main
from tests.conftest import Toy

_OF = (
    "from conformance.harness.check import applies\n"
    "import os\n"
    "def second_device(target):\n"
    "    few = 'DEVICES' not in os.environ and (target is None or target.device_type == 'cpu')\n"
    "    return 'one device only; this needs two' if few else None\n"
)
_CHECKS = _OF + (
    "@contract('AMP-CAST-001', on=('cpu', 'fake'))\n"
    "@applies(second_device)\n"
    "def test_it(case: Case, target: Target) -> None:\n"
    "    case.true('ran', True); case.note('ran on', target.name)\n"
    "@contract('AMP-CAST-002')\n"
    "@applies(second_device)\n"
    "def test_host(case: Case) -> None:\n"
    "    case.true('ran', True)\n"
    "@contract('AMP-CAST-003')\n"
    "def test_other(case: Case) -> None:\n"
    "    case.true('ran', True)\n"
)


@pytest.fixture
def suite(toy: Toy) -> Toy:
    for id in ("AMP-CAST-001", "AMP-CAST-002", "AMP-CAST-003"):
        toy.contract(id)
    toy.checks(_CHECKS)
    return toy


def test_what_the_machine_cannot_have_is_listed_and_keeps_nothing_from_conforming(suite: Toy) -> None:
    outcome = suite.run("--device", "cpu", "--device", "fake:cuda")

    assert outcome.status == 0
    assert outcome.verdicts() == {"AMP-CAST-001[it:fake-cuda]": "PASS", "AMP-CAST-003[other]": "PASS"}
    assert outcome.report["footer"]["overall"] == "CONFORMANT"
    assert outcome.report["footer"]["not_applicable"] == {
        "AMP-CAST-001[it:device]": "one device only; this needs two",
        "AMP-CAST-002[host]": "one device only; this needs two",
    }
    assert outcome.report["footer"]["contracts"]["AMP-CAST-002"]["reason"] == "one device only; this needs two"


def test_terminal_and_checklist_list_it(suite: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = suite.run("--device", "cpu", "--device", "fake:cuda")
    capsys.readouterr()
    assert main(["checklist", str(suite.path / "report")]) == 0

    assert "Not applicable here: 2 cases" in outcome.output
    said = "not applicable here: one device only; this needs two: AMP-CAST-001"
    assert said in capsys.readouterr().out


def test_a_baseline_of_a_larger_machine_is_no_regression(suite: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as larger:
        larger.setenv("DEVICES", "2")
        first = suite.run("--device", "cpu", report="larger")
    outcome = suite.run("--device", "cpu", "--baseline", "larger/report.json")

    assert len(first.verdicts()) == 3
    assert outcome.report["footer"]["baseline"] == {
        "path": "report.json",
        "regressed": [],
        "gone": [],
        "known": [],
        "accepted": [],
    }
    assert outcome.status == 0
