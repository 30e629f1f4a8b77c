"""Autocast's regions, decorators, warnings and errors, written otherwise."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from conformance.self_check.planting import replaced
from tests.variants import Uses, variant
from tests.variants.around import count

_MODULE = importlib.import_module("torch.amp.autocast_mode")
Region: Any = torch.autocast


@variant(
    *("AMP-REGION-002", "AMP-REGION-006", "AMP-REGION-007", "AMP-REGION-033", "AMP-REGION-034"),
    *("AMP-REGION-037", "AMP-REGION-039", "AMP-REGION-042", "AMP-REGION-061", "AMP-CACHE-015"),
)
def regions_by_generators(uses: Uses) -> Iterator[None]:
    """autocast enters and leaves a generator's context manager, of which each instance keeps a stack in each thread.

    torch.autocast: instances serve as context managers or decorators; how they keep the state is not documented.
    """
    local = threading.local()
    enter, leave = Region.__enter__, Region.__exit__

    @contextlib.contextmanager
    def opened(self: Any) -> Iterator[None]:
        device = self.device
        state = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
        torch.autocast_increment_nesting()
        try:
            torch.set_autocast_dtype(device, self.fast_dtype)
            torch.set_autocast_enabled(device, self._enabled)
            torch.set_autocast_cache_enabled(self._cache_enabled)
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            torch.set_autocast_enabled(device, state[0])
            torch.set_autocast_dtype(device, state[1])
            torch.set_autocast_cache_enabled(state[2])

    def stack(self: Any) -> list[Any]:
        return vars(local).setdefault("open", weakref.WeakKeyDictionary()).setdefault(self, [])

    def run_enter(self: Any) -> Any:
        if torch._C._is_torch_function_mode_enabled() or torch.compiler.is_compiling():
            stack(self).append(None)
            return enter(self)
        count(uses, "__enter__")
        region = opened(self)
        region.__enter__()
        stack(self).append(region)
        return self

    def run_leave(self: Any, *error: Any) -> Any:
        region = stack(self).pop()
        if region is None:
            return leave(self, *error)
        region.__exit__(None, None, None)
        return False

    with replaced(Region, "__enter__", run_enter), replaced(Region, "__exit__", run_leave):
        yield


@variant("AMP-API-010", "AMP-REGION-009", "AMP-REGION-020", "AMP-REGION-050", "AMP-REGION-058", "AMP-REGION-116")
def region_takes_further_arguments(uses: Uses) -> Iterator[None]:
    """autocast has a name, given by a keyword, and a repr; warnings are issued one frame further out.

    torch.autocast: a further optional argument changes no call that is documented; no repr is documented.
    """
    stock = Region.__init__

    def run(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        name: str | None = None,
    ) -> None:
        count(uses, "__init__")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stock(self, device_type, dtype, enabled, cache_enabled)
        for one in caught:
            warnings.warn(one.message, one.category, stacklevel=2)
        self._name = name

    def shown(self: Any) -> str:
        return f"autocast({self.device!r}, {self.fast_dtype}, enabled={self._enabled}, name={self._name})"

    with replaced(Region, "__init__", run), replaced(Region, "__repr__", shown):
        yield


@variant("AMP-REGION-002", "AMP-REGION-003", "AMP-REGION-004", "AMP-REGION-005", "AMP-REGION-059")
def decorator_opens_a_new_region(uses: Uses) -> Iterator[None]:
    """A decorated function opens a new region of the same settings at each call.

    torch.autocast: instances serve as decorators; the region of a call need not be that instance.
    """

    def decorated(region: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            count(uses, "call")
            with Region(region.device, region.fast_dtype, region._enabled, region._cache_enabled):
                return function(*args, **kwargs)

        run.__script_unsupported = "@autocast() decorator is not supported in script mode"  # type: ignore[attr-defined]
        return run

    with replaced(_MODULE, "autocast_decorator", decorated):
        yield


@variant("AMP-API-002", "AMP-API-003")
def deprecations_worded_otherwise(uses: Uses) -> Iterator[None]:
    """The deprecated setters and getters of the CPU are Python functions that name their replacement in other words.

    AMP-API-002 promises a DeprecationWarning that names the replacement, not its text.
    """

    def older(name: str, newer: str, *parameters: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            uses[name] += 1
            call = ", ".join(["device_type='cpu'", *(f"{one}=..." for one in parameters)])
            warnings.warn(f"torch.{name} will go. Call torch.{newer}({call}).", DeprecationWarning, stacklevel=2)
            return getattr(torch, newer)("cpu", *args)

        return run

    with (
        replaced(torch, "get_autocast_cpu_dtype", older("get_autocast_cpu_dtype", "get_autocast_dtype")),
        replaced(torch, "set_autocast_cpu_dtype", older("set_autocast_cpu_dtype", "set_autocast_dtype", "dtype")),
        replaced(
            torch, "set_autocast_cpu_enabled", older("set_autocast_cpu_enabled", "set_autocast_enabled", "enabled")
        ),
    ):
        yield


def _worded(uses: Uses, function: Any, words: dict[str, str]) -> Any:
    """The function with errors of the same class in other words: those of `words` whose key the message has."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, ValueError, AssertionError, TypeError) as error:
            for part, text in words.items():
                if part in str(error):
                    uses[text] += 1
                    raise type(error)(text) from None
            raise

    return run


@variant(
    *("AMP-REGION-050", "AMP-REGION-052", "AMP-SCALE-028", "AMP-SCALE-071", "AMP-SCALE-080", "AMP-SCALE-081"),
    *("AMP-SCALE-082", "AMP-SCALE-083", "AMP-SCALE-084", "AMP-SCALE-085", "AMP-SCALE-086", "AMP-SCALE-093"),
    *("AMP-SCALE-097",),
)
def errors_worded_otherwise(uses: Uses) -> Iterator[None]:
    """Errors and warnings of torch.amp have the same class and name the same things in other words.

    The documentation names the class of an error where it names one, and no text.
    """
    scaler = torch.amp.GradScaler
    early = {"_scale is None": "There is no scale: call scaler.scale(loss or outputs) earlier in the iteration."}
    half = {"FP16": "float16 (FP16) gradients cannot be unscaled."}
    words = {
        "unscale_": {
            **early,
            **half,
            "already": "The gradients of this optimizer have been unscaled: unscale_() once, then update().",
            "after step": "unscale_() is too late: step() of this optimizer has run.",
        },
        "step": {**early, **half, "already": "step() ran before; update() must come between two calls of step()."},
        "update": {
            **early,
            "No inf checks": "update() has no inf checks: no step() came before.",
            "new_scale": "new_scale: a float, or a tensor of one element that requires no gradient, is expected.",
        },
        "load_state_dict": {"empty": "An empty state dict, perhaps of a disabled scaler."},
        "__getstate__": {"pickled": "Pickle a GradScaler after update() or before the iteration begins."},
    }
    with contextlib.ExitStack() as stack:
        for name, texts in words.items():
            stack.enter_context(replaced(scaler, name, _worded(uses, getattr(scaler, name), texts)))
        stack.enter_context(replaced(Region, "__init__", _region_worded(uses, Region.__init__)))
        yield


def _region_worded(uses: Uses, stock: Any) -> Any:
    """autocast's constructor with an error and a warning in other words."""

    def run(self: Any, device_type: Any, dtype: Any = None, enabled: Any = True, cache_enabled: Any = None) -> None:
        if not isinstance(device_type, str):
            uses["device_type"] += 1
            raise ValueError(f"{type(device_type).__name__} is no device_type, which is a string such as 'cpu'")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stock(self, device_type, dtype, enabled, cache_enabled)
        for one in caught:
            uses["dtype"] += 1
            text = f"autocast is off: on {device_type} it takes torch.bfloat16 and torch.float16, not {dtype}"
            warnings.warn(text, one.category, stacklevel=2)

    return run


@variant("AMP-BACKWARD-030", "AMP-BACKWARD-031", "AMP-BACKWARD-032", "AMP-TRANSFORM-015")
def custom_functions_by_closures(uses: Uses) -> Iterator[None]:
    """custom_fwd and custom_bwd are closures; tensors in lists and tuples are cast by a recursion of their own.

    torch.amp.custom_fwd: casts incoming floating-point tensors to the target dtype, and runs with autocast disabled.
    """
    stock = _MODULE._cast

    def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        if type(value) in (list, tuple):
            return type(value)([cast(one, device_type, dtype) for one in value])
        return stock(value, device_type, dtype)

    def forward(function: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
        if not isinstance(device_type, str):
            raise ValueError(f"`device_type` has to be a string, not {type(device_type)}")
        if function is None:
            return lambda given: forward(given, device_type=device_type, cast_inputs=cast_inputs)

        @functools.wraps(function)
        def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            count(uses, "forward")
            enabled = torch.is_autocast_enabled(device_type)
            ctx._dtype = torch.get_autocast_dtype(device_type)
            ctx._fwd_used_autocast = enabled and cast_inputs is None
            if cast_inputs is None or not enabled:
                return function(ctx, *args, **kwargs)
            args = tuple(cast(one, device_type, cast_inputs) for one in args)
            kwargs = {name: cast(one, device_type, cast_inputs) for name, one in kwargs.items()}
            with Region(device_type, enabled=False):
                return function(ctx, *args, **kwargs)

        return run

    def backward(function: Any = None, *, device_type: str) -> Any:
        if not isinstance(device_type, str):
            raise ValueError(f"`device_type` has to be a string, not {type(device_type)}")
        if function is None:
            return lambda given: backward(given, device_type=device_type)

        @functools.wraps(function)
        def run(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            count(uses, "backward")
            with Region(device_type, ctx._dtype, ctx._fwd_used_autocast):
                return function(ctx, *args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        for module in (torch.amp, _MODULE):
            stack.enter_context(replaced(module, "custom_fwd", forward))
            stack.enter_context(replaced(module, "custom_bwd", backward))
        yield
