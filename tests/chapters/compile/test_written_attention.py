"""Check that attention which is compiled in processes of its own is judged as here, and survives its end."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from conformance.chapters.compile import written_attention
from conformance.chapters.compile.support import without_inductor
from conformance.chapters.compile.written_attention import ATTENTION, compared, compared_elsewhere
from conformance.measure.compilers import without_torch_compile

CPU = torch.device("cpu")
SEED = 5
NAMES = list(ATTENTION)[-2:]

pytestmark = pytest.mark.skipif(
    bool(without_torch_compile() or without_inductor()), reason="inductor compiles nothing here"
)


def test_other_process_compares_alike() -> None:
    expected = list(compared(NAMES, CPU, torch.bfloat16, SEED))
    torch._dynamo.reset()
    assert compared_elsewhere(NAMES, CPU, torch.bfloat16, SEED) == expected


def test_process_that_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_attention, "_send", _end)
    found = compared_elsewhere(NAMES, CPU, torch.bfloat16, SEED)
    assert [each.raised for each in found] == ["nothing, and its process ended with 9"] * len(NAMES)


def test_error_of_the_process_is_told() -> None:
    found = compared_elsewhere(NAMES, torch.device("cuda", 99), torch.bfloat16, SEED)
    assert [each.name for each in found] == NAMES
    assert all("Error: " in (each.raised or "") for each in found), found


def _end(*_: Any) -> None:
    os._exit(9)
