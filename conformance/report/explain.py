"""The history of every loss scale that a report holds, in plain sentences, and the program of a failed case."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase

from . import text
from .scale_history import ScaleHistory, Stretch, histories
from .values import Report
from .verdicts import Verdict

# So many events are shown one by one; a longer history is cut in its middle.
_TOLD = 12


def scale(report: Report, *, contracts: tuple[str, ...] = (), width: int = 100) -> str | None:
    """Return the history of each loss scale in `report`, or of the contracts that the patterns name; None without any.

    Raises document.ReportError for evidence that claims to be a history and is none.
    """
    every = list(histories(report))
    order = {id: place for place, id in enumerate(report.contracts)}
    chosen = [
        history
        for history in sorted(every, key=lambda history: (order[history.case.contract], history.case.id))
        if not contracts or any(fnmatchcase(history.case.contract, pattern) for pattern in contracts)
    ]
    if not chosen:
        return None
    number = len({history.case.contract for history in chosen})
    head = f"{text.count(len(chosen), 'loss scale')} in {text.count(number, 'contract')}"
    left = f" ({len(every) - len(chosen)} more in other contracts)" if len(chosen) < len(every) else ""
    return "\n\n".join([f"{head}{left}", *(_history(report, history, width) for history in chosen)])


def snippet(report: Report, *, contracts: tuple[str, ...] = (), width: int = 100) -> str | None:
    """Return the program of the first failed case, or of what the patterns name (contracts, or ids of cases).

    It is source to be run, so that no line is wrapped to `width`. None where no such case has one.
    """
    for case in report.cases:
        named = case.id in contracts or any(fnmatchcase(case.contract, one) for one in contracts)
        if (named or not contracts) and case.snippet and case.verdict is Verdict.FAIL:
            return text.clean(case.snippet)
    return None


def _history(report: Report, history: ScaleHistory, width: int) -> str:
    contract = report.contracts[history.case.contract]
    title = text.line(f"{contract.id}  {contract.title}")
    rows = [
        text.wrap(title, width, "", "  "),
        text.wrap(f"case {history.case.id} on {history.case.target}, {history.case.verdict.value}", width, "  "),
        *(text.wrap(words, width, "  ", "    ") for words in _facts(history)),
        *(text.wrap(words, width, "    ", "      ") for words in _events(history)),
        text.wrap(sentence(history), width, "  ", "  "),
    ]
    return "\n".join(rows)


def _facts(history: ScaleHistory) -> Iterator[str]:
    skipped, grew = history.count("skipped"), history.count("grew")
    ran = history.iterations - skipped
    yield (
        f"{history.name}: {text.count(history.iterations, 'iteration')}, {skipped} skipped, {ran} ran, "
        f"{text.count(grew, 'growth')}"
    )
    yield f"began at {number(history.scales[0])}, settled at {number(history.scales[-1])}{_range(history)}"
    if (run := history.longest(without="grew")) is not None:
        yield f"longest run without growth: {text.count(run.count, 'iteration')} ({_span(run)})"


def _range(history: ScaleHistory) -> str:
    later = history.scales[len(history.scales) // 2 :]
    low, high = min(later), max(later)
    return "" if low == high else f", and was between {number(low)} and {number(high)} in the second half"


def _events(history: ScaleHistory) -> Iterator[str]:
    stretches = history.stretches()
    half = _TOLD // 2
    cut = len(stretches) > _TOLD + 1
    for stretch in stretches[:half] if cut else stretches:
        yield _event(stretch)
    if cut:
        yield f"... and so on, {len(stretches) - 2 * half} times more ..."
        yield from map(_event, stretches[-half:])


def _event(stretch: Stretch) -> str:
    if stretch.event == "stayed":
        return f"{_span(stretch)} ran: the scale stayed at {number(stretch.after)}"
    moved = f"from {number(stretch.before)} to {number(stretch.after)}"
    if stretch.event == "grew":
        return f"{_span(stretch)} ran: the scale grew {moved}"
    return f"{_span(stretch)} {_was(stretch.count)} skipped: the scale fell {moved}"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def _span(stretch: Stretch) -> str:
    if stretch.count == 1:
        return f"iteration {stretch.first}"
    return f"iterations {stretch.first} to {stretch.last}"


def sentence(history: ScaleHistory) -> str:
    """Return what the history comes to, in one or two plain sentences."""
    if not history.iterations:
        return "No iteration was run: there is nothing to show."
    last = history.stretches()[-1]
    settled = history.scales[-1]
    if last.event == "skipped" and last.count > 1 and last.count * 2 >= history.iterations:
        below = " It is below 1, where a gradient is inf or NaN whatever the scale is." if settled < 1 else ""
        return f"It was still falling at the end: the last {last.count} iterations were skipped.{below}"
    if settled < 1:
        return (
            "The scale has fallen below 1, which scaling up never needs: look for inf or NaN in the loss or in the "
            "gradients themselves."
        )
    if math.isinf(max(history.scales)):
        return "The scale was infinite, with which no gradient is finite: growth is to stop short of that."
    return _ordinary(history)


def _ordinary(history: ScaleHistory) -> str:
    skipped, grew = history.count("skipped"), history.count("grew")
    if not skipped and not grew:
        return f"The scale never moved: nothing overflowed in {text.count(history.iterations, 'iteration')}."
    if not skipped:
        return "The scale only grew: nothing overflowed, and it may not have found its level yet."
    first = history.stretches()[0]
    began = ""
    if first.event == "skipped":
        factor = first.before / first.after if first.after else math.inf
        began = f"It began {number(factor)} times too large and took {text.count(first.count, 'iteration')} to fall. "
        skipped -= first.count
    if not skipped:
        return f"{began}After that no iteration was skipped." if began else "No iteration was skipped."
    often = f"{text.count(skipped, 'iteration')} {_was(skipped)} skipped {'later' if began else 'on the way'}"
    if (share := skipped / history.iterations) > 0.25:
        return f"{began}{often}, one in {1 / share:.1f}: more than a scale needs to keep its level."
    if not grew:
        return f"{began}{often}, and the scale has not grown since."
    each = "as" if skipped == 1 else "each as"
    why = f"{each} the scale had grown a step too far or an input was out of the ordinary"
    return f"{began}{often}, {why}: the scale has found its level."


def number(value: float) -> str:
    """Return a scale as a person reads it: a power of two as one, others with six digits."""
    if value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5:
        exponent = math.frexp(value)[1] - 1
        return f"{value:.0f}" if 0 <= exponent <= 16 else f"2^{exponent}"
    return text.value(value)
