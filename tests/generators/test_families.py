"""The page of the op families: each overload is of one, and whatever is not alike has a reason and a source."""

from __future__ import annotations

from tests.generators import families
from tests.generators.families import Row


def test_every_exception_has_a_reason() -> None:
    without = [
        (name, row.names)
        for name, rows in families.families().items()
        for row in families.apart(rows)
        if not families.reasons(row)
    ]

    assert without == []


def test_every_reason_is_of_an_exception() -> None:
    found = families.families()
    apart = {line for rows in found.values() for row in families.apart(rows) for line in families.reasons(row)}
    every = {line for rows in found.values() for row in rows for line in families.reasons(row)}

    assert every - apart == set()


def test_what_differs_from_most_of_the_family_or_by_backend_is_apart() -> None:
    alike, other, by_backend = Row(("a", "b"), ("fp32", "fp32")), Row(("c",), ("-", "-")), Row(("d",), ("fp32", "-"))

    assert families.apart([alike]) == []
    assert families.apart([other, alike, by_backend]) == [other, by_backend]


def test_the_page_is_that_of_the_data() -> None:
    assert families.PAGE.read_text(encoding="utf-8") == families.page()
