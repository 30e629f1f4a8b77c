"""Check the autocast rule of torch.library.register_autocast in forward and backward of custom operators."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from ...harness.check import Case, contract, needs
from ...harness.targets import Target
from ...oracles.numbers.formats import OTHER
from ...oracles.policy.overloads import mode_of
from .support import Around, integers, state, surroundings, unlike_elsewhere

# One namespace for each method to define an operator.
OWN, LIBRARY, NAME = "amp_conformance_own", "amp_conformance_library", "recorded"
SCHEMA = "(Tensor x, Tensor weight, Tensor? maybe, Tensor[] many, Tensor?[] some, int n=2, str t='t', float f=0.5)"
DEVICES = ("cpu", "cuda", "fake:cuda")


class Defined(NamedTuple):
    """An operator and the functions that register its rules."""

    operator: Callable[..., torch.Tensor]
    register_autocast: Callable[[str, torch.dtype], object]
    register_autograd: Callable[..., None]


@contextlib.contextmanager
def as_custom_op(body: Callable[..., torch.Tensor], schema: str) -> Iterator[Defined]:
    """Define an operator with torch.library.custom_op, whose definition registers its rules."""
    operator = torch.library.custom_op(f"{OWN}::{NAME}", body, mutates_args=(), schema=f"{schema} -> Tensor")
    operator.register_fake(body)
    yield Defined(operator, operator.register_autocast, operator.register_autograd)


@contextlib.contextmanager
def by_object(body: Callable[..., torch.Tensor], schema: str) -> Iterator[Defined]:
    """Define an operator with torch.library.custom_op, and register its autocast rule through torch.library."""
    with as_custom_op(body, schema) as defined:
        yield defined._replace(register_autocast=functools.partial(torch.library.register_autocast, defined.operator))


@contextlib.contextmanager
def by_name(body: Callable[..., torch.Tensor], schema: str, *, overload: bool = False) -> Iterator[Defined]:
    """Define an operator with torch.library.Library, whose rules are registered by its name, or by its overload."""
    with torch.library._scoped_library(LIBRARY, "FRAGMENT") as library:
        library.define(f"{NAME}{schema} -> Tensor")
        library.impl(NAME, body, "CompositeExplicitAutograd")
        qualified = f"{LIBRARY}::{NAME}"
        torch.library.register_fake(qualified, body, lib=library)
        operator = getattr(getattr(torch.ops, LIBRARY), NAME)
        autocast, autograd = (
            functools.partial(register, operator.default if overload else qualified, lib=library)
            for register in (torch.library.register_autocast, torch.library.register_autograd)
        )
        yield Defined(operator, autocast, autograd)


WAYS: dict[str, Callable[[Callable[..., torch.Tensor], str], contextlib.AbstractContextManager[Defined]]] = {
    "custom-op": as_custom_op,
    "by-object": by_object,
    "by-name": by_name,
    "by-overload": functools.partial(by_name, overload=True),
}
both_ways = pytest.mark.parametrize("way", ["custom-op", "by-name"])
every_way = pytest.mark.parametrize("way", WAYS)


class Recorder:
    """The body of an operator, which records its arguments and autocast state."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.recorded: list[tuple[list[Any], bool, torch.dtype]] = []

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        maybe: torch.Tensor | None,
        many: list[torch.Tensor],
        some: list[torch.Tensor | None],
        n: int = 2,
        t: str = "t",
        f: float = 0.5,
    ) -> torch.Tensor:
        one = torch.ones(2, 2, device=self.target.device)
        self.recorded.append(([x, weight, maybe, many, some, n, t, f], state(self.target)[0], one.mm(one).dtype))
        return x.clone()


def same(seen: Any, expected: Any) -> bool:
    """Return whether two arguments agree; tensors without values are compared by dtype, device and shape."""
    if isinstance(expected, list):
        return len(seen) == len(expected) and all(map(same, seen, expected))
    if not isinstance(expected, torch.Tensor):
        return bool(seen == expected)
    if (seen.dtype, seen.device, seen.shape) != (expected.dtype, expected.device, expected.shape):
        return False
    return expected.is_meta or hasattr(expected, "fake_mode") or torch.equal(seen, expected)


def described(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(described, value))}]"
    return f"{value.dtype} on {value.device.type}" if isinstance(value, torch.Tensor) else repr(value)


def cast(value: Any, to: torch.dtype) -> Any:
    if isinstance(value, list):
        return [cast(part, to) for part in value]
    return value.to(to) if isinstance(value, torch.Tensor) else value


def eligible(rng: torch.Generator, target: Target, dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    """Return arguments with an eligible tensor of each dtype in each position."""
    types = itertools.cycle((torch.float32, *dtypes))
    tensor = [torch.randn(3, generator=rng).to(target.device, next(types)) for _ in range(8)]
    return [tensor[0], tensor[1], tensor[2], [tensor[3], tensor[4]], [tensor[5], None, tensor[6]], 7, "text", 1.5]


def differences(teller: Recorder, expected: list[Any], enabled: bool, product: torch.dtype) -> list[str]:
    """Return the differences of the recorded call from the promise."""
    ((arguments, found, made),) = teller.recorded
    teller.recorded.clear()
    wrong = [
        f"argument {place}: {described(seen)}, promised {described(promised)}"
        for place, (seen, promised) in enumerate(zip(arguments, expected, strict=True))
        if not same(seen, promised)
    ]
    if (found, made) != (enabled, product):
        wrong.append(f"autocast {found} and a product in {made}, promised {enabled} and {product}")
    return wrong


def cast_in_regions(case: Case, way: str, target: Target, rng: torch.Generator) -> None:
    dtypes = case.supported(target)
    wrong: list[str] = []
    with mode_of(target):
        given = eligible(rng, target, dtypes)
        for to in (*dtypes, torch.float32):
            teller = Recorder(target)
            with WAYS[way](teller, SCHEMA) as (operator, register, _):
                register(target.device_type, to)
                for dtype in dtypes:
                    expected = [cast(value, to) for value in given]
                    with target.autocast(dtype):
                        output = operator(*given)
                        after = state(target)
                        found = differences(teller, expected, False, torch.float32)
                        # The rest is the schema's: a keyword for what may be placed, and defaults.
                        operator(given[0], maybe=None, weight=given[1], some=[], many=given[3])
                    brief = [*expected[:2], None, expected[3], [], 2, "t", 0.5]
                    found += differences(teller, brief, False, torch.float32)
                    if (output.dtype, after) != (to, (True, dtype)):
                        found.append(f"output {output.dtype}, state after the call {after}")
                    wrong += [f"cast_inputs {to} in a region of {dtype}: {text}" for text in found]
    case.equal("what differs", wrong[:3], [])


@every_way
@contract("AMP-BACKWARD-067", on=DEVICES)
def test_operator_casts_its_tensors(case: Case, way: str, target: Target, rng: torch.Generator) -> None:
    cast_in_regions(case, way, target, rng)


@every_way
@contract("AMP-BACKWARD-067", on="cpu")
def test_device_types_without_autocast(case: Case, way: str, target: Target) -> None:
    with WAYS[way](Recorder(target), SCHEMA) as (_, register, _):
        for device_type in ("meta", "lazy"):
            call = functools.partial(register, device_type, torch.bfloat16)
            case.raises(f"a rule for {device_type!r}", ValueError, call, names=(device_type,))


@both_ways
@contract("AMP-BACKWARD-071", on=("xpu", "mps", "fake:xpu", "fake:mps"))
def test_operator_on_other_devices(case: Case, way: str, target: Target, rng: torch.Generator) -> None:
    cast_in_regions(case, way, target, rng)


@both_ways
@contract("AMP-BACKWARD-068", on=DEVICES)
def test_operator_leaves_other_tensors(case: Case, way: str, target: Target, rng: torch.Generator) -> None:
    kinds = (torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128)
    elsewhere = "meta" if target.device_type == "cpu" else "cpu"
    wrong: list[str] = []
    with mode_of(target):
        x = torch.randn(3, generator=rng).to(target.device)
        strange = [torch.ones(3, device=elsewhere)] + [x.to(kind) for kind in kinds if target.computes_in(kind)]
        for to in case.supported(target):
            teller = Recorder(target)
            with WAYS[way](teller, SCHEMA) as (operator, register, _):
                register(target.device_type, to)
                for tensor in strange:
                    with target.autocast(to):
                        operator(x, x, tensor, [x, tensor], [tensor, None, x])
                    down = x.to(to)
                    expected = [down, down, tensor, [down, tensor], [tensor, None, down], 2, "t", 0.5]
                    wrong += differences(teller, expected, False, torch.float32)
    case.equal("what differs", wrong[:3], [])


@both_ways
@needs("plain tensors")  # torch calls the operators of a subclass without its autocast keys
@contract("AMP-BACKWARD-069", on=DEVICES)
def test_operator_outside_of_its_regions(case: Case, way: str, target: Target, rng: torch.Generator) -> None:
    dtypes = case.supported(target)
    other = "cpu" if target.device_type == "cuda" else "cuda"
    wrong: list[str] = []
    with mode_of(target):
        given = eligible(rng, target, dtypes)
        for kind, around in itertools.product((target.device_type, other, None), surroundings(dtypes)):
            ours = kind == target.device_type
            if ours and around.dtype is not None and around.enabled:
                continue
            # Around an operator without a rule for this device the region stays on; fake tensors run with it off.
            enabled = around.dtype is not None and around.enabled and not target.is_fake
            teller = Recorder(target)
            with WAYS[way](teller, SCHEMA) as (operator, register, _), unlike_elsewhere(target, True, OTHER[dtypes[0]]):
                if kind is not None:
                    register(kind, dtypes[0])
                with around.open(target):
                    operator(*given)
            product = around.dtype if around.dtype is not None and enabled else torch.float32
            found = differences(teller, given, enabled, product)
            wrong += [f"registered for {kind}, {around}: {text}" for text in found]
    case.equal("what differs", wrong[:3], [])


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.mm(weight)


@both_ways
@contract("AMP-BACKWARD-070", on=("cpu", "cuda"))
def test_gradients_of_an_operator(case: Case, way: str, target: Target, rng: torch.Generator) -> None:
    recorded: list[tuple[torch.dtype, ...]] = []

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        recorded.append((gradient.dtype, x.dtype, weight.dtype))
        return gradient.mm(weight.t()), x.t().mm(gradient)

    def keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    for to, dtype in itertools.product((*case.supported(target), torch.float32), case.supported(target)):
        with WAYS[way](multiply, "(Tensor x, Tensor weight)") as (operator, register, register_autograd):
            register_autograd(backward, setup_context=keep)
            register(target.device_type, to)
            given = OTHER[dtype] if target.computes_in(OTHER[dtype]) else dtype
            x, weight = integers(rng, target, 5, 7, dtype=given), integers(rng, target, 7, 3)
            with Around(dtype).open(target):
                outputs = [operator(x, weight)]
                old = weight.detach().clone()
                if to != torch.float32:
                    # The weight was cast for the first call, and no cache serves that copy to the second.
                    with torch.no_grad():
                        weight.add_(1)
                outputs.append(operator(x, weight))
            for output, used in zip(outputs, (old, weight.detach()), strict=True):
                recorded.clear()
                ones = torch.ones_like(output)
                found = torch.autograd.grad(output, (x, weight), ones)
                a, w, g = (tensor.detach().cpu().double() for tensor in (x, used, ones))
                where = f"cast_inputs {to} in {dtype}"
                case.equal(f"{where}: types in backward", recorded, [(to, to, to)])
                case.equal(f"{where}: types of gradients", [part.dtype for part in found], [x.dtype, weight.dtype])
                case.identical(f"{where}: output", output.detach().cpu().double() + 0.0, a @ w + 0.0)
                case.identical(f"{where}: gradient of x", found[0].cpu().double() + 0.0, g @ w.T + 0.0)
                case.identical(f"{where}: gradient of the weight", found[1].cpu().double() + 0.0, a.T @ g + 0.0)


CONTAINERS: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "list-of-numbers": ("int[]", lambda x: [1, 2]),
    "list-of-tensors": ("Tensor[]", lambda x: [x, x]),
    "dictionary-of-numbers": ("Dict(str, int)", lambda x: {"a": 1, "b": 2}),
    "dictionary-of-tensors": ("Dict(str, Tensor)", lambda x: {"a": x, "b": x}),
}


def _plain(value: Any) -> Any:
    """Return a container with tensors as their dtypes; what is no container as its type."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value.dtype if isinstance(value, torch.Tensor) else value if isinstance(value, int) else type(value)


@contract("AMP-BACKWARD-074", on=("cpu", "cuda"))
@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_reach_the_operator(case: Case, target: Target, amp_dtype: torch.dtype, kind: str) -> None:
    type_, make = CONTAINERS[kind]
    recorded: list[Any] = []

    def body(x: torch.Tensor, held: Any) -> torch.Tensor:
        recorded.append(_plain(held))
        return x.clone()

    x = torch.ones(2, device=target.device)
    with by_name(body, f"(Tensor x, {type_} held)") as (operator, register, _):
        register(target.device_type, amp_dtype)
        operator(x, make(x))
        error = None
        with target.autocast(amp_dtype):
            try:
                operator(x, make(x))
            except RuntimeError as raised:
                error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    case.equal("error of the call in a region", error, None)
    case.equal("what reached the operator outside (control)", recorded[0], _plain(make(x)))
    case.equal("what reached it in a region", recorded[1:], [_plain(make(x.to(amp_dtype)))])
