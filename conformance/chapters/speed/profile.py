"""Profile the share of casts, and of ops that autocast runs in fp32, in a piece of work."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

CAST = "aten::_to_copy"  # what Tensor.to comes down to where it copies
_BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Profile:
    """Seconds of a piece of work in all, in casts, and in each fp32-list op with its own casts, forward and backward.

    `where` says whose seconds these are: the device's kernels, or the host's operations.
    """

    total: float
    casts: float
    fp32_ops: dict[str, float] = field(default_factory=dict)
    where: str = "device"

    @property
    def cast_share(self) -> float:
        """Casts outside of fp32-list ops, as a part of the whole."""
        return self.casts / self.total

    @property
    def fp32_share(self) -> float:
        """All fp32-list ops with their casts, as a part of the whole."""
        return sum(self.fp32_ops.values()) / self.total

    @property
    def largest_fp32_op(self) -> str | None:
        """The fp32-list op that takes most, by its name in aten without prefix."""
        return max(self.fp32_ops, key=lambda name: self.fp32_ops[name], default=None)


def observe(work: Callable[[], object], device_type: str, fp32_ops: Collection[str]) -> Profile | None:
    """Profile `work` once; None where this torch, this device or another profiler in the process does not allow it.

    `fp32_ops` are names of ops as they are called (`layer_norm`). On an accelerator the seconds are those of kernels,
    each counted with the op that launched it. Source: torch.profiler.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _profiler(device_type) as profiler:
                work()
                _wait(device_type)
            events = list(profiler.events() if hasattr(profiler, "events") else profiler.function_events)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, AttributeError, NotImplementedError, TypeError):
        return None
    return summed(events, "host" if device_type == "cpu" else "device", frozenset(fp32_ops))


def _profiler(device_type: str) -> Any:
    if device_type == "cpu":
        # Starting Kineto takes a second, and on a CPU it has nothing to add.
        return torch.autograd.profiler.profile(use_kineto=False)
    activity = torch.profiler.ProfilerActivity
    device = getattr(activity, {"cuda": "CUDA", "xpu": "XPU"}.get(device_type, "PrivateUse1"))
    if device not in torch.profiler.supported_activities():
        raise NotImplementedError(f"this torch has no profiler for {device_type}")
    return torch.profiler.profile(activities=[activity.CPU, device])


def _wait(device_type: str) -> None:
    if device_type != "cpu":
        torch.get_device_module(device_type).synchronize()


def summed(events: Collection[Any], where: str, fp32_ops: Collection[str]) -> Profile | None:
    """Sum up the events of torch's profiler; None where they hold no time of `where`, "device" or "host".

    An event belongs to the outermost fp32-list op above it, else to the cast above it. Backward functions belong to
    the op whose forward call has their sequence number.
    """
    taken: dict[str, float] = defaultdict(float)
    casts = total = 0.0
    forward = _sequences(events, fp32_ops)
    for event in events:
        seconds = _seconds(event, where)
        if not seconds:
            continue
        total += seconds
        chain = list(_ancestors(event))
        function = next((each for each in chain if each.name.startswith(_BACKWARD)), None)
        if function is not None:
            # Backward runs outside of the region: its own sums and norms are not those of the list.
            op = forward.get(function.sequence_nr)
        else:
            op = next((name for each in reversed(chain) if (name := _bare(each.name)) in fp32_ops), None)
        if op is not None:
            taken[op] += seconds
        elif any(each.name == CAST for each in chain):
            casts += seconds
    return Profile(total, casts, dict(taken), where) if total > 0 else None


def _sequences(events: Collection[Any], fp32_ops: Collection[str]) -> dict[int, str]:
    """Return for each backward function of an fp32-list op, and of the casts for it, its sequence number and the op."""
    found: dict[int, str] = {}
    for event in events:
        if event.sequence_nr < 0 or event.scope == 1 or event.name.startswith(_BACKWARD):
            continue
        op = next((name for each in _ancestors(event) if (name := _bare(each.name)) in fp32_ops), None)
        # A call that records no function has the number of the next one that does.
        if op is None:
            found.pop(event.sequence_nr, None)
        else:
            found[event.sequence_nr] = op
    return found


def _ancestors(event: Any) -> Any:
    while event is not None:
        yield event
        event = event.cpu_parent


def _bare(name: str) -> str:
    return name.removeprefix("aten::")


def _seconds(event: Any, where: str) -> float:
    """Return the event's own seconds: of the kernels it launched itself, or of the host without what it called."""
    if where == "host":
        return float(event.self_cpu_time_total) / 1e6
    return sum(kernel.duration for kernel in event.kernels) / 1e6
