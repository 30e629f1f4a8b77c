"""The ranks of a run: started when a check first needs them, ended with the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .processes import Groups


@pytest.fixture(scope="session")
def ranks() -> Iterator[Groups]:
    """The groups of ranks of this run, by their number."""
    groups = Groups()
    yield groups
    groups.close()
