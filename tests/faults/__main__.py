"""Runs the chapters that speak of every fault (or of those named) and prints which contracts caught each."""

from __future__ import annotations

import sys

from tabulate import tabulate

from tests.faults import load
from tests.faults.campaign import run


def main(names: list[str]) -> int:
    faults = load()
    rows, missed = [], 0
    for name in names or sorted(faults):
        outcome = run(faults[name], chapters=faults[name].chapters)
        missed += not outcome.caught
        rows.append([name, "caught" if outcome.caught else "MISSED", ", ".join(sorted(outcome.failed))])
        print(f"{name}: {rows[-1][1]}", file=sys.stderr, flush=True)
    print(tabulate(rows, headers=["fault", "", "contracts that fail"], tablefmt="github"))
    print(f"{len(rows) - missed} of {len(rows)} caught by a contract that speaks of it")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
