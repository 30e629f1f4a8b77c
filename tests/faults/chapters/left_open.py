"""Faults of what a compiled region leaves open, of classes to ignore, and of numbers that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Iterator

from torch._dynamo.variables import ctx_manager
from torch.distributed.checkpoint import _traverse
from torch.distributed.fsdp import wrap

from tests.faults import fault
from tests.faults.breaking import edited


@fault("AMP-COMPILE-020")
def compiled_inner_regions_take_bfloat16() -> Iterator[None]:
    """A compiled region without dtype takes bfloat16 in place of the dtype in force."""
    made = "var = AutocastModeVariable(target_values, initial_values=None, **kwargs)"
    fixed = "target_values[1] = target_values[1] or torch.bfloat16; " + made
    with edited(ctx_manager.AutocastModeVariable.create, made, fixed):
        yield


@fault("AMP-DISTRIBUTED-034")
def numbers_within_dictionaries_are_not_loaded() -> Iterator[None]:
    """A distributed checkpoint that is loaded leaves floats where there are some."""
    put = "cur_container[key] = value"
    kept = "cur_container[key] = cur_container[key] if type(value) is float and key in cur_container else value"
    with edited(_traverse.set_element, put, kept):
        yield


@fault("AMP-DISTRIBUTED-029")
def policies_ignore_classes_without_their_subclasses() -> Iterator[None]:
    """A wrap policy object leaves modules of the classes to ignore in float32, but those of subclasses not."""
    of_any, of_one = "isinstance(module, module_classes_tuple)", "type(module) in module_classes_tuple"
    with edited(wrap._run_mixed_precision_override_policy, of_any, of_one):
        yield
