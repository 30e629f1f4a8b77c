"""The broken AMPs that the suite must catch: each a few lines that break torch, and put it back."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

from tests.faults import chapters

Breakage = Callable[[], Iterator[None]]


@dataclass(frozen=True)
class Fault:
    """One broken AMP: what is broken, and the contracts that speak of it, one of which must fail at `level`.

    `possible` says whether this machine has what the fault breaks. `machine` is what else the contracts need: "model",
    a user's own workload; in a process of its own, "card", the emulated card, and "backend", that of a third party.
    """

    name: str
    summary: str
    contracts: tuple[str, ...]
    breakage: Breakage
    level: str = "quick"
    possible: Callable[[], bool] = lambda: True
    machine: str = ""

    @property
    def apart(self) -> bool:
        """Whether it can be applied in a process of its own only."""
        return self.machine in ("card", "backend")

    @property
    def chapters(self) -> tuple[str, ...]:
        """The chapters of the contracts that speak of it."""
        return tuple(dict.fromkeys(contract.split("-")[1].lower() for contract in self.contracts))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Break torch inside the block and put it back after."""
        with contextlib.contextmanager(self.breakage)():
            yield


_REGISTRY: dict[str, Fault] = {}


def fault(
    *contracts: str, level: str = "quick", possible: Callable[[], bool] = lambda: True, machine: str = ""
) -> Callable[[Breakage], Breakage]:
    """Register a generator function that breaks torch, yields, and puts it back; its docstring says what is broken.

    `level` is the one from which on a contract sees it; `possible`, whether this machine has what it breaks; `machine`,
    what else the contracts need.
    """

    def register(breakage: Breakage) -> Breakage:
        name = breakage.__name__
        if name in _REGISTRY:
            raise ValueError(f"two faults are named {name}")
        summary = (breakage.__doc__ or "").strip().splitlines()[0]
        _REGISTRY[name] = Fault(name, summary, contracts, breakage, level, possible, machine)
        return breakage

    return register


def import_modules(package: ModuleType) -> None:
    """Import every module of a package, whose decorators register what it has."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def load() -> dict[str, Fault]:
    """Import every module of faults and return all of them by name."""
    import_modules(chapters)
    return dict(_REGISTRY)
