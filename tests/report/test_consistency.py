"""A report that contradicts itself or was edited is refused, whatever was edited; one that a run wrote is not."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.__main__ import main
from conformance.report import consistency, document, layout
from tests import reports
from tests.conftest import Toy

_WORDS = ("PASS", "FAIL", "UNSUPPORTED", "CONFORMANT", "NOT CONFORMANT", "INCOMPLETE", "used", "expired")


def _sealed(name: str, *, folded: bool = False) -> dict[str, Any]:
    """The sample `name` with the digest that a run writes."""
    raw = layout.folded(document.parse(reports.raw(name))) if folded else reports.raw(name)
    raw["footer"]["digest"] = consistency.digest(raw)
    return raw


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _edits(value: Any) -> list[Any]:
    """What somebody might write in place of `value`."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1, value * 1.001 + 1e-9, -value - 1]
    if value in _WORDS:
        return [word for word in _WORDS if word != value]
    return [f"{value}x"]


def _edited(raw: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    changed: Any = copy.deepcopy(raw)
    holder = changed
    for part in path[:-1]:
        holder = holder[part]
    holder[path[-1]] = value
    return changed


def _is_noticed(raw: dict[str, Any], file: Path) -> bool:
    file.write_text(json.dumps(raw), encoding="utf-8")
    try:
        document.read(file)
    except document.ReportError:
        return True
    return False


@pytest.mark.parametrize("name", reports.NAMES)
def test_samples_do_not_contradict_themselves(name: str) -> None:
    assert list(consistency.contradictions(document.parse(reports.raw(name)))) == []


@pytest.mark.parametrize("folded", [False, True], ids=["spelled out", "folded"])
@pytest.mark.parametrize("name", ["conformant", "failing"])
def test_every_edit_of_what_a_run_wrote_is_noticed(name: str, folded: bool, tmp_path: Path) -> None:
    raw = _sealed(name, folded=folded)
    file = tmp_path / "report.json"
    assert not _is_noticed(raw, file)

    unnoticed = [
        (path, new)
        for path, value in _leaves(raw)
        for new in _edits(value)
        if not _is_noticed(_edited(raw, path, new), file)
    ]

    assert unnoticed == []


def test_a_report_is_the_same_in_any_order_of_keys_and_with_other_blanks(tmp_path: Path) -> None:
    def turned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(list(value))}
        return [turned(item) for item in value] if isinstance(value, list) else value

    file = tmp_path / "report.json"
    file.write_text(json.dumps(turned(_sealed("conformant")), indent=3, ensure_ascii=False), encoding="utf-8")

    assert document.examine(file)[1] == []


def test_a_run_writes_the_digest_of_its_report(toy: Toy) -> None:
    for number, body in enumerate(
        ("case.true('ran', True); case.note('pair', [float('nan'), 0.1, 1e300, 'µ\\ud800'])", "case.equal('x', 1, 2)")
    ):
        toy.contract(f"AMP-API-00{number}")
        toy.checks(
            f"@contract('AMP-API-00{number}')\ndef test_it(case: Case) -> None:\n    {body}\n", name=f"test_{number}"
        )
    toy.run()
    written = json.loads((toy.path / "report" / "report.json").read_text())

    assert written["footer"]["digest"] == consistency.digest(written)
    assert document.examine(toy.path / "report")[1] == []


# Edits of conformant.json, which has no digest, and what is said of them.
CONTRADICTIONS = [
    (
        "cases/1/evidence/0/measured",
        "torch.float16",
        "'dtype of the loss' that it holds, with 'torch.float16' against ==",
    ),
    ("cases/0/evidence/1/measured", 1.0, "that it holds, with 1.0 against <="),
    ("cases/0/evidence/1/measured", "nan", "that it holds, with 'nan' against <="),
    ("cases/0/evidence/1/bound", 0.0, "that it holds, with 2.1e-08 against <= 0.0"),
    ("cases/0/evidence/1/bound", "much", "which is no bound of 2.1e-08"),
    ("cases/0/evidence/1/bound", None, "which is no bound of 2.1e-08"),
    ("cases/0/evidence/1/relation", "in", "which is no bound of 2.1e-08"),
    ("cases/0/evidence/1/relation", ">=", "that it holds, with 2.1e-08 against >="),
    ("cases/0/evidence/1/relation", None, "and nothing was required of it"),
    ("cases/0/evidence", [], "passes without judged evidence"),
    ("cases/0/verdict", "UNSUPPORTED", "is UNSUPPORTED and gives no reason"),
    ("cases/0/verdict", "WAIVED", "is WAIVED with no reason of a waiver"),
    ("cases/0/waiver", "known", "is PASS with the reason of a waiver"),
    ("cases/0/reason", "it was close", "passes although: it was close"),
    ("cases/0/target", "cuda:0", "ran on 'cuda:0', which is no target of the run"),
    ("cases/0/id", "AMP-SCALE-001[other:device]", "is filed under the contract AMP-LOSS-001"),
    ("header/options/no_waivers", True, "is WAIVED in a run that ignored waivers"),
    ("footer/exit_status", 1, "the exit status 1 is not that of a run that is CONFORMANT"),
    ("footer/contracts/AMP-MEMORY-001/reason", "it was a leap year", "a reason for AMP-MEMORY-001 that none of its"),
    ("footer/waivers/0/matched", 0, "is said to be used and to match 0 cases, and names 1"),
    ("footer/waivers/0/matched", 9, "is said to be used and to match 9 cases, and names 1"),
    ("footer/waivers/0/cases/0", "*:other-device*", "to match 1 cases, and names 0"),
    ("footer/waivers/0/expires", "2020-01-01", "is said to be used, and ends on 2020-01-01; the run was on 2026-"),
    ("footer/waivers/0/reason", "because", "is WAIVED, and no waiver of the footer excuses it"),
    ("footer/waivers/0/contract", "AMP-LOSS-001", "is said to be used, and none of its cases is WAIVED"),
    ("footer/waivers", [], "is WAIVED, and no waiver of the footer excuses it"),
    ("footer/waivers/0/state", "idle", "is WAIVED, and no waiver of the footer excuses it"),
]


@pytest.mark.parametrize(("where", "value", "said"), CONTRADICTIONS)
def test_contradiction_is_told_and_refused(
    where: str, value: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(reports.changed("conformant", where, value)), encoding="utf-8")

    assert main(["verify", str(file)]) == 1
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["summary", str(file)]) == 4
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("relation", "measured", "bound", "holds"),
    [
        ("==", ("b", "a"), ("a", "b"), True),  # a table in another order
        ("==", "1/2", "1/2", True),
        ("==", 1, "1", True),  # a fraction
        ("==", "nan", "nan", False),
        ("==", 1, 1.0, True),
        ("<=", "-inf", 0, True),
        (">=", "inf", "inf", True),
        ("in", 1, (1, 2), True),
        ("in", "nan", (1, 2), False),
        ("raises", "ValueError: no", "ValueError", True),
    ],
)
def test_what_python_takes_for_equal_is_no_contradiction(relation: str, measured: Any, bound: Any, holds: bool) -> None:
    raw = reports.raw("failing")
    raw["footer"] = None
    case = next(case for case in raw["cases"] if case["verdict"] == "FAIL")
    case["evidence"] = [
        {"name": "x", "measured": measured, "relation": relation, "bound": bound, "unit": "", "holds": holds}
    ]

    assert list(consistency.contradictions(document.parse(json.loads(json.dumps(raw))))) == []


def test_waiver_that_ends_at_midnight_during_the_run_is_no_contradiction() -> None:
    raw = reports.raw("conformant")
    raw["header"]["started"], raw["footer"]["finished"] = "2026-11-20T23:59:00+00:00", "2026-11-21T00:01:00+00:00"
    raw["footer"]["waivers"][0] |= {"expires": "2026-11-20", "state": "expired"}
    raw["footer"] |= {"overall": "NOT CONFORMANT", "exit_status": 1}

    assert list(consistency.contradictions(document.parse(raw))) == []


def test_verify_says_what_it_rests_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    for raw, said, end in (
        (_sealed("failing"), "its digest is that of what the run wrote", "a run that is NOT CONFORMANT"),
        (
            reports.raw("conformant"),
            "it has no digest: figures that contradict nothing may have been changed",
            "a run that is CONFORMANT",
        ),
        (reports.raw("incomplete"), "it has no digest, as the run did not end: figures", ""),
    ):
        file.write_text(json.dumps(raw), encoding="utf-8")

        assert main(["verify", str(tmp_path)]) == (0 if raw["footer"] else 2)
        shown = " ".join(capsys.readouterr().out.split())
        assert said in shown
        assert shown.endswith(end)
        assert shown.startswith("INCOMPLETE: ") is (raw["footer"] is None)


def test_many_contradictions_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = reports.raw("conformant")
    raw["footer"] = None
    model = raw["cases"][0]
    raw["cases"] = [{**model, "id": f"AMP-LOSS-001[{number}]", "reason": "close"} for number in range(30)]
    (tmp_path / "report.json").write_text(json.dumps(raw), encoding="utf-8")

    assert main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out.rstrip().endswith("was changed after the run (10 more)")
