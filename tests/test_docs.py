"""What the pages point at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
