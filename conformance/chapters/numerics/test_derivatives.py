"""Check gradients of functions of one 16-bit number with every option, and what an eps keeps finite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS
from .bit_patterns import all_patterns
from .support import largest_share
from .value_ops import named

Unary = Callable[[Tensor], Tensor]


def _all(names: str) -> dict[str, Unary]:
    return {name: named(name) for name in names.split()}


# By family; those of AMP-NUMERICS-045 and their neighbours, with options that are not the default.
DERIVED: dict[str, dict[str, Unary]] = {
    "exponentials": _all("exp exp2 expm1 sigmoid logit")
    | {"logit with eps": lambda x: torch.logit(x, eps=0.125), "logaddexp": lambda x: torch.logaddexp(x, 1 - x)},
    "logarithms": _all("log log2 log10 log1p lgamma digamma")
    | {"xlogy": lambda x: torch.xlogy(x, x), "entr": lambda x: torch.special.entr(x)},
    "roots": _all("sqrt rsqrt reciprocal square")
    | {
        "pow 2": lambda x: x**2,
        "pow 3": lambda x: x**3,
        "pow 0.5": lambda x: x**0.5,
        "pow 1.5": lambda x: x**1.5,
        "pow -1": lambda x: x**-1,
        "a number over it": lambda x: 3.0 / x,
        "hypot": lambda x: torch.hypot(x, torch.ones_like(x)),
    },
    "trigonometric": _all("sin cos tan asin acos atan sinc") | {"atan2": lambda x: torch.atan2(x, torch.ones_like(x))},
    "hyperbolic": _all("sinh cosh tanh asinh acosh atanh tanhshrink"),
    "error": _all("erf erfc erfinv gelu i0")
    | {"gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "ndtr": lambda x: torch.special.ndtr(x)},
    "sigmoids": _all("silu softplus logsigmoid mish softsign hardsigmoid")
    | {
        "softplus with beta": lambda x: F.softplus(x, beta=2.0),
        "softplus with threshold": lambda x: F.softplus(x, beta=0.5, threshold=4.0),
        "softplus with a large beta": lambda x: F.softplus(x, beta=8.0, threshold=64.0),
    },
    "units": _all("relu relu6 elu selu celu leaky_relu hardswish hardtanh softshrink hardshrink")
    | {
        "elu with alpha": lambda x: F.elu(x, alpha=0.5),
        "celu with alpha": lambda x: F.celu(x, alpha=2.0),
        "leaky_relu with a slope": lambda x: F.leaky_relu(x, 0.25),
        "hardtanh with bounds": lambda x: F.hardtanh(x, -3.0, 5.0),
        "softshrink with lambda": lambda x: F.softshrink(x, 1.5),
        "hardshrink with lambda": lambda x: F.hardshrink(x, 1.5),
        "threshold": lambda x: F.threshold(x, 0.5, -2.0),
        "prelu": lambda x: F.prelu(x, torch.full((1,), 0.25, dtype=x.dtype, device=x.device)),
        "clamp": lambda x: x.clamp(-3, 5),
    },
}
# Of a formula that is computed in 16 bits step by step, each step on a number of the size of what it gives.
STEPS = 4
NO_EXPONENTIAL_OVERFLOWS = 64.0
"""Up to here in float32, where the result does not."""


@contract("AMP-NUMERICS-115", on=("cpu", "cuda", "xpu"))
@pytest.mark.parametrize("family", DERIVED)
def test_functions_and_gradients(case: Case, target: Target, amp_dtype: torch.dtype, family: str) -> None:
    case.require_subnormals(target, amp_dtype)
    form = FORMATS[amp_dtype]
    inputs = all_patterns(form)
    inputs = inputs[inputs.isfinite()][:: case.samples(quick=7, standard=1, full=1)]
    for name, function in DERIVED[family].items():
        leaf = inputs.clone().to(target.device).requires_grad_()
        try:
            result = function(leaf)
        except NotImplementedError as error:
            case.note(f"{name}: no kernel for {form.name}", str(error).splitlines()[0][:80])
            continue
        (gradient,) = torch.autograd.grad(result, leaf, torch.ones_like(result))
        value, slope, bend = _derivatives(function, inputs)
        wide = inputs.float().to(target.device).requires_grad_()
        in_float32 = function(wide)
        (slope_in_float32,) = torch.autograd.grad(in_float32, wide, torch.ones_like(in_float32))
        for what, seen, exact, next_one, known in (
            ("result", result, value, slope, in_float32),
            ("gradient", gradient, slope, bend, slope_in_float32),
        ):
            # What float32 loses as well, whose range is bfloat16's, is no matter of 16 bits.
            lost = ~known.detach().cpu().isfinite() & (inputs.abs() > NO_EXPONENTIAL_OVERFLOWS)
            exact = exact.masked_fill(lost, float("nan"))
            share, at = _error(seen.detach().cpu().double(), exact, (inputs.double() * next_one).abs(), amp_dtype)
            case.equal(f"{name}: dtype of the {what}", seen.dtype, amp_dtype)
            case.at_most(f"{name}: error of the {what}, at {float(inputs[at]):g}", share, 1.0, "of the bound")


def _derivatives(function: Unary, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a function's values and its first two derivatives, float64."""
    x = inputs.double().requires_grad_()
    value = function(x)
    (slope,) = torch.autograd.grad(value, x, torch.ones_like(value), create_graph=True)
    bend = torch.zeros_like(slope)
    if slope.requires_grad:
        with contextlib.suppress(RuntimeError):  # hardsigmoid, of straight lines: "not implemented"
            (bend,) = torch.autograd.grad(slope, x, torch.ones_like(slope), allow_unused=True, materialize_grads=True)
    return value.detach(), slope.detach(), bend


def _error(seen: Tensor, exact: Tensor, spread: Tensor, dtype: torch.dtype) -> tuple[float, int]:
    """Return the largest error in units of the bound, and where it is.

    The bound is that of STEPS roundings, of the result or of numbers up to 1 on the way, and of as many relative ones
    of the input, by `spread`. What is beyond a quarter of the range says nothing.
    """
    unit, most = torch.finfo(dtype).eps / 2, torch.finfo(dtype).max
    judged = exact.isfinite() & (exact.abs() < most / 4) & spread.isfinite()
    return largest_share(seen, exact, STEPS * unit * (exact.abs().clamp_min(1) + spread), judged)


Guarded = Callable[[Tensor, dict[str, Any]], Tensor]

# What an eps guards: operands of four rows of 16, and the eps, if it is not the default, by name.
GUARDED: dict[str, Guarded] = {
    "layer_norm": lambda x, eps: F.layer_norm(x, x.shape[-1:], **eps),
    "rms_norm": lambda x, eps: F.rms_norm(x, x.shape[-1:], **eps),
    "group_norm": lambda x, eps: F.group_norm(x, 2, **eps),
    "instance_norm": lambda x, eps: F.instance_norm(x.view(4, 4, 4), **eps),
    "batch_norm": lambda x, eps: F.batch_norm(x, None, None, training=True, **eps),
    "normalize": lambda x, eps: F.normalize(x, **eps),
    "normalize-1": lambda x, eps: F.normalize(x, p=1.0, **eps),
    "cosine_similarity": lambda x, eps: F.cosine_similarity(x, x.flip(0), **eps),
    "pairwise_distance": lambda x, eps: F.pairwise_distance(x, x.roll(1, 0), **eps),
    "cosine_embedding_loss": lambda x, eps: F.cosine_embedding_loss(x, x.flip(0), torch.ones_like(x[:, 0])),
    "triplet_margin_loss": lambda x, eps: F.triplet_margin_loss(x, x.roll(1, 0), x.roll(2, 0), **eps),
    "poisson_nll_loss": lambda x, eps: F.poisson_nll_loss(x.abs(), x.abs(), log_input=False, **eps),
    "gaussian_nll_loss": lambda x, eps: F.gaussian_nll_loss(x, x.roll(1, 0), x.abs(), **eps),
    "local_response_norm": lambda x, eps: F.local_response_norm(x.view(4, 4, 4), 2),
}
OPERANDS: dict[str, Callable[[], Tensor]] = {
    "zero": lambda: torch.zeros(4, 16),
    "constant": lambda: torch.full((4, 16), 3.0),
    "tiny": lambda: torch.linspace(-1, 1, 64).view(4, 16) * 1e-7,
}
EPS: dict[str, dict[str, Any]] = {"the default eps": {}, "eps 1e-12": {"eps": 1e-12}}


@contract("AMP-NUMERICS-116")
@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize("place", ["in", "outside"])
def test_eps_keeps_from_zero(case: Case, target: Target, amp_dtype: torch.dtype, place: str, name: str) -> None:
    """Results and gradients are finite wherever those in float32 are, and not beyond the range."""
    call, most = GUARDED[name], torch.finfo(amp_dtype).max
    for which, eps in EPS.items():
        for kind, make in OPERANDS.items():
            found: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
            for dtype in (amp_dtype, torch.float32):
                leaf = make().to(target.device, dtype).requires_grad_()
                region = target.autocast(dtype) if place == "in" and dtype is amp_dtype else contextlib.nullcontext()
                with region:
                    result = call(leaf, eps)
                (gradient,) = torch.autograd.grad(result.sum(), leaf)
                found[dtype] = result.detach(), gradient
            for what, seen, exact in zip(("result", "gradient"), found[amp_dtype], found[torch.float32], strict=True):
                lost = ~seen.isfinite() & (exact.abs() < most)
                case.equal(f"{which}, {kind} operands: elements of the {what} that are lost", int(lost.sum()), 0)
