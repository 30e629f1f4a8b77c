"""A full disk, a signal, a kill: every record that was finished stays readable, and nothing becomes a pass."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.harness.recorder import Recorder
from conformance.report import document
from conformance.report.encode import encode_case
from tests import reports
from tests.conftest import Toy
from tests.harness.test_option_report import _MAIN, _environment

_MANY = (
    "import time\n@contract('AMP-API-001')\n@pytest.mark.parametrize('number', range({count}))\n"
    "def test_a(case: Case, number: int) -> None:\n"
    "    case.note('words', 'x' * {size})\n    time.sleep({pause})\n    case.true('ran', True)\n"
)


def _suite(toy: Toy, count: int = 40, size: int = 4000, pause: float = 0.0) -> None:
    toy.contract("AMP-API-001")
    toy.checks(_MANY.format(count=count, size=size, pause=pause))


def _start(toy: Toy, *arguments: str, limit: int | None = None) -> subprocess.Popen[str]:
    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, str(toy.path), "-p", "no:cacheprovider", *arguments],
        cwd=toy.path,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=limited,
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; skips where this user may mount none."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def _judged(output: str, status: int, folder: Path) -> document.Report:
    assert status == 3, output
    assert "Traceback" not in output
    assert "INTERNALERROR" not in output
    assert "\nCONFORMANT" not in output
    return document.read(folder)


def test_disk_that_fills_up_ends_the_run_and_keeps_the_records(toy: Toy, small_disk: Path) -> None:
    _suite(toy)
    run = _start(toy, "--report", str(small_disk / "report"))
    output, _ = run.communicate()

    report = _judged(output, run.returncode, small_disk / "report")
    assert 0 < len(report.cases) < 40
    assert "report.json cannot be written: No space left on device; the run ends here" in output
    assert not (small_disk / "report" / "report.whole").exists()


def test_disk_that_is_full_at_the_start_keeps_the_earlier_report(toy: Toy, small_disk: Path) -> None:
    _suite(toy, count=2, size=1)
    assert _start(toy, "--report", str(small_disk / "report")).wait() == 0
    before = (small_disk / "report" / "report.json").read_bytes()
    filled = small_disk / "filled"
    with filled.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
        while True:
            stream.write(b"x" * 4096)

    run = _start(toy, "--report", str(small_disk / "report"))
    output, _ = run.communicate()

    assert run.returncode == 3, output
    assert "No space left on device" in output
    assert "Traceback" not in output
    assert (small_disk / "report" / "report.json").read_bytes() == before


def test_limit_of_a_files_size_is_a_full_disk(toy: Toy) -> None:
    _suite(toy)
    run = _start(toy, "--report", "report", limit=2**16)
    output, _ = run.communicate()

    report = _judged(output, run.returncode, toy.path / "report")
    assert 0 < len(report.cases) < 40


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_report_that_cannot_be_finished_ends_with_the_records_and_no_verdict(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    _suite(toy, count=3, size=1)

    def refused(recorder: Recorder, report: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Recorder, "finish", refused)
    outcome = toy.run()

    report = _judged(outcome.output, outcome.status, toy.path / "report")
    assert (len(report.cases), report.footer) == (3, None)
    said = f"the report could not be written: {os.strerror(number)}; report.json keeps 3 finished records and no"
    assert said in " ".join(outcome.output.split())
    assert [path.name for path in (toy.path / "report").glob("summary*")] == []


def test_partial_write_leaves_the_records_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path, reports.sample("conformant").header)
    recorder.add({"id": "first"})
    whole = os.pwrite

    def half(file: int, chunk: bytes, at: int) -> int:
        monkeypatch.setattr(os, "pwrite", whole)
        return whole(file, chunk[: len(chunk) // 2], at)

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(OSError, match="No space left"):
        recorder.add({"id": "x" * 1000})

    assert json.loads(recorder.path.read_text())["cases"] == [{"id": "first"}]


# Prints so much at its end that a signal comes while the summary is printed.
_AT_THE_SUMMARY = """
import os, signal
from conformance.report import terminal
render = terminal.render

def interrupted(*arguments, **options):
    for number in NUMBERS:
        os.kill(os.getpid(), number)
    return render(*arguments, **options)

terminal.render = interrupted
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_the_summary_prints_changes_nothing(toy: Toy, number: signal.Signals) -> None:
    _suite(toy, count=2, size=1)
    outcome = toy.spawn(
        f"NUMBERS = [{int(number)}]\n"
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        + _AT_THE_SUMMARY.replace("return render", "NUMBERS.clear()\n    return render")
    )

    assert outcome.status == 0
    assert "Traceback" not in outcome.output
    assert "KeyboardInterrupt" not in outcome.output
    assert "CONFORMANT on cpu" in outcome.output
    assert outcome.report["footer"]["exit_status"] == 0


def test_second_signal_ends_a_summary_with_the_status_of_the_run(toy: Toy) -> None:
    _suite(toy, count=2, size=1)
    outcome = toy.spawn(
        "import os, signal\nfrom conformance.harness.reporting import Reporter\nshow = Reporter.summary\n"
        "def summary(self, **options):\n"
        "    if self._run.status is not None:\n"
        "        for _ in range(2):\n            os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return show(self, **options)\n"
        "Reporter.summary = summary\n"
    )

    assert outcome.status == outcome.report["footer"]["exit_status"] == 0
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_the_first_case_leaves_an_incomplete_report(toy: Toy, number: signal.Signals) -> None:
    _suite(toy, count=2, size=1)
    outcome = toy.spawn(
        "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from conformance.harness import header\n"
        f"def heading(run):\n    os.kill(os.getpid(), {int(number)})\n    return []\n"
        "header.heading = heading\n"
    )

    assert outcome.status == 2
    assert "Traceback" not in outcome.output
    assert outcome.report["footer"]["overall"] == "INCOMPLETE"
    assert outcome.report["footer"]["interrupted"] is True


_IN_A_CALLBACK = """
import os

class Told:
    def __del__(self):
        os.kill(os.getpid(), {number})
        sum(range(1000))

@contract('AMP-API-001')
@pytest.mark.parametrize('number', range(3))
def test_a(case: Case, number: int) -> None:
    if number == 1:
        told = Told()
        del told
    case.true('ran', True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_in_a_callback_of_the_interpreter_ends_the_run(toy: Toy, number: signal.Signals) -> None:
    """The exception of a signal is lost there, and no word of it reaches the user."""
    toy.contract("AMP-API-001")
    toy.checks(_IN_A_CALLBACK.format(number=int(number)))
    run = _start(toy, "--report", "report")
    output, _ = run.communicate()

    report = document.read(toy.path / "report" / "report.json")
    assert "Traceback" not in output
    assert run.returncode == 2
    assert len(report.cases) == 2
    assert report.footer is not None
    assert report.footer.overall.value == "INCOMPLETE"


_BETWEEN_LINES = """
def interrupted():
    raise KeyboardInterrupt("terminated")

# Python has no line for some instructions, and a signal may fall there.
interrupted.__code__ = interrupted.__code__.replace(co_linetable=b"")

@contract('AMP-API-001')
def test_a(case: Case) -> None:
    interrupted()
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="every instruction has a line before Python 3.11")
def test_signal_between_two_lines_ends_the_run(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(_BETWEEN_LINES)
    run = _start(toy, "--report", "report", "--disable-warnings")
    output, _ = run.communicate()

    assert "Traceback" not in output
    assert run.returncode == 2


@pytest.mark.parametrize("seed", range(6))
def test_run_that_is_killed_at_a_drawn_moment_keeps_its_records(toy: Toy, seed: int) -> None:
    drawn = random.Random(seed)
    number = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT][seed % 3]
    # The cases take longer than any moment that is drawn: a signal after the last one is pytest's own.
    _suite(toy, count=300, size=9000, pause=0.02)
    # A run of the suite alone prints no warnings; pluggy has one for a hook that a signal ends.
    run = _start(toy, "--report", "report", "--disable-warnings")
    file = toy.path / "report" / "report.json"
    while not (file.exists() and file.stat().st_size) and run.poll() is None:
        time.sleep(0.005)
    time.sleep(drawn.random())
    run.send_signal(number)
    output, _ = run.communicate()

    report = document.read(file)
    assert output.count("Traceback") == 0
    assert run.returncode == (-signal.SIGKILL if number is signal.SIGKILL else 2), output
    assert (report.footer is None) is (number is signal.SIGKILL)
    if report.footer is not None:
        assert report.footer.overall.value == "INCOMPLETE"


def test_write_that_a_kill_cuts_off_at_any_byte_leaves_the_records_before_it(tmp_path: Path) -> None:
    """The last record and the brackets after it are replaced in one write, which may end anywhere."""
    cases = [encode_case(case) for case in reports.sample("conformant").cases[:3]]
    recorder = Recorder(tmp_path, reports.sample("conformant").header)
    for case in cases[:2]:
        recorder.add(case)
    before = recorder.path.read_bytes()
    recorder.add(cases[2])
    after = recorder.path.read_bytes()
    recorder.close()
    begun = next(at for at, byte in enumerate(after) if before[at] != byte)

    for cut in range(begun, len(after), 7):
        recorder.path.write_bytes(after[:cut] + before[cut:])
        read = document.read(recorder.path)
        assert [case.id for case in read.cases][:2] == [case["id"] for case in cases[:2]]
        assert read.footer is None
