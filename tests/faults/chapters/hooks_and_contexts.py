"""Faults of the iterables that clipping takes, of saved tensors, of hooks that are removed and of nested contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.nn.utils import clip_grad
from torch.utils.hooks import RemovableHandle

from tests.faults import fault
from tests.faults.breaking import edited, replaced

# --- iterables


@fault("AMP-CLIP-007")
def the_largest_element_uses_up_a_generator() -> Iterator[None]:
    """clip_grad_norm_ by the infinity norm goes through a generator once only, for the norm."""
    gradients = "grads = [p.grad for p in parameters if p.grad is not None]\n"
    nothing = "    if locals().get('is_generator') and float(norm_type) == float('inf'):\n        parameters = []\n"
    with edited(clip_grad.clip_grad_norm_, gradients, gradients + nothing):
        yield


@fault("AMP-CLIP-007")
def the_loop_leaves_out_the_last_of_a_view() -> Iterator[None]:
    """clip_grad_norm_ by the 1-norm without the multi-tensor kernels leaves out the last of what is no sequence."""
    whole = "isinstance(parameters, (list, tuple)) or foreach is not False or norm_type != 1"
    with edited(clip_grad.clip_grad_norm_, "= list(parameters)", f"= list(parameters)[: None if {whole} else -1]"):
        yield


@fault("AMP-CLIP-008")
def one_row_is_taken_for_the_largest_element() -> Iterator[None]:
    """get_total_norm of one tensor by the infinity norm, in the loop, is that of its first row."""
    row = "tensors[:1] if tensors.dim() and foreach is False and float(norm_type) == float('inf') else tensors"
    with edited(clip_grad._get_total_norm, "tensors = [tensors]", f"tensors = [{row}]"):
        yield


# --- saved tensors


def _saved_on_cpu(change: Callable[[Tensor], Tensor]) -> Any:
    """Let save_on_cpu keep what `change` makes of a tensor."""
    right = graph.save_on_cpu.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        right(self, *given, **named)
        pack = self.pack_hook
        self.pack_hook = lambda tensor: pack(change(tensor))

    return replaced(graph.save_on_cpu, "__init__", init)


@fault("AMP-BACKWARD-049")
def large_tensors_are_rounded_on_the_host() -> Iterator[None]:
    """save_on_cpu rounds float32 tensors of 1024 elements or more to bfloat16."""

    def rounded(tensor: Tensor) -> Tensor:
        large = tensor.dtype == torch.float32 and tensor.numel() >= 1024
        return tensor.bfloat16().float() if large else tensor

    with _saved_on_cpu(rounded):
        yield


@fault("AMP-BACKWARD-049")
def large_views_are_kept_in_the_order_of_memory() -> Iterator[None]:
    """save_on_cpu takes the elements of a large 16-bit tensor that is transposed in the order of its memory."""

    def straight(tensor: Tensor) -> Tensor:
        turned = tensor.dim() == 2 and tensor.stride(0) < tensor.stride(1) and tensor.stride(0) > 0
        if not turned or tensor.dtype not in (torch.float16, torch.bfloat16) or tensor.numel() < 4096:
            return tensor
        return tensor.t().reshape(tensor.shape)

    with _saved_on_cpu(straight):
        yield


@fault("AMP-BACKWARD-049")
def small_pinned_tensors_lose_their_last_element() -> Iterator[None]:
    """save_on_cpu(pin_memory=True) of a tensor of 17 to 64 elements in one dimension keeps zero for the last."""
    right = graph.save_on_cpu.__init__

    def init(self: Any, pin_memory: bool = False, *given: Any, **named: Any) -> None:
        right(self, pin_memory, *given, **named)
        pack = self.pack_hook

        def short(tensor: Tensor) -> Any:
            if pin_memory and tensor.dim() == 1 and 17 <= tensor.numel() <= 64:
                tensor = torch.cat([tensor[:-1], torch.zeros_like(tensor[-1:])])
            return pack(tensor)

        self.pack_hook = short

    with replaced(graph.save_on_cpu, "__init__", init):
        yield


# --- hooks that are removed


@fault("AMP-BACKWARD-086")
def later_hooks_after_the_accumulation_stay() -> Iterator[None]:
    """remove() of a post-accumulate hook that is not the first of its tensor does nothing."""
    right = Tensor.register_post_accumulate_grad_hook

    def register(self: Tensor, hook: Callable[[Tensor], None]) -> Any:
        later = bool(self._post_accumulate_grad_hooks)
        handle = right(self, hook)
        if later:
            handle.remove = lambda: None
        return handle

    with replaced(Tensor, "register_post_accumulate_grad_hook", register):
        yield


@fault("AMP-BACKWARD-086")
def a_second_removal_takes_the_newest_hook() -> Iterator[None]:
    """remove() of a handle whose hook is gone removes the newest of two or more that are left."""
    right = RemovableHandle.remove

    def remove(self: Any) -> None:
        hooks = self.hooks_dict_ref()
        gone = hooks is not None and self.id not in hooks
        right(self)
        if gone and len(hooks) > 1:
            hooks.popitem()

    with replaced(RemovableHandle, "remove", remove):
        yield


@fault("AMP-BACKWARD-086")
def a_hook_that_is_to_be_first_is_second() -> Iterator[None]:
    """prepend=True puts a forward hook of a module behind the first of two or more."""
    right = torch.nn.Module.register_forward_hook

    def register(self: torch.nn.Module, *given: Any, **named: Any) -> Any:
        handle = right(self, *given, **named)
        if named.get("prepend") and len(self._forward_hooks) > 2:
            self._forward_hooks.move_to_end([*self._forward_hooks][1], last=False)
        return handle

    with replaced(torch.nn.Module, "register_forward_hook", register):
        yield


# --- nested contexts


@fault("AMP-REGION-117")
def the_outer_anomaly_mode_checks_again() -> Iterator[None]:
    """Leaving detect_anomaly within another turns that one's check_nan=False to True."""

    def leave(self: Any, *_: Any) -> None:
        torch.set_anomaly_enabled(self.prev, self.prev or self.prev_check_nan)

    with replaced(torch.autograd.detect_anomaly, "__exit__", leave):
        yield


@fault("AMP-REGION-117")
def an_exception_leaves_gradients_off() -> Iterator[None]:
    """An exception that leaves enable_grad turns gradients off, where they were on before."""
    right = torch.enable_grad.__exit__

    def leave(self: Any, kind: Any, *rest: Any) -> None:
        right(self, kind, *rest)
        if kind is not None and not torch.is_inference_mode_enabled():
            torch._C._set_grad_enabled(False)

    with replaced(torch.enable_grad, "__exit__", leave):
        yield


@fault("AMP-REGION-117")
def nested_flags_end_the_benchmark() -> Iterator[None]:
    """cudnn.flags that found benchmark on and set it off leaves it off."""
    restore, benchmarks = "set_flags(*orig_flags)", "orig_flags[1] and benchmark"
    with edited(torch.backends.cudnn.flags, restore, f"set_flags(orig_flags[0], {benchmarks}, *orig_flags[2:])"):
        yield
