"""The documented example of a workload."""

from __future__ import annotations

import re
from pathlib import Path

from tests.paths import ROOT


def source() -> str:
    """Return the module that docs/own-workloads.md shows."""
    page = (ROOT / "docs" / "own-workloads.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


def written(folder: Path) -> Path:
    """Write the module into a folder; return its path."""
    path = folder / "mine.py"
    path.write_text(source(), encoding="utf-8")
    return path
