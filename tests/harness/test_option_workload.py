"""--workload judges AMP on a model, data and optimizer of the user's own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from conformance.harness import catalogue
from conformance.workloads import user_workload
from tests.conftest import Toy

_GOOD = """
import torch
def build(device):
    model = torch.nn.Linear(4, 2).to(device)
    x, y = torch.randn(8, 4).to(device), torch.zeros(8, dtype=torch.long).to(device)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": torch.nn.functional.cross_entropy,
        "batches": [(x, y)],
    }
"""
_CHECK = """
@contract("AMP-API-001")
def test_own(case: Case, target: Target, own) -> None:
    case.equal("parameters", len(list(own.build(target.device).model.parameters())), 2)
"""


@pytest.fixture
def suite(toy: Toy) -> Toy:
    toy.contract("AMP-API-001", extra='needs = "workload"\n')
    toy.contract("AMP-API-002")
    toy.checks(_CHECK + "@contract('AMP-API-002')\ndef test_b(case: Case) -> None:\n    case.equal('x', 1, 1)\n")
    return toy


def _write(suite: Toy, *edits: tuple[str, str], name: str = "mine.py") -> None:
    source = _GOOD
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    (suite.path / name).write_text(source)


def test_runs_the_contracts_that_need_a_workload_alone(suite: Toy) -> None:
    _write(suite)

    outcome = suite.run("--workload", "mine.py:build", "--device", "cpu")

    assert outcome.status == 0
    assert list(outcome.verdicts()) == ["AMP-API-001[own:device]"]
    assert outcome.report["cases"][0]["parameters"] == {"workload": "mine.py:build"}
    assert "narrowed by --workload mine.py:build" in " ".join(outcome.output.split())


def test_runs_them_beside_what_else_is_named(suite: Toy) -> None:
    _write(suite)

    outcome = suite.run("--workload", "mine.py:build", "--chapter", "api")

    assert set(outcome.verdicts()) == {"AMP-API-001[own:device]", "AMP-API-002[b]"}


def test_without_it_they_are_no_part_of_the_run(suite: Toy) -> None:
    outcome = suite.run()

    assert list(outcome.report["footer"]["contracts"]) == ["AMP-API-002"]


def test_a_contract_that_needs_one_is_refused_without(suite: Toy) -> None:
    outcome = suite.run("--contract", "AMP-API-001")

    assert outcome.status == 4
    assert "add --workload MODULE:FUNCTION" in outcome.output


def test_fake_targets_alone_are_refused(suite: Toy) -> None:
    _write(suite)

    outcome = suite.run("--workload", "mine.py:build", "--device", "fake:cuda")

    assert outcome.status == 4
    assert "name a real --device" in outcome.output


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ([("import torch", "import torch, no_such_package")], "cannot be imported: ModuleNotFoundError"),
        ([("import torch", "import torch; raise SystemExit('bye')")], "cannot be imported: SystemExit: bye"),
        ([("import torch", "import torch; def")], "cannot be imported: SyntaxError"),
        ([("def build", "def biuld")], "has no build; did you mean biuld"),
        ([("def build(device):", "build = 3\ndef other(device):")], "build is a int, not a function"),
        ([("def build(device)", "def build()")], "the function raised TypeError"),
        ([("    return {", "    return [model]\n    return {")], "returned a list; it must return a dict with model"),
        ([('"loss":', '"losses":')], "lacks loss"),
        ([('"loss":', '"epochs": 3, "loss":')], "unknown key 'epochs'"),
        ([('"model": model', '"model": 7')], "model is a int, not a torch.nn.Module"),
        ([('"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)', '"optimizer": None')], "optimizer is a None"),
        ([("torch.nn.functional.cross_entropy", "None")], "loss is a NoneType"),
        ([('"batches": [(x, y)]', '"batches": []')], "batches is empty"),
        ([('"batches": [(x, y)]', '"batches": 4')], "batches is a int"),
        ([('"batches": [(x, y)]', '"batches": [x]')], "batch 0 is a Tensor, not a pair"),
        ([('"batches": [(x, y)]', '"batches": [(x, y)], "clip": -1')], "clip is -1, not a positive number"),
        ([("torch.nn.Linear(4, 2)", "torch.nn.Linear(4, 2).requires_grad_(False)")], "no parameters that require"),
        ([(".to(device)\n    x,", ".to('meta')\n    x,")], "weight of the model is on meta, not on cpu"),
        ([("x, y = torch.randn(8, 4).to(device)", "x, y = torch.randn(8, 4).to('meta')")], "of batch 0 is on meta"),
        ([("torch.nn.Linear(4, 2)", "torch.nn.Linear(4, 2).half()")], "is float16; AMP trains float32 weights"),
        ([("SGD(model.parameters()", "SGD([torch.zeros(1)]")], "the optimizer steps none of the model's parameters"),
        ([("torch.randn(8, 4)", "torch.full((8, 4), float('nan'))")], "the loss is nan with batch 0, in fp32"),
        ([("torch.nn.functional.cross_entropy", "lambda a, b: a")], "the loss has the shape (8, 2)"),
        ([("torch.nn.functional.cross_entropy", "lambda a, b: a.detach().sum()")], "the loss has no gradient"),
        ([("torch.nn.functional.cross_entropy", "lambda a, b: (a * 0).sum().sqrt()")], "of weight is not finite"),
        ([("torch.randn(8, 4)", "torch.randn(8, 5)")], "the forward pass raised RuntimeError"),
        ([('"batches": [(x, y)]', '"batches": [(x, y, y)]')], "batch 0 has 3 parts, not two"),
        (
            [('"batches": [(x, y)]', '"batches": (1 / 0 for _ in range(3))')],
            "the batches raised ZeroDivisionError: division by zero (mine.py, line ",
        ),
        ([('"batches": [(x, y)]', '"batches": [(x, y), (x / 0, y)]')], "the loss is nan with batch 1, in fp32"),
        ([('"batches": [(x, y)]', '"batches": [(x, y), (x[:, :3], y)]')], "the forward pass raised RuntimeError"),
        ([("SGD(model.parameters(), lr=0.1)", "LBFGS(model.parameters())")], "optimizer.step() raised TypeError"),
        ([("torch.nn.Linear(4, 2)", "torch.nn.LazyLinear(2)")], "weight of the model is not initialised"),
        (
            [("def build(device):", "KEPT = torch.nn.Linear(4, 2)\ndef build(device):"),
             ("model = torch.nn.Linear(4, 2)", "model = KEPT")],
            "two calls give models that share weights (weight)",
        ),
        (
            [("model = ", "model = torch.nn.init.normal_; g = torch.Generator(); g.seed(); model = "),
             ("    x, y", "    torch.nn.init.normal_(model.weight, generator=g)\n    x, y")],
            "two calls with the same seed give other weights (weight)",
        ),
        ([("torch.randn(8, 4)", "torch.empty(8, 4).normal_(generator=(g := torch.Generator(), g.seed())[0])")],
         "two calls with the same seed give other batches"),
    ],
)  # fmt: skip
def test_a_workload_that_cannot_be_used_gets_one_line(suite: Toy, edits: list[tuple[str, str]], said: str) -> None:
    _write(suite, *edits)

    outcome = suite.run("--workload", "mine.py:build", "--device", "cpu")

    line = next(line for line in outcome.output.splitlines() if "--workload mine.py:build" in line)
    assert outcome.status == 4
    assert said in line
    assert "Traceback" not in outcome.output
    assert outcome.report == {}


@pytest.mark.parametrize("name", ["mine", "mine:", ":build", ""])
def test_a_name_that_names_nothing_is_refused(suite: Toy, name: str) -> None:
    outcome = suite.run("--workload", name)

    assert outcome.status == 4
    assert "module:function" in outcome.output


def test_sparse_gradients_can_be_judged(suite: Toy) -> None:
    _write(
        suite,
        ("torch.nn.Linear(4, 2)", "torch.nn.EmbeddingBag(9, 2, sparse=True, mode='sum')"),
        ("torch.randn(8, 4)", "torch.randint(0, 9, (8, 4))"),
    )
    suite.checks(_CHECK.replace("2)", "1)"))

    assert suite.run("--workload", "mine.py:build", "--device", "cpu").status == 0


def test_a_file_finds_its_neighbours_and_hides_no_module(suite: Toy) -> None:
    (suite.path / "models").mkdir()
    (suite.path / "models" / "helper.py").write_text("import torch, random\nassert random.random() < 1\n")
    _write(suite, ("import torch", "import torch, helper"), name="models/random.py")

    assert suite.run("--workload", "models/random.py:build", "--device", "cpu").status == 0


def test_a_module_is_found_from_where_the_run_starts(suite: Toy) -> None:
    _write(suite, name="a_module_of_mine.py")

    assert suite.run("--workload", "a_module_of_mine:build", "--device", "cpu").status == 0


def test_inputs_go_by_position_or_by_keyword() -> None:
    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.weight * (left - right)

    called = user_workload.Called(Pair())
    three, one = torch.tensor(3.0), torch.tensor(1.0)

    assert float(called((three, one))) == 2.0
    assert float(called({"right": three, "left": one})) == -2.0


def test_the_same_seed_builds_the_same(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_GOOD)
    builder = user_workload.Builder("mine.py:build", user_workload.load("mine.py:build", tmp_path))
    first, again, other = (builder.build(torch.device("cpu"), seed) for seed in (1, 1, 2))

    assert torch.equal(first.model.weight, again.model.weight)
    assert not torch.equal(first.model.weight, other.model.weight)


def test_checks_and_contracts_agree_on_what_they_need(root: Path) -> None:
    asks = {
        node.decorator_list[0].args[0].value  # type: ignore[attr-defined]
        for path in (root / "conformance" / "chapters").glob("*/test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.decorator_list and "own" in [arg.arg for arg in node.args.args]
        if node.name.startswith("test_")
    }

    contracts = catalogue.load().contracts
    assert asks == {id for id, contract in contracts.items() if contract.needs == "workload"}


def test_cause_of_an_exception_is_said_with_its_line(suite: Toy) -> None:
    code = (
        "    try:\n        {}['weights']\n    except KeyError as error:\n        raise OSError('no model') from error\n"
    )
    _write(suite, ("    return {", f"{code}    return {{"))

    outcome = suite.run("--workload", "mine.py:build", "--device", "cpu")

    line = next(line for line in outcome.output.splitlines() if "--workload mine.py:build" in line)
    assert "the function raised OSError: no model, caused by KeyError: 'weights' (mine.py, line " in line
