"""--self-check: faults are planted, noticed and removed; what is not noticed makes the run INCONCLUSIVE."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import catalogue, self_check, waivers
from conformance.self_check import planting, registry
from tests import reports
from tests.conftest import Toy
from tests.faults.campaigns.campaign import PLAIN

_CHECKS = """
@contract("AMP-SCALE-001")
def test_scale(case: Case, target: Target) -> None:
    case.equal("scale", torch.amp.GradScaler("cpu", init_scale=8.0).get_scale(), 8.0)

@contract("AMP-REGION-001")
def test_other(case: Case, target: Target) -> None:
    case.equal("one", 1, 1)
"""


def _scale_is_doubled(device_type: str) -> Iterator[None]:
    """get_scale is twice what it is."""
    seen = torch.amp.GradScaler.get_scale
    with planting.replaced(torch.amp.GradScaler, "get_scale", lambda self: 2 * seen(self)):
        yield


def _nothing(device_type: str) -> Iterator[None]:
    """Nothing is broken."""
    yield


def _left_broken(device_type: str) -> Iterator[None]:
    """get_scale is broken and stays so."""
    torch.amp.GradScaler.get_scale = lambda self: 0.0
    yield


def _unknown_name(device_type: str) -> Iterator[None]:
    """What it replaces does not exist."""
    with planting.replaced(torch.amp.GradScaler, "no_such_method", None):
        yield


def _fault(breakage: registry.Breakage, *contracts: str) -> registry.Fault:
    name = breakage.__name__.strip("_")
    return registry.Fault(name, str(breakage.__doc__), contracts, "real", "", breakage)


@pytest.fixture
def suite(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A toy suite whose self-check plants the given faults."""
    toy.contract("AMP-SCALE-001")
    toy.contract("AMP-REGION-001")
    toy.checks(_CHECKS)

    def run(*faults: registry.Fault, arguments: tuple[str, ...] = ()) -> Any:
        monkeypatch.setattr(self_check, "faults", lambda: faults)
        return toy.run("--self-check", "--device", "cpu", *arguments)

    return run


def test_a_fault_that_is_noticed_leaves_no_trace_in_the_records(suite: Any) -> None:
    outcome = suite(_fault(_scale_is_doubled, "AMP-SCALE-001"))

    assert (outcome.status, set(outcome.verdicts().values())) == (0, {"PASS"})
    assert "caught 1 of 1 planted fault" in outcome.output
    assert "scale_is_doubled (AMP-SCALE-001) on cpu" in outcome.output
    [fault] = outcome.report["footer"]["self_check"]["faults"]
    assert (fault["state"], fault["case"]) == ("caught", "AMP-SCALE-001[scale:device]")
    assert outcome.report["footer"]["totals"] == {"PASS": 2}


def test_without_the_option_nothing_is_planted(toy: Toy) -> None:
    toy.contract("AMP-SCALE-001")
    toy.contract("AMP-REGION-001")
    toy.checks(_CHECKS)

    outcome = toy.run()

    assert outcome.report["footer"]["self_check"] is None
    assert "self-check" not in outcome.output


@pytest.mark.parametrize(("arguments", "status"), [((), 0), (("--require-conclusive",), 6)])
def test_a_fault_that_nothing_notices_makes_the_run_inconclusive(
    suite: Any, arguments: tuple[str, ...], status: int
) -> None:
    faults = _fault(_scale_is_doubled, "AMP-SCALE-001"), _fault(_nothing, "AMP-REGION-001")

    outcome = suite(*faults, arguments=arguments)

    assert outcome.status == status
    assert outcome.report["footer"]["overall"] == "INCONCLUSIVE"
    assert "caught 1 of 2 planted faults" in outcome.output
    assert "MISSED on cpu: nothing (AMP-REGION-001): Nothing is broken. 1 of 1 cases pass" in outcome.output
    assert "1 of 2 planted faults NOT CAUGHT, so this is no pass" in outcome.output


def test_a_case_that_fails_without_the_fault_has_noticed_nothing(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.contract("AMP-SCALE-001")
    check = "def test_one(case: Case, target: Target) -> None:\n    case.equal('one', 1, 2)\n"
    toy.checks('@contract("AMP-SCALE-001")\n' + check)
    monkeypatch.setattr(self_check, "faults", lambda: (_fault(_scale_is_doubled, "AMP-SCALE-001"),))

    outcome = toy.run("--self-check", "--device", "cpu")

    [fault] = outcome.report["footer"]["self_check"]["faults"]
    assert (fault["state"], outcome.status) == ("missed", 1)
    assert "is FAIL: without the fault as well" in fault["reason"]


def test_faults_that_concern_no_selected_contract_are_said_not_to(suite: Any) -> None:
    outcome = suite(_fault(_scale_is_doubled, "AMP-SCALE-001"), arguments=("--contract", "AMP-REGION-001"))

    assert outcome.status == 0
    assert "self-check: no planted fault concerns the selection" in outcome.output
    assert outcome.report["footer"]["self_check"]["faults"] == []


def test_a_fault_that_this_torch_cannot_have_is_not_planted(suite: Any) -> None:
    outcome = suite(_fault(_unknown_name, "AMP-SCALE-001"))

    [fault] = outcome.report["footer"]["self_check"]["faults"]
    assert (fault["state"], outcome.report["footer"]["overall"]) == ("not planted", "CONFORMANT")
    assert "GradScaler has no no_such_method" in fault["reason"]
    assert "none of 1 fault can be planted here" in outcome.output


def test_torch_that_stays_broken_ends_the_run(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", torch.amp.GradScaler.get_scale)  # puts it back afterwards

    outcome = suite(_fault(_left_broken, "AMP-SCALE-001"))

    assert (outcome.status, outcome.report["cases"]) == (3, [])
    assert outcome.report["footer"]["overall"] == "NOT CONFORMANT"
    [problem] = outcome.report["footer"]["problems"]
    assert problem.startswith("self-check: ")
    assert "GradScaler.get_scale" in problem


def test_what_a_check_remembers_of_a_broken_torch_is_forgotten() -> None:
    probe = functools.lru_cache(torch.amp.GradScaler.get_scale)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    planting.probe = probe  # type: ignore[attr-defined]
    try:
        with self_check._forgetting():
            probe(scaler)
        assert probe.cache_info().currsize == 0
    finally:
        del planting.probe  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", registry.faults(), ids=lambda fault: fault.name)
def test_each_fault_is_removed_exactly(fault: registry.Fault) -> None:
    before = planting.Whole.now(("cpu", "cuda"))

    with pytest.raises(ZeroDivisionError), fault.planted("cpu"):
        assert planting.Whole.now(("cpu", "cuda")).changed_since(before) != []
        raise ZeroDivisionError

    assert planting.Whole.now(("cpu", "cuda")).changed_since(before) == []


def test_inherited_attributes_stay_inherited() -> None:
    class Child(torch.amp.GradScaler):
        pass

    with planting.replaced(Child, "get_scale", None):
        assert Child.get_scale is None

    assert "get_scale" not in vars(Child)


def test_faults_name_contracts_that_exist_and_that_no_waiver_excuses() -> None:
    known = catalogue.load().contracts

    excused = {waiver.contract for waiver in waivers.shipped(known) if "*" in waiver.cases}

    assert [fault.name for fault in registry.faults() if not set(fault.contracts) <= set(known) - excused] == []


def test_every_fault_is_caught_on_the_cpu_and_leaves_the_scored_run_alone(tmp_path: Path, root: Path) -> None:
    """The suite with and without a self-check in one process: the same verdicts of the same cases."""
    asked = [word for fault in registry.faults() for contract in fault.contracts for word in ("--contract", contract)]
    found: list[dict[str, Any]] = []
    for more in ([], ["--self-check"], []):
        folder = tmp_path / str(len(found))
        arguments = [str(root / "conformance" / "chapters"), "-q", *PLAIN, "--level", "quick", "-n", "0", *asked]
        assert pytest.main([*arguments, "--report", str(folder), *more]) == 0
        found.append(reports.written(folder / "report.json"))

    footer = found[1]["footer"]["self_check"]
    assert {fault["state"] for fault in footer["faults"]} == {"caught"}
    assert {fault["name"] for fault in footer["faults"]} == {fault.name for fault in registry.faults()}
    verdicts = [[(case["id"], case["verdict"]) for case in report["cases"]] for report in found]
    assert verdicts[0] == verdicts[1] == verdicts[2]
