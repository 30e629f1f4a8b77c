"""What one rank computes with DTensors of every placement, in parts of two sizes too, and with hybrid shards."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed, nn

from .comparison import all_of, unlike

Unary: TypeAlias = Callable[[Tensor], Tensor]
COLUMNS = 8
# Each result is exact in every type: the mean of each column is one, and that of a row a number of eighths.
_UNARY: dict[str, Unary] = {
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(0),
    "mean of columns": lambda x: x.mean(1),
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(0),
    "max": lambda x: x.max(),
    "amax of rows": lambda x: x.amax(0),
    "amin of columns": lambda x: x.amin(1),
    "argmax": lambda x: x.argmax(1),
    "relu": lambda x: torch.relu(x - 1),
    "abs": lambda x: x.abs(),
    "square": lambda x: x.square(),
    "plus a number": lambda x: x + 2,
    "a number minus it": lambda x: 2 - x,
    "times a number": lambda x: x * -2,
    "over a number": lambda x: x / 2,
    "plus itself": lambda x: x + x,
    "times itself": lambda x: x * x,
    "transposed": lambda x: x.t(),
    "comparison": lambda x: x > 1,
    "clamp": lambda x: x.clamp(0, 2),
    "where": lambda x: torch.where(x > 0, x, -x),
    "cast": lambda x: x.float() * 2,
}


def _whole(dtype: torch.dtype, seed: int) -> Tensor:
    """Return integers, of mean one in each column; the rows are one less than two for each rank."""
    shape = (2 * distributed.get_world_size() - 1, COLUMNS)
    drawn = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed))
    return (drawn - drawn.roll(1, 0) + 1).to(dtype)


def _placed(whole: Tensor, mesh: Any, partial: bool) -> Iterator[tuple[str, Any]]:
    """Yield a DTensor of the values of `whole` in each placement, or one that is a sum over the ranks."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    rank = distributed.get_rank()
    for place in () if partial else (Replicate(), Shard(0), Shard(1)):
        yield str(place), distribute_tensor(whole.clone(), mesh, [place])
    if partial:
        rest = 3 * torch.arange(whole.numel()).reshape(whole.shape).remainder(3).to(whole.dtype)
        part = whole - rest if rank == 0 else rest if rank == 1 else torch.zeros_like(whole)
        yield "Partial", DTensor.from_local(part, mesh, [Partial()], run_check=False)


def _unsupported(error: RuntimeError) -> bool:
    """Return whether an op needs what this torch's DTensors or gloo lack: a strategy, or averages."""
    return isinstance(error, NotImplementedError) or "ReduceOp.AVG" in str(error)


def unlike_whole(dtype: torch.dtype, seed: int, count: int, partial: bool) -> list[str]:
    """Name the ops and placements with which a DTensor gives something else than the whole tensor.

    `count` of the ops are taken, which changes with the seed. Ops that DTensors do not support are named where they are
    many.
    """
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    whole = _whole(dtype, seed)
    order = torch.randperm(len(_UNARY), generator=torch.Generator().manual_seed(seed)).tolist()
    names = [list(_UNARY)[place] for place in order[:count]]
    if partial:
        names = [name for name in names if "mean" not in name]  # those of the parts need not be exact
    found, refused = [], []
    for place, one in _placed(whole, mesh, partial):
        for name in names:
            try:
                result = all_of(_UNARY[name](one))
            except RuntimeError as error:
                if not _unsupported(error):
                    raise
                refused.append(f"{name} of {place}: not supported")
                continue
            # Zero added: the sign of a zero is that of no sum over ranks.
            seen, right = result + 0, _UNARY[name](whole) + 0
            found += [f"{name} of {place}: {told}" for told in unlike({"result": seen}, {"result": right})]
    return found + (refused if len(refused) > len(names) else [])


def gradients_of_parts(dtype: torch.dtype) -> list[str]:
    """Name the placements of a tensor and of its gradient with which to_local passes another gradient back.

    Each rank multiplies its local part by its rank plus one.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    rank, world = distributed.get_rank(), distributed.get_world_size()
    mesh = distributed.init_device_mesh("cpu", (world,))
    every = torch.arange(1.0, world + 1)
    rows = every[:, None].expand(world, 2).to(dtype)  # the gradient of row i of a sharded tensor is i + 1
    places: tuple[tuple[Any, Any, Tensor], ...] = (
        (Replicate(), Partial(), torch.full((world, 2), float(every.sum())).to(dtype)),
        (Shard(0), Shard(0), rows),
        (Shard(0), None, rows),
    )
    found = []
    for place, given, expected in places:
        leaf = distribute_tensor(torch.ones(world, 2, dtype=dtype), mesh, [place]).requires_grad_()
        local = leaf.to_local(grad_placements=None if given is None else [given])
        (local * (rank + 1)).sum().backward()
        what = f"{place} with grad_placements {given}"
        found += [f"{what}: {one}" for one in unlike({"gradient": all_of(leaf.grad)}, {"gradient": expected})]
    return found


class _Scaled(nn.Module):
    """Parameters that are multiplied by what the module is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(6, 2)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum() + (self.bias * x).sum()


def gradients_of_hybrid_shards(dtype: torch.dtype, shape: tuple[int, int]) -> list[str]:
    """Name the types of parameters and reductions with which hybrid shards do not average over all ranks.

    The mesh has replicas of groups of shards. With two micro-batches, the all-reduce of the first is left out or not.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, world = distributed.get_rank(), distributed.get_world_size()
    mesh = distributed.init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    found = []
    for low, reduced, deferred in itertools.product((dtype, None), (dtype, torch.float32, None), (False, True)):
        model: Any = _Scaled()
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduced))
        for number in range(2):
            if hasattr(model, "set_requires_all_reduce"):
                model.set_requires_all_reduce(number == 1 or not deferred)
            model(torch.tensor(4.0 * rank)).backward()
        # Each rank's gradients are twice four times its rank: of small integers, so is the mean.
        expected = {name: torch.full(one.shape, 4.0 * (world - 1)) for name, one in _Scaled().named_parameters()}
        seen = {name: all_of(one.grad) for name, one in model.named_parameters()}
        what = f"parameters in {low}, reduced in {reduced}{', once for both' * deferred}"
        found += [f"{what}: {one}" for one in unlike(seen, expected)]
    return found


def gradients_without_synchronization(dtype: torch.dtype) -> list[str]:
    """Name the settings of FullyShardedDataParallel with which micro-batches in no_sync() are not in the mean."""
    from torch.distributed import fsdp

    rank, world = distributed.get_rank(), distributed.get_world_size()
    orders = ((False, True), (True, True), (True, False, True))
    found = []
    for low, reduced, own, order in itertools.product((dtype, None), (dtype, torch.float32), (True, False), orders):
        model = fsdp.FullyShardedDataParallel(
            _Scaled(),
            mixed_precision=fsdp.MixedPrecision(param_dtype=low, reduce_dtype=reduced),
            device_id=torch.device("cpu"),
            use_orig_params=own,
        )
        for synchronized in order:
            with contextlib.nullcontext() if synchronized else model.no_sync():
                model(torch.tensor(4.0 * rank)).backward()
        # The gradients are those of this rank's part, which zeros fill up where it is of one flat parameter.
        parts = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
        seen = {number for part in parts for number in part.tolist()} - (set() if own else {0.0})
        if seen != {len(order) * 2.0 * (world - 1)}:
            what = f"parameters in {low}, reduced in {reduced}, use_orig_params={own}, synchronized {order}"
            found.append(f"{what}: {sorted(seen)} in place of {len(order) * 2.0 * (world - 1)}")
    return found
