"""The mode of torch.compile that runs compiled code as CUDA graphs, and the replays of these."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

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
