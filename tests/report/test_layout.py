"""The folded form of a report says all that the spelled-out one says, and is refused where it says what cannot be."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.__main__ import main
from conformance.report import document, layout
from conformance.report.values import Report
from tests import reports
from tests.conftest import Toy

_WORDS = st.sampled_from(["mm", "addmm", "op", "fp16", "$", "$op", "_", " ", ", ", ": ", "é", "1", "-"])
_TEXTS = st.lists(_WORDS, max_size=5).map("".join)
_SCALARS = st.one_of(st.none(), st.booleans(), st.sampled_from([0, 1, 0.0, -0.0, 1.0, "1", "None", "nan"]), _TEXTS)
_VALUES = st.one_of(_SCALARS, st.lists(st.one_of(_SCALARS, st.lists(_SCALARS, max_size=2)), max_size=2))
_EVIDENCE = st.one_of(
    st.fixed_dictionaries(
        {
            "name": _TEXTS,
            "measured": _VALUES,
            "relation": st.sampled_from(["==", "identical", "<=", ">=", "in", "raises", "warns"]),
            "bound": _VALUES,
            "unit": st.sampled_from(["", "u"]),
            "holds": st.booleans(),
        }
    ),
    st.fixed_dictionaries(
        {
            "name": _TEXTS,
            "measured": _VALUES,
            "relation": st.none(),
            "bound": st.none(),
            "unit": st.sampled_from(["", "u"]),
            "holds": st.just(True),
        }
    ),
)
_CASES = st.lists(
    st.fixed_dictionaries(
        {
            "contract": st.sampled_from(["AMP-LOSS-001", "AMP-SCALE-001"]),
            "node": st.none() | st.just("a.py::b"),
            "target": st.just("cpu"),
            "parameters": st.fixed_dictionaries(
                {}, optional={"op": _TEXTS, "kind": _TEXTS, "amp_dtype": st.just("fp16")}
            ),
            "verdict": st.sampled_from(["PASS", "FAIL"]),
            "reason": st.sampled_from(["", "close"]),
            "detail": st.none() | _TEXTS.filter(bool),
            "evidence": st.lists(_EVIDENCE, max_size=4),
            "snippet": st.none() | st.just("print()"),
            "waiver": st.none() | st.just("known"),
            "duration_s": st.sampled_from([0.0, 0.25]),
        }
    ),
    max_size=5,
)


def _folded(name: str) -> dict[str, Any]:
    return layout.folded(document.parse(reports.raw(name)))


def _written(report: dict[str, Any]) -> dict[str, Any]:
    """The folded report as it is read from a file."""
    found: dict[str, Any] = json.loads("".join(layout.written(layout.folded(document.parse(report)))))
    return found


def _cases(report: Report) -> dict[str, str]:
    # 1, 1.0 and True are equal, and not the same.
    return {case.id: repr(case) for case in report.cases}


@pytest.mark.parametrize("name", reports.NAMES)
def test_samples_say_the_same_when_folded(name: str) -> None:
    folded = document.parse(_written(reports.raw(name)))

    assert _cases(folded) == _cases(reports.sample(name))
    assert folded.footer == reports.sample(name).footer


@settings(deadline=None)  # a busy machine is no failure
@given(cases=_CASES, shape=st.sampled_from(["{op}-{kind}", "device-{op}", "x", "", None]))
def test_every_case_says_the_same_when_folded(cases: list[dict[str, Any]], shape: str | None) -> None:
    whole = {**reports.raw("improved"), "footer": None}
    for number, case in enumerate(cases):
        parameters = {"op": "", "kind": "", **case["parameters"]}
        within = "" if shape is None else f":{number}-{shape.format(**parameters)}"
        case["id"] = f"{case['contract']}[check{number if shape is None else ''}{within}]"
    whole["cases"] = cases

    assert _cases(document.parse(_written(whole))) == _cases(document.parse(whole))


@pytest.mark.parametrize(
    ("measured", "bound"), [(1, True), (1, 1.0), (0.0, -0.0), ([1], [1.0]), ("1", 1), (None, "None")]
)
def test_values_that_python_takes_for_equal_stay_apart(measured: Any, bound: Any) -> None:
    whole = {**reports.raw("improved"), "footer": None}
    row = {"name": "x", "relation": "==", "holds": True}
    pairs = [(measured, bound), (bound, measured), (bound, bound), (measured, measured)]
    whole["cases"] = whole["cases"][:1]
    whole["cases"][0]["evidence"] = [
        {**row, "measured": one, "bound": other, "unit": unit} for one, other in pairs for unit in ("", "u")
    ]

    assert _cases(document.parse(_written(whole))) == _cases(document.parse(whole))


@pytest.mark.parametrize(
    ("id", "parameters", "name"),
    [
        ("[a]", {}, "x"),
        ("[a:]", {}, "x"),
        ("[a:-]", {"op": ""}, "x"),
        ("[a:-60]", {"exponent": "-60"}, "2^-60"),
        ("[a:op-kind]", {"kind": "op", "op": "kind"}, "op and kind of op_kind, $op and $$kind"),
        ("[a:mm-mm]", {"op": "mm", "kind": "mm"}, "mmmm mm.mm bmm mm_ $mm mm"),
        ("[a:a:b]", {"op": "a:b"}, "a:b"),
        ("[a:a$]", {"op": "a$"}, "a$ b"),
        ("[a[b]:c]]", {"op": "c]"}, "c]]"),
    ],
)
def test_ids_and_names_of_any_form_stay_as_they_are(id: str, parameters: dict[str, str], name: str) -> None:
    whole = {**reports.raw("improved"), "footer": None}
    case, *_ = whole["cases"]
    fact = {"name": name, "measured": 1, "relation": None, "bound": None, "unit": "", "holds": True}
    whole["cases"] = [{**case, "id": f"AMP-LOSS-001{id}", "parameters": parameters, "evidence": [fact]}]

    assert _cases(document.parse(_written(whole))) == _cases(document.parse(whole))


def test_what_cases_have_in_common_stands_once() -> None:
    whole = {**reports.raw("improved"), "footer": None}
    model, *_ = whole["cases"]
    ops = [f"op{number}" for number in range(100)]
    row = {"relation": "==", "unit": "", "holds": True}
    whole["cases"] = [
        {
            **model,
            "id": f"AMP-LOSS-001[types:device-fp16-{op}]",
            "parameters": {"amp_dtype": "fp16", "op": op},
            "evidence": [
                {"name": f"type of {op}", "measured": "torch.float16", "bound": "torch.float16", **row},
                {"name": f"type of {op}, in place", "measured": "torch.float16", "bound": "torch.float16", **row},
                {**row, "name": "error", "measured": 0.5, "relation": "<=", "bound": 1.0, "unit": "u"},
            ],
        }
        for op in ops
    ]

    (check,) = layout.folded(document.parse(whole))["checks"]

    assert check["contract"] == "AMP-LOSS-001"
    assert check["check"] == "types"
    assert check["parameters"] == ["amp_dtype", "op"]
    assert check["rows"] == [[["torch.float16"], "type of $op", "type of $op, in place"], [["<=", 1.0, "u"], "error"]]
    seconds = model["duration_s"]
    assert check["cases"] == [[f"device-fp16-{op}", "cpu", "PASS", seconds, [0, 1, [2, 0.5]]] for op in ops]


def test_advice_is_kept_for_contracts_that_failed() -> None:
    report = document.parse(_folded("failing"))

    advised = {contract.id for contract in report.header.contracts if contract.failure or contract.next_step}
    assert advised == {case.contract for case in report.cases if case.verdict.value != "PASS"}


def test_each_case_has_a_line_of_the_file() -> None:
    whole = reports.raw("failing")

    lines = "".join(layout.written(layout.folded(document.parse(whole)))).splitlines()

    assert sum(line.startswith(('["', "[null,")) for line in lines) == len(whole["cases"])


_CHECK = {
    "contract": "AMP-LOSS-001",
    "check": "a",
    "parameters": ["op"],
    "rows": [[["torch.float16"], "type of $op"], [["<=", 1.0], "error"]],
    "cases": [["device-mm", "cpu", "PASS", 0.1, [0, [1, 0.5]]]],
}
_NO_ROW = "rows[0]: must be a list of names that begins with a list of relation, bound, unit and measured value"
_NO_CASE = "cases[0]: must be a list of id, target, verdict, duration_s, evidence, and an object with the rest"
_NO_EVIDENCE = "must be the number of a row, or a list of it, what was measured, and whether that holds"
WRONG = [
    ("checks", {}, document.WrongTypes, "checks: must be a list"),
    ("checks/0", [], document.WrongTypes, "checks[0]: must be an object, not a list"),
    ("checks/0/note", "", document.UnknownKeys, "checks[0]: unknown key 'note'; allowed: contract, check, parameters"),
    ("checks/0/contract", 1, document.WrongTypes, "checks[0].contract: must be a text, not 1"),
    ("checks/0/contract", "AMP-LOSS-999", document.UnknownContract, "AMP-LOSS-999[a:device-mm] is of no contract"),
    ("checks/0/parameters/0", None, document.WrongTypes, "checks[0].parameters[0]: must be a text, not null"),
    ("checks/0/rows", None, document.WrongTypes, "checks[0].rows: must be a list, not null"),
    ("checks/0/rows/0", [], document.WrongTypes, _NO_ROW),
    ("checks/0/rows/0", [["x"]], document.WrongTypes, _NO_ROW),
    ("checks/0/rows/0", ["x", "name"], document.WrongTypes, _NO_ROW),
    ("checks/0/rows/0", [["==", 1, "", 1, 1], "name"], document.WrongTypes, _NO_ROW),
    ("checks/0/rows/0/1", 1, document.WrongTypes, "checks[0].rows[0].name: must be a text, not 1"),
    ("checks/0/rows/1", [["<=", 1.0], "error", 2], document.WrongTypes, "checks[0].rows[1]: must be a text, not 2"),
    ("checks/0/rows/1/0/0", "~", document.WrongTypes, "checks[0].rows[1].relation: must be one of ==, identical"),
    ("checks/0/rows/1/0/1", {}, document.WrongTypes, "checks[0].rows[1].bound: must be a text, a number"),
    ("checks/0/rows/0/1", "type of $kind", document.WrongTypes, "the name 'type of $kind' has the parameter 'kind'"),
    ("checks/0/cases/0", "PASS", document.WrongTypes, _NO_CASE),
    ("checks/0/cases/0", ["device-mm", "cpu", "PASS", 0.1], document.WrongTypes, _NO_CASE),
    ("checks/0/cases/0/0", 1, document.WrongTypes, "must have a text or null for its id"),
    ("checks/0/cases/0/0", None, document.WrongTypes, "checks[0].cases[0]: must have 1 parameters, and has 0"),
    ("checks/0/cases/0/1", 1, document.WrongTypes, "cases[0].target: must be a text, not 1"),
    ("checks/0/cases/0/2", "OK", document.WrongTypes, "cases[0].verdict: must be one of PASS"),
    ("checks/0/cases/0/3", -1, document.WrongTypes, "-1 is no count and no duration"),
    ("checks/0/cases/0/4", 0, document.WrongTypes, "its evidence in a list"),
    ("checks/0/cases/0/4/0", 2, document.WrongTypes, f"checks[0].cases[0].evidence[0]: {_NO_EVIDENCE}"),
    ("checks/0/cases/0/4/0", -1, document.WrongTypes, _NO_EVIDENCE),
    ("checks/0/cases/0/4/0", True, document.WrongTypes, _NO_EVIDENCE),
    ("checks/0/cases/0/4/0", [0], document.WrongTypes, _NO_EVIDENCE),
    ("checks/0/cases/0/4/1", 1, document.WrongTypes, "evidence[1]: must say what was measured, as row 1 does not"),
    ("checks/0/cases/0/4/1", [1, {}], document.WrongTypes, "evidence[1]: must be a text, a number"),
    ("checks/0/cases/0/4/1", [1, 0.5, "no"], document.WrongTypes, "evidence[1]: must be true or false, not 'no'"),
    ("cases", [], document.UnknownKeys, "unknown key 'checks'"),
]
REST = [
    ([], document.WrongTypes, "and the rest in an object"),
    ({"verdict": "FAIL"}, document.UnknownKeys, "unknown key 'verdict'; allowed: node, reason"),
    ({"reason": 1}, document.WrongTypes, "cases[0].reason: must be a text, not 1"),
    ({"parameters": "mm"}, document.WrongTypes, "checks[0].cases[0]: must be a list, not 'mm'"),
    ({"parameters": []}, document.WrongTypes, "checks[0].cases[0]: must have 1 parameters, and has 0"),
]


def _small() -> dict[str, Any]:
    return {**_folded("improved"), "footer": None, "checks": [copy.deepcopy(_CHECK)]}


def test_folded_check_is_read() -> None:
    (case,) = document.parse(_small()).cases

    assert (case.id, case.parameters) == ("AMP-LOSS-001[a:device-mm]", {"op": "mm"})
    assert [(found.name, found.measured, found.bound) for found in case.evidence] == [
        ("type of mm", "torch.float16", "torch.float16"),
        ("error", 0.5, 1.0),
    ]


@pytest.mark.parametrize(("where", "value", "error", "said"), WRONG)
def test_wrong_folded_form_is_refused(where: str, value: Any, error: type[document.ReportError], said: str) -> None:
    whole = _small()
    reports.put(whole, where, value)

    with pytest.raises(error) as caught:
        document.parse(whole)

    assert said in str(caught.value)


@pytest.mark.parametrize(("rest", "error", "said"), REST)
def test_wrong_rest_of_a_case_is_refused(rest: Any, error: type[document.ReportError], said: str) -> None:
    whole = _small()
    whole["checks"][0]["cases"][0].append(rest)

    with pytest.raises(error) as caught:
        document.parse(whole)

    assert said in str(caught.value)


def test_names_that_grow_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MOST_CHARACTERS", 10_000)
    whole = _small()
    whole["checks"][0]["rows"][0][1] = "$op" * 100
    whole["checks"][0]["cases"][0].append({"parameters": ["m" * 100]})

    with pytest.raises(document.WrongTypes, match=r"evidence\[0\]: names .* have more than 10000 characters"):
        document.parse(whole)


def test_cases_are_told_by_name(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "@pytest.mark.parametrize('op', ['mm', 'exp'])\n@contract('AMP-API-001')\n"
        "def test_a(case: Case, op: str) -> None:\n    case.equal(f'type of {op}', op, 'mm')\n"
    )
    outcome = toy.run()
    capsys.readouterr()

    assert main(["cases", str(toy.path / "report")]) == 0

    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told == outcome.report["cases"]
    assert [(case["id"], case["parameters"], case["verdict"]) for case in told] == [
        ("AMP-API-001[a:exp]", {"op": "exp"}, "FAIL"),
        ("AMP-API-001[a:mm]", {"op": "mm"}, "PASS"),
    ]
    assert [case["evidence"][0]["name"] for case in told] == ["type of exp", "type of mm"]


def test_parameters_are_told_by_their_names(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "class Op:\n    name = 'mm'\n    table = list(range(99))\n"
        "class Kind(Op):\n    id = 'mm-fused'\n"
        "VALUES = [Op(), Kind(), Op, len, 0.5, None, torch.bfloat16]\n"
        "@pytest.mark.parametrize('value', VALUES, ids=range(7))\n@contract('AMP-API-001')\n"
        "def test_a(case: Case, value: object) -> None:\n    case.true('it', True)\n"
    )

    told = [case["parameters"]["value"] for case in toy.run().report["cases"]]

    assert told == ["mm", "mm-fused", "Op", "len", "0.5", "None", "bf16"]


def test_folded_report_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text("".join(layout.written(_folded("conformant"))), encoding="ascii")

    assert _cases(document.read(file)) == _cases(reports.sample("conformant"))
