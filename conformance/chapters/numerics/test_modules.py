"""Check the values and gradients of modules, with each of their options, in a region against those outside."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.flags import flag, held, kept
from ...measure.generators import seed_torch
from ...measure.precision import full_precision
from ...oracles.numbers.error_bounds import normwise_distance
from ...oracles.numbers.formats import FORMATS
from ...oracles.trace.ops import OpTrace
from .module_uses import Use, families, uses
from .support import slug

Types = tuple[tuple[torch.dtype, ...], torch.dtype]  # of the inputs, in turns, and of the weights
USES = uses()
FAMILIES = families()
MULTIPLYING = uses(multiplying=True)
BY_SLUG = {slug(name): name for name in USES}
SINGLE = 2.0**-14  # that float32 may be off by, normwise: 1024 roundings, a fiftieth of one of bf16
ROUNDINGS = 32.0  # that what passes through a few layers may be off by, normwise: 2 % in fp16, an eighth in bf16


@dataclass(frozen=True)
class Seen:
    """Outputs that are floating-point, integer ones, and gradients by the name of the parameter or input."""

    outputs: list[torch.Tensor]
    places: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


@contract("AMP-NUMERICS-112")
def test_some_modules(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    """Judge each use in types that the seed chooses, and in all of them from the level standard on.

    Evaluation and modules without inputs are short calls: all types that have 16-bit tensors are judged.
    """
    for name in case.with_kernels(target, {name: functools.partial(_plain, target, name) for name in USES}):
        types = _types(amp_dtype)
        drawn = int(torch.randint(len(types), (), generator=rng))
        chosen = types[drawn : drawn + 1] if USES[name].training and USES[name].shapes else types[1:]
        if len(USES[name].shapes) > 1:
            chosen += (_in_turns(amp_dtype),)
        _judge(case, target, amp_dtype, rng, name, chosen)


@contract("AMP-NUMERICS-112")
@pytest.mark.parametrize("use", [deep("standard", one) for one in BY_SLUG])
def test_modules_as_outside(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, use: str) -> None:
    one = BY_SLUG[use]
    case.require_call(target, f"run {one}", lambda: _plain(target, one))
    turns = (_in_turns(amp_dtype),) if len(USES[one].shapes) > 1 else ()
    _judge(case, target, amp_dtype, rng, one, (*_types(amp_dtype), *turns))


@contract("AMP-NUMERICS-113")
def test_modules_in_float32(case: Case, target: Target, rng: torch.Generator) -> None:
    """Outside of regions, against the same module in float64 on the CPU."""
    for name in case.with_kernels(target, {name: functools.partial(_plain, target, name) for name in USES}):
        one, seed = USES[name], int(torch.randint(2**30, (), generator=rng))
        seed_torch(seed)
        module = one.make().train(one.training)
        given = [torch.randn(shape, generator=rng) for shape in one.shapes]
        exact = replace(one, call=one.exact or one.call)
        wanted = _seen(exact, copy.deepcopy(module).double(), [x.double() for x in given], seed, "cpu")
        module.to(target.device)
        with full_precision(target.device_type):
            seen = _seen(one, module, [x.to(target.device) for x in given], seed, target.device_type)
        far = _far(seen, wanted, SINGLE, gradients=one.smooth and one.differentiable(target.device_type))
        case.equal(f"{name}: what is not as in float64", far, {})


WITHOUT_GRADIENTS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
INFERENCE = [name for name, one in USES.items() if not one.training]


@contract("AMP-NUMERICS-130")
@pytest.mark.parametrize("place", ["in", "outside"])
def test_evaluation(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, place: str) -> None:
    """Weights and inputs are 16-bit outside of a region, and float32 in one."""
    case.require_arithmetic(target, amp_dtype)
    dtype = torch.float32 if place == "in" else amp_dtype
    judged, wrong = 0, {}
    named = INFERENCE if case.level == "quick" else list(USES)
    for name in case.with_kernels(target, {name: functools.partial(_plain, target, name) for name in named}):
        one, found = USES[name], {}
        module = one.make().eval().to(target.device, dtype)
        given = [torch.randn(shape, generator=rng).to(target.device, dtype) for shape in one.shapes]
        try:
            for how, mode in {"gradients": contextlib.nullcontext, **WITHOUT_GRADIENTS}.items():
                with target.autocast(amp_dtype) if place == "in" else contextlib.nullcontext(), mode():
                    inputs = [x.requires_grad_().clone() for x in given] if how == "gradients" else given
                    leaves = tree_leaves(one.call(module, *inputs))
                found[how] = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        except (RuntimeError, ValueError, AssertionError) as error:  # AMP-CAST-091 has those of regions
            told = f"{type(error).__name__}: {error}"[:120]
            if found and place == "outside" and not isinstance(error, NotImplementedError):
                wrong[f"{name}, {list(WITHOUT_GRADIENTS)[len(found) - 1]}"] = told
            case.note(f"{name}: raised", told)
            continue
        judged += 1
        recorded = found.pop("gradients")
        for how, outputs in found.items():
            # In a region fused inference may return the amp dtype where layers return float32 (AMP-CAST-066).
            seen = (
                outputs if place == "outside" else [each.to(x.dtype) for each, x in zip(outputs, recorded, strict=True)]
            )
            far = _apart(seen, recorded, ROUNDINGS * FORMATS[amp_dtype].unit_roundoff)
            wrong.update({f"{name}, {how}: {what}": distance for what, distance in far.items()})
    case.at_least("modules judged", judged, 1)
    case.equal("outputs without gradients that are not those with them", wrong, {})


def _apart(outputs: list[torch.Tensor], recorded: list[torch.Tensor], bound: float) -> dict[str, Any]:
    if len(outputs) != len(recorded):
        return {"outputs": len(outputs)}
    found: dict[str, Any] = {}
    for number, (one, other) in enumerate(zip(outputs, recorded, strict=True)):
        if one.dtype != other.dtype or one.shape != other.shape:
            found[f"output {number}"] = f"{one.dtype}, {tuple(one.shape)}"
        elif not one.is_floating_point():
            found |= {} if torch.equal(one, other) else {f"output {number}": "other places"}
        elif not (distance := normwise_distance(one, other)) <= bound:
            found[f"output {number}"] = distance
    return found


# What multiplies matrices, under the names of its kernels (each has the policy of the op that calls it).
PRODUCTS = re.compile(r"aten::(mm|addmm|bmm|baddbmm|linear|.*convolution.*|.*_rnn.*|_scaled_dot_product_.*)")


@pytest.fixture
def _attention_in_16_bits() -> Iterator[None]:
    """Have attention that runs as matrix products multiply 16-bit operands in 16 bits, and put the flag back."""
    allowed = flag("torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed")
    with kept(allowed):
        allowed.write(True)
        yield


@contract("AMP-NUMERICS-121")
@pytest.mark.usefixtures("_attention_in_16_bits")
def test_products_of_modules(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    judged, wrong = 0, {}
    for name in case.with_kernels(target, {name: functools.partial(_plain, target, name) for name in MULTIPLYING}):
        one, found = USES[name], []
        given = [torch.randn(shape, generator=rng).to(target.device) for shape in one.shapes]
        module = one.make().train(one.training).to(target.device)
        try:
            for region in (False, True):
                with target.autocast(amp_dtype, enabled=region), OpTrace() as trace:
                    one.call(module, *given)
                found.append([op for op in trace.computing if PRODUCTS.fullmatch(op.name)])
        except RuntimeError as error:
            case.note(f"{name}: raised (AMP-CAST-091, AMP-CAST-094)", str(error)[:120])
            continue
        outside, inside = found
        judged += bool(outside)
        wide = [str(op) for op in inside if set(op.inputs) != {amp_dtype}]
        if wide or bool(outside) != bool(inside):
            wrong[name] = wide or "no products"
    case.at_least("modules with products", judged, 1)
    for name, told in wrong.items():
        case.equal(f"{name}: products in another type than the region's", told, [])


@contract("AMP-NUMERICS-123")
@pytest.mark.parametrize("family", FAMILIES)
def test_modules_run(case: Case, target: Target, amp_dtype: torch.dtype, family: str) -> None:
    raised = {}
    calls = {name: functools.partial(_plain, target, name) for name in FAMILIES[family]}
    for name in case.with_kernels(target, calls):
        try:
            with target.autocast(amp_dtype):
                _plain(target, name)
        except Exception as error:  # of whatever kind: outside of a region none was raised
            words = f"{type(error).__name__}: {error}"[:160]
            if _lacks(target, name, amp_dtype):
                case.note(f"{name}: the device does not have it in {amp_dtype} without a region either", words)
            else:
                raised[name] = words
    case.equal("modules that raise in a region alone", raised, {})


@contract("AMP-NUMERICS-123")
@pytest.mark.parametrize("family", FAMILIES)
def test_modules_train_in_16_bits(case: Case, target: Target, amp_dtype: torch.dtype, family: str) -> None:
    """Call the backward, outside of regions, of what has a forward with weights and inputs in 16 bits."""
    judged, raised = 0, {}
    for name, one in FAMILIES[family].items():
        if not one.differentiable(target.device_type):
            continue
        module = one.make().train(one.training).to(target.device, amp_dtype)
        leaves = [torch.ones(shape, device=target.device, dtype=amp_dtype).requires_grad_() for shape in one.shapes]
        try:
            found = tree_leaves(one.call(module, *leaves))
        except Exception as error:  # whatever it raises, the device does not have it
            case.note(f"{name}: has no forward in {amp_dtype}", f"{type(error).__name__}: {error}"[:120])
            continue
        outputs = [each for each in found if isinstance(each, torch.Tensor) and each.requires_grad]
        judged += bool(outputs)
        try:
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        except Exception as error:  # of whatever kind
            words = f"{type(error).__name__}: {error}"[:160]
            if isinstance(error, NotImplementedError) and target.device_type != "cpu":
                # CUDA had no backward by weights of bfloat16 bags (pytorch issue 185808).
                case.note(f"{name}: the device has no backward", words)
            else:
                raised[name] = words
    case.equal("modules whose backward raises though their forward does not", raised, {})
    case.enough(target, "modules with a backward", judged)


def _lacks(target: Target, name: str, dtype: torch.dtype) -> bool:
    """Return whether a module raises outside of regions too, if all of it and its inputs are in this type."""
    try:
        _plain(target, name, dtype)
    except Exception:  # whatever it raises, it does not run
        return True
    return False


def _types(amp_dtype: torch.dtype) -> tuple[Types, ...]:
    """Return the types of inputs and weights that a module meets in a region."""
    return ((torch.float32,), torch.float32), ((amp_dtype,), torch.float32), ((amp_dtype,), amp_dtype)


def _in_turns(amp_dtype: torch.dtype) -> Types:
    """Return types of inputs of which every other one is float32, as one of the states of an LSTM may be."""
    return (amp_dtype, torch.float32), torch.float32


def _plain(target: Target, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Run a module and its backward with weights and inputs of one type."""
    one = USES[name]
    given = [torch.ones(shape, device=target.device, dtype=dtype) for shape in one.shapes]
    _seen(one, one.make().train(one.training).to(target.device, dtype), given, 0, target.device_type)


def _judge(
    case: Case,
    target: Target,
    amp_dtype: torch.dtype,
    rng: torch.Generator,
    name: str,
    types: tuple[Types, ...],
) -> None:
    one, unit = USES[name], FORMATS[amp_dtype].unit_roundoff
    seed = int(torch.randint(2**30, (), generator=rng))
    seed_torch(seed)
    module = one.make().train(one.training)
    given = [torch.randn(shape, generator=rng).to(amp_dtype).float() for shape in one.shapes]
    state = {key: _rounded(value, amp_dtype) for key, value in module.state_dict().items()}

    def ran(inputs: tuple[torch.dtype, ...], weights: torch.dtype = torch.float32, *, region: bool = True) -> Seen:
        with held("torch.__future__.get_swap_module_params_on_conversion", False):
            module.to(target.device, weights).load_state_dict(state)
        before = {key: value.clone() for key, value in _kept_state(one, module).items()}
        with target.autocast(amp_dtype) if region else contextlib.nullcontext():
            placed = [x.to(target.device, dtype) for x, dtype in zip(given, itertools.cycle(inputs), strict=False)]
            seen = _seen(one, module, placed, seed, target.device_type)
        moved = [key for key, value in _kept_state(one, module).items() if not torch.equal(value, before[key])]
        where = "in a region" if region else "outside of regions"
        case.equal(f"{name}, {where}: parameters, and buffers in evaluation, that a call has changed", moved, [])
        return seen

    wanted = ran((torch.float32,), region=False)
    for dtypes in types:
        what = f"{name}: inputs in {' and '.join(map(str, dtypes[0]))}, weights in {dtypes[1]}"
        try:
            seen = ran(*dtypes)
        except (RuntimeError, ValueError) as error:
            case.note(f"{what}: raised (AMP-CAST-091, AMP-CAST-094)", f"{type(error).__name__}: {error}"[:120])
            continue
        far = _far(seen, wanted, ROUNDINGS * unit, gradients=one.smooth)
        case.equal(f"{what}: what is not as outside of the region", far, {})


def _kept_state(one: Use, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what no call of the module may change: its parameters, and in evaluation its buffers.

    Embeddings with a largest norm scale the rows that they look up, as they say.
    """
    if any(getattr(part, "max_norm", None) is not None for part in module.modules()):
        return {}
    return {**dict(module.named_parameters()), **({} if one.training else dict(module.named_buffers()))}


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype).to(value.dtype) if value.is_floating_point() else value.clone()


def _seen(one: Use, module: torch.nn.Module, given: list[torch.Tensor], seed: int, device_type: str) -> Seen:
    """Call the module, and take the gradients of its outputs weighted by random numbers, if it has any."""
    leaves = [x.clone().requires_grad_() for x in given]
    module.zero_grad()
    found = [leaf for leaf in tree_leaves(one.call(module, *leaves)) if isinstance(leaf, torch.Tensor)]
    outputs = [leaf for leaf in found if leaf.is_floating_point()]
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(each.shape, generator=generator).to(each.device, each.dtype) for each in outputs]
    if one.differentiable(device_type):
        with torch.autocast(device_type, enabled=False):
            torch.autograd.backward(outputs, weights)
    gradients: dict[str, Any] = {f"input {number}": leaf.grad for number, leaf in enumerate(leaves)}
    gradients |= {key: parameter.grad for key, parameter in module.named_parameters()}
    gradients |= {f"buffer {key}": value.clone() for key, value in module.named_buffers()}
    dense = {
        key: value.to_dense() if value.is_sparse else value for key, value in gradients.items() if value is not None
    }
    kept = {key: value.detach() for key, value in dense.items()}
    return Seen([each.detach() for each in outputs], [leaf for leaf in found if not leaf.is_floating_point()], kept)


def _far(seen: Seen, wanted: Seen, bound: float, *, gradients: bool) -> dict[str, Any]:
    """Return what is missing, of another shape, or farther than `bound` from what is wanted, by its name."""
    pairs = {f"output {number}": pair for number, pair in enumerate(zip(seen.outputs, wanted.outputs, strict=False))}
    if gradients:
        pairs |= {key: (seen.gradients.get(key), value) for key, value in wanted.gradients.items()}
    found: dict[str, Any] = {}
    for what, ours, theirs in (("outputs", seen.outputs, wanted.outputs), ("places", seen.places, wanted.places)):
        if len(ours) != len(theirs):
            found[what] = len(ours)
    for number, (place, right) in enumerate(zip(seen.places, wanted.places, strict=False)):
        if not torch.equal(place.cpu(), right.cpu()):
            found[f"places {number}"] = "other places"
    for key, (one, right) in pairs.items():
        if one is None or one.shape != right.shape:
            found[key] = None if one is None else tuple(one.shape)
        elif not (distance := normwise_distance(one, right)) <= bound:
            found[key] = distance
    return found
