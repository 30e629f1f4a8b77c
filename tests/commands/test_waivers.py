"""The command `waivers` lists excuses with the days that they have left, and what they excuse in a report."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.harness import waivers
from conformance.harness.catalogue import load
from conformance.report import text
from tests import reports

_TODAY = datetime.datetime.now(datetime.timezone.utc).date()
_FILE = """[[waiver]]
contract = "AMP-REGION-031"
cases = ["*:device*"]
reason = "Broken by our driver."
owner = "the driver team"
link = "https://example.org/7"
expires = {expires}
target = ["cuda"]
"""


def _shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["waivers", *arguments])
    captured = capsys.readouterr()
    return status, " ".join((captured.out + captured.err).split())


def test_waivers_of_the_suite_are_listed_with_their_days_left(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = _shown(capsys)
    known = waivers.shipped(load().contracts)

    assert status == 0
    assert shown.endswith(f"{len(known)} waivers")
    for waiver in known:
        left = (waiver.expires - _TODAY).days
        said = f"{waiver.contract} ({text.some(list(waiver.cases), 4)}): {left} days left (until {waiver.expires})"
        assert "".join(said.split()) in "".join(shown.split())


@pytest.mark.parametrize(
    ("days", "status", "said"),
    [(1, 0, "1 day left"), (0, 0, "0 days left"), (-1, 1, f"EXPIRED on {_TODAY - datetime.timedelta(1)}")],
)
def test_file_of_the_user_is_listed_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], days: int, status: int, said: str
) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(_FILE.format(expires=_TODAY + datetime.timedelta(days)))

    found, shown = _shown(capsys, "--waivers", str(file))

    assert found == status
    assert f"AMP-REGION-031 (*:device*): {said}" in shown
    assert "on cuda; by the driver team Broken by our driver. https://example.org/7" in shown


def test_report_says_what_its_waivers_excuse(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = _shown(capsys, str(reports.path("conformant")))

    assert status == 0
    assert "used: excuses 1 case here; by" in shown
    assert "days left (until" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((str(reports.path("incomplete")),), "the run did not end"),
        ((str(reports.path("conformant")), "--waivers", "x.toml"), "give REPORT or --waivers FILE"),
        (("--waivers", "no-such.toml"), "no-such.toml: cannot be read"),
        (("no-such.json",), "there is no such file"),
    ],
)
def test_what_cannot_be_used_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    status, shown = _shown(capsys, *arguments)

    assert status == 4
    assert said in shown


def test_day_that_is_not_in_the_calendar_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = reports.raw("conformant")
    whole["footer"]["waivers"][0]["expires"] = "2999-02-31"
    whole["footer"]["digest"] = None
    file = tmp_path / "report.json"
    file.write_text(json.dumps(whole))

    status, shown = _shown(capsys, str(file))

    assert status == 4
    assert "'2999-02-31' is no day of the calendar" in shown
