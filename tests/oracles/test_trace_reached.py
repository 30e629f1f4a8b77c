"""The ops that a program reaches are seen by name, also within others, but not within those that hide theirs."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from conformance.oracles.trace.reached import reached, reached_in_regions

REGION = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


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


def test_only_ops_in_regions_of_the_device_type_count() -> None:
    x = torch.ones(2)
    with reached_in_regions(("exp", "log", "sin", "cos", "tan", "abs"), (), "cpu") as ops:
        x.exp()
        with REGION():
            x.log()
            with REGION(enabled=False):
                x.sin()
            x.cos()
        with torch.autocast("xpu", dtype=torch.bfloat16):
            x.tan()
        x.abs()

    assert ops == {"log", "cos"}


def test_setters_open_regions_too() -> None:
    with reached_in_regions(("exp", "log"), (), "cpu") as ops:
        torch.set_autocast_enabled("cpu", True)
        torch.ones(2).exp()
        torch.set_autocast_enabled("cpu", False)
        torch.ones(2).log()

    assert ops == {"exp"}


def test_region_that_an_exception_leaves_is_closed() -> None:
    with pytest.raises(ZeroDivisionError), reached_in_regions(("exp", "log"), (), "cpu") as ops:
        with contextlib.suppress(ValueError), REGION():
            torch.ones(2).exp()
            raise ValueError
        torch.ones(2).log()
        raise ZeroDivisionError

    assert ops == {"exp"}


def test_ops_are_observed_outside_of_regions_within_a_block_that_waits_for_them() -> None:
    with reached_in_regions(("exp",), (), "cpu") as ops:
        with reached(("exp",), ()) as inner:
            torch.ones(2).exp()
        with REGION(), reached(("exp",), ()) as within:
            torch.ones(2).exp()

    assert (inner, within, ops) == ({"exp"}, set(), {"exp"})


def test_setter_is_put_back_and_the_compiler_sees_through_what_stood_in_for_it() -> None:
    setter = torch.set_autocast_enabled

    def switch(x: torch.Tensor) -> torch.Tensor:
        torch.set_autocast_enabled("cpu", True)
        y = x @ x
        torch.set_autocast_enabled("cpu", False)
        return y

    compiled = partial(torch.compile, switch, backend="eager", fullgraph=True)
    try:
        compiled()(torch.ones(2, 2))
    except torch._dynamo.exc.Unsupported:
        pytest.skip("the compiler of this torch does not take the setter")
    torch._dynamo.reset()
    with reached_in_regions(("mm",), (), "cpu"):
        assert compiled()(torch.ones(2, 2)).dtype is torch.bfloat16

    assert torch.set_autocast_enabled is setter


def test_parameters_that_are_swapped_outside_of_regions_are_not_held() -> None:
    layer = torch.nn.Linear(2, 2)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with reached_in_regions(("exp",), (), "cpu"):
            layer.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)

    assert layer.weight.dtype is torch.bfloat16
