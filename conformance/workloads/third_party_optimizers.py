"""Optimizers as third parties write them: one that knows nothing of scaling, and one for each protocol of GradScaler.

All take the step p - g and keep what they were called with, so that what they were handed can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


class Ordinary(torch.optim.Optimizer):
    """An optimizer that knows nothing of scaling; `handed` names what of the scaler its step could see."""

    answer: Any = None

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.handed: list[Any] = []

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        self.handed.append([name for name in ("grad_scale", "found_inf") if hasattr(self, name)])
        for parameter in self._moving():
            parameter -= parameter.grad
        return self.answer

    def _moving(self) -> Iterator[Any]:
        for group in self.param_groups:
            yield from (parameter for parameter in group["params"] if parameter.grad is not None)


class SelfScaling(Ordinary):
    """An optimizer that unscales and skips by itself, as the fused ones do; `handed` lists scale (or None) and flag."""

    answer: Any = "stepped"
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        found = float(getattr(self, "found_inf", 0.0))
        self.handed.append((None if scale is None else float(scale), found))
        if not found:
            for parameter in self._moving():
                parameter -= parameter.grad / (1.0 if scale is None else float(scale))
        return self.answer


class TakesScaler(Ordinary):
    """An optimizer of the older protocol, whose step takes the scaler itself; `handed` lists scaler and flags."""

    answer: Any = "stepped"
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
        if grad_scaler is None:
            return super().step(closure)
        flags = []
        if grad_scaler._per_optimizer_states[id(self)]["stage"].name == "READY":
            flags.append(_total(grad_scaler._check_inf_per_device(self)))
            grad_scaler.unscale_(self)
        flags.append(_total(grad_scaler._found_inf_per_device(self)))
        self.handed.append((grad_scaler, flags))
        if not any(flags):
            for parameter in self._moving():
                parameter -= parameter.grad
        return self.answer


class ActsAsOne:
    """No torch.optim.Optimizer, but an object with the parameter groups, the step and the zero_grad of one."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        self.param_groups = list(groups)

    @torch.no_grad()
    def step(self) -> str:
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
        return "stepped"

    def zero_grad(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def _parameters(self) -> Iterator[Any]:
        for group in self.param_groups:
            yield from group["params"]


class Wrapped:
    """An object around an optimizer, as training libraries make them: its own step, all else the optimizer's."""

    def __init__(self, parameters: Any) -> None:
        self._optimizer = Ordinary(parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> str:
        self._optimizer.step()
        return "stepped"


def _total(flags: dict[torch.device, torch.Tensor]) -> float:
    return sum(flag.item() for flag in flags.values())
