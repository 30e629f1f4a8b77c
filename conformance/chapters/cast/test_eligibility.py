"""Check the calls that autocast must not change, and the inputs that it accepts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ...harness.check import Case, by_rules, contract
from ...harness.targets import Target
from ...measure.precision import repeatable_convolutions
from ...oracles.policy.lists import (
    Listing,
    listings,
    repeatable,
    run_dtype,
)
from ...oracles.policy.overloads import Seen, mode_of, run, type_names
from ...oracles.policy.samples import IN_PLACE, OUT, SAMPLES, TAKES_DTYPE, Inputs
from ...oracles.trace.casts import expected_casts
from .support import (
    CUDA,
    CUDA_OR_CPU,
    Make,
    cast_texts,
    casts_of_arguments,
    check_same,
    chosen,
    dtype_names,
    is_any,
    is_single,
    listed_rule,
    make_inputs,
    own_type,
    reproduced,
    require_rule,
    run_manually_cast,
    run_sample,
)


def check_unchanged(
    case: Case,
    target: Target,
    amp_dtype: torch.dtype,
    make: Make,
    dtypes: Iterable[torch.dtype],
    rng: torch.Generator,
    exact: bool = True,
) -> None:
    """Check that the call behaves in the region as outside: same dtypes, bits and casts, or the same error."""
    outside, wanted = attempt(target, make(make_inputs(target, dtypes, rng)), None)
    inside, seen = attempt(target, make(make_inputs(target, dtypes, rng)), amp_dtype)
    what = f"for {type_names(dtypes)}"
    with reproduced(case, seen.call, outside):
        case.equal(f"outcome {what}", inside, outside)
    case.equal(f"casts {what}", dtype_names(seen.casts), dtype_names(wanted.casts))
    for index, (ours, theirs) in enumerate(zip(seen.outputs, wanted.outputs, strict=True)):
        if target.is_fake:
            case.equal(f"type of output {index} {what}", ours.dtype, theirs.dtype)
        else:
            check_same(case, exact, f"output {index} {what}", ours, theirs)
    if not target.is_fake:
        with repeatable_convolutions():
            plain = run(target, make(make_inputs(target, dtypes, rng)), amp_dtype, traced=False)
        types = [[tensor.dtype for tensor in one.outputs] for one in (plain, wanted)]
        case.equal(f"types of the outputs {what}, untraced", types[0], types[1])


def attempt(target: Target, call: partial[Any], amp_dtype: torch.dtype | None) -> tuple[str, Seen]:
    with repeatable_convolutions():
        seen = run(target, call, amp_dtype)
    if seen.exception is not None:
        return f"raises {type(seen.exception).__name__}", seen
    return f"returns {[str(tensor.dtype) for tensor in seen.outputs]}", seen


_QUICK_UNLISTED = ("relu", "add", "mean", "sigmoid", "gelu", "batch_norm", "max_pool2d", "mul", "sqrt", "tanh", "where")


@contract("AMP-CAST-013", on=CUDA)
@pytest.mark.parametrize("op", chosen("cuda", "unlisted", is_any, *_QUICK_UNLISTED))
def test_cuda_unlisted(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    require_rule(case, target, op)
    with mode_of(target):
        for dtype in (torch.float32, amp_dtype):
            check_unchanged(case, target, amp_dtype, SAMPLES[op.sample], [dtype], rng)


@contract("AMP-CAST-014", on="cpu")
@pytest.mark.parametrize(
    "op", chosen("cpu", "unlisted", is_any, *_QUICK_UNLISTED, "softmax", "layer_norm", "sum", "exp", "pow", "norm")
)
def test_cpu_unlisted(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    for dtype in (torch.float32, amp_dtype):
        check_unchanged(case, target, amp_dtype, SAMPLES[op.sample], [dtype], rng)


@contract("AMP-CAST-015", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "maximum", "minimum", "where", "hypot"])
def test_native_promotion(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        for dtypes in ((amp_dtype, torch.float32), (torch.float32, amp_dtype)):
            (seen,) = run_sample(target, SAMPLES[op](make_inputs(target, dtypes, rng)), amp_dtype).outputs
            case.equal(f"type of {op} of {type_names(dtypes)}", seen.dtype, torch.float32)
            check_unchanged(case, target, amp_dtype, SAMPLES[op], dtypes, rng)


# Of a 16-bit tensor and a number, or a float32 tensor without dimensions: neither widens it (torch.result_type).
WITH_NUMBERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "x + n": lambda x, n: x + n,
    "n - x": lambda x, n: n - x,
    "x * n": lambda x, n: x * n,
    "x / n": lambda x, n: x / n,
    "x % n": lambda x, n: x % n,
    "where x, n": lambda x, n: torch.where(x > 0, x, n),
    "where n, x": lambda x, n: torch.where(x > 0, n, x),
    "add with alpha": lambda x, n: torch.add(x, x, alpha=float(n)),
    "lerp": lambda x, n: torch.lerp(x, x, float(n)),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "clamp": lambda x, n: x.clamp(max=n),
    "fmod": torch.fmod,
    "xlogy": torch.xlogy,
    "copysign": torch.copysign,
}


@contract("AMP-CAST-015", on=CUDA_OR_CPU)
@pytest.mark.parametrize("place", ["in", "outside"])
def test_numbers_do_not_widen(case: Case, target: Target, amp_dtype: torch.dtype, place: str) -> None:
    with mode_of(target):
        x = torch.ones(4, dtype=amp_dtype, device=target.device)
        seen = {}
        for kind, number in {"a number": 1.5, "a tensor": torch.tensor(1.5, device=target.device)}.items():
            for name, call in WITH_NUMBERS.items():
                if kind == "a tensor" and name in ("add with alpha", "lerp"):
                    continue  # which take a number
                with target.autocast(amp_dtype, enabled=place == "in"):
                    seen[f"{name}, {kind}"] = call(x, number).dtype
        wide = {name: str(dtype) for name, dtype in seen.items() if dtype != amp_dtype}
        case.equal("results that are not of the 16-bit type", wide, {})


@contract("AMP-CAST-015", on=CUDA)
@pytest.mark.parametrize("op", ["cat", "stack"])
def test_native_promotion_of_lists(
    case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator
) -> None:
    with mode_of(target):
        for dtypes in itertools.product((amp_dtype, torch.float32), repeat=3):
            expected = torch.float32 if torch.float32 in dtypes else amp_dtype
            (seen,) = run_sample(target, SAMPLES[op](make_inputs(target, dtypes, rng)), amp_dtype).outputs
            case.equal(f"type of {op} of {type_names(dtypes)}", seen.dtype, expected)


def _judge_long_lists(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    """Put a float32 tensor at several places of long lists, whose other tensors are of the 16-bit type."""
    with mode_of(target):
        for count in (9, 40, 200):
            for at in sorted({0, 1, 8, count // 2, count - 1, count}):
                dtypes = [torch.float32 if number == at else amp_dtype for number in range(count)]
                with target.autocast(amp_dtype):
                    seen = getattr(torch, op)([torch.ones(2, dtype=one, device=target.device) for one in dtypes]).dtype
                which = "none" if at == count else f"number {at}"
                what = f"type of {op} of {count} tensors, of which {which} is float32"
                case.equal(what, seen, amp_dtype if at == count else torch.float32)


@contract("AMP-CAST-006", on="cpu")
@pytest.mark.parametrize("op", ["cat", "stack"])
def test_promotion_of_long_lists(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    _judge_long_lists(case, target, amp_dtype, op)


@contract("AMP-CAST-015", on=CUDA)
@pytest.mark.parametrize("op", ["cat", "stack"])
def test_native_promotion_of_long_lists(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    _judge_long_lists(case, target, amp_dtype, op)


@contract("AMP-CAST-052", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", list(IN_PLACE))
def test_in_place(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        for dtype in (torch.float32, amp_dtype):
            call = IN_PLACE[op](make_inputs(target, [dtype], rng))
            result = run_sample(target, call, amp_dtype).outputs[0]
            case.equal(f"type of the result for {dtype}", result.dtype, dtype)
            case.true("the result is the tensor itself", result is call.args[0])
            check_unchanged(case, target, amp_dtype, IN_PLACE[op], [dtype], rng)


@contract("AMP-CAST-052", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", list(OUT))
def test_out_argument(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        for dtype in (torch.float32, amp_dtype):
            call = OUT[op](make_inputs(target, [dtype], rng))
            result = run_sample(target, call, amp_dtype).outputs[0]
            case.equal(f"type of the result for {dtype}", result.dtype, dtype)
            case.true("the result is the tensor given as out", result is call.keywords["out"])
            check_unchanged(case, target, amp_dtype, OUT[op], [dtype], rng)


@contract("AMP-CAST-018", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", list(TAKES_DTYPE))
def test_explicit_dtype(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        for given, asked in itertools.product((amp_dtype, torch.float32), (amp_dtype, torch.float32, torch.float64)):
            if not target.computes_in(asked):
                continue
            # vector_norm raises for a dtype narrower than its input, with or without autocast.
            if op == "vector_norm" and torch.promote_types(given, asked) != asked:
                continue
            call = TAKES_DTYPE[op](make_inputs(target, [given], rng))
            (seen,) = run_sample(target, partial(call, dtype=asked), amp_dtype).outputs
            case.equal(f"type of the result of {given} with dtype={asked}", seen.dtype, asked)


@contract("AMP-CAST-044", on=CUDA)
@pytest.mark.parametrize(
    "op", chosen("cuda", None, is_single, "mm", "linear", "conv2d", "exp", "sum", "softmax", "layer_norm", "addcmul")
)
def test_cuda_float64(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    case.require_arithmetic(target, torch.float64)
    with mode_of(target):
        check_unchanged(case, target, amp_dtype, SAMPLES[op.sample], [torch.float64], rng, repeatable(op.name))


@contract("AMP-CAST-044", on="cpu")
@pytest.mark.parametrize(
    "op",
    chosen("cpu", None, is_single, "mm", "bmm", "linear", "conv2d", "mse_loss", "prod", "cat", "linalg_inv", "fft_fft"),
)
def test_cpu_float64(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    check_unchanged(case, target, amp_dtype, SAMPLES[op.sample], [torch.float64], rng, repeatable(op.name))


@contract("AMP-CAST-044", on=CUDA_OR_CPU)
@pytest.mark.parametrize(
    "op", ["sum", "prod", "cumsum", "pow.scalar", "exp", "matmul", "mm", "linear", "addcmul", "cat"]
)
def test_not_floating(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        for dtype in (torch.int64, torch.int32, torch.bool, torch.complex64, torch.complex128):
            if target.computes_in(dtype):
                check_unchanged(case, target, amp_dtype, SAMPLES[op], [dtype], rng)


_SEVERAL_INPUTS = ("addmm", "baddbmm", "bmm", "conv2d", "linear", "matmul", "mm")


_SEVERAL_INPUTS_FP32 = {
    "cuda": ("binary_cross_entropy_with_logits", "cdist", "cosine_similarity", "layer_norm", "mse_loss", "pow"),
    "cpu": ("binary_cross_entropy", "cdist", "linalg_solve", "mse_loss", "polar", "stft"),
}


def _check_mixed(case: Case, target: Target, amp_dtype: torch.dtype, row: Listing, rng: torch.Generator) -> None:
    """Check the op with each input in turn of the other dtype: it runs in the dtype of its policy."""
    require_rule(case, target, row)
    with mode_of(target):
        count = make_inputs(target, [torch.float32], rng)
        SAMPLES[row.sample](count)
        for odd, (rest, other) in itertools.product(
            range(count.made), itertools.permutations((torch.float32, amp_dtype))
        ):
            dtypes = tuple(other if index == odd else rest for index in range(count.made))
            call = SAMPLES[row.sample](make_inputs(target, dtypes, rng))
            promised = expected_casts(call, run_dtype(row.policy, dtypes, amp_dtype))
            seen = run_sample(target, call, amp_dtype)
            what = f"for {type_names(dtypes)}"
            case.equal(f"casts {what}", casts_of_arguments(seen.casts, promised), cast_texts(promised))
            expected = run_dtype(row.policy, dtypes, amp_dtype)
            case.equal(
                f"types {what}",
                [tensor.dtype for tensor in seen.outputs],
                [own_type(tensor, expected) for tensor in seen.outputs],
            )


def _several_inputs(backend: str) -> list[Any]:
    names = (*_SEVERAL_INPUTS, *_SEVERAL_INPUTS_FP32[backend])
    return [pytest.param(row, id=row.sample) for row in listings(backend) if row.sample in names]


@by_rules
@contract("AMP-CAST-021", on=CUDA)
@pytest.mark.parametrize("op", _several_inputs("cuda"))
def test_cuda_mixed(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_mixed(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-021", on="cpu")
@pytest.mark.parametrize("op", _several_inputs("cpu"))
def test_cpu_mixed(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_mixed(case, target, amp_dtype, op, rng)


@by_rules
@contract("AMP-CAST-022", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", ["linear", "mm", "conv2d", "mse_loss", "prod", "cdist", "kl_div"])
def test_other_16_bit_type(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    other = torch.bfloat16 if amp_dtype is torch.float16 else torch.float16
    case.require_arithmetic(target, other)
    row = listed_rule(case, target, op)
    with mode_of(target):
        call = SAMPLES[op](make_inputs(target, [other], rng))
        (seen,) = run_sample(target, call, amp_dtype).outputs
        expected = run_dtype(row.policy, [other], amp_dtype)
        case.equal(f"type of {op} of {other}", seen.dtype, expected)
        if not target.is_fake:
            (wanted,) = run_manually_cast(target, row, (other,), expected, rng).outputs
            case.identical("result", seen, wanted)


@contract("AMP-CAST-031", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", ["conv2d", "conv_transpose2d"])
def test_channels_last(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        x, weight, *rest = SAMPLES[op](make_inputs(target, [torch.float32], rng)).args
        x, weight = (tensor.to(memory_format=torch.channels_last) for tensor in (x, weight))
        call = partial(getattr(F, op), x, weight, *rest)
        seen = run_sample(target, call, amp_dtype)
        case.equal("casts", len(seen.casts), 3)
        case.equal("casts that keep the layout", [cast.kept_layout for cast in seen.casts], [True] * 3)
        manual = partial(getattr(F, op), *(tensor.to(amp_dtype) for tensor in (x, weight, *rest)))
        (wanted,) = run_sample(target, manual, None).outputs
        case.equal("strides of the result", seen.outputs[0].stride(), wanted.stride())
        if not target.is_fake:
            case.identical("result", seen.outputs[0], wanted)


_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t(),
    "strided": lambda x: x.as_strided((2, 3), (8, 1), 1),
    "expanded": lambda x: x.narrow(0, 1, 1).expand(4, 4),
    "empty": lambda x: x.narrow(0, 2, 0),
}


@contract("AMP-CAST-032", on=CUDA_OR_CPU)
@pytest.mark.parametrize("view", list(_VIEWS))
def test_views(case: Case, target: Target, amp_dtype: torch.dtype, view: str, rng: torch.Generator) -> None:
    with mode_of(target):
        inputs = make_inputs(target, [torch.float32], rng)
        left, right = _VIEWS[view](inputs.f(4, 4)), inputs.f(4, 4)
        right = right.narrow(0, 0, left.shape[1])
        seen = run_sample(target, partial(torch.mm, left, right), amp_dtype)
        case.equal(
            "casts", cast_texts(seen.casts), cast_texts(expected_casts(partial(torch.mm, left, right), amp_dtype))
        )
        case.equal("type", seen.outputs[0].dtype, amp_dtype)
        if not target.is_fake:
            case.identical("result", seen.outputs[0], torch.mm(left.to(amp_dtype), right.to(amp_dtype)))
        low = _VIEWS[view](make_inputs(target, [amp_dtype], rng).p(4, 4))
        for tensor in (low, *([low.select(0, 0).select(0, 0)] if low.numel() else [])):
            (result,) = run_sample(target, partial(torch.prod, tensor), amp_dtype).outputs
            case.equal(f"type of the product over a tensor of shape {tuple(tensor.shape)}", result.dtype, torch.float32)


@contract("AMP-CAST-033", on=CUDA)
@pytest.mark.parametrize("op", ["mm", "linear", "exp", "mse_loss"])
def test_other_device(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        for dtype in (torch.float32, torch.bfloat16):
            here = Inputs((dtype,), torch.device("cpu"), rng.initial_seed(), target.is_fake)
            seen = run_sample(target, SAMPLES[op](here), amp_dtype)
            case.equal(f"type of {op} of a cpu tensor of {dtype}", [x.dtype for x in seen.outputs], [dtype])
            case.equal(f"casts of a cpu tensor of {dtype}", cast_texts(c for c in seen.casts if c.argument), [])


@contract("AMP-CAST-034", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", ["mm", "linear", "conv2d", "prod", "mse_loss", "cat"])
def test_outside_a_region(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        for dtype in (torch.float32, amp_dtype):
            for amp in (None, amp_dtype):
                call = SAMPLES[op](make_inputs(target, [dtype], rng))
                if amp is not None:
                    with target.autocast(amp):
                        seen = run_sample(target, call, None)
                else:
                    seen = run_sample(target, call, None)
                where = "outside" if amp is None else "in a disabled subregion"
                case.equal(f"type of {op} of {dtype} {where}", [x.dtype for x in seen.outputs], [dtype])
                case.equal(f"casts of arguments {where}", cast_texts(c for c in seen.casts if c.argument), [])
