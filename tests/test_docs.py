"""What the pages and the catalogue point at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.harness import catalogue

PAGES = [
    path.relative_to(Path(__file__).resolve().parent.parent).as_posix()
    for folder in ("", "docs")
    for path in sorted((Path(__file__).resolve().parent.parent / folder).glob("*.md"))
]


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(root: Path, page: str) -> None:
    path = root / page
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))

    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_sources_of_contracts_can_be_found_by_a_stranger(root: Path) -> None:
    page = (root / "docs" / "sources.md").read_text(encoding="utf-8")
    sources = {contract.id: contract.source for contract in catalogue.load().contracts.values()}
    short = re.compile(r"\b([A-Z][a-z]+)(?: et al\.)? (\d{4})\b")
    named = {pair for source in sources.values() for pair in short.findall(source) if pair[0] != "ICLR"}

    assert {pair for pair in named if not all(word in page for word in pair)} == set()
    assert [id for id, source in sources.items() if re.search(r"source material|\bclaims? S\d", source, re.I)] == []
