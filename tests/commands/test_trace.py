"""`python -m conformance trace module:function`: what it prints, its exit status, and workloads that it cannot use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands.running import exit_status
from tests.paths import ROOT

_MODULE = """
import torch
from torch import nn

def build(device, factor=1.0, loss=nn.functional.mse_loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    with torch.no_grad():
        model[0].weight.mul_(factor)
    batches = [(torch.randn(8, 16, device=device), torch.randn(8, 1, device=device)) for _ in range(4)]
    return dict(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-5), loss=loss, batches=batches)

def large(device):
    return build(device, 1e6)

def steep(device):
    return build(device, 1.0, lambda output, target: (output.float() - target).pow(2).sum())

def broken(device):
    return [1, 2]

def raising(device):
    def loss(output, target):
        raise RuntimeError("no kernel for that")
    return build(device, 1.0, loss)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module of workloads in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("traced_models.py").write_text(_MODULE, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "traced_models", raising=False)
    return tmp_path


def _run(*words: str) -> int:
    return exit_status("trace", *words)


def test_a_run_that_stays_finite(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("traced_models:build", "--device", "cpu", "--steps", "3", "--scale", "1024") == 0

    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("trace of traced_models:build on cpu, autocast in fp16, 3 iterations loss: ")
    assert "loss scale: 1024 before the first, 1024 after the last, 0 of 3 iterations skipped" in out
    assert out.endswith("FINITE: no infinity or NaN reached a loss, a gradient or a weight.")


def test_a_run_that_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("traced_models:large", "--device", "cpu") == 1

    out = " ".join(capsys.readouterr().out.split())
    assert "first non-finite value: iteration 0, forward, module '0': _to_copy makes inf in" in out
    assert "(the same place in 20 iterations)" in out
    assert out.endswith("LOST: a loss is not finite, and no loss scale helps against that.")


def test_a_run_that_the_scaler_saves(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("traced_models:steep", "--device", "cpu", "--scale", "1048576") == 0

    out = " ".join(capsys.readouterr().out.split())
    assert "backward, outside the model: _to_copy in ToCopyBackward0 makes inf" in out
    assert "HANDLED: gradients overflowed, the scaler skipped these steps" in out


def test_a_file_may_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("traced_models.py:build", "--device", "cpu", "--steps", "1", "--scale", "1024") == 0

    assert capsys.readouterr().out.startswith("trace of traced_models.py:build on cpu")


def test_bf16_has_no_scaler(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("traced_models:build", "--device", "cpu", "--amp-dtype", "bf16", "--steps", "2") == 0

    out = capsys.readouterr().out
    assert "loss scale" not in out
    assert "autocast in bf16, 2 iterations" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["traced_models:buld"], "traced_models has no buld; did you mean build"),
        (["nowhere:build"], "nowhere cannot be imported"),
        (["traced_models:broken"], "the function returned a list; it must return a dict"),
        (["traced_models:raising"], "traced_models:raising: the run raised RuntimeError: no kernel for that"),
        (["traced_models:build", "--steps", "0"], "--steps 0: a run has at least one iteration"),
        (["traced_models:build", "--scale", "0"], "--scale 0: a loss scale is a positive number"),
        (["traced_models:build", "--scale", "nan"], "--scale nan: a loss scale is a positive number"),
        (["traced_models:build", "--device", "fake:cuda"], "fake:cuda computes nothing; name a real device"),
        (["traced_models:build", "--amp-dtype", "fp8"], "invalid choice: 'fp8'"),
        ([], "the following arguments are required: MODULE:FUNCTION"),
    ],
)
def test_what_cannot_be_used_gets_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*words) == 4

    assert said in capsys.readouterr().err


def test_example_of_the_docs_runs_as_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "trace.md").read_text(encoding="utf-8")
    module = page.split("```python\n")[1].split("```")[0]
    printed = page.split("```console\n$ python -m conformance trace ")[1].split("```")[0]
    words, shown = printed.split("\n", 1)
    (folder / "mine.py").write_text(module, encoding="utf-8")

    assert _run(*words.split()) == 1

    seen = capsys.readouterr().out.split()
    assert [word for word in shown.split() if word.isalpha()] == [word for word in seen if word.isalpha()]
