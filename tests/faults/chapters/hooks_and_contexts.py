"""Faults of the iterables that clipping takes, of saved tensors, of hooks that are removed and of nested contexts."""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn.utils import clip_grad

from tests.faults import fault
from tests.faults.breaking import edited

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
