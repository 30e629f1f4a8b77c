"""Regions that change what is no setting of autocast."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.faults import fault
from tests.faults.breaking import edited

SAVED = "self.prev_cache_enabled = torch.is_autocast_cache_enabled()"
PUT_BACK = "torch.set_autocast_cache_enabled(self.prev_cache_enabled)"


@fault("AMP-REGION-061")
def leaving_a_region_draws_a_random_number() -> Iterator[None]:
    """Leaving a region takes a number from torch's global generator."""
    with edited(torch.autocast.__exit__, PUT_BACK, f"{PUT_BACK}; torch.randint(2, (1,))"):
        yield


@fault("AMP-REGION-061")
def region_flushes_subnormal_numbers() -> Iterator[None]:
    """An enabled region has the processor flush subnormal numbers."""
    with edited(torch.autocast.__enter__, SAVED, f"{SAVED}; self._enabled and torch.set_flush_denormal(True)"):
        try:
            yield
        finally:
            torch.set_flush_denormal(False)


@fault("AMP-REGION-061")
def leaving_a_region_records_gradients_again() -> Iterator[None]:
    """Leaving a region switches grad mode on, under torch.no_grad too."""
    with edited(torch.autocast.__exit__, PUT_BACK, f"{PUT_BACK}; torch._C._set_grad_enabled(True)"):
        yield


@fault("AMP-REGION-061")
def disabled_region_asks_for_exact_products() -> Iterator[None]:
    """A disabled region sets the precision of float32 products to the highest, which its end does not undo."""
    exact = "self._enabled or torch.set_float32_matmul_precision('highest')"
    with edited(torch.autocast.__enter__, SAVED, f"{SAVED}; {exact}"):
        yield
