"""Decompositions that take another side of a bound than the kernel, or lose what is no number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import decomposed

aten = torch.ops.aten
Op = Callable[..., Any]


@fault("AMP-COMPILE-079")
def compiled_hardtanh_has_gradients_at_its_bounds() -> Iterator[None]:
    """The decomposition of hardtanh's gradient lets it through at the bounds too."""

    def change(before: Op) -> Op:
        def gradient(incoming: Tensor, x: Tensor, low: float, high: float) -> Tensor:
            return torch.where((x >= low) & (x <= high), incoming, 0.0)

        return gradient

    with decomposed(aten.hardtanh_backward.default, change):
        yield


@fault("AMP-COMPILE-079")
def compiled_rectifiers_give_zeros_for_nans() -> Iterator[None]:
    """The decomposition of relu keeps what is above zero, which a NaN is not."""

    def change(before: Op) -> Op:
        return lambda x: torch.where(x > 0, x, torch.zeros_like(x))

    with decomposed(aten.relu.default, change):
        yield
