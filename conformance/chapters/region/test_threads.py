"""Check that the autocast state is thread-local."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.region.stack_model import (
    Region,
    RegionStack,
    fresh,
    observe,
    probe_product,
    product_in,
)
from .support import DEFAULTS, OTHER, PATIENCE, in_new_thread, is_in_force, region, runs_in


def overlap(target: Target, inner: torch.dtype, outer: torch.dtype, *, shared: bool) -> tuple[list[str], list[str]]:
    """Run a decorated function in two overlapping threads; return the state changes of each thread.

    The second thread calls it in another region. The first enters before the second does, and leaves first.
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


@contract("AMP-REGION-040")
def test_new_thread(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    promised = fresh(DEFAULTS)
    with region(target, amp_dtype, cache_enabled=False):
        seen, product = in_new_thread(lambda: (observe(), probe_product(target.device)))
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
            return observe().differences(model.state), probe_product(target.device), []

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
            return probe_product(target.device)

    case.identical("a product in a region in a new thread", in_new_thread(other), product_in(amp_dtype))
    runs_in(case, "in this thread", target, torch.float32)
