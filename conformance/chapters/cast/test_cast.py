"""Check the dtype, values, accuracy and casts of each op of the AMP op reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.error_bounds import normwise_distance, normwise_error
from ...oracles.policy.lists import (
    Listing,
    definite,
    listings,
    multilinear,
    repeatable,
    run_dtype,
    sets_dtype,
)
from ...oracles.policy.overloads import mode_of, type_names
from ...oracles.policy.samples import SAMPLES, Inputs
from ...oracles.trace.casts import expected_casts
from .float64_reference import REFERENCES
from .support import (
    CUDA,
    FP32_ERROR,
    LIKE_CUDA,
    cast_texts,
    casts_of_arguments,
    check_same,
    chosen,
    dtype_names,
    is_single,
    make_inputs,
    own_type,
    reproduced,
    require_rule,
    run_manually_cast,
    run_sample,
)

pytestmark = pytest.mark.by_rules

XPU = ("fake:xpu", "xpu")


def listed(backend: str, policy: str | None = None, *, origin: str | None = None) -> list[Any]:
    return [pytest.param(row, id=row.sample) for row in listings(backend, policy, origin=origin)]


def _is_undocumented(row: Listing) -> bool:
    return row.origin == "registered"


def _is_documented(row: Listing) -> bool:
    return row.origin == "documented"


def _has_reference(row: Listing) -> bool:
    return definite(row) and row.name != "cross_entropy"  # on CUDA that is AMP-LOSS-017


def _input_types(row: Listing, amp_dtype: torch.dtype) -> list[tuple[torch.dtype, ...]]:
    """Return input dtypes that distinguish the policy: the other dtype, or all triples."""
    if row.policy == "widest":
        return list(itertools.product((amp_dtype, torch.float32), repeat=3))
    return [(torch.float32,)] if row.policy == "lower_precision" else [(amp_dtype,)]


def _check_policy(case: Case, target: Target, amp_dtype: torch.dtype, row: Listing, rng: torch.Generator) -> None:
    """Check that every output of the sample call, in tuples and lists too, has the dtype of the policy."""
    require_rule(case, target, row)
    with mode_of(target):
        for dtypes in dict.fromkeys(_input_types(row, amp_dtype)):
            inputs = make_inputs(target, dtypes, rng)
            call = SAMPLES[row.sample](inputs)
            expected = run_dtype(row.policy, dtypes[: inputs.made], amp_dtype)
            with reproduced(case, call, str(expected)):
                seen = run_sample(target, call, amp_dtype)
                if seen.lacking is not None:
                    case.unsupported(seen.lacking)
                case.at_least("outputs", len(seen.outputs), 1)
                case.equal(
                    f"types of the outputs for {type_names(dtypes[: inputs.made])}",
                    [str(tensor.dtype) for tensor in seen.outputs],
                    [str(own_type(tensor, expected)) for tensor in seen.outputs],
                )


@contract("AMP-CAST-001", on=CUDA)
@pytest.mark.parametrize("op", listed("cuda", "lower_precision", origin="documented"))
def test_cuda_lower_precision(
    case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator
) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-002", on=CUDA)
@pytest.mark.parametrize("op", listed("cuda", "fp32", origin="documented"))
def test_cuda_fp32(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-003", on=CUDA)
@pytest.mark.parametrize("op", listed("cuda", "widest", origin="documented"))
def test_cuda_widest(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-004", on="cpu")
@pytest.mark.parametrize("op", listed("cpu", "lower_precision", origin="documented"))
def test_cpu_lower_precision(
    case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator
) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-005", on="cpu")
@pytest.mark.parametrize("op", listed("cpu", "fp32", origin="documented"))
def test_cpu_fp32(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-006", on="cpu")
@pytest.mark.parametrize("op", listed("cpu", "widest", origin="documented"))
def test_cpu_widest(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-007", on=XPU)
@pytest.mark.parametrize("op", chosen("xpu", None, _is_documented, "linear", "GRUCell", "layer_norm", "cross_entropy"))
def test_xpu_documented(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-008", on=CUDA)
@pytest.mark.parametrize(
    "op",
    chosen("cuda", None, _is_undocumented, "einsum", "huber_loss", "scaled_dot_product_attention", "grid_sampler"),
)
def test_cuda_registered(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-008", on="cpu")
@pytest.mark.parametrize("op", chosen("cpu", None, _is_undocumented, "smooth_l1_loss", "_addmm_activation"))
def test_cpu_registered(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-008", on=XPU)
@pytest.mark.parametrize("op", chosen("xpu", None, _is_undocumented, "einsum", "prelu", "huber_loss"))
def test_xpu_registered(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


def _check_bits(case: Case, target: Target, amp_dtype: torch.dtype, row: Listing, rng: torch.Generator) -> None:
    require_rule(case, target, row)
    for dtypes in dict.fromkeys(_input_types(row, amp_dtype)):
        inputs = make_inputs(target, dtypes, rng)
        seen = run_sample(target, SAMPLES[row.sample](inputs), amp_dtype)
        expected = run_dtype(row.policy, dtypes[: inputs.made], amp_dtype)
        wanted = run_manually_cast(target, row, dtypes, expected, rng)
        if wanted.lacking is not None:
            case.unsupported(wanted.lacking)
        case.equal("number of outputs", len(seen.outputs), len(wanted.outputs))
        for index, (ours, theirs) in enumerate(zip(seen.outputs, wanted.outputs, strict=True)):
            check_same(
                case, repeatable(row.name), f"output {index} for {type_names(dtypes[: inputs.made])}", ours, theirs
            )


_QUICK_CPU = (
    "linear",
    "mm",
    "addmm",
    "conv2d",
    "mse_loss",
    "binary_cross_entropy",
    "prod",
    "cat",
    "linalg_solve",
    "fft_fft",
)


@contract("AMP-CAST-009", on="cpu")
@pytest.mark.parametrize("op", chosen("cpu", None, is_single, *_QUICK_CPU))
def test_cpu_values(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_bits(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-009", on=LIKE_CUDA)
@pytest.mark.parametrize(
    "op", chosen("cuda", None, is_single, "linear", "mm", "conv2d", "softmax", "layer_norm", "sum", "addcmul")
)
def test_cuda_values(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_bits(case, target, amp_dtype, op, rng)


_WITH_OPTIONS: dict[str, Callable[[Inputs], partial[Any]]] = {
    "addmm": lambda t: partial(torch.addmm, t.f(3, 5), t.f(3, 4), t.f(4, 5), alpha=0.5, beta=2.0),
    "baddbmm": lambda t: partial(torch.baddbmm, t.f(2, 3, 5), t.f(2, 3, 4), t.f(2, 4, 5), alpha=0.5, beta=2.0),
    "conv1d": lambda t: partial(F.conv1d, t.f(2, 4, 9), t.f(6, 2, 3), t.f(6), stride=2, padding=1, groups=2),
    "conv2d": lambda t: partial(F.conv2d, t.f(2, 4, 9, 9), t.f(6, 2, 3, 3), padding=(2, 1), dilation=2, groups=2),
    "attention-causal": lambda t: partial(
        F.scaled_dot_product_attention, t.f(1, 2, 4, 8), t.f(1, 2, 4, 8), t.f(1, 2, 4, 8), is_causal=True
    ),
    "attention-scale": lambda t: partial(
        F.scaled_dot_product_attention, t.f(1, 2, 4, 8), t.f(1, 2, 4, 8), t.f(1, 2, 4, 8), scale=0.7
    ),
}


@contract("AMP-CAST-009", on="cpu")
@pytest.mark.parametrize("op", list(_WITH_OPTIONS))
def test_options_reach_the_op(
    case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator
) -> None:
    make = _WITH_OPTIONS[op]
    seen = run_sample(target, make(make_inputs(target, [torch.float32], rng)), amp_dtype)
    manual = run_sample(target, make(make_inputs(target, [torch.float32], rng, cast_to=amp_dtype)), None)
    if seen.lacking is not None:
        case.unsupported(seen.lacking)
    case.identical(f"{op} with options, against manual casts", seen.outputs[0], manual.outputs[0])


# One rounding of the product and up to three more, of a scaled addend, of the sum and of a partial sum.
_ROUNDINGS = 4


def _written_out(row: Listing, call: partial[Any]) -> Any:
    """Return the result of a float64 call from its reference, or of the op itself where there is none."""
    return REFERENCES.get(row.sample, call.func)(*call.args, **call.keywords)


def _check_product(case: Case, target: Target, amp_dtype: torch.dtype, row: Listing, rng: torch.Generator) -> None:
    require_rule(case, target, row)
    make = SAMPLES[row.sample]
    (seen,) = run_sample(target, make(make_inputs(target, [torch.float32], rng)), amp_dtype).outputs
    exact = _written_out(row, make(make_inputs(target, [amp_dtype], rng, cast_to=torch.float64)))
    size = _written_out(row, make(make_inputs(target, [amp_dtype], rng, cast_to=torch.float64, absolute=True)))
    unrounded = _written_out(row, make(make_inputs(target, [torch.float32], rng, cast_to=torch.float64)))
    unit = torch.finfo(amp_dtype).eps / 2
    case.at_most(
        "largest error against float64 over the size of the products",
        float(((seen.cpu().double() - exact.cpu()).abs() / size.cpu()).max()),
        _ROUNDINGS * unit,
    )
    # Control: an op that ran in fp32 would return the result of unrounded inputs, to some 2^-24. Few results of 16-bit
    # inputs come within a tenth of their rounding of it by chance, and hardly any within a hundredth.
    distance = normwise_error(seen, unrounded)
    case.at_least("distance from the result of inputs that are not rounded", distance, 0.01 * unit)


@contract("AMP-CAST-010", on="cpu")
@pytest.mark.parametrize("op", chosen("cpu", "lower_precision", multilinear, "linear", "mm", "bmm", "conv2d"))
def test_cpu_product_is_accurate(
    case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator
) -> None:
    _check_product(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-010", on=LIKE_CUDA)
@pytest.mark.parametrize("op", chosen("cuda", "lower_precision", multilinear, "linear", "mm", "bmm", "conv2d"))
def test_cuda_product_is_accurate(
    case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator
) -> None:
    _check_product(case, target, amp_dtype, op, rng)


def _check_fp32_value(case: Case, target: Target, amp_dtype: torch.dtype, row: Listing, rng: torch.Generator) -> None:
    require_rule(case, target, row)
    seen = run_sample(target, SAMPLES[row.sample](make_inputs(target, [amp_dtype], rng)), amp_dtype)
    call = SAMPLES[row.sample](make_inputs(target, [amp_dtype], rng, cast_to=torch.float64))
    exact = run_sample(target, partial(_written_out, row, call), None)
    if exact.lacking is not None:
        case.unsupported(exact.lacking)
    case.equal("number of outputs", len(seen.outputs), len(exact.outputs))
    for index, (ours, reference) in enumerate(zip(seen.outputs, exact.outputs, strict=True)):
        if reference.is_floating_point() or reference.is_complex():
            case.at_most(f"output {index}, error by norm", normwise_distance(ours, reference), FP32_ERROR)
        else:
            case.identical(f"output {index}", ours, reference)


@contract("AMP-CAST-011", on="cpu")
@pytest.mark.parametrize(
    "op", chosen("cpu", "fp32", _has_reference, "mse_loss", "prod", "trace", "binary_cross_entropy")
)
def test_cpu_fp32_is_accurate(
    case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator
) -> None:
    _check_fp32_value(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-011", on=LIKE_CUDA)
@pytest.mark.parametrize(
    "op", chosen("cuda", "fp32", _has_reference, "softmax", "layer_norm", "sum", "exp", "mse_loss")
)
def test_cuda_fp32_is_accurate(
    case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator
) -> None:
    _check_fp32_value(case, target, amp_dtype, op, rng)


def _check_casts(case: Case, target: Target, amp_dtype: torch.dtype, row: Listing, rng: torch.Generator) -> None:
    """Check that each eligible argument of another dtype is cast once, and nothing else but by the op itself."""
    require_rule(case, target, row)
    with mode_of(target):
        for dtypes in dict.fromkeys(_input_types(row, amp_dtype)):
            inputs = make_inputs(target, dtypes, rng)
            call = SAMPLES[row.sample](inputs)
            expected = run_dtype(row.policy, dtypes[: inputs.made], amp_dtype)
            seen = run_sample(target, call, amp_dtype).casts
            own = run_manually_cast(target, row, dtypes, expected, rng).casts
            promised = [] if sets_dtype(row) else expected_casts(call, expected)
            what = f"for {type_names(dtypes[: inputs.made])}"
            if not sets_dtype(row):
                case.equal(f"casts of the arguments {what}", casts_of_arguments(seen, promised), cast_texts(promised))
            case.equal(f"all casts {what}", dtype_names(seen), dtype_names([*promised, *own]))


@contract("AMP-CAST-012", on=CUDA)
@pytest.mark.parametrize(
    "op", chosen("cuda", None, is_single, "linear", "mm", "conv2d", "layer_norm", "exp", "softmax", "addcmul")
)
def test_cuda_casts(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_casts(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-012", on="cpu")
@pytest.mark.parametrize(
    "op", chosen("cpu", None, is_single, "linear", "mm", "conv2d", "mse_loss", "trace", "cat", "stft")
)
def test_cpu_casts(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_casts(case, target, amp_dtype, op, rng)
