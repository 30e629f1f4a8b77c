"""Check that a sparse gradient that names every row steps as the dense one, with every setting."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...workloads.linear_loss import LinearLoss
from .optimizer_configs import OptimizerConfig
from .parameter_kinds import unit
from .support import ALL, build

ROWS = 6
TINY = 2.0**-100
WAYS = ("foreach", "fused", "differentiable", "capturable")  # settings that choose an implementation


def _coalesced(dense: Tensor) -> Tensor:
    places = torch.arange(ROWS, device=dense.device)[None]
    return torch.sparse_coo_tensor(places, dense, dense.shape, check_invariants=False).coalesce()


def _repeated(dense: Tensor) -> Tensor:
    """Return a sparse gradient that names each row twice, in no order, with a quarter of its values and the rest."""
    places = torch.arange(ROWS, device=dense.device).repeat(2)
    places[:ROWS] = places[:ROWS].flip(0)
    values = torch.cat([dense.flip(0) * 0.25, dense * 0.75])
    return torch.sparse_coo_tensor(places[None], values, dense.shape, check_invariants=False)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {"coalesced": _coalesced, "repeated": _repeated}


def _settings(kind: OptimizerConfig, several: int) -> Iterator[dict[str, Any]]:
    """Yield the settings of the variant, and those with other values of as many as `several` of them."""
    values = {name: list(dict.fromkeys(found)) for name, found in kind.settings().items() if name not in WAYS}
    yield {}
    for count in range(1, several + 1):
        for names in itertools.combinations(values, count):
            for chosen in itertools.product(*(values[name] for name in names)):
                if all(kind.arguments.get(name) != value for name, value in zip(names, chosen, strict=True)):
                    yield dict(zip(names, chosen, strict=True))


def _dense(kind: OptimizerConfig) -> OptimizerConfig:
    """Return the for-loop that takes dense gradients; that of SparseAdam is Adam's, but for where eps is added."""
    if kind.optimizer != "SparseAdam":
        return dataclasses.replace(kind, implementation="for-loop")
    return dataclasses.replace(kind, optimizer="Adam", implementation="for-loop")


@contract("AMP-OPTIMIZER-112")
@pytest.mark.parametrize(
    "kind",
    [
        deep("standard", kind, id=kind.id) if kind.implementation == "default" else pytest.param(kind, id=kind.id)
        for kind in ALL
        if kind.gradients == "sparse" and not kind.fused
    ],
)
def test_sparse_gradients_of_every_row(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    build(case, kind, LinearLoss.make("sparse", target.device, rng))
    start = torch.rand((ROWS, 3), generator=rng).to(target.device)
    # Of one size, as SparseAdam forms an average from its distance to the one before.
    sizes = [torch.rand((ROWS, 3), generator=rng) + 0.5 for _ in range(3)]
    slopes = [torch.where(torch.rand(size.shape, generator=rng) < 0.5, -size, size).to(target.device) for size in sizes]
    judged, wrong = 0, {}
    several = case.samples(quick=1, standard=2, full=2)
    for settings in _settings(kind, several):
        if kind.optimizer == "SparseAdam":
            settings["eps"] = TINY
        expected = _path(_dense(kind), settings, start, slopes)
        for form, sparse in FORMS.items():
            seen = _path(kind, settings, start, [sparse(slope) for slope in slopes])
            if isinstance(seen, str) or isinstance(expected, str):
                continue  # AMP-OPTIMIZER-115 judges what is refused
            judged += 1
            if far := _apart(seen, expected):
                wrong[f"{settings}, {form} rows"] = far
    case.at_least("sequences of steps that were compared", judged, 2 * len(FORMS))
    case.equal("settings that step otherwise with dense gradients", dict(list(wrong.items())[:3]), {})


def _path(kind: OptimizerConfig, settings: dict[str, Any], start: Tensor, slopes: list[Tensor]) -> list[Tensor] | str:
    """Return the parameter after each step, or the error of the constructor or of a step."""
    parameter, points = torch.nn.Parameter(start.clone()), []
    try:
        optimizer = kind.make([parameter], **settings)
        for slope in slopes:
            parameter.grad = slope.clone()
            optimizer.step()
            points.append(parameter.detach().clone())
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return points


def _apart(seen: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Return by step the distance in roundings of the number, or of 1 where that is larger, beyond 32 of them."""
    far = {}
    for number, (one, other) in enumerate(zip(seen, expected, strict=True)):
        distance = float(((one - other).abs() / other.abs().clamp(min=1)).max()) / unit(one.dtype)
        if not distance <= 32:
            far[f"step {number}"] = distance
    return far
