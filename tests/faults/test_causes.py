"""The first cause that a run under a fault gives names what the fault broke."""

from __future__ import annotations

import dataclasses

import pytest

from conformance.report import causes
from tests.faults import load
from tests.faults.campaigns.campaign import run

FAULTS = load()

# The fault, the contracts that run, and the words that the first cause begins with.
_NAMED = {
    "bias_is_not_cast": (("AMP-CAST-001", "AMP-CAST-012", "AMP-CAST-023"), "linear on fake:cuda"),
    "fused_adam_ignores_found_inf": (("AMP-OPTIMIZER-01*",), "Adam fused"),
    "region_keeps_its_dtype": (("AMP-REGION-00*", "AMP-REGION-01*"), "autocast state after a region"),
    "tracker_survives_a_skip": (("AMP-SCALE-06*", "AMP-SCALE-170"), "GradScaler"),
}


@pytest.mark.parametrize("name", _NAMED)
def test_the_first_cause_names_what_is_broken(name: str) -> None:
    contracts, words = _NAMED[name]

    outcome = run(dataclasses.replace(FAULTS[name], contracts=contracts))

    assert outcome.report is not None, outcome.output
    found = causes.groups(outcome.report)
    assert found, outcome.output
    assert found[0].title.startswith(words), found[0].title
    assert len(found[0].contracts) > 1
