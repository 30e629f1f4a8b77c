"""Runs the chapters that speak of every fault (or of those named) and prints which contracts caught each."""

from __future__ import annotations

import difflib
import sys

from tabulate import tabulate

from tests.faults import load
from tests.faults.campaigns.campaign import run


def main(names: list[str]) -> int:
    faults = load()
    if unknown := sorted(set(names) - set(faults)):
        near = difflib.get_close_matches(unknown[0], faults, n=3)
        print(f"there is no fault {unknown[0]!r}; the nearest are {', '.join(near) or 'none'}", file=sys.stderr)
        return 4
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
