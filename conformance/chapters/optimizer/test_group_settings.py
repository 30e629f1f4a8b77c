"""Check that a parameter group keeps every value of its settings, zero and false too, and is stepped with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from .optimizer_configs import OptimizerConfig
from .parameter_kinds import Draw
from .support import ALL, REFUSALS, demand, over_optimizers

pytestmark = pytest.mark.usefixtures("one_thread")
# Settings that choose an implementation (AMP-OPTIMIZER-045) or that the constructor alone uses: kept, not stepped.
KEPT = ("foreach", "fused", "capturable", "differentiable", "initial_accumulator_value")
SHAPE, STEPS = (4, 6), 2


@contract("AMP-OPTIMIZER-035")
@pytest.mark.parametrize("form", ["constructor", "add_param_group"])
@over_optimizers(quick=("SGD", "Adam", "AdamW"), variants=None)
def test_every_value_of_a_setting(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, form: str
) -> None:
    """Give groups each value under another default, and step them as an optimizer of its own."""
    case.require_arithmetic(target, torch.float32)
    demand(case, kind, target.device)
    draw = Draw(rng, target.device)
    start = draw.value(SHAPE)
    slopes = [draw.gradient(SHAPE) for _ in range(STEPS)]
    if kind.gradients == "sparse":
        slopes = [slope.to_sparse(1) for slope in slopes]
    trial = _Trial(start, slopes)
    lost: dict[str, Any] = {}
    unlike: dict[str, str] = {}
    judged: dict[str, list[Any]] = {}
    for name, values in kind.settings().items():
        for variant in _variants(kind):
            legal = [value for value in values if trial.takes(variant, {name: value})]
            if len(legal) > 1:
                break
        else:
            continue
        judged[name] = legal
        for default in (legal[0], legal[-1]):
            given = [value for value in legal if value is not default]
            optimizer = trial.together(variant, name, default, given, form)
            for value, group in zip(given, optimizer.param_groups[1:], strict=True):
                seen = group.get(name, "absent")
                if type(seen) is not type(value) or seen != value:
                    lost[f"{name}={value!r}, default {default!r}"] = seen
            if name not in KEPT:
                other = trial.unlike(optimizer, variant, name, given)
                unlike |= {f"{name}={value!r}, default {default!r}": why for value, why in other.items()}
    case.note("values that were given", judged)
    missing = sorted(kind.settings().keys() - judged.keys() - set(KEPT))
    case.equal("settings of which at most one value was accepted", missing, [])
    case.equal("values that a group has in the place of its own", lost, {})
    case.equal("groups with other steps than an optimizer of these arguments", unlike, {})


def _variants(kind: OptimizerConfig) -> list[OptimizerConfig]:
    return [
        one
        for one in ALL
        if (one.optimizer, one.implementation, one.gradients) == (kind.optimizer, kind.implementation, kind.gradients)
    ]


class _Trial:
    """Optimizers over copies of one parameter, with the same gradients in each step."""

    def __init__(self, start: torch.Tensor, slopes: Sequence[torch.Tensor]) -> None:
        self.start, self.slopes = start, slopes

    def parameter(self) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.start.clone())

    def takes(self, kind: OptimizerConfig, arguments: Mapping[str, Any]) -> bool:
        """Whether the constructor accepts these arguments."""
        try:
            kind.make([self.parameter()], **arguments)
        except REFUSALS:
            return False
        return True

    def together(
        self, kind: OptimizerConfig, name: str, default: Any, values: Sequence[Any], form: str
    ) -> torch.optim.Optimizer:
        """Return an optimizer with a group of the default and one of each value, given or added as `form` says."""
        groups = [{"params": [self.parameter()], name: value} for value in values]
        given = groups if form == "constructor" else []
        optimizer = kind.make([{"params": [self.parameter()]}, *given], **{name: default})
        for group in groups[len(given) :]:
            optimizer.add_param_group(group)
        return optimizer

    def unlike(
        self, optimizer: torch.optim.Optimizer, kind: OptimizerConfig, name: str, values: Sequence[Any]
    ) -> dict[Any, str]:
        """Return the values whose groups end elsewhere than an optimizer of their own does, or the error of a step."""
        try:
            self.step(optimizer)
        except Exception as error:
            return {values[0]: repr(error)[:80]}
        found = {}
        for value, group in zip(values, optimizer.param_groups[1:], strict=True):
            own = kind.make([self.parameter()], **{name: value})
            self.step(own)
            seen, wanted = (one["params"][0].detach() for one in (group, own.param_groups[0]))
            if not torch.equal(seen.nan_to_num(), wanted.nan_to_num()):
                found[value] = f"{seen[0, 0].item()!r} in place of {wanted[0, 0].item()!r}"
        return found

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        for slope in self.slopes:
            for group in optimizer.param_groups:
                group["params"][0].grad = slope.clone()
            optimizer.step()
