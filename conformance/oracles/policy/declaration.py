"""What a third party declares of the op policy of its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Declaration:
    """The backend whose lists hold for a device, and by overload the policies that hold in their place.

    These are of the file that `surface` names or, of a backend that the op reference has no lists for, its own; without
    either the lists hold as they are. `changed` has the ops ("mm") to which they give another rule than the lists do,
    to one of their overloads at least.
    """

    backend: str
    surface: str | None = None
    overloads: Mapping[str, str] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.backend if self.surface is None else f"{self.backend} in the surface {self.surface}"


class Undetermined(Exception):
    """The rules of the surface that a device declares do not say what a program does; the message says why."""
