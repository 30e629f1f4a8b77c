"""--time-limit: what is estimated, what is left out, and what is said where the time does not suffice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.chapters.parity import test_user_workload as parity
from conformance.harness import catalogue, endings, measuring, time_limit
from conformance.harness.time_limit import TimeLimit
from conformance.workloads import user_workload
from tests.workloads import example
from tests.workloads.conftest import Runner

_SLOW = (
    ("import torch\n", "import time\n\nimport torch\n"),
    (
        '"loss": torch.nn.functional.cross_entropy',
        '"loss": lambda o, t: (time.sleep(0.02), torch.nn.functional.cross_entropy(o, t))[1]',
    ),
)
_PARITY = "AMP-PARITY-050"
_SLOW_START = """
import time

import torch

builds = 0
steps = 0


def build(device):
    global builds
    builds += 1
    model = torch.nn.Linear(4, 2)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": loss,
        "batches": [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(2)],
    }


def loss(output, target):
    global steps
    steps += 1
    time.sleep(0.5 if steps == 1 else 0.0)
    return torch.nn.functional.mse_loss(output, target)
"""


def _reasons(report: dict[str, Any], verdict: str) -> list[str]:
    return [case["reason"] for case in report["cases"] if case["verdict"] == verdict]


def test_what_does_not_fit_says_what_it_takes(runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    report = runner.run(*_SLOW, contract=_PARITY, arguments=("--time-limit", "2"))

    reasons = _reasons(report, "INCONCLUSIVE")
    assert len(reasons) == len(report["cases"]) == 2
    for reason in reasons:
        said = re.fullmatch(
            r"the smallest test, 8 pairs of 10 steps, needs about \d+ (?:s|min); --time-limit (\d+)", reason
        )
        assert said, reason
        # Two cases, each of 160 steps of 20 ms at least.
        assert 6 <= int(said[1]) <= 200
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"workload: mine.py:build on cpu: a step takes .*s in fp32, .*s in float16", printed), printed
    assert re.search(r"at --level quick, of a limit of 2 s, --time-limit \d+ for all; fewer seeds and steps", printed)


def test_fewer_steps_and_runs_are_taken_where_time_is_short(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_workload.Pace, "run", lambda pace, steps: float(steps))

    report = runner.run(contract=_PARITY, arguments=("--time-limit", "400", "--amp-dtype", "bf16"))

    rows = {row["name"]: row["measured"] for case in report["cases"] for row in case["evidence"]}
    assert rows["the time limit leaves fewer steps or runs than the level has, steps and most pairs"] == [20, 8]
    assert len(rows["fall of the loss within 20 steps, fp32, by seed"]) == 8


def test_estimate_that_is_wrong_ends_the_case_in_time(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_workload.Pace, "run", lambda pace, steps: 0.0)

    report = runner.run(*_SLOW, contract=_PARITY, arguments=("--time-limit", "2", "--amp-dtype", "bf16"))

    (reason,) = _reasons(report, "INCONCLUSIVE")
    assert re.fullmatch(r"after \d of 24 runs no time is left: all needs about \d+ s; --time-limit \d+", reason), reason


def test_progress_names_run_seed_and_step(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measuring, "_SPARSE", 0.0)

    runner.run(contract=_PARITY, arguments=("--amp-dtype", "bf16"))

    printed = capsys.readouterr().out
    assert f"{_PARITY}: run 2 of at most 24, in fp32, seed 1, step 40 of 40" in printed
    assert re.search(rf"{_PARITY}: run 1\d of at most 24, in bf16, seed 0, step 1 of 40", printed)


def test_function_that_seeds_itself_is_told_at_once(runner: Runner) -> None:
    report = runner.run(("def build(device):\n", "def build(device):\n    torch.manual_seed(3)\n"), contract=_PARITY)

    assert all(reason.startswith("two seeds give the same weights") for reason in _reasons(report, "INCONCLUSIVE"))
    assert len(_reasons(report, "INCONCLUSIVE")) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--time-limit", "0"), "--time-limit: '0' is not a number of seconds from 1"),
        (("--time-limit", "soon"), "--time-limit: 'soon' is not a number of seconds"),
    ],
)
def test_other_words_are_refused(arguments: tuple[str, ...], said: str, pytester: pytest.Pytester) -> None:
    example.written(pytester.path)
    result = pytester.runpytest_inprocess(
        "-p", "conformance.harness.plugin", "--workload", "mine.py:build", "--device", "cpu", *arguments
    )

    assert result.ret == 4
    assert said in "\n".join(result.outlines + result.errlines)


def test_without_a_workload_it_is_refused(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("-p", "conformance.harness.plugin", "--time-limit", "60")

    assert result.ret == 4
    assert "add --workload" in "\n".join(result.outlines + result.errlines)


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_a_case_leaves_goes_to_those_that_follow() -> None:
    clock, contract = _Clock(), catalogue.load().contracts[_PARITY]
    limit = TimeLimit(100.0, clock)
    limit.plan([10, 30, 60])

    assert limit.begin(contract, 10, 1.0) == pytest.approx(10.0)
    clock.now = 1.0
    assert limit.begin(contract, 30, 1.0) == pytest.approx(1.0 + 99.0 * 30 / 90)
    # Of 90 steps that were left when it began, 30 were its own.
    assert limit.words(60.0) == "needs about 60 s; --time-limit 190"
    clock.now = 200.0
    with pytest.raises(
        endings.Inconclusive, match="100 s of --time-limit were spent before; the whole needs about 4 min"
    ):
        limit.begin(contract, 60, 1.0)


def test_a_limit_that_is_said_suffices() -> None:
    clock, contract = _Clock(), catalogue.load().contracts[_PARITY]

    def room(seconds: float) -> float:
        limit = TimeLimit(seconds, clock)
        limit.plan([160, 160, 40])
        return limit.begin(contract, 160, 1.0) - clock.now

    limit = TimeLimit(10.0, clock)
    limit.plan([160, 160, 40])
    limit.begin(contract, 160, 1.0)
    said = int(limit.words(320.0).rpartition(" ")[2])
    assert room(said) >= 320.0 > room(said - 20)


@pytest.mark.parametrize(("seconds", "rounded"), [(7.0, 10), (101.0, 110), (2399.0, 2400), (12345.0, 13000)])
def test_limits_are_rounded_up(seconds: float, rounded: int) -> None:
    assert time_limit.round_up(seconds) == rounded


@pytest.mark.parametrize(("seconds", "builds"), [(60.0, 2), (0.0, 1)])
def test_a_slow_first_step_is_not_timed_again_where_the_time_is_over(
    tmp_path: Path, seconds: float, builds: int
) -> None:
    (tmp_path / "slow_start.py").write_text(_SLOW_START)
    function = user_workload.load("slow_start.py:build", tmp_path)
    builder = user_workload.Builder("slow_start.py:build", function)

    assert builder.raises(torch.device("cpu"), torch.bfloat16, seconds) == ""
    assert function.__globals__["builds"] == builds


def test_pace_of_a_run() -> None:
    pace = user_workload.Pace(build=5.0, first=3.0, step=1.0)

    assert pace.run(10) == 17.0
    assert parity.LEAST.seconds(pace, pace) == 16 * 17.0
