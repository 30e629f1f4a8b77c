"""What one rank computes where gradients accumulate in windows of no_sync(), between steps that synchronize."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "buckets": {"bucket_cap_mb": 0.0001},
}
"""Options of DistributedDataParallel by name."""
WINDOWS = (3, 1, 3, 2, 1)
"""How many micro-batches each step has; all but the last of a step are in no_sync()."""


def gradients_of_windows(dtype: torch.dtype, option: str, synchronized_first: bool) -> list[str]:
    """Name the steps whose gradients are not the mean over the ranks of what their micro-batches add up to.

    All numbers are small integers. `synchronized_first` puts a step of one micro-batch before the others.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 1, bias=False))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.fill_(1)
    model = DistributedDataParallel(layers, **OPTIONS[option])
    found: list[str] = []
    for step, count in enumerate((1,) * synchronized_first + WINDOWS):
        model.zero_grad()
        try:
            for number in range(count):
                with contextlib.nullcontext() if number == count - 1 else model.no_sync():
                    with torch.autocast("cpu", dtype=dtype):
                        loss = model(torch.full((1, WIDTH), float(step + number + 2 * rank))).float().sum()
                    loss.backward()
        except RuntimeError as error:
            return [*found, f"step {step}: {str(error).splitlines()[0][:120]}"]
        given = sum(step + number + 2 * other for other in range(world) for number in range(count)) / world
        for name, expected in (("0.weight", given), ("1.weight", given * WIDTH)):
            seen = layers.get_parameter(name).grad
            if seen is None or not bool((seen == expected).all()):
                found.append(f"step {step}: {name}: {seen if seen is None else seen.flatten()[0]}, not {expected}")
    return found


class _Branches(nn.Module):
    """A layer of one number for each name, of which a forward pass uses some."""

    def __init__(self) -> None:
        super().__init__()
        for name in BRANCHES:
            setattr(self, name, nn.Linear(1, 1, bias=False))

    def forward(self, x: torch.Tensor, used: tuple[str, ...]) -> torch.Tensor:
        return sum((getattr(self, name)(x) for name in used), torch.zeros(()))


BRANCHES = ("first", "second", "third")
_USED: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("first",), ("second",)),
    (("first", "second"), ("first",), ("third",)),
    (("second",), ("first", "third")),
    (("third",), ("third",), ("first", "second")),
)
"""Which layers each micro-batch of a step uses; the last one of a step synchronizes those of all before it."""


def gradients_of_branches(dtype: torch.dtype) -> list[str]:
    """Name the steps whose gradients are not the means over the ranks, of layers that some micro-batches use."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    layers = _Branches()
    model = DistributedDataParallel(layers, find_unused_parameters=True)
    found: list[str] = []
    for step, batches in enumerate(_USED):
        model.zero_grad()
        expected = dict.fromkeys(BRANCHES, 0.0)
        for number, used in enumerate(batches):
            with contextlib.nullcontext() if number == len(batches) - 1 else model.no_sync():
                with torch.autocast("cpu", dtype=dtype):
                    loss = model(torch.full((1, 1), float(number + 1 + 2 * rank)), used).float().sum()
                loss.backward()
            for name in used:
                expected[name] += number + world  # the mean of number + 1 + 2 * rank
        for name, mean in expected.items():
            slope = layers.get_submodule(name).weight.grad
            seen = 0.0 if slope is None else float(slope)
            if seen != mean:
                found.append(f"step {step}: {name}: {seen}, not {mean}")
    return found
