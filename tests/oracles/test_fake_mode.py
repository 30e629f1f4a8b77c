"""The fake mode that remembers: what torch's own would give, whatever was asked before, with autocast run each time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from conformance.harness.targets import FAKE_DEVICE_TYPES, Target, resolve
from conformance.oracles.policy import overloads
from conformance.oracles.policy.fake_mode import CachedFakeMode
from conformance.oracles.policy.overload_calls import CALLS
from tests.faults.breaking import dropped

CUDA = torch.device("cuda", 0)
FAKE = [f"fake:{kind}" for kind in FAKE_DEVICE_TYPES]


def _seen(target: Target, overload: str, mode: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> list[overloads.Seen]:
    """Calls of an overload with float32, the amp dtype and both, in a region and outside, with tensors of `mode`."""
    monkeypatch.setattr(overloads, "fake_mode", lambda: mode)
    amp_dtype = torch.get_autocast_dtype(target.device_type)
    calls = overloads.calls(target, overload, amp_dtype, ("high", "low", "low first")).values()
    return [overloads.run(target, call, dtype) for call in calls for dtype in (amp_dtype, None)]


@pytest.mark.parametrize("name", FAKE)
def test_overloads_give_what_they_give_in_torchs_own_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, own, cached = resolve(name), FakeTensorMode(), CachedFakeMode()

    for overload in CALLS.keys() & overloads.known(target.device_type).keys():
        wanted = _seen(target, overload, own, monkeypatch)
        for _ in range(2):  # asked, then remembered
            for seen, one in zip(_seen(target, overload, cached, monkeypatch), wanted, strict=True):
                assert overloads.difference(overloads.Promise([], one), seen) is None, overload
                assert {leaf.device for leaf in seen.outputs} <= {target.device}, overload


def test_autocast_runs_though_the_op_is_remembered() -> None:
    target = resolve("fake:cuda")
    call = overloads.sample(target, "mm", [torch.float32])

    def types() -> list[torch.dtype]:
        return [leaf.dtype for leaf in overloads.run(target, call, torch.float16).outputs]

    assert types() == [torch.float16]
    with dropped("mm", "AutocastCUDA"):
        assert types() == [torch.float32]
    assert types() == [torch.float16]


def test_views_share_their_storage_and_remember_their_place() -> None:
    with CachedFakeMode():
        for _ in range(2):
            x = torch.empty(4, 6, device=CUDA)
            halves = x.split(3, dim=1)

            assert [half.storage_offset() for half in halves] == [0, 3]
            assert {half.untyped_storage()._cdata for half in halves} == {x.untyped_storage()._cdata}
            assert halves[1].as_strided((2,), (6,), 9).storage_offset() == 9


def test_what_is_written_to_is_returned() -> None:
    with CachedFakeMode():
        for _ in range(2):
            x = torch.empty(3, device=CUDA)
            out = torch.empty(3, device=CUDA)

            assert x.exp_() is x
            assert torch.exp(x, out=out) is out
            assert x.unsqueeze_(0).shape == (1, 3)


def test_a_result_of_integers_is_not_one_of_floats() -> None:
    with CachedFakeMode():
        x = torch.empty(3, dtype=torch.int64, device=CUDA)

        assert [(x * factor).dtype for factor in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]


@pytest.mark.parametrize("call", [torch.Tensor.item, lambda x: torch.equal(x, x)], ids=["item", "equal"])
def test_what_depends_on_values_is_refused(call: Callable[[torch.Tensor], object]) -> None:
    with CachedFakeMode():
        x = torch.empty(1, device=CUDA)

        for _ in range(2):
            with pytest.raises(DataDependentOutputException):
                call(x)


def test_tensors_of_two_devices_are_refused() -> None:
    with CachedFakeMode():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="device"):
                torch.mm(torch.empty(2, 2, device=CUDA), torch.empty(2, 2, device="cpu"))


def test_a_wrong_call_is_refused_each_time() -> None:
    with CachedFakeMode():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broadcast"):
                torch.empty(2, 3, device=CUDA) + torch.empty(2, 4, device=CUDA)
