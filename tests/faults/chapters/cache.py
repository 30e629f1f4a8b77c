"""Weight caches that keep too little, too much, too long, or the wrong thing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import autocast_mode

from tests.faults import fault
from tests.faults.breaking import edited, kernel, replaced

REGION = autocast_mode.autocast
OUTERMOST = "if torch.autocast_decrement_nesting() == 0:"
SET_CACHE = "torch.set_autocast_cache_enabled(self._cache_enabled)"

Cast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def linear_with(cast: Cast) -> Any:
    """Break `linear` on the CPU: its weight is brought to the region's dtype by `cast`."""

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            low = cast(weight, dtype)
            return torch.ops.aten.linear(x.to(dtype), low, None if bias is None else bias.to(dtype))

    return kernel("linear", run, "AutocastCPU")


@fault("AMP-CACHE-001")
def every_region_has_the_cache_off() -> Iterator[None]:
    """Every region has the cache off."""
    with edited(REGION.__enter__, SET_CACHE, "torch.set_autocast_cache_enabled(False)"):
        yield


@fault("AMP-CACHE-005", "AMP-CACHE-040")
def cache_cannot_be_switched_off() -> Iterator[None]:
    """Every region has the cache on."""
    with edited(REGION.__enter__, SET_CACHE, "torch.set_autocast_cache_enabled(True)"):
        yield


@fault("AMP-CACHE-002")
def inner_region_drops_the_cache() -> Iterator[None]:
    """Leaving any region clears the cache."""
    with edited(REGION.__exit__, OUTERMOST, "if torch.autocast_decrement_nesting() >= 0:"):
        yield


@fault("AMP-CACHE-002")
def inner_exception_drops_the_cache() -> Iterator[None]:
    """Leaving any region by an exception clears the cache."""
    with edited(REGION.__exit__, OUTERMOST, "if torch.autocast_decrement_nesting() == 0 or exc_type is not None:"):
        yield


@fault("AMP-CACHE-003", "AMP-CACHE-012")
def cache_outlives_its_region() -> Iterator[None]:
    """Leaving the outermost region does not clear the cache."""
    with edited(REGION.__exit__, OUTERMOST, "if torch.autocast_decrement_nesting() < 0:"):
        yield


@fault("AMP-CACHE-004")
def exception_keeps_the_cache() -> Iterator[None]:
    """A region left by an exception does not clear the cache."""
    with edited(REGION.__exit__, OUTERMOST, "if torch.autocast_decrement_nesting() == 0 and exc_type is None:"):
        yield


@fault("AMP-CACHE-007")
def clearing_does_nothing() -> Iterator[None]:
    """torch.clear_autocast_cache does nothing outside of autocast's own use of it."""
    clear = torch.clear_autocast_cache

    def outside_only() -> None:
        torch.autocast_increment_nesting()
        if torch.autocast_decrement_nesting() == 0:
            clear()

    with replaced(torch, "clear_autocast_cache", outside_only):
        yield


@fault("AMP-CACHE-006")
def frozen_weights_are_cached() -> Iterator[None]:
    """linear keeps the casts of weights that need no gradient, too."""
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if weight.requires_grad:
            return weight.to(dtype)
        if id(weight) not in kept or kept[id(weight)][1].dtype != dtype:
            kept[id(weight)] = (weight, weight.to(dtype))
        return kept[id(weight)][1]

    with linear_with(cast):
        yield


@fault("AMP-CACHE-013")
def cache_is_keyed_by_address() -> Iterator[None]:
    """linear keeps casts by the address of the weight, as long as the region is open."""
    kept: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    clear = torch.clear_autocast_cache

    def cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return kept.setdefault((weight.data_ptr(), dtype), weight.detach().to(dtype))

    def clear_all() -> None:
        kept.clear()
        clear()

    with linear_with(cast), replaced(torch, "clear_autocast_cache", clear_all):
        yield


@fault("AMP-CACHE-010")
def cast_is_rounded_twice() -> Iterator[None]:
    """linear casts its weight through float8."""
    with linear_with(lambda weight, dtype: weight.to(torch.float8_e4m3fn).to(dtype)):
        yield


@fault("AMP-CACHE-011")
def cast_truncates() -> Iterator[None]:
    """A cast from float32 to bfloat16 drops the lower bits instead of rounding."""
    low = torch.ops.aten._to_copy.default

    def truncate(tensor: torch.Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
        if dtype is torch.bfloat16 and tensor.dtype is torch.float32:
            tensor = (tensor.contiguous().view(torch.int32) & -65536).view(torch.float32)
        result = torch.empty_like(tensor, dtype=dtype or tensor.dtype)
        return result.copy_(tensor)

    with kernel(low.name().removeprefix("aten::"), truncate, "CPU"):
        yield


@fault("AMP-CACHE-015")
def casts_are_kept_for_ever() -> Iterator[None]:
    """A cast that linear made stays in memory."""
    kept = []

    def cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        kept.append(weight.to(dtype))
        return kept[-1]

    with linear_with(cast):
        yield


@fault("AMP-CACHE-020")
def second_use_is_cut_from_the_graph() -> Iterator[None]:
    """linear uses a weight's cast with its graph the first time only."""
    used: list[int] = []

    def cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        used.append(id(weight))
        return weight.to(dtype) if used.count(id(weight)) == 1 else weight.detach().to(dtype)

    with linear_with(cast):
        yield


def kept_from(mode_is_on: Callable[[], bool]) -> Cast:
    """A cast that is made under a mode is used again after it."""
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if mode_is_on():
            kept[id(weight)] = (weight, weight.to(dtype))
        known = kept.get(id(weight))
        return known[1] if known and known[1].dtype == dtype else weight.to(dtype)

    return cast


@fault("AMP-CACHE-021")
def no_grad_cast_is_used_again() -> Iterator[None]:
    """linear uses a cast that it made under no_grad when gradients are on, as torch did before 2.11."""
    with linear_with(kept_from(lambda: not torch.is_grad_enabled() and not torch.is_inference_mode_enabled())):
        yield


@fault("AMP-CACHE-022")
def inference_cast_is_used_again() -> Iterator[None]:
    """linear uses a cast that it made in inference mode when gradients are on."""

    def cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        low = again(weight, dtype)
        return low.clone() if low.is_inference() and not torch.is_inference_mode_enabled() else low

    again = kept_from(torch.is_inference_mode_enabled)
    with linear_with(cast):
        yield


@fault("AMP-CACHE-023")
def results_under_no_grad_carry_a_graph() -> Iterator[None]:
    """linear computes with gradients on, whatever mode it is called in."""
    linear = torch.nn.functional.linear

    def with_graph(*arguments: Any) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            return linear(*arguments)
        with torch.enable_grad():
            return linear(*arguments)

    with replaced(torch.nn.functional, "linear", with_graph):
        yield


@fault("AMP-CACHE-031")
def thread_that_ends_a_region_spoils_the_cache() -> Iterator[None]:
    """After a region in another thread, linear here casts through float8."""
    threads: set[int] = set()

    def cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        threads.add(threading.get_ident())
        return weight.to(torch.float8_e4m3fn).to(dtype) if len(threads) > 1 else weight.to(dtype)

    with linear_with(cast):
        yield


@fault("AMP-CACHE-012")
def casts_of_large_frozen_weights_are_kept() -> Iterator[None]:
    """linear keeps the casts of large frozen weights from region to region."""
    kept: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if weight.requires_grad or weight.numel() < 2**13:
            return weight.to(dtype)
        return kept.setdefault((id(weight), dtype), (weight.to(dtype), weight))[0]

    with linear_with(cast):
        yield


@fault("AMP-CACHE-030")
def casts_are_kept_where_the_cache_is_off() -> Iterator[None]:
    """A cast of linear's weight is kept by the weight alone, with the cache off as well."""
    held: dict[tuple[int, int], torch.Tensor] = {}

    def cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        key = id(weight), weight._version
        return held.setdefault(key, weight.to(dtype))

    with linear_with(cast):
        yield


@fault("AMP-CACHE-032")
def threads_share_the_dtype() -> Iterator[None]:
    """linear runs in the dtype of the region that was opened last, in whatever thread."""
    last: list[torch.dtype] = []
    enter = REGION.__enter__

    def entering(self: Any) -> Any:
        last[:] = [self.fast_dtype]
        return enter(self)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return torch.ops.aten.linear(*(one if one is None else one.to(last[0]) for one in (x, weight, bias)))

    with replaced(REGION, "__enter__", entering), kernel("linear", run, "AutocastCPU"):
        yield
