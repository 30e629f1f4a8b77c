"""The account of a run for the terminal: a table, what failed and what to do about it, and one verdict."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator

from tabulate import SEPARATING_LINE, DataRow, Line, TableFormat, tabulate

from ..invocation import COMMAND, RUN
from . import excuses, fingerprint, rollup, self_check, speed, text
from .values import Case, Contract, Report
from .verdicts import Overall, Verdict

_SIGHTINGS_SHOWN = 3
_NAMES_SHOWN = 6
_TRACE_LINES = 16
_TRACE_HEAD = 4
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
}

# The frame of a traceback that belongs to the check; what stands above it is pytest's.
_CHECK = re.compile(r'^ *File ".*\bchapters[/\\]\w+[/\\]test_\w+\.py"')

Paint = Callable[[str, str], str]


def render(report: Report, *, short: bool, width: int, report_path: str, color: bool = False) -> str:
    """Return the account of `report` in lines of at most `width` (tables and programs may be wider).

    `short` leaves one line for each contract that failed or was waived. `report_path` is where the reader finds
    the report. Control codes are there with `color` only.
    """

    def paint(words: str, code: str) -> str:
        return f"{code}{words}\x1b[0m" if color else words

    sections = _short(report, width) if short else _long(report, width, paint)
    return "\n\n".join(section for section in [*sections, _verdict(report, width, report_path, paint)] if section)


def _long(report: Report, width: int, paint: Paint) -> Iterator[str]:
    yield _table(report, width)
    yield _self_check(report, width, paint)
    yield _measured(report, width)
    yield from _failed(report, width, paint)
    yield from _errors(report, width, paint)
    yield _waived(report, width, paint)
    yield _facts_that_failed(report, width, paint)
    yield _own_figures(report, width, paint)
    for verdict in (Verdict.INCONCLUSIVE, Verdict.UNTESTABLE, Verdict.UNSUPPORTED):
        yield _grouped(report, verdict, width, paint)
    yield _not_applicable(report, width, paint)
    yield _not_reached(report, width, paint)
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
        text.wrap(f"{report.contracts[id].title}: {_what(cases[0])}", width, f"{_word(cases)} {id}  ", _MARGIN)
        for id, cases in rollup.failing(report).items()
    ]
    rows += [
        text.cut(f"WAIVED {id}  ", f"{text.count(len(cases), 'case')}: {report.contracts[id].title}", width)
        for id, cases in _with(report, Verdict.WAIVED).items()
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
    rows = []
    for chapter in report.header.chapters:
        ids = [contract.id for contract in report.header.contracts if contract.chapter == chapter.name]
        cases = [case for id in ids for case in report.cases_of[id]]
        rows.append([text.line(chapter.name), len(ids), len(cases), *_counted(cases)])
    if not rows:
        return "No chapter was selected."
    if len(rows) > 1:
        rows.append(["all", len(report.contracts), len(report.cases), *_counted(report.cases)])
    # The headers are rows, since tabulate pads its own and the table would not fit into 80 columns.
    names = [("", "chapter"), *(("", full) if width >= _FULL_WIDTH else folded for full, folded in _HEADERS)]
    above, names_below = (list(row) for row in zip(*names, strict=True))
    heads = [above, names_below] if any(above) else [names_below]
    alignment = ["left", *["right"] * len(_HEADERS)]
    return tabulate([*heads, SEPARATING_LINE, *rows], tablefmt=_TABLE, colalign=alignment, disable_numparse=True)


def _counted(cases: list[Case] | tuple[Case, ...]) -> list[int]:
    counted = Counter(case.verdict for case in cases)
    return [counted[verdict] for verdict in _COLUMNS]


def _heading(title: str, paint: Paint) -> str:
    return paint(f"{title}\n{'-' * len(title)}", "\x1b[1m")


def _failed(report: Report, width: int, paint: Paint) -> Iterator[str]:
    """A block for each contract that makes the run not conformant (other than by an error of the suite)."""
    blocks = {
        id: [case for case in cases if case.verdict is not Verdict.ERROR]
        for id, cases in rollup.failing(report).items()
    }
    blocks = {id: cases for id, cases in blocks.items() if cases}
    if blocks:
        yield _heading(f"Failed: {text.count(len(blocks), 'contract')}", paint)
    for id, cases in blocks.items():
        yield _block(report, report.contracts[id], cases, width, paint)


def _block(report: Report, contract: Contract, cases: list[Case], width: int, paint: Paint) -> str:
    """Everything an engineer needs about one failed contract."""
    title = text.wrap(contract.title, width, f"{contract.id}  ", _MARGIN)
    rows = [paint(title, "\x1b[1;31m")]
    rows.append(_field("promised", f"{contract.statement} ({contract.level}, {contract.authority})", width))
    rows.append(_field("source", contract.source, width))
    rows += [_field("" if number else "seen", row, width) for number, row in enumerate(_sightings(cases))]
    rows.append(_field("on", _where(report, contract, cases), width))
    rows.append(_field("usual cause", contract.failure, width))
    rows.append(_field("next step", contract.next_step, width))
    # Not wrapped: it is there to be copied.
    rows.append(f"{_MARGIN}{'run just this':<14}{text.line(_command(report, contract, _own(cases[0])))}")
    if snippet := next((case.snippet for case in cases if case.snippet), None):
        rows += [f"{_MARGIN}with torch alone:", text.indent(snippet, _MARGIN * 3)]
    if trace := next((case.detail for case in cases if case.detail), None):
        rows += [f"{_MARGIN}raised from:", _end_of(trace)]
    return "\n".join(rows)


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


def _sightings(cases: list[Case]) -> Iterator[str]:
    """What was seen, with the cases that saw it."""
    groups: dict[str, list[str]] = {}
    for case in cases:
        groups.setdefault(_what(case), []).append(_short_id(case))
    for what, ids in list(groups.items())[:_SIGHTINGS_SHOWN]:
        yield what
        yield f"  in {text.count(len(ids), 'case')}: {text.some(ids, _SIGHTINGS_SHOWN)}"
    if len(groups) > _SIGHTINGS_SHOWN:
        rest = sum(map(len, list(groups.values())[_SIGHTINGS_SHOWN:]))
        yield f"... and {text.count(rest, 'more case')} that saw something else"


def _what(case: Case) -> str:
    """What a failing case saw."""
    if case.verdict is Verdict.UNTESTABLE:
        return f"could not be tested, which under --gpu fails a must: {case.reason}"
    return text.sighting(case)


def _short_id(case: Case) -> str:
    """The part of a case id after its contract."""
    return case.id.removeprefix(case.contract).strip("[]") or case.id


def _where(report: Report, contract: Contract, cases: list[Case]) -> str:
    ran = Counter(case.target for case in report.cases_of[contract.id])
    failed = Counter(case.target for case in cases)
    return ", ".join(f"{target}: {failed[target]} of {text.count(ran[target], 'case')}" for target in failed)


def _command(report: Report, contract: Contract, own: str) -> str:
    """The command that runs the contract again under the same options."""
    options = report.header.options
    words = [*RUN.split(), "--contract", contract.id]
    words += ["--workload", own] * bool(own)
    words += ["--gpu"] * options.gpu
    words += [word for device in options.devices for word in ("--device", device)]
    words += ["--amp-dtype", options.amp_dtype] * (options.amp_dtype != "both")
    words += ["--level", options.level] * (options.level != "standard")
    words += ["--seed", str(options.seed)] * (options.seed != 0)
    words += ["--no-waivers"] * options.no_waivers
    return shlex.join(words)


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


def _with(report: Report, verdict: Verdict) -> dict[str, list[Case]]:
    found = {id: [case for case in cases if case.verdict is verdict] for id, cases in report.cases_of.items()}
    return {id: cases for id, cases in found.items() if cases}


def _waived(report: Report, width: int, paint: Paint) -> str:
    """A line for each contract: a clean torch has some thirty, whose reasons would hide everything else."""
    waived = _with(report, Verdict.WAIVED)
    if not waived:
        return ""
    number = sum(map(len, waived.values()))
    heading = f"Waived: {text.count(len(waived), 'contract')} known not to hold ({text.count(number, 'case')})"
    more = f"why, and what was seen: {COMMAND} explain waivers REPORT"
    return "\n".join([_heading(heading, paint), *excuses.brief(report, width), text.wrap(more, width, _MARGIN)])


def _facts_that_failed(report: Report, width: int, paint: Paint) -> str:
    """Contracts of level info that do not hold: said, and never counted."""
    found = {id: cases for id, cases in _with(report, Verdict.FAIL).items() if report.contracts[id].level == "info"}
    if not found:
        return ""
    rows = [_heading("For information: facts that differ, which count for no verdict", paint)]
    rows += [
        text.wrap(f"{report.contracts[id].title}: {_what(cases[0])}", width, f"{id}  ", _MARGIN)
        for id, cases in found.items()
    ]
    return "\n".join(rows)


def _own_figures(report: Report, width: int, paint: Paint) -> str:
    """Return the figures of the user's workload that are measured and not judged."""
    cases = [case for case in report.cases if _own(case) and report.contracts[case.contract].level == "info"]
    if not cases:
        return ""
    rows = [_heading(f"Measured of {text.line(_own(cases[0]))}, not judged", paint)]
    for case in cases:
        where = " ".join([case.target, *(str(value) for name, value in case.parameters.items() if name != "workload")])
        rows.append(
            text.wrap(f"{report.contracts[case.contract].title}: {where}", width, f"{case.contract}  ", _MARGIN)
        )
        rows += [text.wrap(text.seen(evidence), width, _MARGIN * 2) for evidence in case.evidence]
    return "\n".join(rows)


def _own(case: Case) -> str:
    """The name of the user's workload that a case is about; empty where it is about none."""
    return case.parameters.get("workload", "")


def _grouped(report: Report, verdict: Verdict, width: int, paint: Paint) -> str:
    """The reasons of a verdict, each with the contracts that it stopped."""
    reasons: dict[str, list[Case]] = {}
    for case in report.cases:
        if case.verdict is verdict:
            reasons.setdefault(text.line(case.reason), []).append(case)
    if not reasons:
        return ""
    total = text.count(sum(map(len, reasons.values())), "case")
    rows = [_heading(f"{verdict.value.capitalize()}: {total}", paint)]
    for reason, cases in reasons.items():
        ids = list(dict.fromkeys(case.contract for case in cases))
        rows.append(text.wrap(f"{text.count(len(cases), 'case')}: {reason or 'no reason is given'}", width, _MARGIN))
        rows.append(text.wrap(text.some(ids, _NAMES_SHOWN), width, _MARGIN * 3))
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
    missing = [id for id, cases in report.cases_of.items() if not cases]
    if not missing:
        return ""
    rows = [_heading(f"Not reached: {text.count(len(missing), 'contract')}", paint)]
    reasons: dict[str, list[str]] = {}
    for id in missing:
        result = report.footer.contracts.get(id) if report.footer else None
        reasons.setdefault(result.reason if result else "the run did not get that far", []).append(id)
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
    if not baseline.regressed and not baseline.gone:
        return text.wrap(f"Against the baseline {baseline.path}: nothing that passed there is worse here.", width)
    rows = [_heading(f"Against the baseline {text.line(baseline.path)}", paint)]
    for word, ids in (("passed there, not here", baseline.regressed), ("passed there, gone here", baseline.gone)):
        if ids:
            rows.append(text.wrap(f"{word} ({len(ids)}): {text.some(list(ids), _NAMES_SHOWN)}", width, _MARGIN))
    if baseline.gone and (narrowing := text.narrowing(report.header.options)):
        words = f"This run was narrowed by {narrowing}: what the baseline has beyond that counts as gone."
        rows.append(text.wrap(words, width, _MARGIN))
    return "\n".join(rows)


def _verdict(report: Report, width: int, report_path: str, paint: Paint) -> str:
    overall = rollup.overall(report)
    line = f"{overall.value}: {'; '.join(_because(report, overall))}"
    return f"{paint(text.line(line), _COLOURS[overall])}\nreport: {text.line(report_path)}"


def _because(report: Report, overall: Overall) -> Iterator[str]:
    """What the overall verdict rests on, in a few words each."""
    footer = report.footer
    verdicts = rollup.verdicts(report)
    judged = {id: verdict for id, verdict in verdicts.items() if report.contracts[id].level != "info"}
    counted = Counter(judged.values())
    if overall is Overall.INCOMPLETE:
        yield "the run did not end, so this is no pass"
    if failing := rollup.failing(report):
        yield f"{text.count(len(failing), 'contract')} failed"
    if not any(case.verdict in rollup.EXECUTED for case in report.cases):
        yield "nothing was executed"
    if footer and footer.problems:
        yield text.count(len(footer.problems), "problem")
    if footer and footer.baseline and (lost := text.tally(footer.baseline.regressed + footer.baseline.gone)):
        yield f"{lost} worse than in the baseline"
    if overall is Overall.INCONCLUSIVE and counted[Verdict.INCONCLUSIVE]:
        yield f"{text.count(counted[Verdict.INCONCLUSIVE], 'contract')} COULD NOT BE JUDGED, so this is no pass"
    if missed := rollup.missed(report):
        planted = text.count(len(rollup.planted(report)), "planted fault")
        yield f"{len(missed)} of {planted} NOT CAUGHT, so this is no pass"
    so_far = " so far" if overall is Overall.INCOMPLETE else ""

    def partly(verdict: Verdict) -> str:
        number = sum(rollup.in_part(report.cases_of[id]) for id, found in judged.items() if found is verdict)
        return f" ({number} of them in part)" * bool(number)

    if judged:
        hold = f"{counted[Verdict.PASS]} of {text.count(len(judged), 'contract')} hold{'s' * (len(judged) == 1)}"
        yield f"{hold}{partly(Verdict.PASS)}{so_far}"
    else:
        yield "nothing was judged"
    for verdict in (Verdict.WAIVED, Verdict.UNSUPPORTED, Verdict.UNTESTABLE, Verdict.INCONCLUSIVE):
        if counted[verdict]:
            yield f"{counted[verdict]} {verdict.value.lower()}{partly(verdict)}"
    if counted[None]:
        yield f"{counted[None]} not reached"
    if facts := len(verdicts) - len(judged):
        yield f"{text.count(facts, 'contract')} for information only"
    if narrowing := text.narrowing(report.header.options):
        yield f"the run was narrowed by {narrowing}"
