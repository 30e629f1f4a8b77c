"""Check the autocast state, the errors, the threads and the nested calls of compiled programs against eager."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ...harness.check import Case, by_seed, contract, deep
from ...harness.targets import Target
from ...oracles.region.stack_model import State, observe
from .observation import observed
from .programs import AMBIENT, PROGRAMS, drawn
from .support import ambient, bound, compiler, dtypes_of, made_anew, same
from .ways import WAYS

# Seconds after which a thread is considered dead.
PATIENCE = 120.0


def states(call: Callable[[Callable[[], None]], object], *, breaks: bool) -> list[State]:
    """Return the states at the pauses of a program, which `call` runs with the function that looks."""
    seen: list[State] = []

    def look() -> None:
        seen.append(observe())

    call(torch.compiler.disable(look) if breaks else look)
    return seen


@contract("AMP-COMPILE-030")
@pytest.mark.parametrize("backend", ["eager", deep("full", "aot_eager")])
@pytest.mark.parametrize("name", ["nested", *(deep("full", each) for each in ("siblings", "getters", "drawn"))])
def test_state_at_graph_breaks(case: Case, target: Target, rng: torch.Generator, backend: str, name: str) -> None:
    program = PROGRAMS[name] if name in PROGRAMS else drawn(case.seed)
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            leaves = program.leaves(target.device, rng)

            def eager(look: Callable[[], None], dtype: torch.dtype = dtype, leaves: Any = leaves) -> None:
                bound(program, target, dtype, pause=look)(*leaves)

            def compiled(look: Callable[[], None], dtype: torch.dtype = dtype, leaves: Any = leaves) -> None:
                torch.compile(bound(program, target, dtype, pause=look), backend=backend)(*leaves)

            before = observe()
            expected, seen = states(eager, breaks=False), states(compiled, breaks=True)
            case.equal(f"{dtype}: pauses", len(seen), len(expected))
            for number, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
                case.equal(f"{dtype}: state that differs at pause {number}", ours.differences(theirs), [])
            case.equal(f"{dtype}: state that the program changed", observe().differences(before), [])


class Broken(ArithmeticError):
    """Raised in a region."""


def _raises(dtype: torch.dtype, kind: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if kind == "python":
        raise Broken("in the region")
    if kind == "shapes":
        return torch.mm(x, w[:2])
    return torch.addmm(x.to(dtype), w, w.double())


# Errors of Python end the tracing in Dynamo, whichever backend there is; those of types come from eager kernels.
LEVELS = {("eager", "python"): "quick", ("eager", "shapes"): "full", ("aot_eager", "python"): "full"}
RAISING = [
    deep(LEVELS.get((backend, kind), "standard"), (backend, kind), id=f"{backend}-{kind}")
    for backend in ("eager", "aot_eager")
    for kind in ("python", "shapes", "types")
]


@contract("AMP-COMPILE-031")
@pytest.mark.parametrize("pair", RAISING)
def test_errors(case: Case, target: Target, pair: tuple[str, str]) -> None:
    (backend, kind), device_type = pair, target.device_type
    x, w = torch.randn(2, 4, 4).to(target.device)
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()

            def program(x: torch.Tensor, w: torch.Tensor, raises: bool, dtype: torch.dtype = dtype) -> torch.Tensor:
                with torch.autocast(device_type, dtype=dtype):
                    y = torch.mm(x, w)
                    with torch.autocast(device_type, enabled=False):
                        if raises:
                            y = _raises(dtype, kind, y, w)
                return torch.mm(x, y.float())

            compiled = torch.compile(program, backend=backend)
            before = observe()
            promised = error_of(functools.partial(program, x, w, True))
            for number in range(2):
                seen = error_of(functools.partial(compiled, x, w, True))
                case.true(
                    f"{dtype}: error of call {number} is a {type(promised).__name__}",
                    isinstance(seen, type(promised)),
                    type(seen).__name__,
                )
                if kind == "python":
                    case.equal(f"{dtype}: its message", str(seen), str(promised))
                case.equal(f"{dtype}: state that the error left changed", observe().differences(before), [])
                # The control: the same code without an error.
                case.identical(f"{dtype}: result after error {number}", compiled(x, w, False), program(x, w, False))


# Ways that run the program in Python while they capture it.
CAPTURING = ("export", "make_fx", "make_fx-pre_dispatch", "jit.trace")


def _broken(device_type: str, dtype: torch.dtype, nested: bool) -> Callable[..., torch.Tensor]:
    """Return a program that raises in its region, or in a disabled one inside of it."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
            y = torch.mm(x, w)
            with torch.autocast(device_type, enabled=False) if nested else contextlib.nullcontext():
                _raises(dtype, "python", y, w)
        return y

    return program


@contract("AMP-COMPILE-031")
@pytest.mark.parametrize("way", [CAPTURING[0], *(deep("standard", way) for way in CAPTURING[1:])])
def test_errors_while_capturing(case: Case, target: Target, way: str) -> None:
    leaves = tuple(torch.randn(2, 4, 4).to(target.device))
    with compiler(case, way):
        for dtype, nested, around in itertools.product(dtypes_of(case, target), (False, True), (False, True)):
            torch._dynamo.reset()
            program = _broken(target.device_type, dtype, nested)
            with ambient(target, dtype)() if around else contextlib.nullcontext():
                before = observe()
                seen = error_of(functools.partial(WAYS[way].make, program, leaves))
                after = observe()
            what = f"{dtype}, {'in two regions' if nested else 'in one region'}{' of its own in another one' * around}"
            case.true(
                f"{what}: the program's own error", isinstance(seen, Broken), f"{type(seen).__name__}: {seen}"[:80]
            )
            case.equal(f"{what}: state that the error left changed", after.differences(before), [])


class _Twice(torch.nn.Module):
    """A Linear layer that is used twice, in the surrounding region or in one of its own."""

    def __init__(self, region: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.layer, self.region = torch.nn.Linear(4, 4), region

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self.region():
            return (self.layer(self.layer(x)),)


HOLDING = ("make_fx", "make_fx-pre_dispatch", "export", "export-strict", "export-decomposed", "eager", "aot_eager")


@contract("AMP-COMPILE-064")
@pytest.mark.parametrize("way", [HOLDING[0], *(by_seed("standard", 2, way) for way in HOLDING[1:])])
def test_parameters_that_change(case: Case, target: Target, rng: torch.Generator, way: str) -> None:
    values = [torch.randn(4, 4, generator=rng) for _ in range(3)]
    with compiler(case):
        for dtype, inside in itertools.product(dtypes_of(case, target), (False, True)):
            torch._dynamo.reset()
            region = functools.partial(torch.autocast, target.device_type, dtype=dtype)
            model = _Twice(region if inside else contextlib.nullcontext).to(target.device)
            x, first, second = (value.to(target.device) for value in values)
            with torch.no_grad():
                model.layer.weight.copy_(first)
            with region():
                before = model(x)[0].detach()
                captured = WAYS[way].make(model, (x,))
                captured(x)
            with torch.no_grad():
                model.layer.weight.copy_(second)
            with region():
                seen, expected = captured(x)[0].detach(), model(x)[0].detach()
            what = f"{dtype}, region {'inside' if inside else 'around'}"
            case.identical(f"{what}: result with other parameters", seen, expected)
            case.true(f"{what}: it is another one than before (control)", not torch.equal(before, expected))


def error_of(call: Callable[[], object]) -> Exception | None:
    """Return what `call` raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


@contract("AMP-COMPILE-032")
@pytest.mark.parametrize("way", ["eager", deep("standard", "aot_eager")])
def test_threads(case: Case, target: Target, rng: torch.Generator, way: str) -> None:
    with compiler(case):
        for dtype in dtypes_of(case, target):
            leaves, call, compiled = made_anew(WAYS[way], AMBIENT["plain_inside"], target, dtype, rng)
            around = ambient(target, dtype, cache_enabled=False)
            inside: dict[str, Any] = {"around": around, "around_backward": around}
            expected, outside = observed(call, leaves, **inside), observed(call, leaves)
            same(case, f"{dtype}: in a region of this thread", observed(compiled, leaves, **inside), expected)
            with around(), ThreadPoolExecutor(1) as pool:
                # Regions are of the thread that opens them.
                other = pool.submit(observed, compiled, leaves).result(PATIENCE)
                same(case, f"{dtype}: in a thread that was started inside a region", other, outside)
                again = pool.submit(observed, compiled, leaves, **inside).result(PATIENCE)
                same(case, f"{dtype}: in a region of that thread", again, expected)
            same(case, f"{dtype}: in this thread again", observed(compiled, leaves), outside)


def _in_regions(function: Callable[..., Any], device_type: str, dtype: torch.dtype) -> Callable[..., Any]:
    def outer(*given: torch.Tensor) -> Any:
        with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
            (low,) = function(*given)
            with torch.autocast(device_type, enabled=False):
                (full,) = function(*given)
        return low, full, *function(*given)

    return outer


@contract("AMP-COMPILE-033")
@pytest.mark.parametrize("backend", [deep("full", "eager"), deep("standard", "aot_eager")])
def test_nested_calls(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    """A compiled function in a region of a compiled, and of an uncompiled, function."""
    program = AMBIENT["island_inside"]
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            leaves = program.leaves(target.device, rng)
            call = bound(program, target, dtype, cache=False)
            inner = torch.compile(call, backend=backend)

            outer, plain = (_in_regions(each, target.device_type, dtype) for each in (inner, call))
            expected = observed(plain, leaves)
            whole = torch.compile(outer, backend=backend)
            same(case, f"{dtype}: called by compiled code", observed(whole, leaves), expected)
            # Backward of a part that is called in a region is AMP-COMPILE-023.
            with torch.no_grad():
                seen, expected = observed(outer, leaves), observed(plain, leaves)
            same(case, f"{dtype}: called by eager code", seen, expected)
