"""The HTML view says what the terminal says, loads and runs nothing of others, and shows every text as a text."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from conformance import __main__ as command_line
from conformance.report import document, markup, outline, page, pictures, rollup
from conformance.report.markup import Markup, tag
from tests import reports


class _Elements(HTMLParser):
    """The elements of a page, its texts, and whether each that opens is closed in order."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(content)
        self.close()
        assert self._open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((name, dict(attributes)))
        self._open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((name, dict(attributes)))

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name

    def handle_data(self, words: str) -> None:
        self.texts.append(words)

    def named(self, name: str) -> list[dict[str, str | None]]:
        """The attributes of each element of that name."""
        return [attributes for found, attributes in self.found if found == name]


@pytest.mark.parametrize("name", reports.NAMES)
def test_verdict_comes_first_and_every_contract_is_there(name: str) -> None:
    report = reports.sample(name)

    content = page.render(report)

    overall = rollup.overall(report).value
    assert f"<title>{overall}: " in content
    assert content.index(f"<strong>{overall}</strong>") < content.index("<nav")
    elements = _Elements(content)
    for ground in outline.because(report):
        assert ground in elements.texts
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(report.contracts) <= set(ids)
    links = {attributes["href"] for attributes in elements.named("a")}
    assert {link[1:] for link in links if link and link.startswith("#")} <= set(ids)


def test_failures_can_be_read_without_javascript() -> None:
    report = reports.sample("failing")

    static = page.render(report).split('<script type="application/gzip"')[0]

    for failure in outline.failures(report):
        assert markup.escape(failure.contract.next_step) in static
        assert markup.escape(failure.sightings[0].what) in static
        assert markup.escape(failure.command) in static
        assert failure.snippet is None or markup.escape(failure.snippet) in static


def test_every_case_and_its_evidence_are_in_the_data() -> None:
    report = reports.sample("failing")

    data = _data(page.render(report))

    cases = {f"{id}[{one[0]}]": (id, one) for id, found in data["cases"].items() for one in found}
    assert set(cases) == {case.id for case in report.cases}
    for case in report.cases:
        _, (_, target, verdict, _, rows, *remarks) = cases[case.id]
        assert data["targets"][target] == case.target
        assert data["verdicts"][verdict][0] == case.verdict.value
        named = [data["texts"][data["rows"][row][0]] for row in rows]
        assert named == [evidence.name for evidence in case.evidence]
        assert [data["rows"][row][3] for row in rows] == [int(evidence.holds) for evidence in case.evidence]
        assert not case.reason or data["texts"][remarks[0]["reason"]] == case.reason


def _data(content: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/gzip" id="data">(.*?)</script>', content, re.DOTALL)
    assert found
    loaded: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return loaded


_HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \" ' & \u202egnp.exe <!--"


@pytest.mark.parametrize(
    "where",
    [
        "header/contracts/0/title",
        "header/contracts/0/statement",
        "header/contracts/2/next_step",
        "header/chapters/0/title",
        "header/environment/cpu",
        "header/variables/OMP_NUM_THREADS",
        "header/targets/0/name",
        "header/targets/0/probe/name",
        "header/options/selection",
        "cases/4/target",
        "cases/5/id",
        "cases/5/snippet",
        "cases/5/parameters/op",
        "cases/5/evidence/1/name",
        "cases/5/evidence/1/measured",
        "cases/8/reason",
        "cases/8/detail",
        "footer/problems/0",
        "footer/baseline/path",
    ],
)
def test_texts_of_a_report_are_no_markup(where: str) -> None:
    content = page.render(document.parse(reports.changed("failing", where, _HOSTILE)))

    elements = _Elements(content)
    assert len(elements.named("script")) == 2
    assert not elements.named("img")
    assert not [key for _, attributes in elements.found for key in attributes if key.startswith("on")]
    assert "\u202e" not in content
    assert "alert(1)" in content or "alert(1)" in json.dumps(_data(content))


@pytest.mark.parametrize("name", ["conformant", "failing"])
def test_nothing_is_loaded_and_only_the_own_script_may_run(name: str) -> None:
    content = page.render(reports.sample(name))

    elements = _Elements(content)
    policy = next(one["content"] for one in elements.named("meta") if one.get("http-equiv"))
    assert policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for kind in ("style", "script"):
        inside = re.search(rf"<{kind}>(.*?)</{kind}>", content, re.DOTALL)
        assert inside
        digest = base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not [attributes for _, attributes in elements.found if {"src", "style", "srcset"} & set(attributes)]
    assert not elements.named("link")


def test_link_of_a_waiver_is_one_only_if_it_is_of_the_web() -> None:
    whole = reports.raw("conformant")
    whole["footer"]["waivers"][0]["link"] = "javascript:alert(1)"

    assert "javascript:" not in page.render(document.parse(whole))
    assert 'href="https://' in page.render(reports.sample("conformant"))


def test_every_picture_is_there_for_who_cannot_see_it() -> None:
    report = _drawn()

    elements = _Elements(page.render(report))

    images = elements.named("svg")
    assert len(images) >= 5
    assert all(image["role"] == "img" and image["aria-label"] for image in images)
    assert all(control.get("aria-label") or control.get("id") for control in elements.named("input"))
    assert "html" in [name for name, attributes in elements.found if attributes.get("lang") == "en"]


def _drawn() -> document.Report:
    """A report with evidence of every picture."""
    whole = reports.raw("improved")
    whole["footer"] = None
    case = whole["cases"][0]
    curve = [2.0, 1.0, 0.5, 0.25]
    case["evidence"] = [
        *(_fact(f"losses, fp32, seed {seed}", [value + seed / 100 for value in curve]) for seed in range(3)),
        _fact("losses, AMP, seed 0", curve),
        _fact("scale", [65536.0, 32768.0, 32768.0, 65536.0], "loss scale by iteration"),
        _fact("matmul/large/fp16/fp32", [["ratio", 2.0], ["low", 1.8], ["high", 2.2]], "speed-up"),
        {**_fact("matmul/large/fp16/fp32: low end of the ratio", 1.8), "relation": ">=", "bound": 1.5},
        {**_fact("error", 0.5), "relation": "<=", "bound": 1.0},
    ]
    for contract in whole["header"]["contracts"]:
        if contract["id"] == "AMP-MEMORY-001":
            model = {**case, "contract": contract["id"], "id": "AMP-MEMORY-001[x]", "parameters": {}}
            model["evidence"] = [{**_fact("bytes alive", 4096), "relation": "==", "bound": 4096}]
            whole["cases"] = [one for one in whole["cases"] if one["contract"] != contract["id"]]
            whole["cases"].append(model)
    return document.parse(whole)


def _fact(name: str, measured: Any, unit: str = "") -> dict[str, Any]:
    return {"name": name, "measured": measured, "relation": None, "bound": None, "unit": unit, "holds": True}


def test_pictures_say_in_words_what_they_show() -> None:
    report = _drawn()

    (curves,) = pictures.loss_curves(report)
    (scales,) = pictures.loss_scales(report)
    (speeds,) = pictures.speedups(report)
    (memory,) = pictures.memory(report)
    (errors,) = pictures.errors(report)

    assert curves.words.startswith("shaded: the range of 3 fp32 curves; dashed: fp32, their mean; solid: 1 AMP curve")
    assert scales.words == "3 iterations, 1 skipped, from 65536 to 32768" or scales.words.endswith("to 65536")
    assert "bars: expected of 1" in speeds.words
    assert memory.words.startswith("1 pair, of which 0 outside")
    assert errors.words.startswith("the largest measured value of each of ")


@pytest.mark.parametrize("number", [1e308, -1e308, 5e-324, 0, "inf", "nan", True, [1e308, -1e308, 0.0, 1.0], [], "x"])
def test_numbers_that_cannot_be_drawn_are_left_out(number: Any) -> None:
    whole = reports.raw("improved")
    whole["footer"] = None
    for case in whole["cases"]:
        case["evidence"] = [
            _fact("losses, fp32", number),
            _fact("losses, AMP", number),
            {**_fact("bytes", number), "relation": "==", "bound": number},
            {**_fact("error", number), "relation": "<=", "bound": number},
        ]

    content = page.render(document.parse(whole))

    assert not re.search(r'"[^"]*\b(?:nan|inf)\b[^"]*"/>', content)


def test_rules_of_the_header_are_a_table_and_what_moved_is_said() -> None:
    old, new = (reports.raw("conformant") for _ in range(2))
    for whole, softmax in ((old, "lower_precision"), (new, "fp32")):
        whole["footer"] = None
        whole["header"]["op_policy"] = {
            "cpu": {"key": "AutocastCPU", "amp_dtype": "bfloat16", "overloads": {"lower_precision": ["aten::mm"]}},
            "cuda": {
                "key": "AutocastCUDA",
                "amp_dtype": "float16",
                "overloads": {softmax: ["aten::softmax.int"], "widest": ["aten::cat", "aten::stack"]},
            },
        }
    new["header"]["op_policy"]["cuda"]["overloads"]["fp32"].append("aten::rms_norm")
    report, before = document.parse(new), document.parse(old)

    content = page.render(report, against=before)

    assert pictures.backends(pictures.op_policy(report)) == ["cpu", "cuda"]
    assert "<li>softmax: 16 bit → fp32 on cuda</li>" in content
    assert "<li>rms_norm: on no list → fp32 on cuda</li>" in content
    assert "2 rules moved" in content
    assert "fp32<b> was 16 bit</b>" in content
    assert "moved" not in page.render(report)


def test_elements_escape_what_is_not_markup() -> None:
    made = tag("p", "<b>", Markup("<i>x</i>"), None, 3, ["&", tag("br")], class_='a"b', data_x=True, hidden=None)

    assert made == '<p class="a&quot;b" data-x>&lt;b&gt;<i>x</i>3&amp;<br/></p>'


def test_the_command_writes_a_file_and_never_over_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(reports.path("failing").read_bytes())

    assert command_line.main(["html", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0
    assert hashlib.sha256(file.read_bytes()).hexdigest() in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert command_line.main(["html", str(tmp_path), "-o", str(file)]) == 4
    assert "is the report itself" in capsys.readouterr().err
    assert document.read(file) == reports.sample("failing")
