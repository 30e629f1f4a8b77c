"""Exceptions of the suite's own code are ERROR; those that torch's answers can have caused are FAIL and say where."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from conformance.harness import blame
from conformance.harness.targets import Target
from tests.conftest import Toy

_CPU = Target("cpu", "cpu", None, False)
_NUMBERS = itertools.count()
_HEADER = """
import contextlib
import math
from dataclasses import dataclass

import torch


from conformance.harness import catalogue

TABLE = {"cuda": 1}
ROWS = [1, 2]


@dataclass
class Row:
    name: str

    def fill(self):
        self.filled = True


class Module(torch.nn.Module):
    pass


class Slow:
    @property
    def answer(self):
        return self.late

    @classmethod
    def made(cls, size):
        return cls()


def own(size, *, kind="x"):
    return size


slow = Slow()


def called(function, *arguments):
    return function(*arguments)
"""

_OWN = {
    "attribute of its module": "catalogue.nothing",
    "attribute of a module of Python": "math.nothing",
    "attribute of its class": "Row.nothing",
    "attribute of its object": "Row('a').nothing",
    "attribute that a property of it looks for": "Slow().answer",
    "an argument of its function is missing": "own()",
    "an argument too many": "own(answer, answer)",
    "an unknown keyword": "own(1, size_of=2)",
    "an argument of its class": "Row()",
    "an argument of its method": "Slow.made()",
    "an argument of a method of its object": "slow.made()",
    "an argument of a function of another module": "catalogue.load(1, 2)",
}
_OWN_EXPRESSIONS = {
    "look-up of the target": "TABLE[target.device_type]",
    "index of a constant": "ROWS[2]",
    "sum of constants": "ROWS + TABLE",
    "look-up below a call": "own(answer) + TABLE['cpu']",
}
_DOUBTFUL = {
    "attribute of None": "answer.nothing",
    "attribute of torch": "torch.nothing",
    "attribute of torch's class": "torch.nn.Linear.nothing",
    "attribute of its module of torch's base": "Module.nothing",
    "attribute of an object of torch": "torch.ones(2).nothing",
    "attribute that a method sets": "Row('a').filled",
    "look-up of a local": "TABLE[answer]",
    "index of what was measured": "[][0]",
    "look-up of what torch returned": "TABLE[torch.ones(2).dtype]",
    "call of torch": "torch.nn.Linear()",
    "call of what its class has of torch": "Module(1, 2)",
    "call of a method of torch": "Module().zero_grad(1, 2, 3)",
    "unpacked arguments": "own(*(1, 2))",
    "unpacked keywords": "own(**{'a': 1})",
    "call of a function that is called otherwise": "called(own)",
    "what it raises itself": "(_ for _ in ()).throw(ValueError('on purpose'))",
    "value of a result": "float('x' if answer is None else answer)",
    "sum with a local": "answer + 1",
}


def _module(tmp_path: Path, source: str, name: str = "conformance.chapters.cast.test_it") -> types.ModuleType:
    """Return a module of that name in a file of its own."""
    path = tmp_path / f"source_{next(_NUMBERS)}.py"
    path.write_text(_HEADER + source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def _raised(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType, *arguments: Any) -> Exception:
    monkeypatch.setitem(sys.modules, module.__name__, module)
    try:
        module.check(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def _judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expression: str) -> Exception:
    source = f"def check(target, answer):\n    return {expression}\n"
    return _raised(monkeypatch, _module(tmp_path, source), _CPU, None)


@pytest.mark.parametrize("expression", _OWN.values(), ids=_OWN.keys())
def test_what_can_be_of_the_suite_alone_is_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expression: str
) -> None:
    assert blame.is_own(_judged(monkeypatch, tmp_path, expression))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not say which expression raised")
@pytest.mark.parametrize("expression", _OWN_EXPRESSIONS.values(), ids=_OWN_EXPRESSIONS.keys())
def test_what_constants_come_to_is_the_suites_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expression: str
) -> None:
    assert blame.is_own(_judged(monkeypatch, tmp_path, expression))


@pytest.mark.parametrize("expression", _DOUBTFUL.values(), ids=_DOUBTFUL.keys())
def test_what_torch_may_have_caused_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expression: str) -> None:
    assert not blame.is_own(_judged(monkeypatch, tmp_path, expression))


_HOOK = """
def check(answer):
    def hook(grad):
        return Row("a").nothing

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(hook)
    weight.sum().backward()
"""
_MODE = """
from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return Row("a").nothing


def check(answer):
    with Mode():
        torch.ones(2)
"""
_PACK = """
def check(answer):
    weight = torch.ones(2, requires_grad=True)

    def pack(x, more):
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        weight * weight
"""


@pytest.mark.parametrize("source", [_HOOK, _MODE, _PACK], ids=["hook", "mode", "hook of other arguments"])
def test_what_torch_calls_back_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    assert not blame.is_own(_raised(monkeypatch, _module(tmp_path, source), None))


def test_code_of_others_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = "def check():\n    return Row('a').nothing\n"

    assert not blame.is_own(_raised(monkeypatch, _module(tmp_path, source, "torch.amp.test_it")))


def test_file_of_the_suite_that_is_missing_is(tmp_path: Path) -> None:
    def opened(path: Path) -> OSError:
        with pytest.raises(FileNotFoundError) as caught:
            path.read_text()
        return caught.value

    assert blame.is_own(opened(Path(blame.__file__).with_name("nothing.toml")))
    assert not blame.is_own(opened(tmp_path / "nothing.toml"))


@pytest.mark.parametrize(
    ("expression", "has_place"),
    [("answer.nothing", True), ("float('x')", True), ("torch.mm(torch.ones(2), torch.ones(2))", False)],
)
def test_place_is_the_line_of_the_suite(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expression: str, has_place: bool
) -> None:
    line = len(_HEADER.splitlines()) + 2
    error = _judged(monkeypatch, tmp_path, expression)
    file = Path(error.__traceback__.tb_next.tb_frame.f_code.co_filename).name  # type: ignore[union-attr]

    assert blame.place(error) == (f"{file}:{line}" if has_place else None)


def test_place_in_the_suite_itself_names_it_from_the_package_on() -> None:
    with pytest.raises(AttributeError) as caught:
        blame._end(None)  # type: ignore[arg-type]

    assert re.fullmatch(r"conformance/harness/blame\.py:\d+", str(blame.place(caught.value)))


_CHECK = """
__name__ = "conformance.chapters.api.test_toy"

class Row:
    pass

@contract("AMP-API-001")
def test_it(case: Case) -> None:
    case.equal("one", {expression}, 1)
"""


@pytest.mark.parametrize(
    ("expression", "verdict", "reason"),
    [
        ("Row.size", "ERROR", "AttributeError: type object 'Row' has no attribute 'size'"),
        (
            "torch.amp.GradScaler('cpu').size",
            "FAIL",
            "raised AttributeError: 'GradScaler' object has no attribute 'size' (in the suite's own code, test_toy.py:",
        ),
        ("torch.ones(2) @ torch.ones(3)", "FAIL", "raised RuntimeError: "),
    ],
)
def test_verdict_of_a_case_and_its_reason(toy: Toy, expression: str, verdict: str, reason: str) -> None:
    toy.contract("AMP-API-001")
    toy.checks(_CHECK.format(expression=expression))

    (case,) = toy.run().report["cases"]

    assert case["verdict"] == verdict
    assert case["reason"].startswith(reason)
    assert ("in the suite's own code" in case["reason"]) == ("in the suite's own code" in reason)


def test_waivers_match_the_reason_without_its_place(toy: Toy, tmp_path: Path) -> None:
    words = "raised AttributeError: 'GradScaler' object has no attribute 'size'"
    (tmp_path / "known.toml").write_text(
        "[[waiver]]\ncontract = 'AMP-API-001'\ncases = ['*']\nreason = 'known'\nowner = 'us'\n"
        f"link = 'https://x.org'\nexpires = 2099-12-31\nevidence = [\"{words}\"]\n"
    )
    toy.contract("AMP-API-001")
    toy.checks(_CHECK.format(expression="torch.amp.GradScaler('cpu').size"))

    outcome = toy.run("--waivers", str(tmp_path / "known.toml"))

    assert outcome.verdicts() == {"AMP-API-001[it]": "WAIVED"}
