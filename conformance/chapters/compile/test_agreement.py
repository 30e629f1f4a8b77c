"""Check the types, values and gradients of compiled, exported and traced programs against eager."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from typing import Any

import pytest
import torch

from ...harness.check import Case, by_seed, contract, deep, needs
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS
from .decomposed_ops import (
    FAR_FROM_ZERO,
    KEEP_THEIR_RESULT,
    OPS,
    SATURATED,
    SHAPES,
    allowed,
    error,
    every,
    every_rounded,
    operand,
    results,
)
from .observation import Observed, copies, observed
from .programs import AMBIENT, PROGRAMS, Program, Tensors, drawn, together
from .spellings import NAMES, spellings
from .support import (
    ambient,
    bound,
    compiler,
    distance_of_programs,
    distance_of_ways,
    dtypes_of,
    graphs,
    inductor,
    near,
    pause_of,
    same,
    same_but_for_sums,
)
from .ways import OF_ANY_SIZE, WAYS, Way
from .written_attention import ATTENTION, ENDED_A_CARD, compared, compared_elsewhere

QUICK = (
    *(("eager", "nested"), ("eager", "decorated_before"), ("aot_eager", "island")),
    *(("export", "nested"), ("make_fx", "float32_ops")),
)
COMPILED = ("eager", "eager-breaks", "aot_eager", "aot_eager-breaks", "aot_eager-dynamic")
EXPORTED = ("export", "export-strict", "make_fx", "make_fx-pre_dispatch")
# At standard these run: regions that nest in each way. The seed draws others.
STANDARD = (
    *(
        ("aot_eager", "nested"),
        ("aot_eager-breaks", "nested"),
        ("eager-breaks", "nested"),
    ),
    *(("export-strict", "nested"), ("make_fx-pre_dispatch", "nested")),
)
DRAWN = 5
DYNAMIC = "aot_eager-dynamic"


def combinations(ways: tuple[str, ...]) -> list[Any]:
    """Return the pairs of a way and a program, each at the level from which on it runs."""
    found = []
    for way in ways:
        for name, program in PROGRAMS.items():
            if WAYS[way].recorded and program.switching:
                continue
            pair, named = (way, name), f"{way}-{name}"
            if way == DYNAMIC and name != "tied":  # dynamic shapes take several times as long
                found.append(deep("full", pair, id=named))
            elif pair in QUICK or pair in STANDARD:
                found.append(deep("quick" if pair in QUICK else "standard", pair, id=named))
            else:
                found.append(by_seed("standard", DRAWN, pair, id=named))
    return found


def runs(way: Way, program: Program, target: Target, dtype: torch.dtype, leaves: Tensors) -> tuple[Observed, Observed]:
    """Return what the program does in this way and in eager."""
    if not way.differentiable:
        leaves = tuple(leaf.detach() for leaf in leaves)
    expected = observed(bound(program, target, dtype, cache=False), leaves)
    # Tracing runs the program, which may write to its arguments.
    made = way.make(bound(program, target, dtype, pause=pause_of(way), cache=False), copies(leaves))
    return observed(made, leaves), expected


# Behind its break this program uses a result of before several times. Gradients of several uses are added in the order
# of the graph that has them, which need not be eager's.
USED_BEHIND_THE_BREAK = ("aot_eager-breaks", "fused")


def bits_agree(case: Case, target: Target, rng: torch.Generator, way: str, name: str) -> None:
    """Check a program in one way against eager, bit for bit, in each amp dtype."""
    program = PROGRAMS[name]
    with compiler(case):
        for dtype in dtypes_of(case, target):
            leaves = program.leaves(target.device, rng)
            seen, expected = runs(WAYS[way], program, target, dtype, leaves)
            if (way, name) == USED_BEHIND_THE_BREAK:
                same_but_for_sums(case, program, target, dtype, leaves, seen, expected)
            else:
                same(case, f"{dtype}", seen, expected)


@contract("AMP-COMPILE-001")
@pytest.mark.parametrize("pair", combinations(COMPILED))
def test_compiled_bits(case: Case, target: Target, rng: torch.Generator, pair: tuple[str, str]) -> None:
    bits_agree(case, target, rng, *pair)


@contract("AMP-COMPILE-001")
@pytest.mark.parametrize("backend", ["eager", deep("full", "aot_eager")])
@pytest.mark.parametrize("name", [deep("standard", name) for name in NAMES])
def test_spellings(case: Case, target: Target, rng: torch.Generator, name: str, backend: str) -> None:
    """Regions from containers, closures, arguments, partials, generators and decorators, and around lazy products."""
    x, w = (torch.randn(4, 4, generator=rng).to(target.device).requires_grad_() for _ in range(2))
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            call = spellings(target.device_type, dtype)[name]
            same(case, f"{dtype}", observed(torch.compile(call, backend=backend), (x, w)), observed(call, (x, w)))


SIZES = (2, 3, 5, 6)
# The second size makes the sizes symbols of the graph, which serves all sizes from then on.
GRAPHS_OF_SIZES = 2
# The order of its chained products depends on the sizes.
COMPILED_FOR_EACH_SIZE = ("composites",)
SQUARE = tuple(name for name, program in PROGRAMS.items() if program.shapes == ((4, 4),) * 3)


def square(program: Program, size: int) -> Program:
    """Return the program on matrices of this size."""
    return dataclasses.replace(program, shapes=((size, size),) * 3)


@contract("AMP-COMPILE-001")
@pytest.mark.parametrize("way", ["eager", *(deep("standard", way) for way in ("eager-breaks", "aot_eager"))])
@pytest.mark.parametrize(
    "name", ["nested", *(by_seed("standard", 2, name) for name in SQUARE if name not in ("nested", "fused"))]
)
def test_sizes_that_change(case: Case, target: Target, rng: torch.Generator, way: str, name: str) -> None:
    program = PROGRAMS[name]
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            before = graphs()
            pausing = bound(program, target, dtype, pause=pause_of(WAYS[way]), cache=False)
            call = bound(program, target, dtype, cache=False)
            compiled = WAYS[way].make(pausing, ())
            for size in SIZES:
                leaves = square(program, size).leaves(target.device, rng)
                seen, expected = observed(compiled, leaves), observed(call, leaves)
                same(case, f"{dtype}, matrices of size {size}", seen, expected)
            if not WAYS[way].breaks and name not in COMPILED_FOR_EACH_SIZE:
                case.at_most(f"{dtype}: graphs compiled (control)", graphs() - before, GRAPHS_OF_SIZES)


@contract("AMP-COMPILE-002")
@pytest.mark.parametrize("pair", combinations(EXPORTED))
def test_exported_bits(case: Case, target: Target, rng: torch.Generator, pair: tuple[str, str]) -> None:
    bits_agree(case, target, rng, *pair)


@contract("AMP-COMPILE-002")
@pytest.mark.parametrize("way", [deep("standard", way) for way in OF_ANY_SIZE])
@pytest.mark.parametrize("name", ["nested", deep("full", "siblings"), deep("full", "getters")])
def test_exported_for_any_size(case: Case, target: Target, rng: torch.Generator, way: str, name: str) -> None:
    """Programs that are captured once with a symbol for the size, and run with other sizes."""
    program = PROGRAMS[name]
    with compiler(case):
        for dtype in dtypes_of(case, target):
            call = bound(program, target, dtype, cache=False)
            captured = OF_ANY_SIZE[way](call, square(program, SIZES[-1]).leaves(target.device, rng))
            for size in SIZES:
                leaves = square(program, size).leaves(target.device, rng)
                seen, expected = observed(captured, leaves), observed(call, leaves)
                same(case, f"{dtype}, matrices of size {size}", seen, expected)


@contract("AMP-COMPILE-003")
@pytest.mark.parametrize("number", [deep("standard", 0), *(deep("full", n) for n in range(1, 24))])
@pytest.mark.parametrize("name", ["eager-breaks", "aot_eager", "export"])
def test_random_programs(case: Case, target: Target, rng: torch.Generator, number: int, name: str) -> None:
    way, program = WAYS[name], drawn(case.seed + number)
    with compiler(case):
        for dtype in dtypes_of(case, target):
            leaves = program.leaves(target.device, rng)
            seen, expected = runs(way, program, target, dtype, leaves)
            # Gradients of several uses are added in the order of the graph.
            same_but_for_sums(case, program, target, dtype, leaves, seen, expected)


INEXACT = ("aot_eager_decomp_partition", "export-decomposed", "jit.trace")
SHOWN = {("aot_eager_decomp_partition", "float32_ops"), ("export-decomposed", "nested"), ("jit.trace", "island")}
DECOMPOSED = [
    deep("standard", (way, name), id=f"{way}-{name}")
    if (way, name) in SHOWN
    else by_seed("standard", 3, (way, name), id=f"{way}-{name}")
    for way in INEXACT
    for name, program in PROGRAMS.items()
    if not (WAYS[way].recorded and program.switching)
]


@contract("AMP-COMPILE-004")
@pytest.mark.parametrize("pair", DECOMPOSED)
def test_decomposed_values(case: Case, target: Target, rng: torch.Generator, pair: tuple[str, str]) -> None:
    way, program = WAYS[pair[0]], PROGRAMS[pair[1]]
    with compiler(case, way.name):
        for dtype in dtypes_of(case, target):
            leaves = program.leaves(target.device, rng)
            seen, expected = runs(way, program, target, dtype, leaves)
            near(case, f"{dtype}", seen, expected, distance_of_ways(bound(program, target, dtype, cache=False), leaves))


# At standard each 16-bit type in one way to tempt it: squares that leave the range, and sums that lose digits.
TEMPTED = {("large numbers", torch.float16), ("long rows", torch.bfloat16), ("far from zero", torch.bfloat16)}


@contract("AMP-COMPILE-004")
@pytest.mark.parametrize("shape", [deep("standard", name) for name in SHAPES])
def test_decomposed_ops(case: Case, target: Target, rng: torch.Generator, shape: str) -> None:
    supported = case.supported(target)
    # Below full each op but normalizations is tempted in one way, which the seed chooses.
    norms = [name for name in OPS if name.endswith("_norm")]
    mixed = random.Random(case.seed).sample([name for name in OPS if name not in norms], len(OPS) - len(norms))
    names = tuple(OPS) if case.level == "full" else (*norms, *mixed[list(SHAPES).index(shape) % 2 :: 2])
    names = FAR_FROM_ZERO if shape == "far from zero" else names
    names = tuple(name for name in names if shape != "large numbers" or name not in SATURATED)
    chosen = [dtype for dtype in supported if case.level == "full" or (shape, dtype) in TEMPTED] or supported
    with compiler(case):
        for dtype in chosen:
            torch._dynamo.reset()

            def inside(*operands: torch.Tensor, dtype: torch.dtype = dtype) -> tuple[torch.Tensor, ...]:
                with torch.autocast(target.device_type, dtype=dtype, cache_enabled=False):
                    return every(names, *operands)

            x = operand(shape, dtype, target.device, rng)
            wide = x.cpu().double()
            far = shape == "far from zero"
            exact = results(names, functools.partial(every, names), wide, far=far)
            # CUDA's kernels for these gradients round each step, which may happen to come nearer (tanh_backward).
            keeping = [name for name in names if name in KEEP_THEIR_RESULT]
            rounded = functools.partial(every_rounded, keeping, dtype)
            kept = results(keeping, rounded, wide, far=far) if keeping else {}
            expected = results(names, inside, x, far=far)
            call = torch.compile(inside, backend="aot_eager_decomp_partition", fullgraph=True)
            seen = results(names, call, x, far=far)
            for name, right in expected.items():
                case.equal(f"{dtype}: type of {name}", seen[name].dtype, right.dtype)
                of_eager = max(error(one, exact[name]) for one in (right, kept.get(name, right)))
                bound = of_eager + allowed(name) * FORMATS[dtype].unit_roundoff
                case.at_most(f"{dtype}: error of {name}", error(seen[name], exact[name]), bound)


# By name the programs that inductor compiles in one graph, which takes a fraction of the time of one for each. The
# losses stand alone: their decompositions return another type than they do (AMP-COMPILE-004).
GRAPHS = {
    "fused": ("fused",),
    "programs": tuple(name for name in PROGRAMS if name not in ("fused", "mixed_losses")),
    "mixed_losses": ("mixed_losses",),
}


@contract("AMP-COMPILE-004", on="cpu")
def test_traced_modules(case: Case, target: Target) -> None:
    """A module that was traced in a region, called outside of regions."""
    for dtype in case.supported(target):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).to(target.device).eval()
        x = torch.ones(2, 3, device=target.device)
        with compiler(case, "jit.trace"), torch.no_grad():
            with target.autocast(dtype, cache_enabled=False):
                traced, expected = torch.jit.trace(model, x), model(x)
            case.identical(f"{dtype}: output of the traced module", traced(x), expected)


# Those that pause, where a graph ends in the middle of a region.
PAUSING = ("nested", "island", "siblings", "tied")


@contract("AMP-COMPILE-005")
@needs("compiled kernels")
@pytest.mark.parametrize("name", [deep("full", name) for name in PAUSING])
def test_inductor_with_breaks(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    program = PROGRAMS[name]
    with compiler(case), inductor(case):
        for dtype in dtypes_of(case, target):
            leaves = program.leaves(target.device, rng)
            seen, expected = runs(WAYS["inductor-breaks"], program, target, dtype, leaves)
            near(case, f"{dtype}", seen, expected, distance_of_programs([program], target, dtype, rng))


@contract("AMP-COMPILE-005")
@needs("compiled kernels")
@pytest.mark.parametrize("graph", [deep("full", name) for name in GRAPHS])
@pytest.mark.parametrize("emulated", [False, True], ids=["fused-casts", "emulated-casts"])
def test_inductor(case: Case, target: Target, rng: torch.Generator, emulated: bool, graph: str) -> None:
    programs = [PROGRAMS[name] for name in GRAPHS[graph]]
    program = together(programs)
    with compiler(case), inductor(case, emulate_precision_casts=emulated):
        for dtype in dtypes_of(case, target):
            leaves = program.leaves(target.device, rng)
            if graph == "fused":
                # A kernel takes seconds to compile, and each cast of an operand is one, forward and backward.
                x, w, v = (leaf.detach() for leaf in leaves)
                leaves = tuple(leaf.requires_grad_() for leaf in (x.to(dtype), w.to(dtype), v))
            seen, expected = runs(WAYS["inductor"], program, target, dtype, leaves)
            near(case, f"{dtype}", seen, expected, distance_of_programs(programs, target, dtype, rng))


@contract("AMP-COMPILE-005")
@needs("compiled kernels")
@pytest.mark.parametrize("part", [deep("standard", "forward")])
def test_ops_of_inductor(case: Case, target: Target, rng: torch.Generator, part: str) -> None:
    """Each op on long rows of one 16-bit type and on large numbers of the other, in a region of that type."""
    names = tuple(OPS)
    tempted = [pair for pair in sorted(TEMPTED, key=str) if pair[1] in case.supported(target)]
    operands = [operand(shape, dtype, target.device, rng) for shape, dtype in tempted]

    def inside(*operands: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for x, (_, dtype) in zip(operands, tempted, strict=True):
            with torch.autocast(target.device_type, dtype=dtype, cache_enabled=False):
                found += [OPS[name](x) for name in names]
        return found

    with compiler(case), inductor(case):
        seen = torch.compile(inside, backend="inductor", fullgraph=True)(*operands)
        expected = inside(*operands)
    exact = [OPS[name](x.double()) for x in operands for name in names]
    what = [(f"{name} of {shape} in {dtype}", dtype) for shape, dtype in tempted for name in names]
    for (name, dtype), ours, theirs, right in zip(what, seen, expected, exact, strict=True):
        case.equal(f"type of {name}", ours.dtype, theirs.dtype)
        bound = error(theirs, right) + allowed(name) * FORMATS[dtype].unit_roundoff
        case.at_most(f"error of {name}", error(ours, right), bound)


@contract("AMP-COMPILE-005")
@needs("compiled kernels")
@pytest.mark.parametrize("low", [deep("standard", "bfloat16"), deep("full", "float16")])
def test_attention_of_inductor(case: Case, target: Target, rng: torch.Generator, low: str) -> None:
    dtype = getattr(torch, low)
    case.require(target, dtype)

    seed = int(torch.randint(2**31, (), generator=rng))
    with compiler(case), inductor(case):
        # CUDA's errors last as long as the process.
        elsewhere = ENDED_A_CARD if target.device_type == "cuda" else ()
        names = [name for name in ATTENTION if name not in elsewhere]
        found = list(compared(names, target.device, dtype, seed))
        if elsewhere:
            found += compared_elsewhere(elsewhere, target.device, dtype, seed)
        for each in found:
            case.equal(f"what attention with {each.name} raises", each.raised, None)
            if each.raised is None:
                case.equal(f"type of attention with {each.name}", each.dtype, dtype)
                case.at_most(f"error of attention with {each.name}", each.error, each.limit)


@contract("AMP-COMPILE-001")
@pytest.mark.parametrize("backend", ["aot_eager", deep("standard", "aot_eager_decomp_partition")])
@pytest.mark.parametrize("name", ["one", deep("standard", "island"), deep("standard", "classifier")])
def test_second_backward(case: Case, target: Target, rng: torch.Generator, name: str, backend: str) -> None:
    """The graph of one compiled call goes back twice where it is retained."""
    program = PROGRAMS[name]
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            leaves = copies(program.leaves(target.device, rng))
            call = bound(program, target, dtype, cache=False)
            out = torch.compile(call, backend=backend, fullgraph=True)(*leaves)[0]
            seeds = [torch.ones_like(out), torch.full_like(out, 2.0)]
            first, second = (
                torch.autograd.grad(out, leaves, seed, retain_graph=True, allow_unused=True) for seed in seeds
            )
            for number, (one, other) in enumerate(zip(first, second, strict=True)):
                if one is not None and other is not None:
                    # Twice the gradient: all products and sums double exactly.
                    case.identical(f"{dtype}: gradient {number} by the second backward", other, 2 * one)
                    case.true(f"{dtype}: gradient {number} is not zero (control)", bool(one.count_nonzero()))


# Programs whose regions are those of others.
ALIKE = ("one_inside", "decorated_inside")


@contract("AMP-COMPILE-006")
@pytest.mark.parametrize(
    "name", [deep("full", "eager"), deep("standard", "aot_eager"), deep("full", "aot_eager-breaks")]
)
@pytest.mark.parametrize(
    "program",
    [
        "island_inside",
        *(
            deep("full", name) if name in ALIKE else by_seed("standard", 1, name)
            for name in AMBIENT
            if name != "island_inside"
        ),
    ],
)
def test_in_a_region(case: Case, target: Target, rng: torch.Generator, name: str, program: str) -> None:
    with compiler(case):
        for dtype in dtypes_of(case, target):
            agrees_in_a_region(case, target, rng, WAYS[name], AMBIENT[program], dtype)


def agrees_in_a_region(
    case: Case, target: Target, rng: torch.Generator, way: Way, chosen: Program, dtype: torch.dtype
) -> None:
    """Compare a program in one way with eager, bit for bit, in a region around it and its backward."""
    leaves = chosen.leaves(target.device, rng)
    around = ambient(target, dtype, cache_enabled=False)
    options: dict[str, Any] = {"around": around, "around_backward": around}
    expected = observed(bound(chosen, target, dtype, cache=False), leaves, **options)
    with around() if way.recorded else contextlib.nullcontext():
        made = way.make(bound(chosen, target, dtype, pause=pause_of(way), cache=False), leaves)
    same(case, f"{dtype}", observed(made, leaves, **options), expected)


# Matrices of 1 ki, 16 ki and 64 ki elements. A matrix of the largest size is beyond each of the limits.
LARGE = (32, 128, 256)
LARGEST = LARGE[-1]


@contract("AMP-COMPILE-006")
@pytest.mark.parametrize("name", ["aot_eager", deep("full", "eager")])
@pytest.mark.parametrize(
    "pair",
    [
        deep("quick", ("island_inside", LARGEST), id=f"island_inside-{LARGEST}"),
        *(
            by_seed("standard", 2, (name, size), id=f"{name}-{size}")
            for name in AMBIENT
            for size in LARGE
            if (name, size) != ("island_inside", LARGEST)
        ),
    ],
)
def test_large_in_a_region(case: Case, target: Target, rng: torch.Generator, name: str, pair: tuple[str, int]) -> None:
    """Programs on tensors of which the elements are many."""
    chosen = square(AMBIENT[pair[0]], pair[1])
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            agrees_in_a_region(case, target, rng, WAYS[name], chosen, dtype)


@contract("AMP-COMPILE-001")
@pytest.mark.parametrize("size", [deep("standard", LARGEST), *(deep("full", size) for size in LARGE[:-1])])
@pytest.mark.parametrize("name", [by_seed("standard", 2, name) for name in SQUARE])
def test_large(case: Case, target: Target, rng: torch.Generator, name: str, size: int) -> None:
    """Programs on tensors of which the elements are many."""
    chosen = square(PROGRAMS[name], size)
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            leaves = chosen.leaves(target.device, rng)
            seen, expected = runs(WAYS["aot_eager"], chosen, target, dtype, leaves)
            same(case, f"{dtype}", seen, expected)
