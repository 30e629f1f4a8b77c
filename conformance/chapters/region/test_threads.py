"""Check that the autocast state is thread-local."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.compilers import without_torchscript
from ...oracles.numbers.formats import OTHER
from ...oracles.region.stack_model import (
    Region,
    RegionStack,
    fresh,
    observe,
    probe_product,
    product_in,
)
from .support import DEFAULTS, PATIENCE, in_new_thread, is_in_force, region, runs_in


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


class Witness(torch.nn.Module):
    """A module that returns its input and records the autocast state of the thread that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[tuple[bool, torch.dtype, bool]] = []
        self.threads: set[int] = set()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        cached = torch.is_autocast_cache_enabled()
        self.states.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), cached))
        self.threads.add(threading.get_ident())
        return inputs


@contract("AMP-REGION-112", on="cpu")
@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_threads_of_the_benchmark(
    case: Case, target: Target, amp_dtype: torch.dtype, enabled: bool, cached: bool
) -> None:
    witness = Witness()
    benchmark = torch.utils.ThroughputBenchmark(witness)
    benchmark.add_input(torch.ones(1))
    with target.autocast(amp_dtype, enabled=enabled, cache_enabled=cached):
        benchmark.benchmark(num_calling_threads=2, num_warmup_iters=1, num_iters=4)
    others = witness.threads - {threading.get_ident()}
    case.at_least("threads of the library (control)", len(others), 1)
    case.equal("enabled in them", {state[0] for state in witness.states}, {enabled})
    if enabled:
        case.equal("dtype and cache flag in them", {state[1:] for state in witness.states}, {(amp_dtype, cached)})


@contract("AMP-REGION-112", on="cpu")
def test_forked_functions(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    if reason := without_torchscript():
        case.untestable(reason)
    x = torch.ones(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later versions deprecate TorchScript
        forked = torch.jit.trace(lambda x: torch.jit.wait(torch.jit.fork(torch.mm, x, x)), (x,))
        with target.autocast(amp_dtype):
            case.equal("dtype of a forked product", torch.jit.wait(torch.jit.fork(torch.mm, x, x)).dtype, amp_dtype)
            case.equal("dtype in a traced fork", forked(x).dtype, amp_dtype)
    case.equal("dtype of a product outside (control)", torch.mm(x, x).dtype, torch.float32)
