"""Check that hooks of every kind run in their order in a step, from their registration to their removal."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from ...harness.check import Case, contract
from ...harness.targets import Target

HOOKS = 3  # of each kind


class Training:
    """A layer with its optimizer and scaler, and a graph that is kept for several backward passes."""

    def __init__(self, target: Target, dtype: torch.dtype) -> None:
        self.region = functools.partial(target.autocast, dtype)
        self.layer = torch.nn.Linear(3, 2).to(target.device)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.125)
        self.scaler = torch.amp.GradScaler(target.device_type, init_scale=4.0)
        self.x = torch.ones(2, 3, device=target.device, requires_grad=True)
        with self.region():
            self.result = torch.mm(self.x, self.x.detach().t())
        self.node: Any = self.result.grad_fn
        self.parameters = [*self.layer.parameters()]

    def step(self) -> None:
        """Take a step, with a second loss over the kept graph, and load what was saved."""
        self.optimizer.zero_grad()
        with self.region():
            loss = self.layer(self.x).float().sum()
        self.scaler.scale(loss).backward()
        self.scaler.scale(self.result.float().sum()).backward(retain_graph=True)
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.layer.load_state_dict(self.layer.state_dict())
        self.optimizer.load_state_dict(self.optimizer.state_dict())


@dataclass(frozen=True)
class Kind:
    """A kind of hook: how one is registered, for which object.

    `first` are the options that register it before those that are there. `free` kinds may be removed while hooks of the
    kind run; the others stand in dicts of Python, which cannot be changed meanwhile. The order of kinds that are not
    `ordered` is documented nowhere.
    """

    name: str
    register: Callable[[Training, Callable[..., None]], Any]
    first: Callable[[Training, Callable[..., None]], Any] | None = None
    free: bool = True
    ordered: bool = True


def _of_layer(name: str) -> Kind:
    def register(training: Training, hook: Callable[..., None], **options: bool) -> Any:
        return getattr(training.layer, name)(hook, **options)

    return Kind(f"Module.{name}", register, functools.partial(register, prepend=True))


def _around_states(owner: str, name: str) -> Kind:
    return Kind(f"{owner}.{name}", lambda training, hook: getattr(getattr(training, owner), name)(hook), free=False)


KINDS = (
    *map(
        _of_layer,
        (
            "register_forward_pre_hook",
            "register_forward_hook",
            "register_full_backward_pre_hook",
            "register_full_backward_hook",
        ),
    ),
    Kind("register_module_forward_pre_hook", lambda _, hook: modules.register_module_forward_pre_hook(hook)),
    Kind("register_module_forward_hook", lambda _, hook: modules.register_module_forward_hook(hook)),
    Kind(
        "register_module_full_backward_pre_hook", lambda _, hook: modules.register_module_full_backward_pre_hook(hook)
    ),
    Kind("register_module_full_backward_hook", lambda _, hook: modules.register_module_full_backward_hook(hook)),
    Kind("Tensor.register_hook of a parameter", lambda at, hook: at.layer.weight.register_hook(hook)),
    Kind("Tensor.register_hook of a 16-bit result", lambda at, hook: at.result.register_hook(hook)),
    Kind(
        "Tensor.register_post_accumulate_grad_hook",
        lambda at, hook: at.layer.weight.register_post_accumulate_grad_hook(hook),
    ),
    Kind("Node.register_hook", lambda at, hook: at.node.register_hook(hook)),
    Kind("Node.register_prehook", lambda at, hook: at.node.register_prehook(hook)),
    Kind("register_multi_grad_hook", lambda at, hook: register_multi_grad_hook(at.parameters, hook), ordered=False),
    Kind(
        "register_multi_grad_hook of any",
        lambda at, hook: register_multi_grad_hook(at.parameters, hook, mode="any"),
        ordered=False,
    ),
    Kind(
        "register_optimizer_step_pre_hook",
        lambda _, hook: optimizers.register_optimizer_step_pre_hook(hook),
        free=False,
    ),
    Kind(
        "register_optimizer_step_post_hook",
        lambda _, hook: optimizers.register_optimizer_step_post_hook(hook),
        free=False,
    ),
    *itertools.starmap(
        _around_states,
        (
            ("optimizer", "register_step_pre_hook"),
            ("optimizer", "register_step_post_hook"),
            ("optimizer", "register_state_dict_pre_hook"),
            ("optimizer", "register_state_dict_post_hook"),
            ("optimizer", "register_load_state_dict_pre_hook"),
            ("optimizer", "register_load_state_dict_post_hook"),
            ("layer", "register_state_dict_pre_hook"),
            ("layer", "register_state_dict_post_hook"),
            ("layer", "register_load_state_dict_pre_hook"),
            ("layer", "register_load_state_dict_post_hook"),
        ),
    ),
)


@dataclass
class Ledger:
    """What ran, and what should: the registered hooks of each kind by number, in their order."""

    training: Training
    ran: dict[Kind, list[int]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    live: dict[Kind, list[int]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    handles: dict[tuple[Kind, int], Any] = field(default_factory=dict)
    # What is done in a hook, once.
    then: dict[tuple[Kind, int], Callable[[], None]] = field(default_factory=dict)

    def register(self, kind: Kind, number: int, first: bool = False) -> None:
        def hook(*_: Any) -> None:
            self.ran[kind].append(number)
            self.then.pop((kind, number), lambda: None)()

        register = kind.first if first and kind.first is not None else kind.register
        self.handles[kind, number] = register(self.training, hook)
        self.live[kind].insert(0 if register is kind.first else len(self.live[kind]), number)

    def remove(self, kind: Kind, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            self.handles[kind, number].remove()
        self.live[kind] = [number for number in self.live[kind] if number not in numbers]

    def close(self) -> None:
        for handle in self.handles.values():
            handle.remove()

    def step(self, uncertain: tuple[int, ...] = ()) -> list[str]:
        """Take a step, and name the kinds of which other hooks ran; the uncertain ones may have run or not."""
        for ran in self.ran.values():
            ran.clear()
        self.training.step()
        found = []
        for kind, ran in self.ran.items():
            seen, right = [number for number in ran if number not in uncertain], self.live[kind]
            if (seen if kind.ordered else sorted(seen)) != (right if kind.ordered else sorted(right)):
                found.append(f"{kind.name}: ran {ran}, registered {right}")
        return found


# Every subset, in the order of removal.
SUBSETS = ((), (0,), (1,), (2,), (0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1), (0, 1, 2), (2, 0, 1))


@contract("AMP-BACKWARD-086")
@pytest.mark.parametrize("moment", ["between-steps", "in-forward", "in-a-hook-of-its-kind"])
def test_exactly_the_hooks_that_are_left_run(case: Case, target: Target, rng: torch.Generator, moment: str) -> None:
    """Three hooks of each kind, of which every subset is removed, twice, before another is registered."""
    dtypes, wrong, steps = case.supported(target), [], 0
    for turn, removed in enumerate(SUBSETS):
        dtype = dtypes[turn % len(dtypes)]
        ledger = Ledger(Training(target, dtype))
        what = f"{dtype}, {list(removed)} removed"
        try:
            for number, kind in itertools.product(range(HOOKS), KINDS):
                ledger.register(kind, number, first=bool(torch.rand((), generator=rng) < 0.25))
            wrong += [f"{what}, before: {one}" for one in ledger.step()]
            remove = {kind: functools.partial(ledger.remove, kind, removed) for kind in KINDS}
            together = KINDS
            if moment == "in-a-hook-of-its-kind":
                together = tuple(kind for kind in KINDS if not kind.free)
                for kind in set(KINDS) - set(together):
                    ledger.then[kind, int(torch.randint(HOOKS, (), generator=rng))] = remove[kind]

            def all_together(remove: Any = remove, together: Any = together) -> None:
                for kind in together:
                    remove[kind]()

            if moment == "in-forward":
                # The layer runs in the midst of a step, where no hook of another kind runs.
                around = ledger.training.layer.register_forward_pre_hook(lambda *_: all_together(), prepend=True)
                wrong += [f"{what}, meanwhile: {one}" for one in ledger.step(removed)]
                around.remove()
            else:
                all_together()
                wrong += [f"{what}, at once: {one}" for one in ledger.step(removed if together != KINDS else ())]
            wrong += [f"{what}, then: {one}" for one in ledger.step()]
            for kind in KINDS:
                ledger.register(kind, HOOKS)
                ledger.remove(kind, removed)
            wrong += [f"{what}, another registered: {one}" for one in ledger.step()]
            for kind in KINDS:
                ledger.remove(kind, tuple(range(HOOKS + 1)))
            wrong += [f"{what}, then all: {one}" for one in ledger.step()]
            steps += 5
        finally:
            ledger.close()
    case.note("steps taken", steps)
    case.equal("kinds of which other hooks ran than those that are registered", wrong[:3], [])
