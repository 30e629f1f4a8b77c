"""The header of a report has the autocast rules of the targets' backends, as a short observation shows them."""

from __future__ import annotations

import pytest
import torch

from conformance.harness import header, targets
from conformance.oracles.policy import overloads, surface
from tests.conftest import Toy
from tests.faults.breaking import dropped, exp_in_half

CUDA = targets.resolve("fake:cuda")


def _cuda() -> dict[str, tuple[str, ...]]:
    found = header.op_policy([CUDA])
    assert found is not None
    return dict(found["cuda"].overloads)


@pytest.mark.parametrize("backend", ["cpu", "cuda", "mps"])
def test_short_observation_gives_what_the_full_one_gives(backend: str) -> None:
    target = targets.resolve(f"fake:{backend}")
    amp_dtype = torch.get_autocast_dtype(backend)

    found = surface.rules(targets.resolve, backend)

    assert found["key"] == overloads.DISPATCH_KEYS[backend]
    assert found["amp_dtype"] == str(amp_dtype).removeprefix("torch.")
    assert {overload: policy for policy, every in found["overloads"].items() for overload in every} == {
        overload: overloads.observe(target, overload, amp_dtype).policy for overload in overloads.registered(backend)
    }


def test_rule_that_is_dropped_or_moved_is_seen() -> None:
    clean = _cuda()
    with dropped("exp", "AutocastCUDA"):
        without = _cuda()
    with exp_in_half():
        moved = _cuda()

    assert "exp" in clean["fp32"]
    assert not any("exp" in every for every in without.values())
    assert "exp" in moved["lower_precision"]
    assert "exp" not in moved["fp32"]
    assert _cuda() == clean


def test_only_backends_of_the_targets_are_read_each_once() -> None:
    found = header.op_policy([targets.resolve("cpu"), targets.resolve("fake:cpu")])

    assert found is not None
    assert list(found) == ["cpu"]


def test_torch_that_does_not_tell_its_rules_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(backend: str) -> frozenset[str]:
        raise AttributeError("module 'torch._C' has no attribute '_dispatch_get_registrations_for_dispatch_key'")

    monkeypatch.setattr(overloads, "registered", gone)

    assert header.op_policy([CUDA]) is None


def test_reading_leaves_the_state_of_autocast_as_it_was() -> None:
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()

    _cuda()

    assert before == (
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
    )


def test_report_of_a_run_has_the_rules_where_they_are_judged(toy: Toy) -> None:
    for id in ("AMP-API-001", "AMP-CAST-001"):
        toy.contract(id)
        source = f"@contract('{id}')\ndef test_a(case: Case) -> None:\n    case.equal('x', 1, 1)\n"
        toy.checks(source, f"test_{id[4:7].lower()}")

    outcome = toy.run()

    rules = {"key": "AutocastCPU", "amp_dtype": "bfloat16", "overloads": {"lower_precision": ["mm"]}}
    assert toy.run("--chapter", "api").report["header"]["op_policy"] is None
    assert outcome.report["header"]["op_policy"] == {"cpu": {**rules, "not_in_force": {}}}
