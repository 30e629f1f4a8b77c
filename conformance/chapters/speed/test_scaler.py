"""Check the operations that scaling, unscaling and the scaler's step add to a training loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.trace import counts
from ...oracles.trace.ops import trace_of

LARGE = 2  # elements: more than a scale, a flag or a norm has
FEW = 3  # operations on the scale and its flags, where torch has one: numbers may be made and combined otherwise
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


def _counted(work: Callable[[], object], least: int = 0) -> dict[str, int]:
    return counts.work(trace_of(work).ops, least)


@contract("AMP-SPEED-051")
@pytest.mark.parametrize("parameters", [1, 4])
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_the_scaler_passes_once_over_the_gradients(
    case: Case, target: Target, rng: torch.Generator, parameters: int, clip: bool
) -> None:
    weights = [torch.randn(5, 3, generator=rng).to(target.device).requires_grad_() for _ in range(parameters)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=8.0)

    def norm() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        return torch.stack([weight.square().sum() for weight in weights]).sum()

    # A first step makes the scale and the momentum.
    scaler.scale(loss()).backward()
    scaler.step(optimizer)
    scaler.update()
    value = loss()
    outputs = value.expand(LARGE)
    case.equal("operations of scale on outputs", _counted(lambda: scaler.scale(outputs), LARGE), {"mul": 1})
    case.at_most("operations of scale", sum(_counted(lambda: scaler.scale(value)).values()), FEW)
    scaler.scale(value).backward()
    if clip:
        case.equal(
            "operations of unscale_ on gradients", _counted(lambda: scaler.unscale_(optimizer), LARGE), {UNSCALE: 1}
        )
        clipped, passes = _counted(norm), _counted(norm, weights[0].numel())
    stepped = _counted(lambda: scaler.step(optimizer), LARGE)
    case.at_most("operations of update", sum(_counted(scaler.update).values()), FEW)
    if clip:
        case.equal("operations of clipping", clipped, _counted(norm))
        # torch.nn.utils.clip_grad_norm_: a norm of each gradient and a product, of all at once where foreach allows.
        together = {"_foreach_mul_": 1, "_foreach_norm": 1}
        one_by_one = {"linalg_vector_norm": parameters, "mul_": parameters}
        forms = together if "_foreach_norm" in passes else one_by_one
        case.equal("operations of clipping on gradients", passes, forms)
    unscaled = {} if clip else {UNSCALE: 1}
    expected = {**_counted(optimizer.step, LARGE), **unscaled}
    case.equal("operations of step on parameters and gradients", stepped, dict(sorted(expected.items())))
