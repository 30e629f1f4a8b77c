"""Check that gradients in the type that grad_dtype names are added up, unscaled, clipped and stepped in it."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .optimizer_configs import OptimizerConfig
from .parameter_kinds import Draw, stepped, unit
from .support import ALL, demand, started

pytestmark = pytest.mark.usefixtures("one_thread")

HOST = torch.device("cpu")
LOOPS = {(kind.optimizer, kind.variant): kind for kind in ALL if kind.implementation == "for-loop"}
# The type of a parameter and that of its gradient.
PAIRS: Mapping[str, tuple[torch.dtype, torch.dtype]] = {
    "bf16-fp32": (torch.bfloat16, torch.float32),
    "fp16-fp32": (torch.float16, torch.float32),
    "fp32-bf16": (torch.float32, torch.bfloat16),
}
BY_PAIR = pytest.mark.parametrize("pair", PAIRS)


def parameter(case: Case, target: Target, pair: str, value: torch.Tensor) -> Any:
    """Return a parameter with a grad_dtype; end the case if torch or the target has none."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        case.unsupported("this torch has no Tensor.grad_dtype")
    dtype, gradient = PAIRS[pair]
    case.require_arithmetic(target, dtype, gradient)
    made: Any = torch.nn.Parameter(value.to(target.device, dtype))
    made.grad_dtype = gradient
    return made


@contract("AMP-OPTIMIZER-129")
@BY_PAIR
def test_gradients_add_up(case: Case, target: Target, pair: str) -> None:
    """Add 300 ones: bfloat16 has no number between 256 and 258."""
    weight = parameter(case, target, pair, torch.ones(2))
    dtype, gradient = PAIRS[pair]
    plain = torch.nn.Parameter(torch.ones(2, dtype=dtype, device=target.device))
    for _ in range(300):
        weight.sum().backward()
        plain.sum().backward()
    assert plain.grad is not None
    case.equal("type of the gradient of a parameter without one (control)", plain.grad.dtype, dtype)
    case.equal("type of the gradient", weight.grad.dtype, gradient)
    exact = [256.0 if each is torch.bfloat16 else 300.0 for each in (dtype, gradient)]
    case.equal("sum of 300 ones without grad_dtype (control)", plain.grad.tolist(), [exact[0]] * 2)
    case.equal("sum of 300 ones", weight.grad.tolist(), [exact[1]] * 2)
    case.equal("grad_dtype", weight.grad_dtype, gradient)


@contract("AMP-OPTIMIZER-129")
@BY_PAIR
def test_gradients_of_a_region(case: Case, target: Target, amp_dtype: torch.dtype, pair: str) -> None:
    """Take the gradient of a linear layer in a region: its weight is cast, or is of the type already."""
    weight = parameter(case, target, pair, torch.full((3, 4), 2.0))
    for number in range(2):
        with target.autocast(amp_dtype):
            output = torch.nn.functional.linear(torch.full((2, 4), 3.0, device=target.device), weight)
        output.float().sum().backward()
        case.equal(f"type of the gradient, {number + 1} passes", weight.grad.dtype, PAIRS[pair][1])
        case.equal(f"gradient, {number + 1} passes", weight.grad.flatten().tolist(), [6.0 * (number + 1)] * 12)


@contract("AMP-OPTIMIZER-129")
@BY_PAIR
def test_gradients_are_unscaled_and_clipped(case: Case, target: Target, pair: str) -> None:
    weight = parameter(case, target, pair, torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.25, foreach=False)
    scaler = started(target, init_scale=2.0**8)
    for bad in (1.0, math.inf):
        optimizer.zero_grad()
        scaler.scale(
            (weight.to(PAIRS[pair][1]) * torch.tensor([3.0, 4.0 * bad], device=target.device)).sum()
        ).backward()
        scaler.unscale_(optimizer)
        if bad == 1.0:
            case.equal(
                "gradient after unscale_", (weight.grad.tolist(), weight.grad.dtype), ([3.0, 4.0], PAIRS[pair][1])
            )
            norm = torch.nn.utils.clip_grad_norm_([weight], 10.0)
            case.equal("norm", float(norm), 5.0)
            torch.nn.utils.clip_grad_value_([weight], 3.0)
            case.equal("gradient after clip_grad_value_", weight.grad.tolist(), [3.0, 3.0])
        scaler.step(optimizer)
        scaler.update()
        case.equal(f"parameter after a step whose gradient has {bad}", weight.tolist(), [0.25, 0.25])
    case.equal("scale after the skipped step", scaler.get_scale(), 2.0**7)


COPIES: Mapping[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy-of-a-module": lambda weight: copy.deepcopy(torch.nn.ParameterList([weight]))[0],
    "pickle": lambda weight: pickle.loads(pickle.dumps(weight)),
}


@contract("AMP-OPTIMIZER-129")
@pytest.mark.parametrize("way", COPIES)
def test_copies_keep_the_type(case: Case, target: Target, way: str) -> None:
    weight = parameter(case, target, "bf16-fp32", torch.ones(2))
    made = COPIES[way](weight)
    case.equal("type of the copy", made.dtype, torch.bfloat16)
    case.equal("grad_dtype of the copy", made.grad_dtype, torch.float32)
    case.equal("grad_dtype of the original", weight.grad_dtype, torch.float32)


SHALLOW = ("SGD", "AdamW")
# Muon is left out: it orthogonalizes in bf16, where a rounding of the gradient grows beyond what bounds a step.
STEPPING = [
    pytest.param(kind, id=kind.id) if kind.optimizer in SHALLOW else deep("standard", kind, id=kind.id)
    for kind in ALL
    if kind.first and kind.implementation != "default" and kind.gradients != "sparse" and kind.optimizer != "Muon"
]


@contract("AMP-OPTIMIZER-129")
@BY_PAIR
@pytest.mark.parametrize("kind", STEPPING)
def test_steps_of_every_optimizer(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, pair: str
) -> None:
    """Step as the for-loop does in float64; moments may be kept in either type."""
    demand(case, kind, target.device)
    draw = Draw(rng, target.device, matrices=kind.gradients == "matrices")
    dtype, gradient = PAIRS[pair]
    values = [value for value, _ in replace(draw, device=HOST).pairs(((8, 9), (3, 2), (64,)), torch.float64)]
    weights = [parameter(case, target, pair, value) for value in values]
    optimizer = kind.make(weights)
    for number in range(2):
        for weight in weights:
            weight.grad = draw.gradient(tuple(weight.shape), gradient)
        step = stepped(LOOPS[kind.optimizer, kind.variant], optimizer, unit(torch.bfloat16))
        case.equal(f"exception of step {number + 1}", repr(step.raised)[:80], "None")
        case.equal("types of the parameters", {weight.dtype for weight in weights}, {dtype})
        case.equal(f"step {number + 1}: distances beyond their bounds", step.beyond, {})


@contract("AMP-OPTIMIZER-129")
@BY_PAIR
@pytest.mark.parametrize("kind", STEPPING)
def test_refused_steps(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, pair: str) -> None:
    """A first step that is refused leaves the parameters as they are."""
    demand(case, kind, target.device)
    draw = Draw(rng, target.device, matrices=kind.gradients == "matrices")
    values = [value for value, _ in replace(draw, device=HOST).pairs(((8, 9), (3, 2)), torch.float64)]
    weights = [parameter(case, target, pair, value) for value in values]
    for weight in weights:
        weight.grad = draw.gradient(tuple(weight.shape), PAIRS[pair][1])
    step = stepped(LOOPS[kind.optimizer, kind.variant], kind.make(weights), unit(torch.bfloat16))
    case.equal("parameters that a refused step changed", step.changed, [])
