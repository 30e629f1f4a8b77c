"""A plain-Python model of torch.amp.GradScaler, with the arithmetic of its kernels done exactly.

Python's floats are IEEE doubles, so the product of two fp32 numbers is exact in them and one rounding gives
the correctly rounded fp32 product. Nothing here calls torch, so the model cannot share its faults.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..oracles.numbers.binary import BF16, FP16, FP32, FP64, Format


def rounded(value: float, form: Format) -> float:
    """Return `value` rounded to `form`, to nearest with ties to even, overflowing to infinity (IEEE 754)."""
    return form.nearest(value)


def reciprocal(scale: float) -> float:
    """Return 1/`scale` computed in fp64 and rounded to fp32, the factor that unscales (GradScaler.unscale_)."""
    if scale == 0.0:
        return math.copysign(math.inf, scale)
    return rounded(1.0 / scale, FP32)


@dataclass(frozen=True)
class Gradient:
    """The numbers of one gradient, in the order of its elements, and the format they are kept in."""

    values: tuple[float, ...]
    form: Format = FP32


def unscaled(gradient: Gradient, factor: float) -> Gradient:
    """Return `gradient` times `factor`, computed in fp32 (in fp64 for fp64) and rounded to its own format.

    Source: the _amp_foreach_non_finite_check_and_unscale_ kernels, which work in the gradient's opmath type.
    """
    if factor == 1.0:
        return gradient
    arithmetic = FP64 if gradient.form is FP64 else FP32
    products = (rounded(value * factor, arithmetic) for value in gradient.values)
    return Gradient(tuple(rounded(product, gradient.form) for product in products), gradient.form)


def divided(gradient: Gradient, scale: float) -> Gradient:
    """Return `gradient` over `scale`, not zero, in fp32 (in fp64 for fp64) and rounded to its own format.

    Source: GradScaler.unscale_ docstring (divides by the scale factor), which torch does by a rounded reciprocal.
    """
    arithmetic = FP64 if gradient.form is FP64 else FP32
    quotients = (rounded(value / scale, arithmetic) for value in gradient.values)
    return Gradient(tuple(rounded(quotient, gradient.form) for quotient in quotients), gradient.form)


def unscalings(gradient: Gradient, scale: float) -> list[Gradient]:
    """Return what unscaling by `scale` may make of `gradient`: torch's product, and the quotient if there is one."""
    product = unscaled(gradient, reciprocal(scale))
    return [product, divided(gradient, scale)] if scale else [product]


def check_and_unscale(gradients: Sequence[Gradient], found_inf: float, factor: float) -> tuple[list[Gradient], float]:
    """Model torch._amp_foreach_non_finite_check_and_unscale_: the new gradients and the new flag.

    The flag becomes 1.0 if a *scaled* number is inf or NaN, and is never cleared.
    """
    finite = all(math.isfinite(value) for gradient in gradients for value in gradient.values)
    return [unscaled(gradient, factor) for gradient in gradients], found_inf if finite else 1.0


def update_scale(
    scale: float, tracker: int, found_inf: float, growth_factor: float, backoff_factor: float, interval: int
) -> tuple[float, int]:
    """Model torch._amp_update_scale_: the new scale and the new growth tracker.

    The factors are doubles, so the product is rounded to fp64 and then to fp32. A growth beyond the range of
    fp32 keeps the scale and resets the count.
    """
    if found_inf:
        return rounded(scale * backoff_factor, FP32), 0
    if tracker + 1 != interval:
        return scale, tracker + 1
    grown = rounded(scale * growth_factor, FP32)
    return (grown if math.isfinite(grown) else scale), 0


@dataclass(frozen=True)
class Output:
    """A 1-element output of a loss: the number, its format, and the number of dimensions of the tensor."""

    value: float
    form: Format = FP32
    dimensions: int = 0

    def scaled(self, scale: float) -> Output:
        """Return the output times `scale`; a 0-dim one in at least fp32.

        Source: type promotion, in which a tensor with dimensions has priority over the 0-dim scale.
        """
        narrow = self.form in (FP16, BF16)
        result = FP32 if narrow and self.dimensions == 0 else self.form
        product = rounded(self.value * scale, FP64 if self.form is FP64 else FP32)
        return Output(rounded(product, result), result, self.dimensions)


@dataclass(frozen=True)
class NewScale:
    """A tensor for update(): its numbers, and whether it is valid as a scale."""

    values: tuple[float, ...]
    requires_grad: bool = False
    elsewhere: bool = False  # on a device type other than the scaler's

    @property
    def valid(self) -> bool:
        """Whether it has one element, requires no gradient and is on the scaler's device type."""
        return len(self.values) == 1 and not self.requires_grad and not self.elsewhere


class Stage(Enum):
    """The stage of an optimizer since the last update()."""

    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


@dataclass
class _Progress:
    stage: Stage = Stage.READY
    found_inf: bool | None = None  # None: no check has been recorded


@dataclass(frozen=True)
class Step:
    """The effect of GradScaler.step(): whether the optimizer ran, and its gradients.

    `received` is the scale (None after unscale_) and the flag of a self-scaling optimizer.
    """

    ran: bool
    gradients: list[Gradient]
    received: tuple[float | None, float] | None = None


@dataclass
class GradScalerModel:
    """The state machine of torch.amp.GradScaler, over gradients that its methods take and return.

    An optimizer is any hashable name. Methods have the names of GradScaler's and raise the types of exception
    that it documents or asserts. Source: the docstrings of torch.amp.GradScaler.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    _scale: float | None = field(default=None, init=False)
    _tracker: int = field(default=0, init=False)
    _progress: dict[Hashable, _Progress] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.enabled and self.growth_factor <= 1.0:
            raise AssertionError("the growth factor must be above 1")
        if self.enabled and self.backoff_factor >= 1.0:
            raise AssertionError("the backoff factor must be below 1")

    @property
    def started(self) -> bool:
        """Whether scale() has been called, which creates GradScaler's scale tensor."""
        return self._scale is not None

    def get_scale(self) -> float:
        """Return the current scale; 1.0 if disabled."""
        if not self.enabled:
            return 1.0
        return self.init_scale if self._scale is None else self._scale

    def get_growth_tracker(self) -> int:
        """Return the number of clean iterations since the scale last changed or an iteration was skipped."""
        return self._tracker if self.enabled else 0

    @property
    def within_iteration(self) -> bool:
        """Whether an optimizer has been used since the last update()."""
        return bool(self._progress)

    def stage(self, optimizer: Hashable) -> Stage:
        """Return the stage of the optimizer in this iteration."""
        return self._progress.get(optimizer, _Progress()).stage

    def found_inf(self, optimizer: Hashable) -> bool | None:
        """Return whether an inf or NaN was found among the optimizer's gradients; None if none was checked."""
        return self._progress.get(optimizer, _Progress()).found_inf

    def scale(self, outputs: Any) -> Any:
        """Multiply outputs, or fp32 losses as floats, in lists and tuples of any depth; ValueError for others."""
        if not self.enabled:
            return outputs
        if isinstance(outputs, (float, Output)):
            if self._scale is None:
                self._scale = rounded(self.init_scale, FP32)
            if isinstance(outputs, float):
                return rounded(outputs * self._scale, FP32)
            return outputs.scaled(self._scale)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(output) for output in outputs)
        raise ValueError("outputs must be numbers, or lists or tuples of them")

    def unscale_(self, optimizer: Hashable, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Check and unscale the optimizer's gradients, in the order of its parameters."""
        if not self.enabled:
            return list(gradients)
        scale = self._require_scale()
        progress = self._progress.setdefault(optimizer, _Progress())
        if progress.stage is Stage.UNSCALED:
            raise RuntimeError("unscale_() has already been called since the last update()")
        if progress.stage is Stage.STEPPED:
            raise RuntimeError("unscale_() is being called after step()")
        if any(gradient.form is FP16 for gradient in gradients):
            raise ValueError("fp16 gradients cannot be unscaled")
        result, found_inf = check_and_unscale(gradients, 0.0, reciprocal(scale))
        progress.found_inf = bool(found_inf) if gradients else None
        progress.stage = Stage.UNSCALED
        return result

    def step(
        self,
        optimizer: Hashable,
        gradients: Sequence[Gradient],
        *,
        unscales: bool = False,
        closure: bool = False,
        preset: float = 1.0,
    ) -> Step:
        """Unscale if unscale_ was not called, then run the optimizer unless a gradient was inf or NaN.

        A self-scaling optimizer (`unscales`) always runs, and receives the scale times the `preset` grad_scale, and the
        flag. Raises RuntimeError for a `closure`.
        """
        if not self.enabled:
            return Step(True, list(gradients))
        if closure:
            raise RuntimeError("closures are not supported")
        scale = self._require_scale()
        progress = self._progress.setdefault(optimizer, _Progress())
        if progress.stage is Stage.STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        if unscales:
            return self._self_scaling_step(progress, gradients, rounded(scale * preset, FP32))
        result = list(gradients)
        if progress.stage is Stage.READY:
            result = self.unscale_(optimizer, gradients)
        if progress.found_inf is None:
            raise AssertionError("no inf checks were recorded for this optimizer")
        progress.stage = Stage.STEPPED
        return Step(not progress.found_inf, result)

    @staticmethod
    def _self_scaling_step(progress: _Progress, gradients: Sequence[Gradient], scale: float) -> Step:
        received_scale = None if progress.stage is Stage.UNSCALED else scale
        if progress.stage is Stage.READY:
            # A factor of 1 checks without changing anything, so fp16 gradients are accepted here.
            progress.found_inf = bool(check_and_unscale(gradients, 0.0, 1.0)[1]) if gradients else None
        progress.stage = Stage.STEPPED
        return Step(True, list(gradients), (received_scale, float(bool(progress.found_inf))))

    def update(self, new_scale: float | NewScale | None = None) -> None:
        """End the iteration: set the scale, or back off, count or grow by what the checks found.

        Raises AssertionError for a tensor that cannot be a scale, and if nothing was checked.
        """
        if not self.enabled:
            return
        scale = self._require_scale()
        if isinstance(new_scale, NewScale):
            if not new_scale.valid:
                raise AssertionError("the new scale must be one number, without gradient, on the scaler's device")
            self._scale = rounded(new_scale.values[0], FP32)
        elif new_scale is not None:
            self._scale = rounded(new_scale, FP32)
        else:
            found = [progress.found_inf for progress in self._progress.values() if progress.found_inf is not None]
            if not found:
                raise AssertionError("no inf checks were recorded prior to update")
            self._scale, self._tracker = update_scale(
                scale,
                self._tracker,
                float(sum(found)),
                self.growth_factor,
                self.backoff_factor,
                self.growth_interval,
            )
        self._progress.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the five entries of GradScaler.state_dict(); empty if disabled."""
        if not self.enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._tracker,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; raise RuntimeError for an empty one; do nothing if disabled."""
        if not self.enabled:
            return
        if not state:
            raise RuntimeError("the state dict is empty")
        self.init_scale = state["scale"]
        if self._scale is not None:
            self._scale = rounded(state["scale"], FP32)
        self.growth_factor = state["growth_factor"]
        self.backoff_factor = state["backoff_factor"]
        self.growth_interval = state["growth_interval"]
        self._tracker = state["_growth_tracker"]

    def copy(self) -> GradScalerModel:
        """Return an unstarted scaler of the same state, as pickling and copying do; AssertionError mid-iteration."""
        if self._progress:
            raise AssertionError("a GradScaler may only be pickled between iterations")
        twin = GradScalerModel(
            self.get_scale(), self.growth_factor, self.backoff_factor, self.growth_interval, self.enabled
        )
        twin._tracker = self._tracker
        return twin

    def _require_scale(self) -> float:
        if self._scale is None:
            raise AssertionError("scale() has not been called")
        return self._scale
