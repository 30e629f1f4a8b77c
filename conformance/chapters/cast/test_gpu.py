"""Check casts on a GPU of tensors copied from the host with non_blocking=True."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, needs
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers.exact import product
from ...oracles.numbers.formats import FORMATS, rounded

ROWS, WIDTH, ROUNDS = 512, 1024, 4


@contract("AMP-CAST-077", on="accelerator")
@needs("streams", "copies that do not wait")
@pytest.mark.parametrize("ahead", [False, True], ids=["same-stream", "another-stream"])
def test_copies_that_do_not_wait(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, ahead: bool
) -> None:
    module: Any = torch.get_device_module(target.device_type)
    form, weights = FORMATS[amp_dtype], torch.randint(-1, 2, (WIDTH, 4), generator=rng).float()
    # Odd integers plus a fraction that the cast rounds away: their sums are exact in fp32 and rounded once.
    drawn = [2 * torch.randint(-4, 4, (ROWS, WIDTH), generator=rng) + 1 + 2.0**-13 for _ in range(ROUNDS)]
    hosts = [each.pin_memory() for each in drawn]
    results, held = [], []  # keeps the sources of the copies alive until the end
    with target.current(), full_precision(target.device_type):
        on_device, side = weights.to(target.device), module.Stream()
        for host in hosts:
            with module.stream(side if ahead else module.current_stream()):
                copied = host.to(target.device, non_blocking=True)
            if ahead:
                module.current_stream().wait_stream(side)
            with target.autocast(amp_dtype):
                result = torch.mm(copied, on_device)
            case.equal("dtype of the result", result.dtype, amp_dtype)
            back = torch.empty(result.shape, dtype=result.dtype).pin_memory()
            back.copy_(result, non_blocking=True)
            results.append(back)
            held.append(copied)
        target.synchronize()
    expected = [rounded(product(rounded(numbers.double(), form), weights), form) for numbers in drawn]
    for number, (back, right) in enumerate(zip(results, expected, strict=True)):
        case.identical(f"result of copy {number + 1}, copied back", back.double(), right)
        case.true("control: it is not that of the copy before", not torch.equal(right, expected[number - 1]))
