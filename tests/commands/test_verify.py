"""The commands `package` and `verify`: what verifies, what does not, and what is said of a run."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.__main__ import main
from conformance.commands import package as package_command
from conformance.commands import verify
from conformance.report import package
from tests import reports
from tests.report.packages import SUITE, catalogue, members, sealed, summed

_ACCEPT = ("--complete", "--without-accelerator", "--level", "quick")


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """This suite is the one that judged the samples."""
    listed = catalogue(sealed())
    monkeypatch.setattr(verify, "own_suite", lambda: SUITE)
    monkeypatch.setattr(verify, "own_catalogue", lambda: listed)
    monkeypatch.setattr(package_command, "own_suite", lambda: SUITE)


def _file(tmp_path: Path, data: bytes, name: str = "report.json") -> str:
    path = tmp_path / name
    path.write_bytes(data)
    return str(path)


def _packed(tmp_path: Path, found: dict[str, bytes]) -> str:
    return _file(tmp_path, package.pack(found), "package.zip")


def _acceptable(raw: dict[str, Any]) -> None:
    """Leave nothing in the sample that a buyer would not accept."""
    for case in list(raw["cases"]):
        if case["verdict"] in ("WAIVED", "UNTESTABLE", "INCONCLUSIVE"):
            raw["cases"].remove(case)
    kept = {case["contract"] for case in raw["cases"]}
    raw["header"]["contracts"] = [row for row in raw["header"]["contracts"] if row["id"] in kept]
    raw["header"]["options"].update(chapters=[], contracts=[], selection=None, amp_dtype="both")
    footer = raw["footer"]
    footer["waivers"], footer["not_applicable"] = [], {}
    footer["contracts"] = {id: row for id, row in footer["contracts"].items() if id in kept}
    for id, row in footer["contracts"].items():
        row["cases"] = sum(case["contract"] == id for case in raw["cases"])
    verdicts = [case["verdict"] for case in raw["cases"]]
    footer["totals"] = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}


def _complete(change: Callable[[dict[str, Any]], None] = lambda raw: None) -> bytes:
    def both(raw: dict[str, Any]) -> None:
        _acceptable(raw)
        change(raw)

    return sealed("conformant", both)


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue is that of the report with nothing but what is acceptable."""
    listed = catalogue(_complete())
    monkeypatch.setattr(verify, "own_catalogue", lambda: listed)


def test_package_is_reproducible_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = _file(tmp_path, sealed())
    gzipped = _file(tmp_path, gzip.compress(sealed()), "report.json.gz")

    for number, path in enumerate((report, report, gzipped)):
        assert main(["package", path, "-o", str(tmp_path / f"{number}.zip")]) == 0

    first, *others = (tmp_path / f"{number}.zip" for number in range(3))
    assert [other.read_bytes() == first.read_bytes() for other in others] == [True, True]
    assert main(["verify", str(first)]) == 0
    assert capsys.readouterr().out.endswith("SOUND: a package of a run that is CONFORMANT\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("incomplete", "the run is INCOMPLETE"),
        ("interrupted", "the run is INCOMPLETE"),
        ("failing", "changes that are not committed"),
    ],
)
def test_package_of_such_a_run_is_refused(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["package", _file(tmp_path, sealed(name)), "-o", str(tmp_path / "package.zip")]) == 4

    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "package.zip").exists()


def test_package_of_a_report_that_was_edited_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited = sealed().replace(b'"seed": 0', b'"seed": 1')
    assert edited != sealed()
    assert main(["package", _file(tmp_path, edited), "-o", str(tmp_path / "package.zip")]) == 4

    assert capsys.readouterr().err.count("\n") == 1


def test_package_over_its_report_is_refused(tmp_path: Path) -> None:
    report = _file(tmp_path, sealed())

    assert main(["package", report, "-o", report]) == 4
    assert Path(report).read_bytes() == sealed()


@pytest.mark.parametrize("name", [name for name in package.NAMES if name != package.SUMS])
def test_member_of_another_run_does_not_verify_even_with_right_sums(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = members(sealed("narrowed"))
    mine = members(sealed())
    # The two runs may have the same waivers.
    other[package.WAIVERS] = other[package.WAIVERS].replace(b"]", b' {"contract": "other"}]')

    assert main(["verify", _packed(tmp_path, summed({**mine, name: other[name]}))]) == 1

    out = capsys.readouterr().out
    assert "of the report in the package" in out
    assert out.splitlines()[-1].startswith("NOT SOUND: ")


@pytest.mark.usefixtures("lists")
def test_view_of_another_suite_is_said_and_not_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = members(_complete())
    about = json.loads(found[package.ABOUT])
    about["made_by"]["digest"] = "e" * 64
    found[package.ABOUT] = (json.dumps(about, indent=1) + "\n").encode()
    found["checklist.md"] += b"more\n"
    path = _packed(tmp_path, summed(found))

    assert main(["verify", path]) == 0
    assert "packed by another suite" in " ".join(capsys.readouterr().out.split())
    assert main(["verify", path, *_ACCEPT]) == 1


def test_package_of_an_unclean_suite_does_not_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", _packed(tmp_path, members(sealed("failing")))]) == 1

    assert "changes that are not committed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [b"PK", b"PK\3\4" + bytes(100), b"PK\5\6" + bytes(18)],
    ids=["two bytes", "one header", "an empty archive"],
)
def test_no_package_gets_one_line(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", _file(tmp_path, content, "package.zip")]) == 1

    out, err = capsys.readouterr()
    assert out.startswith("NOT SOUND: ")
    assert (out.count("\n"), err) == (1, "")


def test_report_in_a_package_is_read_as_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = summed({**members(sealed()), package.REPORT: b"[" * 10**6})

    assert main(["verify", _packed(tmp_path, deep)]) == 1
    assert "nested too deeply" in capsys.readouterr().out


def test_large_package_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(package, "MAX_BYTES", 1000)
    path = _packed(tmp_path, members(sealed()))

    assert main(["verify", path]) == 4
    assert "at most 1000" in capsys.readouterr().err
    assert main(["package", _file(tmp_path, sealed()), "-o", str(tmp_path / "new.zip")]) == 4


def test_named_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    assert main(["verify", str(tmp_path)]) == 4


@pytest.mark.parametrize("name", ["incomplete", "interrupted"])
def test_incomplete_run_has_a_status_of_its_own(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(reports.path(name))]) == 2

    assert capsys.readouterr().out.startswith("INCOMPLETE: ")


def test_contract_that_is_missing_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report with one contract less, digest and sums computed anew."""

    def drop(raw: dict[str, Any]) -> None:
        _acceptable(raw)
        id = raw["header"]["contracts"].pop()["id"]
        dropped = [case for case in raw["cases"] if case["contract"] == id]
        raw["cases"] = [case for case in raw["cases"] if case["contract"] != id]
        del raw["footer"]["contracts"][id]
        for case in dropped:
            raw["footer"]["totals"][case["verdict"]] -= 1

    assert main(["verify", _packed(tmp_path, members(sealed("conformant", drop)))]) == 1
    assert "is not accounted for" in capsys.readouterr().out


def test_contract_that_is_stated_otherwise_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def weaken(raw: dict[str, Any]) -> None:
        raw["header"]["contracts"][0]["level"] = "info"

    assert main(["verify", _file(tmp_path, sealed("conformant", weaken))]) == 1
    assert "is not stated as in the catalogue" in capsys.readouterr().out


def test_contract_of_no_catalogue_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "own_catalogue", lambda: dict(list(catalogue(sealed()).items())[1:]))

    assert main(["verify", _file(tmp_path, sealed())]) == 1
    assert "is not in the catalogue" in capsys.readouterr().out


@pytest.mark.parametrize("excuse", [{"until": "2.6"}, {"since": "9.0"}, {"needs": "workload"}])
@pytest.mark.usefixtures("lists")
def test_contract_that_this_torch_or_run_cannot_have_is_accounted_for(
    excuse: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = catalogue(_complete())
    first = next(iter(listed.values()))
    more = dataclasses.replace(first, contract=dataclasses.replace(first.contract, id="AMP-SCALE-999"), **excuse)
    monkeypatch.setattr(verify, "own_catalogue", lambda: {**listed, "AMP-SCALE-999": more})

    assert main(["verify", _file(tmp_path, _complete()), *_ACCEPT]) == 0


@pytest.mark.usefixtures("lists")
def test_complete_run_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", _packed(tmp_path, members(_complete())), *_ACCEPT]) == 0

    assert "COMPLETE: every contract was judged as asked" in capsys.readouterr().out


def _put(where: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: reports.put(raw, where, value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_put("header/suite/clean", False), "changes that are not committed"),
        (_put("header/suite/digest", None), "does not say which files of the suite judged"),
        (_put("header/suite/digest", "e" * 64), "are not those of the suite that checks"),
        (_put("header/suite/catalogue", "e" * 64), "the contracts were not counted"),
        (_put("header/suite/catalogue", None), "the contracts were not counted"),
        (_put("header/options/chapters", ["scale"]), "narrowed by --chapter scale"),
        (_put("header/options/contracts", ["AMP-SCALE-*"]), "narrowed by --contract"),
        (_put("header/options/selection", "-k loss"), "narrowed by -k loss"),
        (_put("header/options/amp_dtype", "bf16"), "only bf16 was judged"),
        (_put("footer/problems", ["a case left no record"]), "the run is NOT CONFORMANT"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("lists")
def test_run_that_is_not_complete(
    change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def both(raw: dict[str, Any]) -> None:
        change(raw)
        if raw["footer"]["problems"]:
            raw["footer"].update(overall="NOT CONFORMANT", exit_status=1)

    path = _file(tmp_path, _complete(both))

    assert main(["verify", path]) == 0
    assert main(["verify", path, *_ACCEPT]) == 1
    lines = " ".join(capsys.readouterr().out.split())
    assert said in lines
    assert "NOT COMPLETE: 1 fact above" in lines


@pytest.mark.usefixtures("lists")
def test_terms_are_the_buyers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, _complete(_put("header/options/level", "quick")))

    assert main(["verify", path, *_ACCEPT]) == 0
    assert main(["verify", path, "--complete", "--without-accelerator"]) == 1
    assert "! the depth was quick" in capsys.readouterr().out


def test_no_accelerator_is_not_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def cpu(raw: dict[str, Any]) -> None:
        for target in raw["header"]["targets"]:
            target["device_type"] = "cpu"

    path = _file(tmp_path, sealed("conformant", cpu))

    assert main(["verify", path, "--complete"]) == 1
    assert "! no accelerator was judged" in capsys.readouterr().out
    main(["verify", path, *_ACCEPT])
    assert "- no accelerator was judged" in capsys.readouterr().out


def _waiver_file(raw: dict[str, Any], owner: str = "") -> str:
    """A waiver file with the waivers that the report says were used."""
    rows = []
    for waiver in raw["footer"]["waivers"]:
        words = [f'{key} = "{waiver[key]}"' for key in ("contract", "reason", "link")]
        words += [f'owner = "{owner or waiver["owner"]}"', f"expires = {waiver['expires']}"]
        rows.append("\n".join(["[[waiver]]", *words, f"cases = {json.dumps(waiver['cases'])}"]))
    return "\n".join(rows)


def test_waivers_are_accepted_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The very waiver: one for the same cases by another owner accepts nothing."""
    raw = reports.raw("conformant")
    assert any(waiver["state"] == "used" for waiver in raw["footer"]["waivers"])
    path, file = _file(tmp_path, sealed()), tmp_path / "waivers.toml"

    def shown(*words: str) -> str:
        main(["verify", path, *_ACCEPT, *words])
        return " ".join(capsys.readouterr().out.split())

    assert "! waived beyond what is accepted" in shown()
    file.write_text(_waiver_file(raw))
    assert "- waived, as accepted: " in shown("--accept-waivers", str(file))
    file.write_text(_waiver_file(raw, owner="somebody else"))
    assert "! waived beyond what is accepted" in shown("--accept-waivers", str(file))


@pytest.mark.parametrize("content", ["waiver = 1", "[[waiver]]\ncontract = 'A'", "x = [", "[waiver]\ncases = []"])
def test_waiver_file_that_is_none_gets_one_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "waivers.toml"
    file.write_text(content)

    assert main(["verify", str(reports.path("conformant")), "--accept-waivers", str(file)]) == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_gaps_are_accepted_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = reports.raw("untestable")
    id = next(case["contract"] for case in raw["cases"] if case["verdict"] == "UNTESTABLE")
    path = _file(tmp_path, sealed("untestable"))

    main(["verify", path, *_ACCEPT])
    assert "! UNTESTABLE" in capsys.readouterr().out
    main(["verify", path, *_ACCEPT, "--accept", id])
    assert "- UNTESTABLE" in capsys.readouterr().out
    assert main(["verify", path, *_ACCEPT, "--accept", "AMP-NONE-001"]) == 4
