"""CUDA graph capture and replay as in PyTorch's notes on CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(iteration: Callable[[], object], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Run the iteration once on a side stream, capture it, which runs nothing, and return what replays it.

    Gradients are set to None first, so that backward makes them in the graph's memory and replays overwrite them.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs, Whole-network capture.
    """
    optimizer.zero_grad(set_to_none=True)
    warmed(iteration)
    optimizer.zero_grad(set_to_none=True)
    return recorded(iteration).replay


def warmed(work: Callable[[], object]) -> None:
    """Run the work once on a side stream, as what it sets up must be there before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)


def recorded(
    work: Callable[[], object],
    *,
    shared: torch.cuda.CUDAGraph | None = None,
    generator: torch.Generator | None = None,
) -> torch.cuda.CUDAGraph:
    """Capture the work, in the memory pool of the graph `shared` where one is given, and return the graph.

    `generator` is one of the caller's own that the work draws from.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs, Graph memory management.
    """
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, pool=None if shared is None else shared.pool()):
        work()
    return graph
