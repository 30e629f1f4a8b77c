"""The model of the weight cache says what written-out programs cast, and torch beside it differs where it is broken."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch

from conformance.chapters.cache.cache_model import LOW, CacheModel, Setting, Step, WeightSpec, random_steps, simpler
from conformance.chapters.cache.cache_runner import CachePlayer
from tests.faults.breaking import kernel

HALF, BRAIN = torch.float16, torch.bfloat16
ENTER, LEAVE, USE = Step("enter"), Step("leave"), Step("use")
# Those of a CPU's lists.
FUNCTIONS = ("linear", "mse_loss", "cat")


def opened(given: Setting) -> Any:
    return torch.autocast("xpu" if given.elsewhere else "cpu", given.dtype, given.enabled, given.cache_enabled)


def player(*kinds: WeightSpec) -> CachePlayer:
    return CachePlayer(torch.device("cpu"), opened, kinds or (WeightSpec(),))


def casts(steps: list[Step], *kinds: WeightSpec) -> list[str]:
    """The casts of the weights that the model predicts, a string for each use."""
    model = CacheModel(kinds or (WeightSpec(),))
    uses = [use for step in steps if model.legal(step) and (use := model.take(step)) is not None]
    return [" ".join(name for name, dtype in use.casts if name != "x") for use in uses]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([USE, ENTER, USE, USE, LEAVE, ENTER, USE], ["", "w0", "", "w0"]),
        ([ENTER, ENTER, USE, LEAVE, USE, LEAVE, ENTER, USE], ["w0", "", "w0"]),
        ([ENTER, USE, Step("freeze"), USE, Step("freeze", choice=1), USE], ["w0", "w0", ""]),
        ([ENTER, USE, Step("update"), USE, Step("clear"), USE], ["w0", "", "w0"]),
        ([ENTER, Step("use", form="t()"), Step("use", form="t()")], ["w0.t()", "w0.t()"]),
        ([ENTER, USE, Step("retype", choice=2), USE, Step("retype"), USE], ["w0", "", ""]),
        ([ENTER, USE, Step("replace"), USE, Step("raise"), USE], ["w0", "w0", ""]),
        ([Step("enter", setting=Setting(BRAIN, cache_enabled=False)), USE, USE], ["w0", "w0"]),
        ([Step("enter", setting=Setting(BRAIN, elsewhere=True)), USE, ENTER, USE, LEAVE, ENTER, USE], ["", "w0", ""]),
        ([ENTER, Step("mode", choice=1), USE, LEAVE, USE], ["w0", ""]),
        ([ENTER, Step("mode", choice=2), USE, LEAVE, USE, Step("mode", choice=2), USE], ["w0", "w0", "w0"]),
    ],
)
def test_what_is_cast(steps: list[Step], expected: list[str]) -> None:
    assert casts(steps) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (WeightSpec(parameter=True), ["w0", ""]),
        (WeightSpec(requires_grad=False), ["w0", "w0"]),
        (WeightSpec(view=True), ["w0", "w0"]),
        (WeightSpec(HALF), ["w0", "w0"]),
        (WeightSpec(BRAIN), ["", ""]),
        (WeightSpec(torch.float64), ["", ""]),
    ],
)
def test_what_is_kept(kind: WeightSpec, expected: list[str]) -> None:
    assert casts([ENTER, USE, USE], kind) == expected
    assert player(kind).mismatch([ENTER, USE, USE]) is None


def test_one_cast_in_regions_of_two_types_is_left_to_its_own_contract() -> None:
    model = CacheModel((WeightSpec(),))
    for step in (ENTER, USE, Step("enter", setting=Setting(HALF))):
        model.take(step)

    assert not model.legal(USE)
    assert model.legal(Step("use", form="t()"))
    assert model.legal(Step("use", function="mse_loss"))


def test_results_are_of_the_numbers_that_were_cast() -> None:
    steps = [ENTER, USE, Step("update"), USE, LEAVE, ENTER, USE]
    model = CacheModel((WeightSpec(),))
    uses = [use for step in steps if (use := model.take(step)) is not None]

    assert [use.content for use in uses] == [0, 0, 1]
    assert player().mismatch(steps) is None


@pytest.mark.parametrize("change", range(4))
def test_every_update_changes_the_numbers(change: int) -> None:
    assert player().mismatch([ENTER, USE, LEAVE, Step("update", choice=change), ENTER, USE]) is None


def test_a_program_can_be_read_and_run() -> None:
    script = player().script([LEAVE, ENTER, USE, Step("use", form="t()"), LEAVE, Step("clear")])
    other = "torch.ones(4, 4, device='cpu', dtype=torch.float32)"

    assert script.splitlines() == [
        "import torch",
        "from torch.nn.functional import linear, mse_loss",
        "w0 = torch.ones(4, 4, device='cpu', dtype=torch.float32).requires_grad_(True)",
        "with torch.autocast('cpu', dtype=torch.bfloat16, enabled=True):",
        f"    linear({other}, w0)  # casts w0 to bfloat16, x to bfloat16",
        f"    linear({other}, w0.t())  # casts w0.t() to bfloat16, x to bfloat16",
        "torch.clear_autocast_cache()",
    ]
    exec(script, {})


@pytest.mark.parametrize("seed", range(20))
def test_every_script_runs(seed: int) -> None:
    kinds = (WeightSpec(), WeightSpec(parameter=True), WeightSpec(view=True), WeightSpec(HALF))
    steps = random_steps(random.Random(seed), len(kinds), FUNCTIONS, LOW)

    exec(player(*kinds).script([step for step in steps if step.op != "retype"]), {})


def test_a_cast_too_many_departs() -> None:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.ops.aten.linear(x.bfloat16(), weight.bfloat16(), bias)

    with kernel("linear", run, "AutocastCPU"):
        found = player().mismatch([ENTER, USE, USE])

    assert found is not None
    assert "w0): casts to [] are held" in found


def test_a_cast_that_is_kept_too_long_departs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    found = player().mismatch([ENTER, USE])
    monkeypatch.undo()
    torch.clear_autocast_cache()

    assert found == "after the last region: casts to [torch.bfloat16] are held, not to []"


def test_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", None)
    with contextlib.suppress(RuntimeError):
        player().mismatch([ENTER, Step("mode", choice=2), ENTER])

    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_inference_mode_enabled()


def test_drawn_programs_are_repeated_and_their_simpler_steps_end() -> None:
    steps = random_steps(random.Random(0), 3, FUNCTIONS, LOW, modes=True)

    assert steps == random_steps(random.Random(0), 3, FUNCTIONS, LOW, modes=True)
    assert steps[0].op == "enter"
    assert all(other != step for step in steps for other in simpler(step))
