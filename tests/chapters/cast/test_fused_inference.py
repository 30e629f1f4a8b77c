"""What is promised of the fused inference of attention is judged where it was switched off before the run too."""

from __future__ import annotations

import torch

from conformance.harness import state
from tests.faults import Fault
from tests.faults.campaigns.campaign import run


def test_where_fused_inference_was_switched_off() -> None:
    with state.kept():
        torch.backends.mha.set_fastpath_enabled(False)
        outcome = run(Fault("nothing", "Nothing is broken.", ("AMP-CAST-066", "AMP-CAST-111"), lambda: iter([None])))
        left = torch.backends.mha.get_fastpath_enabled()

    assert outcome.status == 0, outcome.output
    assert outcome.cases
    assert not left
    assert torch.backends.mha.get_fastpath_enabled()
