"""Check autocast on batch norm, indexed assignment, transforms, subclasses, nested tensors and aliases."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from ...data import fixture, read_toml
from ...harness.check import Case, by_rules, contract, deep
from ...harness.targets import Target
from ...measure.precision import repeatable_convolutions
from ...oracles.policy.lists import run_dtype, sets_dtype
from ...oracles.policy.overloads import mode_of
from ...oracles.policy.samples import SAMPLES, Inputs
from ...oracles.trace.ops import OpTrace
from .support import CUDA_OR_CPU, FP32_ERROR, floating_tensors, listed_rule, policy_of


def _normed(target: Target, rng: torch.Generator, given: torch.dtype, training: bool) -> dict[str, torch.Tensor]:
    """Return the batch norm of inputs with a mean of 3, and its running statistics, which start from 0 and 1."""
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
        columns = seen["input"].detach().cpu().double().transpose(0, 1).flatten(1)
        mean, variance = (
            (columns.mean(1) / 2, (1 + columns.var(1)) / 2) if training else (torch.zeros(3), torch.ones(3))
        )
        for name, exact in (("running mean", mean), ("running variance", variance)):
            distance = float((seen[name].cpu().double() - exact).norm())
            case.at_most(f"error of the {name} for {given}", distance, FP32_ERROR * float(exact.norm()))


NORMS = [f"{kind}Norm{rank}d" for kind in ("Batch", "Instance") for rank in (1, 2, 3)]
# A missing momentum averages over all batches; InstanceNorm has no such promise.
STATISTICS = [
    pytest.param((name, momentum), id=f"{name}-{said}")
    for name in NORMS
    for said, momentum in (("a-tenth", 0.1), ("whole", 1.0), ("averaged", None))
    if momentum is not None or name.startswith("Batch")
]


@contract("AMP-CAST-068")
@pytest.mark.parametrize("pair", STATISTICS)
def test_running_statistics(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, pair: tuple[str, float | None]
) -> None:
    """Two batches whose variance is far below eps, which is no part of the statistics."""
    name, momentum = pair
    of_batches = name.startswith("Batch")
    for given in (torch.float32, amp_dtype):
        norm = getattr(torch.nn, name)(3, eps=0.5, momentum=momentum, track_running_stats=True).to(target.device)
        mean, variance = torch.zeros(3).double(), torch.ones(3).double()
        for number in (1, 2):
            x = (torch.randn(4, 3, *[4] * int(name[-2]), generator=rng) * 2**-8).to(given)
            with target.autocast(amp_dtype):
                norm(x.to(target.device))
            columns = x.double().transpose(0, 1).flatten(1) if of_batches else x.double().flatten(2)
            new = columns.mean(-1), columns.var(-1)
            new_mean, new_variance = (one if of_batches else one.mean(0) for one in new)
            share = 1 / number if momentum is None else momentum
            mean, variance = mean + share * (new_mean - mean), variance + share * (new_variance - variance)
        for what, seen, exact in (
            ("running mean", norm.running_mean, mean),
            ("running variance", norm.running_var, variance),
        ):
            case.equal(f"{given}: type of the {what}", seen.dtype, torch.float32)
            distance = float((seen.cpu().double() - exact).norm())
            case.at_most(f"{given}: error of the {what}", distance, 16 * FP32_ERROR * float(exact.norm()))
        if of_batches:
            case.equal(f"{given}: batches that are counted", int(norm.num_batches_tracked), 2)


@contract("AMP-CAST-068")
@pytest.mark.parametrize("name", NORMS)
def test_statistics_in_views(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str
) -> None:
    """Statistics that are every second number of a longer tensor are what those of their own memory are."""
    for given in (torch.float32, amp_dtype):
        x = torch.randn(4, 3, *[4] * int(name[-2]), generator=rng).to(target.device, given)
        found, stores = [], []
        for step in (1, 2):
            norm = getattr(torch.nn, name)(3, track_running_stats=True).to(target.device)
            for what in ("running_mean", "running_var"):
                stores.append(torch.full((3 * step,), 7.0, device=target.device))
                stores[-1][::step] = getattr(norm, what)
                setattr(norm, what, stores[-1][::step])
            with target.autocast(amp_dtype):
                norm(x)
            found.append((norm.running_mean, norm.running_var))
        for what, plain, spread in zip(("mean", "variance"), *found, strict=True):
            case.identical(f"{given}: running {what} in a view", spread, plain)
        between = torch.stack([store[1::2] for store in stores[2:]])
        case.equal(f"{given}: numbers between them", between.unique().tolist(), [7.0])


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


# torch.func, API reference: each transforms a function; the result is called inside the region.
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

    def manual(row: torch.Tensor) -> torch.Tensor:
        product = F.linear(row.to(amp_dtype), weight.to(amp_dtype))
        return F.mse_loss(product.float(), wanted.expand(*row.shape[:-1], 5))

    with target.autocast(amp_dtype) if region == "around" else contextlib.nullcontext():
        seen = floating_tensors(_TRANSFORMS[transform](program, x))
    expected = floating_tensors(_TRANSFORMS[transform](manual, x))
    case.equal("types of the product inside", set(kinds), {amp_dtype})
    case.equal("number of outputs", len(seen), len(expected))
    for index, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        case.identical(f"output {index} of {transform}", ours, theirs)


class Wrapper(torch.Tensor):
    """A subclass that wraps a tensor and logs the dtypes of its calls ("Extending PyTorch", wrappers)."""

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


@by_rules
@contract("AMP-CAST-073", on=("cpu", "cuda"))
@pytest.mark.parametrize("op", _WRAPPED)
def test_wrapper_subclass(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    row = listed_rule(case, target, op)
    given = torch.float32 if row.policy == "lower_precision" else amp_dtype
    expected = run_dtype(row.policy, [given], amp_dtype)
    call = SAMPLES[op](Inputs([given], target.device, rng.initial_seed()))
    count = sum(isinstance(value, torch.Tensor) for value in call.args)
    Wrapper.log.clear()
    with repeatable_convolutions():
        with target.autocast(amp_dtype):
            seen = call.func(*_each(Wrapper, call.args), **call.keywords)
        if sets_dtype(row):
            manual = call(dtype=expected)
        else:
            manual = call.func(*_each(lambda x: x.to(expected), call.args), **call.keywords)
    case.equal("type of the result", type(seen), Wrapper)
    if not sets_dtype(row):
        casts = [types for name, types in Wrapper.log if name == "_to_copy"]
        case.equal("casts that the subclass sees", casts, [(given,)] * (count if expected != given else 0))
        inside = {dtype for name, types in Wrapper.log if name != "_to_copy" for dtype in types}
        case.equal("types of what the ops below take", inside, {expected})
    case.identical("result, against manual casts", seen.inner, manual)


def _each(change: Callable[[torch.Tensor], torch.Tensor], args: Any) -> Any:
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, args)


class Named(torch.Tensor):
    """A subclass that overrides nothing."""


_KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "parameter": nn.Parameter,
    "frozen-parameter": partial(nn.Parameter, requires_grad=False),
    "buffer": lambda x: nn.Buffer(x),
    "subclass": lambda x: x.as_subclass(Named),
}


@by_rules
@contract("AMP-CAST-074", on=("cpu", "cuda"))
@pytest.mark.parametrize("op", ["mm", "linear", "mse_loss", "prod", "relu", "cat"])
@pytest.mark.parametrize("kind", list(_KINDS))
def test_kinds_of_tensor(
    case: Case, target: Target, amp_dtype: torch.dtype, kind: str, op: str, rng: torch.Generator
) -> None:
    policy = policy_of(case, target, op)
    given = torch.float32 if policy == "lower_precision" else amp_dtype
    call = SAMPLES[op](Inputs([given], target.device, rng.initial_seed()))
    case.require_call(target, f"hold its numbers in a {kind}", lambda: _each(_KINDS[kind], call.args))
    args = _each(_KINDS[kind], call.args)
    with target.autocast(amp_dtype):
        plain = call()
        seen = call.func(*args, **call.keywords)
    case.equal("type", seen.dtype, run_dtype(policy, [given], amp_dtype))
    case.equal("class", type(seen), Named if kind == "subclass" else type(plain))
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
    made = functools.partial(torch.nested.nested_tensor, rows, layout=torch.jagged)
    case.require_call(target, "make a jagged nested tensor", made)
    ragged = made()
    with target.autocast(amp_dtype):
        seen = _NESTED[op](ragged, weight, bias)
        left_alone = F.relu(ragged)
    low = [x.to(amp_dtype) for x in (weight, bias)]
    manual = _NESTED[op](torch.nested.nested_tensor([x.to(amp_dtype) for x in rows], layout=torch.jagged), *low)
    case.equal("type of what relu, on no list, returns", left_alone.dtype, torch.float32)
    case.equal("layout", seen.layout, torch.jagged)
    case.equal("lengths", [len(row) for row in seen.unbind()], [2, 5, 3])
    case.identical("values, against manual casts", seen.values(), manual.values())


_QUICK_ALIASES = ("torch.linalg.matmul", "torch.ops.aten.linear", "torch.special.expm1", "torch.arccos", "torch.concat")


def _aliases() -> Iterator[Any]:
    """Return each alias of each listed op; one of each namespace at the quick level."""
    for sample, names in read_toml(fixture("cast_aliases.toml"))["aliases"].items():
        for name in names:
            word = f"{sample}-{name.removeprefix('torch.').replace('.', '_')}"
            quick = name in _QUICK_ALIASES
            yield pytest.param(sample, name, id=word) if quick else deep("standard", sample, name, id=word)


@by_rules
@contract("AMP-CAST-076", on=CUDA_OR_CPU)
@pytest.mark.parametrize(("op", "name"), list(_aliases()))
def test_aliases(case: Case, target: Target, amp_dtype: torch.dtype, op: str, name: str, rng: torch.Generator) -> None:
    policy = policy_of(case, target, op)
    given = torch.float32 if policy == "lower_precision" else amp_dtype
    with mode_of(target), repeatable_convolutions():
        call = SAMPLES[op](Inputs([given], target.device, rng.initial_seed(), target.is_fake))
        with target.autocast(amp_dtype), OpTrace():
            listed = call()
            seen = operator.attrgetter(name.removeprefix("torch."))(torch)(*call.args, **call.keywords)
    case.equal(f"type of {name} of {given}", seen.dtype, run_dtype(policy, [given], amp_dtype))
    if not target.is_fake:
        case.identical("result, against the listed op", seen, listed)


@contract("AMP-CAST-076", on=("cpu", "cuda"))
@pytest.mark.parametrize("op", ["softmax", "log_softmax", "logsumexp", "sum", "prod", "cumsum"])
def test_aliases_along_each_dimension(
    case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator
) -> None:
    x = torch.randn(2, 3, 4, 5, generator=rng).to(target.device, amp_dtype)
    listed = operator.attrgetter(f"nn.functional.{op}" if "softmax" in op else op)(torch)
    for name in read_toml(fixture("cast_aliases.toml"))["aliases"][op]:
        alias = operator.attrgetter(name.removeprefix("torch."))(torch)
        for dim in (0, 1, 2, 3, -2):
            given = [dim] if name.endswith("dim_IntList") else dim
            for enabled in (True, False):
                with target.autocast(amp_dtype, enabled=enabled):
                    found, wanted = alias(x, given), listed(x, dim)
                where = "in a region" if enabled else "outside of one"
                case.identical(f"{name} along dimension {dim} {where}", found, wanted)
