"""Faults that make AMP cost more than it must."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from conformance.measure.onednn import runs_lstm
from tests.faults import fault
from tests.faults.breaking import dropped, kernel, replaced


@fault("AMP-SPEED-009")
def scale_reads_the_loss() -> Iterator[None]:
    """scale looks at the loss on the host before it multiplies."""
    right = torch.amp.GradScaler.scale

    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        if outputs.item() != outputs.item():
            return outputs
        return right(self, outputs)

    with replaced(torch.amp.GradScaler, "scale", scale):
        yield


@fault("AMP-SPEED-009")
def update_reads_the_scale() -> Iterator[None]:
    """update reads the scale back to check it."""
    right = torch.amp.GradScaler.update

    def update(self: torch.amp.GradScaler, new_scale: Any = None) -> None:
        right(self, new_scale)
        self.get_scale()

    with replaced(torch.amp.GradScaler, "update", update):
        yield


@fault("AMP-SPEED-009")
def unscale_reads_what_it_found() -> Iterator[None]:
    """unscale_ reads found_inf on the host."""
    right = torch._amp_foreach_non_finite_check_and_unscale_

    def unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        right(gradients, found, inverse)
        found.item()

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale):
        yield


@fault("AMP-SPEED-008")
def every_use_casts_the_weight() -> Iterator[None]:
    """Every region runs without the weight cache."""
    right = torch.set_autocast_cache_enabled
    with replaced(torch, "set_autocast_cache_enabled", lambda enabled: right(False)):
        yield


def _linear(work: Callable[..., torch.Tensor]) -> Iterator[None]:
    def wrapped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            return work(dtype, x, weight, bias)

    with kernel("linear", wrapped, "AutocastCPU"):
        yield


@fault("AMP-SPEED-008")
def linear_casts_there_and_back() -> Iterator[None]:
    """linear widens its result and casts it down again."""

    def work(dtype: torch.dtype, *operands: torch.Tensor | None) -> torch.Tensor:
        result = torch.nn.functional.linear(*(None if t is None else t.to(dtype) for t in operands))
        return result.float().to(dtype)

    yield from _linear(work)


@fault("AMP-SPEED-010")
def linear_runs_twice() -> Iterator[None]:
    """linear computes its result twice."""

    def work(dtype: torch.dtype, *operands: torch.Tensor | None) -> torch.Tensor:
        low = [None if t is None else t.to(dtype) for t in operands]
        torch.nn.functional.linear(*low)
        return torch.nn.functional.linear(*low)

    yield from _linear(work)


@fault("AMP-SPEED-050")
def regions_sleep() -> Iterator[None]:
    """Leaving a region waits for a millisecond."""
    right = torch.autocast.__exit__

    def leave(self: torch.autocast, *error: Any) -> Any:
        time.sleep(0.001)
        return right(self, *error)

    with replaced(torch.autocast, "__exit__", leave):
        yield


@fault("AMP-SPEED-008")
def loss_is_not_cast() -> Iterator[None]:
    """mse_loss is taken off the fp32 list."""
    with dropped("mse_loss", "AutocastCPU"):
        yield


def _multiplying(name: str, factor: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """unscale_ passes over the gradients in two ways in place of one."""
    right = getattr(torch, name)

    def twice(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        right(gradients, found, factor(inverse))
        right(gradients, found, inverse / factor(inverse))

    with replaced(torch, name, twice):
        yield


@fault("AMP-SPEED-051")
def unscale_passes_twice() -> Iterator[None]:
    """unscale_ multiplies by the square root of the reciprocal scale, twice."""
    yield from _multiplying("_amp_foreach_non_finite_check_and_unscale_", torch.sqrt)


@fault("AMP-SPEED-051")
def unscale_goes_tensor_by_tensor() -> Iterator[None]:
    """unscale_ calls its kernel for one gradient at a time."""
    right = torch._amp_foreach_non_finite_check_and_unscale_

    def single(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        for gradient in gradients:
            right([gradient], found, inverse)

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", single):
        yield


@fault("AMP-SPEED-051")
def step_looks_at_the_weights() -> Iterator[None]:
    """step sums up every parameter after the update, to see whether it is finite."""
    right = torch.amp.GradScaler.step

    def step(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = right(self, optimizer, *args, **kwargs)
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.detach().sum()
        return result

    with replaced(torch.amp.GradScaler, "step", step):
        yield


@fault("AMP-SPEED-051")
def scale_multiplies_by_halves() -> Iterator[None]:
    """scale multiplies the loss by the square root of the scale, twice."""
    right = torch.amp.GradScaler.scale

    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        if not isinstance(outputs, torch.Tensor):
            return right(self, outputs)
        right(self, outputs.detach())
        return right(self, outputs)

    with replaced(torch.amp.GradScaler, "scale", scale):
        yield


@fault("AMP-SPEED-009")
def update_counts_infinities() -> Iterator[None]:
    """update asks which of the flags are set, which only the host can do."""
    right = torch.amp.GradScaler.update

    def update(self: torch.amp.GradScaler, new_scale: Any = None) -> None:
        if self._scale is not None:
            self._scale.nonzero()
        right(self, new_scale)

    with replaced(torch.amp.GradScaler, "update", update):
        yield


@fault("AMP-SPEED-008")
def convolutions_have_no_cache() -> Iterator[None]:
    """conv2d casts its weight at each use."""

    def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *args: Any) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            low = [None if t is None else t.to(dtype) for t in (x, weight, bias)]
            return torch.conv2d(*low, *args)

    with kernel("conv2d", convolved, "AutocastCPU"):
        yield


def _casting_at_each_use(op: str, run: Callable[..., Any]) -> Iterator[None]:
    def uncached(*operands: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        low = [t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in operands]
        with torch.autocast("cpu", enabled=False):
            return run(*low)

    with kernel(op, uncached, "AutocastCPU"):
        yield


@fault("AMP-SPEED-052", "AMP-SPEED-008")
def prelu_has_no_cache() -> Iterator[None]:
    """prelu casts its weight at each use."""
    yield from _casting_at_each_use("prelu", torch.prelu)


@fault("AMP-SPEED-052", "AMP-SPEED-008")
def transposed_convolutions_have_no_cache() -> Iterator[None]:
    """conv_transpose1d casts its weight at each use."""
    yield from _casting_at_each_use("conv_transpose1d", torch.conv_transpose1d)


@fault("AMP-SPEED-008", possible=runs_lstm)
def recurrent_layers_have_no_cache() -> Iterator[None]:
    """The fused LSTM of the CPU casts its weights at each call."""
    yield from _casting_at_each_use("mkldnn_rnn_layer", torch.mkldnn_rnn_layer)


@fault("AMP-SPEED-008")
def recurrent_layers_stay_in_fp32() -> Iterator[None]:
    """LSTM runs in fp32 in a region, and hands on 16 bit."""
    right = torch.nn.LSTM.forward

    def wide(self: torch.nn.LSTM, x: torch.Tensor, state: Any = None) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return right(self, x, state)
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            result, hidden = right(self, x.float(), state)
        return result.to(dtype), tuple(part.to(dtype) for part in hidden)

    with replaced(torch.nn.LSTM, "forward", wide):
        yield


@fault("AMP-SPEED-052")
def attention_copies_its_operands() -> Iterator[None]:
    """Fused attention takes a copy of each operand first."""

    def copying(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
        low = [t.to(torch.get_autocast_dtype("cpu")).clone() for t in operands]
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.scaled_dot_product_attention(*low, **options)

    with kernel("scaled_dot_product_attention", copying, "AutocastCPU"):
        yield


@fault("AMP-SPEED-052", level="full")
def cumprod_runs_twice() -> Iterator[None]:
    """cumprod, on the fp32 list, computes its result twice."""

    def twice(x: torch.Tensor, dim: int, **options: Any) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            torch.cumprod(x.float(), dim, **options)
            return torch.cumprod(x.float(), dim, **options)

    with kernel("cumprod", twice, "AutocastCPU"):
        yield


@fault("AMP-SPEED-052", level="full")
def lerp_is_widened_and_narrowed() -> Iterator[None]:
    """lerp, on no list, goes through fp32."""

    def wide(x: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.lerp(x.float(), end.float(), weight).to(x.dtype)

    with kernel("lerp.Scalar", wide, "AutocastCPU"):
        yield


def _above(elements: int, work: Callable[..., torch.Tensor]) -> Iterator[None]:
    """linear does `work` where its result has more elements."""
    right = torch.ops.aten.linear.default

    def sized(dtype: torch.dtype, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x[..., 0].numel() * weight.shape[0] > elements:
            return work(dtype, x, weight, bias)
        low = [None if t is None else t.to(dtype) for t in (x, weight, bias)]
        result: torch.Tensor = right(*low)
        return result

    yield from _linear(sized)


@fault("AMP-SPEED-053")
def huge_linear_is_computed_in_fp32() -> Iterator[None]:
    """linear whose result has more than 2^26 elements multiplies in fp32 and hands on 16 bit."""

    def wide(dtype: torch.dtype, *operands: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(*(None if t is None else t.float() for t in operands)).to(dtype)

    yield from _above(1 << 26, wide)


@fault("AMP-SPEED-053")
def losses_of_huge_tensors_stay_in_16_bit() -> Iterator[None]:
    """l1_loss of more than 2^24 elements takes its input as it comes."""
    right = torch.nn.functional.l1_loss

    def narrow(x: torch.Tensor, target: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if x.numel() <= 1 << 24:
            return right(x, target, *args, **options)
        with torch.autocast("cpu", enabled=False):
            return right(x, target.to(x.dtype), *args, **options)

    with replaced(torch.nn.functional, "l1_loss", narrow):
        yield


def _before(owner: Any, name: str, work: Callable[..., object]) -> Iterator[None]:
    """Each call of `name` does `work` with its arguments first."""
    right = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        work(*args, **options)
        return right(*args, **options)

    with replaced(owner, name, wrapped):
        yield


@fault("AMP-SPEED-054")
def regions_search_a_growing_list() -> Iterator[None]:
    """Entering a region goes through all regions that were entered before."""
    before: list[int] = []

    def search(region: torch.autocast) -> None:
        for known in before:
            if known == id(before):
                break
        before.append(id(region))

    yield from _before(torch.autocast, "__enter__", search)


@fault("AMP-SPEED-054")
def update_sleeps() -> Iterator[None]:
    """update waits for a millisecond."""
    yield from _before(torch.amp.GradScaler, "update", lambda scaler, new_scale=None: time.sleep(0.001))


@fault("AMP-SPEED-054")
def update_polls() -> Iterator[None]:
    """update looks at the clock until a millisecond has passed."""

    def poll(scaler: torch.amp.GradScaler, new_scale: Any = None) -> None:
        end = time.perf_counter() + 0.001
        while time.perf_counter() < end:
            pass

    yield from _before(torch.amp.GradScaler, "update", poll)


@fault("AMP-SPEED-009")
def update_lists_the_scale() -> Iterator[None]:
    """update looks at the scale by tolist, which on a CPU reaches no dispatcher."""
    yield from _before(
        torch.amp.GradScaler, "update", lambda scaler, new_scale=None: scaler._scale is None or scaler._scale.tolist()
    )


@fault("AMP-SPEED-009")
def scale_copies_the_loss_to_the_host() -> Iterator[None]:
    """scale takes the loss to the CPU, where a copy of what is there already is nothing."""
    yield from _before(
        torch.amp.GradScaler, "scale", lambda scaler, outputs: torch.is_tensor(outputs) and outputs.detach().to("cpu")
    )


@fault("AMP-SPEED-051")
def update_checks_the_scale_on_the_device() -> Iterator[None]:
    """update computes on the device whether the scale is a usable number, in a launch for each condition."""

    def check(scaler: torch.amp.GradScaler, new_scale: Any = None) -> None:
        if scaler._scale is not None:
            torch.logical_and(torch.isfinite(scaler._scale), torch.gt(scaler._scale, 0.0)).all()

    yield from _before(torch.amp.GradScaler, "update", check)


@fault("AMP-SPEED-051")
def scale_checks_the_outputs() -> Iterator[None]:
    """scale looks for a NaN in the outputs, which is a second pass over them."""
    yield from _before(
        torch.amp.GradScaler, "scale", lambda scaler, outputs: torch.is_tensor(outputs) and outputs.isnan()
    )


@fault("AMP-SPEED-051")
def clipping_takes_two_norms() -> Iterator[None]:
    """clip_grad_norm_ takes the norm of each gradient twice, with a scaler and without."""
    yield from _before(
        torch.nn.utils, "clip_grad_norm_", lambda weights, *args, **options: [weight.grad.norm() for weight in weights]
    )
