"""The installed plugin's door: it opens for `pytest --pyargs conformance` and stays shut for every other run."""

from __future__ import annotations

import pytest

_PLUGIN = "conformance.harness.plugin"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Load the plugin, and with it its options, only where the suite is what is run."""
    names = {argument.split("::")[0].split(".")[0] for argument in args}
    if "--pyargs" in args and "conformance" in names:
        early_config.pluginmanager.import_plugin(_PLUGIN)
