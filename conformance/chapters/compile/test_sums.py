"""Check that compiled sums of 16-bit contributions, forward and backward, are as right as they can be."""

from __future__ import annotations

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS
from .repeated_sums import ADDED, BY_A_KERNEL, COUNT, SUMMED, program, sums
from .support import compiler, inductor

OPS = {**SUMMED, **ADDED}
# Compiled one by one: inductor's kernels add to 16 bits in memory, and so does a decomposition. Others leave it to
# eager's kernels, of which CUDA's add to 16 bits in memory too.
SCATTERED = ("gather", "take_along_dim", "scatter_add", "scatter_reduce", "index_select", "index_add")
GROUPS = {
    # Sums by index, over rows and over rows of a normalization: fewer, as a kernel takes seconds to compile.
    "few": ("embedding", "expand", "bias of layer_norm"),
    "others": tuple(name for name in OPS if name not in SCATTERED),
    **{name: (name,) for name in SCATTERED},
}


def judge(case: Case, target: Target, dtype: torch.dtype, backend: str, names: tuple[str, ...]) -> None:
    """Compare each sum with the exact one, or with eager's where its kernel makes it."""
    ops = {name: OPS[name] for name in names}
    run = program(ops)
    eager = sums(ops, target.device, dtype, run)
    torch._dynamo.reset()
    seen = sums(ops, target.device, dtype, torch.compile(run, backend=backend, fullgraph=True))
    rounding = FORMATS[dtype].unit_roundoff
    for name, theirs in eager.items():
        case.equal(f"type of {name}", seen[name].dtype, theirs.dtype)
        error, of_eager = (abs(float(each) / COUNT - 1) for each in (seen[name], theirs))
        by_eager = backend == "aot_eager" or name in BY_A_KERNEL or (name in SCATTERED and backend != "inductor")
        case.at_most(f"relative error of {name}", error, max(rounding, of_eager) if by_eager else rounding)


@contract("AMP-COMPILE-073")
@pytest.mark.parametrize("group", [name if name == "few" else deep("standard", name) for name in GROUPS])
@pytest.mark.parametrize("backend", [deep("standard", "aot_eager"), "aot_eager_decomp_partition"])
def test_sums_of_graphs(case: Case, target: Target, amp_dtype: torch.dtype, backend: str, group: str) -> None:
    with compiler(case):
        judge(case, target, amp_dtype, backend, GROUPS[group])


@contract("AMP-COMPILE-073")
@needs("compiled kernels")
@pytest.mark.parametrize("group", [deep("standard" if name == "few" else "full", name) for name in GROUPS])
def test_sums_of_kernels(case: Case, target: Target, amp_dtype: torch.dtype, group: str) -> None:
    with compiler(case), inductor(case):
        judge(case, target, amp_dtype, "inductor", GROUPS[group])
