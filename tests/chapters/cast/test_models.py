"""Composites whose kernel another library has: where that is switched off, their types are another kernel's."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.harness.catalogue import load
from conformance.harness.check import Case
from conformance.harness.endings import Unsupported


@pytest.fixture
def without_onednn() -> Iterator[None]:
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


@pytest.mark.usefixtures("without_onednn")
def test_an_lstm_without_onednn_is_unsupported() -> None:
    checks = importlib.import_module("conformance.chapters.cast.test_models")
    case = Case(load().contracts["AMP-CAST-065"], level="quick", seed=0, substitutions={})
    target: Any = SimpleNamespace(name="cpu", device_type="cpu", device=torch.device("cpu"), is_fake=False)
    composite = next(row.values[0] for row in checks._rows(("lstm",), "cpu"))
    with pytest.raises(Unsupported, match=r"switched off \(torch.backends.mkldnn.enabled\)"):
        checks.test_cpu_recurrent_nets(case, target, torch.bfloat16, composite, torch.Generator())
