"""Check that compiled ops that write to a copy pass each gradient to the tensor that the number comes from."""

from __future__ import annotations

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .functional_writes import GROUPS, WRITES, gradients, program
from .support import compiling, dtypes_of, unlike

# The decomposition of these asks the code generator of the device, which one without compiled kernels does not have.
ASKING = ("masked_scatter",)


def _judge(case: Case, target: Target, names: tuple[str, ...], backend: str) -> None:
    """Compare the gradients of both tensors with eager's; those of a number that is written come back once."""
    for dtype in dtypes_of(case, target):
        run = program(names)
        expected = gradients(names, dtype, target.device, run)
        with compiling(case, backend):
            seen = gradients(names, dtype, target.device, torch.compile(run, backend=backend, fullgraph=True))
        for key, (copied, written, incoming) in seen.items():
            wanted = dict(zip(("copied", "written"), expected[key], strict=False))
            found = unlike({"copied": copied, "written": written}, wanted)
            case.equal(f"{key} in {dtype}: gradients that are not as in eager", found, [])
            if key.split(": ")[0] in WRITES:
                total = float(copied.double().sum() + written.double().sum())
                case.equal(f"{key} in {dtype}: sum of the gradients of both tensors", total, incoming)


@contract("AMP-COMPILE-088")
@pytest.mark.parametrize("group", GROUPS)
def test_decomposed_writes(case: Case, target: Target, group: str) -> None:
    without = ASKING if target.lacks("compiled kernels") else ()
    _judge(case, target, tuple(name for name in GROUPS[group] if name not in without), "aot_eager_decomp_partition")


@contract("AMP-COMPILE-088")
@needs("compiled kernels")
@pytest.mark.parametrize("group", [group if group == "parts" else deep("standard", group) for group in GROUPS])
def test_writes_of_inductor(case: Case, target: Target, group: str) -> None:
    _judge(case, target, GROUPS[group], "inductor")
