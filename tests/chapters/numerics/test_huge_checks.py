"""The checks of tensors of more than 2^31 elements, with fewer: each holds, and fails where what is beyond is lost."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from conformance.chapters.numerics.huge_tensors import OPERATIONS, WIDTH
from conformance.harness import catalogue
from conformance.harness.check import Case
from conformance.harness.endings import ContractViolation, Untestable
from conformance.harness.targets import resolve
from conformance.measure import allocator
from tests.faults.breaking import replaced

FEW = 2**12
CPU = resolve("cpu")


def _run(name: str, limit: int = FEW) -> Case:
    dtypes = (torch.float16, torch.bfloat16)
    contract = catalogue.load().contracts["AMP-NUMERICS-102"]
    case = Case(contract, level="full", seed=0, substitutions={}, amp_dtypes=dtypes)
    importlib.import_module("conformance.chapters.numerics.test_huge").judge(case, CPU, name, limit)
    return case


def _cast() -> AbstractContextManager[None]:
    """A cast leaves zeros beyond."""
    right = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = right(self, *args, **kwargs)
        return made if made.numel() <= FEW else torch.cat([made[:FEW], torch.zeros_like(made[FEW:])])

    return replaced(torch.Tensor, "to", to)


def _within(name: str) -> AbstractContextManager[None]:
    """A function of tensors sees their first elements alone."""
    right = getattr(torch, name)

    def seeing(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return right([tensor[:FEW] if tensor.numel() > FEW else tensor for tensor in tensors], *args, **kwargs)

    return replaced(torch, name, seeing)


@contextlib.contextmanager
def _found_late() -> Iterator[None]:
    """The check for what is not finite sees the first elements alone; all are unscaled."""
    right = torch._amp_foreach_non_finite_check_and_unscale_

    def unscale(tensors: Any, found: torch.Tensor, factor: torch.Tensor) -> None:
        right([tensor[:FEW] for tensor in tensors], found, factor)
        for tensor in tensors:
            tensor[FEW:] *= factor

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale):
        yield


def _softmax() -> AbstractContextManager[None]:
    """The last row holds the result of the first of the others."""
    right = torch.softmax

    def softmax(rows: torch.Tensor, dim: int) -> torch.Tensor:
        made = right(rows, dim)
        made[-1] = made[1]
        return made

    return replaced(torch, "softmax", softmax)


def _embedding() -> AbstractContextManager[None]:
    """Rows beyond are those at the beginning."""
    right = F.embedding
    return replaced(F, "embedding", lambda index, table: right(index % (FEW // WIDTH + 1), table))


def _mm() -> AbstractContextManager[None]:
    """The last row of the result is the one before it."""
    right = torch.mm

    def mm(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        made = right(left, other)
        made[-1] = made[-2]
        return made

    return replaced(torch, "mm", mm)


FAULTS = {
    "cast": [_cast],
    "unscale": [lambda: _within("_amp_foreach_non_finite_check_and_unscale_"), _found_late],
    "norm": [lambda: _within("_foreach_norm"), lambda: _within("_foreach_mul_")],
    "softmax": [_softmax],
    "index": [_embedding],
    "matmul of a large operand": [_mm],
    "matmul with a large result": [_mm],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_check_holds(name: str) -> None:
    assert all(each.holds for each in _run(name).evidence)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, id=f"{name}-{number}")
        for name in OPERATIONS
        for number, fault in enumerate(FAULTS[name])
    ],
)
def test_the_check_fails_where_what_is_beyond_is_lost(name: str, fault: Any) -> None:
    with fault(), pytest.raises(ContractViolation):
        _run(name)


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:       24000000 kB\nMemAvailable:    9000000 kB\n")
    monkeypatch.setattr(allocator, "_MEMINFO", told)

    with pytest.raises(Untestable, match=r"14\.0 GiB of free memory are needed, 8\.6 are free"):
        _run("cast", 2**31)
    monkeypatch.setattr(allocator, "_MEMINFO", tmp_path / "none")
    with pytest.raises(Untestable, match="does not report its free memory"):
        _run("cast", 2**31)
