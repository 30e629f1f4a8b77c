"""Check averages of gradients against their documented recurrences in float64, written out here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target

# An average, its gradient and the number of the step give the next average.
Recurrence = Callable[[Tensor, Tensor, int], Tensor]
# The class, its arguments, and by the name of the entry in its state the recurrence, which starts from zeros.
AVERAGES: dict[str, tuple[str, dict[str, Any], dict[str, Recurrence]]] = {
    "SGD": (
        "SGD",
        {"momentum": 0.9, "dampening": 0.25},
        # The first step takes the gradient as it is.
        {"momentum_buffer": lambda average, slope, step: slope if step == 1 else 0.9 * average + 0.75 * slope},
    ),
    **{
        name: (
            "Muon",
            {"momentum": 0.95, "nesterov": nesterov},
            {"momentum_buffer": lambda average, slope, step: 0.95 * average + 0.05 * slope},
        )
        for name, nesterov in (("Muon", True), ("Muon without Nesterov", False))
    },
    "RMSprop": ("RMSprop", {"alpha": 0.9}, {"square_avg": lambda average, slope, step: 0.9 * average + 0.1 * slope**2}),
    "Adagrad": ("Adagrad", {}, {"sum": lambda average, slope, step: average + slope**2}),
    "Adadelta": ("Adadelta", {"rho": 0.9}, {"square_avg": lambda average, slope, step: 0.9 * average + 0.1 * slope**2}),
    **{
        name: (
            name,
            {"betas": (0.9, 0.99)},
            {
                "exp_avg": lambda average, slope, step: 0.9 * average + 0.1 * slope,
                "exp_avg_sq": lambda average, slope, step: 0.99 * average + 0.01 * slope**2,
            },
        )
        for name in ("Adam", "AdamW", "NAdam", "RAdam")
    },
}
STEPS = 4
# A few roundings of float32 in each step; bfloat16 rounds to 2^-9.
LIMIT = 2.0**-19
# Of 16-bit averages each step rounds a product, a square and their sum, by half of eps of the largest each.
STORED = 3 * STEPS / 2


# Which implementation steps, by the argument that asks for it.
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
PAIRS = [
    pytest.param((name, implementation), id=name if kind == "Muon" else f"{name}-{implementation}")
    for name, (kind, _, _) in AVERAGES.items()
    for implementation in IMPLEMENTATIONS
    if (implementation == "default") is (kind == "Muon") and (implementation != "fused" or kind in FUSED)
]


@contract("AMP-OPTIMIZER-130")
@pytest.mark.parametrize("pair", PAIRS)
def test_averages(case: Case, target: Target, rng: torch.Generator, pair: tuple[str, str]) -> None:
    _follow(case, target, rng, pair, torch.float32, LIMIT)


@contract("AMP-OPTIMIZER-130")
@pytest.mark.parametrize("pair", PAIRS)
def test_averages_of_16_bits(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, pair: tuple[str, str]
) -> None:
    """Averages over 16-bit parameters are rounded in each step, and go on from what was stored."""
    case.require_arithmetic(target, amp_dtype)
    _follow(case, target, rng, pair, amp_dtype, STORED * torch.finfo(amp_dtype).eps)


def _follow(
    case: Case, target: Target, rng: torch.Generator, pair: tuple[str, str], dtype: torch.dtype, limit: float
) -> None:
    """Step over one matrix of a type, and compare its averages with their recurrences."""
    name, implementation = pair
    kind, arguments, recurrences = AVERAGES[name]
    if not hasattr(torch.optim, kind):
        case.unsupported(f"this torch has no torch.optim.{kind}")
    parameter = torch.nn.Parameter(torch.randn(8, 8, generator=rng).to(target.device, dtype))
    optimizer = getattr(torch.optim, kind)([parameter], lr=2.0**-6, **arguments, **IMPLEMENTATIONS[implementation])
    averages = {entry: torch.zeros(8, 8, dtype=torch.float64) for entry in recurrences}
    for step in range(1, STEPS + 1):
        slope = torch.randn(8, 8, generator=rng).to(dtype)
        parameter.grad = slope.to(target.device)
        optimizer.step()
        for entry, recurrence in recurrences.items():
            averages[entry] = recurrence(averages[entry], slope.double(), step)
            seen = optimizer.state[parameter][entry]
            case.equal(f"step {step}: dtype of {entry}", seen.dtype, dtype)
            far = (seen.detach().cpu().double() - averages[entry]).abs().max() / averages[entry].abs().max()
            case.at_most(f"step {step}: error of {entry}, of its largest element", float(far), limit)
