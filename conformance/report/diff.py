"""Two reports compared, for a reader: what moved in op policy, what changed around the run, and then verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from . import causes, fingerprint, reach, rollup, speed, surface_diff, text
from .comparison import Change, Comparison, Kind, release
from .surface import Backend
from .values import AcceptedChange, Case, Evidence, Header, OpPolicy, Report
from .verdicts import Verdict

_CASES_SHOWN = 3
_CONTRACTS_SHOWN = 40
_EVIDENCE_SHOWN = 2
_REASONS_SHOWN = 12
_SIGHTING = 300  # characters of what one case saw
_NUMBERS = 8  # more of them are a tensor, of which a reader wants the size and the range
_MARGIN = "  "
# Kinds that are told by reason, as each reason holds for many cases.
_BY_REASON = (Kind.KNOWN, Kind.NOT_APPLICABLE, Kind.NOT_COMPARED)


@dataclass(frozen=True)
class Around:
    """One fact about the machine, the software or the options that differs."""

    name: str
    old: str
    new: str


def around(old: Report, new: Report) -> list[Around]:
    """Return what differs around the runs: torch, driver and devices first, then flags, then the rest."""
    slots = [{target.slot for target in report.header.targets} for report in (old, new)]
    # Every run has variables, if only those that the suite sets; a baseline has none.
    variables = bool(old.header.variables and new.header.variables)
    entries = _entries(old.header, new.header)
    there, here = (dict(_facts(report, slots[0] & slots[1], variables, entries)) for report in (old, new))
    # The order of the newer report, with what only the older one has at the end.
    return [
        Around(name, there.get(name, "absent"), here.get(name, "absent"))
        for name in dict.fromkeys([*here, *there])
        if there.get(name) != here.get(name)
    ]


def _entries(old: Header, new: Header) -> set[str]:
    """Return the entries of torch.backends to compare: those that neither run had without loading them."""
    if not (old.torch_backends and new.torch_backends):
        return set()  # older reports have none
    found = (*old.torch_backends.items(), *new.torch_backends.items())
    return {name for name, _ in found} - {name for name, settings in found if not settings}


def _facts(
    report: Report, shared: Collection[str], variables: bool, entries: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield what is around a run: probes of targets in the `shared` slots, and these `entries` of torch.backends."""
    header = report.header
    environment = vars(header.environment)
    first = ("torch", "torch_git", "cuda_build", "hip_build", "driver")
    for name in first:
        yield name.replace("_", " "), _plain(environment[name])
    for target in header.targets:
        yield f"target {target.slot}", target.name
        for name, value in target.probe.items() if target.slot in shared else ():
            yield f"target {target.slot}: {name}", _plain(value)
    for name, value in header.flags.items():
        yield name, _plain(value)
    for entry, settings in header.torch_backends.items():
        for name, value in settings.items() if entry in entries else ():
            yield f"torch.backends.{entry}.{name}", _plain(value)
    for name, value in header.variables.items() if variables else ():
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
    for device_type, sources in header.autocast_kernels.items():
        yield f"autocast kernels of {device_type}", reach.sources(sources)
    for origin, names in header.replaced_functions.items():
        yield f"replaced by {origin}", ", ".join(names)


def _plain(value: Any) -> str:
    return "none" if value is None else text.value(value)


def render(old: Report, new: Report, comparison: Comparison, *, names: tuple[str, str], width: int = 100) -> str:
    """Return the comparison in lines of at most `width`; `names` are what the reader calls the two reports."""
    if comparison.incomplete:
        return "\n\n".join((_unfinished(old, new, comparison, names, width), _runs(old, new, names)))
    sections = [_runs(old, new, names), _policy(old, new, width), _surroundings(old, new, width)]
    sections += [_arithmetic(old, new, width), _speed(old, new, width)]
    for kind in Kind:
        found = [change for change in comparison.changes if change.kind is kind]
        sections.append((_reasons if kind in _BY_REASON else _section)(kind, found, old, new, width))
    sections += [_accepted(comparison, width), _conclusion(old, new, comparison)]
    return "\n\n".join(section for section in sections if section)


def _unfinished(old: Report, new: Report, comparison: Comparison, names: tuple[str, str], width: int) -> str:
    """Say which run did not end, before anything else: what it holds must not pass for a comparison."""
    rows = []
    for side, name, report in (("old", names[0], old), ("new", names[1], new)):
        if side in comparison.incomplete:
            how = "it was interrupted" if report.footer else "it was killed, or still runs"
            held = text.count(len(report.cases), "case")
            words = f"INCOMPLETE: {name} is of a run that did not end ({how}; {held} recorded): nothing is compared."
            rows.append(text.wrap(words, width, "", _MARGIN))
    return "\n".join(rows)


def _runs(old: Report, new: Report, names: tuple[str, str]) -> str:
    rows = []
    for word, name, report in (("old", names[0], old), ("new", names[1], new)):
        torch = report.header.environment.torch
        overall = rollup.overall(report).value
        rows.append(text.line(f"{word}: {name}, {overall}, torch {torch}, started {report.header.started}"))
    return "\n".join(rows)


def moved(old: Report, new: Report) -> list[str]:
    """Return a sentence for each move of op policy on the backends that both reports have rules of."""
    there, here = old.header.op_policy or {}, new.header.op_policy or {}
    backends = [backend for backend in here if backend in there]
    found = [
        change
        for backend in backends
        for change in surface_diff.of_backend(text.line(backend), _rules(there[backend]), _rules(here[backend]))
    ]
    return [text.line(sentence.spoken) for sentence in surface_diff.said(found)]


def _builds(old: Report, new: Report) -> str:
    """Say which toolkit only one of the builds of torch has; which version of it decides nothing."""
    there, here = old.header.environment, new.header.environment
    toolkits = (("CUDA", there.cuda_build, here.cuda_build), ("HIP", there.hip_build, here.hip_build))
    words = [
        f"{name} {'without -> with' if before is None else 'with -> without'}"
        for name, before, after in toolkits
        if (before is None) is not (after is None)
    ]
    return f"The builds of torch differ ({', '.join(words)})" if words else ""


def _rules(policy: OpPolicy) -> Backend:
    overloads = {name: rule for rule, names in policy.overloads.items() for name in names}
    return Backend(policy.key, policy.amp_dtype, overloads, {}, {})  # type: ignore[arg-type]  # as the file says


def _policy(old: Report, new: Report, width: int) -> str:
    missing = [word for word, report in (("old", old), ("new", new)) if report.header.op_policy is None]
    if missing:
        return text.wrap(f"Op policy: not compared, as the {' and the '.join(missing)} report has no rules.", width)
    found = moved(old, new)
    if not found:
        return "Op policy: no rule moved."
    rows = [_heading("Op policy: what moved")]
    if builds := _builds(old, new):
        rows.append(text.wrap(f"{builds}: a build registers only the kernels that it carries.", width))
    return "\n".join([*rows, *(text.wrap(sentence, width, _MARGIN, _MARGIN * 3) for sentence in found)])


def _surroundings(old: Report, new: Report, width: int) -> str:
    found = [f"{fact.name}: {fact.old} -> {fact.new}" for fact in around(old, new)]
    rows = fingerprint.differences(old, new)
    found += [text.line(f"{row.target}: {row}") for row in rows if not row.arithmetic]
    if not found:
        return "Environment: the same machine, software, flags and options."
    head = _heading("Environment: what differs")
    return "\n".join([head, *(text.wrap(words, width, _MARGIN, _MARGIN * 3) for words in found)])


def _arithmetic(old: Report, new: Report, width: int) -> str:
    """What changed in the numerics fingerprint: no verdict, and the first thing to know of other results."""
    found = [row for row in fingerprint.differences(old, new) if row.arithmetic]
    if not found:
        return ""
    rows = [_heading(f"Numerics fingerprint: what differs ({text.count(len(found), 'row')})")]
    several = len({row.target for row in found}) > 1
    rows += [text.wrap(f"{row.target}, {row}" if several else str(row), width, _MARGIN, _MARGIN * 3) for row in found]
    return "\n".join(rows)


def _speed(old: Report, new: Report, width: int) -> str:
    """Which speed-ups changed by more than both intervals: no verdict, and what an upgrade is asked for."""
    found, apart = speed.differences(old, new), speed.not_compared(old, new)
    rows = [_heading(f"Speed-ups: what differs by more than both intervals ({text.count(len(found), 'measurement')})")]
    rows += [text.wrap(row, width, _MARGIN, _MARGIN * 3) for row in found]
    lines = [text.wrap(f"{row[0].upper()}{row[1:]}.", width, "", _MARGIN) for row in apart]
    return "\n".join([*(rows if found else []), *lines])


def _heading(title: str) -> str:
    return f"{title}\n{'-' * len(title)}"


def _section(kind: Kind, found: list[Change], old: Report, new: Report, width: int) -> str:
    """The changes of one kind, by contract."""
    if not found:
        return ""
    ids = list(dict.fromkeys(change.contract for change in found))
    rows = [_heading(f"{kind.value} ({text.tally([change.id for change in found])})")]
    if kind is Kind.REGRESSED and len(ids) > 1:
        rows += causes.brief(causes.explained(new, {change.case for change in found if change.case}), width)
    for id in ids[:_CONTRACTS_SHOWN]:
        rows += _contract([change for change in found if change.contract == id], old, new, width)
    if len(ids) > _CONTRACTS_SHOWN:
        rows.append(f"{_MARGIN}... and {text.count(len(ids) - _CONTRACTS_SHOWN, 'more contract')}")
    return "\n".join(rows)


def _reasons(kind: Kind, found: list[Change], old: Report, new: Report, width: int) -> str:
    """The changes of one kind, by the reason that each has, with the contracts below it."""
    if not found:
        return ""
    rows = [_heading(f"{kind.value} ({text.tally([change.id for change in found])})")]
    groups: dict[str, list[Change]] = {}
    for change in found:
        groups.setdefault(change.why or "for several reasons", []).append(change)
    for why, changes in list(groups.items())[:_REASONS_SHOWN]:
        rows.append(text.wrap(why, width, _MARGIN, _MARGIN * 3))
        shown = [f"{change.id}: {_step(change)}" for change in changes if change.case is not None] or [
            f"{change.id}: {_step(change)}" for change in changes
        ]
        rows += [text.wrap(words, width, _MARGIN * 2, _MARGIN * 4) for words in shown[:_CASES_SHOWN]]
        if len(shown) > _CASES_SHOWN:
            rows.append(f"{_MARGIN * 2}... and {len(shown) - _CASES_SHOWN} more")
    if len(groups) > _REASONS_SHOWN:
        rows.append(f"{_MARGIN}... and {text.count(len(groups) - _REASONS_SHOWN, 'more reason')}")
    return "\n".join(rows)


def _contract(found: list[Change], old: Report, new: Report, width: int) -> Iterator[str]:
    contract = new.contracts.get(found[0].contract) or old.contracts[found[0].contract]
    info = " (for information only)" if contract.level == "info" else ""
    yield text.wrap(f"{contract.title}{info}", width, f"{_MARGIN}{contract.id}  ", _MARGIN * 3)
    verdicts = [change for change in found if change.case is None]
    cases = [change for change in found if change.case is not None]
    if verdicts and (found[0].kind is not Kind.NEW or not cases):
        words = f"the contract: {_step(verdicts[0])}{_why(new, contract.id)}"
        yield text.wrap(words, width, _MARGIN * 2, _MARGIN * 4)
    if found[0].kind is Kind.NEW:
        counts = Counter(change.new.value for change in cases if change.new is not None)
        words = ", ".join(f"{text.count(number, 'case')} {verdict}" for verdict, number in counts.items())
        yield f"{_MARGIN * 2}{words}"
        cases = [change for change in cases if change.new in (Verdict.FAIL, Verdict.ERROR)]
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
    if change.why:
        return f", {change.why}"
    case = next((case for case in new.cases_of.get(change.contract, []) if case.id == change.case), None)
    if case is None or case.verdict is Verdict.PASS:
        return ""
    return text.cut(", ", _sighting(case), _SIGHTING)


def _sighting(case: Case) -> str:
    """What a case saw, with tensors in short."""
    broken = [evidence for evidence in case.evidence if not evidence.holds]
    if not broken:
        return case.reason or "no reason is given"
    more = f"; and {len(broken) - _EVIDENCE_SHOWN} more" if len(broken) > _EVIDENCE_SHOWN else ""
    return "; ".join(_in_short(evidence) for evidence in broken[:_EVIDENCE_SHOWN]) + more


def _in_short(evidence: Evidence) -> str:
    measured, bound = (_tensor(value) for value in (evidence.measured, evidence.bound))
    if measured is None and bound is None:
        return text.seen(evidence)
    wanted = bound or text.value(evidence.bound)
    return f"{evidence.name}: {measured or text.value(evidence.measured)} (required: {evidence.relation} {wanted})"


def _tensor(value: Any) -> str | None:
    """Return the number and the range of the numbers of a tensor; None of what is none, or has few."""
    numbers = list(_numbers(value)) if isinstance(value, tuple) else []
    if len(numbers) <= _NUMBERS or None in numbers:
        return None
    finite = [number for number in numbers if number is not None and not isinstance(number, str)]
    odd = [text.count(numbers.count(name), name) for name in ("nan", "inf", "-inf") if name in numbers]
    between = f"from {text.value(min(finite))} to {text.value(max(finite))}" if finite else "none finite"
    return ", ".join([f"{len(numbers)} numbers {between}", *odd])


def _numbers(value: Any) -> Iterator[float | str | None]:
    """Yield the numbers in nested tuples, those that are not finite as texts, and None for anything else."""
    if isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    elif (isinstance(value, (int, float)) and not isinstance(value, bool)) or value in ("nan", "inf", "-inf"):
        yield value
    else:
        yield None


def _accepted(comparison: Comparison, width: int) -> str:
    """What became of each line on accepted changes that fails the comparison or was in use."""
    rows = [text.wrap(words, width, f"{_MARGIN}STALE  ", _MARGIN * 3) for words in comparison.stale]
    rows += [
        text.wrap(f"{_subject(line)}: {text.count(line.matched, 'case')}", width, f"{_MARGIN}used   ", _MARGIN * 3)
        for line in comparison.accepted
        if line.state == "used"
    ]
    return "\n".join([_heading("Accepted changes"), *rows]) if rows else ""


def _subject(line: AcceptedChange) -> str:
    after = "GONE" if line.after is None else line.after.value
    return text.line(f"{line.contract or line.op} ({line.before.value} -> {after})")


def _conclusion(old: Report, new: Report, comparison: Comparison) -> str:
    rows = sum(row.arithmetic for row in fingerprint.differences(old, new))
    policies, ratios = len(moved(old, new)), len(speed.differences(old, new))
    return (
        f"{judgement(new, comparison)}."
        + f" Op policy moved: {text.count(policies, 'change')}, above." * bool(policies)
        + f" The arithmetic differs in {text.count(rows, 'row')}, above." * bool(rows)
        + f" {text.count(ratios, 'speed-up')} differ{'s' * (ratios == 1)}, above." * bool(ratios)
    )


def judgement(new: Report, comparison: Comparison) -> str:
    """Return in one line what a comparison comes to, and how much of it was excused or not compared."""
    parts = []
    for word, ids in (("not here", comparison.regressed), ("gone here", comparison.gone)):
        parts += [f"passed there, {word}: {text.tally(ids)}"] if ids else []
    parts += [f"accepted changes that are stale: {len(comparison.stale)}"] if comparison.stale else []
    word = "REGRESSION" if comparison.worse else "NO REGRESSION"
    if not comparison.changes and not parts:
        return f"{word}: every contract and every case has the same verdict"
    if not comparison.worse:
        parts.append("nothing that passed is worse")
    torch = release(new.header.environment.torch)
    for kind, what in (
        (Kind.KNOWN, "known and excused"),
        (Kind.FIXED, "fixed"),
        (Kind.UNDECIDED, "undecided"),
        (Kind.NEW, "new"),
        (Kind.NOT_APPLICABLE, f"not applicable to torch {torch} or this machine"),
        (Kind.NOT_COMPARED, "not compared"),
        (Kind.CHANGED, "changed otherwise"),
    ):
        found = [change.id for change in comparison.changes if change.kind is kind]
        parts += [f"{what}: {text.tally(found)}"] if found else []
    return f"{word}: {'; '.join(parts)}"
