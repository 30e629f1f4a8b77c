"""Weight caches whose rules are wrong in one place, which only whole programs come to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch.amp import autocast_mode

from tests.faults import fault
from tests.faults.breaking import edited, kernel, replaced

REGION = autocast_mode.autocast
OUTERMOST = "if torch.autocast_decrement_nesting() == 0:"
INCREMENT = "torch.autocast_increment_nesting()"


def cacheable(weight: torch.Tensor) -> bool:
    """The rule of torch, which the faults below break."""
    return (
        torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
        and weight.dtype is torch.float32
        and weight.requires_grad
        and weight.is_leaf
        and not weight._is_view()
    )


def key_of(weight: torch.Tensor) -> Hashable:
    """What a cast is found by."""
    return id(weight)


def cast_of(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A cast with its graph, whatever the mode."""
    with torch.enable_grad():
        return weight.to(dtype)


@contextlib.contextmanager
def cached_linear(
    rule: Callable[[torch.Tensor], bool] = cacheable,
    key: Callable[[torch.Tensor], Hashable] = key_of,
    cast: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = cast_of,
    *,
    cleared: bool = True,
) -> Iterator[None]:
    """Give `linear` on the CPU a cache of its own, of which one rule is another."""
    kept: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}
    clear = torch.clear_autocast_cache

    def low(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if weight.dtype in (dtype, torch.float64):
            return weight
        if not rule(weight):
            return weight.to(dtype)
        if key(weight) not in kept:
            kept[key(weight)] = (weight, cast(weight, dtype))
        return kept[key(weight)][1]

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype, cache = torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
        torch.set_autocast_enabled("cpu", False)
        try:
            x = x if x.dtype is torch.float64 else x.to(dtype)
            return torch.ops.aten.linear(x, low(weight, dtype), None if bias is None else bias.to(dtype))
        finally:
            torch.set_autocast_enabled("cpu", True)
            torch.set_autocast_cache_enabled(cache)

    def clear_all() -> None:
        if cleared:
            kept.clear()
        clear()

    with kernel("linear", run, "AutocastCPU"), replaced(torch, "clear_autocast_cache", clear_all):
        yield
    kept.clear()


@fault("AMP-CACHE-050")
def cache_takes_views() -> Iterator[None]:
    """A leaf that is a view is cached."""
    with cached_linear(
        lambda weight: cacheable(weight) or (weight._is_view() and weight.is_leaf and weight.requires_grad)
    ):
        yield


@fault("AMP-CACHE-050")
def cache_is_keyed_by_memory() -> Iterator[None]:
    """Casts are found by the memory of the weight, and views are cached too."""

    def rule(weight: torch.Tensor) -> bool:
        return torch.is_autocast_cache_enabled() and weight.dtype is torch.float32 and weight.requires_grad

    with cached_linear(rule, lambda weight: weight.data_ptr()):
        yield


@fault("AMP-CACHE-050", "AMP-CACHE-010")
def cache_is_keyed_by_shape() -> Iterator[None]:
    """Weights of one shape share a cast."""
    with cached_linear(key=lambda weight: tuple(weight.shape)):
        yield


@fault("AMP-CACHE-050")
def frozen_weight_uses_its_old_cast() -> Iterator[None]:
    """A weight that was frozen after its cast goes on with it."""
    seen: set[int] = set()

    def rule(weight: torch.Tensor) -> bool:
        if cacheable(weight):
            seen.add(id(weight))
            return True
        return id(weight) in seen and weight.dtype is torch.float32 and torch.is_autocast_cache_enabled()

    with cached_linear(rule):
        yield


@fault("AMP-CACHE-050")
def retyped_weight_uses_its_old_cast() -> Iterator[None]:
    """A weight whose data became 16-bit inside a region goes on with the cast of its float32 data."""

    def rule(weight: torch.Tensor) -> bool:
        return (weight.requires_grad and weight.dtype is not torch.float32) or cacheable(weight)

    with cached_linear(rule):
        yield


@fault("AMP-CACHE-050")
def update_inside_a_region_is_seen_only_by_version() -> Iterator[None]:
    """A weight that was changed in place is cast anew inside its region."""
    with cached_linear(key=lambda weight: (id(weight), weight._version)):
        yield


@fault("AMP-CACHE-050")
def only_parameters_are_cached() -> Iterator[None]:
    """A leaf that is no torch.nn.Parameter is cast on every use."""
    with cached_linear(lambda weight: cacheable(weight) and isinstance(weight, torch.nn.Parameter)):
        yield


@fault("AMP-CACHE-050")
def third_weight_is_not_cached() -> Iterator[None]:
    """The cache holds two casts, and no more."""
    known: list[int] = []

    def rule(weight: torch.Tensor) -> bool:
        if not cacheable(weight):
            return False
        known.extend([id(weight)] if id(weight) not in known else [])
        return known.index(id(weight)) < 1

    with cached_linear(rule):
        yield


@fault("AMP-CACHE-050")
def cast_of_an_updated_weight_lacks_its_graph() -> Iterator[None]:
    """A weight that was changed in place gets a cast without a graph."""

    def cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return weight.detach().to(dtype) if weight._version > 0 else cast_of(weight, dtype)

    with cached_linear(cast=cast):
        yield


@fault("AMP-CACHE-050")
def entering_a_region_drops_the_cache() -> Iterator[None]:
    """Entering a nested region clears the cache."""
    with edited(REGION.__enter__, INCREMENT, f"{INCREMENT}; torch.clear_autocast_cache()"):
        yield


@fault("AMP-CACHE-050")
def disabled_outermost_region_keeps_the_cache() -> Iterator[None]:
    """Leaving an outermost region that is disabled does not clear the cache."""
    with edited(REGION.__exit__, OUTERMOST, "if torch.autocast_decrement_nesting() == 0 and self._enabled:"):
        yield


@fault("AMP-CACHE-050")
def uncached_outermost_region_keeps_the_cache() -> Iterator[None]:
    """Leaving an outermost region with the cache off does not clear the cache."""
    with edited(REGION.__exit__, OUTERMOST, "if torch.autocast_decrement_nesting() == 0 and self._cache_enabled:"):
        yield


@fault("AMP-CACHE-050")
def uncached_inner_region_drops_the_cache() -> Iterator[None]:
    """Leaving an inner region with the cache off clears the cache."""
    with edited(REGION.__exit__, OUTERMOST, "if torch.autocast_decrement_nesting() == 0 or not self._cache_enabled:"):
        yield


@fault("AMP-CACHE-050")
def region_of_another_dtype_drops_the_cache() -> Iterator[None]:
    """Leaving an inner region of another dtype clears the cache."""
    other = "self.fast_dtype != self.prev_fastdtype"
    with edited(REGION.__exit__, OUTERMOST, f"if torch.autocast_decrement_nesting() == 0 or {other}:"):
        yield


@fault("AMP-CACHE-050")
def region_of_another_device_drops_the_cache() -> Iterator[None]:
    """Leaving an inner region of another device type than the CPU clears the cache."""
    with edited(REGION.__exit__, OUTERMOST, "if torch.autocast_decrement_nesting() == 0 or self.device != 'cpu':"):
        yield


@fault("AMP-CACHE-050", "AMP-CACHE-004")
def exception_through_two_regions_keeps_the_cache() -> Iterator[None]:
    """The depth is not counted down by an exception in an inner region."""
    counted = "if (0 if exc_type is not None and self.prev else torch.autocast_decrement_nesting()) == 0:"
    with edited(REGION.__exit__, OUTERMOST, counted):
        yield


@fault("AMP-CACHE-051")
def no_grad_is_never_cached() -> Iterator[None]:
    """Uses under no_grad cast each time and find no cast that was kept."""
    with cached_linear(lambda weight: cacheable(weight) and torch.is_grad_enabled()):
        yield


@fault("AMP-CACHE-051")
def no_grad_cast_has_no_graph() -> Iterator[None]:
    """A cast under no_grad is kept as it is made there."""
    with cached_linear(cast=lambda weight, dtype: weight.to(dtype)):
        yield


@fault("AMP-CACHE-051")
def inference_mode_uses_kept_casts() -> Iterator[None]:
    """Inference mode keeps casts like any other mode."""

    def rule(weight: torch.Tensor) -> bool:
        with torch.inference_mode(False):
            return cacheable(weight)

    with cached_linear(rule):
        yield


@fault("AMP-CACHE-051")
def gradients_inside_no_grad_are_lost() -> Iterator[None]:
    """enable_grad inside no_grad has no effect on the cast of a weight."""
    depth: list[None] = []

    def rule(weight: torch.Tensor) -> bool:
        if not torch.is_grad_enabled():
            depth.append(None)
        return cacheable(weight)

    def cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return weight.detach().to(dtype) if depth else cast_of(weight, dtype)

    with cached_linear(rule, cast=cast):
        yield


@fault("AMP-CACHE-050")
def loss_in_float32_keeps_its_casts() -> Iterator[None]:
    """mse_loss keeps the casts of 16-bit weights to float32."""
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def single(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            return tensor
        return kept.setdefault(id(tensor), (tensor, tensor.float()))[1]

    def run(tensor: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
        torch.set_autocast_enabled("cpu", False)
        try:
            return torch.ops.aten.mse_loss(single(tensor), single(target), reduction)
        finally:
            torch.set_autocast_enabled("cpu", True)

    with kernel("mse_loss", run, "AutocastCPU"):
        yield


@fault("AMP-CACHE-015")
def decorated_function_is_counted_twice() -> Iterator[None]:
    """The decorator counts up the nesting depth once more than it counts down."""
    call = REGION.__call__

    def decorate(self: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        inner = call(self, function)

        def decorated(*arguments: Any, **options: Any) -> Any:
            torch.autocast_increment_nesting()
            return inner(*arguments, **options)

        return decorated

    with replaced(REGION, "__call__", decorate):
        yield


@fault("AMP-CACHE-015")
def interrupt_keeps_the_cache() -> Iterator[None]:
    """A region left by what is no Exception does not clear the cache."""
    ordinary = "(exc_type is None or issubclass(exc_type, Exception))"
    with edited(REGION.__exit__, OUTERMOST, f"if torch.autocast_decrement_nesting() == 0 and {ordinary}:"):
        yield


@fault("AMP-CACHE-015")
def side_thread_keeps_the_cache() -> Iterator[None]:
    """A region in a thread other than the main one does not clear the cache."""
    main = "__import__('threading').current_thread() is __import__('threading').main_thread()"
    with edited(REGION.__exit__, OUTERMOST, f"if torch.autocast_decrement_nesting() == 0 and {main}:"):
        yield


@fault("AMP-CACHE-015")
def casts_of_deleted_weights_stay() -> Iterator[None]:
    """Clearing forgets weights that are gone, but not their casts."""
    with cached_linear(cleared=False):
        yield


@fault("AMP-CACHE-052")
def every_thread_has_its_own_cache() -> Iterator[None]:
    """Casts are found only by the thread that made them."""
    with cached_linear(key=lambda weight: (id(weight), threading.get_ident())):
        yield
