"""The cast trace: it sees each cast once, by argument, and asks no hardware for fake tensors."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from conformance.oracles.trace.casts import Cast, arguments, expected_casts, traced_casts
from conformance.oracles.trace.ops import OpTrace


def trace(call: partial[torch.Tensor]) -> list[Cast]:
    with torch.autocast("cpu", dtype=torch.bfloat16), OpTrace() as seen:
        call()
    return traced_casts(seen, call)


def test_arguments_are_named_by_their_place() -> None:
    a, b, c = torch.ones(2, 2), torch.ones(2, 2), torch.ones(2)
    call = partial(F.linear, [a, b], 3.0, bias=c)
    assert [(path, tensor is wanted) for (path, tensor), wanted in zip(arguments(call), (a, b, c), strict=True)] == [
        ("0[0]", True),
        ("0[1]", True),
        ("bias", True),
    ]


def test_each_cast_is_seen_once() -> None:
    call = partial(F.linear, torch.ones(3, 4), torch.ones(5, 4), torch.ones(5))
    assert sorted(map(str, trace(call))) == sorted(map(str, expected_casts(call, torch.bfloat16)))
    assert [str(cast) for cast in expected_casts(call, torch.bfloat16)] == [
        "0: float32 to bfloat16",
        "1: float32 to bfloat16",
        "2: float32 to bfloat16",
    ]


def test_a_call_that_casts_twice_shows_both() -> None:
    x = torch.ones(2, 2)
    seen = trace(partial(lambda tensor: tensor.bfloat16() + tensor.bfloat16(), x))
    assert [str(cast) for cast in seen] == ["0: float32 to bfloat16"] * 2


def test_a_cast_of_an_intermediate_has_no_argument() -> None:
    seen = trace(partial(lambda tensor: (tensor + 1).double(), torch.ones(2)))
    assert [str(cast) for cast in seen] == ["an intermediate: float32 to float64"]


def test_a_cast_that_loses_the_layout_says_so() -> None:
    x = torch.ones(3, 4).t()
    kept = trace(partial(lambda tensor: tensor.bfloat16(), x))
    lost = trace(partial(lambda tensor: tensor.to(torch.bfloat16, memory_format=torch.contiguous_format), x))
    assert ([cast.kept_layout for cast in kept], [cast.kept_layout for cast in lost]) == ([True], [False])


def test_copies_that_keep_the_type_are_no_casts() -> None:
    assert trace(partial(lambda tensor: tensor.clone().to("cpu", copy=True), torch.ones(2))) == []


def test_float64_and_integers_are_not_eligible() -> None:
    call = partial(torch.stack, [torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)])
    assert expected_casts(call, torch.float16) == []


# With CUDA initialised as far as torch knows, which holds for the rest of the process, kernels of CUDA are missed.
INITIALISED = """
import contextlib, torch
torch.cuda._lazy_init = lambda: None
with contextlib.suppress(NotImplementedError, RuntimeError):
    torch.empty(1, device="cuda")
"""
TRACED = """
from functools import partial
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from conformance.oracles.trace.ops import OpTrace
with FakeTensorMode():
    shapes = ((2, 4), (2, 3), (9, 4), (9, 3), (9,), (9,))
    call = partial(torch.gru_cell, *(torch.empty(shape, device="cuda") for shape in shapes))
    with OpTrace():
        hidden = call()
assert (hidden.shape, hidden.dtype, hidden.device.type) == ((2, 3), torch.float32, "cuda")
"""


@pytest.mark.parametrize("before", ["", INITIALISED], ids=["new-process", "initialised"])
def test_fake_kernels_that_ask_the_driver_are_replaced(before: str, root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", before + TRACED], cwd=root, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr[-2000:]
