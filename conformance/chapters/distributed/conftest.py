"""The ranks of a run: started when a check first needs them, ended with the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ...harness.targets import Target
from .processes import Groups


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[str, Groups]]:
    """The groups of this run, by the type of the ranks' devices."""
    made: dict[str, Groups] = {}
    yield made
    for one in made.values():
        one.close()


@pytest.fixture
def ranks(target: Target, groups: dict[str, Groups]) -> Groups:
    """The groups of ranks on the target's type of device, by their number."""
    if target.device_type not in groups:
        groups[target.device_type] = Groups(target.device_type)
    return groups[target.device_type]
