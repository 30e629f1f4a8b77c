"""Cases that rest on the lists of a backend, on a device that declares a surface with other rules for some ops."""

from __future__ import annotations

import pytest

from tests.conftest import Outcome, Toy
from tests.harness.test_lost_device import MORTAL
from tests.oracles.test_trace_reached import observes_all_threads

# The CPU as a device whose surface has another rule for exp; linear keeps its own, and hides what it is made of.
_SURFACE = """
from conformance.oracles.policy import declared, overloads

declared.changed = lambda device_type: frozenset(["exp", "mm"]) if device_type == "cpu" else frozenset()
overloads.ruled = lambda device_type: frozenset(["exp", "linear"])
"""
_REASON = "the surface that is declared for cpu has another rule for exp, and the case rests on that of the lists"


def _run(toy: Toy, checks: str, plugin: str = "") -> Outcome:
    for number in range(1, 5):
        toy.contract(f"AMP-CAST-00{number}")
    toy.checks("import toyplugin\nfrom conformance.harness.check import by_rules, timed\n" + checks)
    return toy.spawn(_SURFACE + plugin, "-p", "no:randomly", "--device", "cpu")


def _check(number: int, body: str, marks: str = "") -> str:
    return f"""{marks}
@contract("AMP-CAST-00{number}")
def test_{"abcd"[number - 1]}(case: Case, target: Target) -> None:
    {body}
"""


_IN_A_REGION = "with torch.autocast('cpu', dtype=torch.bfloat16): "
_REACHES = _IN_A_REGION + "case.equal('x', torch.ones(2).exp().dtype, torch.float32)"


def _verdicts(outcome: Outcome) -> list[str]:
    return [case["verdict"] for case in outcome.report["cases"]]


def test_case_that_reaches_such_an_op_is_unsupported_and_has_no_evidence(toy: Toy) -> None:
    outcome = _run(toy, _check(1, _REACHES) + _check(2, "case.equal('x', 1, 1)"))

    assert _verdicts(outcome) == ["UNSUPPORTED", "PASS"]
    assert outcome.report["cases"][0]["reason"] == _REASON
    assert not outcome.report["cases"][0].get("evidence")


def test_such_an_op_outside_of_regions_is_judged(toy: Toy) -> None:
    assert _verdicts(_run(toy, _check(1, "case.equal('x', torch.ones(2).exp().dtype, torch.float32)"))) == ["PASS"]


def test_check_by_rules_is_judged(toy: Toy) -> None:
    fails = _IN_A_REGION + "case.equal('x', torch.ones(2).exp().dtype, torch.float16)"

    outcome = _run(toy, _check(1, _REACHES, "@by_rules") + _check(2, fails, "@by_rules") + _check(3, fails))

    assert _verdicts(outcome) == ["PASS", "FAIL", "UNSUPPORTED"]


def test_op_in_a_thread_counts_and_one_within_an_op_that_keeps_its_rule_does_not(toy: Toy) -> None:
    if not observes_all_threads():
        pytest.skip("this torch observes the thread that asks alone")
    steps = "t = Thread(target=torch.ones(2).exp); t.start(); t.join(); case.true('x', True)"
    thread = f"from threading import Thread\n    {_IN_A_REGION}{steps}"
    inside = _IN_A_REGION + "case.true('x', torch.nn.functional.linear(*(torch.ones(2, 2),) * 2) is not None)"

    outcome = _run(toy, _check(1, thread) + _check(2, inside))

    assert _verdicts(outcome) == ["UNSUPPORTED", "PASS"]


def test_lost_device_comes_before_such_an_op(toy: Toy) -> None:
    dies = _IN_A_REGION + "torch.ones(2).exp(); toyplugin.STATE['dead'] = True; raise RuntimeError(toyplugin.ERROR)"

    outcome = _run(toy, _check(1, dies) + _check(2, "case.true('x', True)"), MORTAL)

    assert _verdicts(outcome) == ["FAIL"]
    assert "cpu no longer works" in outcome.report["footer"]["problems"][0]
    assert outcome.status == 1


def test_error_of_a_device_that_works_on_ends_no_run(toy: Toy) -> None:
    raises = _IN_A_REGION + "torch.ones(2).exp(); raise RuntimeError('CUDA error: invalid argument')"

    outcome = _run(toy, _check(1, raises) + _check(2, "case.true('x', True)"), MORTAL)

    assert _verdicts(outcome) == ["UNSUPPORTED", "PASS"]
    assert outcome.report["footer"]["problems"] == []
