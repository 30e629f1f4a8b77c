"""Numerics of gradients: what comes back of reductions, normalisations and losses, each operand's by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from conformance.harness.check import Case, contract
from conformance.harness.targets import Target
from conformance.oracles.bounded import Measured, Op
from conformance.oracles.bounded_losses import LOSSES
from conformance.oracles.bounded_normalisations import NORMALISATIONS
from conformance.oracles.bounded_reductions import REDUCTIONS
from conformance.oracles.float_formats import FP32, Format
from conformance.test_numerics_reductions import by_loss, by_name, hold, is_listed, runs

DIFFERENTIABLE = {name: op for name, op in REDUCTIONS.items() if op.gradient is not None}
OPERANDS = ("input", "weight", "bias")


def _of_gradients(found: Sequence[Measured]) -> list[Measured]:
    return [one for one in found if one.operand is not None]


@contract("AMP-NUMERICS-061")
@by_name(DIFFERENTIABLE)
def test_gradients_of_reductions(case: Case, target: Target, rng: torch.Generator, op: Op) -> None:
    found = [one for _, some in runs(case, target, rng, op, backward=True) for one in _of_gradients(some)]
    hold(case, f"gradient of {op.name}", found)


def _is_left_to_066(op: Op, target: Target, form: Format, one: Measured) -> bool:
    """Whether it is a parameter's gradient of a layer norm that ran on a 16-bit tensor."""
    return op.name == "layer_norm" and form is not FP32 and not is_listed(op, target) and one.operand != 0


@contract("AMP-NUMERICS-063")
@by_name(NORMALISATIONS)
def test_gradients_of_normalisations(case: Case, target: Target, rng: torch.Generator, op: Op) -> None:
    by_operand: dict[int, list[Measured]] = {}
    for form, some in runs(case, target, rng, op, backward=True):
        for one in _of_gradients(some):
            if one.operand is not None and not _is_left_to_066(op, target, form, one):
                by_operand.setdefault(one.operand, []).append(one)
    for operand, found in by_operand.items():
        hold(case, f"gradient of the {OPERANDS[operand]} of {op.name}", found)


@contract("AMP-NUMERICS-065")
@by_loss()
def test_gradients_of_losses(case: Case, target: Target, rng: torch.Generator, loss: str) -> None:
    for op in (op for name, op in LOSSES.items() if name.split(" ")[0] == loss):
        found = [
            one for _, some in runs(case, target, rng, op, backward=True, is_loss=True) for one in _of_gradients(some)
        ]
        hold(case, f"gradient of {op.name}", found)


@contract("AMP-NUMERICS-066")
def test_parameters_of_a_layer_norm(case: Case, target: Target, rng: torch.Generator) -> None:
    op = NORMALISATIONS["layer_norm"]
    found = [
        one
        for form, some in runs(case, target, rng, op, backward=True)
        for one in _of_gradients(some)
        if form is not FP32 and one.operand != 0
    ]
    if not found:
        case.unsupported("nothing is known of layer norms of 16-bit tensors on this device")
    for operand in (1, 2):
        hold(case, f"gradient of the {OPERANDS[operand]}", [one for one in found if one.operand == operand])
