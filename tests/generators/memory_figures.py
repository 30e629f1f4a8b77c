"""The bytes of a training step, predicted and observed, for each workload: writes docs/evidence/memory.md."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from tabulate import tabulate

from conformance.chapters.memory.step_memory import StepBytes, step_bytes
from conformance.measure.storages import PeakStorages, SavedForBackward, without_bookkeeping
from conformance.oracles.symbolic.blocks import Block, blocks, chain, execute, predict, tensors

WORKLOADS = {
    "perceptron, 64 rows": blocks()["mlp"],
    "residual convolutions, batch norm": blocks()["residual"],
    "transformer block, fused attention": blocks()["transformer"],
    "language model, tied embedding": blocks()["language"],
    "LSTM, two steps": blocks()["lstm"],
    "upsampling convolutions, group norm": blocks()["upsampler"],
    "6 Linear of 16, 96 rows": chain(96, 16, 6),
    "4 Linear of 16, 32 rows": chain(32, 16, 4),
    "4 Linear of 32, 8 rows": chain(8, 32, 4),
}
ARMS = {"fp32": None, "AMP": torch.bfloat16}

_HEAD = """# Memory of a training step: predicted and observed

Written by `python -m tests.generators.memory_figures -o docs/evidence/memory.md` on {day} with torch {torch}, on
the CPU in bfloat16 (float16 gives the same bytes). The checks are those of [the memory chapter](../contracts.md):
AMP-MEMORY-014 to -018 hold these figures on any device, AMP-MEMORY-013 and -037 on accelerators by the allocator's own
counters, at real sizes.

## How bytes are predicted

`conformance/oracles/symbolic/tensors.py` evaluates a network symbolically, operation by operation. The op reference
gives the casts of each, the rule of the weight cache (fp32 leaves that require a gradient, one copy per region) the
shared copies, and `derivatives.yaml` what each saves for backward. Nothing is measured, so that a fault of autocast
cannot affect it. The bytes in addition to weights, optimizer state and inputs are then

| when | what is alive |
|---|---|
| end of the forward pass, in the region | tensors saved for backward, the region's weight copies, the loss |
| after the region | the same without the copies that backward does not need |
| after backward | the fp32 gradients |

With P elements of weights, P_low of them used by lower-precision operations, and A_low and A_32 elements saved for
backward in 16 bits and in fp32, that is 4P(2 + k) + 4A in fp32 and 4P(2 + k) + 2P_low + 2A_low + 4A_32 under AMP, k
being the optimizer's moments: **AMP saves memory where A_low exceeds P_low**, and costs memory below; a copy of an fp32
input counts among P_low. The peak lies between what is alive between two operations, and that plus the gradients which
the running operation makes and one more of the largest of them. With an optimizer, its state of 4Pk bytes is added to
all of that, and the peak of a step is the larger of that peak and of the gradients with the optimizer's temporaries for
the weight being updated: none for SGD with momentum, three of the largest weight for Adam (`foreach=False`).

## How bytes are observed

A weak reference follows each storage that an operation returns until nothing holds it
(`conformance/measure/storages.py`). This is exact, on every device, independent of the device's allocator, and
excludes what a kernel allocates and frees inside one operation. `torch.autograd.graph.saved_tensors_hooks` gives the
bytes saved for backward. On an accelerator the allocator's `requested_bytes` are checked as well, with an allowance for
what one matrix product of that size takes in addition to its tensors outside of any region, the workspaces of libraries
(108 MiB at most). The count excludes what libraries reserve for themselves (uint8) and the states of random number
generators.

Each operation of an accelerator (on the CPU: attention, dropout and normalizations, which have several kernels) is
first run alone, outside of regions. If it saves other tensors than the formula predicts in fp32 too, the region must
hold the same as with manual casts, and the case is then UNSUPPORTED. If it does so in 16 bits alone, more bytes or
wider ones are a failure; only attention that is not fused in 16 bits may save them.
"""

_RECIPE = """## Other allocators

Expandable segments (`expandable_segments:True`) do not affect the counters: torch's own allocator counts blocks
wherever they are. The counters of `backend:cudaMallocAsync` are the driver's, and there are none if caching is off
(`PYTORCH_NO_CUDA_MEMORY_CACHING=1`) or a pluggable allocator is used: the checks of peaks and growth are then
UNSUPPORTED. The report has the variables, and `torch.cuda.get_allocator_backend` among the flags.

## A published case

discuss.pytorch.org/t/134442 reports the peak of torch's AMP recipe, three Linear layers of 4096 with 512 rows, on an
RTX 3080: 826,428,416 bytes in fp32 and 925,018,112 under AMP, {reported:,} more. By the closed form the difference at
the end of the forward pass is {predicted:,} bytes.
"""


def observed(block: Block, dtype: torch.dtype | None) -> tuple[int, StepBytes]:
    """Bytes kept for backward, and bytes alive at each point of a step of `block` on the CPU."""
    leaves = tensors(block, torch.device("cpu"), torch.Generator().manual_seed(0))
    region = {"dtype": dtype or torch.bfloat16, "enabled": dtype is not None}
    with SavedForBackward(leaves.values()) as saved, torch.autocast("cpu", **region):
        execute(block, leaves)
    kept = sum(nbytes for _, nbytes in without_bookkeeping(saved.storages))
    del saved
    with PeakStorages(leaves.values()) as live:
        with torch.autocast("cpu", **region):
            loss = execute(block, leaves)
            in_region = live.counted_bytes
        after_region = live.counted_bytes
        loss.backward()
        del loss
        gradients = live.counted_bytes
    return kept, StepBytes(in_region, after_region, gradients, live.peak_bytes, live.peak_bytes)


def points() -> Iterable[list[str]]:
    """For each workload and arm, what is predicted and what is observed at each point."""
    for name, block in WORKLOADS.items():
        for arm, dtype in ARMS.items():
            kept, seen = observed(block, dtype)
            symbolic = step_bytes(block, "cpu", dtype)
            pairs = (
                (sum(item.nbytes for item in predict(block, "cpu", dtype)), kept),
                (symbolic.in_region, seen.in_region),
                (symbolic.after_region, seen.after_region),
                (symbolic.gradients, seen.gradients),
            )
            yield [name, arm, *(f"{predicted:,} / {found:,}" for predicted, found in pairs)]


def peaks() -> Iterable[list[str]]:
    """For each workload and arm, the bounds of the peak and the peak; then what AMP saves at the peak."""
    for name, block in WORKLOADS.items():
        most = {}
        for arm, dtype in ARMS.items():
            symbolic, most[arm] = step_bytes(block, "cpu", dtype), observed(block, dtype)[1].high
            saving = f"{most['fp32'] - most['AMP']:,}" if arm == "AMP" else ""
            yield [name, arm, f"{symbolic.low:,}", f"{most[arm]:,}", f"{symbolic.high:,}", saving]


def page() -> str:
    """The whole page."""
    kept = tabulate(
        points(),
        headers=["workload", "", "saved for backward", "in the region", "after the region", "after backward"],
        tablefmt="github",
        disable_numparse=True,
    )
    most = tabulate(
        peaks(),
        headers=["workload", "", "at least", "observed", "at most", "AMP saves"],
        tablefmt="github",
        disable_numparse=True,
        colalign=("left", "left", "right", "right", "right", "right"),
    )
    low, full = (step_bytes(chain(512, 4096, 3), "cuda", dtype).in_region for dtype in (torch.float16, None))
    return "\n".join(
        [
            _HEAD.format(day=datetime.date.today(), torch=torch.__version__.split("+")[0]),
            "## Bytes at each point, predicted / observed\n",
            kept,
            "\n## The peak of a step\n",
            most,
            "",
            _RECIPE.format(reported=925_018_112 - 826_428_416, predicted=low - full),
        ]
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generators.memory_figures", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="write to this file (default: standard output)")
    options = parser.parse_args(arguments)
    if options.output is None:
        print(page(), end="")
    else:
        options.output.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
