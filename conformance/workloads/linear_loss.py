"""A loss that is linear in its parameters, so that its gradients are chosen exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# 77 elements are several vectors of any width and a remainder; the rest are shapes that kernels treat specially.
_SHAPES = {
    "dense": ((7, 11), (13,), (), (6, 4)),
    "matrices": ((7, 11), (5, 3), (6, 4)),
    "sparse": ((7, 11), (5, 3), (6, 4)),
}
_ROWS = (3, 0, 3, 1)


@dataclass(frozen=True)
class LinearLoss:
    """Parameters in two groups and a loss linear in them; the last parameter never gets a gradient.

    `gradients` is "dense" (any shape), "matrices" or "sparse" (rows looked up in tables, one of them twice).
    """

    parameters: tuple[torch.nn.Parameter, ...]
    gradients: str

    @classmethod
    def make(cls, gradients: str, device: torch.device, rng: torch.Generator) -> LinearLoss:
        """Return random fp32 parameters in [1, 2) on `device`; `rng` is a generator on the CPU."""
        shapes = (*_SHAPES[gradients], (3, 2))
        values = [1 + torch.rand(shape, generator=rng) for shape in shapes]
        return cls(tuple(torch.nn.Parameter(value.to(device)) for value in values), gradients)

    def copy(self) -> LinearLoss:
        """Return new parameters of the same values without gradients."""
        return LinearLoss(tuple(torch.nn.Parameter(each.detach().clone()) for each in self.parameters), self.gradients)

    def groups(self) -> list[dict[str, object]]:
        """Return two parameter groups; the first holds the first two parameters."""
        return [{"params": list(self.parameters[:2])}, {"params": list(self.parameters[2:])}]

    @property
    def moving(self) -> tuple[torch.nn.Parameter, ...]:
        """The parameters that get a gradient, all but the last."""
        return self.parameters[:-1]

    def draw(self, rng: torch.Generator, *, positive: bool = False) -> list[torch.Tensor]:
        """Return random gradients for the moving parameters: Gaussian, or in [0.5, 1.5) if `positive`."""
        return [
            (0.5 + torch.rand(shape, generator=rng) if positive else torch.randn(shape, generator=rng)).to(
                self.parameters[0].device
            )
            for shape in map(self._slope_shape, self.moving)
        ]

    def loss(self, slopes: Sequence[torch.Tensor], *, without: int | None = None) -> torch.Tensor:
        """Return the sum of slope times parameter (0-dim), whose gradients are the slopes; `without` one parameter.

        With sparse gradients each row of a slope belongs to one looked-up row of the table; one row is looked up twice.
        """
        used = list(self.moving)
        if self.gradients == "sparse":
            rows = torch.tensor(_ROWS, device=used[0].device)
            used = [torch.nn.functional.embedding(rows, table, sparse=True) for table in used]
        products = zip(used, slopes, strict=True)
        terms = [(part * slope).sum() for number, (part, slope) in enumerate(products) if number != without]
        return torch.stack(terms).sum()

    def _slope_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        if self.gradients == "sparse":
            return (len(_ROWS), parameter.shape[1])
        return tuple(parameter.shape)


def with_nonfinite(slopes: Sequence[torch.Tensor], place: str, value: float) -> list[torch.Tensor]:
    """Return copies of the slopes with `value` in the first element of the first or the last element of the last."""
    copies = [slope.clone() for slope in slopes]
    if place == "first":
        copies[0].view(-1)[0] = value
    else:
        copies[-1].view(-1)[-1] = value
    return copies
