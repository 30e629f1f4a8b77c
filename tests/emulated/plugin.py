"""The emulated card as a plugin of pytest (-p tests.emulated.plugin), which the workers of xdist load too.

Cases that take times or peaks of memory run on a simulated card in its place, whose clock is not that of a CPU.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from tests.emulated.loading import load

_card = load()

import pytest  # noqa: E402

from tests.emulated import cuda  # noqa: E402  (torch comes after the card)

if TYPE_CHECKING:
    from tests.simulated_card import Simulation

cuda.install(_card)
_SIMULATION: pytest.StashKey[Simulation] = pytest.StashKey()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    if item.get_closest_marker("timed") is None:
        return (yield)
    from tests.simulated_checks import machine

    with machine(_simulation(item.config)):
        return (yield)


def _simulation(config: pytest.Config) -> Simulation:
    """Return the simulated card of the run, by whose clock the deadlines of its chapters go."""
    from conformance.harness.plugin import RUN
    from tests.simulated_card import H100
    from tests.simulated_gpu import Simulation

    if _SIMULATION not in config.stash:
        made = config.stash[_SIMULATION] = Simulation(H100)
        config.stash[RUN].deadlines.now = made.timeline.now
    return config.stash[_SIMULATION]
