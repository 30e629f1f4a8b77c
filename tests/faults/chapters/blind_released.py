"""Faults that a refactoring between two releases may bring, of captured programs, shards, options and kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import checkpoint as checkpointing

from tests.faults import fault
from tests.faults.breaking import decomposed, edited
from tests.faults.chapters.blind_history import amp, around, low, method, with_gradient_of

aten = torch.ops.aten

# --- captured programs


@fault("AMP-COMPILE-070")
def regions_left_by_a_caught_exception_go_on() -> Iterator[None]:
    """In compiled code a region that is left by an exception which is caught around it goes on to the end."""
    from torch._dynamo.variables import ctx_manager

    def leave(original: Any, self: Any, tx: Any, *given: Any) -> Any:
        if given and not (given[0].is_python_constant() and given[0].as_python_constant() is None):
            self.cleanup_assert()
            return ctx_manager.variables.ConstantVariable.create(None)
        return original(self, tx, *given)

    with method(ctx_manager.AutocastModeVariable, "exit", leave):
        yield


@fault("AMP-COMPILE-004")
def decomposed_expm1_cancels() -> Iterator[None]:
    """inductor decomposes expm1 of 16-bit tensors into exp(x) - 1."""

    def change(before: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: (x.float().exp() - 1).to(x.dtype) if low(x) else before(x)

    with decomposed(aten.expm1.default, change):
        yield


@fault("AMP-COMPILE-004", level="standard")
def decomposed_quotients_are_truncated() -> Iterator[None]:
    """inductor decomposes quotients of 16-bit tensors that are rounded down into such that are rounded to zero."""

    def change(before: Callable[..., Any]) -> Callable[..., Any]:
        def quotient(x: Tensor, y: Any, *, rounding_mode: str | None = None) -> Any:
            if rounding_mode == "floor" and low(x):
                return torch.trunc(x.float() / y).to(x.dtype)
            return before(x, y, rounding_mode=rounding_mode)

        return quotient

    with decomposed(aten.div.Tensor_mode, change), decomposed(aten.div.Scalar_mode, change):
        yield


@fault("AMP-COMPILE-004", level="standard")
def decomposed_reflections_lose_their_border() -> Iterator[None]:
    """inductor leaves what comes from the border out of the gradient of reflection padding in 16 bits."""

    def change(before: Callable[..., Any]) -> Callable[..., Any]:
        def gradient(incoming: Tensor, x: Tensor, padding: list[int]) -> Any:
            if not low(x):
                return before(incoming, x, padding)
            for place, start in enumerate(padding[::2]):
                incoming = incoming.narrow(-1 - place, start, x.shape[-1 - place])
            return incoming.clone()

        return gradient

    both = aten.reflection_pad1d_backward.default, aten.reflection_pad2d_backward.default
    with decomposed(both[0], change), decomposed(both[1], change):
        yield


@fault("AMP-CAST-050")
def fake_convolutions_are_contiguous() -> Iterator[None]:
    """A fake convolution of 16-bit channels-last pictures is contiguous."""
    from torch._subclasses import fake_impls

    op, table = aten.convolution.default, fake_impls.op_implementations_dict
    before = table[op]

    def contiguous(mode: Any, *given: Any, **named: Any) -> Any:
        found = before(mode, *given, **named)
        with mode:
            return found.contiguous() if low(found) else found

    table[op] = contiguous
    try:
        yield
    finally:
        table[op] = before


# --- state, checkpoints and shards


@fault("AMP-BACKWARD-062")
def second_outputs_of_reentrant_checkpoints_pass_nothing_back() -> Iterator[None]:
    """A reentrant checkpoint of several outputs passes zeros back for those of 16 bits but the first."""

    def backward(original: Any, ctx: Any, first: Any, *others: Any) -> Any:
        return original(ctx, first, *(torch.zeros_like(one) if low(one) else one for one in others))

    with method(checkpointing.CheckpointFunction, "backward", backward):
        yield


@fault("AMP-BF16-010")
def swapped_conversions_lose_gradients() -> Iterator[None]:
    """A module that swaps its parameters when it becomes 16-bit has no gradients afterwards."""

    def apply(original: Any, self: Any, *given: Any, **named: Any) -> Any:
        found = original(self, *given, **named)
        if torch.__future__.get_swap_module_params_on_conversion():
            for parameter in self.parameters(recurse=False):
                if low(parameter):
                    parameter.grad = None
        return found

    with method(nn.Module, "_apply", apply):
        yield


@fault("AMP-DISTRIBUTED-009")
def columns_of_shards_are_reduced_as_rows() -> Iterator[None]:
    """fully_shard with Shard(1) gives each rank rows for columns where gradients are reduced in another type."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    old = "fsdp_param.fsdp_placement.dim) == 0:"
    with edited(collectives.foreach_reduce, old, f"{old[:-1]} or reduce_dtype != grad_dtype:"):
        yield


# --- ops and kernels


@fault("AMP-NUMERICS-085")
def expanded_indices_are_read_as_packed() -> Iterator[None]:
    """gather of 16 bits reads an expanded index as if it were packed."""

    def read(original: Any, self: Tensor, dim: int, index: Tensor) -> Tensor:
        strides = [stride for stride, size in zip(index.stride(), index.shape, strict=True) if size > 1]
        if low(self) and 0 in strides:
            count = 1 + sum((size - 1) * stride for size, stride in zip(index.shape, index.stride(), strict=True))
            flat = index.as_strided((count,), (1,)).repeat(-(-index.numel() // count))
            index = flat[: index.numel()].view(index.shape)
        found: Tensor = original(self, dim, index)
        return found

    with method(Tensor, "gather", read):
        yield


@fault("AMP-NUMERICS-122")
def divisors_of_addcdiv_forget_the_factor() -> Iterator[None]:
    """The gradient of a 16-bit addcdiv by its divisor is not multiplied by the factor."""

    def added(original: Any, x: Tensor, y: Tensor, z: Tensor, *, value: float = 1, **named: Any) -> Tensor:
        found: Tensor = original(x, y, z.detach() if low(z) else z, value=value, **named)
        return with_gradient_of(found, found + original(x.detach() * 0, y.detach(), z)) if low(z) else found

    with around(torch, "addcdiv", added):
        yield


@fault("AMP-NUMERICS-130")
def maxima_without_gradients_are_not_dilated() -> Iterator[None]:
    """max_pool1d of 16 bits where no gradient is recorded takes neighbours, whatever the dilation is."""

    def pooled(original: Any, x: Tensor, size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Tensor:
        found: Tensor = original(x, size, stride, padding, dilation, ceil)
        if not low(x) or (torch.is_grad_enabled() and x.requires_grad):
            return found
        near: Tensor = original(x, size, stride, padding, 1, ceil)
        return near[..., : found.shape[-1]].clone()

    with around(torch, "max_pool1d", pooled):
        yield


@fault("AMP-NUMERICS-110")
def masks_repeat_after_65536() -> Iterator[None]:
    """Dropout of more than 65536 16-bit numbers repeats its mask."""

    def dropped(original: Any, x: Tensor, p: float = 0.5, *given: Any, **named: Any) -> Tensor:
        found: Tensor = original(x, p, *given, **named)
        if not low(x) or x.numel() <= 2**16:
            return found
        mask = (found != 0).flatten()[: 2**16]
        return x * mask.repeat(-(-x.numel() // 2**16))[: x.numel()].view(x.shape) / (1 - p)

    with around(F, "dropout", dropped):
        yield


@fault("AMP-TRANSFORM-003")
def mapped_embeddings_learn_their_padding() -> Iterator[None]:
    """Per-sample gradients of an embedding of 16 bits or in a region have a row for padding_idx."""
    from torch._C._functorch import TransformType
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    def embed(original: Any, index: Tensor, weight: Tensor, padding_idx: int | None = None, **named: Any) -> Tensor:
        mapped = any(one.key() == TransformType.Vmap for one in retrieve_all_functorch_interpreters())
        found: Tensor = original(index, weight, None if mapped and amp(weight) else padding_idx, **named)
        return found

    with around(F, "embedding", embed):
        yield
