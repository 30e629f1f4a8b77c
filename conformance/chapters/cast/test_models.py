"""Casts in whole models, in composites of several ops, and through every documented way to call."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from ...data import fixture, read_toml
from ...harness.check import Case, contract, deep, per_target
from ...harness.targets import Target
from ...measure.precision import repeatable_convolutions
from ...oracles.manual_cast import ManualCast, casts_last_first
from ...oracles.numbers.error_bounds import attention_window, normwise_error
from ...oracles.numbers.formats import FORMATS
from ...oracles.policy.lists import listings, run_dtype, sets_dtype
from ...oracles.policy.overloads import mode_of
from ...oracles.policy.samples import SAMPLES, Inputs
from ...oracles.trace.ops import Op, OpTrace, first_difference
from .composite_ops import CALLS, WRITTEN, Composite, composites
from .models import Program, programs

CUDA = ("fake:cuda", "cuda")
EVERYWHERE = ("cpu", "fake:cuda", "cuda", "xpu")
CUDA_OR_CPU = ("cpu", "fake:cuda", "cuda")
REAL = ("cpu", "cuda", "xpu")


@functools.cache
def _last_first(target: Target) -> bool:
    """The order of casts does not depend on the values or the case, so it is read once."""
    with mode_of(target):
        return casts_last_first(target.device, lambda: target.autocast(torch.bfloat16))


@dataclass(frozen=True)
class Ran:
    """One forward and backward pass of a program: its streams, and what came of it by name."""

    forward: list[Op]
    backward: list[Op]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Given:
    """A program, what it is given, and where."""

    program: Program
    target: Target
    amp_dtype: torch.dtype
    seed: int
    inputs: torch.dtype = torch.float32
    lowered: bool = False

    def run(self, *, by_hand: bool) -> Ran:
        """Run it in a region, or with the casts written in, on the same values each time."""
        target, amp_dtype = self.target, self.amp_dtype
        with mode_of(target), repeatable_convolutions(), _attention(target):
            weights, inputs = self._tensors()
            region = (
                ManualCast(target.device_type, amp_dtype, last_first=_last_first(target))
                if by_hand
                else target.autocast(amp_dtype)
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
    """Attention by the CPU's own choice; elsewhere written out, since fused backward passes may add with atomics.

    To choose a kernel, torch 2.6 to 2.8 asks the hardware that fake tensors lack.
    """
    if target.device_type == "cpu":
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


MODELS = ["cnn", "transformer", "lstm", "dlrm"]


def _given(model: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, **types: Any) -> Given:
    return Given(programs()[model], target, amp_dtype, rng.initial_seed(), **types)


def _same_stream(case: Case, what: str, seen: list[Op], predicted: list[Op]) -> None:
    case.at_least(f"ops of {what}", len(seen), 10)
    case.equal(f"first op of {what} that is not as predicted", first_difference(seen, predicted), None)


def _low(stream: list[Op], amp_dtype: torch.dtype) -> int:
    return sum(op.computes and amp_dtype in op.outputs for op in stream)


def _check_forward(case: Case, given: Given) -> None:
    seen, predicted = given.run(by_hand=False), given.run(by_hand=True)
    _same_stream(case, "the forward pass", seen.forward, predicted.forward)
    case.at_least(f"ops that give {given.amp_dtype}", _low(seen.forward, given.amp_dtype), 3)


@contract("AMP-CAST-060", on=EVERYWHERE)
@pytest.mark.parametrize("model", MODELS)
def test_forward_stream(case: Case, target: Target, amp_dtype: torch.dtype, model: str, rng: torch.Generator) -> None:
    _check_forward(case, _given(model, target, amp_dtype, rng))


@contract("AMP-CAST-060", on="fake:xpu")
@pytest.mark.parametrize("model", [MODELS[0], *(deep("standard", model) for model in MODELS[1:])])
def test_xpu_forward_stream(
    case: Case, target: Target, amp_dtype: torch.dtype, model: str, rng: torch.Generator
) -> None:
    _check_forward(case, _given(model, target, amp_dtype, rng))


@contract("AMP-CAST-061", on=REAL)
@pytest.mark.parametrize("model", MODELS)
def test_backward_stream(case: Case, target: Target, amp_dtype: torch.dtype, model: str, rng: torch.Generator) -> None:
    given = _given(model, target, amp_dtype, rng)
    seen, predicted = given.run(by_hand=False), given.run(by_hand=True)
    _same_stream(case, "the backward pass", seen.backward, predicted.backward)
    case.at_least(f"ops that give {amp_dtype}", _low(seen.backward, amp_dtype), 3)


def _same_bits(case: Case, seen: Ran, wanted: Ran) -> None:
    case.equal("what came of it", list(seen.tensors), list(wanted.tensors))
    for name, tensor in seen.tensors.items():
        case.identical(name, tensor, wanted.tensors[name])


@contract("AMP-CAST-062", on=REAL)
@pytest.mark.parametrize("model", MODELS)
def test_model_values(case: Case, target: Target, amp_dtype: torch.dtype, model: str, rng: torch.Generator) -> None:
    given = _given(model, target, amp_dtype, rng)
    _same_bits(case, given.run(by_hand=False), given.run(by_hand=True))


def _check_whole(case: Case, given: Given) -> None:
    """The forward pass op for op; on a real target the backward pass and every value too."""
    seen, predicted = given.run(by_hand=False), given.run(by_hand=True)
    _same_stream(case, "the forward pass", seen.forward, predicted.forward)
    if not given.target.is_fake:
        _same_stream(case, "the backward pass", seen.backward, predicted.backward)
        _same_bits(case, seen, predicted)


MIXTURES = {"inputs": (True, False), "weights": (False, True), "both": (True, True)}


def _mixed(
    model: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, inputs: bool, weights: bool
) -> Given:
    return _given(model, target, amp_dtype, rng, inputs=amp_dtype if inputs else torch.float32, lowered=weights)


@contract("AMP-CAST-063", on=EVERYWHERE)
@pytest.mark.parametrize("mixture", [deep("standard", "inputs"), deep("standard", "weights"), "both"])
@pytest.mark.parametrize("model", MODELS)
def test_mixed_types(
    case: Case, target: Target, amp_dtype: torch.dtype, model: str, mixture: str, rng: torch.Generator
) -> None:
    _check_whole(case, _mixed(model, target, amp_dtype, rng, *MIXTURES[mixture]))


@contract("AMP-CAST-064", on=CUDA_OR_CPU)
@pytest.mark.parametrize("weights", [False, deep("standard", True)], ids=["float32", "mixed"])
def test_fused_attention(
    case: Case, target: Target, amp_dtype: torch.dtype, weights: bool, rng: torch.Generator
) -> None:
    _check_whole(case, _mixed("transformer-sdpa", target, amp_dtype, rng, False, weights))


# As in AMP-CAST-011: far below one rounding to 16 bits, and room for the roundings of sums of 100 terms.
_FP32_ERROR = 128 * 2.0**-24

# What oneDNN says where the processor has no instruction for a type.
_LACKING = "could not create a primitive"

# Roundings to 16 bits that can follow one another from input to output: seven in each of five steps, or in each
# of five layers of ops. Each moves a result by at most 0.6u of its norm (normwise_window), and what is between them
# (sigmoid, tanh, softmax, sums with weights of norm about 1) passes errors on without making more than twice of them.
_CHAIN = 2 * 0.6 * 35
# Of those of a fused kernel and of single ops, which differ in where they round, at most one a step.
_APART = 2 * 0.6 * 10


_RECURRENT = ("gru", "lstm", "lstm-deep", "rnn-tanh", "rnn-relu", "gru-cell", "lstm-cell", "rnn-cell")
_ATTENTION = ("attention", "encoder", "encoder-inference")
_FUNCTIONS = ("pairwise_distance", "normalize", "ctc_loss", "einsum")


def _rows(names: tuple[str, ...], backend: str, *, real: bool = False) -> list[Any]:
    return [pytest.param(row, id=row.name) for row in composites(*names) if row.backend == backend and row.real == real]


def _made(row: Composite, target: Target, rng: torch.Generator, given: torch.dtype, **options: Any) -> partial[Any]:
    inputs = Inputs((given, torch.float32), target.device, rng.initial_seed(), target.is_fake, **options)
    return CALLS[row.name](inputs)


def _floats(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _by_hand(row: Composite, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, given: torch.dtype) -> Any:
    """The composite outside any region, by the way that its row names."""
    if row.by_hand == "cast":
        return _made(row, target, rng, given, hand_cast=amp_dtype)()
    call = _made(row, target, rng, given)
    if row.by_hand == "given":
        return call()
    with ManualCast(target.device_type, amp_dtype):
        return WRITTEN[row.name](call.func, *call.args) if row.by_hand == "written" else call()


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
                with target.autocast(amp_dtype), OpTrace() if target.is_fake else contextlib.nullcontext():
                    seen = _floats(call())
            except RuntimeError as error:
                if _LACKING not in str(error):
                    raise
                case.unsupported(str(error).splitlines()[0])
            case.equal(f"types for {given}", [x.dtype for x in seen], [words[word] for word in row.outputs])
            if target.is_fake:
                continue
            if row.by_hand != "none":
                by_hand = _floats(_by_hand(row, target, amp_dtype, rng, given))
                _check_by_hand(case, target, f"for {given}, against casts by hand", _APART * unit, seen, by_hand)
            exact = _floats(_made(row, target, rng, given, hand_cast=torch.float64)())
        for index, (ours, reference) in enumerate(zip(seen, exact, strict=True)):
            case.at_most(f"output {index} for {given}, error", _distance(ours, reference), _CHAIN * unit)


def _distance(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    """The error by norm, relative where the norm is above 1: a rectified state may be zero or next to it."""
    seen, wanted = seen.detach().cpu().double(), wanted.detach().cpu().double()
    return float((seen - wanted).norm() / wanted.norm().clamp(min=1))


def _check_by_hand(
    case: Case, target: Target, what: str, bound: float, seen: list[torch.Tensor], wanted: list[torch.Tensor]
) -> None:
    """The same bits on a CPU; elsewhere libraries may choose other kernels, and the distance is bounded."""
    case.equal("number of outputs", len(seen), len(wanted))
    for index, (ours, theirs) in enumerate(zip(seen, wanted, strict=True)):
        if target.device_type == "cpu":
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
    try:
        with target.autocast(amp_dtype):
            seen = sorted({str(x.dtype) for x in _floats(_made(composite, target, rng, torch.float32)())})
    except RuntimeError as error:
        seen = [f"raises {str(error).splitlines()[0]}"]
    case.note("types of the outputs", ", ".join(seen))


@contract("AMP-CAST-066", on="cpu")
@pytest.mark.parametrize("composite", _rows(_ATTENTION, "cpu"))
def test_cpu_attention_modules(
    case: Case, target: Target, amp_dtype: torch.dtype, composite: Composite, rng: torch.Generator
) -> None:
    _check_composite(case, target, amp_dtype, composite, rng)


@contract("AMP-CAST-066", on="cuda")
@pytest.mark.parametrize("composite", _rows(_ATTENTION, "cuda", real=True))
def test_cuda_attention_modules(
    case: Case, target: Target, amp_dtype: torch.dtype, composite: Composite, rng: torch.Generator
) -> None:
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
    """The ways to compute attention that torch has code for on the device; cards differ in which they support."""
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
    casts = ManualCast(target.device_type, amp_dtype, last_first=_last_first(target))
    with sdpa_kernel(getattr(SDPBackend, _SDPA[backend])):
        with OpTrace() as predicted:
            try:
                with casts:
                    by_hand = call(*tensors)
            except RuntimeError as error:
                case.unsupported(f"{backend} attention takes no {amp_dtype} here: {str(error).splitlines()[0]}")
        with target.autocast(amp_dtype), OpTrace() as seen:
            result = call(*tensors)
    case.equal("first op that is not as predicted", first_difference(seen.floating, predicted.floating), None)
    case.identical("result, against casts by hand", result, by_hand)
    low, high = attention_window(FORMATS[amp_dtype])
    exact = call(*(x.to(amp_dtype).double() for x in tensors))
    case.equal("type", result.dtype, amp_dtype)
    case.between("error by norm", normwise_error(result, exact), low / 3, high)


def _normed(target: Target, rng: torch.Generator, given: torch.dtype, training: bool) -> dict[str, torch.Tensor]:
    """What batch norm makes of inputs with a mean of 3, and the running statistics, from 0 and 1, after it."""
    inputs = Inputs([given, torch.float32], target.device, rng.initial_seed())
    x = (inputs.f(4, 3, 5, 5) + 3).requires_grad_()
    weight, bias = inputs.p(3).requires_grad_(), inputs.f(3).requires_grad_()
    mean, variance = torch.zeros(3, device=target.device), torch.ones(3, device=target.device)
    with repeatable_convolutions():
        output = F.batch_norm(x, mean, variance, weight, bias, training=training, momentum=0.5)
    steps = torch.arange(output.numel(), device=target.device).reshape(output.shape) % 7 - 3
    gradients = torch.autograd.grad(output, (x, weight, bias), steps.to(output.dtype))
    names = ("gradient of the input", "gradient of the weight", "gradient of the bias")
    return {
        "output": output,
        "running mean": mean,
        "running variance": variance,
        "input": x,
        **dict(zip(names, gradients, strict=True)),
    }


@contract("AMP-CAST-068", on=("cpu", "cuda"))
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_batch_norm(case: Case, target: Target, amp_dtype: torch.dtype, training: bool, rng: torch.Generator) -> None:
    for given in (torch.float32, amp_dtype):
        with target.autocast(amp_dtype):
            seen = _normed(target, rng, given, training)
        outside = _normed(target, rng, given, training)
        for name, tensor in seen.items():
            wanted = given if "put" in name else torch.float32
            case.equal(f"type of the {name} for {given}", tensor.dtype, wanted)
            case.identical(f"{name} for {given}, against the call outside", tensor, outside[name])
        columns = seen["input"].detach().double().transpose(0, 1).flatten(1)
        mean, variance = (
            (columns.mean(1) / 2, (1 + columns.var(1)) / 2) if training else (torch.zeros(3), torch.ones(3))
        )
        for name, exact in (("running mean", mean), ("running variance", variance)):
            distance = float((seen[name].double() - exact.to(target.device)).norm())
            case.at_most(f"error of the {name} for {given}", distance, _FP32_ERROR * float(exact.norm()))


_PLACES = {
    "list": lambda device: torch.tensor([2, 0], device=device),
    "mask": lambda device: torch.tensor([True, False, True], device=device),
    "slice": lambda device: slice(0, 2),
}


@contract("AMP-CAST-071", on=("cpu", "cuda"))
@pytest.mark.parametrize("place", list(_PLACES))
def test_indexed_assignment(
    case: Case, target: Target, amp_dtype: torch.dtype, place: str, rng: torch.Generator
) -> None:
    where = _PLACES[place](target.device)

    def assigned(dtypes: tuple[torch.dtype, ...], amp: bool) -> torch.Tensor | str:
        inputs = Inputs(dtypes, target.device, rng.initial_seed())
        x, y = inputs.f(3, 4), inputs.f(2, 4)
        try:
            with target.autocast(amp_dtype, enabled=amp):
                x[where] = y
        except RuntimeError as error:
            return f"raises {type(error).__name__}"
        return x

    for dtypes in itertools.product((torch.float32, amp_dtype), repeat=2):
        inside, outside = assigned(dtypes, True), assigned(dtypes, False)
        what = f"{dtypes[1]} put into {dtypes[0]}"
        if isinstance(inside, str) or isinstance(outside, str):
            case.equal(what, inside, outside)
        else:
            case.equal(f"type after {what}", inside.dtype, dtypes[0])
            case.identical(f"values after {what}", inside, outside)


Function = Callable[[torch.Tensor], torch.Tensor]

# torch.func, API reference: each turns a function into another, which is called inside the region.
_TRANSFORMS: dict[str, Callable[[Function, torch.Tensor], Any]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(f)(x),
    "grad-and-value": lambda f, x: torch.func.grad_and_value(f)(x),
    "per-sample-grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones((), device=x.device)),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


@contract("AMP-CAST-072", on=("cpu", "cuda"))
@pytest.mark.parametrize("region", ["around", "inside"])
@pytest.mark.parametrize("transform", [deep("standard", name) if name == "jvp" else name for name in _TRANSFORMS])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch compiles its first jvp with it
def test_function_transforms(
    case: Case, target: Target, amp_dtype: torch.dtype, transform: str, region: str, rng: torch.Generator
) -> None:
    inputs = Inputs([torch.float32], target.device, rng.initial_seed())
    x, weight, wanted = inputs.f(3, 2, 4), inputs.f(5, 4), inputs.f(5)

    kinds = []

    def program(row: torch.Tensor) -> torch.Tensor:
        with target.autocast(amp_dtype) if region == "inside" else contextlib.nullcontext():
            product = F.linear(row, weight)
            kinds.append(product.dtype)
            return F.mse_loss(product, wanted.expand(*row.shape[:-1], 5))

    def by_hand(row: torch.Tensor) -> torch.Tensor:
        product = F.linear(row.to(amp_dtype), weight.to(amp_dtype))
        return F.mse_loss(product.float(), wanted.expand(*row.shape[:-1], 5))

    with target.autocast(amp_dtype) if region == "around" else contextlib.nullcontext():
        seen = _floats(_TRANSFORMS[transform](program, x))
    expected = _floats(_TRANSFORMS[transform](by_hand, x))
    case.equal("types of the product inside", set(kinds), {amp_dtype})
    case.equal("number of outputs", len(seen), len(expected))
    for index, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        case.identical(f"output {index} of {transform}", ours, theirs)


class Wrapper(torch.Tensor):
    """A subclass that holds a tensor and logs the types of what it is asked for ("Extending PyTorch", wrappers)."""

    inner: torch.Tensor
    log: ClassVar[list[tuple[str, tuple[torch.dtype, ...]]]] = []
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type[Wrapper], inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tuple(leaf.dtype for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Wrapper))
        cls.log.append((func.overloadpacket.__name__, given))
        args, kwargs = tree_map(lambda leaf: leaf.inner if isinstance(leaf, Wrapper) else leaf, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map(lambda leaf: cls(leaf) if isinstance(leaf, torch.Tensor) else leaf, result)


_WRAPPED = ("mm", "linear", "conv2d", "prod", "mse_loss", "relu")


def _policy_of(sample: str, backend: str) -> str:
    return {row.sample: row.policy for row in listings(backend)}.get(sample, "unlisted")


@contract("AMP-CAST-073", on=("cpu", "cuda"))
@pytest.mark.parametrize("op", _WRAPPED)
def test_wrapper_subclass(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    row = {row.sample: row for row in listings(target.device_type)}[op]
    given = torch.float32 if row.policy == "lower_precision" else amp_dtype
    expected = run_dtype(row.policy, [given], amp_dtype)
    call = SAMPLES[op](Inputs([given], target.device, rng.initial_seed()))
    count = sum(isinstance(value, torch.Tensor) for value in call.args)
    Wrapper.log.clear()
    with repeatable_convolutions():
        with target.autocast(amp_dtype):
            seen = call.func(*_each(Wrapper, call.args), **call.keywords)
        if sets_dtype(row):
            by_hand = call(dtype=expected)
        else:
            by_hand = call.func(*_each(lambda x: x.to(expected), call.args), **call.keywords)
    case.equal("type of the result", type(seen), Wrapper)
    if not sets_dtype(row):
        casts = [types for name, types in Wrapper.log if name == "_to_copy"]
        case.equal("casts that the subclass sees", casts, [(given,)] * (count if expected != given else 0))
        inside = {dtype for name, types in Wrapper.log if name != "_to_copy" for dtype in types}
        case.equal("types of what the ops below take", inside, {expected})
    case.identical("result, against casts by hand", seen.inner, by_hand)


def _each(change: Callable[[torch.Tensor], torch.Tensor], args: Any) -> Any:
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, args)


class Named(torch.Tensor):
    """A subclass that leaves everything to torch."""


_KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "parameter": nn.Parameter,
    "frozen-parameter": partial(nn.Parameter, requires_grad=False),
    "buffer": lambda x: nn.Buffer(x),
    "subclass": lambda x: x.as_subclass(Named),
}


@contract("AMP-CAST-074", on=("cpu", "cuda"))
@pytest.mark.parametrize("op", ["mm", "linear", "mse_loss", "prod", "relu", "cat"])
@pytest.mark.parametrize("kind", list(_KINDS))
def test_kinds_of_tensor(
    case: Case, target: Target, amp_dtype: torch.dtype, kind: str, op: str, rng: torch.Generator
) -> None:
    policy = _policy_of(op, target.device_type)
    given = torch.float32 if policy == "lower_precision" else amp_dtype
    call = SAMPLES[op](Inputs([given], target.device, rng.initial_seed()))
    args = _each(_KINDS[kind], call.args)
    with target.autocast(amp_dtype):
        plain = call()
        seen = call.func(*args, **call.keywords)
    case.equal("type", seen.dtype, run_dtype(policy, [given], amp_dtype))
    case.equal("class", type(seen), Named if kind == "subclass" else torch.Tensor)
    case.identical("result, against the same call on tensors", seen.as_subclass(torch.Tensor), plain)


_NESTED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda x, w, b: F.linear(x, w),
    "linear-bias": lambda x, w, b: F.linear(x, w, b),
    "matmul": lambda x, w, b: torch.matmul(x, w.t()),
    "operator": lambda x, w, b: x @ w.t(),
}


@contract("AMP-CAST-075", on=("cpu", "cuda"))
@pytest.mark.parametrize("op", list(_NESTED))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    inputs = Inputs([torch.float32], target.device, rng.initial_seed())
    rows, weight, bias = [inputs.f(length, 4) for length in (2, 5, 3)], inputs.f(6, 4), inputs.f(6)
    ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with target.autocast(amp_dtype):
        seen = _NESTED[op](ragged, weight, bias)
        left_alone = F.relu(ragged)
    low = [x.to(amp_dtype) for x in (weight, bias)]
    by_hand = _NESTED[op](torch.nested.nested_tensor([x.to(amp_dtype) for x in rows], layout=torch.jagged), *low)
    case.equal("type of what relu, on no list, returns", left_alone.dtype, torch.float32)
    case.equal("layout", seen.layout, torch.jagged)
    case.equal("lengths", [len(row) for row in seen.unbind()], [2, 5, 3])
    case.identical("values, against casts by hand", seen.values(), by_hand.values())


_QUICK_ALIASES = ("torch.linalg.matmul", "torch.ops.aten.linear", "torch.special.expm1", "torch.arccos", "torch.concat")


def _aliases() -> Iterator[Any]:
    """Each other name of each listed op; one of each namespace at the quick level."""
    for sample, names in read_toml(fixture("cast_aliases.toml"))["aliases"].items():
        for name in names:
            word = f"{sample}-{name.removeprefix('torch.').replace('.', '_')}"
            quick = name in _QUICK_ALIASES
            yield pytest.param(sample, name, id=word) if quick else deep("standard", sample, name, id=word)


@contract("AMP-CAST-076", on=CUDA_OR_CPU)
@pytest.mark.parametrize(("op", "name"), list(_aliases()))
def test_aliases(case: Case, target: Target, amp_dtype: torch.dtype, op: str, name: str, rng: torch.Generator) -> None:
    policy = _policy_of(op, target.device_type)
    given = torch.float32 if policy == "lower_precision" else amp_dtype
    with mode_of(target), repeatable_convolutions():
        call = SAMPLES[op](Inputs([given], target.device, rng.initial_seed(), target.is_fake))
        with target.autocast(amp_dtype), OpTrace():
            listed = call()
            seen = operator.attrgetter(name.removeprefix("torch."))(torch)(*call.args, **call.keywords)
    case.equal(f"type of {name} of {given}", seen.dtype, run_dtype(policy, [given], amp_dtype))
    if not target.is_fake:
        case.identical("result, against the listed op", seen, listed)
