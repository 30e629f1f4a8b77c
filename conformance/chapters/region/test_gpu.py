"""Check random numbers of regions in CUDA graphs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ...harness.check import Case, contract, needs
from ...harness.targets import Target
from ...oracles.numbers.running_error import CONFIDENCE
from ...workloads.graphs import recorded, warmed

SIDE = 64  # masks of 4096 elements
REPLAYS = 3


def mask(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu() != 0


@contract("AMP-REGION-102", on="cuda")
@needs("graphs")
@pytest.mark.parametrize("private", [False, True], ids=["dropout", "own-generator"])
def test_captured_dropout(case: Case, target: Target, amp_dtype: torch.dtype, private: bool) -> None:
    generator = torch.Generator(device=target.device) if private else None
    weight = torch.eye(SIDE, device=target.device, requires_grad=True)
    ones, held = torch.ones(SIDE, SIDE, device=target.device), {}

    def seed(number: int) -> None:
        if generator is None:
            torch.manual_seed(number)
        else:
            generator.manual_seed(number)

    def work() -> None:
        with target.autocast(amp_dtype, cache_enabled=False):
            product = torch.mm(ones, weight)
            if generator is None:
                held["output"] = F.dropout(product, 0.5)
            else:
                held["output"] = product * torch.empty_like(product).bernoulli_(0.5, generator=generator) * 2
        (held["gradient"],) = torch.autograd.grad(held["output"], weight, torch.ones_like(held["output"]))

    warmed(work)
    replay = recorded(work, generator=generator).replay
    series = []
    for number in (7, 7, 7, 8):
        seed(number)
        masks = []
        for _ in range(REPLAYS):
            replay()
            masks.append(mask(held["output"]))
            case.equal("values", sorted(held["output"].unique().tolist()), [0.0, 2.0])
            case.equal("dtype", held["output"].dtype, amp_dtype)
            # The gradient of each column is twice its number of elements that are kept, 2 * 64 at most.
            case.identical("gradient", held["gradient"].cpu()[0], 2.0 * masks[-1].sum(0).float())
        series.append(torch.stack(masks))
    away = CONFIDENCE * math.sqrt(SIDE**2 / 4)
    for first, second in ((0, 1), (1, 2)):
        case.between(
            f"elements that replays {first + 1} and {second + 1} draw differently",
            int((series[0][first] != series[0][second]).sum()),
            SIDE**2 / 2 - away,
            SIDE**2 / 2 + away,
        )
    differing = [
        f"series {one}, replay {number}"
        for one, masks in enumerate(series[:-1])
        for number, drawn in enumerate(masks)
        if not torch.equal(drawn, series[0][number])
    ]
    case.equal("random masks after the same seed that are not those of series 0", differing, [])
    case.true("control: another seed draws otherwise", not torch.equal(series[-1], series[0]))
