"""Check the regions of programs traced by torch.export and make_fx."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.formats import OTHER
from ...oracles.region.stack_model import observe, probe_product, product_in

Tensors = tuple[torch.Tensor, ...]

PROGRAMS = ("one", "nested", "siblings", "off")
# The first trace of a process imports torch's tracing, about two seconds.
PROGRAM = pytest.mark.parametrize("program", [deep("standard", name) for name in PROGRAMS])


def regions(program: str, device_type: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the regions of a program as a tree: the arguments of autocast, then the inner regions."""
    leaf = (device_type, dtype, True, True)
    return {
        "one": ((leaf, ()),),
        "nested": ((leaf, (((device_type, OTHER[dtype], True, False), (((device_type, dtype, False, True), ()),)),)),),
        "siblings": (((device_type, dtype, True, False), ()), ((device_type, OTHER[dtype], True, True), ())),
        "off": (((device_type, dtype, False, False), ((leaf, ()),)),),
    }[program]


def run(tree: tuple[Any, ...], a: torch.Tensor, b: torch.Tensor) -> Tensors:
    """Compute a product in each region, before and after its inner regions, and one outside."""
    products: list[torch.Tensor] = []

    def inside(part: tuple[Any, ...]) -> None:
        for (device_type, dtype, enabled, cache_enabled), inner in part:
            with torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled):
                products.append(torch.mm(a, b))
                inside(inner)
                products.append(torch.mm(a, b))

    inside(tree)
    return *products, torch.mm(a, b)


def traced(program: Callable[..., Any], *arguments: torch.Tensor) -> torch.fx.GraphModule:
    # Not at the top: collecting this module would import torch's tracing.
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(program, pre_dispatch=True)(*arguments)


def recorded(graph: torch.fx.Graph) -> list[tuple[Any, ...]]:
    """Return the calls of the graph in order: arguments of an entered region, number of one that ends, product."""
    calls: list[tuple[Any, ...]] = []
    numbers: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            numbers[node] = len(numbers)
            calls.append(("enter", *node.args))
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            calls.append(("exit", numbers[node.args[0]]))
        elif node.op == "call_function":
            calls.append(("product",))
    return calls


def promised(tree: tuple[Any, ...], target: Target) -> list[tuple[Any, ...]]:
    """Return the calls, in the form of `recorded`; torch disables regions of types that the device does not support."""
    calls: list[tuple[Any, ...]] = []
    opened = 0

    def inside(part: tuple[Any, ...]) -> None:
        nonlocal opened
        for (device_type, dtype, enabled, cache), inner in part:
            number, opened = opened, opened + 1
            arguments = (device_type, dtype, enabled and target.supports(dtype), cache)
            calls.extend([("enter", *arguments), ("product",)])
            inside(inner)
            calls.extend([("product",), ("exit", number)])

    inside(tree)
    return [*calls, ("product",)]


def column(target: Target) -> Tensors:
    """The factors of `probe_product`, whose bits tell the arithmetic; shapes (2, 1) and (1, 1)."""
    return probe_product(target.device).detach(), torch.ones(1, 1, device=target.device)


@contract("AMP-REGION-090")
@PROGRAM
@pytest.mark.parametrize("again", [False, True], ids=["traced", "traced-again"])
def test_trace_keeps_regions(case: Case, target: Target, amp_dtype: torch.dtype, program: str, again: bool) -> None:
    tree = regions(program, target.device_type, amp_dtype)
    before = observe()
    graph = traced(lambda a, b: run(tree, a, b), *column(target))
    if again:
        graph = traced(graph, *column(target))
    case.equal("regions and products in the trace", recorded(graph.graph), promised(tree, target))
    case.equal("state that tracing changed", observe().differences(before), [])


def tracer_calls(program: Callable[..., object], *arguments: torch.Tensor) -> list[tuple[Any, ...]]:
    """Return the calls that regions make to torch.export's tracer, in the form of `recorded`; nothing is traced."""
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    calls: list[tuple[Any, ...]] = []
    opened: list[int] = []

    class Listener(PreDispatchTorchFunctionMode):
        def __init__(self) -> None:
            """Skip the tracer that the tracing mode requires."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.amp.autocast_mode._enter_autocast:
                opened.append(sum(call[0] == "enter" for call in calls))
                calls.append(("enter", *args))
            elif func is torch.amp.autocast_mode._exit_autocast:
                calls.append(("exit", opened.pop()))
            else:
                calls.extend([("product",)] if func is torch.mm else [])
                return func(*args, **(kwargs or {}))
            return None

    with Listener():
        program(*arguments)
    return calls


@contract("AMP-REGION-090")
@pytest.mark.parametrize("program", PROGRAMS)
def test_tracer_is_told_of_regions(case: Case, target: Target, program: str) -> None:
    for dtype in case.amp_dtypes:
        tree = regions(program, target.device_type, dtype)
        seen = tracer_calls(functools.partial(run, tree), *column(target))
        case.equal(f"{dtype}: regions and products that the tracer receives", seen, promised(tree, target))


@contract("AMP-REGION-091")
@PROGRAM
def test_traced_regions_run(case: Case, target: Target, amp_dtype: torch.dtype, program: str) -> None:
    tree = regions(program, target.device_type, amp_dtype)
    before = observe()
    arguments = column(target)
    eager = run(tree, *arguments)
    case.identical("a product of the eager program, outside (control)", eager[-1].cpu(), product_in(torch.float32))
    seen = traced(lambda a, b: run(tree, a, b), *arguments)(*arguments)
    case.equal("dtypes of the products", [product.dtype for product in seen], [product.dtype for product in eager])
    for number, (replayed, expected) in enumerate(zip(seen, eager, strict=True)):
        case.identical(f"product {number}", replayed, expected)
    case.equal("state that the traced program changed", observe().differences(before), [])


@contract("AMP-REGION-092")
@pytest.mark.parametrize("depth", [deep("standard", 1), deep("standard", 3)])
def test_exception_while_tracing(case: Case, target: Target, amp_dtype: torch.dtype, depth: int) -> None:
    before = observe()

    def breaks(left: int) -> None:
        with torch.autocast(target.device_type, dtype=amp_dtype):
            if left > 1:
                breaks(left - 1)
            raise ArithmeticError("in the region")

    def program(tensor: torch.Tensor) -> torch.Tensor:
        breaks(depth)
        return tensor

    case.raises("tracing", ArithmeticError, lambda: traced(program, torch.ones(2, device=target.device)))
    case.equal("state that the exception left changed", observe().differences(before), [])
