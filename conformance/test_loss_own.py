"""The loss of a model of the user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from conformance.harness.check import Case, contract
from conformance.harness.targets import Target
from conformance.oracles.float_formats import FORMATS
from conformance.workloads.own import Builder


@contract("AMP-LOSS-018")
def test_the_loss_is_fp32(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    work, unit = own.build(target.device, case.seed).workload(), FORMATS[amp_dtype].unit_roundoff
    worst = 0.0
    with torch.no_grad():
        for inputs, expected in work.batches[: case.samples(quick=8, standard=16, full=64)]:
            with target.autocast(amp_dtype):
                output = work.model(inputs)
                seen = work.loss(output, expected)
            case.equal("dtype of the loss", seen.dtype, torch.float32)
            wide = float(work.loss(tree_map(_widened, output), expected))
            worst = max(worst, abs(float(seen) - wide) / max(abs(wide), torch.finfo(torch.float32).tiny))
    # Rounded to 16 bit a number is off by 0.2 u on average; what fp32 sums and functions lose is far less.
    case.at_most("largest difference to the loss of the output in fp32, relative", worst / unit, 0.1, "u")


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
