"""A clean loss scaler of another maker, written from GradScaler's documentation, with private names of its own."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from typing_extensions import deprecated


class _Progress:
    """What happened to one optimizer since the last update()."""

    def __init__(self) -> None:
        self.unscaled = self.stepped = False
        self.overflows: dict[torch.device, torch.Tensor] = {}


class GradScaler:
    """The scaler; it unscales one gradient after the other."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self.kind, self.on = device, enabled
        if enabled and device == "cuda" and not torch.cuda.is_available():
            warnings.warn("GradScaler is enabled, but CUDA is not available: it is disabled.", stacklevel=2)
            self.on = False
        assert not self.on or growth_factor > 1.0, "The growth factor must be > 1.0."
        assert not self.on or backoff_factor < 1.0, "The backoff factor must be < 1.0."
        self.factors = [growth_factor, backoff_factor]
        self.interval = growth_interval
        self.numbers: tuple[float, int] = (init_scale, 0)
        self.tensors: tuple[torch.Tensor, torch.Tensor] | None = None
        self.progress: dict[int, _Progress] = {}

    def scale(self, outputs: Any) -> Any:
        if not self.on:
            return outputs
        return self._scaled(outputs, {})

    def _scaled(self, outputs: Any, copies: dict[torch.device, torch.Tensor]) -> Any:
        if isinstance(outputs, torch.Tensor):
            if self.tensors is None:
                self.tensors = (
                    torch.full((), self.numbers[0], dtype=torch.float32, device=outputs.device),
                    torch.full((), self.numbers[1], dtype=torch.int32, device=outputs.device),
                )
            if outputs.device not in copies:
                copies[outputs.device] = self.tensors[0].to(outputs.device, non_blocking=True)
            return outputs * copies[outputs.device]
        if isinstance(outputs, Iterable):
            results = (self._scaled(one, copies) for one in outputs)
            return type(outputs)(results) if isinstance(outputs, (list, tuple)) else results
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    def _started(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.tensors is not None, f"{name} needs a scale: call scaler.scale(loss) earlier in the iteration."
        return self.tensors

    def _examine(self, optimizer: Any, factor: torch.Tensor, narrow: bool) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients by the factor, one by one; return a flag for each device."""
        flags: dict[torch.device, torch.Tensor] = {}
        factors: dict[torch.device, torch.Tensor] = {}
        with torch.no_grad():
            for parameter in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
                assert isinstance(parameter, torch.Tensor), f"a parameter is a {type(parameter).__name__}, no Tensor"
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.dtype is torch.float16 and not narrow:
                    raise ValueError("Attempting to unscale FP16 gradients.")
                if gradient.is_sparse:
                    if gradient.dtype is torch.float16:
                        parameter.grad = gradient = gradient.coalesce()
                    gradient = gradient._values()
                where = gradient.device
                if where not in flags:
                    flags[where] = torch.zeros((), dtype=torch.float32, device=where)
                    factors[where] = factor.to(where, non_blocking=True)
                torch._amp_foreach_non_finite_check_and_unscale_([gradient], flags[where], factors[where])
        return flags

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.on:
            return
        scale, _ = self._started("unscale_")
        progress = self.progress.setdefault(id(optimizer), _Progress())
        if progress.unscaled and not progress.stepped:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if progress.stepped:
            raise RuntimeError("unscale_() is being called after step().")
        wide = torch.float32 if scale.device.type == "mps" else torch.float64
        progress.overflows = self._examine(optimizer, scale.to(wide).reciprocal().float(), narrow=False)
        progress.unscaled = True

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if not self.on:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scale, _ = self._started("step")
        progress = self.progress.setdefault(id(optimizer), _Progress())
        if progress.stepped:
            raise RuntimeError("step() has already been called since the last update().")
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            result = self._self_scaling_step(optimizer, progress, scale, args, kwargs)
        else:
            if not progress.unscaled:
                self.unscale_(optimizer)
            assert progress.overflows, "No inf checks were recorded for this optimizer."
            overflow = sum(flag.item() for flag in progress.overflows.values())
            result = None if overflow else optimizer.step(*args, **kwargs)
        progress.stepped = True
        return result

    def _self_scaling_step(
        self, optimizer: Any, progress: _Progress, scale: torch.Tensor, args: Any, kwargs: Any
    ) -> float | None:
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            warnings.warn("step(grad_scaler) is going away: read grad_scale and found_inf", FutureWarning, stacklevel=3)
            return optimizer.step(*args, grad_scaler=self, **kwargs)
        if not progress.unscaled:
            progress.overflows = self._examine(optimizer, torch.ones_like(scale), narrow=True)
        preset = getattr(optimizer, "grad_scale", None)
        optimizer.grad_scale = preset if progress.unscaled else scale * (1 if preset is None else preset)
        optimizer.found_inf = sum(flag.to(scale.device) for flag in progress.overflows.values())
        result: float | None = optimizer.step(*args, **kwargs)
        del optimizer.grad_scale, optimizer.found_inf
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if not self.on:
            return
        scale, count = self._started("update")
        if isinstance(new_scale, torch.Tensor):
            fits = new_scale.device.type == self.kind and new_scale.numel() == 1 and not new_scale.requires_grad
            assert fits, "new_scale should be a float or a 1-element tensor on the scaler's device without gradient."
            scale.copy_(new_scale.reshape(()))
        elif new_scale is not None:
            scale.fill_(new_scale)
        else:
            found = [flag for one in self.progress.values() for flag in one.overflows.values()]
            assert found, "No inf checks were recorded prior to update."
            flags = [flag.to(scale.device, non_blocking=True) for flag in found]
            overflow = sum(flags[1:], flags[0])
            torch._amp_update_scale_(scale, count, overflow, *self.factors, self.interval)
        self.progress = {}

    def get_scale(self) -> float:
        if not self.on:
            return 1.0
        return self.numbers[0] if self.tensors is None else float(self.tensors[0].item())

    def _count(self) -> int:
        return self.numbers[1] if self.tensors is None else int(self.tensors[1].item())

    def get_growth_factor(self) -> float:
        return self.factors[0]

    def set_growth_factor(self, new_factor: float) -> None:
        self.factors[0] = new_factor

    def get_backoff_factor(self) -> float:
        return self.factors[1]

    def set_backoff_factor(self, new_factor: float) -> None:
        self.factors[1] = new_factor

    def get_growth_interval(self) -> int:
        return self.interval

    def set_growth_interval(self, new_interval: int) -> None:
        self.interval = new_interval

    def is_enabled(self) -> bool:
        return self.on

    def state_dict(self) -> dict[str, Any]:
        if not self.on:
            return {}
        growth, backoff = self.factors
        return {
            "scale": self.get_scale(), "growth_factor": growth, "backoff_factor": backoff,
            "growth_interval": self.interval, "_growth_tracker": self._count(),
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.on:
            return
        if not state_dict:
            raise RuntimeError("The source state dict is empty, possibly that of a disabled GradScaler.")
        numbers = state_dict["scale"], state_dict["_growth_tracker"]
        factors, interval = [state_dict["growth_factor"], state_dict["backoff_factor"]], state_dict["growth_interval"]
        for tensor, number in zip(self.tensors or (), numbers, strict=False):
            tensor.fill_(number)
        self.numbers, self.factors, self.interval = numbers, factors, interval

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self.on:
            assert not self.progress, "A GradScaler may only be pickled between iterations: after update()."
            state.update(numbers=(self.get_scale(), self._count()), tensors=None, factors=[*self.factors])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def old_spelling(kind: str) -> type[GradScaler]:
    """Return the deprecated class of torch.cuda.amp or torch.cpu.amp."""

    class Old(GradScaler):
        @deprecated(
            f"torch.{kind}.amp.GradScaler(args...) is deprecated: use torch.amp.GradScaler('{kind}', args...)",
            category=FutureWarning,
        )
        def __init__(
            self,
            init_scale: float = 2.0**16,
            growth_factor: float = 2.0,
            backoff_factor: float = 0.5,
            growth_interval: int = 2000,
            enabled: bool = True,
        ) -> None:
            super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    Old.__name__ = Old.__qualname__ = "GradScaler"
    Old.__module__ = f"torch.{kind}.amp.grad_scaler"
    return Old
