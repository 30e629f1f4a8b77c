"""The stored baselines of stock PyTorch, and the page that compares each of its versions with the next.

`python -m tests.generators.neighbours REPORT ... [--check]` takes one report of level quick for each version, made with
`pytest conformance --level quick --report DIR` on that torch from a clean checkout. It writes the baselines of
`fixtures/baselines` and `docs/evidence/neighbours.md`. Exit status 1 if a step from one version to the next regresses.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from conformance.commands.console import OK
from conformance.report import baselines, comparison, diff, document
from conformance.report.comparison import Comparison, Kind
from conformance.report.values import Report
from tests.paths import ROOT

PAGE = ROOT / "docs" / "evidence" / "neighbours.md"
FOLDER = ROOT / "fixtures" / "baselines"
BASE = "2.13.0"
"""The version whose baseline is stored whole; the others hold what differs from it."""

_COUNTED = (Kind.KNOWN, Kind.FIXED, Kind.NOT_APPLICABLE)
_HEAD = """# Stock against stock: the gate between neighbouring versions

Written by `python -m tests.generators.neighbours` from one run of level quick for each version, on a CPU and the fake
accelerators, the last of them on {day}. The exit status is that of `diff OLD NEW`; the other figures count cases. Not
applicable is what the newer torch does not have.

{builds}.

"""


def version(report: Report) -> str:
    """Return the release of torch that a report judged, without the local part of its version."""
    return report.header.environment.torch.partition("+")[0]


def read(paths: Sequence[str]) -> list[Report]:
    """Read the reports, the oldest torch first; raises ValueError for two of a version and for one of no clean run."""
    found = sorted(map(document.read, paths), key=lambda report: [int(part) for part in version(report).split(".")])
    twice = [name for name, count in Counter(map(version, found)).items() if count > 1]
    if twice:
        raise ValueError(f"two reports of torch {twice[0]}")
    for report in found:
        if report.header.options.level != "quick" or report.footer is None or report.footer.exit_status:
            raise ValueError(f"the report of torch {version(report)} is not of a run of level quick that ended with 0")
    return found


def store(reports: Sequence[Report]) -> None:
    """Write the baseline of each report, that of `BASE` first, since the others are told by the difference to it."""
    for report in sorted(reports, key=lambda report: version(report) != BASE):
        base = None if version(report) == BASE else f"torch-{BASE}"
        (FOLDER / f"torch-{version(report)}.json.gz").write_bytes(baselines.render(report, base))


def _row(old: Report, new: Report, found: Comparison) -> list[str]:
    counts = Counter(change.kind for change in found.changes if change.case is not None)
    known = sorted({change.contract for change in found.changes if change.kind is Kind.KNOWN})
    excused = f"{counts[Kind.KNOWN]}: {', '.join(known)}" if known else "-"
    return [
        version(old),
        version(new),
        "1" if found.worse else "0",
        str(len(diff.moved(old, new)) or "-"),
        excused,
        *(str(counts[kind] or "-") for kind in _COUNTED[1:]),
    ]


def page(reports: Sequence[Report]) -> tuple[str, bool]:
    """Return the page, and whether no step from a version to the next regresses."""
    compared = [(old, new, comparison.compare(old, new)) for old, new in pairwise(reports)]
    compared.append((reports[0], reports[-1], comparison.compare(reports[0], reports[-1])))
    back = [(version(old), version(new), comparison.compare(new, old)) for old, new in pairwise(reports)]
    titles = ("old", "new", "exit", "op policy moved", "known, each with its waiver", "fixed", "not applicable")
    rows = [titles, ["---"] * len(titles), *(_row(*one) for one in compared)]
    day = max(report.footer.finished for report in reports if report.footer is not None)[:10]
    builds = textwrap.fill("Builds: " + ", ".join(report.header.environment.torch for report in reports), 120)
    text = _HEAD.format(day=day, builds=builds) + "".join(f"| {' | '.join(row)} |\n" for row in rows)
    text += "\n## Op policy\n\n"
    for old, new, _ in compared[:-1]:
        text += "".join(f"- {version(old)} to {version(new)}: {sentence}\n" for sentence in diff.moved(old, new))
    text += "\n`_cudnn_rnn` comes and goes with builds for CUDA.\n\n## Backwards\n"
    red = [f"{new} to {old}: {_regressions(found)}" for old, new, found in back if found.worse]
    text += f"\nOf the steps back, downgrades, {len(back) - len(red)} of {len(back)} end with 0.\n\n"
    return text + "".join(f"- {one}\n" for one in red), not any(found.worse for _, _, found in compared)


def _regressions(found: Comparison) -> str:
    worse = Counter(change.contract for change in found.changes if change.kind in (Kind.REGRESSED, Kind.GONE))
    return ", ".join(f"{count} of {contract}" for contract, count in sorted(worse.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write baselines and page."""
    parser = argparse.ArgumentParser("python -m tests.generators.neighbours", description=__doc__)
    parser.add_argument("reports", nargs="+", metavar="REPORT")
    parser.add_argument("--check", action="store_true", help="write nothing; compare only")
    options = parser.parse_args(arguments)
    reports = read(options.reports)
    text, holds = page(reports)
    if options.check:
        print(text, end="")
    else:
        store(reports)
        PAGE.write_text(text, encoding="utf-8")
    return OK if holds else 1


if __name__ == "__main__":
    sys.exit(main())
