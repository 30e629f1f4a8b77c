"""--gpu takes the accelerator that torch finds and refuses to start without one."""

from __future__ import annotations

import pytest

from conformance.harness import targets
from tests.conftest import Toy

_CHECK = "@contract('AMP-API-001', on={on!r})\ndef test_it(case: Case, target: Target) -> None:\n    {body}\n"


@pytest.fixture
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the cpu stand in for an accelerator."""
    monkeypatch.setattr(targets, "accelerator", lambda: "cpu")
    monkeypatch.setattr(targets, "resolve", lambda name: targets.Target("cpu", "cpu", None, is_fake=False))


def test_refuses_without_an_accelerator(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "accelerator", lambda: None)
    toy.contract("AMP-API-001")
    toy.checks(_CHECK.format(on="real", body="case.equal('x', 1, 1)"))

    outcome = toy.run("--gpu")

    assert outcome.status == 4
    assert "--gpu: torch" in outcome.output
    assert "finds no accelerator" in outcome.output
    assert "Traceback" not in outcome.output
    assert not (toy.path / "report").exists()


def test_excludes_device(toy: Toy) -> None:
    toy.contract("AMP-API-001")

    outcome = toy.run("--gpu", "--device", "cpu")

    assert outcome.status == 4
    assert "--gpu and --device exclude each other" in outcome.output


@pytest.mark.usefixtures("_accelerator")
def test_runs_on_the_accelerator_alone(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(_CHECK.format(on=("real", "fake"), body="case.equal('x', 1, 1)"))

    outcome = toy.run("--gpu")

    assert outcome.verdicts() == {"AMP-API-001[it:device]": "PASS"}
    assert outcome.report["header"]["options"]["gpu"] is True


@pytest.mark.usefixtures("_accelerator")
@pytest.mark.parametrize(("level", "status"), [("must", 1), ("should", 0)])
def test_untestable_must_fails_the_run(toy: Toy, level: str, status: int) -> None:
    toy.contract("AMP-API-001", level=level)
    toy.contract("AMP-API-002")
    toy.checks(
        _CHECK.format(on="real", body="case.untestable('no second device')")
        + "@contract('AMP-API-002')\ndef test_b(case: Case) -> None:\n    case.equal('x', 1, 1)\n"
    )

    outcome = toy.run("--gpu")

    assert outcome.status == status
