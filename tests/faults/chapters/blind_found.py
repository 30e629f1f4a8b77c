"""Faults ported from reports of users: layouts, optimizers and checkpoints, written blind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import edited, given_the_original, replaced


@fault("AMP-COMPILE-098")
def compiled_functions_with_a_setup_context_lose_their_backward() -> Iterator[None]:
    """The compiler differentiates the ops of forward where a custom function defines setup_context (193279)."""
    from torch._dynamo.variables.misc import AutogradFunctionVariable
    from torch.autograd.function import _is_setup_context_defined

    def call(original: Callable[..., Any], self: Any, *given: Any) -> Any:
        if not _is_setup_context_defined(self.fn_cls.setup_context):
            return original(self, *given)
        with replaced(torch, "is_grad_enabled", lambda: False):
            return original(self, *given)

    with given_the_original(AutogradFunctionVariable, "call_apply", call):
        yield


@fault("AMP-OPTIMIZER-103")
def differentiable_nadam_multiplies_a_momentum_twice() -> Iterator[None]:
    """The product of momenta of NAdam's next step has the present one twice where autograd records (92699)."""
    from torch.optim import nadam

    with edited(
        nadam._single_tensor_nadam,
        "mu_product_next = mu_product * mu_next",
        "mu_product_next = mu_product * mu * mu_next",
    ):
        yield


@fault("AMP-DISTRIBUTED-038")
def states_of_optimizers_lose_groups_without_parameters() -> Iterator[None]:
    """set_optimizer_state_dict loads nothing into a group without parameters (143828)."""
    from torch.distributed.checkpoint import state_dict

    with edited(state_dict._split_optim_state_dict, "if len(param_group[_PARAMS]) == 0:", "if False:"):
        yield


@fault("AMP-DISTRIBUTED-038")
def states_of_optimizers_load_known_settings_alone() -> Iterator[None]:
    """set_optimizer_state_dict drops what a scheduler wrote into a group of the first optimizer (140900)."""
    from torch.distributed.checkpoint import state_dict

    known = "if key == _PARAMS or key not in optim.param_groups[pg_idx]:\n                continue\n            # TODO"
    with edited(
        state_dict._split_optim_state_dict, "if key == _PARAMS:\n                continue\n            # TODO", known
    ):
        yield
