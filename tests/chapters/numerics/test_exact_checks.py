"""The exact checks that need another device or a faulty one: held on stand-ins for both."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conformance.chapters.numerics.tiled_matmul import checksums
from conformance.harness import catalogue
from conformance.harness.check import Case
from conformance.harness.endings import ContractViolation
from tests.faults.breaking import replaced


class Cuda:
    """A CPU that, inside a region, runs exp in fp32, as CUDA does, and rounds its result to `kept` before."""

    device = torch.device("cpu")

    def __init__(self, kept: torch.dtype = torch.float32) -> None:
        self._kept = kept

    @contextlib.contextmanager
    def autocast(self, dtype: torch.dtype) -> Iterator[None]:
        native = torch.exp
        with replaced(torch, "exp", lambda x: native(x.float()).to(self._kept).float()):
            yield


def _check(target: Any, dtype: torch.dtype) -> Case:
    case = Case(catalogue.load().contracts["AMP-NUMERICS-046"], level="quick", seed=0, substitutions={})
    checks = importlib.import_module("conformance.chapters.numerics.test_unary")
    checks.test_functions_of_the_fp32_list(case, target, dtype, "exp")
    return case


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_a_function_of_the_fp32_list_is_fp32_in_value(dtype: torch.dtype) -> None:
    assert all(each.holds for each in _check(Cuda(), dtype).evidence)
    with pytest.raises(ContractViolation, match="share of the results"):
        _check(Cuda(kept=dtype), dtype)


def _watch() -> Any:
    return importlib.import_module("conformance.chapters.numerics.test_watch").Watch()


def test_the_watch_says_where_a_bit_is_wrong_and_how_often() -> None:
    expected = torch.arange(20.0).view(4, 5).half()
    wrong = expected.clone()
    wrong.view(torch.int16)[2, 3] ^= 1 << 9
    watch = _watch()
    for seen in (expected, wrong, expected, wrong):
        watch.look("torch.mm", seen, expected, checksums(expected))

    assert watch.repeats == 4
    assert watch.elements == 80
    assert watch.verdict == (
        "2 elements in 2 of 4 repeats; "
        "first torch.mm, repeat 2, row 2, column 3: 0x4880 in place of 0x4A80 (bits 0x0200)"
    )


def test_the_watch_is_silent_where_nothing_is_wrong() -> None:
    expected = torch.ones(3, 3).half()
    watch = _watch()
    watch.look("copy", expected.clone(), expected, checksums(expected))
    assert watch.verdict == "none"
    watch.look("copy", expected.float(), expected, checksums(expected))
    assert watch.verdict.endswith("torch.float32 in place of torch.float16")
