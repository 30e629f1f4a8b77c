"""Steps that go wrong only in a region, at small gradients, or for what is no torch.optim.Optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim import adam, rmsprop, sgd

from tests.faults import fault
from tests.faults.breaking import edited

SCALER = torch.amp.GradScaler


@fault("AMP-OPTIMIZER-094")
def other_objects_are_not_checked() -> Iterator[None]:
    """Infs count only in the gradients of a torch.optim.Optimizer."""
    new = "if not isinstance(optimizer, torch.optim.Optimizer) or not sum("
    with edited(SCALER._maybe_opt_step, "if not sum(", new):
        yield


@fault("AMP-OPTIMIZER-095")
def region_unscales_in_its_own_type() -> Iterator[None]:
    """Inside a region the reciprocal of the scale is rounded to the region's type."""
    old = "self._scale.double().reciprocal().float()"
    rounded = f"{old}.to(torch.get_autocast_dtype('cpu')).float() if torch.is_autocast_enabled('cpu') else {old}"
    with edited(SCALER.unscale_, old, rounded):
        yield


@fault("AMP-OPTIMIZER-095")
def region_steps_in_bf16() -> Iterator[None]:
    """Inside a region the for-loop of SGD rounds its gradients to bfloat16."""
    old = "grad = grads[i] if not maximize else -grads[i]"
    with edited(
        sgd._single_tensor_sgd,
        old,
        f"{old}; grad = grad.bfloat16().float() if torch.is_autocast_enabled('cpu') else grad",
    ):
        yield


@fault("AMP-OPTIMIZER-096")
def small_squares_are_dropped() -> Iterator[None]:
    """The for-loop of Adam takes squares below 1e-23 for zero."""
    old = "exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)"
    with edited(adam._single_tensor_adam, old, f"grad = grad * (grad * grad > 1e-23); {old}"):
        yield


@fault("AMP-OPTIMIZER-096", level="standard")
def small_gradients_do_not_move_rmsprop() -> Iterator[None]:
    """The for-loop of RMSprop takes gradients below 2**-36 for zero."""
    old = "grad = grads[i]\n"
    with edited(rmsprop._single_tensor_rmsprop, old, "grad = grads[i] * (grads[i].abs() >= 2.0**-36)\n"):
        yield
