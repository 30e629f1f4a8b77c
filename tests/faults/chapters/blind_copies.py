"""Faults of states, copies, replaced weights and stateless calls whose like went unnoticed when written blind."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import fusion, prune
from torch.optim import asgd

from tests.faults import fault
from tests.faults.breaking import edited, replaced


@fault("AMP-OPTIMIZER-140")
def eta_of_16_bit_parameters_is_rounded() -> Iterator[None]:
    """The for-loop of ASGD computes its decayed rate in the type of the parameter, and keeps it in float32."""
    with edited(asgd._single_tensor_asgd, "eta.copy_(new_eta)", "eta.copy_(new_eta.to(param.dtype))"):
        yield


@fault("AMP-BF16-020")
def fused_bias_of_a_linear_layer_is_wide() -> Iterator[None]:
    """fuse_linear_bn_weights converts the weight back to the type of the layer, and not the bias."""
    with edited(fusion.fuse_linear_bn_weights, ".to(dtype=linear_bias_dtype)", ""):
        yield


@fault("AMP-BF16-021")
def loaded_frozen_16_bit_parameters_train() -> Iterator[None]:
    """A pickled or saved parameter of 16 bits requires a gradient when it is rebuilt."""
    old = "param = torch.nn.Parameter(data, requires_grad)"
    with edited(torch._utils._rebuild_parameter, old, old.replace("grad)", "grad or data.element_size() == 2)")):
        yield


@fault("AMP-BF16-021")
def deep_copies_of_small_types_have_storages_of_their_own() -> Iterator[None]:
    """copy.deepcopy of a buffer of 16 bits clones it, and forgets which others share its storage."""
    original = torch.Tensor.__deepcopy__

    def cloned(self: torch.Tensor, memo: dict[int, object]) -> torch.Tensor:
        if type(self) is torch.Tensor and self.is_floating_point() and self.element_size() == 2 and self.is_leaf:
            return self.detach().clone().requires_grad_(self.requires_grad)
        return original(self, memo)

    with replaced(torch.Tensor, "__deepcopy__", cloned):
        yield


@fault("AMP-BF16-022")
def recurrent_layers_do_not_look_at_their_weights() -> Iterator[None]:
    """An RNN passes the flat list of its weights to the kernel without looking whether they have been replaced."""
    with replaced(torch.nn.RNNBase, "_weights_have_changed", lambda self: False):
        yield


@fault("AMP-BF16-023")
def weights_train_when_their_pruning_is_removed() -> Iterator[None]:
    """prune.remove makes a new parameter of the pruned weight, which requires a gradient."""
    old = "setattr(module, self._tensor_name, orig)"
    new = "setattr(module, self._tensor_name, torch.nn.Parameter(orig.data))"
    with edited(prune.BasePruningMethod.remove, old, new):
        yield


@fault("AMP-TRANSFORM-020")
def refused_names_leave_what_was_put_before_them() -> Iterator[None]:
    """A functional call with a name that it refuses leaves the weights that it has put into the module so far."""
    accessor = importlib.import_module("torch.nn.utils._named_member_accessor").NamedMemberAccessor
    old = "# Swap back if any exception occurs"
    with edited(accessor.swap_tensors_dict, old, "orig_named_tensors.clear()"):
        yield


@fault("AMP-TRANSFORM-021")
def vectorized_hessians_have_units_of_one_type() -> Iterator[None]:
    """The vectorized functions of torch.autograd.functional make all unit vectors in the type of the last tensor."""
    functional = importlib.import_module("torch.autograd.functional")
    old = "tensor.new_zeros(total_numel, tensor_numel)"
    with edited(functional._construct_standard_basis_for, old, old.replace("tensor.", "tensors[-1].", 1)):
        yield


@fault("AMP-BF16-023")
def memory_that_moves_makes_parameters_anew() -> Iterator[None]:
    """Module._apply makes a new parameter where a tensor is given other memory of the same type, as by to_empty."""
    old = "compute_should_use_set_data(param, param_applied)"
    new = f"{old} and (param.dtype != param_applied.dtype or param.data_ptr() == param_applied.data_ptr())"
    with edited(torch.nn.Module._apply, f"p_should_use_set_data = {old}", f"p_should_use_set_data = {new}"):
        yield


@fault("AMP-BF16-010")
def partial_loads_pass_over_other_types() -> Iterator[None]:
    """load_state_dict(strict=False) leaves tensors as they are where the state has another type."""
    original = torch.nn.Module.load_state_dict

    def load(self: torch.nn.Module, state: Any, strict: bool = True, assign: bool = False) -> Any:
        if not strict and not assign:
            own = self.state_dict()
            state = {key: own[key] if key in own and own[key].dtype != one.dtype else one for key, one in state.items()}
        return original(self, state, strict, assign)

    with replaced(torch.nn.Module, "load_state_dict", load):
        yield


@fault("AMP-OPTIMIZER-127")
def loaded_plateaus_forget_their_bad_epochs() -> Iterator[None]:
    """ReduceLROnPlateau.load_state_dict counts bad epochs from zero."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau
    original = scheduler.load_state_dict

    def load(self: Any, state: dict[str, Any]) -> None:
        original(self, {**state, "num_bad_epochs": 0})

    with replaced(scheduler, "load_state_dict", load):
        yield


@fault("AMP-OPTIMIZER-127")
def loaded_cycles_leave_the_momentum() -> Iterator[None]:
    """OneCycleLR changes the momentum no more after load_state_dict."""
    scheduler = torch.optim.lr_scheduler.OneCycleLR
    original = scheduler.load_state_dict

    def load(self: Any, state: dict[str, Any]) -> None:
        original(self, {**state, "cycle_momentum": False})

    with replaced(scheduler, "load_state_dict", load):
        yield


@fault("AMP-OPTIMIZER-128")
def optimizers_share_the_rate_that_they_load() -> Iterator[None]:
    """Optimizer.load_state_dict keeps the tensor of a rate that the state holds."""
    old = 'deepcopy(state_dict["param_groups"])'
    with edited(torch.optim.Optimizer.load_state_dict, old, '[dict(group) for group in state_dict["param_groups"]]'):
        yield


@fault("AMP-REGION-115")
def casts_into_square_transposes_keep_the_order_of_memory() -> Iterator[None]:
    """copy_ of a contiguous float32 matrix into the transpose of a square 16-bit one writes in the order of memory."""
    original = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        square = self.dim() == 2 and self.shape == source.shape == self.shape[::-1]
        packed = square and source.is_contiguous() and not self.is_contiguous() and self.t().is_contiguous()
        if packed and self.element_size() == 2 and source.dtype == torch.float32:
            original(self.t(), source, non_blocking)
            return self
        return original(self, source, non_blocking)

    with replaced(torch.Tensor, "copy_", copy_):
        yield
