"""Texts of a report made safe to show: they come from files that anybody may have written."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Collection
from typing import Any

from .values import Case, Evidence, Options

_MARKDOWN = re.compile(r"[\\`*\[\]|<>&~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_BLOCK_MARK = re.compile(r"^(#{1,6}(?= |$)|[-+=]+(?= |$)|\d+[.)](?= |$)|[-=]{3,}$)")
_RELATIONS = {"==": "exactly", "<=": "at most", ">=": "at least", "identical": "bit for bit"}
_ITEMS = 8


def clean(text: str) -> str:
    """Return `text` without anything that moves a cursor, colours, hides or reorders: only lines and tabs stay."""
    return "".join(
        char if char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else "?"
        for char in text.replace("\r\n", "\n").expandtabs(4)
    )


def line(text: str) -> str:
    """Return `text` in one line, with single spaces."""
    return " ".join(clean(text).split())


def wrap(text: str, width: int, first: str = "", rest: str | None = None) -> str:
    """Wrap `text` to `width`, with `first` before its first line and `rest` (default: blanks) before the others."""
    rest = " " * len(first) if rest is None else rest
    return textwrap.fill(
        line(text),
        max(width, len(rest) + 20),
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
    )


def cut(first: str, text: str, width: int) -> str:
    """Return `first` and `text` in one line of at most `width`, cut at a word where it is too long."""
    words, room = line(text), max(width - len(first), 20)
    return first + (words if len(words) <= room else f"{words[: room - 3].rsplit(' ', 1)[0]}...")


def indent(text: str, margin: str) -> str:
    """Put `margin` before every line of `text`, a program or a traceback."""
    return "\n".join(f"{margin}{row}".rstrip() for row in clean(text).strip("\n").split("\n"))


def markdown(text: str) -> str:
    """Return `text` in one line that Markdown shows as it is, also inside a table."""
    escaped = _MARKDOWN.sub(lambda found: _ENTITIES.get(found[0]) or f"\\{found[0]}", line(text))
    return _BLOCK_MARK.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", escaped)


def value(measured: Any, unit: str = "") -> str:
    """Return a measured value or a bound as a reader wants it: six digits, long lists cut."""
    return f"{_value(measured)} {unit}".strip() if unit else _value(measured)


def _value(measured: Any) -> str:
    if isinstance(measured, bool):
        return "true" if measured else "false"
    if isinstance(measured, float):
        return f"{measured:.6g}" if not measured.is_integer() or abs(measured) >= 1e15 else f"{measured:.0f}"
    if measured is None:
        return "none"
    if isinstance(measured, tuple):
        more = f", ... {len(measured)} in all" if len(measured) > _ITEMS else ""
        if measured and all(
            isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in measured
        ):
            return ", ".join(f"{name} {_value(found)}" for name, found in measured[:_ITEMS]) + more
        return f"[{', '.join(_value(item) for item in measured[:_ITEMS])}{more}]"
    return str(measured)


def required(evidence: Evidence) -> str:
    """Return what was required of `evidence`, such as `at most 0.5 ms`; empty where nothing was."""
    if evidence.relation is None:
        return ""
    if evidence.relation == "in" and isinstance(evidence.bound, tuple) and len(evidence.bound) == 2:
        low, high = evidence.bound
        return f"between {value(low)} and {value(high, evidence.unit)}"
    return f"{_RELATIONS.get(evidence.relation, evidence.relation)} {value(evidence.bound, evidence.unit)}"


def seen(evidence: Evidence) -> str:
    """Return one piece of evidence in a line: what was measured, and what was required of it."""
    measured = f"{evidence.name}: {value(evidence.measured, evidence.unit)}"
    if evidence.relation is None:
        return measured
    return f"{measured} (required: {required(evidence)})"


def sighting(case: Case) -> str:
    """Return what a case saw: the evidence of it that does not hold, else its reason."""
    broken = [seen(evidence) for evidence in case.evidence if not evidence.holds]
    return "; ".join(broken) or case.reason or "no reason is given"


def count(number: int, noun: str) -> str:
    """Return `3 cases` or `1 case`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def some(items: list[str], limit: int) -> str:
    """Join the first `limit` of `items` and say how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def tally(ids: Collection[str]) -> str:
    """Return `2 contracts and 5 cases` for a mixture of their ids; those of cases have brackets."""
    cases = sum("[" in id for id in ids)
    parts = [count(number, noun) for number, noun in ((len(ids) - cases, "contract"), (cases, "case")) if number]
    return " and ".join(parts)


def narrowing(options: Options) -> str:
    """Return the command-line words that left contracts out of a run; empty where there were none."""
    words = [f"--chapter {chapter}" for chapter in options.chapters]
    words += [f"--contract {contract}" for contract in options.contracts]
    words += [options.selection] if options.selection else []
    return line(" ".join(words))
