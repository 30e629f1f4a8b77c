"""Faults of whole training programs: accumulation, resuming, averaging, schedules, frozen layers, types that mix."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.nn import functional
from torch.optim import swa_utils

from tests.faults import fault
from tests.faults.breaking import edited, kernel, replaced


@contextlib.contextmanager
def _after_backward(change: Callable[[torch.Tensor], None], *, again: bool = False) -> Iterator[None]:
    """Change every leaf that a backward reaches after it; `again`: those alone that had a gradient before."""
    right = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        leaves = [leaf for leaf in _leaves(self) if not again or leaf.grad is not None]
        right(self, *args, **kwargs)
        for leaf in leaves:
            if leaf.grad is not None:
                change(leaf)

    with replaced(torch.Tensor, "backward", backward):
        yield


def _leaves(root: torch.Tensor) -> list[Any]:
    """The leaves that a backward from `root` reaches."""
    found, waiting, met = [], [root.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        found += [node.variable] if hasattr(node, "variable") else []
        waiting += [parent for parent, _ in node.next_functions]
    return found


@fault("AMP-RECIPE-023")
def accumulated_gradients_are_kept_in_bf16() -> Iterator[None]:
    """Gradients add up in bf16: each sum is rounded."""

    def lower(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad.copy_(leaf.grad.bfloat16())

    with _after_backward(lower, again=True):
        yield


@fault("AMP-RECIPE-023")
def last_gradient_takes_the_place_of_the_sum() -> Iterator[None]:
    """A backward drops what was accumulated before."""
    right = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        for leaf in _leaves(self):
            leaf.grad = None
        right(self, *args, **kwargs)

    with replaced(torch.Tensor, "backward", backward):
        yield


@fault("AMP-RECIPE-002", "AMP-RECIPE-044")
def gradients_of_parameters_are_16_bit() -> Iterator[None]:
    """What backward leaves in .grad is rounded to fp16."""

    def lower(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad.copy_((leaf.grad * 2.0**-12).half().float() * 2.0**12)

    with _after_backward(lower):
        yield


@fault("AMP-RECIPE-044", "AMP-RECIPE-002")
def master_weights_are_rounded() -> Iterator[None]:
    """The scaler's step rounds every parameter to bf16."""
    right = torch.amp.GradScaler.step

    def step(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = right(self, optimizer, *args, **kwargs)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.copy_(parameter.bfloat16())
        return result

    with replaced(torch.amp.GradScaler, "step", step):
        yield


@fault("AMP-RECIPE-022")
def step_unscales_what_was_unscaled() -> Iterator[None]:
    """step() divides by the scale again after unscale_."""
    right = torch.amp.GradScaler.unscale_

    def unscale(self: Any, optimizer: torch.optim.Optimizer) -> None:
        right(self, optimizer)
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY

    with replaced(torch.amp.GradScaler, "unscale_", unscale):
        yield


@fault("AMP-RECIPE-024")
def scale_multiplies_by_more_than_it_tells() -> Iterator[None]:
    """scale() multiplies by a thousandth more than get_scale says, so that a penalty is unscaled wrongly."""
    right = torch.amp.GradScaler.scale
    with replaced(torch.amp.GradScaler, "scale", lambda self, outputs: right(self, outputs) * 1.001):
        yield


@fault("AMP-RECIPE-025")
def first_optimizer_decides_for_all() -> Iterator[None]:
    """Whether an optimizer is stepped depends on the gradients of the first one."""
    right = torch.amp.GradScaler._maybe_opt_step

    def maybe(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return right(self, optimizer, next(iter(self._per_optimizer_states.values())), *args, **kwargs)

    with replaced(torch.amp.GradScaler, "_maybe_opt_step", maybe):
        yield


@fault("AMP-RECIPE-026")
def custom_function_needs_no_float32() -> Iterator[None]:
    """cast_inputs casts to the region's type."""
    with edited(
        torch.amp.custom_fwd, "*_cast(args, device_type, cast_inputs)", "*_cast(args, device_type, args[0]._dtype)"
    ):
        yield


@fault("AMP-RECIPE-028")
def evaluation_draws_a_random_number() -> Iterator[None]:
    """Leaving a region without gradients moves the stream of random numbers on."""
    right = torch.autocast.__exit__

    def leave(self: Any, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            torch.rand(1)
        return right(self, *args)

    with replaced(torch.autocast, "__exit__", leave):
        yield


@fault("AMP-RECIPE-029")
def averages_are_kept_in_16_bit() -> Iterator[None]:
    """AveragedModel rounds its averages to bf16."""
    right = swa_utils.AveragedModel.update_parameters

    def update(self: Any, model: torch.nn.Module) -> None:
        right(self, model)
        for parameter in self.module.parameters():
            parameter.detach().copy_(parameter.detach().bfloat16())

    with replaced(swa_utils.AveragedModel, "update_parameters", update):
        yield


@fault("AMP-RECIPE-030")
def frozen_weights_are_cached_as_frozen() -> Iterator[None]:
    """linear's cast of a weight that was frozen once carries no gradient when it is unfrozen."""
    frozen: set[int] = set()

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not weight.requires_grad:
            frozen.add(weight.data_ptr())
        dtype = torch.get_autocast_dtype("cpu")
        lowered = weight.detach().to(dtype) if weight.data_ptr() in frozen else weight.to(dtype)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return functional.linear(x.to(dtype), lowered, None if bias is None else bias.to(dtype))

    with kernel("linear", linear, "AutocastCPU"):
        yield


@fault("AMP-RECIPE-031")
def detach_keeps_the_graph() -> Iterator[None]:
    """detach() of a 16-bit tensor leaves it in the graph."""
    right = torch.Tensor.detach

    def detach(self: torch.Tensor) -> torch.Tensor:
        if self.dtype in (torch.float16, torch.bfloat16) and not self.is_leaf:
            return self.view_as(self)
        return right(self)

    with replaced(torch.Tensor, "detach", detach):
        yield


@fault("AMP-RECIPE-032", "AMP-RECIPE-013")
def second_region_keeps_the_first_type() -> Iterator[None]:
    """A region entered after another keeps the dtype of the first that the process has seen."""
    right = torch.autocast.__enter__
    seen: list[torch.dtype] = []

    def enter(self: Any) -> Any:
        result = right(self)
        seen.append(torch.get_autocast_dtype("cpu"))
        if len(seen) % 2 == 0:
            torch.set_autocast_dtype("cpu", seen[-2])
        return result

    with replaced(torch.autocast, "__enter__", enter):
        yield


@fault("AMP-RECIPE-033")
def scale_is_lowered_a_step_late() -> Iterator[None]:
    """get_scale tells the scale of before the last update."""
    right, before = torch.amp.GradScaler.update, torch.amp.GradScaler.get_scale

    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        self._told = before(self)
        right(self, *args, **kwargs)

    with (
        replaced(torch.amp.GradScaler, "update", update),
        replaced(torch.amp.GradScaler, "get_scale", lambda self: getattr(self, "_told", None) or before(self)),
    ):
        yield


@fault("AMP-RECIPE-034")
def transposed_use_of_a_weight_is_cut() -> Iterator[None]:
    """The cast of mm's second operand carries no gradient."""

    def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return torch.mm(left.to(dtype), right.detach().to(dtype))

    with kernel("mm", mm, "AutocastCPU"):
        yield


@fault("AMP-RECIPE-035")
def disabled_region_casts_float64() -> Iterator[None]:
    """mm casts whatever is floating, in a region with enabled=False inside of another one too."""

    def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return torch.mm(left.to(dtype), right.to(dtype))

    off = "torch.set_autocast_enabled(self.device, self._enabled)"
    on = off.replace("self._enabled", "self._enabled or self.prev")
    with kernel("mm", mm, "AutocastCPU"), edited(torch.autocast.__enter__, off, on):
        yield


@fault("AMP-RECIPE-036")
def zero_grad_multiplies_by_zero() -> Iterator[None]:
    """zero_grad(set_to_none=False) multiplies by zero, so that an inf becomes NaN."""
    right = torch.optim.Optimizer.zero_grad

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if set_to_none:
            right(self)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.0)

    with replaced(torch.optim.Optimizer, "zero_grad", zero_grad):
        yield


@fault("AMP-RECIPE-037")
def check_covers_the_first_group() -> Iterator[None]:
    """The check for inf leaves out every parameter group but the first."""
    with edited(
        torch.amp.GradScaler._unscale_grads_,
        "for group in optimizer.param_groups:",
        "for group in optimizer.param_groups[:1]:",
    ):
        yield


@fault("AMP-RECIPE-038")
def kernels_lose_their_memory_format() -> Iterator[None]:
    """Gradients of kernels come back contiguous."""

    def flatten(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad = leaf.grad.contiguous()

    with _after_backward(flatten):
        yield


@fault("AMP-RECIPE-039", "AMP-RECIPE-040")
def loaded_scale_waits_for_a_new_scaler() -> Iterator[None]:
    """load_state_dict of a scaler that is in use leaves its scale as it is."""
    with edited(torch.amp.GradScaler.load_state_dict, 'self._scale.fill_(state_dict["scale"])', "pass"):
        yield


@fault("AMP-RECIPE-039")
def growth_factor_is_not_loaded() -> Iterator[None]:
    """load_state_dict keeps the growth factor of the constructor."""
    with edited(
        torch.amp.GradScaler.load_state_dict, 'cast(float, state_dict["growth_factor"])', "self._growth_factor"
    ):
        yield


@fault("AMP-RECIPE-041")
def disabled_scaler_loads() -> Iterator[None]:
    """A disabled scaler refuses a state in place of ignoring it."""
    with edited(torch.amp.GradScaler.load_state_dict, "if not self._enabled:", "if False:"):
        yield


@fault("AMP-RECIPE-042", "AMP-RECIPE-016")
def inference_casts_the_model() -> Iterator[None]:
    """A forward without gradients leaves its 16-bit numbers in the weights."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            if not torch.is_grad_enabled():
                weight.copy_(weight.to(dtype))
            return functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    with kernel("linear", linear, "AutocastCPU"):
        yield


@fault("AMP-RECIPE-043")
def second_step_is_taken() -> Iterator[None]:
    """step() can be called again without update()."""
    right = torch.amp.GradScaler.step

    def step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = right(self, optimizer, *args, **kwargs)
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
        return result

    with replaced(torch.amp.GradScaler, "step", step):
        yield


@fault("AMP-RECIPE-027", level="standard")
def workers_lower_what_they_load() -> Iterator[None]:
    """A data loader's worker rounds its batches to bf16."""
    fetcher = torch.utils.data._utils.fetch._MapDatasetFetcher
    right = fetcher.fetch

    def fetch(self: Any, *args: Any) -> Any:
        found = right(self, *args)
        if torch.utils.data.get_worker_info() is None:
            return found
        return [part.bfloat16().float() for part in found]

    with replaced(fetcher, "fetch", fetch):
        yield


@fault("AMP-RECIPE-045")
def linear_is_on_no_list() -> Iterator[None]:
    """linear runs in float32 in a region."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return functional.linear(x.float(), weight, bias)

    with kernel("linear", linear, "AutocastCPU"):
        yield


@fault("AMP-RECIPE-045", "AMP-RECIPE-022")
def unscaling_is_off_by_a_hundredth() -> Iterator[None]:
    """Gradients are unscaled by a factor one percent too large."""
    right = torch.amp.GradScaler._unscale_grads_

    def unscale(self: Any, optimizer: Any, inverse: torch.Tensor, *args: Any) -> Any:
        return right(self, optimizer, inverse * 1.01, *args)

    with replaced(torch.amp.GradScaler, "_unscale_grads_", unscale):
        yield
