"""A made-up GPU under the real torch: tensors without data, autocast's own dispatcher, and the clock of a card.

Every tensor of the device is a meta tensor in a wrapper that carries the dispatch keys of CUDA, so that autocast's and
autograd's own kernels run; below them nothing is computed, but the card's clock and memory advance. It needs neither
CUDA nor a torch built with it.

Autocast asks a tensor in C++ whether it is on CUDA, and autograd, when it records one, on which stream it was made,
which a machine without CUDA cannot answer. So a tensor says "cuda" while autocast may ask, and "meta" when autograd
does: see `SimulatedTensor.hidden`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # its import looks for calls that a mode would catch
import torch._meta_registrations
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from conformance.harness import targets
from conformance.harness.targets import Target
from tests.faults._tools import kernel
from tests.simulated_card import Card, Simulation, touched_bytes
from tests.simulated_cuda import accelerator, cuda

CUDA, META, CPU = torch.device("cuda:0"), torch.device("meta"), torch.device("cpu")
LARGE = 1 << 16  # tensors of the CPU with more elements have no data either
WORKSPACE = 32 << 20  # cuBLAS: bytes taken once, with the first product (torch's notes on CUBLAS_WORKSPACE_CONFIG)

_FACTORIES = {"empty", "zeros", "ones", "full", "rand", "randn", "randint", "arange", "empty_strided", "tensor"}
_CONSTANTS = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "zero_": 0.0, "ones": 1.0, "ones_like": 1.0}
_RESHAPES = {"t", "view", "_unsafe_view", "expand", "reshape", "detach", "alias", "clone", "_to_copy", "unsqueeze"}
# On no list of autocast, and asking for the device: to choose cuDNN, or to make it the current one.
_UNLISTED = {"batch_norm", "contiguous", "__getitem__", "__setitem__", "float", "half", "bfloat16", "double", "tolist"}


_STATE: SimpleNamespace = SimpleNamespace(now=None, window=False, meta=False, hidden=[])


class SimulatedTensor(torch.Tensor):
    """A tensor without data; `value` is the one number that all its elements are, where that is known."""

    elem: torch.Tensor
    place: torch.device
    hidden: str
    value: float | None

    @staticmethod
    def __new__(cls, elem: torch.Tensor, place: torch.device = CUDA, value: float | None = None) -> SimulatedTensor:
        made = torch.Tensor._make_subclass(cls, elem, False, dispatch_device=True, device_for_backend_keys=CUDA)
        made.elem, made.place, made.hidden, made.value = elem, place, "", value
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    device = property(lambda self: self.place)
    is_cuda = property(lambda self: self.place.type == "cuda")
    is_cpu = property(lambda self: self.place.type == "cpu")
    is_meta = property(lambda self: False)

    def is_hidden(self) -> bool:
        """Whether autograd is what asks now: it records a result before it marks it as one that requires a gradient."""
        return self.hidden == "changed" or (self.hidden == "made" and not self.requires_grad)

    def untyped_storage(self) -> Any:
        return SimulatedStorage(super().untyped_storage(), self.place)

    def data_ptr(self) -> int:
        return int(super().untyped_storage()._cdata) + self.storage_offset() * self.element_size()

    def __repr__(self, **_: Any) -> str:
        return f"simulated({tuple(self.shape)}, {self.dtype}, {self.place})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return CUDA if _STATE.window and not args[0].is_hidden() else META
        with torch._C.DisableTorchFunction():
            return _run(func, args, kwargs or {})


class SimulatedStorage:
    """A storage without data, whose address is its identity."""

    def __init__(self, storage: torch.UntypedStorage, place: torch.device) -> None:
        self._storage = storage
        self.device = place

    def data_ptr(self) -> int:
        return int(self._storage._cdata)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def _flat(given: Any) -> list[Any]:
    """The leaves of lists and dictionaries in each other."""
    if isinstance(given, tuple | list):
        return [leaf for each in given for leaf in _flat(each)]
    return [leaf for each in given.values() for leaf in _flat(each)] if isinstance(given, dict) else [given]


def _mapped(function: Callable[[Any], Any], given: Any) -> Any:
    """The same lists and dictionaries with `function` of each leaf."""
    if isinstance(given, tuple | list):
        return type(given)([_mapped(function, each) for each in given])
    if isinstance(given, dict):
        return {name: _mapped(function, each) for name, each in given.items()}
    return function(given)


def _ours(given: Any) -> list[SimulatedTensor]:
    return [leaf for leaf in _flat(given) if isinstance(leaf, SimulatedTensor)]


def _reveal() -> None:
    for reference in _STATE.hidden:
        if (tensor := reference()) is not None:
            tensor.hidden = ""
    _STATE.hidden = []


def _hide(tensor: SimulatedTensor, how: str) -> None:
    """Answer "meta" for this tensor, which was `made` or `changed`, until the next operation: autograd may ask."""
    tensor.hidden = how
    _STATE.hidden.append(weakref.ref(tensor))


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation below autocast and autograd: shapes by the meta kernel, time and memory by the card."""
    simulation: Simulation = _STATE.now
    _reveal()
    name = func.overloadpacket.__name__
    if name == "_local_scalar_dense":
        simulation.timeline.wait()
        return _number(args[0])
    if name == "_fused_sdp_choice":
        return int(SDPBackend.EFFICIENT_ATTENTION if args[0].dtype is torch.float32 else SDPBackend.FLASH_ATTENTION)
    target = kwargs.get("device")
    if name == "_to_copy" and target is not None and torch.device(target).type == "cpu":
        simulation.timeline.wait()
        return _on_the_cpu(args[0], kwargs.get("dtype"))
    ours = _ours((args, kwargs))
    if name == "copy_" and not isinstance(args[0], SimulatedTensor):
        simulation.timeline.wait()
        return args[0]
    known = _known(func, name, args, kwargs)
    mutated = _mutated(func, args, kwargs)
    place = CUDA if any(tensor.place.type == "cuda" for tensor in ours) else CPU
    if mutated and _only_returns(func):
        outputs = mutated
        result: Any = mutated[0] if len(func._schema.returns) == 1 else None
        for tensor in mutated:
            if not name.startswith("_amp_"):  # no gradient is infinite here, so a scaler's numbers stay as they are
                tensor.value = known
            _hide(tensor, "changed")
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            for gradient in args[0]:
                gradient.value = None if None in (gradient.value, args[2].value) else gradient.value * args[2].value
    else:
        result = _wrapped(func, args, kwargs, place, known, simulation)
        outputs = _ours(result)
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in ours):
            how = "changed" if _is_view(result, args, kwargs) else "made"  # a view requires what its base does at once
            for tensor in outputs:
                _hide(tensor, how)
    if place.type == "cuda" and not simulation.paused:
        _account(simulation, func, name, args, kwargs, ours, outputs, result)
    return result


def _wrapped(func: Any, args: Any, kwargs: dict[str, Any], place: torch.device, known: Any, simulation: Any) -> Any:
    """What the operation returns, on the card or beside it; its form is remembered, as meta kernels are slow."""
    key = repr((func, _mapped(_form, (args, kwargs))))
    form = _FORMS.get(key)
    if form is None:
        inner_args, inner_kwargs = _mapped(_inner, (args, kwargs))
        if inner_kwargs.get("device") is not None:
            inner_kwargs["device"] = META
        inner_kwargs.pop("generator", None)
        made = func(*inner_args, **inner_kwargs)
        if not _is_view(made, args, kwargs):
            _FORMS[key] = _mapped(_form, made)
    else:
        made = _mapped(_formed, form)

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if place.type == "cuda" and not simulation.paused:
            simulation.memory.take(leaf.untyped_storage())
        return SimulatedTensor(leaf, place, known)

    return _mapped(wrap, made)


@dataclass(frozen=True)
class _Form:
    """All that an operation without data can know of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


_FORMS: dict[str, Any] = {}


def _form(leaf: Any) -> Any:
    return _Form(tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _formed(leaf: Any) -> Any:
    if not isinstance(leaf, _Form):
        return leaf
    with torch._C.DisableTorchFunction(), _plain_meta():
        return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=META)


@contextlib.contextmanager
def _plain_meta() -> Iterator[None]:
    """What is made on "meta" meanwhile is a meta tensor, and nothing of the card."""
    before, _STATE.meta = _STATE.meta, True
    try:
        yield
    finally:
        _STATE.meta = before


def _is_view(made: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    before = {tensor.elem.untyped_storage()._cdata for tensor in _ours((args, kwargs))}
    after = [getattr(leaf, "elem", leaf).untyped_storage()._cdata for leaf in _flat(made) if torch.is_tensor(leaf)]
    return len(set(after)) < len(after) or bool(before & set(after))


def _inner(leaf: Any) -> Any:
    if isinstance(leaf, SimulatedTensor):
        return leaf.elem
    return leaf.detach().to(META) if isinstance(leaf, torch.Tensor) else leaf


def _mutated(func: Any, args: Any, kwargs: dict[str, Any]) -> list[SimulatedTensor]:
    """The tensors that the operation writes to, in the order of its schema."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += _ours(given)
    return found


def _only_returns(func: Any) -> bool:
    """Whether all that an operation returns are its own arguments; one that changes shapes has to be run."""
    if func.overloadpacket.__name__ in ("resize_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"):
        raise NotImplementedError(f"{func} is not simulated")
    return all(result.alias_info is not None for result in func._schema.returns)


def _account(
    simulation: Simulation,
    func: Any,
    name: str,
    args: Any,
    kwargs: Any,
    ours: list[Any],
    outputs: list[Any],
    result: Any,
) -> None:
    """The time that one operation takes; a view takes none on the device."""
    before = {tensor.elem.untyped_storage()._cdata for tensor in ours}
    mutates = any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments
    )
    if not mutates and all(tensor.elem.untyped_storage()._cdata in before for tensor in outputs):
        simulation.timeline.spend(simulation.card.launch / 5)
        return
    count = flop_registry.get(func.overloadpacket)
    flops = float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
    first = next((tensor for tensor in ours if tensor.is_floating_point()), None)
    arithmetic = str(first.dtype).removeprefix("torch.") if first is not None else "integer"
    if flops and arithmetic == "float32" and _tf32(simulation, "convolution" in name):
        arithmetic = "tf32"
    if flops and simulation.workspace is None:
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=META)
        simulation.memory.take(workspace.untyped_storage())
        simulation.workspace = workspace
    touched = touched_bytes([tensor.elem for tensor in (*ours, *outputs)])
    if func.namespace == "aten":
        simulation.timeline.launch(name, arithmetic, flops, touched)


def _tf32(simulation: Simulation, convolution: bool) -> bool:
    if simulation.card.tf32 is None:
        return False
    flags = torch.backends.cudnn if convolution else torch.backends.cuda.matmul
    return simulation.tf32_is_stuck or bool(flags.allow_tf32)


# What is known of the elements.


def _number(tensor: SimulatedTensor) -> Any:
    value = 1.0 if tensor.value is None else tensor.value
    if tensor.dtype is torch.bool:
        return bool(value)
    return value if tensor.is_floating_point() else int(value)


def _on_the_cpu(tensor: SimulatedTensor, dtype: torch.dtype | None) -> torch.Tensor:
    dtype = dtype or tensor.dtype
    if tensor.numel() > LARGE:
        return SimulatedTensor(torch.empty(tensor.shape, dtype=dtype, device=META), CPU, tensor.value)
    return torch.full(tensor.shape, 0.0 if tensor.value is None else tensor.value, dtype=dtype)


def _known(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> float | None:
    """The one value that all elements of the result have, where the operands tell it."""
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    if name in ("full", "full_like", "fill_", "new_full"):
        given = args[2] if name == "new_full" else args[1]
        return None if isinstance(given, torch.Tensor) else float(given)
    if name == "copy_":
        return _value(args[1])
    operands = [leaf for leaf in _flat(args) if isinstance(leaf, torch.Tensor)]
    values = [_value(operand) for operand in operands]
    if not values or any(value is None for value in values) or name.startswith("_foreach"):
        return None
    if name in _RESHAPES:
        return values[0]
    if name in ("all", "any", "mean", "amax", "amin", "max", "min"):
        return values[0]
    if name == "sum":
        return values[0] * operands[0].numel()
    if name in ("mm", "bmm"):
        return _product(values[0] or 0.0, values[1] or 0.0, operands[0].shape[-1], operands[0].dtype)
    if name == "convolution" and args[2] is None and not any(args[4]):
        return _product(
            values[0] or 0.0, values[1] or 0.0, operands[1].numel() // operands[1].shape[0], operands[0].dtype, True
        )
    if name == "convolution" and not any(args[4]):  # without padding every window is whole
        window = operands[1].numel() // operands[1].shape[0]
        return _product(values[0] or 0.0, values[1] or 0.0, window, operands[0].dtype, convolution=True)
    if torch.Tag.pointwise in func.tags and not func._schema.is_mutable:
        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
            small = iter(values)
            point = _mapped(
                lambda leaf: torch.tensor(next(small), dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf,
                args,
            )
            return float(func(*point, **kwargs))
    return None


def _value(tensor: torch.Tensor) -> float | None:
    if isinstance(tensor, SimulatedTensor):
        return tensor.value
    return float(tensor) if tensor.numel() == 1 and not tensor.is_meta else None


def _product(left: float, right: float, length: int, dtype: torch.dtype, convolution: bool = False) -> float:
    """A sum of equal products, of operands that TF32 rounds to 10 bits of fraction where it is in effect."""
    if dtype is torch.float32 and _tf32(_STATE.now, convolution):
        left, right = (float(torch.tensor(side * (1 + 2.0**-30)).mul(2**10).round() / 2**10) for side in (left, right))
    return left * right * length


# How torch's Python functions reach the card.


class _Calls(TorchFunctionMode):
    """Sends what is asked for on "cuda:0" to the card, and opens the window in which autocast may ask for devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        # Where a Function in Python records its results, autograd's question for the device comes by this way.
        if name == "__get__" or func is torch.ops.prim.device.default or _STATE.now is None:
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
        if device is None or device.type == "cpu" or _STATE.meta or any(map(torch.is_tensor, _flat(args))):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            elem = func(*args, **{**kwargs, "device": META})
            name = func.overloadpacket.__name__
            return _placed(elem, CUDA, float(args[1]) if name == "full" else _CONSTANTS.get(name))


def _called(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call into torch; autograd's accumulators of the leaves are made first, as they too ask for a device."""
    _reveal()
    before = _STATE.window
    nodes = []
    if torch.is_autocast_enabled("cuda") and getattr(func, "__name__", "") not in _UNLISTED:
        for leaf in _ours((args, kwargs)):
            if leaf.requires_grad and leaf.is_leaf:
                nodes.append(_accumulator(leaf))
        _STATE.window = True
    try:
        return func(*args, **kwargs)
    finally:
        _STATE.window = before
        nodes.clear()


def _accumulator(leaf: SimulatedTensor) -> Any:
    simulation = _STATE.now
    before, simulation.paused = simulation.paused, True
    window, _STATE.window = _STATE.window, False
    try:
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            alias = leaf.view_as(leaf)
        return alias.grad_fn.next_functions[0][0] if alias.grad_fn is not None else None
    finally:
        simulation.paused, _STATE.window = before, window


def _made(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """A new tensor: on the card, or on the CPU without data where it is large."""
    device = kwargs.get("device")
    asked = None if device is None else torch.device(device)
    if asked is not None and asked.type not in ("cuda", "cpu"):
        with _plain_meta():
            return _called(func, args, kwargs)
    if _ours(args):
        return _called(func, args, kwargs)
    if asked is None or asked.type == "cpu":
        return _made_on_the_cpu(func, name, args, kwargs)
    if name == "tensor" or (name == "arange" and kwargs.get("dtype") is None):
        return _adopted(func(*args, **{**kwargs, "device": CPU, "requires_grad": False}), kwargs)
    elem = _without_data(func, args, kwargs)
    value = _CONSTANTS.get(name)
    if name == "full":
        value = float(args[1] if len(args) > 1 else kwargs["fill_value"])
    return _placed(elem, CUDA, value, bool(kwargs.get("requires_grad")))


def _made_on_the_cpu(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    if name in _FACTORIES - {"tensor", "arange"}:
        with contextlib.suppress(RuntimeError, TypeError):
            elem = _without_data(func, args, kwargs)
            if elem.numel() > LARGE:
                return _placed(elem, CPU, _CONSTANTS.get(name), bool(kwargs.get("requires_grad")))
    return _called(func, args, kwargs)


def _without_data(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    plain = {key: value for key, value in kwargs.items() if key not in ("generator", "requires_grad", "pin_memory")}
    with _plain_meta():
        return func(*args, **{**plain, "device": META})


def _placed(elem: torch.Tensor, place: torch.device, value: float | None, requires_grad: bool = False) -> Any:
    simulation: Simulation = _STATE.now
    if place.type == "cuda" and not simulation.paused:
        simulation.memory.take(elem.untyped_storage())
        simulation.timeline.launch("fill", "integer", 0.0, touched_bytes([elem]))
    made = SimulatedTensor(elem, place, value)
    return made.requires_grad_() if requires_grad else made


def _adopted(real: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    value = float(real) if real.numel() == 1 else None
    return _placed(_formed(_form(real)), CUDA, value, bool(kwargs.get("requires_grad")))


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
            moved = _placed(_formed(_form(tensor.elem)), CUDA, tensor.value)
        moved.requires_grad_(tensor.requires_grad and tensor.is_floating_point() and torch.is_grad_enabled())
        return moved if dtype is None else _called(torch.Tensor.to, (moved, dtype), {})
    if wanted.type == "cpu" and isinstance(tensor, SimulatedTensor):
        _STATE.now.timeline.wait()
        return _on_the_cpu(tensor, dtype)
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
    simulation: Simulation = _STATE.now
    arithmetic = str(sequence.dtype).removeprefix("torch.")
    if arithmetic == "float32" and _tf32(simulation, convolution=True):
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
def simulated(card: Card) -> Iterator[Simulation]:
    """Put the card where torch looks for its GPU; the target to run on is `TARGET`."""
    simulation = Simulation(card)
    before = _STATE.now, _STATE.window
    with contextlib.ExitStack() as stack:
        for patch in _patches(simulation):
            stack.enter_context(patch)
        for registration in _kernels():
            stack.enter_context(registration)
        targets._probe.cache_clear()
        stack.callback(targets._probe.cache_clear)
        stack.enter_context(_Calls())
        stack.enter_context(_Factories())
        _STATE.now, _STATE.window = simulation, False
        try:
            yield simulation
        finally:
            _STATE.now, _STATE.window = before
            _STATE.hidden = []
