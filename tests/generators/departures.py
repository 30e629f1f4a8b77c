"""The page of what moved between torch versions: the departures that began and ended with each.

`python -m tests.generators.departures` writes docs/evidence/departures.md from the waivers of the suite. A run fails
where a waived case passes on fake tensors, and the bounds of the others were run on both sides, or are of what did not
exist before.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from packaging.specifiers import SpecifierSet
from tabulate import tabulate

from conformance.harness import catalogue
from conformance.harness.waivers import Waiver, shipped
from tests.paths import ROOT

PAGE = ROOT / "docs" / "evidence" / "departures.md"
VERSIONS = tuple(f"2.{minor}" for minor in range(6, 16))
_PAGE = """# Departures of stock torch by version

Written by `python -m tests.generators.departures` from the {waivers} waivers of the suite, each of which excuses cases
of one contract in which stock torch breaks a promise; [divergences](../divergences.md) has a snippet for each. A
departure that begins with a version may be of what that version brought: MTIA is there from 2.7 on, MAIA from 2.8 on.

How many waivers apply, by chapter:

{counts}

{steps}"""


def applying(waivers: Sequence[Waiver], version: str) -> list[Waiver]:
    """Return the waivers that apply to a version."""
    return [one for one in waivers if SpecifierSet(one.torch).contains(f"{version}.0")]


def moved(waivers: Sequence[Waiver], before: str, after: str) -> tuple[list[Waiver], list[Waiver]]:
    """Return the waivers that apply to one version and not to the next, and those of the next alone."""
    old, new = applying(waivers, before), applying(waivers, after)
    return [one for one in old if one not in new], [one for one in new if one not in old]


def page(waivers: Sequence[Waiver], chapter_of: Callable[[str], str], chapters: Sequence[str]) -> str:
    """Return the page."""
    by_version = [Counter(chapter_of(one.contract) for one in applying(waivers, version)) for version in VERSIONS]
    rows = [[name, *(found[name] for found in by_version)] for name in chapters if any(f[name] for f in by_version)]
    rows.append(["all", *(sum(found.values()) for found in by_version)])
    steps = []
    for before, after in itertools.pairwise(VERSIONS):
        ended, began = moved(waivers, before, after)
        steps += [f"## From {before} to {after}", "", *_lines("Ended", ended), *_lines("Began", began)]
    return _PAGE.format(
        waivers=len(waivers), counts=tabulate(rows, ["chapter", *VERSIONS], tablefmt="github"), steps="\n".join(steps)
    )


def _lines(title: str, waivers: Sequence[Waiver]) -> list[str]:
    if not waivers:
        return [f"{title}: none.", ""]
    of_reason: dict[str, dict[str, None]] = {}
    for one in waivers:
        of_reason.setdefault(f"{one.reason} ({one.link})", {})[one.contract] = None
    return [f"{title}:", "", *(f"- {', '.join(ids)}: {reason}" for reason, ids in of_reason.items()), ""]


def current() -> str:
    """Return the page of the waivers and the catalogue as they are."""
    known = catalogue.load()
    waivers = shipped(known.contracts)
    return page(waivers, lambda id: known.contracts[id].chapter, [chapter.name for chapter in known.chapters])


def main() -> int:
    """Write the page."""
    PAGE.write_text(current(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
