"""Check that torch.cuda.amp.autocast and torch.cpu.amp.autocast open the same regions."""

from __future__ import annotations

import contextlib
import itertools
import warnings

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.fake_hardware import cuda_that_says
from ...oracles.numbers.formats import OTHER
from ...oracles.region.stack_model import (
    Region,
    RegionStack,
    observe,
    probe_product,
    product_in,
)
from .support import DEFAULTS, Interruption, is_in_force, runs_in


def deprecated_autocast(device_type: str, *arguments: object, **options: object) -> torch.autocast:
    """Create `torch.<device_type>.amp.autocast`; the api chapter checks its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(torch, device_type).amp.autocast(*arguments, **options)


@contract("AMP-REGION-060", on=("torch.cpu", "torch.cuda"))
def test_deprecated_spelling(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    kind, before = target.device_type, observe()

    def make() -> torch.autocast:
        return getattr(torch, kind).amp.autocast(dtype=amp_dtype)

    instance = case.warns(f"torch.{kind}.amp.autocast(...)", FutureWarning, make)
    with instance:
        runs_in(case, "as a context manager", target, amp_dtype)
        with deprecated_autocast(kind, enabled=False):
            runs_in(case, "disabled", target, torch.float32)
        runs_in(case, "after the disabled subregion", target, amp_dtype)
    is_in_force(case, "after the region", before)
    product = deprecated_autocast(kind, dtype=amp_dtype)(probe_product)(target.device)
    case.identical("a product in a decorated function", product, product_in(amp_dtype))
    with deprecated_autocast(kind, True, amp_dtype, False):
        runs_in(case, "with positional arguments", target, amp_dtype)
        case.equal("cache flag of the third argument", torch.is_autocast_cache_enabled(), False)
    with contextlib.suppress(Interruption), deprecated_autocast(kind, dtype=amp_dtype):
        raise Interruption
    is_in_force(case, "after an exception", before)


@contract("AMP-REGION-060")
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_deprecated_spelling_sets_the_state(case: Case, device_type: str) -> None:
    for dtype in OTHER:
        for cache in (True, False):
            setting = Region(device_type, dtype, enabled=False, cache_enabled=cache)
            before = observe()
            model = RegionStack(before)
            model.enter(setting)
            with deprecated_autocast(device_type, enabled=False, dtype=dtype, cache_enabled=cache):
                is_in_force(case, f"in {setting}", model.state)
            is_in_force(case, "after the region", before)
    with deprecated_autocast(device_type, enabled=False):
        case.equal("default dtype", torch.get_autocast_dtype(device_type), DEFAULTS[device_type])


@contract("AMP-REGION-060")
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_deprecated_spelling_as_a_decorator(case: Case, device_type: str) -> None:
    for dtype, enabled in itertools.product(OTHER, (True, False)):
        setting = Region(device_type, dtype, enabled=enabled)
        model = RegionStack(observe())
        model.enter(setting)
        with cuda_that_says(bf16=True):
            seen = deprecated_autocast(device_type, enabled=enabled, dtype=dtype)(observe)()
        case.equal(f"state that differs in a function decorated with {setting}", seen.differences(model.state), [])
