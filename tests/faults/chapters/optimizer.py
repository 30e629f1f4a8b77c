"""Optimizers that step where they must not, on gradients that they must not see, or leave traces of a skip."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import adam, swa_utils

from tests.faults import fault
from tests.faults.breaking import edited, kernel, replaced

SCALER = torch.amp.GradScaler


def _around_skips(then: Callable[[torch.optim.Optimizer], None]) -> Callable[..., Any]:
    """A GradScaler._maybe_opt_step that does something more when it skips."""
    original = SCALER._maybe_opt_step

    def maybe_step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if sum(flag.item() for flag in state["found_inf_per_device"].values()):
            then(optimizer)
        return original(self, optimizer, state, *args, **kwargs)

    return maybe_step


def _with(name: str, **changes: Any) -> Any:
    """The fused kernel of torch of that name with some keyword arguments replaced."""
    original = getattr(torch, name)
    return replaced(torch, name, lambda *args, **kwargs: original(*args, **{**kwargs, **changes}))


@fault("AMP-OPTIMIZER-010", "AMP-OPTIMIZER-011", "AMP-OPTIMIZER-040")
def steps_on_inf() -> Iterator[None]:
    """GradScaler steps whatever it found."""
    with edited(SCALER._maybe_opt_step, "if not sum(", "if True or not sum("):
        yield


@fault("AMP-OPTIMIZER-012")
def skip_decays_weights() -> Iterator[None]:
    """A skipped step applies decoupled weight decay all the same."""

    @torch.no_grad()
    def decay(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - 1e-3 * group.get("weight_decay", 0))

    with replaced(SCALER, "_maybe_opt_step", _around_skips(decay)):
        yield


@fault("AMP-OPTIMIZER-011", "AMP-OPTIMIZER-022")
def skip_counts_as_step() -> Iterator[None]:
    """A skipped step advances the step counters."""

    def count(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] += 1

    with replaced(SCALER, "_maybe_opt_step", _around_skips(count)):
        yield


@fault("AMP-OPTIMIZER-011", "AMP-OPTIMIZER-022")
def fused_skip_counts_as_step() -> Iterator[None]:
    """Fused Adam does not take its step counter back after a skip."""
    with edited(adam._fused_adam, "[device_found_inf] *", "[device_found_inf * 0] *"):
        yield


@fault("AMP-OPTIMIZER-010", "AMP-OPTIMIZER-011", "AMP-OPTIMIZER-061")
def fused_adam_ignores_found_inf() -> Iterator[None]:
    """The fused Adam kernel steps on inf."""
    with _with("_fused_adam_", found_inf=None):
        yield


@fault("AMP-OPTIMIZER-030", "AMP-OPTIMIZER-032")
def fused_sgd_ignores_the_scale() -> Iterator[None]:
    """The fused SGD kernel takes scaled gradients for gradients."""
    with _with("_fused_sgd_", grad_scale=None):
        yield


@fault("AMP-OPTIMIZER-061")
def fused_adam_forgets_the_tail() -> Iterator[None]:
    """The fused Adam kernel, when it unscales, leaves out the last element after whole vectors of eight."""
    original = torch._fused_adam_

    def step(*args: Any, **kwargs: Any) -> None:
        kept = [parameter.flatten()[-1].clone() for parameter in args[0]]
        original(*args, **kwargs)
        if kwargs.get("grad_scale") is not None:
            for parameter, last in zip(args[0], kept, strict=True):
                if parameter.numel() > 8 and parameter.numel() % 8 == 1:
                    parameter.view(-1)[-1] = last

    with replaced(torch, "_fused_adam_", step):
        yield


@fault("AMP-OPTIMIZER-031")
def fused_gradients_stay_scaled() -> Iterator[None]:
    """Fused Adam steps right and leaves the scaled gradients behind."""
    original = torch._fused_adam_

    def step(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if kwargs.get("grad_scale") is not None:
            for gradient in args[1]:
                gradient.mul_(kwargs["grad_scale"])

    with replaced(torch, "_fused_adam_", step):
        yield


@fault("AMP-OPTIMIZER-060")
def fused_keeps_the_flag() -> Iterator[None]:
    """The attribute found_inf stays on a fused optimizer after its step."""
    with edited(SCALER.step, "del optimizer.found_inf  #", "pass  #"):
        yield


@fault("AMP-OPTIMIZER-060")
def fused_unscales_twice() -> Iterator[None]:
    """A fused optimizer is handed the scale although unscale_ was called."""
    with edited(SCALER.step, 'getattr(optimizer, "grad_scale", None)\n', "scaler\n"):
        yield


@fault("AMP-OPTIMIZER-063")
def everybody_scales_itself() -> Iterator[None]:
    """GradScaler hands every optimizer the scale and leaves the unscaling to it."""
    with edited(SCALER.step, 'getattr(optimizer, "_step_supports_amp_scaling", False)', "True"):
        yield


@fault("AMP-OPTIMIZER-050")
def one_skip_for_all() -> Iterator[None]:
    """Inf in one optimizer's gradients skips every optimizer."""
    original = SCALER._maybe_opt_step

    def maybe_step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        states = self._per_optimizer_states.values()
        if any(flag.item() for each in states for flag in each["found_inf_per_device"].values()):
            return None
        return original(self, optimizer, state, *args, **kwargs)

    with replaced(SCALER, "_maybe_opt_step", maybe_step):
        yield


@fault("AMP-OPTIMIZER-035")
def unscale_sees_the_first_group() -> Iterator[None]:
    """unscale_ leaves out all parameter groups but the first."""
    with edited(
        SCALER._unscale_grads_, "for group in optimizer.param_groups:", "for group in optimizer.param_groups[:1]:"
    ):
        yield


@fault("AMP-OPTIMIZER-010", "AMP-OPTIMIZER-011")
def check_misses_the_last_element() -> Iterator[None]:
    """The check for inf leaves out the last element of every gradient."""

    def check(gradients: list[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor) -> None:
        for gradient in gradients:
            if not bool(gradient.flatten()[:-1].isfinite().all()):
                found_inf.fill_(1.0)
            gradient.mul_(factor)

    with kernel("_amp_foreach_non_finite_check_and_unscale_", check, "CPU"):
        yield


@fault("AMP-OPTIMIZER-040")
def return_value_is_lost() -> Iterator[None]:
    """GradScaler.step returns None for a fused optimizer."""
    with edited(SCALER.step, "retval = optimizer.step(*args, **kwargs_)", "optimizer.step(*args, **kwargs_)"):
        yield


@fault("AMP-OPTIMIZER-042")
def arguments_are_lost() -> Iterator[None]:
    """GradScaler.step forwards no arguments."""
    with edited(SCALER._maybe_opt_step, "optimizer.step(*args, **kwargs)", "optimizer.step()"):
        yield


@fault("AMP-OPTIMIZER-022")
def scale_is_not_resumed() -> Iterator[None]:
    """load_state_dict leaves the scale out."""
    with edited(SCALER.load_state_dict, 'self._init_scale = cast(float, state_dict["scale"])', "pass"):
        yield


@fault("AMP-OPTIMIZER-080")
def zero_grad_multiplies() -> Iterator[None]:
    """zero_grad(set_to_none=False) multiplies by zero, which keeps NaN."""

    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.mul_(0)

    with replaced(torch.optim.Optimizer, "zero_grad", zero_grad):
        yield


@fault("AMP-OPTIMIZER-082")
def closure_is_accepted() -> Iterator[None]:
    """GradScaler.step takes a closure and lets the optimizer see scaled gradients."""
    with edited(SCALER.step, 'if "closure" in kwargs:', "if False:"):
        yield


# --- implementations


@fault("AMP-OPTIMIZER-097")
def skip_scales_gradients() -> Iterator[None]:
    """A skipped step doubles the gradients that it found."""

    def double(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * 2

    with replaced(SCALER, "_maybe_opt_step", _around_skips(double)):
        yield


def _after_loading(then: Callable[[str, Any], Any]) -> Any:
    """Optimizer.load_state_dict with another value for each entry of the state."""
    original = torch.optim.Optimizer.load_state_dict

    def load(self: torch.optim.Optimizer, state_dict: Any) -> None:
        original(self, state_dict)
        for entry in self.state.values():
            for name, value in list(entry.items()):
                entry[name] = then(name, value)

    return replaced(torch.optim.Optimizer, "load_state_dict", load)


@fault("AMP-OPTIMIZER-098")
def loaded_numbers_count_from_zero() -> Iterator[None]:
    """A step counter that was saved as a number is loaded as zero."""
    original = torch.optim.Optimizer.load_state_dict

    def load(self: torch.optim.Optimizer, state_dict: Any) -> None:
        for entry in state_dict["state"].values():
            if "step" in entry and not torch.is_tensor(entry["step"]):
                entry["step"] = 0
        original(self, state_dict)

    with replaced(torch.optim.Optimizer, "load_state_dict", load):
        yield


@fault("AMP-OPTIMIZER-101", "AMP-OPTIMIZER-102")
def loaded_averages_are_rounded() -> Iterator[None]:
    """load_state_dict rounds averages to bf16 and keeps their dtype."""
    with _after_loading(
        lambda name, value: value.bfloat16().to(value.dtype) if torch.is_tensor(value) and value.dim() else value
    ):
        yield


@fault("AMP-OPTIMIZER-100")
def foreach_keeps_another_average() -> Iterator[None]:
    """Adam with foreach=True holds an entry of state that its other implementations do not have."""
    original = torch.optim.Adam.step

    def step(self: Any, closure: Any = None) -> Any:
        answer = original(self, closure)
        for group in self.param_groups:
            for parameter in group["params"] if group["foreach"] else ():
                self.state[parameter]["norm"] = torch.zeros_like(parameter)
        return answer

    with replaced(torch.optim.Adam, "step", step):
        yield


@fault("AMP-OPTIMIZER-103")
def adam_squares_complex_gradients() -> Iterator[None]:
    """Adam does not look at complex gradients as pairs of real ones."""
    with replaced(adam, "_view_as_real", lambda *tensors: None):
        yield


@fault("AMP-OPTIMIZER-104")
def empty_gradients_are_infinite() -> Iterator[None]:
    """unscale_ takes a gradient without elements for one that is not finite."""
    original = SCALER._unscale_grads_

    def unscale(self: Any, optimizer: Any, *args: Any) -> Any:
        found = original(self, optimizer, *args)
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        if any(gradient is not None and gradient.numel() == 0 for gradient in gradients):
            for flag in found.values():
                flag.fill_(1.0)
        return found

    with replaced(SCALER, "_unscale_grads_", unscale):
        yield


@fault("AMP-OPTIMIZER-105")
def rates_in_tensors_are_larger() -> Iterator[None]:
    """SGD steps a percent further with a learning rate in a tensor."""
    original = torch.optim.SGD.__init__

    @functools.wraps(original)
    def construct(self: Any, params: Any, lr: Any = 1e-3, **options: Any) -> None:
        original(self, params, lr * 1.01 if isinstance(lr, torch.Tensor) else lr, **options)

    with replaced(torch.optim.SGD, "__init__", construct):
        yield


@fault("AMP-OPTIMIZER-106")
def adam_has_no_eps() -> Iterator[None]:
    """Adam divides by the root of the second moment alone."""
    original = torch.optim.Adam.__init__

    @functools.wraps(original)
    def construct(self: Any, params: Any, *args: Any, **options: Any) -> None:
        original(self, params, *args, **{**options, "eps": 0.0})

    with replaced(torch.optim.Adam, "__init__", construct):
        yield


@fault("AMP-OPTIMIZER-107")
def steps_follow_the_first_dtype() -> Iterator[None]:
    """SGD steps a percent further where its first parameter is not float32."""
    original = torch.optim.SGD.step

    @functools.wraps(original)
    def step(self: Any, *args: Any, **options: Any) -> Any:
        group = self.param_groups[0]
        rate, first = group["lr"], group["params"][0].dtype
        group["lr"] = rate if first is torch.float32 else rate * 1.5
        try:
            return original(self, *args, **options)
        finally:
            group["lr"] = rate

    with replaced(torch.optim.SGD, "step", step):
        yield


@fault("AMP-OPTIMIZER-108")
def schedules_replace_the_tensor() -> Iterator[None]:
    """Every scheduler puts a new tensor into the group."""
    original = torch.optim.lr_scheduler.LRScheduler.step

    @functools.wraps(original)
    def step(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"] = group["lr"].clone()

    with replaced(torch.optim.lr_scheduler.LRScheduler, "step", step):
        yield


@fault("AMP-OPTIMIZER-113")
def averages_of_16_bit_tensors_stand_still() -> Iterator[None]:
    """AveragedModel averages float32 tensors, and keeps the first values of 16-bit ones."""
    plain = swa_utils.AveragedModel.update_parameters

    def update(self: Any, model: torch.nn.Module) -> None:
        kept = {name: one.clone() for name, one in self.module.state_dict().items() if one.element_size() == 2}
        first = int(self.n_averaged) == 0
        plain(self, model)
        for name, one in self.module.state_dict().items():
            if name in kept and not first:
                one.copy_(kept[name])

    with replaced(swa_utils.AveragedModel, "update_parameters", update):
        yield


@fault("AMP-OPTIMIZER-113")
def decays_of_averages_are_rounded() -> Iterator[None]:
    """Moving averages take their decay as a number of bfloat16."""
    plain, several = swa_utils.get_ema_avg_fn, swa_utils.get_ema_multi_avg_fn

    def rounded(decay: float) -> float:
        return float(torch.tensor(decay).bfloat16())

    with (
        replaced(swa_utils, "get_ema_avg_fn", lambda decay=0.999: plain(rounded(decay))),
        replaced(swa_utils, "get_ema_multi_avg_fn", lambda decay=0.999: several(rounded(decay))),
    ):
        yield


@fault("AMP-OPTIMIZER-114")
def scheduler_warns_of_fused_optimizers_too() -> Iterator[None]:
    """A scheduler's first step warns of a wrong order if the optimizer counted no step."""
    plain = torch.optim.lr_scheduler.LRScheduler.step

    @functools.wraps(plain)
    def step(self: Any, *args: Any, **options: Any) -> None:
        if self._step_count == 1 and not any(float(state["step"]) for state in self.optimizer.state.values()):
            warnings.warn("Detected call of `lr_scheduler.step()` before `optimizer.step()`.", stacklevel=2)
        plain(self, *args, **options)

    with replaced(torch.optim.lr_scheduler.LRScheduler, "step", step):
        yield
