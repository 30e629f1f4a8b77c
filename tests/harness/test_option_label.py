"""--label: the user's own words for the machine, kept in the report."""

from __future__ import annotations

import pytest

from tests.conftest import Toy

_CHECK = "@contract('AMP-SCALE-001')\ndef test_it(case): case.expect('x', 1, 1)\n"


def test_labels_are_in_the_report(toy: Toy) -> None:
    toy.contract("AMP-SCALE-001")
    toy.checks(_CHECK)

    run = toy.run("--label", "host=node17", "--label", "rack=row 3, B")

    assert run.report["header"]["options"]["labels"] == {"host": "node17", "rack": "row 3, B"}


@pytest.mark.parametrize(
    "label",
    [
        "host",
        "=x",
        "host=",
        "Host=x",
        "host= x",
        "host=x\ny",
        "host=" + "x" * 81,
        "a b=c",
        "h" * 41 + "=x",
        "host=\u202e",
    ],
)
def test_label_that_is_none_is_refused(toy: Toy, label: str) -> None:
    toy.contract("AMP-SCALE-001")
    toy.checks(_CHECK)

    run = toy.run("--label", label)

    assert run.status == 4
    assert "--label: " in run.output


def test_label_given_twice_is_refused(toy: Toy) -> None:
    toy.contract("AMP-SCALE-001")
    toy.checks(_CHECK)

    assert "given twice" in toy.run("--label", "host=a", "--label", "host=b").output


def test_report_names_the_files_that_judged(toy: Toy) -> None:
    toy.contract("AMP-SCALE-001")
    toy.checks(_CHECK)
    first = toy.run(report="first").report["header"]["suite"]
    toy.contract("AMP-SCALE-002")
    second = toy.run(report="second").report["header"]["suite"]

    assert len(first["digest"]) == len(first["catalogue"]) == 64
    assert first["digest"] == second["digest"]
    assert first["catalogue"] != second["catalogue"]
