"""A plugin of pytest that breaks torch for a run in a process of its own: -p tests.faults.plugin --fault NAME.

`--first CASE` runs that case before all others.
"""

from __future__ import annotations

import contextlib

import pytest

from conformance.harness.items import facts
from tests.faults import load


class First:
    """A plugin of pytest that puts a case before all others, which keep their order."""

    def __init__(self, case: str) -> None:
        self.case = case

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Move the case to the front."""
        items.sort(key=lambda item: (found := facts(item)) is None or found.id != self.case)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault", metavar="NAME", help="break torch by a fault of tests.faults")
    parser.addoption("--first", metavar="CASE", help="run this case before all others")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Apply the fault, once what --import names has been imported."""
    if name := config.getoption("--fault"):
        stack = contextlib.ExitStack()
        stack.enter_context(load()[name].applied())
        config.add_cleanup(stack.close)
    if case := config.getoption("--first"):
        config.pluginmanager.register(First(case))
