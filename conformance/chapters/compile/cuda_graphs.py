"""The mode of torch.compile that runs compiled code as CUDA graphs, and whether it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from ...harness.check import Case
from ...harness.targets import Target

MODE = "reduce-overhead"


@contextlib.contextmanager
def replays() -> Iterator[list[str]]:
    """Note the replays of CUDA graphs."""
    found: list[str] = []
    replay = torch.cuda.CUDAGraph.replay

    def noted(graph: torch.cuda.CUDAGraph) -> None:
        found.append("replay")
        replay(graph)

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", noted):
        yield found


def replayed(case: Case, target: Target, what: str, found: list[str], fewest: int) -> None:
    """Check that graphs were replayed, on a device that has them."""
    if target.device_type == "cuda":
        case.at_least(f"{what}: graphs that were replayed (control)", len(found), fewest)
