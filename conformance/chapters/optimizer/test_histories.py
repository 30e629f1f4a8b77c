"""Check random histories of clean and non-finite iterations against runs on the clean iterations alone."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.optimizer_state import differences, gradients, snapshot
from ...oracles.shrinking import shortest
from ...scaler import model as oracle
from ...workloads.linear_loss import LinearLoss
from ...workloads.third_party_optimizers import Ordinary, SelfScaling
from .optimizer_configs import OptimizerConfig
from .random_histories import Iteration, histories, simpler
from .support import ALL, build, only, over_optimizers, tracker

INTERVAL = 2  # growth interval: within a short history the scale grows and backs off, by powers of two


def with_nonfinite(slopes: Sequence[torch.Tensor], iteration: Iteration) -> list[torch.Tensor]:
    """Return copies of the slopes with the iteration's non-finite values, none of them in the unused parameter."""
    copies = [slope.clone() for slope in slopes]
    for parameter, element, value in iteration.bad:
        at = parameter % len(copies)
        at = (at + 1) % len(copies) if at == iteration.without else at
        copies[at].view(-1)[element % copies[at].numel()] = value
    return copies


def make(kind: OptimizerConfig, slopes: LinearLoss) -> Any:
    return kind.make(slopes.groups())


class Run:
    """An optimizer over a linear loss, with or without a scaler, that runs a history."""

    def __init__(self, optimizer: Any, slopes: LinearLoss, scaler: torch.amp.GradScaler | None) -> None:
        self.optimizer, self.slopes, self.scaler = optimizer, slopes, scaler
        self.scaled = False  # update() takes a new scale once scale() has been called

    def prepare(self, iteration: Iteration, again: Callable[[], Any] | None) -> None:
        """Run the iteration's `before`; `again` makes a new optimizer over the same parameters, to resume with."""
        if iteration.before == "halve lr":
            for group in self.optimizer.param_groups:
                if "lr" in group:
                    group["lr"] = group["lr"] / 2
        elif iteration.before == "reload" and again is not None:
            saved = copy.deepcopy(self.optimizer.state_dict())
            self.optimizer = again()
            self.optimizer.load_state_dict(saved)
            if self.scaler is not None:
                self.scaler.load_state_dict(copy.deepcopy(self.scaler.state_dict()))
        elif iteration.before == "move scale" and self.scaler is not None and self.scaled:
            self.scaler.update(self.scaler.get_scale() / 2)

    def backward(self, iteration: Iteration, slopes: Sequence[torch.Tensor]) -> None:
        self.optimizer.zero_grad(set_to_none=not iteration.zeros)
        loss = self.slopes.loss(slopes, without=iteration.without)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.scaled = True

    def step(self, iteration: Iteration) -> None:
        if self.scaler is None:
            self.optimizer.step()
            return
        if iteration.explicit:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def without_empty_state(seen: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Drop state of zeros that only a skipped step created, as a fused optimizer does."""
    return {
        place: value
        for place, value in seen.items()
        if place in expected or not (place.startswith("state/") and torch.is_tensor(value) and not value.any())
    }


def moved_scale(scale: float, tracker: int, iteration: Iteration, started: bool) -> tuple[float, int]:
    """Return the scale and the tracker after the iteration, by the model."""
    if iteration.before == "move scale" and started:
        scale /= 2
    return oracle.update_scale(scale, tracker, float(not iteration.clean), 2.0, 0.5, INTERVAL)


def first_difference(
    history: Sequence[Iteration], start: LinearLoss, kind: OptimizerConfig, device: torch.device
) -> str | None:
    """Run the history with a scaler, and its clean iterations without one; describe the first difference, if any."""
    scaled, plain = start.copy(), start.copy()
    scaler = torch.amp.GradScaler(device.type, growth_interval=INTERVAL)
    ours, theirs = Run(make(kind, scaled), scaled, scaler), Run(make(kind, plain), plain, None)
    state = (65536.0, 0)
    for number, iteration in enumerate(history):
        slopes = start.draw(torch.Generator().manual_seed(iteration.seed))
        for run in (ours, theirs):
            run.prepare(iteration, functools.partial(make, kind, run.slopes))
        before = snapshot(ours.optimizer)
        ours.backward(iteration, with_nonfinite(slopes, iteration))
        theirs.backward(iteration, slopes)
        ours.step(iteration)
        seen = snapshot(ours.optimizer)
        if iteration.clean:
            theirs.step(iteration)
            seen |= gradients(scaled.parameters)
            expected = snapshot(theirs.optimizer) | gradients(plain.parameters)
            seen = without_empty_state(seen, expected) if kind.fused else seen
        else:
            # A fused optimizer creates state in a skipped first step; existing state must not change.
            expected = before
            seen = {place: value for place, value in seen.items() if place in before}
        wrong = differences(seen, expected)
        state = moved_scale(*state, iteration, number > 0)
        if (scaler.get_scale(), tracker(scaler)) != state:
            wrong.append(f"scale and tracker {scaler.get_scale()}, {tracker(scaler)} in place of {state}")
        if wrong:
            return f"after iteration {number} of {[str(one) for one in history]}: {wrong}"
    return None


@contract("AMP-OPTIMIZER-022")
@over_optimizers(variants="standard", fused="quick")
def test_histories(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    start = LinearLoss.make(kind.gradients, target.device, rng)
    build(case, kind, start.copy())
    # Fused SGD uses uninitialised momentum after a skipped first step: test_first_step_after_a_skip checks that.
    momentum = kind.fused and bool(kind.arguments.get("momentum"))
    compared = []

    def fails(history: Sequence[Iteration]) -> bool:
        if momentum and not (history and history[0].clean and history[0].without is None):
            return False
        compared.append(len(history))
        return first_difference(history, start, kind, target.device) is not None

    def draw(generator: random.Random) -> list[Iteration]:
        return histories(generator, sparse=kind.gradients == "sparse", clean_first=momentum)

    count = case.samples(quick=2, standard=2 if kind.first else 1, full=40)
    found = shortest(draw, fails, count=count, seed=case.seed, simpler=simpler)
    case.note("iterations compared", sum(compared))
    case.equal(
        "shortest history whose result differs from a run on its clean iterations alone",
        None if found is None else first_difference(found, start, kind, target.device),
        None,
    )


# Several optimizers

POOL: dict[str, Callable[[LinearLoss], Any]] = {
    "Ordinary": lambda slopes: Ordinary(slopes.groups()),
    "SelfScaling": lambda slopes: SelfScaling(slopes.groups()),
    **{
        kind.id: functools.partial(make, kind)
        for kind in ALL
        if kind.first and kind.optimizer in ("SGD", "Adam", "AdamW", "Adagrad") and kind.implementation != "default"
    },
}


def stand_alone(name: str, slopes: LinearLoss) -> Any:
    """Return the optimizer of the fp32 run: SelfScaling takes the step p - g of Ordinary."""
    return POOL["Ordinary" if name == "SelfScaling" else name](slopes)


@contract("AMP-OPTIMIZER-052")
@pytest.mark.parametrize("number", [2, 3])
def test_histories_of_several(case: Case, target: Target, rng: torch.Generator, number: int) -> None:
    """Draw histories after one in which a self-scaling optimizer after the other is the first, and skips alone."""
    draw = random.Random(case.seed + number)
    usable = [name for name in POOL if _works(name, target)]
    wrong: list[str] = []
    for history in range(case.samples(quick=2, standard=12, full=200)):
        names = [draw.choice(usable) if history else "SelfScaling" for _ in range(number)]
        starts = [LinearLoss.make("dense", target.device, rng) for _ in names]
        twins = [start.copy() for start in starts]
        ours = [POOL[name](start) for name, start in zip(names, starts, strict=True)]
        theirs = [stand_alone(name, twin) for name, twin in zip(names, twins, strict=True)]
        scaler = torch.amp.GradScaler(target.device_type, growth_interval=INTERVAL)
        state, described = (65536.0, 0), [str(names)]
        for step in range(5):
            # The first iteration is clean because of fused SGD's momentum, as above.
            dirty = [step > 0 and draw.random() < 0.4 for _ in names]
            explicit = [draw.random() < 0.5 for _ in names]
            order = draw.sample(range(number), number)
            left_out = draw.choice(order) if step and draw.random() < 0.3 else None
            if history == 0:
                order = [(step + at) % number for at in range(number)]
                dirty, explicit, left_out = (
                    [step > 0 and at == order[0] for at in range(number)],
                    [False] * number,
                    None,
                )
            described.append(f"dirty {dirty}, unscale_ {explicit}, order {order}, no step of {left_out}")
            iteration = Iteration(draw.randrange(10**6), bad=((draw.randrange(4), draw.randrange(99), float("nan")),))
            before = [snapshot(optimizer) for optimizer in ours]
            for at in range(number):
                slopes = starts[at].draw(torch.Generator().manual_seed(iteration.seed + at))
                Run(ours[at], starts[at], scaler).backward(
                    iteration, with_nonfinite(slopes, iteration) if dirty[at] else slopes
                )
                Run(theirs[at], twins[at], None).backward(iteration, slopes)
            for at in order:
                if explicit[at] and at != left_out:
                    scaler.unscale_(ours[at])
            for at in order:
                if at != left_out:
                    scaler.step(ours[at])
                    if not dirty[at]:
                        theirs[at].step()
            scaler.update()
            checked = any(flag for at, flag in enumerate(dirty) if at != left_out)
            state = oracle.update_scale(*state, float(checked), 2.0, 0.5, INTERVAL)
            for at in range(number):
                still = dirty[at] or at == left_out
                found = differences(
                    only("parameter/", snapshot(ours[at])),
                    only("parameter/", before[at] if still else snapshot(theirs[at])),
                )
                wrong += [f"optimizer {at} after {described}: {found}"] if found else []
            if (scaler.get_scale(), tracker(scaler)) != state:
                wrong.append(f"after {described}: scale {scaler.get_scale()}, expected {state}")
            if wrong:
                break
    case.equal("histories of several optimizers that differ from a run of each alone", wrong[:2], [])


def _works(name: str, target: Target) -> bool:
    known = {kind.id: kind for kind in ALL}
    return name not in known or known[name].promised_on(target.device_type)
