"""pytest11 entry point: loads the plugin for `pytest --pyargs amp_conformance`, and nothing for any other run."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

_SUITE = Path(__file__).resolve().parent.parent


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> Generator[None, object, object]:
    """Load the plugin, and with it its options, only where the suite is what is run."""
    names = {argument.split("::")[0].split(".")[0] for argument in args}
    if "--pyargs" not in args or "amp_conformance" not in names:
        return (yield)
    if _SUITE.name != "amp_conformance":  # a checkout that is installed for development
        sys.path.insert(0, str(_SUITE.parent))
    early_config.pluginmanager.import_plugin(f"{_SUITE.name}.harness.plugin")
    try:
        return (yield)
    except ValueError as error:
        raise pytest.UsageError(
            f"a plugin or conftest.py of this project clashes with the suite ({error}): run amp-conformance instead, "
            "which reads neither conftest.py nor the settings of the current folder"
        ) from None
