"""`python -m conformance calibrate`: what it makes of reports, by which machines it is then judged, what it refuses."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.__main__ import main
from conformance.commands import calibrate
from conformance.data import read_toml
from conformance.harness import expectations, targets
from conformance.report import document, speed
from tests import reports

NAME = "NVIDIA H100 80GB HBM3"
DEVICE = ("cuda", NAME, "9.0")
TODAY = datetime.date(2026, 12, 1)
KEY, OTHER = "matmul/compute/bf16/fp32", "linear/compute/bf16/fp32"
FIGURES = {"low": 9.8, "ratio": 10.0, "high": 10.2, "noise": 0.01, "pairs": 40, "AMP TFLOP/s": 700.0}
FIGURES |= {"baseline TFLOP/s": 52.0}
FACTOR = 9.8 * (9.8 / 10 * math.exp(0.01)) ** math.sqrt(2)


@pytest.fixture(autouse=True)
def _today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expectations, "date_of_today", lambda: TODAY)


def _figures(**changes: Any) -> dict[str, Any]:
    return FIGURES | changes


def _raw(rows: dict[str, dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """The sample of a conformant run, as if on a GPU, with these speed-ups."""
    raw = reports.raw("conformant")
    raw["header"]["started"] = changes.pop("started", "2026-11-30T12:00:00+00:00")
    raw["header"]["environment"] |= {"torch": "2.13.0", "driver": "580.65"} | changes.pop("environment", {})
    target = next(target for target in raw["header"]["targets"] if not target["fake"])
    place = target["name"]
    target |= {"name": "cuda:0", "device_type": "cuda"}
    target["probe"] |= {"name": NAME, "capability": "9.0"} | changes.pop("probe", {})
    for case in raw["cases"]:
        case["target"] = "cuda:0" if case["target"] == place else case["target"]
    case = next(case for case in raw["cases"] if case["target"] == "cuda:0")
    common = {"relation": None, "bound": None, "unit": speed.UNIT, "holds": True}
    case["evidence"] += [
        {"name": key, "measured": [list(pair) for pair in figures.items()], **common} for key, figures in rows.items()
    ]
    assert not changes
    return raw


def _report(folder: Path, rows: dict[str, dict[str, Any]], name: str = "report.json", **changes: Any) -> str:
    path = folder / name
    path.write_text(json.dumps(_raw(rows, **changes)))
    return str(path)


def _calibrated(folder: Path, *arguments: str) -> expectations.DeviceClass:
    output = folder / "fleet.toml"
    assert main(["calibrate", *arguments, "-o", str(output)]) == 0
    found = expectations.load([output], today=TODAY).of(*DEVICE, TODAY)
    assert found is not None
    return found


def _factor(device_class: expectations.DeviceClass, key: str) -> float:
    expected = device_class.expected(key)
    assert expected is not None
    return expected.factor


def test_a_report_becomes_expectations_with_their_provenance(tmp_path: Path) -> None:
    path = _report(tmp_path, {KEY: FIGURES, "lstm/launch/fp16/fp32": _figures(low=0.5, ratio=0.6, high=0.7)})

    found = _calibrated(tmp_path, path)

    expected = found.expected(KEY)
    assert expected is not None
    assert expected.factor == pytest.approx(FACTOR, rel=1e-5)
    assert (expected.how, expected.date, expected.expires) == (
        "calibrated",
        datetime.date(2026, 11, 30),
        datetime.date(2027, 11, 30),
    )
    assert _factor(found, "lstm/launch/fp16/fp32") == pytest.approx(
        0.5 * (0.5 / 0.6 * math.exp(0.01)) ** math.sqrt(2), rel=1e-5
    )
    assert (found.torch, found.driver) == ("2.13.0", "580.65")
    assert found.reports == (hashlib.sha256(Path(path).read_bytes()).hexdigest(),)
    assert found.reached == {"bf16": 700, "fp32": 52, "fp16": 700}
    assert found.id.startswith("nvidia-h100-80gb-hbm3-calibrated")


def test_the_page_goes_to_standard_output_and_the_account_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _report(tmp_path, {KEY: FIGURES, "bmm/compute/bf16/fp32": _figures(spoiled="the machine is busy")})

    assert main(["calibrate", path]) == 0

    seen = capsys.readouterr()
    (tmp_path / "fleet.toml").write_text(seen.out)
    assert len(expectations.read(tmp_path / "fleet.toml")[0].expectations) == 1
    assert f"{NAME}: 1 expectation from 1 report, to 2027-11-30" in seen.err
    assert "left out: bmm/compute/bf16/fp32: the measurement was invalid: the machine is busy" in seen.err
    assert "all rest on one machine, which does not show how machines differ" in seen.err
    assert f"fails a machine whose ratio is {1 - FACTOR / 10.2:.1%} less than the one measured" in seen.err
    assert "what two measurements of one machine differ by.\n" in seen.out


@pytest.mark.parametrize(
    ("figures", "kept"),
    [
        ({}, (0.01, 40)),
        ({"noise": 10.0, "pairs": 1}, (10.0, 1)),
        ({"noise": "loud", "pairs": "many"}, (0.0, 1)),
        ({"noise": -1.0, "pairs": 0}, (0.0, 1)),
        ({"noise": 11.0, "pairs": 2.5}, (0.0, 1)),
    ],
)
def test_what_the_factor_is_made_of_is_kept(tmp_path: Path, figures: dict[str, Any], kept: tuple[float, int]) -> None:
    _calibrated(tmp_path, _report(tmp_path, {KEY: FIGURES | figures}))

    (row,) = read_toml(tmp_path / "fleet.toml")["class"][0]["ratio"]
    assert row["seen"] == [9.8, 10.0, 10.2]
    assert (row["noise"], row["pairs"]) == kept


def test_step_of_a_users_model_is_left_out_beside_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _calibrated(tmp_path, _report(tmp_path, {KEY: FIGURES, "own/step/bf16/fp32": FIGURES}))

    assert found.expected(KEY) is not None
    assert (
        "left out: own/step/bf16/fp32: of a user's model (--workload), by which no other machine is judged"
        in capsys.readouterr().err
    )


def test_a_cpu_is_a_device_too(tmp_path: Path) -> None:
    key = "matmul/middle/bf16/fp32"
    raw = _raw({key: FIGURES})
    target = next(target for target in raw["header"]["targets"] if target["name"] == "cuda:0")
    target["device_type"], target["probe"]["capability"] = "cpu", None
    (tmp_path / "report.json").write_text(json.dumps(raw))

    _calibrated(tmp_path, str(tmp_path / "report.json"))

    (found,) = expectations.read(tmp_path / "fleet.toml")
    assert found.device_type == "cpu"
    assert found.expected(key) is not None


def test_of_several_machines_the_least_counts(tmp_path: Path) -> None:
    paths = [
        _report(tmp_path, {KEY: FIGURES}, "a.json"),
        _report(tmp_path, {KEY: _figures(low=9.0, ratio=9.1, high=9.2)}, "b.json", environment={"torch": "2.14.0"}),
        _report(tmp_path, {KEY: _figures(low=11.0, ratio=11.5, high=12.0)}, "c.json"),
    ]

    found = _calibrated(tmp_path, *paths)

    assert _factor(found, KEY) == pytest.approx(9 * (9 / 9.1 * math.exp(0.01)) ** math.sqrt(2), rel=1e-5)
    assert len(found.reports) == 3
    assert found.torch == "2.13.0, 2.14.0"


def test_devices_of_other_names_become_classes_of_their_own(tmp_path: Path) -> None:
    paths = [
        _report(tmp_path, {KEY: FIGURES}, "a.json"),
        _report(
            tmp_path,
            {KEY: _figures(low=3, ratio=3.1, high=3.2)},
            "b.json",
            probe={"name": 'X[1]* "\\ ü', "capability": "9.9"},
        ),
    ]

    assert _factor(_calibrated(tmp_path, *paths), KEY) > 9

    both = expectations.load([tmp_path / "fleet.toml"], today=TODAY)
    other = both.of("cuda", 'X[1]* "\\ ü', "9.9", TODAY)
    assert other is not None
    assert 2.8 < _factor(other, KEY) < 3
    assert both.of("cuda", 'X1 "\\ ü', "9.9", TODAY) is None


def test_what_a_terminal_would_obey_is_written_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "X\x1b[2J\x7f\x9b\u202e"
    figures = _figures(spoiled="\x1b]0;gone\x07")
    path = _report(tmp_path, {KEY: FIGURES, "bmm/compute/bf16/fp32": figures}, probe={"name": name})

    assert main(["calibrate", path]) == 0
    seen = capsys.readouterr()
    assert all(one.isprintable() or one == "\n" for one in seen.out + seen.err)
    (tmp_path / "fleet.toml").write_text(seen.out)
    assert expectations.read(tmp_path / "fleet.toml")[0].fits("cuda", name, "9.0")

    assert main(["calibrate", _report(tmp_path, {KEY: figures}, probe={"name": name})]) == 4
    assert all(one.isprintable() or one == "\n" for one in capsys.readouterr().err)


def test_margin_and_validity_are_the_users(tmp_path: Path) -> None:
    path = _report(tmp_path, {KEY: FIGURES})

    found = _calibrated(tmp_path, path, "--margin", "0.1", "--valid-days", "30")

    assert _factor(found, KEY) == pytest.approx(0.9 * FACTOR, rel=1e-5)
    assert found.expires == datetime.date(2026, 12, 30)
    assert "a margin of 0.1." in (tmp_path / "fleet.toml").read_text()
    assert _calibrated(tmp_path, path, "--valid-days", "1").expires == TODAY  # its last day
    assert _calibrated(tmp_path, path, "--valid-days", "3650").expires == datetime.date(2036, 11, 27)


def test_the_machine_that_was_measured_passes_and_one_that_lost_a_tenth_fails(tmp_path: Path) -> None:
    """By the rule of the checks, over many measurements: a half-width of 2 %, a noise floor of 1 %."""
    rng = random.Random(1)
    verdicts = {1.0: [], 0.9: []}  # type: dict[float, list[str]]
    for _ in range(200):
        # A 99 % interval of half-width 0.02 belongs to medians that scatter by 0.02 / 2.58.
        middle = math.log(10) + rng.gauss(0, 0.02 / 2.58)
        row = _figures(low=math.exp(middle - 0.03), ratio=math.exp(middle), high=math.exp(middle + 0.03))
        report = document.parse(_raw({KEY: row}))
        factor = calibrate._factor(speed.speedups(report)[0], 0.0).at_least
        for loss, found in verdicts.items():
            again = math.log(10 * loss) + rng.gauss(0, 0.02 / 2.58)
            low, high = math.exp(again - 0.03), math.exp(again + 0.03)
            found.append("PASS" if low >= factor else "FAIL" if high < factor else "INCONCLUSIVE")

    assert verdicts[1.0].count("FAIL") == 0
    assert verdicts[1.0].count("PASS") >= 196
    assert verdicts[0.9].count("FAIL") >= 180
    assert verdicts[0.9].count("PASS") == 0


REFUSED = [
    ([], "no such file"),
    (["--margin", "1"], "--margin 1"),
    (["--margin", "-0.1"], "--margin -0.1"),
    (["--margin", "nan"], "--margin nan"),
    (["--valid-days", "0"], "--valid-days 0"),
    (["--valid-days", "99999999"], "--valid-days 99999999"),
    (["--level", "full"], "a report is measured already"),
    (["--device", "cuda:0"], "a report is measured already"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_wrong_options_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    path = _report(tmp_path, {KEY: FIGURES}) if options else str(tmp_path / "absent.json")

    assert main(["calibrate", path, *options]) == 4

    seen = capsys.readouterr()
    assert words in seen.err
    assert seen.err.count("\n") == 1
    assert seen.out == ""


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({}, "no speed-up was measured"),
        ({"matmul/compute/fp8/fp32": FIGURES}, "no measurement that this suite knows"),
        ({KEY: _figures(spoiled="the device was slowed down by heat")}, "slowed down by heat"),
        ({KEY: FIGURES | {"batch halved": 2}}, "for want of memory or time"),
        ({KEY: _figures(low=500.0, ratio=501.0, high=502.0)}, "more than any device reaches"),
        ({KEY: _figures(low=11.0)}, "outside its interval"),
        ({KEY: _figures(low=-1.0)}, "not a ratio"),
    ],
)
def test_a_report_without_use_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: dict[str, Any], words: str
) -> None:
    assert main(["calibrate", _report(tmp_path, rows)]) == 4

    assert words in capsys.readouterr().err


def test_a_machine_in_doubt_is_no_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = _raw({KEY: FIGURES})
    raw["footer"] = None
    (tmp_path / "cut.json").write_text(json.dumps(raw))

    assert main(["calibrate", str(tmp_path / "cut.json")]) == 4
    assert "did not end" in capsys.readouterr().err

    path = _report(tmp_path, {KEY: FIGURES})
    assert main(["calibrate", path, path]) == 4
    assert "no second machine" in capsys.readouterr().err


@pytest.mark.parametrize(("verdict", "words"), [("FAIL", "failed on cuda:0"), ("ERROR", "broke on cuda:0")])
def test_a_failed_speed_case_is_no_measure(verdict: str, words: str) -> None:
    raw = _raw({KEY: FIGURES})
    case = next(case for case in raw["cases"] if case["target"] == "cuda:0")
    case["verdict"] = verdict
    contract = next(one for one in raw["header"]["contracts"] if one["id"] == case["contract"])
    assert calibrate._unfit(document.parse(raw)) is None  # of another chapter
    contract["chapter"] = "speed"

    assert words in str(calibrate._unfit(document.parse(raw)))


def test_an_old_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _report(tmp_path, {KEY: FIGURES}, started="2024-01-01T00:00:00+00:00")

    assert main(["calibrate", path]) == 4

    assert "ended on 2024-12-31 already" in capsys.readouterr().err


def test_the_report_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _report(tmp_path, {KEY: FIGURES})
    before = Path(path).read_bytes()

    assert main(["calibrate", path, "-o", path]) == 4

    assert "is a report itself" in capsys.readouterr().err
    assert Path(path).read_bytes() == before


def test_a_wide_interval_is_no_measure_for_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = _figures(low=4.0, ratio=8.0, high=10.0)
    paths = []
    for number, figures in enumerate(({KEY: FIGURES, OTHER: wide}, {KEY: FIGURES, OTHER: FIGURES})):
        folder = tmp_path / str(number)
        folder.mkdir()
        paths.append(_report(folder, figures))

    assert main(["calibrate", *paths, "-o", str(tmp_path / "fleet.toml")]) == 0

    (found,) = expectations.read(tmp_path / "fleet.toml")
    assert found.expected(OTHER) is not None  # of the other report
    assert "1 of 2 rest on one machine" in capsys.readouterr().err
    assert main(["calibrate", paths[0]]) == 0
    assert f"{OTHER}: the interval [4, 10] is too wide to judge others by" in capsys.readouterr().err


def test_fake_devices_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--device", " FAKE:cuda"]) == 4
    assert "nothing computes on a fake device" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize(
    ("given", "accelerator", "named"),
    [(["--device", "cuda:1"], "cuda", "cuda:1"), ([], "cuda", "cuda"), ([], None, "cpu")],
    ids=["named", "found", "none"],
)
def test_without_a_report_the_chapter_is_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: list[str],
    accelerator: str | None,
    named: str,
    status: int,
) -> None:
    commands = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        assert options["stdout"] is sys.stderr
        folder = Path(command[command.index("--report") + 1])
        folder.mkdir()
        _report(folder, {KEY: FIGURES})
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(targets, "accelerator", lambda: accelerator)
    arguments = ["--level", "full", "--folder", str(tmp_path / "run"), "-o", str(tmp_path / "x")]

    assert main(["calibrate", *given, *arguments]) == 0

    (command,) = commands
    assert command[command.index("--chapter") + 1] == "speed"
    assert command[command.index("--level") + 1] == "full"
    assert command[-2:] == ["--device", named]
    assert expectations.read(tmp_path / "x")[0].how == "calibrated"


@pytest.mark.parametrize("status", [2, 3, 4, 5])
def test_a_run_that_came_to_nothing_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    ended: subprocess.CompletedProcess[str] = subprocess.CompletedProcess([], status)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: ended)

    assert main(["calibrate", "--device", "cuda:0", "-o", str(tmp_path / "x")]) == 4

    assert f"ended with status {status}" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_the_run_is_one_that_pytest_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run of a small chapter with the same command line, from a folder that is not the checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate, "_CHAPTER", "api")

    found = calibrate._run(["cpu"], "quick", "run")

    assert isinstance(found, Path)
    assert document.read(found).footer is not None
