"""What fails a run and is no failure of a case, in pytest's JUnit file: CI systems show that file alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

_PLACE = "conformance.py"


def add(config: pytest.Config, failures: Mapping[str, str]) -> None:
    """Add a failed test for each of `failures` (name and message) to the JUnit file, where one is written."""
    try:
        from _pytest.junitxml import xml_key
    except ImportError:  # pytest keeps its plugin for these files to itself, and may move it
        return
    xml = config.stash.get(xml_key, None)
    if xml is None:
        return
    for name, message in failures.items():
        node = f"{_PLACE}::{name}"
        location = (_PLACE, None, name)
        for when in ("setup", "call", "teardown"):
            failed = when == "call"
            xml.pytest_runtest_logreport(
                pytest.TestReport(
                    node, location, {}, "failed" if failed else "passed", message if failed else None, when
                )
            )
