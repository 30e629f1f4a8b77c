"""What one rank has after it clips gradients of any size by their norm, against the norm in float64."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from .comparison import all_of

Tensors = dict[str, torch.Tensor]
ROUNDINGS = 16
"""Half units of the type that gradients may be apart: the norm of each part and of those, its root, the sum over ranks,
1e-6 more, the coefficient and the product, at most two roundings each where all is in the type of the gradients."""


class Sloped(nn.Module):
    """Parameters whose gradients are what forward is given, whatever the parameters are."""

    def __init__(self, slopes: Tensors) -> None:
        super().__init__()
        self.names = tuple(slopes)
        for name, one in slopes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(one)))

    def forward(self, *slopes: torch.Tensor) -> torch.Tensor:
        # By name: FullyShardedDataParallel may have one flat parameter in place of these.
        products = [(getattr(self, name) * slope).sum() for name, slope in zip(self.names, slopes, strict=True)]
        return torch.stack(products).sum()


@dataclass
class Clipped:
    """Sharded parameters with gradients: how they are clipped to a norm of a type, and the whole gradients."""

    clip: Callable[[float, float], Any]
    whole: Callable[[], Tensors]


def _of_parameters(model: nn.Module) -> Clipped:
    def whole() -> Tensors:
        return {name.removeprefix("module."): all_of(one.grad).clone() for name, one in model.named_parameters()}

    return Clipped(lambda norm, kind: nn.utils.clip_grad_norm_(model.parameters(), norm, kind), whole)


def _plain(slopes: Tensors) -> Clipped:
    model = Sloped(slopes)
    model(*slopes.values()).backward()
    return _of_parameters(model)


def _replicas(slopes: Tensors) -> Clipped:
    model = nn.parallel.DistributedDataParallel(Sloped(slopes))
    model(*slopes.values()).backward()
    return _of_parameters(model)


def _tensors(slopes: Tensors) -> Clipped:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    model = nn.Module()
    for number, (name, one) in enumerate(slopes.items()):
        places = [Shard(0) if number % 2 == 0 else Replicate()]
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(one), mesh, places))
        parameter.grad = distribute_tensor(one.clone(), mesh, places)
        model.register_parameter(name, parameter)
    return _of_parameters(model)


def _fully_sharded(slopes: Tensors) -> Clipped:
    from torch.distributed.fsdp import fully_shard

    model: Any = Sloped(slopes)
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (distributed.get_world_size(),)))
    model(*slopes.values()).backward()
    return _of_parameters(model)


def _flat(dtype: torch.dtype, *modules: nn.Module) -> torch.Tensor:
    """Return a copy of the gradients that this rank has, in one row: an empty one of `dtype` where it has none."""
    found = [one.grad.flatten() for part in modules for one in part.parameters() if one.grad is not None]
    return torch.cat(found) if found else torch.zeros(0, dtype=dtype)


def _of_all_ranks(own: torch.Tensor) -> torch.Tensor:
    parts: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(parts, own)
    return torch.cat(parts)


def _fsdp1(slopes: Tensors, strategy: str, original: bool, kept: bool) -> Clipped:
    from torch.distributed import fsdp

    dtype = next(iter(slopes.values())).dtype
    # Parameters are in float32, and so are gradients unless they are kept in the type of the reduction.
    precision = fsdp.MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, keep_low_precision_grads=kept)
    model = fsdp.FullyShardedDataParallel(
        Sloped({name: one.float() for name, one in slopes.items()}),
        device_id=torch.device("cpu"),
        sharding_strategy=getattr(fsdp.ShardingStrategy, strategy),
        use_orig_params=original,
        mixed_precision=precision,
    )
    model(*slopes.values()).backward()

    def whole() -> Tensors:
        """Return the gradients of this rank's shard of the flat parameter, and of the other ranks'."""
        own = _flat(dtype, model)
        return {"flat": own if strategy == "NO_SHARD" else _of_all_ranks(own)}

    return Clipped(model.clip_grad_norm_, whole)


class _Parts(nn.Module):
    """Modules whose outputs are added, each of the values for its parameters."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *slopes: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(slope) for part, slope in zip(self.parts, slopes, strict=True)]).sum()


def _beside_whole_parameters(slopes: Tensors, original: bool) -> Clipped:
    """Shard the first parameter, leave the second a replica in NO_SHARD, and the third to no instance."""
    from torch.distributed import fsdp

    wrap = functools.partial(fsdp.FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=original)
    first, second, ignored = (Sloped({name: one}) for name, one in slopes.items())
    sharded = wrap(first, sharding_strategy=fsdp.ShardingStrategy.FULL_SHARD)
    replicated = wrap(second, sharding_strategy=fsdp.ShardingStrategy.NO_SHARD)
    model = wrap(_Parts([sharded, replicated, ignored]), ignored_modules=[ignored])
    model(*slopes.values()).backward()

    def whole() -> Tensors:
        return {
            "sharded": _of_all_ranks(_flat(torch.float32, sharded)),
            "whole": _flat(torch.float32, replicated, ignored),
        }

    return Clipped(model.clip_grad_norm_, whole)


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def _ways() -> Iterator[tuple[str, Callable[[Tensors], Clipped]]]:
    yield "ddp", _replicas
    yield "dtensor", _tensors
    yield "fully_shard", _fully_sharded
    for original in (True, False):
        name = f"FULL_SHARD{', original parameters' * original}, beside whole ones"
        yield name, functools.partial(_beside_whole_parameters, original=original)
    for strategy, original, kept in itertools.product(STRATEGIES, (True, False), (True, False)):
        name = f"{strategy}{', original parameters' * original}{', kept' * kept}"
        yield name, functools.partial(_fsdp1, strategy=strategy, original=original, kept=kept)


WAYS = dict(_ways())
BY_UTILS = ("ddp", "dtensor", "fully_shard", *(one for one in WAYS if "NO_SHARD" in one))
"""The ways that torch.nn.utils clips, in the type of the gradients."""
LIMITS = (0.5, 2.0**-6, 2.0)
NORM_TYPES = (2.0, math.inf, 1.0)
"""By the first limit it is clipped in each type of norm, by the others in the first."""


def sizes(dtype: torch.dtype, within: bool) -> tuple[float, ...]:
    """Return sizes of gradients whose squares are within the range of the type, or those beside and beyond its ends.

    float32 holds the squares of all of them.
    """
    if within:
        return (1.0, 2.0, 2.0**3)
    return (2.0**14, 2.0**-20, 2.0**-12, 2.0**7, 2.0**10) if dtype is torch.float16 else (2.0**40, 2.0**-40)


def types(way: str) -> tuple[torch.dtype, ...]:
    """Return the types in which gradients are reduced, those that can differ in how a way takes their norm."""
    if way.endswith("kept"):
        return (torch.float16, torch.bfloat16)
    return (torch.float16, torch.bfloat16, torch.float32) if way in BY_UTILS[:3] else (torch.float32,)


def misclipped(way: str, dtype: torch.dtype, within: bool, seed: int, count: int) -> list[str]:
    """Name the sizes and limits, the first `count` of each, with which a way clips not by the norm in float64.

    What torch.nn.utils does otherwise with plain tensors already is not the way's.
    """
    found = []
    for number, size in enumerate(sizes(dtype, within)[:count]):
        generator = torch.Generator().manual_seed(seed + number)
        slopes = {
            # At most two, so that the largest size times this is in the range of the type.
            name: (torch.rand(shape, generator=generator) * 4 - 2).mul(size).to(dtype)
            for name, shape in {"first": (8, 4), "second": (6,), "third": (3, 3)}.items()
        }
        first = [(LIMITS[0], kind) for kind in NORM_TYPES]
        for limit, kind in first + [(limit, NORM_TYPES[0]) for limit in LIMITS[1:count]]:
            if way in BY_UTILS and _clipped(_plain(slopes), limit, kind):
                continue
            where = f"gradients of {size:g}, clipped to {limit:g} of the norm of type {kind:g}"
            found += [f"{where}: {one}" for one in _clipped(WAYS[way](slopes), limit, kind)]
    return found


def _clipped(made: Clipped, limit: float, kind: float) -> list[str]:
    """Clip to a part of the norm; name what differs from it."""
    before = made.whole()
    norm = float(torch.cat([one.double().flatten() for one in before.values()]).norm(kind))
    returned = all_of(made.clip(norm * limit, kind))
    return list(_wrong(before, made.whole(), norm, norm * limit, returned))


def _wrong(before: Tensors, after: Tensors, norm: float, limit: float, returned: torch.Tensor) -> Iterator[str]:
    kind = next(iter(before.values())).dtype
    unit = torch.finfo(kind).eps / 2
    allowed = max(ROUNDINGS * unit, 2.0**-20)
    # Subnormal numbers are this far apart.
    apart = torch.finfo(kind).smallest_normal * torch.finfo(kind).eps
    expected = float(torch.tensor(norm, dtype=torch.float64).to(returned.dtype))
    if not (float(returned) == expected or abs(float(returned) - norm) <= allowed * norm + apart):
        yield f"returned {float(returned):g}"
    factor = min(1.0, limit / (norm + 1e-6))
    for name, one in before.items():
        if after[name].dtype != one.dtype:
            yield f"{name}: {after[name].dtype} in place of {one.dtype}"
        wanted = one.double() * factor
        error = (after[name].double() - wanted).abs()
        if not bool((error <= allowed * wanted.abs() + apart).all()):
            at = int((error / (allowed * wanted.abs() + apart)).nan_to_num(nan=1e300).argmax())
            yield f"{name}: {float(after[name].flatten()[at]):g} in place of {float(wanted.flatten()[at]):g}"
