"""Targets: what a check runs on, a real device or a fake one, and what each can do, as probed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ..measure.precision import computes_in, flushes_subnormals
from . import environment
from .endings import Untestable


def _has_autocast(device_type: str) -> bool:
    """Whether this torch has autocast for the device type: MTIA from 2.7 on, MAIA from 2.8 on."""
    try:
        torch.get_autocast_dtype(device_type)
    except RuntimeError:
        return False
    return True


# The device types that torch's own autocast knows; a third party's arrives under its own name (privateuse1).
# Of every supported torch, and of this one.
_FAKED_SOMEWHERE = ("cuda", "cpu", "xpu", "mps", "mtia", "maia")
FAKE_DEVICE_TYPES = tuple(kind for kind in _FAKED_SOMEWHERE if _has_autocast(kind))
DEFAULT_TARGETS = ("cpu", *(f"fake:{kind}" for kind in FAKE_DEVICE_TYPES if kind != "cpu"))
AMP_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in AMP_DTYPES.items()}


# What a check may need of a device beyond an amp dtype, and which names of its module (torch.<device type>) that takes.
# A device that lacks one for another reason declares it: its module by `amp_conformance_lacks`, a mapping from these
# names to reasons, or its package by an entry point (backends.py).
CAPABILITIES: Mapping[str, tuple[str, ...]] = {
    "streams": ("Stream", "stream", "current_stream"),
    "graphs": ("CUDAGraph", "graph"),
    "copies that do not wait": (),
    "pools of memory": (),
    "child processes": (),
    "compiled kernels": (),
    "storages": (),
    "plain tensors": (),
    "traced tensors": (),
}


# What packages declare of their devices, by device type.
_OF_PACKAGES: dict[str, Mapping[str, str]] = {}


class TargetError(ValueError):
    """A target that was asked for does not exist on this machine, or cannot exist."""


@dataclass(frozen=True)
class Target:
    """A real device or, where `is_fake`, fake tensors through the autocast dispatcher of a device type."""

    name: str
    device_type: str
    index: int | None
    is_fake: bool

    @property
    def device(self) -> torch.device:
        if self.index is None:
            return torch.device(self.device_type)
        return torch.device(self.device_type, self.index)

    @property
    def probe(self) -> Mapping[str, Any]:
        """Facts of the device: amp_dtypes, tensor_cores, memory_bytes, event_timing, name, capability, lacks."""
        return {**_probe(self), "lacks": [] if self.is_fake else sorted(self._declared_lacks())}

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether the device computes natively in `dtype` under autocast; emulation counts as no."""
        return DTYPE_NAMES.get(dtype) in self.probe["amp_dtypes"]

    def computes_in(self, dtype: torch.dtype) -> bool:
        """Whether the device has arithmetic in `dtype`, natively or by emulation; fake tensors have every type."""
        return self.is_fake or computes_in(self.device, dtype)

    def flushes_subnormals(self) -> bool:
        """Whether a device takes subnormal float32 numbers for zero; a CPU and cards of torch's own backends do not."""
        return self.device_type not in ("cpu", "cuda", "xpu") and not self.is_fake and flushes_subnormals(self.device)

    def lacks(self, capability: str) -> str | None:
        """Return why the device lacks one of CAPABILITIES, and None where it has it."""
        module = device_module(self.device_type)
        if reason := self._declared_lacks().get(capability):
            return reason
        if capability == "storages":
            return self._without_storages()
        if capability in ("plain tensors", "traced tensors"):
            return self._of_a_subclass(traced=capability == "traced tensors")
        if capability == "compiled kernels" and is_foreign(self.device_type):
            return _without_inductor(self.device_type)
        missing = [name for name in CAPABILITIES[capability] if not hasattr(module, name)]
        return f"torch.{self.device_type} has no {missing[0]}" if missing else None

    def _declared_lacks(self) -> dict[str, str]:
        return {**_OF_PACKAGES.get(self.device_type, {}), **declared(device_module(self.device_type))}

    def _without_storages(self) -> str | None:
        """Return why the storages that ops get do not tell one tensor from another, and None where they do."""
        if self.is_fake:
            return None
        tensor = torch.ones(8, device=self.device)
        if torch._is_functional_tensor(tensor):
            tensor = torch._from_functional_tensor(tensor)
        seen = tensor.untyped_storage().nbytes()
        return None if seen >= 32 else f"below its functionalization a tensor of 32 bytes has a storage of {seen} bytes"

    def _of_a_subclass(self, *, traced: bool) -> str | None:
        """Return that the device has tensors of a class of its own, if `traced` of one without __tensor_flatten__."""
        kind = torch.Tensor if self.is_fake else type(torch.empty(0, device=self.device))
        if kind is torch.Tensor:
            return None
        if traced:
            able = hasattr(kind, "__tensor_flatten__")
            return None if able else f"torch.compile traces no {kind.__name__}, which has no __tensor_flatten__"
        return f"its tensors are of {kind.__name__}, a subclass of torch.Tensor"

    @contextlib.contextmanager
    def autocast(
        self, dtype: torch.dtype, *, enabled: bool = True, cache_enabled: bool | None = None
    ) -> Iterator[None]:
        """An autocast region of `dtype` on this target.

        A real target enters `torch.autocast`. A fake one sets the state of its key directly, because
        `torch.autocast("cuda")` disables itself on a machine without CUDA.
        """
        if not self.is_fake:
            with torch.autocast(self.device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled):
                yield
            return
        before = (
            torch.is_autocast_enabled(self.device_type),
            torch.get_autocast_dtype(self.device_type),
            torch.is_autocast_cache_enabled(),
        )
        torch.autocast_increment_nesting()
        try:
            torch.set_autocast_enabled(self.device_type, enabled)
            torch.set_autocast_dtype(self.device_type, dtype)
            torch.set_autocast_cache_enabled(before[2] if cache_enabled is None else cache_enabled)
            with self._dispatched() if enabled else contextlib.nullcontext():
                yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            torch.set_autocast_enabled(self.device_type, before[0])
            torch.set_autocast_dtype(self.device_type, before[1])
            torch.set_autocast_cache_enabled(before[2])

    def _dispatched(self) -> contextlib.AbstractContextManager[Any]:
        """Let calls reach the autocast kernels where fake tensors carry no key of their device type: those of MAIA."""
        if self.device_type != "maia":
            return contextlib.nullcontext()
        try:
            key = torch._C._dispatch_key_parse("AutocastMAIA")
            guard: contextlib.AbstractContextManager[Any] = torch._C._IncludeDispatchKeyGuard(key)
        except AttributeError as error:
            raise Untestable(f"this torch lacks what lets fake MAIA tensors reach autocast: {error}") from None
        return guard

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        if not self.is_fake and (module := device_module(self.device_type)) is not None:
            synchronize = getattr(module, "synchronize", None)
            if synchronize is not None and self.device_type != "cpu":
                with self.current():
                    synchronize()

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Make the device its type's current one, whose streams and counters calls without an index mean."""
        if self.is_fake or not self.index:
            return contextlib.nullcontext()
        made: contextlib.AbstractContextManager[Any] = torch.get_device_module(self.device_type).device(self.index)
        return made


@functools.cache
def _without_inductor(device_type: str) -> str | None:
    """Return that inductor makes no kernels for a third party's devices; None where their package has told it how."""
    try:
        common = importlib.import_module("torch._inductor.codegen.common")
        common.init_backend_registration()
        makes = common.get_scheduling_for_device(device_type) is not None
    except Exception as error:  # a torch whose compiler cannot be imported, or has other functions
        return f"inductor does not tell whether it makes kernels for {device_type}: {type(error).__name__}"
    return None if makes else f"inductor makes no kernels for {device_type}"


def is_foreign(device_type: str) -> bool:
    """Whether a device type is a third party's, of which torch promises no op lists and no set of operators."""
    return device_type not in FAKE_DEVICE_TYPES


def has_kernel(device_type: str, operator: str) -> bool:
    """Whether a third party registered a kernel of `operator` ("aten::mm") for its devices, and no fallback alone."""
    key = {"xla": "XLA", "hpu": "HPU"}.get(device_type, "PrivateUse1")
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key))
    except RuntimeError:  # this torch has no such operator
        return False


def one_device_only(target: Target) -> str | None:
    """Say that the machine has no second device of the target's type, or return None."""
    module = device_module(target.device_type)  # torch_xla registers none
    count = 1 if module is None else module.device_count()
    return f"one {target.device_type} device only; this needs two" if count < 2 else None


def second(target: Target) -> torch.device:
    """Return another device of the target's type."""
    count = torch.get_device_module(target.device_type).device_count()
    return torch.device(target.device_type, (target.device.index + 1) % count)


def declare(lacks: Mapping[str, Mapping[str, str]]) -> None:
    """Say for a run which of CAPABILITIES the packages of devices say that these lack, by device type, and why."""
    _OF_PACKAGES.clear()
    _OF_PACKAGES.update(lacks)


def declared(module: ModuleType | None) -> dict[str, str]:
    """Return which of CAPABILITIES a device module declares to lack, and why; raises TargetError for other names."""
    found = {str(name): str(reason) for name, reason in getattr(module, "amp_conformance_lacks", {}).items()}
    if unknown := sorted(set(found) - set(CAPABILITIES)):
        name = getattr(module, "__name__", "")
        known = ", ".join(CAPABILITIES)
        raise TargetError(f"{name} declares that it lacks {unknown[0]!r}, which is no capability; there are {known}")
    return found


def device_module(device_type: str) -> ModuleType | None:
    """Return torch's module of that device type (`torch.cuda`), or None where it has none."""
    try:
        return torch.get_device_module(device_type)
    except RuntimeError:
        return None


def accelerator() -> str | None:
    """Return the device type of the accelerator that torch finds on this machine, if any."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def not_judged(run_targets: Iterable[Target]) -> dict[str, str]:
    """Return the accelerators of this machine that are none of `run_targets`, each with what it calls itself."""
    if (device_type := accelerator()) is None:
        return {}
    module, names = device_module(device_type), {target.name for target in run_targets}
    indices = range(_device_count(module))
    here = (Target(f"{device_type}:{index}", device_type, index, is_fake=False) for index in indices)
    return {target.name: name_of(target) for target in here if target.name not in names}


def resolve(name: str) -> Target:
    """Turn `cpu`, `cuda:1`, `xpu`, `fake:cuda`... into a Target; raises TargetError with what is allowed."""
    lowered = name.strip().lower()
    if lowered.startswith("fake:"):
        device_type = lowered.removeprefix("fake:")
        if device_type not in FAKE_DEVICE_TYPES:
            known = ", ".join(f"fake:{known}" for known in FAKE_DEVICE_TYPES)
            raise TargetError(f"unknown fake target {name!r}; there are {known}")
        return Target(lowered, device_type, None if device_type == "cpu" else 0, is_fake=True)
    try:
        device = torch.device(lowered)
    except RuntimeError:
        raise TargetError(f"unknown device {name!r}; {_available()}") from None
    if device.type == "meta":
        raise TargetError(f"{name!r} computes nothing; {_available()}")
    if device.type == "cpu":
        if device.index not in (None, 0):
            raise TargetError(f"there is no {name!r}: a machine has one cpu device; {_available()}")
        return Target("cpu", "cpu", None, is_fake=False)
    module = device_module(device.type)
    if module is None:
        return _unregistered(device)
    count = _device_count(module)
    if count == 0:
        raise TargetError(f"torch finds no {device.type} device on this machine; {_available()}")
    index = 0 if device.index is None else device.index
    if index >= count:
        raise TargetError(f"there is no {name!r}: torch finds {count} {device.type} device(s); {_available()}")
    return Target(f"{device.type}:{index}", device.type, index, is_fake=False)


def _unregistered(device: torch.device) -> Target:
    """Return the target of a type without a device module, whose devices alone can say that they are there."""
    index = 0 if device.index is None else device.index
    try:
        torch.empty(1, device=torch.device(device.type, index))
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        missing = "--import the package that brings it; where it is imported, it does not call"
        raise TargetError(
            f"torch.{device.type} is not registered, and no tensor can be made on {device.type}:{index} "
            f"({type(error).__name__}: {text[0][:120]}): {missing} torch._register_device_module; see docs/backends.md"
        ) from None
    return Target(f"{device.type}:{index}", device.type, index, is_fake=False)


def known(name: str) -> bool:
    """Whether `name` can be that of a target on some machine: a fake one, or a device that torch can name."""
    if name.startswith("fake:"):
        return name.removeprefix("fake:") in _FAKED_SOMEWHERE
    try:
        torch.device(name)
    except RuntimeError:
        return name == "host"
    return True


def _device_count(module: ModuleType | None) -> int:
    if module is None or not getattr(module, "is_available", lambda: True)():
        return 0
    return int(getattr(module, "device_count", lambda: 1)())


def _available() -> str:
    names = ["cpu"]
    if (device_type := accelerator()) is not None:
        names += [f"{device_type}:{index}" for index in range(_device_count(device_module(device_type)))]
    return f"here: {', '.join(names)}, fake:{', fake:'.join(FAKE_DEVICE_TYPES)}"


@functools.cache
def _probe(target: Target) -> dict[str, Any]:
    if target.is_fake:
        return {
            "name": f"fake tensors, {target.device_type} autocast",
            "amp_dtypes": list(AMP_DTYPES),
            "tensor_cores": False,
            "memory_bytes": None,
            "event_timing": False,
            "capability": None,
        }
    module = device_module(target.device_type)
    properties = _properties(module, target.index)
    capability = (
        f"{properties.major}.{properties.minor}"
        if hasattr(properties, "major") and hasattr(properties, "minor")
        else None
    )
    return {
        "name": name_of(target),
        "amp_dtypes": [name for name, dtype in AMP_DTYPES.items() if _declares(target, dtype, properties)],
        "tensor_cores": _tensor_cores(target, properties),
        "memory_bytes": getattr(properties, "total_memory", None),
        "event_timing": target.device_type != "cpu" and hasattr(module, "Event"),
        "capability": capability or getattr(properties, "gcnArchName", None),
    }


def name_of(target: Target) -> str:
    """Return what a real device calls itself; its device type where its module does not tell."""
    properties = _properties(device_module(target.device_type), target.index)
    own = environment.cpu() if target.device_type == "cpu" else target.device_type
    return re.sub(r"\s+", " ", str(getattr(properties, "name", None) or own))


def _properties(module: ModuleType | None, index: int | None) -> Any:
    read = getattr(module, "get_device_properties", None)
    if read is None:
        return None
    try:
        return read(index)
    except (RuntimeError, AssertionError, TypeError):
        return None


def clocks(target: Target) -> dict[str, float]:
    """The clocks that a device declares as its highest, in Hz; what it does not report is left out."""
    properties = _properties(device_module(target.device_type), target.index)
    names = {"clock_rate": "clock_hz", "memory_clock_rate": "memory_clock_hz"}  # both in kHz
    return {name: rate * 1e3 for key, name in names.items() if (rate := getattr(properties, key, None))}


def _declares(target: Target, dtype: torch.dtype, properties: Any) -> bool:
    """Whether the device declares native arithmetic in `dtype`; a broken kernel is no such declaration.

    A third party's device lists the dtypes of its regions, and torch disables those of other dtypes; one that it lists
    and has no tensors of counts as no, and is what AMP-REGION-113 fails. fp16 is part of
    every backend of torch's own. bf16 is native from compute capability 8.0 on (CUDA C++ Programming Guide, arithmetic
    instructions); before, torch emulates it, which counts as no.
    """
    if is_foreign(target.device_type):
        listed = getattr(device_module(target.device_type), "get_amp_supported_dtype", None)
        if listed is not None and (dtype not in listed() or not _makes_tensors(target, dtype)):
            return False
    if dtype is torch.float16 or target.device_type == "cpu":
        return True
    if target.device_type == "cuda" and torch.version.hip is None:
        return properties is not None and int(properties.major) >= 8
    asked = getattr(device_module(target.device_type), "is_bf16_supported", None)
    if asked is not None:
        return bool(asked())
    return _makes_tensors(target, dtype)


def _makes_tensors(target: Target, dtype: torch.dtype) -> bool:
    try:
        torch.ones(1, device=target.device, dtype=dtype)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def _tensor_cores(target: Target, properties: Any) -> bool:
    """Whether 16-bit matrix units exist: NVIDIA from 7.0 less the GTX 16 line, AMD CDNA, Intel XMX."""
    if target.device_type == "cuda" and torch.version.hip is None:
        return properties is not None and properties.major >= 7 and "GTX 16" not in properties.name
    if target.device_type == "cuda":
        return bool(re.match(r"gfx9(0[8a]|4|5)|gfx1[12]", getattr(properties, "gcnArchName", "")))
    if target.device_type == "xpu":
        return bool(getattr(properties, "has_subgroup_matrix_multiply_accumulate", False))
    return False


def smoke(target: Target) -> str | None:
    """Try a matmul and a backward on a real target; return what broke, or None.

    No autocast region: that is what the contracts judge, each by its name.
    """
    steps = (
        ("a matrix product", lambda: known_sum(target)),
        ("a backward pass", lambda: _smoke_backward(target)),
        ("mixed precision", lambda: _smoke_dtypes(target)),
    )
    for name, step in steps:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step()
                target.synchronize()
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            return f"{name} fails on {target.name}: {type(error).__name__}: {text[0]}"
    return None


def known_sum(target: Target) -> None:
    """Sum a product of matrices of ones on `target`; raises ArithmeticError where it is wrong, or what torch raises."""
    ones = torch.ones(4, 4, device=target.device)
    seen = torch.matmul(ones, ones).sum().item()
    if seen != 64.0:
        raise ArithmeticError(f"the product of two 4x4 matrices of ones sums to {seen}, not to 64")


def _smoke_backward(target: Target) -> None:
    weight = torch.ones(4, 4, device=target.device, requires_grad=True)
    torch.matmul(weight, weight).sum().backward()
    seen = None if weight.grad is None else weight.grad.sum().item()
    if seen != 128.0:
        raise ArithmeticError(f"the gradient of the sum of a product sums to {seen}, not to 128")


def _smoke_dtypes(target: Target) -> None:
    if not target.probe["amp_dtypes"]:
        raise TypeError("the device declares neither float16 nor bfloat16")
