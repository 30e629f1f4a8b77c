"""Regions that do not set, keep or put back what they promise."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import autocast_mode

from tests.faults import fault
from tests.faults.breaking import dropped, edited, kernel, replaced

REGION = autocast_mode.autocast
SET_ENABLED = "torch.set_autocast_enabled(self.device, self._enabled)"
PUT_ENABLED_BACK = "torch.set_autocast_enabled(self.device, self.prev)"
SET_DTYPE = "torch.set_autocast_dtype(self.device, self.fast_dtype)"
PUT_DTYPE_BACK = "torch.set_autocast_dtype(self.device, self.prev_fastdtype)"
SET_CACHE = "torch.set_autocast_cache_enabled(self._cache_enabled)"
PUT_CACHE_BACK = "torch.set_autocast_cache_enabled(self.prev_cache_enabled)"
DEPTH = "(torch.autocast_increment_nesting(), torch.autocast_decrement_nesting())[1]"
OUTERMOST = "if torch.autocast_decrement_nesting() == 0:"


def initialised(change: Callable[..., Any]) -> Any:
    """A replacement of autocast.__init__: `change` gets the original one, the instance and the arguments."""
    original = REGION.__init__

    @functools.wraps(original)
    def initialise(
        self: Any, device_type: Any, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        change(original, self, device_type, dtype, enabled, cache_enabled)

    return replaced(REGION, "__init__", initialise)


@fault("AMP-REGION-001")
def region_does_nothing() -> Iterator[None]:
    """Entering a region does not switch autocast on."""
    with edited(REGION.__enter__, SET_ENABLED, "pass"):
        yield


@fault("AMP-REGION-010", "AMP-REGION-025")
def region_ignores_enabled() -> Iterator[None]:
    """Every region is enabled."""
    with edited(REGION.__enter__, SET_ENABLED, "torch.set_autocast_enabled(self.device, True)"):
        yield


@fault("AMP-REGION-012")
def region_cannot_enable_inside_a_disabled_one() -> Iterator[None]:
    """A region inside a disabled one stays disabled."""
    enabled = f"torch.set_autocast_enabled(self.device, self._enabled and (self.prev or {DEPTH} == 0))"
    with edited(REGION.__enter__, SET_ENABLED, enabled):
        yield


@fault("AMP-REGION-001", "AMP-REGION-031")
def region_ignores_its_dtype() -> Iterator[None]:
    """Every region runs in the dtype that is in force."""
    with edited(REGION.__enter__, SET_DTYPE, "pass"):
        yield


@fault("AMP-REGION-024", "AMP-REGION-032")
def region_ignores_its_cache_flag() -> Iterator[None]:
    """The cache is on in every region."""
    with edited(REGION.__enter__, SET_CACHE, "torch.set_autocast_cache_enabled(True)"):
        yield


@fault("AMP-REGION-024")
def cache_flag_is_not_inherited() -> Iterator[None]:
    """cache_enabled=None switches the cache on."""

    def change(original: Any, self: Any, device_type: Any, dtype: Any, enabled: bool, cache: bool | None) -> None:
        original(self, device_type, dtype, enabled, True if cache is None else cache)

    with initialised(change):
        yield


@fault("AMP-REGION-023")
def dtype_none_is_a_constant() -> Iterator[None]:
    """A region with no dtype runs in the first default, whatever is set."""
    defaults = {"cpu": torch.bfloat16, "hpu": torch.bfloat16, "xla": torch.bfloat16, "maia": torch.bfloat16}

    def change(original: Any, self: Any, device_type: Any, dtype: Any, enabled: bool, cache: bool | None) -> None:
        original(self, device_type, dtype or defaults.get(device_type, torch.float16), enabled, cache)

    with initialised(change):
        yield


@fault("AMP-REGION-030")
def region_stays_enabled() -> Iterator[None]:
    """Leaving a region does not put the enabled flag back."""
    with edited(REGION.__exit__, PUT_ENABLED_BACK, "pass"):
        yield


@fault("AMP-REGION-030", "AMP-REGION-010")
def region_ends_disabled() -> Iterator[None]:
    """Leaving a region switches autocast off, also inside another one."""
    with edited(REGION.__exit__, PUT_ENABLED_BACK, "torch.set_autocast_enabled(self.device, False)"):
        yield


@fault("AMP-REGION-031")
def region_keeps_its_dtype() -> Iterator[None]:
    """Leaving a region does not put the dtype back."""
    with edited(REGION.__exit__, PUT_DTYPE_BACK, "pass"):
        yield


@fault("AMP-REGION-031")
def region_ends_in_the_default_dtype() -> Iterator[None]:
    """Leaving a region sets bfloat16, also inside another one."""
    with edited(REGION.__exit__, PUT_DTYPE_BACK, "torch.set_autocast_dtype(self.device, torch.bfloat16)"):
        yield


@fault("AMP-REGION-032")
def region_keeps_its_cache_flag() -> Iterator[None]:
    """Leaving a region does not put the cache flag back."""
    with edited(REGION.__exit__, PUT_CACHE_BACK, "pass"):
        yield


@fault("AMP-REGION-032")
def region_ends_with_the_cache_on() -> Iterator[None]:
    """Leaving a region switches the cache on."""
    with edited(REGION.__exit__, PUT_CACHE_BACK, "torch.set_autocast_cache_enabled(True)"):
        yield


@fault("AMP-REGION-033")
def region_is_not_counted() -> Iterator[None]:
    """A disabled region does not count for the nesting depth, but its end does."""
    counted = "torch.autocast_increment_nesting() if self._enabled else None"
    with edited(REGION.__enter__, "torch.autocast_increment_nesting()", counted):
        yield


@fault("AMP-REGION-034")
def exception_keeps_the_region() -> Iterator[None]:
    """A region that is left by an exception puts nothing back."""
    with edited(REGION.__exit__, OUTERMOST, f"if exc_type is not None: return False\n    {OUTERMOST}"):
        yield


@fault("AMP-REGION-034")
def exception_is_swallowed() -> Iterator[None]:
    """A region swallows the exceptions that leave it."""
    with edited(REGION.__exit__, PUT_CACHE_BACK, f"{PUT_CACHE_BACK}; return exc_type is not None"):
        yield


@fault("AMP-REGION-034")
def interrupt_keeps_the_region() -> Iterator[None]:
    """A region that is left by an interrupt puts nothing back."""
    skipped = "if exc_type is not None and not issubclass(exc_type, Exception): return False"
    with edited(REGION.__exit__, OUTERMOST, f"{skipped}\n    {OUTERMOST}"):
        yield


@fault("AMP-REGION-035")
def region_reaches_another_device_type() -> Iterator[None]:
    """A region switches xpu as well."""
    with edited(REGION.__enter__, SET_ENABLED, f"{SET_ENABLED}; torch.set_autocast_enabled('xpu', self._enabled)"):
        yield


@fault("AMP-REGION-037")
def third_region_is_forgotten() -> Iterator[None]:
    """A region at the third level or deeper does not put its dtype back."""
    with edited(REGION.__exit__, PUT_DTYPE_BACK, f"{DEPTH} > 1 or {PUT_DTYPE_BACK}"):
        yield


@fault("AMP-REGION-006")
def second_use_puts_back_the_first_state() -> Iterator[None]:
    """An instance that is used again puts back what its first use found."""
    found = "torch.is_autocast_enabled(self.device)"
    with edited(REGION.__enter__, f"self.prev = {found}", f"self.prev = getattr(self, 'prev', {found})"):
        yield


@fault("AMP-REGION-007")
def entering_gives_nothing() -> Iterator[None]:
    """`with torch.autocast(...) as region` binds None."""
    enter = REGION.__enter__

    def silent(self: Any) -> None:
        enter(self)

    with replaced(REGION, "__enter__", silent):
        yield


@fault("AMP-REGION-002", "AMP-REGION-003")
def decorator_opens_no_region() -> Iterator[None]:
    """A decorated function runs as if it were not."""
    with replaced(REGION, "__call__", lambda self, function: function):
        yield


@fault("AMP-REGION-002")
def decorator_loses_keywords() -> Iterator[None]:
    """A decorated function gets its positional arguments only."""

    def decorate(self: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            with self:
                return function(*arguments)

        return run

    with replaced(REGION, "__call__", decorate):
        yield


@fault("AMP-REGION-002")
def decorator_works_once() -> Iterator[None]:
    """A decorated function runs in a region at its first call only."""

    def decorate(self: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        calls: list[None] = []

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            calls.append(None)
            if len(calls) > 1:
                return function(*arguments, **options)
            with self:
                return function(*arguments, **options)

        return run

    with replaced(REGION, "__call__", decorate):
        yield


@fault("AMP-API-021")
def default_dtype_is_changed() -> Iterator[None]:
    """The CPU's default is float16."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cpu", before)


@fault("AMP-REGION-020")
def region_is_disabled_by_default() -> Iterator[None]:
    """torch.autocast(device_type) is a disabled region."""
    original = REGION.__init__

    def initialise(
        self: Any, device_type: Any, dtype: Any = None, enabled: bool = False, cache_enabled: bool | None = None
    ) -> None:
        original(self, device_type, dtype, enabled, cache_enabled)

    with replaced(REGION, "__init__", initialise):
        yield


@fault("AMP-REGION-040")
def new_thread_inherits_the_region() -> Iterator[None]:
    """A thread starts with the enabled flag of the thread that started it."""
    start, run = threading.Thread.start, threading.Thread.run

    def starting(self: Any) -> None:
        self.inherited = torch.is_autocast_enabled("cpu")
        start(self)

    def running(self: Any) -> None:
        torch.set_autocast_enabled("cpu", self.inherited)
        run(self)

    with replaced(threading.Thread, "start", starting), replaced(threading.Thread, "run", running):
        yield


@fault("AMP-REGION-050", "AMP-REGION-055")
def region_is_disabled_in_silence() -> Iterator[None]:
    """A region that disables itself does not warn."""

    def change(original: Any, self: Any, *arguments: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            original(self, *arguments)

    with initialised(change):
        yield


@fault("AMP-REGION-050")
def unsupported_dtype_is_used() -> Iterator[None]:
    """A region of float32 warns and is enabled all the same."""

    def change(original: Any, self: Any, device_type: Any, dtype: Any, enabled: bool, cache: bool | None) -> None:
        original(self, device_type, dtype, enabled, cache)
        self._enabled = self._enabled or (enabled and device_type == "cpu")

    with initialised(change):
        yield


@fault("AMP-REGION-055")
def cuda_region_is_enabled_without_cuda() -> Iterator[None]:
    """A CUDA region is enabled where there is no CUDA."""

    def change(original: Any, self: Any, device_type: Any, dtype: Any, enabled: bool, cache: bool | None) -> None:
        original(self, device_type, dtype, enabled, cache)
        self._enabled = self._enabled or (enabled and device_type == "cuda")

    with initialised(change):
        yield


@fault("AMP-REGION-051")
def every_region_warns() -> Iterator[None]:
    """Disabled regions warn too."""

    def change(original: Any, self: Any, *arguments: Any) -> None:
        warnings.warn("autocast is experimental", stacklevel=2)
        original(self, *arguments)

    with initialised(change):
        yield


@fault("AMP-REGION-052")
def device_type_may_be_anything() -> Iterator[None]:
    """device_type is turned into a string."""

    def change(original: Any, self: Any, device_type: Any, *arguments: Any) -> None:
        original(self, str(device_type), *arguments)

    with initialised(change):
        yield


@fault("AMP-REGION-053")
def unknown_device_type_is_disabled() -> Iterator[None]:
    """A region for an unknown device type is one for the CPU that is disabled."""

    def change(original: Any, self: Any, device_type: Any, dtype: Any, enabled: bool, cache: bool | None) -> None:
        known = not isinstance(device_type, str) or (device_type.islower() and device_type not in ("nonsense", "gpu"))
        original(self, device_type if known else "cpu", dtype, enabled and known, cache)

    with initialised(change):
        yield


@fault("AMP-REGION-054")
def meta_region_is_allowed() -> Iterator[None]:
    """A region may be opened for a device type without autocast."""
    with replaced(autocast_mode, "is_autocast_available", lambda device_type: True):
        yield


@fault("AMP-REGION-014")
def float_always_copies() -> Iterator[None]:
    """float() of a float32 tensor makes a copy."""
    with replaced(torch.Tensor, "float", lambda self: self.to(torch.float32, copy=True)):
        yield


@fault("AMP-REGION-060")
def deprecated_autocast_ignores_its_dtype() -> Iterator[None]:
    """torch.cpu.amp.autocast always runs in bfloat16."""
    old = torch.cpu.amp.autocast

    def initialise(
        self: Any, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True
    ) -> None:
        REGION.__init__(self, "cpu", torch.bfloat16, enabled, cache_enabled)

    with replaced(old, "__init__", initialise):
        yield


@fault("AMP-REGION-011")
def mixed_products_promote() -> Iterator[None]:
    """`@` takes tensors of two types outside regions too."""
    product = torch.Tensor.__matmul__

    def promoting(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(left.device.type):
            return product(left, right)
        widest = torch.promote_types(left.dtype, right.dtype)
        return product(left.to(widest), right.to(widest))

    with replaced(torch.Tensor, "__matmul__", promoting):
        yield


@fault("AMP-REGION-013")
def matmul_casts_float32_only() -> Iterator[None]:
    """matmul in a region leaves a tensor of the other 16-bit type as it is."""

    def run(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        cast = [each.to(dtype) if each.dtype is torch.float32 else each for each in (left, right)]
        with torch.autocast("cpu", enabled=False):
            return torch.ops.aten.matmul(*cast)

    with kernel("matmul", run, "AutocastCPU"):
        yield


@fault("AMP-REGION-015")
def parameters_are_rounded() -> Iterator[None]:
    """linear in a region rounds its weight where it lies."""

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        weight.data.copy_(weight.data.to(dtype))
        with torch.autocast("cpu", enabled=False):
            return torch.ops.aten.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    with kernel("linear", run, "AutocastCPU"):
        yield


@fault("AMP-API-021")
def default_dtype_of_xpu_is_changed() -> Iterator[None]:
    """The default of xpu is bfloat16."""
    before = torch.get_autocast_dtype("xpu")
    torch.set_autocast_dtype("xpu", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_dtype("xpu", before)


@fault("AMP-REGION-041")
def region_reaches_every_thread() -> Iterator[None]:
    """A product runs in the dtype of whatever region any thread has open."""
    product, opened = torch.mm, []
    enter, leave = REGION.__enter__, REGION.__exit__

    def entering(self: Any) -> Any:
        opened.append(self.fast_dtype if self._enabled else torch.float32)
        return enter(self)

    def leaving(self: Any, *error: Any) -> Any:
        opened.pop()
        return leave(self, *error)

    def anywhere(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return product(left.to(opened[-1]), right.to(opened[-1])) if opened else product(left, right)

    with (
        replaced(REGION, "__enter__", entering),
        replaced(REGION, "__exit__", leaving),
        replaced(torch, "mm", anywhere),
    ):
        yield


# --- a user's own model


@fault("AMP-REGION-100", machine="model")
def linear_layers_of_a_model_are_not_lowered() -> Iterator[None]:
    """linear and addmm have no autocast kernel on the CPU."""
    with dropped("linear", "AutocastCPU"), dropped("addmm", "AutocastCPU"):
        yield


@fault("AMP-REGION-101", machine="model")
def a_step_leaves_autocast_on() -> Iterator[None]:
    """Leaving a region puts nothing back."""
    with replaced(torch.autocast, "__exit__", lambda self, *error: False):
        yield
