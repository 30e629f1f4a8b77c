"""Check custom autograd functions, custom operators and checkpoints inside compiled programs against eager."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from ...harness.check import Case, by_seed, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.formats import OTHER
from . import custom_parts
from .observation import Around, observed
from .programs import AMBIENT, PROGRAMS, Program, Tensors
from .recorded_ops import PARTS, RecordedOps
from .support import ambient, bound, compiler, dtypes_of, same
from .ways import WAYS

SHAPES = ((4, 4),) * 3
# The backends that torch.compile documents and that have autocast.
BACKENDS = ("cpu", "cuda", "xpu", "mps")


def around_part(part: Callable[..., torch.Tensor]) -> Program:
    """Return a program that uses `part` on float32 and 16-bit tensors, in a region, a disabled one and outside."""

    def function(amp: Any, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
        with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
            a = part(x, w)
            b = part(torch.mm(x, w).float(), v)
            with torch.autocast(amp.kind, enabled=False):
                c = part(x, v)
        return a, b, c, part(w, v)

    return Program("part", function, SHAPES)


def agrees(case: Case, target: Target, rng: torch.Generator, dtype: torch.dtype, way: str, program: Program) -> None:
    """Check the bits of a program in this way against eager."""
    leaves = program.leaves(target.device, rng)
    call = bound(program, target, dtype, cache=False)
    same(case, f"{dtype}", observed(WAYS[way].make(call, leaves), leaves), observed(call, leaves))


@contract("AMP-COMPILE-040")
@pytest.mark.parametrize("cast", [by_seed("standard", 1, "none"), by_seed("standard", 1, "float32"), "low"])
@pytest.mark.parametrize(
    "way", [deep("full", "eager"), deep("standard", "aot_eager"), deep("full", "aot_eager-breaks")]
)
def test_custom_functions(case: Case, target: Target, rng: torch.Generator, way: str, cast: str) -> None:
    with compiler(case):
        for dtype in dtypes_of(case, target):
            inputs = {"none": None, "float32": torch.float32, "low": dtype}[cast]
            part = custom_parts.product(target.device_type, inputs)
            agrees(case, target, rng, dtype, way, around_part(part))


@contract("AMP-COMPILE-040")
@pytest.mark.parametrize("backend", ["aot_eager", deep("standard", "eager")])
def test_one_tensor_in_both_places(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    """Of a function of two tensors, each of whose gradients counts; the compiler may leave the call to eager."""
    x = torch.randint(-3, 4, (4, 4), generator=rng).float().to(target.device)
    with compiler(case):
        for dtype in dtypes_of(case, target):
            part = custom_parts.product(target.device_type, dtype)

            def square(x: torch.Tensor, part: Any = part, dtype: torch.dtype = dtype) -> torch.Tensor:
                with torch.autocast(x.device.type, dtype=dtype):
                    return part(x, x)

            found = []
            for call in (torch.compile(square, backend=backend), square):
                leaf = x.clone().requires_grad_()
                result = call(leaf)
                result.float().sum().backward()
                found.append((result.detach(), leaf.grad))
            (seen, gradient), (expected, right) = found
            case.identical(f"{dtype}: result", seen, expected)
            case.identical(f"{dtype}: gradient", gradient, right)


def told_by(
    call: Callable[..., torch.Tensor], target: Target, around: Around, around_backward: Around
) -> dict[str, torch.Tensor]:
    """Return what a function that tells the autocast state returns in forward and as gradient."""
    x = torch.full((1, 1), custom_parts.TOLD, device=target.device, requires_grad=True)
    one = torch.ones(1, 1, device=target.device)
    with around():
        result = call(x, one)
    with around_backward():
        (gradient,) = torch.autograd.grad(result, x, torch.full_like(result, custom_parts.TOLD))
    return {"forward": result.detach(), "backward": gradient}


@contract("AMP-COMPILE-072")
@pytest.mark.parametrize("backward", ["no region", deep("standard", "a region")])
@pytest.mark.parametrize("place", ["inside", deep("standard", "around")])
@pytest.mark.parametrize("cast", ["none", deep("standard", "float32")])
@pytest.mark.parametrize("way", [deep("standard", "eager"), "aot_eager"])
def test_state_of_methods(case: Case, target: Target, way: str, cast: str, place: str, backward: str) -> None:
    """Forward in each type and without a region, each with another type in force where no region is."""
    case.require(target, torch.float16, torch.bfloat16)
    kind = target.device_type
    seen_states = set()
    for dtype in (torch.float16, torch.bfloat16):
        for enabled in (True, False):
            region = ambient(target, dtype, enabled=enabled, cache_enabled=False)
            outside = ambient(target, OTHER[dtype], enabled=backward == "a region", cache_enabled=False)
            part = custom_parts.telling(kind, torch.float32 if cast == "float32" else None)

            def program(x: torch.Tensor, one: torch.Tensor, part: Any = part, region: Around = region) -> torch.Tensor:
                if place == "around":
                    return part(x, one)
                with region():
                    return part(x, one)

            around = region if place == "around" else contextlib.nullcontext
            with compiler(case), torch.autocast(kind, dtype=OTHER[dtype], enabled=False, cache_enabled=False):
                expected = told_by(program, target, around, outside)
                seen = told_by(WAYS[way].make(program, ()), target, around, outside)
            for name, right in expected.items():
                case.identical(f"{dtype}, enabled {enabled}: state in {name}", seen[name], right)
                seen_states.add(float(right))
    case.at_least("different states of eager (control)", len(seen_states), 2 if cast == "float32" else 4)


@contract("AMP-COMPILE-041")
@pytest.mark.parametrize("rule", [deep("standard", "low"), deep("standard", "float32")])
@pytest.mark.parametrize("way", [deep("full", "eager"), "aot_eager", deep("full", "export"), deep("full", "make_fx")])
def test_custom_operators(case: Case, target: Target, rng: torch.Generator, way: str, rule: str) -> None:
    with compiler(case):
        for dtype in dtypes_of(case, target):
            part = custom_parts.operator(target.device_type, dtype if rule == "low" else torch.float32)
            agrees(case, target, rng, dtype, way, around_part(part))


def checkpointed(program: Program) -> Program:
    """Return the program as a checkpoint, with its region inside it."""

    def function(amp: Any, *leaves: torch.Tensor) -> Any:
        run = functools.partial(program.function, amp)
        return torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=False)

    return Program(f"checkpointed {program.name}", function, program.shapes)


@contract("AMP-COMPILE-042")
@pytest.mark.parametrize("way", [deep("full", "eager"), deep("standard", "aot_eager")])
@pytest.mark.parametrize("name", ["island", deep("full", "nested"), deep("full", "classifier")])
def test_checkpoints(case: Case, target: Target, rng: torch.Generator, way: str, name: str) -> None:
    with compiler(case):
        for dtype in dtypes_of(case, target):
            agrees(case, target, rng, dtype, way, checkpointed(PROGRAMS[name]))


@contract("AMP-COMPILE-042")
@pytest.mark.parametrize("way", ["eager", deep("standard", "aot_eager")])
def test_checkpoint_in_a_region(case: Case, target: Target, rng: torch.Generator, way: str) -> None:
    program = checkpointed(AMBIENT["plain_inside"])
    with compiler(case):
        for dtype in dtypes_of(case, target):
            leaves = program.leaves(target.device, rng)
            around = ambient(target, dtype, cache_enabled=False)
            options: dict[str, Any] = {"around": around, "around_backward": around}
            call = bound(program, target, dtype, cache=False)
            expected = observed(call, leaves, **options)
            same(case, f"{dtype}", observed(WAYS[way].make(call, leaves), leaves, **options), expected)


@contract("AMP-COMPILE-043")
@pytest.mark.parametrize(
    "name", [deep("standard", "classifier"), *(deep("full", each) for each in ("float32_ops", "attention", "island"))]
)
def test_memory_for_backward(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    program = PROGRAMS[name]
    with compiler(case):
        for dtype in dtypes_of(case, target):
            leaves = program.leaves(target.device, rng)
            call = bound(program, target, dtype)
            eager, graph = RecordedOps(), RecordedOps(partitioned=True)
            observed(call, leaves, watch=eager.watch)
            observed(torch.compile(call, backend=graph.backend(), fullgraph=True), leaves)
            case.at_least(f"{dtype}: ops recorded in backward (control)", min(len(graph.ops[p]) for p in PARTS), 1)
            case.at_most(f"{dtype}: memory that the graph keeps", graph.kept, eager.kept, "B")


def in_a_region(program: Program) -> Program:
    """Return the program called in a region of its own 16-bit type."""

    def function(amp: Any, *leaves: torch.Tensor) -> Any:
        with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
            return program.function(amp, *leaves)

    return Program(f"{program.name} in a region", function, program.shapes)


CHECKPOINTED = {
    "region around": in_a_region(checkpointed(AMBIENT["plain_inside"])),
    "region inside": checkpointed(in_a_region(AMBIENT["plain_inside"])),
    "regions around and inside": in_a_region(checkpointed(PROGRAMS["island"])),
    "region around a classifier": in_a_region(checkpointed(PROGRAMS["classifier"])),
}


@contract("AMP-COMPILE-043")
@pytest.mark.parametrize(
    "name", [deep("quick" if name == "region around" else "standard", name) for name in CHECKPOINTED]
)
def test_memory_of_checkpoints(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    program = CHECKPOINTED[name]
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            leaves = program.leaves(target.device, rng)
            call = bound(program, target, dtype, cache=False)
            eager, graph = RecordedOps(), RecordedOps()
            observed(call, leaves, watch=eager.watch)
            observed(torch.compile(call, backend=graph.backend(), fullgraph=True), leaves)
            case.at_least(f"{dtype}: ops recorded in backward (control)", min(len(graph.ops[p]) for p in PARTS), 1)
            case.at_most(f"{dtype}: memory that the graph keeps", graph.kept, eager.kept, "B")


def _rule(operator: Any, key: Any) -> str:
    """Say what a higher-order operator does where an autocast key is active."""
    if key in operator.py_kernels:
        return "casts"
    return "raises" if operator.non_fallthrough_keys.has(key) else "runs"


@contract("AMP-COMPILE-044")
@pytest.mark.parametrize("backend", BACKENDS)
def test_higher_order_operators(case: Case, backend: str) -> None:
    try:
        for module in ("flex_attention", "triton_kernel_wrap"):
            importlib.import_module(f"torch._higher_order_ops.{module}")
        operators = dict(torch._ops._higher_order_ops)
        ours, cuda = (getattr(torch._C.DispatchKey, f"Autocast{name}") for name in (backend.upper(), "CUDA"))
    except (AttributeError, ImportError) as error:
        case.untestable(f"this torch does not tell the rules of its higher-order operators: {error}")
        raise
    expected = {name: "casts" if _rule(one, cuda) == "casts" else "runs" for name, one in sorted(operators.items())}
    case.at_least("operators", len(operators), 10)
    wrong = {name: _rule(one, ours) for name, one in operators.items() if _rule(one, ours) != expected[name]}
    told = [f"{name} {rule} in place of {expected[name]}" for name, rule in sorted(wrong.items())]
    case.equal(f"operators with another rule in a region of {backend} than in one of CUDA", told[:5], [])


@contract("AMP-COMPILE-044", on="cpu")
@pytest.mark.parametrize("backend", ["eager", deep("standard", "aot_eager")])
def test_branches_of_cond(case: Case, target: Target, backend: str) -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: (x @ x) * 2, (x,))
        return found

    for dtype in case.supported(target):
        for sign in (1.0, -1.0):
            x = torch.full((2, 2), sign, device=target.device)
            with compiler(case), torch.no_grad(), target.autocast(dtype):
                seen = torch.compile(branches, backend=backend, fullgraph=True)(x)
            expected = torch.full((2, 2), 2.0 if sign > 0 else 4.0, dtype=dtype, device=target.device)
            case.identical(f"{dtype}: product in the branch for {sign:g}", seen, expected)
