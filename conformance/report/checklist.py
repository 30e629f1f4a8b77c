"""The acceptance checklist: two pages that a buyer can read without this suite, and sign; contracts in an annex."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from ..data import read_toml
from ..invocation import COMMAND
from . import annex, excuses, outline, rollup, text
from .blocks import Block, Heading, Lines, NewPage, Paragraph, Strong, Table, as_html, as_markdown
from .outline import ChapterResult, Failure
from .values import Report
from .verdicts import Overall, Verdict

Form = Literal["markdown", "html"]
FORMS: tuple[Form, ...] = ("markdown", "html")

_STYLE = "checklist.css"
_TITLE = "Acceptance of automatic mixed precision (AMP)"
_MEANING = {
    Overall.CONFORMANT: "Every contract that was judged holds, apart from those that are waived below.",
    Overall.NOT_CONFORMANT: "At least one contract does not hold, or the run itself is at fault; see below.",
    Overall.INCONCLUSIVE: "No contract was seen to fail, but at least one could not be judged, or the self-check "
    "missed a planted fault. This is no pass.",
    Overall.PARTIAL: "No contract was seen to fail, but a chapter was largely not reached. This is no pass.",
    Overall.NOTHING_RAN: "No case was executed, so nothing is known of any contract. This is no pass.",
    Overall.INCOMPLETE: "The run did not come to its end. Nothing here is a pass, whatever single contracts say.",
}
# What two pages of A4 hold besides the first table, the chapters and the signatures, as checklist.css prints them.
_LINES = 92
_LINE, _HALF_LINE = 118, 56  # characters
# How much is said of failures, waivers and what was not run: the first that fits.
_DETAILS = ((2, 2, 1), (2, 1, 1), (2, 0, 1), (1, 0, 1), (1, 0, 0), (0, 0, 0))
_PROBLEMS_SHOWN = 8
_PROBLEM = 220


def render(report: Report, *, digest: str | None = None, form: Form = "markdown", with_annex: bool = False) -> str:
    """Return the checklist of `report`: two pages, and the annex on further ones where it is asked for.

    `digest` is the SHA-256 of the report.
    """
    blocks = [*_pages(report, digest)]
    if with_annex:
        blocks += [NewPage(), *annex.blocks(report)]
    return as_html(_TITLE, _STYLE, blocks) if form == "html" else as_markdown(blocks)


def _pages(report: Report, digest: str | None) -> Iterator[Block]:
    overall = rollup.overall(report)
    yield Heading(1, _TITLE)
    yield Paragraph(
        f"{_MEANING[overall]} {'; '.join(outline.grounds(report))}.", f"Verdict: {outline.verdict(report)}."
    )
    yield Table(("", ""), tuple(_facts(report, digest)), "facts")
    yield Heading(2, "What was judged, by chapter")
    results = outline.chapters(report)
    failing = rollup.failing(report)
    rows = [(_promise(found), _result(report, found, failing)) for found in results]
    yield Table(("promise", "result"), tuple(rows), "chapters")
    yield from _fitting(report)
    yield Heading(2, "Signatures")
    words = f"For the verdict {outline.verdict(report)}, of torch {report.header.environment.torch}"
    words += f", from the report with the SHA-256 {digest}" if digest else ""
    yield Paragraph(f"{words} (each contract, measured against required: {COMMAND} checklist --annex):")
    who = [(name, "", "", "") for name in ("for the supplier", "for the buyer")]
    yield Table(("", "name", "date", "signature"), tuple(who), "sign")


def _facts(report: Report, digest: str | None) -> Iterator[tuple[str, str]]:
    header = report.header
    environment, suite, options = header.environment, header.suite, header.options
    devices = [str(target.probe.get("name", target.name)) for target in header.targets if not target.fake]
    driver = f"; driver {environment.driver}" if environment.driver else ""
    build = environment.cuda_build and f" for CUDA {environment.cuda_build}"
    build = build or (environment.hip_build and f" for HIP {environment.hip_build}") or ""
    state = {True: "", False: ", WITH CHANGES THAT ARE NOT COMMITTED", None: ""}[suite.clean]
    footer = report.footer
    ended = f"{footer.finished}, after {footer.duration_s:.0f} s" if footer else "it did not end"
    targets = text.some([f"{target.name}{' (fake)' * target.fake}" for target in header.targets], 12)
    narrowed = f"; narrowed by {text.narrowing(options)}" if text.narrowing(options) else ""
    cases = f"{text.count(len(report.cases), 'case')} of {text.count(len(report.contracts), 'contract')}"
    facts = [
        ("machine", f"{environment.cpu} ({environment.machine}), {environment.os}; {', '.join(devices)}{driver}"),
        ("software", f"torch {environment.torch}{build}, commit {environment.torch_git}; Python {environment.python}"),
        ("judged by", f"amp-conformance {suite.version}, commit {suite.commit or 'unknown'}{state}"),
        ("run", f"from {header.started} to {ended}"),
        ("what was run", f"{cases} at level {options.level}, AMP dtypes: {options.amp_dtype}, seed {options.seed}"),
        ("on", f"{targets}{narrowed}"),
        ("report", f"SHA-256 of report.json {digest}" if digest else "its SHA-256 is not known"),
    ]
    yield from ((name, text.cut("", words, 2 * _LINE)) for name, words in facts)


@cache
def _promises() -> dict[str, str]:
    found: dict[str, str] = read_toml(Path(__file__).with_suffix(".toml"))["promises"]
    return found


def _promise(found: ChapterResult) -> str:
    return _promises().get(found.chapter.name) or text.cut("", found.chapter.title, _HALF_LINE)


def _result(report: Report, found: ChapterResult, failing: Iterable[str]) -> str:
    """Say what a chapter came to; facts for information only are not counted."""
    verdicts = {id: verdict for id, verdict in found.contracts.items() if report.contracts[id].level != "info"}
    failed = sum(id in failing for id in found.contracts)
    counted = Counter(verdicts.values())
    words = []
    if failed:
        words.append(f"FAILS: {failed} of {text.count(len(found.contracts), 'contract')}")
    if undecided := counted[Verdict.INCONCLUSIVE]:
        words.append(f"COULD NOT BE DECIDED: {undecided}")
    if counted[Verdict.PASS]:
        words.append(f"holds: {counted[Verdict.PASS]} of {len(verdicts)}")
    if counted[Verdict.WAIVED]:
        words.append(f"fails and is excused: {counted[Verdict.WAIVED]}")
    lacking = counted[Verdict.UNSUPPORTED] + counted[Verdict.UNTESTABLE] + counted[None]
    if lacking:
        words.append(f"not judged: {lacking}")
    said = ", ".join(words) or "nothing to judge"
    return Strong(said) if failed or undecided else said


# --- what has to fit --------------------------------------------------------------------------------------------


def _fitting(report: Report) -> list[Block]:
    """Return the failures, waivers and what was not run, in as much detail as two pages hold."""
    failures = outline.failures(report)
    problems = tuple(_problems(report))
    for of_failures, of_waivers, of_rest in _DETAILS:
        blocks: list[Block] = [
            Heading(2, "What does not hold"),
            *_failures(failures, of_failures),
            *([Lines(problems)] if problems else []),
            Heading(2, "What was waived: it does not hold, and a written excuse says so"),
            *_waivers(report, of_waivers),
            Heading(2, "What was not run or judged, and why"),
            *_not_run(report, of_rest),
        ]
        if sum(map(_height, blocks)) <= _LINES:
            break
    return blocks


def _height(block: Block) -> float:
    """Return how many lines of a printed page a block takes at most."""
    if isinstance(block, Heading):
        return 2
    if isinstance(block, Paragraph):
        return _lines(block.strong + block.words)
    if isinstance(block, Lines):
        width = _HALF_LINE if block.columns > 1 else _LINE
        return sum(_lines(item, width) for item in block.items) / block.columns + 0.5
    return 0


def _lines(words: str, width: int = _LINE) -> int:
    return math.ceil(len(words) / width) or 1


def _failures(failures: list[Failure], detail: int) -> Iterator[Block]:
    if not failures:
        yield Paragraph("No contract failed.")
    elif detail == 2:
        rows = [
            f"{failure.contract.id} {failure.contract.title} ({len(failure.cases)} of "
            f"{text.count(failure.of, 'case')}): {failure.sightings[0].what}"
            for failure in failures
        ]
        yield Lines(tuple(text.cut("", row, _LINE) for row in rows))
    elif detail == 1:
        rows = [f"{failure.contract.id} {failure.contract.title}" for failure in failures]
        yield Lines(tuple(text.cut("", row, _HALF_LINE) for row in rows), columns=2)
    else:
        yield Paragraph(_ids(failure.contract.id for failure in failures), f"{text.count(len(failures), 'contract')}:")


def _ids(ids: Iterable[str]) -> str:
    """Name contracts in as few words as possible: `AMP-CAST-001 to 004, 009; AMP-SCALE-060`."""
    families: dict[str, list[str]] = {}
    for id in ids:
        family, _, number = text.cut("", id, 40).rpartition("-")
        families.setdefault(family, []).append(number)
    return "; ".join(f"{family}-{', '.join(_ranges(numbers))}" for family, numbers in families.items())


def _ranges(numbers: list[str]) -> Iterator[str]:
    """Yield three or more consecutive numbers as a range, others alone."""
    start = 0
    for at in range(1, len(numbers) + 1):
        follows = at < len(numbers) and numbers[at].isdecimal() and numbers[at - 1].isdecimal()
        if follows and int(numbers[at]) == int(numbers[at - 1]) + 1:
            continue
        run = numbers[start:at]
        yield from [f"{run[0]} to {run[-1]}"] if len(run) > 2 else run
        start = at


def _problems(report: Report) -> Iterator[str]:
    footer = report.footer
    if footer is None:
        return
    found = [f"problem of the run: {problem}" for problem in footer.problems]
    found += [f"missed by the self-check: {fault.summary} ({fault.target})" for fault in rollup.missed(report)]
    if footer.baseline and (lost := footer.baseline.regressed + footer.baseline.gone):
        found.append(f"worse than in the baseline {footer.baseline.path}: {text.tally(lost)}: {_ids(lost)}")
    yield from (text.cut("", problem, _PROBLEM) for problem in found[:_PROBLEMS_SHOWN])
    if len(found) > _PROBLEMS_SHOWN:
        yield f"and {len(found) - _PROBLEMS_SHOWN} more, in the report"


def _waivers(report: Report, detail: int) -> Iterator[Block]:
    if report.header.options.no_waivers:
        yield Paragraph("Waivers were ignored (--no-waivers).")
    groups: dict[str, dict[str, int]] = {}
    for excuse in excuses.excuses(report):
        counted = groups.setdefault(excuse.given, {})
        counted[excuse.contract.id] = counted.get(excuse.contract.id, 0) + len(excuse.cases)
    if not groups:
        yield Paragraph("Nothing.")
        return
    for given, counted in groups.items():
        number = f"{text.count(len(counted), 'contract')} ({text.count(sum(counted.values()), 'case')})"
        by = f" by {text.cut('', given, _LINE)}" if given else ""
        if detail:
            yield Paragraph(f"{number}{by}:")
            rows = [f"{id} {report.contracts[id].title} ({text.count(cases, 'case')})" for id, cases in counted.items()]
            width = _LINE if detail == 2 else _HALF_LINE
            yield Lines(tuple(text.cut("", row, width) for row in rows), columns=3 - detail)
        else:
            yield Paragraph(_ids(counted), f"{number}{by}:")
    yield Paragraph(f"Each reason in full: {COMMAND} explain waivers REPORT, and in the annex.")


def _not_run(report: Report, detail: int) -> Iterator[Block]:
    rows = [*annex.narrowed(report)]
    for why, ids in outline.not_reached(report).items():
        rows.append(_row("not reached", why, ids, detail))
    for why, ids in rollup.not_applicable(report).items():
        rows.append(_row("not applicable here", why, ids, detail))
    for verdict, reasons in outline.not_judged(report).items():
        if detail:
            rows += [_row(verdict.value.lower(), one.line, one.contracts, detail) for one in reasons]
        else:
            ids = list(dict.fromkeys(id for one in reasons for id in one.contracts))
            rows.append(_row(verdict.value.lower(), f"{text.count(len(reasons), 'reason')}, in the annex", ids, detail))
    yield Lines(tuple(rows)) if rows else Paragraph("Everything was run.")


def _row(word: str, why: str, ids: Iterable[str], detail: int) -> str:
    return f"{word}: {text.cut('', why, _LINE * (1 + detail))}: {_ids(dict.fromkeys(ids))}"
