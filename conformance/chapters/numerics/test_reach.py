"""Check rarer calls: large batches of matrices, long sums, inference, derivatives of activation functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers import exact
from ...oracles.numbers.formats import FORMATS, FP32, Format, narrow, rounded, tensor_of
from .matmul_spellings import integers
from .op_error import half_spacing
from .support import by_kernel, compare

# Matrices, m, k, n: more matrices than a kernel's block of them, and no multiple of any; more than 8 bits count; and
# more than 16 do, or a launch takes along its last axis (CUDA C++ Programming Guide, maximum z-dimension of a grid).
SIZES = ((33, 3, 5, 4), (301, 2, 3, 2))
MANY = (65_536 + 301, 2, 3, 2)
BATCHED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": lambda left, right: torch.bmm(left, right),
    "matmul": lambda left, right: left @ right,
    "baddbmm": lambda left, right: torch.baddbmm(torch.zeros((), dtype=left.dtype, device=left.device), left, right),
    "einsum": lambda left, right: torch.einsum("bij,bjk->bik", left, right),
}


def _many_matrices(
    case: Case, target: Target, dtype: torch.dtype, rng: torch.Generator, op: str, *, backward: bool
) -> None:
    # Other batched calls, and the backward, run a bmm as well.
    many = case.level != "quick" or (op == "bmm" and not backward)
    for batch, m, k, n in (*SIZES, MANY) if many else SIZES:
        # Results are at most 5 * 7 * 7 = 245, the gradients 3 * 5 * 7: integers that both types hold.
        left, right, seed = integers(rng, 7, batch, m, k), integers(rng, 7, batch, k, n), integers(rng, 3, batch, m, n)
        leaves = [source.clone().to(target.device).requires_grad_() for source in (left, right)]
        what = f"{op} of {batch} matrices" + ", more than a launch's last axis counts (65,535)" * (batch > 65_535)
        with full_precision(target.device_type):
            with target.autocast(dtype):
                seen = BATCHED[op](*leaves)
            if not backward:
                case.identical(what, seen + 0.0, exact.product(left, right).to(dtype))
                continue
            seen.backward(seed.to(target.device, seen.dtype))
        expected = exact.product(seed, right.mT), exact.product(left.mT, seed)
        for name, leaf, gradient in zip(("left", "right"), leaves, expected, strict=True):
            case.identical(f"{what}: gradient of {name}", leaf.grad + 0.0, gradient.float())


@contract("AMP-NUMERICS-040")
@pytest.mark.parametrize("op", BATCHED)
def test_many_matrices(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str) -> None:
    _many_matrices(case, target, amp_dtype, rng, op, backward=False)


@contract("AMP-NUMERICS-011")
@pytest.mark.parametrize("op", BATCHED)
def test_gradients_of_many_matrices(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    _many_matrices(case, target, amp_dtype, rng, op, backward=True)


WITHOUT_GRADIENTS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@contract("AMP-NUMERICS-040")
@pytest.mark.parametrize("mode", WITHOUT_GRADIENTS)
def test_products_without_gradients(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, mode: str
) -> None:
    # Inference may take other kernels, quantised ones among them: no row of weights has a step of 1 in 127 of its size.
    left, weight, bias = integers(rng, 3, 19, 40), integers(rng, 2, 24, 40), integers(rng, 9, 24)
    weight[:, 0] = 31.0
    left[:, 0] = 1.0
    product = exact.product(left, weight.t())
    layer = torch.nn.Linear(40, 24).to(target.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    x, w, b = (source.to(target.device) for source in (left, weight, bias))
    calls: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "mm": (lambda: torch.mm(x, w.t()), product),
        "bmm": (lambda: torch.bmm(x[None], w.t()[None])[0], product),
        "F.linear": (lambda: F.linear(x, w, b), product + bias),
        "Linear": (lambda: layer.eval()(x), product + bias),
        "addmm": (lambda: torch.addmm(b, x, w.t()), product + bias),
        "conv2d": (lambda: F.conv2d(x[..., None, None], w[..., None, None], b).flatten(1), product + bias),
    }
    with full_precision(target.device_type), WITHOUT_GRADIENTS[mode](), target.autocast(amp_dtype):
        seen = {name: call() for name, (call, _) in calls.items()}
    for name, (_, expected) in calls.items():
        case.identical(
            f"{name} under {mode}", seen[name].clone() + 0.0, rounded(expected, FORMATS[amp_dtype]).to(amp_dtype)
        )


FACTORS = ((1, 1), (0.5, 1), (1, 2), (-2, 0.5), (0, 1), (0.5, 0), (0, 0))


@contract("AMP-NUMERICS-040")
@pytest.mark.parametrize(("beta", "alpha"), FACTORS, ids=str)
@pytest.mark.parametrize("size", ["small", "large"])
def test_factors_of_what_is_added(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, beta: float, alpha: float, size: str
) -> None:
    """Some libraries take large products only."""
    inner = 9 if size == "small" else 130
    left, right, added = (2 * integers(rng, 1, *shape) for shape in ((2, inner, inner), (2, inner, 5), (2, inner, 5)))
    products = exact.product(left, right)
    if beta == 0:
        added = torch.full_like(added, torch.nan)  # which is then not looked at (torch.addmm docstring)
    sums = {
        "addmm": (added[0], products[0]),
        "addmv": (added[0, :, 0], products[0, :, 0]),
        "baddbmm": (added, products),
        "addbmm": (added[0], products.sum(0)),
        "addr": (added[0], torch.outer(left[0, 0].double(), right[0, 0].double())),
    }
    options = {"beta": beta, "alpha": alpha}
    for place, region in (("", True), (" outside", False)):
        dtype = torch.float32 if region else amp_dtype
        a, x, y = (source.to(target.device, dtype) for source in (added, left, right))
        with full_precision(target.device_type), target.autocast(amp_dtype, enabled=region):
            seen = {
                "addmm": torch.addmm(a[0], x[0], y[0], **options),
                "addmv": torch.addmv(a[0, :, 0], x[0], y[0, :, 0], **options),
                "baddbmm": torch.baddbmm(a, x, y, **options),
                "addbmm": torch.addbmm(a[0], x, y, **options),
                "addr": torch.addr(a[0], x[0, 0], y[0, 0], **options),
            }
        for name, (sum_of, product) in sums.items():
            expected = alpha * product + (beta * sum_of.double() if beta else 0.0)
            what = f"{name}{place}, beta {beta}, alpha {alpha}"
            case.identical(what, seen[name] + 0.0, expected.to(seen[name].dtype) + 0.0)


@contract("AMP-NUMERICS-040")
@pytest.mark.parametrize("width", range(1, 18))
def test_every_width(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, width: int) -> None:
    """Few columns, of any number of rows, with a bias: kernels for narrow operands have paths of their own."""
    for rows, inner in ((1, 5), (2, 8), (17, 33), (127, 16), (128, 9), (130, 8), (257, 3)):
        left, right, bias = (2 * integers(rng, 3, *shape) for shape in ((rows, inner), (width, inner), (width,)))
        expected = left.double() @ right.double().t()
        x, weight, added = (source.to(target.device, amp_dtype) for source in (left, right, bias))
        with full_precision(target.device_type):
            seen = {
                "linear": F.linear(x, weight, added),
                "addmm": torch.addmm(added, x, weight.t()),
                "without bias": F.linear(x, weight) + added,
            }
        for name, product in seen.items():
            what = f"{name}: {rows} rows of {inner}, {width} columns"
            case.identical(what, product + 0.0, (expected + bias.double()).to(amp_dtype))


@contract("AMP-NUMERICS-022")
@pytest.mark.parametrize("op", ["mm", "linear", "bmm"])
def test_large_fp32_products_read_every_bit(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    # A product with a permutation gives the other operand back, all 24 bits of each number; of a size for matrix units.
    size = case.samples(quick=512, standard=512, full=2048)
    numbers, order = torch.randn(size, size, generator=rng), torch.randperm(size, generator=rng)
    permutation = torch.eye(size)[order]
    call = {
        "mm": lambda left, right: torch.mm(left, right),
        "linear": lambda left, right: F.linear(left, right.t()),
        "bmm": lambda left, right: torch.bmm(left[None], right[None])[0],
    }[op]
    n, p = numbers.to(target.device), permutation.to(target.device)
    with full_precision(target.device_type), target.autocast(amp_dtype), target.autocast(amp_dtype, enabled=False):
        left, right = call(p, n), call(n, p)
    case.identical(f"{op}: a permutation of rows, size {size}", left, numbers[order])
    case.identical(f"{op}: a permutation of columns, size {size}", right, numbers[:, order.argsort()])


@contract("AMP-NUMERICS-002")
def test_casts_of_a_million(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    # Beyond the size at which kernels change, and no multiple of a vector.
    form, count, size = FORMATS[amp_dtype], 1021, 2**20 + 1021
    patterns = torch.randint(0, 2**32, (count,), generator=rng).tolist()
    repeats = -(-size // count)
    source = tensor_of(patterns, FP32).repeat(repeats)[:size]
    expected = tensor_of([narrow(pattern, form) for pattern in patterns], form).repeat(repeats)[:size]
    case.identical(f"{size} fp32 numbers", source.to(target.device).to(amp_dtype), expected)


LENGTHS = (4096 + 5, 65536 + 9)


@contract("AMP-NUMERICS-025")
@pytest.mark.parametrize("op", ["sum", "mean", "norm", "cumsum", "amax", "logsumexp"])
def test_long_reductions_leave_no_element_out(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    form, lengths = FORMATS[amp_dtype], LENGTHS[: case.samples(quick=1, standard=2, full=2)]
    for length in lengths:
        for dtype in (amp_dtype, torch.float32):
            # One element is different; each of these places is the tail of some kernel.
            for place in (0, length // 2, length - 6, length - 1):
                # exp(30) outweighs all the ones that zeros give, so that logsumexp is 30.
                large = 30.0 if op == "logsumexp" else 3.0
                values = torch.zeros(length)
                values[place] = large
                with target.autocast(amp_dtype):
                    seen = getattr(values.to(target.device, dtype), op)(*([0] if op in ("cumsum", "logsumexp") else []))
                what = f"{op} of {length} of {dtype}, the one at {place}"
                value = seen[-1] if op == "cumsum" else seen
                if op == "mean":
                    error = abs(float(value) * length / large - 1) / _unit(value, form)
                    # A product or a quotient, and the store.
                    case.at_most(f"{what}: relative error", error, 2.0, "u of its type")
                else:
                    case.equal(what, float(value), large)


def _unit(value: Tensor, form: Format) -> float:
    return FORMATS[value.dtype].unit_roundoff if value.dtype in FORMATS else form.unit_roundoff


STEP = 128.0
"""By how much the logit of each key is above that of the one before it: e^-104 is nothing in fp32, so that softmax is 1
for the last key that is seen."""


def _climbing(queries: int, keys: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return queries, all alike, and keys whose logits climb by STEP; a place is written to base 16, for 16 bits."""
    places = torch.arange(keys).float()
    query, key = torch.zeros(1, 2, queries, 16), torch.zeros(1, 2, keys, 16)
    query[..., 0], query[..., 1] = STEP / scale * 16, STEP / scale
    key[..., 0], key[..., 1] = places // 16, places % 16
    # All below zero, so that no finite number may stand for what is masked.
    query[..., 2], key[..., 2] = -STEP / scale * 16, float(keys // 16 + 1)
    return query, key


@dataclass(frozen=True)
class Seen:
    """Queries, keys, the options of attention, and the last key that each query sees."""

    queries: int
    keys: int
    options: Callable[[], dict[str, Any]]
    last: Callable[[int], int]


def _every_third_hidden() -> Tensor:
    """Return a mask (true: seen) that hides every third key, and the last ten."""
    mask = torch.arange(261) % 3 != 0
    mask[-10:] = False
    return mask.expand(7, 261)


ATTENTIONS = {
    "causal": Seen(261, 261, lambda: {"is_causal": True}, lambda query: query),
    # The mask of a rectangle begins at its upper left corner (scaled_dot_product_attention docstring).
    "causal, fewer queries": Seen(37, 261, lambda: {"is_causal": True}, lambda query: query),
    "causal, scale": Seen(65, 65, lambda: {"is_causal": True, "scale": 8.0}, lambda query: query),
    "scale": Seen(7, 261, lambda: {"scale": 0.0625}, lambda query: 260),
    "mask": Seen(7, 261, lambda: {"attn_mask": _every_third_hidden()}, lambda query: 250),
}


@contract("AMP-NUMERICS-048")
@pytest.mark.parametrize("name", ATTENTIONS, ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def test_attention_sees_what_it_is_told_to(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str
) -> None:
    seen = ATTENTIONS[name]
    options = {
        key: value.to(target.device) if isinstance(value, Tensor) else value for key, value in seen.options().items()
    }
    query, key = _climbing(seen.queries, seen.keys, options.get("scale", 0.25))
    # Powers of two, so that another key's value is twice or half as large at least, wherever it is not the same.
    value = 2.0 ** torch.randint(0, 8, (1, 2, seen.keys, 16), generator=rng)
    parts = [part.to(target.device) for part in (query, key, value)]
    last = torch.tensor([seen.last(query) for query in range(seen.queries)])

    def run() -> tuple[torch.dtype, float]:
        with full_precision(target.device_type), target.autocast(amp_dtype):
            result = F.scaled_dot_product_attention(*parts, **options)
        return result.dtype, float((result.cpu().double() / value[:, :, last] - 1).abs().max())

    ran = by_kernel(case, target, rng, run)
    # A kernel that evaluates 2^fma(logit, log2 e, -maximum) with the product of the maximum rounded is off by 2^-24 of
    # a logit of 34,816, which is 2^-9, in the exponent; the sum that divides is off alike, or not.
    what = f"{name}: {seen.queries} queries, {seen.keys} keys, the value of the last key seen, relative error"
    compare(case, what, {kernel: error for kernel, (_, error) in ran.items()})
    for kernel, (dtype, error) in ran.items():
        case.equal(f"{kernel}: dtype", dtype, amp_dtype)
        case.at_most(f"{kernel}: {what}", error, 2.0**-6)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _gelu_tanh(x: Tensor) -> Tensor:
    inner, slope = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3), math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + inner.tanh()) + 0.5 * x * (1 - inner.tanh() ** 2) * slope


def _mish(x: Tensor) -> Tensor:
    inner = torch.log1p(torch.exp(x)).tanh()
    return inner + x * (1 - inner**2) * _sigmoid(x)


# Each activation with its derivative, written out (float64). PyTorch keeps the input of these for backward
# (derivatives.yaml), and computes in fp32 (opmath) what it stores in 16 bits. logsigmoid is not among them: on a CPU it
# keeps exp(-|x|) in 16 bits.
DERIVATIVES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gelu": (
        lambda x: F.gelu(x),
        lambda x: 0.5 * torch.erfc(-x / math.sqrt(2)) + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi),
    ),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), _gelu_tanh),
    "silu": (lambda x: F.silu(x), lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))),
    "mish": (lambda x: F.mish(x), _mish),
    "softplus": (lambda x: F.softplus(x), lambda x: torch.where(x > 20, torch.ones_like(x), _sigmoid(x))),
    "elu": (lambda x: F.elu(x), lambda x: torch.where(x > 0, torch.ones_like(x), torch.exp(x))),
    "hardswish": (
        lambda x: F.hardswish(x),
        lambda x: torch.where(x <= -3, torch.zeros_like(x), torch.where(x < 3, x / 3 + 0.5, torch.ones_like(x))),
    ),
    "leaky_relu": (
        lambda x: F.leaky_relu(x),
        lambda x: torch.where(x > 0, torch.ones_like(x), 0.01 * torch.ones_like(x)),
    ),
}


@contract("AMP-NUMERICS-100", on=("cpu", "cuda", "xpu"))
@pytest.mark.parametrize("name", DERIVATIVES)
def test_gradients_of_activations(case: Case, target: Target, amp_dtype: torch.dtype, name: str) -> None:
    case.require_subnormals(target, amp_dtype)
    form, (call, derivative) = FORMATS[amp_dtype], DERIVATIVES[name]
    stride = case.samples(quick=7, standard=1, full=1)
    patterns = [pattern | sign for pattern in form.finite_patterns()[::stride] for sign in (0, 0x8000)]
    inputs = tensor_of(patterns, form)
    # Beyond 2^7 every derivative is 0 or 1, and exp overflows on the way in some formulas.
    inputs = inputs[inputs.float().abs() <= 2.0**7]
    inputs = inputs[inputs.float().abs() != 3.0]  # hard swish has no derivative there
    leaf = inputs.clone().to(target.device).requires_grad_()
    with target.autocast(amp_dtype):
        seen = call(leaf)
    seen.backward(torch.ones_like(seen))
    exactly = derivative(inputs.double())
    # All of these derivatives are sums of terms of size up to about 1.2 (x times a density), each of a few elementary
    # functions good to 4 ulp: 64 u of fp32 in all; below the smallest normal number a term may be flushed.
    arithmetic = 64 * FP32.unit_roundoff * torch.ones_like(exactly)
    allowed = arithmetic + half_spacing(exactly.abs() + arithmetic, form)
    ratio = (leaf.grad.cpu().double() - exactly).abs() / allowed
    at = int(ratio.argmax())
    case.equal("dtype of the gradient", leaf.grad.dtype, amp_dtype)
    case.at_most(
        f"{name}: worst error of {len(inputs)} gradients, at {float(inputs[at]):g}",
        float(ratio.max()),
        1.0,
        "of the bound",
    )


# Derivatives by the result, which PyTorch keeps for these (derivatives.yaml): the one that was rounded to 16 bits.
# sigmoid is not among them: a CPU computes what vectors leave over of an fp16 tensor step by step in fp16.
BY_RESULT: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda y: 1 - y * y,
    "exp": lambda y: y,
    "sqrt": lambda y: 0.5 / y,
}


@contract("AMP-NUMERICS-100", on=("cpu", "cuda", "xpu"))
@pytest.mark.parametrize("name", BY_RESULT)
def test_gradients_by_the_result(case: Case, target: Target, amp_dtype: torch.dtype, name: str) -> None:
    form = FORMATS[amp_dtype]
    patterns = form.finite_patterns()[:: case.samples(quick=7, standard=1, full=1)]
    inputs = tensor_of([pattern | sign for pattern in patterns for sign in (0, 0x8000)], form)
    # Roots of normal numbers; exponentials that neither overflow nor come near what may be flushed.
    size = inputs.float().abs()
    inputs = inputs[(inputs > 0) & (size > 2.0**-14)] if name == "sqrt" else inputs[size <= 8]
    leaf = inputs.clone().to(target.device).requires_grad_()
    seen = getattr(torch, name)(leaf)
    seen.backward(torch.ones_like(seen))
    result = seen.detach().cpu().double()
    exactly = BY_RESULT[name](result)
    # Three roundings of numbers up to 1 or of the result's size, or of what it is the inverse of.
    arithmetic = 4 * FP32.unit_roundoff * exactly.abs().clamp_min(1)
    if name == "tanh" and target.device_type != "cpu":
        # a * (1 - b * b) on operands of the 16-bit type, whose operators round each result to it: the square, the
        # difference, and the product, which with a gradient of 1 is exact
        # (aten/src/ATen/native/cuda/BinaryMiscBackwardOpsKernels.cu; c10/util/BFloat16-inl.h).
        arithmetic = arithmetic + half_spacing(result.square(), form)
    allowed = arithmetic + half_spacing(exactly.abs() + arithmetic, form)
    ratio = float(((leaf.grad.cpu().double() - exactly).abs() / allowed).max())
    case.at_most(f"{name}: worst error of {len(inputs)} gradients", ratio, 1.0, "of the bound")


@contract("AMP-NUMERICS-045", on=("cpu", "cuda", "xpu"))
@pytest.mark.parametrize("name", ["erf", "gelu", "elu", "selu", "silu", "mish", "tanh", "asinh", "atan", "expm1"])
def test_odd_functions_keep_the_sign(case: Case, target: Target, amp_dtype: torch.dtype, name: str) -> None:
    # Near zero some of these are good to an absolute error only, which leaves the sign to this.
    form = FORMATS[amp_dtype]
    patterns = form.finite_patterns()[:: case.samples(quick=7, standard=1, full=1)]
    inputs = tensor_of([pattern | sign for pattern in patterns for sign in (0, 0x8000)], form)
    seen = getattr(F if hasattr(F, name) else torch, name)(inputs.to(target.device)).cpu().float()
    wrong = inputs[seen.sign() * inputs.float().sign() < 0]
    case.equal(f"{name}: inputs of {len(inputs)} whose result has the other sign", wrong[:3].tolist(), [])
