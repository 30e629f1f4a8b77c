"""Which case of a long run shows a fault: it goes first where a run ends with the first failure.

`python -m tests.faults.campaigns.first_failures [--seconds 1] [NAME ...]` runs every fault, or those named, in the
order in which the suite has its cases, and writes the case that fails first where that takes at least so many seconds.
The file only orders: a fault whose case is no longer there, or no longer fails, is run to the end as any other.
"""

from __future__ import annotations

import argparse
import csv
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.faults import Fault, load
from tests.faults.campaigns import campaign

FILE = Path(__file__).parents[1] / "first_failures.csv"


@functools.cache
def known(file: Path = FILE) -> Mapping[str, str]:
    """The case that shows each fault, by the name of the fault."""
    if not file.exists():
        return {}
    with file.open(newline="") as lines:
        return {line["fault"]: line["case"] for line in csv.DictReader(lines)}


def found(fault: Fault, seconds: float) -> str | None:
    """The case that fails first on a fault, if those before it take at least so many seconds.

    The run ends with that failure: all other cases were before it, in whatever order the report has them.
    """
    cases = campaign.run(fault, until_caught=True).cases
    failed = [case for case in cases if case["verdict"] == "FAIL" and campaign.speaking(fault, [case["contract"]])]
    if not failed or sum(case["duration_s"] for case in cases if case not in failed) < seconds:
        return None
    return str(failed[0]["id"])


def write(cases: Mapping[str, str], file: Path = FILE) -> None:
    """Write a line for each fault, in the order of the names."""
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(("fault", "case"))
        writer.writerows(sorted(cases.items()))


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the faults and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="what the cases before it must take (default 1)")
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults (default: all)")
    asked = parser.parse_args(None if arguments is None else list(arguments))
    faults = load()
    if missing := sorted(set(asked.names) - set(faults)):
        parser.error(f"no fault is named {', '.join(missing)}")
    cases = {name: case for name, case in known().items() if name in faults}
    for name in asked.names or faults:
        cases.pop(name, None)
        if faults[name].possible() and (case := found(faults[name], asked.seconds)):
            cases[name] = case
            print(name, case, flush=True)
        write(cases)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
