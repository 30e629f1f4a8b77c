"""Check DTensors, tensor parallel layers, pipeline stages and collectives inside regions against one process."""

from __future__ import annotations

import pytest
import torch

from ...data import in_force
from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from . import reference
from .batch_norms import evaluated, refusals
from .comparison import differences, unlike
from .differentiable import gradients_of_collectives
from .interleaved_stages import SCHEDULES, STAGES, THERE_AND_BACK
from .interleaved_stages import unlike_one_process as unlike_in_stages
from .meshes import changed_on_meshes, mapped
from .norms import norms_unlike_whole
from .placed_programs import ALWAYS, EVERY, unlike_one_process
from .placements import gradients_of_parts, unlike_whole
from .processes import Groups
from .programs import SCALE, Program
from .redistribution import TYPES, redistributed
from .reductions import NOT_SHARDED, REDUCTIONS, errors
from .split_twice import SIZES, unlike_whole_parameters
from .support import LISTED, answers, described, judge
from .tensors import (
    OPS,
    averages_micro_batches,
    collectives,
    gathered,
    outputs_of_pipelines,
    pipeline,
    placed_ops,
    split_sequences,
    tensor_parallel,
)

pytestmark = pytest.mark.usefixtures("one_thread")

AT_QUICK = "log_softmax under loss_parallel"


@contract("AMP-DISTRIBUTED-016", on="cpu")
@pytest.mark.parametrize("op", ["matmul", *(deep("standard", one) for one in OPS if one != "matmul")])
def test_distributed_tensors(case: Case, target: Target, ranks: Groups, op: str) -> None:
    turns = case.samples(quick=4, standard=len(case.amp_dtypes), full=1)
    for number, dtype in enumerate(case.amp_dtypes):
        for rank, found in enumerate(answers(case, ranks, 2, placed_ops, op, dtype, case.seed, number, turns)):
            case.equal(f"rank {rank}, {dtype}: differences from plain tensors", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-016", on="cpu")
@pytest.mark.parametrize("world", [2, deep("standard", 4)])
def test_placements(case: Case, target: Target, ranks: Groups, world: int) -> None:
    count = case.samples(quick=7, standard=99, full=99)
    for dtype in (*case.amp_dtypes, torch.float32)[: case.samples(quick=1, standard=2, full=3)]:
        for rank, found in enumerate(answers(case, ranks, world, unlike_whole, dtype, case.seed, count, False)):
            case.equal(f"rank {rank}, {dtype}: results unlike those of the whole tensor", found[:LISTED], [])
        for rank, found in enumerate(answers(case, ranks, world, gradients_of_parts, dtype)):
            case.equal(f"rank {rank}, {dtype}: gradients of to_local", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-016", on="cpu")
@pytest.mark.parametrize("world", [deep("standard", 2), deep("full", 4)])
def test_partial_sums(case: Case, target: Target, ranks: Groups, world: int) -> None:
    for dtype in (*case.amp_dtypes, torch.float32):
        for rank, found in enumerate(answers(case, ranks, world, unlike_whole, dtype, case.seed, 99, True)):
            case.equal(f"rank {rank}, {dtype}: results unlike those of the whole tensor", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-016", on="cpu")
@pytest.mark.parametrize("world", [2, deep("full", 4)])
def test_norms(case: Case, target: Target, ranks: Groups, world: int) -> None:
    for dtype in (*case.amp_dtypes, torch.float32)[: case.samples(quick=1, standard=2, full=3)]:
        for rank, parts in enumerate(answers(case, ranks, world, norms_unlike_whole, dtype, case.seed)):
            for part, found in parts.items():
                case.equal(f"rank {rank}, {dtype}: {part} that are not those of the whole", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-016", on="cpu")
@pytest.mark.parametrize("world", [2, deep("full", 4)])
def test_local_map(case: Case, target: Target, ranks: Groups, world: int) -> None:
    for dtype in case.amp_dtypes:
        for rank, parts in enumerate(answers(case, ranks, world, mapped, dtype, case.seed)):
            for part, found in parts.items():
                case.equal(f"rank {rank}, {dtype}: {part} that are not those of the whole", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-017", on="cpu")
@pytest.mark.parametrize("world", [2, deep("standard", 4)])
def test_tensor_parallel(case: Case, target: Target, ranks: Groups, world: int) -> None:
    for dtype in case.amp_dtypes if case.level == "full" else case.amp_dtypes[world // 4 :][:1]:
        program = Program("perceptron", dtype, 1, seed=case.seed + 4, exact=True)
        expected = reference.whole(program, 1)
        expected.parameters = {name: one.detach() for name, one in program.built().named_parameters()}
        seen, types = zip(*answers(case, ranks, world, tensor_parallel, program), strict=True)
        case.equal(f"{described(program)}: type of the outputs on each rank", list(types), [dtype] * world)
        judge(case, described(program), differences([[step] for step in seen], [[expected]] * world))


@contract("AMP-DISTRIBUTED-017", on="cpu")
@pytest.mark.parametrize("world", [2, deep("standard", 4)])
def test_split_sequences(case: Case, target: Target, ranks: Groups, world: int) -> None:
    for dtype in case.amp_dtypes[: case.samples(quick=1, standard=2, full=2)]:
        for rank, found in enumerate(answers(case, ranks, world, split_sequences, dtype, case.seed)):
            case.equal(f"rank {rank}, {dtype}: gradients unlike those of the whole sequence", found[:LISTED], [])


def _require_gloo(case: Case, schedule: str) -> None:
    """End as UNTESTABLE where gloo cannot send what the schedule does."""
    from torch.distributed import pipelining  # not there in a torch without torch.distributed

    if schedule != "ScheduleGPipe" and not in_force(torch.__version__, since="2.8"):
        case.untestable("gloo hangs before torch 2.8 where ranks send in both directions at once")
    if schedule in THERE_AND_BACK:
        if not hasattr(pipelining, schedule):
            case.unsupported(f"this torch has no {schedule}")
        if not in_force(torch.__version__, since="2.12"):
            case.untestable("before torch 2.12 a rank sends what its next stage takes to itself, which gloo refuses")


@contract("AMP-DISTRIBUTED-018", on="cpu")
@pytest.mark.parametrize("schedule", [deep("standard", one) for one in ("ScheduleGPipe", "Schedule1F1B")])
def test_pipeline(case: Case, target: Target, ranks: Groups, schedule: str) -> None:
    _require_gloo(case, schedule)
    for dtype in case.amp_dtypes:
        program = Program("perceptron", dtype, 1, seed=case.seed + 5, exact=True)
        expected = reference.whole(program, 1)
        theirs = {name: one for name, one in expected.gradients.items() if name != "tail"}
        for averages in (False, True) if averages_micro_batches(schedule) else (False,):
            found = answers(case, ranks, 2, pipeline, program, schedule, averages)
            (first, _, types), (second, losses, more) = found
            what = f"{described(program)}, gradients {'averaged' if averages else 'added up'}"
            # The first micro-batch of each stage runs once more where the schedule asks for the shapes of its outputs.
            case.equal(f"{what}: types that the layers gave", {*types, *more}, {dtype})
            case.equal(f"{what}: differences from one process", unlike({**first, **second}, theirs), [])
            mean = torch.stack(losses).sum() / SCALE
            case.identical(f"{what}: mean of the micro-batches' losses", mean, expected.losses[0])
        if averages_micro_batches(schedule):
            averaged, added = (answers(case, ranks, 2, pipeline, program, schedule, one, True) for one in (True, False))
            for rank, ((mean_of, *_), (sum_of, *_)) in enumerate(zip(averaged, added, strict=True)):
                case.equal(
                    f"{dtype}: types of the gradients of 16-bit parameters",
                    {one.dtype for one in mean_of.values()},
                    {dtype},
                )
                case.equal(f"{dtype}, rank {rank}: averaged gradients, of halved losses", unlike(mean_of, sum_of), [])


@contract("AMP-DISTRIBUTED-018", on="cpu")
@pytest.mark.parametrize("schedule", [deep("standard", one) for one in ("ScheduleGPipe", "Schedule1F1B")])
def test_region_around_a_pipeline(case: Case, target: Target, ranks: Groups, schedule: str) -> None:
    _require_gloo(case, schedule)
    for dtype in case.amp_dtypes:
        program = Program("perceptron", dtype, 1, seed=case.seed + 8, exact=True)
        theirs = {name: one for name, one in reference.whole(program, 1).gradients.items() if name != "tail"}
        for averages in (False, True) if averages_micro_batches(schedule) else (False,):
            found = answers(case, ranks, 2, pipeline, program, schedule, averages, False, True)
            (first, _, types), (second, _, more) = found
            what = f"{described(program)}, gradients {'averaged' if averages else 'added up'}"
            case.equal(f"{what}: types that the layers gave", {*types, *more}, {dtype})
            case.equal(f"{what}: differences from one process", unlike({**first, **second}, theirs), [])


@contract("AMP-DISTRIBUTED-018", on="cpu")
def test_outputs_of_pipelines(case: Case, target: Target, ranks: Groups) -> None:
    for dtype in case.amp_dtypes[: case.samples(quick=1, standard=2, full=2)]:
        for rank, found in enumerate(answers(case, ranks, 2, outputs_of_pipelines, dtype)):
            case.equal(f"rank {rank}, region of {dtype}: outputs unlike the rows that went in", found, [])


@contract("AMP-DISTRIBUTED-018", on="cpu")
@pytest.mark.parametrize("schedule", [deep("standard", one) for one in SCHEDULES])
@pytest.mark.parametrize("world", [deep("standard", 2), deep("full", 4)])
def test_several_stages_a_rank(case: Case, target: Target, ranks: Groups, schedule: str, world: int) -> None:
    _require_gloo(case, schedule)
    for number, name in enumerate(STAGES):
        for dtype in case.amp_dtypes if case.level == "full" else case.amp_dtypes[number % 2 :][:1]:
            for rank, found in enumerate(
                answers(case, ranks, world, unlike_in_stages, schedule, name, dtype, case.seed)
            ):
                case.equal(f"rank {rank}, {dtype}, {name}: gradients unlike those of one process", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-019", on="cpu")
@pytest.mark.parametrize("world", [2, deep("standard", 4)])
def test_collectives(case: Case, target: Target, ranks: Groups, world: int) -> None:
    for dtype in case.amp_dtypes:
        for rank, found in enumerate(answers(case, ranks, world, collectives, dtype)):
            wrong = [f"{name}: {one}" for name, one in gathered(world).items() if found[name] != one]
            case.equal(f"rank {rank}, region of {dtype}: collectives of other types or values", wrong[:LISTED], [])


@contract("AMP-DISTRIBUTED-030", on="cpu")
@pytest.mark.parametrize("world", [2, deep("standard", 4)])
def test_gradients_of_collectives(case: Case, target: Target, ranks: Groups, world: int) -> None:
    for region in (None, *case.amp_dtypes):
        for rank, found in enumerate(answers(case, ranks, world, gradients_of_collectives, region)):
            what = f"rank {rank}, {f'region of {region}' if region else 'no region'}: not the exact value, or its type"
            case.equal(what, found[:LISTED], [])


@contract("AMP-DISTRIBUTED-035", on="cpu")
@pytest.mark.parametrize("world", [2, deep("standard", 4)])
def test_types_of_redistribution(case: Case, target: Target, ranks: Groups, world: int) -> None:
    count = case.samples(quick=12, standard=len(TYPES) if world == 2 else 12, full=len(TYPES))
    for number, region in enumerate((None, *case.amp_dtypes)[: case.samples(quick=2, standard=2, full=3)]):
        first = case.seed + number * (len(TYPES) // 2)
        for rank, both in enumerate(answers(case, ranks, world, redistributed, first, count, region)):
            for part, found in zip(("results", "gradients"), both, strict=True):
                where = f"rank {rank}, {f'region of {region}' if region else 'no region'}"
                case.equal(f"{where}: {part} that are not what the named types make", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-035", on="cpu")
@pytest.mark.parametrize("flattened", [deep("standard", one) for one in (True, False)])
def test_changes_on_meshes(case: Case, target: Target, ranks: Groups, flattened: bool) -> None:
    count = case.samples(quick=0, standard=12, full=150)
    for dtype in case.amp_dtypes[: case.samples(quick=1, standard=1, full=2)]:
        found = answers(case, ranks, 4, changed_on_meshes, dtype, case.seed, count, flattened)
        for rank, both in enumerate(found):
            for part, wrong in zip(("values", "gradients"), both, strict=True):
                for size, changes in wrong.items():
                    where = f"rank {rank}, {dtype}, {size}"
                    case.equal(f"{where}: {part} that a change of placements does not keep", changes[:LISTED], [])


@contract("AMP-DISTRIBUTED-037", on="cpu")
@pytest.mark.parametrize("size", [deep("standard", one) for one in SIZES])
def test_parameters_split_twice(case: Case, target: Target, ranks: Groups, size: str) -> None:
    types = [(one, None) for one in (torch.float32, *case.amp_dtypes)]
    regions = [(torch.float32, one) for one in case.amp_dtypes]
    for held, region in (types + regions) if case.level == "full" else (types[-1], regions[0]):
        where = f"{held}{f' in a region of {region}' if region else ''}"
        found = answers(case, ranks, 4, unlike_whole_parameters, held, region, SIZES[size], case.seed)
        if not found:
            return
        if None in found:
            case.unsupported("fully_shard refuses to split a parameter into parts that are not equal")
        for rank, (parts, judged) in enumerate(found):
            for part, wrong in parts.items():
                what = f"rank {rank}, {where}: {part} that are not those of the whole parameter"
                case.equal(what, wrong[:LISTED], [])
            case.at_least(f"rank {rank}, {where}: calls that are not refused", judged, 20)


@contract("AMP-DISTRIBUTED-028", on="cpu")
def test_synchronized_batch_normalization(case: Case, target: Target, ranks: Groups) -> None:
    for dtype in case.amp_dtypes:
        for rank, found in enumerate(answers(case, ranks, 2, refusals, dtype, case.seed)):
            for place, raised, wrapped, kept, enabled in found:
                what = f"rank {rank}, training in {place}, {dtype}"
                case.equal(f"{what}: exception", raised, "ValueError, of SyncBatchNorm")
                case.equal(f"{what}: exception of a replica", wrapped, "ValueError, of SyncBatchNorm")
                case.equal(f"{what}: running statistics stay", kept, True)
                case.equal(f"{what}: autocast after it", enabled, False)
        for rank, evaluations in enumerate(answers(case, ranks, 2, evaluated, dtype, case.seed)):
            for place, seen, expected, equal in evaluations:
                what = f"rank {rank}, evaluation in {place}, {dtype} (control)"
                case.equal(f"{what}: type of the result", seen, expected)
                case.equal(f"{what}: the bits of BatchNorm1d", equal, True)


@contract("AMP-DISTRIBUTED-033", on="cpu")
@pytest.mark.parametrize("name", [AT_QUICK, *(deep("standard", one) for one in REDUCTIONS if one != AT_QUICK)])
def test_reductions_of_each_length(case: Case, target: Target, ranks: Groups, name: str) -> None:
    types = (torch.bfloat16, torch.float16, torch.float32)
    for dtype in types[: case.samples(quick=1, standard=3, full=3)]:
        lengths = case.samples(quick=2, standard=3, full=3)
        for rank, found in enumerate(answers(case, ranks, 2, errors, name, dtype, case.seed, lengths)):
            if any(one.startswith(NOT_SHARDED) for one in found):
                case.unsupported(found[0])
            case.equal(f"rank {rank}, {dtype}: lengths whose error is too large", found, [])


@contract("AMP-DISTRIBUTED-036", on="cpu")
@pytest.mark.parametrize("kind", ["losses", deep("standard", "reductions"), "modules"])
def test_placed_programs(case: Case, target: Target, ranks: Groups, kind: str) -> None:
    judge_placements(case, ranks, kind, sums=False)


@contract("AMP-DISTRIBUTED-036", on="cpu")
@pytest.mark.parametrize("kind", [deep("standard", one) for one in EVERY])
def test_programs_of_sums(case: Case, target: Target, ranks: Groups, kind: str) -> None:
    judge_placements(case, ranks, kind, sums=True)


def judge_placements(case: Case, ranks: Groups, kind: str, *, sums: bool) -> None:
    """Losses, reductions and ops of modules on placed operands have the results and gradients of one process."""
    types: list[tuple[torch.dtype, torch.dtype | None]] = [(torch.float32, one) for one in (*case.amp_dtypes[:1], None)]
    types += [(torch.float32, one) for one in case.amp_dtypes[1:]] + [(one, None) for one in case.amp_dtypes]
    every = list(EVERY[kind])
    step = case.samples(quick=len(every), standard=3 if kind == "losses" else 1, full=1)
    names = list(dict.fromkeys((ALWAYS[kind], *every[case.seed % step :: step])))
    judged = False
    for dtype, region in types[: case.samples(quick=1, standard=2, full=6)]:
        where = f"{dtype}, {f'region of {region}' if region else 'no region'}"
        for rank, found in enumerate(
            answers(case, ranks, 2, unlike_one_process, kind, names, dtype, region, case.seed, sums)
        ):
            for name, (count, wrong) in found.items():
                if count or wrong:
                    judged = True
                    case.equal(f"rank {rank}, {where}, {name}: unlike one process", wrong[:LISTED], [])
    if not judged:
        case.unsupported(f"DTensors of this torch refuse {', '.join(names)}")
