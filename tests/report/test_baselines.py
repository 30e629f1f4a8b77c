"""Baselines: verdicts alone, written by a command, stored for stock PyTorch and found by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from conformance.__main__ import main
from conformance.harness import catalogue
from conformance.report import baselines, comparison, document
from tests import reports
from tests.paths import ROOT

FOLDER = ROOT / "fixtures" / "baselines"


def _written(folder: Path, document: Any) -> Path:
    path = folder / "own.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


def _own(folder: Path, name: str = "conformant") -> Path:
    path = folder / "own.json.gz"
    assert main(["baseline", str(reports.path(name)), "-o", str(path)]) == 0
    return path


def test_baseline_compares_as_its_report_does(tmp_path: Path) -> None:
    there = reports.sample("conformant")
    reduced, name = baselines.read(_own(tmp_path), "2.11.0")

    assert name == "own.json.gz"
    assert all(case.evidence == () and case.reason == "" for case in reduced.cases)
    for new in ("failing", "improved", "untestable", "narrowed"):
        here = reports.sample(new)
        assert comparison.compare(reduced, here) == comparison.compare(there, here)


def test_baseline_is_the_same_each_time(tmp_path: Path) -> None:
    report = reports.sample("conformant")

    assert baselines.render(report) == baselines.render(report) == _own(tmp_path).read_bytes()


def test_difference_to_a_stored_baseline_is_read_back_whole(tmp_path: Path) -> None:
    (name,) = (one for one in baselines.names() if one.startswith("torch-2.12"))
    base, _ = baselines.read("torch-2.13.0", "")
    there, _ = baselines.read(name, "")

    path = tmp_path / "own.json.gz"
    path.write_bytes(baselines.render(there, "torch-2.13.0"))
    again, _ = baselines.read(path, "")

    assert path.stat().st_size < 10_000
    assert {case.id: case for case in again.cases} == {case.id: case for case in there.cases}
    assert again.contracts == there.contracts
    assert {case.id for case in there.cases} != {case.id for case in base.cases}


@pytest.mark.parametrize(
    ("name", "torch", "found"),
    [
        ("stock", "2.13.0+cu128", "torch-2.13.0"),
        ("stock", "2.13.1a0+git1234", "torch-2.13.0"),
        ("torch-2.13.0", "2.6.0", "torch-2.13.0"),
        ("torch-2.13", "2.6.0", "torch-2.13.0"),
        ("torch-2.13.9", "2.6.0", "torch-2.13.0"),
        ("torch-2.6.0", "2.13.0", "torch-2.6.0"),
    ],
)
def test_stored_baseline_is_found_by_name(name: str, torch: str, found: str) -> None:
    report, known = baselines.read(name, torch)

    assert known == found
    assert report.header.environment.torch.startswith(found.removeprefix("torch-"))
    assert not comparison.incomplete(report)


@pytest.mark.parametrize(("name", "torch"), [("stock", "3.0.0"), ("torch-1.13.1", "2.13.0")])
def test_version_without_a_stored_baseline_is_refused(name: str, torch: str) -> None:
    with pytest.raises(
        baselines.UnknownBaseline, match=r"there is no stock baseline of torch [13]\.\d+; there are torch"
    ):
        baselines.read(name, torch)


def test_stored_baselines_are_small_and_of_the_catalogue() -> None:
    known = catalogue.load().contracts
    for name in baselines.names():
        report, _ = baselines.read(name, "")

        assert set(report.contracts) <= set(known), f"{name}: make it again with `python -m conformance baseline`"
        assert report.header.options.level == "quick"
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 200_000


_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"schema": "amp-conformance-baseline/2"}, "neither a report nor a baseline"),
    ({"base": "torch-1.0"}, "'torch-1.0', which is no stored baseline"),
    ({"base": "../../secret"}, "which is no stored baseline"),
    ({"base": 1}, "which is no stored baseline"),
    ({"base": "torch-2.13.0", "without": [1]}, "must be a text"),
    ({"extra": 1}, "unknown key 'extra'"),
    ({"base": "torch-2.13.0", "header": []}, "must be an object"),
]


@pytest.mark.parametrize(("change", "said"), _WRONG)
def test_baseline_that_cannot_be_used_is_refused_in_one_line(
    change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.loads(gzip.decompress(_own(tmp_path).read_bytes()))
    path = _written(tmp_path, {**whole, **change})

    assert main(["diff", str(path), str(reports.path("conformant"))]) == 4

    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_run_that_did_not_end_is_no_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.json.gz"

    assert main(["baseline", str(reports.path("interrupted")), "-o", str(path)]) == 4
    assert "the run did not end (INCOMPLETE), and is no baseline" in capsys.readouterr().err
    assert not path.exists()
    with pytest.raises(document.MissingReport):
        baselines.read(path, "2.13.0")


def test_output_that_cannot_be_written_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["baseline", str(reports.path("conformant")), "-o", str(tmp_path)]) == 4
    assert "cannot be written: Is a directory" in capsys.readouterr().err
