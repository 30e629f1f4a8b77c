"""The page of neighbouring versions says what `diff` says, and takes clean runs of different versions alone."""

from __future__ import annotations

import dataclasses

import pytest

from conformance.report import document
from conformance.report.values import Report
from tests.generators import neighbours
from tests.paths import ROOT

REPORTS = ROOT / "fixtures" / "reports"


def _of(name: str, torch: str) -> Report:
    report = document.read(REPORTS / f"{name}.json")
    environment = dataclasses.replace(report.header.environment, torch=torch)
    return dataclasses.replace(report, header=dataclasses.replace(report.header, environment=environment))


def test_step_that_regresses_is_red_and_the_way_back_is_not() -> None:
    better, worse = _of("conformant", "2.12.1+cpu"), _of("failing", "2.13.0+cpu")

    text, holds = neighbours.page([better, worse])
    back, clean = neighbours.page([worse, better])

    assert not holds
    assert "| 2.12.1 | 2.13.0 | 1 |" in text
    assert clean
    assert "| 2.13.0 | 2.12.1 | 0 |" in back
    assert "downgrades, 0 of 1 end with 0" in back
    assert "- 2.12.1 to 2.13.0: " in back


@pytest.mark.parametrize(
    ("names", "said"), [(["conformant", "conformant"], "two reports of torch"), (["failing"], "is not of a run")]
)
def test_other_reports_are_refused(names: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        neighbours.read([str(REPORTS / f"{name}.json") for name in names])
