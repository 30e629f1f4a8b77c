"""A reader that closes the pipe, such as `| head`: the run is INCOMPLETE, where pytest would end with status 1."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main() -> Generator[None, Any, Any]:
    try:
        status = yield
        # A run whose output fits the buffer meets the closed pipe only here.
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # What is left in the buffer goes nowhere, else Python fails over it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return int(pytest.ExitCode.INTERRUPTED)
