"""AMP-REGION-061 passes, and restores what it sets, whatever was set before the run."""

from __future__ import annotations

import pytest
import torch

from conformance.harness import state
from conformance.measure.flags import writable
from tests.faults import Fault
from tests.faults.campaigns.campaign import run


def _verdicts() -> set[tuple[str, str]]:
    outcome = run(Fault("nothing", "Nothing is broken.", ("AMP-REGION-061",), lambda: iter([None])))
    return {(case["verdict"], case["reason"]) for case in outcome.cases}


@pytest.mark.parametrize("mode", ["default", "warn"])
def test_with_and_without_warnings_of_nondeterministic_algorithms(mode: str) -> None:
    with state.kept():
        torch.set_deterministic_debug_mode(mode)
        assert _verdicts() == {("PASS", "")}


def test_where_writes_to_flags_are_forbidden() -> None:
    with writable():
        torch.backends.disable_global_flags()
        assert _verdicts() == {("PASS", "")}
