"""Runs without some of pytest's own plugins, with those of others, and under what fixtures set."""

from __future__ import annotations

import pytest

from tests.conftest import Toy

_HOLDS = """
@contract("AMP-API-001")
@pytest.mark.filterwarnings("ignore:nothing")
def test_a(case: Case) -> None:
    case.equal("x", 1, 1)
"""
_FAILS = """
@contract("AMP-API-001")
def test_a(case: Case) -> None:
    {}
    case.equal("type of a new tensor", torch.ones(1).dtype, torch.float32)
"""


@pytest.mark.parametrize("plugin", ["logging", "debugging", "capture", "warnings"])
def test_run_without_a_plugin_of_pytest(toy: Toy, plugin: str) -> None:
    toy.contract("AMP-API-001")
    toy.checks("import pytest\n" + _HOLDS)

    outcome = toy.spawn("", "-p", f"no:{plugin}")

    assert (outcome.status, outcome.verdicts()) == (0, {"AMP-API-001[a]": "PASS"})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-p", "no:skipping"), "-p no:skipping takes away how waivers are shown"),
        (("--report", ""), "--report: the name of the folder is empty"),
        (("--device", "meta"), "'meta' computes nothing"),
    ],
)
def test_what_no_run_can_be_made_with_is_refused_in_one_line(toy: Toy, arguments: tuple[str, ...], said: str) -> None:
    toy.contract("AMP-API-001")
    toy.checks("import pytest\n" + _HOLDS)

    outcome = toy.run(*arguments)

    assert outcome.status == pytest.ExitCode.USAGE_ERROR
    assert said in outcome.output


def test_case_that_a_plugin_ends_is_an_error_and_no_failure(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks("import pytest\nimport torch\n" + _FAILS.format('pytest.fail("Timeout (>5.0s)")'))

    assert toy.run().verdicts() == {"AMP-API-001[a]": "ERROR"}


_FIXTURE = """
import pytest, torch

@pytest.fixture(autouse=True)
def other_numbers():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
"""


def test_failure_under_what_a_fixture_set_is_an_error_that_names_it(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks("import torch\n" + _FAILS.format("pass"))

    outcome = toy.spawn(_FIXTURE)

    (case,) = outcome.report["cases"]
    assert case["verdict"] == "ERROR"
    assert "the default dtype: torch.float64, not torch.float32" in case["reason"]


_RERUNS = """
def pytest_addoption(parser):
    parser.addoption("--reruns", type=int)
"""


def test_reruns_are_refused(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks("import pytest\n" + _HOLDS)

    outcome = toy.spawn(_RERUNS, "--reruns", "1")

    assert outcome.status == pytest.ExitCode.USAGE_ERROR
    assert "--reruns runs a case until it passes" in outcome.output
