"""Faults of custom operators' autocast rules, and of the decorators' deprecated spellings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._library import custom_ops

from conformance.harness import catalogue
from tests.faults import Breakage, fault
from tests.faults.breaking import edited, replaced

TYPES = "(value.dtype is not torch.float64)"
LISTS = "return type(value)(iterable)"
CALL = "return self._opoverload(*_cast(args, device_type, cast_inputs))"
KEYWORDS = "fwd=fwd, cast_inputs=cast_inputs"

CONTRACTS = catalogue.load().contracts


def rule_fault(contract: str) -> Callable[[Breakage], Breakage]:
    """Register a fault of register_autocast where this torch has what the contract promises."""
    return fault(contract) if CONTRACTS[contract].holds_for(torch.__version__) else lambda breakage: breakage


@fault("AMP-BACKWARD-066")
def deprecated_custom_fwd_casts_to_half_always() -> Iterator[None]:
    """torch.cuda.amp.custom_fwd with cast_inputs casts to float16 whatever the type is."""
    to_half = "fwd=fwd, cast_inputs=cast_inputs and torch.float16"
    with edited(torch.cuda.amp.custom_fwd, KEYWORDS, to_half):
        yield


@fault("AMP-BACKWARD-066")
def deprecated_custom_fwd_forgets_the_cast_when_called_directly() -> Iterator[None]:
    """torch.cuda.amp.custom_fwd(function, cast_inputs=...) casts nothing; as a decorator with brackets it does."""
    with edited(torch.cuda.amp.custom_fwd, KEYWORDS, "fwd=fwd, cast_inputs=None if fwd else cast_inputs"):
        yield


@fault("AMP-BACKWARD-066")
def deprecated_custom_fwd_works_for_xpu() -> Iterator[None]:
    """torch.cuda.amp.custom_fwd keeps the state of XPU."""
    with edited(torch.cuda.amp.custom_fwd, 'device_type="cuda")', 'device_type="xpu")'):
        yield


@fault("AMP-BACKWARD-066")
def deprecated_custom_bwd_opens_a_region_of_xpu() -> Iterator[None]:
    """torch.cuda.amp.custom_bwd runs backward in a region of XPU."""
    with edited(torch.cuda.amp.custom_bwd, 'device_type="cuda")', 'device_type="xpu")'):
        yield


@fault("AMP-BACKWARD-066")
def deprecated_custom_bwd_runs_backward_as_it_is() -> Iterator[None]:
    """torch.cuda.amp.custom_bwd returns the function that it is given."""
    with edited(torch.cuda.amp.custom_bwd, 'functools.partial(torch.amp.custom_bwd, device_type="cuda")(bwd)', "bwd"):
        yield


@rule_fault("AMP-BACKWARD-067")
def operator_casts_float32_alone() -> Iterator[None]:
    """The rule of a custom operator leaves tensors of 16 bits as they are."""
    with edited(custom_ops._cast, TYPES, "value.dtype == torch.float32"):
        yield


@rule_fault("AMP-BACKWARD-067")
def operator_casts_the_first_of_a_list() -> Iterator[None]:
    """The rule of a custom operator casts the first tensor of a list and leaves the others."""
    with edited(custom_ops._cast, LISTS, "return type(value)([next(iterable, None), *value[1:]][: len(value)])"):
        yield


@rule_fault("AMP-BACKWARD-067")
def operator_gives_the_region_type() -> Iterator[None]:
    """The rule of a custom operator casts to the region's type in place of cast_inputs."""
    region = "value.to(torch.get_autocast_dtype(device_type)) if"
    with edited(custom_ops._cast, "value.to(dtype) if", region):
        yield


@rule_fault("AMP-BACKWARD-067")
def operator_casts_its_first_three_arguments() -> Iterator[None]:
    """The rule of a custom operator casts three arguments and leaves those behind."""
    three = "return self._opoverload(*_cast(args[:3], device_type, cast_inputs), *args[3:])"
    with edited(custom_ops.CustomOpDef.register_autocast, CALL, three):
        yield


@rule_fault("AMP-BACKWARD-067")
def operator_named_in_a_library_rounds_numbers() -> Iterator[None]:
    """A rule that is registered by name rounds every float argument to a whole number."""
    old = "return _op(*_cast(args, device_type, cast_inputs))"
    new = "return _op(*[int(a) if isinstance(a, float) else a for a in _cast(args, device_type, cast_inputs)])"
    with edited(torch.library.register_autocast, old, new):
        yield


@rule_fault("AMP-BACKWARD-067")
def rules_of_operators_that_are_given_themselves_are_lost() -> Iterator[None]:
    """torch.library.register_autocast registers nothing for an operator that is given by its definition."""
    register = torch.library.register_autocast

    def lost(op: Any, *args: Any, **options: Any) -> Any:
        return None if isinstance(op, custom_ops.CustomOpDef) else register(op, *args, **options)

    with replaced(torch.library, "register_autocast", lost):
        yield


@rule_fault("AMP-BACKWARD-067")
def rules_for_devices_without_autocast_are_taken() -> Iterator[None]:
    """A rule for a device type that has no autocast is registered nowhere, without an error."""
    register = custom_ops.CustomOpDef.register_autocast

    def taken(self: Any, device_type: str, cast_inputs: torch.dtype) -> Any:
        known = torch.amp.is_autocast_available(device_type)
        return register(self, device_type, cast_inputs) if known else None

    with replaced(custom_ops.CustomOpDef, "register_autocast", taken):
        yield


@rule_fault("AMP-BACKWARD-068")
def operator_casts_complex_numbers() -> Iterator[None]:
    """The rule of a custom operator casts complex tensors, and drops what is imaginary."""
    with edited(custom_ops._cast, "value.is_floating_point()", "not value.dtype.is_signed or value.dtype.is_complex"):
        yield


@rule_fault("AMP-BACKWARD-068")
def operator_casts_float64_in_lists() -> Iterator[None]:
    """The rule of a custom operator leaves float64 alone, but not in a list."""
    listed = "return type(value)(v.to(dtype) if getattr(v, 'dtype', 0) is torch.float64 else v for v in iterable)"
    with edited(custom_ops._cast, LISTS, f"{listed} if isinstance(value, list) else type(value)(iterable)"):
        yield


@rule_fault("AMP-BACKWARD-068")
def operator_casts_what_lies_elsewhere() -> Iterator[None]:
    """The rule of a custom operator casts the tensors of every device."""
    with edited(custom_ops._cast, "value.device.type == device_type", "bool(device_type)"):
        yield


@rule_fault("AMP-BACKWARD-069")
def operator_registers_for_both() -> Iterator[None]:
    """A rule that is registered for CUDA is one for the CPU too."""
    too = 'device_type == "cuda" and self._lib.impl(self._name, kernel, "AutocastCPU", with_keyset=True)'
    with edited(custom_ops.CustomOpDef.register_autocast, "return kernel", f"{too}; return kernel"):
        yield


@rule_fault("AMP-BACKWARD-071")
def operator_asks_for_tensors_of_cpu_and_cuda() -> Iterator[None]:
    """The rule of a custom operator casts for the CPU and CUDA alone."""
    with edited(custom_ops._cast, "value.device.type == device_type", 'value.device.type == device_type in "cpu cuda"'):
        yield


@rule_fault("AMP-BACKWARD-070")
def operator_detaches_what_it_casts() -> Iterator[None]:
    """The rule of a custom operator casts without a gradient."""
    with edited(custom_ops._cast, "value.to(dtype) if", "value.detach().to(dtype) if"):
        yield


@rule_fault("AMP-BACKWARD-070")
def operator_keeps_its_casts() -> Iterator[None]:
    """The rule of a custom operator casts a weight once and serves the copy when the weight has changed."""
    kept = "value.__dict__.setdefault(f'_cast_{dtype}', value.to(dtype)) if"
    with edited(custom_ops._cast, "value.to(dtype) if", kept):
        yield


@rule_fault("AMP-BACKWARD-074")
def rule_drops_the_last_number_of_a_list() -> Iterator[None]:
    """register_autocast passes a list of numbers without its last one."""
    original = torch.library._cast

    def shortened(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        if isinstance(value, tuple) and any(isinstance(part, list) and part == [1, 2] for part in value):
            value = tuple(part[:-1] if isinstance(part, list) else part for part in value)
        return original(value, device_type, dtype)

    with replaced(torch.library, "_cast", shortened):
        yield
