"""Numerics: 16-bit functions of one variable, for each of their 65,536 inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.harness.check import Case, contract
from conformance.harness.targets import Target
from conformance.oracles import unary
from conformance.oracles.float_formats import FORMATS, Format
from conformance.oracles.float_patterns import all_patterns, narrowed

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
    "error": ("erf", "erfc", "gelu", "gelu_tanh"),
    "sigmoids": ("sigmoid", "silu", "logsigmoid", "softplus", "mish"),
    "units": ("elu", "selu", "leaky_relu", "hardsigmoid", "hardswish"),
}
# Each way runs another kernel: whole vectors, vectors across threads, single elements, what vectors leave over.
LAYOUTS: dict[str, Callable[[Unary, Tensor], Tensor]] = {
    "whole": lambda call, inputs: call(inputs),
    "threads": lambda call, inputs: call(inputs.repeat(2))[2**16 :],
    "strided": lambda call, inputs: call(torch.stack([inputs, inputs], 1)[:, 0]),
    "tails": lambda call, inputs: torch.cat([call(part) for part in inputs.split(4099)]),
    "in place": lambda call, inputs: inputs.clone().copy_(call(inputs)),
}


def _wrong(seen: Tensor, op: str, form: Format) -> str:
    """Say how many of the 65,536 results are unacceptable, and what the first one is."""
    outside = unary.outside(seen, op, form)
    if not bool(outside.any()):
        return "none"
    at = int(outside.nonzero()[0])
    low, high = (int(end[at]) for end in unary.acceptable(op, form))
    found = int(seen.cpu().view(torch.int16)[at]) & 0xFFFF
    promised = " to ".join(dict.fromkeys(f"0x{unary.pattern(end):04X}" for end in (low, high)))
    return f"{int(outside.sum())}; the first, input 0x{at:04X}: 0x{found:04X} in place of {promised}"


def _holds(case: Case, target: Target, dtype: torch.dtype, ops: tuple[str, ...]) -> None:
    form = FORMATS[dtype]
    inputs = all_patterns(form).to(target.device)
    layouts = list(LAYOUTS) if case.level != "quick" else ["whole", "strided"]
    for op in ops:
        for layout in layouts:
            seen = LAYOUTS[layout](_call(op), inputs)
            case.equal(f"{op}, {layout}: dtype", seen.dtype, dtype)
            case.equal(f"{op}, {layout}: wrong results for 65536 inputs", _wrong(seen, op, form), "none")


@contract("AMP-NUMERICS-044")
@pytest.mark.parametrize("family", EXACT)
def test_exact_functions(case: Case, target: Target, amp_dtype: torch.dtype, family: str) -> None:
    _holds(case, target, amp_dtype, EXACT[family])


# MPS is left out: Metal's mathematics promises less (Metal Shading Language, relative error of 16-bit functions).
@contract("AMP-NUMERICS-045", on=("cpu", "cuda", "xpu"))
@pytest.mark.parametrize("family", ROUNDED)
def test_rounded_functions(case: Case, target: Target, amp_dtype: torch.dtype, family: str) -> None:
    _holds(case, target, amp_dtype, ROUNDED[family])


# On CUDA's documented fp32 list, as "torch.amp, Autocast Op Reference" has it.
FP32_LIST = (
    "exp", "expm1", "log", "log2", "log10", "log1p", "reciprocal", "rsqrt", "acos", "asin", "cosh", "sinh", "tan",
    "softplus",
)  # fmt: skip


@contract("AMP-NUMERICS-046", on="cuda")
@pytest.mark.parametrize("op", FP32_LIST)
def test_functions_of_the_fp32_list(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    form = FORMATS[amp_dtype]
    inputs = all_patterns(form).to(target.device)
    for layout in ("whole", "strided"):
        with target.autocast(amp_dtype):
            seen = LAYOUTS[layout](_call(op), inputs)
        case.equal(f"{op}, {layout}: dtype", seen.dtype, torch.float32)
        # Rounding is monotonic: what is within the error of fp32 rounds into the interval.
        stored = narrowed(seen.detach().cpu().view(torch.int32).long() & 0xFFFF_FFFF, form)
        case.equal(f"{op}, {layout}: wrong results for 65536 inputs", _wrong(stored, op, form), "none")
        # Between 1/8 and 1 a result is a 16-bit number by chance, once in thousands, or where the input is 2^-k.
        part = ((inputs >= 0.125) & (inputs < 1)).cpu()
        share = float((stored.float() == seen.cpu())[part].double().mean())
        case.at_most(f"{op}, {layout}: share of the results that are numbers of {form.name}", share, 0.05)
