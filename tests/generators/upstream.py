"""The page of the upstream defects: which contracts turn red on the torch versions that have them.

`python -m tests.generators.upstream --reports FOLDER` reads docs/evidence/upstream.toml and the report folders in
FOLDER, each named by a torch version and what is behind a +, and writes docs/evidence/upstream.md. The versions that
earlier runs found, in docs/evidence/upstream-runs.toml, are kept: a run has the cases that its seed draws.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from conformance.data import read_toml
from conformance.report.document import read
from tests.paths import ROOT

DATA = ROOT / "docs" / "evidence" / "upstream.toml"
RUNS = ROOT / "docs" / "evidence" / "upstream-runs.toml"
PAGE = ROOT / "docs" / "evidence" / "upstream.md"


@dataclass(frozen=True)
class Defect:
    """One defect; the fields are those of docs/evidence/upstream.toml."""

    number: int
    repository: str
    kind: str
    title: str
    topic: str
    mode: str
    device: str
    versions: str
    state: str
    evidence: str
    seen_on: tuple[str, ...]
    not_seen_on: tuple[str, ...]
    promise: str
    relation: str
    red: tuple[str, ...]
    unseen: str
    fixed_by: int | None = None

    @property
    def link(self) -> str:
        if not self.number:
            return "no report found"
        page = "pull" if self.kind == "pull" else "issues"
        name = "" if self.repository == "pytorch/pytorch" else f"{self.repository} "
        return f"[{name}{self.number}](https://github.com/{self.repository}/{page}/{self.number})"


def defects() -> list[Defect]:
    """Read the table. Raises TypeError for an unknown or missing field."""
    rows: list[dict[str, Any]] = read_toml(DATA)["defect"]
    lists = ("seen_on", "not_seen_on", "red")
    made = []
    for row in rows:
        fields: dict[str, Any] = {key: tuple(value) if key in lists else value for key, value in row.items()}
        made.append(Defect(**fields))
    return made


def failing(report: Path) -> list[str]:
    """Return the ids of the failed cases of one report, those that a waiver excuses too."""
    return [case.id for case in read(report).cases if case.verdict in ("FAIL", "WAIVED")]


def measured(reports: Path, table: list[Defect]) -> dict[str, list[str]]:
    """Return for each pattern of the table the torch versions on which a case that it names failed."""
    patterns = {pattern for one in table for pattern in one.red}
    red: dict[str, list[str]] = {pattern: [] for pattern in sorted(patterns)}
    for folder in sorted(reports.iterdir(), key=_order):
        ids = failing(folder)
        for pattern, versions in red.items():
            version = _version(folder)
            if version not in versions and any(fnmatch.fnmatchcase(one, pattern.replace("[", "[[]")) for one in ids):
                versions.append(version)
    return red


def _version(folder: Path) -> str:
    return folder.name.partition("+")[0]


def _order(folder: Path) -> tuple[int, ...]:
    return _parts(_version(folder))


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _red_on(one: Defect, red: dict[str, list[str]]) -> list[str]:
    versions = {version for pattern in one.red for version in red.get(pattern, ())}
    return sorted(versions, key=_parts)


def page(table: list[Defect], red: dict[str, list[str]], versions: list[str]) -> str:
    """Return the page in Markdown."""
    eager = [one for one in table if one.mode == "eager"]
    seen = [one for one in eager if _red_on(one, red)]
    shown = [one for one in eager if one.evidence == "reproduced"]
    caught = [one for one in shown if _red_on(one, red)]
    counts = Counter(one.mode for one in table)
    lines = [
        "# AMP defects of PyTorch, and the contracts that show them",
        "",
        "Written by `python -m tests.generators.upstream`; the data is in `upstream.toml`, each with the promise that",
        "it breaks and the relation that finds it and its neighbours. Red: the contract fails on that torch, waived or",
        "not, in runs without a GPU at the level `standard`, on: "
        + ", ".join(versions)
        + "; those of the device cuda on",
        "an NVIDIA H100 or H200 with 2.11.0.",
        "",
        f"{len(table)} defects: " + ", ".join(f"{count} {mode}" for mode, count in counts.most_common()) + ".",
        f"Of {len(eager)} in eager mode {len(seen)} turn a contract red. Of the {len(shown)} of those that a script",
        f"reproduced, {len(caught)} do.",
        "",
        tabulate(
            [
                [topic, len(own), sum(bool(_red_on(one, red)) for one in own)]
                for topic, own in sorted(_by_topic(eager).items())
            ],
            ["topic, eager mode", "defects", "red"],
            tablefmt="github",
        ),
        "",
        "## Red on some version",
        "",
        *_table([one for one in table if _red_on(one, red)], red),
        "",
        "## In eager mode, not red",
        "",
        *_unseen([one for one in eager if not _red_on(one, red)]),
        "",
        "## Compiled, exported, distributed and other defects, not red",
        "",
        *_unseen([one for one in table if one.mode != "eager" and not _red_on(one, red)]),
    ]
    return "\n".join(lines) + "\n"


def _by_topic(table: list[Defect]) -> dict[str, list[Defect]]:
    return {topic: [one for one in table if one.topic == topic] for topic in {one.topic for one in table}}


def _table(table: list[Defect], red: dict[str, list[str]]) -> list[str]:
    rows = [
        [
            one.link,
            one.title,
            one.versions,
            ", ".join(sorted({pattern.split("[")[0] for pattern in one.red})),
            ", ".join(_red_on(one, red)),
        ]
        for one in table
    ]
    head = ["defect", "what goes wrong", "versions that have it", "contracts", "red on"]
    return [tabulate(rows, head, tablefmt="github")]


def _unseen(table: list[Defect]) -> list[str]:
    rows = [
        [one.link, one.title, one.device, one.versions, one.evidence, one.unseen or "no check yet"] for one in table
    ]
    return [
        tabulate(rows, ["defect", "what goes wrong", "device", "versions", "evidence", "why unseen"], tablefmt="github")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generators.upstream", description=__doc__)
    parser.add_argument("--reports", type=Path, help="a folder of reports, named by torch version")
    arguments = parser.parse_args()
    table = defects()
    if arguments.reports is not None:
        before = read_toml(RUNS)
        earlier: dict[str, list[str]] = before["red"]
        red = {
            pattern: sorted({*found, *earlier.get(pattern, ())}, key=_parts)
            for pattern, found in measured(arguments.reports, table).items()
        }
        run = {_version(one) for one in arguments.reports.iterdir()}
        versions = sorted({*run, *before["versions"]}, key=_parts)
        text = "# The torch versions on which each pattern of upstream.toml failed; written by upstream.py.\n"
        text += f"versions = {json.dumps(versions)}\n\n[red]\n"
        text += "".join(f"{json.dumps(pattern)} = {json.dumps(found)}\n" for pattern, found in red.items())
        RUNS.write_text(text, encoding="utf-8")
    runs = read_toml(RUNS)
    PAGE.write_text(page(table, runs["red"], runs["versions"]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
