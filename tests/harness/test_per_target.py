"""A check may be parametrised by what belongs to each of its targets, and may try the run's amp dtypes itself."""

from __future__ import annotations

from tests.conftest import Toy

_OF = (
    "from conformance.harness.check import per_target\n"
    "def of(target):\n"
    "    return {'cuda': ['mm', deep('standard', 'exp')], 'xpu': ['dot']}.get(target.device_type, [])\n"
    "@contract('AMP-CAST-001', on=('cpu', 'fake'))\n"
    "@per_target('op', of)\n"
)


def _suite(toy: Toy, body: str) -> None:
    toy.contract("AMP-CAST-001")
    toy.checks(_OF + "def test_it(case: Case, target: Target, op: str) -> None:\n" + f"    {body}\n")


def test_each_target_has_its_own_values(toy: Toy) -> None:
    _suite(toy, "case.equal(op, target.name, target.name)")

    outcome = toy.run("--device", "cpu", "--device", "fake:cuda", "--device", "fake:xpu", "--level", "quick")
    deeper = toy.run("--device", "fake:cuda", "--level", "standard", report="deeper")

    assert set(outcome.verdicts()) == {"AMP-CAST-001[it:fake-cuda-mm]", "AMP-CAST-001[it:fake-xpu-dot]"}
    assert {case["target"] for case in outcome.report["cases"]} == {"fake:cuda", "fake:xpu"}
    assert [case["parameters"] for case in deeper.report["cases"]] == [{"op": "exp"}, {"op": "mm"}]


def test_a_run_without_any_value_says_so(toy: Toy) -> None:
    _suite(toy, "case.equal(op, target.name, target.name)")

    outcome = toy.run("--device", "fake:mps")

    assert outcome.report["cases"] == []
    assert outcome.status != 0
    assert outcome.report["footer"]["contracts"]["AMP-CAST-001"]["reason"] == "has nothing to try on fake:mps"


def test_amp_dtypes_are_those_of_the_run(toy: Toy) -> None:
    _suite(toy, "case.equal('dtypes', [str(dtype) for dtype in case.amp_dtypes], ['torch.bfloat16'])")

    one = toy.run("--device", "fake:cuda", "--amp-dtype", "bf16", "--level", "quick")
    both = toy.run("--device", "fake:cuda", "--level", "quick", report="both")

    assert set(one.verdicts().values()) == {"PASS"}
    assert set(both.verdicts().values()) == {"FAIL"}
