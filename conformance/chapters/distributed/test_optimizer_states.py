"""Check that the optimizer state that torch.distributed.checkpoint collects is whole, and that a run goes on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import distributed, nn

from ...harness.check import Case, contract, deep
from ...harness.targets import Target

Groups = list[dict[str, Any]]

GROUPS: Mapping[str, Callable[[list[nn.Parameter]], Groups]] = {
    "one": lambda some: [{"params": some}],
    "two": lambda some: [{"params": some[:2], "lr": 0.2}, {"params": some[2:], "weight_decay": 0.05}],
    "empty last": lambda some: [{"params": some, "lr": 0.2}, {"params": [], "lr": 0.7}],
    "empty first": lambda some: [{"params": [], "lr": 0.7}, {"params": some, "lr": 0.2}],
}
ROUTES: Mapping[str, dict[str, bool]] = {
    "plain": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
    "offloaded": {"cpu_offload": True},
}
OPTIMIZERS: Mapping[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.1, weight_decay=0.1),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.5, dampening=0.5),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
}


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _tied() -> nn.Module:
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last)


def _frozen() -> nn.Module:
    model = _plain()
    next(model.parameters()).requires_grad_(False)
    return model


def _compiled() -> Any:
    return torch.compile(_plain(), backend="eager")


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "plain": _plain,
    "tied": _tied,
    "frozen": _frozen,
    "compiled": _compiled,
}


class Run:
    """A small model in training, with its optimizer."""

    def __init__(self, seed: int, groups: str, optimizer: str = "Adam", model: str = "plain") -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = MODELS[model]()
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.optimizer = OPTIMIZERS[optimizer](GROUPS[groups](list(self.model.parameters())))

    def step(self, numbers: range) -> None:
        """Train on the batches of these numbers."""
        for number in numbers:
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
            self.optimizer.zero_grad()
            self.model(x).square().sum().backward()
            self.optimizer.step()

    def settings(self) -> list[dict[str, Any]]:
        """Return what the groups hold besides parameters; a list stands for a tuple."""
        return [
            {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in self.optimizer.param_groups
        ]

    def different(self, other: Run) -> list[str]:
        """Name the parameters that have other bits."""
        theirs = other.model.state_dict()
        return [name for name, value in self.model.state_dict().items() if not torch.equal(value, theirs[name])]


@contract("AMP-DISTRIBUTED-038", on="cpu")
@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize("groups", list(GROUPS))
@pytest.mark.parametrize("route", ["plain", "flat", *(deep("standard", route) for route in ("full", "offloaded"))])
def test_optimizer_goes_on(case: Case, target: Target, route: str, groups: str, scheduled: bool) -> None:
    """From a state that was collected after two steps; its scheduler is made when it is loaded."""
    _resume(case, route, groups, scheduled=scheduled)


@contract("AMP-DISTRIBUTED-038", on="cpu")
@pytest.mark.parametrize("model", [model for model in MODELS if model != "plain"])
@pytest.mark.parametrize("route", ["plain", "flat"])
def test_optimizer_of_a_model_goes_on(case: Case, target: Target, route: str, model: str) -> None:
    """From a state of models with a weight of two names, with one that does not learn, and of compiled ones."""
    _resume(case, route, "one", model=model)


def _resume(case: Case, route: str, groups: str, *, scheduled: bool = False, model: str = "plain") -> None:
    """Collect the state after two steps and go on from it; then load it into another run, which goes on alike."""
    if not distributed.is_available():
        case.untestable("this torch is built without torch.distributed")
    from torch.distributed.checkpoint import state_dict as states

    options = states.StateDictOptions(**ROUTES[route])
    first, second, straight = (Run(case.seed + more, groups, model=model) for more in (0, 1, 0))
    schedulers = [torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5) for run in (first, straight) if scheduled]
    for run in (first, straight):
        run.step(range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of loading before a process group is there
        for scheduler in schedulers:
            scheduler.step()
        saved = copy.deepcopy(states.get_optimizer_state_dict(first.model, first.optimizer, options=options))
        second.model.load_state_dict(first.model.state_dict())
        for group in second.optimizer.param_groups:
            group["lr"] *= 3
        states.set_optimizer_state_dict(second.model, second.optimizer, saved, options=options)
    first.step(range(2, 4))
    straight.step(range(2, 4))
    case.equal("parameters that differ after two more steps of the first", first.different(straight), [])
    case.equal("settings of the groups", second.settings(), straight.settings())
    if second.settings() == straight.settings():
        second.step(range(2, 4))
        case.equal("parameters that differ after two more steps of the second", second.different(straight), [])


@contract("AMP-DISTRIBUTED-038", on="cpu")
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_asking_changes_nothing(case: Case, target: Target, optimizer: str, steps: int) -> None:
    """The state is asked for before the first step, or after it, and the training goes on."""
    if not distributed.is_available():
        case.untestable("this torch is built without torch.distributed")
    from torch.distributed.checkpoint import state_dict as states

    asked, straight = Run(case.seed, "one", optimizer), Run(case.seed, "one", optimizer)
    for run in (asked, straight):
        run.step(range(steps))
    before = asked.settings()
    states.get_optimizer_state_dict(asked.model, asked.optimizer)
    case.equal("settings of the groups", asked.settings(), before)
    case.equal("parameters that changed", asked.different(straight), [])
    for run in (asked, straight):
        run.step(range(steps, 3))
    case.equal("parameters that differ after further steps", asked.different(straight), [])
