"""Check the implementations, arguments, errors and side effects of the clipping functions."""

from __future__ import annotations

import collections
import decimal
import fractions
import functools
import importlib
import inspect
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.trace import counts
from ...oracles.trace.ops import OpTrace
from ...workloads.gradients import held, holding
from .support import NONFINITE

IMPLEMENTATIONS: dict[str, bool | None] = {"auto": None, "for-loop": False, "foreach": True}
# Gradients of norm 13.
SLOPES = ((3.0, 0.0), (-4.0,), (0.0, 12.0))
NORM = 13.0


class Subclass(torch.Tensor):
    """A tensor subclass, for which foreach=None does not select the foreach kernels."""


def sloped(device: torch.device | str = "cpu") -> list[torch.nn.Parameter]:
    """Return parameters whose gradients together have the norm 13."""
    return holding(torch.tensor(values, device=device) for values in SLOPES)


# More elements than there are gradients, so that what is computed with their norms is not taken for a gradient.
_LONG = 64


def long(device: torch.device, kind: type[torch.Tensor] = torch.Tensor) -> list[torch.nn.Parameter]:
    """Return parameters with gradients of 64 elements, of a class of tensors."""
    return holding(torch.full((_LONG,), 4.0, device=device).as_subclass(kind) for _ in SLOPES)


def clippers(parameters: list[torch.nn.Parameter], foreach: bool | None) -> dict[str, Callable[[], Any]]:
    """Return calls of every clipping function on the parameters with one implementation."""
    utils = torch.nn.utils
    norm = torch.tensor(NORM, device=parameters[0].device)
    return {
        "get_total_norm": lambda: utils.get_total_norm([one.grad for one in parameters], foreach=foreach),
        "clip_grads_with_norm_": lambda: utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach),
        "clip_grad_norm_": lambda: utils.clip_grad_norm_(parameters, 1.0, foreach=foreach),
        "clip_grad_value_": lambda: utils.clip_grad_value_(parameters, 1.0, foreach),
    }


def implementations(call: Callable[[], Any]) -> list[str]:
    """Return which kernels compute with whole gradients in a call: "multi-tensor", "loop" or both.

    The documentation names no kernel, so any that takes a list of tensors is a multi-tensor one.
    """
    with OpTrace() as trace:
        call()
    whole = [op.name for op in trace.computing if op.elements >= _LONG]
    return sorted({"multi-tensor" if name.startswith("aten::_foreach") else "loop" for name in whole})


# Implementations


@contract("AMP-CLIP-012", on=("cpu", "cuda"))
def test_choice_of_implementation(case: Case, target: Target) -> None:
    slow_of: dict[type[torch.Tensor], tuple[bool | None, ...]] = {torch.Tensor: (False,), Subclass: (None, False)}
    if target.lacks("plain tensors"):
        slow_of = {type(torch.empty(0, device=target.device)): (None, False)}
    for kind, slow in slow_of.items():
        for foreach in IMPLEMENTATIONS.values():
            for name, call in clippers(long(target.device, kind), foreach).items():
                what = f"kernels that {name} runs with foreach={foreach} on gradients of class {kind.__name__}"
                case.equal(what, implementations(call), ["loop" if foreach in slow else "multi-tensor"])


@contract("AMP-CLIP-013")
def test_fallback_without_foreach_kernels(case: Case) -> None:
    for foreach in (None, False):
        for name, call in clippers(sloped("meta"), foreach).items():
            with OpTrace() as trace:
                result = call()
            names = [each for each in counts.by_name(trace.ops) if each.startswith("_foreach")]
            case.equal(f"foreach kernels that {name} runs on meta tensors with foreach={foreach}", names, [])
            case.at_least("control: operations seen", sum(counts.by_name(trace.ops).values()), len(SLOPES))
            if name.endswith("norm") or name == "clip_grad_norm_":
                seen = (result.device.type, result.dtype, result.shape)
                case.equal(f"result of {name}", seen, ("meta", torch.float32, torch.Size([])))


@contract("AMP-CLIP-014")
def test_foreach_without_foreach_kernels(case: Case) -> None:
    for name, call in clippers(sloped("meta"), True).items():
        case.raises(f"{name} of meta tensors with foreach=True", RuntimeError, call, names=("foreach", "meta"))
    for name, call in clippers(sloped("cpu"), True).items():
        call()
        case.note(f"control: {name} of CPU tensors with foreach=True", "runs")


# Arguments


_SIGNATURES = {
    "clip_grad_norm_": "(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None)",
    "clip_grad_norm": "(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None)",
    "clip_grad_value_": "(parameters, clip_value, foreach=None)",
    "get_total_norm": "(tensors, norm_type=2.0, error_if_nonfinite=False, foreach=None)",
    "clip_grads_with_norm_": "(parameters, max_norm, total_norm, foreach=None)",
}


@contract("AMP-CLIP-015")
@pytest.mark.parametrize("name", _SIGNATURES)
def test_signature(case: Case, name: str) -> None:
    function = getattr(torch.nn.utils, name)
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    seen = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    case.equal(f"arguments of torch.nn.utils.{name}", seen, _SIGNATURES[name])
    case.equal("name in torch.nn.utils.__all__", name in torch.nn.utils.__all__, True)


class Walked:
    """An iterable of its own class, which only `__iter__` makes one."""

    def __init__(self, members: Iterable[Any]) -> None:
        self.members = list(members)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.members)


class Indexed:
    """A sequence of the old protocol, which is iterated by `__getitem__`."""

    def __init__(self, members: Iterable[Any]) -> None:
        self.members = list(members)

    def __getitem__(self, index: int) -> Any:
        return self.members[index]


# Every one has the order of the list.
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "generator": lambda members: (each for each in members),
    "iterator": iter,
    "values of a dict": lambda members: dict(enumerate(members)).values(),
    "keys of a dict": dict.fromkeys,
    "deque": collections.deque,
    "filter": lambda members: filter(lambda each: isinstance(each, torch.Tensor), members),
    "chain": lambda members: itertools.chain(members[:1], iter(members[1:])),
    "iterable class": Walked,
    "class with __getitem__": Indexed,
}
MODULES: dict[str, Callable[[list[torch.nn.Parameter]], Any]] = {
    "parameters of a module": lambda members: torch.nn.ParameterList(members).parameters(),
    "ParameterList": torch.nn.ParameterList,
    "values of a ParameterDict": lambda members: torch.nn.ParameterDict(
        {str(number): each for number, each in enumerate(members)}
    ).values(),
    "named parameters of a module": lambda members: (
        each for _, each in torch.nn.ParameterList(members).named_parameters()
    ),
}


def squares(target: Target, rng: torch.Generator) -> list[torch.Tensor | None]:
    """Return gradients of one square of an integer each, in float32 and 16 bits, and None: sums are exact in any order.

    The powers 0.5, 1 and 2 of the elements are integers of few bits, so the norms of types 0.5 and 1 are, and so is
    what the root of the 2-norm is taken of.
    """
    made: list[torch.Tensor | None] = []
    for size in (3, 1, 17, 2):
        gradient = torch.zeros(size)
        root = int(torch.randint(1, 7, (), generator=rng))
        sign = 1 - 2 * int(torch.randint(2, (), generator=rng))
        gradient[int(torch.randint(size, (), generator=rng))] = sign * root * root
        made += [gradient.to(target.device), None]
    low = [dtype for dtype in (torch.float16, torch.bfloat16) if target.computes_in(dtype)]
    return made + [torch.tensor([[0.0, -25.0]]).to(target.device, dtype) for dtype in low]


def implementations_on(target: Target) -> list[bool | None]:
    """Return the values of foreach that this device accepts."""
    return [None, False, True] if target.device_type in ("cpu", "cuda") else [None, False]


def bits(result: Any, parameters: list[torch.nn.Parameter]) -> list[Any]:
    """Return what a call returned and the gradients that it left, each with its dtype, for a comparison by ==.

    As text, in which zeros of either sign differ and NaNs are alike.
    """
    found = [result, *(parameter.grad for parameter in parameters)]
    return [f"{one.tolist()} in {one.dtype}" if isinstance(one, torch.Tensor) else one for one in found]


@contract("AMP-CLIP-007")
def test_every_iterable_gives_what_a_list_gives(case: Case, target: Target, rng: torch.Generator) -> None:
    """For every norm and implementation: clip_grad_norm_, get_total_norm and what is a part of them."""
    utils = torch.nn.utils
    wrong, unclipped, compared = [], [], 0
    slopes = squares(target, rng)
    given = [slope for slope in slopes if slope is not None]
    far = torch.tensor(1e4, device=target.device)

    def run(call: Callable[[Any], Any], form: Callable[[list[Any]], Any]) -> list[Any]:
        parameters = holding(None if slope is None else slope.clone() for slope in slopes)
        return bits(call(form(parameters)), parameters)

    whole = bits(None, holding(slopes))
    settings = [*itertools.product((0.5, 0.0, 1e6), (False, True))]
    for foreach, norm_type in itertools.product(implementations_on(target), (2.0, "inf", math.inf, 1.0, 0.5)):
        chosen = torch.randperm(len(settings), generator=rng).tolist()
        for limit, strict in (settings[number] for number in chosen[: case.samples(quick=1, standard=6, full=6)]):
            options = {"norm_type": norm_type, "error_if_nonfinite": strict, "foreach": foreach}
            clip = functools.partial(utils.clip_grad_norm_, max_norm=limit, **options)
            calls: dict[str, Callable[[Any], Any]] = {f"clip_grad_norm_ to {limit}": clip}
            if norm_type == 2.0:
                calls["clip_grad_value_"] = functools.partial(utils.clip_grad_value_, clip_value=0.5, foreach=foreach)
                calls["clip_grads_with_norm_"] = functools.partial(
                    utils.clip_grads_with_norm_, max_norm=2.0, total_norm=far, foreach=foreach
                )
            for name, call in calls.items():
                expected = run(call, list)
                if (expected[1:] == whole[1:]) != (call is clip and limit == 1e6):
                    unclipped.append(f"{name} with {options}: {expected[1:]}")
                others = [
                    container for container, form in (CONTAINERS | MODULES).items() if run(call, form) != expected
                ]
                wrong += [f"{name} of a {container} with {options}" for container in others]
                compared += len(CONTAINERS | MODULES)
            norms = {name: bits(utils.get_total_norm(form(given), **options), []) for name, form in CONTAINERS.items()}
            norm = bits(utils.get_total_norm(given, **options), [])
            wrong += [f"get_total_norm of a {name} with {options}" for name in norms if norms[name] != norm]
            compared += len(norms)
    case.note("calls compared with that of a list", compared)
    case.equal("control: lists that were not clipped, or clipped beyond the threshold", unclipped[:3], [])
    case.equal("calls that give other bits than with a list", wrong[:3], [])


@contract("AMP-CLIP-008")
def test_one_tensor_gives_what_its_list_gives(case: Case, target: Target, rng: torch.Generator) -> None:
    wrong = []
    slopes = [slope for slope in squares(target, rng) if slope is not None]
    for slope, foreach, norm_type in itertools.product(
        slopes, implementations_on(target), (2.0, "inf", math.inf, 1.0, 0.5)
    ):
        options = {"norm_type": norm_type, "foreach": foreach}
        calls: dict[str, Callable[[Any], Any]] = {
            "clip_grad_norm_": functools.partial(torch.nn.utils.clip_grad_norm_, max_norm=0.5, **options),
            "clip_grad_value_": functools.partial(torch.nn.utils.clip_grad_value_, clip_value=0.5, foreach=foreach),
        }
        for name, call in calls.items():
            alone, listed = holding([slope.clone()]), holding([slope.clone()])
            if bits(call(alone[0]), alone) != bits(call(listed), listed):
                wrong.append(f"{name} of shape {tuple(slope.shape)} in {slope.dtype} with {options}")
        norms = [torch.nn.utils.get_total_norm(given, **options) for given in (slope, [slope])]
        if bits(norms[0], []) != bits(norms[1], []):
            wrong.append(f"get_total_norm of shape {tuple(slope.shape)} in {slope.dtype} with {options}")
    case.equal("tensors that give other bits than a list of them", wrong[:3], [])


@contract("AMP-CLIP-015")
@pytest.mark.filterwarnings("ignore:.*clip_grad_norm.*deprecated:FutureWarning")
def test_arguments_by_position_and_by_name(case: Case, target: Target) -> None:
    """No argument is at its default, and any number of them, from the left, is given by position."""
    norm = torch.tensor(NORM, device=target.device)
    options = {"norm_type": 1.0, "error_if_nonfinite": True, "foreach": False}
    others: dict[str, dict[str, Any]] = {
        "clip_grad_norm_": {"max_norm": 2.0, **options},
        "clip_grad_norm": {"max_norm": 2.0, **options},
        "clip_grad_value_": {"clip_value": 1.5, "foreach": False},
        "get_total_norm": options,
        "clip_grads_with_norm_": {"max_norm": 2.0, "total_norm": norm, "foreach": False},
    }
    for name, given in others.items():
        function, found = getattr(torch.nn.utils, name), []
        for count in range(len(given) + 2):
            parameters = sloped(target.device)
            first = {"tensors": held(parameters)} if name == "get_total_norm" else {"parameters": parameters}
            arguments = [*(first | given).items()]
            by_position, by_name = [value for _, value in arguments[:count]], dict(arguments[count:])
            found.append(bits(function(*by_position, **by_name), parameters))
        other = [each for each in found if each != found[0]]
        case.equal(f"results of {name} that depend on how the arguments are given", other, [])


def same_thresholds(threshold: float, target: Target) -> Iterator[Any]:
    """Yield the threshold, which is exact in every binary format, in types other than float."""
    yield from (fractions.Fraction(threshold), decimal.Decimal(threshold))
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        yield torch.tensor(threshold, dtype=dtype)
        if target.computes_in(dtype):
            yield torch.tensor([threshold], dtype=dtype, device=target.device)
    numpy = sys.modules.get("numpy")  # torch imports it if it is installed
    if numpy is not None:
        yield from (scalar(threshold) for scalar in (numpy.float16, numpy.float32, numpy.float64))
    if threshold.is_integer():
        yield from (int(threshold), torch.tensor(int(threshold)), bool(threshold))


@contract("AMP-CLIP-016")
def test_thresholds_of_any_number_type(case: Case, target: Target) -> None:
    utils = torch.nn.utils
    clips: dict[str, Callable[[Any, Any], Any]] = {
        "clip_grad_norm_": utils.clip_grad_norm_,
        "clip_grads_with_norm_": lambda given, limit: utils.clip_grads_with_norm_(
            given, limit, torch.tensor(NORM, device=target.device)
        ),
        "clip_grad_value_": utils.clip_grad_value_,
        "clip_grad_value_ in a loop": functools.partial(utils.clip_grad_value_, foreach=False),
    }
    for threshold, (name, clip) in itertools.product((0.625, 1.0), clips.items()):
        plain = sloped(target.device)
        clip(plain, threshold)
        for given in same_thresholds(threshold, target):
            parameters = sloped(target.device)
            clip(parameters, given)
            same = [torch.equal(ours, theirs) for ours, theirs in zip(held(parameters), held(plain), strict=True)]
            # A tensor of a third party's device is printed in float64, which that may lack.
            shown = given.cpu() if isinstance(given, torch.Tensor) else given
            case.equal(
                f"gradients after {name} with {shown!r} that equal those with {threshold}", same, [True] * len(SLOPES)
            )
        changed = [
            not torch.equal(now, then) for now, then in zip(held(plain), held(sloped(target.device)), strict=True)
        ]
        case.equal(f"control: {name} with {threshold} changed something", any(changed), True)


@contract("AMP-CLIP-017")
def test_norm_types_of_any_number_type(case: Case, target: Target) -> None:
    for plain, others in ((2.0, (2,)), (1.0, (1, True)), (3.0, (3,)), (math.inf, ("inf", "Infinity"))):
        for foreach in (None, False):
            norm = torch.nn.utils.get_total_norm(held(sloped(target.device)), plain, foreach=foreach)
            for given in others:
                seen = torch.nn.utils.get_total_norm(held(sloped(target.device)), given, foreach=foreach)
                case.identical(f"norm of type {given!r}, foreach={foreach}, against type {plain}", seen, norm)
                parameters = sloped(target.device)
                seen = torch.nn.utils.clip_grad_norm_(parameters, 1.0, given, foreach=foreach)
                case.identical(f"result of clip_grad_norm_ with {given!r}", seen, norm)
    norms = [float(torch.nn.utils.get_total_norm(held(sloped(target.device)), p)) for p in (1, 2, "inf")]
    case.equal("control: the norms of types 1, 2 and inf", norms, [19.0, NORM, 12.0])


@contract("AMP-CLIP-018")
def test_norm_types_that_are_no_numbers(case: Case, target: Target) -> None:
    for given, error in (
        ("fro", ValueError),
        ("nuc", ValueError),
        ("", ValueError),
        (None, TypeError),
        ([2], TypeError),
    ):
        parameters = sloped(target.device)
        for foreach in IMPLEMENTATIONS.values():
            clip = functools.partial(torch.nn.utils.clip_grad_norm_, parameters, 1.0, given, foreach=foreach)
            case.raises(f"clip_grad_norm_ with norm_type={given!r}", error, clip)
        kept = [
            torch.equal(ours, theirs)
            for ours, theirs in zip(held(parameters), held(sloped(target.device)), strict=True)
        ]
        case.equal("gradients that are unchanged after the error", kept, [True] * len(SLOPES))


def warned(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    """Return the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return caught


def _is_torchs(function: Any) -> bool:
    """Whether torch's own function is called, and none that wraps it, as profilers do: warnings name the wrapper."""
    return Path(function.__code__.co_filename).is_relative_to(Path(torch.__file__).parent)


@contract("AMP-CLIP-019")
def test_empty_generator(case: Case) -> None:
    nothing: list[torch.nn.Parameter] = []
    place: list[tuple[str, int]] = []

    def clip_nothing() -> None:
        here = inspect.stack()[0]
        place.append((Path(here.filename).name, here.lineno + 2))
        torch.nn.utils.clip_grad_norm_((each for each in nothing), 1.0)

    seen = warned(clip_nothing)
    case.equal("warnings for an empty generator", [each.category for each in seen], [UserWarning])
    case.true("the warning names the argument", "parameters" in str(seen[0].message), str(seen[0].message))
    if _is_torchs(torch.nn.utils.clip_grad_norm_):
        case.equal("file and line of the warning", [(Path(each.filename).name, each.lineno) for each in seen], place)
    module = torch.nn.Linear(2, 2)
    quiet: dict[str, Iterable[torch.nn.Parameter]] = {
        "an empty list": [],
        "an empty tuple": (),
        "an iterator at its end": iter(nothing),
        "a generator of parameters without gradients": module.parameters(),
        "a generator of parameters with gradients": (each for each in sloped()),
    }
    for name, given in quiet.items():
        clip = functools.partial(torch.nn.utils.clip_grad_norm_, given, 1.0)
        case.equal(f"control: warnings for {name}", [str(each.message) for each in warned(clip)], [])


# Results and side effects


@contract("AMP-CLIP-052")
def test_norm_of_any_iterable(case: Case, target: Target) -> None:
    gradients = held(sloped(target.device))
    given: dict[str, Callable[[], Any]] = {
        "a list": lambda: gradients,
        "a tuple": lambda: tuple(gradients),
        "a generator": lambda: (each for each in gradients),
        "the values of a dict": lambda: dict(enumerate(gradients)).values(),
    }
    for foreach in IMPLEMENTATIONS.values():
        if foreach and target.device_type not in ("cpu", "cuda"):
            continue
        for name, make in given.items():
            norm = torch.nn.utils.get_total_norm(make(), foreach=foreach)
            case.equal(f"norm of {name}, foreach={foreach}", float(norm), NORM)
        for shape, values in (("no dimension", -3.0), ("two dimensions", [[3.0, 0.0], [0.0, -4.0]])):
            alone = torch.tensor(values, device=target.device)
            norm = torch.nn.utils.get_total_norm(alone, foreach=foreach)
            case.equal(f"norm of one tensor of {shape}", float(norm), 3.0 if alone.dim() == 0 else 5.0)
    for one, slope in zip(gradients, SLOPES, strict=True):
        case.equal("gradient after the call", tuple(one.tolist()), slope)
    nothing: list[torch.Tensor] = []
    norm = torch.nn.utils.get_total_norm(nothing)
    case.identical("norm of an empty list", norm, torch.tensor(0.0))


@contract("AMP-CLIP-053")
def test_clip_by_given_norm_takes_any_iterable(case: Case, target: Target) -> None:
    norm = torch.tensor(4 * NORM, device=target.device)
    forms: dict[str, Callable[[list[torch.nn.Parameter]], Any]] = {
        "a list": list,
        "a tuple": tuple,
        "a generator": lambda parameters: (each for each in parameters),
        "the parameters of a module": lambda parameters: torch.nn.ParameterList(parameters).parameters(),
    }
    # 52 + 1e-6 is 52 in fp32, so the coefficient is 1/4 or an adjacent number: one unit for the reciprocal.
    for name, form in forms.items():
        parameters = [*sloped(target.device), *holding([None])]
        answer = torch.nn.utils.clip_grads_with_norm_(form(parameters), NORM, norm)
        case.equal(f"result for {name}", answer, None)
        for gradient, values in zip(held(parameters), SLOPES, strict=True):
            worst = max(abs(seen - value / 4) for seen, value in zip(gradient.tolist(), values, strict=True))
            case.at_most(f"distance from a quarter of the gradient, {name}", worst, 2**-23 * max(map(abs, values)))
    for shape in ((), (1,), (2, 2)):
        alone = holding([torch.full(shape, 8.0, device=target.device)])[0]
        torch.nn.utils.clip_grads_with_norm_(alone, 1.0, torch.tensor(64.0, device=target.device))
        case.equal(
            f"gradient of one parameter of shape {shape}",
            held([alone])[0].flatten().tolist(),
            [0.125] * max(1, alone.numel()),
        )
    for name, given in {"no parameter": [], "parameters without gradients": holding([None, None])}.items():
        case.equal(f"result for {name}", torch.nn.utils.clip_grads_with_norm_(given, 1.0, norm), None)


@contract("AMP-CLIP-091")
def test_frozen_parameters_count(case: Case, target: Target) -> None:
    for name in ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"):
        free, frozen = sloped(target.device), sloped(target.device)
        for parameter in frozen:
            parameter.requires_grad_(False)
        norms = [clippers(parameters, None)[name]() for parameters in (free, frozen)]
        if name == "clip_grad_norm_":
            case.equal("norm of gradients whose parameters are frozen", float(norms[1]), NORM)
        for number, (seen, expected) in enumerate(zip(held(frozen), held(free), strict=True)):
            case.identical(f"{name}: gradient {number} of a frozen parameter", seen, expected)


@contract("AMP-CLIP-054")
def test_nothing_is_recorded_for_autograd(case: Case, target: Target) -> None:
    for foreach in IMPLEMENTATIONS.values():
        if foreach and target.device_type not in ("cpu", "cuda"):
            continue
        # A leaf that requires grad cannot be changed in place while grad mode is on.
        leaves = [torch.tensor(values, device=target.device, requires_grad=True) for values in SLOPES]
        norm = torch.nn.utils.get_total_norm(leaves, foreach=foreach)
        case.equal("requires_grad of the norm of tensors that require grad", norm.requires_grad, False)
        recorded = [leaf * 2.0 for leaf in leaves]
        for name in ("clip_grads_with_norm_", "clip_grad_norm_", "clip_grad_value_"):
            for kind, given in (("leaf", leaves), ("result", recorded)):
                parameters = holding(given)
                before = [one.grad.grad_fn for one in parameters if one.grad is not None]
                result = clippers(parameters, foreach)[name]()
                if name == "clip_grad_norm_":
                    case.equal(f"requires_grad of the norm of a {kind}", result.requires_grad, False)
                after = [one.grad.grad_fn for one in parameters if one.grad is not None]
                kept = [now is then for now, then in zip(after, before, strict=True)]
                case.equal(f"unchanged grad_fn of each {kind} after {name}, foreach={foreach}", kept, [True] * 3)
    enabled = torch.is_grad_enabled()
    case.equal("grad mode after the call", enabled, True)


@contract("AMP-CLIP-054")
def test_what_wraps_the_functions(case: Case) -> None:
    def probe(first: int, *, second: int = 2) -> tuple[bool, int, int]:
        """A docstring that the wrapper must keep."""
        return torch.is_grad_enabled(), first, second

    wrapped = importlib.import_module("torch.nn.utils.clip_grad")._no_grad(probe)
    case.equal("grad mode inside, and the arguments", wrapped(1, second=3), (False, 1, 3))
    case.equal("grad mode after the call", torch.is_grad_enabled(), True)
    kept = (wrapped.__name__, wrapped.__doc__, wrapped.__wrapped__)
    case.equal("name, documentation and function of the wrapper", kept, (probe.__name__, probe.__doc__, probe))


@contract("AMP-CLIP-081")
def test_deprecated_spelling_hands_everything_on(case: Case, target: Target) -> None:
    old = functools.partial(torch.nn.utils.clip_grad_norm, max_norm=1.0)
    for norm_type, expected in ((2.0, NORM), (1.0, 19.0), (math.inf, 12.0)):
        call = functools.partial(old, sloped(target.device), norm_type=norm_type)
        names = ("torch.nn.utils.clip_grad_norm", "torch.nn.utils.clip_grad_norm_")
        norm = case.warns("the deprecated name", FutureWarning, call, names=names)
        case.equal(f"norm of type {norm_type}", float(norm), expected)
    bad = holding([torch.tensor([math.nan], device=target.device)])
    raising = functools.partial(without_warnings, functools.partial(old, bad, error_if_nonfinite=True))
    case.raises("NaN with error_if_nonfinite=True", RuntimeError, raising, names=(NONFINITE,))
    case.equal("NaN by default", math.isnan(float(without_warnings(functools.partial(old, bad)))), True)
    if target.device_type in ("cpu", "cuda"):
        for foreach in IMPLEMENTATIONS.values():
            seen, expected_kernels = (
                implementations(
                    functools.partial(
                        without_warnings, functools.partial(function, long(target.device), 1.0, foreach=foreach)
                    )
                )
                for function in (torch.nn.utils.clip_grad_norm, torch.nn.utils.clip_grad_norm_)
            )
            case.equal(f"kernels with foreach={foreach}, as in clip_grad_norm_", seen, expected_kernels)


def without_warnings(call: Callable[[], Any]) -> Any:
    """Return the result of a call, with its warnings suppressed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()
