"""Many machines' reports: read by their lines as they are read whole, and the machine that stands out is found."""

from __future__ import annotations

import copy
import gzip
import html.parser
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.__main__ import main
from conformance.report import consistency, document, fleet, fleet_views, layout, lines, rollup
from conformance.report.verdicts import Overall
from tests import reports
from tests.generators import fleet_reports


def _raw(name: str = "conformant", *, host: str = "", seed: int = 0, **labels: str) -> dict[str, Any]:
    """The sample `name` of a machine; of each `seed` it took other times."""
    raw = reports.raw(name)
    raw["header"]["options"]["labels"] = {**({"host": host} if host else {}), **labels}
    for case in raw["cases"]:
        case["duration_s"] = round(case["duration_s"] + seed / 1000, 4)
    if raw["footer"]:
        raw["footer"]["duration_s"] = 100 + seed % 3
    return raw


def _text(raw: dict[str, Any], *, sealed: bool = True) -> str:
    """The report as a run writes it, folded, with its digest."""
    folded = layout.folded(document.parse(raw))
    if folded["footer"] and sealed:
        folded["footer"].pop("digest", None)
        folded["footer"]["digest"] = consistency.digest(folded)
    return "".join(layout.written(folded))


def _evidence(raw: dict[str, Any], unit: str | None = None) -> dict[str, Any]:
    """The first judged number of a report, which may be changed."""
    return next(
        evidence
        for case in raw["cases"]
        for evidence in case["evidence"]
        if (evidence["unit"] == unit if unit else isinstance(evidence["measured"], float) and evidence["relation"])
    )


def _fleet(tmp_path: Path, raws: list[dict[str, Any]], processes: int = 1) -> fleet.Fleet:
    for number, raw in enumerate(raws):
        (tmp_path / f"machine{number:02}.json").write_text(_text(raw))
    return fleet.merge(fleet.files([tmp_path]), processes=processes)


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "without a digest"])
@pytest.mark.parametrize("name", reports.NAMES)
def test_report_read_by_its_lines_comes_to_the_same(name: str, sealed: bool, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(_text(reports.raw(name), sealed=sealed))
    whole = document.read(file)
    reader = lines.Reader()

    for _ in range(2):
        read = reader.read(file)

        assert read.header == whole.header
        assert read.footer == whole.footer
        assert read.count == len(whole.cases)
        assert read.overall is rollup.overall(whole)
        assert rollup.verdicts(read.reduced) == rollup.verdicts(whole)
        assert rollup.failing(read.reduced) == rollup.failing(whole)
        assert reader.header(file) == whole.header


def test_report_of_one_check_is_read(tmp_path: Path) -> None:
    raw = _raw("incomplete")
    raw["cases"] = raw["cases"][:1]
    file = tmp_path / "report.json"
    file.write_text(_text(raw))

    assert lines.Reader().read(file).count == 1


@pytest.mark.parametrize("name", ["conformant", "incomplete"])
def test_report_in_another_layout_is_read_too(name: str, tmp_path: Path) -> None:
    (tmp_path / "spelled.json").write_text(json.dumps(reports.raw(name), indent=2))
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(_text(reports.raw(name)).encode()))

    spelled, packed = (lines.Reader().read(tmp_path / name) for name in ("spelled.json", "packed.json.gz"))

    assert spelled.count == packed.count > 0
    assert spelled.overall is packed.overall
    headers = [lines.Reader().header(tmp_path / name) for name in ("spelled.json", "packed.json.gz")]
    assert headers[0].environment == headers[1].environment


def test_every_edit_of_a_known_report_is_noticed(tmp_path: Path) -> None:
    """Also after the unchanged report was read, when most lines are known."""
    file = tmp_path / "report.json"
    text = _text(_raw())
    file.write_text(text)
    reader = lines.Reader()
    reader.read(file)
    unnoticed = []
    for place in range(0, len(text), 3):
        char = text[place]
        other = "7" if char.isdigit() and char != "7" else "8" if char == "7" else "x" if char != "x" else "y"
        file.write_text(text[:place] + other + text[place + 1 :])
        try:
            reader.read(file)
        except document.ReportError:
            continue
        unnoticed.append((place, text[place - 30 : place + 30]))

    assert unnoticed == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw["footer"]["totals"].update(PASS=99), "counts other cases"),
        (lambda raw: raw["footer"].update(overall="INCONCLUSIVE"), "the footer says INCONCLUSIVE"),
        (lambda raw: next(iter(raw["footer"]["contracts"].values())).update(cases=77), "what its cases do not come to"),
        (lambda raw: _evidence(raw).update(holds=False), "does not hold"),
        (lambda raw: raw["cases"][0].update(target="cuda:9"), "no target of the run"),
    ],
)
def test_contradiction_is_noticed_with_a_digest_that_is_right(
    change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path
) -> None:
    raw = _raw()
    change(raw)
    file = tmp_path / "report.json"
    file.write_text(_text(raw))

    with pytest.raises(document.ReportError, match=said):
        lines.Reader().read(file)


@pytest.mark.parametrize("odd", [0, 1, 4])
@pytest.mark.parametrize("processes", [1, 2])
def test_bit_that_differs_on_one_machine_is_found(odd: int, processes: int, tmp_path: Path) -> None:
    """Also on the machine that the others are compared with."""
    raws = [_raw(seed=number, host=f"node{number}") for number in range(20)]
    measured = _evidence(raws[0])["measured"]
    _evidence(raws[odd])["measured"] = measured * (1 - 2**-52)

    found = _fleet(tmp_path, raws, processes)

    assert [suspect.machine for suspect in found.suspects] == [f"node{odd}"]
    assert found.suspects[0].others == repr(measured)
    assert found.suspects[0].agreeing == 19
    assert found.stands_out
    assert found.compared == 20


def test_value_that_varies_is_no_suspect(tmp_path: Path) -> None:
    raws = [_raw(seed=number) for number in range(40)]
    for number, raw in enumerate(raws):
        _evidence(raw)["measured"] *= 1 - number / 1000

    assert _fleet(tmp_path, raws).suspects == ()


def test_machines_of_other_kinds_are_not_compared(tmp_path: Path) -> None:
    raws = [_raw(seed=number) for number in range(6)]
    for number, raw in enumerate(raws):
        if number % 2:
            raw["header"]["environment"]["driver"] = "999.1"
            _evidence(raw)["measured"] *= 0.5

    found = _fleet(tmp_path, raws)

    assert found.suspects == ()
    assert found.compared == 6
    assert not found.stands_out


def test_two_machines_are_too_few_to_compare(tmp_path: Path) -> None:
    raws = [_raw(seed=number) for number in range(2)]
    _evidence(raws[0])["measured"] *= 0.5

    found = _fleet(tmp_path, raws)

    assert (found.suspects, found.compared) == ((), 0)
    assert "evidence not compared: 2 machines" in fleet_views.as_text(found)


def test_slow_machine_is_found(tmp_path: Path) -> None:
    raws = [_raw(seed=number, host=f"node{number}") for number in range(12)]
    raws[7]["footer"]["duration_s"] = 140

    (slow,) = _fleet(tmp_path, raws).slow

    assert slow.machine == "node7"
    assert 1.3 < slow.times < 1.5


def test_times_of_speed_ups_are_compared(tmp_path: Path) -> None:
    raws = [_raw(seed=number, host=f"node{number}") for number in range(12)]
    for number, raw in enumerate(raws):
        case = copy.deepcopy(raw["cases"][0])
        pairs = [["ratio", 2.0], ["low", 1.9], ["high", 2.1], ["AMP ms", 1.0 + number / 100], ["baseline ms", 2.0]]
        if number == 3:
            pairs[3][1] = 1.9
        speed = {"name": "matmul/compute/bf16/tf32", "measured": pairs, "relation": None, "bound": None}
        raw["cases"][0]["evidence"] = [*case["evidence"], {**speed, "unit": "speed-up", "holds": True}]

    found = _fleet(tmp_path, raws)

    assert found.suspects == ()
    (slow,) = found.slow
    assert slow.machine == "node3"
    assert "matmul/compute/bf16/tf32, AMP ms" in slow.measurements[0]


def test_failing_contracts_are_counted_by_group(tmp_path: Path) -> None:
    raws = [_raw("failing", host="bad"), *(_raw(seed=number, host=f"node{number}") for number in range(3))]

    found = _fleet(tmp_path, raws)

    assert {machine.name: machine.overall for machine in found.machines}["bad"] is Overall.NOT_CONFORMANT
    assert all(failure.machines == ("bad",) for failure in found.failures)
    assert {failure.contract for failure in found.failures} == set(rollup.failing(reports.sample("failing")))


def test_report_that_is_there_twice_is_no_second_machine(tmp_path: Path) -> None:
    found = _fleet(tmp_path, [_raw(host="one"), _raw(host="one"), _raw(host="two", seed=1)])

    assert [machine.name for machine in found.machines] == ["one", "two"]
    assert "the same report as" in found.unusable[0].reason


def test_two_reports_of_one_name_are_told_apart(tmp_path: Path) -> None:
    found = _fleet(tmp_path, [_raw(host="one"), _raw(host="one", seed=1)])

    assert len({machine.name for machine in found.machines}) == 2


def test_labels_that_machines_share_are_groups(tmp_path: Path) -> None:
    raws = [_raw(host=f"node{number}", rack=f"R{number % 2}", seed=number) for number in range(4)]

    groups = _fleet(tmp_path, raws).groups()

    assert {row: len(machines) for row, machines in groups["label rack"].items()} == {"R0": 2, "R1": 2}
    assert "label host" not in groups


def test_reports_that_cannot_be_used_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("no report")
    (tmp_path / "b.json").write_text(_text(_raw())[:-2000])
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(_text(_raw()).encode())[:-9])
    (tmp_path / "d.json").write_text(_text(_raw()).replace("fp16", "fp61"))

    found = _fleet(tmp_path, [_raw(seed=1)])

    assert [Path(one.file).name for one in found.unusable] == ["a.json", "b.json", "c.json.gz", "d.json"]
    assert len(found.machines) == 1
    assert found.stands_out


def test_folders_of_reports_stand_for_them(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "z.json.gz").write_bytes(b"")

    found = [path.relative_to(tmp_path).as_posix() for path in fleet.files([tmp_path, tmp_path / "x"])]

    assert found == ["x/report.json", "y/report.json", "z.json.gz"]


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_html_is_self_contained_and_escapes_what_it_shows(tmp_path: Path) -> None:
    raw = _raw("failing", host="node1")
    raw["header"]["options"]["labels"] = {"host": "<script>alert(1)</script>"}
    page = fleet_views.as_html(_fleet(tmp_path, [raw]))
    parsed = _Page()
    parsed.feed(page)

    assert "<script>alert" not in page
    assert sum(tag == "script" for tag, _ in parsed.tags) == 1
    assert [attrs for tag, attrs in parsed.tags if "src" in attrs or "href" in attrs] == []


def test_views_say_the_same(tmp_path: Path) -> None:
    raws = [_raw(seed=number, host=f"node{number}") for number in range(20)]
    _evidence(raws[4])["measured"] *= 0.5
    found = _fleet(tmp_path, raws)

    for name, view in fleet_views.VIEWS.items():
        page = view(found)
        assert "node4" in page, name
        assert "20 machines: 20 CONFORMANT" in page or json.loads(page)["compared"] == 20
    assert json.loads(fleet_views.as_json(found))["suspects"][0]["machine"] == "node4"


@pytest.mark.parametrize("suffix", [".html", ".md", ".json", ".txt"])
def test_command_writes_the_form_that_the_name_says(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(_text(_raw()))
    output = tmp_path / f"fleet{suffix}"

    assert main(["merge", str(file), "-o", str(output)]) == 0
    assert output.read_text().startswith(
        {".html": "<!doctype", ".md": "# 1 machine", ".json": "{", ".txt": "By gpu"}[suffix]
    )


def test_command_ends_with_1_where_a_machine_stands_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text(_text(_raw("failing")))

    assert main(["merge", str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith("1 machine: 1 NOT CONFORMANT\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.json"], "no report can be used"),
        (["good.json", "-o", "good.json"], "is one of the reports"),
        (["good.json", "-o", "fleet.pdf"], "ends in none of"),
        (["good.json", "--processes", "0"], "is not at least 1"),
        (["good.json", "-o", "no/such.html"], "cannot be written"),
    ],
)
def test_wrong_use_gets_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.json").write_text(_text(_raw()))

    assert main(["merge", *words]) == 4

    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_machines_of_the_generated_fleet_that_stand_out_are_found(tmp_path: Path) -> None:
    """As `merge` is measured with."""
    raw = json.loads(_text(_raw()))
    cases = sum(len(check["cases"]) for check in raw["checks"])
    # The sample has no numerics, of which the generator changes a bit.
    old, new = raw["checks"][0]["contract"], "AMP-NUMERICS-900"
    raw = json.loads(json.dumps(raw).replace(old, new))
    fleet_reports.grown(raw, cases)
    for name, text in fleet_reports.fleet(raw, 36):
        (tmp_path / f"{name}.json").write_text(text)

    found = fleet.merge(fleet.files([tmp_path]))

    assert found.unusable == ()
    assert [suspect.machine for suspect in found.suspects] == ["node0011"]
    assert [slow.machine for slow in found.slow] == ["node0007"]
