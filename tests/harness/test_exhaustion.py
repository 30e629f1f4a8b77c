"""Memory that runs out: the case is untestable, what it held is given back, and the cases after it run."""

from __future__ import annotations

import pytest

from tests.conftest import Toy

CHECKS = """
import weakref

HELD = []

@contract("AMP-SPEED-001")
def test_too_large(case: Case) -> None:
    case.true("begun", True)
    block = torch.ones(1000)
    HELD.append(weakref.ref(block))
    {raises}

@contract("AMP-SPEED-002")
def test_after(case: Case) -> None:
    case.equal("blocks of the case before still alive", [held() is not None for held in HELD], [False])
"""


@pytest.mark.parametrize(
    "raises",
    [
        'raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")',
        "torch.empty(1 << 60, dtype=torch.uint8)",
        'raise RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)")',
        'raise MemoryError("no memory")',
        'raise RuntimeError("CUDA error: out of memory")',
        'raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")',
        'raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")',
        'raise RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)")',
        'raise RuntimeError("Out of memory allocating 1152921504606846976 bytes.")',
        'raise RuntimeError("RESOURCE_EXHAUSTED: attempting to reserve 4.00G")',
    ],
    ids=["accelerator", "cpu", "mps", "host", "driver", "cublas", "cudnn", "xpu", "xla-cpu", "xla"],
)
def test_the_next_case_runs(toy: Toy, raises: str) -> None:
    toy.contract("AMP-SPEED-001")
    toy.contract("AMP-SPEED-002")
    toy.checks(CHECKS.format(raises=raises), "test_speed")

    outcome = toy.run()

    assert outcome.verdicts() == {"AMP-SPEED-001[too_large]": "UNTESTABLE", "AMP-SPEED-002[after]": "PASS"}
    assert "the device has too little memory" in outcome.report["cases"][0]["reason"]


def test_other_errors_are_failures(toy: Toy) -> None:
    toy.contract("AMP-SPEED-001")
    toy.contract("AMP-SPEED-002")
    toy.checks(CHECKS.format(raises='raise RuntimeError("out of luck")'), "test_speed")

    assert toy.run().verdicts()["AMP-SPEED-001[too_large]"] == "FAIL"
