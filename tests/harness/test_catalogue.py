"""The catalogue's own rules, and that it and the checks speak of the same contracts, both ways."""

from __future__ import annotations

import json
import signal
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conformance.data import in_force
from conformance.harness import catalogue
from conformance.measure.onednn import lacks_primitive, runs_lstm

_GOOD = {
    "id": '"AMP-API-001"',
    "title": '"A title"',
    "statement": '"s"',
    "level": '"must"',
    "authority": '"documented"',
    "source": '"x"',
    "failure": '"f"',
    "next_step": '"n"',
    "snippet": '"print(1)"',
}


def _write(
    folder: Path, *rows: dict[str, str | None], head: str = 'chapter = "api"\ntitle = "T"\nsummary = "S"\n'
) -> Path:
    text = head
    for row in rows:
        merged = {**_GOOD, **row}
        text += "[[contract]]\n" + "".join(f"{key} = {value}\n" for key, value in merged.items() if value is not None)
    (folder / "api").mkdir()
    (folder / "api" / "contracts.toml").write_text(text)
    return folder


def test_a_good_chapter_is_read(tmp_path: Path) -> None:
    read = catalogue.load(_write(tmp_path, {}, {"id": '"AMP-API-002"', "title": '"Another"', "since": '"2.8"'}))

    assert [contract.since for contract in read.contracts.values()] == [None, "2.8"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"colour": '"red"'}, "unknown key 'colour'"),
        ({"source": None}, "the key 'source' is missing"),
        ({"statement": '" "'}, "statement must be a text"),
        ({"level": "1"}, "level must be a text"),
        ({"level": '"maybe"'}, "level 'maybe'"),
        ({"authority": '"rumour"'}, "authority 'rumour'"),
        ({"authority": '"engineering"'}, "may not be a must"),
        ({"id": '"AMP-SCALE-001"'}, "reads AMP-API-NNN"),
        ({"id": '"AMP-API-1"'}, "reads AMP-API-NNN"),
        ({"title": '"The scale should be halved"'}, "neither 'should'"),
        ({"title": '"Test that the scale is halved"'}, "neither 'should'"),
        ({"title": '"What is scaled is unscaled"'}, "opens with its subject"),
        ({"title": f'"{"x" * 81}"'}, "at most 80 characters"),
        ({"since": '"new"'}, "not a torch version"),
    ],
)
def test_a_broken_rule_is_named(tmp_path: Path, row: dict[str, str | None], said: str) -> None:
    with pytest.raises(catalogue.CatalogueError, match=said):
        catalogue.load(_write(tmp_path, row))


@pytest.mark.parametrize("row", [{"title": '"Another"'}, {"id": '"AMP-API-002"'}])
def test_ids_and_titles_are_unique(tmp_path: Path, row: dict[str, str | None]) -> None:
    with pytest.raises(catalogue.CatalogueError, match="used twice"):
        catalogue.load(_write(tmp_path, {}, row))


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ('chapter = "api"\ntitle = "T"\n', "'summary' is missing"),
        ('chapter = "scale"\ntitle = "T"\nsummary = "S"\n', "is not the folder's name"),
        ('chapter = "api"\ntitle = "T"\nsummary = "S"\nx = 1\n', "unknown key 'x'"),
        ("chapter = ", "not TOML"),
    ],
)
def test_a_broken_chapter_is_named(tmp_path: Path, head: str, said: str) -> None:
    with pytest.raises(catalogue.CatalogueError, match=said):
        catalogue.load(_write(tmp_path, {}, head=head))


def test_an_empty_catalogue_is_refused(tmp_path: Path) -> None:
    with pytest.raises(catalogue.CatalogueError, match="no chapter in"):
        catalogue.load(tmp_path)


@pytest.mark.parametrize(
    ("bounds", "version", "holds"),
    [
        ({"since": "2.8"}, "2.7.1", False),
        ({"since": "2.8"}, "2.8.0+cu128", True),
        ({"until": "2.12"}, "2.11.0", True),
        ({"until": "2.12"}, "2.12.0+cpu", False),
        ({"since": "2.12"}, "2.12.0a0+git123", True),
        ({"since": "2.12"}, "2.12.0.dev20260101", True),
        ({"since": "2.12"}, "2.9.1", False),
    ],
)
def test_versions_bound_a_contract(bounds: dict[str, str], version: str, holds: bool) -> None:
    contract = catalogue.Contract("AMP-API-001", "api", "T", "S", "must", "documented", "x", "f", "n", "p", **bounds)

    assert contract.holds_for(version) is holds


def test_every_contract_has_a_check_and_every_check_names_one_contract(root: Path) -> None:
    """Read the marks off the real test modules, in a process of its own."""
    script = (
        "import importlib, json, pathlib\n"
        "from conformance.harness import catalogue\n"
        "seen = []\n"
        "for path in sorted(pathlib.Path('conformance/chapters').glob('*/test_*.py')):\n"
        "    module = importlib.import_module(f'conformance.chapters.{path.parent.name}.{path.stem}')\n"
        "    for name, check in vars(module).items():\n"
        "        if name.startswith('test_') and callable(check):\n"
        "            marks = [m for m in getattr(check, 'pytestmark', []) if m.name == 'contract']\n"
        "            seen.append([path.parent.name, name, [m.args[0] for m in marks]])\n"
        "print(json.dumps(seen))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    checks = json.loads(run.stdout.strip().splitlines()[-1])
    contracts = catalogue.load().contracts

    assert [row for row in checks if len(row[2]) != 1] == []
    assert [row for row in checks if row[2][0] not in contracts] == []
    assert [row for row in checks if contracts[row[2][0]].chapter != row[0]] == []
    assert sorted(set(contracts) - {row[2][0] for row in checks}) == []


def test_every_snippet_runs_on_stock_torch(root: Path) -> None:
    """A reader pastes these; each runs alone, on the CPU, without an error, on any torch that its contract is about."""
    every = catalogue.load().contracts.values()
    snippets = {one.id: one.snippet for one in every if in_force(torch.__version__, one.since, one.until)}
    # What forks would copy a process in which others have started threads; the end of a process group may hang there.
    alone = {id: text for id, text in snippets.items() if 'get_context("fork")' in text or "init_process_group" in text}
    for id, text in alone.items():
        code = string.Template(text).substitute(device="cpu", amp_dtype="torch.bfloat16")
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False, timeout=120
            )
            if done.returncode != -signal.SIGABRT:  # a busy machine showed gloo's threads abort at the end of a process
                break
        assert (done.returncode, bool(done.stdout.strip())) == (0, True), (id, done.stderr)
    snippets = {id: text for id, text in snippets.items() if id not in alone}
    script = (
        "import io, contextlib, json, string, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "failed = {}\n"
        "for id, text in json.load(sys.stdin).items():\n"
        "    code = string.Template(text).substitute(device='cpu', amp_dtype='torch.bfloat16')\n"
        "    out = io.StringIO()\n"
        "    try:\n"
        "        with contextlib.redirect_stdout(out):\n"
        "            exec(compile(code, id, 'exec'), {'__name__': '__main__'})\n"
        "    except BaseException as error:\n"
        "        failed[id] = f'{type(error).__name__}: {error}'\n"
        "    else:\n"
        "        if not out.getvalue().strip():\n"
        "            failed[id] = 'prints nothing'\n"
        "print(json.dumps(failed))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root, input=json.dumps(snippets), capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip

    failed = json.loads(run.stdout.strip().splitlines()[-1])
    if not runs_lstm():  # the contract does not hold on such a processor, and its program says so
        failed = {id: error for id, error in failed.items() if not lacks_primitive(error)}
    assert failed == {}
