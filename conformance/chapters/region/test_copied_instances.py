"""Check that a copy of a region object, by itself or in a module, opens the same region."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.region.stack_model import observe
from .support import is_in_force, region


def _kept_by_a_module(instance: torch.autocast) -> torch.autocast:
    module = torch.nn.Identity()
    module.around = instance
    kept: torch.autocast = copy.deepcopy(module).around
    return kept


COPIES: dict[str, Callable[[torch.autocast], torch.autocast]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda instance: pickle.loads(pickle.dumps(instance)),
    "module": _kept_by_a_module,
}


@contract("AMP-REGION-116")
@pytest.mark.parametrize("way", COPIES)
def test_copied_instance(case: Case, target: Target, way: str) -> None:
    """Copy an instance that was not used, one whose region is open, and one that was used."""
    # An instance of PrivateUse1 keeps the module of its backend, which neither deepcopy nor pickle takes.
    case.require_call(target, f"copy a region object by {way}", lambda: COPIES[way](region(target)))
    before = observe()
    for dtype in case.supported(target):
        for enabled, cache in itertools.product((True, False), (True, False)):
            what = f"{dtype}, enabled {enabled}, cache {cache}"
            instance = region(target, dtype, enabled=enabled, cache_enabled=cache)
            copies = {"before use": COPIES[way](instance)}
            with instance:
                wanted = observe()
                copies["within its region"] = COPIES[way](instance)
            copies["after use"] = COPIES[way](instance)
            for when, copied in copies.items():
                with copied:
                    is_in_force(case, f"{what}, copied {when}: inside", wanted)
                is_in_force(case, f"{what}, copied {when}: after it", before)
