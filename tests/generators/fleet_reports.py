"""Write the reports of a fleet that does not exist, to measure `merge`: `python -m tests.generators.fleet_reports`.

Each is the report SOURCE of a real run, with cases repeated until there are enough, times of its own, labels, one of
three drivers, and the digest that a run would write. One machine in 200 is slow; in one of 250 the last bits of a
measured value differ.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.report import consistency, layout

_TIMES = ("AMP ms", "baseline ms")
_DRIVERS = ("570.10", "575.20", "580.30")


def grown(report: dict[str, Any], cases: int) -> None:
    """Repeat cases that passed, under other ids, until the folded `report` has as many as `cases`."""
    left = cases - sum(len(check["cases"]) for check in report["checks"])
    rounds = 0
    while left > 0:
        rounds += 1
        for check in report["checks"]:
            names = len(check["parameters"])
            some = [case for case in check["cases"] if case[2] == "PASS" and case[0] and "~" not in case[0]][:left]
            for id, *middle in some if len(check["cases"]) > 3 else ():
                values = middle[4]["parameters"] if len(middle) > 4 else id.split("-")[-names:] if names else []
                check["cases"].append([f"{id}~{rounds}", *middle[:4], {"parameters": values}])
                report["footer"]["contracts"][check["contract"]]["cases"] += 1
                report["footer"]["totals"]["PASS"] += 1
                left -= 1
    for check in report["checks"]:
        check["cases"].sort(key=lambda case: case[0] or "")


def _numbers(report: dict[str, Any]) -> Iterator[tuple[list[Any], int]]:
    """Yield where a measured number of numerics stands."""
    for check in report["checks"]:
        for case in check["cases"] if check["contract"].startswith("AMP-NUMERICS") else ():
            for item in case[4]:
                if isinstance(item, list) and len(item) == 2 and isinstance(item[1], float) and item[1] > 0:
                    yield item, 1


def fleet(report: dict[str, Any], count: int) -> Iterator[tuple[str, str]]:
    """Yield name and text of the reports of `count` machines; `report` is changed."""
    draw = random.Random(0)
    numbers = list(_numbers(report))
    for number in range(count):
        factor = 1.3 if number % 200 == 7 else 1.0
        report["header"]["options"]["labels"] = {"host": f"node{number:04d}", "rack": f"R{number // 32}"}
        report["header"]["environment"]["driver"] = _DRIVERS[number % len(_DRIVERS)]
        for check in report["checks"]:
            for case in check["cases"]:
                case[3] = round(abs(draw.gauss(0.01, 0.003)), 4)
                for item in case[4] if check["contract"].startswith("AMP-SPEED") else ():
                    for pair in item[1] if isinstance(item, list) and isinstance(item[1], list) else ():
                        if isinstance(pair, list) and pair[0] in _TIMES:
                            pair[1] = 0.1 * factor * draw.gauss(1, 0.02)
        place, at = numbers[number % len(numbers)] if number % 250 == 11 and numbers else ([None], 0)
        kept = place[at]
        if kept is not None:
            place[at] = kept * (1 - 2**-50)
        report["footer"]["duration_s"] = round(100 * factor * draw.gauss(1, 0.02), 3)
        report["footer"].pop("digest", None)
        report["footer"]["digest"] = consistency.digest(report)
        yield f"node{number:04d}", "".join(layout.written(report))
        place[at] = kept


def main() -> None:
    """Write the reports into a folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("source", type=Path, help="report.json of a finished run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--cases", type=int, default=10000)
    asked = parser.parse_args()
    report = json.loads(asked.source.read_text(encoding="ascii"))
    grown(report, asked.cases)
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name, text in fleet(report, asked.count):
        (asked.folder / f"{name}.json").write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
