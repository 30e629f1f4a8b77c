"""Check and record how regions behave in generators and coroutines."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.region.stack_model import (
    Region,
    RegionStack,
    observe,
    probe_product,
    product_in,
)
from .support import Result, is_in_force, region


@contract("AMP-REGION-070")
def test_decorated_generator(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    @region(target, amp_dtype)
    def work() -> Iterator[torch.Tensor]:
        yield probe_product(target.device)
        yield probe_product(target.device)

    case.equal("types of a decorated generator's products", [one.dtype for one in work()], [amp_dtype] * 2)


@contract("AMP-REGION-071")
@pytest.mark.parametrize("kind", ["coroutine", "asynchronous generator"], ids=["coroutine", "generator"])
def test_decorated_coroutine(case: Case, target: Target, amp_dtype: torch.dtype, kind: str) -> None:
    @region(target, amp_dtype)
    async def work() -> torch.Tensor:
        return probe_product(target.device)

    @region(target, amp_dtype)
    async def values() -> AsyncIterator[torch.Tensor]:
        yield probe_product(target.device)

    made: Awaitable[torch.Tensor] = work() if kind == "coroutine" else values().__anext__()
    before = observe()
    product = awaited(made)
    is_in_force(case, "after the call", before)
    case.equal("type of a product in the body", None if product is None else product.dtype, amp_dtype)


@contract("AMP-REGION-039")
@pytest.mark.parametrize("end", ["runs out", "is closed"], ids=["end", "close"])
def test_region_in_an_asynchronous_generator(case: Case, target: Target, amp_dtype: torch.dtype, end: str) -> None:
    async def values() -> AsyncGenerator[torch.Tensor, None]:
        with region(target, amp_dtype):
            yield probe_product(target.device)
            yield probe_product(target.device)

    before, model = observe(), RegionStack(observe())
    model.enter(Region(target.device_type, amp_dtype))
    generator = values()
    for number in range(2):
        case.identical(f"product {number} of the generator", awaited(generator.__anext__()), product_in(amp_dtype))
        # The state belongs to the thread: the region is open as long as the generator is suspended in it.
        is_in_force(case, f"while the generator is suspended, {number}", model.state)
    if end == "runs out":
        with contextlib.suppress(StopAsyncIteration):
            awaited(generator.__anext__())
    else:
        awaited(generator.aclose())
    is_in_force(case, f"after the generator {end}", before)


def awaited(work: Awaitable[Result]) -> Result | None:
    """Return the result of a coroutine that never suspends."""
    try:
        next(work.__await__())
    except StopIteration as stopped:
        returned: Result = stopped.value
        return returned
    return None
