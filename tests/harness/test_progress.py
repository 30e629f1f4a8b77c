"""Progress names the chapter, the cases left and an estimate: on a terminal, in a log, and in a file for a watcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.harness import measuring, progress, time_limit
from tests.conftest import Toy
from tests.harness.test_option_report import _MAIN, _environment

_CHECKS = (
    "import json, pathlib, time\n@contract('AMP-SCALE-001')\n@pytest.mark.parametrize('number', range(8))\n"
    "def test_a(case: Case, number: int) -> None:\n"
    "    time.sleep(0.02)\n"
    "    seen = pathlib.Path('report/progress.json')\n"
    "    case.note('progress', json.loads(seen.read_text()) if seen.exists() else None)\n"
    "    case.true('ran', True)\n"
)


@pytest.fixture
def suite(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Toy:
    toy.contract("AMP-SCALE-001")
    toy.checks(_CHECKS)
    monkeypatch.setattr(progress, "_OFTEN", 0.0)
    monkeypatch.setattr(measuring, "_SPARSE", 0.0)
    monkeypatch.setattr(measuring, "_OFTEN", 0.0)
    return toy


def _file(toy: Toy) -> dict[str, object]:
    said: dict[str, object] = json.loads((toy.path / "report" / "progress.json").read_text())
    return said


def test_log_has_plain_lines(suite: Toy) -> None:
    outcome = suite.run()

    lines = re.findall(r"^scale: (\d+) cases? left, about \d+ s$", outcome.output, re.MULTILINE)
    assert lines == [str(left) for left in range(7, -1, -1)]
    assert "\x1b7" not in outcome.output


def test_quiet_run_has_none(suite: Toy) -> None:
    assert "cases left" not in suite.run("-q").output


def test_watcher_reads_a_whole_file_at_any_moment(suite: Toy) -> None:
    outcome = suite.run()
    seen = [evidence["measured"] for case in outcome.report["cases"] for evidence in case["evidence"][:1]]

    assert seen[0] is None
    assert ["'done': 3" in str(said) or "done: 3" in str(said) for said in seen].count(True) == 1
    ended = _file(suite)
    assert ended["state"] == "ended"
    assert (ended["done"], ended["left"], ended["exit_status"]) == (8, 0, 0)
    assert (ended["chapter"], ended["case"]) == ("scale", "AMP-SCALE-001[a:7]")
    assert not (suite.path / "report" / "progress.new").exists()


@pytest.mark.parametrize("processes", ["0", "2"])
def test_ended_file_is_that_of_the_run_with_workers_too(suite: Toy, processes: str) -> None:
    outcome = suite.spawn("from conformance.harness import progress\nprogress._OFTEN = 0.0\n", "-n", processes)

    assert outcome.status == 0
    assert _file(suite)["done"] == 8


def test_terminal_shows_it_after_the_dots_and_takes_it_away(suite: Toy) -> None:
    pty = pytest.importorskip("pty")
    main, side = pty.openpty()
    run = subprocess.Popen(
        [
            *(sys.executable, "-c", "from conformance.harness import measuring\nmeasuring._OFTEN = 0.0\n" + _MAIN),
            *(str(suite.path), "--report", "report", "-p", "no:cacheprovider"),
        ],
        cwd=suite.path,
        env={**_environment(), "TERM": "xterm"},
        stdout=side,
        stderr=side,
    )
    os.close(side)
    shown = b""
    while True:
        try:
            chunk = os.read(main, 65536)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(main)

    assert run.wait() == 0
    assert re.search(rb"\x1b7 scale: 5 cases left, about 5 s\x1b\[K\x1b8", shown), shown[-3000:]
    assert shown.rfind(b"\x1b[K") > shown.rfind(b"\x1b8")


def test_file_that_cannot_be_written_stops_nothing(suite: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def refused(path: Path, words: str, **options: str) -> int:
        if path.name == "progress.new":
            raise OSError(28, "No space left on device")
        return write(path, words, **options)

    monkeypatch.setattr(Path, "write_text", refused)

    assert suite.run().status == 0
    assert not (suite.path / "report" / "progress.json").exists()


@pytest.mark.parametrize(("seconds", "words"), [(0.0, "5 s"), (42.0, "40 s"), (89.0, "90 s"), (150.0, "2 min")])
def test_estimate_is_no_more_exact_than_it_can_be(seconds: float, words: str) -> None:
    assert time_limit.rounded(seconds) == words
