"""Files of accepted changes: what they hold, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.harness import accepted
from conformance.report.values import AcceptedChange
from conformance.report.verdicts import Verdict
from tests import reports

LINE = """
[[change]]
contract = "AMP-OPTIMIZER-045"
cases = ["*fused]"]
from = "PASS"
to = "GONE"
reason = "Changed on purpose."
owner = "Somebody"
link = "https://example.org/1"
expires = 2027-12-31
"""


def _write(folder: Path, page: str) -> Path:
    path = folder / "accepted.toml"
    path.write_text(page, encoding="utf-8")
    return path


def test_line_is_read(tmp_path: Path) -> None:
    both = LINE + LINE.replace('contract = "AMP-OPTIMIZER-045"\ncases = ["*fused]"]', 'op = "softmax"').replace(
        '"GONE"', '"FAIL"'
    )

    gone, failing = accepted.read([_write(tmp_path, both)])

    rest = ("Changed on purpose.", "Somebody", "https://example.org/1", "2027-12-31")
    assert gone == AcceptedChange("AMP-OPTIMIZER-045", None, ("*fused]",), Verdict.PASS, None, *rest)
    assert failing == AcceptedChange(None, "softmax", ("*",), Verdict.PASS, Verdict.FAIL, *rest)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("owner", "order", "change 1: unknown key 'order'; allowed: cases, contract, expires, from, link, op, owner"),
        ('owner = "Somebody"\n', "", "the key 'owner' is missing"),
        ('"Somebody"', '" "', "owner must be a text that is not empty"),
        ("2027-12-31", '"2027-12-31"', "expires must be a date without quotes"),
        ('"PASS"', '"OK"', "from 'OK' is not one of PASS, UNSUPPORTED"),
        ('"PASS"', "1", "from must be a text"),
        ('"GONE"', '"PASS"', "from and to are both PASS"),
        ('"GONE"', '"gone"', "to 'gone' is not one of PASS"),
        ('["*fused]"]', "[]", "cases must be a list of patterns over case ids"),
        ('contract = "AMP-OPTIMIZER-045"', "", "it names neither a contract nor an op"),
        ("[[change]]", "[change]", "holds at least one [[change]] table"),
        ("[[change]]", "[[waiver]]", "unknown key 'waiver'; a file of accepted changes holds [[change]] tables"),
        (LINE, "", "holds at least one [[change]] table"),
        (LINE, "[[", "not TOML"),
    ],
)
def test_file_that_cannot_be_taken_at_its_word_is_refused(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path, LINE.replace(old, new, 1))
    sample = str(reports.path("conformant"))

    with pytest.raises(accepted.AcceptedError) as caught:
        accepted.read([path])

    assert said in str(caught.value)
    assert main(["diff", sample, sample, "--accepted-changes", str(path)]) == 4
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("conformance diff: --accepted-changes: ")


def test_diff_takes_accepted_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = LINE.replace("AMP-OPTIMIZER-045", "AMP-SCALE-002").replace('["*fused]"]', '["*nan]"]')
    words = ["diff", str(reports.path("conformant")), str(reports.path("improved"))]

    assert main(words) == 1
    assert main([*words, "--accepted-changes", str(_write(tmp_path, line))]) == 0

    assert "accepted: Changed on purpose. (Somebody, until 2027-12-31)" in capsys.readouterr().out
