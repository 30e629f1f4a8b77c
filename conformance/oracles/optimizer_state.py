"""Everything an optimizer step may change, copied, and what differs between two such copies, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .numbers import bits


def snapshot(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copy the parameters and the state dict of an optimizer into one flat mapping from place to value.

    Places read "parameter/0/1" (second parameter of the first group), "state/2/exp_avg", "param_groups/0/lr".
    Tensors are cloned, so that later in-place changes do not reach the copy.
    """
    parameters = [group["params"] for group in optimizer.param_groups]
    return flat({"parameter": parameters, **optimizer.state_dict()})


def gradients(parameters: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Copy the gradients of the parameters; None for a parameter without one."""
    return flat({"gradient": [parameter.grad for parameter in parameters]})


def on_host(copied: Mapping[str, Any]) -> dict[str, Any]:
    """Move the tensors of a snapshot to the CPU, for runs that may keep the same numbers on different devices."""
    return {place: value.cpu() if isinstance(value, torch.Tensor) else value for place, value in copied.items()}


def differences(seen: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Say where two snapshots differ in dtype, shape, bits (NaNs are equal), value, or in what they hold at all.

    The first four places are described, the others counted; empty if nothing differs.
    """
    found = [f"{place}: gone" for place in expected if place not in seen]
    found += [f"{place}: new" for place in seen if place not in expected]
    for place in expected:
        if place in seen and not same(seen[place], expected[place]):
            found.append(f"{place}: {_brief(seen[place])} in place of {_brief(expected[place])}")
    return found if len(found) <= 5 else [*found[:4], f"and {len(found) - 4} more"]


def by_step(snapshot: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the step counters of a snapshot, and all else that is in it."""
    steps = {place: value for place, value in snapshot.items() if place.endswith("/step")}
    return steps, {place: value for place, value in snapshot.items() if place not in steps}


def same(seen: Any, expected: Any) -> bool:
    """Whether two values are of one type and equal; tensors in dtype, device, shape and bits (NaNs are equal)."""
    if not isinstance(seen, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return type(seen) is type(expected) and bool(seen == expected)
    return seen.device == expected.device and bits.same(seen, expected)


def flat(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Copy nested mappings and sequences into one flat mapping from place to value, as `snapshot` does.

    A loop, as snapshots are taken some thousand times.
    """
    found: dict[str, Any] = {}
    left = [(str(key), part) for key, part in reversed(list(whole.items()))]
    while left:
        place, value = left.pop()
        if isinstance(value, torch.Tensor):
            found[place] = (value.detach().to_dense() if value.is_sparse else value.detach()).clone()
        elif value is None or isinstance(value, (int, float, str)):
            found[place] = value
        elif isinstance(value, Mapping):
            left += [(f"{place}/{key}", part) for key, part in reversed(list(value.items()))]
        elif isinstance(value, (list, tuple)):
            left += [(f"{place}/{index}", value[index]) for index in reversed(range(len(value)))]
        else:
            found[place] = value
    return found


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shown = value.flatten()[:3].tolist()
        return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)} {shown} on {value.device}"
    return repr(value)
