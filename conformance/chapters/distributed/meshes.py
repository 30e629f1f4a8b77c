"""What one rank has of DTensors that change their placements on a mesh of two dimensions, or go through local_map."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, distributed

from .comparison import unlike

_SIZES = ((5, 3), (4, 4), (3, 5), (1, 6))
"""Sizes of which most are not multiples of the number of ranks, and one is."""


def integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int, most: int = 8) -> Tensor:
    """Return whole numbers between -most and most."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def square(flattened: bool = False) -> Any:
    """Return a mesh of rows of two ranks, with its dimensions as one beside them or not."""
    shape = (distributed.get_world_size() // 2, 2)
    mesh = distributed.init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns"))
    if flattened:
        mesh._flatten("all")
    return mesh


def _placed(whole: Tensor, mesh: Any, places: tuple[Any, ...]) -> Any:
    """Return a DTensor of the values of `whole`, of which the parts of a sum are three and minus two times as large."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    even = [Replicate() if one.is_partial() else one for one in places]
    local = distribute_tensor(whole.clone(), mesh, even).to_local()
    sums = [at for at, one in zip(mesh.get_coordinate(), places, strict=True) if one.is_partial()]
    local = local * math.prod(-2 if at else 3 for at in sums)
    return DTensor.from_local(local, mesh, places, run_check=False, shape=whole.shape, stride=whole.stride())


def _changes(seed: int, count: int) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Return `count` of the placements before and after, on a mesh of two dimensions; shards to replicas always."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    each = (Replicate(), Shard(0), Shard(1))
    before = list(itertools.product((*each, Partial()), repeat=2))
    every = list(itertools.product(before, itertools.product(each, repeat=2)))
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed)).tolist()
    gathered = [((one, one), (Replicate(), Replicate())) for one in (Shard(0), Shard(1))]
    return [*gathered, *(every[at] for at in order[:count])]


def changed_on_meshes(
    dtype: torch.dtype, seed: int, count: int, flattened: bool
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Name by size the changes of placements on a mesh that do not keep a tensor's values, and those of gradients.

    `count` of the changes are tried for each size, which change with the seed. The mesh has its dimensions as one too,
    or not.
    """
    from torch.distributed.tensor import distribute_tensor

    mesh = square(flattened)
    values: dict[str, list[str]] = {}
    gradients: dict[str, list[str]] = {}
    for number, size in enumerate(_SIZES):
        name = f"size {size}"
        values[name], gradients[name] = [], []
        whole, slope = (integers(size, dtype, seed + 2 * number + more) for more in (0, 1))
        for before, after in _changes(seed + number, count):
            what = f"{', '.join(map(str, before))} to {', '.join(map(str, after))}"
            x = _placed(whole, mesh, before).requires_grad_()
            out = x.redistribute(mesh, after)
            right = distribute_tensor(whole.clone(), mesh, after).to_local()
            values[name] += [f"{what}: {one}" for one in unlike({"part": out.to_local().detach() + 0}, {"part": right})]
            out.backward(distribute_tensor(slope.clone(), mesh, after))
            seen, theirs = x.grad.to_local() + 0, distribute_tensor(slope.clone(), mesh, x.grad.placements).to_local()
            gradients[name] += [f"{what}: {one}" for one in unlike({"gradient": seen}, {"gradient": theirs})]
    return values, gradients


def mapped(dtype: torch.dtype, seed: int) -> dict[str, list[str]]:
    """Name the sizes and placements of which local_map returns another shape than that of the whole, or other parts.

    They are returned by what is compared: shapes where the ranks do not divide a size, other shapes, and parts.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import local_map

    world = distributed.get_world_size()
    mesh = distributed.init_device_mesh("cpu", (world,))
    found: dict[str, list[str]] = {what: [] for what in ("shapes of unequal parts", "shapes of equal parts", "parts")}
    for size, place in itertools.product(_SIZES, (Replicate(), Shard(0), Shard(1))):
        one, two = (integers(size, dtype, seed + number) for number in range(2))
        placed = [distribute_tensor(whole.clone(), mesh, [place]) for whole in (one, two)]
        both = local_map(
            lambda x, y: (x * 2 + y, x - y),
            out_placements=((place,), (place,)),
            in_placements=((place,), (place,)),
            device_mesh=mesh,
        )
        unequal = isinstance(place, Shard) and size[place.dim] % world > 0
        for seen, right in zip(both(*placed), (one * 2 + two, one - two), strict=True):
            what = f"{size} in {place}"
            if seen.shape != right.shape:
                where = "shapes of unequal parts" if unequal else "shapes of equal parts"
                found[where].append(f"{what}: {tuple(seen.shape)}")
            local = distribute_tensor(right.clone(), mesh, [place]).to_local()
            found["parts"] += [f"{what}: {told}" for told in unlike({"part": seen.to_local()}, {"part": local})]
    return found
