"""Objects and lines are counted, whatever the collector and the machine do."""

from __future__ import annotations

import gc
import sys

import torch

from conformance.chapters.memory.python_objects import collected_apart, kinds, least_rises, reachable, tracked
from conformance.chapters.speed.python_lines import lines_of
from conformance.oracles.trace.counts import HostReads


def test_new_containers_are_tracked_and_freed_ones_are_not() -> None:
    with collected_apart():
        before = tracked()
        kept: list[list[object]] = [[], []]
        with_two = tracked()
        kept[0].append(kept)  # a cycle, which the collector alone frees
        del kept
        after = tracked()

    assert (with_two - before, after - before) == (3, 0)


def test_objects_that_a_few_calls_leave_are_no_leak_and_those_of_each_call_are() -> None:
    kept: list[object] = []
    calls = iter(range(100))

    def sometimes() -> None:
        if next(calls) < 5:  # as another thread does that works for a while
            kept.append([])

    with collected_apart():
        before = kinds()
        by_chance = least_rises(sometimes, lambda: (tracked(), len(kept)))
        always = least_rises(lambda: kept.append([]), lambda: (tracked(), len(kept)))
        new = kinds() - before

    assert (by_chance, always) == ([0, 0], [1, 1])
    assert new["builtins.list"] >= 5 + 15


def test_counting_gives_all_objects_back_to_the_collector() -> None:
    collecting = gc.isenabled()
    gc.unfreeze()  # which another test may have left frozen

    with collected_apart():
        assert not gc.isenabled()

    assert gc.isenabled() == collecting
    assert gc.get_freeze_count() == 0


def test_counting_leaves_frozen_what_was() -> None:
    gc.freeze()
    try:
        with collected_apart():
            pass

        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_numbers_and_arrays_that_hang_on_a_root_are_counted() -> None:
    root: list[object] = [object()]
    before = reachable([root])
    root.extend((1e9 + 1, torch.empty(3)))

    assert reachable([root]) - before >= 2


def test_a_function_is_followed_into_its_closure_and_not_into_its_module() -> None:
    held: list[float] = []

    def function() -> list[float]:
        return held

    before = reachable([function])
    held.extend((1e9 + 1, 1e9 + 2))

    assert reachable([function]) - before == 2
    assert before < 50


def test_lines_are_counted_and_the_trace_function_is_put_back() -> None:
    def loop(times: int) -> None:
        for _ in range(times):
            pass

    before = sys.gettrace()
    counts = [lines_of(lambda times=times: loop(times)) for times in (3, 3, 30)]  # type: ignore[misc]

    assert counts[0] == counts[1]
    assert counts[2] - counts[0] >= 27
    assert sys.gettrace() is before


def test_calls_that_tell_the_host_a_value_are_counted() -> None:
    tensor = torch.ones(2)
    with HostReads() as told:
        tensor.tolist()
        bool(tensor[0] > 0)
        tensor.to("cpu")
        tensor.to("cpu", non_blocking=True)
        tensor.to(torch.float16)
        tensor.to(tensor.device)

    # A device that is no word may be the tensor's own.
    assert dict(told.counts) == {"tolist": 1, "__bool__": 1, "to": 1}


def test_what_is_made_of_copies_on_the_host_tells_nothing_more() -> None:
    first, second = torch.ones(()), torch.zeros(())
    with HostReads() as told:
        flags = torch.stack([first.detach().to("cpu"), second.detach().to(device="cpu")])
        bool(flags.ne(0).any())
        (flags + torch.zeros(())).tolist()

    # The two copies, and a sum with a tensor that was not copied.
    assert dict(told.counts) == {"to": 2, "tolist": 1}
