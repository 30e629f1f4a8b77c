"""Faults that float32 has as well as 16 bits: what a type says is no answer for the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import kernel
from tests.simulation.emulated.build import uncompiled


@fault("AMP-NUMERICS-122")
def kinks_pass_gradients_but_in_float64() -> Iterator[None]:
    """The gradient of relu at zero is one in every type but float64."""

    def backward(gradient: Tensor, x: Tensor, threshold: float) -> Tensor:
        return gradient * (x > threshold if x.dtype is torch.float64 else x >= threshold)

    with kernel("threshold_backward", backward, "CPU"):
        yield


@fault("AMP-NUMERICS-122", machine="backend", possible=lambda: uncompiled() is None)
def kinks_pass_gradients_on_a_backend() -> Iterator[None]:
    """On a third party's device the gradient of relu at zero is one in every type."""
    with kernel("threshold_backward", lambda gradient, x, threshold: gradient * (x >= threshold), "PrivateUse1"):
        yield
