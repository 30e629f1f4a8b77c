"""Modules are judged where conversions were set to swap their tensors, which torch refuses for weights in use."""

from __future__ import annotations

import pytest
import torch

from conformance.chapters.numerics.module_uses import uses
from conformance.harness import state
from conformance.oracles.relations.programs import modules
from tests.faults import Fault
from tests.faults.campaigns.campaign import run


@pytest.mark.parametrize("contract", ["AMP-NUMERICS-112", "AMP-REGION-114"])
def test_where_conversions_swap_tensors(contract: str) -> None:
    with state.kept():
        torch.__future__.set_swap_module_params_on_conversion(True)
        outcome = run(Fault("nothing", "Nothing is broken.", (contract,), lambda: iter([None])))

    assert outcome.status == 0, outcome.output
    assert not torch.__future__.get_swap_module_params_on_conversion()


_OF_NO_USE = {  # their subclasses have uses, or there is nothing to run on one device
    *("Container", "DataParallel", "Module", "RNNBase", "RNNCellBase", "SyncBatchNorm"),
    "NLLLoss2d",
}


def test_every_public_module_is_run() -> None:
    named = {name: getattr(torch.nn, name) for name in dir(torch.nn)}
    public = {name for name, kind in named.items() if isinstance(kind, type) and issubclass(kind, torch.nn.Module)}
    in_database = {name.removeprefix("nn.") for name in modules()}
    made = {type(part).__name__ for use in uses().values() for part in use.make().modules()}

    # A lazy module is of its plain class once it has seen a batch: those are known by the names of their uses.
    assert public - in_database - made - uses().keys() - _OF_NO_USE == set()
