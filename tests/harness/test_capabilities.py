"""Capabilities that a device module declares to lack: cases that need one are UNSUPPORTED, and the report says why."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from conformance.harness import collection, targets
from conformance.harness.targets import CAPABILITIES
from tests.conftest import Toy

_CHECKS = """
from conformance.harness.check import needs

@contract("AMP-API-001")
@needs("pools of memory")
def test_pools(case: Case, target: Target) -> None:
    case.equal("one", 1, 1)

@contract("AMP-API-002")
def test_anything(case: Case, target: Target) -> None:
    case.equal("one", 1, 1)

@contract("AMP-API-003")
@needs("graphs")
def test_graphs(case: Case, target: Target) -> None:
    case.equal("one", 1, 1)
"""


@pytest.fixture
def suite(toy: Toy) -> Any:
    for number in (1, 2, 3):
        toy.contract(f"AMP-API-00{number}")
    toy.checks(_CHECKS)
    targets._probe.cache_clear()
    yield toy
    targets._probe.cache_clear()


def test_a_declared_lack_is_unsupported_with_its_reason(suite: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = {"pools of memory": "the allocator has one pool"}
    monkeypatch.setattr(torch.cpu, "amp_conformance_lacks", lacks, raising=False)

    outcome = suite.run("--device", "cpu")
    reasons = {case["contract"]: (case["verdict"], case["reason"]) for case in outcome.report["cases"]}

    assert reasons["AMP-API-001"][0] == "UNSUPPORTED"
    assert reasons["AMP-API-001"][1].endswith("lacks pools of memory: the allocator has one pool")
    assert reasons["AMP-API-002"] == ("PASS", "")
    assert outcome.report["header"]["targets"][0]["probe"]["lacks"] == ["pools of memory"]
    assert "which declares that it lacks pools of memory" in outcome.output


def test_what_a_module_has_no_functions_for_it_lacks(suite: Toy) -> None:
    outcome = suite.run("--device", "cpu")
    reasons = {case["contract"]: (case["verdict"], case["reason"]) for case in outcome.report["cases"]}

    assert reasons["AMP-API-001"] == ("PASS", "")
    assert reasons["AMP-API-003"][0] == "UNSUPPORTED"
    assert reasons["AMP-API-003"][1].endswith("lacks graphs: torch.cpu has no CUDAGraph")
    assert outcome.report["header"]["targets"][0]["probe"]["lacks"] == []


def test_a_device_whose_ops_get_storages_without_bytes_lacks_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    target = targets.Target("cpu", "cpu", None, False)
    assert target.lacks("storages") is None

    inner = Mock()
    inner.untyped_storage.return_value.nbytes.return_value = 0
    monkeypatch.setattr(torch, "_is_functional_tensor", lambda tensor: True)
    monkeypatch.setattr(torch, "_from_functional_tensor", lambda tensor: inner)

    assert target.lacks("storages") == "below its functionalization a tensor of 32 bytes has a storage of 0 bytes"


class _Opaque(torch.Tensor):
    pass


class _Flat(torch.Tensor):
    def __tensor_flatten__(self) -> Any: ...


@pytest.mark.parametrize(
    ("kind", "plain", "traced"),
    [
        (torch.Tensor, None, None),
        (_Flat, "its tensors are of _Flat, a subclass of torch.Tensor", None),
        (
            _Opaque,
            "its tensors are of _Opaque, a subclass of torch.Tensor",
            "torch.compile traces no _Opaque, which has no __tensor_flatten__",
        ),
    ],
)
def test_a_device_whose_tensors_are_of_a_subclass(
    monkeypatch: pytest.MonkeyPatch, kind: type[torch.Tensor], plain: str | None, traced: str | None
) -> None:
    made = torch.zeros(0).as_subclass(kind)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: made)

    target = targets.Target("cpu", "cpu", None, False)

    assert (target.lacks("plain tensors"), target.lacks("traced tensors")) == (plain, traced)
    assert targets.Target("fake:cuda", "cuda", None, True).lacks("plain tensors") is None


def test_every_check_of_compiled_code_needs_tensors_that_are_traced(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.contract("AMP-COMPILE-001")
    toy.checks(
        """
@contract("AMP-COMPILE-001")
def test_anything(case: Case, target: Target) -> None:
    case.equal("one", 1, 1)
"""
    )
    monkeypatch.setattr(torch.cpu, "amp_conformance_lacks", {"traced tensors": "no"}, raising=False)

    outcome = toy.run("--device", "cpu")

    assert [case["verdict"] for case in outcome.report["cases"]] == ["UNSUPPORTED"]


def test_a_device_without_a_module_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "device_module", lambda device_type: None)

    reason = targets.one_device_only(targets.Target("xla:0", "xla", 0, False))

    assert reason == "one xla device only; this needs two"


def test_a_declaration_of_what_is_no_capability_is_refused(suite: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "amp_conformance_lacks", {"unscaling": "it is slow"}, raising=False)

    outcome = suite.run("--device", "cpu")

    assert outcome.status == 4
    assert "lacks 'unscaling', which is no capability" in outcome.output
    assert outcome.report == {}


def test_checks_need_capabilities_that_there_are() -> None:
    named = {
        name
        for path in collection.CHAPTERS.glob("*/test_*.py")
        for arguments in re.findall(r"^@needs\((.*)\)$", path.read_text(), re.M)
        for name in re.findall(r'"([^"]+)"', arguments)
    }

    assert named
    assert named <= set(CAPABILITIES)


@pytest.mark.parametrize("flushes", [True, False])
def test_flushing_is_measured_on_a_device_of_a_third_party(monkeypatch: pytest.MonkeyPatch, flushes: bool) -> None:
    assert not targets.flushes_subnormals(torch.device("cpu"))
    monkeypatch.setattr(targets, "flushes_subnormals", lambda device: flushes)

    assert targets.Target("xla:0", "xla", 0, False).flushes_subnormals() == flushes
    assert not targets.Target("cpu", "cpu", None, False).flushes_subnormals()
