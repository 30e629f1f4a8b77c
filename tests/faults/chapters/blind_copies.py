"""Faults of states, copies, replaced weights and stateless calls whose like went unnoticed when written blind."""

from __future__ import annotations

from collections.abc import Iterator

from torch.optim import asgd

from tests.faults import fault
from tests.faults.breaking import edited


@fault("AMP-OPTIMIZER-140")
def eta_of_16_bit_parameters_is_rounded() -> Iterator[None]:
    """The for-loop of ASGD computes its decayed rate in the type of the parameter, and keeps it in float32."""
    with edited(asgd._single_tensor_asgd, "eta.copy_(new_eta)", "eta.copy_(new_eta.to(param.dtype))"):
        yield
