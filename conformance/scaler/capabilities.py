"""Capabilities that a loss scaler may lack, and the calls of a history that need them."""

from __future__ import annotations

from typing import Any, TypeAlias

from .model import BF16, FP16, Output
from .optimizers import FUSED

Call: TypeAlias = tuple[Any, ...]
"""The name of one of the methods of `differential.World` and its arguments, all plain values."""

CAPABILITIES = {
    "arguments": "step() forwards further arguments to optimizer.step()",
    "bf16_gradients": "bf16 gradients",
    "closure": "step(closure=...) raises",
    "containers": "scale() accepts lists and tuples of any depth",
    "copies": "copy.deepcopy() between iterations returns an independent scaler",
    "disabled": "with enabled=False it is a no-op",
    "errors": "calls out of order, and invalid outputs, states and scales, raise",
    "extremes": "scales at both ends of fp32, at zero and at infinity; growth stays finite",
    "fp16_refusal": "unscale_() raises for fp16 gradients",
    "getters": "get_growth_factor(), get_backoff_factor() and get_growth_interval()",
    "intact_gradients": "unscale_() that raises for fp16 gradients leaves all gradients as they were",
    "is_enabled": "is_enabled()",
    "narrow_losses": "0-dim losses in fp16 or bf16 are scaled in fp32",
    "new_scale": "update(new_scale), a float or a tensor",
    "no_gradients": "step() of an optimizer without gradients raises",
    "pickles": "pickling between iterations, and its error within one",
    "return_values": "step() returns what optimizer.step() returns",
    "self_scaling": "optimizers that unscale by themselves get grad_scale and found_inf",
    "setters": "set_growth_factor(), set_backoff_factor() and set_growth_interval()",
    "sparse": "sparse gradients",
    "state": "state_dict() and load_state_dict()",
}
"""Optional capabilities by name; required are scale(), unscale_(), step(), update() and get_scale()."""

_NEEDS = {
    "update_to": "new_scale",
    "update_to_tensor": "new_scale",
    "set_growth_factor": "setters",
    "set_backoff_factor": "setters",
    "set_growth_interval": "setters",
    "save": "state",
    "load": "state",
    "load_state": "state",
    "load_nothing": "state",
    "pickle": "pickles",
    "deepcopy": "copies",
    "switch": "copies",
}
# The range of scales for a scaler without "extremes".
MODERATE = (2.0**-40, 2.0**40)


def lacking(call: Call, without: frozenset[str]) -> str | None:
    """Return a capability in `without` that the call needs in every state of the scaler; None if there is none."""
    name, *arguments = call
    needs = [_NEEDS[name]] if name in _NEEDS else []
    if name == "step":
        which, words, named = (*arguments, (), ())[:3] if len(arguments) == 1 else arguments
        needs += ["self_scaling"] if which == FUSED else []
        needs += ["closure"] if "closure" in dict(named) else ["arguments"] if words or named else []
    elif name == "scale":
        needs += ["containers"] if isinstance(arguments[0], (list, tuple)) else []
        needs += ["narrow_losses"] if _narrow(arguments[0]) else []
    elif name in ("backward", "unscale_"):
        which = arguments[0].which if name == "backward" else arguments[0]
        needs += ["self_scaling"] if which == FUSED else []
    if name in ("update_to", "load_state") and not MODERATE[0] <= arguments[0] <= MODERATE[1]:
        needs.append("extremes")
    return next((need for need in needs if need in without), None)


def _narrow(outputs: Any) -> bool:
    if isinstance(outputs, (list, tuple)):
        return any(map(_narrow, outputs))
    return isinstance(outputs, Output) and outputs.form in (FP16, BF16) and outputs.dimensions == 0
