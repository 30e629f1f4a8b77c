"""The page of divergences: its snippets print what it says, and it names every contract that a waiver excuses."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from conformance.harness import catalogue, waivers
from tests.paths import ROOT

_SECTION = re.compile(
    r"^### (?P<title>[^\n]+)\n\n"
    r"<!-- torch: (?P<torch>\S+?)(?P<cuda>; needs: cuda)?(?P<varies>; varies: (?:cpu|python))? -->"
    r"\n\n(?P<text>.*?)\n\n"
    r"```python\n(?P<snippet>.*?)```\n\n```text\n(?P<output>.*?)```$",
    re.DOTALL | re.MULTILINE,
)
# Each snippet in a child of one process that has torch loaded, and what an optimizer imports of it: it is slow to
# import, and snippets leave state behind. One that waits for ranks which never answer ends with all that it started.
_RUN = """
import json, os, signal, sys, threading, torch, torch._dynamo, torch._subclasses.fake_tensor, traceback
printed = {}
for title, snippet in json.load(sys.stdin).items():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        # Some versions of gloo announce their connections on file descriptor 1, where the lines of ranks mix.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout = os.fdopen(writer, "w")
        try:
            exec(compile(snippet, title, "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    deadline = threading.Timer(60, os.killpg, (child, signal.SIGKILL))
    deadline.start()
    with os.fdopen(reader) as pipe:
        printed[title] = pipe.read()
    if os.waitpid(child, 0)[1]:
        printed[title] += "(was killed)"
    deadline.cancel()
    deadline.join()
print(json.dumps(printed))
"""


@dataclass(frozen=True)
class Section:
    """One divergence: where it is seen, whether it takes a GPU, its contracts, a snippet and what that prints."""

    title: str
    torch: SpecifierSet
    needs_cuda: bool
    varies: bool
    contracts: frozenset[str]
    snippet: str
    output: str


def _sections(page: str) -> list[Section]:
    return [
        Section(
            title=found["title"],
            torch=SpecifierSet(found["torch"]),
            needs_cuda=found["cuda"] is not None,
            varies=found["varies"] is not None,
            contracts=frozenset(re.findall(r"AMP-[A-Z0-9]+-\d{3}", found["text"])),
            snippet=found["snippet"],
            output=found["output"],
        )
        for found in _SECTION.finditer(page)
    ]


def _is_seen(section: Section, version: str) -> bool:
    return section.torch.contains(Version(version).base_version)


def _wrong(sections: list[Section], printed: dict[str, str], version: str) -> dict[str, str]:
    """What was printed against the page: another output where it says it is seen, the same one where it is not."""
    return {
        one.title: printed[one.title]
        for one in sections
        if (printed[one.title] == one.output) is not _is_seen(one, version)
        and not (one.varies and _is_seen(one, version))
    }


def _unnamed(sections: list[Section], waived: Iterable[waivers.Waiver]) -> set[tuple[str, str]]:
    """The waived contracts, and the versions that they are waived for, that no section speaks of."""
    versions = [f"2.{minor}.0" for minor in range(6, 16)]
    said = {(id, version) for one in sections for id in one.contracts for version in versions if _is_seen(one, version)}
    return {
        (one.contract, version) for one in waived for version in versions if SpecifierSet(one.torch).contains(version)
    } - said


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "divergences.md").read_text(encoding="utf-8")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the snippets run in forked children")
def test_every_snippet_prints_what_the_page_says(page: str) -> None:
    """Where a divergence is not seen in this torch it prints something else: it was mended, or had not come yet."""
    sections = [one for one in _sections(page) if torch.cuda.is_available() or not one.needs_cuda]
    snippets = json.dumps({one.title: one.snippet for one in sections})
    run = subprocess.run([sys.executable, "-c", _RUN], input=snippets, capture_output=True, text=True, check=True)

    assert _wrong(sections, json.loads(run.stdout), torch.__version__) == {}


def test_every_section_is_read_and_names_contracts_that_exist(page: str) -> None:
    sections = _sections(page)

    assert [one.title for one in sections] == re.findall(r"^### (.+)$", page, re.MULTILINE)
    assert [one.title for one in sections if not one.contracts] == []
    assert {id for one in sections for id in one.contracts} - set(catalogue.load().contracts) == set()


def test_every_waived_contract_is_on_the_page(page: str) -> None:
    """With each version that its waiver is for."""
    assert _unnamed(_sections(page), waivers.shipped(catalogue.load().contracts)) == set()


def test_a_wrong_page_is_noticed() -> None:
    page = (
        "### T\n\n<!-- torch: <2.11 -->\n\n- Contracts: AMP-CACHE-021.\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n"
    )
    sections = _sections(page)
    waiver = waivers.Waiver("AMP-CACHE-021", ("*",), "r", "o", "l", datetime.date.max, torch="<2.12")

    assert _wrong(sections, {"T": "1\n"}, "2.10.0+cpu") == {}
    assert _wrong(sections, {"T": "2\n"}, "2.10.0+cpu") == {"T": "2\n"}
    assert _wrong(sections, {"T": "1\n"}, "2.11.0a0+git1") == {"T": "1\n"}
    assert _unnamed(sections, [waiver]) == {("AMP-CACHE-021", "2.11.0")}

    varying = _sections(page.replace("<2.11 -->", "<2.11; varies: cpu -->"))
    assert _wrong(varying, {"T": "2\n"}, "2.10.0+cpu") == {}
    assert _wrong(varying, {"T": "1\n"}, "2.11.0a0+git1") == {"T": "1\n"}
