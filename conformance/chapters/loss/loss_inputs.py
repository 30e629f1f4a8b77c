"""Calls of each loss of torch.nn.functional on random data, from fixtures/losses.toml."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...data import fixture, read_toml
from ...oracles.policy.declared import changed, followed
from ...oracles.policy.lists import declared_policies, resolved

REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class Program:
    """Arguments and options of one kind of call of a loss.

    `exact` names the reductions that are exact in 16 bit too; `smooth` says that no random input is at a point without
    a unique gradient; `fake` that fake tensors can run the call.
    """

    id: str
    arguments: tuple[Mapping[str, Any], ...]
    options: Mapping[str, Any]
    exact: tuple[str, ...]
    smooth: bool
    fake: bool


@dataclass(frozen=True)
class Loss:
    """A loss function of torch.nn.functional: its autocast policy by device type, and programs that call it."""

    name: str
    module: str | None
    since: str | None
    policies: Mapping[str, str]
    reductions: tuple[str, ...]
    programs: tuple[Program, ...]

    def policy(self, device_type: str) -> str:
        """Return its policy in a region on `device_type`: fp32, banned, composite, unlisted, derived or product.

        By the backend that the device declares or, where its surface has other rules, by these; `open` where they
        depend on the overload or differ among the ops that the loss is made of.
        """
        listed = self.policies.get(followed(device_type), self.policies["default"])
        if changed(device_type).isdisjoint(ops := resolved(self.name)):
            return listed
        found = frozenset().union(*(declared_policies(op, device_type) for op in ops))
        return next(iter(found)) if len(found) == 1 else "open"

    def __str__(self) -> str:
        return self.name if self.module or not self.programs else f"{self.name}-{self.programs[0].id}"


@dataclass(frozen=True)
class Call:
    """A program with its random data: positional arguments and keywords, all on one device."""

    name: str
    arguments: tuple[torch.Tensor, ...]
    options: Mapping[str, Any]

    def cast(self, first: torch.dtype, rest: torch.dtype | None = None) -> Call:
        """Give the first argument dtype `first`, every other floating-point tensor `rest` (or `first`)."""
        others = rest or first
        return Call(
            self.name,
            (_cast(self.arguments[0], first), *(_cast(tensor, others) for tensor in self.arguments[1:])),
            {key: _cast(value, others) for key, value in self.options.items()},
        )

    def to(self, device: torch.device) -> Call:
        """Move every tensor."""
        return Call(
            self.name,
            tuple(tensor.to(device) for tensor in self.arguments),
            {key: value.to(device) if _is_tensor(value) else value for key, value in self.options.items()},
        )

    def leaf(self) -> Call:
        """Make the first argument a leaf that requires grad."""
        first = self.arguments[0].detach().clone().requires_grad_()
        return Call(self.name, (first, *self.arguments[1:]), self.options)

    def evaluate(self, reduction: str) -> torch.Tensor:
        """Call the function that torch.nn.functional holds at the time of the call."""
        function = getattr(torch.nn.functional, self.name)
        result: torch.Tensor = function(*self.arguments, **self.options, reduction=reduction)
        return result


def losses() -> tuple[Loss, ...]:
    """Read the table; a loss with programs of two policies has a row for each."""
    return tuple(_loss(row) for row in read_toml(fixture("losses.toml"))["loss"])


def draw(name: str, program: Program, generator: torch.Generator) -> Call:
    """Return the call of a program with random data on the CPU, floating-point values in float32."""
    return Call(
        name,
        tuple(_draw(argument, generator) for argument in program.arguments),
        {key: _draw(value, generator) if isinstance(value, dict) else value for key, value in program.options.items()},
    )


def _loss(row: Mapping[str, Any]) -> Loss:
    programs = tuple(
        Program(
            entry["id"],
            tuple(entry["arguments"]),
            entry.get("options", {}),
            tuple(entry.get("exact", ())),
            entry.get("smooth", True),
            entry.get("fake", True),
        )
        for entry in row.get("program", ())
    )
    return Loss(
        row["name"],
        row.get("module"),
        row.get("since"),
        row["policy"],
        tuple(row.get("reductions", REDUCTIONS)),
        programs,
    )


def _draw(argument: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    if argument["make"] == "given":
        return torch.tensor(argument["values"])
    return _MAKERS[argument["make"]](argument, generator)


def _normal(argument: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(argument["shape"], generator=generator) * argument.get("scale", 1.0)


def _between(low: float, high: float) -> Callable[[Mapping[str, Any], torch.Generator], torch.Tensor]:
    def uniform(argument: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
        return low + (high - low) * torch.rand(argument["shape"], generator=generator)

    return uniform


def _sign(argument: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, argument["shape"], generator=generator).float() * 2 - 1


def _classes(argument: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, argument["high"], argument["shape"], generator=generator)


def _log_distribution(argument: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    return torch.log_softmax(_normal(argument, generator), argument.get("dim", 1))


def _distribution(argument: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    return torch.softmax(_normal(argument, generator), 1)


_MAKERS: dict[str, Callable[[Mapping[str, Any], torch.Generator], torch.Tensor]] = {
    "normal": _normal,
    "probability": _between(0.02, 0.98),
    "positive": _between(0.3, 3.0),
    "sign": _sign,
    "classes": _classes,
    "distribution": _distribution,
    "log_distribution": _log_distribution,
}


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if _is_tensor(value) and value.is_floating_point() else value
