"""Faults that only one combination of options, settings, names or sizes shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch import vmap
from torch.nn.utils import stateless
from torch.optim import adagrad, sgd
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


# --- transforms


@fault("AMP-TRANSFORM-006")
def chunks_are_joined_along_the_dimension_of_the_first_output() -> Iterator[None]:
    """vmap in chunks joins every output along the dimension that out_dims names for the first."""
    with edited(vmap._concat_chunked_outputs, "dim=out_dim", "dim=flat_out_dims[0]"):
        yield


@fault("AMP-TRANSFORM-006")
def last_chunk_is_left_out_where_it_is_smaller() -> Iterator[None]:
    """vmap in chunks repeats the first samples for a last chunk that is smaller than the others."""
    split = vmap._get_chunked_inputs

    def parts(flat: Any, dims: Any, size: int, chunk: int | None) -> Any:
        made = list(split(flat, dims, size, chunk))
        if chunk is not None and size % chunk and len(made) > 2:
            made[-1] = tuple(
                one if dim is None else first.narrow(dim, 0, one.shape[dim])
                for one, first, dim in zip(made[-1], made[0], dims, strict=True)
            )
        return iter(made)

    with replaced(vmap, "_get_chunked_inputs", parts):
        yield


@fault("AMP-TRANSFORM-008")
def value_under_a_later_name_is_taken_there_alone() -> Iterator[None]:
    """functional_call takes a value for a later name of a shared weight under that name alone."""
    later = "given_name not in dict(module.named_parameters())"
    tied = "tied_names_map[given_name]:"
    with edited(stateless._untie_named_tensors_map, f"in {tied}", f"in [given_name] if {later} else {tied}"):
        yield


@fault("AMP-TRANSFORM-008")
def names_of_one_set_are_tied_where_they_should_not_be() -> Iterator[None]:
    """functional_call with tie_weights=False takes a value for two names of a weight under the third as well."""
    enter = stateless._reparametrize_module

    def entered(module: Any, given: Any, *, tie_weights: bool = False, **named: Any) -> Any:
        if not tie_weights and len(given) == 2:
            weights = {id(module.get_parameter(name)) for name in given}
            every = module.named_parameters(remove_duplicate=False)
            given = dict.fromkeys([name for name, one in every if id(one) in weights], *set(given.values()))
        return enter(module, given, tie_weights=tie_weights, **named)

    with replaced(stateless, "_reparametrize_module", entered):
        yield


# --- sparse gradients


@fault("AMP-OPTIMIZER-112")
def rate_of_sparse_gradients_does_not_decay() -> Iterator[None]:
    """Adagrad steps with sparse gradients at the rate of the first step, whatever lr_decay is."""
    old, new = "(step - 1) * lr_decay", "(step - 1) * (0.0 if grad.is_sparse else lr_decay)"
    with edited(adagrad._single_tensor_adagrad, old, new):
        yield


@fault("AMP-OPTIMIZER-112")
def sparse_gradients_have_no_dampening() -> Iterator[None]:
    """SGD adds sparse gradients to the momentum whole, whatever dampening is."""
    with edited(sgd._single_tensor_sgd, "alpha=1 - dampening", "alpha=1.0 if grad.is_sparse else 1 - dampening"):
        yield


@fault("AMP-OPTIMIZER-112")
def sparse_gradients_are_minimized() -> Iterator[None]:
    """Adagrad minimizes with sparse gradients, with maximize too."""
    with edited(adagrad._single_tensor_adagrad, "else -grad", "else (grad if grad.is_sparse else -grad)"):
        yield
