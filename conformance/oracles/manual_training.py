"""Mixed precision training written out: casts, loss scale, check, unscaling and skipping, without torch.amp."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from ..measure.pending import run_pending
from .manual_cast import ManualCast

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class HandScale:
    """A loss scale kept by hand: a power of two, so that scaling and unscaling float32 numbers is exact.

    Defaults and rules are those of the torch.amp.GradScaler docstring. None as the scale means no scaling.
    """

    scale: float | None = 65536.0
    growth_interval: int = 2000
    clean: int = 0
    skipped: list[bool] = field(default_factory=list)

    def update(self, finite: bool) -> None:
        """Halve after an overflow; double after `growth_interval` steps without one."""
        self.skipped.append(not finite)
        if self.scale is None:
            return
        self.clean = self.clean + 1 if finite else 0
        if not finite:
            self.scale *= 0.5
        elif self.clean == self.growth_interval:
            self.scale, self.clean = self.scale * 2.0, 0


def forward_by_hand(model: torch.nn.Sequential, inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Run Linear layers in `dtype` on casts of their float32 parameters, everything else in what it is given.

    `inputs` is (rows, features), the result (rows, outputs) in `dtype`.
    """
    hidden = inputs
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            hidden = functional.linear(hidden.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))
        else:
            hidden = layer(hidden)
    return hidden


def step_by_hand(
    model: torch.nn.Sequential,
    optimizer: torch.optim.Optimizer,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    batch: Batch,
    dtype: torch.dtype,
    scale: HandScale,
    clip: float | None = None,
) -> torch.Tensor:
    """One training step; `loss_function` is given 16-bit outputs. Returns the detached float32 loss."""
    inputs, target = batch
    optimizer.zero_grad()
    loss = loss_function(forward_by_hand(model, inputs, dtype), target)
    factor = scale.scale
    (loss if factor is None else loss * factor).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    finite = factor is None or _finite(gradients)
    if factor is not None:
        for gradient in gradients:
            gradient.mul_(1.0 / factor)
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    if finite:
        optimizer.step()
    scale.update(finite)
    run_pending(loss.device.type)
    return loss.detach()


def _finite(gradients: list[torch.Tensor]) -> bool:
    for device_type in {gradient.device.type for gradient in gradients}:
        run_pending(device_type)
    return all(bool(gradient.isfinite().all()) for gradient in gradients)


def train_by_hand(
    model: torch.nn.Sequential,
    optimizer: torch.optim.Optimizer,
    loss_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    batches: Iterable[Batch],
    dtype: torch.dtype,
    scale: HandScale,
    clip: float | None = None,
) -> list[float]:
    """A step for every batch; the losses."""
    return [step_by_hand(model, optimizer, loss_function, batch, dtype, scale, clip).item() for batch in batches]


class HandScaler:
    """A loss scaler by hand, with the names of torch.amp.GradScaler and none of its code.

    Several optimizers may share it; each decides for itself whether to skip, and any overflow halves the scale.
    """

    def __init__(self, init_scale: float, growth_interval: int) -> None:
        self.rule = HandScale(scale=init_scale, growth_interval=growth_interval)
        self._finite: dict[int, bool] = {}

    def get_scale(self) -> float:
        assert self.rule.scale is not None
        return self.rule.scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.get_scale()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._finite[id(optimizer)] = _finite(gradients)
        for gradient in gradients:
            gradient.mul_(1.0 / self.get_scale())

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in self._finite:
            self.unscale_(optimizer)
        if self._finite[id(optimizer)]:
            optimizer.step()

    def update(self) -> None:
        self.rule.update(all(self._finite.values()))
        self._finite.clear()


class ManualAmp:
    """Mixed precision with every cast and every scaling written out: what recipes are compared with."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._casts = ManualCast(device_type)

    def region(self, dtype: torch.dtype | None = None, *, enabled: bool = True) -> AbstractContextManager[None]:
        """Manual casts to `dtype`, or to that of the program."""
        return self._casts.region((dtype or self.dtype) if enabled else None)

    def scaler(self, init_scale: float, growth_interval: int = 2000) -> HandScaler:
        """A scaler by hand."""
        return HandScaler(init_scale, growth_interval)

    def product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The matrix product in the region around it."""
        return torch.mm(left, right)

    def cube(self, x: torch.Tensor) -> torch.Tensor:
        """The cube in float32, its derivative written out so that it rounds as a custom function's does."""
        single = x.float()
        return Cube.apply(single)


class Cube(torch.autograd.Function):
    """The cube of a tensor of any shape, with a gradient that can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


class Float32(ManualAmp):
    """The same programs in float32 throughout: no casts, and a scale of one that nothing changes."""

    def region(self, dtype: torch.dtype | None = None, *, enabled: bool = True) -> AbstractContextManager[None]:
        """No region."""
        return contextlib.nullcontext()

    def scaler(self, init_scale: float, growth_interval: int = 2000) -> HandScaler:
        """A scaler that multiplies by one, and skips as one must."""
        return _Unscaled(1.0, growth_interval)


class _Unscaled(HandScaler):
    def update(self) -> None:
        self._finite.clear()
