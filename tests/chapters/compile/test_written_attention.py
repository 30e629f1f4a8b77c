"""Check that attention which is compiled in processes of its own is judged as here, and survives its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conformance.chapters.compile import written_attention
from conformance.chapters.compile.support import without_inductor
from conformance.chapters.compile.written_attention import ATTENTION, Compared, compared, compared_elsewhere
from conformance.measure.compilers import without_torch_compile

CPU = torch.device("cpu")
SEED = 5

pytestmark = pytest.mark.skipif(
    bool(without_torch_compile() or without_inductor()), reason="inductor compiles nothing here"
)


@pytest.fixture
def one_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Leave one name, as each takes a process that compiles."""
    monkeypatch.setattr(written_attention, "ATTENTION", {name: ATTENTION[name] for name in list(ATTENTION)[:1]})
    yield from list(ATTENTION)[:1]
    torch._dynamo.reset()


def test_other_process_compares_alike(one_name: str) -> None:
    assert list(compared_elsewhere(CPU, torch.bfloat16, SEED)) == list(compared([one_name], CPU, torch.bfloat16, SEED))


def test_process_that_ends_is_told(one_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_attention, "_send", _end)
    (found,) = compared_elsewhere(CPU, torch.bfloat16, SEED)
    assert found == Compared(
        one_name, error=found.error, limit=found.limit, raised="nothing, and its process ended with 9"
    )


def test_error_of_the_process_is_told(one_name: str) -> None:
    (found,) = compared_elsewhere(torch.device("cuda", 99), torch.bfloat16, SEED)
    assert "Error: " in (found.raised or ""), found


def _end(*_: Any) -> None:
    os._exit(9)
