"""The entries of torch.backends in a report: all that this torch has, without an import, whatever they raise."""

from __future__ import annotations

import pkgutil
import sys
import types

import pytest
import torch

from conformance.harness.torch_backends import torch_backends
from tests.conftest import Toy


def test_each_entry_of_this_torch_is_named_and_nothing_is_imported() -> None:
    there = {found.name for found in pkgutil.iter_modules(torch.backends.__path__) if not found.name.startswith("_")}
    before = set(sys.modules)

    found = torch_backends()

    assert set(found) == there
    assert set(sys.modules) == before
    assert found["mkl"] == {"is_available": torch.backends.mkl.is_available()}
    assert found["quantized"]["engine"] == torch.backends.quantized.engine
    assert all(found[name] for name in ("openmp", "nnpack", "cusparselt"))


def test_settings_among_the_flags_are_not_repeated() -> None:
    assert "allow_tf32" not in torch_backends()["cudnn"]
    assert "is_available" in torch_backends()["cudnn"]


def _entry(**functions: object) -> types.ModuleType:
    module = types.ModuleType("vendor.backends.npu")
    vars(module).update(functions)
    return module


def test_entry_of_a_third_party_that_raises_is_named_with_its_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def version() -> int:
        raise OSError("libnpu.so")

    entry = _entry(version=version, is_available=lambda: True, is_on=lambda name: name, kernels=["mm", "bmm"], LIMIT=3)
    monkeypatch.setitem(vars(torch.backends), "npu", entry)

    assert torch_backends()["npu"] == {"is_available": True, "kernels": "mm, bmm", "version": "raises OSError"}


def test_header_of_a_report_has_them(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(torch.backends), "npu", _entry(is_available=lambda: False))
    toy.contract("AMP-API-001")
    toy.checks("@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.equal('x', 1, 1)\n")

    outcome = toy.run()

    assert outcome.report["header"]["torch_backends"]["npu"] == {"is_available": False}
    assert "mkl" in outcome.report["header"]["torch_backends"]
