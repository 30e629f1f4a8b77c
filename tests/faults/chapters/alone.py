"""Faults for contracts that no other fault names: each breaks what one of them states."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from tests.faults import fault
from tests.faults.breaking import edited, replaced
from tests.faults.cast_rules import DROPPED, ruled

_SCALER = torch.amp.GradScaler


@fault("AMP-CAST-007")
def xpu_forgets_the_rule_of_layer_norm() -> Iterator[None]:
    """XPU runs `layer_norm` in the type of its inputs."""
    with ruled("layer_norm", DROPPED, "xpu"), ruled("native_layer_norm", DROPPED, "xpu"):
        yield


@fault("AMP-CAST-025")
def loss_of_logits_keeps_their_type() -> Iterator[None]:
    """CUDA's `binary_cross_entropy_with_logits` gives 16-bit logits a 16-bit loss."""
    with ruled("binary_cross_entropy_with_logits", DROPPED, "cuda"):
        yield


@fault("AMP-CAST-041")
def norm_of_an_order_keeps_its_type() -> Iterator[None]:
    """CUDA's `norm` with an order is 16-bit for 16-bit input."""
    with ruled("norm.Scalar", DROPPED, "cuda"), ruled("norm.ScalarOpt_dim", DROPPED, "cuda"):
        yield


@fault("AMP-CAST-028")
def norms_of_linalg_keep_their_type() -> Iterator[None]:
    """CUDA's vector and nuclear norms, which `torch.norm` calls, are 16-bit for 16-bit input."""
    with ruled("linalg_vector_norm", DROPPED, "cuda"), ruled("nuclear_norm", DROPPED, "cuda"):
        yield


@fault("AMP-CAST-033")
def region_of_cuda_is_one_of_the_cpu_too() -> Iterator[None]:
    """A region of CUDA casts tensors of the CPU as well."""
    plain = torch.set_autocast_enabled

    def enable(device_type: str, enabled: bool) -> None:
        plain(device_type, enabled)
        if device_type == "cuda":
            plain("cpu", enabled)

    with replaced(torch, "set_autocast_enabled", enable):
        yield


@fault("AMP-CAST-034")
def disabled_region_within_another_is_enabled() -> Iterator[None]:
    """A region with enabled=False does nothing in one that is enabled."""
    plain = torch.amp.autocast_mode.autocast.__enter__

    def enter(region: torch.autocast) -> Any:
        region._enabled = region._enabled or torch.is_autocast_enabled(region.device)
        return plain(region)

    with replaced(torch.amp.autocast_mode.autocast, "__enter__", enter):
        yield


@fault("AMP-BACKWARD-002")
def backward_opens_a_region() -> Iterator[None]:
    """`backward()` outside of a region runs its ops in bfloat16."""
    plain = torch.autograd.backward

    def backward(tensors: Any, *arguments: Any, **keywords: Any) -> None:
        first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
        with torch.autocast(first.device.type, torch.bfloat16):
            plain(tensors, *arguments, **keywords)

    with replaced(torch.autograd, "backward", backward):
        yield


@fault("AMP-LOSS-008")
def float32_logits_get_rounded_gradients() -> Iterator[None]:
    """The gradient of `mse_loss` is rounded to bfloat16 on its way to float32 logits."""
    plain = torch.nn.functional.mse_loss

    def mse_loss(logits: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if logits.requires_grad and logits.dtype == torch.float32:
            logits = logits.view_as(logits)
            logits.register_hook(lambda gradient: gradient.to(torch.bfloat16).float())
        return plain(logits, *arguments, **keywords)

    with replaced(torch.nn.functional, "mse_loss", mse_loss):
        yield


@fault("AMP-SCALE-007")
def scale_before_the_first_use_is_whole() -> Iterator[None]:
    """`get_scale()` returns an int before the first call of scale()."""
    plain = _SCALER.get_scale

    def get_scale(scaler: torch.amp.GradScaler) -> float:
        return plain(scaler) if scaler._scale is not None else int(plain(scaler))

    with replaced(_SCALER, "get_scale", get_scale):
        yield


@fault("AMP-SCALE-093")
def empty_state_is_ignored() -> Iterator[None]:
    """`load_state_dict({})` leaves the scaler as it is, and says nothing."""
    plain = _SCALER.load_state_dict

    def load(scaler: torch.amp.GradScaler, state: dict[str, Any]) -> None:
        if state:
            plain(scaler, state)

    with replaced(_SCALER, "load_state_dict", load):
        yield


@fault("AMP-CLIP-009")
def norm_of_nothing_is_undefined() -> Iterator[None]:
    """`clip_grad_norm_` returns NaN where no parameter has a gradient."""
    plain = torch.nn.utils.clip_grad_norm_

    def clip(parameters: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        single = isinstance(parameters, torch.Tensor) or not isinstance(parameters, Iterable)
        every = parameters if single else list(parameters)
        empty = not single and all(one.grad is None for one in every)
        return torch.tensor(torch.nan) if empty else plain(every, *arguments, **keywords)

    with replaced(torch.nn.utils, "clip_grad_norm_", clip):
        yield


@fault("AMP-BF16-004")
def disabled_scaler_doubles_the_loss() -> Iterator[None]:
    """`scale()` of a disabled GradScaler returns twice its argument."""
    plain = _SCALER.scale

    def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        return plain(scaler, outputs) if scaler.is_enabled() else outputs * 2

    with replaced(_SCALER, "scale", scale):
        yield


@fault("AMP-NUMERICS-008")
def smallest_normal_number_of_bfloat16_is_that_of_half() -> Iterator[None]:
    """`torch.finfo` of bfloat16 tells the smallest normal number of float16."""
    plain = torch.finfo

    def finfo(*arguments: Any) -> Any:
        told = plain(*arguments)
        if arguments != (torch.bfloat16,):
            return told
        of_half = plain(torch.float16)
        names = ("bits", "eps", "max", "min", "dtype", "resolution")
        return mock.Mock(
            **{name: getattr(told, name) for name in names}, tiny=of_half.tiny, smallest_normal=of_half.tiny
        )

    with replaced(torch, "finfo", finfo):
        yield


@fault("AMP-RECIPE-050")
def checkpoint_calls_a_deprecated_region() -> Iterator[None]:
    """`torch.utils.checkpoint` opens the region of `torch.cpu.amp`, which warns in each step."""
    plain = torch.utils.checkpoint.checkpoint

    def checkpoint(*arguments: Any, **keywords: Any) -> Any:
        with torch.cpu.amp.autocast(enabled=torch.is_autocast_enabled("cpu")):
            return plain(*arguments, **keywords)

    with replaced(torch.utils.checkpoint, "checkpoint", checkpoint):
        yield


@fault("AMP-RECIPE-050")
def step_warns_of_its_own_scaler() -> Iterator[None]:
    """`GradScaler.step` warns of the deprecated scaler that it was once."""
    plain = _SCALER.step

    def step(scaler: torch.amp.GradScaler, *arguments: Any, **keywords: Any) -> Any:
        warnings.warn("torch.cuda.amp.GradScaler(args...) is deprecated", FutureWarning, stacklevel=2)
        return plain(scaler, *arguments, **keywords)

    with replaced(_SCALER, "step", step):
        yield


@fault("AMP-CAST-110")
def normed_weights_are_refused_in_a_region() -> Iterator[None]:
    """`weight_norm` has no kernel for the types of a region."""
    plain = torch._weight_norm

    def weight_norm(*arguments: Any, **keywords: Any) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("\"weight_norm_kernel\" not implemented for 'Half'")
        return plain(*arguments, **keywords)

    with replaced(torch, "_weight_norm", weight_norm):
        yield


@fault("AMP-CAST-110")
def power_iteration_stores_16_bits() -> Iterator[None]:
    """`spectral_norm` keeps its vectors in bfloat16 once it was trained in a region."""
    place: Any = torch.nn.utils.parametrizations._SpectralNorm
    plain = place._power_method

    def iterate(norm: Any, *arguments: Any) -> None:
        plain(norm, *arguments)
        if torch.is_autocast_enabled("cpu"):
            norm._u = norm._u.to(torch.bfloat16)

    with replaced(place, "_power_method", iterate):
        yield


@fault("AMP-CAST-110")
def orthogonal_weight_ends_the_region() -> Iterator[None]:
    """A region ends where an orthogonal weight is computed, so that the module that uses it runs in float32."""
    place: Any = torch.nn.utils.parametrizations._Orthogonal
    plain = place.forward

    def forward(self: Any, weight: torch.Tensor) -> Any:
        torch.set_autocast_enabled("cpu", False)
        return plain(self, weight)

    with replaced(place, "forward", forward):
        yield


@fault("AMP-SCALE-190")
def reciprocal_is_float64_on_every_device() -> Iterator[None]:
    """`unscale_` asks MPS, which has no float64, for the reciprocal in it."""
    with edited(_SCALER.unscale_, 'torch.device("mps:0")', 'torch.device("mps:1")'):
        yield


@fault("AMP-SCALE-190")
def scale_begins_in_float64() -> Iterator[None]:
    """The state of a scaler is made in float64."""
    old = "torch.full((), self._init_scale, dtype=torch.float32, device=dev)"
    with edited(_SCALER._lazy_init_scale_growth_tracker, old, old.replace("float32", "float64")):
        yield


@fault("AMP-RECIPE-013")
def weights_of_linear_are_rounded_to_bfloat16_first() -> Iterator[None]:
    """`linear` in a region rounds its weight to bfloat16, whatever the dtype of the region."""
    plain = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if torch.is_autocast_enabled(weight.device.type):
            weight = weight.to(torch.bfloat16).to(weight.dtype)
        return plain(x, weight, bias)

    with replaced(torch.nn.functional, "linear", linear):
        yield


@fault("AMP-RECIPE-017")
def weight_used_without_gradients_gets_none_later() -> Iterator[None]:
    """A weight that `linear` used under no_grad in a region has no gradient in the rest of that region."""
    plain = torch.nn.functional.linear
    seen: set[int] = set()

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not torch.is_autocast_enabled(weight.device.type):
            seen.clear()
        elif not torch.is_grad_enabled():
            seen.add(id(weight))
        elif id(weight) in seen:
            weight = weight.detach()
        return plain(x, weight, bias)

    with replaced(torch.nn.functional, "linear", linear):
        yield


@fault("AMP-RECIPE-040")
def state_of_the_scaler_is_not_restored() -> Iterator[None]:
    """`load_state_dict` of a GradScaler keeps what the scaler has."""
    with replaced(_SCALER, "load_state_dict", lambda scaler, state: None):
        yield
