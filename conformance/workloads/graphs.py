"""A training iteration that is captured in a CUDA graph and replayed, as PyTorch's notes on CUDA graphs write it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(iteration: Callable[[], object], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Run the iteration once on a side stream, capture it, which runs nothing, and return what replays it.

    Gradients are set to None first, so that backward makes them in the graph's memory and replays overwrite them.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs, Whole-network capture.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.stream(side):
        iteration()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration()
    return graph.replay
