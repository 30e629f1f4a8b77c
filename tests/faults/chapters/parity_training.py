"""Faults that one step hardly shows, or that only whole models, whole runs or a second run do."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from tests.faults import fault
from tests.faults.breaking import kernel, replaced

LOW = (torch.float16, torch.bfloat16)
# Ops that torch composes of others have the same kernel at every backend, so this one leads past the broken one.
_ELSEWHERE = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)


@contextlib.contextmanager
def _after_step(change: Callable[[Any], object]) -> Iterator[None]:
    """Let scaler.step, scaling or not, do something to the optimizer when it has done."""
    right = torch.amp.GradScaler.step

    def step(self: torch.amp.GradScaler, optimizer: Any, *args: Any, **options: Any) -> Any:
        result = right(self, optimizer, *args, **options)
        change(optimizer)
        return result

    with replaced(torch.amp.GradScaler, "step", step):
        yield


@contextlib.contextmanager
def _before_step(change: Callable[[Any], object]) -> Iterator[None]:
    right = torch.amp.GradScaler.step

    def step(self: torch.amp.GradScaler, optimizer: Any, *args: Any, **options: Any) -> Any:
        change(optimizer)
        return right(self, optimizer, *args, **options)

    with replaced(torch.amp.GradScaler, "step", step):
        yield


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextlib.contextmanager
def _low_mm(change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Change what the CPU kernel of mm, which the gradients of linear are made with, gives for 16-bit operands."""

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        wide = torch.bmm(a.float()[None], b.float()[None])[0]
        return change(wide).to(a.dtype) if a.dtype in LOW else wide.to(a.dtype)

    with kernel("mm", mm, "CPU"):
        yield


# --- weights and optimizers


@fault("AMP-PARITY-004", "AMP-PARITY-013")
def weights_live_in_bf16() -> Iterator[None]:
    """scaler.step leaves weights that bf16 can hold."""

    def narrow(optimizer: Any) -> None:
        for parameter in _parameters(optimizer):
            parameter.data.copy_(parameter.data.bfloat16())

    with _after_step(narrow):
        yield


@fault("AMP-PARITY-013", level="standard")
def weights_of_sgd_live_in_16_bit() -> Iterator[None]:
    """SGD under scaler.step leaves weights that fp16 can hold; Adam does not."""

    def narrow(optimizer: Any) -> None:
        if isinstance(optimizer, torch.optim.SGD):
            for parameter in _parameters(optimizer):
                parameter.data.copy_(parameter.data.half())

    with _after_step(narrow):
        yield


@fault("AMP-PARITY-004")
def optimizer_state_is_16_bit() -> Iterator[None]:
    """scaler.step leaves moments that bf16 can hold."""

    def narrow(optimizer: Any) -> None:
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                if state.get(name) is not None:
                    state[name].copy_(state[name].bfloat16())

    with _after_step(narrow):
        yield


@fault("AMP-PARITY-004")
def bias_correction_is_a_step_ahead() -> Iterator[None]:
    """Adam under scaler.step counts its first step as the second."""

    def ahead(optimizer: Any) -> None:
        for state in optimizer.state.values():
            if "step" in state and float(state["step"]) == 1:
                state["step"] += 1

    with _after_step(ahead):
        yield


@fault("AMP-OPTIMIZER-011", "AMP-OPTIMIZER-022")
def momentum_is_lost_with_a_skipped_step() -> Iterator[None]:
    """A step that is skipped clears the optimizer's state."""
    right = torch.amp.GradScaler._maybe_opt_step

    def maybe(self: torch.amp.GradScaler, optimizer: Any, state: Any, *args: Any, **options: Any) -> Any:
        if any(found.item() for found in state["found_inf_per_device"].values()):
            optimizer.state.clear()
        return right(self, optimizer, state, *args, **options)

    with replaced(torch.amp.GradScaler, "_maybe_opt_step", maybe):
        yield


@fault("AMP-PARITY-010", level="standard")
def momentum_of_sgd_is_small() -> Iterator[None]:
    """SGD under scaler.step forgets 12 % of its momentum each step in place of 10 %."""

    def forget(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            if group.get("momentum") == 0.9:
                group["momentum"] = 0.88

    with _before_step(forget):
        yield


@fault("AMP-PARITY-010", "AMP-PARITY-012", level="standard")
def one_step_in_eight_is_lost() -> Iterator[None]:
    """Every eighth call of scaler.step steps with gradients of zero, and no scale tells."""
    right, calls = torch.amp.GradScaler.step, [0]

    def step(self: torch.amp.GradScaler, optimizer: Any, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] % 8 == 0:
            optimizer.zero_grad(set_to_none=False)
        return right(self, optimizer, *args, **options)

    with replaced(torch.amp.GradScaler, "step", step):
        yield


@fault("AMP-PARITY-003", "AMP-PARITY-004")
def gradients_are_those_of_the_micro_batch_before() -> Iterator[None]:
    """From the second step on, scaler.step uses the gradients of the step before."""
    kept: dict[int, list[torch.Tensor]] = {}

    def swap(optimizer: Any) -> None:
        gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
        fresh = [gradient.clone() for gradient in gradients]
        for gradient, old in zip(gradients, kept.get(id(optimizer), fresh), strict=True):
            gradient.copy_(old)
        kept[id(optimizer)] = fresh

    with _before_step(swap):
        yield


# --- the scaler


@fault("AMP-RECIPE-002")
def unscaled_by_65535() -> Iterator[None]:
    """Gradients are divided by one less than the scale."""
    right = torch._amp_foreach_non_finite_check_and_unscale_

    def unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        right(gradients, found, 1 / (1 / inverse - 1))

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale):
        yield


@fault("AMP-PARITY-008", "AMP-PARITY-016")
def scale_is_infinite_after_each_step() -> Iterator[None]:
    """update() leaves an infinite scale, so that every later step is skipped and nothing is said."""
    right = torch.amp.GradScaler.update

    def update(self: torch.amp.GradScaler, new_scale: Any = None) -> None:
        right(self, new_scale)
        if self.is_enabled():
            self._scale.fill_(math.inf)

    with replaced(torch.amp.GradScaler, "update", update):
        yield


@fault("AMP-PARITY-014", level="standard")
def losses_are_scaled_after_backward() -> Iterator[None]:
    """scale() leaves the loss alone and the gradients are multiplied when they are there: too late for fp16."""
    right = torch._amp_foreach_non_finite_check_and_unscale_

    def unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        for gradient in gradients:
            gradient.div_(inverse)
        right(gradients, found, inverse)

    def scale(self: torch.amp.GradScaler, outputs: torch.Tensor) -> torch.Tensor:
        if self.is_enabled() and self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs

    with (
        replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale),
        replaced(torch.amp.GradScaler, "scale", scale),
    ):
        yield


@fault("AMP-RECIPE-002", "AMP-PARITY-002")
def cached_weights_are_a_step_old() -> Iterator[None]:
    """The weight cache is cleared at the end of every second region only."""
    right, calls = torch.clear_autocast_cache, [0]

    def clear() -> None:
        calls[0] += 1
        if calls[0] % 2 == 0:
            right()

    with replaced(torch, "clear_autocast_cache", clear):
        yield


# --- chance


@fault("AMP-PARITY-016", "AMP-PARITY-017")
def casts_round_at_random() -> Iterator[None]:
    """Casts from fp32 to 16 bit round stochastically."""

    def cast(x: Any, **options: Any) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):  # a Python number in an expression
            return torch.full((), x, dtype=options.get("dtype"), device=options.get("device"))
        copied = torch.ops.aten._to_copy.default.redispatch(_ELSEWHERE, x, **options)
        if x.dtype is not torch.float32 or copied.dtype not in LOW:
            return copied
        spacing = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent) * (torch.finfo(copied.dtype).eps / 2)
        return copied.copy_(x + (torch.rand(x.shape) - 0.5) * spacing)

    with kernel("_to_copy", cast, "CPU"):
        yield


@fault("AMP-PARITY-016")
def products_have_a_random_last_bit() -> Iterator[None]:
    """The 16-bit product mm is a unit in the last place off in one element of a thousand, another one each time."""
    generator = torch.Generator().manual_seed(0)

    def spoil(wide: torch.Tensor) -> torch.Tensor:
        hit = torch.rand(wide.shape, generator=generator) < 1e-3
        return torch.where(hit, wide * (1 + 2.0**-8), wide)

    with _low_mm(spoil):
        yield


@fault("AMP-PARITY-017")
def dropout_draws_again_under_autocast() -> Iterator[None]:
    """dropout under autocast draws a number before its mask."""
    right = F.dropout

    def dropout(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            torch.rand(())
        return right(x, *args, **options)

    with replaced(F, "dropout", dropout):
        yield


# --- models


@fault("AMP-PARITY-018")
def backward_of_linear_shrinks_by_a_hundredth() -> Iterator[None]:
    """The 16-bit product mm, which the gradients of linear are made with, is 1 % too small."""
    with _low_mm(lambda wide: wide * 0.99):
        yield


def _attention(change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    right = F.scaled_dot_product_attention

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        if query.dtype in LOW:
            change(options)
        return right(query, key, value, **options)

    with replaced(F, "scaled_dot_product_attention", attention):
        yield


@fault("AMP-PARITY-018")
def attention_is_not_scaled() -> Iterator[None]:
    """scaled_dot_product_attention of 16-bit operands leaves out the division by sqrt(d)."""
    yield from _attention(lambda options: options.update(scale=1.0))


@fault("AMP-PARITY-018")
def attention_sees_the_future() -> Iterator[None]:
    """scaled_dot_product_attention of 16-bit operands forgets that it is causal."""
    yield from _attention(lambda options: options.update(is_causal=False))


@fault("AMP-PARITY-018")
def gradients_of_convolutions_miss_an_image() -> Iterator[None]:
    """conv2d under autocast leaves the last image of a batch out of the gradient of its weight."""
    right = F.conv2d

    def conv2d(x: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not torch.is_autocast_enabled("cpu") or len(x) < 2:
            return right(x, weight, *args, **options)
        parts = right(x[:-1], weight, *args, **options), right(x[-1:], weight.detach(), *args, **options)
        return torch.cat(parts)

    with replaced(F, "conv2d", conv2d):
        yield


@fault("AMP-PARITY-018")
def transformers_run_in_fp32() -> Iterator[None]:
    """linear under autocast leaves its operands in fp32."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.ops.aten.linear(x.float(), weight, bias)

    with kernel("linear", linear, "AutocastCPU"):
        yield


@fault("AMP-PARITY-018")
def gates_of_an_lstm_are_summed_in_16_bit() -> Iterator[None]:
    """torch.nn.LSTM in 16 bit adds the products of its gates one by one in 16 bit."""
    right = torch.nn.LSTM.forward

    def summed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x), len(weight), dtype=x.dtype)
        for k in range(x.shape[1]):
            total = total + x[:, k : k + 1] * weight[:, k]
        return total

    def forward(self: torch.nn.LSTM, rows: torch.Tensor, state: Any = None) -> Any:
        if not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") != torch.bfloat16:
            return right(self, rows, state)
        inward, onward, *biases = (p.bfloat16() for p in self._flat_weights)
        hidden = torch.zeros(len(rows), self.hidden_size, dtype=torch.bfloat16)
        cell, states = hidden.float(), []
        for row in rows.bfloat16().unbind(1):
            gates = summed(row, inward) + summed(hidden, onward) + sum(biases)
            entry, forget, change, exit_ = gates.float().chunk(4, 1)
            cell = forget.sigmoid() * cell + entry.sigmoid() * change.tanh()
            hidden = (exit_.sigmoid() * cell.tanh()).bfloat16()
            states.append(hidden)
        return torch.stack(states, 1), None

    with replaced(torch.nn.LSTM, "forward", forward):
        yield


# --- runs


@fault("AMP-PARITY-015", level="standard")
def losses_are_computed_in_bf16() -> Iterator[None]:
    """cross_entropy of 16-bit logits is computed op by op in bf16 and given in fp32."""
    right = F.cross_entropy

    def cross_entropy(output: torch.Tensor, target: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if output.dtype not in LOW or output.dim() != 2 or target.is_floating_point() or args or options:
            return right(output, target, *args, **options)
        logits = output.bfloat16()
        with torch.autocast("cpu", enabled=False):
            return (logits.logsumexp(1) - logits.gather(1, target.unsqueeze(1)).squeeze(1)).mean().float()

    with replaced(F, "cross_entropy", cross_entropy):
        yield


@fault("AMP-PARITY-011", level="standard")
def fp32_does_not_train() -> Iterator[None]:
    """The fp32 product mm, which the gradients of linear are made with, gives noise: the device itself is broken."""

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        wide = torch.bmm(a.float()[None], b.float()[None])[0]
        noise = torch.sin(torch.arange(wide.numel(), dtype=torch.float32)).view_as(wide) * wide.abs().mean()
        return wide.to(a.dtype) if a.dtype in LOW or wide.numel() < 1000 else noise

    with kernel("mm", mm, "CPU"):
        yield
