"""A report as one HTML file that loads nothing: the verdict and failures as they are, cases and evidence on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..invocation import COMMAND
from . import causes, excuses, fingerprint, markup, outline, pictures, reach, rollup, self_check, text
from .markup import Child, Markup, tag
from .outline import Failure
from .pictures import Picture
from .values import Contract, Report
from .verdicts import Overall, Verdict

_STYLE, _SCRIPT = "page.css", "page.js"
_SIGHTINGS_SHOWN = 5
_REMARKS = ("reason", "waiver", "detail", "snippet", "node")
_TONES = {
    Verdict.PASS: "pass",
    Verdict.FAIL: "fail",
    Verdict.ERROR: "fail",
    Verdict.WAIVED: "waived",
    Verdict.INCONCLUSIVE: "waived",
    Verdict.UNTESTABLE: "none",
    Verdict.UNSUPPORTED: "none",
}
_TONES_OF_RUN = {Overall.CONFORMANT: "pass", Overall.NOT_CONFORMANT: "fail"}


def render(report: Report, *, digest: str | None = None, against: Report | None = None) -> str:
    """Return `report` as HTML; `digest` is the SHA-256 of its file, `against` an older report for the op policy.

    Raises document.ReportError for evidence that claims to be a history or a speed-up and is none.
    """
    sections = [
        ("failures", "Failures", _failures(report)),
        ("chapters", "Chapters", _chapters(report)),
        ("contracts", "Contracts, cases and evidence", _contracts(report)),
        ("pictures", "Pictures", _pictures(report, against)),
        ("waived", "Waived", _waived(report)),
        ("not-judged", "Not judged, and why", _not_judged(report)),
        ("run", "The run", _run(report, digest)),
    ]
    shown = [(id, title, inside) for id, title, parts in sections if (inside := markup.join(parts))]
    overall = rollup.overall(report).value
    body: list[Child] = [
        tag("a", "Skip to the content", href="#main", class_="skip"),
        _head(report),
        tag("nav", tag("ul", [tag("li", tag("a", title, href=f"#{id}")) for id, title, _ in shown]), aria_label="Page"),
        tag(
            "main",
            [
                tag("section", tag("h2", title, id=f"{id}-title"), inside, id=id, aria_labelledby=f"{id}-title")
                for id, title, inside in shown
            ],
            id="main",
        ),
        tag("script", markup.data(_data(report)), type="application/gzip", id="data"),
    ]
    return markup.page(f"{overall}: AMP on {reach.on(report)}", _STYLE, body, _SCRIPT)


def badge(verdict: Verdict | None) -> Markup:
    """Return a verdict as a word in its colour."""
    tone = _TONES[verdict] if verdict else ""
    return tag("span", verdict.value if verdict else "not reached", class_=f"badge {tone}")


def _head(report: Report) -> Markup:
    overall = rollup.overall(report)
    environment = report.header.environment
    footer = report.footer
    ended = f", {footer.duration_s:.0f} s" if footer else ", and did not end"
    return tag(
        "header",
        tag("h1", "PyTorch automatic mixed precision: ", tag("strong", overall.value)),
        tag("p", f"on {reach.on(report)}", class_="where"),
        tag("ul", [tag("li", ground) for ground in outline.grounds(report)], class_="because"),
        tag("p", f"torch {environment.torch}, {environment.cpu}, {environment.os}; {report.header.started}{ended}"),
        class_=f"verdict {_TONES_OF_RUN.get(overall, 'waived')}",
    )


# --- failures ---------------------------------------------------------------------------------------------------


def _failures(report: Report) -> Iterator[Child]:
    footer = report.footer
    if footer and footer.problems:
        yield tag("h3", "Problems that fail the run")
        yield _list(footer.problems)
    if footer and footer.baseline:
        yield tag("h3", f"Against the baseline {footer.baseline.path}")
        lost = [f"passed there, not here: {id}" for id in footer.baseline.regressed]
        lost += [f"passed there, gone here: {id}" for id in footer.baseline.gone]
        yield _list(lost or ["nothing that passed there is worse here"])
    for fault in rollup.missed(report):
        yield tag("p", f"NOT CAUGHT by the self-check: {self_check.named(fault)}: {fault.summary}")
    found = outline.failures(report)
    if not found:
        yield tag("p", "No contract failed.")
        return
    groups = causes.groups(report)
    if groups:
        yield tag("h3", "Likely causes, by what failed cases share")
        heads = ("cause", "contracts", "cases")
        rows: list[list[Child]] = [[cause.title, _links(cause.contracts), len(cause.cases)] for cause in groups]
        yield markup.table(heads, rows)
    yield tag("h3", text.count(len(found), "contract"))
    yield map(_failure, found)


def _failure(failure: Failure) -> Markup:
    contract = failure.contract
    seen: list[Child] = [
        [sighting.what, f" (in {text.count(len(sighting.cases), 'case')}: {text.some(list(sighting.cases), 3)})"]
        for sighting in failure.sightings[:_SIGHTINGS_SHOWN]
    ]
    if len(failure.sightings) > _SIGHTINGS_SHOWN:
        seen.append(f"and {len(failure.sightings) - _SIGHTINGS_SHOWN} others, with the cases below")
    facts: list[tuple[str, Child]] = [
        ("promised", f"{contract.statement} ({contract.level}, {contract.authority}: {contract.source})"),
        ("seen", _list(seen)),
        ("on", failure.where),
        ("usual cause", contract.failure),
        ("next step", contract.next_step),
        ("run just this", tag("code", failure.command)),
    ]
    programs = (("with torch alone", failure.snippet), ("raised from", failure.trace))
    facts += [(name, tag("pre", tag("code", program))) for name, program in programs if program]
    return tag(
        "article",
        tag("h4", badge(failure.verdict), " ", tag("a", contract.id, href=f"#{contract.id}"), " ", contract.title),
        tag("dl", [[tag("dt", name), tag("dd", words)] for name, words in facts if words]),
        class_="failure",
    )


def _list(items: Iterable[Child]) -> Markup:
    return tag("ul", [tag("li", item) for item in items])


def _links(ids: Iterable[str]) -> list[Child]:
    return [[", " if place else "", tag("a", id, href=f"#{id}")] for place, id in enumerate(ids)]


# --- chapters and contracts -------------------------------------------------------------------------------------


def _chapters(report: Report) -> Iterator[Child]:
    rows = []
    for found in outline.chapters(report):
        counted = Counter(found.contracts.values())
        name = tag("a", found.chapter.title, href=f"#chapter-{found.chapter.name}")
        rows.append([name, len(found.contracts), found.cases.total(), *_counts(counted)])
    if not rows:
        yield tag("p", "No chapter was selected.")
        return
    every = Counter(rollup.verdicts(report).values())
    rows.append(["all", len(report.contracts), len(report.cases), *_counts(every)])
    heads = ["chapter", "contracts", "cases", *(verdict.value.lower() for verdict in Verdict), "not reached"]
    yield tag("div", markup.table(heads, rows, "Contracts of each verdict", class_="counts"), class_="wide", tabindex=0)


def _counts(counted: Counter[Verdict | None]) -> Iterator[Child]:
    for verdict in (*Verdict, None):
        number = counted[verdict]
        yield tag("span", number, class_=_TONES[verdict] if verdict and number else "none")


def _contracts(report: Report) -> Iterator[Child]:
    targets = [target.name for target in report.header.targets]
    yield tag(
        "form",
        _control("Search", tag("input", type="search", id="search", autocomplete="off", aria_describedby="keys")),
        _control("Verdict", _select("verdict", ["any", "not PASS", *(verdict.value for verdict in Verdict)])),
        _control("Target", _select("target", ["any", *targets])),
        _control("Chapter", _select("chapter", ["any", *(chapter.name for chapter in report.header.chapters)])),
        tag("button", "Clear", type="reset"),
        tag("output", id="found", aria_live="polite"),
        tag("p", "Words in ids, titles, reasons and evidence. Press / to search.", id="keys"),
        id="filter",
        role="search",
        aria_label="Filter contracts and cases",
        hidden=True,
    )
    yield tag("noscript", tag("p", "The cases and their evidence, and the filter, need JavaScript."))
    for found in outline.chapters(report):
        counted = Counter(found.contracts.values())
        words = ", ".join(
            f"{counted[verdict]} {verdict.value if verdict else 'not reached'}"
            for verdict in (*reversed(Verdict), None)
            if counted[verdict]
        )
        yield tag(
            "details",
            tag("summary", tag("h3", found.chapter.title), " ", tag("span", words, class_="counted")),
            tag("p", found.chapter.summary),
            [_contract(report, report.contracts[id], verdict) for id, verdict in found.contracts.items()],
            class_="chapter",
            id=f"chapter-{found.chapter.name}",
            data_name=found.chapter.name,
        )


def _control(name: str, control: Markup) -> Markup:
    return tag("label", f"{name} ", control)


def _select(id: str, words: list[str]) -> Markup:
    return tag("select", [tag("option", word, value="" if word == "any" else word) for word in words], id=id)


def _contract(report: Report, contract: Contract, verdict: Verdict | None) -> Markup:
    cases = report.cases_of[contract.id]
    part = f"{text.count(len(cases), 'case')}{', in part' * rollup.in_part(cases)}" if cases else "no case"
    return tag(
        "details",
        tag(
            "summary",
            badge(verdict),
            " ",
            tag("b", contract.id),
            f" {contract.title} ",
            tag("span", f"({part})", class_="counted"),
        ),
        tag("p", contract.statement, " ", tag("small", f"{contract.level}, {contract.authority}: {contract.source}")),
        tag("div", class_="cases"),
        class_="contract",
        id=contract.id,
    )


def _data(report: Report) -> dict[str, Any]:
    """Return the cases as the script shows them: each text stands once, and what refers to it has its number."""
    texts: dict[str, int] = {}
    rows: dict[tuple[int, int, int, int], int] = {}
    targets = {target.name: place for place, target in enumerate(report.header.targets)}
    verdicts = {verdict: place for place, verdict in enumerate(Verdict)}
    contracts: dict[str, list[list[Any]]] = {}

    def number(words: str) -> int:
        return texts.setdefault(words, len(texts))

    for case in report.cases:
        numbers = []
        for found in case.evidence:
            said = number(found.name), number(text.value(found.measured, found.unit)), number(text.required(found))
            numbers.append(rows.setdefault((*said, int(found.holds)), len(rows)))
        target = targets.setdefault(case.target, len(targets))
        remarks = {name: number(words) for name in _REMARKS if (words := getattr(case, name))}
        cells = [outline.short_id(case), target, verdicts[case.verdict], round(case.duration_s, 4), numbers]
        contracts.setdefault(case.contract, []).append([*cells, remarks] if remarks else cells)
    return {
        "verdicts": [[verdict.value, _TONES[verdict]] for verdict in Verdict],
        "targets": list(map(text.line, targets)),
        "texts": list(map(text.clean, texts)),
        "rows": list(rows),
        "cases": contracts,
    }


# --- pictures ---------------------------------------------------------------------------------------------------

_PICTURES_SHOWN = 12
_DRAWN: tuple[tuple[str, Callable[[Report], list[Picture]], str], ...] = (
    ("Error against bound", pictures.errors, "large"),
    ("Loss curves", pictures.loss_curves, "half"),
    ("Loss scales, iteration by iteration", pictures.loss_scales, "small"),
    ("Speed", pictures.speedups, "large"),
    ("Memory", pictures.memory, "large"),
)


def _pictures(report: Report, against: Report | None) -> Iterator[Child]:
    yield from _op_policy(report, against)
    for title, draw, size in _DRAWN:
        if found := draw(report):
            yield tag("h3", title)
            yield tag("div", map(_picture, found[:_PICTURES_SHOWN]), class_=f"pictures {size}")
            if rest := found[_PICTURES_SHOWN:]:
                more = tag("div", map(_picture, rest), class_=f"pictures {size}")
                yield tag("details", tag("summary", f"{len(rest)} more"), more)


def _picture(picture: Picture) -> Markup:
    return tag(
        "figure",
        tag("figcaption", tag("b", picture.title), tag("br"), picture.words),
        picture.drawing,
    )


def _op_policy(report: Report, against: Report | None) -> Iterator[Child]:
    rows = pictures.op_policy(report)
    if not rows:
        return
    heads = pictures.backends(rows)
    before = pictures.op_policy(against) if against else {}
    yield tag("h3", "The op policy: what autocast does to each op on each backend")
    if against:
        moved = list(_moved(rows, before, heads))
        version = against.header.environment.torch
        yield tag("p", f"Against torch {version}: {text.count(len(moved), 'rule')} moved.")
        yield _list(moved)
    words = "16 bit: computed in the AMP dtype; fp32; widest: in the widest type of its inputs; error: refused."
    yield tag("p", words, " A mark in red or amber: a case about this op failed or is waived. Empty: on no list.")
    body = [
        [op, *(_cell(cells.get(backend), backend, before.get(op)) for backend in heads)] for op, cells in rows.items()
    ]
    table = markup.table(["op", *heads], body, f"{len(rows)} ops on {len(heads)} backends", class_="policy")
    yield tag("div", table, class_="scroll", tabindex=0, role="region", aria_label="The op policy")


def _moved(
    rows: dict[str, dict[str, pictures.Cell]], before: dict[str, dict[str, pictures.Cell]], heads: list[str]
) -> Iterator[str]:
    """Yield a line for each rule that is another one than it was, of the backends that both reports have."""
    both = [backend for backend in heads if any(backend in cells for cells in before.values())]
    for op in sorted({*rows, *before}):
        changes: dict[str, list[str]] = {}
        for backend in both:
            old, new = (found.get(op, {}).get(backend) for found in (before, rows))
            was, is_ = (cell.policy if cell else "on no list" for cell in (old, new))
            if was != is_:
                changes.setdefault(f"{was} → {is_}", []).append(backend)
        yield from (f"{op}: {change} on {', '.join(where)}" for change, where in changes.items())


def _cell(cell: pictures.Cell | None, backend: str, before: dict[str, pictures.Cell] | None) -> Child:
    if cell is None:
        return ""
    class_ = cell.policy.replace(" ", "-")
    mark: Child = None
    if cell.verdict and _TONES[cell.verdict] in ("fail", "waived"):
        mark = tag("span", f" {cell.verdict.value}", class_=f"badge {_TONES[cell.verdict]}")
    old = before.get(backend) if before else None
    moved = tag("b", f" was {old.policy}") if old and old.policy != cell.policy else None
    return tag("span", cell.policy, mark, moved, class_=f"rule {class_}")


# --- the rest ---------------------------------------------------------------------------------------------------


def _waived(report: Report) -> Iterator[Child]:
    found = excuses.excuses(report)
    if not found:
        return
    heads = ("contract", "cases", "seen", "excuse", "given by")
    rows: list[list[Child]] = []
    for excuse in found:
        # Other links could run a script.
        link = excuse.waiver.link if excuse.waiver and excuse.waiver.link.startswith("https://") else None
        rows.append(
            [
                [tag("a", excuse.contract.id, href=f"#{excuse.contract.id}"), tag("br"), excuse.contract.title],
                len(excuse.cases),
                text.sighting(excuse.cases[0]),
                excuse.reason,
                [excuse.given, tag("br"), tag("a", "read on", href=link, rel="noreferrer") if link else None],
            ]
        )
    yield tag("p", f"{text.count(len(found), 'known failure')}, each with its excuse.")
    yield tag("details", tag("summary", "Show them"), tag("div", markup.table(heads, rows), class_="wide"))


def _not_judged(report: Report) -> Iterator[Child]:
    heads = ("why", "cases", "contracts")
    for verdict, groups in outline.not_judged(report).items():
        rows: list[list[Child]] = [[one.line, len(one.cases), _links(one.contracts)] for one in groups]
        yield markup.table(heads, rows, verdict.value)
    if reasons := outline.not_reached(report):
        yield markup.table(("why", "contracts"), [[why, _links(ids)] for why, ids in reasons.items()], "Not reached")
    if absent := rollup.not_applicable(report):
        rows = [[why, len(ids), _links(dict.fromkeys(ids))] for why, ids in absent.items()]
        yield markup.table(heads, rows, "Not applicable here")


def _run(report: Report, digest: str | None) -> Iterator[Child]:
    header = report.header
    suite = header.suite
    state = {True: "", False: ", WITH CHANGES THAT ARE NOT COMMITTED", None: ""}[suite.clean]
    yield _facts(
        "Suite and report",
        {
            "suite": f"{suite.version}, commit {suite.commit or 'unknown'}{state}",
            "started": header.started,
            "ended": report.footer.finished if report.footer else "it did not end",
            "SHA-256 of report.json": digest or "not known",
            "shown as": f"{COMMAND} html",
        },
    )
    environment = {name.replace("_", " "): value for name, value in vars(header.environment).items()}
    packages = environment.pop("packages")
    yield _facts("Environment", {**environment, **{f"package {name}": value for name, value in packages.items()}})
    kernels = {device_type: reach.sources(files) for device_type, files in header.autocast_kernels.items()}
    yield _facts("Autocast kernels that are not torch's", kernels)
    functions = {origin: ", ".join(names) for origin, names in header.replaced_functions.items()}
    yield _facts("Functions that are not torch's, by module", functions)
    options = {name.replace("_", " "): value for name, value in vars(header.options).items()}
    yield _facts("Options", {name: value for name, value in options.items() if value not in (None, (), "")})
    for target in header.targets:
        yield _facts(f"Target {target.name}{' (fake: no hardware)' if target.fake else ''}", target.probe)
    yield _facts("Flags and variables", {**header.flags, **header.variables})
    yield _facts("Entries of torch.backends", reach.entries(header.torch_backends))
    for found in fingerprint.fingerprints(report).values():
        rows = [(section, row, value) for section, values in found.sections.items() for row, value in values.items()]
        yield _folded(f"Numerics fingerprint of {found.target}", markup.table(("", "of", "found"), rows))
    footer = report.footer
    for health in footer.health if footer else ():
        names = dict.fromkeys([*health.before, *health.after])
        counts: list[list[Child]] = [
            [name, health.before.get(name, "-"), health.after.get(name, "-")] for name in names
        ]
        counts.append(["critical errors (Xid)", "", ", ".join(map(str, health.xids)) or "none"])
        yield _folded(f"Health of {health.target}", markup.table(("", "before", "after"), counts))
    if footer and footer.self_check:
        faults = [
            [fault.summary, fault.target, ", ".join(fault.contracts), fault.state, fault.case or fault.reason]
            for fault in footer.self_check.faults
        ]
        heads = ("fault", "target", "contracts that have to notice", "state", "by, or why not")
        yield _folded(self_check.brief(footer.self_check).capitalize(), markup.table(heads, faults))


def _facts(title: str, facts: Any) -> Child:
    rows = [[name, "none" if value is None else text.value(value)] for name, value in facts.items()]
    return _folded(title, markup.table(("", "found"), rows)) if rows else None


def _folded(title: str, body: Markup) -> Markup:
    return tag("details", tag("summary", title), tag("div", body, class_="wide"))
