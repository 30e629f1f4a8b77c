"""Third-party optimizers: an ordinary one, and one for each of GradScaler's protocols with self-scaling optimizers.

All take the step p - g and record their arguments and what GradScaler passed to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


class Ordinary(torch.optim.Optimizer):
    """An ordinary optimizer; `received` lists, per step, which of grad_scale and found_inf were set on it."""

    answer: Any = None

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.received: list[Any] = []

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        self.received.append([name for name in ("grad_scale", "found_inf") if hasattr(self, name)])
        for parameter in self._moving():
            parameter -= parameter.grad
        return self.answer

    def _moving(self) -> Iterator[Any]:
        for group in self.param_groups:
            yield from (parameter for parameter in group["params"] if parameter.grad is not None)


class SelfScaling(Ordinary):
    """An optimizer that unscales and skips like the fused ones; `received` lists scale (or None) and flag per step."""

    answer: Any = "stepped"
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        found = float(getattr(self, "found_inf", 0.0))
        self.received.append((None if scale is None else float(scale), found))
        if not found:
            for parameter in self._moving():
                parameter -= parameter.grad / (1.0 if scale is None else float(scale))
        return self.answer


class TakesScaler(Ordinary):
    """An optimizer of the older protocol, whose step takes the scaler; `received` lists scaler and flags per step."""

    answer: Any = "stepped"
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
        if grad_scaler is None:
            return super().step(closure)
        flags = []
        record = record_of(grad_scaler, self)
        if record is None:
            flags = self._own_flags(grad_scaler)
        else:
            if record["stage"].name == "READY":
                flags.append(_total(grad_scaler._check_inf_per_device(self)))
                grad_scaler.unscale_(self)
            flags.append(_total(grad_scaler._found_inf_per_device(self)))
        self.received.append((grad_scaler, flags))
        if not any(flags):
            for parameter in self._moving():
                parameter -= parameter.grad
        return self.answer

    def _own_flags(self, grad_scaler: Any) -> list[float]:
        """Unscale by the scaler's public call, unless that has been done, and find the flag in the gradients."""
        found = float(not all(parameter.grad.isfinite().all() for parameter in self._moving()))
        try:
            grad_scaler.unscale_(self)
        except RuntimeError:  # unscale_() was called before step()
            return [found]
        return [found, found]


class DuckTyped:
    """An object with param_groups, step() and zero_grad() that is not a torch.optim.Optimizer."""

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
    """A wrapper around an optimizer, as in training libraries: its own step(), and the optimizer's other attributes."""

    def __init__(self, parameters: Any) -> None:
        self._optimizer = Ordinary(parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> str:
        self._optimizer.step()
        return "stepped"


def answering(parameters: Any, answer: Any) -> Ordinary:
    """Return an `Ordinary` optimizer whose step returns `answer`."""
    optimizer = Ordinary(parameters)
    optimizer.answer = answer
    return optimizer


def owning(*gradients: torch.Tensor, kind: Callable[[Any], Any] = Ordinary) -> Any:
    """Return a `kind` of optimizer over zero parameters, one for each of `gradients`, which is its .grad already."""
    parameters = []
    for gradient in gradients:
        parameter = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device, requires_grad=True)
        parameter.grad = gradient
        parameters.append(parameter)
    return kind(parameters)


def record_of(scaler: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Return what torch's scaler records of an optimizer: its stage, and a flag by device.

    None for a scaler of another maker, which may keep its records otherwise.
    """
    records = getattr(scaler, "_per_optimizer_states", None)
    record = records[id(optimizer)] if isinstance(records, defaultdict) else None
    return record if isinstance(record, dict) and {"stage", "found_inf_per_device"} <= record.keys() else None


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters of every group, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def give(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Give every parameter a gradient full of `value`, as backward would."""
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.full_like(parameter, value)


def _total(flags: dict[torch.device, torch.Tensor]) -> float:
    return sum(flag.item() for flag in flags.values())
