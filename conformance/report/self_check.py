"""The self-check of a run in words: how many planted faults its contracts noticed, and which they missed."""

from __future__ import annotations

from collections.abc import Iterator

from . import text
from .values import PlantedFault, SelfCheck


def brief(check: SelfCheck) -> str:
    """Return the count in one line."""
    planted = [fault for fault in check.faults if fault.state != "not planted"]
    caught = sum(fault.state == "caught" for fault in planted)
    took = f"({check.duration_s:.1f} s)"
    if not check.faults:
        return f"self-check: no planted fault concerns the selection {took}"
    if not planted:
        return f"self-check: none of {text.count(len(check.faults), 'fault')} can be planted here {took}"
    return f"self-check: caught {caught} of {text.count(len(planted), 'planted fault')} {took}"


def lines(check: SelfCheck) -> Iterator[str]:
    """Yield a line for each fault that was missed or not planted, and one for all that were caught."""
    for fault in check.faults:
        if fault.state != "caught":
            yield text.line(f"{fault.state.upper()} on {fault.target}: {named(fault)}: {fault.summary} {fault.reason}")
    targets: dict[str, list[str]] = {}
    for fault in check.faults:
        if fault.state == "caught":
            targets.setdefault(named(fault), []).append(fault.target)
    caught = [f"{name} on {', '.join(where)}" for name, where in targets.items()]
    if caught:
        yield text.line(f"caught: {'; '.join(caught)}")


def named(fault: PlantedFault) -> str:
    """Return the name of a fault with the contracts that have to notice it."""
    return f"{fault.name} ({', '.join(fault.contracts)})"
