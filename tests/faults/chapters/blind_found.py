"""Faults ported from reports of users: layouts, optimizers and checkpoints, written blind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import given_the_original, replaced


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
