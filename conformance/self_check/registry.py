"""The faults by name, each with the contracts that have to notice it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Breakage = Callable[[str], Iterator[None]]
Kind = Literal["real", "any"]


@dataclass(frozen=True)
class Fault:
    """A broken AMP: what is broken, the contracts that must notice, and the targets on which they can."""

    name: str
    summary: str
    contracts: tuple[str, ...]
    kind: Kind
    """`real`: on real devices; `any`: on fake targets too."""
    first: str
    """The parameter of the cases that are run first; those of other parameters may take long to notice."""
    breakage: Breakage

    @contextlib.contextmanager
    def planted(self, device_type: str) -> Iterator[None]:
        """Break torch inside the block, for a device type where that matters, and restore it at its end."""
        with contextlib.contextmanager(self.breakage)(device_type):
            yield


_REGISTRY: dict[str, Fault] = {}


def fault(*contracts: str, kind: Kind = "real", first: str = "") -> Callable[[Breakage], Breakage]:
    """Register a generator function that breaks torch, yields and restores it; its docstring says what is broken."""

    def register(breakage: Breakage) -> Breakage:
        name = breakage.__name__
        assert name not in _REGISTRY, f"two faults are named {name}"
        summary = (breakage.__doc__ or "").strip()
        _REGISTRY[name] = Fault(name, summary, contracts, kind, first, breakage)
        return breakage

    return register


def faults() -> tuple[Fault, ...]:
    """Return every fault."""
    from . import autocast_faults, scaling_faults  # noqa: F401  (they register themselves)

    return tuple(_REGISTRY.values())
