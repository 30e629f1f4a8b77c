"""The folded form of a report: what the cases of one check have in common stands once, and they refer to it.

A run appends each case as it ends, spelled out, to `cases`; at its end it folds them into `checks`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .decode import Decoder, Mismatch, UnknownKey, decode, each
from .encode import encode
from .values import Case, Evidence, Report
from .verdicts import Verdict

# Names into which parameters are filled could take all the memory of the reader's machine.
MOST_CHARACTERS = 2**28

_ADVICE = ("failure", "next_step")
_EXACT = ("==", "identical")
_MARK = re.compile(r"\$(\$|\w+)")
_TEXTS = tuple[str, ...]
_REST: dict[str, Any] = {"node": None, "reason": "", "detail": None, "snippet": None, "waiver": None}

Marks = Sequence[tuple[str, str]]


def folded(report: Report) -> dict[str, Any]:
    """Return `report` as JSON can hold it, in the folded form.

    Contracts whose cases all passed lose what to do about a failure.
    """
    checks: dict[tuple[str, ...], _Folding] = {}
    troubled = set()
    for case in report.cases:
        contract, parameters = case.contract, case.parameters
        name, colon, id = case.id.removeprefix(f"{contract}[").removesuffix("]").partition(":")
        key = (contract, name, *parameters)
        check = checks.get(key)
        if check is None:
            check = checks[key] = _Folding(contract, name, list(parameters))
        check.add(case, id if colon else None)
        if case.verdict is not Verdict.PASS:
            troubled.add(contract)
    header = encode(report.header)
    for row in header["contracts"]:
        if row["id"] not in troubled:
            for name in _ADVICE:
                del row[name]
    return {
        "schema": report.schema,
        "header": header,
        "checks": [check.folded() for check in checks.values()],
        "footer": encode(report.footer),
    }


class _Folding:
    """The cases of one check while they are folded."""

    def __init__(self, contract: str, check: str, parameters: list[str]) -> None:
        self._head = {"contract": contract, "check": check, "parameters": parameters}
        self._rows: dict[str, list[Any]] = {}
        self._numbers: dict[tuple[str, str], int] = {}  # of the names of all rows, as they came
        self._cases: list[tuple[list[Any], list[Any], dict[str, Any]]] = []

    def add(self, case: Case, id: str | None) -> None:
        """Take a case, which is `id` within the check."""
        marks = _marks(case.parameters)
        evidence = [self._item(_marked(found.name, marks), found) for found in case.evidence]
        rest = {name: value for name in _REST if (value := getattr(case, name))}
        values = list(case.parameters.values())
        if values != _parts(id, len(values)):
            rest["parameters"] = values
        self._cases.append(([id, case.target, case.verdict.value, case.duration_s], evidence, rest))

    def folded(self) -> dict[str, Any]:
        """Return the check as the file holds it, the names numbered row by row."""
        numbers = (self._numbers[said, name] for said, (_, *names) in self._rows.items() for name in names)
        final = {number: place for place, number in enumerate(numbers)}
        cases = []
        for head, found, rest in self._cases:
            evidence = [final[item] if type(item) is int else [final[item[0]], *item[1:]] for item in found]
            cases.append([*head, evidence, rest] if rest else [*head, evidence])
        return {**self._head, "rows": list(self._rows.values()), "cases": cases}

    def _item(self, name: str, found: Evidence) -> Any:
        """Return a piece of evidence as the number of its name, in a list with what the row does not say of it."""
        measured, relation, bound, unit = found.measured, found.relation, found.bound, found.unit
        said = [relation, bound, unit] if unit else [] if relation is None else [relation, bound]
        seen: tuple[Any, ...] = (measured,)
        if not found.holds:
            seen = (measured, False)
        elif relation in _EXACT and _same(measured, bound):
            said, seen = [bound] if relation == "==" and not unit else said, ()
        elif relation is not None and type(measured) is str:
            said, seen = [relation, bound, unit, measured], ()
        key = repr(said), name
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._rows.setdefault(key[0], [said]).append(name)
        return [number, *seen] if seen else number


def _same(measured: Any, bound: Any) -> bool:
    """Whether two values are one in JSON, where 1, 1.0 and True are three."""
    return bool(measured == bound) and (type(measured) is str or repr(measured) == repr(bound))


def _marks(parameters: Mapping[str, str]) -> Marks:
    """Return the values that a name may hold, the longest first, each with what is written for it."""
    found = [(value, f"${name}") for name, value in parameters.items() if len(value) > 1 and "$" not in value]
    return sorted(found, key=lambda pair: -len(pair[0]))


def _marked(name: str, marks: Marks) -> str:
    """Return `name` with the parameter written for each of its values that stands there as a word."""
    name = name.replace("$", "$$")
    for value, mark in marks:
        at = name.find(value)
        while at >= 0:
            before, after = name[:at], name[at + len(value) :]
            whole = not before.endswith("$") and not _is_of_a_word(before[-1:]) and not _is_of_a_word(after[:1])
            name = f"{before}{mark if whole else value}{after}"
            at = name.find(value, at + len(mark if whole else value))
    return name


def _is_of_a_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _parts(id: str | None, number: int) -> list[str]:
    """Return the last parts of the id of a case, which mostly are the values of its parameters."""
    return id.split("-")[-number:] if id is not None and number else []


def written(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of a folded report: the header, the head of each check and each case in a line of its own."""
    yield f'{{"schema":{_json(report["schema"])},\n"header":{_json(report["header"])},\n"checks":['
    for number, check in enumerate(report["checks"]):
        head = _json({name: value for name, value in check.items() if name != "cases"})
        cases = ",\n".join(map(_json, check["cases"]))
        yield f'{"," * bool(number)}\n{head[:-1]},"cases":[\n{cases}]}}'
    yield f'\n],\n"footer":{_json(report["footer"])}}}\n'


_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class _Check:
    """A check as the file holds it."""

    contract: str
    check: str
    parameters: tuple[str, ...]
    rows: tuple[object, ...]
    cases: tuple[object, ...]


@dataclass(frozen=True)
class _Row:
    """A name and what is said of it; `whole` where that is all of a piece of evidence, `marked` where it has marks."""

    evidence: Evidence
    whole: bool
    marked: bool


def spelled_out(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a folded `report` (of json.loads) with its cases spelled out, their evidence decoded.

    Raises decode.Mismatch and decode.UnknownKey for what cannot be folded cases; nothing else is looked at.
    """
    if not isinstance(report["checks"], list):
        raise Mismatch("must be a list").inside("checks")
    checks = _each("checks", _Unfolding().cases, report["checks"])
    rest = {key: value for key, value in report.items() if key != "checks"}
    return {**rest, "cases": [case for cases in checks for case in cases]}


class _Unfolding:
    """The checks of a report while their cases are spelled out."""

    def __init__(self) -> None:
        self._left = MOST_CHARACTERS

    def cases(self, value: Any) -> tuple[dict[str, Any], ...]:
        check: _Check = decode(_Check, value)
        rows = [row for rows in _each("rows", _rows, check.rows) for row in rows]
        return _each("cases", partial(self._case, check, rows), check.cases)

    def _case(self, check: _Check, rows: Sequence[_Row], value: Any) -> dict[str, Any]:
        if not isinstance(value, list) or not 5 <= len(value) <= 6:
            raise Mismatch("must be a list of id, target, verdict, duration_s, evidence, and an object with the rest")
        id, target, verdict, duration, evidence, rest = (*value, {})[:6]
        if not (id is None or isinstance(id, str)) or not isinstance(evidence, list) or not isinstance(rest, dict):
            raise Mismatch("must have a text or null for its id, its evidence in a list, and the rest in an object")
        if unknown := sorted(rest.keys() - {*_REST, "parameters"}):
            raise UnknownKey(f"unknown key {unknown[0]!r}; allowed: {', '.join(_REST)}, parameters")
        values = decode(_TEXTS, rest.get("parameters", _parts(id, len(check.parameters))))
        if len(values) != len(check.parameters):
            raise Mismatch(f"must have {len(check.parameters)} parameters, and has {len(values)}")
        parameters = dict(zip(check.parameters, values, strict=True))
        return {
            **_REST,
            **rest,
            "id": f"{check.contract}[{check.check}{'' if id is None else f':{id}'}]",
            "contract": check.contract,
            "target": target,
            "parameters": parameters,
            "verdict": verdict,
            "evidence": list(_each("evidence", partial(self._evidence, rows, parameters), evidence)),
            "duration_s": duration,
        }

    def _evidence(self, rows: Sequence[_Row], parameters: Mapping[str, str], value: Any) -> Evidence:
        number, *seen = value if isinstance(value, list) and 2 <= len(value) <= 3 else (value,)
        if type(number) is not int or not 0 <= number < len(rows):
            raise Mismatch("must be the number of a row, or a list of it, what was measured, and whether that holds")
        row, found = rows[number], rows[number].evidence
        if not seen and not row.whole:
            raise Mismatch(f"must say what was measured, as row {number} does not")
        if row.whole and not row.marked and not seen:
            return found
        return Evidence(
            self._filled(found.name, parameters) if row.marked else found.name,
            decode(Any, seen[0]) if seen else found.measured,
            found.relation,
            found.bound,
            found.unit,
            decode(bool, seen[1]) if len(seen) > 1 else True,
        )

    def _filled(self, name: str, parameters: Mapping[str, str]) -> str:
        self._left -= len(name) + name.count("$") * max(map(len, parameters.values()), default=0)
        if self._left < 0:
            raise Mismatch(f"names with their parameters filled in have more than {MOST_CHARACTERS} characters")
        try:
            return _MARK.sub(lambda found: "$" if found[1] == "$" else parameters[found[1]], name)
        except KeyError as unknown:
            raise Mismatch(f"the name {name[:60]!r} has the parameter {unknown}, and the check has not") from None


def _rows(value: Any) -> list[_Row]:
    if not isinstance(value, list) or len(value) < 2 or not isinstance(value[0], list) or len(value[0]) > 4:
        raise Mismatch("must be a list of names that begins with a list of relation, bound, unit and measured value")
    said: list[Any] = ["=="] * (len(value[0]) == 1) + value[0]
    exact = 0 < len(said) < 4 and said[0] in _EXACT
    relation, bound, unit, measured = said + [None, None, "", None][len(said) :]
    claim = {"relation": relation, "bound": bound, "unit": unit, "measured": bound if exact else measured}
    first: Evidence = decode(Evidence, {"name": value[1], "holds": True, **claim})
    rest = (first.measured, first.relation, first.bound, first.unit, True)
    found = [first, *(Evidence(decode(str, name), *rest) for name in value[2:])]
    return [_Row(evidence, exact or len(said) == 4, "$" in evidence.name) for evidence in found]


def _each(place: str, decoder: Decoder, values: Iterable[Any]) -> tuple[Any, ...]:
    try:
        return each(decoder, values)
    except Mismatch as mismatch:
        raise mismatch.inside(place) from None
