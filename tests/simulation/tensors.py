"""Tensors of a made-up GPU: without data, with CUDA's dispatch keys, and with the card's clock and memory below them.

Every tensor of the device is a meta tensor in a wrapper that carries the dispatch keys of CUDA, so that autocast's and
autograd's own kernels run; below them nothing is computed, but the card's clock and memory advance.

Autocast asks a tensor in C++ whether it is on CUDA, and autograd, when it records one, on which stream it was made,
which a machine without CUDA cannot answer. So a tensor says "cuda" while autocast may ask, and "meta" when autograd
does: see `SimulatedTensor.hidden`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._meta_registrations
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import flop_registry

from tests.simulation.card import Simulation, touched_bytes

CUDA, META, CPU = torch.device("cuda:0"), torch.device("meta"), torch.device("cpu")
LARGE = 1 << 16  # tensors of the CPU with more elements have no data either
WORKSPACE = 32 << 20  # cuBLAS: bytes taken once, with the first product (torch's notes on CUBLAS_WORKSPACE_CONFIG)

CONSTANTS = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "zero_": 0.0, "ones": 1.0, "ones_like": 1.0}
_RESHAPES = {"t", "view", "_unsafe_view", "expand", "reshape", "detach", "alias", "clone", "_to_copy", "unsqueeze"}

STATE: SimpleNamespace = SimpleNamespace(now=None, window=False, meta=False, hidden=[])


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
            return CUDA if STATE.window and not args[0].is_hidden() else META
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


def flat(given: Any) -> list[Any]:
    """The leaves of lists and dictionaries in each other."""
    if isinstance(given, tuple | list):
        return [leaf for each in given for leaf in flat(each)]
    return [leaf for each in given.values() for leaf in flat(each)] if isinstance(given, dict) else [given]


def _mapped(function: Callable[[Any], Any], given: Any) -> Any:
    """The same lists and dictionaries with `function` of each leaf."""
    if isinstance(given, tuple | list):
        return type(given)([_mapped(function, each) for each in given])
    if isinstance(given, dict):
        return {name: _mapped(function, each) for name, each in given.items()}
    return function(given)


def simulated_in(given: Any) -> list[SimulatedTensor]:
    return [leaf for leaf in flat(given) if isinstance(leaf, SimulatedTensor)]


def reveal() -> None:
    for reference in STATE.hidden:
        if (tensor := reference()) is not None:
            tensor.hidden = ""
    STATE.hidden = []


def _hide(tensor: SimulatedTensor, how: str) -> None:
    """Answer "meta" for this tensor, which was `made` or `changed`, until the next operation: autograd may ask."""
    tensor.hidden = how
    STATE.hidden.append(weakref.ref(tensor))


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation below autocast and autograd: shapes by the meta kernel, time and memory by the card."""
    simulation: Simulation = STATE.now
    reveal()
    name = func.overloadpacket.__name__
    if name == "_local_scalar_dense":
        simulation.timeline.wait()
        return _number(args[0])
    if name == "_fused_sdp_choice":
        return int(SDPBackend.EFFICIENT_ATTENTION if args[0].dtype is torch.float32 else SDPBackend.FLASH_ATTENTION)
    target = kwargs.get("device")
    if name == "_to_copy" and target is not None and torch.device(target).type == "cpu":
        simulation.timeline.wait()
        return on_the_cpu(args[0], kwargs.get("dtype"))
    ours = simulated_in((args, kwargs))
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
        outputs = simulated_in(result)
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in ours):
            how = "changed" if _is_view(result, args, kwargs) else "made"  # a view requires what its base does at once
            for tensor in outputs:
                _hide(tensor, how)
    if place.type == "cuda" and not simulation.paused:
        _account(simulation, func, name, args, kwargs, ours, outputs, result)
    return result


def _wrapped(func: Any, args: Any, kwargs: dict[str, Any], place: torch.device, known: Any, simulation: Any) -> Any:
    """What the operation returns, on the card or beside it; its form is remembered, as meta kernels are slow."""
    key = repr((func, _mapped(form_of, (args, kwargs))))
    form = _FORMS.get(key)
    if form is None:
        inner_args, inner_kwargs = _mapped(_inner, (args, kwargs))
        if inner_kwargs.get("device") is not None:
            inner_kwargs["device"] = META
        inner_kwargs.pop("generator", None)
        made = func(*inner_args, **inner_kwargs)
        if not _is_view(made, args, kwargs):
            _FORMS[key] = _mapped(form_of, made)
    else:
        made = _mapped(tensor_of, form)

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


def form_of(leaf: Any) -> Any:
    return _Form(tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def tensor_of(leaf: Any) -> Any:
    if not isinstance(leaf, _Form):
        return leaf
    with torch._C.DisableTorchFunction(), plain_meta():
        return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=META)


@contextlib.contextmanager
def plain_meta() -> Iterator[None]:
    """What is made on "meta" meanwhile is a meta tensor, and nothing of the card."""
    before, STATE.meta = STATE.meta, True
    try:
        yield
    finally:
        STATE.meta = before


def _is_view(made: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    before = {tensor.elem.untyped_storage()._cdata for tensor in simulated_in((args, kwargs))}
    after = [getattr(leaf, "elem", leaf).untyped_storage()._cdata for leaf in flat(made) if torch.is_tensor(leaf)]
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
            found += simulated_in(given)
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
    if flops and arithmetic == "float32" and takes_tf32(simulation, "convolution" in name):
        arithmetic = "tf32"
    if flops and simulation.workspace is None:
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=META)
        simulation.memory.take(workspace.untyped_storage())
        simulation.workspace = workspace
    touched = touched_bytes([tensor.elem for tensor in (*ours, *outputs)])
    if func.namespace == "aten":
        simulation.timeline.launch(name, arithmetic, flops, touched)


def takes_tf32(simulation: Simulation, convolution: bool) -> bool:
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


def on_the_cpu(tensor: SimulatedTensor, dtype: torch.dtype | None) -> torch.Tensor:
    dtype = dtype or tensor.dtype
    if tensor.numel() > LARGE:
        return SimulatedTensor(torch.empty(tensor.shape, dtype=dtype, device=META), CPU, tensor.value)
    return torch.full(tensor.shape, 0.0 if tensor.value is None else tensor.value, dtype=dtype)


def _known(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> float | None:
    """The one value that all elements of the result have, where the operands tell it."""
    if name in CONSTANTS:
        return CONSTANTS[name]
    if name in ("full", "full_like", "fill_", "new_full"):
        given = args[2] if name == "new_full" else args[1]
        return None if isinstance(given, torch.Tensor) else float(given)
    if name == "copy_":
        return _value(args[1])
    operands = [leaf for leaf in flat(args) if isinstance(leaf, torch.Tensor)]
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
    if dtype is torch.float32 and takes_tf32(STATE.now, convolution):
        left, right = (float(torch.tensor(side * (1 + 2.0**-30)).mul(2**10).round() / 2**10) for side in (left, right))
    return left * right * length
