"""Targets: what is probed, with small fakes in the place of the cards that this machine lacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.harness import targets
from conformance.harness.targets import Target
from conformance.oracles.policy.overloads import mode_of

_CUDA = Target("cuda:0", "cuda", 0, is_fake=False)


def _card(monkeypatch: pytest.MonkeyPatch, **properties: Any) -> None:
    """Let torch.cuda tell of a card with these properties."""
    targets._probe.cache_clear()
    monkeypatch.setattr(torch.version, "hip", properties.pop("hip", None))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))


@pytest.fixture(autouse=True)
def _forget_probes() -> Any:
    yield
    targets._probe.cache_clear()


@pytest.mark.parametrize(
    ("properties", "dtypes", "tensor_cores", "capability"),
    [
        ({"name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0}, ["fp16", "bf16"], True, "9.0"),
        ({"name": "NVIDIA A100-SXM4-40GB", "major": 8, "minor": 0}, ["fp16", "bf16"], True, "8.0"),
        # Volta and Turing only emulate bf16, and the GTX 16 line of Turing has no tensor cores.
        ({"name": "Tesla V100-SXM2-16GB", "major": 7, "minor": 0}, ["fp16"], True, "7.0"),
        ({"name": "NVIDIA GeForce GTX 1660 Ti", "major": 7, "minor": 5}, ["fp16"], False, "7.5"),
        ({"name": "Tesla P100-PCIE-16GB", "major": 6, "minor": 0}, ["fp16"], False, "6.0"),
    ],
)
def test_probe_of_nvidia_cards(
    monkeypatch: pytest.MonkeyPatch,
    properties: dict[str, Any],
    dtypes: list[str],
    tensor_cores: bool,
    capability: str,
) -> None:
    _card(monkeypatch, total_memory=1 << 34, **properties)

    probe = _CUDA.probe

    assert probe["amp_dtypes"] == dtypes
    assert probe["tensor_cores"] is tensor_cores
    assert probe["capability"] == capability
    assert probe["memory_bytes"] == 1 << 34
    assert _CUDA.supports(torch.bfloat16) is ("bf16" in dtypes)


@pytest.mark.parametrize(("arch", "matrix_units"), [("gfx942:sramecc+", True), ("gfx90a", True), ("gfx1030", False)])
def test_probe_of_amd_cards(monkeypatch: pytest.MonkeyPatch, arch: str, matrix_units: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *arguments, **options: True)
    _card(monkeypatch, hip="6.4", name="AMD Instinct", major=9, minor=4, gcnArchName=arch, total_memory=1 << 36)

    assert _CUDA.probe["tensor_cores"] is matrix_units
    assert _CUDA.probe["amp_dtypes"] == ["fp16", "bf16"]


def test_broken_kernel_does_not_pass_for_a_missing_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("a broken kernel")

    monkeypatch.setattr(torch, "matmul", broken)
    targets._probe.cache_clear()

    assert targets.resolve("cpu").probe["amp_dtypes"] == ["fp16", "bf16"]


def test_fake_target_makes_fake_tensors_of_its_device_under_its_autocast() -> None:
    target = targets.resolve("fake:cuda")

    with mode_of(target), target.autocast(torch.bfloat16):
        ones = torch.ones(2, 2, device=target.device)
        product = torch.mm(ones, ones)
        state = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))

    assert product.device.type == "cuda"
    assert product.dtype is torch.bfloat16
    assert state == (True, torch.bfloat16)
    assert not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_dtype("cuda") is torch.float16


@pytest.mark.parametrize("name", ["cpu", "fake:cuda"])
def test_region_is_left_on_an_exception(name: str) -> None:
    target = targets.resolve(name)

    with pytest.raises(KeyError), target.autocast(torch.bfloat16, cache_enabled=False):
        raise KeyError

    assert not torch.is_autocast_enabled(target.device_type)
    assert torch.is_autocast_cache_enabled()


def _broken(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("driver\nand more")


def test_smoke_names_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "matmul", _broken)

    assert targets.smoke(targets.resolve("cpu")) == "a matrix product fails on cpu: RuntimeError: driver"


def test_smoke_leaves_autocast_to_the_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", _broken)

    assert targets.smoke(targets.resolve("cpu")) is None


def test_smoke_notices_a_device_without_16_bit_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets.Target, "probe", {"amp_dtypes": []})

    assert "neither float16 nor bfloat16" in (targets.smoke(targets.resolve("cpu")) or "")


def test_smoke_notices_a_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "matmul", lambda a, b: torch.zeros(4, 4))

    assert "sums to 0.0, not to 64" in (targets.smoke(targets.resolve("cpu")) or "")


def test_smoke_passes_on_stock_torch() -> None:
    assert targets.smoke(targets.resolve("cpu")) is None


def test_device_without_a_module_is_tried_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(targets.TargetError, match=r"torch\.xla is not registered.*docs/backends\.md"):
        targets.resolve("xla")
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)

    assert targets.resolve("xla") == Target("xla:0", "xla", 0, is_fake=False)
