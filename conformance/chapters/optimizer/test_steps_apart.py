"""Check what a step leaves as it was, and that complex parameters and later groups step as on their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from .optimizer_configs import OptimizerConfig
from .parameter_kinds import Draw, attempted, held, parameters_of, unit
from .support import ALL

NAMES = list(dict.fromkeys(kind.optimizer for kind in ALL if kind.gradients != "sparse"))
SHAPES = ((4, 6), (6, 3))
OPTIONS: dict[str, dict[str, Any]] = {"as given": {}, "decay": {"weight_decay": 0.1}, "maximize": {"maximize": True}}
# Of the larger of a parameter and its change, that two orders of the same operations may be apart.
ROUNDINGS = 32


def _variants(target: Target, name: str) -> Iterator[tuple[OptimizerConfig, str]]:
    """Yield the implementations of an optimizer that the documentation promises, and options that each takes."""
    for kind in ALL:
        if kind.optimizer != name or kind.gradients == "sparse" or not kind.promised_on(target.device_type):
            continue
        for word, options in OPTIONS.items():
            if all(kind.accepts(option) and option not in kind.arguments for option in options):
                yield kind, word


def _steps(optimizer: Any, gradients: list[list[Tensor]]) -> str | None:
    """Take a step for each list of gradients; return what it raises."""
    for one in gradients:
        for parameter, gradient in zip(parameters_of(optimizer), one, strict=True):
            parameter.grad = gradient.clone()
        if (raised := attempted(optimizer)) is not None:
            return raised
    return None


def _far(seen: Tensor, wanted: Tensor, before: Tensor) -> float:
    """Return how far two parameters are apart, in the roundings that they may be."""
    size = (wanted - before).abs().max().double() + wanted.abs().max().double()
    return float((seen - wanted).abs().max().double() / (ROUNDINGS * unit(seen.dtype) * size))


@contract("AMP-OPTIMIZER-133")
@pytest.mark.parametrize("name", NAMES)
def test_a_step_changes_no_gradient(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    draw, judged, changed = Draw(rng, target.device), 0, {}
    for kind, options in _variants(target, name):
        for dtype in (torch.float32, torch.bfloat16):
            parameters = held(draw.pairs(SHAPES, dtype))
            optimizer = kind.make(parameters, **OPTIONS[options])
            given = [gradient for _, gradient in draw.pairs(SHAPES, dtype)]
            if (raised := _steps(optimizer, [given, given])) is not None:
                case.note(f"{kind.id}, {options}, {dtype}", raised)
                continue
            for number, (parameter, gradient) in enumerate(zip(parameters, given, strict=True)):
                if parameter.grad is None or not torch.equal(parameter.grad, gradient):
                    changed[f"{kind.id}, {options}, {dtype}"] = f"gradient {number}"
            judged += 1
    case.equal("steps that change a gradient", changed, {})
    case.enough(target, "implementations judged", judged)


@contract("AMP-OPTIMIZER-134")
@pytest.mark.parametrize("name", NAMES)
def test_complex_parameters_step_as_their_parts(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    draw, judged, wrong = Draw(rng, target.device), 0, {}
    for kind, options in _variants(target, name):
        whole = held(draw.pairs(SHAPES, torch.complex64))
        parts = [torch.nn.Parameter(torch.view_as_real(one.detach()).clone()) for one in whole]
        before = [one.detach().clone() for one in parts]
        gradients = [[gradient for _, gradient in draw.pairs(SHAPES, torch.complex64)] for _ in range(3)]
        if (raised := _steps(kind.make(whole, **OPTIONS[options]), gradients)) is not None:
            case.note(f"{kind.id}, {options}", raised)
            continue
        _steps(kind.make(parts, **OPTIONS[options]), [[torch.view_as_real(one) for one in each] for each in gradients])
        judged += 1
        far = [_far(torch.view_as_real(one.detach()), *other) for one, *other in zip(whole, parts, before, strict=True)]
        if not max(far) <= 1:
            wrong[f"{kind.id}, {options}"] = max(far)
    if not judged:
        case.unsupported(f"torch.optim.{name} takes no complex parameters")
    case.equal("implementations that step otherwise, and how far", wrong, {})


@contract("AMP-OPTIMIZER-135")
@pytest.mark.parametrize("name", NAMES)
def test_groups_that_are_added_later(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    """Two steps of one group, and two more with a second one, are those of two optimizers."""
    draw, judged, wrong = Draw(rng, target.device), 0, {}
    for kind, options in _variants(target, name):
        first, second = (held(draw.pairs(SHAPES, torch.float32)) for _ in range(2))
        alone = [[torch.nn.Parameter(one.detach().clone()) for one in group] for group in (first, second)]
        before = [one.detach().clone() for one in (*first, *second)]
        gradients = [[gradient for _, gradient in draw.pairs(SHAPES * 2, torch.float32)] for _ in range(4)]
        half = len(first)
        optimizer = kind.make(first, **OPTIONS[options])
        raised = _steps(optimizer, [one[:half] for one in gradients[:2]])
        if raised is None:
            optimizer.add_param_group({"params": second})
            raised = _steps(optimizer, gradients[2:])
        _steps(kind.make(alone[0], **OPTIONS[options]), [one[:half] for one in gradients])
        _steps(kind.make(alone[1], **OPTIONS[options]), [one[half:] for one in gradients[2:]])
        judged += 1
        far = max(
            _far(seen.detach(), wanted.detach(), then)
            for seen, wanted, then in zip((*first, *second), (*alone[0], *alone[1]), before, strict=True)
        )
        if raised is not None or not far <= 1:
            wrong[f"{kind.id}, {options}"] = raised or far
    case.equal("implementations that step otherwise, and how far or what is raised", wrong, {})
    case.enough(target, "implementations judged", judged)
