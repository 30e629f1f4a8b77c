"""Faults of schedulers, averages and groups: rates of another group or step, periods that are off, hooks of states."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.optim.swa_utils import SWALR

from tests.faults import fault
from tests.faults.breaking import edited, given_the_original, replaced


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


@fault("AMP-OPTIMIZER-131")
def rates_that_another_schedule_set_are_lost() -> Iterator[None]:
    """ExponentialLR computes the rate from the first one, whatever the rate is."""

    def closed(self: Any) -> list[float]:
        return [base * self.gamma ** max(self.last_epoch, 0) for base in self.base_lrs]

    with replaced(lr_scheduler.ExponentialLR, "get_lr", closed):
        yield


@fault("AMP-OPTIMIZER-113")
def second_refreshes_go_on_from_the_first() -> Iterator[None]:
    """update_bn resets the statistics of a layer the first time only."""
    layer, seen = nn.modules.batchnorm._BatchNorm, weakref.WeakSet[Any]()
    original = layer.reset_running_stats

    def once(self: Any) -> None:
        if self not in seen:
            original(self)
        seen.add(self)

    update = swa_utils.update_bn

    def refreshed(*args: Any, **kwargs: Any) -> None:
        with replaced(layer, "reset_running_stats", once):
            update(*args, **kwargs)

    with replaced(swa_utils, "update_bn", refreshed):
        yield


@fault("AMP-OPTIMIZER-036")
def added_groups_take_the_rate_of_the_moment() -> Iterator[None]:
    """add_param_group takes the learning rate that the first group has by then, not the optimizer's own."""
    original = Optimizer.add_param_group

    def added(self: Any, group: dict[str, Any]) -> None:
        original(self, {"lr": self.param_groups[0]["lr"], **group} if self.param_groups else group)

    with replaced(Optimizer, "add_param_group", added):
        yield


@fault("AMP-OPTIMIZER-131")
def resumed_functions_begin_again() -> Iterator[None]:
    """LambdaLR gives its functions the steps of the object in the place of its epochs."""
    with edited(lr_scheduler.LambdaLR.get_lr, "lmbda(self.last_epoch)", "lmbda(self._step_count - 1)"):
        yield


@fault("AMP-OPTIMIZER-131")
def resumed_steps_are_counted_anew() -> Iterator[None]:
    """StepLR multiplies after so many steps of the object."""
    place = "self.last_epoch % self.step_size != 0"
    with edited(lr_scheduler.StepLR.get_lr, place, "(self._step_count - 1) % self.step_size != 0"):
        yield


@fault("AMP-OPTIMIZER-131")
def cycles_begin_at_the_rates_of_another_schedule() -> Iterator[None]:
    """CyclicLR keeps the initial rates that another schedule has left in the groups (21965)."""

    def init(right: Callable[..., None], self: Any, optimizer: Any, *args: Any, **options: Any) -> None:
        left = [group.get("initial_lr") for group in optimizer.param_groups]
        right(self, optimizer, *args, **options)
        if None not in left:
            self.base_lrs = left

    with given_the_original(lr_scheduler.CyclicLR, "__init__", init):
        yield
