"""`python -m conformance surface`: the file it writes, the comparison and its exit status, and bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.harness import targets
from conformance.oracles.policy import overloads
from conformance.oracles.policy import surface as reader
from conformance.report import surface, surface_diff
from tests import reports
from tests.commands.running import exit_status
from tests.faults.breaking import dropped, exp_in_half
from tests.paths import ROOT
from tests.report.surfaces import changed, small


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with good files and with everything that is none, which is the current one."""
    monkeypatch.chdir(tmp_path)
    page = surface.render(small())
    Path("good.json").write_text(page, encoding="utf-8")
    Path("moved.json").write_text(page.replace('"exp": "fp32"', '"exp": "widest"'), encoding="utf-8")
    Path("truncated.json").write_text(page[: len(page) // 2], encoding="utf-8")
    Path("newer.json").write_text(json.dumps(changed(("schema", 2))), encoding="utf-8")
    Path("report.json").write_bytes(reports.path("conformant").read_bytes())
    Path("list.json").write_text("[1, 2]", encoding="utf-8")
    Path("key.json").write_text(json.dumps(changed(("signed", True))), encoding="utf-8")
    Path("binary.json").write_bytes(bytes(range(256)) * 4)
    Path("empty.json").write_bytes(b"")
    Path("folder").mkdir()
    with Path("large.json").open("wb") as stream:
        stream.truncate(100 * 2**20)
    return tmp_path


@pytest.mark.parametrize(
    ("old", "new", "status", "last"),
    [
        ("good.json", "good.json", 0, "NOTHING CHANGED: the same keys"),
        ("good.json", "moved.json", 1, "CHANGED: 2 rules moved"),
        ("moved.json", "good.json", 1, "CHANGED: 2 rules moved"),
    ],
)
def test_diff(old: str, new: str, status: int, last: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("surface", "diff", old, new) == status

    out, err = capsys.readouterr()
    assert out.startswith(f"old: {old}, torch 2.13.0+cpu")
    assert out.splitlines()[-1].startswith(last)
    assert err == ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.json", "absent.json: there is no such file"),
        ("folder", "folder: not a regular file"),
        ("empty.json", "empty.json: not a JSON document"),
        ("truncated.json", "truncated.json: not a JSON document"),
        ("binary.json", "binary.json: not a JSON document: not UTF-8"),
        ("newer.json", "newer.json: written by a newer suite (schema 2)"),
        ("report.json", "report.json: not a surface: this is a report"),
        ("list.json", "list.json: not a surface: a list"),
        ("key.json", "key.json: unknown key 'signed'"),
        ("large.json", "large.json: 104857600 bytes, and a surface has at most 4194304"),
    ],
)
def test_bad_file_gets_one_line(name: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for pair in (("good.json", name), (name, "good.json")):
        assert exit_status("surface", "diff", *pair) == 4

        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"conformance surface: {said}")
        assert err.count("\n") == 1


def test_surface_is_no_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("summary", "good.json") == 4

    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words", [["diff"], ["diff", "a"], ["diff", "a", "b", "c"], ["differ", "a", "b"], ["--cuda"]])
def test_wrong_command_line_ends_with_4(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("surface", *words) == 4

    assert "usage: python -m conformance" in capsys.readouterr().err


def test_output_is_not_ignored_beside_diff(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("surface", "-o", "out.json", "diff", "good.json", "good.json") == 4

    assert capsys.readouterr().err.startswith("conformance surface: --output is for the surface of this torch")
    assert not Path("out.json").exists()


def test_help_names_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("surface", "diff", "--help") == 0

    words = " ".join(capsys.readouterr().out.split())
    assert "Exit status: 0 nothing changed, 1 something changed, 4 a file that cannot be used." in words


def test_surface_of_this_torch_is_the_stored_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "live.json"

    assert exit_status("surface", "-o", str(file)) == 0

    assert capsys.readouterr() == ("", "")
    live = surface.read(file)
    assert file.read_text(encoding="utf-8") == surface.render(live)
    assert set(live.backends["cuda"].overloads) == overloads.registered("cuda")
    path = ROOT / "fixtures" / "surfaces" / f"{live.torch.split('+')[0]}.json"
    if not path.exists():
        pytest.skip(f"no surface of torch {live.torch} is stored")
    stored = surface.read(path)
    if differing := surface_diff.caveats(stored, live):
        pytest.skip(f"the stored surface of torch {live.torch} is of another build ({'; '.join(differing)})")
    assert list(surface_diff.sentences(surface_diff.changes(stored, live))) == []


def test_rule_that_is_dropped_or_moved_in_the_dispatcher_is_seen() -> None:
    def live() -> surface.Surface:
        return surface.parse(reader.read(targets.resolve, only={"exp", "mm"}))

    clean = live()
    with dropped("exp", "AutocastCUDA"):
        without = live()
    with exp_in_half():
        moved = live()

    words = [[said for _, said in surface_diff.sentences(surface_diff.changes(clean, one))] for one in (without, moved)]
    assert words == [
        ["cuda: exp: no longer autocasts to float32"],
        ["cuda: exp: fp32 -> lower_precision: now in the amp dtype, before in float32; the type of the result follows"],
    ]
    assert surface_diff.changes(clean, live()) == []


def test_page_shows_what_diff_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")

    assert exit_status("surface", "diff", "fixtures/surfaces/2.11.0.json", "fixtures/surfaces/2.12.0.json") == 1

    assert capsys.readouterr().out in (ROOT / "docs" / "surfaces.md").read_text(encoding="utf-8")


def test_output_that_cannot_be_written_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("conformance.commands.surface.read", lambda **_: small())

    assert exit_status("surface", "-o", str(tmp_path / "none" / "s.json")) == 4

    assert "cannot be written: No such file" in capsys.readouterr().err


def test_dispatcher_without_its_private_functions_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(backend: str) -> frozenset[str]:
        raise AttributeError("module 'torch._C' has no attribute '_dispatch_get_registrations_for_dispatch_key'")

    monkeypatch.setattr(overloads, "registered", gone)
    for words in (["surface"], ["ops"], ["ops", "--op", "mm"]):
        assert exit_status(*words) == 4

        out, err = capsys.readouterr()
        assert out == ""
        assert "no longer has the private functions of its dispatcher" in err
        assert err.count("\n") == 1


_FAKE_TORCH = {
    "missing": ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "torch is not installed"),
    "old": ("__version__ = '2.5.1+cpu'", "torch 2.5.1+cpu is too old: the suite needs 2.6 or newer"),
    "broken": ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
    "half": ("int.no_such_thing", "torch is installed but cannot be imported: type object 'int'"),
}


@pytest.mark.parametrize("name", _FAKE_TORCH)
@pytest.mark.parametrize("words", [["surface"], ["ops", "--op", "mm"]], ids=["surface", "ops"])
def test_torch_that_cannot_be_imported_gets_one_line(tmp_path: Path, words: list[str], name: str) -> None:
    source, said = _FAKE_TORCH[name]
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    script = (
        f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); "
        "runpy.run_module('conformance', run_name='__main__')"
    )

    run = subprocess.run([sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, text=True, check=False)

    assert run.returncode == 4
    assert run.stdout == ""
    assert said in run.stderr
    assert run.stderr.count("\n") == 1


def test_diff_needs_no_torch(folder: Path) -> None:
    script = (
        "import sys, runpy\n"
        "sys.modules.update(dict.fromkeys(('torch', 'pytest', 'packaging')))\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "runpy.run_module('conformance', run_name='__main__')\n"
    )

    run = subprocess.run(
        [sys.executable, "-c", script, "surface", "diff", "good.json", "moved.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 1, run.stderr
    assert "cuda, xpu: exp: fp32 -> widest" in run.stdout


@pytest.fixture(scope="module")
def stock() -> surface.Surface:
    return surface.parse(reader.read(targets.resolve))


_TOY = ("surface", "--import", "tests.simulation.foreign.toyacc", "--device", "toyacc")


def _surface_of_toy(tmp_path: Path, variant: str, *words: str) -> surface.Surface:
    file = tmp_path / "toy.json"
    run = subprocess.run(
        [sys.executable, "-m", "conformance", *_TOY, *words, "-o", str(file)],
        cwd=ROOT,
        env={**os.environ, "TOYACC_VARIANT": variant},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    return surface.read(file)


def _moved(
    before: surface.Surface, after: surface.Surface, backend: surface.BackendName
) -> dict[str, tuple[str | None, str | None]]:
    """The overloads whose policies differ, less those of cuDNN, with both."""
    old, new = before.backends[backend].overloads, after.backends[backend].overloads
    names = {name for name in old.keys() | new.keys() if "cudnn" not in name}
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


@pytest.mark.parametrize(
    ("variant", "moved"),
    [
        ("", {}),
        ("bmm_has_no_rule", {"bmm": ("lower_precision", None)}),
        ("exp_is_lowered", {"exp": ("fp32", "lower_precision")}),
        ("a_rule_that_is_not_declared", {"relu": (None, "unknown")}),
    ],
)
def test_rules_of_a_device_stand_in_the_place_of_a_backend(
    tmp_path: Path, stock: surface.Surface, variant: str, moved: dict[str, tuple[str | None, str | None]]
) -> None:
    toy = _surface_of_toy(tmp_path, variant)

    assert toy.backends["cuda"].key == "AutocastPrivateUse1"
    assert _moved(stock, toy, "cuda") == moved
    assert {name: one for name, one in toy.backends.items() if name != "cuda"} == {
        name: one for name, one in stock.backends.items() if name != "cuda"
    }


def test_device_stands_in_the_place_of_the_backend_that_is_named(tmp_path: Path, stock: surface.Surface) -> None:
    toy = _surface_of_toy(tmp_path, "", "--like", "maia")

    assert toy.backends["cuda"] == stock.backends["cuda"]
    assert toy.backends["maia"].key == "AutocastPrivateUse1"
    assert _moved(stock, toy, "maia") == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--like", "cpu"], "--import and --like are for the device that --device names"),
        (["--import", "json"], "--import and --like are for the device that --device names"),
        (["--device", "cpu"], "--device: the rules of cpu are in the surface of torch; leave it out"),
        (["--device", "fake:cuda"], "fake:cuda computes nothing; name a real device"),
        (["--device", "nosuch"], "unknown device 'nosuch'"),
        (["--import", "no_such_module", "--device", "npu"], "--import: no_such_module: ModuleNotFoundError"),
        (["--device", "npu", "diff", "good.json", "good.json"], "--device, --import and --like are for a surface that"),
    ],
)
def test_wrong_device_gets_one_line(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status("surface", *words) == 4

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"conformance surface: {said}")
    assert err.count("\n") == 1
