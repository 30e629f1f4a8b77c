"""What the pages and the catalogue point at is there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.harness import catalogue
from conformance.report import consistency, layout
from tests import reports
from tests.paths import ROOT

PAGES = [path.relative_to(ROOT).as_posix() for folder in ("", "docs") for path in sorted((ROOT / folder).glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(root: Path, page: str) -> None:
    path = root / page
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))

    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_sources_of_contracts_can_be_found_by_a_stranger(root: Path) -> None:
    page = (root / "docs" / "sources.md").read_text(encoding="utf-8")
    sources = {contract.id: contract.source for contract in catalogue.load().contracts.values()}
    short = re.compile(r"\b([A-Z][a-z]+)(?: et al\.)? (\d{4})\b")
    named = {pair for source in sources.values() for pair in short.findall(source) if pair[0] != "ICLR"}

    assert {pair for pair in named if not all(word in page for word in pair)} == set()
    assert [id for id, source in sources.items() if re.search(r"source material|\bclaims? S\d", source, re.I)] == []


def test_contracts_whose_source_is_code_alone_were_read_for_defects(root: Path) -> None:
    page = (root / "docs" / "evidence" / "code-sources.md").read_text(encoding="utf-8")
    code = re.compile(r"\.(cpp|cu|h|py|yaml)\b")
    documents = re.compile(
        r"docs|documentation|docstring|notes?\b|tutorial|recipe|examples|issue|pull|N\. J\.|IEEE", re.I
    )
    contracts = catalogue.load().contracts
    alone = {id for id, one in contracts.items() if code.search(one.source) and not documents.search(one.source)}

    assert alone - set(re.findall(r"AMP-[A-Z0-9]+-\d{3}", page)) == set()


def test_every_page_is_reached_from_the_first(root: Path) -> None:
    first = (root / "README.md").read_text(encoding="utf-8")

    assert [page for page in PAGES if page != "README.md" and f"({page})" not in first] == []


def test_digest_is_computed_as_the_page_says(root: Path, tmp_path: Path) -> None:
    report = reports.raw("conformant")
    report["footer"]["digest"] = consistency.digest(report)
    (tmp_path / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    page = (root / "docs" / "reports.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert found.stdout == "True\n"


def test_example_of_a_check_says_what_the_page_says(root: Path) -> None:
    page = (root / "docs" / "reports.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)

    held, failed = layout.spelled_out({"checks": [json.loads(example)]})["cases"]

    assert (held["id"], held["verdict"]) == ("AMP-CAST-001[lower_precision:device-fp16-mm]", "PASS")
    assert held["parameters"] == {"amp_dtype": "fp16", "op": "mm"}
    assert [found.name for found in held["evidence"]] == ["type of mm", "type of mm, in place", "error"]
    assert str(failed["reason"]).startswith("error: 1.5 of the bound")
    assert [found.holds for found in failed["evidence"]] == [True, True, False]


def test_jobs_of_the_gating_page_run(root: Path, tmp_path: Path) -> None:
    page = (root / "docs" / "gating.md").read_text(encoding="utf-8")
    github, gitlab = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    variables = dict(re.findall(r"^ +(TORCH|BASELINE): \"?([\w.-]+)", github, re.MULTILINE))
    judged, shown = re.findall(r"run: (python -m (?:pytest|conformance).*)", github)
    asked = judged.replace("--report gate", f"--report {tmp_path}/gate").replace(
        "gate/junit.xml", f"{tmp_path}/junit.xml"
    )

    steps = [f"{asked} --contract AMP-SCALE-060", shown.replace("gate", f"{tmp_path}/gate")]
    done = [
        subprocess.run(
            step.replace("python", sys.executable, 1),
            shell=True,
            cwd=root,
            env={**os.environ, **variables, "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")},
            capture_output=True,
            text=True,
            check=False,
        )
        for step in steps
    ]

    assert [ended.returncode for ended in done] == [0, 0], done
    assert f"Against the baseline {variables['BASELINE']}: nothing" in done[0].stdout
    assert "CONFORMANT" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert judged in gitlab
    assert f"- {shown} -o gate/summary.md" in gitlab


def test_workflow_has_a_job_for_each_environment_of_the_checks_of_a_submission(root: Path) -> None:
    script = (root / ".ci" / "run").read_text(encoding="utf-8")
    workflow = (root / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")

    ran = re.findall(r"^(?:run|run_in_conformance) (\w+) ", script, re.M) + re.findall(
        r'^"\$tox" -e ([\w,]+)$', script, re.M
    )
    jobs = re.findall(r"env: \"?([\w,]+)\"? \}", workflow)

    assert {"conformance", "emulated", "foreign", "installed", "tests"} <= set(ran)
    assert set(ran) <= set(jobs)
