"""Check that regions use the current values of weights of every size, trained or frozen, however they were changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTHS = (4, 96, 260)
"""Weights have their squares as numbers of elements, so that a limit by size lies between two of them."""
OPS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "linear": (F.linear, 0),
    "matmul": (lambda x, weight: x @ weight, 0),
    "mm": (torch.mm, 0),
    "addmm": (lambda x, weight: torch.addmm(x[:1], x, weight), 0),
    "bmm": (lambda x, weight: torch.bmm(x[None], weight[None]), 0),
    "einsum": (lambda x, weight: torch.einsum("ij,jk->ik", x, weight), 0),
    "conv1d": (lambda x, weight: F.conv1d(x[:, :, None], weight), 1),
    "conv2d": (lambda x, weight: F.conv2d(x[:, :, None, None], weight), 2),
    "conv_transpose2d": (lambda x, weight: F.conv_transpose2d(x[:, :, None, None], weight), 2),
    "conv3d": (lambda x, weight: F.conv3d(x[:, :, None, None, None], weight), 3),
}
"""By name a call, and how many dimensions of one element its weight has after the first two."""


def _scaled(weight: Tensor, by: float) -> None:
    weight.mul_(by)


def _averaged(weight: Tensor, by: float) -> None:
    weight.lerp_(weight.flip(0), 0.25 * by)


def _copied(weight: Tensor, by: float) -> None:
    weight.copy_(weight.flip(1) * by)


def _through_data(weight: Tensor, by: float) -> None:
    weight.data.mul_(by)


def _given_other_data(weight: Tensor, by: float) -> None:
    weight.data = weight.detach().flip(0) * by


def _by_foreach(weight: Tensor, by: float) -> None:
    torch._foreach_mul_([weight], by)


CHANGES: dict[str, Callable[[Tensor, float], None]] = {
    "new": lambda weight, by: None,
    "scaled in place": _scaled,
    "averaged with others": _averaged,
    "copied into": _copied,
    "changed through .data": _through_data,
    "given other data": _given_other_data,
    "scaled by foreach": _by_foreach,
}
MODES: dict[str, Callable[[], Any]] = {
    "with gradients": torch.enable_grad,
    "under no_grad": torch.no_grad,
    "in inference mode": torch.inference_mode,
}


@contract("AMP-CACHE-012")
@pytest.mark.parametrize("kind", ["trained", "frozen", "parameter", "frozen parameter"])
@pytest.mark.parametrize("mode", MODES, ids=lambda name: name.replace(" ", "_"))
def test_updates_of_every_size(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, mode: str, kind: str
) -> None:
    """Each case tries some of the ops, others with another seed."""
    count = case.samples(quick=2, standard=4, full=len(OPS))
    for name in (list(OPS)[int(place)] for place in torch.randperm(len(OPS), generator=rng)[:count]):
        call, dimensions = OPS[name]
        for width in WIDTHS:
            x = torch.randn(3, width, generator=rng).to(target.device)
            weight = torch.randn(width, width, *[1] * dimensions, generator=rng).to(target.device)
            if kind.endswith("parameter"):
                weight = torch.nn.Parameter(weight)
            weight.requires_grad_(not kind.startswith("frozen"))
            stale = []
            for number, (change, changed) in enumerate(CHANGES.items()):
                with torch.no_grad():
                    changed(weight, -0.5 if number % 2 else 2.0)
                with MODES[mode](), target.autocast(amp_dtype):
                    seen = call(x, weight)
                expected = call(x.to(amp_dtype), weight.detach().to(amp_dtype))
                if not torch.equal(seen.detach(), expected):
                    stale.append(change)
            case.equal(f"{name}, width {width}: weights whose current values were not used", stale, [])
