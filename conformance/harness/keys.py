"""Keys under which hooks find the run and the case on pytest's objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .check import Case
    from .run import Run

RUN: pytest.StashKey[Run] = pytest.StashKey()
CASE: pytest.StashKey[Case] = pytest.StashKey()
