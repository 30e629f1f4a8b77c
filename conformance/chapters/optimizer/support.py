"""Helpers of the optimizer checks: parametrisation over optimizers and implementations, iterations and comparisons."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from ...harness.check import Case, deep
from ...harness.targets import Target, is_foreign
from ...measure.determinism import deterministic_algorithms
from ...measure.pending import run_pending
from ...workloads.linear_loss import LinearLoss
from .optimizer_configs import OptimizerConfig, configs

REFUSALS = (AssertionError, RuntimeError, TypeError, ValueError)
"""Errors by which an optimizer refuses a setting."""

U = 2.0**-24


ALL = tuple(configs(implementations=("for-loop", "foreach", "fused", "default")))

PLAIN = next(kind for kind in ALL if (kind.optimizer, kind.implementation) == ("SGD", "for-loop"))

FUSED = next(kind for kind in ALL if (kind.optimizer, kind.implementation) == ("Adam", "fused"))

ROUTES = (False, True)  # values of `explicit`: unscale_() is called before step()


def over_optimizers(
    chosen: Callable[[OptimizerConfig], bool] = lambda kind: True,
    *,
    quick: tuple[str, ...] = ("SGD", "Adam"),
    variants: str | None = "full",
    fused: str | None = None,
) -> pytest.MarkDecorator:
    """Parametrise by every chosen optimizer.

    The first variant of those in `quick` (of all, if empty) runs at every level, of the others from standard on. Other
    variants, and torch's default implementation, run from the level `variants` on, fused ones from `fused` on.
    """
    parameters = []
    for kind in filter(chosen, ALL):
        if kind.first and kind.implementation != "default":
            shallow = not quick or kind.optimizer in quick
            parameters.append(pytest.param(kind, id=kind.id) if shallow else deep("standard", kind, id=kind.id))
        elif variants:
            parameters.append(deep(fused if fused and kind.fused else variants, kind, id=kind.id))
    return pytest.mark.parametrize("kind", parameters)


BAD = pytest.mark.parametrize(
    "bad",
    [pytest.param(math.inf, id="inf"), deep("standard", math.nan, id="nan"), deep("full", -math.inf, id="minus-inf")],
)

BOTH = pytest.mark.parametrize("kind", [PLAIN, FUSED], ids=["for-loop", "fused"])


def demand(case: Case, kind: OptimizerConfig, device: torch.device) -> None:
    """End the case if torch does not say that this implementation is there; on a third party's device, if it is not."""
    if is_foreign(device.type):
        build(case, kind, LinearLoss.make(kind.gradients, device, torch.Generator()))
    elif not kind.promised_on(device.type):
        case.unsupported(f"no {kind.implementation} {kind.optimizer} on {device.type}")


def build(case: Case, kind: OptimizerConfig, slopes: LinearLoss, **changes: Any) -> torch.optim.Optimizer:
    """Return the optimizer over the loss's parameters; end the case if this device (or the suite) lacks it."""
    device = slopes.parameters[0].device
    if not kind.promised_on(device.type):
        trial = slopes.copy()
        try:
            iterate(kind.make(trial.groups(), **changes), trial.loss(trial.draw(torch.Generator())))
        except Exception as error:
            if not kind.listed:
                case.untestable(
                    f"torch.optim.{kind.optimizer} is not in the table and its default step raises: {error}"
                )
            case.unsupported(f"no {kind.implementation} {kind.optimizer} on {device.type}: {error}")
    return kind.make(slopes.groups(), **changes)


def iterate(
    optimizer: torch.optim.Optimizer,
    loss: torch.Tensor,
    scaler: torch.amp.GradScaler | None = None,
    *,
    explicit: bool = False,
) -> Any:
    """Run one iteration, with or without a scaler; return the result of the step."""
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        answer: Any = optimizer.step()
    else:
        scaler.scale(loss).backward()
        if explicit:
            scaler.unscale_(optimizer)
        answer = scaler.step(optimizer)
        scaler.update()
    run_pending(loss.device.type)
    return answer


def twins(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig
) -> tuple[LinearLoss, LinearLoss, torch.optim.Optimizer, torch.optim.Optimizer]:
    """Return two linear losses with equal random parameters, and an optimizer over each."""
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    twin = slopes.copy()
    return slopes, twin, build(case, kind, slopes), build(case, kind, twin)


def only(place: str, whole: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a snapshot whose places begin with `place`."""
    return {key: value for key, value in whole.items() if key.startswith(place)}


def unmoved(slopes: LinearLoss, before: Iterable[torch.Tensor]) -> list[int]:
    """Return the indices of the moving parameters that equal their copies."""
    return [i for i, (now, then) in enumerate(zip(slopes.moving, before, strict=False)) if torch.equal(now, then)]


def clones(slopes: LinearLoss) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in slopes.moving]


def kind_of(optimizer: str, implementation: str, variant: str | None = None) -> OptimizerConfig:
    return next(
        kind
        for kind in ALL
        if (kind.optimizer, kind.implementation) == (optimizer, implementation)
        and (kind.first if variant is None else kind.variant == variant)
    )


PROTOCOL = ("grad_scale", "found_inf")

BY_ROUTE = pytest.mark.parametrize("explicit", ROUTES, ids=["step", "unscale-then-step"])


def left_on(optimizer: Any) -> list[str]:
    return [name for name in PROTOCOL if hasattr(optimizer, name)]


def started(target: Target, **settings: Any) -> torch.amp.GradScaler:
    """Return a scaler whose first scale() has been called, so that its scale tensor exists."""
    scaler = torch.amp.GradScaler(target.device_type, **settings)
    scaler.scale(torch.ones((), device=target.device))
    return scaler


def tracker(scaler: torch.amp.GradScaler) -> int:
    return int(scaler.state_dict()["_growth_tracker"])


@contextlib.contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """Fill torch.empty with NaN, so that uninitialised state cannot be zero by chance."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with deterministic_algorithms(True, warn_only=True):
        try:
            torch.utils.deterministic.fill_uninitialized_memory = True
            yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = fill
