"""Faults of what is apart from the call: evaluation before it, keywords, formats of a weight, spellings, kept copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import replaced

Scaler = torch.amp.GradScaler


# --- what skips a step


@fault("AMP-SCALE-195")
def overflows_of_exp_skip_the_next_step() -> Iterator[None]:
    """An infinite exp under no_grad sets the flag of the next optimizer that is unscaled."""
    met: list[bool] = []
    exp, unscale = torch.exp, Scaler._unscale_grads_

    def seen(*given: Any, **named: Any) -> Tensor:
        found = exp(*given, **named)
        if not torch.is_grad_enabled() and found.isinf().any():
            met.append(True)
        return found

    def flagged(self: Any, *given: Any, **named: Any) -> dict[torch.device, Tensor]:
        flags = unscale(self, *given, **named)
        while met:
            met.pop()
            for flag in flags.values():
                flag.fill_(1.0)
        return flags

    with replaced(torch, "exp", seen), replaced(Scaler, "_unscale_grads_", flagged):
        yield


@fault("AMP-SCALE-195")
def scaled_infinities_back_the_scale_off() -> Iterator[None]:
    """update() backs off after a scale() of an infinite output, of whatever gradients."""
    scale, update = Scaler.scale, Scaler.update

    def scaled(self: Any, outputs: Any) -> Any:
        found = scale(self, outputs)
        if isinstance(outputs, Tensor) and outputs.numel() > 1 and outputs.isinf().any():
            self._met = True
        return found

    def updated(self: Any, *given: Any, **named: Any) -> None:
        if self.__dict__.pop("_met", False):
            for state in self._per_optimizer_states.values():
                for flag in state["found_inf_per_device"].values():
                    flag.fill_(1.0)
        update(self, *given, **named)

    with replaced(Scaler, "scale", scaled), replaced(Scaler, "update", updated):
        yield
