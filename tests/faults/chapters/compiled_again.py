"""Compilers that lose the autocast state of a graph that is compiled again, and widths of what a graph computes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.faults import fault
from tests.faults.breaking import edited


@fault("AMP-COMPILE-071")
def graphs_of_any_size_are_not_guarded() -> Iterator[None]:
    """The graph that is compiled for each number of rows has no guard on the autocast state."""
    from torch._dynamo import guards

    with edited(
        guards.GuardBuilder.GLOBAL_STATE,
        "    self.guard_manager.root.add_global_state_guard(",
        "    nodes = output_graph.graph.nodes\n"
        "    if any(isinstance(node.meta.get('example_value'), torch.SymInt) for node in nodes):\n"
        "        return\n"
        "    self.guard_manager.root.add_global_state_guard(",
    ):
        yield


@fault("AMP-COMPILE-071")
def the_second_graph_is_not_guarded() -> Iterator[None]:
    """The graph that is compiled because an input requires a gradient has no guard on the autocast state."""
    from torch._dynamo import guards

    with edited(
        guards.GuardBuilder.GLOBAL_STATE,
        "    self.guard_manager.root.add_global_state_guard(",
        "    values = [node.meta.get('example_value') for node in output_graph.graph.nodes if node.op == 'placeholder']\n"
        "    found = [value for value in values if isinstance(value, torch.Tensor)]\n"
        "    if any(each.requires_grad and not isinstance(each, torch.nn.Parameter) for each in found):\n"
        "        return\n"
        "    self.guard_manager.root.add_global_state_guard(",
    ):
        yield
