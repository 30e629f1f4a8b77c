"""By which bound each numerical fault is seen, and by what margin: writes docs/evidence/fault-margins.md."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from tests.faults import Fault, load
from tests.faults.campaigns.campaign import Caught, run

_HEAD = """# How far outside its bound each numerical fault lies

Written by `python -m tests.faults.campaigns.margins -o docs/evidence/fault-margins.md` on {day} with torch {torch}.
Each fault of the chapters on numerics and parity is put in place, and the contracts that speak of it are run at the
level from which on
it is caught (quick, unless the last column says otherwise). A row names, for each of those contracts that fails, the
piece of evidence that lies furthest outside what was required, and by what margin: the measured value over the bound,
or the bound over the value where the bound is a floor. *exact* means that nothing but equality was asked, so there is
no margin to be lucky by. {caught} of {made} faults are caught.
"""


def margin(evidence: dict[str, Any]) -> float | None:
    """How many times the bound a piece of evidence is off; None where equality was required, or no number was seen."""
    measured, bound = evidence["measured"], evidence["bound"]
    if evidence["relation"] not in ("<=", ">=", "in"):
        return None
    value = float(measured)
    if evidence["relation"] == "in":
        low, high = (float(end) for end in bound)
        return max(_ratio(value, high), _ratio(low, value))
    return _ratio(value, float(bound)) if evidence["relation"] == "<=" else _ratio(float(bound), value)


def _ratio(larger: float, smaller: float) -> float:
    """The quotient; infinite where the bound is zero or has the other sign, or where no number was measured."""
    if larger != larger or smaller != smaller:
        return float("inf")
    if smaller == 0 or larger == 0 or larger / smaller < 0:
        return float("inf")
    return larger / smaller if smaller > 0 else smaller / larger


def rows(outcome: Caught) -> Iterable[tuple[str, str, str]]:
    """For each contract that failed: its id, the evidence that is furthest off, and its margin."""
    for contract in sorted(outcome.failed):
        broken = [
            evidence for case in outcome.cases_of(contract) for evidence in case["evidence"] if not evidence["holds"]
        ]
        judged = [(margin(evidence), evidence["name"]) for evidence in broken]
        if not judged:
            yield contract, "an exception", "exact"
            continue
        sized = [(size, name) for size, name in judged if size is not None]
        if len(sized) < len(judged) or not sized:
            yield contract, next(name for size, name in judged if size is None), "exact"
            continue
        size, name = max(sized)
        yield contract, name, f"{size:.3g}"


def page(faults: Iterable[Fault]) -> str:
    """Run every fault and return the page."""
    table, caught, made = [], 0, 0
    for fault in faults:
        outcome = run(fault)
        made += 1
        caught += outcome.caught
        print(f"{fault.name}: {'caught' if outcome.caught else 'MISSED'}", file=sys.stderr, flush=True)
        level = "" if fault.level == "quick" else fault.level
        for number, (contract, name, size) in enumerate(list(rows(outcome)) or [("MISSED", "", "")]):
            table.append([fault.summary if number == 0 else "", contract, name.replace("|", "\\|"), size, level])
    head = _HEAD.format(day=datetime.date.today(), torch=torch.__version__, caught=caught, made=made)
    columns = ["fault", "contract", "evidence furthest outside", "margin", "level"]
    return head + "\n" + tabulate(table, headers=columns, tablefmt="github", disable_numparse=True) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Write the page for the faults of the chapters on numerics and parity, or for those that are named."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaigns.margins", description=__doc__)
    parser.add_argument("name", nargs="*", help="only these faults")
    parser.add_argument("-o", "--output", type=Path, help="write to this file (default: standard output)")
    arguments = parser.parse_args(argv)
    chosen = [
        fault
        for fault in load().values()
        if (fault.name in arguments.name if arguments.name else {"numerics", "parity"} & set(fault.chapters))
    ]
    text = page(chosen)
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
