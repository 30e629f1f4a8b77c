"""Repeatable uses of the AMP API, each a function: steps, regions, getters, recipes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from ..measure.onednn import runs_lstm


class _Doubled(torch.autograd.Function):
    """Twice its input; saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Uses:
    """The uses by name, on one device and in regions of one type; all share two weights, a scaler and a module each."""

    def __init__(self, device: torch.device, amp_dtype: torch.dtype) -> None:
        self.device, self.kind = device, device.type
        self._dtype = amp_dtype
        self.x = torch.ones(2, 4, device=device)
        self.weights = [torch.ones(4, 4, device=device).requires_grad_() for _ in range(2)]
        self.optimizers = [torch.optim.SGD([weight], lr=0.125) for weight in self.weights]
        self.scaler = torch.amp.GradScaler(self.kind, init_scale=1024.0)
        self._off = torch.amp.GradScaler(self.kind, enabled=False)
        self._modules = [nn.ConvTranspose1d(4, 4, 1).to(device), nn.MultiheadAttention(4, 2).to(device)]
        self._modules.append(self._recurrent())
        self._decorated = self._region()(nn.functional.linear)

    def held(self) -> list[torch.Tensor]:
        """Return the tensors that live throughout."""
        return [self.x, *self.weights, *(p for module in self._modules for p in module.parameters())]

    def all(self) -> dict[str, Callable[[], object]]:
        """Return every use by name."""
        names = [name for name in vars(type(self)) if name.startswith("use_")]
        return {name.removeprefix("use_").replace("_", "-"): getattr(self, name) for name in names}

    def _region(self, **options: Any) -> torch.autocast:
        return torch.autocast(self.kind, dtype=self._dtype, **options)

    def _recurrent(self) -> nn.Module:
        """Return an LSTM; a GRU where the processor's oneDNN has no LSTM in the type of the region (AMP-CAST-065)."""
        kind = nn.LSTM if runs_lstm(self.kind, self._dtype) else nn.GRU
        return kind(4, 4).to(self.device)

    def _loss(self, number: int = 0) -> torch.Tensor:
        with self._region():
            return nn.functional.linear(self.x, self.weights[number]).float().sum()

    def _forget(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def use_step(self) -> None:
        self.scaler.scale(self._loss()).backward()
        self.scaler.step(self.optimizers[0])
        self.scaler.update()
        self._forget()

    def use_step_that_overflows(self) -> None:
        self.scaler.scale(self._loss() * float("inf")).backward()
        self.scaler.step(self.optimizers[0])
        self.scaler.update(1024.0)
        self._forget()

    def use_growth(self) -> None:
        scaler = torch.amp.GradScaler(self.kind, init_scale=2.0, growth_interval=1)
        for _ in range(2):
            scaler.scale(self._loss()).backward()
            scaler.step(self.optimizers[0])
            scaler.update()
            self._forget()

    def use_clipping(self) -> None:
        self.scaler.scale(self._loss()).backward()
        self.scaler.unscale_(self.optimizers[0])
        nn.utils.clip_grad_norm_(self.weights[:1], 1.0)
        nn.utils.clip_grad_value_(self.weights[:1], 1.0)
        self.scaler.step(self.optimizers[0])
        self.scaler.update()
        self._forget()

    def use_two_optimizers_and_a_list_of_losses(self) -> None:
        first, second = self.scaler.scale([self._loss(0), self._loss(1)])
        first.backward()
        second.backward()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self._forget()

    def use_two_losses_added_up(self) -> None:
        for _ in range(2):
            self.scaler.scale(self._loss()).backward()
        self.scaler.step(self.optimizers[0])
        self.scaler.update()
        self._forget()

    def use_disabled_scaler(self) -> None:
        self._off.scale(self._loss()).backward()
        self._off.unscale_(self.optimizers[0])
        self._off.step(self.optimizers[0])
        self._off.update()
        self._off.get_scale()
        self._off.state_dict()
        self._forget()

    def use_new_scaler(self) -> None:
        torch.amp.GradScaler(self.kind).scale(self.x.sum())

    def use_checkpoint_of_the_scaler(self) -> None:
        torch.amp.GradScaler(self.kind).load_state_dict(self.scaler.state_dict())

    def use_get_scale(self) -> None:
        self.scaler.get_scale()

    def use_settings(self) -> None:
        self.scaler.set_growth_factor(2.0 * self.scaler.get_growth_factor() / 2.0)
        self.scaler.set_backoff_factor(self.scaler.get_backoff_factor())
        self.scaler.set_growth_interval(self.scaler.get_growth_interval())
        self.scaler.is_enabled()

    def use_nested_regions(self) -> None:
        with self._region():
            with self._region(enabled=False):
                nn.functional.linear(self.x, self.weights[0])
            with self._region(cache_enabled=False):
                nn.functional.linear(self.x, self.weights[0])

    def use_region_left_by_an_error(self) -> None:
        try:
            with self._region():
                nn.functional.linear(self.x, self.weights[0])
                raise KeyError
        except KeyError:
            pass

    def use_decorator(self) -> None:
        self._decorated(self.x.clone(), self.weights[0])

    def use_evaluation(self) -> None:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), self._region():
                nn.functional.linear(self.x, self.weights[0])

    def use_modules(self) -> None:
        self._run_modules(self._region())

    def modules_without_amp(self) -> None:
        """Compute what `use_modules` does, without a region."""
        self._run_modules(contextlib.nullcontext())

    def _run_modules(self, region: contextlib.AbstractContextManager[object]) -> None:
        with region:
            convolution, attention, recurrent = self._modules
            convolution(self.x.t().unsqueeze(0)).float().sum().backward()
            attention(self.x, self.x, self.x)[0].float().sum().backward()
            recurrent(self.x.unsqueeze(1))[0].float().sum().backward()
        for module in self._modules:
            module.zero_grad(set_to_none=True)

    def use_custom_function(self) -> None:
        function = self.doubled()
        with self._region():
            function.apply(self.weights[0]).sum().backward()
        self._forget()

    def doubled(self) -> Any:
        """Return a custom function that saves nothing, with AMP's decorators; it casts its input to fp32."""
        forward = torch.amp.custom_fwd(_Doubled.forward, device_type=self.kind, cast_inputs=torch.float32)
        backward = torch.amp.custom_bwd(_Doubled.backward, device_type=self.kind)
        return type("Function", (torch.autograd.Function,), {"forward": forward, "backward": backward})

    def use_checkpointed_segment(self) -> None:
        with self._region():
            segment = torch.utils.checkpoint.checkpoint
            result = segment(nn.functional.linear, self.x, self.weights[0], use_reentrant=False)
        result.float().sum().backward()
        self._forget()
