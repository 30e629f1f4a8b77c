"""HTML and SVG in which every text is escaped: only what was built here is markup."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from . import text

_FOLDER = Path(__file__).resolve().parent
_VOID = frozenset({"meta", "link", "br", "hr", "input", "path", "rect", "line", "circle", "polyline", "polygon"})


class Markup(str):
    """A piece of HTML; any other text is escaped when it is put into one."""

    __slots__ = ()


Child: TypeAlias = "Markup | str | int | Iterable[Child] | None"


def tag(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """Return the element `name` with escaped `attributes` and `children`.

    An underscore at the end of an attribute's name is dropped, another one is a hyphen. An attribute of True has no
    value; one of None or False is left out.
    """
    written = [name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            written.append(key if value is True else f'{key}="{escape(_short(value))}"')
    if name in _VOID and not children:
        return Markup(f"<{' '.join(written)}/>")
    return Markup(f"<{' '.join(written)}>{join(children)}</{name}>")


def join(children: Child) -> Markup:
    """Return one piece of HTML of `children`, nested however deeply; None is nothing."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, (str, int)):
        return escape(str(children))
    return Markup("".join(map(join, children)))


def escape(words: str) -> Markup:
    """Return `words` as HTML that shows them, without characters that hide or reorder others."""
    return Markup(html.escape(text.clean(words)))


def data(value: Any) -> Markup:
    """Return `value` as JSON, gzipped and in base64: a tenth of its size, and nothing that a browser could run."""
    written = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return Markup(base64.b64encode(gzip.compress(written, mtime=0)).decode())


def file(name: str) -> Markup:
    """Return the style sheet or script `name` of this folder; raises OSError."""
    return Markup((_FOLDER / name).read_text(encoding="utf-8").strip())


def page(title: str, style: str, body: Child, script: str | None = None) -> str:
    """Return a document that loads nothing and runs no script but `script`, the name of a file of this folder."""
    sheet = file(style)
    allowed = f"default-src 'none'; style-src '{_hash(sheet)}'; base-uri 'none'; form-action 'none'"
    program = None if script is None else file(script)
    if program is not None:
        allowed += f"; script-src '{_hash(program)}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{allowed}"/>'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        Markup(f"<style>{sheet}</style>"),
    )
    last = Markup("" if program is None else f"<script>{program}</script>")
    return f'<!DOCTYPE html>\n<html lang="en">{head}\n{tag("body", body, last)}</html>\n'


def table(heads: Iterable[Child], rows: Iterable[Iterable[Child]], caption: Child = None, **attributes: Any) -> Markup:
    """Return a table whose rows each begin with their heading."""
    return tag(
        "table",
        tag("caption", caption) if caption else None,
        tag("thead", tag("tr", [tag("th", head, scope="col") for head in heads])),
        tag("tbody", [_row(list(row)) for row in rows]),
        **attributes,
    )


def _row(cells: list[Child]) -> Markup:
    return tag("tr", tag("th", cells[0], scope="row"), [tag("td", cell) for cell in cells[1:]])


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _short(value: str | int | float | bool) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
