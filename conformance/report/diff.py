"""Two reports compared: what changed around the run first, then what regressed, then the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from . import fingerprint, rollup, speed, text
from .values import Report
from .verdicts import Verdict

_CASES_SHOWN = 3
_CONTRACTS_SHOWN = 40
_MARGIN = "  "
_BROKEN = frozenset({Verdict.FAIL, Verdict.ERROR, Verdict.WAIVED})


class Kind(Enum):
    """How a contract or case differs; members stand in the order in which they are shown."""

    REGRESSED = "Regressed: passed there, does not pass here"
    UNDECIDED = "Undecided: passed there, and here the measurement was too noisy to decide"
    GONE = "Gone: judged there, not judged here"
    FIXED = "Fixed: did not hold there, passes here"
    NEW = "New: judged here only"
    CHANGED = "Changed otherwise"


@dataclass(frozen=True)
class Change:
    """A contract (`case` is None) or a case whose verdict differs; a verdict of None means not judged."""

    contract: str
    case: str | None
    old: Verdict | None
    new: Verdict | None
    kind: Kind

    @property
    def id(self) -> str:
        return self.contract if self.case is None else self.case


@dataclass(frozen=True)
class Around:
    """One fact about the machine, the software or the options that differs."""

    name: str
    old: str
    new: str


@dataclass(frozen=True)
class Regressions:
    """Ids of contracts and cases that passed there and do not pass (`regressed`) or are not there (`gone`) now.

    What could not be decided this time is neither: the run that it belongs to is INCONCLUSIVE by itself.
    """

    regressed: tuple[str, ...]
    gone: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.regressed or self.gone)


def regressions(old: Report, new: Report) -> Regressions:
    """Compare `new` with the baseline `old`; contracts that were of level info there never count."""
    passed = [
        change
        for change in changes(old, new)
        if change.old is Verdict.PASS and old.contracts[change.contract].level != "info"
    ]
    return Regressions(
        tuple(change.id for change in passed if change.kind is Kind.REGRESSED),
        tuple(change.id for change in passed if change.new is None),
    )


def changes(old: Report, new: Report) -> list[Change]:
    """Return the contracts and then the cases whose verdicts differ, in the order of the catalogue."""
    there, here = _verdicts(old), _verdicts(new)
    return [
        Change(contract, case, there.get((contract, case)), here.get((contract, case)), kind)
        for contract, case in dict.fromkeys([*there, *here])
        if (kind := _kind(there.get((contract, case)), here.get((contract, case)))) is not None
    ]


def _verdicts(report: Report) -> dict[tuple[str, str | None], Verdict | None]:
    contracts: dict[tuple[str, str | None], Verdict | None] = {
        (id, None): verdict for id, verdict in rollup.verdicts(report).items()
    }
    return contracts | {(case.contract, case.id): case.verdict for case in report.cases}


def _kind(old: Verdict | None, new: Verdict | None) -> Kind | None:
    if old is new:
        return None
    if new is None:
        return Kind.GONE
    if old is None:
        return Kind.NEW
    if old is Verdict.PASS:
        return Kind.UNDECIDED if new is Verdict.INCONCLUSIVE else Kind.REGRESSED
    return Kind.FIXED if new is Verdict.PASS and old in _BROKEN else Kind.CHANGED


def around(old: Report, new: Report) -> list[Around]:
    """Return what differs around the runs: torch, driver and devices first, then flags, then the rest."""
    there, here = dict(_facts(old)), dict(_facts(new))
    # The order of the newer report, with what only the older one has at the end.
    return [
        Around(name, there.get(name, "absent"), here.get(name, "absent"))
        for name in dict.fromkeys([*here, *there])
        if there.get(name) != here.get(name)
    ]


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    header = report.header
    environment = vars(header.environment)
    first = ("torch", "torch_git", "cuda_build", "hip_build", "driver")
    for name in first:
        yield name.replace("_", " "), _plain(environment[name])
    for target in header.targets:
        yield f"target {target.slot}", target.name
        for name, value in target.probe.items():
            yield f"target {target.slot}: {name}", _plain(value)
    for name, value in header.flags.items():
        yield name, _plain(value)
    for name, value in header.variables.items():
        yield f"variable {name}", value
    for name, value in environment.items():
        if name not in (*first, "packages"):
            yield name, _plain(value)
    for name, value in vars(header.suite).items():
        yield f"suite {name}", _plain(value)
    for name, value in vars(header.options).items():
        yield f"option {name}", _plain(value)
    for name, value in header.environment.packages.items():
        yield f"package {name}", value


def _plain(value: Any) -> str:
    return "none" if value is None else text.value(value)


def render(old: Report, new: Report, *, names: tuple[str, str], width: int = 100) -> str:
    """Return the comparison in lines of at most `width`; `names` are what the reader calls the two reports."""
    sections = [_runs(old, new, names), _surroundings(old, new, width)]
    sections += [_arithmetic(old, new, width), _speed(old, new, width)]
    found = changes(old, new)
    sections += [_section(kind, [c for c in found if c.kind is kind], old, new, width) for kind in Kind]
    return "\n\n".join(section for section in [*sections, _conclusion(old, new, found)] if section)


def _runs(old: Report, new: Report, names: tuple[str, str]) -> str:
    rows = []
    for word, name, report in (("old", names[0], old), ("new", names[1], new)):
        torch = report.header.environment.torch
        overall = rollup.overall(report).value
        rows.append(text.line(f"{word}: {name}, {overall}, torch {torch}, started {report.header.started}"))
    return "\n".join(rows)


def _surroundings(old: Report, new: Report, width: int) -> str:
    found = around(old, new)
    if not found:
        return "Environment: the same machine, software, flags and options."
    rows = [_heading("Environment: what differs")]
    rows += [text.wrap(f"{fact.name}: {fact.old} -> {fact.new}", width, _MARGIN, _MARGIN * 3) for fact in found]
    return "\n".join(rows)


def _arithmetic(old: Report, new: Report, width: int) -> str:
    """What changed in the numerics fingerprint: no verdict, and the first thing to know of other results."""
    found = fingerprint.differences(old, new)
    if not found:
        return ""
    rows = [_heading(f"Numerics fingerprint: what differs ({text.count(len(found), 'row')})")]
    several = len({row.target for row in found}) > 1
    rows += [text.wrap(f"{row.target}, {row}" if several else str(row), width, _MARGIN, _MARGIN * 3) for row in found]
    return "\n".join(rows)


def _speed(old: Report, new: Report, width: int) -> str:
    """Which speed-ups changed by more than their intervals: no verdict, and what an upgrade is asked for."""
    found = speed.differences(old, new)
    if not found:
        return ""
    rows = [_heading(f"Speed-ups: what differs by more than the intervals ({text.count(len(found), 'measurement')})")]
    return "\n".join([*rows, *(text.wrap(row, width, _MARGIN, _MARGIN * 3) for row in found)])


def _heading(title: str) -> str:
    return f"{title}\n{'-' * len(title)}"


def _section(kind: Kind, found: list[Change], old: Report, new: Report, width: int) -> str:
    """The changes of one kind, by contract."""
    if not found:
        return ""
    ids = list(dict.fromkeys(change.contract for change in found))
    rows = [_heading(f"{kind.value} ({text.tally([change.id for change in found])})")]
    for id in ids[:_CONTRACTS_SHOWN]:
        rows += _contract([change for change in found if change.contract == id], old, new, width)
    if len(ids) > _CONTRACTS_SHOWN:
        rows.append(f"{_MARGIN}... and {text.count(len(ids) - _CONTRACTS_SHOWN, 'more contract')}")
    return "\n".join(rows)


def _contract(found: list[Change], old: Report, new: Report, width: int) -> Iterator[str]:
    contract = new.contracts.get(found[0].contract) or old.contracts[found[0].contract]
    info = " (for information only)" if contract.level == "info" else ""
    yield text.wrap(f"{contract.title}{info}", width, f"{_MARGIN}{contract.id}  ", _MARGIN * 3)
    verdicts = [change for change in found if change.case is None]
    cases = [change for change in found if change.case is not None]
    if verdicts:
        words = f"the contract: {_step(verdicts[0])}{_why(new, contract.id)}"
        yield text.wrap(words, width, _MARGIN * 2, _MARGIN * 4)
    for change in cases[:_CASES_SHOWN]:
        yield text.wrap(f"{change.id}: {_step(change)}{_seen(change, new)}", width, _MARGIN * 2, _MARGIN * 4)
    if len(cases) > _CASES_SHOWN:
        yield f"{_MARGIN * 2}... and {text.count(len(cases) - _CASES_SHOWN, 'more case')}"


def _step(change: Change) -> str:
    return " -> ".join("not judged" if verdict is None else verdict.value for verdict in (change.old, change.new))


def _why(report: Report, contract: str) -> str:
    """Why a contract was not judged here, where the report says so."""
    result = report.footer.contracts.get(contract) if report.footer else None
    return f", {text.line(result.reason)}" if result is not None and result.verdict is None else ""


def _seen(change: Change, new: Report) -> str:
    """What the case saw in the newer run, where it did not pass."""
    case = next((case for case in new.cases_of.get(change.contract, []) if case.id == change.case), None)
    if case is None or case.verdict is Verdict.PASS:
        return ""
    return f", {text.sighting(case)}"


def _conclusion(old: Report, new: Report, found: list[Change]) -> str:
    rows, ratios = len(fingerprint.differences(old, new)), len(speed.differences(old, new))
    return (
        _judgement(old, new, found)
        + f" The arithmetic differs in {text.count(rows, 'row')}, above." * bool(rows)
        + f" {text.count(ratios, 'speed-up')} differ{'s' * (ratios == 1)}, above." * bool(ratios)
    )


def _judgement(old: Report, new: Report, found: list[Change]) -> str:
    worse = regressions(old, new)
    if worse:
        parts = [f"passed there, not here: {text.tally(worse.regressed)}"] if worse.regressed else []
        parts += [f"passed there, gone here: {text.tally(worse.gone)}"] if worse.gone else []
        return f"REGRESSION: {'; '.join(parts)}."
    if not found:
        return "NO REGRESSION: every contract and every case has the same verdict."
    return f"NO REGRESSION: nothing that passed is worse; different: {text.tally([change.id for change in found])}."
