"""Check that a captured program keeps its regions when it is saved, copied or changed by passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ...harness.check import Case, by_seed, contract, deep
from ...harness.targets import Target
from .graph_passes import KEEPING, PASSES, Pass
from .observation import copies, observed
from .programs import PROGRAMS, Tensors
from .support import bound, compiler, dtypes_of, same, same_but_for_sums
from .ways import AsModule

# torch.export itself keeps the bits of these programs.
EXPORTABLE = ("one", "siblings", "float32_ops", "tied", "getters", "decorated", "module")


@contract("AMP-COMPILE-067")
@pytest.mark.parametrize("name", ["nested", *(by_seed("standard", 2, name) for name in EXPORTABLE)])
@pytest.mark.parametrize("how", [name if name == "saved" else deep("standard", name) for name in KEEPING])
def test_exported_programs(case: Case, target: Target, rng: torch.Generator, how: str, name: str) -> None:
    program = PROGRAMS[name]
    with compiler(case):
        # Each type is written in its own way.
        for dtype in case.supported(target):
            leaves = program.leaves(target.device, rng)
            call = bound(program, target, dtype, cache=False)
            kept = KEEPING[how](torch.export.export(AsModule(call), copies(leaves), strict=False))
            same(case, f"{dtype}", observed(kept, leaves), observed(call, leaves))


class _Holding(torch.nn.Module):
    """A product with a parameter, and the values of that type that a module can hold."""

    def __init__(self, kind: torch.dtype, amp: tuple[str, torch.dtype], rng: torch.Generator) -> None:
        super().__init__()
        self.amp = amp
        drawn = [torch.randn(4, 4, generator=rng).to(kind) for _ in range(4)]
        self.weight = torch.nn.Parameter(drawn[0])
        self.register_buffer("kept", drawn[1])
        self.register_buffer("passing", drawn[2], persistent=False)
        self.constant = drawn[3]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        held = (self.weight, self.get_buffer("kept"), self.get_buffer("passing"), self.constant)
        with torch.autocast(self.amp[0], dtype=self.amp[1], cache_enabled=False):
            low = torch.mm(x, self.weight.float())
        return low, *(one * 2 for one in held), x.to(self.constant.dtype) + self.constant


@contract("AMP-COMPILE-067")
@pytest.mark.parametrize("how", [name if name == "saved" else deep("standard", name) for name in KEEPING])
def test_values_of_exported_programs(case: Case, target: Target, rng: torch.Generator, how: str) -> None:
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    with compiler(case):
        for dtype in dtypes_of(case, target):
            for kind in filter(target.computes_in, kinds) if case.level != "quick" else (dtype,):
                x = torch.randn(4, 4, generator=rng).to(target.device)
                module = _Holding(kind, (target.device_type, dtype), rng).to(target.device)
                module.constant = module.constant.to(target.device)
                with torch.no_grad():
                    kept = KEEPING[how](torch.export.export(module, (x,), strict=False))
                    seen, expected = kept(x), module(x)
                for number, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
                    case.identical(f"{dtype}, values of {kind}: result {number}", ours, theirs)


def traced(program: Callable[..., Any], leaves: Tensors, changed: Pass) -> Callable[..., Any]:
    """Return what the pass makes of the graph of make_fx."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return changed(make_fx(program, pre_dispatch=True)(*leaves))


def compiled(program: Callable[..., Any], leaves: Tensors, changed: Pass) -> Callable[..., Any]:
    """Return the program compiled with what the pass makes of Dynamo's graph, as a backend may change it."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return changed(graph)

    found: Callable[..., Any] = torch.compile(program, backend=backend, fullgraph=True)
    return found


GRAPHS = {"make_fx": traced, "Dynamo": compiled}
QUICK = (("make_fx", "a part for each node", "nested"), ("make_fx", "dead code", "nested"))
CHANGED = [
    deep(
        "quick" if (graph, name, program) in QUICK else "standard",
        (graph, name, program),
        id=f"{graph}-{name}-{program}",
    )
    for graph in GRAPHS
    for name in PASSES
    for program in ("nested", "siblings")
]


@contract("AMP-COMPILE-068")
@pytest.mark.parametrize("changed", CHANGED)
def test_passes(case: Case, target: Target, rng: torch.Generator, changed: tuple[str, str, str]) -> None:
    graph, name, chosen = changed
    program = PROGRAMS[chosen]
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            leaves = program.leaves(target.device, rng)
            call = bound(program, target, dtype, cache=False)
            made = GRAPHS[graph](call, copies(leaves), PASSES[name])
            seen, expected = observed(made, leaves), observed(call, leaves)
            # Gradients of several uses are added in the order of the graph.
            same_but_for_sums(case, program, target, dtype, leaves, seen, expected)
