"""Reading a report: what is refused and how, and that nothing the footer says is believed."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from conformance.report import document, rollup, schema
from conformance.report.verdicts import Overall, Verdict
from tests import reports
from tests.conftest import Toy
from tests.paths import ROOT

SCHEMA = json.loads((Path(document.__file__).parent / "schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

OVERALL = {
    "conformant": Overall.CONFORMANT,
    "failing": Overall.NOT_CONFORMANT,
    "improved": Overall.CONFORMANT,
    "incomplete": Overall.INCOMPLETE,
    "inconclusive": Overall.INCONCLUSIVE,
    "interrupted": Overall.INCOMPLETE,
    "narrowed": Overall.CONFORMANT,
    "nothing": Overall.NOTHING_RAN,
    "untestable": Overall.NOT_CONFORMANT,
}

# A change of conformant.json, and what is said of it. All but the last group also break the schema.
WRONG_FORM = [
    ("header/started", 5, document.WrongTypes, "header.started: must be a text, not 5"),
    ("header/started", "yesterday", document.WrongTypes, "'yesterday' is no ISO 8601 date"),
    ("header/suite/clean", "yes", document.WrongTypes, "header.suite.clean: must be true or false, not 'yes'"),
    ("header/options/seed", True, document.WrongTypes, "header.options.seed: must be a whole number, not true"),
    ("header/options/seed", 1.5, document.WrongTypes, "header.options.seed: must be a whole number, not 1.5"),
    ("header/options/chapters", "scale", document.WrongTypes, "header.options.chapters: must be a list"),
    ("header/targets/0/probe/name", {}, document.WrongTypes, "header.targets[0].probe.name: must be a text"),
    ("header/flags/x", [], document.WrongTypes, "header.flags.x: must be a text, a number, true or false"),
    ("header/contracts/0/level", "may", document.WrongTypes, "must be one of must, should, info, not 'may'"),
    ("header", [], document.WrongTypes, "header: must be an object, not a list"),
    ("header", None, document.WrongTypes, "header: must be an object, not null"),
    ("cases", None, document.WrongTypes, "cases: must be a list, not null"),
    ("cases/0/verdict", "OK", document.WrongTypes, "cases[0].verdict: must be one of PASS, "),
    ("cases/0/verdict", ["PASS"], document.WrongTypes, "cases[0].verdict: must be one of PASS, "),
    ("cases/0/duration_s", "1", document.WrongTypes, "cases[0].duration_s: must be a number, not '1'"),
    ("cases/0/duration_s", -1, document.WrongTypes, "-1 is no count and no duration"),
    ("cases/0/evidence/0/relation", "~", document.WrongTypes, "cases[0].evidence[0].relation: must be one of =="),
    ("cases/0/evidence/0/measured", {"a": 1}, document.WrongTypes, "cases[0].evidence[0].measured: must be a text"),
    ("cases/0/evidence/1/unit", 1, document.WrongTypes, "cases[0].evidence[1].unit: must be a text, not 1"),
    ("cases/0/node", "x" * 100 + "\x1b", None, ""),
    ("footer", {}, document.WrongTypes, "footer: the key 'finished' is missing"),
    ("footer/waivers/0/state", "fine", document.WrongTypes, "must be one of used, expired"),
    ("footer/waivers/0/expires", "2027-12-31 or so", document.WrongTypes, "'2027-12-31 or so' is no ISO 8601 date"),
    ("footer/totals/GOOD", 1, document.WrongTypes, "footer.totals: must be one of PASS"),
    ("verified", True, document.UnknownKeys, "unknown key 'verified'; allowed: schema, header"),
    ("header/host", "a", document.UnknownKeys, "header: unknown key 'host'"),
    ("cases/0/note", "", document.UnknownKeys, "cases[0]: unknown key 'note'"),
    ("cases/0/evidence/0/note", "", document.UnknownKeys, "cases[0].evidence[0]: unknown key 'note'"),
    ("footer/signed", "me", document.UnknownKeys, "footer: unknown key 'signed'"),
    ("schema", "amp-conformance-report/5", document.NewerSchema, "written by a newer suite"),
    ("schema", "amp-conformance-report/1", document.OlderSchema, "written by an older suite"),
    ("schema", "amp-conformance-report/3", document.OlderSchema, "(amp-conformance-report/3); this one reads"),
    ("schema", "junit/1", document.WrongKind, "not a report of this suite"),
    ("schema", 1, document.WrongKind, "not a report of this suite"),
    ("schema", None, document.WrongKind, "not a report of this suite"),
]
FALSE_CLAIMS = [
    ("footer/totals/PASS", 12, "the footer counts 12 PASS, 1 WAIVED, the records come to 11 PASS, 1 WAIVED"),
    ("footer/totals/FAIL", 1, "the records come to 11 PASS"),
    ("footer/contracts/AMP-SCALE-001/verdict", "FAIL", "the footer says FAIL of AMP-SCALE-001, its cases come to PASS"),
    ("footer/contracts/AMP-SCALE-001/verdict", None, "the footer says not reached of AMP-SCALE-001"),
    ("footer/contracts/AMP-SCALE-001/cases", 2, "the footer counts 2 cases of AMP-SCALE-001, there are 1"),
    ("footer/contracts/AMP-X-001", {"verdict": None, "cases": 0, "reason": ""}, "AMP-X-001 is in only one of"),
    ("footer/overall", "NOT CONFORMANT", "the footer says NOT CONFORMANT, the records come to CONFORMANT"),
    ("footer/interrupted", True, "the footer says CONFORMANT, the records come to INCOMPLETE"),
    ("footer/problems", ["one"], "the records come to NOT CONFORMANT"),
    ("footer/waivers/0/state", "expired", "is said to be expired, and ends on 2027-12-31; the run was on"),
    ("cases/0/evidence/0/holds", False, "passes although its 'dtype of the loss' does not hold"),
]


def _write(folder: Path, text: str | bytes | dict[str, Any]) -> Path:
    file = folder / "report.json"
    if isinstance(text, dict):
        text = json.dumps(text)
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


@pytest.mark.parametrize("name", reports.NAMES)
def test_samples_are_read_and_fit_the_schema(name: str) -> None:
    VALIDATOR.validate(reports.raw(name))

    assert rollup.overall(reports.sample(name)) is OVERALL[name]


def test_report_of_a_run_is_read_and_fits_the_schema(toy: Toy) -> None:
    endings = {
        "PASS": "case.note('pair', [float('nan'), (1, torch.float16)]); case.true('ran', True)",
        "FAIL": "case.at_most('most', float('nan'), float('inf'), 'ms')",
        "UNSUPPORTED": "case.unsupported('no such unit')",
        "UNTESTABLE": "case.untestable('a second device is missing')",
        "INCONCLUSIVE": "case.inconclusive('too noisy')",
        "ERROR": "undefined_name",
    }
    for number, (verdict, body) in enumerate(endings.items(), start=1):
        toy.contract(f"AMP-API-{number:03}")
        check = f"@contract('AMP-API-{number:03}')\ndef test_{verdict.lower()}(case: Case) -> None:\n    {body}\n"
        toy.checks(check, name=f"test_{number}")

    toy.run()

    VALIDATOR.validate(json.loads((toy.path / "report" / "report.json").read_text()))
    report = document.read(toy.path / "report")
    assert [case.verdict.value for case in report.cases] == list(endings)
    assert report.cases[0].evidence[0].measured == ("nan", (1, "torch.float16"))


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_what_is_read_is_what_was_written() -> None:
    report = reports.sample("failing")

    case = report.cases_of["AMP-SCALE-002"][0]
    assert case.id == "AMP-SCALE-002[halving:device-inf]"
    assert case.verdict is Verdict.FAIL
    assert [(found.name, found.measured, found.bound) for found in case.evidence] == [
        ("found_inf", 1.0, 1.0),
        ("new scale", 65536.0, 32768.0),
    ]
    assert report.contracts["AMP-SPEED-001"].level == "info"
    assert report.header.targets[0].probe["amp_dtypes"] == ("fp16", "bf16")
    assert report.footer is not None
    assert report.footer.totals[Verdict.FAIL] == 3
    with pytest.raises(AttributeError):
        report.cases = ()  # type: ignore[misc]


@pytest.mark.parametrize(("where", "value", "error", "said"), WRONG_FORM)
def test_wrong_form_is_refused(
    where: str, value: Any, error: type[document.ReportError] | None, said: str, tmp_path: Path
) -> None:
    changed = reports.changed("conformant", where, value)
    file = _write(tmp_path, changed)
    if error is None:
        document.read(file)
        return

    with pytest.raises(error) as caught:
        document.read(file)

    message = str(caught.value)
    assert said in message
    assert message.startswith(f"{file}: ")
    assert "\n" not in message
    assert not VALIDATOR.is_valid(changed)


@pytest.mark.parametrize("where", ["header", "header/options/gpu", "cases/0/id", "cases/0/evidence/0/unit", "footer"])
def test_missing_key_is_refused(where: str, tmp_path: Path) -> None:
    changed = reports.changed("conformant", where, None)
    holder: Any = changed
    *parents, last = where.split("/")
    for part in parents:
        holder = holder[int(part) if part.isdigit() else part]
    del holder[last]

    with pytest.raises(document.WrongTypes, match=f"the key '{last}' is missing"):
        document.read(_write(tmp_path, changed))

    assert not VALIDATOR.is_valid(changed)


@pytest.mark.parametrize(("where", "value", "said"), FALSE_CLAIMS)
def test_false_claim_is_refused(where: str, value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(document.Disagreement) as caught:
        document.read(_write(tmp_path, reports.changed("conformant", where, value)))

    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("", document.NotJSON, "not a JSON document"),
        ('{"schema": "amp-conf', document.NotJSON, "not a JSON document"),
        (b"\xff\xfe{}", document.NotJSON, "not UTF-8"),
        ("[" * 100_000, document.NotJSON, "not a JSON document"),
        ('{"schema": NaN}', document.NotJSON, "the number NaN is not finite"),
        ('{"schema": 1e999}', document.NotJSON, "the number 1e999 is not finite"),
        ('{"schema": 1, "schema": 2}', document.NotJSON, "the key 'schema' stands twice"),
        ("[]", document.WrongKind, "not a report of this suite"),
        ("null", document.WrongKind, "not a report of this suite"),
        ("<html></html>", document.NotJSON, "not a JSON document"),
    ],
    ids=lambda value: str(value)[:12] if isinstance(value, str) else None,
)
def test_what_is_no_report_is_refused(
    text: str | bytes, error: type[document.ReportError], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        document.read(_write(tmp_path, text))

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_deep_lists_in_a_report_are_refused() -> None:
    nested: Any = 1
    for _ in range(100_000):
        nested = [nested]

    with pytest.raises(document.WrongTypes, match="nested too deeply"):
        document.parse(reports.changed("conformant", "cases/0/evidence/0/measured", nested))


def test_missing_file_and_folder_without_report(tmp_path: Path) -> None:
    with pytest.raises(document.MissingReport, match=r"absent\.json: there is no such file"):
        document.read(tmp_path / "absent.json")
    with pytest.raises(document.MissingReport, match=r"report\.json: there is no such file"):
        document.read(tmp_path)


def test_folder_stands_for_its_report(tmp_path: Path) -> None:
    _write(tmp_path, reports.raw("conformant"))

    assert document.read(tmp_path) == reports.sample("conformant")


def test_large_file_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with file.open("wb") as stream:
        stream.truncate(document.MAX_BYTES + 1)

    with pytest.raises(document.TooLarge, match="67108865 bytes, and a report has at most 67108864"):
        document.read(file)


def test_id_used_twice_is_refused(tmp_path: Path) -> None:
    for where, what in (("cases", "case"), ("header/contracts", "contract"), ("header/chapters", "chapter")):
        whole = reports.raw("conformant")
        rows = whole["cases"] if where == "cases" else whole["header"][where.split("/")[1]]
        rows.append(rows[0])

        with pytest.raises(document.Duplicate, match=f"the {what} '.*' is there twice"):
            document.read(_write(tmp_path, whole))


def test_case_of_an_unknown_contract_is_refused(tmp_path: Path) -> None:
    changed = reports.changed("conformant", "cases/0/contract", "AMP-LOSS-999")

    with pytest.raises(document.UnknownContract, match=r"the case .* is of no contract"):
        document.read(_write(tmp_path, changed))


def test_every_error_says_why_it_exists() -> None:
    errors = [one for one in document.ReportError.__subclasses__() if one.__module__ == document.__name__]

    assert len(errors) == 11
    assert all(error.__doc__ for error in errors)


@pytest.mark.parametrize(
    ("level", "gpu", "verdict", "expected"),
    [
        ("must", False, "PASS", Overall.CONFORMANT),
        ("must", False, "FAIL", Overall.NOT_CONFORMANT),
        ("should", False, "FAIL", Overall.NOT_CONFORMANT),
        ("info", False, "FAIL", Overall.CONFORMANT),
        ("must", False, "ERROR", Overall.NOT_CONFORMANT),
        ("must", False, "WAIVED", Overall.CONFORMANT),
        ("must", False, "UNSUPPORTED", Overall.CONFORMANT),
        ("must", True, "UNSUPPORTED", Overall.CONFORMANT),
        ("must", False, "UNTESTABLE", Overall.CONFORMANT),
        ("must", True, "UNTESTABLE", Overall.NOT_CONFORMANT),
        ("should", True, "UNTESTABLE", Overall.CONFORMANT),
        ("must", False, "INCONCLUSIVE", Overall.INCONCLUSIVE),
        ("info", False, "INCONCLUSIVE", Overall.CONFORMANT),
    ],
)
def test_overall_verdict(level: str, gpu: bool, verdict: str, expected: Overall) -> None:
    whole = reports.changed("improved", "header/options/gpu", gpu)
    case = whole["cases"][0]
    case["verdict"] = verdict
    next(row for row in whole["header"]["contracts"] if row["id"] == case["contract"])["level"] = level

    assert rollup.overall(document.parse(whole)) is expected


def test_untestable_must_fails_under_gpu_also_beside_something_worse() -> None:
    whole = reports.changed("improved", "header/options/gpu", True)
    whole["cases"][0]["verdict"], whole["cases"][1]["verdict"] = "UNTESTABLE", "INCONCLUSIVE"

    report = document.parse(whole)

    assert rollup.verdicts(report)["AMP-LOSS-001"] is Verdict.INCONCLUSIVE
    assert rollup.overall(report) is Overall.NOT_CONFORMANT


@pytest.mark.parametrize("key", ["regressed", "gone"])
def test_baseline_regression_is_not_conformant(key: str) -> None:
    baseline = {"path": "old.json", "regressed": [], "gone": []} | {key: ["AMP-SCALE-001"]}

    report = document.parse(reports.changed("conformant", "footer/baseline", baseline))

    assert rollup.overall(report) is Overall.NOT_CONFORMANT


def test_run_that_executed_nothing_has_a_verdict_of_its_own() -> None:
    whole = reports.raw("improved")
    for case in whole["cases"]:
        case["verdict"] = "UNSUPPORTED"

    assert rollup.overall(document.parse(whole)) is Overall.NOTHING_RAN


def test_run_that_executed_nothing_and_has_a_problem_is_not_conformant() -> None:
    whole = reports.raw("nothing")
    whole["footer"]["problems"] = ["smoke stage: cpu: add failed; nothing else was run"]

    assert rollup.overall(document.parse(whole)) is Overall.NOT_CONFORMANT


def test_schema_is_written_from_the_values() -> None:
    assert (ROOT / "conformance" / "report" / "schema.json").read_text(encoding="utf-8") == schema.text(), (
        "run: python -m conformance.report.schema"
    )


def test_gzipped_report_is_read_and_keeps_its_sum(tmp_path: Path) -> None:
    plain = reports.path("failing").read_bytes()
    (tmp_path / "report.json.gz").write_bytes(gzip.compress(plain))

    file = document.locate(tmp_path)

    assert file.name == "report.json.gz"
    assert document.read(tmp_path) == reports.sample("failing")
    assert document.sha256(file) == document.sha256(reports.path("failing")) == hashlib.sha256(plain).hexdigest()


def test_report_that_is_not_compressed_comes_first(tmp_path: Path) -> None:
    for name in ("report.json", "report.json.gz"):
        (tmp_path / name).touch()

    assert document.locate(tmp_path).name == "report.json"


_PACKED = gzip.compress(reports.path("failing").read_bytes())


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (_PACKED[:-100], document.NotJSON, "its gzip data end early"),
        (_PACKED[:10], document.NotJSON, "its gzip data end early"),
        (_PACKED[:50] + bytes(50) + _PACKED[100:], document.NotJSON, "its gzip data are damaged"),
        (_PACKED[:-8] + bytes(8), document.NotJSON, "its gzip data are damaged"),
        (_PACKED + _PACKED, document.NotJSON, "something follows its gzip data"),
        (gzip.compress(b"\xff"), document.NotJSON, "not UTF-8"),
        (gzip.compress(_PACKED), document.NotJSON, "not UTF-8"),
        (b"\x1f\x8b", document.NotJSON, "its gzip data end early"),
    ],
    ids=("cut off", "header alone", "changed", "other sums", "two members", "no text", "gzipped twice", "magic alone"),
)
def test_gzip_data_that_hold_no_report_are_refused(
    content: bytes, error: type[document.ReportError], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "report.json.gz"
    file.write_bytes(content)

    for reading in (document.read, document.sha256):
        if reading is document.sha256 and said == "not UTF-8":
            continue  # a sum needs no text
        with pytest.raises(error) as refused:
            reading(file)
        assert str(refused.value).startswith(f"{file}: ")
        assert said in str(refused.value)


def test_gzip_bomb_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    packer = zlib.compressobj(wbits=31)
    megabyte = bytes(2**20)
    file.write_bytes(b"".join([*(packer.compress(megabyte) for _ in range(2**7)), packer.flush()]))

    with pytest.raises(document.TooLarge, match="more than 67108864 bytes when decompressed"):
        document.read(file)
