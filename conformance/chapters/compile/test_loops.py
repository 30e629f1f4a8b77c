"""Check that loops and branches of compiled code run in their regions, and pass gradients, as loops of Python do."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.error_bounds import distance_of_chains
from .support import compiler, dtypes_of

Region: TypeAlias = Callable[[], AbstractContextManager[Any]]
Regions: TypeAlias = dict[str, Region]
Results: TypeAlias = tuple[Tensor, ...]
Program: TypeAlias = Callable[[Region, Tensor, Tensor, Tensor], Results]

TIMES = 3


def _step(region: Region, carried: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is carried, in float32 whatever the region is, and what shows the region."""
    with region():
        product = ((carried * x) @ w) / 4
    # Without a cast where none is needed: a body that is made in another region then carries another type.
    return product if product.dtype == x.dtype else product.float(), product * 2


def _steps(region: Region, first: Tensor, x: Tensor, w: Tensor) -> Results:
    for _ in range(TIMES):
        first = _step(region, first, x, w)[0]
    return (first,)


def _scanned(region: Region, first: Tensor, x: Tensor, w: Tensor) -> Results:
    shown = []
    for number in range(TIMES):
        first, one = _step(region, first, x * (number + 1), w)
        shown.append(one)
    return first, torch.stack(shown)


def _cond(region: Region, first: Tensor, x: Tensor, w: Tensor) -> Results:
    def product(first: Tensor, w: Tensor) -> Tensor:
        with region():
            return first @ w

    found: Tensor = torch.cond(x[0, 0] > 0, product, lambda first, w: product(first, w) * 2, (first, w))
    return (found,)


def _if(region: Region, first: Tensor, x: Tensor, w: Tensor) -> Results:
    with region():
        found = first @ w
    return (found if x[0, 0] > 0 else found * 2,)


def _programs() -> dict[str, tuple[Program, Program]]:
    """Return programs with an operator, by its name, each with the one that Python runs."""
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop

    def loop(region: Region, first: Tensor, x: Tensor, w: Tensor) -> Results:
        def body(count: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, _step(region, carried, x, w)[0]

        start = torch.tensor(0, device=x.device)
        return (while_loop(lambda count, carried: count < TIMES, body, (start, first))[1],)

    def scanned(region: Region, first: Tensor, x: Tensor, w: Tensor) -> Results:
        given = torch.stack([x * (number + 1) for number in range(TIMES)])
        carried, shown = scan(lambda carried, each: _step(region, carried, each, w), first, given)
        return carried, shown

    return {"cond": (_cond, _if), "while_loop": (loop, _steps), "scan": (scanned, _scanned)}


OPERATORS = ("cond", "while_loop", "scan")
INNER = ("none", "region", "disabled")
# Of the 16-bit products on the longest way of a gradient.
ROUNDINGS = {"cond": 1, "while_loop": 2 * TIMES, "scan": 2 * TIMES}


def _judge(
    case: Case, target: Target, rng: torch.Generator, op: str, inner: str, backend: str, trained: str | None
) -> None:
    x, w, first = (torch.randn(4, 4, generator=rng).to(target.device) for _ in range(3))
    ours, theirs = _programs()[op]
    kind = target.device_type
    for dtype in dtypes_of(case, target):
        inside: Regions = {
            "none": contextlib.nullcontext,
            "region": functools.partial(torch.autocast, kind, dtype=dtype, cache_enabled=False),
            "disabled": functools.partial(torch.autocast, kind, enabled=False),
        }
        for outer in ("none", "region"):

            def outcome(
                program: Program, *, compiled: bool, outer: str = outer, inside: Regions = inside
            ) -> dict[str, Any]:
                leaves = {
                    name: one.clone().requires_grad_(
                        trained in ("all", "all but the first carried") and name != "first"
                    )
                    for name, one in {"first": first, "x": x, "w": w}.items()
                }
                if trained == "all":
                    leaves["first"].requires_grad_()

                def call(first: Tensor, x: Tensor, w: Tensor) -> Results:
                    with inside[outer]():
                        return program(inside[inner], first, x, w)

                made = torch.compile(call, backend=backend, fullgraph=True) if compiled else call
                with contextlib.nullcontext() if trained else torch.no_grad():
                    results = made(**leaves)
                found: dict[str, Any] = {f"result {place}": one.detach() for place, one in enumerate(results)}
                if trained:
                    torch.stack([one.double().sum() for one in results]).sum().backward()
                    grads = {f"gradient of {name}": one.grad for name, one in leaves.items()}
                    found |= {name: one for name, one in grads.items() if one is not None}
                return found

            what = f"{dtype}, {outer} around"
            with compiler(case):
                seen = outcome(ours, compiled=True)
            expected = outcome(theirs, compiled=False)
            case.equal(f"{what}: dtypes", *({n: str(t.dtype) for n, t in each.items()} for each in (seen, expected)))
            for name, wanted in expected.items():
                if name.startswith("result"):
                    case.identical(f"{what}: {name}", seen[name], wanted)
                else:
                    # Gradients of the 16-bit products are summed in another order, or in float32.
                    distance = float((seen[name].double() - wanted.double()).norm() / wanted.double().norm())
                    case.at_most(f"{what}: distance of {name}", distance, distance_of_chains(dtype, ROUNDINGS[op]))


@contract("AMP-COMPILE-084", on="cpu")
@pytest.mark.parametrize("backend", [deep("standard", "eager"), "aot_eager"])
@pytest.mark.parametrize("inner", [inner if inner == "disabled" else deep("standard", inner) for inner in INNER])
@pytest.mark.parametrize("op", [deep("standard", "cond"), "while_loop", deep("standard", "scan")])
def test_bodies(case: Case, target: Target, rng: torch.Generator, op: str, inner: str, backend: str) -> None:
    _judge(case, target, rng, op, inner, backend, None)


@contract("AMP-COMPILE-087", on="cpu")
@pytest.mark.parametrize("backend", [deep("full", "eager"), deep("standard", "aot_eager")])
@pytest.mark.parametrize("inner", [deep("standard", inner) for inner in INNER])
@pytest.mark.parametrize("leaves", [deep("standard", "all"), deep("standard", "all but the first carried")])
@pytest.mark.parametrize("op", [deep("standard", op) for op in OPERATORS if op != "cond"])
def test_gradients_of_bodies(
    case: Case, target: Target, rng: torch.Generator, op: str, leaves: str, inner: str, backend: str
) -> None:
    _judge(case, target, rng, op, inner, backend, leaves)


@contract("AMP-COMPILE-095", on="cpu")
@pytest.mark.parametrize("backend", ["aot_eager", deep("full", "eager")])
@pytest.mark.parametrize("inner", ["none", *(deep("standard", inner) for inner in INNER if inner != "none")])
@pytest.mark.parametrize("leaves", ["all", deep("full", "all but the first carried")])
def test_gradients_of_branches(
    case: Case, target: Target, rng: torch.Generator, leaves: str, inner: str, backend: str
) -> None:
    _judge(case, target, rng, "cond", inner, backend, leaves)
