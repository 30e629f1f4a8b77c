"""The catalogue as one page of Markdown that reads from top to bottom as the specification."""

from __future__ import annotations

from collections import Counter

from ..report.text import markdown
from .catalogue import LEVELS, Catalogue, Chapter, Contract


def render(catalogue: Catalogue) -> str:
    """Return the page; the same catalogue always gives the same text."""
    contracts = catalogue.contracts.values()
    levels = Counter(contract.level for contract in contracts)
    counted = ", ".join(f"{levels[level]} {level}" for level in LEVELS)
    parts = [
        "# The contracts",
        f"{len(contracts)} contracts in {len(catalogue.chapters)} chapters: {counted}. This page is written by\n"
        "`python -m conformance catalogue -o docs/contracts.md` from `conformance/chapters/*/contracts.toml`.\n"
        "Short names of sources are spelled out in [Sources](sources.md).",
        *(_chapter(chapter) for chapter in catalogue.chapters),
    ]
    return "\n\n".join(parts) + "\n"


def _chapter(chapter: Chapter) -> str:
    rows = "\n".join(_row(contract) for contract in chapter.contracts)
    head = "| contract | promise | level | authority and source |\n|---|---|---|---|"
    return f"## {chapter.name}: {markdown(chapter.title)}\n\n{markdown(chapter.summary)}\n\n{head}\n{rows}"


def _row(contract: Contract) -> str:
    bounds = [f"since torch {contract.since}"] * bool(contract.since)
    bounds += [f"until torch {contract.until}"] * bool(contract.until)
    bounds += ["with `--workload`"] * (contract.needs == "workload")
    level = ", ".join([contract.level, *bounds])
    promise = f"**{markdown(contract.title)}.** {markdown(contract.statement)}"
    return f"| {contract.id} | {promise} | {level} | {contract.authority}: {markdown(contract.source)} |"
