"""Check that the scaler's step and update hold no more memory than the optimizer's own step."""

from __future__ import annotations

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from ...measure.storages import PeakStorages
from ...measure.threads import one_thread

SMALL = 256  # bytes: the reciprocals of the scale, found_inf, the scale and the tracker
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.1),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1),
}


def _step(target: Target, name: str, scaled: bool, steps: int) -> list[tuple[int, int]]:
    """Return peak and live bytes of the optimizer's step, or of a scaler's step and update, from the second one on."""
    weights = [torch.ones(64, 32 + number, device=target.device, requires_grad=True) for number in range(3)]
    optimizer = OPTIMIZERS[name](weights)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0)
    seen = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = sum((weight.sum() for weight in weights), torch.zeros((), device=target.device))
        (scaler.scale(loss) if scaled else loss).backward()
        with PeakStorages([*weights, *(weight.grad for weight in weights if weight.grad is not None)]) as live:
            if scaled:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        if number:  # the first makes the optimizer's state
            seen.append((live.peak_bytes, live.live_bytes))
    return seen


@contract("AMP-MEMORY-050")
@needs("storages")
@pytest.mark.parametrize("name", ["sgd", "adam", deep("standard", "adamw")])
def test_a_scaled_step_holds_no_more(case: Case, target: Target, name: str) -> None:
    with one_thread():
        alone, scaled = (_step(target, name, amp, case.samples(quick=3, standard=3, full=8)) for amp in (False, True))
    for number, ((peak, left), (scaled_peak, scaled_left)) in enumerate(zip(alone, scaled, strict=True), start=2):
        case.at_most(
            f"step {number}: peak of step and update above the optimizer's own", scaled_peak - peak, SMALL, "bytes"
        )
        case.at_most(f"step {number}: bytes left above the optimizer's own", scaled_left - left, SMALL, "bytes")
