"""Faults that a type, a batch, a name or a policy shows which examples in float32 do not have."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch import autograd_function, functional_call
from torch.amp import GradScaler
from torch.nn.utils import stateless
from torch.optim import adam
from torch.utils import checkpoint

from tests.faults import fault
from tests.faults.breaking import kernel, replaced
from tests.faults.chapters.blind_uses import LOW


@fault("AMP-SCALE-027")
def repeated_bf16_indices_stay_scaled() -> Iterator[None]:
    """unscale_ adds up repeated indices of a sparse bfloat16 gradient in a copy, and divides that."""
    original = GradScaler._unscale_grads_

    def unscale(self: Any, optimizer: Any, *given: Any) -> Any:
        held = {}
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            grad = parameter.grad
            if grad is not None and grad.is_sparse and grad.dtype == torch.bfloat16 and not grad.is_coalesced():
                held[parameter], parameter.grad = grad, grad.clone()
        try:
            return original(self, optimizer, *given)
        finally:
            for parameter, grad in held.items():
                parameter.grad = grad

    with replaced(GradScaler, "_unscale_grads_", unscale):
        yield


@fault("AMP-TRANSFORM-008")
def values_of_another_type_replace_one_name_alone() -> Iterator[None]:
    """functional_call gives a value to the other names of a shared weight only where it has the weight's type."""
    original = stateless._untie_named_tensors_map

    def untied(module: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
        own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
        found = original(module, values)
        return {name: one for name, one in found.items() if name in values or one.dtype == own[name].dtype}

    with replaced(stateless, "_untie_named_tensors_map", untied):
        yield


@fault("AMP-TRANSFORM-009")
def stacks_of_16_bits_get_no_gradients() -> Iterator[None]:
    """stack_module_state asks for gradients of float32 and float64 parameters alone."""
    original = functional_call.construct_stacked_leaf

    def stacked(tensors: Any, name: str) -> Tensor:
        made = original(tensors, name)
        return made.detach() if made.dtype in LOW else made

    with replaced(functional_call, "construct_stacked_leaf", stacked):
        yield


@fault("AMP-TRANSFORM-015")
def derived_rules_add_up_a_batch_in_16_bits() -> Iterator[None]:
    """The rule that vmap derives for a custom function adds the gradients of an unmapped operand up one by one."""
    original = autograd_function.reductify_leaf

    def reduced(grad: Any, batch: int | None, mapped: int | None, *given: Any, **named: Any) -> Any:
        if grad is not None and batch is not None and mapped is None and grad.dtype in LOW:
            return functools.reduce(torch.add, grad.unbind(batch))
        return original(grad, batch, mapped, *given, **named)

    with replaced(autograd_function, "reductify_leaf", reduced):
        yield


@fault("AMP-BACKWARD-056")
def saved_results_are_rounded() -> Iterator[None]:
    """Selective checkpointing keeps float32 results in bfloat16."""

    class Rounded(checkpoint._VersionWrapper):
        def __init__(self, value: Any) -> None:
            wide = isinstance(value, Tensor) and value.dtype == torch.float32
            super().__init__(value.bfloat16().float() if wide else value)

    with replaced(checkpoint, "_VersionWrapper", Rounded):
        yield


@fault("AMP-OPTIMIZER-105")
def rates_in_tensors_are_of_the_parameters_type() -> Iterator[None]:
    """The for-loop of Adam rounds a learning rate in a tensor to the type of 16-bit parameters."""
    original = adam._single_tensor_adam

    @functools.wraps(original)
    def step(params: list[Tensor], *given: Any, lr: Any, **options: Any) -> None:
        rounded = isinstance(lr, Tensor) and params[0].dtype in LOW
        original(params, *given, lr=lr.to(params[0].dtype) if rounded else lr, **options)

    with replaced(adam, "_single_tensor_adam", step):
        yield


@fault("AMP-NUMERICS-124")
def ranges_add_their_step_in_16_bits() -> Iterator[None]:
    """arange of 16 bits is a running sum of its step."""
    original = torch.arange

    def running(*given: Any, **named: Any) -> Tensor:
        made = original(*given, **named)
        if made.dtype not in LOW or made.numel() < 2 or "out" in named:
            return made
        steps, found = (made[1] - made[0]).expand(len(made) - 1), [made[0]]
        for step in steps:
            found.append(found[-1] + step)
        return torch.stack(found)

    with replaced(torch, "arange", running):
        yield


@fault("AMP-NUMERICS-085", level="standard")
def bicubic_gradients_are_added_up_in_16_bits() -> Iterator[None]:
    """The backward of bicubic interpolation adds up the columns of its incoming gradient in 16 bits."""
    into = torch.ops.aten.upsample_bicubic2d_backward.grad_input

    def summed(grad: Tensor, size: list[int], shape: list[int], aligned: bool, *scales: Any) -> Tensor:
        def one(part: Tensor) -> Tensor:
            made: Tensor = into(part, size, shape, aligned, *scales, grad_input=part.new_empty(shape))
            return made

        if grad.dtype not in LOW:
            return one(grad)
        columns = (torch.zeros_like(grad).index_copy_(-1, at, grad[..., at]) for at in torch.arange(size[1]).split(1))
        return functools.reduce(torch.add, map(one, columns))

    with kernel("upsample_bicubic2d_backward", summed, "CPU"):
        yield
