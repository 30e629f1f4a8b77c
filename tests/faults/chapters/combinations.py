"""Faults that only one combination of options, settings, names or sizes shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import checkpoint

from tests.faults import fault
from tests.faults.breaking import edited, replaced

Scaler = torch.amp.GradScaler

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


# --- states of scalers


@fault("AMP-SCALE-091")
def loaded_count_is_folded_by_the_interval_before() -> Iterator[None]:
    """A used scaler that loads a state counts what is left of the loaded count in its own interval of before."""
    load = Scaler.load_state_dict

    def loaded(self: Any, state: dict[str, Any]) -> None:
        before = self.get_growth_interval()
        folded = state["_growth_tracker"] % before if state and self._scale is not None else None
        load(self, state if folded is None else {**state, "_growth_tracker": folded})

    with replaced(Scaler, "load_state_dict", loaded):
        yield


@fault("AMP-SCALE-091", "AMP-SCALE-092")
def loaded_interval_is_never_below_the_own_one() -> Iterator[None]:
    """A scaler that loads a state keeps its own interval where that is larger and below 100."""
    load = Scaler.load_state_dict

    def loaded(self: Any, state: dict[str, Any]) -> None:
        before = self.get_growth_interval()
        load(self, state)
        if self.get_growth_interval() < before < 100:
            self.set_growth_interval(before)

    with replaced(Scaler, "load_state_dict", loaded):
        yield


@fault("AMP-SCALE-091")
def loaded_scale_is_kept_from_below_the_own_one_after_growth() -> Iterator[None]:
    """A scaler that has counted clean steps loads no smaller scale than its own."""
    load = Scaler.load_state_dict

    def loaded(self: Any, state: dict[str, Any]) -> None:
        counted = self._scale is not None and int(self._growth_tracker) > 1
        load(self, {**state, "scale": max(state["scale"], self.get_scale())} if state and counted else state)

    with replaced(Scaler, "load_state_dict", loaded):
        yield
