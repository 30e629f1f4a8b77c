"""How long the HTML file of a report takes to open in a headless browser.

`python -m tests.generators.page_times FILE ...` prints a line for each file.

Seconds from the request for the file until the filter over all cases can be used; the smallest and the median of runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.report import browser


def main(arguments: Sequence[str] | None = None) -> int:
    """Open each file several times, and print a line for it."""
    parser = argparse.ArgumentParser("python -m tests.generators.page_times", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    if browser.PROGRAM is None:
        print(browser.WHY_NOT, file=sys.stderr)
        return 4
    with browser.started() as window:
        for file in options.files:
            seconds = []
            for _ in range(options.runs):
                window.open(file.resolve())
                seconds.append(window.ask(browser.READY) / 1000)
            size = file.stat().st_size
            print(f"{file.name}: {size} bytes, {min(seconds):.2f} s (median {statistics.median(seconds):.2f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
