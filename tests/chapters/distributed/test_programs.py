"""The programs that ways are tried on: the seed chooses them, and each seed leaves some."""

from __future__ import annotations

import pytest
import torch

from conformance.chapters.distributed.support import programs
from conformance.harness import catalogue
from conformance.harness.check import Case
from conformance.harness.targets import resolve

DTYPES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("level", ["quick", "standard", "full"])
@pytest.mark.parametrize("way", ["fsdp1_mixed", "fsdp2_mixed", "ddp"])
def test_each_seed_leaves_programs_without_a_model(level: str, way: str) -> None:
    contract, target = catalogue.load().contracts["AMP-DISTRIBUTED-007"], resolve("cpu")
    every = set()
    for seed in range(16):
        case = Case(contract, level=level, seed=seed, substitutions={}, amp_dtypes=DTYPES)
        models = [program.model for program in programs(case, target, way, ["island"])]
        assert models
        assert "island" not in models
        every.update(models)

    assert len(every) > 2
