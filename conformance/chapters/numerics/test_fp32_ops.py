"""Check that fp32 operands, and 16-bit inputs of ops on the fp32 list, are computed in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers import error_bounds, exact
from ...oracles.numbers.formats import FORMATS, FP32, rounded
from .matmul_ops import PRODUCTS, gaussians, transposed_product, worst_ratio
from .support import within_window


@contract("AMP-NUMERICS-022")
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "conv2d"])
# Libraries take matrix units, and with them TF32, where all sizes are multiples of 8 or more.
@pytest.mark.parametrize("terms", [65, 128], ids=["odd", "aligned"])
def test_disabled_region_computes_in_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str, terms: int
) -> None:
    if op == "conv2d":
        left, right = gaussians(rng, (64, terms, 1, 1), (48, terms, 1, 1))
        expected = transposed_product(left.flatten(1), right.flatten(1))
    else:
        left, right, bias = gaussians(rng, *PRODUCTS[op].operands(64, terms, 48))
        expected = PRODUCTS[op].expected(left, right, bias)
    left, right = left.to(target.device), right.to(target.device)
    with full_precision(target.device_type), target.autocast(amp_dtype), target.autocast(amp_dtype, enabled=False):
        seen = F.conv2d(left, right).flatten(1) if op == "conv2d" else PRODUCTS[op].call(left, right, bias.to(left))
    case.equal(f"{op}: dtype", seen.dtype, torch.float32)
    window = error_bounds.fp32_product_window(terms)
    within_window(case, f"{op} with autocast disabled", seen, expected, window, FP32.unit_roundoff)


@contract("AMP-NUMERICS-023")
@pytest.mark.parametrize("mean", [1000, 30_000])
def test_softmax_of_fp32_logits_is_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, mean: int
) -> None:
    # Around 1000 16 bits distinguish logits by 0.5 (fp16) or 4 (bf16) only.
    logits = mean + 3 * torch.randn(13, 129, generator=rng)
    with target.autocast(amp_dtype):
        seen = torch.softmax(logits.to(target.device), -1)
        logarithms = torch.log_softmax(logits.to(target.device), -1)
    expected, bound = exact.softmax(logits), error_bounds.softmax_bound(logits)
    case.equal("dtypes", [seen.dtype, logarithms.dtype], [torch.float32] * 2)
    case.at_most("softmax: worst error over its bound", worst_ratio(seen, expected, bound), 1.0)
    # The error of a logarithm is the relative error of its argument, plus the rounding of the shifted logit.
    tolerance = bound / expected + 4 * FP32.unit_roundoff * (expected.log().abs() + 1)
    case.at_most("log_softmax: worst error over its bound", worst_ratio(logarithms, expected.log(), tolerance), 1.0)
    through = exact.softmax(rounded(logits.double(), FORMATS[amp_dtype]))
    case.at_least(
        "control: logits rounded to 16 bits, error over the bound", worst_ratio(through, expected, bound), 10.0
    )


@contract("AMP-NUMERICS-023")
def test_layer_norm_of_fp32_rows_is_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    rows = 100 + torch.randn(9, 65, generator=rng)
    with target.autocast(amp_dtype):
        seen = F.layer_norm(rows.to(target.device), (65,))
    case.equal("dtype", seen.dtype, torch.float32)
    expected, bound = exact.layer_norm(rows), error_bounds.layer_norm_bound(rows)
    case.at_most("mean 100, deviation 1: normwise error", error_bounds.normwise_error(seen, expected), bound)
    through = exact.layer_norm(rounded(rows.double(), FORMATS[amp_dtype]))
    case.at_least(
        "control: rows rounded to 16 bits, normwise error", error_bounds.normwise_error(through, expected), 5 * bound
    )


@contract("AMP-NUMERICS-023")
def test_sum_of_fp32_terms_is_fp32(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    terms = torch.rand(5, 3001, generator=rng)
    with target.autocast(amp_dtype):
        seen = terms.to(target.device).sum(-1)
    case.equal("dtype", seen.dtype, torch.float32)
    expected = terms.double().sum(-1)
    case.at_most("worst error over its bound", worst_ratio(seen, expected, error_bounds.sum_bound(terms)), 1.0)


# On the target's fp32 list: a 16-bit input comes out in fp32, and in value as well. Relative bounds in u of fp32:
# the roundings on the way times the condition, elementary functions being good to 4 ulp (CUDA C++ Programming Guide).
FP32_LIST: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "prod": (lambda values: values.prod(-1), 64.0),
    "mse_loss": (lambda values: F.mse_loss(values, torch.zeros_like(values), reduction="none"), 2.0),
    "avg_pool3d": (lambda values: F.avg_pool3d(values.reshape(1, 8, 2, 2, 2), 2), 16.0),
    "cdist": (lambda values: torch.cdist(values, -values), 32.0),
    "softmax": (lambda values: values.softmax(-1), 64.0),
    "sum": (lambda values: values.sum(-1), 64.0),
    "cumsum": (lambda values: values.cumsum(-1), 64.0),
    "cumprod": (lambda values: values.cumprod(-1), 64.0),
    "norm": (lambda values: values.norm(dim=-1), 64.0),
    "exp": (lambda values: values.exp(), 8.0),
    "log": (lambda values: (values * 4).log(), 8.0),  # times 4, which 16 bits hold: plus 4 would round before the op
    "pow": (lambda values: values.pow(3), 8.0),
    "reciprocal": (lambda values: values.reciprocal(), 4.0),
    "rsqrt": (lambda values: values.rsqrt(), 8.0),
}


def _computes_in_fp32(case: Case, target: Target, dtype: torch.dtype, rng: torch.Generator, op: str) -> None:
    form, (call, bound) = FORMATS[dtype], FP32_LIST[op]
    values = rounded(1 + torch.rand(8, 8, generator=rng).double() / 4, form)
    with target.autocast(dtype):
        seen = call(values.to(dtype).to(target.device))
    expected = call(values)
    case.equal(f"{op} of a 16-bit input: dtype", seen.dtype, torch.float32)
    worst = float((seen.cpu().double() / expected - 1).abs().max()) / FP32.unit_roundoff
    case.at_most(f"{op}: worst relative error", worst, bound, "u of fp32")
    stored = float((rounded(expected, form) / expected - 1).abs().max()) / FP32.unit_roundoff
    case.at_least(f"control: the exact {op} stored in 16 bits", stored, bound, "u of fp32")


@contract("AMP-NUMERICS-024", on="cpu")
@pytest.mark.parametrize("op", ["prod", "mse_loss", "avg_pool3d", "cdist"])
def test_fp32_list_of_the_cpu(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    _computes_in_fp32(case, target, amp_dtype, rng, op)


@contract("AMP-NUMERICS-024", on="cuda")
@pytest.mark.parametrize(
    "op",
    [
        "prod",
        "mse_loss",
        "cdist",
        "softmax",
        "sum",
        "cumsum",
        "cumprod",
        "norm",
        "exp",
        "log",
        "pow",
        "reciprocal",
        "rsqrt",
    ],
)
def test_fp32_list_of_cuda(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str) -> None:
    _computes_in_fp32(case, target, amp_dtype, rng, op)
