"""The account of a run for the terminal: a table, what failed and what to do about it, and one verdict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from tabulate import SEPARATING_LINE, DataRow, Line, TableFormat, tabulate

from ..invocation import COMMAND
from . import causes, excuses, fingerprint, outline, reach, rollup, self_check, speed, text
from .outline import Failure
from .values import Baseline, Case, Contract, Report
from .verdicts import Overall, Verdict

_SIGHTINGS_SHOWN = 3
_NAMES_SHOWN = 6
_TRACE_LINES = 16
_TRACE_HEAD = 4
_SNIPPET_LINES = 32
_INDEX_FROM = 4
_MARGIN = "  "
_FULL_WIDTH = 92
_COLUMNS = (
    Verdict.PASS,
    Verdict.FAIL,
    Verdict.WAIVED,
    Verdict.UNSUPPORTED,
    Verdict.UNTESTABLE,
    Verdict.INCONCLUSIVE,
    Verdict.ERROR,
)
# Each in full, and folded for a narrow terminal.
_HEADERS = (
    ("contracts", ("con-", "tracts")),
    ("cases", ("", "cases")),
    ("pass", ("", "pass")),
    ("fail", ("", "fail")),
    ("waived", ("", "waived")),
    ("unsupported", ("unsup-", "ported")),
    ("untestable", ("untest-", "able")),
    ("inconclusive", ("incon-", "clusive")),
    ("error", ("", "error")),
)
_ROW = DataRow("", "  ", "")
_TABLE = TableFormat(
    lineabove=None,
    linebelowheader=Line("", "-", "  ", ""),
    linebetweenrows=None,
    linebelow=None,
    headerrow=_ROW,
    datarow=_ROW,
    padding=0,
    with_header_hide=None,
)
_COLOURS = {
    Overall.CONFORMANT: "\x1b[1;32m",
    Overall.NOT_CONFORMANT: "\x1b[1;31m",
    Overall.INCONCLUSIVE: "\x1b[1;33m",
    Overall.INCOMPLETE: "\x1b[1;33m",
    Overall.PARTIAL: "\x1b[1;33m",
    Overall.NOTHING_RAN: "\x1b[1;33m",
}

# The frame of a traceback that belongs to the check; what stands above it is pytest's.
_CHECK = re.compile(r'^ *File ".*\bchapters[/\\]\w+[/\\]test_\w+\.py"')

Paint = Callable[[str, str], str]


def render(report: Report, *, short: bool, width: int, report_path: str, color: bool = False) -> str:
    """Return the account of `report` in lines of at most `width` (tables and programs may be wider).

    `short` leaves one line for each contract that failed, was waived or could not be judged. `report_path` is where the
    reader finds the report. Control codes are there with `color` only.
    """

    def paint(words: str, code: str) -> str:
        return f"{code}{words}\x1b[0m" if color else words

    sections = _short(report, width) if short else _long(report, width, paint)
    return "\n\n".join(section for section in [*sections, _verdict(report, width, report_path, paint)] if section)


def _long(report: Report, width: int, paint: Paint) -> Iterator[str]:
    yield _table(report, width)
    yield _self_check(report, width, paint)
    yield _measured(report, width)
    yield _waived(report, width, paint)
    yield _facts_that_failed(report, width, paint)
    yield _own_figures(report, width, paint)
    for verdict in (Verdict.INCONCLUSIVE, Verdict.UNTESTABLE, Verdict.UNSUPPORTED):
        yield _grouped(report, verdict, width, paint)
    yield _not_applicable(report, width, paint)
    yield _not_reached(report, width, paint)
    # Last, since a log is read from its end, and often only the end of one is kept.
    yield from _failed(report, width, paint)
    yield from _errors(report, width, paint)
    yield _problems(report, width, paint)
    yield _baseline(report, width, paint)
    yield _index(report, width, paint)


def _self_check(report: Report, width: int, paint: Paint) -> str:
    check = report.footer.self_check if report.footer else None
    if check is None:
        return ""
    rows = [text.wrap(line, width, _MARGIN, _MARGIN * 2) for line in self_check.lines(check)]
    return "\n".join([_heading(self_check.brief(check), paint), *rows])


def _measured(report: Report, width: int) -> str:
    """Return the numerics and the speed of each device in short; `fingerprint` and `explain` show all of it."""
    lines = [*map(fingerprint.brief, fingerprint.fingerprints(report).values()), *speed.brief(report)]
    return "\n".join(text.wrap(line, width, "", _MARGIN) for line in lines)


def _index(report: Report, width: int, paint: Paint) -> str:
    """A line for each failed contract, where there are so many that their blocks have scrolled away."""
    failing = rollup.failing(report)
    if len(failing) < _INDEX_FROM:
        return ""
    rows = [
        text.wrap(
            f"{report.contracts[id].title} ({len(cases)}/{len(report.cases_of[id])})",
            width,
            f"{_MARGIN}{_word(cases)} {id}  ",
            _MARGIN * 3,
        )
        for id, cases in failing.items()
    ]
    return "\n".join([_heading("All that failed, in short (failing cases of all)", paint), *rows])


def _short(report: Report, width: int) -> Iterator[str]:
    yield _table(report, width)
    rows = [
        text.wrap(f"{report.contracts[id].title}: {outline.what(cases[0])}", width, f"{_word(cases)} {id}  ", _MARGIN)
        for id, cases in rollup.failing(report).items()
    ]
    rows += [
        text.cut(f"WAIVED {id}  ", f"{text.count(len(cases), 'case')}: {report.contracts[id].title}", width)
        for id, cases in outline.with_verdict(report, Verdict.WAIVED).items()
    ]
    rows += [
        text.cut(f"INCONCLUSIVE {id}  ", f"{text.count(len(cases), 'case')}: {cases[0].reason}", width)
        for id, cases in outline.with_verdict(report, Verdict.INCONCLUSIVE).items()
    ]
    footer = report.footer
    rows += [text.wrap(problem, width, "PROBLEM  ", _MARGIN) for problem in (footer.problems if footer else ())]
    rows += [text.wrap(self_check.named(fault), width, "NOT CAUGHT  ", _MARGIN) for fault in rollup.missed(report)]
    if footer and footer.baseline:
        rows += [text.wrap(id, width, "REGRESSED  ") for id in footer.baseline.regressed[:_NAMES_SHOWN]]
        rows += [text.wrap(id, width, "GONE  ") for id in footer.baseline.gone[:_NAMES_SHOWN]]
    yield "\n".join(rows)


def _word(cases: list[Case]) -> str:
    return Verdict.worst(case.verdict for case in cases).value


def _table(report: Report, width: int) -> str:
    """One row a chapter; columns of verdicts count cases."""
    rows = [
        [text.line(found.chapter.name), len(found.contracts), found.cases.total(), *_counted(found.cases)]
        for found in outline.chapters(report)
    ]
    if not rows:
        return "No chapter was selected."
    if len(rows) > 1:
        rows.append(["all", len(report.contracts), len(report.cases), *_counted(Counter(rollup.totals(report)))])
    # The headers are rows, since tabulate pads its own and the table would not fit into 80 columns.
    names = [("", "chapter"), *(("", full) if width >= _FULL_WIDTH else folded for full, folded in _HEADERS)]
    above, names_below = (list(row) for row in zip(*names, strict=True))
    heads = [above, names_below] if any(above) else [names_below]
    alignment = ["left", *["right"] * len(_HEADERS)]
    return tabulate([*heads, SEPARATING_LINE, *rows], tablefmt=_TABLE, colalign=alignment, disable_numparse=True)


def _counted(cases: Counter[Verdict]) -> list[int]:
    return [cases[verdict] for verdict in _COLUMNS]


def _heading(title: str, paint: Paint) -> str:
    return paint(f"{title}\n{'-' * len(title)}", "\x1b[1m")


def _failed(report: Report, width: int, paint: Paint) -> Iterator[str]:
    """A block for each contract that makes the run not conformant (other than by an error of the suite)."""
    blocks = {
        id: [case for case in cases if case.verdict is not Verdict.ERROR]
        for id, cases in rollup.failing(report).items()
    }
    failures = [outline.failure(report, id, cases) for id, cases in blocks.items() if cases]
    if failures:
        yield _heading(f"Failed: {text.count(len(failures), 'contract')}", paint)
        yield _causes(report, width)
    for failure in failures:
        yield _block(failure, width, paint)


def _causes(report: Report, width: int) -> str:
    """What failed cases have in common, where several contracts failed."""
    found = causes.groups(report)
    if not any(len(cause.contracts) > 1 for cause in found):
        return ""
    return "\n".join(["likely causes, by what failed cases share:", *causes.brief(found, width)])


def _block(failure: Failure, width: int, paint: Paint) -> str:
    """Everything an engineer needs about one failed contract."""
    contract = failure.contract
    title = text.wrap(contract.title, width, f"{contract.id}  ", _MARGIN)
    rows = [paint(title, "\x1b[1;31m")]
    rows.append(_field("promised", f"{contract.statement} ({contract.level}, {contract.authority})", width))
    rows.append(_field("source", contract.source, width))
    rows += [_field("" if number else "seen", row, width) for number, row in enumerate(_sightings(failure))]
    rows.append(_field("on", failure.where, width))
    rows.append(_field("usual cause", contract.failure, width))
    rows.append(_field("next step", contract.next_step, width))
    # Not wrapped: it is there to be copied.
    rows.append(f"{_MARGIN}{'run just this':<14}{text.line(failure.command)}")
    if failure.snippet:
        rows += _program(failure.snippet, contract)
    if failure.trace:
        rows += [f"{_MARGIN}raised from:", _end_of(failure.trace)]
    return "\n".join(rows)


def _sightings(failure: Failure) -> Iterator[str]:
    """What was seen, with the cases that saw it."""
    for sighting in failure.sightings[:_SIGHTINGS_SHOWN]:
        yield sighting.what
        yield f"  in {text.count(len(sighting.cases), 'case')}: {text.some(list(sighting.cases), _SIGHTINGS_SHOWN)}"
    if rest := sum(len(sighting.cases) for sighting in failure.sightings[_SIGHTINGS_SHOWN:]):
        yield f"... and {text.count(rest, 'more case')} that saw something else"


def _program(snippet: str, contract: Contract) -> list[str]:
    """The snippet of the first failed case; of a long one the check itself, and the command that writes all of it."""
    lines = snippet.splitlines()
    if len(lines) <= _SNIPPET_LINES:
        return [f"{_MARGIN}with torch alone:", text.indent(snippet, _MARGIN * 3)]
    head = next((number for number, line in enumerate(lines) if not line.startswith("#")), 0)
    short = next((number for number, line in enumerate(lines[:head]) if line == "# in short:"), head)
    checks = [number for number, line in enumerate(lines) if line.startswith("def test_")]
    start = max([*checks[-1:], len(lines) - _SNIPPET_LINES])
    shown = [line.removeprefix("#     ") for line in lines[short + 1 : head][:_SNIPPET_LINES]] or lines[start:]
    command = f"{COMMAND} explain snippet REPORT --contract {contract.id} > case.py"
    return [
        f"{_MARGIN}with torch alone, {text.count(len(lines), 'line')}: {text.line(command)}",
        f"{_MARGIN}in short:" if short < head else f"{_MARGIN}it ends with:",
        text.indent("\n".join(shown), _MARGIN * 3),
    ]


def _end_of(trace: str) -> str:
    """A traceback from the check onwards, without markers and without its middle; the report has all of it."""
    lines = [line for line in trace.strip().splitlines() if line.strip(" ^~")]
    start = next((number for number, line in enumerate(lines) if _CHECK.search(line)), 0)
    lines = lines[start:]
    if len(lines) > _TRACE_LINES:
        lines = [*lines[:_TRACE_HEAD], "  ...", *lines[_TRACE_HEAD - _TRACE_LINES :]]
    return text.indent("\n".join(lines), _MARGIN * 3)


def _field(name: str, words: str, width: int) -> str:
    return text.wrap(words, width, f"{_MARGIN}{name:<14}")


def _errors(report: Report, width: int, paint: Paint) -> Iterator[str]:
    """Cases in which the suite itself broke, with their tracebacks."""
    cases = [case for case in report.cases if case.verdict is Verdict.ERROR]
    if not cases:
        return
    yield _heading(f"Errors: the suite itself broke in {text.count(len(cases), 'case')}", paint)
    for case in cases[:_NAMES_SHOWN]:
        rows = [text.wrap(f"{case.id} on {case.target}", width), text.wrap(case.reason, width, _MARGIN)]
        if case.detail:
            rows.append(_end_of(case.detail))
        yield "\n".join(rows)
    if len(cases) > _NAMES_SHOWN:
        yield f"... and {text.count(len(cases) - _NAMES_SHOWN, 'more case')}"


def _waived(report: Report, width: int, paint: Paint) -> str:
    """A line for each contract: a clean torch has some thirty, whose reasons would hide everything else."""
    waived = outline.with_verdict(report, Verdict.WAIVED)
    if not waived:
        return ""
    number = sum(map(len, waived.values()))
    heading = f"Waived: {text.count(len(waived), 'contract')} known not to hold ({text.count(number, 'case')})"
    more = f"why, and what was seen: {COMMAND} explain waivers REPORT"
    return "\n".join([_heading(heading, paint), *excuses.brief(report, width), text.wrap(more, width, _MARGIN)])


def _facts_that_failed(report: Report, width: int, paint: Paint) -> str:
    """Contracts of level info that do not hold: said, and never counted."""
    found = {
        id: cases
        for id, cases in outline.with_verdict(report, Verdict.FAIL).items()
        if report.contracts[id].level == "info"
    }
    if not found:
        return ""
    rows = [_heading("For information: facts that differ, which count for no verdict", paint)]
    rows += [
        text.wrap(f"{report.contracts[id].title}: {outline.what(cases[0])}", width, f"{id}  ", _MARGIN)
        for id, cases in found.items()
    ]
    return "\n".join(rows)


def _own_figures(report: Report, width: int, paint: Paint) -> str:
    """Return the figures of the user's workload that are measured and not judged."""
    cases = [
        case for case in report.cases if outline.own_workload(case) and report.contracts[case.contract].level == "info"
    ]
    if not cases:
        return ""
    rows = [_heading(f"Measured of {text.line(outline.own_workload(cases[0]))}, not judged", paint)]
    for case in cases:
        where = " ".join([case.target, *(str(value) for name, value in case.parameters.items() if name != "workload")])
        rows.append(
            text.wrap(f"{report.contracts[case.contract].title}: {where}", width, f"{case.contract}  ", _MARGIN)
        )
        for evidence in case.evidence:
            words = speed.seen(case, evidence) if evidence.unit == speed.UNIT else text.seen(evidence)
            rows.append(text.wrap(words, width, _MARGIN * 2))
    return "\n".join(rows)


def _grouped(report: Report, verdict: Verdict, width: int, paint: Paint) -> str:
    """The causes of a verdict, each with the contracts that it stopped."""
    groups = outline.not_judged(report).get(verdict)
    if not groups:
        return ""
    total = text.count(sum(len(group.cases) for group in groups), "case")
    rows = [_heading(f"{verdict.value.capitalize()}: {total}", paint)]
    for group in groups:
        rows.append(text.wrap(f"{text.count(len(group.cases), 'case')}: {group.line}", width, _MARGIN))
        rows.append(text.wrap(text.some(group.contracts, _NAMES_SHOWN), width, _MARGIN * 3))
    return "\n".join(rows)


def _not_applicable(report: Report, width: int, paint: Paint) -> str:
    reasons = rollup.not_applicable(report)
    if not reasons:
        return ""
    rows = [_heading(f"Not applicable here: {text.count(sum(map(len, reasons.values())), 'case')}", paint)]
    for reason, contracts in reasons.items():
        names = text.some(list(dict.fromkeys(contracts)), _NAMES_SHOWN)
        rows.append(text.wrap(f"{text.count(len(contracts), 'case')}: {reason}", width, _MARGIN))
        rows.append(text.wrap(names, width, _MARGIN * 3))
    return "\n".join(rows)


def _not_reached(report: Report, width: int, paint: Paint) -> str:
    reasons = outline.not_reached(report)
    if not reasons:
        return ""
    rows = [_heading(f"Not reached: {outline.not_reached_count(report)}", paint)]
    for reason, ids in reasons.items():
        rows.append(text.wrap(f"{reason}: {text.some(ids, _NAMES_SHOWN)}", width, _MARGIN, _MARGIN * 3))
    return "\n".join(rows)


def _problems(report: Report, width: int, paint: Paint) -> str:
    if report.footer is None or not report.footer.problems:
        return ""
    rows = [text.wrap(problem, width, f"{_MARGIN}- ") for problem in report.footer.problems]
    return "\n".join([_heading("Problems that fail the run", paint), *rows])


def _baseline(report: Report, width: int, paint: Paint) -> str:
    baseline = report.footer.baseline if report.footer else None
    if baseline is None:
        return ""
    known = f"{len(baseline.known)} excused" if baseline.known else ""
    if not baseline.regressed and not baseline.gone:
        words = f"Against the baseline {baseline.path}: nothing that passed there is worse here"
        return "\n".join([text.wrap(f"{words}{f' ({known})' * bool(known)}.", width), *_known(baseline, width)])
    rows = [_heading(f"Against the baseline {text.line(baseline.path)}", paint)]
    for word, ids in (("passed there, not here", baseline.regressed), ("passed there, gone here", baseline.gone)):
        if ids:
            rows.append(text.wrap(f"{word} ({len(ids)}): {text.some(list(ids), _NAMES_SHOWN)}", width, _MARGIN))
    return "\n".join([*rows, *_known(baseline, width)])


def _known(baseline: Baseline, width: int) -> Iterator[str]:
    """A line for each excuse of what passed in the baseline and does not here."""
    excuses: dict[str, list[str]] = {}
    for change in baseline.known:
        if "[" in change.id or not change.excuse:
            excuses.setdefault(change.excuse, []).append(change.id)
    for excuse, ids in excuses.items():
        yield text.wrap(f"excused ({len(ids)}): {text.some(ids, 2)}; {excuse}", width, _MARGIN, _MARGIN * 3)


def _verdict(report: Report, width: int, report_path: str, paint: Paint) -> str:
    overall = rollup.overall(report)
    verdict = text.wrap(f"{outline.verdict(report)}: {'; '.join(outline.because(report))}", width, "", _MARGIN)
    rows = [paint(verdict, _COLOURS[overall])]
    rows += [paint(text.line(words), _COLOURS[Overall.PARTIAL]) for words in reach.not_judged(report.header)]
    return "\n".join([*rows, f"report: {text.line(report_path)}"])
