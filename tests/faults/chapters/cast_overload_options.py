"""Autocast kernels that forget their casts where an option is not its default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.faults.cast_rules import CASTING, RULES
from tests.faults.chapters.cast_overloads import Arguments, broken

# The overload, its policy, the backend, the option and what the fault takes for usual.
_FORGETTING: dict[str, tuple[str, str, str, str, Callable[[Any], bool]]] = {
    "groups": ("conv_transpose1d", "lower_precision", "cpu", "groups", lambda groups: groups == 1),
    "stride_beside_valid": ("conv2d.padding", "lower_precision", "cpu", "stride", lambda stride: set(stride) <= {1}),
    "scale": ("scaled_dot_product_attention", "lower_precision", "cuda", "scale", lambda scale: scale is None),
    "interpolation": ("quantile", "fp32", "cpu", "interpolation", lambda how: how == "linear"),
    "value": ("addcdiv", "widest", "cuda", "value", lambda value: value == 1),
}


def _forgets(
    name: str, overload: str, policy: str, device_type: str, option: str, usual: Callable[[Any], bool]
) -> None:
    assert policy in CASTING

    def rule(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
        return op(**named) if option in named and not usual(named[option]) else RULES[policy](op, named, amp_dtype)

    rule.__name__ = f"{name}_forgets_the_casts"
    rule.__doc__ = f"{overload} of {device_type} casts nothing where {option} is not the default."
    broken(overload, device_type, "AMP-CAST-055")(rule)


for _name, _row in _FORGETTING.items():
    _forgets(_name, *_row)


def _casts_masks(name: str, overload: str, device_type: str, option: str) -> None:
    def rule(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
        mask = named.get(option)
        if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool:
            named = {**named, option: mask.to(amp_dtype)}
        return RULES["lower_precision"](op, named, amp_dtype)

    rule.__name__ = f"{name}_are_cast"
    rule.__doc__ = f"{overload} of {device_type} casts a boolean {option}, so that it is added to the scores."
    broken(overload, device_type, "AMP-CAST-055")(rule)


for _device_type in ("cpu", "cuda"):
    _casts_masks(f"masks_of_attention_on_{_device_type}", "scaled_dot_product_attention", _device_type, "attn_mask")


# Options whose value changes the result of a usual call rarely, which is how their loss went unnoticed.
_LOSING = {
    "ctc_loss.IntList": "zero_infinity",
    "pinverse": "rcond",
    "avg_pool3d": "count_include_pad",
    "nll_loss2d": "ignore_index",
}


def _loses(overload: str, option: str) -> None:
    def rule(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
        return RULES["fp32"](op, {name: value for name, value in named.items() if name != option}, amp_dtype)

    rule.__name__ = f"{overload.partition('.')[0]}_loses_{option}"
    rule.__doc__ = f"{overload} of the CPU computes as if {option} were not given."
    broken(overload, "cpu", "AMP-CAST-055")(rule)


for _overload, _option in _LOSING.items():
    _loses(_overload, _option)
