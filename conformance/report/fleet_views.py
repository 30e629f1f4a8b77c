"""The table of many machines as text, as Markdown, as JSON and as one HTML file that needs nothing else."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from . import text
from .encode import encode
from .fleet import FEWEST, Fleet, Machine
from .verdicts import Overall

KIND = "amp-conformance-fleet/1"

_NAMED = 6
_ROWS = 20  # of each table in text and Markdown; HTML and JSON have all

_EXPLAINED = {
    "suspects": "A value that differs where all or nearly all machines of its kind agree bit for bit. Run the suite "
    "again on that machine: if the value comes back, suspect its memory or its arithmetic units.",
    "slow": "Slower than the median of its kind by more than 3.5 robust deviations (median absolute deviation), or 1.5 "
    "times slower in a single measurement.",
    "failures": "Contracts that make at least one machine not conformant.",
}


@dataclass(frozen=True)
class _Table:
    """A section of the view: its title, a sentence on it, and rows below heads."""

    title: str
    about: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def _heading(fleet: Fleet) -> str:
    counts = Counter(machine.overall for machine in fleet.machines)
    verdicts = ", ".join(f"{counts[overall]} {overall.value}" for overall in Overall if counts[overall])
    unusable = f"; {text.count(len(fleet.unusable), 'report')} not usable" if fleet.unusable else ""
    return f"{text.count(len(fleet.machines), 'machine')}: {verdicts or 'none'}{unusable}"


def _summary(fleet: Fleet) -> list[str]:
    """Return what the tables come to, a line each."""
    lines = []
    if fleet.failures:
        lines.append(f"{text.count(len(fleet.failures), 'contract')} failing on at least one machine")
    suspects = dict.fromkeys(suspect.machine for suspect in fleet.suspects)
    if suspects:
        lines.append(f"{text.count(len(suspects), 'corruption suspect')}: {text.some(list(suspects), _NAMED)}")
    if fleet.slow:
        slow = list(dict.fromkeys(one.machine for one in fleet.slow))
        lines.append(f"{text.count(len(slow), 'slow machine')}: {text.some(slow, _NAMED)}")
    left = len(fleet.machines) - fleet.compared
    if left:
        lines.append(
            f"evidence not compared: {text.count(left, 'machine')} of which fewer than {FEWEST} of one kind are there"
        )
    if not fleet.stands_out:
        lines.append("no machine stands out")
    return lines


def _tables(fleet: Fleet) -> Iterator[_Table]:
    if fleet.unusable:
        yield _Table(
            "Reports that cannot be used",
            "They count for no machine.",
            ("report", "reason"),
            [(text.line(one.file), text.line(one.reason)) for one in fleet.unusable],
        )
    if fleet.failures:
        yield _Table(
            "Contracts that fail",
            _EXPLAINED["failures"],
            ("contract", "machines", "where", "seen first"),
            [
                (
                    f"{one.contract}: {one.title}",
                    f"{len(one.machines)}: {text.some(list(one.machines), _NAMED)}",
                    "; ".join(f"{count} of {group}" for group, count in one.groups.items()),
                    text.line(one.reason),
                )
                for one in fleet.failures
            ],
        )
    if fleet.suspects:
        yield _Table(
            "Corruption suspects",
            _EXPLAINED["suspects"],
            ("machine", "case", "evidence", "measured", "others"),
            [
                (
                    one.machine,
                    f"{one.case} on {one.target}",
                    one.evidence,
                    one.measured,
                    f"{one.others} ({one.agreeing})",
                )
                for one in fleet.suspects
            ],
        )
    if fleet.slow:
        yield _Table(
            "Slow machines",
            _EXPLAINED["slow"],
            ("machine", "times over the median", "deviations", "measurements that stand out"),
            [
                (one.machine, f"{one.times:.2f}", f"{one.deviations:.1f}", text.some(list(one.measurements), 3))
                for one in fleet.slow
            ],
        )
    for what, groups in fleet.groups().items():
        yield _Table(
            f"By {what}",
            "",
            (what, "machines", *(overall.value for overall in Overall), "contracts that fail"),
            [(group, *_counts(machines)) for group, machines in groups.items()],
        )
    yield _Table(
        "Machines",
        "",
        ("machine", "GPU", "driver", "torch", "level", "labels", "verdict", "cases", "waived", "fails"),
        [_row(machine) for machine in sorted(fleet.machines, key=lambda one: one.overall is Overall.CONFORMANT)],
    )


def _counts(machines: Sequence[Machine]) -> tuple[str, ...]:
    counts = Counter(machine.overall for machine in machines)
    failing = Counter(id for machine in machines for id in machine.failing)
    ids = [f"{id} ({count})" for id, count in failing.most_common()]
    return (str(len(machines)), *(str(counts[overall]) for overall in Overall), text.some(ids, 3))


def _row(machine: Machine) -> tuple[str, ...]:
    labels = ", ".join(f"{key}={value}" for key, value in machine.labels.items())
    found = [*machine.failing, *machine.problems]
    words = (machine.name, machine.gpu, machine.driver, machine.torch, machine.level, labels, machine.overall.value)
    return (*words, str(machine.cases), str(machine.waived), text.some(found, 3))


def as_text(fleet: Fleet, width: int = 100) -> str:
    """Return the tables as text, the first rows of each; the verdict of all last."""
    from tabulate import tabulate

    parts = []
    for table in _tables(fleet):
        rows = [[text.wrap(cell, 34) for cell in row] for row in table.rows[:_ROWS]]
        body = tabulate(rows, headers=table.heads, tablefmt="simple", disable_numparse=True)
        about = [text.wrap(table.about, width)] if table.about else []
        parts.append("\n".join([table.title, "-" * len(table.title), *about, body, *_more(table)]))
    parts.append("\n".join([*(f"- {line}" for line in _summary(fleet)), _heading(fleet)]))
    return "\n\n".join(parts)


def _more(table: _Table) -> list[str]:
    left = len(table.rows) - _ROWS
    return [f"and {text.count(left, 'row')} more (-o FILE.html or FILE.json has all)"] if left > 0 else []


def as_markdown(fleet: Fleet) -> str:
    """Return the tables in Markdown, the first rows of each; the verdict of all first."""
    parts = [f"# {_heading(fleet)}", "\n".join(f"- {text.markdown(line)}" for line in _summary(fleet))]
    for table in _tables(fleet):
        cells = [table.heads, ("---",) * len(table.heads)]
        cells += [tuple(text.markdown(cell) for cell in row) for row in table.rows[:_ROWS]]
        parts += [f"## {table.title}", table.about, "\n".join(f"| {' | '.join(row)} |" for row in cells), *_more(table)]
    return "\n\n".join(part for part in parts if part) + "\n"


def as_json(fleet: Fleet) -> str:
    """Return everything as JSON."""
    return json.dumps({"schema": KIND, **encode(fleet)}, indent=1, allow_nan=False) + "\n"


_STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { margin: 1.5rem auto; max-width: 100rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #8886; padding: .25rem .6rem; text-align: left; vertical-align: top;
  overflow-wrap: anywhere; }
th { position: sticky; top: 0; background: Canvas; }
.scroll { overflow-x: auto; } input { font: inherit; padding: .3rem; width: min(30rem, 100%); }
.bad { font-weight: 600; color: light-dark(#a40000, #ff9a9a); }
@media print { input, label { display: none; } th { position: static; } }
"""

_SCRIPT = """
const field = document.getElementById("find"), status = document.getElementById("shown");
field.addEventListener("input", () => {
  const words = field.value.toLowerCase().split(/\\s+/);
  let shown = 0;
  for (const row of document.querySelectorAll("tbody tr")) {
    const line = row.textContent.toLowerCase();
    row.hidden = !words.every(word => line.includes(word));
    shown += !row.hidden;
  }
  status.textContent = shown + " rows";
});
"""


def as_html(fleet: Fleet) -> str:
    """Return everything as one HTML file without network, which reads as well without its script."""
    title = html.escape(_heading(fleet))
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">",
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>{title}</h1>",
        "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in _summary(fleet)) + "</ul>",
        '<p><label for="find">Rows with all of these words:</label> <input id="find" type="search"> '
        '<span id="shown" role="status"></span></p>',
    ]
    for table in _tables(fleet):
        parts.append(f"<h2>{html.escape(table.title)}</h2>")
        parts.append(f"<p>{html.escape(table.about)}</p>" if table.about else "")
        heads = "".join(f'<th scope="col">{html.escape(head)}</th>' for head in table.heads)
        parts.append(f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>')
        parts += [f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in table.rows]
        parts.append("</tbody></table></div>")
    parts.append(f"</main><script>{_SCRIPT}</script></body></html>")
    return "\n".join(part for part in parts if part) + "\n"


_BAD = {overall.value for overall in Overall if overall is not Overall.CONFORMANT}


def _cell(cell: str) -> str:
    return f'<td class="bad">{html.escape(cell)}</td>' if cell in _BAD else f"<td>{html.escape(cell)}</td>"


VIEWS: Mapping[str, Callable[[Fleet], str]] = {
    "text": as_text,
    "markdown": as_markdown,
    "json": as_json,
    "html": as_html,
}
"""The views by the name that `--format` takes."""
