"""The optimizers of torch.optim, found by introspection, with the arguments and implementations that are checked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ...data import in_force
from ...workloads.optimizer_classes import TABLE, present, promises_fused

_FLAGS = MappingProxyType(
    {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, "default": {}}
)


# Arguments that choose an implementation, are used by the constructor alone, or are no numbers.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
_OF_ALL_GROUPS = frozenset(
    ("params", "lr", "initial_accumulator_value", "nesterov", "ns_steps", "adjust_lr_fn", *_IMPLEMENTATION)
)
_OTHER_PAIRS = MappingProxyType({"etas": (0.25, 1.5)})  # below and above one
_OTHER_NUMBERS = MappingProxyType({"d": 1.5, "eps": 2.0**-8})  # at least one; a number that shows


@dataclass(frozen=True)
class OptimizerConfig:
    """One optimizer with one set of arguments, in one of its implementations.

    `gradients` is "dense", "matrices" (its parameters must be two-dimensional) or "sparse". `first` marks the set of
    arguments that runs at every level. An optimizer that is not in the table runs with default arguments.
    """

    optimizer: str
    variant: str
    implementation: str
    arguments: MappingProxyType[str, Any]
    gradients: str = "dense"
    first: bool = True
    listed: bool = True

    @property
    def id(self) -> str:
        return f"{self.optimizer}-{self.variant}-{self.implementation}"

    @property
    def fused(self) -> bool:
        return self.implementation == "fused"

    @property
    def scales_itself(self) -> bool:
        """Whether it is self-scaling: GradScaler sets grad_scale and found_inf on it, and it unscales and skips."""
        since = _entry(self.optimizer).get("scales_itself_since")
        return self.fused and since is not None and reached(since)

    def promised_on(self, device_type: str) -> bool:
        """Whether torch's documentation promises this implementation on the device type."""
        if self.implementation in ("for-loop", "default"):
            return self.listed
        if self.implementation == "foreach":
            return self.listed and device_type in TABLE["foreach"]
        return promises_fused(self.optimizer, device_type)

    @property
    def flags(self) -> Mapping[str, bool]:
        """The arguments that choose the implementation, where the class has several."""
        return _FLAGS[self.implementation] if _implementations(self.optimizer) != ("for-loop",) else {}

    def make(self, parameters: Iterable[Any], **changes: Any) -> torch.optim.Optimizer:
        """Construct it over parameters or parameter groups; `changes` replace arguments. Raises what torch raises."""
        made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(
            parameters, **{**self.arguments, **self.flags, **changes}
        )
        return made

    def other_settings(self) -> dict[str, Any]:
        """Return other values of every setting that a parameter group can have of its own, the rate apart."""
        given = {**_signature(self.optimizer), **self.arguments}
        found = {name: _other(name, value) for name, value in given.items() if name not in _OF_ALL_GROUPS}
        if given.get("nesterov") and "dampening" in found:
            found["dampening"] = 0.0  # which SGD demands with it
        return {name: value for name, value in found.items() if value != given[name]}

    def settings(self) -> dict[str, list[Any]]:
        """Return values of each number or flag among the settings, zero and false first; a constructor refuses some."""
        given = {**_signature(self.optimizer), **self.arguments}
        return {name: values for name, value in given.items() if (values := _values(name, value))}

    def accepts(self, argument: str) -> bool:
        """Whether the constructor has that argument."""
        return argument in _signature(self.optimizer)


def listed() -> dict[str, str]:
    """Return the names of the table with the torch version since which each exists ("" for always)."""
    return {name: entry.get("since", "") for name, entry in TABLE["optimizer"].items()}


def reached(version: str) -> bool:
    """Whether this torch is of that version ("2.9") or a later one; "" is every version."""
    return in_force(torch.__version__, version or None)


def takes_closure(optimizer: str) -> bool:
    """Whether step() of that optimizer evaluates the loss itself, through a closure that it must be given."""
    return bool(_entry(optimizer).get("closure", False))


def configs(*, implementations: tuple[str, ...] = ("for-loop", "foreach", "fused")) -> Iterator[OptimizerConfig]:
    """Yield every optimizer that needs no closure, with every variant in each of those implementations that it has."""
    for name in present():
        entry = _entry(name)
        if takes_closure(name):
            continue
        usual, sparse = entry["variants"], entry.get("sparse", {})
        for number, (variant, arguments) in enumerate({**usual, **sparse}.items()):
            for implementation in _implementations(name):
                if implementation in implementations and not (variant in sparse and implementation == "fused"):
                    yield OptimizerConfig(
                        name,
                        variant,
                        implementation,
                        MappingProxyType(arguments),
                        "sparse" if variant in sparse else entry.get("gradients", "dense"),
                        first=number == 0,
                        listed=name in TABLE["optimizer"],
                    )


def _entry(optimizer: str) -> dict[str, Any]:
    entry: dict[str, Any] = TABLE["optimizer"].get(optimizer, {"variants": TABLE["unlisted"]})
    return entry


def _signature(optimizer: str) -> Mapping[str, Any]:
    found = getattr(torch.optim, optimizer)
    return _arguments(found, found.__init__)


def _other(name: str, value: Any) -> Any:
    """Return another valid value of a setting: a flag turned, three quarters of a number, a quarter for zero."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (list, tuple)):
        return _OTHER_PAIRS.get(name) or tuple(None if each is None else 0.75 * each for each in value)
    return _OTHER_NUMBERS.get(name, 0.75 * value or 0.25)


def _values(name: str, value: Any) -> list[Any]:
    """Return values of a setting, zero and false first and the given one among them; none for what is no number."""
    if name in ("foreach", "fused"):
        return [False, None, True]
    if isinstance(value, bool):
        return [False, True]
    if isinstance(value, (list, tuple)):
        single = [(*value[:place], 0.0, *value[place + 1 :]) for place in range(len(value))]
        return [(0.0,) * len(value), *single, tuple(value), _other(name, value)]
    if name == "ns_steps":
        return [0, value, value - 1]
    return [0.0, 0, value, _other(name, value)] if isinstance(value, (int, float)) else []


@functools.cache
def _arguments(made: type, _: Callable[..., None]) -> Mapping[str, Any]:
    """The arguments of a class and their defaults, as long as it has that constructor."""
    return MappingProxyType({name: one.default for name, one in inspect.signature(made).parameters.items()})


def _implementations(optimizer: str) -> tuple[str, ...]:
    """The implementations whose flag the constructor has, and "default" where there is a choice."""
    flags = _signature(optimizer)
    offered = tuple(name for name in ("foreach", "fused") if name in flags)
    return ("for-loop", *offered, "default") if offered else ("for-loop",)
