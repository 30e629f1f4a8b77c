"""Autocast regions: what is in force inside one, beside it, and after it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import threading
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from ...harness.check import Case, applies, contract, deep
from ...harness.targets import Target
from ...oracles.fake_hardware import cuda_that_says
from ...oracles.policy.devices import DeviceType, device_types
from ...oracles.region.stack_model import (
    DEVICE_TYPES,
    Region,
    RegionStack,
    State,
    fresh,
    observe,
    product_in,
    telling_product,
)

Result = TypeVar("Result")

DEVICES = {device.type: device for device in device_types()}
AVAILABLE = [device for device in DEVICES.values() if device.dtype is not None]
DEFAULTS = {name: DEVICES[name].dtype or torch.float32 for name in DEVICE_TYPES}
OTHER = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
# Long enough that only a thread that died is given up on.
PATIENCE = 60.0


class Interruption(Exception):
    """Leaves a region early."""


def runs_in(case: Case, what: str, target: Target, dtype: torch.dtype) -> None:
    """A product of float32 tensors has the dtype and the digits of arithmetic in `dtype`."""
    case.identical(f"{what}: a product of float32 tensors", telling_product(target.device), product_in(dtype))


def is_in_force(case: Case, what: str, promised: State) -> None:
    """Every getter of torch says `promised`."""
    case.equal(f"{what}: autocast state that differs", observe().differences(promised), [])


def in_new_thread(call: Callable[[], Result]) -> Result:
    """Return what `call` returns in a thread of its own."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(call).result(timeout=PATIENCE)


def neighbour(target: Target) -> str:
    """Return a device type that is not the target's and whose regions torch opens without the hardware."""
    return "cpu" if target.device_type == "xpu" else "xpu"


def region(target: Target, dtype: torch.dtype | None = None, **options: bool) -> torch.autocast:
    return torch.autocast(target.device_type, dtype=dtype, **options)


# What a region does


@contract("AMP-REGION-001")
@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_context_manager(
    case: Case, target: Target, amp_dtype: torch.dtype, around: Callable[[], contextlib.AbstractContextManager[object]]
) -> None:
    with around():
        runs_in(case, "before the region", target, torch.float32)
        with region(target, amp_dtype):
            runs_in(case, "inside the region", target, amp_dtype)
            runs_in(case, "inside, once more", target, amp_dtype)
        runs_in(case, "after the region", target, torch.float32)


@contract("AMP-REGION-001")
def test_under_a_default_device(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    # torch.device as a context manager is a function mode, which __enter__ and __exit__ ask for.
    with torch.device(target.device):
        with region(target, amp_dtype):
            runs_in(case, "inside the region", target, amp_dtype)
        runs_in(case, "after the region", target, torch.float32)


@contract("AMP-REGION-002")
def test_decorated_function(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    @region(target, amp_dtype)
    def work(first: int, *rest: int, named: str = "unset") -> tuple[torch.Tensor, list[object]]:
        """Multiply."""
        return telling_product(target.device), [first, *rest, named]

    for call in ("first", "second"):
        product, arguments = work(1, 2, 3, named=call)
        case.identical(f"the {call} call: a product of float32 tensors", product, product_in(amp_dtype))
        case.equal(f"the {call} call: what arrived", arguments, [1, 2, 3, call])
        runs_in(case, f"after the {call} call", target, torch.float32)
    case.equal("name and docstring", (work.__name__, work.__doc__), ("work", "Multiply."))


@contract("AMP-REGION-002")
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize("cache_enabled", [True, False], ids=["cache", "no-cache"])
def test_state_in_decorated_function(
    case: Case, target: Target, amp_dtype: torch.dtype, enabled: bool, cache_enabled: bool
) -> None:
    inner = Region(target.device_type, amp_dtype, enabled=enabled, cache_enabled=cache_enabled)
    outer = Region(target.device_type, OTHER[amp_dtype], enabled=not enabled, cache_enabled=not cache_enabled)
    work = inner.open()(observe)
    for surrounding in ([], [outer]):
        model = RegionStack(observe())
        with contextlib.ExitStack() as opened:
            for setting in surrounding:
                opened.enter_context(setting.open())
                model.enter(setting)
            model.enter(inner)
            case.equal(f"within {len(surrounding)} regions: state that differs", work().differences(model.state), [])


@contract("AMP-REGION-002")
def test_result_of_decorated_function(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    tensor = torch.ones(2, device=target.device)
    for result in (None, False, (), (1,), [1], (tensor,), {"one": 1}, tensor, iter([1])):
        returned = region(target, amp_dtype)(lambda result=result: result)()
        case.true(f"a result of type {type(result).__name__} is the object returned", returned is result, returned)


@contract("AMP-REGION-002")
def test_decorated_disabled_function(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    @region(target, enabled=False)
    def work() -> torch.Tensor:
        return telling_product(target.device)

    with region(target, amp_dtype):
        case.identical("a product in the decorated function", work(), product_in(torch.float32))
        runs_in(case, "in the surrounding region", target, amp_dtype)


@contract("AMP-REGION-003")
def test_decorated_forward(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        @region(target, amp_dtype)
        def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(features), telling_product(target.device)

    model = Model().to(target.device)
    output, product = model(torch.ones(4, 3, device=target.device))
    case.equal("dtype of the layer's output", output.dtype, amp_dtype)
    case.identical("a product in forward", product, product_in(amp_dtype))
    output.float().sum().backward()
    case.equal("dtype of the weight's gradient", model.layer.weight.grad.dtype, torch.float32)
    runs_in(case, "after the call", target, torch.float32)


@contract("AMP-REGION-004")
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_recursive_function(case: Case, target: Target, amp_dtype: torch.dtype, enabled: bool) -> None:
    @region(target, amp_dtype, enabled=enabled)
    def descend(depth: int) -> torch.Tensor:
        return telling_product(target.device) if depth == 0 else descend(depth - 1)

    inside = amp_dtype if enabled else torch.float32
    with region(target, amp_dtype, enabled=not enabled):
        before = observe()
        case.identical("a product without recursion", descend(0), product_in(inside))
        is_in_force(case, "after a call without recursion (control)", before)
        case.identical("a product two calls down", descend(2), product_in(inside))
        is_in_force(case, "after the recursion", before)


def overlap(target: Target, inner: torch.dtype, outer: torch.dtype, *, shared: bool) -> tuple[list[str], list[str]]:
    """Run a decorated function in two threads that overlap; return by thread how its state changed.

    The second thread calls it in a region of its own. The first enters before the second does, and leaves first.
    """
    entered, may_leave = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def work(number: int) -> None:
        entered[number].set()
        may_leave[number].wait(PATIENCE)

    decorators = [region(target, inner)] * 2 if shared else [region(target, inner), region(target, inner)]
    decorated = [decorate(work) for decorate in decorators]

    def first() -> list[str]:
        before = observe()
        decorated[0](0)
        return observe().differences(before)

    def second() -> list[str]:
        with region(target, outer):
            before = observe()
            decorated[1](1)
            return observe().differences(before)

    with ThreadPoolExecutor(max_workers=2) as pool:
        try:
            running = [pool.submit(first)]
            entered[0].wait(PATIENCE)
            running.append(pool.submit(second))
            entered[1].wait(PATIENCE)
            may_leave[0].set()
            changed_first = running[0].result(PATIENCE)
        finally:
            for event in may_leave:
                event.set()
        return changed_first, running[1].result(PATIENCE)


@contract("AMP-REGION-005")
def test_function_in_two_threads(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    control = overlap(target, amp_dtype, OTHER[amp_dtype], shared=False)
    case.equal("state that differs, a function for each thread (control)", control, ([], []))
    changed = overlap(target, amp_dtype, OTHER[amp_dtype], shared=True)
    case.equal("state that differs, one function in both threads", changed, ([], []))


@contract("AMP-REGION-006")
def test_reused_instance(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    instance = region(target, amp_dtype)
    before = observe()
    for use in ("first", "second"):
        with instance:
            runs_in(case, f"inside, {use} use", target, amp_dtype)
        is_in_force(case, f"after the {use} use", before)
        with contextlib.suppress(Interruption), instance:
            raise Interruption
        is_in_force(case, f"after the {use} use and an exception", before)
    with region(target, OTHER[amp_dtype]) if target.supports(OTHER[amp_dtype]) else region(target, enabled=False):
        before = observe()
        with instance:
            runs_in(case, "inside, in another region", target, amp_dtype)
        is_in_force(case, "after the use in another region", before)


@contract("AMP-REGION-007")
def test_enter_gives_the_instance(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    instance = region(target, amp_dtype)
    with instance as entered:
        case.true("`with torch.autocast(...) as region` gives the instance", entered is instance, type(entered))


@contract("AMP-REGION-008")
@pytest.mark.parametrize("way", ["functions", "methods", "with", "function in with"])
def test_instance_inside_its_own_region(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    def nested(outer: torch.autocast, inner: torch.autocast) -> Callable[[], object]:
        class Block(torch.nn.Module):
            forward = inner(lambda self: telling_product(target.device))

        class Model(torch.nn.Module):
            forward = outer(lambda self: Block()())

        def entered() -> object:
            with outer, inner:
                return telling_product(target.device)

        def called() -> object:
            with outer:
                return inner(telling_product)(target.device)

        function = inner(telling_product)
        calls = {"functions": outer(lambda: function(target.device)), "methods": lambda: Model()()}
        return {**calls, "with": entered, "function in with": called}[way]

    before, shared = observe(), region(target, amp_dtype)
    case.identical(
        "a product, two instances",
        nested(region(target, amp_dtype), region(target, amp_dtype))(),
        product_in(amp_dtype),
    )
    is_in_force(case, "after two instances (control)", before)
    case.identical("a product, one instance", nested(shared, shared)(), product_in(amp_dtype))
    is_in_force(case, "after one instance inside its own region", before)


@contract("AMP-REGION-009")
def test_settled_when_made(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    default = torch.get_autocast_dtype(target.device_type)
    model = RegionStack(observe())
    settled = model.settled(Region(target.device_type))
    instance = region(target)
    decorated = region(target)(observe)
    for around in (
        Region(target.device_type, amp_dtype, cache_enabled=False),
        Region(target.device_type, enabled=False),
    ):
        model.enter(around)
        model.enter(settled)
        with around.open():
            with instance:
                is_in_force(case, f"in {around}, an instance made outside", model.state)
                runs_in(case, f"in {around}, an instance made outside", target, default)
            case.equal(
                f"in {around}, a decorated function: state that differs", decorated().differences(model.state), []
            )
        model.leave()
        model.leave()
    with region(target, amp_dtype, cache_enabled=False):
        instance = region(target)
    with instance:
        runs_in(case, "an instance made in a region, entered outside", target, amp_dtype)
        case.equal("its cache flag", torch.is_autocast_cache_enabled(), False)


# Disabled subregions and the border of a region


@contract("AMP-REGION-010")
def test_disabled_subregion(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    with region(target, amp_dtype):
        runs_in(case, "before the subregion (control)", target, amp_dtype)
        for arguments in ({}, {"dtype": amp_dtype}):
            with torch.autocast(target.device_type, enabled=False, **arguments):
                runs_in(case, f"in the disabled subregion {arguments}", target, torch.float32)
                case.equal("enabled in the subregion", torch.is_autocast_enabled(target.device_type), False)
            runs_in(case, "after the subregion", target, amp_dtype)


def low_and_single(target: Target, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a 16-bit and a float32 tensor, (2, 3) and (3, 2), of small integers that every type holds."""
    values = torch.arange(6.0, device=target.device)
    return values.reshape(2, 3).to(dtype), values.reshape(3, 2)


# arange(6) as a (2, 3) times itself as a (3, 2), by hand; exact in every type.
SMALL_PRODUCT = [[10.0, 13.0], [28.0, 40.0]]


@contract("AMP-REGION-011")
@pytest.mark.parametrize("place", ["disabled subregion", "outside"], ids=["subregion", "outside"])
def test_explicit_cast(case: Case, target: Target, amp_dtype: torch.dtype, place: str) -> None:
    low, single = low_and_single(target, amp_dtype)
    with region(target, amp_dtype):
        case.identical("mixed in the region (control)", low @ single, torch.tensor(SMALL_PRODUCT, dtype=amp_dtype))
    around = region(target, amp_dtype, enabled=place != "outside")
    with around, region(target, enabled=False):
        case.raises(f"mixed, {place}", RuntimeError, lambda: low @ single, match="dtype|type|scalar")
        case.identical(f"cast by hand, {place}", low.float() @ single, torch.tensor(SMALL_PRODUCT))


@contract("AMP-REGION-012")
def test_re_entered_region(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    low, single = low_and_single(target, amp_dtype)
    promised = torch.tensor(SMALL_PRODUCT, dtype=amp_dtype)
    with region(target, amp_dtype):
        with region(target, enabled=False):
            single = single * 1.0
            with region(target, amp_dtype):
                case.identical("mixed, in a region inside the subregion", low @ single, promised)
                runs_in(case, "in a region inside the subregion", target, amp_dtype)
            runs_in(case, "back in the subregion", target, torch.float32)
        case.identical("mixed, after the subregion", low @ single, promised)


@contract("AMP-REGION-013")
def test_any_type_may_enter(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    types = [torch.float32, *(dtype for dtype in OTHER if target.supports(dtype))]
    promised = torch.tensor(SMALL_PRODUCT, dtype=amp_dtype)
    for left in types:
        for right in types:
            low, single = low_and_single(target, left)
            second = single.to(right)
            with region(target, amp_dtype):
                case.identical(f"{left} times {right}", low @ second, promised)


@contract("AMP-REGION-014")
def test_float_of_float32(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    with region(target, amp_dtype):
        single, low = torch.ones(3, device=target.device) * 2, telling_product(target.device)
    case.equal("dtypes of the results", (single.dtype, low.dtype), (torch.float32, amp_dtype))
    case.true("float() of a float32 result gives the tensor itself", single.float() is single)
    case.true("float() of a 16-bit result gives another tensor (control)", low.float() is not low)


@contract("AMP-REGION-015")
def test_parameters_stay(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    layer = torch.nn.Linear(6, 4).to(target.device)
    features = torch.randn(3, 6, generator=rng).to(target.device)
    kept = {"weight": layer.weight, "bias": layer.bias, "input": features}
    before = {name: (tensor.detach().clone(), tensor.data_ptr(), tensor._version) for name, tensor in kept.items()}
    with region(target, amp_dtype):
        output = layer(features)
        case.equal("dtype of the output (control)", output.dtype, amp_dtype)
    output.float().sum().backward()
    for name, tensor in kept.items():
        case.identical(f"{name} after the region", tensor.detach(), before[name][0])
        case.equal(f"address and version of the {name}", (tensor.data_ptr(), tensor._version), before[name][1:])
    case.true("the module's parameters are the same objects", layer.weight is kept["weight"])


# What a region's arguments mean


@contract("AMP-REGION-020")
def test_defaults(case: Case, target: Target) -> None:
    default = torch.get_autocast_dtype(target.device_type)
    with torch.autocast(target.device_type):
        case.equal("enabled", torch.is_autocast_enabled(target.device_type), True)
        case.equal("cache enabled", torch.is_autocast_cache_enabled(), True)
        case.equal("dtype", torch.get_autocast_dtype(target.device_type), default)
        runs_in(case, "in a region with no arguments", target, default)


@contract("AMP-REGION-023")
def test_dtype_none_takes_what_is_set(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    before = torch.get_autocast_dtype(target.device_type)
    torch.set_autocast_dtype(target.device_type, amp_dtype)
    try:
        with torch.autocast(target.device_type):
            runs_in(case, f"after set_autocast_dtype({amp_dtype})", target, amp_dtype)
        case.equal("dtype after the region", torch.get_autocast_dtype(target.device_type), amp_dtype)
    finally:
        torch.set_autocast_dtype(target.device_type, before)
    with region(target, amp_dtype), torch.autocast(target.device_type):
        runs_in(case, "in a region with no dtype inside one with", target, amp_dtype)


@contract("AMP-REGION-024")
@pytest.mark.parametrize("inner", [None, True, False], ids=["none", "on", "off"])
@pytest.mark.parametrize("outer", [True, False], ids=["in_on", "in_off"])
def test_cache_flag(case: Case, target: Target, outer: bool, inner: bool | None) -> None:
    with torch.autocast(target.device_type, cache_enabled=outer):
        case.equal("cache flag of the outer region", torch.is_autocast_cache_enabled(), outer)
        with torch.autocast(target.device_type, cache_enabled=inner):
            promised = outer if inner is None else inner
            case.equal(f"cache flag with cache_enabled={inner}", torch.is_autocast_cache_enabled(), promised)
        case.equal("cache flag back in the outer region", torch.is_autocast_cache_enabled(), outer)
    case.equal("cache flag outside", torch.is_autocast_cache_enabled(), True)


@contract("AMP-REGION-025")
def test_enabled_false_alone(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    with region(target, amp_dtype, enabled=True):
        runs_in(case, "enabled=True (control)", target, amp_dtype)
    with region(target, amp_dtype, enabled=False):
        case.equal("enabled inside", torch.is_autocast_enabled(target.device_type), False)
        runs_in(case, "enabled=False", target, torch.float32)
    runs_in(case, "after the region", target, torch.float32)


# Nesting and what is put back


@contract("AMP-REGION-030")
@pytest.mark.parametrize("outer", [True, False], ids=["in_enabled", "in_disabled"])
@pytest.mark.parametrize("inner", [True, False], ids=["enabled", "disabled"])
def test_enabled_is_put_back(case: Case, target: Target, amp_dtype: torch.dtype, outer: bool, inner: bool) -> None:
    kind = target.device_type
    with region(target, amp_dtype, enabled=outer):
        with region(target, amp_dtype, enabled=inner):
            case.equal("enabled inside", torch.is_autocast_enabled(kind), inner)
        case.equal("enabled after the inner region", torch.is_autocast_enabled(kind), outer)
        runs_in(case, "after the inner region", target, amp_dtype if outer else torch.float32)
    case.equal("enabled after the outer region", torch.is_autocast_enabled(kind), False)
    runs_in(case, "after the outer region", target, torch.float32)


@contract("AMP-REGION-031")
def test_dtype_is_put_back(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    kind, default = target.device_type, torch.get_autocast_dtype(target.device_type)
    other = OTHER[amp_dtype]
    with region(target, amp_dtype):
        if target.supports(other):
            with region(target, other):
                case.equal("dtype inside", torch.get_autocast_dtype(kind), other)
                runs_in(case, "in the inner region", target, other)
        with region(target, other, enabled=False):
            case.equal("dtype in a disabled region", torch.get_autocast_dtype(kind), other)
        case.equal("dtype after the inner regions", torch.get_autocast_dtype(kind), amp_dtype)
        runs_in(case, "after the inner regions", target, amp_dtype)
    case.equal("dtype after the outer region", torch.get_autocast_dtype(kind), default)


@contract("AMP-REGION-032")
@pytest.mark.parametrize("flag", [True, False], ids=["on", "off"])
def test_cache_flag_is_put_back(case: Case, target: Target, flag: bool) -> None:
    before = torch.is_autocast_cache_enabled()
    try:
        for ambient in (True, False):
            torch.set_autocast_cache_enabled(ambient)
            with torch.autocast(target.device_type, cache_enabled=flag):
                case.equal("cache flag inside", torch.is_autocast_cache_enabled(), flag)
            case.equal("cache flag after the region", torch.is_autocast_cache_enabled(), ambient)
            with contextlib.suppress(Interruption), torch.autocast(target.device_type, cache_enabled=flag):
                raise Interruption
            case.equal("cache flag after an exception", torch.is_autocast_cache_enabled(), ambient)
    finally:
        torch.set_autocast_cache_enabled(before)


@contract("AMP-REGION-033")
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_nesting_depth(case: Case, target: Target, amp_dtype: torch.dtype, enabled: bool) -> None:
    before = observe().depth
    with contextlib.ExitStack() as stack:
        for depth in range(1, 5):
            stack.enter_context(region(target, amp_dtype, enabled=enabled))
            case.equal(f"depth inside {depth} regions", observe().depth - before, depth)
    case.equal("depth after all of them", observe().depth - before, 0)


def failing(target: Target, kind: type[BaseException]) -> None:
    """Raise `kind`, or have torch raise it where it is its own error."""
    if kind is RuntimeError:
        torch.mm(torch.ones(2, 3, device=target.device), torch.ones(2, 3, device=target.device))
    raise kind("raised in the region")


@contract("AMP-REGION-034")
@pytest.mark.parametrize("kind", [Interruption, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_exception(case: Case, target: Target, amp_dtype: torch.dtype, kind: type[BaseException], depth: int) -> None:
    settings = [
        Region(target.device_type, amp_dtype, cache_enabled=False),
        Region(target.device_type, amp_dtype, enabled=False),
        Region(neighbour(target), OTHER[amp_dtype]),
        Region(target.device_type, amp_dtype, cache_enabled=True),
    ]
    for caught_at in range(depth):
        model = RegionStack(observe())
        with contextlib.ExitStack() as outer:
            for setting in settings[:caught_at]:
                outer.enter_context(setting.open())
                model.enter(setting)
            try:
                with contextlib.ExitStack() as inner:
                    for setting in settings[caught_at:depth]:
                        inner.enter_context(setting.open())
                    failing(target, kind)
            except kind:
                caught = True
            else:
                caught = False
            case.true(f"{kind.__name__} from depth {depth} reaches depth {caught_at}", caught)
            is_in_force(case, f"after {depth - caught_at} regions left by an exception", model.state)
        runs_in(case, "after all regions", target, torch.float32)


@contract("AMP-REGION-034")
@pytest.mark.parametrize(
    "kind",
    [Exception, AssertionError, KeyError, ValueError, StopIteration, GeneratorExit, SystemExit, torch.OutOfMemoryError],
    ids=lambda kind: kind.__name__,
)
def test_exception_of_any_kind(case: Case, target: Target, amp_dtype: torch.dtype, kind: type[BaseException]) -> None:
    def work() -> None:
        raise kind("raised in the region")

    def opened() -> None:
        with region(target, amp_dtype):
            work()

    before = observe()
    for what, call in (("with statement", opened), ("decorator", region(target, amp_dtype)(work))):
        arrived: type[BaseException] | None = None
        try:
            call()
        except kind as error:
            arrived = type(error)
        case.equal(f"{what}: type of what arrived", arrived, kind)
        is_in_force(case, f"{what}: after the region", before)


@contract("AMP-REGION-034")
def test_exception_in_decorated_function(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    @region(target, amp_dtype, cache_enabled=False)
    def work(depth: int) -> None:
        case.equal("enabled inside (control)", torch.is_autocast_enabled(target.device_type), True)
        raise Interruption(f"from call {depth}")

    before = observe()
    error = case.raises("calling the function", Interruption, lambda: work(7), match="from call 7")
    case.equal("arguments of the exception", error.args, ("from call 7",))
    is_in_force(case, "after the call", before)


@contract("AMP-REGION-035")
def test_device_types_are_independent(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    here, there = Region(target.device_type, amp_dtype), Region(neighbour(target), OTHER[amp_dtype])
    for first, second in ((here, there), (there, here)):
        model = RegionStack(observe())
        model.enter(first)
        with first.open():
            is_in_force(case, f"in a region for {first}", model.state)
            runs_in(case, f"in a region for {first}", target, amp_dtype if first is here else torch.float32)
            model.enter(second)
            with second.open():
                is_in_force(case, f"in {first}, {second}", model.state)
                runs_in(case, f"in {first}, {second}", target, amp_dtype)
            model.leave()
            is_in_force(case, f"in {first} again", model.state)
        model.leave()
        is_in_force(case, "after both", model.state)


@contract("AMP-REGION-035")
@pytest.mark.parametrize("flag", [True, False], ids=["on", "off"])
def test_other_device_type_stays(case: Case, target: Target, amp_dtype: torch.dtype, flag: bool) -> None:
    kind = neighbour(target)
    before = torch.is_autocast_enabled(kind)
    try:
        torch.set_autocast_enabled(kind, flag)
        for enabled in (True, False):
            with region(target, amp_dtype, enabled=enabled):
                case.equal(f"enabled for {kind} in a region", torch.is_autocast_enabled(kind), flag)
            case.equal(f"enabled for {kind} after a region", torch.is_autocast_enabled(kind), flag)
    finally:
        torch.set_autocast_enabled(kind, before)


def drawn(target: Target, rng: torch.Generator) -> Region:
    """Draw a region that torch opens here without disabling it."""

    def pick(*choices: Result) -> Result:
        return choices[int(torch.randint(len(choices), (), generator=rng))]

    dtypes = [dtype for dtype in OTHER if target.supports(dtype)]
    kind = pick(target.device_type, target.device_type, neighbour(target))
    dtype = pick(None, *(dtypes if kind == target.device_type else OTHER))
    return Region(kind, dtype, enabled=pick(True, True, False), cache_enabled=pick(None, None, True, False))


def steps(target: Target, rng: torch.Generator, length: int) -> Iterator[tuple[str, State]]:
    """Enter and leave drawn regions, `length` times; after each step yield what was done and the promised state."""
    model = RegionStack(observe())
    opened: list[torch.autocast] = []
    try:
        for _ in range(length):
            if len(opened) < 6 and (not opened or torch.rand((), generator=rng) < 0.6):
                chosen = drawn(target, rng)
                opened.append(chosen.open())
                opened[-1].__enter__()
                model.enter(chosen)
                done = f"entering {chosen}"
            else:
                error = Interruption() if torch.rand((), generator=rng) < 0.3 else None
                opened.pop().__exit__(type(error) if error else None, error, None)
                model.leave()
                done = "leaving by an exception" if error else "leaving"
            yield f"{done}, at depth {len(opened)}", model.state
    finally:
        while opened:
            opened.pop().__exit__(None, None, None)


@contract("AMP-REGION-037")
def test_nested_regions_are_a_stack(case: Case, target: Target, rng: torch.Generator) -> None:
    length, wrong = case.samples(quick=40, standard=120, full=5000), []
    before = observe()
    for done, promised in steps(target, rng, length):
        setting = promised.settings[target.device_type]
        product = product_in(setting.dtype if setting.enabled else torch.float32)
        seen = telling_product(target.device).cpu()
        if seen.dtype != product.dtype or not torch.equal(seen, product):
            wrong.append(f"{done}: a product is {seen.flatten().tolist()} in {seen.dtype}")
        wrong += [f"{done}: {difference}" for difference in observe().differences(promised)]
    case.note("regions entered and left", length)
    case.equal("first steps that differ from a stack", wrong[:3], [])
    is_in_force(case, "after the last region", before)


# Threads


@contract("AMP-REGION-040")
def test_new_thread(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    promised = fresh(DEFAULTS)
    with region(target, amp_dtype, cache_enabled=False):
        seen, product = in_new_thread(lambda: (observe(), telling_product(target.device)))
        runs_in(case, "in the region's own thread (control)", target, amp_dtype)
    case.equal("state that differs in a thread started in the region", seen.differences(promised), [])
    case.identical("a product in that thread", product, product_in(torch.float32))


@contract("AMP-REGION-041")
def test_regions_of_two_threads(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    outside, inside = observe(), RegionStack(observe())
    setting = Region(target.device_type, amp_dtype, cache_enabled=False)
    inside.enter(setting)
    entered, may_leave = threading.Event(), threading.Event()

    def other() -> tuple[list[str], torch.Tensor, list[str]]:
        model = RegionStack(observe())
        model.enter(setting)
        with setting.open():
            entered.set()
            may_leave.wait(PATIENCE)
            return observe().differences(model.state), telling_product(target.device), []

    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(other)
        try:
            case.true("the other thread has entered its region", entered.wait(PATIENCE))
            is_in_force(case, "here, while the other thread is in a region", outside)
            runs_in(case, "here, while the other thread is in a region", target, torch.float32)
            with region(target, amp_dtype, enabled=False):
                runs_in(case, "in a disabled region here", target, torch.float32)
        finally:
            may_leave.set()
        differences, product, _ = running.result(PATIENCE)
    case.equal("state that differs in the other thread after regions here", differences, [])
    case.identical("a product in the other thread", product, product_in(amp_dtype))
    is_in_force(case, "here, after the other thread's region", outside)


@contract("AMP-REGION-041")
def test_region_in_a_thread(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    def other() -> torch.Tensor:
        with region(target, amp_dtype):
            return telling_product(target.device)

    case.identical("a product in a region in a new thread", in_new_thread(other), product_in(amp_dtype))
    runs_in(case, "in this thread", target, torch.float32)


# What is refused, or disabled with a warning


@contract("AMP-REGION-050")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("device_type", ["cpu", "xpu", deep("standard", "mps"), deep("standard", "hpu")])
def test_unsupported_dtype(case: Case, device_type: str, dtype: torch.dtype) -> None:
    def enter() -> tuple[bool, torch.Tensor]:
        with torch.autocast(device_type, dtype=dtype):
            return torch.is_autocast_enabled(device_type), telling_product("cpu")

    supported = r"(torch\.bfloat16.*torch\.float16|torch\.float16.*torch\.bfloat16)"
    match = rf"{device_type.upper()} autocast.*not supported.*Disabling(?s:.*){supported}"
    enabled, product = case.warns(f"a region of {dtype}", UserWarning, enter, match=match)
    case.equal("enabled inside", enabled, False)
    case.identical("a product inside", product, product_in(torch.float32))
    case.equal("enabled after", torch.is_autocast_enabled(device_type), False)


@contract("AMP-REGION-051")
def test_disabled_region_does_not_warn(case: Case, target: Target) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for dtype in (torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype=dtype):
                pass
        for dtype in (None, torch.float32, torch.float64):
            with torch.autocast("cpu", dtype=dtype, enabled=False), torch.autocast("cuda", enabled=False):
                pass
    case.equal("warnings", [str(warning.message) for warning in caught], [])


@contract("AMP-REGION-052")
@pytest.mark.parametrize(
    "device_type",
    [torch.device("cpu"), None, 0, b"cpu"],
    ids=["device", "none", "index", "bytes"],
)
def test_device_type_is_no_string(case: Case, device_type: object) -> None:
    case.raises(
        f"torch.autocast({device_type!r})",
        ValueError,
        lambda: torch.autocast(device_type),
        match=r"device_type.*`str`.*" + type(device_type).__name__,
    )
    with torch.autocast("cpu"):
        case.equal("enabled with a string (control)", torch.is_autocast_enabled("cpu"), True)


@contract("AMP-REGION-053")
@pytest.mark.parametrize("name", ["nonsense", "CPU", "", "gpu"], ids=["nonsense", "capitals", "empty", "gpu"])
def test_unknown_device_type(case: Case, name: str) -> None:
    before = observe()
    case.raises(f"torch.autocast({name!r})", RuntimeError, lambda: torch.autocast(name))
    case.raises(f"torch.autocast({name!r}, dtype)", RuntimeError, lambda: torch.autocast(name, torch.bfloat16))
    is_in_force(case, "after the error", before)


@contract("AMP-REGION-054")
@pytest.mark.parametrize("device", [device for device in DEVICES.values() if device.dtype is None], ids=str)
def test_device_type_without_autocast(case: Case, device: DeviceType) -> None:
    before = observe()
    case.raises(
        f"torch.autocast({device.type!r}, torch.bfloat16)",
        RuntimeError,
        lambda: torch.autocast(device.type, torch.bfloat16),
        match=f"unsupported autocast device_type.*{device.type}",
    )
    case.raises(f"torch.autocast({device.type!r})", RuntimeError, lambda: torch.autocast(device.type))
    is_in_force(case, "after the error", before)


def cuda_is_there(_: None) -> str | None:
    """Say that the machine has CUDA, or a stand-in for it, or None."""
    if torch.cuda.is_available() or importlib.util.find_spec("torch_xla") is not None:
        return "CUDA, or torch_xla in its place, is available; this is about machines without"
    return None


@contract("AMP-REGION-055")
@applies(cuda_is_there)
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=["default", "fp16", "bf16"])
def test_cuda_without_cuda(case: Case, dtype: torch.dtype | None) -> None:
    before = observe()
    instance = case.warns(
        "torch.autocast('cuda')",
        UserWarning,
        lambda: torch.autocast("cuda", dtype=dtype),
        match=r"CUDA is not available.*Disabling",
    )
    with instance:
        case.equal("enabled inside", torch.is_autocast_enabled("cuda"), False)
        case.equal("dtype inside", torch.get_autocast_dtype("cuda"), dtype or torch.float16)
        runs_in_fake_cuda(case, torch.float32)
    is_in_force(case, "after the region", before)


def runs_in_fake_cuda(case: Case, dtype: torch.dtype) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        ones = torch.ones(2, 2, device="cuda")
        case.equal("dtype of a product of fake CUDA tensors", (ones @ ones).dtype, dtype)


@contract("AMP-REGION-056")
@pytest.mark.parametrize("thing", [3, "text", None], ids=["int", "str", "none"])
def test_decorating_what_cannot_be_called(case: Case, thing: object) -> None:
    case.raises(
        f"torch.autocast('cpu')({thing!r})",
        TypeError,
        lambda: torch.autocast("cpu")(thing),
        match=f"callable.*{type(thing).__name__}",
    )


WRONG = {"cache_enabled": (1, "on"), "enabled": (1, "yes"), "dtype": ("float16", 16)}


@contract("AMP-REGION-057")
@pytest.mark.parametrize("argument", list(WRONG))
def test_region_that_fails_to_open(case: Case, target: Target, amp_dtype: torch.dtype, argument: str) -> None:
    def entered(value: object) -> None:
        with torch.autocast(target.device_type, **{argument: value}):
            pass

    for around in (contextlib.nullcontext(), region(target, amp_dtype)):
        with warnings.catch_warnings(), around:
            warnings.simplefilter("ignore")
            before = observe()
            for value in WRONG[argument]:
                case.raises(f"{argument}={value!r}", TypeError, functools.partial(entered, value))
                is_in_force(case, f"after {argument}={value!r}", before)


@contract("AMP-REGION-058")
def test_warnings_point_at_the_caller(case: Case) -> None:
    calls: dict[str, Callable[[], object]] = {
        "cpu": lambda: torch.autocast("cpu", dtype=torch.float32),
        "xpu": lambda: torch.autocast("xpu", dtype=torch.int8),
    }
    if not torch.cuda.is_available():
        calls["cuda"] = lambda: torch.autocast("cuda")
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        case.equal(
            f"{name}: files that the warnings name", [Path(one.filename).name for one in caught], [Path(__file__).name]
        )


@contract("AMP-REGION-059")
def test_scripted_decorated_function(case: Case) -> None:
    def script(decorated: Callable[..., object]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.script(decorated)

    case.raises(
        "torch.jit.script of a decorated function",
        RuntimeError,
        lambda: script(torch.autocast("cpu")(telling_product)),
        match="not supported in script mode",
    )


# Older spellings


def deprecated_autocast(device_type: str, *arguments: object, **options: object) -> torch.autocast:
    """Make `torch.<device_type>.amp.autocast`, whose warning is the business of the api chapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(torch, device_type).amp.autocast(*arguments, **options)


@contract("AMP-REGION-060", on=("cpu", "cuda"))
def test_deprecated_spelling(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    kind, before = target.device_type, observe()

    def make() -> torch.autocast:
        return getattr(torch, kind).amp.autocast(dtype=amp_dtype)

    instance = case.warns(f"torch.{kind}.amp.autocast(...)", FutureWarning, make)
    with instance:
        runs_in(case, "as a context manager", target, amp_dtype)
        with deprecated_autocast(kind, enabled=False):
            runs_in(case, "disabled", target, torch.float32)
        runs_in(case, "after the disabled subregion", target, amp_dtype)
    is_in_force(case, "after the region", before)
    product = deprecated_autocast(kind, dtype=amp_dtype)(telling_product)(target.device)
    case.identical("a product in a decorated function", product, product_in(amp_dtype))
    with deprecated_autocast(kind, True, amp_dtype, False):
        runs_in(case, "with positional arguments", target, amp_dtype)
        case.equal("cache flag of the third argument", torch.is_autocast_cache_enabled(), False)
    with contextlib.suppress(Interruption), deprecated_autocast(kind, dtype=amp_dtype):
        raise Interruption
    is_in_force(case, "after an exception", before)


@contract("AMP-REGION-060")
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_deprecated_spelling_sets_the_state(case: Case, device_type: str) -> None:
    for dtype in OTHER:
        for cache in (True, False):
            setting = Region(device_type, dtype, enabled=False, cache_enabled=cache)
            before = observe()
            model = RegionStack(before)
            model.enter(setting)
            with deprecated_autocast(device_type, enabled=False, dtype=dtype, cache_enabled=cache):
                is_in_force(case, f"in {setting}", model.state)
            is_in_force(case, "after the region", before)
    with deprecated_autocast(device_type, enabled=False):
        case.equal("default dtype", torch.get_autocast_dtype(device_type), DEFAULTS[device_type])


@contract("AMP-REGION-060")
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_deprecated_spelling_as_a_decorator(case: Case, device_type: str) -> None:
    for dtype, enabled in itertools.product(OTHER, (True, False)):
        setting = Region(device_type, dtype, enabled=enabled)
        model = RegionStack(observe())
        model.enter(setting)
        with cuda_that_says(bf16=True):
            seen = deprecated_autocast(device_type, enabled=enabled, dtype=dtype)(observe)()
        case.equal(f"state that differs in a function decorated with {setting}", seen.differences(model.state), [])


# Facts


@contract("AMP-REGION-070")
def test_decorated_generator(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    @region(target, amp_dtype)
    def work() -> Iterator[bool]:
        yield torch.is_autocast_enabled(target.device_type)

    case.note("the body of a decorated generator function runs in the region", next(work()))


@contract("AMP-REGION-071")
def test_decorated_coroutine(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    def enabled() -> bool:
        return torch.is_autocast_enabled(target.device_type)

    @region(target, amp_dtype)
    async def work() -> bool:
        return enabled()

    @region(target, amp_dtype)
    async def values() -> AsyncIterator[bool]:
        yield enabled()

    before = observe()
    case.note("the body of a decorated coroutine function runs in the region", awaited(work()))
    case.note("the body of a decorated asynchronous generator function does", awaited(values().__anext__()))
    is_in_force(case, "after both", before)


@contract("AMP-REGION-039")
@pytest.mark.parametrize("end", ["runs out", "is closed"], ids=["end", "close"])
def test_region_in_an_asynchronous_generator(case: Case, target: Target, amp_dtype: torch.dtype, end: str) -> None:
    async def values() -> AsyncGenerator[torch.Tensor, None]:
        with region(target, amp_dtype):
            yield telling_product(target.device)
            yield telling_product(target.device)

    before, model = observe(), RegionStack(observe())
    model.enter(Region(target.device_type, amp_dtype))
    generator = values()
    for number in range(2):
        case.identical(f"product {number} of the generator", awaited(generator.__anext__()), product_in(amp_dtype))
        # The state belongs to the thread: the region is open as long as the generator is suspended in it.
        is_in_force(case, f"beside the suspended generator, {number}", model.state)
    if end == "runs out":
        with contextlib.suppress(StopAsyncIteration):
            awaited(generator.__anext__())
    else:
        awaited(generator.aclose())
    is_in_force(case, f"after the generator {end}", before)


def awaited(work: Awaitable[Result]) -> Result | None:
    """Return what a coroutine that waits for nothing returns."""
    try:
        next(work.__await__())
    except StopIteration as stopped:
        returned: Result = stopped.value
        return returned
    return None
