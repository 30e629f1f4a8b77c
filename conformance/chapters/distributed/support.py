"""Steps that the checks share: programs on ranks, with every way in which a rank can end judged."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...harness.check import Case, Check, applies, needs
from ...harness.targets import Target, name_of, one_device_only
from ...oracles.manual_training import HandScale
from . import processes, reference
from .comparison import apart, differences
from .processes import Groups, NoGroup, Raised, RankLost
from .programs import HUGE, INTERVAL, MODELS, SCALE, Program, Step
from .ways import WAYS, train_each

# A replica waits for every gradient, unless it is asked to look for those that do not come.
NEED_EVERY_GRADIENT = tuple(
    way for way in WAYS if way.startswith(("ddp", "zero")) and way not in ("ddp_unused", "ddp_static")
)
LISTED = 4
"""Differences that one piece of evidence lists."""
LEAST_SCALE = SCALE / 4
"""The loss scale below which no overflow is planned: what is large enough at `SCALE` need not overflow there."""


def without_a_pair(target: Target) -> str | None:
    """Say why ranks cannot have devices of the target's type, each its own and all alike, or return None."""
    if target.device_type == "cpu":
        return None
    if reason := one_device_only(target):
        return reason
    names = [name_of(replace(target, index=index)) for index in range(2)]
    return None if names[0] == names[1] else f"the first two devices are not alike: {names[0]}, {names[1]}"


def on_a_device_each(check: Check) -> Check:
    """Say that a check's ranks compute on the CPU or each on its own accelerator."""
    return applies(without_a_pair)(needs("child processes")(check))


def answers(case: Case, ranks: Groups, world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `work` on `world` ranks and return what each returned; an exception or a lost rank violates the contract.

    Nothing is returned where a waiver excuses the exceptions or the loss.
    """
    if reason := processes.lacking(ranks.device_type):
        case.untestable(reason) if ranks.device_type == "cpu" else case.unsupported(reason)
    if ranks.device_type != "cpu" and (count := torch.get_device_module(ranks.device_type).device_count()) < world:
        case.unsupported(f"{count} devices of {ranks.device_type}; this needs {world}")
    try:
        found = ranks(world).call(work, *arguments)
    except NoGroup as error:
        case.untestable(str(error))
    except RankLost as error:
        case.equal("ranks that were lost", str(error), "none")
        return []
    raised = [
        f"rank {rank}: {one.kinds[0]}: {one.message.strip().splitlines()[0] if one.message.strip() else ''}"
        for rank, one in enumerate(found)
        if isinstance(one, Raised)
    ]
    if raised and (reason := _without_numpy()) and all(reason in one for one in raised):
        case.untestable(f"this torch works without numpy: {reason}")
    case.equal("exceptions", raised, [])
    return [] if raised else found


def _without_numpy() -> str | None:
    """Say that this torch cannot send objects from rank to rank, which it reads through numpy, or return None."""
    try:
        torch.zeros(1).numpy()
    except RuntimeError as error:
        return str(error)
    return None


def train(
    case: Case, ranks: Groups, world: int, way: str, programs: Sequence[Program], clip: float | None = None
) -> list[list[list[Step]]]:
    """Train each program in one way; return by program and rank its steps."""
    if reason := absent(way, ranks.device_type):
        case.unsupported(reason)
    by_rank = answers(case, ranks, world, train_each, way, programs, clip)
    return [list(one) for one in zip(*by_rank, strict=True)]


def absent(way: str, device_type: str = "cpu") -> str | None:
    """Say what this torch lacks for a way on devices of a type, or return None."""
    stream = getattr(torch.get_device_module(device_type), "Stream", None)
    if way.startswith("fsdp2") and not hasattr(stream, "record_event"):
        return f"fully_shard of this torch needs streams that record events, which its {device_type} does not have"
    if way.startswith("fsdp1") and stream is None:
        return f"FullyShardedDataParallel needs streams, which torch.{device_type} does not have"
    return None


def agree(
    case: Case,
    ranks: Groups,
    way: str,
    programs: Sequence[Program],
    **how: Any,
) -> None:
    """Each program has on two or four ranks every bit that it has in one process, which `how` says more of."""
    world = 4 if "hybrid" in way else 2
    for program, seen in zip(programs, train(case, ranks, world, way, programs), strict=True):
        judge(case, f"{way}, {described(program)}", differences(seen, reference.steps(program, world, **how)))
        case.equal(f"{way}, {described(program)}: differences between ranks", apart(seen)[:LISTED], [])


def judge(case: Case, what: str, found: list[str]) -> None:
    """There are no differences from one process."""
    case.equal(f"{what}: differences from one process", found[:LISTED], [])


def described(program: Program) -> str:
    """Return a program in the words of the evidence."""
    skipped = f", overflow at steps {sorted(program.overflows)}" if program.overflows else ""
    return f"{program.model} in {str(program.dtype).removeprefix('torch.')}{skipped}"


def programs(case: Case, target: Target, way: str, without: Sequence[str] = (), **more: Any) -> list[Program]:
    """Return a program of each model but those of `without` that a way can train on a target, each with one overflow.

    Below level full it is in one dtype, which alternates over models and ways, and of two models, at quick of one;
    which they are changes with the way and the seed. The overflow goes over the ranks of a pair and over the steps.
    """
    shift = zlib.crc32(way.encode()) + case.seed
    left_out = [*without, *(["unused"] if way in NEED_EVERY_GRADIENT else [])]
    if target.device_type != "cpu":
        left_out += ["attention"]  # whose backward adds up in the order in which a card's blocks end
    models = [name for name in MODELS if name not in left_out]
    count = case.samples(quick=1, standard=2, full=len(models))
    models = [models[(shift + number) % len(models)] for number in range(count)]
    found = []
    for number, model in enumerate(models):
        dtypes = case.amp_dtypes[(number + shift) % len(case.amp_dtypes) :][:1]
        for dtype in case.amp_dtypes if case.level == "full" else dtypes:
            overflows = {1 + number % 2: (number + shift) % 2}
            seed = case.seed + number + 1
            size = {"steps": 4 if case.level == "full" else 3, "device_type": target.device_type, **more}
            found.append(Program(model, dtype, overflows=overflows, seed=seed, **size))
    return found


def one_process(way: str) -> dict[str, Any]:
    """Return what the reference of a way needs besides the program.

    FullyShardedDataParallel hands out views of its flat parameter, which are no leaves: autocast casts them at each use
    instead of once, so that the gradients of several uses meet in float32. A parameter without gradient has zeros where
    the flat parameter has others with one.
    """
    how = {"combine": combining(way)}
    if not way.startswith("fsdp1"):
        return how
    return how | {"forward": reference.of_autocast_uncached, "zeros": way != "fsdp1_blocks"}


def combining(way: str) -> reference.Combine:
    """Return how the ranks' gradients become one: as a mean of all, or of each pair first."""
    return reference.mean_of_pairs if "hybrid" in way else reference.mean


def in_types_of(way: str, program: Program) -> tuple[Program, dict[str, Any]]:
    """Return the program that a way can train in its own types, and what its reference needs besides."""
    how = one_process(way)
    if way.endswith(("mixed", "reduce_low")):
        how |= {"combine": reference.mean_in(program.dtype, combining(way))}
    if "mixed" in way:
        return unlike_fp32(program), how | {"forward": reference.of_casts}
    return program, how


def differs_from_fp32(case: Case, program: Program, dtype: torch.dtype) -> None:
    """The mean in `dtype` is another one than in float32, so that one cannot pass for the other (control)."""
    low, wide = (
        reference.steps(program, 2, combine=combine)[0][0].gradients
        for combine in (reference.mean_in(dtype), reference.mean)
    )
    moved = [name for name in low if not torch.equal(low[name], wide[name])]
    case.true("gradients that differ by the type of the mean (control)", bool(moved), moved)


def unlike_fp32(program: Program) -> Program:
    """Return a program whose overflow is one of a model in 16 bits throughout: fp16 has no room for HUGE."""
    return replace(program, huge=2.0**15 if program.dtype is torch.float16 else HUGE)


def histories(case: Case, target: Target, world: int, count: int, dtype: torch.dtype, steps: int = 6) -> list[Program]:
    """Return programs with random overflows, each step of any rank or of none."""
    draw = random.Random(f"{case.seed}/{case.contract.id}/{world}")
    found = []
    for number in range(count):
        rule, overflows = HandScale(SCALE, INTERVAL), {}
        for step in range(steps):
            if draw.random() < 0.4 and (rule.scale or 0.0) >= LEAST_SCALE:
                overflows[step] = draw.randrange(world)
            rule.update(step not in overflows)
        seed = case.seed + number + 1
        found.append(Program("perceptron", dtype, steps, overflows, seed=seed, device_type=target.device_type))
    return found
