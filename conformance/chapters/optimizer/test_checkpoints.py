"""Check that taking or loading a checkpoint, at any point and in any way, changes nothing but what is loaded."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.optim import swa_utils

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from ...oracles.optimizer_state import differences, snapshot
from .optimizer_configs import OptimizerConfig
from .support import ALL, demand

pytestmark = pytest.mark.usefixtures("one_thread")

Saved = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]


# --- taking one


def written(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())


def distributed(name: str, **options: Any) -> Saved:
    """Return a function of torch.distributed.checkpoint.state_dict, with these options."""

    def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        from torch.distributed.checkpoint import state_dict

        return getattr(state_dict, name)(model, optimizer, options=state_dict.StateDictOptions(**options))

    return save


PLAIN: Mapping[str, Saved] = {
    "state_dict": lambda model, optimizer: (model.state_dict(), optimizer.state_dict()),
    "saved": written,
    "deepcopy": lambda model, optimizer: copy.deepcopy((model, optimizer)),
    "pickle": lambda model, optimizer: pickle.dumps((model, optimizer)),
}
DISTRIBUTED: Mapping[str, Saved] = {
    "get_optimizer_state_dict": distributed("get_optimizer_state_dict"),
    "get_state_dict": distributed("get_state_dict"),
    "flat": distributed("get_optimizer_state_dict", flatten_optimizer_state_dict=True),
    "full": distributed("get_state_dict", full_state_dict=True),
}
# By name: the iteration, the call after which the checkpoint is taken, and whether the first iteration overflows.
POINTS: Mapping[str, tuple[int, str, bool]] = {
    "before_the_first_step": (0, "zero_grad", False),
    "after_a_skipped_first_step": (1, "zero_grad", True),
    "after_the_first_backward": (0, "backward", False),
    "after_the_first_unscale": (0, "unscale_", False),
    "after_a_step": (1, "step", False),
    "after_an_update": (1, "update", False),
    "after_a_later_unscale": (2, "unscale_", True),
}
MAKERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=2.0**-6, momentum=0.75, weight_decay=0.125),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=2.0**-6, weight_decay=0.125, amsgrad=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=2.0**-6, lr_decay=0.125),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=2.0**-6, momentum=0.75, centered=True),
}


@dataclass
class Training:
    """Four iterations of a small model with two groups and a frozen tensor, in which a checkpoint may be taken."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    slopes: list[torch.Tensor]
    changed: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, target: Target, make: Callable[[Any], torch.optim.Optimizer], drawn: torch.Tensor) -> Training:
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).to(target.device)
        for parameter, values in zip(model.parameters(), drawn[4:], strict=False):
            parameter.data.copy_(values.flatten()[: parameter.numel()].reshape(parameter.shape))
        model[0].bias.requires_grad_(False)
        optimizer = make([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 2.0**-5}])
        scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**8, growth_interval=2)
        return cls(model, optimizer, scaler, list(drawn[:4].to(target.device)))

    def run(self, point: tuple[int, str, bool], save: Saved | None) -> dict[str, Any]:
        """Train; return the parameters, the state and the scale at the end, bit for bit."""

        def passed(call: str) -> None:
            if save is not None and (number, call) == point[:2]:
                before = self._tensors()
                save(self.model, self.optimizer)
                self.changed = differences(self._tensors(), before)

        for number, slope in enumerate(self.slopes):
            self.optimizer.zero_grad()
            passed("zero_grad")
            loss = (self.model(slope) ** 2).sum() * (float("inf") if point[2] and number == 0 else 1.0)
            self.scaler.scale(loss).backward()
            passed("backward")
            self.scaler.unscale_(self.optimizer)
            passed("unscale_")
            self.scaler.step(self.optimizer)
            passed("step")
            self.scaler.update()
            passed("update")
        return {**snapshot(self.optimizer), "scale": self.scaler.get_scale()}

    def _tensors(self) -> dict[str, Any]:
        """Return the parameters, their gradients and the settings of the groups."""
        found: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach().clone()
            found[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.detach().clone()
            found[f"whether {name} is trained"] = parameter.requires_grad
        for number, group in enumerate(self.optimizer.param_groups):
            found |= {f"group {number}, {key}": value for key, value in group.items() if key != "params"}
        return found


def by_way(ways: Mapping[str, Saved]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("way", ways)


BY_POINT = pytest.mark.parametrize("point", POINTS)


def compare(case: Case, target: Target, rng: torch.Generator, save: Saved, point: str) -> None:
    """Compare a training in which a checkpoint is taken with one without: there, and at the end."""
    for name in MAKERS if case.level != "quick" else ("SGD", "AdamW"):
        drawn = torch.randn(8, 5, 4, generator=rng)
        training, undisturbed = (Training.start(target, MAKERS[name], drawn) for _ in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # functions of torch.distributed say that there is one process
            end = training.run(POINTS[point], save)
        case.equal(f"{name}: parameters, gradients and settings that the checkpoint changed", training.changed, [])
        expected = undisturbed.run(POINTS[point], None)
        case.equal(
            f"{name}: what differs at the end from training without a checkpoint", differences(end, expected), []
        )


@contract("AMP-OPTIMIZER-126")
@BY_POINT
@by_way(PLAIN)
def test_checkpoints_in_training(case: Case, target: Target, rng: torch.Generator, way: str, point: str) -> None:
    compare(case, target, rng, PLAIN[way], point)


def need_distributed(case: Case) -> None:
    if not torch.distributed.is_available():
        case.untestable("this torch is built without torch.distributed")


@contract("AMP-OPTIMIZER-126")
@needs("streams")
@BY_POINT
@by_way(DISTRIBUTED)
def test_distributed_checkpoints_in_training(
    case: Case, target: Target, rng: torch.Generator, way: str, point: str
) -> None:
    need_distributed(case)
    compare(case, target, rng, DISTRIBUTED[way], point)


# --- loading one


class Holder(torch.nn.Module):
    """Three groups of matrices: of fp32, and of the given dtypes in this order and in reverse."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], rng: torch.Generator, device: torch.device) -> None:
        super().__init__()
        self.groups = torch.nn.ModuleList(
            torch.nn.ParameterList(torch.rand(4, 3, generator=rng).to(device, dtype) for dtype in each)
            for each in ((torch.float32,), dtypes, dtypes[::-1])
        )


def over_groups(kind: OptimizerConfig, model: Holder, *, other: bool) -> torch.optim.Optimizer:
    """Return the optimizer over the groups; with `other`, the second and third have settings of their own."""
    settings = {**kind.other_settings(), "lr": 0.125} if other else {}
    settings.pop("maximize", None)  # an option of all groups for a part of the optimizers
    changes: tuple[dict[str, Any], ...] = ({}, settings, {"lr": 0.0625} if other else {})
    return kind.make([{"params": [*group], **change} for group, change in zip(model.groups, changes, strict=True)])


def steps(optimizer: torch.optim.Optimizer, rng: torch.Generator, count: int = 2) -> None:
    for _ in range(count):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = (torch.rand(parameter.shape, generator=rng) + 0.5).to(parameter)
        optimizer.step()


def through_a_file(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    kept = io.BytesIO()
    torch.save(state, kept)
    kept.seek(0)
    optimizer.load_state_dict(torch.load(kept, weights_only=True))


def by_distributed(source: Any, into: Any) -> None:
    from torch.distributed.checkpoint import state_dict

    # A copy, as a file is one.
    state_dict.set_optimizer_state_dict(*into, copy.deepcopy(state_dict.get_optimizer_state_dict(*source)))


def by_distributed_with_models(source: Any, into: Any) -> None:
    from torch.distributed.checkpoint import state_dict

    values, state = copy.deepcopy(state_dict.get_state_dict(*source))
    state_dict.set_state_dict(*into, model_state_dict=values, optim_state_dict=state)


LOADS: Mapping[str, Callable[[Any, Any], None]] = {
    "load_state_dict": lambda source, into: into[1].load_state_dict(copy.deepcopy(source[1].state_dict())),
    "a-file": lambda source, into: through_a_file(into[1], source[1].state_dict()),
}
DISTRIBUTED_LOADS: Mapping[str, Callable[[Any, Any], None]] = {
    "set_optimizer_state_dict": by_distributed,
    "set_state_dict": by_distributed_with_models,
}

LOADED = [
    pytest.param(kind, id=kind.id)
    if kind.first and kind.optimizer in ("SGD", "Adam", "AdamW")
    else deep("standard", kind, id=kind.id)
    for kind in ALL
    if kind.implementation == "for-loop" and kind.gradients != "sparse"
]
BY_KIND = pytest.mark.parametrize("kind", LOADED)


def entries(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return options and state; numbers of single elements apart, whose type AMP-OPTIMIZER-102 is about."""
    saved = optimizer.state_dict()
    found = {
        f"group {number}, {name}": value
        for number, group in enumerate(saved["param_groups"])
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
    for number, entry in saved["state"].items():
        for name, value in entry.items():
            if not isinstance(value, torch.Tensor) or value.dim():
                found[f"state {number}, {name}"] = value.clone() if isinstance(value, torch.Tensor) else value
            elif name == "step":
                found[f"state {number}, step"] = float(value)
    return found


def expect_loaded(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, load: Callable[[Any, Any], None]
) -> None:
    demand(case, kind, target.device)
    narrow = case.supported(target)
    mixtures = [(torch.float32, *narrow), (*narrow, torch.float32)]
    if target.computes_in(torch.float64):
        mixtures.append((torch.float64, torch.float32))
    for (dtypes, used), scheduled in itertools.product(
        zip(mixtures, itertools.cycle((False, True)), strict=False), (False, True)
    ):
        models = [Holder(dtypes, rng, target.device) for _ in range(2)]
        saved, into = (over_groups(kind, model, other=number == 0) for number, model in enumerate(models))
        if scheduled:
            scheduler = torch.optim.lr_scheduler.StepLR(saved, 1, gamma=0.5)
        steps(saved, rng)
        if scheduled:
            scheduler.step()
        if used:
            steps(into, rng, 1)
        before = entries(saved)
        control = differences(entries(into), before)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load((models[0], saved), (models[1], into))
        what = f"{[str(dtype) for dtype in dtypes]}, used={used}, scheduled={scheduled}"
        case.true(f"the optimizer differs before the load (control), {what}", bool(control))
        case.equal(f"options and entries that differ after the load, {what}", differences(entries(into), before), [])
        case.equal(
            f"options and entries of the source that the load changed, {what}", differences(entries(saved), before), []
        )
        if scheduled:
            resumed = torch.optim.lr_scheduler.StepLR(into, 1, gamma=0.5, last_epoch=1)
            scheduler.step()
            case.equal(f"rates of a scheduler that goes on, {what}", resumed.get_last_lr(), scheduler.get_last_lr())


@contract("AMP-OPTIMIZER-127")
@pytest.mark.parametrize("way", LOADS)
@BY_KIND
@pytest.mark.filterwarnings("ignore")
def test_loaded_groups(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, way: str) -> None:
    expect_loaded(case, target, rng, kind, LOADS[way])


@contract("AMP-OPTIMIZER-127")
@needs("streams")
@pytest.mark.parametrize("way", DISTRIBUTED_LOADS)
@BY_KIND
@pytest.mark.filterwarnings("ignore")
def test_loaded_groups_of_a_distributed_checkpoint(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, way: str
) -> None:
    need_distributed(case)
    expect_loaded(case, target, rng, kind, DISTRIBUTED_LOADS[way])


# --- what was loaded from


@contract("AMP-OPTIMIZER-128")
@BY_KIND
def test_source_of_a_state(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    """Load one optimizer's state into another, step that one, and look at the first, its state and its groups."""
    demand(case, kind, target.device)
    for copied in (True, False):
        models = [Holder(case.supported(target), rng, target.device) for _ in range(2)]
        saved, into = (over_groups(kind, model, other=False) for model in models)
        steps(saved, rng)
        state = saved.state_dict()
        into.load_state_dict(copy.deepcopy(state) if copied else state)
        before = entries(saved)
        steps(into, rng)
        into.param_groups[0]["lr"] = 0.75
        what = "a deep copy of the state (control)" if copied else "the state"
        case.equal(f"entries of the source that steps changed, from {what}", differences(entries(saved), before), [])


@contract("AMP-OPTIMIZER-128")
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adadelta"])
def test_source_of_a_rate_in_a_tensor(case: Case, target: Target, name: str) -> None:
    """Load one state into two optimizers and change the rates of each in place, by a scheduler and without."""

    def made() -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": [torch.nn.Parameter(torch.ones(2, device=target.device))]}]
        groups.append({"params": [torch.nn.Parameter(torch.ones(2, device=target.device))], "lr": torch.tensor(0.125)})
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, lr=torch.tensor(0.25), foreach=False)
        return optimizer

    def rates(groups: list[dict[str, Any]]) -> list[float]:
        return [float(group["lr"]) for group in groups]

    first, second, third = made(), made(), made()
    state = first.state_dict()
    for loading in (second, third):
        loading.load_state_dict(state)
    schedule = torch.optim.lr_scheduler.StepLR(second, 1, gamma=0.5)
    second.step()
    schedule.step()
    for group in third.param_groups:
        group["lr"].fill_(2.0)
    case.equal("rates of the optimizer that was loaded from", rates(first.param_groups), [0.25, 0.125])
    case.equal("rates in its state", rates(state["param_groups"]), [0.25, 0.125])
    case.equal("rates after a scheduler", rates(second.param_groups), [0.125, 0.0625])
    case.equal("rates after a change in place", rates(third.param_groups), [2.0, 2.0])
    first.param_groups[0]["lr"].fill_(4.0)
    case.equal("rates after a change of the source", rates(third.param_groups), [2.0, 2.0])


@contract("AMP-OPTIMIZER-128")
def test_source_of_a_model(case: Case, target: Target, rng: torch.Generator) -> None:
    """Load a model, an average, a scaler and a scheduler from others of its kind and go on with it alone."""

    def parts() -> dict[str, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(target.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
        return {
            "model": model,
            "average": swa_utils.AveragedModel(model),
            "scaler": torch.amp.GradScaler(target.device_type, growth_interval=1),
            "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
            "optimizer": optimizer,
        }

    def train(run: dict[str, Any]) -> None:
        for _ in range(2):
            run["optimizer"].zero_grad()
            output = run["model"](torch.randn(8, 4, generator=rng).to(target.device))
            run["scaler"].scale((output**2).sum()).backward()
            run["scaler"].step(run["optimizer"])
            run["scaler"].update()
            run["scheduler"].step()
            run["average"].update_parameters(run["model"])

    names = ("model", "average", "scaler", "scheduler")
    first, second = parts(), parts()
    train(first)
    before = {name: copy.deepcopy(first[name].state_dict()) for name in names}
    for name in names:
        second[name].load_state_dict(first[name].state_dict())
    train(second)
    for name in names:
        seen = first[name].state_dict()
        case.equal(f"entries of the {name} that was loaded from", differences(dict(seen), dict(before[name])), [])
        after = differences(dict(second[name].state_dict()), dict(before[name]))
        case.true(f"the {name} that was loaded has gone on (control)", bool(after))
