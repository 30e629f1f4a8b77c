"""Check that AMP's Python work does not grow from call to call, and that nothing in it sleeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.waits import voluntary_waits
from ...workloads.amp_uses import Uses
from .python_lines import lines_of

pytestmark = pytest.mark.usefixtures("one_thread")

WARM_UPS, CALLS = 3, 3
# What CPython runs in about a millisecond, at 50 ns a line; the longest use, with torch 2.6's wrappers, takes 3614.
MOST = 20_000


def _always_waits(work: Callable[[], object]) -> bool:
    """Return whether this thread gives its processor up in each of some calls, if the kernel counts it."""
    return all(voluntary_waits(work) for _ in range(CALLS))


def _lines(work: Callable[[], object]) -> list[int]:
    for _ in range(WARM_UPS):
        work()
    return [lines_of(work) for _ in range(CALLS)]


@contract("AMP-SPEED-054")
def test_the_host_does_no_more_from_call_to_call(case: Case, target: Target) -> None:
    uses = Uses(target.device, case.supported(target)[-1])
    for name, use in uses.all().items():
        lines = _lines(use)
        case.equal(f"{name}: lines of Python in each of {CALLS} calls", lines, lines[:1] * CALLS)
        # A backend such as torch_xla computes the gradients of an LSTM by Python code of torch, in a region or not.
        without = _lines(uses.modules_without_amp)[0] if name == "modules" and lines[0] > MOST else 0
        case.at_most(f"{name}: lines of Python that AMP adds", lines[0] - without, MOST)


@contract("AMP-SPEED-054", on="cpu")
def test_the_host_does_not_sleep(case: Case, target: Target) -> None:
    uses = Uses(target.device, case.supported(target)[-1])

    def plain() -> None:
        # The same operations with nothing of AMP.
        torch.nn.functional.linear(uses.x, uses.weights[0]).sum().backward()
        uses.weights[0].grad = None

    waiting = []
    for name, use in uses.all().items():
        use()
        # Seen three times in a row: other causes of a waiting thread come and go.
        if _always_waits(use) and not _always_waits(plain) and _always_waits(use):
            waiting.append(name)
    case.note("uses tried", len(uses.all()))
    case.equal("uses that wait in each call, where the same operations without AMP do not", waiting, [])
