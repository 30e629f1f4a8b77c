"""Check random programs, pairs and interleavings of regions against the model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import CodeType

import pytest
import torch
from torch.cuda.amp.common import amp_definitely_not_available

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.threads import one_thread
from ...oracles.fake_hardware import cuda_that_says
from ...oracles.policy.devices import device_types
from ...oracles.region.programs import (
    WAYS,
    Block,
    Jump,
    Machine,
    Open,
    Player,
    Program,
    Set,
    Token,
    parting,
    predicted,
    program_of,
    random_tokens,
    simpler,
)
from ...oracles.region.stack_model import DEVICE_TYPES, Region, fresh, observe
from ...oracles.shrinking import shortest
from . import interleaving
from .interleaving import Stage, Step

DEFAULTS = {device.type: device.dtype or torch.float32 for device in device_types() if device.type in DEVICE_TYPES}


def machine_of(target: Target) -> Machine:
    """Return the initial state of programs on this machine, and the behaviour of CUDA regions here."""
    has_cuda = torch.cuda.is_available()
    return Machine(
        device=target.device,
        base=observe(),
        new_thread=fresh(DEFAULTS),
        absent=frozenset() if has_cuda else frozenset({"cuda"}),
        unrestricted=frozenset({"cuda"}) if has_cuda else frozenset(),
    )


def regions_of(target: Target, others: Sequence[str], *dtypes: torch.dtype | None) -> list[Region]:
    """Return the regions of every supported dtype on the target and on other device types."""
    return [
        Region(kind, dtype, enabled, cache)
        for kind in (target.device_type, *others)
        for dtype in dtypes
        # In a new thread the default is DEFAULTS', whatever the backend made it elsewhere.
        if kind != target.device_type or dtype is torch.float32 or target.supports(dtype or DEFAULTS[kind])
        for enabled in (True, False)
        for cache in (None, True, False)
    ]


def neighbours(target: Target) -> list[str]:
    """Return other device types than the target's, whose regions torch opens without the hardware."""
    kinds = [kind for kind in ("xpu", "hpu", "cuda", "cpu") if kind != target.device_type][:3]
    # With torch_xla installed and no CUDA, torch opens CUDA's regions of fp16 and refuses those of bf16.
    return [kind for kind in kinds if kind != "cuda" or torch.cuda.is_available() or amp_definitely_not_available()]


def explored(case: Case) -> int:
    """Return the seed of random programs: fixed below level full."""
    return case.seed if case.level == "full" else 0


@contract("AMP-REGION-037")
def test_programs(case: Case, target: Target) -> None:
    case.require_arithmetic(target, DEFAULTS[target.device_type])  # of the regions in new threads
    choices = regions_of(target, neighbours(target), None, torch.float16, torch.bfloat16, torch.float32)
    nested(case, machine_of(target), choices, case.samples(quick=150, standard=1000, full=15000))


@contract("AMP-REGION-037", on="cpu")
def test_programs_beside_cuda(case: Case, target: Target) -> None:
    # Where CUDA is reported as available, its regions behave like any other and accept every dtype.
    machine = replace(machine_of(target), absent=frozenset(), unrestricted=frozenset({"cuda"}))
    choices = regions_of(target, ("cuda",), None, torch.float16, torch.bfloat16, torch.float32)
    with cuda_that_says(bf16=True):
        nested(case, machine, choices, case.samples(quick=50, standard=300, full=10000))


def nested(case: Case, machine: Machine, choices: Sequence[Region], count: int) -> None:
    """Check random programs over the regions against the model."""
    places: list[int] = []
    with one_thread(), Player(machine) as player:

        def differs(tokens: Sequence[Token]) -> bool:
            program = program_of(tokens)
            places.append(len(predicted(program, player.machine)))
            return player.mismatch(program) is not None

        found = shortest(
            lambda generator: random_tokens(generator, choices),
            differs,
            count=count,
            seed=explored(case),
            simpler=simpler,
        )
        seen = None if found is None else player.mismatch(program_of(found))
    case.note("random programs", len(places))
    case.note("places compared", sum(places))
    case.note("seed", explored(case))
    if found is not None:
        case.reproduce(program_of(found).script("$device"))
    case.equal("how the shortest program found differs from the model", seen, None)


@contract("AMP-REGION-039")
@pytest.mark.parametrize("kind", ["generator", "coroutine"])
def test_out_of_order(case: Case, target: Target, kind: str) -> None:
    interleaved(case, target, kind, case.samples(quick=60, standard=600, full=10000))


@contract("AMP-REGION-042")
def test_threads_in_turns(case: Case, target: Target) -> None:
    interleaved(case, target, "thread", case.samples(quick=12, standard=80, full=3000))


def interleaved(case: Case, target: Target, kind: str, count: int) -> None:
    """Check random schedules of actors against the model after every step."""
    choices = regions_of(target, neighbours(target), None, torch.float16, torch.bfloat16)
    taken: list[int] = []
    with one_thread(), Stage(kind, machine_of(target)) as stage:

        def differs(steps: Sequence[Step]) -> bool:
            taken.append(len(steps))
            return stage.mismatch(steps) is not None

        found = shortest(
            lambda generator: interleaving.random_steps(generator, choices),
            differs,
            count=count,
            seed=explored(case),
            simpler=interleaving.simpler,
        )
        seen = None if found is None else stage.mismatch(found)
    case.note("schedules", len(taken))
    case.note("steps compared", sum(taken))
    case.note("seed", explored(case))
    if found is not None:
        case.reproduce(interleaving.source(kind, found))
    case.equal("how the shortest schedule found differs from the model", seen, None)


def shapes(target: Target, outer: str, inner: str, first: Region, second: Region) -> dict[str, Program]:
    """Return pairs of regions: left normally, by an exception, and with their state set inside."""
    other = torch.float16 if torch.get_autocast_dtype(target.device_type) is torch.bfloat16 else torch.bfloat16
    setters = {
        "flag": Set(2, target.device_type, True),
        **({"dtype": Set(2, target.device_type, other)} if target.supports(other) else {}),
        "flag of another device": Set(2, neighbours(target)[0], True),
        "cache": Set(2, target.device_type, False, cache=True),
    }
    raised = Open(1, inner, second, (Jump(3, "ValueError"),))
    made = {
        "end": Program((Open(0, outer, first, (Open(1, inner, second, ()),)),)),
        "exception": Program((Open(0, outer, first, (Block(2, "try", (raised,), "ValueError"),)),)),
        "far exception": Program((Block(2, "try", (Open(0, outer, first, (raised,)),), "BaseException"),)),
    }
    for name, setter in setters.items():
        made[f"{name} set inside"] = Program((Open(0, outer, first, (Open(1, inner, second, (setter,)),)),))
        made[f"{name} set between"] = Program((Open(0, outer, first, (setter, Open(1, inner, second, ()))),))
    return made


def pairs(case: Case, target: Target) -> Iterator[tuple[tuple[str, str, str], Program]]:
    """Yield pairs of regions: random ones for every two ways to open them, and every two regions."""
    choices = regions_of(target, neighbours(target)[:1], None, torch.float16, torch.bfloat16)
    draw = random.Random(case.seed)
    both = list(itertools.product(choices, choices))
    some = [
        ("with", "with", *two)
        for two in draw.sample(both, min(len(both), case.samples(quick=200, standard=800, full=len(both))))
    ]
    every = [
        (*ways, *draw.choice(both))
        for ways in itertools.product(WAYS, WAYS)
        for _ in range(case.samples(quick=1, standard=3, full=8))
    ]
    for outer, inner, first, second in some + every:
        made = shapes(target, outer, inner, first, second)
        for shape in made if case.level == "full" else draw.sample(list(made), 1):
            yield (shape, outer, inner), made[shape]


@contract("AMP-REGION-037")
def test_pairs(case: Case, target: Target) -> None:
    wrong: list[tuple[str, Program]] = []
    compiled: dict[tuple[str, str, str], CodeType] = {}
    tried = 0
    with one_thread(), Player(machine_of(target)) as player:
        for kind, program in pairs(case, target):
            tried += 1
            if kind not in compiled:
                compiled[kind] = compile(program.parametric_source, "<program>", "exec")
            seen = player.played(compiled[kind], program.regions())
            if difference := parting(seen, predicted(program, player.machine)):
                wrong.append((difference, program))
    case.note("pairs of regions", tried)
    case.note("pairs of ways, with each shape", len(compiled))
    if wrong:
        case.reproduce(min((program.script("$device") for _, program in wrong), key=len))
    case.equal("how pairs of regions depart from the model", [difference for difference, _ in wrong[:3]], [])
