"""Faults of one setting, type, container or route beside those that checks had, written without sight of the checks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils import _pytree as pytree

from tests.faults import fault
from tests.faults.breaking import edited, replaced

ADAM = sys.modules["torch.optim.adam"]
LOW = (torch.float16, torch.bfloat16)


# --- optimizers and clipping


@fault("AMP-OPTIMIZER-035")
def adam_takes_the_betas_of_the_first_group() -> Iterator[None]:
    """Adam steps every parameter group with the betas of the first one."""
    with edited(torch.optim.Adam.step, 'group["betas"]', 'self.param_groups[0]["betas"]'):
        yield


@fault("AMP-OPTIMIZER-035")
def loaded_groups_have_the_decay_of_the_first() -> Iterator[None]:
    """load_state_dict gives every parameter group the weight decay that was saved for the first."""
    load = torch.optim.Optimizer.load_state_dict

    @functools.wraps(load)
    def loaded(self: Any, saved: Any) -> None:
        load(self, saved)
        for group in self.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = self.param_groups[0]["weight_decay"]

    with replaced(torch.optim.Optimizer, "load_state_dict", loaded):
        yield


def _zero_grad(left: Callable[[Any, Any], bool]) -> Callable[..., None]:
    """Return a zero_grad that leaves the gradients of parameters of which `left(first, parameter)` is true."""

    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        parameters = [one for group in self.param_groups for one in group["params"]]
        for one in parameters:
            if one.grad is None or left(parameters[0], one):
                continue
            if set_to_none:
                one.grad = None
            else:
                one.grad.detach_().zero_()

    return zero_grad


@fault("AMP-OPTIMIZER-080")
def zero_grad_clears_one_type() -> Iterator[None]:
    """zero_grad resets the gradients that have the type of the first one."""
    with replaced(torch.optim.Optimizer, "zero_grad", _zero_grad(lambda first, one: one.dtype != first.dtype)):
        yield


@fault("AMP-OPTIMIZER-080")
def zero_grad_leaves_frozen_parameters() -> Iterator[None]:
    """zero_grad leaves the gradient of a parameter that no longer requires one."""
    with replaced(torch.optim.Optimizer, "zero_grad", _zero_grad(lambda first, one: not one.requires_grad)):
        yield


@fault("AMP-OPTIMIZER-105")
def fused_adam_reads_a_tensor_once() -> Iterator[None]:
    """Fused Adam reads a learning rate in a tensor at its first step, and keeps that number."""
    fused = ADAM._fused_adam

    @functools.wraps(fused)
    def stale(*args: Any, lr: Any, **options: Any) -> None:
        if isinstance(lr, Tensor):
            lr = lr.__dict__.setdefault("first", lr.item())
        fused(*args, lr=lr, **options)

    with replaced(ADAM, "_fused_adam", stale):
        yield


@fault("AMP-CLIP-008")
def a_single_number_is_not_clipped_by_value() -> Iterator[None]:
    """clip_grad_value_ does nothing to a parameter of no dimensions that is given by itself."""
    old = "    clip_value = float(clip_value)\n"
    new = "    if len(parameters) == 1 and not next(iter(parameters)).dim():\n        return\n"
    with edited(clip_grad.clip_grad_value_, old, old + new):
        yield


# --- transforms


def _cast(tree: Any, dtype: torch.dtype, kinds: tuple[torch.dtype, ...]) -> Any:
    return pytree.tree_map(lambda one: one.to(dtype) if isinstance(one, Tensor) and one.dtype in kinds else one, tree)


@fault("AMP-TRANSFORM-001")
def tangents_beside_something_else_are_wide() -> Iterator[None]:
    """jvp of a function with something beside its result gives tangents in float32."""
    jvp = torch.func.jvp

    @functools.wraps(jvp)
    def wide(*args: Any, has_aux: bool = False, **options: Any) -> Any:
        found = jvp(*args, has_aux=has_aux, **options)
        return (found[0], _cast(found[1], torch.float32, LOW), found[2]) if has_aux else found

    with replaced(torch.func, "jvp", wide):
        yield


@fault("AMP-TRANSFORM-001")
def batched_gradients_are_rounded() -> Iterator[None]:
    """Gradients of several 16-bit vectors at once are rounded to 16 bits in the end."""
    grad = torch.autograd.grad

    @functools.wraps(grad)
    def rounded(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **options: Any) -> Any:
        found = grad(outputs, inputs, grad_outputs, *args, **options)
        if options.get("is_grads_batched") and isinstance(grad_outputs, Tensor) and grad_outputs.dtype in LOW:
            return tuple(one.to(grad_outputs.dtype).to(one.dtype) for one in found)
        return found

    with replaced(torch.autograd, "grad", rounded):
        yield


@fault("AMP-TRANSFORM-017")
def pulling_enters_the_region_again() -> Iterator[None]:
    """The function that vjp returns runs in the region in which vjp was called."""
    vjp = torch.func.vjp

    @functools.wraps(vjp)
    def entering(*args: Any, **options: Any) -> Any:
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        output, pull, *rest = vjp(*args, **options)

        def again(*cotangents: Any, **given: Any) -> Any:
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                return pull(*cotangents, **given)

        return (output, again, *rest)

    with replaced(torch.func, "vjp", entering):
        yield


@fault("AMP-TRANSFORM-012")
def regions_in_transforms_leave_their_casts() -> Iterator[None]:
    """The weight cache is kept where the outermost region is left inside of a transform."""
    leave, clear = torch.autocast.__exit__, torch.clear_autocast_cache

    def left(self: Any, *error: Any) -> Any:
        inside = torch._C._functorch.peek_interpreter_stack() is not None
        with replaced(torch, "clear_autocast_cache", (lambda: None) if inside else clear):
            return leave(self, *error)

    with replaced(torch.autocast, "__exit__", left):
        yield


# --- distributed training


@fault("AMP-DISTRIBUTED-013")
def norms_of_16_bit_shards_are_added() -> Iterator[None]:
    """The norm of sharded 16-bit gradients is the sum of the norms of the shards."""
    from torch.distributed.tensor._ops import _math_ops

    partial = _math_ops._NormPartial
    before, after = partial._pre_reduce_transform, partial._post_reduce_transform
    with (
        replaced(partial, "_pre_reduce_transform", lambda self, one: one if one.dtype in LOW else before(self, one)),
        replaced(partial, "_post_reduce_transform", lambda self, one: one if one.dtype in LOW else after(self, one)),
    ):
        yield


@fault("AMP-DISTRIBUTED-018", level="standard")
def pipelines_add_up_16_bit_gradients() -> Iterator[None]:
    """A pipeline leaves 16-bit gradients undivided where it is asked for the mean over micro-batches."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    scale = _PipelineStageBase.scale_grads

    def scaled(self: Any, divisor: int) -> None:
        if all(one.dtype not in LOW for one in self.submod.parameters()):
            scale(self, divisor)

    with replaced(_PipelineStageBase, "scale_grads", scaled):
        yield


@fault("AMP-DISTRIBUTED-023")
def parallel_losses_subtract_no_maximum() -> Iterator[None]:
    """loss_parallel takes exponentials of 16-bit logits as they are."""
    from torch.distributed import distributed_c10d
    from torch.distributed.tensor.parallel import loss

    usual = loss._log_softmax

    def log_softmax(x: Tensor, dim: int, half_to_float: bool, mesh: Any, mesh_dim: int) -> Tensor:
        if x.dtype not in LOW:
            return usual(x, dim, half_to_float, mesh, mesh_dim)
        total = x.float().exp().sum(dim, keepdim=True)
        total = loss.funcol.all_reduce(total, distributed_c10d.ReduceOp.SUM.name, (mesh, mesh_dim))
        found = x.float() - total.log()
        return found if half_to_float else found.to(x.dtype)

    with replaced(loss, "_log_softmax", log_softmax):
        yield


@fault("AMP-DISTRIBUTED-029")
def outputs_in_dictionaries_are_not_cast() -> Iterator[None]:
    """fully_shard casts outputs to output_dtype, but for those in a dictionary."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    usual = FSDPState._post_forward

    def forward(self: Any, module: Any, given: Any, output: Any) -> Any:
        found = usual(self, module, given, output)
        return output if isinstance(output, dict) else found

    with replaced(FSDPState, "_post_forward", forward):
        yield


# --- numerics


@fault("AMP-NUMERICS-110")
def dropout_draws_16_bits() -> Iterator[None]:
    """Dropout of a 16-bit tensor compares random numbers that were rounded to its type."""
    dropout = torch.nn.functional.dropout

    def rounded(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if x.dtype not in LOW or not training:
            return dropout(x, p, training, inplace)
        return x * (torch.rand(x.shape, device=x.device).to(x.dtype) < 1 - p) / (1 - p)

    with replaced(torch.nn.functional, "dropout", rounded):
        yield


@fault("AMP-NUMERICS-088")
def rows_without_a_key_attend_to_all() -> Iterator[None]:
    """16-bit attention closes keys by its type's lowest number: a row without a key gets the mean of all values."""
    attention = torch.nn.functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def lowest(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **options: Any) -> Tensor:
        if attn_mask is not None and query.dtype in LOW:
            least = torch.finfo(query.dtype).min
            if attn_mask.dtype is torch.bool:
                attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype).masked_fill(~attn_mask, least)
            attn_mask = attn_mask.clamp_min(least)
        return attention(query, key, value, attn_mask, *args, **options)

    with replaced(torch.nn.functional, "scaled_dot_product_attention", lowest):
        yield


@fault("AMP-CLIP-097")
def norms_of_fp16_lists_square_in_fp16() -> Iterator[None]:
    """The norms of a list of fp16 gradients are roots of sums of squares in fp16."""
    norm = torch._foreach_norm

    def squared(gradients: Any, order: Any = 2, *args: Any, **options: Any) -> Any:
        if order == 2 and all(one.dtype is torch.float16 for one in gradients):
            return [one.square().sum().sqrt() for one in gradients]
        return norm(gradients, order, *args, **options)

    with replaced(torch, "_foreach_norm", squared):
        yield


# --- compiled programs


@fault("AMP-COMPILE-004")
def modules_are_traced_outside_of_the_region() -> Iterator[None]:
    """torch.jit.trace of a module runs its forward with autocast off."""
    trace = torch.jit.trace

    @functools.wraps(trace)
    def outside(function: Any, *args: Any, **options: Any) -> Any:
        enabled = torch.is_autocast_enabled("cpu") and not isinstance(function, torch.nn.Module)
        with torch.autocast("cpu", enabled=enabled, dtype=torch.get_autocast_dtype("cpu")):
            return trace(function, *args, **options)

    with replaced(torch.jit, "trace", outside):
        yield


@fault("AMP-COMPILE-044")
def branches_run_outside_of_the_region() -> Iterator[None]:
    """torch.cond runs its branches with autocast off."""
    cond = torch.cond

    @functools.wraps(cond)
    def outside(condition: Any, true: Any, false: Any, operands: Any = ()) -> Any:
        def off(branch: Any) -> Any:
            def run(*given: Any) -> Any:
                with torch.autocast("cpu", enabled=False):
                    return branch(*given)

            return run

        return cond(condition, off(true), off(false), operands)

    with replaced(torch, "cond", outside):
        yield
