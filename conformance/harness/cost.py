"""What the judgement of the user's workload takes: the pace of its steps, and the whole, in lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .time_limit import round_up, rounded

if TYPE_CHECKING:
    import torch

    from .items import Facts
    from .run import Run
    from .targets import Target


def lines(run: Run, cases: Sequence[Facts]) -> list[str]:
    """Return for each device the seconds of a step, and what all cases take at this level and at least."""
    found = []
    for target in dict.fromkeys(case.target for case in cases):
        mine = [case for case in cases if case.target is target]
        found.append(f"workload: {run.options.workload} on {target.name}: a step takes {_paces(run, target)}")
        level, least = (_seconds(run, mine, name) for name in (run.options.level, "fewest"))
        limit = run.time_limit.seconds
        room = (
            "" if level <= limit else f"; fewer seeds and steps are taken where it is short, at least {rounded(least)}"
        )
        more = f", --time-limit {round_up(level)} for all" if level > limit else ""
        found.append(
            f"workload: about {rounded(level)} at --level {run.options.level}, of a limit of {limit:g} s{more}{room}"
        )
    return found


def longest_step(run: Run, target: Target) -> float:
    """Return the longest of the known seconds of a step on the target, or 0."""
    assert run.own is not None
    return max((pace.step for (device, _), pace in run.own.paces.items() if device == target.device), default=0.0)


def _paces(run: Run, target: Target) -> str:
    assert run.own is not None
    return ", ".join(
        f"{_short(pace.step)} in {'fp32' if dtype is None else str(dtype).removeprefix('torch.')}"
        for (device, dtype), pace in run.own.paces.items()
        if device == target.device
    )


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms" if seconds < 0.1 else f"{seconds:.2g} s"


def _seconds(run: Run, cases: Iterable[Facts], name: str) -> float:
    return sum(case.steps.get(name, 1) * seconds for case, seconds in _with_pace(run, cases))


def _with_pace(run: Run, cases: Iterable[Facts]) -> Iterator[tuple[Facts, float]]:
    """Yield each case with the seconds of its steps: half of them are in fp32, half in its own dtype."""
    assert run.own is not None
    for case in cases:
        dtype: torch.dtype | None = case.parameters.get("amp_dtype")
        plain = run.own.paces.get((case.target.device, None))
        low = run.own.paces.get((case.target.device, dtype), plain)
        if plain is not None and low is not None:
            yield case, (plain.step + low.step) / 2
