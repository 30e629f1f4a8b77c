"""Fake tensors at less cost: what an op returns is asked of its meta kernel, once for inputs of the same form."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_META = torch.device("meta")
_DEVICE_OF = torch.ops.prim.device.default
# Arguments that an answer depends on by their value alone; a generator or a symbolic number is none of them.
_VALUES = frozenset((int, float, bool, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format))
# Whose fake kernels ask for the device, or which library would compute it there: convolutions in
# torch/_subclasses/fake_impls.py, the others by device_hint in torch/_meta_registrations.py, or in torch/_decomp.
_OF_DEVICE = (
    *("convolution", "_convolution", "_fft_", "linalg_eig", "_linalg_svd", "_linalg_eigh", "median", "nanmedian"),
    *(
        "upsample_nearest",
        "_upsample_nearest",
        "upsample_bilinear",
        "log_sigmoid",
        "_embedding_bag",
        "_addmm_activation",
    ),
    *("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm", "_batch_norm"),
    *("reflection_pad", "replication_pad", "histc", "nonzero_static", "masked_fill", "_scaled_dot_product"),
)
# Of ops with one of these the result depends on values, or the first argument changes its form.
_UNANSWERABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


class _Kind(Enum):
    """What an op returns: new tensors, views of its first argument, or that argument, which it has written to."""

    NEW = auto()
    VIEW = auto()
    IN_PLACE = auto()


@dataclass(frozen=True)
class _Form:
    """All that a strided tensor is, beside its device and its values."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


_Answer: TypeAlias = _Form | tuple[_Form | None, ...] | list[_Form | None] | None


class CachedFakeMode(FakeTensorMode):
    """FakeTensorMode that asks the meta kernel of an op, and remembers the answer for inputs of the same form.

    A fake tensor has the dispatch keys of its device, so autocast itself runs at every call. What is remembered is
    below it: types, shapes and strides, that neither device nor earlier calls have a part in, so that calls in any
    order give the same. Torch's own memory takes five times as long, and is apart for each device, as it is here for
    `_OF_DEVICE`. What no meta kernel answers, such as an op whose result depends on values, is left to torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[tuple[Any, ...], _Answer] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; the guard against it imports the compiler, and takes time at each op."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OF:
            return args[0].device
        keywords, kind = kwargs or {}, _kind(func)
        question: list[Any] = [func, torch.get_default_dtype()]
        devices: set[torch.device] = set()
        if kind is None or not self._describe(question, devices, args, keywords, kind):
            return super().__torch_dispatch__(func, types, args, keywords)
        of_device = _of_device(func)
        key = (*question, *devices) if of_device else tuple(question)
        if key not in self._answers:
            if of_device:
                result = super().__torch_dispatch__(func, types, args, keywords)
                self._answers[key] = _forms(result, FakeTensor)
                return result
            self._answers[key] = _ask(func, args, keywords, kind)
        answer = self._answers[key]
        if answer is None:
            return super().__torch_dispatch__(func, types, args, keywords)
        if kind is _Kind.IN_PLACE:
            return args[0]
        make = functools.partial(self._make, devices.pop(), args[0].untyped_storage() if kind is _Kind.VIEW else None)
        return make(answer) if isinstance(answer, _Form) else type(answer)(map(make, answer))

    def _describe(
        self,
        question: list[Any],
        devices: set[torch.device],
        args: Sequence[Any],
        keywords: Mapping[str, Any],
        kind: _Kind,
    ) -> bool:
        """Add to `question` what the answer depends on, to `devices` where the outputs are; False where that fails."""
        if not self._add(question, devices, args):
            return False
        for name, value in keywords.items():
            question.append(name)
            if name != "device" and not self._add(question, devices, (value,)):
                return False
        if kind is _Kind.VIEW:
            question.append(args[0].storage_offset())
        if (asked := keywords.get("device")) is not None:
            devices.clear()
            devices.add(asked)
        return len(devices) == 1 and _META not in devices

    def _add(self, question: list[Any], devices: set[torch.device], values: Iterable[Any]) -> bool:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None or not _is_plain(value):
                    return False
                question += (value.dtype, value.shape, value.stride())
                devices.add(value.fake_device)
            elif kind in _VALUES:
                question += (kind, value)
            elif kind is list or kind is tuple:
                question.append(len(value))
                if not self._add(question, devices, value):
                    return False
            else:
                return False
        return True

    def _make(self, device: torch.device, storage: torch.UntypedStorage | None, form: _Form | None) -> Any:
        """Make a fake tensor as FakeTensor does, which takes six times as long to fill in what is the same in each."""
        if form is None:
            return None
        with torch._C._DisableTorchDispatch():
            if storage is None:
                bare = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=_META)
            else:
                bare = torch.empty(0, dtype=form.dtype, device=_META)
                bare.set_(storage, form.offset, form.shape, form.stride)
        if device not in self._attributes:
            self._attributes[device] = vars(FakeTensor(self, bare, device))
        made = torch.Tensor._make_subclass(
            FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes[device])
        return made


@functools.cache
def fake_mode() -> CachedFakeMode:
    """Return the mode of all fake targets; making one formats the whole stack of its caller."""
    return CachedFakeMode()


def _ask(func: Any, args: Sequence[Any], keywords: Mapping[str, Any], kind: _Kind) -> _Answer:
    """Call `func` on meta tensors and return the forms of its outputs; None where it raises, or they are of no form."""

    def bare(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(bare, value))
        if not isinstance(value, torch.Tensor):
            return value
        if kind is not _Kind.VIEW:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
        made = torch.empty(0, dtype=value.dtype, device=_META)
        return made.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    with torch._C._DisableTorchDispatch():
        try:
            words = {name: _META if name == "device" else bare(value) for name, value in keywords.items()}
            result = func(*map(bare, args), **words)
        except Exception:  # torch's own way says what is wrong
            return None
    return _forms(result, torch.Tensor)


def _forms(result: Any, of: type[torch.Tensor]) -> _Answer:
    """The forms of outputs that are tensors of exactly that class; None where one has none."""
    if not isinstance(result, (list, tuple)):
        return _form(result, of)
    forms = [_form(one, of) for one in result]
    whole = all((form is None) == (one is None) for form, one in zip(forms, result, strict=True))
    return (forms if isinstance(result, list) else tuple(forms)) if whole else None


def _form(value: Any, of: type[torch.Tensor]) -> _Form | None:
    if type(value) is not of or not _is_plain(value) or getattr(value, "constant", None) is not None:
        return None
    return _Form(value.dtype, value.shape, value.stride(), value.storage_offset())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape, strides and offset tell all of it."""
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return strided and not tensor.is_conj() and not tensor.is_neg()


@functools.cache
def _kind(func: Any) -> _Kind | None:
    """What an op returns; None where that is of no one kind, or a meta kernel is not to be asked."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return None
    name = func.name()
    # A literal becomes a constant, which torch reads the value of. A composite calls ops that autocast knows.
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    if composite or name.startswith("aten::lift") or any(tag in func.tags for tag in _UNANSWERABLE):
        return None
    returns = func._schema.returns
    first, *others = [argument.alias_info for argument in func._schema.arguments] or [None]
    if any(others):
        return None
    if first is None:
        return _Kind.NEW if not any(one.alias_info for one in returns) else None
    if len(returns) != 1 or not returns[0].alias_info:
        return None
    return _Kind.IN_PLACE if first.is_write else _Kind.VIEW


@functools.cache
def _of_device(func: Any) -> bool:
    name: str = func.overloadpacket.__name__
    return name.startswith(_OF_DEVICE)
