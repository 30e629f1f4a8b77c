"""Check that nested regions, normal exits and exceptions restore the autocast state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import OTHER
from ...oracles.region.stack_model import (
    Region,
    RegionStack,
    State,
    observe,
    probe_product,
    product_in,
)
from .support import Interruption, is_in_force, neighbour, random_region, region, runs_in


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
    """Raise `kind`, by a torch call where it is torch's own error."""
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
    error = case.raises("calling the function", Interruption, lambda: work(7))
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


def steps(target: Target, rng: torch.Generator, length: int) -> Iterator[tuple[str, State]]:
    """Enter and leave random regions `length` times; yield each step and the promised state after it."""
    model = RegionStack(observe())
    opened: list[torch.autocast] = []
    try:
        for _ in range(length):
            if len(opened) < 6 and (not opened or torch.rand((), generator=rng) < 0.6):
                chosen = random_region(target, rng)
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
        seen = probe_product(target.device).cpu()
        if seen.dtype != product.dtype or not torch.equal(seen, product):
            wrong.append(f"{done}: a product is {seen.flatten().tolist()} in {seen.dtype}")
        wrong += [f"{done}: {difference}" for difference in observe().differences(promised)]
    case.note("regions entered and left", length)
    case.equal("first steps that differ from a stack", wrong[:3], [])
    is_in_force(case, "after the last region", before)
