"""The emulated card as a plugin of pytest (-p tests.simulation.emulated.plugin), which the workers of xdist load too.

Cases that take times or peaks of memory run on a simulated card in its place, whose clock is not that of a CPU.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.simulation.card import Simulation

_SIMULATION: pytest.StashKey[Simulation] = pytest.StashKey()
importlib.import_module("tests.simulation.emulated.loading")  # before torch, which the next one imports
importlib.import_module("tests.simulation.emulated.cuda").install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault", metavar="NAME", help="break torch by a fault of tests.simulation.emulated.faults or tests.faults"
    )


def pytest_configure(config: pytest.Config) -> None:
    if name := config.getoption("--fault"):
        from tests.simulation.emulated.faults import applied

        stack = contextlib.ExitStack()
        stack.enter_context(applied(name))
        config.add_cleanup(stack.close)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    if item.get_closest_marker("timed") is None:
        return (yield)
    from tests.simulation.checks import machine

    with machine(_simulation(item.config)):
        return (yield)


def _simulation(config: pytest.Config) -> Simulation:
    """Return the simulated card of the run, by whose clock the deadlines of its chapters go."""
    from conformance.harness.keys import RUN
    from tests.simulation.card import H100
    from tests.simulation.gpu import Simulation

    if _SIMULATION not in config.stash:
        made = config.stash[_SIMULATION] = Simulation(H100)
        config.stash[RUN].deadlines.now = made.timeline.now
    return config.stash[_SIMULATION]
