"""A device that dies ends the run; the case that did it is named, and the cases after it are not blamed."""

from __future__ import annotations

import pytest

from tests.conftest import Outcome, Toy

# The CPU in the place of an accelerator. Errors of asynchronous kernels are raised at the next wait.
MORTAL = """
from conformance.harness import lost_device, targets

STATE = {"dead": False}
ERROR = "CUDA error: an illegal memory access was encountered"
computes = targets.known_sum

def known_sum(target):
    if STATE["dead"]:
        raise RuntimeError(ERROR)
    computes(target)

def synchronize(target):
    if STATE["dead"]:
        raise RuntimeError(ERROR)

targets.known_sum = known_sum
targets.Target.synchronize = synchronize
lost_device.watched = tuple
"""
_CHECKS = """
import toyplugin

@contract("AMP-CAST-001")
def test_before(case: Case, target: Target) -> None:
    case.true("ran", True)

@contract("AMP-CAST-002")
def test_kernel(case: Case, target: Target) -> None:
    case.true("ran", True)
    toyplugin.STATE["dead"] = True
    {then}

@contract("AMP-CAST-003")
@pytest.mark.parametrize("number", range(50))
def test_after(case: Case, target: Target, number: int) -> None:
    case.true("ran", True)
"""
_AT_ONCE = "raise RuntimeError(toyplugin.ERROR)"
_EXPECTED = 'case.raises("refusal", RuntimeError, lambda: toyplugin.synchronize(None))'


def _died(toy: Toy, then: str, *arguments: str) -> Outcome:
    for id in ("AMP-CAST-001", "AMP-CAST-002", "AMP-CAST-003"):
        toy.contract(id)
    toy.checks(_CHECKS.format(then=then))
    return toy.spawn(MORTAL, "-p", "no:randomly", "--device", "cpu", *arguments)


@pytest.mark.parametrize(
    "then", [_AT_ONCE, "pass", _EXPECTED], ids=["at once", "asynchronously", "as an expected error"]
)
def test_the_run_ends_and_names_the_case(toy: Toy, then: str) -> None:
    outcome = _died(toy, then)
    footer = outcome.report["footer"]

    assert outcome.status == footer["exit_status"] == 1
    assert outcome.verdicts() == {"AMP-CAST-001[before:device]": "PASS", "AMP-CAST-002[kernel:device]": "FAIL"}
    assert footer["overall"] == "NOT CONFORMANT"
    assert footer["problems"] == [
        "cpu no longer works: RuntimeError: CUDA error: an illegal memory access was encountered; "
        "the case that did it: AMP-CAST-002[kernel:device]; nothing else was run"
    ]
    assert footer["contracts"]["AMP-CAST-003"]["reason"] == "a device stopped working before"
    assert "the case that did it: AMP-CAST-002[kernel:device]" in " ".join(outcome.output.split())


def test_among_workers_the_run_ends_too(toy: Toy) -> None:
    outcome = _died(toy, _AT_ONCE, "-n", "2")

    assert outcome.status == 1
    assert outcome.verdicts()["AMP-CAST-002[kernel:device]"] == "FAIL"
    assert set(outcome.verdicts().values()) == {"PASS", "FAIL"}
    assert len(outcome.verdicts()) < 52
    assert "the case that did it: AMP-CAST-002[kernel:device]" in outcome.report["footer"]["problems"][0]


def test_an_error_of_a_device_that_works_on_ends_nothing(toy: Toy) -> None:
    outcome = _died(toy, 'toyplugin.STATE["dead"] = False; raise RuntimeError("CUDA error: invalid argument")')

    assert len(outcome.verdicts()) == 52
    assert outcome.report["footer"]["problems"] == []
