"""What one rank computes with DTensors, tensor parallel layers, pipeline stages and collectives inside regions."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

from .comparison import all_of, unlike
from .programs import SCALE, Program, Region, Step

Op = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# A product, an op of float32, one of the widest type, and a chain of them.
OPS: dict[str, Op] = {
    "matmul": lambda a, b: torch.matmul(a, b),
    "linear": lambda a, b: functional.linear(a, b.t()),
    "softmax": lambda a, b: functional.softmax(a, -1) + 0 * b.sum(),
    "sum": lambda a, b: a.half().sum() + b.sum(),
    "chain": lambda a, b: (a @ b).relu() @ b.t(),
}


def placed_ops(name: str, dtype: torch.dtype, seed: int, turn: int, turns: int) -> list[str]:
    """Name what an op in a region of `dtype` has otherwise with DTensors, by placement: types, values, gradients.

    The pairs of placements are taken in `turns`, of which this is one; which pairs it takes changes with the seed.
    The operands are small integers, so that sums over shards round nowhere; softmax is compared by type and within the
    rounding of its sums.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    op = OPS[name]
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((4, 8), (8, 4)))
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    placements = (Replicate(), Shard(0), Shard(1))
    plain = _results(op, left.clone().requires_grad_(), right.clone().requires_grad_(), dtype)
    found = []
    for pair in tuple(product(placements, placements))[(turn + seed) % turns :: turns]:
        ours, theirs = (
            distribute_tensor(one, mesh, [place]).requires_grad_()
            for one, place in zip((left, right), pair, strict=True)
        )
        seen = {key: one.full_tensor() for key, one in _results(op, ours, theirs, dtype).items()}
        if name == "softmax":
            seen = {key: _rounded(one, plain[key]) for key, one in seen.items()}
        found += [f"{name} of {pair}: {one}" for one in unlike(seen, plain)]
    return found


def _results(op: Op, left: Any, right: Any, dtype: torch.dtype) -> dict[str, Any]:
    with torch.autocast("cpu", dtype=dtype):
        out = op(left, right)
    out.float().sum().backward()
    return {"result": out.detach(), "left gradient": left.grad, "right gradient": right.grad}


def _rounded(seen: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return `expected` where `seen` differs by no more than the rounding of a sum of eight of at most one."""
    close = (seen - expected).abs() <= 2 * 8 * 2.0**-24 if seen.dtype == expected.dtype else torch.tensor(False)
    return torch.where(close, expected, seen) if bool(close.any()) else seen


def tensor_parallel(program: Program) -> tuple[Step, torch.dtype]:
    """Train one step with the first layer split by columns and the second by rows; return it and the outputs' type.

    Every rank has the whole batch.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = program.built()
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    parallelize_module(model.model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    types: list[torch.dtype] = []
    model.model.register_forward_hook(lambda module, given, out: types.append(out.dtype))
    batch = next(program.batches(0))[0]
    with torch.autocast("cpu", dtype=program.dtype):
        loss = program.loss(model, batch)
    scaler.scale(loss).backward()
    gradients = {name: all_of(one.grad) / SCALE for name, one in model.named_parameters() if one.grad is not None}
    parameters = {name: all_of(one.detach()).clone() for name, one in model.named_parameters()}
    return Step([loss.detach()], gradients, parameters, scaler.get_scale()), types[0]


_NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "RMSNorm": lambda: nn.RMSNorm(8, eps=1e-5),
}


def split_sequences(dtype: torch.dtype, seed: int) -> list[str]:
    """Name the norms under SequenceParallel whose gradients are not those of the whole sequence, by the region."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    rank, world = distributed.get_rank(), distributed.get_world_size()
    mesh = distributed.init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((2, 2 * world, 8), generator=generator)
    found = []
    for (name, make), region, steps in product(_NORMS.items(), (None, dtype), (1, 2)):
        plain, ours = make(), nn.Sequential(make())
        parallelize_module(ours, mesh, {"0": SequenceParallel()})
        for _ in range(steps):
            with torch.autocast("cpu", dtype=dtype, enabled=region is not None):
                whole, part = plain(x), ours(DTensor.from_local(x.chunk(world, 1)[rank].clone(), mesh, [Shard(1)]))
            whole.float().pow(3).sum().backward()
            (part.to_local() if isinstance(part, DTensor) else part).float().pow(3).sum().backward()
        for (key, theirs), own in zip(plain.named_parameters(), ours.parameters(), strict=True):
            seen, right = all_of(own.grad), theirs.grad
            what = f"{name} {key} in {f'a region of {region}' if region else 'no region'}, {steps} times"
            # float32 sums of the same numbers in another order.
            if seen.dtype != right.dtype or not float((seen - right).norm() / right.norm()) <= 1e-5:
                found.append(f"{what}: {seen.dtype}, {seen.flatten()[:2].tolist()} in place of {right[:2].tolist()}")
    return found


class Stage(nn.Module):
    """One layer of the perceptron, the first with its ReLU, in a region of its own where it has one.

    The last stage returns float32, and so does a stage without a region.
    """

    def __init__(self, layer: nn.Module, region: Region | None, last: bool) -> None:
        super().__init__()
        self.layer, self.region, self.last = layer, region, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.region() if self.region else contextlib.nullcontext():
            out: torch.Tensor = self.layer(x)
            out = out if self.last else out.relu()
            return out.float() if self.last or self.region is None else out


def pipeline(
    program: Program, schedule: str, averages: bool, low: bool = False, around: bool = False
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], list[torch.dtype]]:
    """Run one step on two stages and two micro-batches, whose gradients the schedule averages, or adds up.

    Returns the unscaled gradients and the scaled losses of this stage, and the types that its layer gave. With `low`
    the parameters of the layer are of the program's type; with `around` the region is not the stage's own but around
    the step of the schedule.
    """
    from torch.distributed import pipelining

    model, rank = program.built(), distributed.get_rank()
    batch = next(program.batches(0))[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    name = ("first", "second")[rank]
    region: Region = partial(torch.autocast, "cpu", dtype=program.dtype)
    stage = Stage(getattr(model.model, name), None if around else region, last=rank == 1)
    if low:
        stage.layer.to(program.dtype)
    made = pipelining.PipelineStage(stage, rank, 2, torch.device("cpu"))
    losses: list[torch.Tensor] = []
    types: list[torch.dtype] = []
    stage.layer.register_forward_hook(lambda module, given, out: types.append(out.dtype))
    kind = getattr(pipelining, schedule)
    # Schedules before torch 2.7 sum over the micro-batches; later ones average, unless they are asked not to.
    options = {"scale_grads": averages} if averages_micro_batches(schedule) else {}
    parts = 1 if averages else 2

    def loss(out: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        return scaler.scale(program.criterion(out, goal) / parts)

    run = kind(made, n_microbatches=2, loss_fn=loss, **options)
    with region() if around else contextlib.nullcontext():
        if rank == 0:
            run.step(batch.x)
        else:
            run.step(target=batch.goal, losses=losses)
    gradients = {one: value.grad for one, value in stage.layer.named_parameters() if value.grad is not None}
    found = {f"model.{name}.{one}": value / SCALE for one, value in gradients.items()}
    return found, [one.detach() * parts / 2 for one in losses], types


class _OfEachType(nn.Module):
    """Return the rows that it is given in a type, which the region has computed or not."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(2, 2, bias=False), kind
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.float()).to(self.kind)
        return out


def outputs_of_pipelines(dtype: torch.dtype) -> list[str]:
    """Name the types in which a pipeline of two stages that pass rows on does not return the rows in their order."""
    from torch.distributed import pipelining

    rank = distributed.get_rank()
    rows = torch.arange(12.0).reshape(6, 2)
    found = []
    for kind in (dtype, torch.float32):
        stage = pipelining.PipelineStage(_OfEachType(kind), rank, 2, torch.device("cpu"))
        run = pipelining.ScheduleGPipe(stage, n_microbatches=3, loss_fn=lambda out, goal: out.float().sum())
        with torch.autocast("cpu", dtype=dtype):
            out = run.step(rows) if rank == 0 else run.step(target=rows)
        if rank == 1:
            found += [f"{kind}: {one}" for one in unlike({"outputs": out.detach()}, {"outputs": rows.to(kind)})]
    return found


def averages_micro_batches(schedule: str) -> bool:
    """Return whether a schedule of this torch can average gradients over micro-batches, as it does by default."""
    from torch.distributed import pipelining

    return "scale_grads" in inspect.signature(getattr(pipelining, schedule)).parameters


class _Holding(nn.Module):
    """A parameter, and a buffer of each type."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        for kind in LAST_BIT:
            self.register_buffer(f"of_{str(kind).removeprefix('torch.')}", torch.zeros(1, dtype=kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def _buffers(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the buffers of a replica after a forward in a region of `dtype`; before it each rank has its own."""
    model = nn.parallel.DistributedDataParallel(_Holding())
    for one in model.module.buffers():
        one.fill_(contributed(distributed.get_rank(), one.dtype))
    with torch.autocast("cpu", dtype=dtype):
        model(torch.ones(1))
    return list(model.module.buffers())


def collectives(dtype: torch.dtype) -> dict[str, tuple[torch.dtype, list[float]]]:
    """Return types and values of collectives on tensors of each type in a region of `dtype`.

    DTensors are reduced and gathered where their placement changes, and buffers of replicas are broadcast in forward.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    rank, world = distributed.get_rank(), distributed.get_world_size()
    mesh = distributed.init_device_mesh("cpu", (world,))
    changes = {
        "partial to replicated": (Partial(), Replicate()),
        "partial to sharded": (Partial(), Shard(0)),
        "sharded to replicated": (Shard(0), Replicate()),
    }
    found = {}
    for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        own = torch.full((world,), contributed(rank, kind), dtype=kind)
        reduced, given = own.clone(), own.clone()
        parts = [torch.empty_like(own) for _ in range(world)]
        with torch.autocast("cpu", dtype=dtype):
            distributed.all_reduce(reduced)
            distributed.broadcast(given, 0)
            distributed.all_gather(parts, own)
        for name, one in {"all_reduce": reduced, "broadcast": given, "all_gather": torch.stack(parts)}.items():
            found[f"{name} of {kind}"] = (one.dtype, one.double().flatten().tolist())
        for name, (before, after) in changes.items():
            part = own if before.is_partial() else own[:1]
            with torch.autocast("cpu", dtype=dtype):
                one = DTensor.from_local(part, mesh, [before]).redistribute(placements=[after]).to_local()
            found[f"{name}, {kind}"] = (one.dtype, one.double().flatten().tolist())
    for kind, one in zip(LAST_BIT, _buffers(dtype), strict=True):
        found[f"buffer, {kind}"] = (one.dtype, one.tolist())
    return found


LAST_BIT = {torch.float64: 2.0**-40, torch.float32: 2.0**-20, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
"""What a number from one to two has in its type and loses in the next narrower one."""


def contributed(rank: int, kind: torch.dtype) -> float:
    """Return what a rank contributes: the sum of up to four ranks stays below two, and has the last bit."""
    return 1 + LAST_BIT[kind] if rank == 0 else 0.25


def gathered(world: int) -> dict[str, tuple[torch.dtype, list[float]]]:
    """Return what `collectives` has to return on `world` ranks: the tensors' own types and exact values."""
    found = {}
    for kind in LAST_BIT:
        own = [contributed(rank, kind) for rank in range(world)]
        found[f"all_reduce of {kind}"] = (kind, [sum(own)] * world)
        found[f"broadcast of {kind}"] = (kind, [own[0]] * world)
        found[f"all_gather of {kind}"] = (kind, [one for one in own for _ in range(world)])
        found[f"partial to replicated, {kind}"] = (kind, [sum(own)] * world)
        found[f"partial to sharded, {kind}"] = (kind, [sum(own)])
        found[f"sharded to replicated, {kind}"] = (kind, own)
        found[f"buffer, {kind}"] = (kind, own[:1])
    return found


def clipped(seed: int, dtype: torch.dtype, size: float) -> list[str]:
    """Name the placements by which clipping gradients of that size differs from that of plain ones.

    Clipping divides by the norm plus 1e-6, which is added once however many ranks hold a part of the norm.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    gradient = (torch.randn((8, 4), generator=torch.Generator().manual_seed(seed)) * size).to(dtype)
    plain = nn.Parameter(torch.zeros(8, 4, dtype=dtype))
    plain.grad = gradient.clone()
    nn.utils.clip_grad_norm_([plain], size / 2)
    # Norms of the parts, the norm of those, the coefficient and the product, on either side.
    allowed = 8 * torch.finfo(dtype).eps
    found = []
    for place in (Replicate(), Shard(0), Shard(1)):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(8, 4, dtype=dtype), mesh, [place]))
        parameter.grad = distribute_tensor(gradient.clone(), mesh, [place])
        nn.utils.clip_grad_norm_([parameter], size / 2)
        seen = parameter.grad.full_tensor()
        error = float((seen - plain.grad).float().norm() / plain.grad.float().norm())
        if not error < max(allowed, 1e-5):
            found.append(f"{place}: {error:.2g} of the norm apart")
    return found
