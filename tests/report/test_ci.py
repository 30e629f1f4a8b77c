"""The summary for a CI job fits its page, and annotations are commands of their system and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance import __main__ as command_line
from conformance.report import ci, document, outline, rollup
from conformance.report.verdicts import Overall
from tests import reports
from tests.report import test_browser

_VARIABLES = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "TF_BUILD", "TEAMCITY_VERSION")


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", reports.NAMES)
def test_summary_begins_with_the_verdict_and_has_at_most_sixty_lines(name: str) -> None:
    report = reports.sample(name)

    lines = ci.summary(report).splitlines()

    assert lines[0].startswith(f"## {rollup.overall(report).value}: AMP on ")
    assert len(lines) <= 60
    for id in rollup.failing(report):
        assert any(line.startswith(f"| {id} | ") for line in lines)


@pytest.mark.parametrize("failing", [0, 10, 11, 690])
@pytest.mark.parametrize("chapters", [1, 60])
def test_summary_of_many_failures_fits(failing: int, chapters: int) -> None:
    whole = reports.raw("failing")
    many = test_browser.many_raw(800, failing=failing)
    header = many["header"]
    header["chapters"] = [{"name": f"c{number}", "title": "T", "summary": "S"} for number in range(chapters)]
    for place, contract in enumerate(header["contracts"]):
        contract["chapter"] = f"c{place % chapters}"
    many["footer"] = {
        **whole["footer"],
        "contracts": {},
        "waivers": [],
        "problems": [f"problem {number}" * 50 for number in range(30)],
        "digest": None,
    }
    report = document.parse(many)

    summary = ci.summary(report)

    assert len(summary.splitlines()) <= 60
    assert "- and 26 more" in summary
    if failing > 10:
        assert f"| {failing - 10} more |" in summary
    table = summary[summary.index("| chapter |") :]
    counted = [row.split(" | ") for row in table.splitlines() if re.match(r"\| (\*\*)?(c|\d+ more)", row)][1:]
    assert sum(int(row[2]) for row in counted) == failing


def test_texts_of_a_report_are_no_markup() -> None:
    hostile = "<script>x</script> | cell\n# heading"
    whole = reports.changed("failing", "header/contracts/2/title", hostile)
    reports.put(whole, "footer/problems/0", hostile)

    summary = ci.summary(document.parse(whole))

    assert "<script" not in summary
    assert "\n# heading" not in summary
    assert "&lt;script&gt;" in summary


def test_without_a_variable_nothing_is_annotated() -> None:
    assert ci.annotated(reports.sample("failing"), {}) == []


@pytest.mark.parametrize(
    ("variable", "form"),
    [
        ("GITHUB_ACTIONS", r"::(error|warning) title=AMP conformance::.+"),
        ("TF_BUILD", r"##vso\[task\.logissue type=(error|warning)\].+"),
        ("TEAMCITY_VERSION", r"##teamcity\[(buildProblem description|message text)='.+'( status='WARNING')?\]"),
    ],
)
@pytest.mark.parametrize("name", reports.NAMES)
def test_each_failure_is_one_line_in_the_form_of_the_system(variable: str, form: str, name: str) -> None:
    report = reports.sample(name)

    lines = ci.annotated(report, {variable: "true"})

    assert all(re.fullmatch(form, line) for line in lines)
    failing = list(rollup.failing(report))
    assert len(lines) == len(failing) + (rollup.overall(report) is not Overall.CONFORMANT)
    for id, line in zip(failing, lines, strict=False):
        assert id in line


@pytest.mark.parametrize(
    ("variable", "written"),
    [
        ("GITHUB_ACTIONS", "100%25 'x' [y] | ##vso[z]"),
        ("TF_BUILD", "100%AZP25 'x' [y] | ##vso[z]"),
        ("TEAMCITY_VERSION", "100% |'x|' |[y|] || ##vso|[z|]"),
    ],
)
def test_marks_of_the_systems_in_a_text_are_escaped(variable: str, written: str) -> None:
    whole = reports.changed("failing", "header/contracts/2/title", "100% 'x' [y] | ##vso[z]\n::error::mine")

    lines = ci.annotated(document.parse(whole), {variable: "1"})

    assert any(written in line for line in lines)
    assert not any("\n" in line or "\r" in line for line in lines)


def test_many_failures_are_ten_annotations_of_which_the_last_names_the_rest() -> None:
    lines = ci.annotated(test_browser.many(800, failing=40), {"GITHUB_ACTIONS": "true"})

    assert len(lines) == 11
    assert "31 more contracts failed" in lines[9]


def test_the_command_adds_to_the_page_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "summary.md"
    page.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))

    status = command_line.main(["ci", str(reports.path("failing"))])

    report = reports.sample("failing")
    assert report.footer
    assert status == report.footer.exit_status
    assert page.read_text(encoding="utf-8") == "before\n" + ci.summary(report)
    assert capsys.readouterr().out.splitlines()[0].startswith("::error ")


def test_the_command_ends_with_the_status_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["ci", str(reports.path("conformant"))]) == 0
    assert command_line.main(["ci", str(reports.path("incomplete"))]) == 2
    assert command_line.main(["ci", str(reports.path("interrupted"))]) == 2
    assert "## INCOMPLETE: AMP on" in capsys.readouterr().out
    assert command_line.main(["ci", str(tmp_path / "none")]) == 4


def test_the_summary_goes_to_a_file_which_azure_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_BUILD", "True")
    file = tmp_path / "out.md"

    command_line.main(["ci", str(reports.path("failing")), "-o", str(file)])

    assert f"##vso[task.uploadsummary]{file}" in capsys.readouterr().out
    assert outline.failures(reports.sample("failing"))[0].contract.id in file.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "page"))

    assert command_line.main(["ci", str(reports.path("failing"))]) == 4
    assert "GITHUB_STEP_SUMMARY" in capsys.readouterr().err
