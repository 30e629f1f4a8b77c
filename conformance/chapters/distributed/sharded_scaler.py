"""What each rank does with a ShardedGradScaler, or with a GradScaler and sharded parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import distributed

from ...scaler import Depth, drive
from ...scaler.adapters import sharded
from ...scaler.optimizers import CountedSGD

SCALE = 2.0**10
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOSSES = (1.5, -3.0, 2.0**15)
"""The last one times the scale is infinite in fp16."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
}
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
SIZE = 8
"""Elements of the parameter: each rank has a gradient for all of them, or for its shard."""


def driven(without: Collection[str], histories: int, seed: int, depth: Depth) -> tuple[str, int]:
    """Drive the scaler; return the shortest history after which it departs, "" for none, and the number of calls."""
    found = drive(sharded, without=without, histories=histories, seed=seed, depth=depth)
    return "" if found.mismatch is None else str(found.mismatch), found.steps


def defaults() -> dict[str, Any]:
    """Return the state of a scaler that was given no settings but its device."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    state: dict[str, Any] = ShardedGradScaler("cpu").state_dict()
    return state


# --- losses


def scaled_losses() -> tuple[list[str], int]:
    """Scale losses of every dtype, size, rank and container; return what is not the product in the loss's dtype."""
    wrong, asked = [], 0
    for dtype, value in itertools.product(DTYPES, LOSSES):
        loss = torch.tensor(value, dtype=dtype)
        forms: dict[str, Any] = {
            "tensor": loss,
            "vector": loss.expand(3),
            "list": [loss, loss],
            "tuple": (loss,),
            "nested": [loss, (loss, [loss])],
        }
        for form, given in forms.items():
            result = sharded(init_scale=SCALE).scale(given)
            wrong += [f"{form} of {value} in {dtype}: {result}"] * (not _is_scaled(result, given))
            asked += 1
        result = list(sharded(init_scale=SCALE).scale(one for one in (loss, loss)))
        wrong += [f"generator of {value} in {dtype}: {result}"] * (not _is_scaled(result, [loss, loss]))
        asked += 1
    return wrong, asked


def _is_scaled(result: Any, loss: Any) -> bool:
    if isinstance(loss, torch.Tensor):
        expected = (loss.double() * SCALE).to(loss.dtype)
        return isinstance(result, torch.Tensor) and result.dtype is loss.dtype and torch.equal(result, expected)
    return type(result) is type(loss) and len(result) == len(loss) and all(map(_is_scaled, result, loss))


def taken_for_losses() -> list[str]:
    """Return what is no loss and is scaled without an error all the same."""
    taken = []
    for given in (1.0, None, [torch.ones(()), 1.0], (torch.ones(()), None)):
        try:
            sharded(init_scale=SCALE).scale(given)
        except (TypeError, ValueError):
            continue
        taken.append(str(given))
    return taken


# --- gradients


def _added(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    """Return a sparse gradient in which all values are of the second of three elements."""
    indices = torch.ones(1, len(values), dtype=torch.long)
    # torch 2.6 checks the indices where it is not told whether to.
    return torch.sparse_coo_tensor(indices, torch.tensor(values, dtype=dtype), (3,), check_invariants=False)


# What backward leaves of a scaled loss, the second element of which comes to 3 where the step is taken. The sums of
# the last two are beyond the end of fp16 on the way, or in the end; wider types have room for both.
GRADIENTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "dense": lambda dtype: torch.tensor([0.0, 3 * SCALE, 0.0], dtype=dtype),
    "infinite": lambda dtype: torch.tensor([0.0, 3 * SCALE, float("inf")], dtype=dtype),
    "sparse": lambda dtype: _added([SCALE, 2 * SCALE], dtype),
    "sparse, infinite": lambda dtype: _added([SCALE, float("-inf")], dtype),
    "sparse, added beyond fp16": lambda dtype: _added([61440.0, 61440.0, 3 * SCALE - 61440.0, -61440.0], dtype),
    "sparse, infinite when added": lambda dtype: _added([61440.0] * 2, dtype),
}


def unscaled() -> tuple[list[str], int]:
    """Unscale gradients of every form and dtype; return what is wrong with them or with the step, and their number."""
    wrong = []
    for (form, gradient), dtype in itertools.product(GRADIENTS.items(), DTYPES):
        parameter = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = CountedSGD([parameter])
        scaler = sharded(init_scale=SCALE)
        scaler.scale(torch.zeros(()))
        parameter.grad = gradient(dtype)
        scaler.unscale_(optimizer)
        assert parameter.grad is not None
        kept, value = parameter.grad.dtype, parameter.grad.to_dense()[1].item()
        scaler.step(optimizer)
        taken = "infinite" not in form or ("added" in form and dtype is not torch.float16)
        right = 120.0 if "added" in form and "infinite" in form else 3.0
        if bool(optimizer.calls) is not taken or kept is not dtype or (taken and value != right):
            wrong.append(f"{form} in {dtype}: {value} in {kept}, steps {len(optimizer.calls)}")
    return wrong, len(GRADIENTS) * len(DTYPES)


# --- steps


def steps(scaler: str, kind: str, implementation: str, explicit: bool) -> list[tuple[str, list[float], float]]:
    """Step where no rank overflows, each one alone, and all; return by step an exception, the parameter and the scale.

    A ShardedGradScaler has a plain parameter on each rank, as FullyShardedDataParallel leaves its shard; "dtensor" is a
    GradScaler with a sharded parameter. The gradient is 1 where nothing overflows.
    """
    world = distributed.get_world_size()
    found = []
    for ranks in ([], *([rank] for rank in range(world)), list(range(world))):
        bad = distributed.get_rank() in ranks
        parameter, gradient = torch.ones(SIZE), torch.full((SIZE,), SCALE)
        gradient[SIZE // 2] = float("inf") if bad else SCALE
        used = torch.nn.Parameter(_held(scaler, parameter))
        used.grad = _held(scaler, gradient)
        optimizer = OPTIMIZERS[kind]([used], lr=0.5, **IMPLEMENTATIONS[implementation])
        amp = _scaler(scaler)
        amp.scale(torch.zeros(()))
        raised = ""
        try:
            if explicit:
                amp.unscale_(optimizer)
            amp.step(optimizer)
            amp.update()
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"[:100]
        local: Any = used.detach()
        found.append((raised, (local.to_local() if scaler == "dtensor" else local).tolist(), amp.get_scale()))
    return found


def lacking(kind: str, implementation: str) -> str:
    """Return what a step with a sharded parameter raises where no scaler is used: "" where it works."""
    parameter = torch.nn.Parameter(_shard(torch.ones(SIZE)))
    parameter.grad = _shard(torch.ones(SIZE))
    try:
        OPTIMIZERS[kind]([parameter], **IMPLEMENTATIONS[implementation]).step()
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _scaler(name: str) -> torch.amp.GradScaler:
    settings = {"init_scale": SCALE, "growth_interval": 10}
    return torch.amp.GradScaler("cpu", **settings) if name == "dtensor" else sharded(**settings)


def _held(scaler: str, local: torch.Tensor) -> torch.Tensor:
    """Return a rank's part as that scaler takes it: a plain tensor, or the shard of a DTensor."""
    return _shard(local) if scaler == "dtensor" else local


def _shard(local: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


# By name the placements of the parameters of one optimizer on each dimension of the mesh: a dimension of the parameter
# that is sharded, or "R" for a replica.
PLACEMENTS: dict[str, tuple[str, ...]] = {
    "replicated": ("R",),
    "rows": ("0",),
    "columns": ("1",),
    "rows-replicated": ("0", "R"),
    "replicated-rows": ("R", "0"),
    "replicas-of-rows": ("R0",),
    "rows-of-replicas": ("0R",),
    "rows-and-columns": ("01",),
    "rows-twice": ("00",),
    "rows-twice-replicas": ("00", "R0"),
    "rows-of-replicas-replicas-of-rows": ("0R", "R0"),
}


def ranks_of(name: str) -> int:
    """Return the number of ranks of a mesh with two along each dimension."""
    return 2 ** len(PLACEMENTS[name][0])


def steps_with_placements(name: str) -> list[tuple[str, list[float], float]]:
    """Overflow in each parameter in turn; return by step an exception, an element of each parameter and the scale.

    The overflow lies in the part of the last rank, and in those of the ranks that hold a replica of it.
    """
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, init_device_mesh

    kinds = PLACEMENTS[name]
    mesh = init_device_mesh("cpu", (2,) * len(kinds[0]))
    where = mesh.get_coordinate()
    assert where is not None
    found = []
    for overflowing in range(len(kinds)):
        parameters = []
        for number, kind in enumerate(kinds):
            bad = number == overflowing and all(at == 1 for at, one in zip(where, kind, strict=True) if one != "R")
            placements: list[Placement] = [Replicate() if one == "R" else Shard(int(one)) for one in kind]
            gradient = torch.full((2, 2), SCALE)
            gradient[1, 0] = float("inf") if bad else SCALE
            value, slope = (
                DTensor.from_local(local, mesh, placements, run_check=False) for local in (torch.ones(2, 2), gradient)
            )
            parameters.append(torch.nn.Parameter(value))
            parameters[-1].grad = slope
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        scaler.scale(torch.zeros(()))
        raised = ""
        try:
            scaler.step(optimizer)
            scaler.update()
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"[:100]
        locals_of: list[Any] = [one.detach() for one in parameters]
        found.append((raised, [float(one.to_local()[0, 0]) for one in locals_of], scaler.get_scale()))
    return found


def steps_of_optimizers(scaler: str, explicit: bool, count: int) -> list[tuple[list[int], float]]:
    """Overflow on the last rank for each of `count` optimizers of one scaler; return by round the steps and the scale.

    `explicit`: all gradients are unscaled before the first step. One scaler takes all rounds; it halves its scale in
    each.
    """
    amp = _scaler(scaler)
    last = distributed.get_rank() == distributed.get_world_size() - 1
    optimizers = [CountedSGD([torch.nn.Parameter(_held(scaler, torch.zeros(SIZE)))]) for _ in range(count)]
    found = []
    for overflowing in range(count):
        amp.scale(torch.zeros(()))
        for number, optimizer in enumerate(optimizers):
            gradient = torch.full((SIZE,), float("inf") if last and number == overflowing else SCALE)
            optimizer.param_groups[0]["params"][0].grad = _held(scaler, gradient)
            optimizer.calls.clear()
        for optimizer in optimizers if explicit else ():
            amp.unscale_(optimizer)
        for optimizer in optimizers:
            amp.step(optimizer)
        amp.update()
        found.append(([len(optimizer.calls) for optimizer in optimizers], amp.get_scale()))
    return found


def steps_beside_a_rank_without_gradients() -> tuple[int, float]:
    """Overflow on the last rank, where the others have no gradient; return the steps of this one and the new scale."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = CountedSGD([parameter])
    scaler = sharded(init_scale=SCALE)
    scaler.scale(torch.zeros(()))
    if distributed.get_rank() == distributed.get_world_size() - 1:
        parameter.grad = torch.full((3,), float("inf"))
    scaler.step(optimizer)
    scaler.update()
    return len(optimizer.calls), scaler.get_scale()


def step_in_own_group() -> tuple[int, float]:
    """Overflow on the last rank, each rank with a process group of its own; return its steps and its new scale."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    groups = [distributed.new_group([rank]) for rank in range(distributed.get_world_size())]
    last = distributed.get_rank() == distributed.get_world_size() - 1
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = CountedSGD([parameter])
    scaler = ShardedGradScaler("cpu", init_scale=SCALE, process_group=groups[distributed.get_rank()])
    scaler.scale(torch.zeros(()))
    parameter.grad = torch.full((3,), float("inf") if last else SCALE)
    scaler.step(optimizer)
    scaler.update()
    return len(optimizer.calls), scaler.get_scale()
