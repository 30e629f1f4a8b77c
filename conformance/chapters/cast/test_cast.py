"""Casts: which type each op of the AMP op reference runs in, and what is left alone."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.precision import repeatable_convolutions
from ...oracles.numbers.error_bounds import normwise_distance, normwise_error
from ...oracles.policy.lists import (
    Listing,
    composite,
    definite,
    listings,
    multilinear,
    repeatable,
    run_dtype,
    sets_dtype,
)
from ...oracles.policy.overloads import Seen, mode_of, run, type_names
from ...oracles.policy.samples import COMPOSITES, IN_PLACE, OUT, SAMPLES, TAKES_DTYPE, Inputs, spell
from ...oracles.trace.casts import Cast, expected_casts
from .float64_reference import REFERENCES

CUDA = ("fake:cuda", "cuda")
XPU = ("fake:xpu", "xpu")
CUDA_OR_CPU = ("cpu", "fake:cuda", "cuda")

Make = Callable[[Inputs], "partial[Any]"]

# u of fp32 times 128: less than a fifth of the least that one rounding to 16 bits makes (0.3 u of fp16 by norm), and
# room for the roundings of the longest sample (40 terms) and a condition number of a few.
_FP32_ERROR = 128 * 2.0**-24


def _inputs(target: Target, dtypes: Iterable[torch.dtype], rng: torch.Generator, **options: Any) -> Inputs:
    return Inputs(tuple(dtypes), target.device, rng.initial_seed(), target.is_fake, **options)


def _run(target: Target, call: partial[Any], amp_dtype: torch.dtype | None) -> Seen:
    """Run `call` in a region of `amp_dtype`, or outside any where that is None; what it lacks is told, not raised."""
    with repeatable_convolutions():
        seen = run(target, call, amp_dtype)
    if seen.exception is not None and seen.lacking is None:
        raise seen.exception
    return seen


def _listed(backend: str, policy: str | None = None, *, origin: str | None = None) -> list[Any]:
    return [pytest.param(row, id=row.sample) for row in listings(backend, policy, origin=origin)]


def _chosen(backend: str, policy: str | None, fits: Callable[[Listing], bool], *quick: str) -> list[Any]:
    """The listings that fit, as parameters; those that are not in `quick` from the standard level on."""
    return [
        pytest.param(row, id=row.sample) if row.sample in quick else deep("standard", row, id=row.sample)
        for row in listings(backend, policy)
        if fits(row)
    ]


def _is_single(row: Listing) -> bool:
    return row.policy in ("lower_precision", "fp32", "widest") and not composite(row)


def _is_undocumented(row: Listing) -> bool:
    return row.origin == "registered"


def _is_documented(row: Listing) -> bool:
    return row.origin == "documented"


def _is_any(row: Listing) -> bool:
    return True


def _has_reference(row: Listing) -> bool:
    return definite(row) and row.name != "cross_entropy"  # on CUDA that is AMP-LOSS-017


def _input_types(row: Listing, amp_dtype: torch.dtype) -> list[tuple[torch.dtype, ...]]:
    """The types to call an op with, so that its policy shows: the other type, or all pairs and triples."""
    if row.policy == "widest":
        return list(itertools.product((amp_dtype, torch.float32), repeat=3))
    return [(torch.float32,)] if row.policy == "lower_precision" else [(amp_dtype,)]


def _own_type(tensor: torch.Tensor, real: torch.dtype) -> torch.dtype:
    """The type that a floating, complex or other output has, of an op that runs in `real`."""
    if tensor.is_complex():
        return real.to_complex()
    return real if tensor.is_floating_point() else tensor.dtype


def _check_policy(case: Case, target: Target, amp_dtype: torch.dtype, row: Listing, rng: torch.Generator) -> None:
    """Every output of the sample call, tuples and lists included, has the type that the policy predicts."""
    with mode_of(target):
        for dtypes in dict.fromkeys(_input_types(row, amp_dtype)):
            inputs = _inputs(target, dtypes, rng)
            call = SAMPLES[row.sample](inputs)
            expected = run_dtype(row.policy, dtypes[: inputs.made], amp_dtype)
            with _reproduced(case, call, str(expected)):
                seen = _run(target, call, amp_dtype)
                if seen.lacking is not None:
                    case.unsupported(seen.lacking)
                case.at_least("outputs", len(seen.outputs), 1)
                case.equal(
                    f"types of the outputs for {type_names(dtypes[: inputs.made])}",
                    [str(tensor.dtype) for tensor in seen.outputs],
                    [str(_own_type(tensor, expected)) for tensor in seen.outputs],
                )


# The region is entered by its state, so that the snippet shows the op's policy without the hardware too.
_SNIPPET = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
kind = "$device".split(":")[0]
torch.set_autocast_dtype(kind, $amp_dtype)
torch.set_autocast_enabled(kind, True)
with FakeTensorMode(), torch.no_grad():
    seen = {call}
print([getattr(leaf, "dtype", leaf) for leaf in torch.utils._pytree.tree_leaves(seen)], "promised: {promised}")
"""


@contextlib.contextmanager
def _reproduced(case: Case, call: partial[Any], promised: str) -> Iterator[None]:
    """Give a case that fails inside the very call as its snippet, where it can be written down."""
    try:
        yield
    except Exception:
        text = spell(call)
        if text is not None:
            case.reproduce(_SNIPPET.format(call=text, promised=promised))
        raise


@contract("AMP-CAST-001", on=CUDA)
@pytest.mark.parametrize("op", _listed("cuda", "lower_precision", origin="documented"))
def test_cuda_lower_precision(
    case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator
) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-002", on=CUDA)
@pytest.mark.parametrize("op", _listed("cuda", "fp32", origin="documented"))
def test_cuda_fp32(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-003", on=CUDA)
@pytest.mark.parametrize("op", _listed("cuda", "widest", origin="documented"))
def test_cuda_widest(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-004", on="cpu")
@pytest.mark.parametrize("op", _listed("cpu", "lower_precision", origin="documented"))
def test_cpu_lower_precision(
    case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator
) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-005", on="cpu")
@pytest.mark.parametrize("op", _listed("cpu", "fp32", origin="documented"))
def test_cpu_fp32(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-006", on="cpu")
@pytest.mark.parametrize("op", _listed("cpu", "widest", origin="documented"))
def test_cpu_widest(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-007", on=XPU)
@pytest.mark.parametrize("op", _chosen("xpu", None, _is_documented, "linear", "GRUCell", "layer_norm", "cross_entropy"))
def test_xpu_documented(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-008", on=CUDA)
@pytest.mark.parametrize(
    "op",
    _chosen("cuda", None, _is_undocumented, "einsum", "huber_loss", "scaled_dot_product_attention", "grid_sampler"),
)
def test_cuda_registered(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-008", on="cpu")
@pytest.mark.parametrize("op", _chosen("cpu", None, _is_undocumented, "smooth_l1_loss", "_addmm_activation"))
def test_cpu_registered(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-008", on=XPU)
@pytest.mark.parametrize("op", _chosen("xpu", None, _is_undocumented, "einsum", "prelu", "huber_loss"))
def test_xpu_registered(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_policy(case, target, amp_dtype, op, rng)


def _by_hand(
    target: Target, row: Listing, dtypes: tuple[torch.dtype, ...], to: torch.dtype, rng: torch.Generator
) -> Seen:
    """The sample call outside any region, its inputs cast by hand, or fp32 asked for where autocast does that."""
    if sets_dtype(row):
        call = SAMPLES[row.sample](_inputs(target, dtypes, rng))
        return _run(target, partial(call, dtype=to), None)
    return _run(target, SAMPLES[row.sample](_inputs(target, dtypes, rng, hand_cast=to)), None)


def _check_bits(case: Case, target: Target, amp_dtype: torch.dtype, row: Listing, rng: torch.Generator) -> None:
    for dtypes in dict.fromkeys(_input_types(row, amp_dtype)):
        inputs = _inputs(target, dtypes, rng)
        seen = _run(target, SAMPLES[row.sample](inputs), amp_dtype)
        expected = run_dtype(row.policy, dtypes[: inputs.made], amp_dtype)
        wanted = _by_hand(target, row, dtypes, expected, rng)
        if wanted.lacking is not None:
            case.unsupported(wanted.lacking)
        case.equal("number of outputs", len(seen.outputs), len(wanted.outputs))
        for index, (ours, theirs) in enumerate(zip(seen.outputs, wanted.outputs, strict=True)):
            _check_same(
                case, repeatable(row.name), f"output {index} for {type_names(dtypes[: inputs.made])}", ours, theirs
            )


def _check_same(case: Case, exact: bool, what: str, seen: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same bits or, of an op that does not repeat its own bits, the same up to a few roundings of its type."""
    if exact or not (wanted.is_floating_point() or wanted.is_complex()):
        case.identical(what, seen, wanted)
    else:
        case.equal(f"type of {what}", seen.dtype, wanted.dtype)
        case.equal(f"shape of {what}", seen.shape, wanted.shape)
        case.at_most(f"distance of {what} by norm", normwise_distance(seen, wanted), 64 * torch.finfo(wanted.dtype).eps)


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
@pytest.mark.parametrize("op", _chosen("cpu", None, _is_single, *_QUICK_CPU))
def test_cpu_values(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_bits(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-009", on="cuda")
@pytest.mark.parametrize(
    "op", _chosen("cuda", None, _is_single, "linear", "mm", "conv2d", "softmax", "layer_norm", "sum", "addcmul")
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
    seen = _run(target, make(_inputs(target, [torch.float32], rng)), amp_dtype)
    by_hand = _run(target, make(_inputs(target, [torch.float32], rng, hand_cast=amp_dtype)), None)
    if seen.lacking is not None:
        case.unsupported(seen.lacking)
    case.identical(f"{op} with options, against casts by hand", seen.outputs[0], by_hand.outputs[0])


# One rounding of the product and up to three more, of a scaled addend, of the sum and of a partial sum.
_ROUNDINGS = 4


def _written_out(row: Listing, call: partial[Any]) -> Any:
    """The result of a float64 call from its written-out reference, of the op itself where there is none."""
    return REFERENCES.get(row.sample, call.func)(*call.args, **call.keywords)


def _check_product(case: Case, target: Target, amp_dtype: torch.dtype, row: Listing, rng: torch.Generator) -> None:
    make = SAMPLES[row.sample]
    (seen,) = _run(target, make(_inputs(target, [torch.float32], rng)), amp_dtype).outputs
    exact = _written_out(row, make(_inputs(target, [amp_dtype], rng, hand_cast=torch.float64)))
    size = _written_out(row, make(_inputs(target, [amp_dtype], rng, hand_cast=torch.float64, absolute=True)))
    unrounded = _written_out(row, make(_inputs(target, [torch.float32], rng, hand_cast=torch.float64)))
    unit = torch.finfo(amp_dtype).eps / 2
    case.at_most(
        "largest error against float64 over the size of the products",
        float(((seen.double() - exact).abs() / size).max()),
        _ROUNDINGS * unit,
    )
    # The control: had it run in fp32, the result would be near that of the inputs that were not rounded.
    distance = normwise_error(seen, unrounded)
    case.at_least("distance from the result of inputs that are not rounded", distance, 0.1 * unit)


@contract("AMP-CAST-010", on="cpu")
@pytest.mark.parametrize("op", _chosen("cpu", "lower_precision", multilinear, "linear", "mm", "bmm", "conv2d"))
def test_cpu_product_is_accurate(
    case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator
) -> None:
    _check_product(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-010", on="cuda")
@pytest.mark.parametrize("op", _chosen("cuda", "lower_precision", multilinear, "linear", "mm", "bmm", "conv2d"))
def test_cuda_product_is_accurate(
    case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator
) -> None:
    _check_product(case, target, amp_dtype, op, rng)


def _check_fp32_value(case: Case, target: Target, amp_dtype: torch.dtype, row: Listing, rng: torch.Generator) -> None:
    seen = _run(target, SAMPLES[row.sample](_inputs(target, [amp_dtype], rng)), amp_dtype)
    call = SAMPLES[row.sample](_inputs(target, [amp_dtype], rng, hand_cast=torch.float64))
    exact = _run(target, partial(_written_out, row, call), None)
    if exact.lacking is not None:
        case.unsupported(exact.lacking)
    case.equal("number of outputs", len(seen.outputs), len(exact.outputs))
    for index, (ours, reference) in enumerate(zip(seen.outputs, exact.outputs, strict=True)):
        if reference.is_floating_point() or reference.is_complex():
            case.at_most(f"output {index}, error by norm", normwise_distance(ours, reference), _FP32_ERROR)
        else:
            case.identical(f"output {index}", ours, reference)


@contract("AMP-CAST-011", on="cpu")
@pytest.mark.parametrize(
    "op", _chosen("cpu", "fp32", _has_reference, "mse_loss", "prod", "trace", "binary_cross_entropy")
)
def test_cpu_fp32_is_accurate(
    case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator
) -> None:
    _check_fp32_value(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-011", on="cuda")
@pytest.mark.parametrize(
    "op", _chosen("cuda", "fp32", _has_reference, "softmax", "layer_norm", "sum", "exp", "mse_loss")
)
def test_cuda_fp32_is_accurate(
    case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator
) -> None:
    _check_fp32_value(case, target, amp_dtype, op, rng)


def _check_casts(case: Case, target: Target, amp_dtype: torch.dtype, row: Listing, rng: torch.Generator) -> None:
    """Each eligible argument of another type is cast once, nothing else is, and the op's own casts remain."""
    with mode_of(target):
        for dtypes in dict.fromkeys(_input_types(row, amp_dtype)):
            inputs = _inputs(target, dtypes, rng)
            call = SAMPLES[row.sample](inputs)
            expected = run_dtype(row.policy, dtypes[: inputs.made], amp_dtype)
            seen = _run(target, call, amp_dtype).casts
            own = _by_hand(target, row, dtypes, expected, rng).casts
            promised = [] if sets_dtype(row) else expected_casts(call, expected)
            what = f"for {type_names(dtypes[: inputs.made])}"
            if not sets_dtype(row):
                case.equal(f"casts of the arguments {what}", _of_arguments(seen, promised), _texts(promised))
            case.equal(f"all casts {what}", _types(seen), _types([*promised, *own]))


def _of_arguments(casts: list[Cast], promised: list[Cast]) -> list[str]:
    """The casts of arguments; those from one wide or complex type to another are the op's own."""
    sources = {cast.source for cast in promised}
    return _texts(cast for cast in casts if cast.argument is not None and (not sources or cast.source in sources))


def _texts(casts: Iterable[Cast]) -> list[str]:
    return sorted(map(str, casts))


def _types(casts: Iterable[Cast]) -> list[str]:
    return sorted(f"{cast.source} to {cast.target}" for cast in casts)


@contract("AMP-CAST-012", on=CUDA)
@pytest.mark.parametrize(
    "op", _chosen("cuda", None, _is_single, "linear", "mm", "conv2d", "layer_norm", "exp", "softmax", "addcmul")
)
def test_cuda_casts(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_casts(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-012", on="cpu")
@pytest.mark.parametrize(
    "op", _chosen("cpu", None, _is_single, "linear", "mm", "conv2d", "mse_loss", "trace", "cat", "stft")
)
def test_cpu_casts(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_casts(case, target, amp_dtype, op, rng)


def _check_left_alone(
    case: Case,
    target: Target,
    amp_dtype: torch.dtype,
    make: Make,
    dtypes: Iterable[torch.dtype],
    rng: torch.Generator,
    exact: bool = True,
) -> None:
    """In the region the call does what it does outside: the same types, bits and casts, or the same refusal."""
    outside, wanted = _attempt(target, make(_inputs(target, dtypes, rng)), None)
    inside, seen = _attempt(target, make(_inputs(target, dtypes, rng)), amp_dtype)
    what = f"for {type_names(dtypes)}"
    with _reproduced(case, seen.call, outside):
        case.equal(f"outcome {what}", inside, outside)
    case.equal(f"casts {what}", _types(seen.casts), _types(wanted.casts))
    for index, (ours, theirs) in enumerate(zip(seen.outputs, wanted.outputs, strict=True)):
        if target.is_fake:
            case.equal(f"type of output {index} {what}", ours.dtype, theirs.dtype)
        else:
            _check_same(case, exact, f"output {index} {what}", ours, theirs)
    if not target.is_fake:
        with repeatable_convolutions():
            plain = run(target, make(_inputs(target, dtypes, rng)), amp_dtype, traced=False)
        types = [[tensor.dtype for tensor in one.outputs] for one in (plain, wanted)]
        case.equal(f"types of the outputs {what}, untraced", types[0], types[1])


def _attempt(target: Target, call: partial[Any], amp_dtype: torch.dtype | None) -> tuple[str, Seen]:
    with repeatable_convolutions():
        seen = run(target, call, amp_dtype)
    if seen.exception is not None:
        return f"raises {type(seen.exception).__name__}", seen
    return f"returns {[str(tensor.dtype) for tensor in seen.outputs]}", seen


_QUICK_UNLISTED = ("relu", "add", "mean", "sigmoid", "gelu", "batch_norm", "max_pool2d", "mul", "sqrt", "tanh", "where")


@contract("AMP-CAST-013", on=CUDA)
@pytest.mark.parametrize("op", _chosen("cuda", "unlisted", _is_any, *_QUICK_UNLISTED))
def test_cuda_unlisted(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    with mode_of(target):
        for dtype in (torch.float32, amp_dtype):
            _check_left_alone(case, target, amp_dtype, SAMPLES[op.sample], [dtype], rng)


@contract("AMP-CAST-014", on="cpu")
@pytest.mark.parametrize(
    "op", _chosen("cpu", "unlisted", _is_any, *_QUICK_UNLISTED, "softmax", "layer_norm", "sum", "exp", "pow", "norm")
)
def test_cpu_unlisted(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    for dtype in (torch.float32, amp_dtype):
        _check_left_alone(case, target, amp_dtype, SAMPLES[op.sample], [dtype], rng)


@contract("AMP-CAST-015", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "maximum", "minimum", "where", "hypot"])
def test_native_promotion(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        for dtypes in ((amp_dtype, torch.float32), (torch.float32, amp_dtype)):
            (seen,) = _run(target, SAMPLES[op](_inputs(target, dtypes, rng)), amp_dtype).outputs
            case.equal(f"type of {op} of {type_names(dtypes)}", seen.dtype, torch.float32)
            _check_left_alone(case, target, amp_dtype, SAMPLES[op], dtypes, rng)


@contract("AMP-CAST-015", on=CUDA)
@pytest.mark.parametrize("op", ["cat", "stack"])
def test_native_promotion_of_lists(
    case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator
) -> None:
    with mode_of(target):
        for dtypes in itertools.product((amp_dtype, torch.float32), repeat=3):
            expected = torch.float32 if torch.float32 in dtypes else amp_dtype
            (seen,) = _run(target, SAMPLES[op](_inputs(target, dtypes, rng)), amp_dtype).outputs
            case.equal(f"type of {op} of {type_names(dtypes)}", seen.dtype, expected)


@contract("AMP-CAST-016", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", list(IN_PLACE))
def test_in_place(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        for dtype in (torch.float32, amp_dtype):
            call = IN_PLACE[op](_inputs(target, [dtype], rng))
            result = _run(target, call, amp_dtype).outputs[0]
            case.equal(f"type of the result for {dtype}", result.dtype, dtype)
            case.true("the result is the tensor itself", result is call.args[0])
            _check_left_alone(case, target, amp_dtype, IN_PLACE[op], [dtype], rng)


@contract("AMP-CAST-017", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", list(OUT))
def test_out_argument(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        for dtype in (torch.float32, amp_dtype):
            call = OUT[op](_inputs(target, [dtype], rng))
            result = _run(target, call, amp_dtype).outputs[0]
            case.equal(f"type of the result for {dtype}", result.dtype, dtype)
            case.true("the result is the tensor given as out", result is call.keywords["out"])
            _check_left_alone(case, target, amp_dtype, OUT[op], [dtype], rng)


@contract("AMP-CAST-018", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", list(TAKES_DTYPE))
def test_explicit_dtype(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        for given, asked in itertools.product((amp_dtype, torch.float32), (amp_dtype, torch.float32, torch.float64)):
            # vector_norm refuses a dtype that is narrower than its input, with or without autocast.
            if op == "vector_norm" and torch.promote_types(given, asked) != asked:
                continue
            call = TAKES_DTYPE[op](_inputs(target, [given], rng))
            (seen,) = _run(target, partial(call, dtype=asked), amp_dtype).outputs
            case.equal(f"type of the result of {given} with dtype={asked}", seen.dtype, asked)


@contract("AMP-CAST-019", on=CUDA)
@pytest.mark.parametrize(
    "op", _chosen("cuda", None, _is_single, "mm", "linear", "conv2d", "exp", "sum", "softmax", "layer_norm", "addcmul")
)
def test_cuda_float64(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    with mode_of(target):
        _check_left_alone(case, target, amp_dtype, SAMPLES[op.sample], [torch.float64], rng, repeatable(op.name))


@contract("AMP-CAST-019", on="cpu")
@pytest.mark.parametrize(
    "op",
    _chosen(
        "cpu", None, _is_single, "mm", "bmm", "linear", "conv2d", "mse_loss", "prod", "cat", "linalg_inv", "fft_fft"
    ),
)
def test_cpu_float64(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_left_alone(case, target, amp_dtype, SAMPLES[op.sample], [torch.float64], rng, repeatable(op.name))


@contract("AMP-CAST-020", on=CUDA_OR_CPU)
@pytest.mark.parametrize(
    "op", ["sum", "prod", "cumsum", "pow.scalar", "exp", "matmul", "mm", "linear", "addcmul", "cat"]
)
def test_not_floating(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        for dtype in (torch.int64, torch.int32, torch.bool, torch.complex64, torch.complex128):
            _check_left_alone(case, target, amp_dtype, SAMPLES[op], [dtype], rng)


_SEVERAL_INPUTS = ("addmm", "baddbmm", "bmm", "conv2d", "linear", "matmul", "mm")
_SEVERAL_INPUTS_FP32 = {
    "cuda": ("binary_cross_entropy_with_logits", "cdist", "cosine_similarity", "layer_norm", "mse_loss", "pow"),
    "cpu": ("binary_cross_entropy", "cdist", "linalg_solve", "mse_loss", "polar", "stft"),
}


def _check_mixed(case: Case, target: Target, amp_dtype: torch.dtype, row: Listing, rng: torch.Generator) -> None:
    """The op takes inputs of which each in turn is of the other type, and runs in the type of its policy."""
    with mode_of(target):
        count = _inputs(target, [torch.float32], rng)
        SAMPLES[row.sample](count)
        for odd, (rest, other) in itertools.product(
            range(count.made), itertools.permutations((torch.float32, amp_dtype))
        ):
            dtypes = tuple(other if index == odd else rest for index in range(count.made))
            call = SAMPLES[row.sample](_inputs(target, dtypes, rng))
            promised = expected_casts(call, run_dtype(row.policy, dtypes, amp_dtype))
            seen = _run(target, call, amp_dtype)
            what = f"for {type_names(dtypes)}"
            case.equal(f"casts {what}", _of_arguments(seen.casts, promised), _texts(promised))
            expected = run_dtype(row.policy, dtypes, amp_dtype)
            case.equal(
                f"types {what}",
                [tensor.dtype for tensor in seen.outputs],
                [_own_type(tensor, expected) for tensor in seen.outputs],
            )


def _several_inputs(backend: str) -> list[Any]:
    names = (*_SEVERAL_INPUTS, *_SEVERAL_INPUTS_FP32[backend])
    return [pytest.param(row, id=row.sample) for row in listings(backend) if row.sample in names]


@contract("AMP-CAST-021", on=CUDA)
@pytest.mark.parametrize("op", _several_inputs("cuda"))
def test_cuda_mixed(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_mixed(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-021", on="cpu")
@pytest.mark.parametrize("op", _several_inputs("cpu"))
def test_cpu_mixed(case: Case, target: Target, amp_dtype: torch.dtype, op: Listing, rng: torch.Generator) -> None:
    _check_mixed(case, target, amp_dtype, op, rng)


@contract("AMP-CAST-022", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", ["linear", "mm", "conv2d", "mse_loss", "prod", "cdist", "kl_div"])
def test_other_16_bit_type(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    other = torch.bfloat16 if amp_dtype is torch.float16 else torch.float16
    (row,) = (row for row in listings(target.device_type) if row.sample == op)
    with mode_of(target):
        call = SAMPLES[op](_inputs(target, [other], rng))
        (seen,) = _run(target, call, amp_dtype).outputs
        expected = run_dtype(row.policy, [other], amp_dtype)
        case.equal(f"type of {op} of {other}", seen.dtype, expected)
        if not target.is_fake:
            (wanted,) = _by_hand(target, row, (other,), expected, rng).outputs
            case.identical("result", seen, wanted)


def _module(made: nn.Module, **parameters: torch.Tensor) -> Callable[..., torch.Tensor]:
    """`made`, on the meta device, as a function of its input with these parameters."""
    return lambda *inputs: torch.func.functional_call(made, parameters, inputs)


def _bare(kind: Callable[..., nn.Module], *sizes: int) -> nn.Module:
    return kind(*sizes, device="meta")


# The ways to call one op: the first is what the op reference lists, the others are to give the same result.
WAYS: dict[str, Callable[..., dict[str, Callable[[], torch.Tensor]]]] = {
    "linear": lambda x, w, b: {
        "function": partial(F.linear, x, w, b),
        "module": partial(_module(_bare(nn.Linear, 4, 5), weight=w, bias=b), x),
    },
    "conv2d": lambda x, w, b: {
        "function": partial(F.conv2d, x, w, b, padding=1),
        "torch": partial(torch.conv2d, x, w, b, padding=1),
        "module": partial(_module(nn.Conv2d(3, 4, 3, padding=1, device="meta"), weight=w, bias=b), x),
    },
    "mm": lambda a, b: {
        "function": partial(torch.mm, a, b),
        "method": lambda: a.mm(b),
        "operator": partial(operator.matmul, a, b),
        "matmul": partial(torch.matmul, a, b),
        "linalg": partial(torch.linalg.matmul, a, b),
    },
    "bmm": lambda a, b: {"function": partial(torch.bmm, a, b), "method": lambda: a.bmm(b), "operator": lambda: a @ b},
    "addmm": lambda c, a, b: {
        "function": partial(torch.addmm, c, a, b, beta=0.5, alpha=2.0),
        "method": lambda: c.addmm(a, b, beta=0.5, alpha=2.0),
    },
    "prelu": lambda x, w: {
        "function": partial(F.prelu, x, w),
        "torch": partial(torch.prelu, x, w),
        "method": lambda: x.prelu(w),
        "module": partial(_module(_bare(nn.PReLU, 3), weight=w), x),
    },
    "softmax": lambda x: {
        "function": partial(F.softmax, x, 1),
        "torch": partial(torch.softmax, x, 1),
        "special": partial(torch.special.softmax, x, 1),
        "method": lambda: x.softmax(1),
        "module": partial(nn.Softmax(1), x),
    },
    "layer_norm": lambda x, w, b: {
        "function": partial(F.layer_norm, x, (8,), w, b),
        "torch": partial(torch.layer_norm, x, (8,), w, b),
        "module": partial(_module(_bare(nn.LayerNorm, 8), weight=w, bias=b), x),
    },
    "sum": lambda x: {"function": partial(torch.sum, x, 1), "method": lambda: x.sum(1)},
    "prod": lambda x: {"function": partial(torch.prod, x, 1), "method": lambda: x.prod(1)},
    "exp": lambda x: {"function": partial(torch.exp, x), "method": lambda: x.exp()},
    "expm1": lambda x: {
        "function": partial(torch.expm1, x),
        "special": partial(torch.special.expm1, x),
        "method": lambda: x.expm1(),
    },
    "acos": lambda x: {
        "function": partial(torch.acos, x),
        "alias": partial(torch.arccos, x),
        "method": lambda: x.acos(),
    },
    "pow.scalar": lambda x: {
        "function": partial(torch.pow, x, 2.5),
        "operator": partial(operator.pow, x, 2.5),
        "method": lambda: x.pow(2.5),
    },
    "mse_loss": lambda x, y: {"function": partial(F.mse_loss, x, y), "module": partial(nn.MSELoss(), x, y)},
    "l1_loss": lambda x, y: {"function": partial(F.l1_loss, x, y), "module": partial(nn.L1Loss(), x, y)},
    "cdist": lambda x, y: {"function": partial(torch.cdist, x, y)},
    "binary_cross_entropy_with_logits": lambda x, y: {
        "function": partial(F.binary_cross_entropy_with_logits, x, y),
        "torch": lambda: torch.binary_cross_entropy_with_logits(x, y).mean(),
        "module": partial(nn.BCEWithLogitsLoss(), x, y),
    },
}


@contract("AMP-CAST-023", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", list(WAYS))
def test_ways_to_call(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    policy = {row.sample: row.policy for row in listings(target.device_type)}.get(op, "unlisted")
    given = torch.float32 if policy == "lower_precision" else amp_dtype
    with mode_of(target):
        tensors = [
            value for value in SAMPLES[op](_inputs(target, [given], rng)).args if isinstance(value, torch.Tensor)
        ]
        expected = run_dtype(policy, [given], amp_dtype)
        results = {way: _run(target, partial(call), amp_dtype).outputs[0] for way, call in WAYS[op](*tensors).items()}
        for way, result in results.items():
            case.equal(f"type of {op} as {way}", result.dtype, expected)
            if not target.is_fake:
                case.identical(f"{op} as {way}", result, results["function"])


_PROBABILITIES = SAMPLES["binary_cross_entropy"]


@contract("AMP-CAST-024", on=CUDA)
@pytest.mark.parametrize("way", ["function", "module"])
def test_binary_cross_entropy_is_refused(
    case: Case, target: Target, amp_dtype: torch.dtype, way: str, rng: torch.Generator
) -> None:
    loss = {"function": lambda x, y: F.binary_cross_entropy(x, y), "module": nn.BCELoss()}[way]
    with mode_of(target):
        for dtype in (torch.float32, amp_dtype):
            x, y = _PROBABILITIES(_inputs(target, [dtype], rng)).args
            with target.autocast(amp_dtype):
                case.raises(f"{way} of {dtype} in a region", RuntimeError, partial(loss, x, y), "unsafe to autocast")
        x, y = _PROBABILITIES(_inputs(target, [torch.float32], rng)).args
        with target.autocast(amp_dtype), target.autocast(amp_dtype, enabled=False):
            case.equal("type in a disabled subregion", loss(x, y).dtype, torch.float32)
        case.equal("type outside", loss(x, y).dtype, torch.float32)


@contract("AMP-CAST-025", on=CUDA_OR_CPU)
@pytest.mark.parametrize("way", ["function", "module"])
def test_logits_are_accepted(
    case: Case, target: Target, amp_dtype: torch.dtype, way: str, rng: torch.Generator
) -> None:
    loss = {"function": F.binary_cross_entropy_with_logits, "module": nn.BCEWithLogitsLoss()}[way]
    make = SAMPLES["binary_cross_entropy_with_logits"]
    with mode_of(target):
        for dtypes in itertools.product((torch.float32, amp_dtype), repeat=2):
            x, y = make(_inputs(target, dtypes, rng)).args
            with target.autocast(amp_dtype):
                result = loss(x, y)
            case.equal(f"type for {type_names(dtypes)}", result.dtype, torch.float32)
            if not target.is_fake:
                case.identical(f"loss for {type_names(dtypes)}", result, loss(x.float(), y.float()))


@contract("AMP-CAST-026", on="cpu")
@pytest.mark.parametrize("way", ["function", "module"])
def test_cpu_binary_cross_entropy(
    case: Case, target: Target, amp_dtype: torch.dtype, way: str, rng: torch.Generator
) -> None:
    loss = {"function": F.binary_cross_entropy, "module": nn.BCELoss()}[way]
    for dtypes in itertools.product((torch.float32, amp_dtype), repeat=2):
        x, y = _PROBABILITIES(_inputs(target, dtypes, rng)).args
        with target.autocast(amp_dtype):
            result = loss(x, y)
        case.identical(f"loss for {type_names(dtypes)}", result, loss(x.float(), y.float()))


@contract("AMP-CAST-027", on="cpu")
@pytest.mark.parametrize("op", list(COMPOSITES))
def test_composites(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    (seen,) = _run(target, COMPOSITES[op](_inputs(target, [torch.float32], rng)), amp_dtype).outputs
    (wanted,) = _run(target, COMPOSITES[op](_inputs(target, [torch.float32], rng, hand_cast=amp_dtype)), None).outputs
    case.equal(f"type of {op} of float32 inputs", seen.dtype, amp_dtype)
    case.identical("result", seen, wanted)


@contract("AMP-CAST-028", on=CUDA)
@pytest.mark.parametrize("order", [0, 1, 2, 3, float("inf"), "fro", "nuc"], ids=str)
def test_norm_of_any_order(
    case: Case, target: Target, amp_dtype: torch.dtype, order: Any, rng: torch.Generator
) -> None:
    with mode_of(target):
        tensor = _inputs(target, [amp_dtype], rng).f(3, 4)
        with target.autocast(amp_dtype):
            case.equal(f"type of the norm of order {order}", torch.norm(tensor, order).dtype, torch.float32)


@contract("AMP-CAST-029", on=CUDA)
@pytest.mark.parametrize("op", ["bilinear"])
def test_optional_input_widens(
    case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator
) -> None:
    with mode_of(target):
        for bias_dtype, expected in ((amp_dtype, amp_dtype), (torch.float32, torch.float32)):
            bias = _inputs(target, [bias_dtype], rng).f(2)
            call = SAMPLES[op](_inputs(target, [amp_dtype], rng))
            (seen,) = _run(target, partial(call, bias=bias), amp_dtype).outputs
            case.equal(f"type of {op} of {type_names([amp_dtype])} with a bias of {bias_dtype}", seen.dtype, expected)


@contract("AMP-CAST-030", on=("cpu", "cuda"))
@pytest.mark.parametrize("op", ["linear", "mm", "conv2d", "addmm", "mse_loss", "prod"])
def test_gradient_passes_the_cast(
    case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator
) -> None:
    (row,) = (row for row in listings(target.device_type) if row.sample == op)
    given = torch.float32 if row.policy == "lower_precision" else amp_dtype
    to = run_dtype(row.policy, [given], amp_dtype)

    def gradients(amp: bool) -> list[torch.Tensor]:
        call = SAMPLES[op](_inputs(target, [given], rng))
        leaves = [value.requires_grad_() for value in call.args if isinstance(value, torch.Tensor)]
        if amp:
            with target.autocast(amp_dtype):
                result = call()
        else:
            cast = [value.to(to) if isinstance(value, torch.Tensor) else value for value in call.args]
            result = call.func(*cast, **call.keywords)
        # A gradient that differs by element, and that 16 bits hold exactly.
        weights = torch.arange(1, result.numel() + 1, device=target.device).reshape(result.shape) % 7 - 3
        return list(torch.autograd.grad(result, leaves, weights.to(result.dtype)))

    with repeatable_convolutions():
        both = gradients(True), gradients(False)
    for index, (seen, wanted) in enumerate(zip(*both, strict=True)):
        case.equal(f"type of the gradient of input {index}", seen.dtype, given)
        case.identical(f"gradient of input {index}", seen, wanted)
        case.at_least(f"largest gradient of input {index}", float(seen.abs().max()), 0.0)


@contract("AMP-CAST-031", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", ["conv2d", "conv_transpose2d"])
def test_channels_last(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        x, weight, *rest = SAMPLES[op](_inputs(target, [torch.float32], rng)).args
        x, weight = (tensor.to(memory_format=torch.channels_last) for tensor in (x, weight))
        call = partial(getattr(F, op), x, weight, *rest)
        seen = _run(target, call, amp_dtype)
        case.equal("casts", len(seen.casts), 3)
        case.equal("casts that keep the layout", [cast.kept_layout for cast in seen.casts], [True] * 3)
        by_hand = partial(getattr(F, op), *(tensor.to(amp_dtype) for tensor in (x, weight, *rest)))
        (wanted,) = _run(target, by_hand, None).outputs
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
        inputs = _inputs(target, [torch.float32], rng)
        left, right = _VIEWS[view](inputs.f(4, 4)), inputs.f(4, 4)
        right = right.narrow(0, 0, left.shape[1])
        seen = _run(target, partial(torch.mm, left, right), amp_dtype)
        case.equal("casts", _texts(seen.casts), _texts(expected_casts(partial(torch.mm, left, right), amp_dtype)))
        case.equal("type", seen.outputs[0].dtype, amp_dtype)
        if not target.is_fake:
            case.identical("result", seen.outputs[0], torch.mm(left.to(amp_dtype), right.to(amp_dtype)))
        low = _VIEWS[view](_inputs(target, [amp_dtype], rng).p(4, 4))
        for tensor in (low, *([low.select(0, 0).select(0, 0)] if low.numel() else [])):
            (result,) = _run(target, partial(torch.prod, tensor), amp_dtype).outputs
            case.equal(f"type of the product over a tensor of shape {tuple(tensor.shape)}", result.dtype, torch.float32)


@contract("AMP-CAST-033", on=CUDA)
@pytest.mark.parametrize("op", ["mm", "linear", "exp", "mse_loss"])
def test_other_device(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        for dtype in (torch.float32, torch.bfloat16):
            here = Inputs((dtype,), torch.device("cpu"), rng.initial_seed(), target.is_fake)
            seen = _run(target, SAMPLES[op](here), amp_dtype)
            case.equal(f"type of {op} of a cpu tensor of {dtype}", [x.dtype for x in seen.outputs], [dtype])
            case.equal(f"casts of a cpu tensor of {dtype}", _texts(c for c in seen.casts if c.argument), [])


@contract("AMP-CAST-034", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", ["mm", "linear", "conv2d", "prod", "mse_loss", "cat"])
def test_outside_a_region(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    with mode_of(target):
        for dtype in (torch.float32, amp_dtype):
            for amp in (None, amp_dtype):
                call = SAMPLES[op](_inputs(target, [dtype], rng))
                if amp is not None:
                    with target.autocast(amp):
                        seen = _run(target, call, None)
                else:
                    seen = _run(target, call, None)
                where = "outside" if amp is None else "in a disabled subregion"
                case.equal(f"type of {op} of {dtype} {where}", [x.dtype for x in seen.outputs], [dtype])
                case.equal(f"casts of arguments {where}", _texts(c for c in seen.casts if c.argument), [])
