"""Two reports compared by one rule: what is worse, what is excused, and what cannot be compared.

`diff` shows the comparison, and a run with --baseline is judged by it.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase

from . import lacking, rollup, speed, text
from .values import AcceptedChange, Case, Report
from .verdicts import Overall, Verdict

_LEVELS = ("quick", "standard", "full")
_TIMED = ("memory", "speed")  # chapters whose figures belong to one class of machine
_BROKEN = frozenset({Verdict.FAIL, Verdict.ERROR, Verdict.WAIVED})
_GONE = "GONE"


class Kind(Enum):
    """How a contract or case differs; members stand in the order in which they are shown."""

    REGRESSED = "Regressed: passed there, does not pass here"
    KNOWN = "Known: passed there, and a waiver or an accepted change excuses it here"
    FIXED = "Fixed: did not hold there, passes here"
    UNDECIDED = "Undecided: passed there, and here the measurement was too noisy to decide"
    GONE = "Gone: judged there, not judged here"
    NEW = "New: judged here only"
    NOT_APPLICABLE = "Not applicable: judged there, and this torch or this machine does not have it"
    NOT_COMPARED = "Not compared: this run was not asked for it, or measured it on another class of machine"
    CHANGED = "Changed otherwise"


@dataclass(frozen=True)
class Change:
    """A contract (`case` is None) or a case whose verdict differs; a verdict of None means not judged.

    `why` is the excuse of a KNOWN change, and the reason of one that is not compared or not applicable.
    """

    contract: str
    case: str | None
    old: Verdict | None
    new: Verdict | None
    kind: Kind
    why: str = ""

    @property
    def id(self) -> str:
        return self.contract if self.case is None else self.case


@dataclass(frozen=True)
class Comparison:
    """What differs between a baseline and a later report, and what of it counts.

    `informing` are the contracts of level info in the baseline, which never count. `incomplete` names the reports that
    are of runs that did not end (`old`, `new`), and then nothing was compared.
    """

    changes: tuple[Change, ...]
    accepted: tuple[AcceptedChange, ...]
    informing: frozenset[str]
    incomplete: tuple[str, ...] = ()

    @property
    def regressed(self) -> tuple[str, ...]:
        """Ids of contracts and cases that passed there and do not here, without an excuse."""
        return self._ids(Kind.REGRESSED)

    @property
    def gone(self) -> tuple[str, ...]:
        """Ids of contracts and cases that passed there and are not judged here, without a reason."""
        return tuple(change.id for change in self._of(Kind.GONE) if change.old is Verdict.PASS)

    @property
    def known(self) -> tuple[Change, ...]:
        """What passed there, does not here, and is excused."""
        return tuple(self._of(Kind.KNOWN))

    @property
    def stale(self) -> tuple[str, ...]:
        """Lines on accepted changes that no longer excuse anything, which fail a comparison."""
        return tuple(problem for one in self.accepted if (problem := _stale(one)) is not None)

    @property
    def worse(self) -> bool:
        """Whether the comparison fails."""
        return bool(self.incomplete or self.regressed or self.gone or self.stale)

    def _ids(self, kind: Kind) -> tuple[str, ...]:
        return tuple(change.id for change in self._of(kind))

    def _of(self, kind: Kind) -> Iterator[Change]:
        return (change for change in self.changes if change.kind is kind and change.contract not in self.informing)


def incomplete(report: Report) -> bool:
    """Whether a report is of a run that did not end, and so cannot be compared."""
    return rollup.overall(report) is Overall.INCOMPLETE


def compare(
    old: Report, new: Report, accepted: Iterable[AcceptedChange] = (), *, today: datetime.date | None = None
) -> Comparison:
    """Compare `new` with the baseline `old`; `accepted` are the lines that excuse changes, until they expire.

    A report of a run that did not end is compared with none.
    """
    unfinished = tuple(name for name, report in (("old", old), ("new", new)) if incomplete(report))
    if unfinished:
        return Comparison((), (), frozenset(), unfinished)
    rule = _Rule(old, new, tuple(accepted), (today or _today()).isoformat())
    found = tuple(rule.changes())
    informing = frozenset(id for id, contract in old.contracts.items() if contract.level == "info")
    return Comparison(found, tuple(rule.states()), informing)


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.timezone.utc).date()


def release(version: str) -> str:
    """Return the release of a version of torch: 2.13 of 2.13.0+cpu."""
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else text.line(version)


class _Rule:
    """The comparison of two reports, while it is made."""

    def __init__(self, old: Report, new: Report, accepted: Sequence[AcceptedChange], today: str) -> None:
        self._old, self._new = old, new
        self._accepted, self._today = accepted, today
        self._matched = [0] * len(accepted)
        self._there = {target.name: target for target in old.header.targets}
        self._here = {target.slot: target for target in new.header.targets}
        self._speeds = speed.differing(old, new)

    def changes(self) -> Iterator[Change]:
        """Yield the contracts and then the cases that differ, in the order of the catalogue."""
        cases = list(self._cases())
        by_contract: dict[str, list[Change]] = {}
        for change in cases:
            by_contract.setdefault(change.contract, []).append(change)
        there, here = rollup.verdicts(self._old), rollup.verdicts(self._new)
        for id in dict.fromkeys([*there, *here]):
            before, after = there.get(id), here.get(id)
            if before is not after:
                yield self._contract(id, before, after, by_contract.get(id, []))
        yield from cases

    def states(self) -> Iterator[AcceptedChange]:
        """Yield the accepted changes with what became of each; to be asked for after `changes`."""
        for line, matched in zip(self._accepted, self._matched, strict=True):
            if line.expires < self._today:
                state = "expired"
            elif matched:
                state = "used"
            else:
                state = "idle" if self._leaves_out(line) else "unused"
            yield replace(line, state=state, matched=matched)  # type: ignore[arg-type]  # one of its literals

    def _leaves_out(self, line: AcceptedChange) -> bool:
        """Whether the newer run was not asked for what a line is about."""
        if line.contract is None or self._new.header.options.selection is not None:
            return bool(text.narrowing(self._new.header.options))
        return line.contract not in self._new.contracts and self._why_not_selected(line.contract) is not None

    def _cases(self) -> Iterator[Change]:
        there, here = ({case.id: case for case in report.cases} for report in (self._old, self._new))
        for id in dict.fromkeys([*there, *here]):
            before, after = there.get(id), here.get(id)
            if before is None or after is None or before.verdict is not after.verdict:
                yield self._case(before, after)

    def _case(self, before: Case | None, after: Case | None) -> Change:
        known = after or before
        assert known is not None
        old, new = (None if case is None else case.verdict for case in (before, after))
        made: Callable[..., Change] = functools.partial(Change, known.contract, known.id, old, new)
        line = self._line(known, old, new)
        excuse = "" if line is None else f"accepted: {text.line(line.reason)} ({_given(line.owner, line.expires)})"
        if before is None:
            return made(Kind.NEW, self._waived(after) if after is not None and after.waiver else "")
        if after is None:
            kind, why = self._absent(before) or (Kind.GONE, "")
            return made(Kind.KNOWN, excuse) if kind is Kind.GONE and line is not None else made(kind, why)
        if old is not Verdict.PASS:
            return made(Kind.FIXED if new is Verdict.PASS and old in _BROKEN else Kind.CHANGED)
        if new is Verdict.INCONCLUSIVE:
            return made(Kind.UNDECIDED)
        if (apart := self._incomparable(before)) is not None:
            return made(*apart)
        if new is Verdict.WAIVED and after.waiver:
            return made(Kind.KNOWN, self._waived(after))
        return made(Kind.REGRESSED) if line is None else made(Kind.KNOWN, excuse)

    def _line(self, case: Case, old: Verdict | None, new: Verdict | None) -> AcceptedChange | None:
        """Return the first accepted change in force that names the change of a case, and count it for all that do."""
        found = None
        for number, line in enumerate(self._accepted):
            if (old, new) == (line.before, line.after) and _names(line, case):
                self._matched[number] += 1
                if found is None and line.expires >= self._today:
                    found = line
        return found

    def _waived(self, case: Case) -> str:
        waivers = self._new.footer.waivers if self._new.footer else ()
        given = [row for row in waivers if row.contract == case.contract and row.reason == case.waiver]
        words = _given(given[0].owner, given[0].expires) if given else "by an unknown owner"
        return f"waived: {text.line(case.waiver or '')} ({words})"

    def _incomparable(self, case: Case) -> tuple[Kind, str] | None:
        """Why a worse time or byte count says nothing of torch, or None."""
        if self._old.contracts[case.contract].chapter not in _TIMED:
            return None
        slot = self._there[case.target].slot if case.target in self._there else case.target
        if (changed := speed.other_class(self._old, self._new, slot)) is not None:
            return Kind.NOT_COMPARED, f"measured on another class of machine ({changed})"
        if self._speeds.get(case.id) is False:
            return Kind.UNDECIDED, "the intervals of the two measurements overlap"
        return None

    def _absent(self, case: Case) -> tuple[Kind, str] | None:
        """Why a case of the baseline is not in the newer report, or None where nothing says so."""
        new = self._new
        torch = release(new.header.environment.torch)
        if new.footer is not None and (reason := new.footer.not_applicable.get(case.id)) is not None:
            return Kind.NOT_APPLICABLE, f"not applicable to this machine: {text.line(reason)}"
        if (bounds := new.header.not_in_force.get(case.contract)) is not None:
            return Kind.NOT_APPLICABLE, f"not applicable to torch {torch}: the contract is {text.line(bounds)}"
        left_out = self._why_not_asked(case)
        if left_out is not None:
            return Kind.NOT_COMPARED, left_out
        target = self._there.get(case.target)
        if target is not None and target.fake and target.slot not in self._here:
            return Kind.NOT_APPLICABLE, f"not applicable to torch {torch}: it has no autocast for {target.device_type}"
        for value in case.parameters.values():
            if (reason := lacking.lacks(torch, value)) is not None:
                return Kind.NOT_APPLICABLE, f"not applicable to torch {torch}: {text.line(reason)}"
        return self._moved(case, torch)

    def _moved(self, case: Case, torch: str) -> tuple[Kind, str] | None:
        """Why an op of a case has no rule in the newer torch, by the versions that have one."""
        target = self._there.get(case.target)
        backend = case.parameters.get("backend", "")
        if target is not None and target.slot in self._here:
            backend = self._here[target.slot].device_type
        rules = (self._new.header.op_policy or {}).get(backend)
        for value in case.parameters.values() if rules else ():
            if rules is not None and (when := rules.not_in_force.get(value)) is not None:
                return Kind.NOT_APPLICABLE, f"not applicable to torch {torch}: {text.line(f'{value} {when}')}"
        return None

    def _why_not_asked(self, case: Case) -> str | None:
        """Which option of the newer run left a case out, or None."""
        there, here = self._old.header.options, self._new.header.options
        if case.contract not in self._new.contracts and (why := self._why_not_selected(case.contract)) is not None:
            return why
        if here.selection is not None:
            return f"left out by {text.line(here.selection)}"
        dtype = case.parameters.get("amp_dtype")
        if here.amp_dtype != "both" and dtype not in (None, here.amp_dtype):
            return f"left out by --amp-dtype {text.line(here.amp_dtype)}"
        target = self._there.get(case.target)
        if target is not None and target.slot not in self._here and (here.gpu or here.devices):
            return f"on {text.line(case.target)}, which this run was not asked for"
        if _depth(here.level) < _depth(there.level):
            return f"left out by --level {text.line(here.level)}"
        return None

    def _why_not_selected(self, contract: str) -> str | None:
        """Which option keeps a contract of the baseline out of the newer run, or None."""
        options = self._new.header.options
        stated = self._old.contracts.get(contract)
        chapter = stated.chapter if stated else contract.split("-")[1].lower() if contract.count("-") > 1 else ""
        for option, name, patterns in (
            ("--chapter", chapter, options.chapters),
            ("--contract", contract, options.contracts),
        ):
            if patterns and not any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns):
                return f"left out by {option} {text.line(', '.join(patterns))}"
        if options.selection is not None and not (options.chapters or options.contracts):
            return f"left out by {text.line(options.selection)}"
        if any("workload" in case.parameters for case in self._old.cases_of.get(contract, ())):
            return "needs --workload, which this run was not given"
        return None

    def _contract(self, id: str, old: Verdict | None, new: Verdict | None, cases: Sequence[Change]) -> Change:
        """Return the change of a contract, which follows from those of its cases."""
        made: Callable[..., Change] = functools.partial(Change, id, None, old, new)
        if old is None:
            return made(Kind.NEW)
        if old is not Verdict.PASS and new is not None:
            return made(Kind.FIXED if new is Verdict.PASS and old in _BROKEN else Kind.CHANGED)
        if new is Verdict.INCONCLUSIVE:
            return made(Kind.UNDECIDED)
        kinds = {change.kind for change in cases if change.old is Verdict.PASS or new is None}
        if new is not None and any(change.kind is Kind.NEW and change.new is new for change in cases):
            # A case that is new here passed nowhere; only one that fails makes the contract worse.
            kinds.add(_OF_NEW.get(new, Kind.CHANGED))
        severe = (Kind.REGRESSED, Kind.GONE, Kind.KNOWN, Kind.UNDECIDED, Kind.NOT_COMPARED, Kind.NOT_APPLICABLE)
        kind = next((one for one in severe if one in kinds), Kind.CHANGED)
        if kind is Kind.GONE and new is not None:
            kind = Kind.REGRESSED
        reasons = (change.why for change in cases if change.kind in (kind, Kind.NEW))
        return made(kind, next(filter(None, reasons), "") if kind is not Kind.REGRESSED else "")


_OF_NEW: Mapping[Verdict, Kind] = {
    Verdict.FAIL: Kind.REGRESSED,
    Verdict.ERROR: Kind.REGRESSED,
    Verdict.WAIVED: Kind.KNOWN,
}


def _depth(level: str) -> int:
    return _LEVELS.index(level) if level in _LEVELS else len(_LEVELS)


def _names(line: AcceptedChange, case: Case) -> bool:
    """Whether an accepted change is about a case: of its contract, or of its op in any contract."""
    if line.contract is not None and line.contract != case.contract:
        return False
    if line.op is not None and not any(line.op in (value, value.split(".")[0]) for value in case.parameters.values()):
        return False
    # A case id holds brackets, which fnmatch would read as a character set.
    return any(fnmatchcase(case.id, pattern.replace("[", "[[]")) for pattern in line.cases)


def _given(owner: str, expires: str) -> str:
    return f"{text.line(owner)}, until {text.line(expires)}"


def _stale(line: AcceptedChange) -> str | None:
    """Say why a line on an accepted change fails the comparison, or None."""
    after = _GONE if line.after is None else line.after.value
    name = f"the accepted change of {text.line(line.contract or line.op or '')} ({line.before.value} -> {after})"
    return {
        "expired": f"{name} expired on {line.expires}",
        "unused": f"{name} is not needed: nothing changed so",
    }.get(line.state)
