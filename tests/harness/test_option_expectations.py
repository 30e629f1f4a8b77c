"""--expectations holds speed-ups against a file of the user's, and refuses one that could judge nothing here."""

from __future__ import annotations

import pytest

from conformance.harness import environment
from tests.conftest import Outcome, Toy

CLASS = """
[[class]]
id = "this-fleet"
device_type = "{device_type}"
names = ["{name}"]
how = "published"
source = "the data sheet"
date = 2026-01-01
expires = {expires}

[[class.ratio]]
keys = ["matmul/compute/bf16/fp32"]
at_least = {at_least}
"""
CHECKS = """
from conformance.harness.expectations import Expectations
import datetime

@contract("AMP-SPEED-001", on="cpu")
def test_expected(case: Case, target: Target, expectations: Expectations) -> None:
    found = expectations.of("cpu", target.probe["name"], None, datetime.date(2026, 6, 1))
    case.note("factor", None if found is None else found.expected("matmul/compute/bf16/fp32").factor)
    case.true("ran", True)
"""


def _run(toy: Toy, values: dict[str, str] | None = None, *, given: bool = True) -> Outcome:
    toy.contract("AMP-SPEED-001", level="should", authority="engineering")
    toy.checks(CHECKS, "test_speed")
    defaults = {"device_type": "cpu", "name": environment.cpu(), "expires": "2999-12-31", "at_least": "1.25"}
    (toy.path / "fleet.toml").write_text(CLASS.format(**(defaults | (values or {}))))
    return toy.run(*(["--expectations", "fleet.toml"] if given else []))


def test_checks_get_the_factors(toy: Toy) -> None:
    outcome = _run(toy)

    assert outcome.status == 0
    assert outcome.report["cases"][0]["evidence"][0]["measured"] == 1.25


def test_without_it_nothing_is_expected_of_a_cpu(toy: Toy) -> None:
    assert _run(toy, given=False).report["cases"][0]["evidence"][0]["measured"] is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "Another Processor 3000"}, "these expectations are for Another Processor 3000, and this run is on"),
        ({"device_type": "xpu"}, "these expectations are for"),
        ({"expires": "2026-02-01"}, "ended on 2026-02-01"),
        ({"at_least": "1e9"}, "at_least must be a number above 0 and at most"),
        ({"at_least": "-1"}, "at_least must be a number above 0 and at most"),
        ({"at_least": "="}, "not TOML"),
    ],
    ids=["another", "type", "old", "impossible", "negative", "malformed"],
)
def test_bad_files_are_refused(toy: Toy, values: dict[str, str], words: str) -> None:
    outcome = _run(toy, values)

    assert outcome.status == 4
    assert "ERROR: --expectations: " in outcome.output
    assert words in outcome.output
    assert outcome.report == {}


def test_a_file_that_is_not_there_is_refused(toy: Toy) -> None:
    toy.contract("AMP-SPEED-001")
    toy.checks(CHECKS, "test_speed")

    outcome = toy.run("--expectations", "absent.toml")

    assert outcome.status == 4
    assert "absent.toml: cannot be read: No such file or directory" in outcome.output
