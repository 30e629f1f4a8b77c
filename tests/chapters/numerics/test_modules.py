"""Modules are judged where conversions were set to swap their tensors, which torch refuses for weights in use."""

from __future__ import annotations

import pytest
import torch

from conformance.harness import state
from tests.faults import Fault
from tests.faults.campaigns.campaign import run


@pytest.mark.parametrize("contract", ["AMP-NUMERICS-112", "AMP-REGION-114"])
def test_where_conversions_swap_tensors(contract: str) -> None:
    with state.kept():
        torch.__future__.set_swap_module_params_on_conversion(True)
        outcome = run(Fault("nothing", "Nothing is broken.", (contract,), lambda: iter([None])))

    assert outcome.status == 0, outcome.output
    assert not torch.__future__.get_swap_module_params_on_conversion()
