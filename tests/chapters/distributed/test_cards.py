"""Ranks on accelerators: each has its own device and the collectives of its type, and what cannot be is said.

Devices are `meta` tensors and stand-ins for torch's device modules: docs/untried.md says what waits for two cards.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from conformance.chapters.distributed import processes, support
from conformance.chapters.distributed.processes import Groups, Ranks
from conformance.chapters.distributed.programs import MODELS, Program
from conformance.harness.catalogue import load
from conformance.harness.check import Case
from conformance.harness.endings import Unsupported
from conformance.harness.targets import Target
from tests.chapters.distributed import ranks

pytestmark = pytest.mark.skipif(processes.lacking() is not None, reason="torch without gloo")

TARGET = Target("standin:0", "standin", 0, is_fake=False)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device module of two equal devices, whose collectives are gloo's; forked ranks have it too."""
    names = ["a card", "a card"]
    made = SimpleNamespace(
        names=names,
        chosen=None,
        device_count=lambda: len(names),
        get_device_properties=lambda index: SimpleNamespace(name=names[index]),
    )
    made.set_device = lambda index: setattr(made, "chosen", index)
    real = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", lambda kind=None: made if kind == "standin" else real(kind))
    monkeypatch.setitem(distributed.Backend.default_device_backend_map, "standin", "gloo")
    return made


def chosen() -> tuple[int, float]:
    """Return the device that this rank has chosen, and a sum over the ranks."""
    return int(torch.get_device_module("standin").chosen), ranks.total(1)


def _case(level: str = "quick") -> Case:
    contract, dtypes = load().contracts["AMP-DISTRIBUTED-001"], (torch.float16, torch.bfloat16)
    return Case(contract, level=level, seed=0, substitutions={}, amp_dtypes=dtypes)


def test_models_and_batches_lie_on_the_device_of_their_rank() -> None:
    on_cards = Program("perceptron", torch.bfloat16, device_type="cuda")
    assert [on_cards.device(rank) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    program = Program("perceptron", torch.bfloat16, device_type="meta")
    assert {one.device.type for one in program.built(index=1).parameters()} == {"meta"}
    batch = next(program.batches(1))[0]
    assert {batch.x.device.type, batch.goal.device.type, batch.blow.device.type} == {"meta"}


def test_each_rank_chooses_its_device(module: SimpleNamespace) -> None:
    group = Ranks(2, "fork", "standin")
    try:
        assert group.call(chosen) == [(0, 3.0), (1, 3.0)]
    finally:
        group.close()


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["a card"], "one standin device only; this needs two"),
        (["a card", "another card"], "the first two devices are not alike: a card, another card"),
        (["a card", "a card"], None),
    ],
)
def test_ranks_need_two_devices_of_a_kind(module: SimpleNamespace, names: list[str], reason: str | None) -> None:
    module.names[:] = names
    assert support.without_a_pair(TARGET) == reason
    assert support.without_a_pair(SimpleNamespace(device_type="cpu")) is None  # type: ignore[arg-type]


def test_devices_whose_module_tells_no_properties_are_of_a_kind(module: SimpleNamespace) -> None:
    del module.get_device_properties
    assert support.without_a_pair(TARGET) is None


def test_more_ranks_than_devices_are_unsupported(module: SimpleNamespace) -> None:
    with pytest.raises(Unsupported, match="2 devices of standin; this needs 4"):
        support.answers(_case(), Groups("standin"), 4, chosen)


@pytest.mark.parametrize(
    ("device_type", "words"),
    [("npu", "torch knows no collectives of npu"), ("xpu", "this torch was built without xccl")],
)
def test_a_torch_without_collectives_is_unsupported(device_type: str, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        support.answers(_case(), Groups(device_type), 2, chosen)


def test_programs_on_cards_have_no_attention(module: SimpleNamespace) -> None:
    found = support.programs(_case("full"), TARGET, "ddp_unused")
    assert {one.model for one in found} == set(MODELS) - {"attention"}
    assert {one.device_type for one in found} == {"standin"}
