"""Faults of state that were written without sight of the checks, and that none of them saw at first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import adam, rmsprop, sgd
from torch.utils import checkpoint as checkpointing

from tests.faults import fault
from tests.faults.breaking import edited, replaced

Scaler = torch.amp.GradScaler


@fault("AMP-BACKWARD-028")
def second_backward_of_a_custom_function_runs_outside() -> Iterator[None]:
    """The first backward of a custom function forgets that forward ran in a region."""
    old = "return bwd(*args, **kwargs)"
    with edited(torch.amp.custom_bwd, old, f"args[0]._fwd_used_autocast = False; {old}"):
        yield


@fault("AMP-BACKWARD-028")
def second_backward_of_a_custom_function_changes_dtype() -> Iterator[None]:
    """The first backward of a custom function leaves bfloat16 behind for the next."""
    old = "return bwd(*args, **kwargs)"
    with edited(torch.amp.custom_bwd, old, f"args[0]._dtype = torch.bfloat16; {old}"):
        yield


@fault("AMP-BACKWARD-054")
def second_recomputation_runs_outside() -> Iterator[None]:
    """A checkpoint keeps the enabled flag of forward for one recomputation only."""
    real = checkpointing._get_autocast_kwargs

    def once(*arguments: Any, **options: Any) -> Any:
        return tuple(found if found is None else _Fading(found) for found in real(*arguments, **options))

    with replaced(checkpointing, "_get_autocast_kwargs", once):
        yield


class _Fading:
    """A mapping whose "enabled" is False from the second time on that it is read."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._read = False

    def keys(self) -> Any:
        return self._values.keys()

    def __getitem__(self, name: str) -> Any:
        if name != "enabled":
            return self._values[name]
        seen, self._read = self._values[name] and not self._read, True
        return seen


@fault("AMP-CLIP-091")
def frozen_parameters_are_left_out_of_the_norm() -> Iterator[None]:
    """clip_grad_norm_ looks at parameters that require a gradient only."""
    old = "grads = [p.grad for p in parameters if p.grad is not None]"
    new = "grads = [p.grad for p in parameters if p.grad is not None and p.requires_grad]"
    with edited(clip_grad.clip_grad_norm_, old, new):
        yield


@fault("AMP-SCALE-023")
def frozen_parameters_keep_scaled_gradients() -> Iterator[None]:
    """Parameters that were frozen after backward are passed over by unscaling."""
    with edited(Scaler._unscale_grads_, "if param.grad is None:", "if param.grad is None or not param.requires_grad:"):
        yield


@fault("AMP-SCALE-091")
def loading_a_state_empties_it() -> Iterator[None]:
    """load_state_dict() takes the growth tracker out of the caller's dictionary."""
    old = 'self._growth_tracker.fill_(state_dict["_growth_tracker"])'
    with edited(Scaler.load_state_dict, old, old.replace('["_growth_tracker"]', '.pop("_growth_tracker")')):
        yield


@fault("AMP-CLIP-005")
def norm_is_divided_by_itself_alone_for_a_threshold_of_zero() -> Iterator[None]:
    """With max_norm 0 the 1e-6 is left out, so that zero gradients become NaN."""
    old = "clip_coef = max_norm / (total_norm + 1e-6)"
    with edited(
        clip_grad._clip_grads_with_norm_, old, "clip_coef = max_norm / (total_norm + (1e-6 if max_norm else 0))"
    ):
        yield


@fault("AMP-SCALE-040")
def step_bypasses_an_overridden_unscale() -> Iterator[None]:
    """step() calls GradScaler's own unscale_, whatever a subclass makes of it."""
    with edited(Scaler.step, "self.unscale_(optimizer)", "type(self).__mro__[-2].unscale_(self, optimizer)"):
        yield


@fault("AMP-SCALE-095")
def pickling_empties_the_scaler() -> Iterator[None]:
    """What is pickled is the scaler's own dictionary, so its tensors are taken from the scaler as well."""
    with edited(Scaler.__getstate__, "self.__dict__.copy()", "self.__dict__"):
        yield


@fault("AMP-SCALE-014")
def computed_losses_are_scaled_in_place() -> Iterator[None]:
    """scale() of a loss that was computed multiplies the loss itself; leaves are copied."""
    old = "return outputs * scale.to(device=outputs.device, non_blocking=True)"
    with edited(Scaler.scale, old, old.replace("outputs *", "outputs.mul_(scale) if outputs.grad_fn else outputs *")):
        yield


@fault("AMP-SCALE-014")
def computed_losses_in_a_list_are_scaled_in_place() -> Iterator[None]:
    """scale() of several losses multiplies those that were computed in place."""
    old = "return val * stash[0].get(val.device)"
    new = "return val.mul_(stash[0].get(val.device)) if val.grad_fn else val * stash[0].get(val.device)"
    with edited(Scaler.scale, old, new):
        yield


@fault("AMP-SCALE-182")
def a_state_without_growth_factor_is_completed() -> Iterator[None]:
    """load_state_dict takes 2 for a growth factor that is missing."""
    with edited(Scaler.load_state_dict, 'state_dict["growth_factor"]', 'state_dict.get("growth_factor", 2.0)'):
        yield


@fault("AMP-SCALE-182")
def a_state_without_growth_interval_is_completed() -> Iterator[None]:
    """load_state_dict keeps the scaler's own growth interval where the state has none."""
    old = 'state_dict["growth_interval"]'
    with edited(Scaler.load_state_dict, old, 'state_dict.get("growth_interval", self._growth_interval)'):
        yield


@fault("AMP-OPTIMIZER-102")
def step_of_a_fused_optimizer_is_loaded_in_the_type_of_the_parameter() -> Iterator[None]:
    """load_state_dict casts the step of fused and capturable optimizers to 16 bits, and that of others not."""
    with edited(
        torch.optim.Optimizer._process_value_according_to_param_policy,
        "return value.to(dtype=torch.float32, device=param.device)",
        "return value.to(dtype=param.dtype, device=param.device)",
    ):
        yield


@fault("AMP-OPTIMIZER-120")
def foreach_decay_has_the_wrong_sign_under_maximize() -> Iterator[None]:
    """Adam's foreach step subtracts the decay from the gradient where it maximizes."""
    old = "torch._foreach_add_(device_grads, device_params, alpha=weight_decay)"
    with edited(adam._multi_tensor_adam, old, old.replace("_foreach_add_", "_foreach_sub_")):
        yield


@fault("AMP-OPTIMIZER-120")
def foreach_rmsprop_decays_only_under_momentum() -> Iterator[None]:
    """RMSprop's foreach step leaves the weight decay out where there is no momentum."""
    with edited(rmsprop._multi_tensor_rmsprop, "if weight_decay != 0:", "if weight_decay != 0 and momentum > 0:"):
        yield


@fault("AMP-OPTIMIZER-121")
def foreach_maximize_negates_the_gradients() -> Iterator[None]:
    """SGD's foreach step negates the gradients in place where it maximizes."""
    old = "device_grads = torch._foreach_neg("
    with edited(sgd._multi_tensor_sgd, old, "torch._foreach_neg_(device_grads); device_grads = list("):
        yield


@fault("AMP-OPTIMIZER-121")
def first_momentum_is_the_gradient_itself() -> Iterator[None]:
    """SGD keeps the first gradient as its momentum buffer, without a copy."""
    with edited(sgd._single_tensor_sgd, "buf = grad.detach().clone()", "buf = grad.detach()"):
        yield


@fault("AMP-OPTIMIZER-121")
def first_foreach_momentum_is_the_gradient_itself() -> Iterator[None]:
    """SGD's foreach step keeps the first gradient as its momentum buffer, without a copy."""
    old = "device_grads[i].detach().clone()"
    with edited(sgd._multi_tensor_sgd, old, "device_grads[i].detach()"):
        yield
