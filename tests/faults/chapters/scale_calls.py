"""Scalers that get one call wrong: its arguments, the gradients that it is given, or what it has to forget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.amp import grad_scaler

from tests.faults import fault
from tests.faults.breaking import edited, kernel, replaced
from tests.faults.chapters.scale import Scaler, _unscale_kernel

# --- settings and containers


@fault("AMP-SCALE-003")
def enabled_comes_before_the_interval() -> Iterator[None]:
    """The constructor takes `enabled` in the place of the growth interval, and that at the end."""
    before = Scaler.__init__

    def init(
        self: Any,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        enabled: bool = True,
        growth_interval: int = 2000,
    ) -> None:
        before(self, device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    with replaced(Scaler, "__init__", init):
        yield


@fault("AMP-SCALE-008")
def scale_has_the_default_type() -> Iterator[None]:
    """The scale is a tensor of torch's default type."""
    with edited(Scaler._lazy_init_scale_growth_tracker, "dtype=torch.float32, ", ""):
        yield


@fault("AMP-SCALE-008")
def tracker_is_on_the_default_device() -> Iterator[None]:
    """The growth tracker is made on torch's default device."""
    with edited(Scaler._lazy_init_scale_growth_tracker, "dtype=torch.int32, device=dev", "dtype=torch.int32"):
        yield


@fault("AMP-SCALE-012")
def iterables_are_looked_through_first() -> Iterator[None]:
    """scale() looks for what is no tensor before it scales, which leaves nothing of an iterator."""
    with edited(
        Scaler.scale,
        "iterable = map(",
        "all(isinstance(each, torch.Tensor) for each in val)\n            iterable = map(",
    ):
        yield


# --- gradients


@fault("AMP-SCALE-015")
def values_are_scaled_and_gradients_are_not() -> Iterator[None]:
    """The scaled loss has the value times the scale and the gradients of the loss."""
    with edited(
        Scaler.scale,
        "return outputs * scale.to(device=outputs.device, non_blocking=True)",
        "return outputs + (outputs * (scale.to(outputs.device) - 1)).detach()",
    ):
        yield


@fault("AMP-SCALE-015")
def gradients_of_lists_are_not_scaled() -> Iterator[None]:
    """The scaled losses of a list have the gradients of the losses."""
    with edited(
        Scaler.scale,
        "return val * stash[0].get(val.device)",
        "return val + (val * (stash[0].get(val.device) - 1)).detach()",
    ):
        yield


@fault("AMP-SCALE-042")
def step_takes_the_gradients_that_unscale_left() -> Iterator[None]:
    """unscale_ keeps the gradients, and step() puts them back."""
    unscale, step = Scaler.unscale_, Scaler._maybe_opt_step

    def keeping(self: Any, optimizer: torch.optim.Optimizer) -> None:
        unscale(self, optimizer)
        self._kept = [
            (one, one.grad.clone())
            for group in optimizer.param_groups
            for one in group["params"]
            if one.grad is not None
        ]

    def stepping(self: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter, gradient in getattr(self, "_kept", ()):
            parameter.grad.copy_(gradient)
        return step(self, *args, **kwargs)

    with replaced(Scaler, "unscale_", keeping), replaced(Scaler, "_maybe_opt_step", stepping):
        yield


@fault("AMP-SCALE-045")
def strided_gradients_are_not_checked() -> Iterator[None]:
    """The check passes over gradients that are not contiguous."""
    with _unscale_kernel(
        "if not torch.isfinite(grad).all()", "if grad.is_contiguous() and not torch.isfinite(grad).all()"
    ):
        yield


@fault("AMP-SCALE-045")
def gaps_of_gradients_are_checked() -> Iterator[None]:
    """The check looks at a strided gradient's memory from its first number to its last, gaps included."""
    first_to_last = "(sum((n - 1) * step for n, step in zip(grad.shape, grad.stride())) + 1,)"
    with _unscale_kernel("torch.isfinite(grad).all()", f"torch.isfinite(grad.as_strided({first_to_last}, (1,))).all()"):
        yield


@fault("AMP-SCALE-045")
def fp64_gradients_are_not_checked() -> Iterator[None]:
    """The check passes over gradients in fp64."""
    with _unscale_kernel(
        "if not torch.isfinite(grad).all()", "if grad.dtype != torch.float64 and not torch.isfinite(grad).all()"
    ):
        yield


@fault("AMP-SCALE-046")
def products_out_of_range_saturate() -> Iterator[None]:
    """A product of finite numbers that is out of range is the largest number, as some devices can be set to do."""

    def saturating(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = torch.empty(0, dtype=torch.result_type(left, right))
        torch.mul(left, right, out=product)
        if not product.is_floating_point():
            return product
        largest = torch.finfo(product.dtype).max
        finite = left.isfinite() & right.isfinite()
        return torch.where(finite, product.clamp(-largest, largest), product)

    with kernel("mul.Tensor", saturating, "CPU"):
        yield


@fault("AMP-SCALE-052")
def the_last_gradients_decide_the_skip() -> Iterator[None]:
    """step() goes by the gradients that it sees, whatever unscale_ found."""
    step = Scaler._maybe_opt_step

    def stepping(self: Any, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        if all(bool(gradient.to_dense().isfinite().all()) for gradient in gradients):
            return optimizer.step(*args, **kwargs)
        return step(self, optimizer, state, *args, **kwargs)

    with replaced(Scaler, "_maybe_opt_step", stepping):
        yield


# --- update()


@fault("AMP-SCALE-069")
def new_scale_keeps_its_type() -> Iterator[None]:
    """A tensor that update() is given becomes the scale, in its own dtype."""
    with edited(Scaler.update, "self._scale.copy_(new_scale)", "self._scale = new_scale.clone()"):
        yield


@fault("AMP-SCALE-074")
def update_reads_the_flag() -> Iterator[None]:
    """update() looks on the host whether there was an overflow."""
    with edited(
        Scaler.update, "torch._amp_update_scale_(", "found_inf_combined.item()\n        torch._amp_update_scale_("
    ):
        yield


@fault("AMP-SCALE-112")
def an_iteration_counts_once_for_each_optimizer() -> Iterator[None]:
    """A clean iteration is counted once for each optimizer that was stepped."""
    with edited(
        Scaler.update,
        "found_inf_combined = found_infs[0]",
        "_growth_tracker += len(found_infs) - 1\n        found_inf_combined = found_infs[0]",
    ):
        yield


@fault("AMP-SCALE-113")
def optimizers_that_were_not_stepped_stay_unscaled() -> Iterator[None]:
    """update() keeps what it knows of an optimizer that was unscaled and not stepped."""
    update = Scaler.update

    def updating(self: Any, new_scale: Any = None) -> None:
        before = dict(self._per_optimizer_states)
        update(self, new_scale)
        kept = {key: state for key, state in before.items() if state["stage"] is grad_scaler.OptState.UNSCALED}
        self._per_optimizer_states = defaultdict(grad_scaler._refresh_per_optimizer_state, kept)

    with replaced(Scaler, "update", updating):
        yield


@fault("AMP-SCALE-131")
def cudas_spelling_forgets_the_interval() -> Iterator[None]:
    """torch.cuda.amp.GradScaler does not pass the growth interval on."""
    before = torch.cuda.amp.GradScaler.__init__

    def init(
        self: Any,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        before(self, init_scale, growth_factor, backoff_factor, enabled=enabled)

    with replaced(torch.cuda.amp.GradScaler, "__init__", init):
        yield
