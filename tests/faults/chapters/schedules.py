"""Faults of schedulers: rates of another group or step, bounds and periods that are off; and of hooks of states."""

from __future__ import annotations

from collections.abc import Iterator

from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from tests.faults import fault
from tests.faults.breaking import edited, replaced


@fault("AMP-OPTIMIZER-131")
def averaging_ends_at_the_rate_of_the_first_group() -> Iterator[None]:
    """SWALR anneals every group to the rate of the first one."""
    with edited(SWALR.get_lr, 'group["swa_lr"] * alpha', 'self.optimizer.param_groups[0]["swa_lr"] * alpha'):
        yield


@fault("AMP-OPTIMIZER-131")
def averaging_begins_a_step_late() -> Iterator[None]:
    """SWALR counts one step less than were made."""
    with edited(SWALR.get_lr, "t = max(0, min(1, step / max", "t = max(0, min(1, (step - 1) / max"):
        yield


@fault("AMP-OPTIMIZER-131")
def betas_are_cycled_with_the_rate() -> Iterator[None]:
    """OneCycleLR moves momenta as it moves rates, not against them."""
    original = lr_scheduler.OneCycleLR._annealing_cos

    def along(start: float, end: float, pct: float) -> float:
        return original(end, start, pct) if 0.5 < start < 1 else original(start, end, pct)

    with replaced(lr_scheduler.OneCycleLR, "_annealing_cos", staticmethod(along)):
        yield


@fault("AMP-OPTIMIZER-131")
def restarts_have_one_length() -> Iterator[None]:
    """CosineAnnealingWarmRestarts does not lengthen its periods."""
    with edited(lr_scheduler.CosineAnnealingWarmRestarts.step, "self.T_i = self.T_i * self.T_mult", "pass"):
        yield


@fault("AMP-OPTIMIZER-131")
def plateaus_forget_their_cooldown() -> Iterator[None]:
    """ReduceLROnPlateau counts bad epochs in the cooldown too."""
    with edited(lr_scheduler.ReduceLROnPlateau.step, "self.cooldown_counter = self.cooldown", "pass"):
        yield


@fault("AMP-OPTIMIZER-127")
def hooks_after_loading_are_left_out() -> Iterator[None]:
    """load_state_dict runs no hook after it."""
    hooks = "self._optimizer_load_state_dict_post_hooks.values()"
    with edited(Optimizer.load_state_dict, hooks, "()"):
        yield


@fault("AMP-OPTIMIZER-127")
def what_hooks_return_is_not_saved() -> Iterator[None]:
    """state_dict ignores the dictionary that a hook returns."""
    with edited(Optimizer.state_dict, "if hook_result is not None:", "if False:"):
        yield
