"""What one rank has after any history of calls of ZeroRedundancyOptimizer, and of the optimizer that it wraps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed, nn

from .comparison import unlike

SIZES = (3, 4, 5, 1)
CALLS = ("add", "rate", "momentum", "reload", "resume", "zero_grad", "some")
"""Calls between two steps: a new parameter group; another lr; another momentum, as a cyclic schedule sets it; the
optimizer's own state, loaded; the same, into a new optimizer; zero_grad; gradients of some parameters only."""
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.5, "momentum": 0.5},
    "AdamW": {"lr": 0.25},
}


def histories(seed: int, count: int, length: int = 5) -> list[tuple[str, ...]]:
    """Return histories of calls: one with new groups and schedules between steps, and drawn ones."""
    draw = random.Random(f"histories of a sharded optimizer, {seed}")
    found = [("add", "rate", "momentum", "resume", "add", "reload")]
    return found + [tuple(draw.choices(CALLS, k=length)) for _ in range(count - 1)]


class _Pair:
    """Parameters twice, for a ZeroRedundancyOptimizer and for the optimizer that it wraps."""

    def __init__(self, name: str, dtype: torch.dtype, views: bool, seed: int) -> None:
        self.name, self.dtype, self.views = name, dtype, views
        self.generator = torch.Generator().manual_seed(seed)
        self.kind: Any = getattr(torch.optim, name)
        self.ours: list[nn.Parameter] = []
        self.plain: list[nn.Parameter] = []
        self.groups: list[list[int]] = []
        self.rate = OPTIONS[name]["lr"]
        first = self._grown()
        self.groups = [first[1::2], first[::2]]  # in another order than they were made in
        self.sharded: Any = self._made(self._sharded, self.ours)
        self.alone: Any = self._made(self._alone, self.plain)

    def _made(self, make: Callable[[Any], Any], parameters: list[nn.Parameter]) -> Any:
        return make([{"params": [parameters[one] for one in numbers]} for numbers in self.groups])

    def _sharded(self, groups: list[dict[str, Any]]) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(groups, self.kind, parameters_as_bucket_view=self.views, **OPTIONS[self.name])

    def _grown(self) -> list[int]:
        """Make the parameters of one more group; return their numbers."""
        numbers = list(range(len(self.ours), len(self.ours) + len(SIZES)))
        for size in SIZES:
            value = torch.randn((size, 2), generator=self.generator).to(self.dtype)
            self.ours.append(nn.Parameter(value.clone()))
            self.plain.append(nn.Parameter(value))
        self.groups.append(numbers)
        return numbers

    def call(self, what: str) -> None:
        """Make one call on both sides; `reload` and `resume` need every rank."""
        if what == "add":
            numbers, self.rate = self._grown(), self.rate / 2
            for optimizer, parameters in ((self.sharded, self.ours), (self.alone, self.plain)):
                optimizer.add_param_group({"params": [parameters[one] for one in numbers], "lr": self.rate})
        elif what == "rate":
            for optimizer in (self.sharded, self.alone):
                optimizer.param_groups[-1]["lr"] *= 0.75
        elif what == "momentum":
            for optimizer in (self.sharded, self.alone):
                for group in optimizer.param_groups:
                    if "betas" in group:
                        group["betas"] = (group["betas"][0] * 0.5, *group["betas"][1:])
                    else:
                        group["momentum"] *= 0.5
        elif what == "zero_grad":
            for optimizer in (self.sharded, self.alone):
                optimizer.zero_grad()
        elif what in ("reload", "resume"):
            whole, state = self.consolidated(), self.alone.state_dict()
            if what == "resume":
                self.sharded = self._made(self._sharded, self.ours)
                self.alone = self._made(self._alone, self.plain)
            self.sharded.load_state_dict(whole)
            self.alone.load_state_dict(state)

    def _alone(self, groups: list[dict[str, Any]]) -> Any:
        return self.kind(groups, **OPTIONS[self.name])

    def consolidated(self) -> Any:
        """Return the whole state of the sharded optimizer, which each rank has in turn."""
        found: Any = None
        for rank in range(distributed.get_world_size()):
            self.sharded.consolidate_state_dict(to=rank)
            if rank == distributed.get_rank():
                found = self.sharded.state_dict()
        return found

    def step(self, some: bool) -> None:
        """Step both with the same gradients, of every parameter or of every other one."""
        for number, (one, other) in enumerate(zip(self.ours, self.plain, strict=True)):
            drawn = torch.randn(other.shape, generator=self.generator).to(self.dtype)
            other.grad = None if some and number % 2 else drawn
            one.grad = None if other.grad is None else drawn.clone()
        self.sharded.step()
        self.alone.step()

    def differences(self) -> list[str]:
        """Name the parameters, gradients and learning rates that differ."""
        found = unlike(_numbered(self.ours, lambda one: one.detach()), _numbered(self.plain, lambda one: one.detach()))
        found += [
            f"gradient: {one}" for one in unlike(_numbered(self.ours, _gradient), _numbered(self.plain, _gradient))
        ]
        rates, expected = ([one["lr"] for one in each.param_groups] for each in (self.sharded, self.alone))
        return found + ([] if rates == expected else [f"learning rates {rates} in place of {expected}"])

    def differences_of_state(self) -> list[str]:
        """Name the consolidated state that is not that of the wrapped optimizer."""
        ours, plain = (
            {f"{number}, {key}": one for number, state in whole["state"].items() for key, one in state.items()}
            for whole in (self.consolidated(), self.alone.state_dict())
        )
        return [f"state: {one}" for one in unlike(_tensors(ours), _tensors(plain))]


def _numbered(
    parameters: Sequence[nn.Parameter], of: Callable[[nn.Parameter], torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    found = {f"{number}": of(one) for number, one in enumerate(parameters)}
    return {number: one for number, one in found.items() if one is not None}


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    return parameter.grad


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: torch.as_tensor(one) for key, one in state.items() if one is not None}


def unlike_wrapped(name: str, dtype: torch.dtype, seed: int, calls: Sequence[Sequence[str]]) -> list[str]:
    """Name what histories of calls leave otherwise with ZeroRedundancyOptimizer than with its optimizer."""
    found = []
    for number, history in enumerate(calls):
        for views in (False, True):
            pair = _Pair(name, dtype, views, seed + number)
            done = []
            for what in history:
                pair.call(what)
                done.append(what)
                where = f"{dtype}{', views of buckets' * views}, {' '.join(done)}"
                found += [f"{where}: {one}" for one in pair.differences()]
                pair.step(what == "some")
                done.append("step")
                found += [f"{where} step: {one}" for one in pair.differences()]
            found += [f"{where} step: {one}" for one in pair.differences_of_state()]
    return found
