"""Models of libraries as docs/own-workloads.md plugs them in; skipped without the library (`tox -e workloads`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from conformance.workloads import user_workload
from conformance.workloads.user_workload import Builder
from tests import reports
from tests.faults.campaigns.campaign import PLAIN, modules
from tests.workloads import library_models

CONTRACT = "AMP-PARITY-051"


def _snippets(root: Path) -> list[str]:
    """Return the functions of the page: of a plain module, of transformers, of lightning."""
    page = (root / "docs" / "own-workloads.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


@pytest.mark.parametrize(("number", "library"), [(1, "transformers"), (2, "lightning")])
def test_function_of_the_page_is_judged(number: int, library: str, root: Path, pytester: pytest.Pytester) -> None:
    pytest.importorskip(library)
    (pytester.path / "mine.py").write_text(_snippets(root)[number])

    pytester.runpytest_inprocess(
        *modules((CONTRACT,)),
        *("-p", "no:randomly", *PLAIN, "--workload", "mine.py:build", "--device", "cpu", "--level", "quick"),
        *("--contract", CONTRACT, "--report", "report"),
    )

    report = reports.written(pytester.path / "report" / "report.json")
    assert [case["verdict"] for case in report["cases"]] == ["PASS", "PASS"]


@pytest.mark.parametrize(
    ("name", "library"),
    [("gpt2_tiny", "transformers"), ("bert_tiny", "transformers"), ("lightning_module", "lightning")],
)
def test_model_of_a_library_can_be_used(name: str, library: str) -> None:
    pytest.importorskip(library)
    builder, cpu = Builder(name, getattr(library_models, name)), torch.device("cpu")

    user_workload.probe(builder, cpu, 5.0)

    assert builder.raises(cpu, torch.bfloat16) == ""
    assert not builder.repeats(cpu, 0, 1)
