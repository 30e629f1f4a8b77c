"""Decorated functions that lose their marks, biases that mask otherwise, and averages that start again."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import bias
from torch.optim import swa_utils

from tests.faults import fault
from tests.faults.breaking import given_the_original


@fault("AMP-BACKWARD-087")
def decorated_functions_get_copies() -> Iterator[None]:
    """custom_fwd calls forward with a copy of each tensor that is no leaf."""

    def decorated(original: Any, fwd: Any = None, **options: Any) -> Any:
        if fwd is None:
            return functools.partial(torch.amp.custom_fwd, **options)

        def forward(ctx: Any, *given: Any, **named: Any) -> Any:
            inputs = [
                one.clone() if isinstance(one, torch.Tensor) and one.grad_fn is not None else one for one in given
            ]
            return fwd(ctx, *inputs, **named)

        return original(forward, **options)

    with given_the_original(torch.amp, "custom_fwd", decorated):
        yield


@fault("AMP-BACKWARD-087")
def decorated_backward_gets_zeros() -> Iterator[None]:
    """custom_bwd makes zeros of the gradients that are absent."""

    def decorated(original: Any, bwd: Any = None, **options: Any) -> Any:
        if bwd is None:
            return functools.partial(torch.amp.custom_bwd, **options)

        def backward(ctx: Any, *gradients: Any) -> Any:
            return bwd(ctx, *(torch.zeros(()) if one is None else one for one in gradients))

        return original(backward, **options)

    with given_the_original(torch.amp, "custom_bwd", decorated):
        yield


@fault("AMP-CAST-117")
def lower_right_masks_count_from_the_left() -> Iterator[None]:
    """The mask of a lower right bias is that of the upper left corner."""

    def materialized(original: Any, self: Any, device: Any = None) -> Any:
        return self._upper_left(device)

    with given_the_original(bias.CausalBias, "_materialize", materialized):
        yield


@fault("AMP-CAST-117")
def biased_attention_is_float32() -> Iterator[None]:
    """Attention with a causal bias of the upper left corner runs outside of the region."""

    def dispatched(original: Any, *given: Any, **named: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return original(
                *(one.float() if isinstance(one, torch.Tensor) else one for one in given[:3]), *given[3:], **named
            )

    with given_the_original(bias.CausalBias, "_dispatch", staticmethod(dispatched)):
        yield


@fault("AMP-OPTIMIZER-127")
def averages_start_to_anneal_again() -> Iterator[None]:
    """SWALR's state_dict does not say how far it has come."""

    def state(original: Any, self: Any) -> Any:
        return {**original(self), "last_epoch": 0, "_step_count": 1}

    with given_the_original(swa_utils.SWALR, "state_dict", state):
        yield
