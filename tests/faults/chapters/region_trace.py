"""Broken regions of traced programs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.faults import fault
from tests.faults.breaking import edited

autocast_mode = torch.amp.autocast_mode


@fault("AMP-REGION-090", level="standard")
def trace_loses_the_cache_flag() -> Iterator[None]:
    """A region is recorded with its cache on, whatever was asked for."""
    old, new = "_enter_autocast, (), args)", "_enter_autocast, (), (*args[:3], True))"
    with edited(torch.autocast.__enter__, old, new):
        yield


@fault("AMP-REGION-091", level="standard")
def traced_region_is_not_left() -> Iterator[None]:
    """The recorded end of a region does nothing when it is run."""
    with edited(autocast_mode._exit_autocast, "mode.__exit__(None, None, None)", "return None"):
        yield


@fault("AMP-REGION-092", level="standard")
def tracing_swallows_exceptions() -> Iterator[None]:
    """The end of a region hands back what the tracer gave, so that Python drops the exception."""
    old, new = "mode.__torch_function__(torch.amp._exit_autocast, (), ())", "return"
    with edited(torch.autocast.__exit__, old, f"{new} {old}"):
        yield


@fault("AMP-REGION-090")
def tracer_hears_only_of_enabled_regions() -> Iterator[None]:
    """A disabled region is not told to the tracer, so that what it runs is lowered in the exported program."""
    old = "mode.__torch_function__(torch.amp._enter"
    with edited(torch.autocast.__enter__, old, f"self._enabled and {old}"):
        yield
