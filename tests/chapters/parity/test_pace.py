"""The bound on AMP's pace: the scatter of fp32 runs whose initial weights were moved as casts move them."""

from __future__ import annotations

import importlib
import statistics
from typing import Any

import pytest
import torch

from conformance.workloads.training import train

CPU = torch.device("cpu")
STEPS = {"P1": (1, 4), "P2": (20, 60)}


def pace(parity: Any, program: str, unit: float, seed: int) -> float:
    """Per cent of the learning rate by which an fp32 run from moved weights keeps another pace."""
    rng = torch.Generator().manual_seed(seed)
    first, last = STEPS[program]

    def losses(rate: float, moved: float) -> list[float]:
        work = parity.PROGRAMS[program](CPU, parity._fork(rng), lr=rate)
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in work.model.parameters():
                parameter.mul_(1 + moved * (2 * torch.rand(parameter.shape, generator=noise) - 1))
        return train(work, last, torch.enable_grad, torch.amp.GradScaler("cpu", enabled=False))

    plain, moved, faster = losses(parity.LR, 0.0), losses(parity.LR, unit), losses(1.02 * parity.LR, 0.0)
    return float(2 * parity._shift(moved, plain, first, last) / parity._shift(faster, plain, first, last))


@pytest.mark.parametrize("program", STEPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_weights_keep_the_pace(program: str, dtype: torch.dtype) -> None:
    parity = importlib.import_module("conformance.chapters.parity.test_parity")
    unit = torch.finfo(dtype).eps / 2
    paces = [pace(parity, program, unit, seed) for seed in range(6 if program == "P2" else 2)]

    assert statistics.pstdev(paces) < parity.PACES[program] / 8
    assert max(map(abs, paces)) < parity.PACES[program] / 3
