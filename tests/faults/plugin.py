"""A plugin of pytest that breaks torch for a run in a process of its own: -p tests.faults.plugin --fault NAME."""

from __future__ import annotations

import contextlib

import pytest

from tests.faults import load


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault", metavar="NAME", help="break torch by a fault of tests.faults")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Apply the fault, once what --import names has been imported."""
    if name := config.getoption("--fault"):
        stack = contextlib.ExitStack()
        stack.enter_context(load()[name].applied())
        config.add_cleanup(stack.close)
