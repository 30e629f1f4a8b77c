"""Mutants of torch's AMP sources: made, put in place and taken away as told, and a sample of them is caught."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.faults.campaigns import mutation
from tests.faults.campaigns.mutants import Mutant, mutants
from tests.faults.campaigns.mutation import Outcome, equivalent, every, sample, wrong
from tests.paths import ROOT

WHOLE = every()


def _one(pattern: str) -> Mutant:
    (found,) = (mutant for mutant in WHOLE if pattern in str(mutant))
    return found


def test_sample_is_caught_or_listed(tmp_path: Path) -> None:
    """With one that is listed as equivalent: every check of its chapters is run on it.

    In a process of its own: what a fork needs may have been used by the tests before, such as a pool of threads.
    """
    page = tmp_path / "mutants.md"
    chosen = sample(WHOLE, 6)
    listed = [mutant for mutant in chosen if equivalent(mutant)]
    names = [f"--only={mutant}" for mutant in chosen if mutant not in listed[1:]]

    command = [sys.executable, "-m", "tests.faults.campaigns.mutation", "--workers", "1", "-o", str(page), *names]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{7 - len(listed)} mutants" in page.read_text()


def test_mutants_of_another_module_are_judged_by_the_chapters_named() -> None:
    only = "torch.optim.swa_utils.SWALR._linear_anneal: result: return t -> return None"
    options = ["--module=torch.optim.swa_utils", "--home=optimizer", "--level=quick", "--workers=1", f"--only={only}"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.campaigns.mutation", *options],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"AMP-OPTIMIZER-131 at quick: line {_line_of(only)}: {only}" in done.stderr


def _line_of(name: str) -> int:
    return next(mutant.line for mutant in every(["torch.optim.swa_utils"]) if str(mutant) == name)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--module", "torch.optim.sgd"], "--home has to name the chapters that speak of torch.optim.sgd"),
        (["--module", "torch.nothing", "--home", "optimizer"], "there is no module torch.nothing"),
    ],
)
def test_modules_that_cannot_be_judged_are_refused(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        mutation.main(options)

    assert complaint in capsys.readouterr().err


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(map(str, WHOLE)).items() if count > 1] == []


def test_sample_is_the_same_each_time() -> None:
    assert sample(WHOLE, 20) == sample(every(), 20)


def test_mutant_breaks_torch_and_puts_it_back() -> None:
    mutant = _one("grad_scaler.GradScaler.is_enabled: result")
    scaler = torch.amp.GradScaler("cpu")

    with mutant.applied():
        assert scaler.is_enabled() is None
    assert scaler.is_enabled() is True


def test_wrapped_functions_are_reached() -> None:
    mutant = _one("clip_grad.clip_grad_value_: statement: clip_value = float(clip_value) -> nothing")
    before = inspect.unwrap(torch.nn.utils.clip_grad_value_).__code__

    with mutant.applied():
        assert inspect.unwrap(torch.nn.utils.clip_grad_value_).__code__ is not before
    assert inspect.unwrap(torch.nn.utils.clip_grad_value_).__code__ is before


def test_defaults_are_reached() -> None:
    mutant = _one("torch.amp.grad_scaler.GradScaler.__init__: constant: 2000 -> 2001")

    with mutant.applied():
        assert torch.amp.GradScaler("cpu").get_growth_interval() == 2001
    assert torch.amp.GradScaler("cpu").get_growth_interval() == 2000


def test_mutants_compile_and_are_taken_away() -> None:
    before = str(mutants("torch.amp.grad_scaler")[0])
    codes = {name: function.__code__ for name, function in inspect.getmembers(torch.amp.GradScaler, inspect.isfunction)}

    for mutant in sample(WHOLE, 60, seed=1):
        with mutant.applied():
            pass

    assert str(mutants("torch.amp.grad_scaler")[0]) == before
    assert codes == {
        name: function.__code__ for name, function in inspect.getmembers(torch.amp.GradScaler, inspect.isfunction)
    }


@pytest.mark.parametrize("number", range(len(mutation._rows())))
def test_every_row_of_equivalents_excuses_a_mutant(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    row = mutation._rows()[number]
    for pattern in row["mutants"]:
        monkeypatch.setattr(mutation, "_rows", lambda pattern=pattern: [{**row, "mutants": [pattern]}])
        assert any(equivalent(mutant) for mutant in WHOLE), pattern


def test_survivor_is_told() -> None:
    mutant = _one("grad_scaler.GradScaler.is_enabled: result")

    (complaint,) = wrong([Outcome(mutant, None, None)])

    assert complaint.startswith("SURVIVED line ")


def test_hang_is_no_contract() -> None:
    mutant = _one("grad_scaler.GradScaler.is_enabled: result")

    (complaint,) = wrong([Outcome(mutant, "(hangs)", "quick")])

    assert complaint.startswith("NO CONTRACT, (hangs)")


def test_equivalent_that_is_caught_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = _one("grad_scaler.GradScaler.is_enabled: result")
    monkeypatch.setattr(mutation, "_rows", lambda: [{"function": "*", "mutants": ["*"], "reason": "none"}])

    (complaint,) = wrong([Outcome(mutant, "AMP-SCALE-001", "quick")])

    assert complaint.startswith("LISTED as equivalent, yet caught by AMP-SCALE-001")
