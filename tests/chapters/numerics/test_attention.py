"""The check of attention by backend: which of them ran, which decline and which raise is told."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from conformance.chapters.numerics.bounds_attention import LowLogits
from conformance.harness import catalogue
from conformance.harness.check import Case
from conformance.harness.endings import ContractViolation
from conformance.harness.targets import resolve

LOW = LowLogits("float", 64, 64)


def _case() -> Case:
    contract = catalogue.load().contracts["AMP-NUMERICS-101"]
    return Case(contract, level="quick", seed=0, substitutions={}, amp_dtypes=(torch.bfloat16,))


def _judge(case: Case) -> None:
    checks = importlib.import_module("conformance.chapters.numerics.test_attention")
    checks.test_gradients_below_zero(case, resolve("cpu"), torch.Generator().manual_seed(0), LOW)


def _noted(case: Case) -> dict[str, Any]:
    return {each.name: each.measured for each in case.evidence if each.relation is None}


def test_backends_that_ran_are_named() -> None:
    case = _case()
    _judge(case)

    assert _noted(case)["backends that take these inputs"] == ["math", "flash"]


def _flash_only() -> bool:
    return not torch.backends.cuda.math_sdp_enabled()


def test_one_backend_that_raises_is_told_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    right, case = F.scaled_dot_product_attention, _case()

    def attend(*args: Any, **options: Any) -> torch.Tensor:
        if _flash_only() and torch.backends.cuda.flash_sdp_enabled():
            raise RuntimeError("the kernel could not be launched")
        return right(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    with pytest.raises(RuntimeError, match="could not be launched"):
        _judge(case)

    assert _noted(case) == {"backends that take these inputs": ["math"], "backends that raise": ["flash"]}


def test_no_backend_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    with pytest.raises(ContractViolation, match="a backend takes these inputs"):
        _judge(_case())
