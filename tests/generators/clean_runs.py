"""Runs of the suite on clean torch builds: does a verdict change with seed, order, processes, threads or load?

`python -m tests.generators.clean_runs --resume docs/evidence/clean-runs.csv --minutes 60 --page FILE PYTHON ...` runs
`pytest conformance --level quick` with each interpreter in turn (environments with torch, the test packages and
pytest-randomly) until the time is over, appends a line for each run, and writes the page. What a run is given depends
on its number alone, but for the level: `--level standard` makes longer runs. `--verdicts FOLDER` keeps the verdicts,
against which later calls compare, and the reports of the runs that are not clean.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tabulate import tabulate

from conformance.report.document import read
from tests.paths import ROOT

PROCESSES = ("auto", "auto", "0", "1", "2", "3")
LEVELS = ("quick", "standard")
THREADS = ("all", "1", "2", "4")


@dataclass(frozen=True)
class Run:
    """One run: its settings, its end, and the cases that failed or changed against other runs on its torch."""

    number: int
    torch: str
    level: str
    seed: int
    processes: str
    threads: str
    shuffled: bool
    load: float
    seconds: float
    status: int
    cases: int
    changed: str

    @property
    def clean(self) -> bool:
        return self.status == 0 and not self.changed


def given(number: int) -> tuple[int, str, str, bool]:
    """Return the seed, the number of processes, the threads and whether the order is random."""
    draw = random.Random(number)
    return draw.randrange(1, 10**6), draw.choice(PROCESSES), draw.choice(THREADS), draw.random() < 0.5


def run(python: str, number: int, level: str, verdicts: Path) -> Run:
    """Run the suite with an interpreter, and compare the verdicts with those of its torch and level in the folder."""
    seed, processes, threads, shuffled = given(number)
    order = [f"--randomly-seed={seed}"] if shuffled else ["-p", "no:randomly"]
    workers = [] if processes == "auto" else ["-n", processes]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if threads != "all":
        environment["OMP_NUM_THREADS"] = threads
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "pytest", "conformance", "--level", level, "--seed", str(seed), "--report", folder]
        begun, load = time.monotonic(), os.getloadavg()[0]
        done = subprocess.run(
            [*command, "-q", "-p", "no:cacheprovider", *order, *workers],
            cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        seconds = time.monotonic() - begun
        report = read(folder)
        torch = report.header.environment.torch or "none"
        found = {case.id: case.verdict.value for case in report.cases}
        changed = compare(verdicts / f"{torch}-{level}.json.gz", found)
        if changed or done.returncode:
            shutil.copytree(folder, verdicts / f"run-{number}", dirs_exist_ok=True)
    return Run(
        number, torch, level, seed, processes, threads, shuffled, round(load, 1), round(seconds, 1), done.returncode,
        len(found), " ".join(changed),
    )  # fmt: skip


def compare(known: Path, found: dict[str, str]) -> list[str]:
    """Return the cases that failed, or whose verdict is not the one that the file has; the file gets what is new.

    A case may pass with one seed and be excused with another: a waiver that says what it varies with allows both.
    """
    before = json.loads(gzip.decompress(known.read_bytes())) if known.exists() else {}
    changed = sorted(
        case
        for case, verdict in found.items()
        if verdict in ("FAIL", "ERROR") or {verdict, before.get(case, verdict)} not in ({verdict}, {"PASS", "WAIVED"})
    )
    known.write_bytes(gzip.compress(json.dumps({**found, **before}).encode()))
    return changed


def load(path: Path) -> list[Run]:
    """Read the runs of a file, or none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return [
            Run(
                int(row["number"]), row["torch"], row["level"], int(row["seed"]), row["processes"], row["threads"],
                row["shuffled"] == "True", float(row["load"]), float(row["seconds"]), int(row["status"]),
                int(row["cases"]), row["changed"],
            )
            for row in csv.DictReader(stream)
        ]  # fmt: skip


def save(path: Path, runs: Sequence[Run]) -> None:
    """Write the runs to a file."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, [field.name for field in fields(Run)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(one) for one in runs)


def page(runs: Sequence[Run]) -> str:
    """Return the page of the documentation."""
    by_torch = {version: [one for one in runs if one.torch == version] for version in {one.torch for one in runs}}
    rows = [
        (
            version,
            *(sum(one.level == level for one in mine) for level in LEVELS),
            sum(one.clean for one in mine),
            _range([one.load for one in mine]),
        )
        for version, mine in sorted(by_torch.items(), key=lambda item: _order(item[0]))
    ]
    drawn = {
        "processes": Counter(one.processes for one in runs),
        "threads": Counter(one.threads for one in runs),
        "order": Counter("random" if one.shuffled else "as collected" for one in runs),
    }
    spread = [
        (name, ", ".join(f"{key}: {number}" for key, number in sorted(found.items()))) for name, found in drawn.items()
    ]
    bad = [(one.number, one.torch, one.level, one.status, one.changed or "-") for one in runs if not one.clean]
    changed = tabulate(bad, ["run", "torch", "level", "exit", "cases that failed or changed"], tablefmt="github")
    return f"""# Clean runs

Written by `python -m tests.generators.clean_runs` from [clean-runs.csv](clean-runs.csv), which has a line for each run:
`pytest conformance` at the level quick or standard on stock torch builds for the CPU and CUDA, on a machine without a
GPU, each with a seed, an order, a number of processes and of threads of its own, beside other work (the load average
at the start is given). A run is clean if its exit status is 0 and each case has the verdict of all other runs on that
torch at that level, but that a waiver may say with what a case varies that it excuses.

**{sum(one.clean for one in runs)} of {len(runs)} runs are clean.**

{tabulate(rows, ["torch", *LEVELS, "clean", "load"], tablefmt="github")}

{tabulate(spread, ["drawn", "runs"], tablefmt="github")}
{f"{chr(10)}{changed}{chr(10)}" if bad else ""}"""


def _range(values: Sequence[float]) -> str:
    return f"{min(values)} to {max(values)}"


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split("+")[0].split(".")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until the time is over, and write the page."""
    parser = argparse.ArgumentParser("python -m tests.generators.clean_runs", description=__doc__)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="interpreters, in turn")
    parser.add_argument("--resume", type=Path, required=True, metavar="FILE", help="the data: read, then appended to")
    parser.add_argument("--verdicts", type=Path, metavar="FOLDER", help="keep verdicts here")
    parser.add_argument("--level", choices=LEVELS, default="quick", help="the level of the runs")
    parser.add_argument("--minutes", type=float, default=0.0, help="run for so long (0: only write the page)")
    parser.add_argument("--page", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    runs = load(options.resume)
    ends = time.monotonic() + options.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        verdicts = options.verdicts or Path(folder)
        verdicts.mkdir(parents=True, exist_ok=True)
        while options.pythons and time.monotonic() < ends:
            number = len(runs)
            runs.append(run(options.pythons[number % len(options.pythons)], number, options.level, verdicts))
            save(options.resume, runs)
    if options.page:
        options.page.write_text(page(runs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
