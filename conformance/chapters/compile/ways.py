"""Ways to run a program other than plain and eager: compiled, exported, and traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from .programs import Tensors

Call: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Way:
    """A way to run a program; `make` gets the program as a function of tensors, and the tensors.

    `exact` ways leave the arithmetic as it is. `breaks` breaks the graph wherever the program pauses. What `recorded`
    ways make has the casts of the regions that were open then as ops, and knows no grad mode. What ways that are not
    `differentiable` make is for inference.
    """

    name: str
    make: Callable[[Call, Tensors], Call]
    exact: bool = True
    breaks: bool = False
    recorded: bool = False
    differentiable: bool = True


def _compiled(name: str, backend: str, *, exact: bool = True, breaks: bool = False, **options: Any) -> Way:
    def make(program: Call, leaves: Tensors) -> Call:
        call: Call = torch.compile(program, backend=backend, **options)
        return call

    return Way(name, make, exact, breaks)


class AsModule(torch.nn.Module):
    """A program as the module that torch.export asks for."""

    def __init__(self, program: Call) -> None:
        super().__init__()
        self.program = program

    def forward(self, *leaves: torch.Tensor) -> Any:
        return self.program(*leaves)


def _exported(*, strict: bool) -> Callable[[Call, Tensors], Call]:
    def make(program: Call, leaves: Tensors) -> Call:
        from torch.export import export

        call: Call = export(AsModule(program), leaves, strict=strict).module()
        return call

    return make


def _decomposed(program: Call, leaves: Tensors) -> Call:
    from torch.export import export

    call: Call = export(AsModule(program), leaves, strict=False).run_decompositions().module()
    return call


def _traced(*, pre_dispatch: bool) -> Callable[[Call, Tensors], Call]:
    def make(program: Call, leaves: Tensors) -> Call:
        from torch.fx.experimental.proxy_tensor import make_fx

        # Without a table of decompositions, detach is traced as alias from 2.15 on, which does not end gradients.
        call: Call = make_fx(program, {}, pre_dispatch=pre_dispatch)(*leaves)
        return call

    return make


def _jit_traced(program: Call, leaves: Tensors) -> Call:
    call: Call = torch.jit.trace(program, leaves, check_trace=False)
    return call


WAYS: Mapping[str, Way] = {
    way.name: way
    for way in (
        _compiled("eager", "eager", fullgraph=True),
        _compiled("eager-breaks", "eager", breaks=True),
        _compiled("aot_eager", "aot_eager", fullgraph=True),
        _compiled("aot_eager-breaks", "aot_eager", breaks=True),
        _compiled("aot_eager-dynamic", "aot_eager", fullgraph=True, dynamic=True),
        _compiled("aot_eager_decomp_partition", "aot_eager_decomp_partition", exact=False, fullgraph=True),
        _compiled("inductor", "inductor", exact=False, fullgraph=True),
        _compiled("inductor-breaks", "inductor", exact=False, breaks=True),
        Way("export", _exported(strict=False)),
        Way("export-strict", _exported(strict=True)),
        Way("export-decomposed", _decomposed, exact=False, differentiable=False),
        Way("make_fx", _traced(pre_dispatch=False), recorded=True),
        Way("make_fx-pre_dispatch", _traced(pre_dispatch=True)),
        Way("jit.trace", _jit_traced, exact=False, recorded=True),
    )
}
"""The ways by name."""


def _exported_for_any_size(program: Call, leaves: Tensors) -> Call:
    from torch.export import Dim, export

    size = Dim("size", min=2, max=64)
    shapes = (tuple(dict.fromkeys(range(leaf.dim()), size) for leaf in leaves),)
    exported = export(AsModule(program), leaves, strict=False, dynamic_shapes=shapes)
    # The guards of sizes, which are no part of the promise, raise a NameError in 2.9.
    unguarded = {"check_guards": False} if "check_guards" in inspect.signature(exported.module).parameters else {}
    call: Call = exported.module(**unguarded)
    return call


def _traced_for_any_size(program: Call, leaves: Tensors) -> Call:
    from torch.fx.experimental.proxy_tensor import make_fx

    call: Call = make_fx(program, pre_dispatch=True, tracing_mode="symbolic")(*leaves)
    return call


OF_ANY_SIZE: Mapping[str, Callable[[Call, Tensors], Call]] = {
    "export": _exported_for_any_size,
    "make_fx-pre_dispatch": _traced_for_any_size,
}
"""Ways to capture a program of square matrices of one size, for any size from 2 on, by name."""
