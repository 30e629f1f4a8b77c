"""A report for the page and the log of a CI job: a summary in Markdown of at most 60 lines, and annotations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..invocation import COMMAND
from . import causes, outline, reach, rollup, self_check, text
from .blocks import Block, Heading, Lines, Paragraph, Strong, Table, as_markdown
from .outline import Failure
from .values import Report
from .verdicts import Overall, Verdict

MOST_LINES = 60
_PROBLEMS, _CAUSES, _FAILURES = 5, 6, 10
_CELL = 160  # characters
_COUNTED = (Verdict.PASS, Verdict.FAIL, Verdict.WAIVED)
# GitHub shows ten errors of a step.
_ANNOTATIONS = 9

Annotate = Callable[[str, str], str]


def summary(report: Report) -> str:
    """Return the summary in Markdown, of at most MOST_LINES lines however many failures there are."""
    overall = rollup.overall(report)
    environment, options = report.header.environment, report.header.options
    last = list(_last(report))
    blocks: list[Block] = [
        Heading(2, f"{overall.value}: AMP on {text.cut('', reach.on(report), _CELL)}"),
        Paragraph(text.cut("", "; ".join(outline.grounds(report)), 4 * _CELL)),
        Paragraph(text.cut("", f"torch {environment.torch}, {environment.cpu}, level {options.level}", _CELL)),
        *_problems(report),
        *_causes(report),
        *_failures(report),
    ]
    left = MOST_LINES - len(as_markdown([*blocks, *last]).splitlines())
    return as_markdown([*blocks, *_chapters(report, left), *last])


def _problems(report: Report) -> Iterator[Block]:
    footer = report.footer
    rows = list(footer.problems) if footer else []
    rows += [f"the self-check missed {self_check.named(fault)}" for fault in rollup.missed(report)]
    if footer and footer.baseline and (lost := text.tally(footer.baseline.regressed + footer.baseline.gone)):
        rows.append(f"worse than in the baseline: {lost}")
    if rows:
        shown = [text.cut("", row, _CELL) for row in rows[:_PROBLEMS]]
        shown += [f"and {len(rows) - _PROBLEMS} more"] if len(rows) > _PROBLEMS else []
        yield Heading(3, "Problems that fail the run")
        yield Lines(tuple(shown))


def _causes(report: Report) -> Iterator[Block]:
    found = causes.groups(report)
    if not any(len(cause.contracts) > 1 for cause in found):
        return
    yield Heading(3, "Likely causes")
    rows = [
        (text.cut("", cause.title, _CELL), str(len(cause.contracts)), str(len(cause.cases)))
        for cause in found[:_CAUSES]
    ]
    if rest := found[_CAUSES:]:
        contracts = len({id for cause in rest for id in cause.contracts})
        rows.append((f"{len(rest)} more", str(contracts), str(sum(len(cause.cases) for cause in rest))))
    yield Table(("cause", "contracts", "cases"), tuple(rows))


def _failures(report: Report) -> Iterator[Block]:
    found = outline.failures(report)
    if not found:
        return
    yield Heading(3, f"Failed: {text.count(len(found), 'contract')}")
    rows = [(failure.contract.id, text.cut("", failure.contract.title, _CELL), _seen(failure)) for failure in found]
    if len(rows) > _FAILURES:
        others = [row[0] for row in rows[_FAILURES:]]
        rows = [*rows[:_FAILURES], (f"{len(others)} more", text.cut("", text.some(others, 12), 3 * _CELL), "")]
    yield Table(("contract", "promised", "seen"), tuple(rows))


def _seen(failure: Failure) -> str:
    return text.cut("", failure.sightings[0].what, _CELL)


def _chapters(report: Report, left: int) -> Iterator[Block]:
    """Yield the chapters in at most `left` lines, those with a failure first."""
    rows = []
    for found in outline.chapters(report):
        counted = Counter(found.contracts.values())
        counted[Verdict.FAIL] += counted.pop(Verdict.ERROR, 0)
        others = len(found.contracts) - sum(counted[verdict] for verdict in _COUNTED)
        name = Strong(found.chapter.name) if counted[Verdict.FAIL] else found.chapter.name
        rows.append((name, *(str(counted[verdict]) for verdict in _COUNTED), str(others)))
    rows.sort(key=lambda row: not isinstance(row[0], Strong))
    room = max(left - 6, 1)
    if len(rows) > room:
        rest = rows[room - 1 :]
        sums = (str(sum(int(row[column]) for row in rest)) for column in range(1, 5))
        rows = [*rows[: room - 1], (f"{len(rest)} more", *sums)]
    if rows:
        heads = ("chapter", *(verdict.value.lower() for verdict in _COUNTED), "not judged")
        yield Table(heads, tuple(rows))


def _last(report: Report) -> Iterator[Block]:
    reasons = outline.not_judged(report)
    words = [
        f"{text.count(sum(len(one.cases) for one in found), 'case')} {verdict.value}"
        for verdict, found in reasons.items()
    ]
    if missing := outline.not_reached_count(report):
        words.append(f"{missing} not reached")
    if waived := len(outline.with_verdict(report, Verdict.WAIVED)):
        words.insert(0, f"{text.count(waived, 'contract')} waived")
    said = f"{', '.join(words)}. " if words else ""
    yield Paragraph(f"{said}More: {COMMAND} summary REPORT, {COMMAND} html REPORT -o report.html")


# --- annotations ------------------------------------------------------------------------------------------------


def annotated(report: Report, environment: Mapping[str, str]) -> list[str]:
    """Return the lines that a CI system shows beside a job, for each whose variable is in `environment`.

    GitHub Actions (Gitea and Forgejo set its variable as well), Azure Pipelines and TeamCity.
    """
    said = list(_messages(report))
    return [
        annotate(kind, message)
        for variable, annotate in _SYSTEMS.items()
        if environment.get(variable)
        for kind, message in said
    ]


def _messages(report: Report) -> Iterator[tuple[str, str]]:
    """Yield a kind (error, warning) and a message for each failure, the last for all that are left."""
    overall = rollup.overall(report)
    failures = outline.failures(report)
    for failure in failures[:_ANNOTATIONS]:
        words = f"{failure.contract.title}; {_seen(failure)}; {failure.where}"
        yield "error", text.line(f"{failure.verdict.value} {failure.contract.id}: {words}")
    if len(failures) > _ANNOTATIONS:
        rest = [failure.contract.id for failure in failures[_ANNOTATIONS:]]
        yield "error", text.line(f"{len(rest)} more contracts failed: {text.some(rest, 20)}")
    if overall is not Overall.CONFORMANT:
        kind = "error" if overall in (Overall.NOT_CONFORMANT, Overall.NOTHING_RAN) else "warning"
        yield kind, text.line(f"{outline.verdict(report)}: {'; '.join(outline.grounds(report))}")


def _escaped(words: str, marks: Iterable[tuple[str, str]]) -> str:
    for char, written in marks:
        words = words.replace(char, written)
    return words


def _github(kind: str, words: str) -> str:
    # https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    return f"::{kind} title=AMP conformance::{_escaped(words, (('%', '%25'),))}"


def _azure(kind: str, words: str) -> str:
    # https://learn.microsoft.com/azure/devops/pipelines/scripts/logging-commands
    return f"##vso[task.logissue type={kind}]{_escaped(words, (('%', '%AZP25'),))}"


def _teamcity(kind: str, words: str) -> str:
    # https://www.jetbrains.com/help/teamcity/service-messages.html
    plain = words.encode("ascii", "replace").decode()
    said = _escaped(plain, (("|", "||"), ("'", "|'"), ("[", "|["), ("]", "|]")))
    if kind == "error":
        return f"##teamcity[buildProblem description='{said}']"
    return f"##teamcity[message text='{said}' status='WARNING']"


_SYSTEMS: dict[str, Annotate] = {"GITHUB_ACTIONS": _github, "TF_BUILD": _azure, "TEAMCITY_VERSION": _teamcity}
