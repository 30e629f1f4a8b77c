"""Faults of custom functions, gradients, hooks and checkpoints: state that backward does not get, or gets wrong."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.amp import autocast_mode

from tests.faults import fault
from tests.faults._tools import edited


@fault("AMP-BACKWARD-028")
def custom_bwd_forgets_the_type_of_a_disabled_region() -> Iterator[None]:
    """custom_bwd takes forward's dtype where forward was enabled, and the default elsewhere."""
    kept = "dtype=args[0]._dtype if args[0]._fwd_used_autocast else None"
    with edited(autocast_mode.custom_bwd, "dtype=args[0]._dtype", kept):
        yield


@fault("AMP-BACKWARD-028")
def custom_fwd_keeps_the_type_of_the_cast() -> Iterator[None]:
    """custom_fwd with cast_inputs keeps that type for backward in place of the region's."""
    own = "args[0]._dtype = torch.get_autocast_dtype(device_type)"
    with edited(autocast_mode.custom_fwd, own, "args[0]._dtype = cast_inputs or torch.get_autocast_dtype(device_type)"):
        yield


@fault("AMP-BACKWARD-028")
def custom_fwd_asks_for_the_type_of_cuda() -> Iterator[None]:
    """custom_fwd keeps the dtype of CUDA's regions whatever its device type."""
    with edited(autocast_mode.custom_fwd, "torch.get_autocast_dtype(device_type)", 'torch.get_autocast_dtype("cuda")'):
        yield


@fault("AMP-BACKWARD-028")
def custom_fwd_remembers_the_region_that_it_left() -> Iterator[None]:
    """custom_fwd with cast_inputs keeps that autocast was on, so that backward runs with it on."""
    with edited(
        autocast_mode.custom_fwd,
        "args[0]._fwd_used_autocast = False",
        "args[0]._fwd_used_autocast = autocast_context",
    ):
        yield


@fault("AMP-BACKWARD-028")
def custom_fwd_returns_nothing_outside_of_a_region() -> Iterator[None]:
    """custom_fwd outside of a region returns nothing."""
    text = "else:\n                return fwd(*args, **kwargs)"
    with edited(autocast_mode.custom_fwd, text, text.replace("return ", "")):
        yield


@fault("AMP-BACKWARD-028")
def custom_bwd_drops_keywords() -> Iterator[None]:
    """custom_bwd hands on the positional arguments alone."""
    with edited(autocast_mode.custom_bwd, "return bwd(*args, **kwargs)", "return bwd(*args, **dict.fromkeys(kwargs))"):
        yield


@fault("AMP-BACKWARD-028")
def custom_bwd_returns_nothing_in_a_disabled_region() -> Iterator[None]:
    """custom_bwd runs backward only where forward used autocast."""
    with edited(
        autocast_mode.custom_bwd,
        "return bwd(*args, **kwargs)",
        "return bwd(*args, **kwargs) if args[0]._fwd_used_autocast else None",
    ):
        yield


@fault("AMP-BACKWARD-028")
def cast_inputs_leaves_autocast_off() -> Iterator[None]:
    """custom_fwd switches autocast off without a region that would bring it back."""
    with edited(
        autocast_mode.custom_fwd,
        "with autocast(device_type=device_type, enabled=False):",
        "if torch.set_autocast_enabled(device_type, False) is None:",
    ):
        yield


@fault("AMP-BACKWARD-030")
def cast_inputs_makes_tuples_of_lists() -> Iterator[None]:
    """cast_inputs gives a list for every sequence."""
    with edited(autocast_mode._cast, "type(value)(iterable)", "list(iterable)"):
        yield


@fault("AMP-BACKWARD-030")
def cast_inputs_takes_bytes_apart() -> Iterator[None]:
    """cast_inputs hands over an iterator over the numbers of a bytes object."""
    with edited(autocast_mode._cast, "(str, bytes)", "str"):
        yield


@fault("AMP-BACKWARD-030")
def cast_inputs_takes_arrays_apart() -> Iterator[None]:
    """cast_inputs hands over an iterator over the rows of a numpy array."""
    with edited(autocast_mode._cast, "HAS_NUMPY and", "not HAS_NUMPY and"):
        yield


@fault("AMP-BACKWARD-030")
def cast_inputs_casts_complex_numbers() -> Iterator[None]:
    """cast_inputs casts whatever is a tensor of the device and not float64."""
    with edited(autocast_mode._cast, "value.is_floating_point()", "True"):
        yield


@fault("AMP-BACKWARD-030")
def cast_inputs_leaves_keys() -> Iterator[None]:
    """cast_inputs does not cast the tensors among a mapping's keys."""
    with edited(autocast_mode._cast, "_cast(k, device_type, dtype):", "k:"):
        yield


@fault("AMP-BACKWARD-030")
def cast_inputs_leaves_iterators() -> Iterator[None]:
    """cast_inputs hands over an iterator as it is."""
    with edited(autocast_mode._cast, "return iterable", "return value"):
        yield


@fault("AMP-BACKWARD-032")
def custom_fwd_forgets_its_cast_in_a_partial() -> Iterator[None]:
    """custom_fwd called with arguments alone drops cast_inputs."""
    with edited(
        autocast_mode.custom_fwd, "device_type=device_type, cast_inputs=cast_inputs", "device_type=device_type"
    ):
        yield


@fault("AMP-BACKWARD-032")
def custom_bwd_does_not_wrap() -> Iterator[None]:
    """custom_bwd hides the name of what it decorates."""
    with edited(autocast_mode.custom_bwd, "@functools.wraps(bwd)", "@(lambda function: function)"):
        yield


@fault("AMP-BACKWARD-035")
def custom_bwd_is_differentiable_once() -> Iterator[None]:
    """custom_bwd runs backward where autograd does not record."""
    call = "return bwd(*args, **kwargs)"
    with edited(autocast_mode.custom_bwd, call, f"with torch.no_grad(): {call}"):
        yield


@fault("AMP-BACKWARD-037", "AMP-BACKWARD-028")
def disabled_subregion_stays_on() -> Iterator[None]:
    """A region with enabled=False inside of an enabled one changes nothing."""
    entered = torch.autocast.__enter__
    with edited(
        entered,
        "torch.set_autocast_enabled(self.device, self._enabled)",
        "torch.set_autocast_enabled(self.device, self._enabled or self.prev)",
    ):
        yield


@fault("AMP-BACKWARD-038", "AMP-BACKWARD-028")
def custom_bwd_never_enters_a_region() -> Iterator[None]:
    """custom_bwd runs backward with autocast off."""
    with edited(autocast_mode.custom_bwd, "enabled=args[0]._fwd_used_autocast", "enabled=False"):
        yield
