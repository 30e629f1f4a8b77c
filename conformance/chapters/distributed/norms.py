"""What one rank computes of norms of DTensors in each placement, with sums, maxima and minima over the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed, nn

from .comparison import all_of

Norm: TypeAlias = Callable[[list[Any]], Any]

PARTS = (
    *("norms of shards and sums", "norms of maxima and minima", "clipped gradients", "numbers computed from norms"),
    "sums of norms",
)
_CLIPPED = "gradient after clip_grad_norm_"
_COMPUTED, _SUMMED = "computed:", "sum of"
_ORDERS = (0.0, 1.0, 2.0, 3.0, float("inf"), float("-inf"))
_OF_LISTS = (1.0, 2.0, float("inf"))
# Norms of order 3 take a root that rounds, and so does the sum of two norms in 16 bits.
_ROUNDINGS = 8


def _norms() -> dict[str, Norm]:
    """Return norms of a list of two tensors, by what they are."""
    found: dict[str, Norm] = {"torch.norm": lambda two: torch.norm(two[0])}
    for order in _ORDERS:
        found[f"vector_norm of order {order:g}"] = partial(_of_one, order=order, dim=None)
        found[f"vector_norm of order {order:g} of rows"] = partial(_of_one, order=order, dim=1)
    for order in _OF_LISTS:
        found[f"{_COMPUTED} 1 + vector_norm of order {order:g}"] = partial(_computed, order, lambda norm: 1 + norm)
        found[f"{_COMPUTED} -vector_norm of order {order:g}"] = partial(_computed, order, lambda norm: norm * -1)
        found[f"{_SUMMED} vector_norm of order {order:g} of columns"] = partial(
            _computed, order, lambda norm: norm.sum(), dim=0
        )
    for order, foreach in itertools.product(_OF_LISTS, (False, True)):
        how = f"of order {order:g}, foreach={foreach}"
        found[f"get_total_norm {how}"] = partial(nn.utils.get_total_norm, norm_type=order, foreach=foreach)
        found[f"{_CLIPPED} {how}"] = partial(_clipped, order=order, foreach=foreach)
    return found


def _of_one(two: list[Any], order: float, dim: int | None) -> Any:
    return torch.linalg.vector_norm(two[0], order, dim=dim)


def _computed(order: float, call: Callable[[Any], Any], two: list[Any], dim: int | None = None) -> Any:
    return call(torch.linalg.vector_norm(two[0], order, dim=dim))


def _clipped(two: list[Any], order: float, foreach: bool) -> Any:
    """Return the first of the gradients that clip_grad_norm_ has scaled."""
    parameters = [nn.Parameter(torch.zeros_like(one)) for one in two]
    for parameter, one in zip(parameters, two, strict=True):
        parameter.grad = _copied(one)
    nn.utils.clip_grad_norm_(parameters, 4.0, order, foreach=foreach)
    return parameters[0].grad


def _copied(one: Any) -> Any:
    """Return a copy; clone reduces what is a sum over the ranks in some versions."""
    from torch.distributed.tensor import DTensor

    if not isinstance(one, DTensor):
        return one.clone()
    return DTensor.from_local(
        one.to_local().clone(), one.device_mesh, one.placements, run_check=False, shape=one.shape, stride=one.stride()
    )


def _whole(dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Return two tensors of the numbers 3, 4 and 5, of both signs and in any order, and of 12 and 0."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.tensor([[3.0, 4.0, 0.0, 12.0], [3.0, 4.0, 5.0, 0.0]]).repeat(2, 1)
    mixed = rows.flatten()[torch.randperm(16, generator=generator)].reshape(4, 4)
    signs = 1 - 2 * torch.randint(0, 2, (4, 4), generator=generator)
    return [(mixed * signs).to(dtype), rows.to(dtype)]


def _placed(whole: Tensor, mesh: Any) -> Iterator[tuple[str, Any]]:
    """Yield a DTensor of the values of `whole` in each placement; the parts of sums have other signs and sizes."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    rank = distributed.get_rank()
    for place in (Replicate(), Shard(0), Shard(1)):
        yield str(place), distribute_tensor(whole.clone(), mesh, [place])
    other = whole.roll(1, 1) - 2
    parts = {
        "sum": (other, whole - other, torch.zeros_like(whole)),
        "max": (whole - (whole > 0).to(whole.dtype), torch.where(whole > 0, whole, whole - 3), whole - 20),
        "min": (whole + (whole > 0).to(whole.dtype), torch.where(whole > 0, whole, whole + 3), whole + 20),
    }
    for kind, three in parts.items():
        yield f"Partial({kind})", DTensor.from_local(three[min(rank, 2)], mesh, [Partial(kind)], run_check=False)


def _part(name: str, extremes: bool) -> str:
    """Return which of the parts a norm is compared in."""
    if name.startswith(_CLIPPED):
        return PARTS[2]
    if name.startswith(_SUMMED):
        return PARTS[4]
    return PARTS[3] if name.startswith(_COMPUTED) else PARTS[extremes]


def norms_unlike_whole(dtype: torch.dtype, seed: int) -> dict[str, list[str]]:
    """Name the placements of tensors whose norms are not those of the whole tensors, or scale gradients otherwise.

    They are returned by what is compared. Gradients, and what numbers are computed from, are no maxima or minima.
    """
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    two = _whole(dtype, seed)
    found: dict[str, list[str]] = {part: [] for part in PARTS}
    firsts, seconds = (list(_placed(one, mesh)) for one in two)
    # The last pair is of a model that is sharded in part: gradients of both kinds are clipped together.
    for (place, first), (other, second) in [*zip(firsts, seconds, strict=True), (firsts[0], seconds[1])]:
        extremes = place in ("Partial(max)", "Partial(min)")
        for name, norm in _norms().items():
            part = _part(name, extremes)
            if part in PARTS[2:] and extremes:
                continue
            right, seen = norm([one.clone() for one in two]), all_of(norm([first, second]))
            apart = float((seen.double() - right.double()).abs().max())
            if seen.dtype != right.dtype or apart > _ROUNDINGS * torch.finfo(dtype).eps * float(right.abs().max()):
                what = f"{name} of {place} and {other}"
                found[part].append(f"{what}: {seen.dtype} {seen.tolist()} in place of {right.dtype} {right.tolist()}")
    return found
