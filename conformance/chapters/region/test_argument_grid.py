"""Check every combination of the arguments of autocast: refused, or in force."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ...harness.check import Case, applies, contract
from ...harness.state import kept
from .argument_grid import Arguments, grid, opened
from .support import DEVICES, cuda_is_there

# Names of devices without an autocast and names that are none are among them.
TYPES = [*DEVICES, "privateuseone", "meta", "vulkan", "nonsense", "CPU", ""]
_ALLOWED = ("in force", "raises", "warns, disabled")


def _outcomes(device_type: str) -> list[tuple[Arguments, str]]:
    """Open each region of the grid; torch leaks the state of some that it refuses, which is AMP-REGION-057's."""
    found = []
    for arguments in grid(device_type):
        with kept():
            found.append((arguments, opened(arguments)))
    return found


@contract("AMP-REGION-110")
@pytest.mark.parametrize("device_type", TYPES, ids=lambda name: name or "empty")
def test_every_argument_is_in_force_or_refused(case: Case, device_type: str) -> None:
    found = _outcomes(device_type)
    wrong = [f"{arguments}: {outcome}" for arguments, outcome in found if outcome not in _ALLOWED]
    case.note("regions opened", dict(Counter(outcome for _, outcome in found)))
    case.equal("arguments that torch accepts and does not apply", wrong, [])


def _check_index(case: Case, device_type: str) -> None:
    plain, indexed = _outcomes(device_type), _outcomes(f"{device_type}:0")
    unlike = [
        f"{other}: {seen}; without the index: {outcome}"
        for (other, seen), (_, outcome) in zip(indexed, plain, strict=True)
        if seen not in (outcome, "raises")
    ]
    case.at_least("combinations compared", len(plain), 1)
    case.equal("arguments treated otherwise with an index", unlike, [])


_OWN = torch._C._get_privateuse1_backend_name()  # of a third party's device, "privateuseone" where there is none
_WITH_AUTOCAST = [name for name, device in DEVICES.items() if device.dtype is not None and name not in ("cuda", _OWN)]


@contract("AMP-REGION-111")
@pytest.mark.parametrize("device_type", [*_WITH_AUTOCAST, pytest.param(_OWN, id="third-party")])
def test_device_string_with_an_index(case: Case, device_type: str) -> None:
    _check_index(case, device_type)


@contract("AMP-REGION-111")
@applies(cuda_is_there)
def test_cuda_string_with_an_index(case: Case) -> None:
    _check_index(case, "cuda")
