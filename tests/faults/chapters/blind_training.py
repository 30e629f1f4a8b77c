"""Faults of groups, iterables, checkpoints, averages and gradient types in training, each in one situation alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, swa_utils

from tests.faults import fault
from tests.faults.breaking import replaced

SCALER: Any = torch.amp.GradScaler


class Groups:
    """An optimizer of some groups alone."""

    def __init__(self, groups: list[Any]) -> None:
        self.param_groups = groups


def over_some_groups(chosen: Callable[[list[Any]], list[Any]]) -> Any:
    """Return a context in which unscale_ sees the groups that are chosen."""
    original = SCALER._unscale_grads_

    def unscale(self: Any, optimizer: Any, *given: Any) -> Any:
        groups = chosen(optimizer.param_groups)
        return original(self, Groups(groups) if groups else optimizer, *given)

    return replaced(SCALER, "_unscale_grads_", unscale)


# --- groups


@fault("AMP-SCALE-023")
def a_frozen_parameter_ends_its_group() -> Iterator[None]:
    """unscale_ leaves out a group whose first parameter is frozen."""
    with over_some_groups(lambda groups: [g for g in groups if not g["params"] or g["params"][0].requires_grad]):
        yield


@fault("AMP-SCALE-023")
def an_empty_group_is_the_last() -> Iterator[None]:
    """unscale_ stops at a group without parameters."""

    def before_the_empty_one(groups: list[Any]) -> list[Any]:
        empty = [number for number, group in enumerate(groups) if not group["params"]]
        return groups[: empty[0]] if empty else groups

    with over_some_groups(before_the_empty_one):
        yield


@fault("AMP-SCALE-021")
def the_inverse_scale_has_the_default_dtype() -> Iterator[None]:
    """The inverse scale is rounded to a default dtype of 16 bits."""
    original = SCALER._unscale_grads_

    def unscale(self: Any, optimizer: Any, inverse: Tensor, *given: Any) -> Any:
        return original(self, optimizer, inverse.to(torch.get_default_dtype()).float(), *given)

    with replaced(SCALER, "_unscale_grads_", unscale):
        yield


# --- iterables


@fault("AMP-CLIP-092")
def values_of_one_type_are_clipped_in_what_is_no_list() -> Iterator[None]:
    """clip_grad_value_ clamps the gradients of the first type alone, unless it is given a list."""
    original = clip_grad.clip_grad_value_

    def clip(parameters: Any, *given: Any, **named: Any) -> Any:
        if not isinstance(parameters, (Tensor, list)):
            parameters = list(parameters)
            types = [parameter.grad.dtype for parameter in parameters if parameter.grad is not None]
            parameters = [each for each in parameters if each.grad is not None and each.grad.dtype == types[0]]
        return original(parameters, *given, **named)

    with replaced(torch.nn.utils, "clip_grad_value_", clip):
        yield


# --- checkpoints


def saving_changes(change: Callable[[Any], None]) -> Any:
    """Return a context in which state_dict of an optimizer changes it."""
    original = Optimizer.state_dict

    def state_dict(self: Any) -> Any:
        change(self)
        return original(self)

    return replaced(Optimizer, "state_dict", state_dict)


@fault("AMP-OPTIMIZER-126")
def saving_clears_gradients() -> Iterator[None]:
    """state_dict sets the gradients to zero."""

    def clear(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.zero_()

    with saving_changes(clear):
        yield


@fault("AMP-OPTIMIZER-127")
def groups_load_the_rate_of_the_first() -> Iterator[None]:
    """load_state_dict gives every group the rate of the first."""
    original = Optimizer.load_state_dict

    def load(self: Any, state: Any) -> None:
        original(self, state)
        for group in self.param_groups[1:]:
            group["lr"] = self.param_groups[0]["lr"]

    with replaced(Optimizer, "load_state_dict", load):
        yield


@fault("AMP-OPTIMIZER-127")
def the_state_of_a_group_has_one_type() -> Iterator[None]:
    """load_state_dict casts the state of each group to the type of its first parameter."""
    original = Optimizer.load_state_dict

    def load(self: Any, state: Any) -> None:
        original(self, state)
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state.get(parameter, {})
                for name, value in kept.items():
                    if isinstance(value, Tensor) and value.dim():
                        kept[name] = value.to(group["params"][0].dtype)

    with replaced(Optimizer, "load_state_dict", load):
        yield


@fault("AMP-OPTIMIZER-128")
def averages_share_what_they_load() -> Iterator[None]:
    """AveragedModel.load_state_dict keeps the tensors of the state."""
    original = swa_utils.AveragedModel.load_state_dict

    def load(self: Any, state: Any, *given: Any, **named: Any) -> Any:
        return original(self, state, *given, **{**named, "assign": True})

    with replaced(swa_utils.AveragedModel, "load_state_dict", load):
        yield


# --- types


@fault("AMP-OPTIMIZER-113")
def averages_round_to_the_type_of_the_model() -> Iterator[None]:
    """An average of another type than the model's is rounded to that one in each update."""
    original = swa_utils.AveragedModel.update_parameters

    def update(self: Any, model: Any) -> None:
        original(self, model)
        for average, parameter in zip(self.module.parameters(), model.parameters(), strict=True):
            average.data.copy_(average.data.to(parameter.dtype))

    with replaced(swa_utils.AveragedModel, "update_parameters", update):
        yield


@fault("AMP-OPTIMIZER-129")
def gradients_are_unscaled_in_the_type_of_the_parameter() -> Iterator[None]:
    """unscale_ rounds gradients to the type of their parameter."""
    original = SCALER._unscale_grads_

    def unscale(self: Any, optimizer: Any, *given: Any) -> Any:
        found = original(self, optimizer, *given)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                    parameter.grad.copy_((parameter.grad.to(parameter.dtype) * 257).to(parameter.dtype) / 257)
        return found

    with replaced(SCALER, "_unscale_grads_", unscale):
        yield
