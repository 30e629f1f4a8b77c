"""Regions that go wrong only in certain places: at a depth, in an order, by a way to open them or a way to leave."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import autocast_mode

from tests.faults import fault
from tests.faults.breaking import edited, replaced

REGION = autocast_mode.autocast
PUT_ENABLED_BACK = "torch.set_autocast_enabled(self.device, self.prev)"
PUT_DTYPE_BACK = "torch.set_autocast_dtype(self.device, self.prev_fastdtype)"
PUT_CACHE_BACK = "torch.set_autocast_cache_enabled(self.prev_cache_enabled)"
SET_CACHE = "torch.set_autocast_cache_enabled(self._cache_enabled)"
DEPTH = "(torch.autocast_increment_nesting(), torch.autocast_decrement_nesting())[1]"


def decorating(run: Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """Break the decorator: `run` gets the instance, the function and its arguments."""

    def decorate(self: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def decorated(*arguments: Any, **options: Any) -> Any:
            return run(self, function, arguments, options)

        return decorated

    return replaced(REGION, "__call__", decorate)


@fault("AMP-REGION-037")
def fourth_region_keeps_the_cache_flag() -> Iterator[None]:
    """A region inside three others does not put the cache flag back."""
    with edited(REGION.__exit__, PUT_CACHE_BACK, f"{DEPTH} > 2 or {PUT_CACHE_BACK}"):
        yield


@fault("AMP-REGION-037")
def dtype_is_put_back_only_after_an_enabled_region() -> Iterator[None]:
    """A disabled region keeps its dtype in force."""
    with edited(REGION.__exit__, PUT_DTYPE_BACK, f"not self._enabled or {PUT_DTYPE_BACK}"):
        yield


@fault("AMP-REGION-037")
def enabled_is_put_back_only_if_the_dtype_changed() -> Iterator[None]:
    """A region of the dtype that was in force already does not put the enabled flag back."""
    with edited(REGION.__exit__, PUT_ENABLED_BACK, f"self.fast_dtype == self.prev_fastdtype or {PUT_ENABLED_BACK}"):
        yield


@fault("AMP-REGION-037", "AMP-REGION-039")
def region_puts_the_cache_flag_back_on_all_devices_but_the_cpu() -> Iterator[None]:
    """A region for the CPU inside one of another device type keeps its cache flag."""
    kept = f"(self.device == 'cpu' and torch.is_autocast_enabled('xpu')) or {PUT_CACHE_BACK}"
    with edited(REGION.__exit__, PUT_CACHE_BACK, kept):
        yield


@fault("AMP-REGION-037")
def exception_inside_a_region_ends_both() -> Iterator[None]:
    """A region that is left by an exception inside another one switches autocast off."""
    put = f"torch.set_autocast_enabled(self.device, self.prev if exc_type is None or {DEPTH} != 1 else False)"
    with edited(REGION.__exit__, PUT_ENABLED_BACK, put):
        yield


@fault("AMP-REGION-037")
def setter_inside_a_region_survives_it() -> Iterator[None]:
    """A region puts back nothing if somebody set the dtype inside it."""
    same = "torch.get_autocast_dtype(self.device) != self.fast_dtype"
    with edited(REGION.__exit__, PUT_DTYPE_BACK, f"{same} or {PUT_DTYPE_BACK}"):
        yield


@fault("AMP-REGION-037")
def region_forgets_a_setter_of_another_device() -> Iterator[None]:
    """Leaving a region puts the flag of every device type back, also what was set inside it."""
    enter, leave = REGION.__enter__, REGION.__exit__
    found: list[dict[str, bool]] = []

    def entering(self: Any) -> Any:
        found.append({kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "xpu", "hpu") if kind != self.device})
        return enter(self)

    def leaving(self: Any, *error: Any) -> Any:
        returned = leave(self, *error)
        for kind, flag in found.pop().items():
            torch.set_autocast_enabled(kind, flag)
        return returned

    with replaced(REGION, "__enter__", entering), replaced(REGION, "__exit__", leaving):
        yield


@fault("AMP-REGION-037")
def decorated_function_that_raises_stays_in_its_region() -> Iterator[None]:
    """A decorated function that ends by an exception does not leave its region."""

    def run(self: Any, function: Any, arguments: Any, options: Any) -> Any:
        self.__enter__()
        returned = function(*arguments, **options)
        self.__exit__(None, None, None)
        return returned

    with decorating(run):
        yield


@fault("AMP-REGION-037", "AMP-REGION-002", "AMP-REGION-003")
def decorated_method_is_taken_for_a_function() -> Iterator[None]:
    """The decorator opens no region for a call with an instance of a class as its first argument."""

    def run(self: Any, function: Any, arguments: Any, options: Any) -> Any:
        if arguments and inspect.isfunction(getattr(type(arguments[0]), function.__name__, None)):
            return function(*arguments, **options)
        with self:
            return function(*arguments, **options)

    with decorating(run):
        yield


@fault("AMP-REGION-037")
def decorated_callable_object_runs_outside() -> Iterator[None]:
    """The decorator opens a region for functions only, not for partials, classes and callable objects."""

    def run(self: Any, function: Any, arguments: Any, options: Any) -> Any:
        if not inspect.isroutine(function):
            return function(*arguments, **options)
        with self:
            return function(*arguments, **options)

    with decorating(run):
        yield


@fault("AMP-REGION-037", "AMP-REGION-009")
def region_settles_its_dtype_on_entering() -> Iterator[None]:
    """An instance that names no dtype takes the one in force where it is entered."""
    original, enter = REGION.__init__, REGION.__enter__

    @functools.wraps(original)
    def initialise(self: Any, device_type: Any, dtype: Any = None, *rest: Any, **options: Any) -> None:
        original(self, device_type, dtype, *rest, **options)
        self.unnamed = dtype is None

    def entering(self: Any) -> Any:
        if self.unnamed:
            self.fast_dtype = torch.get_autocast_dtype(self.device)
        return enter(self)

    with replaced(REGION, "__init__", initialise), replaced(REGION, "__enter__", entering):
        yield


@fault("AMP-REGION-037")
def second_use_of_an_instance_has_the_cache_on() -> Iterator[None]:
    """An instance that is used again switches the cache on."""
    used = "torch.set_autocast_cache_enabled(self._cache_enabled or self.__dict__.setdefault('used', 0) > 0)"
    with edited(REGION.__enter__, SET_CACHE, f"{used}; self.used += 1"):
        yield


@fault("AMP-REGION-039")
def region_puts_back_the_last_entered_state() -> Iterator[None]:
    """Regions keep what they found on one stack for the thread, not each its own."""
    enter, leave = REGION.__enter__, REGION.__exit__
    local = threading.local()

    def entering(self: Any) -> Any:
        entered = enter(self)
        local.__dict__.setdefault("found", []).append((self.prev, self.prev_fastdtype, self.prev_cache_enabled))
        return entered

    def leaving(self: Any, *error: Any) -> Any:
        self.prev, self.prev_fastdtype, self.prev_cache_enabled = local.found.pop()
        return leave(self, *error)

    with replaced(REGION, "__enter__", entering), replaced(REGION, "__exit__", leaving):
        yield


@fault("AMP-REGION-039")
def closed_generator_stays_in_its_region() -> Iterator[None]:
    """A region that is left by GeneratorExit puts nothing back."""
    skipped = "if exc_type is GeneratorExit: return False"
    outermost = "if torch.autocast_decrement_nesting() == 0:"
    with edited(REGION.__exit__, outermost, f"{skipped}\n    {outermost}"):
        yield


@fault("AMP-REGION-042")
def regions_of_all_threads_share_one_stack() -> Iterator[None]:
    """What regions have to put back lies on one stack for all threads."""
    enter, leave = REGION.__enter__, REGION.__exit__
    found: list[tuple[bool, torch.dtype, bool]] = []

    def entering(self: Any) -> Any:
        entered = enter(self)
        found.append((self.prev, self.prev_fastdtype, self.prev_cache_enabled))
        return entered

    def leaving(self: Any, *error: Any) -> Any:
        self.prev, self.prev_fastdtype, self.prev_cache_enabled = found.pop()
        return leave(self, *error)

    with replaced(REGION, "__enter__", entering), replaced(REGION, "__exit__", leaving):
        yield


@fault("AMP-REGION-042")
def cache_flag_is_one_for_all_threads() -> Iterator[None]:
    """Entering a region sets the cache flag that every thread sees next."""
    flag = [True]
    setter = torch.set_autocast_cache_enabled

    def setting(enabled: bool) -> None:
        flag[0] = enabled
        setter(enabled)

    with (
        replaced(torch, "set_autocast_cache_enabled", setting),
        replaced(torch, "is_autocast_cache_enabled", lambda: flag[0]),
    ):
        yield


@fault("AMP-REGION-037", "AMP-REGION-002")
def decorator_returns_before_it_leaves() -> Iterator[None]:
    """A decorated function leaves its region at its caller's next line."""

    def run(self: Any, function: Any, arguments: Any, options: Any) -> Any:
        self.__enter__()
        frame = sys._getframe(2)
        try:
            return function(*arguments, **options)
        finally:
            if frame.f_code.co_name != "<module>":
                self.__exit__(None, None, None)

    with decorating(run):
        yield


@fault("AMP-REGION-057")
def cache_goes_off_before_the_flag_is_refused() -> Iterator[None]:
    """Entering a region switches the cache off before it sets the flag."""
    flag = "torch.set_autocast_enabled(self.device, self._enabled)"
    with edited(REGION.__enter__, flag, f"torch.set_autocast_cache_enabled(False); {flag}"):
        yield


@fault("AMP-REGION-058")
def warnings_point_into_torch() -> Iterator[None]:
    """The warnings of a region name the line that is one call too near."""
    original = REGION.__init__

    @functools.wraps(original)
    def initialise(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)

    with replaced(REGION, "__init__", initialise):
        yield


@fault("AMP-REGION-050")
def warning_names_no_dtype() -> Iterator[None]:
    """The warning for a dtype that autocast lacks does not say which dtypes there are."""
    warn = autocast_mode.warnings.warn

    def shortened(message: Any, *arguments: Any, **options: Any) -> None:
        warn(str(message).split(" only supports")[0], *arguments, **options)

    with replaced(autocast_mode.warnings, "warn", shortened):
        yield


@fault("AMP-REGION-059")
def decorated_function_can_be_scripted() -> Iterator[None]:
    """The decorator does not mark its functions as unfit for TorchScript."""

    def run(self: Any, function: Any, arguments: Any, options: Any) -> Any:
        with self:
            return function(*arguments, **options)

    with decorating(run):
        yield


@fault("AMP-REGION-044", level="standard")
def worker_never_leaves_its_region() -> Iterator[None]:
    """In a data-loader worker a region puts nothing back."""
    outermost = "if torch.autocast_decrement_nesting() == 0:"
    stay = "if torch.utils.data.get_worker_info() is not None: return False"
    with edited(REGION.__exit__, outermost, f"{stay}\n    {outermost}"):
        yield


@fault("AMP-REGION-044")
def data_loader_switches_the_cache_off() -> Iterator[None]:
    """A data loader without workers switches the cache off when it has made a sample."""
    fetcher = torch.utils.data._utils.fetch._MapDatasetFetcher
    fetch = fetcher.fetch

    def fetching(self: Any, index: Any) -> Any:
        sample = fetch(self, index)
        torch.set_autocast_cache_enabled(False)
        return sample

    with replaced(fetcher, "fetch", fetching):
        yield


def forking() -> Any:
    """Have torch.multiprocessing fork where it is asked to spawn, so that the child is as broken as its parent."""
    context = torch.multiprocessing.get_context
    return replaced(torch.multiprocessing, "get_context", lambda method: context("fork"))


@fault("AMP-REGION-043", level="standard")
def spawned_process_is_a_fork() -> Iterator[None]:
    """A process that is to be spawned is forked, and inherits the region."""
    with forking():
        yield


@fault("AMP-REGION-064", level="standard")
def backend_is_asked_by_its_first_name() -> Iterator[None]:
    """torch.autocast looks for the module of a third party's backend as torch.privateuseone."""
    name = "torch._C._get_privateuse1_backend_name()"
    with forking(), edited(REGION.__init__, name, "'privateuseone'"):
        yield


@fault("AMP-REGION-064", level="standard")
def backend_may_use_any_dtype() -> Iterator[None]:
    """torch.autocast warns of a dtype that a third party's backend lacks, and is enabled all the same."""
    original = REGION.__init__

    @functools.wraps(original)
    def initialise(self: Any, device_type: Any, *arguments: Any, **options: Any) -> None:
        original(self, device_type, *arguments, **options)
        self._enabled = self._enabled or device_type == torch._C._get_privateuse1_backend_name()

    with forking(), replaced(REGION, "__init__", initialise):
        yield


@fault("AMP-REGION-037")
def cuda_region_ends_disabled() -> Iterator[None]:
    """Leaving an enabled CUDA region switches autocast for CUDA off, also inside another one."""
    off = "torch.set_autocast_enabled(self.device, self.prev and not (self.device == 'cuda' and self._enabled))"
    with edited(REGION.__exit__, PUT_ENABLED_BACK, off):
        yield


@fault("AMP-REGION-004")
def recursion_runs_outside_of_the_region() -> Iterator[None]:
    """A decorated function that is called while it runs is taken for one that has its region, and runs without."""
    running: set[int] = set()

    def run(self: Any, function: Any, arguments: Any, options: Any) -> Any:
        if id(self) in running:
            with REGION(self.device, dtype=self.fast_dtype, enabled=False):
                return function(*arguments, **options)
        running.add(id(self))
        try:
            with self:
                return function(*arguments, **options)
        finally:
            running.discard(id(self))

    with decorating(run):
        yield


@fault("AMP-REGION-005")
def decorators_with_equal_arguments_share_an_instance() -> Iterator[None]:
    """Functions that are decorated with equal arguments share one instance, and what it has to put back."""
    shared: dict[Any, Any] = {}

    def run(self: Any, function: Any, arguments: Any, options: Any) -> Any:
        with shared.setdefault((self.device, self.fast_dtype, self._enabled, self._cache_enabled), self):
            return function(*arguments, **options)

    with decorating(run):
        yield


@fault("AMP-REGION-008")
def instance_inside_its_own_region_is_disabled() -> Iterator[None]:
    """An instance that is entered in its own region switches autocast off there."""
    enter, leave = REGION.__enter__, REGION.__exit__
    open_ones: list[int] = []

    def entering(self: Any) -> Any:
        entered = enter(self)
        if id(self) in open_ones:
            torch.set_autocast_enabled(self.device, False)
        open_ones.append(id(self))
        return entered

    def leaving(self: Any, *error: Any) -> Any:
        open_ones.remove(id(self))
        return leave(self, *error)

    with replaced(REGION, "__enter__", entering), replaced(REGION, "__exit__", leaving):
        yield
