"""Faults of what comes as several: optimizers of one scaler, kinds of sharding in a model, types in a state."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.faults import fault
from tests.faults.breaking import edited, given_the_original, replaced


@fault("AMP-DISTRIBUTED-026")
def second_optimizer_of_an_iteration_is_not_synchronized() -> Iterator[None]:
    """ShardedGradScaler exchanges what overflowed for the first optimizer of an iteration only."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    old = 'for found_inf in optimizer_state["found_inf_per_device"].values():'
    new = (
        'for found_inf in [] if any(one is not optimizer_state and one["found_inf_per_device"] '
        'for one in self._per_optimizer_states.values()) else optimizer_state["found_inf_per_device"].values():'
    )
    with edited(ShardedGradScaler.unscale_, old, new):
        yield


@fault("AMP-DISTRIBUTED-013")
def gradients_that_are_not_sharded_count_once_per_rank() -> Iterator[None]:
    """FullyShardedDataParallel adds up over the ranks the norm of the gradients that each of them has whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    old = "total_norm += local_nonsharded_norm**norm_type"
    with edited(FullyShardedDataParallel.clip_grad_norm_, old, "total_norm += 2 * local_nonsharded_norm**norm_type"):
        yield


@fault("AMP-TRANSFORM-009")
def stacked_buffers_are_of_the_parameters_type() -> Iterator[None]:
    """stack_module_state gives floating-point buffers the type of the first parameter."""

    def cast(stack: Any, models: Any) -> Any:
        parameters, buffers = stack(models)
        kind = next((one.dtype for one in parameters.values()), None)
        return parameters, {name: one.to(kind) if one.is_floating_point() else one for name, one in buffers.items()}

    with given_the_original(torch.func, "stack_module_state", cast):
        yield


@fault("AMP-CAST-113")
def ragged_sums_ignore_their_dtype() -> Iterator[None]:
    """The sum of the sequences of a jagged tensor is of the tensor's type, whatever dtype is asked for."""
    from torch.nested._internal.ops import JAGGED_OPS_TABLE as table

    def summed(take: Any, func: Any, *args: Any, **named: Any) -> Any:
        return take(func, *args, **{name: one for name, one in named.items() if name != "dtype"})

    operator = torch.ops.aten.sum.dim_IntList
    with mock.patch.dict(table, {operator: functools.partial(summed, table[operator])}):
        yield


@fault("AMP-BACKWARD-059")
def masks_of_alpha_dropout_are_drawn_again() -> Iterator[None]:
    """alpha_dropout takes its mask from a generator of its own, which no checkpoint restores."""
    own = torch.Generator()

    def dropped(take: Any, input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
        if not training or inplace or input.device.type != "cpu":
            return take(input, p, training, inplace)
        return input * torch.empty(input.shape).bernoulli_(1 - p, generator=own).to(input.dtype)

    with given_the_original(torch.nn.functional, "alpha_dropout", dropped):
        yield


@fault("AMP-BACKWARD-049")
def masks_of_dropout_are_written_after_they_are_saved() -> Iterator[None]:
    """dropout saves its mask for backward before it draws it."""

    def late(take: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or inplace or not input.requires_grad:
            return take(input, p, training, inplace)
        mask = torch.ones_like(input, requires_grad=False)
        output = input * mask
        mask.data.bernoulli_(1 - p).div_(1 - p)
        output.data.mul_(mask)
        return output

    with given_the_original(torch.nn.functional, "dropout", late):
        yield


@fault("AMP-CAST-050", level="standard")
def fake_volumes_are_contiguous() -> Iterator[None]:
    """A fake convolution of a channels-last volume says that its result is contiguous."""
    from torch._subclasses import fake_impls

    table = fake_impls.op_implementations_dict
    operator = torch.ops.aten.convolution.default
    before = table[operator]

    def contiguous(*given: Any, **named: Any) -> Any:
        result = before(*given, **named)
        return result.contiguous() if result.dim() == 5 else result

    with mock.patch.dict(table, {operator: contiguous}):
        yield


@fault("AMP-MEMORY-012")
def reentrant_checkpoints_copy_their_inputs() -> Iterator[None]:
    """A reentrant checkpoint saves copies of its inputs beside those that its caller has."""
    from torch.utils.checkpoint import CheckpointFunction

    before = CheckpointFunction.forward

    def copied(ctx: Any, run: Any, preserve: Any, *args: Any) -> Any:
        output = before(ctx, run, preserve, *args)
        ctx.save_for_backward(*(one.detach().clone().requires_grad_(one.requires_grad) for one in args))
        return output

    with replaced(CheckpointFunction, "forward", staticmethod(copied)):
        yield
