"""A loss scaler that owes torch's nothing, on a page of plain Python, and ways to break it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch


class PageScaler:
    """The rules of torch.amp.GradScaler's documentation, written down once more: floats, and no tensor of its own."""

    def __init__(
        self, init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int, enabled: bool
    ) -> None:
        self.value, self.count, self.enabled = init_scale, 0, enabled
        self.growth, self.backoff, self.interval = growth_factor, backoff_factor, growth_interval
        self.started = False
        self.found: dict[int, bool | None] = {}  # by optimizer: whether unscale_ has seen an inf or NaN
        self.stepped: set[int] = set()

    def get_scale(self) -> float:
        return self.value if self.enabled else 1.0

    def scale(self, loss: Any) -> Any:
        if not self.enabled:
            return loss
        if not isinstance(loss, torch.Tensor):
            raise ValueError("not a tensor")
        if not self.started:
            self.value, self.started = single(self.value), True
        return loss * torch.tensor(self.value)

    def unscale_(self, optimizer: Any) -> None:
        if not self.enabled:
            return
        assert self.started, "scale() comes first"
        if id(optimizer) in self.found or id(optimizer) in self.stepped:
            raise RuntimeError("unscaled already")
        gradients = list(gradients_of(optimizer))
        if any(gradient.dtype is torch.float16 for gradient in gradients):
            raise ValueError("fp16 gradients")
        bad = any(not gradient.isfinite().all() for gradient in gradients)
        self.found[id(optimizer)] = bad if gradients else None
        for gradient in gradients:
            gradient.mul_(self.factor)

    @property
    def factor(self) -> torch.Tensor:
        return torch.tensor(1 / self.value if self.value else math.inf)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("no closures")
        assert self.started, "scale() comes first"
        if id(optimizer) in self.stepped:
            raise RuntimeError("stepped already")
        if id(optimizer) not in self.found:
            self.unscale_(optimizer)
        assert self.found[id(optimizer)] is not None, "no gradients"
        self.stepped.add(id(optimizer))
        return None if self.found[id(optimizer)] else optimizer.step(*args, **kwargs)

    def update(self) -> None:
        if not self.enabled:
            return
        assert any(bad is not None for bad in self.found.values()), "nothing was checked"
        if any(self.found.values()):
            self.value, self.count = single(self.value * self.backoff), 0
        else:
            self.count += 1
            if self.count == self.interval:
                grown = single(self.value * self.growth)
                self.value, self.count = grown if math.isfinite(grown) else self.value, 0
        self.found.clear()
        self.stepped.clear()


LACKS = ("containers", "getters", "is_enabled", "new_scale", "pickles", "self_scaling", "setters", "sparse", "state")
"""What the scaler on a page leaves out."""


def single(value: float) -> float:
    """Round to fp32."""
    return float(torch.tensor(value, dtype=torch.float64).float())


def gradients_of(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


class KeepsCount(PageScaler):
    """A skip does not start the count of clean iterations again."""

    def update(self) -> None:
        count = self.count
        super().update()
        if self.enabled and self.count == 0 and self.value != single(self.value * self.growth) and count:
            self.count = count if self.skipped else 0

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        answer = super().step(optimizer, *args, **kwargs)
        self.skipped = any(self.found.values())
        return answer


class Floored(PageScaler):
    """The scale never falls below one."""

    def update(self) -> None:
        super().update()
        self.value = max(self.value, 1.0)


class ForgetsOthers(PageScaler):
    """Only the optimizer that stepped last decides on the scale."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        answer = super().step(optimizer, *args, **kwargs)
        for other in set(self.found) - {id(optimizer)} if self.enabled else ():
            self.found[other] = False
        return answer


class SkipsEmpty(PageScaler):
    """The largest element decides, and that of nothing is taken for infinite."""

    def unscale_(self, optimizer: Any) -> None:
        super().unscale_(optimizer)
        if self.enabled and any(gradient.numel() == 0 for gradient in gradients_of(optimizer)):
            self.found[id(optimizer)] = True


class UnscalesAgain(PageScaler):
    """A second unscale_ is refused after it has divided once more."""

    def unscale_(self, optimizer: Any) -> None:
        if self.enabled and id(optimizer) in self.found:
            for gradient in gradients_of(optimizer):
                gradient.mul_(self.factor)
        super().unscale_(optimizer)


class DividesFirst(PageScaler):
    """The gradients before the one in fp16 for which unscale_ raises are divided by then."""

    def refused(self, gradient: torch.Tensor) -> None:
        gradient.mul_(self.factor)

    def unscale_(self, optimizer: Any) -> None:
        try:
            super().unscale_(optimizer)
        except ValueError:
            for gradient in gradients_of(optimizer):
                if gradient.dtype is not torch.float16:
                    self.refused(gradient)
            raise


class ClearsRefused(DividesFirst):
    """The gradients beside the one in fp16 for which unscale_ raises are zero."""

    def refused(self, gradient: torch.Tensor) -> None:
        gradient.zero_()


class ClearsSkipped(PageScaler):
    """A skipped step frees the gradients."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        answer = super().step(optimizer, *args, **kwargs)
        if self.enabled and self.found[id(optimizer)]:
            optimizer.zero_grad()
        return answer


BROKEN: tuple[Callable[..., Any], ...] = (KeepsCount, Floored, ForgetsOthers, SkipsEmpty, UnscalesAgain, ClearsSkipped)
