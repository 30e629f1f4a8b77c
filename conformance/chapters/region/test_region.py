"""Check the autocast state and the arithmetic inside and outside a region."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.storages import memory
from ...oracles.numbers.formats import OTHER
from ...oracles.region.stack_model import (
    Region,
    RegionStack,
    observe,
    probe_product,
    product_in,
)
from .support import Interruption, is_in_force, region, runs_in

# Context manager and decorator


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
        return probe_product(target.device), [first, *rest, named]

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
        return probe_product(target.device)

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
            return self.layer(features), probe_product(target.device)

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
        return probe_product(target.device) if depth == 0 else descend(depth - 1)

    inside = amp_dtype if enabled else torch.float32
    with region(target, amp_dtype, enabled=not enabled):
        before = observe()
        case.identical("a product without recursion", descend(0), product_in(inside))
        is_in_force(case, "after a call without recursion (control)", before)
        case.identical("a product two calls down", descend(2), product_in(inside))
        is_in_force(case, "after the recursion", before)


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
            forward = inner(lambda self: probe_product(target.device))

        class Model(torch.nn.Module):
            forward = outer(lambda self: Block()())

        def entered() -> object:
            with outer, inner:
                return probe_product(target.device)

        def called() -> object:
            with outer:
                return inner(probe_product)(target.device)

        function = inner(probe_product)
        calls = {"functions": outer(lambda: function(target.device)), "methods": lambda: Model()()}
        return {**calls, "with": entered, "function in with": called}[way]

    shared = region(target, amp_dtype)
    with region(target, amp_dtype, enabled=False):  # restores what the instance leaves
        before = observe()
        two = nested(region(target, amp_dtype), region(target, amp_dtype))
        case.identical("a product, two instances", two(), product_in(amp_dtype))
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


# Disabled subregions and tensors that cross the border


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


# arange(6) as a (2, 3) times itself as a (3, 2); exact in every dtype.
SMALL_PRODUCT = [[10.0, 13.0], [28.0, 40.0]]


@contract("AMP-REGION-011")
@pytest.mark.parametrize("place", ["disabled subregion", "outside"], ids=["subregion", "outside"])
def test_explicit_cast(case: Case, target: Target, amp_dtype: torch.dtype, place: str) -> None:
    low, single = low_and_single(target, amp_dtype)
    with region(target, amp_dtype):
        case.identical("mixed in the region (control)", low @ single, torch.tensor(SMALL_PRODUCT, dtype=amp_dtype))
    around = region(target, amp_dtype, enabled=place != "outside")
    with around, region(target, enabled=False):
        case.raises(f"mixed, {place}", RuntimeError, lambda: low @ single)
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
        single, low = torch.ones(3, device=target.device) * 2, probe_product(target.device)
    case.equal("dtypes of the results", (single.dtype, low.dtype), (torch.float32, amp_dtype))
    case.true("float() of a float32 result gives the tensor itself", single.float() is single)
    case.true("float() of a 16-bit result gives another tensor (control)", low.float() is not low)


@contract("AMP-REGION-015")
def test_parameters_stay(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    layer = torch.nn.Linear(6, 4).to(target.device)
    features = torch.randn(3, 6, generator=rng).to(target.device)
    kept = {"weight": layer.weight, "bias": layer.bias, "input": features}
    before = {name: (tensor.detach().clone(), memory(tensor), tensor._version) for name, tensor in kept.items()}
    with region(target, amp_dtype):
        output = layer(features)
        case.equal("dtype of the output (control)", output.dtype, amp_dtype)
    output.float().sum().backward()
    for name, tensor in kept.items():
        case.identical(f"{name} after the region", tensor.detach(), before[name][0])
        case.equal(f"memory and version of the {name}", (memory(tensor), tensor._version), before[name][1:])
    case.true("the module's parameters are the same objects", layer.weight is kept["weight"])


# Arguments


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
