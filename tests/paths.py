"""Places of the checkout that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
