"""Check the autocast state inside, around and after transforms, their errors, and the weight cache between them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.policy.fake_mode import fake_mode
from ...oracles.trace.ops import OpTrace
from .derivative_ways import FIRST, SECOND, Direction, Way
from .exact_programs import TAIL

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch compiles its first jvp with it
]
_VMAP = Way("vmap", "output", lambda f, inputs, direction: torch.func.vmap(f)(*(x[None] for x in inputs)))
_FUNCTIONALIZE = Way("functionalize", "output", lambda f, inputs, direction: torch.func.functionalize(f)(*inputs))
_QUICK = ("grad", "vjp", "dual-numbers", "functional.vjp", "grad-of-grad", "vmap")


def _ways() -> list[Any]:
    return [
        pytest.param(way, id=way.name) if way.name in _QUICK else deep("standard", way, id=way.name)
        for way in (*FIRST[1:], *SECOND[1:], _VMAP, _FUNCTIONALIZE)
    ]


# torch traces what it linearizes, and turns the cache off while it traces (make_fx, disable_autocast_cache).
_WITHOUT_CACHE = ("linearize",)


def _state(device_type: str) -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )


def _matrices(target: Target) -> tuple[Tensor, Tensor]:
    x = torch.tensor([[1.0, -1.0], [1.0, 1.0]], device=target.device) * (1.0 + TAIL)
    return x, x.flip(0)


def _direction(target: Target) -> Direction:
    ones = torch.ones(2, 2, device=target.device)
    return Direction(ones, (ones, ones))


@contract("AMP-TRANSFORM-010")
@pytest.mark.parametrize("way", _ways())
def test_state_inside_and_after(case: Case, target: Target, way: Way) -> None:
    kind, direction, outside = target.device_type, _direction(target), _state(target.device_type)

    def state() -> tuple[bool, torch.dtype, bool]:
        enabled, dtype, cached = _state(kind)
        return enabled, dtype, cached or way.name in _WITHOUT_CACHE

    for dtype in case.supported(target):
        seen: dict[str, set[Any]] = {name: set() for name in ("around", "inside", "disabled", "after")}

        def states(a: Tensor, b: Tensor, seen: dict[str, set[Any]] = seen, dtype: torch.dtype = dtype) -> Tensor:
            seen["around"].add((state(), torch.mm(a, b).dtype))
            with target.autocast(dtype, enabled=False):
                seen["disabled"].add((_state(kind)[0], torch.mm(a, b).dtype))
            with target.autocast(dtype, cache_enabled=False):
                seen["inside"].add((_state(kind), torch.mm(a, b).dtype))
            seen["after"].add((state(), torch.mm(a, b).dtype))
            return torch.mm(a, b)

        with target.autocast(dtype):
            way.take(states, _matrices(target), direction)
            case.equal(f"{dtype}: state behind the transform", _state(kind), (True, dtype, True))
        within = ((True, dtype, True), dtype)
        case.equal(f"{dtype}: state and type of mm in the function", seen["around"], {within})
        case.equal(f"{dtype}: in a disabled region there", seen["disabled"], {(False, torch.float32)})
        case.equal(f"{dtype}: in a region without cache there", seen["inside"], {((True, dtype, False), dtype)})
        case.equal(f"{dtype}: after these", seen["after"], {within})
        case.equal(f"{dtype}: state after the region", _state(kind), outside)


class _Refusal(Exception):
    """What the function of a transform raises."""


@contract("AMP-TRANSFORM-011")
@pytest.mark.parametrize("way", _ways())
def test_errors(case: Case, target: Target, way: Way) -> None:
    direction, outside = _direction(target), _state(target.device_type)
    x, w = _matrices(target)
    for dtype in case.supported(target):

        def refuses(a: Tensor, b: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            with target.autocast(dtype):
                raise _Refusal(str(torch.mm(a, b).dtype))

        def mixes(a: Tensor, b: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            with target.autocast(dtype):
                low = torch.mm(a, b)
            return torch.mm(low, b)

        def take(f: Callable[..., Tensor]) -> object:
            return way.take(f, (x, w), direction)

        case.raises(f"{dtype}: own exception", _Refusal, lambda: take(refuses))
        case.equal(f"{dtype}: state after it", _state(target.device_type), outside)
        try:
            mixes(x, w)
        except RuntimeError:  # AMP-REGION-011 asks for it; a device may take both types
            case.raises(f"{dtype}: 16-bit times float32 outside of the region", RuntimeError, lambda: take(mixes))
        else:
            take(mixes)
        case.equal(f"{dtype}: state after that", _state(target.device_type), outside)
        case.equal(f"{dtype}: type of mm after both", torch.mm(x, w).dtype, torch.float32)


@contract("AMP-TRANSFORM-012")
@pytest.mark.parametrize("way", _ways())
def test_weight_cache(case: Case, target: Target, way: Way) -> None:
    x, w = _matrices(target)
    direction = _direction(target)
    exact = torch.mm(x.sign(), w.sign())
    promised = torch.mm(x.sign().mT, torch.ones(2, 2, device=target.device))
    for dtype in case.supported(target):
        for first in ("plain", "transform"):
            weight = w.clone().requires_grad_()

            def plain(weight: Tensor = weight) -> object:
                return torch.mm(x, weight)

            def transformed(weight: Tensor = weight) -> object:
                return way.take(lambda a, b: torch.mm(a, weight) + torch.mm(b, weight), (x, x), direction)

            with target.autocast(dtype):
                (plain if first == "plain" else transformed)()
                transformed()
                output = torch.mm(x, weight)
            what = f"{dtype}, {first} call first"
            case.identical(f"{what}: product after the transform", output, exact.to(dtype))
            case.identical(f"{what}: its gradient", torch.autograd.grad(output.float().sum(), weight)[0], promised)
        _check_left(case, target, dtype, way, w.clone().requires_grad_())


def _check_left(case: Case, target: Target, dtype: torch.dtype, way: Way, weight: Tensor) -> None:
    """Check that a region that is left inside of a transform leaves no cast of a weight behind."""
    x, direction = _matrices(target)[0], _direction(target)

    def within(a: Tensor, b: Tensor) -> Tensor:
        with target.autocast(dtype):
            return torch.mm(a, weight) + torch.mm(b, weight)

    way.take(within, (x, x), direction)
    with torch.no_grad():
        weight.neg_()
    with target.autocast(dtype):
        seen = torch.mm(x, weight)
    expected = torch.mm(x.sign(), weight.sign()).to(dtype)
    case.identical(f"{dtype}: product of a weight that changed behind a region inside the transform", seen, expected)


@contract("AMP-TRANSFORM-017")
@pytest.mark.parametrize("place", ["outside", "disabled", deep("standard", "again")])
def test_backward_later(case: Case, target: Target, place: str) -> None:
    """Call what vjp gave behind the region, with a product of the forward that was kept in float32."""
    for dtype in case.supported(target):
        inputs = _matrices(target)
        leaves = tuple(one.detach().requires_grad_() for one in inputs)

        def island(a: Tensor, b: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            with target.autocast(dtype, enabled=False):
                wide = torch.mm(a, b)
            return wide + torch.mm(a, b)

        later: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
            "outside": contextlib.nullcontext,
            "disabled": functools.partial(target.autocast, dtype, enabled=False),
            "again": functools.partial(target.autocast, dtype),
        }
        with target.autocast(dtype):
            output, pull = torch.func.vjp(island, *inputs)
            eager = island(*leaves)
        cotangent = torch.full_like(eager, 1.0 + TAIL)
        with later[place](), OpTrace() as ours:
            seen = pull(cotangent.to(output.dtype))
        with later[place](), OpTrace() as theirs:
            expected = torch.autograd.grad(eager, leaves, cotangent)
        types = [sorted({str(op.inputs) for op in one.computing if op.multiplies}) for one in (ours, theirs)]
        case.equal(f"{dtype}: types of the operands of products, {place}", types[0], types[1])
        for number, (one, other) in enumerate(zip(seen, expected, strict=True)):
            case.identical(f"{dtype}: gradient {number} of vjp, {place}, against backward there", one, other)


@contract("AMP-TRANSFORM-013", on="fake:cuda")
@pytest.mark.parametrize("transform", ["vmap", "functionalize"])
def test_refused_ops(case: Case, target: Target, amp_dtype: torch.dtype, transform: str) -> None:
    function = torch.nn.functional.binary_cross_entropy
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_mode())
        p = torch.empty(3, 4, device=target.device)
        wrapped = getattr(torch.func, transform)(function)
        case.equal("type outside of a region", wrapped(p, p).dtype, torch.float32)
        stack.enter_context(target.autocast(amp_dtype))
        case.raises("the call alone", RuntimeError, lambda: function(p, p), names=("autocast",))
        case.raises("the call transformed", RuntimeError, lambda: wrapped(p, p), names=("autocast",))
