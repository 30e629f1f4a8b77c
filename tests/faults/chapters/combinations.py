"""Faults that only one combination of options, settings, names or sizes shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import checkpoint

from tests.faults import fault
from tests.faults.breaking import edited, replaced

# --- checkpoints


@fault("AMP-BACKWARD-062")
def reentrant_recomputation_without_random_state_has_no_region() -> Iterator[None]:
    """The reentrant kind of checkpoint recomputes with autocast off where preserve_rng_state=False."""
    given = "**ctx.cpu_autocast_kwargs"
    off = '**(ctx.cpu_autocast_kwargs if ctx.preserve_rng_state else {"enabled": False})'
    with edited(checkpoint.CheckpointFunction.backward, given, off):
        yield


@fault("AMP-BACKWARD-062")
def contexts_without_determinism_check_replace_the_region() -> Iterator[None]:
    """A checkpoint without determinism check and with contexts of the user's recomputes with autocast off."""
    original, none = checkpoint._checkpoint_without_reentrant_generator, checkpoint.noop_context_fn

    def made(fn: Any, preserve: bool, context_fn: Any, check: str, *rest: Any, **named: Any) -> Any:
        if context_fn is not none and check == "none":
            user = context_fn

            def context_fn() -> Any:
                forward, again = user()
                return forward, _off(again)

        return original(fn, preserve, context_fn, check, *rest, **named)

    with replaced(checkpoint, "_checkpoint_without_reentrant_generator", made):
        yield


@contextlib.contextmanager
def _off(inner: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with inner, torch.autocast("cpu", enabled=False):
        yield
