"""Check that a region runs the same operations on huge tensors as on small ones."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.symbolic.blocks import Block, blocks, execute, resized
from ...oracles.trace.ops import Op, first_difference, stream_of

BLOCKS = blocks()
# New sizes for those of a block: tensors of more than 2^31 elements and products of more than 2^40 multiplications.
HUGE = {
    "tied": {7: 1 << 20, 11: 1 << 13},
    "op-losses": {17: 1 << 22, 19: 1 << 10, 23: 1 << 10},
    "op-baddbmm": {3: 1 << 20, 7: 1 << 8},
    "conv": {2: 1 << 24},
    "attention": {2: 1 << 12, 17: 1 << 10, 20: 1 << 12, 24: 1 << 11, 28: 1 << 11},
    "mlp": {64: 1 << 20, 128: 1 << 12, 256: 1 << 13, 250: (1 << 12) + 2},
    "lstm": {8: 1 << 20, 20: 1 << 11, 24: 1 << 12, 96: 1 << 14},
    "transformer": {4: 1 << 12, 32: 1 << 11, 64: 1 << 12, 256: 1 << 14},
    "residual": {4: 1 << 22},
}
DEPTHS = {"tied": "quick", "op-losses": "quick", "lstm": "full", "transformer": "full", "residual": "full"}


def _stream(target: Target, block: Block, dtype: torch.dtype) -> list[Op]:
    """Return the operations and their types, forward and backward, on tensors without elements."""

    def step() -> None:
        with target.autocast(dtype):
            result = execute(block, leaves)
        result.backward(torch.ones_like(result))

    leaves = {}
    with FakeTensorMode():
        for name, shape in {**block.inputs, **block.parameters}.items():
            kind = torch.int64 if name in block.integers else torch.float32
            leaves[name] = torch.zeros(shape, dtype=kind, device=target.device)
            leaves[name].requires_grad_(name in block.parameters)
        return stream_of(step).floating


@contract("AMP-SPEED-053")
@pytest.mark.parametrize("block", [deep(DEPTHS.get(name, "standard"), name) for name in HUGE])
def test_size_changes_no_operation(case: Case, target: Target, amp_dtype: torch.dtype, block: str) -> None:
    small = _stream(target, BLOCKS[block], amp_dtype)
    huge = _stream(target, resized(BLOCKS[block], HUGE[block]), amp_dtype)
    case.at_least("operations on small tensors", len(small), 1)
    case.equal("first operation on huge tensors that is another", first_difference(huge, small), None)
