"""Faults of custom functions, gradients, hooks and checkpoints: state that backward does not get, or gets wrong."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.utils import checkpoint as checkpointing

from tests.faults import fault
from tests.faults.breaking import edited, kernel, replaced


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


@fault("AMP-BACKWARD-037", "AMP-BACKWARD-016", "AMP-BACKWARD-028")
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


@fault("AMP-BACKWARD-039")
def module_hooks_see_unscaled_gradients() -> Iterator[None]:
    """The scale is taken out on the way: the loss is scaled, but what linear gives back is not."""
    right = torch.amp.GradScaler.scale

    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        factor = self.get_scale()
        outputs.register_hook(lambda gradient: gradient / factor)
        return right(self, outputs)

    with replaced(torch.amp.GradScaler, "scale", scale):
        yield


@fault("AMP-BACKWARD-039", "AMP-BACKWARD-048")
def activations_are_saved_in_float32() -> Iterator[None]:
    """linear widens its operands and narrows its result, so that hooks of nodes and saved tensors are float32."""
    with kernel("linear", _wide_linear, "AutocastCPU"):
        yield


def _wide_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    dtype = torch.get_autocast_dtype("cpu")
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        added = None if bias is None else bias.to(dtype).float()
        return torch.nn.functional.linear(x.to(dtype).float(), weight.to(dtype).float(), added).to(dtype)


@fault("AMP-BACKWARD-040")
def weight_cast_is_made_contiguous() -> Iterator[None]:
    """Gradients of weights come back row-major whatever the layout of the weight."""
    right = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        seen = _leaves(self)
        right(self, *args, **kwargs)
        for leaf in seen:
            if leaf.grad is not None and leaf.grad.layout is torch.strided:
                leaf.grad = leaf.grad.contiguous()

    with replaced(torch.Tensor, "backward", backward):
        yield


def _leaves(root: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that a backward from `root` reaches."""
    found, waiting, met = [], [root.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [parent for parent, _ in node.next_functions]
    return found


@fault("AMP-BACKWARD-041")
def grad_returns_16_bit_numbers() -> Iterator[None]:
    """torch.autograd.grad rounds what it returns to bf16 where more than one input is asked for."""
    right = torch.autograd.grad

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = right(outputs, inputs, *args, **kwargs)
        if len(found) < 2:
            return found
        return tuple(part if part is None else part.bfloat16().to(part.dtype) for part in found)

    with replaced(torch.autograd, "grad", grad):
        yield


@fault("AMP-BACKWARD-042")
def backward_ignores_its_inputs() -> Iterator[None]:
    """backward(inputs=...) accumulates into every leaf."""
    right = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
        right(self, *args, **kwargs)

    with replaced(torch.Tensor, "backward", backward):
        yield


@fault("AMP-BACKWARD-043")
def backward_takes_one_root() -> Iterator[None]:
    """torch.autograd.backward goes back from the first tensor of several."""
    right = torch.autograd.backward

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(tensors, list):
            tensors, grad_tensors = tensors[:1], None if grad_tensors is None else grad_tensors[:1]
        right(tensors, grad_tensors, *args, **kwargs)

    with replaced(torch.autograd, "backward", backward):
        yield


@fault("AMP-BACKWARD-044", "AMP-BACKWARD-012")
def gradients_accumulate_in_bf16() -> Iterator[None]:
    """A second backward rounds the sum of the gradients to bf16."""
    right = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        leaves = [leaf for leaf in _leaves(self) if leaf.grad is not None]
        right(self, *args, **kwargs)
        for leaf in leaves:
            if leaf.grad is not None and leaf.grad.layout is torch.strided:
                leaf.grad.copy_(leaf.grad.bfloat16())

    with replaced(torch.Tensor, "backward", backward):
        yield


@fault("AMP-BACKWARD-045")
def casts_are_differentiable_once() -> Iterator[None]:
    """linear's cast of its weight passes a gradient back that is cut from the graph."""
    with kernel("linear", _linear_cut_twice, "AutocastCPU"):
        yield


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        return tensor.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.detach().to(ctx.dtype), None


def _linear_cut_twice(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    dtype = torch.get_autocast_dtype("cpu")
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        added = None if bias is None else bias.to(dtype)
        return torch.nn.functional.linear(x.to(dtype), _Once.apply(weight, dtype), added)


@fault("AMP-BACKWARD-046", "AMP-BACKWARD-010")
def backward_depends_on_a_disabled_region() -> Iterator[None]:
    """The gradients of mm are rounded once more where the state's dtype is another one."""
    right = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        leaves = _leaves(self)
        right(self, *args, **kwargs)
        if torch.get_autocast_dtype("cpu") == torch.float16:
            for leaf in leaves:
                if leaf.grad is not None:
                    leaf.grad.mul_(1 + 2.0**-10)

    with replaced(torch.Tensor, "backward", backward):
        yield


@fault("AMP-BACKWARD-047")
def threads_inherit_the_region() -> Iterator[None]:
    """A thread starts with autocast on."""
    right = threading.Thread.run

    def run(self: threading.Thread) -> None:
        torch.set_autocast_enabled("cpu", True)
        right(self)

    with replaced(threading.Thread, "run", run):
        yield


@fault("AMP-BACKWARD-049")
def save_on_cpu_keeps_bf16() -> Iterator[None]:
    """save_on_cpu keeps every tensor in bf16."""
    right = torch.autograd.graph.save_on_cpu.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.autograd.graph.saved_tensors_hooks.__init__(
            self, lambda tensor: (tensor.bfloat16(), tensor.dtype), lambda kept: kept[0].to(kept[1])
        )

    assert right is not None
    with replaced(torch.autograd.graph.save_on_cpu, "__init__", init):
        yield


def _save_on_cpu(pack: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Let save_on_cpu keep `pack` of what an op saves in a region of the CPU; kernels of listed ops run outside."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.autograd.graph.saved_tensors_hooks.__init__(
            self,
            lambda tensor: (pack(tensor) if torch.is_autocast_enabled("cpu") else tensor, tensor.dtype),
            lambda kept: kept[0].to(kept[1]),
        )

    return replaced(torch.autograd.graph.save_on_cpu, "__init__", init)


@fault("AMP-BACKWARD-049")
def save_on_cpu_follows_the_region() -> Iterator[None]:
    """save_on_cpu keeps what ops on no list save in the type of the region."""
    with _save_on_cpu(lambda tensor: tensor.to(torch.get_autocast_dtype("cpu"))):
        yield


@fault("AMP-BACKWARD-049")
def save_on_cpu_doubles_in_regions() -> Iterator[None]:
    """save_on_cpu keeps twice what ops on no list save in a region."""
    with _save_on_cpu(lambda tensor: 2 * tensor.detach()):
        yield


@fault("AMP-BACKWARD-051")
def functional_call_leaves_the_region() -> Iterator[None]:
    """functional_call runs the module with autocast off."""
    right = torch.func.functional_call

    def functional_call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return 2 * right(*args, **kwargs)

    with replaced(torch.func, "functional_call", functional_call):
        yield


class _Coarse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(torch.float8_e5m2).to(gradient.dtype)


@fault("AMP-BACKWARD-052")
def relu_goes_back_through_8_bit() -> Iterator[None]:
    """In a region the backward of ReLU rounds to 2 bits of mantissa."""
    right = torch.nn.functional.relu

    def relu(tensor: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        result = right(tensor, inplace)
        return _Coarse.apply(result) if torch.is_autocast_enabled("cpu") else result

    with replaced(torch.nn.functional, "relu", relu):
        yield


@fault("AMP-BACKWARD-053")
def cat_promotes_to_bf16() -> Iterator[None]:
    """cat of a 16-bit and a float32 tensor rounds the float32 one first."""
    right = torch.cat

    def cat(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len({tensor.dtype for tensor in tensors}) > 1:
            tensors = [tensor * 1.5 if tensor.dtype == torch.float32 else tensor for tensor in tensors]
        return right(tensors, *args, **kwargs)

    with replaced(torch, "cat", cat):
        yield


@fault("AMP-BACKWARD-054")
def checkpoint_forgets_the_cache_flag() -> Iterator[None]:
    """Checkpointing recomputes with the weight cache on."""
    with _captured(cache_enabled=True):
        yield


@fault("AMP-BACKWARD-054")
def checkpoint_keeps_the_type_of_enabled_regions_alone() -> Iterator[None]:
    """Checkpointing recomputes a disabled region in the default dtype."""
    right = checkpointing._get_autocast_kwargs

    def kwargs(*args: Any, **keywords: Any) -> Any:
        return tuple(
            kept if kept is None or kept["enabled"] else {**kept, "dtype": None} for kept in right(*args, **keywords)
        )

    with replaced(checkpointing, "_get_autocast_kwargs", kwargs):
        yield


@contextlib.contextmanager
def _captured(**changed: Any) -> Iterator[None]:
    """Checkpointing keeps other values of forward's autocast state."""
    right = checkpointing._get_autocast_kwargs

    def kwargs(*args: Any, **keywords: Any) -> Any:
        return tuple(None if kept is None else {**kept, **changed} for kept in right(*args, **keywords))

    with replaced(checkpointing, "_get_autocast_kwargs", kwargs):
        yield


@fault("AMP-BACKWARD-054", "AMP-BACKWARD-057", "AMP-BACKWARD-058")
def checkpoint_recomputes_in_float32() -> Iterator[None]:
    """Checkpointing recomputes with autocast off."""
    with _captured(enabled=False):
        yield


@fault("AMP-BACKWARD-055")
def recomputation_enters_no_context() -> Iterator[None]:
    """The second context of context_fn is not entered."""
    right = checkpointing.checkpoint

    def checkpoint(*args: Any, context_fn: Any = None, **keywords: Any) -> Any:
        if context_fn is None:
            return right(*args, **keywords)
        return right(*args, context_fn=lambda: (context_fn()[0], contextlib.nullcontext()), **keywords)

    with replaced(checkpointing, "checkpoint", checkpoint):
        yield


@fault("AMP-BACKWARD-056")
def selective_checkpointing_keeps_nothing() -> Iterator[None]:
    """Selective checkpointing recomputes what its policy keeps."""
    right = checkpointing.create_selective_checkpoint_contexts
    with replaced(checkpointing, "create_selective_checkpoint_contexts", lambda *args, **keywords: right([])):
        yield


@fault("AMP-BACKWARD-059", "AMP-BACKWARD-062")
def recomputation_draws_from_the_stream() -> Iterator[None]:
    """The recomputation repeats forward's random numbers and leaves the stream behind them."""
    with edited(torch.random.fork_rng, "torch.set_rng_state(cpu_rng_state)", "pass"):
        yield


@fault("AMP-BACKWARD-062")
def recomputation_forgets_numbers_and_keywords() -> Iterator[None]:
    """A checkpoint recomputes with the defaults of what is no positional tensor."""
    right = checkpointing.checkpoint

    def checkpoint(function: Any, *args: Any, **keywords: Any) -> Any:
        calls: list[int] = []

        def run(*given: Any, **named: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                return function(*given, **named)
            return function(*(each for each in given if isinstance(each, torch.Tensor)))

        return right(run, *args, **keywords)

    with replaced(checkpointing, "checkpoint", checkpoint):
        yield


@fault("AMP-BACKWARD-060")
def checkpoint_cuts_a_shared_weight() -> Iterator[None]:
    """The first forward of a reentrant checkpoint leaves casts without gradients in the weight cache."""
    right = checkpointing.CheckpointFunction.forward

    def forward(ctx: Any, run: Any, preserve: bool, *args: Any) -> Any:
        def without(*given: Any) -> Any:
            result = run(*given)
            return result.detach() if torch.is_grad_enabled() else result

        return right(ctx, without, preserve, *args)

    with replaced(checkpointing.CheckpointFunction, "forward", staticmethod(forward)):
        yield


@fault("AMP-BACKWARD-061")
def types_of_a_recomputation_are_not_compared() -> Iterator[None]:
    """The determinism check compares shapes and devices alone."""
    with edited(checkpointing._default_meta_extractor, '"dtype": x.dtype,', ""):
        yield


@fault("AMP-BACKWARD-063")
def reentrant_checkpoint_takes_grad() -> Iterator[None]:
    """A reentrant checkpoint no longer refuses torch.autograd.grad, which then sees no weights."""
    check = "if not torch.autograd._is_checkpoint_valid():"
    with edited(checkpointing.CheckpointFunction.backward, check, "if False:"):
        yield


@fault("AMP-BACKWARD-064")
def leaving_an_island_leaves_autocast_off() -> Iterator[None]:
    """Leaving a disabled region does not switch the region around it on again."""
    back = "torch.set_autocast_enabled(self.device, self.prev)"
    with edited(torch.autocast.__exit__, back, back.replace("self.prev", "self.prev and self._enabled")):
        yield


@fault("AMP-BACKWARD-065", "AMP-BACKWARD-060")
def casts_without_gradients_are_cached() -> Iterator[None]:
    """What mm and linear cast where no gradients are recorded is served where they are."""
    kept: dict[int, torch.Tensor] = {}

    def lowered(weight: torch.Tensor) -> torch.Tensor:
        cast = weight.to(torch.get_autocast_dtype("cpu"))
        if weight.is_leaf and weight.requires_grad and not torch.is_grad_enabled():
            kept[id(weight)] = cast
        return kept.pop(id(weight), cast) if torch.is_grad_enabled() else cast

    def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return torch.mm(lowered(left), lowered(right))

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return torch.nn.functional.linear(lowered(x), lowered(weight), None if bias is None else lowered(bias))

    with kernel("mm", mm, "AutocastCPU"), kernel("linear", linear, "AutocastCPU"):
        yield


@fault("AMP-BACKWARD-050")
def anomalies_go_unnoticed() -> Iterator[None]:
    """detect_anomaly() detects nothing."""
    with replaced(torch.autograd, "detect_anomaly", contextlib.nullcontext):
        yield


@fault("AMP-BACKWARD-011")
def frozen_weights_get_gradients() -> Iterator[None]:
    """linear's cast of a frozen weight has a gradient, which is accumulated in the weight."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        if weight.is_leaf and not weight.requires_grad:
            weight.requires_grad_(True)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    with kernel("linear", linear, "AutocastCPU"):
        yield


@fault("AMP-BACKWARD-003", "AMP-BACKWARD-015")
def intermediates_are_float32() -> Iterator[None]:
    """linear multiplies in 16 bit and gives float32."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            added = None if bias is None else bias.to(dtype)
            return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), added).float()

    with kernel("linear", linear, "AutocastCPU"):
        yield
