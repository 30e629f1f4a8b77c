"""The lines of Python that a backend's modules run without AMP are not those of AMP; a region's are."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.harness import targets
from conformance.harness.catalogue import load
from conformance.harness.check import Case
from conformance.harness.endings import ContractViolation

_CPU = targets.resolve("cpu")


def _judged() -> None:
    check = importlib.import_module("conformance.chapters.speed.test_host").test_the_host_does_no_more_from_call_to_call
    case = Case(
        load().contracts["AMP-SPEED-054"], level="quick", seed=0, substitutions={}, amp_dtypes=(torch.bfloat16,)
    )
    check(case, _CPU)


def _slow(function: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*args: Any, **keywords: Any) -> Any:
        for _ in range(15_000):
            pass
        return function(*args, **keywords)

    return slow


def test_modules_that_run_in_python_outside_of_regions_too_are_no_work_of_amp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.MultiheadAttention, "forward", _slow(torch.nn.MultiheadAttention.forward))

    _judged()


def test_lines_of_a_region_are_work_of_amp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autocast, "__enter__", _slow(torch.autocast.__enter__))

    with pytest.raises(ContractViolation, match="lines of Python that AMP adds"):
        _judged()
