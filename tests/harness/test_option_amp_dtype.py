"""--amp-dtype narrows the cases to one low-precision dtype."""

from __future__ import annotations

import pytest
import torch

from conformance.harness import targets
from tests.conftest import Toy


def _suite(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.contract("AMP-API-002")
    toy.checks(
        "@contract('AMP-API-001')\n"
        "def test_a(case: Case, target: Target, amp_dtype: torch.dtype) -> None:\n"
        "    case.true('dtype', amp_dtype is not None, str(amp_dtype))\n"
        "@contract('AMP-API-002', dtypes=('fp16',))\n"
        "def test_b(case: Case) -> None:\n"
        "    case.equal('about', 'fp16', 'fp16')\n"
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((), {"a:device-fp16", "a:device-bf16", "b"}),
        (("--amp-dtype", "both"), {"a:device-fp16", "a:device-bf16", "b"}),
        (("--amp-dtype", "fp16"), {"a:device-fp16", "b"}),
        (("--amp-dtype", "bf16"), {"a:device-bf16"}),
    ],
)
def test_narrows_the_cases(toy: Toy, asked: tuple[str, ...], expected: set[str]) -> None:
    _suite(toy)

    outcome = toy.run(*asked)

    assert {id.split("[")[1].rstrip("]") for id in outcome.verdicts()} == expected


def test_dtype_that_the_target_lacks_is_unsupported(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets.Target, "supports", lambda self, dtype: dtype is torch.float16)
    _suite(toy)

    outcome = toy.run()

    assert outcome.verdicts()["AMP-API-001[a:device-bf16]"] == "UNSUPPORTED"
    assert outcome.verdicts()["AMP-API-001[a:device-fp16]"] == "PASS"
    assert "does not compute natively in torch.bfloat16" in " ".join(outcome.output.split())


def test_other_dtypes_are_refused(toy: Toy) -> None:
    outcome = toy.run("--amp-dtype", "fp8")

    assert outcome.status == 4
    assert "fp8" in outcome.output
