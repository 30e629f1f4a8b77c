"""Passes that copy or change a captured graph and may not change what it computes, by name."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

Pass: TypeAlias = Callable[[torch.fx.GraphModule], Callable[..., Any]]


def _split(parts: int) -> Pass:
    def split(graph: torch.fx.GraphModule) -> Callable[..., Any]:
        from torch.fx.passes.split_module import split_module

        places = {node: place for place, node in enumerate(graph.graph.nodes)}
        count = min(parts, len(places))
        found: Callable[..., Any] = split_module(graph, graph, lambda node: places[node] * count // len(places))
        return found

    return split


def _without_dead_code(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    """Eliminate dead code, of which there is an op after each one that is used."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.name.startswith("mm"):
            with graph.graph.inserting_after(node):
                graph.graph.call_function(torch.neg, (node,))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _copied_nodes(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    made = torch.fx.Graph()
    made.output(made.graph_copy(graph.graph, {}))
    return torch.fx.GraphModule(graph, made)


def _constants_folded(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    from torch.fx.experimental.const_fold import split_const_subgraphs

    return split_const_subgraphs(graph)


def _pickled(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    made: Callable[..., Any] = pickle.loads(pickle.dumps(graph))
    return made


EVERY_NODE = 1000
PASSES: Mapping[str, Pass] = {
    "a part for each node": _split(EVERY_NODE),
    "two parts": _split(2),
    "three parts": _split(3),
    "dead code": _without_dead_code,
    "constants": _constants_folded,
    "copy.deepcopy": copy.deepcopy,
    "pickle": _pickled,
    "graph_copy": _copied_nodes,
    "Transformer": lambda graph: torch.fx.Transformer(graph).transform(),
    "Interpreter": lambda graph: torch.fx.Interpreter(graph).run,
}
"""Passes by name; what they return is called as the graph is."""


def _loaded(program: Any) -> Callable[..., Any]:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    found: Callable[..., Any] = torch.export.load(buffer).module()
    return found


KEEPING: Mapping[str, Callable[[Any], Callable[..., Any]]] = {
    "saved": _loaded,
    "copied": lambda program: copy.deepcopy(program).module(),
    "unflattened": lambda program: torch.export.unflatten(program),
}
"""What makes of an exported program another one that is to compute the same, by name."""
