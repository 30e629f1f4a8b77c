"""Autocast kernels that an extension registered are told from torch's own."""

from __future__ import annotations

import pytest
import torch

from conformance.oracles.policy import kernels
from conformance.oracles.policy.kernels import foreign_sources
from conformance.report import reach


def test_kernel_that_replaces_torchs_is_counted() -> None:
    assert foreign_sources("cpu") == {}
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("mm", lambda *arguments: arguments[0], "AutocastCPU", allow_override=True)
        found = foreign_sources("cpu")
    finally:
        library._destroy()

    assert list(found.values()) == [1]
    assert foreign_sources("cpu") == {}


@pytest.mark.parametrize(
    ("file", "is_torchs"),
    [
        ("/pytorch/aten/src/ATen/autocast_mode.cpp", True),
        ("/pytorch/aten/src/ATen/cudnn/AutocastRNN.cpp", True),
        ("/vendor/csrc/cpu/autocast/autocast_mode.cpp", False),
    ],
)
def test_files_of_torch_are_known_by_their_folder(monkeypatch: pytest.MonkeyPatch, file: str, is_torchs: bool) -> None:
    dumped = f"AutocastCPU[alias]: registered at {file}:7 :: (Tensor) -> Tensor [ boxed ]\n"
    monkeypatch.setattr(kernels, "registered", lambda device_type: ["mm"])
    monkeypatch.setattr(torch._C, "_dispatch_dump", lambda overload: dumped)

    assert foreign_sources("cpu") == ({} if is_torchs else {file: 1})


def test_only_replaced_kernels_of_torchs_own_backends_are_said() -> None:
    kernels = {"cpu": {"csrc/autocast_mode.cpp": 10}, "npu": {"npu/autocast.cpp": 60}}

    assert list(reach.overridden(kernels, {"cpu", "cuda"})) == [
        "autocast kernels of cpu that are not torch's: 10 registered at csrc/autocast_mode.cpp"
    ]
