"""What a release of torch does not have yet is told by the suite's tables, whatever a report says its version is."""

from __future__ import annotations

import dataclasses

import pytest

from conformance.report import comparison
from conformance.report.comparison import Kind
from conformance.report.lacking import lacks
from conformance.report.values import Report
from tests import reports

LINEAR = "AMP-SCALE-002[halving:device-inf]"


@pytest.mark.parametrize(
    ("release", "value", "reason"),
    [
        ("2.7", "mtia", "autocast for mtia begins with 2.8"),
        ("2.8", "mtia", None),
        ("2.8", "Muon-decay-for-loop", "Muon begins with 2.9"),
        ("2.10", "Muon-decay-for-loop", None),
        ("2.11", "Adagrad-decay-fused", "fused Adagrad that unscales by itself begins with 2.12"),
        ("2.11", "Adagrad-decay-for-loop", None),
        ("2.6", "cuda", None),
        ("2.6", "", None),
        ("a fork", "mtia", None),
    ],
)
def test_devices_and_optimizers_begin_with_a_release(release: str, value: str, reason: str | None) -> None:
    assert lacks(release, value) == reason


def _of(report: Report, torch: str, parameters: dict[str, str]) -> Report:
    environment = dataclasses.replace(report.header.environment, torch=torch)
    cases = tuple(
        dataclasses.replace(case, parameters=parameters) if case.id == LINEAR else case for case in report.cases
    )
    return dataclasses.replace(report, header=dataclasses.replace(report.header, environment=environment), cases=cases)


@pytest.mark.parametrize(
    ("value", "torch", "kind"),
    [("mtia", "2.7.1", Kind.NOT_APPLICABLE), ("mtia", "2.9.1", Kind.GONE), ("inf", "2.7.1", Kind.GONE)],
)
def test_case_of_what_the_older_torch_lacks_is_not_gone(value: str, torch: str, kind: Kind) -> None:
    whole = reports.sample("conformant")
    old = _of(whole, "2.9.1", {"value": value})
    kept = tuple(case for case in whole.cases if case.id != LINEAR)
    new = dataclasses.replace(_of(whole, torch, {}), cases=kept)

    kinds = {change.case: change.kind for change in comparison.compare(old, new).changes}

    assert kinds[LINEAR] is kind
