"""A document of headings, paragraphs, tables and lists, written as Markdown or as HTML; its texts are plain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from . import markup, text
from .markup import Markup, tag


class Strong(str):
    """A cell of a table, or an item of a list, that stands out."""

    __slots__ = ()


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is that of the document."""

    level: int
    words: str


@dataclass(frozen=True)
class Paragraph:
    """A paragraph, the first words of which may be strong."""

    words: str
    strong: str = ""


@dataclass(frozen=True)
class Table:
    """A table; `kind` names its look in HTML."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kind: str = ""


@dataclass(frozen=True)
class Lines:
    """A list, in HTML in so many columns."""

    items: tuple[str, ...]
    columns: int = 1


@dataclass(frozen=True)
class NewPage:
    """What follows begins on a new page where the document is printed."""


Block = Heading | Paragraph | Table | Lines | NewPage


def as_markdown(blocks: Iterable[Block]) -> str:
    """Return the document in Markdown."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {text.markdown(block.words)}"
    if isinstance(block, Paragraph):
        strong = f"**{text.markdown(block.strong)}** " if block.strong else ""
        return f"{strong}{text.markdown(block.words)}".strip()
    if isinstance(block, Table):
        rows = [list(map(text.markdown, block.heads)), ["---"] * len(block.heads)]
        rows += [[_strong(cell) for cell in row] for row in block.rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    if isinstance(block, Lines):
        return "\n".join(f"- {_strong(item)}" for item in block.items)
    return "---"


def _strong(cell: str) -> str:
    return f"**{text.markdown(cell)}**" if isinstance(cell, Strong) else text.markdown(cell)


def as_html(title: str, style: str, blocks: Iterable[Block]) -> str:
    """Return the document as a page with the style sheet `style` of this folder, and no script."""
    return markup.page(title, style, tag("main", list(_elements(blocks))))


def _elements(blocks: Iterable[Block]) -> Iterator[Markup]:
    for block in blocks:
        if isinstance(block, Heading):
            yield tag(f"h{block.level}", block.words)
        elif isinstance(block, Paragraph):
            yield tag("p", tag("strong", block.strong) if block.strong else None, " " * bool(block.strong), block.words)
        elif isinstance(block, Table):
            rows = [[_cell(cell) for cell in row] for row in block.rows]
            yield markup.table(block.heads, rows, class_=block.kind or None)
        elif isinstance(block, Lines):
            kind = "columns" if block.columns > 1 else None
            yield tag("ul", [tag("li", _cell(item)) for item in block.items], class_=kind)
        else:
            yield tag("hr", class_="page")


def _cell(cell: str) -> Markup:
    return tag("strong", cell) if isinstance(cell, Strong) else markup.escape(cell)
