"""--device names targets outright; a device that is not there gets one clear line."""

from __future__ import annotations

import pytest
import torch

from conformance.harness.targets import FAKE_DEVICE_TYPES
from tests.conftest import Toy

_CHECK = "@contract('AMP-API-001', on=('real', 'fake'))\ndef test_it(case: Case, target: Target) -> None:\n"


def _suite(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(_CHECK + "    case.note('device', str(target.device)); case.true('ran', True)\n")


def test_default_is_the_cpu_and_each_fake_accelerator(toy: Toy) -> None:
    _suite(toy)

    outcome = toy.run()

    assert {case["id"]: case["target"] for case in outcome.report["cases"]} == {
        "AMP-API-001[it:device]": "cpu",
        **{f"AMP-API-001[it:fake-{kind}]": f"fake:{kind}" for kind in FAKE_DEVICE_TYPES if kind != "cpu"},
    }


def test_repeats_and_drops_repetitions(toy: Toy) -> None:
    _suite(toy)

    outcome = toy.run("--device", "fake:xpu", "--device", "cpu", "--device", "CPU")

    assert [target["name"] for target in outcome.report["header"]["targets"]] == ["fake:xpu", "cpu"]
    assert set(outcome.verdicts()) == {"AMP-API-001[it:device]", "AMP-API-001[it:fake-xpu]"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("quantum", "unknown device 'quantum'"),
        ("fake:quantum", "unknown fake target 'fake:quantum'"),
        ("cpu:3", "there is no 'cpu:3'"),
        ("", "unknown device ''"),
    ],
)
def test_unknown_device_is_refused_with_what_is_there(toy: Toy, name: str, said: str) -> None:
    _suite(toy)

    outcome = toy.run("--device", name)

    assert outcome.status == 4
    assert said in outcome.output
    assert "fake:cuda" in outcome.output
    assert "Traceback" not in outcome.output
    assert not (toy.path / "report").exists()


def test_index_beyond_the_last_device_is_refused(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    _suite(toy)

    outcome = toy.run("--device", "cuda:7")

    assert outcome.status == 4
    assert "there is no 'cuda:7': torch finds 2 cuda device(s)" in outcome.output


def test_a_device_type_without_hardware_is_refused(toy: Toy) -> None:
    _suite(toy)

    outcome = toy.run("--device", "xpu")

    assert outcome.status == 4
    assert "torch finds no xpu device on this machine" in outcome.output


def test_contract_that_no_target_fits_is_reported(toy: Toy) -> None:
    _suite(toy)
    toy.contract("AMP-API-002")
    toy.checks(
        "@contract('AMP-API-002', on='accelerator')\ndef test_b(case: Case, target: Target) -> None:\n"
        "    case.equal('x', 1, 1)\n",
        name="test_other",
    )

    outcome = toy.run()

    row = outcome.report["footer"]["contracts"]["AMP-API-002"]
    assert row["verdict"] is None
    assert "accelerator only; this run has cpu, fake:cuda" in row["reason"]
    assert "AMP-API-002" in outcome.output


def test_device_that_fails_the_smoke_stage_ends_the_run(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    _suite(toy)
    real = torch.matmul

    def broken(*arguments: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(torch, "matmul", broken)
    outcome = toy.run()
    monkeypatch.setattr(torch, "matmul", real)

    assert outcome.status == 1
    assert "a matrix product fails on cpu: RuntimeError: no kernel image is available" in outcome.output
    assert outcome.report["cases"] == []
    assert outcome.report["footer"]["overall"] == "NOT CONFORMANT"
    assert outcome.report["footer"]["exit_status"] == 1
