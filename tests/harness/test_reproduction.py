"""The program of a case: its parameters as source, and definitions in an order that runs without the suite."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness.check import Case
from conformance.harness.reproduction import definitions, literals, program, stand_ins
from conformance.harness.reproduction.definitions import CannotCopy, File
from conformance.harness.targets import Target, resolve
from tests.conftest import Toy
from tests.harness.test_case import _CONTRACT

# Of cases whose failures have no program: they train a user's own model within a time limit.
_TIMED = {"allowance", "now", "out_of_time", "reproduction"}


def test_the_case_of_a_program_has_what_checks_call() -> None:
    public = {name for name in dir(Case) if not name.startswith("_")}

    assert public - set(dir(stand_ins.Case)) == _TIMED


@dataclasses.dataclass(frozen=True)
class _Local:
    number: int


_VALUES: dict[str, Any] = {
    "numbers": (1, -2.5, True, None, 1 + 2j, "a'b", b"x"),
    "one": (1,),
    "infinite": [math.inf, -math.inf],
    "mappings": {"a": [1, 2], 3: {"b": ()}},
    "sets": {1, 2},
    "dtypes": [torch.float16, torch.strided, torch.channels_last, torch.device("cpu"), torch.Size([2, 3])],
    "functions of torch": [torch.mm, torch.nn.functional.linear, torch.optim.SGD, torch.Tensor.add_, torch.nn.Linear],
    "overloads": [torch.ops.aten.add.Tensor, torch.ops.aten.mm],
    "functions": [math.sqrt, len],
    "partial": slice(1, None, 2),
    "proxy": types.MappingProxyType({"lr": 0.1}),
}


def _run(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "<program>", "exec"), names)
    return names


@pytest.mark.parametrize("name", _VALUES)
def test_a_value_is_written_as_an_expression_that_makes_it(name: str) -> None:
    file = File()
    text = file.text(f"value = {literals.source(file, _VALUES[name])}", program.LONGEST)

    assert _run(text)["value"] == _VALUES[name]


def test_nan_and_partials_are_written() -> None:
    file = File()
    text = file.text(f"value = {literals.source(file, [math.nan, partial(torch.sum, dim=1)])}", program.LONGEST)
    number, call = _run(text)["value"]

    assert math.isnan(number)
    assert (call.func, call.keywords) == (torch.sum, {"dim": 1})


@pytest.mark.parametrize(
    "value", [_Local(3), Path("x"), object(), lambda: 3], ids=["class", "path", "object", "lambda"]
)
def test_what_is_of_no_file_of_the_suite_is_refused(value: Any) -> None:
    with pytest.raises(CannotCopy):
        literals.source(File(), value)


_SUITE = {
    "first": """
        import math
        from . import third
        from .second import SCALE as WIDTH, shared as theirs

        def shared(x):
            return x + WIDTH

        class Late:
            def half(self):
                return LATER.value / 2

            def __init__(self, value):
                self.value = value

        LATER = Late(6)

        def local(scale):
            SCALE = scale
            return SCALE + theirs(1) + shared(1) + third.doubled(SCALE) + LATER.half()

        def test_sum(case, scale):
            from .third import doubled as twice
            case.equal("the sum", local(scale) + twice(0) + math.floor(0.5), 17)
    """,
    "second": """
        SCALE = 2

        def shared(x):
            return SCALE * x
    """,
    "third": """
        def doubled(x):
            scale = 2
            return scale * x
    """,
}


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A check of a package whose modules use one another's names under other names, and each other's at import."""
    folder = tmp_path / "copied_suite"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for name, text in _SUITE.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(definitions, "PACKAGE", "copied_suite")
    definitions._module.cache_clear()
    definitions._is_module.cache_clear()
    import copied_suite.first  # type: ignore[import-not-found]

    made: Callable[..., None] = copied_suite.first.test_sum
    return made


def _written(check: Callable[..., None], target: Target | None = None, **given: Any) -> str:
    case = Case(_CONTRACT, level="quick", seed=3, substitutions={}, amp_dtypes=(torch.float16,))
    return program.written(
        check, title="a title\nin two lines", case=case, target=target, given=given, fixtures=(), seed=5, leaks=False
    )


def _exit(text: str, folder: Path) -> tuple[int, str]:
    path = folder / "case.py"
    path.write_text(text, encoding="utf-8")
    run = subprocess.run([sys.executable, "-I", str(path)], capture_output=True, text=True, cwd=folder, check=False)
    return run.returncode, run.stderr.strip().split("\n")[-1]


def test_a_program_runs_without_the_suite_and_judges_as_the_check_does(
    check: Callable[..., None], tmp_path: Path
) -> None:
    assert _exit(_written(check, scale=3), tmp_path) == (0, "")

    status, said = _exit(_written(check, scale=4), tmp_path)
    assert status == 1
    assert said == "AssertionError: the sum: 20.0, not 17"


def test_a_program_is_given_a_few_numbers_of_a_tensor(check: Callable[..., None], tmp_path: Path) -> None:
    text = _written(check, scale=torch.tensor(4.0, dtype=torch.float64))

    assert "torch.tensor(4.0, dtype=torch.float64)" in text
    assert _exit(text, tmp_path)[1].startswith("AssertionError: the sum: ")
    with pytest.raises(CannotCopy, match="Tensor"):
        _written(check, scale=torch.zeros(65))


def test_dollars_and_inner_docstrings_are_kept(toy: Toy) -> None:
    toy.contract("AMP-API-000")
    toy.checks(
        "@contract('AMP-API-000')\n"
        "def test_price(case: Case) -> None:\n"
        "    def inner() -> None:\n        'For $$3 or $device.'\n        return None\n"
        "    case.equal('docstring', inner.__doc__, '$')\n"
    )

    (case,) = toy.run("--contract", "AMP-API-000").report["cases"]

    assert case["verdict"] == "FAIL"
    assert "'For $$3 or $device.'" in case["snippet"].replace('"""', "'")


def test_a_program_begins_with_what_it_shows(check: Callable[..., None]) -> None:
    assert _written(check, scale=3).startswith("# a title\n# in two lines\nfrom __future__")


def test_a_program_first_imports_what_the_run_did(check: Callable[..., None]) -> None:
    """Behind the title and what a program must begin with, before torch makes anything of the device."""
    lines = program.importing(_written(check, scale=3), ["this_device", "its.rules"]).splitlines()

    assert lines[:4] == ["# a title", "# in two lines", "from __future__ import annotations", ""]
    assert lines[4:6] == ["import this_device", "import its.rules"]


def test_only_what_is_used_of_the_stand_ins_is_copied(check: Callable[..., None]) -> None:
    text = _written(check, resolve("fake:cuda"), scale=3)

    assert "def equal" in text
    assert "def raises" not in text
    assert "def autocast" not in text


def test_what_no_program_can_be_given_is_named(check: Callable[..., None]) -> None:
    with pytest.raises(CannotCopy, match="given as scale"):
        _written(check)


def test_a_program_that_would_be_too_long_is_refused(
    check: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "LONGEST", 100)

    with pytest.raises(CannotCopy, match="100 characters"):
        _written(check, scale=3)


def test_the_stand_ins_end_as_the_case_does() -> None:
    """The assertions of the stand-in and of the harness hold and fail alike."""
    ours = Case(_CONTRACT, level="standard", seed=0, substitutions={})
    theirs = stand_ins.Case("AMP-API-001", "standard", 0, ())
    nan = torch.tensor([math.nan, -0.0])
    calls: list[Callable[[Any], Any]] = [
        lambda case: case.equal("x", 1, 1),
        lambda case: case.equal("x", 1, True),
        lambda case: case.identical("x", nan, nan.clone()),
        lambda case: case.identical("x", nan, torch.tensor([math.nan, 0.0])),
        lambda case: case.identical("x", torch.tensor([1 + 2j]), torch.tensor([1 + 3j])),
        lambda case: case.identical("x", torch.ones(2), torch.ones(2, dtype=torch.float64)),
        lambda case: case.at_most("x", math.nan, 1.0),
        lambda case: case.at_most("x", 1.0, 1.0),
        lambda case: case.at_least("x", 0.5, 1.0),
        lambda case: case.between("x", 0.5, 0.0, 1.0),
        lambda case: case.between("x", 1.5, 0.0, 1.0),
        lambda case: case.true("x", False),
        lambda case: case.raises("x", ValueError, lambda: int("no"), names=["invalid"]),
        lambda case: case.raises("x", ValueError, lambda: int("no"), names=["half|float16"]),
        lambda case: case.raises("x", ValueError, lambda: None),
        lambda case: case.warns("x", FutureWarning, lambda: None),
        lambda case: case.note("x", 3),
    ]

    assert [_ending(call, ours) for call in calls] == [_ending(call, theirs) for call in calls]
    assert ours.samples(quick=1, standard=2, full=3) == theirs.samples(quick=1, standard=2, full=3)


def _ending(call: Callable[[Any], Any], case: Any) -> bool:
    try:
        call(case)
    except AssertionError:
        return False
    return True


def test_stand_in_lacks_the_types_that_the_target_lacks() -> None:
    """Types that no device is known to lack, such as integers, are not asked for when the program is written."""
    other = stand_ins.Target("cpu", "cpu", None, False, {"without": ["torch.float64"]})

    assert not other.computes_in(torch.float64)
    assert other.computes_in(torch.int8)


@pytest.mark.parametrize("name", ["cpu", "fake:cuda", "fake:xpu"])
def test_the_region_of_the_stand_in_is_that_of_the_target(name: str) -> None:
    target = resolve(name)
    kind = target.device_type
    other = stand_ins.Target(name, kind, target.index, target.is_fake, dict(target.probe))

    assert other.device == target.device
    for region in (target.autocast, other.autocast):
        before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        with region(torch.bfloat16, cache_enabled=False):
            inside = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
        assert inside == (True, torch.bfloat16, False)
        assert (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) == before
