"""Check that states of older versions, which lack options that came later, load and continue."""

from __future__ import annotations

import copy
import inspect
import tempfile
import warnings
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from ...workloads.optimizer_classes import present
from .optimizer_configs import takes_closure

pytestmark = pytest.mark.usefixtures("one_thread")

# Options that releases after 1.8 added to an optimizer that was there.
LATER = ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
CHOICES = ("foreach", "fused")  # of an implementation; without one the choice is torch's, not the constructor's
NEVER_WITHOUT = {"Adafactor": ("maximize",)}  # it came with the option
QUICK = ("SGD", "Adam", "AdamW")


def made(name: str, parameters: Any) -> Any:
    kind = getattr(torch.optim, name)
    decay = {"weight_decay": 0.125} if "weight_decay" in inspect.signature(kind).parameters else {}
    return kind(parameters, lr=0.25, **decay)


def stepped(optimizer: Any, gradient: torch.Tensor) -> Any:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = gradient.clone()
    optimizer.step()
    return optimizer


def continued(name: str, state: dict[str, Any], weight: torch.Tensor, gradients: list[torch.Tensor]) -> Any:
    """Return the parameter after steps from a loaded state, or the error as text."""
    parameter = torch.nn.Parameter(weight.clone())
    try:
        optimizer = made(name, [parameter])
        optimizer.load_state_dict(copy.deepcopy(state))
        for gradient in gradients:
            stepped(optimizer, gradient)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return parameter.detach()


def drawn(name: str, target: Target, rng: torch.Generator) -> list[torch.Tensor]:
    """Return a weight and gradients for an optimizer."""
    values = [torch.randn(4, 3, generator=rng).to(target.device) for _ in range(4)]
    return [values[0], *(one.to_sparse() if name == "SparseAdam" else one for one in values[1:])]


def saved(name: str, weight: torch.Tensor, gradient: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the state after a step and the parameter there."""
    parameter = torch.nn.Parameter(weight.clone())
    state = stepped(made(name, [parameter]), gradient).state_dict()
    return state, parameter.detach()


NAMES = [one if one in QUICK else deep("standard", one) for one in present() if not takes_closure(one)]


def chosen(
    name: str, state: dict[str, Any], option: str, seen: torch.Tensor, weight: torch.Tensor, rest: list[torch.Tensor]
) -> torch.Tensor:
    """Return the parameter after the same steps with the value of `option` that gives `seen`, or else with None."""
    named = []
    for choice in (None, True, False):
        one = copy.deepcopy(state)
        one["param_groups"][0][option] = choice
        named.append(continued(name, one, weight, rest))
    found = [other for other in named if isinstance(other, torch.Tensor)]
    return next((other for other in found if torch.equal(other, seen)), found[0])


@contract("AMP-OPTIMIZER-110")
@pytest.mark.parametrize("name", NAMES)
def test_states_without_later_options(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    weight, first, *rest = drawn(name, target, rng)
    state, after = saved(name, weight, first)
    expected = continued(name, state, after, rest)
    case.true("a complete state continues (control)", isinstance(expected, torch.Tensor), expected)
    for option in LATER:
        if option not in state["param_groups"][0] or option in NEVER_WITHOUT.get(name, ()):
            continue
        older = copy.deepcopy(state)
        del older["param_groups"][0][option]
        seen = continued(name, older, after, rest)
        error = None if isinstance(seen, torch.Tensor) else seen
        case.equal(f"error without {option}", error, None)
        if error is None:
            same = expected if option not in CHOICES else chosen(name, older, option, seen, after, rest)
            case.identical(f"parameter without {option}", seen, same)


@contract("AMP-OPTIMIZER-110")
def test_adamw_from_a_state_of_adam(case: Case, target: Target, rng: torch.Generator) -> None:
    weight, first, *rest = drawn("AdamW", target, rng)
    own, after = saved("AdamW", weight, first)
    others = copy.deepcopy(own)
    others["param_groups"] = saved("Adam", weight, first)[0]["param_groups"]
    expected = continued("AdamW", own, after, rest)
    case.identical("parameter, with the settings that Adam saved", continued("AdamW", others, after, rest), expected)
    coupled = continued("Adam", own | {"param_groups": others["param_groups"]}, after, rest)
    case.true("Adam's decay gives other parameters (control)", not torch.equal(coupled, expected))


def partly(state: dict[str, Any], option: str) -> dict[str, Any]:
    """Return a state without an option of its groups."""
    groups = [{key: value for key, value in group.items() if key != option} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


@contract("AMP-OPTIMIZER-111")
@needs("streams")
@pytest.mark.parametrize("option", [deep("standard", option) for option in ("nothing", *LATER)])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints(case: Case, target: Target, rng: torch.Generator, name: str, option: str) -> None:
    if not torch.distributed.is_available():
        case.untestable("this torch is built without torch.distributed")
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint import state_dict

    models = [torch.nn.Linear(3, 4, bias=False, device=target.device) for _ in range(2)]
    gradient = torch.randn(4, 3, generator=rng).to(target.device)
    first, second = (stepped(made(name, model.parameters()), gradient * (1 + i)) for i, model in enumerate(models))
    ours = state_dict.get_optimizer_state_dict(models[0], first)
    if option != "nothing" and option not in ours["param_groups"][0]:
        case.unsupported(f"{name} has no option {option} in this torch")
    theirs = state_dict.get_optimizer_state_dict(models[1], second)
    error = None
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is one process
        checkpoint.save(partly(ours, option), checkpoint_id=folder)
        try:
            checkpoint.load(theirs, checkpoint_id=folder)
            state_dict.set_optimizer_state_dict(models[1], second, theirs)
        except checkpoint.api.CheckpointException as raised:
            error = type(raised).__name__
    case.equal("error of the load", error, None)
    wanted = first.state_dict()["state"].get(0, {})
    seen = second.state_dict()["state"].get(0, {})
    case.equal("entries of the state", sorted(seen), sorted(wanted))
    for key in wanted:
        if isinstance(wanted[key], torch.Tensor):
            case.identical(key, seen[key], wanted[key])
