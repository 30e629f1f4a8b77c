"""Check 16-bit unary functions for all 65,536 inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS, Format
from . import unary_functions
from .bit_patterns import all_patterns, narrowed

Unary = Callable[[Tensor], Tensor]

# By name at the time of the call, so that what is judged is what a user would get.
_FUNCTIONAL = (
    "silu",
    "softplus",
    "logsigmoid",
    "mish",
    "elu",
    "selu",
    "leaky_relu",
    "hardsigmoid",
    "hardswish",
    "relu6",
)


def _call(op: str) -> Unary:
    if op.startswith("gelu"):
        return lambda x: F.gelu(x, approximate="tanh" if op == "gelu_tanh" else "none")
    owner = F if op in _FUNCTIONAL else torch
    return lambda x: getattr(owner, op)(x)


# IEEE 754 defines these, or they follow from the bits: one result is right for every input.
EXACT = {
    "bits": ("abs", "neg", "relu", "relu6"),
    "rounding": ("floor", "ceil", "round", "trunc", "frac"),
    "roots": ("sqrt", "reciprocal", "square"),
}
ROUNDED = {
    "exponentials": ("exp", "exp2", "expm1"),
    "logarithms": ("log", "log2", "log10", "log1p"),
    "roots": ("rsqrt",),
    "trigonometric": ("sin", "cos", "tan", "asin", "acos", "atan"),
    "hyperbolic": ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    "error": ("erf", "erfc", "erfinv", "gelu", "gelu_tanh"),
    "sigmoids": ("sigmoid", "silu", "logsigmoid", "softplus", "mish"),
    "units": ("elu", "selu", "leaky_relu", "hardsigmoid", "hardswish"),
}


def _in_place(op: str, inputs: Tensor) -> Tensor:
    """Call the op in place on a copy; on what has no such form, as a function."""
    if hasattr(torch.Tensor, f"{op}_"):
        changed: Tensor = getattr(inputs.clone(), f"{op}_")()
        return changed
    return getattr(F, op)(inputs.clone(), inplace=True) if op in _IN_PLACE else _call(op)(inputs)


def _into(op: str, inputs: Tensor) -> Tensor:
    """Call the op with out=, or as a method, or, on what has neither, as a function."""
    if op not in _FUNCTIONAL and op not in ("relu", "gelu", "gelu_tanh"):
        return getattr(torch, op)(inputs, out=torch.full_like(inputs, 7.0))
    return getattr(inputs, op)() if hasattr(inputs, op) else _call(op)(inputs)


_IN_PLACE = ("silu", "mish", "elu", "selu", "leaky_relu", "hardsigmoid", "hardswish", "relu6")

# Each way runs another kernel: whole vectors, vectors across threads, single elements, what vectors leave over.
LAYOUTS: dict[str, Callable[[str, Tensor], Tensor]] = {
    "whole": lambda op, inputs: _call(op)(inputs),
    "strided": lambda op, inputs: _call(op)(torch.stack([inputs, inputs], 1)[:, 0]),
    "in place": _in_place,
    "out=": _into,
    "threads": lambda op, inputs: _call(op)(inputs.repeat(2))[2**16 :],
    "tails": lambda op, inputs: torch.cat([_call(op)(part) for part in inputs.split(4099)]),
}


def _wrong(seen: Tensor, op: str, form: Format) -> str:
    """Say how many of the 65,536 results are unacceptable, and what the first one is."""
    outside = unary_functions.outside(seen, op, form)
    if not bool(outside.any()):
        return "none"
    at = int(outside.nonzero()[0])
    low, high = (int(end[at]) for end in unary_functions.acceptable(op, form))
    found = int(seen.cpu().view(torch.int16)[at]) & 0xFFFF
    promised = " to ".join(dict.fromkeys(f"0x{unary_functions.pattern(end):04X}" for end in (low, high)))
    return f"{int(outside.sum())}; the first, input 0x{at:04X}: 0x{found:04X} in place of {promised}"


def _holds(case: Case, target: Target, dtype: torch.dtype, ops: tuple[str, ...]) -> None:
    form = FORMATS[dtype]
    inputs = all_patterns(form).to(target.device)
    layouts = list(LAYOUTS)[: case.samples(quick=2, standard=6, full=6)]
    for op in ops:
        for layout in layouts:
            seen = LAYOUTS[layout](op, inputs)
            case.equal(f"{op}, {layout}: dtype", seen.dtype, dtype)
            wrong = _wrong(seen, op, form)
            case.equal(f"{op}, {layout}: wrong results for 65536 inputs", wrong, "none")
            if wrong != "none":
                far = unary_functions.farthest(seen, op, form)
                case.at_most(f"{op}, {layout}: places between a result and the nearest right one", far, 1)


@contract("AMP-NUMERICS-044", on=("cpu", "cuda", "xpu"))
@pytest.mark.parametrize("family", EXACT)
def test_exact_functions(case: Case, target: Target, amp_dtype: torch.dtype, family: str) -> None:
    case.require_subnormals(target, amp_dtype)
    _holds(case, target, amp_dtype, EXACT[family])


# MPS is left out: Metal's mathematics promises less (Metal Shading Language, relative error of 16-bit functions).
@contract("AMP-NUMERICS-045", on=("cpu", "cuda", "xpu"))
@pytest.mark.parametrize("family", ROUNDED)
def test_rounded_functions(case: Case, target: Target, amp_dtype: torch.dtype, family: str) -> None:
    case.require_subnormals(target, amp_dtype)
    _holds(case, target, amp_dtype, ROUNDED[family])


# On CUDA's documented fp32 list, as "torch.amp, Autocast Op Reference" has it.
FP32_LIST = (
    "exp", "expm1", "log", "log2", "log10", "log1p", "reciprocal", "rsqrt", "acos", "asin", "cosh", "sinh", "tan",
    "erfinv", "softplus",
)  # fmt: skip


@contract("AMP-NUMERICS-046", on="cuda")
@pytest.mark.parametrize("op", FP32_LIST)
def test_functions_of_the_fp32_list(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    form = FORMATS[amp_dtype]
    inputs = all_patterns(form).to(target.device)
    for layout in ("whole", "strided"):
        with target.autocast(amp_dtype):
            seen = LAYOUTS[layout](op, inputs)
        case.equal(f"{op}, {layout}: dtype", seen.dtype, torch.float32)
        # Rounding is monotonic: what is within the error of fp32 rounds into the interval.
        stored = narrowed(seen.detach().cpu().view(torch.int32).long() & 0xFFFF_FFFF, form)
        case.equal(f"{op}, {layout}: wrong results for 65536 inputs", _wrong(stored, op, form), "none")
        # Between 1/8 and 1 a result is a 16-bit number by chance, once in thousands, or where the input is 2^-k.
        part = ((inputs >= 0.125) & (inputs < 1)).cpu()
        share = float((stored.float() == seen.cpu())[part].double().mean())
        case.at_most(f"{op}, {layout}: share of the results that are numbers of {form.name}", share, 0.05)
