"""Check casts in whole models, in attention backends and in composites of several ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...harness.check import Case, by_rules, contract, deep, per_target
from ...harness.targets import Target
from ...measure.onednn import lacks_primitive
from ...measure.precision import repeatable_convolutions
from ...oracles.cast_order import CastOrder
from ...oracles.manual_cast import ManualCast
from ...oracles.numbers.error_bounds import attention_window, normwise_error
from ...oracles.numbers.formats import FORMATS
from ...oracles.policy import declared
from ...oracles.policy.overloads import mode_of
from ...oracles.policy.samples import Inputs
from ...oracles.trace.ops import Op, OpTrace, first_difference
from .composite_ops import CALLS, WRITTEN, Composite, composites
from .models import Program, programs
from .support import CUDA, CUDA_OR_CPU, floating_tensors, fused_inference, make_inputs

EVERYWHERE = ("cpu", "fake:cuda", "cuda", "xpu")
REAL = ("cpu", "cuda", "xpu")


@contextlib.contextmanager
def _manual(target: Target, amp_dtype: torch.dtype, call: Callable[[], Any]) -> Iterator[None]:
    """Cast manually in the device's order, which is read while `call` does once what the block does."""
    order = CastOrder(partial(target.autocast, amp_dtype))
    with ManualCast(target.device_type, amp_dtype, order=order), OpTrace():  # which fake kernels need
        call()
    with ManualCast(target.device_type, amp_dtype, order=order):
        yield


@dataclass(frozen=True)
class Ran:
    """Hold one forward and backward pass of a program: its op traces, and its results by name."""

    forward: list[Op]
    backward: list[Op]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Given:
    """A program, its inputs and its target."""

    program: Program
    target: Target
    amp_dtype: torch.dtype
    seed: int
    inputs: torch.dtype = torch.float32
    lowered: bool = False

    def run(self, *, manual: bool) -> Ran:
        """Run the program in a region, or with manual casts, on the same values each time."""
        target, amp_dtype = self.target, self.amp_dtype
        with mode_of(target), repeatable_convolutions(), _attention(target):
            (weights, inputs), others = self._tensors(), self._tensors()
            region = (
                _manual(target, amp_dtype, partial(self.program, *others)) if manual else target.autocast(amp_dtype)
            )
            with region, OpTrace() as ahead:
                output, loss = self.program(weights, inputs)
            tensors = {"the output": output, "the loss": loss}
            if target.is_fake:
                return Ran(ahead.floating, [], tensors)
            with OpTrace() as back:
                loss.backward()
            buffers = {name: weight for name, weight in weights.items() if not weight.requires_grad}
            gradients = {
                f"the gradient of {name}": weight.grad for name, weight in weights.items() if weight.requires_grad
            }
            return Ran(ahead.floating, back.floating, {**tensors, **buffers, **gradients})

    def _tensors(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        draw = Inputs([torch.float32], self.target.device, self.seed, self.target.is_fake).f
        low = self.program.lowered if self.lowered else ()
        weights = {
            name: weight.to(self.amp_dtype) if name.startswith(tuple(low)) and weight.is_floating_point() else weight
            for name, weight in self.program.weights(draw).items()
        }
        trained = () if self.target.is_fake else [name for name, _ in self.program.network.named_parameters()]
        for name in trained:
            weights[name].requires_grad_()
        inputs = self.program.inputs(draw, self.target.device)
        return weights, tuple(x.to(self.inputs) if x.is_floating_point() else x for x in inputs)


@contextlib.contextmanager
def _attention(target: Target) -> Iterator[None]:
    """Return fused attention on the CPU, and attention as single ops elsewhere: fused backward passes may use atomics.

    To select a kernel, torch 2.6 to 2.8 queries hardware that fake tensors lack.
    """
    if target.device_type == "cpu":
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


MODELS = ["cnn", "transformer", "lstm", "dlrm"]


def _given(model: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, **types: Any) -> Given:
    return Given(programs()[model], target, amp_dtype, rng.initial_seed(), **types)


def _both(case: Case, given: Given) -> tuple[Ran, Ran]:
    """Run the program in a region and with manual casts; by the rules of a surface it may be refused."""
    try:
        predicted = given.run(manual=True)
    except RuntimeError as error:
        if not declared.changed(given.target.device_type):
            raise
        rules = declared.source_of_rules(given.target.device_type)
        case.unsupported(f"{rules} makes the model raise: {error}")
    return given.run(manual=False), predicted


def _same_stream(case: Case, what: str, seen: list[Op], predicted: list[Op]) -> None:
    case.at_least(f"ops of {what}", len(seen), 10)
    case.equal(f"first op of {what} that is not as predicted", first_difference(seen, predicted), None)


def _low(stream: list[Op], amp_dtype: torch.dtype) -> int:
    return sum(op.computes and amp_dtype in op.outputs for op in stream)


def _check_low(case: Case, given: Given, seen: list[Op], predicted: list[Op]) -> None:
    """Check that ops run in 16 bit at all; by the rules of a surface as many as are predicted may be fewer than 3."""
    changed = declared.changed(given.target.device_type)
    least = min(3, _low(predicted, given.amp_dtype)) if changed else 3
    case.at_least(f"ops that give {given.amp_dtype}", _low(seen, given.amp_dtype), least)


def _check_forward(case: Case, given: Given) -> None:
    seen, predicted = _both(case, given)
    _same_stream(case, "the forward pass", seen.forward, predicted.forward)
    _check_low(case, given, seen.forward, predicted.forward)


@by_rules
@contract("AMP-CAST-060", on=EVERYWHERE)
@pytest.mark.parametrize("model", MODELS)
def test_forward_stream(case: Case, target: Target, amp_dtype: torch.dtype, model: str, rng: torch.Generator) -> None:
    _check_forward(case, _given(model, target, amp_dtype, rng))


@by_rules
@contract("AMP-CAST-060", on="fake:xpu")
@pytest.mark.parametrize("model", [MODELS[0], *(deep("standard", model) for model in MODELS[1:])])
def test_xpu_forward_stream(
    case: Case, target: Target, amp_dtype: torch.dtype, model: str, rng: torch.Generator
) -> None:
    _check_forward(case, _given(model, target, amp_dtype, rng))


@by_rules
@contract("AMP-CAST-061", on=REAL)
@pytest.mark.parametrize("model", MODELS)
def test_backward_stream(case: Case, target: Target, amp_dtype: torch.dtype, model: str, rng: torch.Generator) -> None:
    given = _given(model, target, amp_dtype, rng)
    seen, predicted = _both(case, given)
    _same_stream(case, "the backward pass", seen.backward, predicted.backward)
    _check_low(case, given, seen.backward, predicted.backward)


def _same_bits(case: Case, seen: Ran, wanted: Ran) -> None:
    case.equal("what came of it", list(seen.tensors), list(wanted.tensors))
    for name, tensor in seen.tensors.items():
        promised = wanted.tensors[name]
        if promised is None:  # a gradient that a broken backward loses without autocast too
            case.true(f"there is {name} with manual casts (control)", False)
        case.identical(name, tensor, promised)


@by_rules
@contract("AMP-CAST-062", on=REAL)
@pytest.mark.parametrize("model", MODELS)
def test_model_values(case: Case, target: Target, amp_dtype: torch.dtype, model: str, rng: torch.Generator) -> None:
    given = _given(model, target, amp_dtype, rng)
    _same_bits(case, *_both(case, given))


def _check_whole(case: Case, given: Given) -> None:
    """Check the forward pass op by op; on a real target also the backward pass and every value."""
    seen, predicted = _both(case, given)
    _same_stream(case, "the forward pass", seen.forward, predicted.forward)
    if not given.target.is_fake:
        _same_stream(case, "the backward pass", seen.backward, predicted.backward)
        _same_bits(case, seen, predicted)


MIXTURES = {"inputs": (True, False), "weights": (False, True), "both": (True, True)}


def _mixed(
    model: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, inputs: bool, weights: bool
) -> Given:
    return _given(model, target, amp_dtype, rng, inputs=amp_dtype if inputs else torch.float32, lowered=weights)


@by_rules
@contract("AMP-CAST-063", on=EVERYWHERE)
@pytest.mark.parametrize("mixture", [deep("standard", "inputs"), deep("standard", "weights"), "both"])
@pytest.mark.parametrize("model", MODELS)
def test_mixed_types(
    case: Case, target: Target, amp_dtype: torch.dtype, model: str, mixture: str, rng: torch.Generator
) -> None:
    _check_whole(case, _mixed(model, target, amp_dtype, rng, *MIXTURES[mixture]))


@by_rules
@contract("AMP-CAST-064", on=CUDA_OR_CPU)
@pytest.mark.parametrize("weights", [False, deep("standard", True)], ids=["float32", "mixed"])
def test_fused_attention(
    case: Case, target: Target, amp_dtype: torch.dtype, weights: bool, rng: torch.Generator
) -> None:
    _check_whole(case, _mixed("transformer-sdpa", target, amp_dtype, rng, False, weights))


# The number of consecutive roundings to 16 bits from input to output: seven in each of five steps, or in each
# of five layers of ops. Each changes a result by at most 0.6u of its norm (normwise_window), and the ops in between
# (sigmoid, tanh, softmax, sums with weights of norm about 1) amplifies errors by at most 2.
_CHAIN = 2 * 0.6 * 35


# A fused kernel and single ops round in different places: at most one rounding a step.
_APART = 2 * 0.6 * 10
_RECURRENT = (
    *("gru", "gru-packed", "lstm", "lstm-deep", "rnn-tanh", "rnn-relu", "rnn-packed"),
    *("gru-cell", "lstm-cell", "rnn-cell"),
)
_ATTENTION = ("attention", "attention-inference", "encoder", "encoder-inference")
_FUNCTIONS = (
    "pairwise_distance",
    "normalize",
    "ctc_loss",
    "stft",
    "grid_sample",
    "grid_sample-of-volumes",
    "cdist",
    "cdist-of-many",
    "matrix_rank",
    "matrix_rank-absolute",
    "einsum",
    "einsum-of-three",
    "einsum-of-a-list",
    "einsum-by-numbers",
)


def _rows(names: tuple[str, ...], backend: str, *, real: bool = False) -> list[Any]:
    return [pytest.param(row, id=row.name) for row in composites(*names) if row.backend == backend and row.real == real]


def _made(row: Composite, target: Target, rng: torch.Generator, given: torch.dtype, **options: Any) -> partial[Any]:
    return CALLS[row.name](make_inputs(target, (given, torch.float32), rng, **options))


def _run_manual(
    row: Composite, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, given: torch.dtype
) -> Any:
    """Run the composite outside any region, by the method that its row names."""
    if row.manual == "cast":
        return _made(row, target, rng, given, cast_to=amp_dtype)()
    call = _made(row, target, rng, given)
    if row.manual == "given":
        return call()
    with ManualCast(target.device_type, amp_dtype):
        return WRITTEN[row.name](call.func, *call.args) if row.manual == "written" else call()


def _check_composite(case: Case, target: Target, amp_dtype: torch.dtype, row: Composite, rng: torch.Generator) -> None:
    if row.needs is not None:
        library = getattr(torch.backends, row.needs)
        if not (library.is_available() and library.enabled):
            case.unsupported(
                f"this build has no {row.needs}, or it is switched off (torch.backends.{row.needs}.enabled)"
            )
    unit = torch.finfo(amp_dtype).eps / 2
    for given in (torch.float32, amp_dtype):
        words = {"amp": amp_dtype, "float32": torch.float32, "given": given}
        with mode_of(target), _attention(target):
            call = _made(row, target, rng, given)
            try:
                with (
                    target.autocast(amp_dtype),
                    OpTrace() if target.is_fake else contextlib.nullcontext(),
                ):
                    seen = floating_tensors(call())
            except RuntimeError as error:
                if not lacks_primitive(error) or _is_able(row, call, target, amp_dtype, rng):
                    raise
                case.unsupported(str(error))
            case.equal(f"types for {given}", [x.dtype for x in seen], [words[word] for word in row.outputs])
            if target.is_fake:
                continue
            if row.manual != "none":
                manual = floating_tensors(_run_manual(row, target, amp_dtype, rng, given))
                exactly = target.device_type == "cpu" and _has_written_bits(row, target, amp_dtype, rng)
                what = f"for {given}, against manual casts"
                _check_manual(case, what, None if exactly else _APART * unit, seen, manual)
                if target.device_type == "cpu" and not exactly:
                    _check_own_casts(case, row, target, amp_dtype, rng, given, seen)
            exact = floating_tensors(_made(row, target, rng, given, cast_to=torch.float64)())
        for index, (ours, reference) in enumerate(zip(seen, exact, strict=True)):
            case.at_most(f"output {index} for {given}, error", _distance(ours, reference), _CHAIN * unit)


def _is_able(
    row: Composite, call: Callable[[], Any], target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> bool:
    """Whether the composite works in the region without gradients, or in 16 bits outside of any region."""
    with contextlib.suppress(RuntimeError):
        with torch.no_grad(), target.autocast(amp_dtype):
            call()
        return True
    with contextlib.suppress(RuntimeError):
        _made(row, target, rng, amp_dtype, cast_to=amp_dtype)()
        return True
    return False


def _distance(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the normwise error, relative where the norm is above 1: a state after ReLU may be close to zero."""
    seen, wanted = seen.detach().cpu().double(), wanted.detach().cpu().double()
    return float((seen - wanted).norm() / wanted.norm().clamp(min=1))


def _has_written_bits(row: Composite, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> bool:
    """Whether, in 16 bits outside of any region, the module has the bits of its formula, if that is what is compared.

    A kernel that keeps gates and state in float32 and rounds once has others, in a region too.
    """
    if row.manual != "written":
        return True
    call = _made(row, target, rng, amp_dtype, cast_to=amp_dtype)
    pairs = zip(*map(floating_tensors, (call(), WRITTEN[row.name](call.func, *call.args))), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def _check_own_casts(
    case: Case,
    row: Composite,
    target: Target,
    amp_dtype: torch.dtype,
    rng: torch.Generator,
    given: torch.dtype,
    seen: list[torch.Tensor],
) -> None:
    """Check a module of other roundings than its formula's against itself: of 16 bits the bits, of float32 no bits."""
    alone = floating_tensors(_made(row, target, rng, given, cast_to=given)())
    for index, (ours, theirs) in enumerate(zip(seen, alone, strict=True)):
        if given == amp_dtype:
            case.identical(f"output {index} for {given}, against the module in it", ours, theirs)
        else:
            case.true(f"output {index} for {given} is not that without a cast", not torch.equal(ours, theirs))


def _check_manual(
    case: Case, what: str, bound: float | None, seen: list[torch.Tensor], wanted: list[torch.Tensor]
) -> None:
    """Check equal bits without a bound; libraries of accelerators may select other kernels, so that one is needed."""
    case.equal("number of outputs", len(seen), len(wanted))
    for index, (ours, theirs) in enumerate(zip(seen, wanted, strict=True)):
        if bound is None:
            case.identical(f"output {index} {what}", ours, theirs)
        else:
            case.at_most(f"output {index} {what}, by norm", _distance(ours, theirs), bound)


@contract("AMP-CAST-065", on="cpu")
@pytest.mark.parametrize("composite", _rows(_RECURRENT, "cpu"))
def test_cpu_recurrent_nets(
    case: Case, target: Target, amp_dtype: torch.dtype, composite: Composite, rng: torch.Generator
) -> None:
    _check_composite(case, target, amp_dtype, composite, rng)


@contract("AMP-CAST-065", on=CUDA)
@pytest.mark.parametrize("composite", _rows(_RECURRENT, "cuda"))
def test_cuda_recurrent_nets(
    case: Case, target: Target, amp_dtype: torch.dtype, composite: Composite, rng: torch.Generator
) -> None:
    _check_composite(case, target, amp_dtype, composite, rng)


@contract("AMP-CAST-065", on="cuda", dtypes=("fp16",))
@pytest.mark.parametrize("composite", _rows(_RECURRENT, "cuda", real=True))
def test_cuda_recurrent_nets_of_its_libraries(
    case: Case, target: Target, amp_dtype: torch.dtype, composite: Composite, rng: torch.Generator
) -> None:
    _check_composite(case, target, amp_dtype, composite, rng)


@contract("AMP-CAST-070", on="cuda", dtypes=("bf16",))
@pytest.mark.parametrize("composite", _rows(_RECURRENT, "cuda", real=True))
def test_recurrent_nets_in_bfloat16(
    case: Case, target: Target, amp_dtype: torch.dtype, composite: Composite, rng: torch.Generator
) -> None:
    if not torch.backends.cudnn.is_available():
        case.unsupported("cuDNN and MIOpen are absent, so no kernel of theirs runs")
    with target.autocast(amp_dtype):
        seen = {x.dtype for x in floating_tensors(_made(composite, target, rng, torch.float32)())}
    case.equal("types of the outputs", sorted(map(str, seen)), [str(amp_dtype)])


@contract("AMP-CAST-066", on="cpu")
@pytest.mark.parametrize("composite", _rows(_ATTENTION, "cpu"))
def test_cpu_attention_modules(
    case: Case, target: Target, amp_dtype: torch.dtype, composite: Composite, rng: torch.Generator
) -> None:
    with fused_inference():
        _check_composite(case, target, amp_dtype, composite, rng)


@contract("AMP-CAST-066", on="cuda")
@pytest.mark.parametrize("composite", _rows(_ATTENTION, "cuda", real=True))
def test_cuda_attention_modules(
    case: Case, target: Target, amp_dtype: torch.dtype, composite: Composite, rng: torch.Generator
) -> None:
    with fused_inference():
        _check_composite(case, target, amp_dtype, composite, rng)


@contract("AMP-CAST-069", on="cpu")
@pytest.mark.parametrize("composite", _rows(_FUNCTIONS, "cpu"))
def test_cpu_composite_functions(
    case: Case, target: Target, amp_dtype: torch.dtype, composite: Composite, rng: torch.Generator
) -> None:
    _check_composite(case, target, amp_dtype, composite, rng)


@contract("AMP-CAST-069", on=CUDA)
@pytest.mark.parametrize("composite", _rows(_FUNCTIONS, "cuda"))
def test_cuda_composite_functions(
    case: Case, target: Target, amp_dtype: torch.dtype, composite: Composite, rng: torch.Generator
) -> None:
    _check_composite(case, target, amp_dtype, composite, rng)


@contract("AMP-CAST-069", on="cuda")
@pytest.mark.parametrize("composite", _rows(_FUNCTIONS, "cuda", real=True))
def test_cuda_composite_functions_of_its_libraries(
    case: Case, target: Target, amp_dtype: torch.dtype, composite: Composite, rng: torch.Generator
) -> None:
    _check_composite(case, target, amp_dtype, composite, rng)


_SDPA = {"math": "MATH", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


def _attention_backends(target: Target) -> list[str]:
    """Return the attention backends that torch implements for the device; devices differ in which they support."""
    return ["math", "flash"] if target.device_type == "cpu" else list(_SDPA)


@contract("AMP-CAST-067", on=("cpu", "cuda"))
@per_target("backend", _attention_backends)
@pytest.mark.parametrize("causal", [False, deep("standard", True)], ids=["full", "causal"])
def test_attention_backends(
    case: Case, target: Target, amp_dtype: torch.dtype, backend: str, causal: bool, rng: torch.Generator
) -> None:
    inputs = Inputs([torch.float32, amp_dtype], target.device, rng.initial_seed())
    tensors = [inputs.f(2, 2, 64, 16) for _ in range(3)]
    call: partial[torch.Tensor] = partial(F.scaled_dot_product_attention, is_causal=causal)
    with sdpa_kernel(getattr(SDPBackend, _SDPA[backend])):
        try:
            with _manual(target, amp_dtype, partial(call, *tensors)), OpTrace() as predicted:
                manual = call(*tensors)
        except RuntimeError as error:
            case.unsupported(f"{backend} attention takes no {amp_dtype} here: {error}")
        with target.autocast(amp_dtype), OpTrace() as seen:
            result = call(*tensors)
    case.equal("first op that is not as predicted", first_difference(seen.floating, predicted.floating), None)
    case.identical("result, against manual casts", result, manual)
    low, high = attention_window(FORMATS[amp_dtype])
    exact = call(*(x.to(amp_dtype).cpu().double() for x in tensors))
    case.equal("type", result.dtype, amp_dtype)
    case.between("error by norm", normwise_error(result, exact), low / 3, high)
