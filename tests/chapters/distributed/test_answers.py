"""What a check gets of ranks that raise, die or are excused by a waiver."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

from conformance.chapters.distributed import processes, support
from conformance.chapters.distributed.processes import Groups
from conformance.harness.catalogue import load
from conformance.harness.check import Case
from conformance.harness.endings import ContractViolation
from conformance.harness.waivers import Waiver
from tests.chapters.distributed import ranks

pytestmark = pytest.mark.skipif(processes.lacking() is not None, reason="torch without gloo")

FAILURES = pytest.mark.parametrize(
    ("work", "evidence"), [(ranks.raises, "exceptions"), (ranks.dies, "ranks that were lost")]
)


def _case(*excused: str) -> Case:
    contract = load().contracts["AMP-DISTRIBUTED-001"]
    waived = tuple(
        Waiver(contract.id, ("*",), "why", "us", "https://example.org", datetime.date.max, evidence=(one,))
        for one in excused
    )
    return Case(contract, level="quick", seed=0, substitutions={}, waivers=waived)


@FAILURES
def test_failures_of_ranks_violate_the_contract(work: Callable[..., Any], evidence: str) -> None:
    case = _case()
    with pytest.raises(ContractViolation, match=evidence):
        support.answers(case, Groups("cpu"), 2, work, 1)


@FAILURES
def test_failures_that_a_waiver_excuses_leave_nothing_to_judge(work: Callable[..., Any], evidence: str) -> None:
    case = _case(evidence)
    assert support.answers(case, Groups("cpu"), 2, work, 1) == []
    assert [one.name for one in case.excused] == [evidence]
