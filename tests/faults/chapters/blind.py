"""Faults written from the catalogue alone, without a look at the checks that must catch them."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.utils._pytree import tree_leaves, tree_map

from tests.faults import fault
from tests.faults.breaking import edited, kernel, replaced

CPU, CUDA = "AutocastCPU", "AutocastCUDA"
Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

autocast = torch.amp.autocast
RESTORE_ENABLED = "torch.set_autocast_enabled(self.device, self.prev)"
RESTORE_DTYPE = "torch.set_autocast_dtype(self.device, self.prev_fastdtype)"
OUTERMOST = "if torch.autocast_decrement_nesting() == 0:"
SUPPORTED = "[torch.bfloat16, torch.float16]"


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def one(leaf: Any) -> Any:
        eligible = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype is not torch.float64
        return leaf.to(dtype) if eligible else leaf

    return tree_map(one, tree)


@contextlib.contextmanager
def _policy(op: str, key: str, rule: Rule) -> Iterator[None]:
    """Let `rule(op below autocast, arguments, keywords)` be what autocast does with an op."""
    name, _, overload = op.partition(".")
    call = getattr(getattr(torch.ops.aten, name), overload or "default")

    def run(*arguments: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return rule(call, arguments, options)

    with kernel(op, run, key):
        yield


@contextlib.contextmanager
def _in_regions(owner: Any, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Let a function lose or change its keywords where autocast is on for the CPU."""
    before = getattr(owner, name)

    @functools.wraps(before)
    def changed(*arguments: Any, **options: Any) -> Any:
        return before(*arguments, **(change(options) if torch.is_autocast_enabled("cpu") else options))

    with replaced(owner, name, changed):
        yield


def _without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda options: {name: value for name, value in options.items() if name not in names}


@fault("AMP-REGION-034")
def dtype_is_restored_only_without_exception() -> Iterator[None]:
    """A region left by an exception leaves its dtype behind."""
    with edited(autocast.__exit__, RESTORE_DTYPE, f"exc_type or {RESTORE_DTYPE}"):
        yield


@fault("AMP-REGION-034")
def interrupt_keeps_the_depth() -> Iterator[None]:
    """A KeyboardInterrupt leaves the nesting depth, and with it the state, as inside the region."""
    with edited(
        autocast.__exit__, OUTERMOST, f"if exc_type is KeyboardInterrupt:\n        return False\n    {OUTERMOST}"
    ):
        yield


@fault("AMP-REGION-010")
def nested_enabled_false_is_ignored() -> Iterator[None]:
    """enabled=False has no effect inside an enabled region."""
    own = "torch.set_autocast_enabled(self.device, self._enabled)"
    with edited(autocast.__enter__, own, own.replace("self._enabled", "self._enabled or self.prev")):
        yield


@fault("AMP-REGION-031")
def disabled_region_leaves_its_dtype() -> Iterator[None]:
    """A disabled region does not put the dtype back."""
    with edited(autocast.__exit__, RESTORE_DTYPE, f"self._enabled and {RESTORE_DTYPE}"):
        yield


@fault("AMP-REGION-002")
def decorator_forgets_the_cache_flag() -> Iterator[None]:
    """The decorator opens a region of its own and passes cache_enabled not on."""
    fresh = "autocast(autocast_instance.device, autocast_instance.fast_dtype, autocast_instance._enabled)"
    with edited(autocast_mode.autocast_decorator, "with autocast_instance:", f"with {fresh}:"):
        yield


@fault("AMP-REGION-002")
def decorator_unpacks_a_single_tuple() -> Iterator[None]:
    """A decorated function that returns a tuple of one gives the one."""
    own = "return func(*args, **kwargs)"
    new = "out = func(*args, **kwargs)\n            return out[0] if type(out) is tuple and len(out) == 1 else out"
    with edited(autocast_mode.autocast_decorator, own, new):
        yield


@fault("AMP-REGION-034")
def region_swallows_stop_iteration() -> Iterator[None]:
    """StopIteration does not come out of a region."""
    before = autocast.__exit__

    def leave(self: Any, kind: Any, value: Any, trace: Any) -> bool:
        before(self, kind, value, trace)
        return kind is StopIteration

    with replaced(autocast, "__exit__", leave):
        yield


@fault("AMP-REGION-023")
def default_dtype_is_hard_wired() -> Iterator[None]:
    """dtype=None takes a constant in place of the dtype that is set."""
    new = "(torch.bfloat16 if device_type in ('cpu', 'hpu', 'xla', 'maia') else torch.float16)"
    with edited(autocast.__init__, "torch.get_autocast_dtype(device_type)", new):
        yield


@fault("AMP-REGION-050")
def int8_is_accepted() -> Iterator[None]:
    """A region of int8 opens without a warning."""
    with edited(autocast.__init__, SUPPORTED, "[torch.bfloat16, torch.float16, torch.int8]"):
        yield


@fault("AMP-REGION-050")
def float8_is_accepted() -> Iterator[None]:
    """A region of float8 opens without a warning."""
    with edited(autocast.__init__, SUPPORTED, "[torch.bfloat16, torch.float16, torch.float8_e4m3fn]"):
        yield


@fault("AMP-REGION-006")
def instance_is_dead_after_an_exception() -> Iterator[None]:
    """An instance that was left by an exception opens a disabled region the next time."""
    new = f"{RESTORE_ENABLED}\n    self._enabled = self._enabled and exc_type is None"
    with edited(autocast.__exit__, RESTORE_ENABLED, new):
        yield


@fault("AMP-REGION-031", "AMP-REGION-037")
def previous_dtype_is_kept_on_the_class() -> Iterator[None]:
    """All instances share the place where the dtype to put back is kept."""
    enter, leave = autocast.__enter__, autocast.__exit__
    kept: dict[str, torch.dtype] = {}

    def entered(self: Any) -> Any:
        result = enter(self)
        kept["dtype"] = self.prev_fastdtype
        return result

    def left(self: Any, *error: Any) -> Any:
        self.prev_fastdtype = kept["dtype"]
        return leave(self, *error)

    with replaced(autocast, "__enter__", entered), replaced(autocast, "__exit__", left):
        yield


@fault("AMP-REGION-035")
def cpu_region_enables_cuda() -> Iterator[None]:
    """A CPU region switches CUDA's autocast as well, and puts it back."""
    enter, leave = autocast.__enter__, autocast.__exit__

    def entered(self: Any) -> Any:
        self.cuda_before = torch.is_autocast_enabled("cuda")
        result = enter(self)
        torch.set_autocast_enabled("cuda", self._enabled)
        return result

    def left(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        torch.set_autocast_enabled("cuda", self.cuda_before)
        return result

    with replaced(autocast, "__enter__", entered), replaced(autocast, "__exit__", left):
        yield


@fault("AMP-REGION-040")
def thread_inherits_the_cache_flag() -> Iterator[None]:
    """A new thread begins with the cache flag of the one that started it."""
    start, run = threading.Thread.start, threading.Thread.run

    def started(self: Any) -> None:
        self.cache_flag = torch.is_autocast_cache_enabled()
        start(self)

    def ran(self: Any) -> None:
        torch.set_autocast_cache_enabled(self.cache_flag)
        run(self)

    with replaced(threading.Thread, "start", started), replaced(threading.Thread, "run", ran):
        yield


@contextlib.contextmanager
def _cache_is_dropped_only_if(condition: str) -> Iterator[None]:
    with edited(autocast.__exit__, OUTERMOST, OUTERMOST.replace(":", f" and {condition}:")):
        yield


@fault("AMP-CACHE-003")
def cache_outlives_a_disabled_region() -> Iterator[None]:
    """The cache is not dropped where the outermost region is a disabled one."""
    with _cache_is_dropped_only_if("self._enabled"):
        yield


@fault("AMP-CACHE-003")
def cache_outlives_an_uncached_region() -> Iterator[None]:
    """The cache is not dropped where the outermost region has cache_enabled=False."""
    with _cache_is_dropped_only_if("self._cache_enabled"):
        yield


@fault("AMP-CACHE-003")
def cache_outlives_a_region_of_another_device() -> Iterator[None]:
    """The cache is not dropped where the outermost region is for a device other than the CPU."""
    with _cache_is_dropped_only_if("self.device == 'cpu'"):
        yield


@fault("AMP-CACHE-003")
def cache_outlives_a_region_without_gradients() -> Iterator[None]:
    """The cache is not dropped by a region that is left with gradients off."""
    with _cache_is_dropped_only_if("torch.is_grad_enabled()"):
        yield


def _widest_of_first_two(call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    widest = functools.reduce(torch.promote_types, [tensor.dtype for tensor in arguments[0][:2]])
    return call([tensor.to(widest) for tensor in arguments[0]], *arguments[1:], **options)


@fault("AMP-CAST-006")
def cpu_cat_looks_at_two_tensors() -> Iterator[None]:
    """On the CPU cat takes the widest type of its first two tensors only."""
    with _policy("cat", CPU, _widest_of_first_two):
        yield


@fault("AMP-CAST-015")
def cuda_cat_looks_at_two_tensors() -> Iterator[None]:
    """On CUDA cat takes the widest type of its first two tensors only."""
    with _policy("cat", CUDA, _widest_of_first_two):
        yield


@fault("AMP-CAST-010", "AMP-CAST-009")
def bmm_casts_by_way_of_bf16() -> Iterator[None]:
    """bmm brings its inputs to float16 by way of bfloat16."""
    with _policy("bmm", CPU, lambda call, given, _: call(*_cast(_cast(given, torch.bfloat16), _amp_dtype()))):
        yield


def _amp_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


@fault("AMP-CAST-018")
def cumsum_ignores_its_dtype() -> Iterator[None]:
    """On CUDA cumsum returns float32 whatever dtype is asked for."""
    with _policy("cumsum", CUDA, lambda call, given, _: call(*given[:2], dtype=torch.float32)):
        yield


@fault("AMP-LOSS-007")
def l1_loss_detaches_what_it_casts() -> Iterator[None]:
    """The cast of a 16-bit prediction of l1_loss has no gradient."""

    def rule(call: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        if all(tensor.dtype is torch.float32 for tensor in tensors):
            return call(*given, **options)
        return call(_cast(given[0], torch.float32).detach(), *_cast(given[1:], torch.float32), **options)

    with _policy("l1_loss", CPU, rule):
        yield


@fault("AMP-LOSS-006")
def cross_entropy_loses_ignore_index() -> Iterator[None]:
    """In a region cross_entropy ignores no class but -100."""
    with _in_regions(torch.nn.functional, "cross_entropy", _without("ignore_index")):
        yield


@fault("AMP-LOSS-006")
def cross_entropy_loses_label_smoothing() -> Iterator[None]:
    """In a region cross_entropy does no label smoothing."""
    with _in_regions(torch.nn.functional, "cross_entropy", _without("label_smoothing")):
        yield


@fault("AMP-LOSS-006")
def nll_loss_loses_ignore_index() -> Iterator[None]:
    """In a region nll_loss ignores no class but -100."""
    with _in_regions(torch.nn.functional, "nll_loss", _without("ignore_index")):
        yield


@fault("AMP-LOSS-006")
def smooth_l1_loss_loses_beta() -> Iterator[None]:
    """In a region smooth_l1_loss has the default beta."""
    with _in_regions(torch.nn.functional, "smooth_l1_loss", _without("beta")):
        yield


@fault("AMP-BACKWARD-028")
def custom_bwd_takes_the_default_dtype() -> Iterator[None]:
    """custom_bwd does not bring back the dtype of forward."""
    with edited(autocast_mode.custom_bwd, "dtype=args[0]._dtype", "dtype=None"):
        yield


@fault("AMP-API-020")
def xpu_is_said_to_lack_autocast() -> Iterator[None]:
    """is_autocast_available says no for xpu."""
    before = torch._C._is_autocast_available
    with replaced(torch._C, "_is_autocast_available", lambda name: name != "xpu" and before(name)):
        yield


@fault("AMP-API-021")
def hpu_default_dtype_is_float16() -> Iterator[None]:
    """get_autocast_dtype says float16 for hpu."""
    before = torch.get_autocast_dtype
    with replaced(torch, "get_autocast_dtype", lambda name: torch.float16 if name == "hpu" else before(name)):
        yield


@fault("AMP-API-003", "AMP-API-002")
def xla_getter_reads_cuda() -> Iterator[None]:
    """torch.get_autocast_xla_dtype returns the dtype of cuda."""

    def getter() -> torch.dtype:
        text = "torch.get_autocast_xla_dtype() is deprecated. Please use torch.get_autocast_dtype('xla') instead."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return torch.get_autocast_dtype("cuda")

    with replaced(torch, "get_autocast_xla_dtype", getter):
        yield


@fault("AMP-API-023")
def setting_the_flag_switches_the_cache_on() -> Iterator[None]:
    """set_autocast_enabled puts the cache flag on as well."""
    before = torch.set_autocast_enabled

    def setter(*arguments: Any) -> None:
        before(*arguments)
        torch.set_autocast_cache_enabled(True)

    with replaced(torch, "set_autocast_enabled", setter):
        yield


@fault("AMP-BACKWARD-028")
def custom_fwd_asks_for_any_device() -> Iterator[None]:
    """custom_fwd takes the region of any device type for one of its own."""
    own = "args[0]._fwd_used_autocast = torch.is_autocast_enabled(device_type)"
    new = "args[0]._fwd_used_autocast = any(map(torch.is_autocast_enabled, ('cpu', 'cuda', 'xpu')))"
    with edited(autocast_mode.custom_fwd, own, new):
        yield


@fault("AMP-BACKWARD-030")
def cast_inputs_reaches_other_devices() -> Iterator[None]:
    """cast_inputs casts tensors of any device."""
    with edited(autocast_mode._cast, "value.device.type == device_type", "True"):
        yield


@fault("AMP-CAST-009")
def attention_loses_its_scale() -> Iterator[None]:
    """In a region scaled_dot_product_attention has the default scale."""
    with _in_regions(torch.nn.functional, "scaled_dot_product_attention", _without("scale")):
        yield


@fault("AMP-CAST-044")
def bmm_casts_float64() -> Iterator[None]:
    """bmm brings float64 inputs to 16 bit."""

    def rule(call: Callable[..., Any], given: tuple[Any, ...], _: dict[str, Any]) -> Any:
        return call(*[tensor.to(_amp_dtype()) if tensor.is_floating_point() else tensor for tensor in given])

    with _policy("bmm", CPU, rule):
        yield
