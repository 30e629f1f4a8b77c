"""The table of upstream defects: every row says what shows it, or why nothing does."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.data import read_toml
from tests import reports
from tests.generators.upstream import defects, measured
from tests.paths import ROOT


def _contracts() -> set[str]:
    files = (ROOT / "conformance" / "chapters").glob("*/contracts.toml")
    return {row["id"] for file in files for row in read_toml(file)["contract"]}


def test_every_defect_is_red_or_has_a_reason() -> None:
    assert [one.number for one in defects() if bool(one.red) == bool(one.unseen)] == []


def test_each_defect_stands_once() -> None:
    numbered = Counter((one.repository, one.number) for one in defects() if one.number)
    assert [name for name, count in numbered.items() if count > 1] == []


def test_titles_and_reasons_fit_in_a_table() -> None:
    assert [one.number for one in defects() if len(one.title) > 80 or len(one.unseen) > 120] == []


@pytest.mark.parametrize(
    ("page", "said"), [("docs/scope.md", r"\[(\d+) real defects\]"), ("CHANGELOG.md", r"(\d+) AMP defects")]
)
def test_pages_say_how_many_there_are(page: str, said: str) -> None:
    assert re.findall(said, (ROOT / page).read_text(encoding="utf-8")) == [str(len(defects()))]


def test_patterns_name_contracts() -> None:
    known = _contracts()
    assert {pattern for one in defects() for pattern in one.red if pattern.split("[")[0] not in known} == set()


def test_patterns_find_the_failed_cases_of_each_version(tmp_path: Path) -> None:
    for version, sample in (("2.6.0", "failing"), ("2.13.0", "conformant")):
        (tmp_path / version).mkdir()
        shutil.copy(reports.path(sample), tmp_path / version / "report.json")
    one = replace(defects()[0], red=("AMP-SCALE-002[halving:*", "AMP-LOSS-001[*-bf16]"))
    assert measured(tmp_path, [one]) == {"AMP-SCALE-002[halving:*": ["2.6.0"], "AMP-LOSS-001[*-bf16]": []}
