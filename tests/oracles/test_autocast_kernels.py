"""Autocast kernels that an extension registered are told from torch's own."""

from __future__ import annotations

import torch

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


def test_only_replaced_kernels_of_torchs_own_backends_are_said() -> None:
    kernels = {"cpu": {"csrc/autocast_mode.cpp": 10}, "npu": {"npu/autocast.cpp": 60}}

    assert list(reach.overridden(kernels, {"cpu", "cuda"})) == [
        "autocast kernels of cpu that are not torch's: 10 registered at csrc/autocast_mode.cpp"
    ]
