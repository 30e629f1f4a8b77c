"""Hands pytest to the suite's plugin."""

pytest_plugins = ("conformance.harness.plugin",)
