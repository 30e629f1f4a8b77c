"""Snapshots of the process-wide state that AMP and its checks touch: taken, compared and restored for each case."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..measure.flags import FLAGS
from ..measure.generators import seed_torch

# Device types whose autocast state is compared; each has its own enabled flag and dtype.
_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "hpu", "xla", "ipu")

# What a flag of another torch version raises, or TF32 set through torch's newer, exclusive interface.
_UNREADABLE = (AttributeError, RuntimeError, AssertionError, ValueError)


@dataclass(frozen=True)
class _Flag:
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


def _autocast_flags(device_type: str) -> list[_Flag]:
    return [
        _Flag(
            f"autocast enabled for {device_type}",
            lambda: torch.is_autocast_enabled(device_type),
            lambda value: torch.set_autocast_enabled(device_type, value),
        ),
        _Flag(
            f"autocast dtype for {device_type}",
            lambda: torch.get_autocast_dtype(device_type),
            lambda value: torch.set_autocast_dtype(device_type, value),
        ),
    ]


def _nesting() -> int:
    """Return autocast's nesting depth, which torch returns only when it changes."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _set_nesting(depth: int) -> None:
    while _nesting() > depth:
        torch.autocast_decrement_nesting()
    while _nesting() < depth:
        torch.autocast_increment_nesting()


def _transforms() -> int:
    """Return how many function transforms (torch.func) are open: a compiler that raises inside of one leaves it so."""
    return len(torch._C._functorch.get_interpreter_stack() or ())


def _end_transforms(depth: int) -> None:
    while _transforms() > depth:
        torch._C._functorch.pop_dynamic_layer_stack()


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _device_types() -> tuple[str, ...]:
    # A region of a third party's type can be opened where there is no such device too.
    return *_DEVICE_TYPES, torch._C._get_privateuse1_backend_name()


@functools.cache
def _flags() -> tuple[_Flag, ...]:
    """Return every flag that is compared."""
    flags = [flag for device_type in _device_types() for flag in _autocast_flags(device_type)]
    flags += [
        _Flag("autocast cache enabled", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        _Flag("autocast nesting depth", _nesting, _set_nesting),
        _Flag("open function transforms", _transforms, _end_transforms),
        _Flag("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        _Flag("anomaly mode", torch.is_anomaly_enabled, lambda value: torch.set_anomaly_enabled(value)),
        _Flag(
            "default device",
            torch.get_default_device,
            lambda value: torch.set_default_device(None if value == torch.device("cpu") else value),
        ),
        _Flag(
            "deterministic algorithms",
            _deterministic,
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        *(_Flag(flag.name, flag.read, flag.write) for flag in FLAGS if flag.restored),
    ]
    return tuple(flags)


def _values() -> dict[_Flag, Any]:
    """Return each flag with its value; one that cannot be read is left out."""
    found: dict[_Flag, Any] = {}
    for flag in _flags():
        with contextlib.suppress(*_UNREADABLE):
            found[flag] = flag.read()
    return found


def _keeps_subnormal_numbers() -> bool:
    """Whether the processor does, in Python's own arithmetic too, in which the expected answers are worked out."""
    smallest = sys.float_info.min
    return smallest / 2 > 0.0


def _has_default_device() -> bool:
    # torch 2.6 cannot name the default device once one has been set and reset; the mode is there while it is set.
    return any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def region() -> set[str]:
    """Name what of a region is in force in the thread that calls."""
    found = set()
    for device_type in _device_types():
        with contextlib.suppress(*_UNREADABLE):
            found |= {f"autocast enabled for {device_type}"} if torch.is_autocast_enabled(device_type) else set()
    if not torch.is_autocast_cache_enabled():
        found.add("the weight cache disabled")
    if (depth := _nesting()) > 0:
        found.add(f"nesting depth {depth}")
    return found


def _open_regions() -> str:
    """Name what of a region is in force in this thread and not in a new one, which has torch's defaults.

    Wrong defaults are in force in both, and are for the checks to judge.
    """
    if not (here := region()):
        return "none"  # most cases begin so, and start no thread
    new: set[str] = set()
    thread = threading.Thread(target=lambda: new.update(region()))
    thread.start()
    thread.join()
    return ", ".join(sorted(here - new)) or "none"


def leave_regions() -> str:
    """Leave what regions are in force in this thread, and name them; empty where there are none."""
    opened = _open_regions()
    if opened == "none":
        return ""
    for device_type in _device_types():
        with contextlib.suppress(*_UNREADABLE):
            torch.set_autocast_enabled(device_type, False)
    torch.set_autocast_cache_enabled(True)
    _set_nesting(0)
    torch.clear_autocast_cache()
    return opened


def _has_saved_tensors_hooks() -> bool:
    # torch 2.6 has no getter; to disable such hooks raises where there are any, and is undone at once.
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("there are hooks"):
            return False
    except RuntimeError:
        return True


def _backward_hooks() -> int:
    # Full ones put a function of autograd around each module, which torch.func refuses.
    module = torch.nn.modules.module
    return len(module._global_backward_hooks) + len(module._global_backward_pre_hooks)


def unlike_a_new_process() -> str | None:
    """In one line what was set before the run, by a plugin, a conftest.py or the like, under which no check holds.

    They are settings of what is computed at all, which checks rely on and AMP has no part in, and autocast regions
    that are open in this thread. Other settings that AMP sets or reads are left as they were found: checks look at
    them.
    """
    wanted = {
        "the default dtype": (torch.get_default_dtype(), torch.float32),
        # Though it be the CPU: its function mode makes torch leave out fast paths and fused kernels.
        "a default device (torch.set_default_device)": (_has_default_device(), False),
        "an autocast region is open in this thread, or its flags were set": (_open_regions(), "none"),
        "hooks of saved tensors (torch.autograd.graph.saved_tensors_hooks)": (_has_saved_tensors_hooks(), False),
        "global backward hooks of modules (register_module_full_backward_hook)": (_backward_hooks(), 0),
        "gradients are recorded": (torch.is_grad_enabled(), True),
        "anomaly detection": (torch.is_anomaly_enabled(), False),
        "inference mode": (torch.is_inference_mode_enabled(), False),
        "operations without a deterministic form are refused": (_deterministic() == (True, False), False),
        "this thread keeps subnormal numbers (torch.set_flush_denormal, or a library built with -ffast-math)": (
            _keeps_subnormal_numbers(),
            True,
        ),
    }
    found = [f"{name}: {seen}, not {needed}" for name, (seen, needed) in wanted.items() if seen != needed]
    return "; ".join(found) or None


def _hooks() -> dict[str, int]:
    """Count the process-wide hooks and modes; these can be compared, not restored."""
    module = torch.nn.modules.module
    counts = {
        "torch dispatch modes": torch._C._len_torch_dispatch_stack(),
        "torch function modes": torch._C._len_torch_function_stack(),
    }
    for name in (
        *("_global_forward_hooks", "_global_forward_pre_hooks"),
        *("_global_backward_hooks", "_global_backward_pre_hooks"),
    ):
        counts[f"global module hooks ({name})"] = len(getattr(module, name, ()))
    return counts


class Snapshot:
    """The state at one moment."""

    def __init__(self) -> None:
        self._values = _values()
        self._hooks = _hooks()
        self._random = random.getstate()
        self._generators = _generator_states()

    def leaks(self) -> list[str]:
        """Say what differs now from the snapshot; RNG states are left to `restore`, which always puts them back."""
        found = [f"{flag.name} was {value}, is {now}" for flag, value, now in self._changed()]
        now = _hooks()
        return found + [
            f"{name} were {count}, are {now[name]}" for name, count in self._hooks.items() if now[name] != count
        ]

    def _changed(self) -> list[tuple[_Flag, Any, Any]]:
        """Return each flag that differs from the snapshot, with what it was and what it is."""
        return [(flag, value, now) for flag, value in self._values.items() if (now := flag.read()) != value]

    def restore(self) -> None:
        """Put every flag and every random generator back."""
        for flag, value, _ in self._changed():
            flag.write(value)
        if not torch.is_autocast_cache_enabled() or _nesting() == 0:
            torch.clear_autocast_cache()
        random.setstate(self._random)
        torch.set_rng_state(self._generators["cpu"])
        if "accelerator" in self._generators:
            torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(
                self._generators["accelerator"]
            )


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Put every flag and generator back at the end, whatever was done to them meanwhile."""
    before = Snapshot()
    try:
        yield
    finally:
        before.restore()


def _generator_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        if hasattr(module, "get_rng_state"):
            states["accelerator"] = module.get_rng_state()
    return states


def seed_everything(seed: int) -> None:
    """Seed Python's and torch's global generators."""
    random.seed(seed)
    seed_torch(seed)
