"""What a third party declares of the op policy of its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Declaration:
    """The backend whose lists hold for a device, and by overload the policies of a surface that hold in their place.

    `surface` names the file of these policies; without one the lists hold as they are.
    """

    backend: str
    surface: str | None = None
    overloads: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.backend if self.surface is None else f"{self.backend} in the surface {self.surface}"
