"""Check that inductor rounds where eager does if it is asked to emulate eager's casts: the bits are those of eager."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from ...oracles.numbers.formats import OTHER
from .observation import observed
from .programs import Program, Tensors
from .support import bound, compiler, dtypes_of, inductor, same


def arithmetic(amp: Any, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Sums and products, which every kernel rounds alike, in chains of 16 bits, and round trips to 16 bits."""
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        low = torch.mm(x, w)
        chain = low * 0.3 + low
        trip = (v * 0.7).to(amp.dtype).float() * 3
        tenth = torch.full((4, 4), 0.1, dtype=amp.dtype, device=x.device)
        return (
            chain,
            torch.relu(chain - low) * chain,
            trip * trip,
            (v * 0.9).to(amp.dtype).to(OTHER[amp.dtype]),
            tenth.float() * v,
            chain.float() * trip,
        )


ARITHMETIC = Program("arithmetic", arithmetic, ((4, 4),) * 3)


def _graph_itself(graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
    """Stand for the code generation of inductor: run the graph that it gets."""
    from functorch.compile import make_boxed_func

    made: Callable[..., Any] = make_boxed_func(graph.forward)
    return made


def graphs_of_inductor(graph: Any, inputs: Any) -> Callable[..., Any]:
    """Compile as inductor does, decompositions, passes and partition, but for the kernels."""
    from torch._inductor.compile_fx import compile_fx

    made: Callable[..., Any] = compile_fx(graph, inputs, inner_compile=_graph_itself)
    return made


def _agree(case: Case, target: Target, rng: torch.Generator, backend: Any) -> None:
    for dtype in dtypes_of(case, target):
        torch._dynamo.reset()
        leaves = ARITHMETIC.leaves(target.device, rng)
        call = bound(ARITHMETIC, target, dtype, cache=False)
        seen = observed(torch.compile(call, backend=backend, fullgraph=True), leaves)
        same(case, f"{dtype}", seen, observed(call, leaves))


@contract("AMP-COMPILE-065")
@pytest.mark.parametrize("part", [deep("standard", "graphs")])
def test_roundings_of_graphs(case: Case, target: Target, rng: torch.Generator, part: str) -> None:
    # inductor traces the attention that it looks for in fp16; the programs have both types.
    case.require_arithmetic(target, torch.float16, torch.bfloat16)
    with compiler(case):
        from torch._inductor import config

        with config.patch(emulate_precision_casts=True):
            _agree(case, target, rng, graphs_of_inductor)


# The ways to ask one compilation for it. Names of options may have dashes.
OPTIONS = ("emulate_precision_casts", "emulate-precision-casts")


@contract("AMP-COMPILE-065")
@pytest.mark.parametrize("option", [deep("standard", name) for name in OPTIONS])
def test_option_of_torch_compile(case: Case, target: Target, rng: torch.Generator, option: str) -> None:
    case.require_arithmetic(target, torch.float16, torch.bfloat16)
    with compiler(case):
        from torch._inductor import compile_fx, config

        asked: list[bool] = []

        def graph_itself(*given: Any, **options: Any) -> Callable[..., Any]:
            asked.append(config.emulate_precision_casts)
            return _graph_itself(*given, **options)

        changed = functools.partial(compile_fx.compile_fx, inner_compile=graph_itself)
        with mock.patch.object(compile_fx, "compile_fx", changed), config.patch(emulate_precision_casts=False):
            for value in (True, False):
                asked.clear()
                for dtype in dtypes_of(case, target):
                    torch._dynamo.reset()
                    call = bound(ARITHMETIC, target, dtype, cache=False)
                    leaves = ARITHMETIC.leaves(target.device, rng)
                    observed(torch.compile(call, backend="inductor", fullgraph=True, options={option: value}), leaves)
                case.equal(f"emulate_precision_casts while inductor compiles with {value}", set(asked), {value})


@contract("AMP-COMPILE-065")
@needs("compiled kernels")
@pytest.mark.parametrize("part", [deep("full", "kernels")])
def test_roundings_of_kernels(case: Case, target: Target, rng: torch.Generator, part: str) -> None:
    with compiler(case), inductor(case, emulate_precision_casts=True):
        _agree(case, target, rng, "inductor")
