"""A made-up GPU under the real torch: tensors without data, autocast's own dispatcher, and the clock of a card.

It needs neither CUDA nor a torch built with it. The tensors, and what runs on them, are in `simulated_tensor`; here is
how torch's Python functions reach the card.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # its import looks for calls that a mode would catch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.harness import targets
from conformance.harness.targets import Target
from tests.faults.breaking import kernel
from tests.simulation.card import Card, Simulation, touched_bytes
from tests.simulation.cuda import accelerator, cuda
from tests.simulation.tensors import (
    CONSTANTS,
    CPU,
    CUDA,
    LARGE,
    META,
    STATE,
    SimulatedTensor,
    flat,
    form_of,
    on_the_cpu,
    plain_meta,
    reveal,
    simulated_in,
    takes_tf32,
    tensor_of,
)

_FACTORIES = {"empty", "zeros", "ones", "full", "rand", "randn", "randint", "arange", "empty_strided", "tensor"}
# On no list of autocast, and asking for the device: to choose cuDNN, or to make it the current one.
_UNLISTED = {"batch_norm", "contiguous", "__getitem__", "__setitem__", "float", "half", "bfloat16", "double", "tolist"}


class _Calls(TorchFunctionMode):
    """Sends what is asked for on "cuda:0" to the card, and opens the window in which autocast may ask for devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        # Where a Function in Python records its results, autograd's question for the device comes by this way.
        if name == "__get__" or func is torch.ops.prim.device.default or STATE.now is None:
            return func(*args, **kwargs)
        if name in ("to", "cuda", "cpu") and args and isinstance(args[0], torch.Tensor):
            return _to(func, name, args, kwargs)
        if name == "scaled_dot_product_attention":
            return _attention(*args, **kwargs)
        if name == "dropout" and (args[2] if len(args) > 2 else kwargs["train"]):
            # The fused kernel, which torch takes on CUDA only.
            return _called(torch.native_dropout, (args[0], args[1] if len(args) > 1 else kwargs["p"], True), {})[0]
        if name in ("lstm", "_cudnn_rnn_flatten_weight"):
            return _lstm(*args) if name == "lstm" else None
        if kwargs.get("device") is not None or name in _FACTORIES:
            return _made(func, name, args, kwargs)
        return _called(func, args, kwargs)


class _Factories(TorchDispatchMode):
    """Puts on the card what torch's own code makes there, in backward formulas for instance, of no tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is None or device.type == "cpu" or STATE.meta or any(map(torch.is_tensor, flat(args))):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            elem = func(*args, **{**kwargs, "device": META})
            name = func.overloadpacket.__name__
            return _placed(elem, CUDA, float(args[1]) if name == "full" else CONSTANTS.get(name))


def _called(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call into torch; autograd's accumulators of the leaves are made first, as they too ask for a device."""
    reveal()
    before = STATE.window
    nodes = []
    if torch.is_autocast_enabled("cuda") and getattr(func, "__name__", "") not in _UNLISTED:
        for leaf in simulated_in((args, kwargs)):
            if leaf.requires_grad and leaf.is_leaf:
                nodes.append(_accumulator(leaf))
        STATE.window = True
    try:
        return func(*args, **kwargs)
    finally:
        STATE.window = before
        nodes.clear()


def _accumulator(leaf: SimulatedTensor) -> Any:
    simulation = STATE.now
    before, simulation.paused = simulation.paused, True
    window, STATE.window = STATE.window, False
    try:
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            alias = leaf.view_as(leaf)
        return alias.grad_fn.next_functions[0][0] if alias.grad_fn is not None else None
    finally:
        simulation.paused, STATE.window = before, window


def _made(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """A new tensor: on the card, or on the CPU without data where it is large."""
    device = kwargs.get("device")
    asked = None if device is None else torch.device(device)
    if asked is not None and asked.type not in ("cuda", "cpu"):
        with plain_meta():
            return _called(func, args, kwargs)
    if simulated_in(args):
        return _called(func, args, kwargs)
    if asked is None or asked.type == "cpu":
        return _made_on_the_cpu(func, name, args, kwargs)
    if name == "tensor" or (name == "arange" and kwargs.get("dtype") is None):
        return _adopted(func(*args, **{**kwargs, "device": CPU, "requires_grad": False}), kwargs)
    elem = _without_data(func, args, kwargs)
    value = CONSTANTS.get(name)
    if name == "full":
        value = float(args[1] if len(args) > 1 else kwargs["fill_value"])
    return _placed(elem, CUDA, value, bool(kwargs.get("requires_grad")))


def _made_on_the_cpu(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    if name in _FACTORIES - {"tensor", "arange"}:
        with contextlib.suppress(RuntimeError, TypeError):
            elem = _without_data(func, args, kwargs)
            if elem.numel() > LARGE:
                return _placed(elem, CPU, CONSTANTS.get(name), bool(kwargs.get("requires_grad")))
    return _called(func, args, kwargs)


def _without_data(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    plain = {key: value for key, value in kwargs.items() if key not in ("generator", "requires_grad", "pin_memory")}
    with plain_meta():
        return func(*args, **{**plain, "device": META})


def _placed(elem: torch.Tensor, place: torch.device, value: float | None, requires_grad: bool = False) -> Any:
    simulation: Simulation = STATE.now
    if place.type == "cuda" and not simulation.paused:
        simulation.memory.take(elem.untyped_storage())
        simulation.timeline.launch("fill", "integer", 0.0, touched_bytes([elem]))
    made = SimulatedTensor(elem, place, value)
    return made.requires_grad_() if requires_grad else made


def _adopted(real: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    value = float(real) if real.numel() == 1 else None
    return _placed(tensor_of(form_of(real)), CUDA, value, bool(kwargs.get("requires_grad")))


def _to(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Tensor.to, .cuda and .cpu: between the CPU and the card, and between dtypes."""
    tensor, *rest = args
    device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
    for given in rest if name == "to" else []:
        if isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, str | torch.device | int) and not isinstance(given, bool):
            device = given
        elif isinstance(given, torch.Tensor):
            device, dtype = given.device, given.dtype
    wanted = torch.device({"cuda": CUDA, "cpu": CPU}.get(name) or device or tensor.device)
    if wanted.type == tensor.device.type:
        return _called(torch.Tensor.to, (tensor, dtype or tensor.dtype), kwargs)
    if wanted.type == "cuda":
        if not isinstance(tensor, SimulatedTensor):
            moved = _adopted(tensor.detach(), {})
        else:
            moved = _placed(tensor_of(form_of(tensor.elem)), CUDA, tensor.value)
        moved.requires_grad_(tensor.requires_grad and tensor.is_floating_point() and torch.is_grad_enabled())
        return moved if dtype is None else _called(torch.Tensor.to, (moved, dtype), {})
    if wanted.type == "cpu" and isinstance(tensor, SimulatedTensor):
        STATE.now.timeline.wait()
        return on_the_cpu(tensor, dtype)
    return func(*args, **kwargs)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **rest: Any,
) -> Any:
    """Attention by the kernel that a GPU would choose: flash in 16 bit, memory-efficient in fp32.

    The operation itself would ask CUDA which; whether autocast casts for it is read off the dispatcher.
    """
    dtype = query.dtype
    registered = functools.partial(_registered, "aten::scaled_dot_product_attention")
    if torch.is_autocast_enabled("cuda") and registered("AutocastCUDA"):
        dtype = torch.get_autocast_dtype("cuda")
    query, key, value = (_called(torch.Tensor.to, (tensor, dtype), {}) for tensor in (query, key, value))
    scale = rest.get("scale")
    if dtype in (torch.float16, torch.bfloat16) and attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def _registered(op: str, key: str) -> bool:
    """Whether an operation has a kernel of its own at a dispatch key."""
    has, falls = (
        torch._C._dispatch_has_kernel_for_dispatch_key,
        torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough,
    )
    return has(op, key) and not falls(op, key)


class _Recurrence(torch.autograd.Function):
    """An LSTM as cuDNN runs it: one kernel forward, one for the inputs' gradients, one for the weights'."""

    @staticmethod
    def forward(ctx: Any, sequence: Any, hidden: Any, cell: Any, *weights: Any) -> Any:
        width = weights[1].shape[-1]
        steps, rows = sequence.shape[0], sequence.shape[1]
        result = torch.empty(steps, rows, width, dtype=sequence.dtype, device=sequence.device)
        last = [torch.empty_like(state) for state in (hidden, cell)]
        reserve = torch.empty(steps, rows, 5 * width, dtype=sequence.dtype, device=sequence.device)
        ctx.save_for_backward(sequence, hidden, cell, *weights, result, reserve)
        _recur(sequence, weights, [sequence, *weights, result, reserve])
        return result, *last

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        *operands, result, reserve = ctx.saved_tensors
        sequence, _, _, *weights = operands
        made = [torch.empty_like(operand) for operand in operands]
        for _ in range(2):
            _recur(sequence, weights, [*operands, result, reserve, *made])
        return tuple(made)


def _recur(sequence: Any, weights: Any, touched: list[Any]) -> None:
    simulation: Simulation = STATE.now
    arithmetic = str(sequence.dtype).removeprefix("torch.")
    if arithmetic == "float32" and takes_tf32(simulation, convolution=True):
        arithmetic = "tf32"
    flops = 2.0 * sequence.shape[0] * sequence.shape[1] * sum(weight.numel() for weight in weights if weight.dim() == 2)
    simulation.timeline.launch("_cudnn_rnn", arithmetic, flops, touched_bytes([each.elem for each in touched]))


def _lstm(sequence: Any, states: Any, weights: Any, biases: bool, layers: int, *_: Any) -> Any:
    """nn.LSTM, whose operands autocast casts on every call, its weights too (#42385)."""
    each = 2 + 2 * biases
    if len(weights) != layers * each:
        raise NotImplementedError("an LSTM of one direction, without projections, is simulated")
    operands = [*states, *weights]
    if torch.is_autocast_enabled("cuda") and _registered("aten::_cudnn_rnn", "AutocastCUDA"):
        dtype = torch.get_autocast_dtype("cuda")
        operands = [_called(torch.Tensor.to, (operand, dtype), {}) for operand in operands]
        sequence = _called(torch.Tensor.to, (sequence, dtype), {})
    hidden, cell, *weights = operands
    last = []
    for layer in range(layers):
        states = [state[layer : layer + 1] for state in (hidden, cell)]
        sequence, *ends = _Recurrence.apply(sequence, *states, *weights[layer * each : (layer + 1) * each])
        last.append(ends)
    return sequence, *(torch.cat([ends[which] for ends in last]) for which in (0, 1))


def _never(*_: Any) -> bool:
    """Not a mock, which would keep the tensors that it is called with."""
    return False


def _always(*_: Any) -> bool:
    return True


_OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _patches(simulation: Simulation) -> Iterator[Any]:
    for owner, table in ((torch.cuda, cuda(simulation)), (torch.accelerator, accelerator(simulation))):
        for name, value in table.items():
            yield mock.patch.object(owner, name, value, create=True)
    yield mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", _never)
    # Functions written in Python run as they are, so that each call inside them comes to the mode by itself.
    for path in ("torch.nn.functional", "torch.functional", "torch._tensor", "torch.nn.init", "torch.autograd"):
        module = importlib.import_module(path)
        for name in _OVERRIDE_CHECKS:
            if hasattr(module, name):
                yield mock.patch.object(module, name, _never)
    # Module.to makes parameters anew: those of the CPU cannot take over the keys of another device.
    yield mock.patch.object(torch.__future__, "get_overwrite_module_params_on_conversion", _always)
    optimizers = importlib.import_module("torch.optim.optimizer")
    types = [*optimizers._foreach_supported_types, SimulatedTensor]
    yield mock.patch.object(optimizers, "_foreach_supported_types", types)


# With a kernel of CUDA's own and, for devices without one, a composition, which a torch without CUDA would take.
_FUSED = ("silu_backward", "mish_backward", "_fused_rms_norm")


def _kernels() -> Iterator[Any]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for op in _FUSED:
        name = f"aten::{op}"
        # torch 2.6 has no fused rms_norm.
        if torch._C._dispatch_has_kernel(name) and has(name, "CompositeImplicitAutograd") and not has(name, "CUDA"):
            yield kernel(op, _never, "CUDA")  # it is registered, not called


TARGET = Target("cuda:0", "cuda", 0, is_fake=False)


@contextlib.contextmanager
def simulated(card: Card | Simulation) -> Iterator[Simulation]:
    """Put the card, a new one or one in use, where torch looks for its GPU; the target to run on is `TARGET`."""
    simulation = card if isinstance(card, Simulation) else Simulation(card)
    before = STATE.now, STATE.window
    with contextlib.ExitStack() as stack:
        for patch in _patches(simulation):
            stack.enter_context(patch)
        for registration in _kernels():
            stack.enter_context(registration)
        targets._probe.cache_clear()
        stack.callback(targets._probe.cache_clear)
        stack.enter_context(_Calls())
        stack.enter_context(_Factories())
        STATE.now, STATE.window = simulation, False
        try:
            yield simulation
        finally:
            STATE.now, STATE.window = before
            STATE.hidden = []
