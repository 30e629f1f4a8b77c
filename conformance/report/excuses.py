"""What was waived in a run: a line for each contract in its summary, and in full for whoever asks why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from . import text
from .values import Case, Contract, Report, Waiver
from .verdicts import Verdict

_MARGIN = "  "
_NAMES_SHOWN = 6


@dataclass(frozen=True)
class Excuse:
    """Cases of one contract that were excused for one reason; `waiver` is None where the run did not end."""

    contract: Contract
    reason: str
    cases: tuple[Case, ...]
    waiver: Waiver | None

    @property
    def given(self) -> str:
        """Who answers for the excuse and until when; empty where that is not known."""
        return f"{self.waiver.owner}, until {self.waiver.expires}" if self.waiver else ""


def excuses(report: Report) -> list[Excuse]:
    """Return what was waived, in the order of the catalogue."""
    used = [waiver for waiver in report.footer.waivers if waiver.state == "used"] if report.footer else []
    found = []
    for id, cases in report.cases_of.items():
        reasons: dict[str, list[Case]] = {}
        for case in cases:
            if case.verdict is Verdict.WAIVED:
                reasons.setdefault(case.waiver or "no reason is given", []).append(case)
        for reason, under in reasons.items():
            waiver = next((one for one in used if (one.contract, one.reason) == (id, reason)), None)
            found.append(Excuse(report.contracts[id], reason, tuple(under), waiver))
    return found


def brief(report: Report, width: int) -> list[str]:
    """Return a line for each waived contract, below who answers for the waiver: its cases, and what does not hold."""
    groups: dict[str, dict[str, int]] = {}
    for excuse in excuses(report):
        counted = groups.setdefault(excuse.given, {})
        counted[excuse.contract.id] = counted.get(excuse.contract.id, 0) + len(excuse.cases)
    rows = []
    for given, counted in groups.items():
        rows += [text.wrap(f"by {given}:", width, _MARGIN)] if given else []
        name, number = max(map(len, counted)), len(str(max(counted.values())))
        rows += [
            text.cut(f"{_MARGIN}{id:<{name}}  {count:>{number}}  ", report.contracts[id].title, width)
            for id, count in counted.items()
        ]
    return rows


def render(report: Report, *, contracts: tuple[str, ...] = (), width: int = 100) -> str | None:
    """Return in full what was waived, or of the contracts that the patterns name; None where nothing was."""
    every = excuses(report)
    chosen = [one for one in every if not contracts or any(fnmatchcase(one.contract.id, name) for name in contracts)]
    if not chosen:
        return None
    number = sum(len(excuse.cases) for excuse in chosen)
    head = f"{text.count(number, 'case')} waived: each fails, and a written excuse says so"
    return "\n\n".join([head, *("\n".join(_lines(excuse, width)) for excuse in chosen)])


def _lines(excuse: Excuse, width: int) -> Iterator[str]:
    cases = [case.id.removeprefix(excuse.contract.id).strip("[]") or case.id for case in excuse.cases]
    yield text.wrap(excuse.contract.title, width, f"{excuse.contract.id}  ", _MARGIN)
    for name, words in (
        ("promised", f"{excuse.contract.statement} ({excuse.contract.level}, {excuse.contract.authority})"),
        ("seen", text.sighting(excuse.cases[0])),
        ("in", f"{text.count(len(cases), 'case')}: {text.some(cases, _NAMES_SHOWN)}"),
        ("excuse", excuse.reason),
        ("given by", excuse.given or "not known: the run did not end"),
    ):
        yield text.wrap(words, width, f"{_MARGIN}{name:<10}")
    if excuse.waiver:
        # Not wrapped: it is there to be copied.
        yield f"{_MARGIN}{'read on':<10}{text.line(excuse.waiver.link)}"
