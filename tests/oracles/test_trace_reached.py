"""The ops that a program reaches are seen by name, also within others, but not within those that hide theirs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional as F

from conformance.oracles.trace.reached import reached


def test_ops_within_others_are_seen() -> None:
    with reached(("mm", "matmul", "linear", "exp"), ()) as ops:
        torch.ones(2, 2) @ torch.ones(2, 2)

    assert ops == {"matmul", "mm"}


def test_ops_within_those_that_hide_theirs_are_not() -> None:
    x = torch.ones(2, 2)
    with reached(("mm", "addmm", "t", "exp"), ("linear",)) as ops:
        F.linear(x, x, x[0])
        x.exp()

    assert ops == {"exp"}


def test_ops_of_backward_are_seen() -> None:
    x = torch.ones(2, requires_grad=True)
    with reached(("sigmoid_backward",), ()) as ops:
        x.sigmoid().sum().backward()

    assert ops == {"sigmoid_backward"}


def observes_all_threads() -> bool:
    return "profile_all_threads" in str(torch._C._profiler._ExperimentalConfig.__init__.__doc__)


@pytest.mark.skipif(not observes_all_threads(), reason="this torch observes the thread that asks alone")
def test_ops_of_other_threads_are_seen_and_hide_those_of_their_own() -> None:
    x = torch.ones(2, 2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(x.sum).result()  # a thread from before
        with reached(("mm", "exp"), ("linear",)) as ops:
            pool.submit(F.linear, x, x).result()
            pool.submit(torch.exp, x).result()

    assert ops == {"exp"}


def test_tensors_in_lists_are_seen() -> None:
    with reached(("cat", "stack"), ()) as ops:
        torch.cat([torch.ones(2), torch.ones(2)])

    assert ops == {"cat"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_what_autocast_leaves_alone_is_left_out(dtype: torch.dtype) -> None:
    with reached(("sum",), ()) as ops:
        torch.ones(2, dtype=dtype).sum()

    assert ops == set()


def test_exceptions_pass_and_what_was_reached_before_is_seen() -> None:
    with pytest.raises(ZeroDivisionError), reached(("exp",), ()) as ops:
        torch.ones(2).exp()
        raise ZeroDivisionError

    assert ops == {"exp"}


def test_inner_observer_leaves_all_to_the_outer_one() -> None:
    with reached(("exp", "log"), ()) as outer:
        with reached(("exp",), ()) as inner:
            torch.ones(2).exp()
        torch.ones(2).log()

    assert (inner, outer) == (set(), {"exp", "log"})
