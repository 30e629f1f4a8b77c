"""Check what compiled code calls in a region: functions left to eager, transforms, and dtypes that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.formats import OTHER
from .support import compiler

BACKENDS = pytest.mark.parametrize("backend", ["eager", deep("standard", "aot_eager")])
TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor], torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "grad_and_value": lambda f, x: torch.func.grad_and_value(f)(x)[0],
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones((), device=x.device))[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "vmap": lambda f, x: torch.vmap(f)(torch.stack([x, -x])),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


def _integers(target: Target, rng: torch.Generator, size: int = 4) -> torch.Tensor:
    """Return a matrix of small integers and a little more, which 16 bits round off."""
    return (torch.randint(1, 3, (size, size), generator=rng) * (1 + 2.0**-11)).to(target.device)


@contract("AMP-COMPILE-030")
@BACKENDS
def test_functions_left_to_eager(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    """A function under torch.compiler.disable, with a region around it in compiled code or around that."""
    case.require(target, torch.float16, torch.bfloat16)
    kind = target.device_type
    states: list[tuple[bool, torch.dtype, bool]] = []

    @torch.compiler.disable
    def left(x: torch.Tensor) -> torch.Tensor:
        states.append(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        )
        return x @ x

    x = _integers(target, rng)
    for dtype in OTHER:
        for enabled in (True,) if case.level == "quick" else (True, False):

            def program(x: torch.Tensor, dtype: torch.dtype = dtype, enabled: bool = enabled) -> torch.Tensor:
                with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=enabled):
                    return left(x) * 2

            found = []
            for call in (program, torch.compile(program, backend=backend)):
                states.clear()
                with compiler(case):
                    within = call(x)
                    with torch.autocast(kind, dtype=OTHER[dtype]):
                        around = call(x)
                found.append((within, around, list(states)))
            (within, around, seen), (ours, ours_around, compiled) = found
            what = f"{dtype}, enabled {enabled}"
            case.equal(f"{what}: states in the function", compiled, seen)
            case.identical(f"{what}: result", ours, within)
            case.identical(f"{what}: result in a region of the other type", ours_around, around)


@contract("AMP-COMPILE-020")
@BACKENDS
def test_dtypes_that_are_given(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    """A dtype as an argument, by keyword, in a container and as an attribute, another at each call."""
    case.require(target, torch.float16, torch.bfloat16)
    kind, x = target.device_type, _integers(target, rng)

    def given(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with torch.autocast(kind, dtype=dtype):
            return x @ x

    class Holding(torch.nn.Module):
        dtype = torch.bfloat16

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return given(x, self.dtype)

    def held(settings: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        return given(x, **settings)

    with compiler(case):
        plain, named, contained = (torch.compile(one, backend=backend) for one in (given, given, held))
        module = Holding()
        owning = torch.compile(module, backend=backend)
        for number, dtype in enumerate((*OTHER, *OTHER)):
            module.dtype = dtype
            with torch.autocast(kind, dtype=dtype):
                expected = x @ x
            seen = {
                "argument": plain(x, dtype),
                "keyword": named(x, dtype=dtype),
                "container": contained({"dtype": dtype}, x),
                "attribute": owning(x),
            }
            for name, one in seen.items():
                case.identical(f"call {number}, {dtype} as {name}", one, expected)


@contract("AMP-COMPILE-001")
@pytest.mark.parametrize("backend", ["eager", deep("full", "aot_eager")])
@pytest.mark.parametrize("name", ["grad", *(deep("standard", name) for name in TRANSFORMS if name != "grad")])
def test_transforms(case: Case, target: Target, rng: torch.Generator, name: str, backend: str) -> None:
    """A transform in compiled code, with the region around it, and in the function that it transforms."""
    kind, x = target.device_type, _integers(target, rng)
    for dtype in case.supported(target)[-1:]:

        def loss(x: torch.Tensor) -> torch.Tensor:
            return (x @ x).float().sum()

        def inside(x: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            with torch.autocast(kind, dtype=dtype, cache_enabled=False):
                return loss(x)

        def around(x: torch.Tensor, dtype: torch.dtype = dtype) -> Any:
            with torch.autocast(kind, dtype=dtype, cache_enabled=False):
                return TRANSFORMS[name](loss, x)

        def within(x: torch.Tensor) -> Any:
            return TRANSFORMS[name](inside, x)

        for what, program in {"the region around": around, "the region inside": within}.items():
            with compiler(case):
                case.identical(f"{dtype}, {what}", torch.compile(program, backend=backend)(x), program(x))


@contract("AMP-COMPILE-044", on="cpu")
@pytest.mark.parametrize("backend", [deep("standard", "eager"), deep("standard", "aot_eager")])
def test_bodies_of_loops(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def loop(x: torch.Tensor) -> torch.Tensor:
        def body(count: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return count + 1, (x @ x).float() / 4

        found: torch.Tensor = while_loop(lambda count, x: count < 3, body, (torch.tensor(0), x))[1]
        return found

    x = _integers(target, rng, 2)
    for dtype in case.supported(target)[-1:]:
        expected = x
        with target.autocast(dtype, cache_enabled=False), torch.no_grad():
            for _ in range(3):
                expected = (expected @ expected).float() / 4
            with compiler(case):
                seen = torch.compile(loop, backend=backend, fullgraph=True)(x)
        case.identical(f"{dtype}: what the loop leaves", seen, expected)
