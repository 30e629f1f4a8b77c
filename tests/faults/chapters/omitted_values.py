"""Faults of absent gradients, settings that are zero, small weights of averages, and values beside derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.optim import adam, sgd, swa_utils
from torch.utils import _pytree as pytree

from tests.faults import fault
from tests.faults.breaking import edited, replaced

# --- absent gradients


@fault("AMP-OPTIMIZER-107")
def buffers_beside_absent_ones_are_not_dampened() -> Iterator[None]:
    """foreach SGD drops the dampening where some parameters have a momentum buffer and others have none."""
    old = "buf.mul_(momentum).add_(device_grads[i], alpha=1 - dampening)"
    with edited(sgd._multi_tensor_sgd, old, "buf.mul_(momentum).add_(device_grads[i])"):
        yield


@fault("AMP-OPTIMIZER-107")
def first_counter_corrects_all_averages() -> Iterator[None]:
    """foreach Adam corrects the first moment of every parameter by the step counter of the first one."""
    old = "1 - beta1 ** _get_value(step) for step in device_state_steps"
    with edited(adam._multi_tensor_adam, old, old.replace("(step)", "(device_state_steps[0])")):
        yield


@fault("AMP-OPTIMIZER-107")
def absent_gradients_are_zeros_later() -> Iterator[None]:
    """SGD takes an absent gradient for zeros where the parameter has a momentum buffer."""
    grouped = sgd.SGD._init_group

    def with_zeros(self: Any, group: Any, *given: Any) -> Any:
        for parameter in group["params"]:
            if parameter.grad is None and self.state.get(parameter, {}).get("momentum_buffer") is not None:
                parameter.grad = torch.zeros_like(parameter)
        return grouped(self, group, *given)

    with replaced(sgd.SGD, "_init_group", with_zeros):
        yield


# --- settings of a group


@fault("AMP-OPTIMIZER-035")
def zeros_of_a_group_become_the_default() -> Iterator[None]:
    """A parameter group that names zero for a number gets the default of the optimizer."""
    new = (
        "param_group[name] = param_group.get(name) or default "
        "if isinstance(default, float) else param_group.get(name, default)"
    )
    with edited(torch.optim.Optimizer.add_param_group, "param_group.setdefault(name, default)", new):
        yield


@fault("AMP-OPTIMIZER-035")
def flags_of_a_later_group_stay_on() -> Iterator[None]:
    """A flag that is on in the optimizer is on in every group that is added later."""
    add = torch.optim.Optimizer.add_param_group

    def added(self: Any, param_group: Any) -> None:
        later = bool(self.param_groups)
        add(self, param_group)
        if later:
            self.param_groups[-1].update({name: True for name, value in self.defaults.items() if value is True})

    with replaced(torch.optim.Optimizer, "add_param_group", added):
        yield


@fault("AMP-OPTIMIZER-035")
def groups_share_a_first_moment_of_zero() -> Iterator[None]:
    """Adam steps a group whose first beta is zero with the betas of the optimizer."""
    old = 'beta1, beta2 = group["betas"]'
    new = 'beta1, beta2 = group["betas"] if group["betas"][0] else self.defaults["betas"]'
    with edited(adam.Adam.step, old, new):
        yield


# --- weights of an average


@fault("AMP-OPTIMIZER-113")
def decays_near_one_stop_the_average() -> Iterator[None]:
    """The moving average of several tensors rounds its decay to the type of the first one: 0.999 is 1 in bfloat16."""
    several = swa_utils.get_ema_multi_avg_fn

    def averaging(decay: float = 0.999) -> Any:
        def update(means: Any, models: Any, count: Any) -> None:
            several(float(torch.tensor(decay, dtype=means[0].dtype)))(means, models, count)

        return update

    with replaced(swa_utils, "get_ema_multi_avg_fn", averaging):
        yield


@fault("AMP-OPTIMIZER-113")
def means_stop_after_many_models() -> Iterator[None]:
    """The mean of several 16-bit tensors rounds the share of the models before: that of 998 models is 1 in bfloat16."""
    several = swa_utils.get_swa_multi_avg_fn

    def averaging() -> Any:
        update = several()

        def rounded(means: Any, models: Any, count: Any) -> None:
            share = float((count / (count + 1)).to(means[0].dtype))
            if means[0].dtype not in (torch.float16, torch.bfloat16):
                update(means, models, count)
            elif share < 1:
                update(means, models, share / (1 - share))

        return rounded

    with replaced(swa_utils, "get_swa_multi_avg_fn", averaging):
        yield


@fault("AMP-OPTIMIZER-113")
def weights_of_models_are_rounded() -> Iterator[None]:
    """The moving average of one tensor takes the weight of the model from the decay in 16 bits."""
    single = swa_utils.get_ema_avg_fn

    def averaging(decay: float = 0.999) -> Any:
        update = single(decay)

        def rounded(mean: Any, model: Any, count: Any) -> Any:
            low = mean.dtype in (torch.float16, torch.bfloat16)
            kept = torch.tensor(decay, dtype=mean.dtype)
            return decay * mean + (1 - kept) * model if low else update(mean, model, count)

        return rounded

    with replaced(swa_utils, "get_ema_avg_fn", averaging):
        yield


# --- values beside derivatives


@fault("AMP-TRANSFORM-023")
def values_beside_aux_have_the_type_of_gradients() -> Iterator[None]:
    """grad_and_value with has_aux converts the value to the type of the first gradient."""
    old = "return grad_input, (output, aux)"
    with edited(
        eager_transforms.grad_and_value_impl, old, "return grad_input, (output.to(flat_grad_input[0].dtype), aux)"
    ):
        yield


@fault("AMP-TRANSFORM-023")
def aux_has_the_type_of_the_value() -> Iterator[None]:
    """vjp with has_aux converts the floating-point tensors of aux to the type of the value."""
    original = torch.func.vjp

    def vjp(func: Any, *primals: Any, has_aux: bool = False) -> Any:
        if not has_aux:
            return original(func, *primals)
        value, pull, aux = original(func, *primals, has_aux=True)
        kind = pytree.tree_leaves(value)[0].dtype
        return value, pull, pytree.tree_map(lambda one: one.to(kind) if one.is_floating_point() else one, aux)

    with replaced(torch.func, "vjp", vjp):
        yield


@fault("AMP-TRANSFORM-023")
def values_of_jvp_follow_the_region() -> Iterator[None]:
    """In a region jvp returns its value in the type of the region."""
    original = torch.func.jvp

    def jvp(func: Any, primals: Any, tangents: Any, **options: Any) -> Any:
        value, *others = original(func, primals, tangents, **options)
        if torch.is_autocast_enabled("cpu"):
            value = pytree.tree_map(lambda one: one.to(torch.get_autocast_dtype("cpu")), value)
        return (value, *others)

    with replaced(torch.func, "jvp", jvp):
        yield


# --- statistics of an average


@fault("AMP-OPTIMIZER-113")
def momenta_without_a_number_become_one() -> Iterator[None]:
    """update_bn puts a momentum of 0.1 where there was none, or zero."""
    old = "bn_module.momentum = momenta[bn_module]"
    with edited(swa_utils.update_bn, old, f"{old} or 0.1"):
        yield


@fault("AMP-OPTIMIZER-113")
def models_of_several_norms_train_on() -> Iterator[None]:
    """update_bn leaves a model with several BatchNorm layers in training."""
    old = "model.train(was_training)"
    with edited(swa_utils.update_bn, old, "model.train(was_training or len(momenta) > 1)"):
        yield


@fault("AMP-OPTIMIZER-113")
def later_norms_keep_their_statistics() -> Iterator[None]:
    """update_bn resets the statistics of the first BatchNorm layer alone."""
    old = "module.reset_running_stats()"
    with edited(swa_utils.update_bn, old, "momenta or module.reset_running_stats()"):
        yield
