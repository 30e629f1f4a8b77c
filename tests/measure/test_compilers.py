"""A compiler that is switched off leaves its cases untestable, with the reason: they would judge eager, or fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch._dynamo.config

from conformance.measure import compilers
from tests.conftest import run_of
from tests.faults import Fault
from tests.faults.campaigns.campaign import run


def _verdicts(*contracts: str) -> set[tuple[str, str]]:
    outcome = run(Fault("nothing", "Nothing is broken.", contracts, lambda: iter([None])))
    return {(case["verdict"], case["reason"]) for case in outcome.cases}


def test_switched_on() -> None:
    assert compilers.without_torch_compile() is None
    assert compilers.without_torchscript() is None
    assert {verdict for verdict, _ in _verdicts("AMP-COMPILE-010", "AMP-REGION-059")} == {"PASS"}


def test_torch_compile_is_switched_off_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")

    ((verdict, reason),) = _verdicts("AMP-COMPILE-010")

    assert verdict == "UNTESTABLE"
    assert reason.startswith("torch.compile is switched off")


def test_torch_compile_is_switched_off_by_its_configuration() -> None:
    with torch._dynamo.config.patch(disable=True):
        assert "switched off" in str(compilers.without_torch_compile())


def test_torchscript_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.jit._state._enabled, "enabled", False)

    assert _verdicts("AMP-REGION-059") == {("UNTESTABLE", "TorchScript is switched off (PYTORCH_JIT)")}


def test_where_the_locale_has_ascii_alone_nothing_fails(root: Path, tmp_path: Path) -> None:
    """torch 2.13 reads the templates of inductor, which are UTF-8, in the encoding of the locale."""
    ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = ("pytest", "conformance", "-n", "0", "--contract", "AMP-COMPILE-001")

    outcome = run_of(root, tmp_path, command, ascii)

    found = {(case["verdict"], case["reason"].rpartition("; ")[2]) for case in outcome.report["cases"]}
    assert found in ({("PASS", "")}, {("UNTESTABLE", "set PYTHONUTF8=1")}), outcome.output
