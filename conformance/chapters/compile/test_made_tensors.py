"""Check that tensors which a compiled program makes have the types and numbers that they have in eager."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .made_tensors import FACTORIES, RANDOM, SIZE, UNKNOWN, WITHOUT_A_TYPE, Made, by_default, expressions, sums, types
from .support import compiler, default_type, drawn, dtypes_of, inductor, unlike

DRAWN = {"quick": 8, "standard": 40, "full": 400}
KERNELS = {"standard": 4, "full": 100}  # each takes long to compile

# pytorch 189518. It is always compiled: the waiver of the others would be stale without it.
WRONG = "cumsum in bfloat16 of full of a bool in none"


def _agree(
    case: Case, target: Target, backend: str, dtype: torch.dtype, known: dict[str, Made], typed: dict[str, Made]
) -> None:
    """Compile all as one program, outside of a region and in one; of `typed` the types alone are those of eager."""

    def program(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        found = []
        for enabled in (False, True):
            with torch.autocast(target.device_type, dtype=dtype, enabled=enabled, cache_enabled=False):
                found.append([make(x) for make in (*known.values(), *typed.values())])
        return found[0], found[1]

    x = torch.full((SIZE,), 2.0, dtype=dtype, device=target.device)
    seen, expected = torch.compile(program, backend=backend, fullgraph=True)(x), program(x)
    for where, ours, theirs in zip(("outside of a region", "in a region"), seen, expected, strict=True):
        names = [f"{name}, {where}" for name in (*known, *typed)]
        found, right = dict(zip(names, ours, strict=True)), dict(zip(names, theirs, strict=True))
        wrong = unlike(found, {name: right[name] for name in names[: len(known)]}) + [
            f"{name}: {found[name].dtype}, in eager {right[name].dtype}"
            for name in names[len(known) :]
            if found[name].dtype is not right[name].dtype
        ]
        case.equal(f"{dtype}, {where}: results that are not those of eager", wrong[:4], [])


@contract("AMP-COMPILE-078")
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_graphs(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    for dtype in dtypes_of(case, target):
        number = DRAWN[case.level]
        known = {**drawn(expressions(), rng, number), **drawn(sums(), rng, number // 4)}
        with compiler(case):
            _agree(case, target, backend, dtype, known, drawn(types(), rng, number // 4))


@contract("AMP-COMPILE-078")
@needs("compiled kernels")
@pytest.mark.parametrize("part", [deep("standard", "sums"), deep("full", "others")])
def test_kernels(case: Case, target: Target, rng: torch.Generator, part: str) -> None:
    number = KERNELS[case.level]
    for dtype in dtypes_of(case, target):
        with compiler(case), inductor(case):
            if part == "sums":
                every = sums()
                _agree(case, target, "inductor", dtype, {WRONG: every[WRONG], **drawn(every, rng, number)}, {})
            else:
                _agree(case, target, "inductor", dtype, drawn(expressions(), rng, number), drawn(types(), rng, 3))


KNOWN = (*FACTORIES, *UNKNOWN, "a quotient of integers", "a number times integers", "a number elsewhere", "bernoulli")
DRAWN_BY_DEFAULT = tuple(name for name in (*RANDOM, *WITHOUT_A_TYPE) if name not in KNOWN)
GROUPS = {"known": KNOWN, "random": DRAWN_BY_DEFAULT}


@contract("AMP-COMPILE-078")
@pytest.mark.parametrize("group", ["known", deep("standard", "random")])
@pytest.mark.parametrize("backend", [deep("standard", "eager"), "aot_eager"])
def test_default_types(case: Case, target: Target, rng: torch.Generator, group: str, backend: str) -> None:
    _follows_the_default(case, target, rng, group, backend)


@contract("AMP-COMPILE-078")
@needs("compiled kernels")
@pytest.mark.parametrize("group", [deep("full", "known"), deep("standard", "random")])
def test_default_types_of_kernels(case: Case, target: Target, rng: torch.Generator, group: str) -> None:
    with inductor(case):
        _follows_the_default(case, target, rng, group, "inductor")


def _follows_the_default(case: Case, target: Target, rng: torch.Generator, group: str, backend: str) -> None:
    """Call one program under each default type, and back under the first, for which it is compiled already."""
    kinds = (torch.float16, torch.bfloat16) if case.level == "full" else (torch.bfloat16,)
    first, step = (int(torch.randint(3, (), generator=rng)), 3) if case.level != "full" else (0, 1)
    made = by_default(("ones", GROUPS[group][0], *GROUPS[group][first::step]))
    x = torch.ones(SIZE, dtype=torch.bfloat16, device=target.device)

    def program(x: Tensor) -> Mapping[str, Tensor]:
        return {name: make(x) for name, make in made.items()}

    kept = []
    with compiler(case):
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        for kind in (torch.float32, *kinds, torch.float32):
            with default_type(kind):
                seen, expected = compiled(x), program(x)
            kept.append(expected["ones"].dtype)
            wrong = [
                f"{name}: {seen[name].dtype}, in eager {one.dtype}"
                for name, one in expected.items()
                if seen[name].dtype is not one.dtype
            ]
            case.equal(f"default type {kind}: types that are not those of eager", wrong, [])
    case.equal("types of eager (control)", kept, [torch.float32, *kinds, torch.float32])
