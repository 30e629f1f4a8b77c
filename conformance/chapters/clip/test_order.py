"""Check clipping before unscale_ and of random gradients against exact predictions and derived bounds."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...workloads.gradients import held, holding
from .reference import U, clamped, clipped, norm_bound, relative_distance, total_norm

SCALES = (2.0**-4, 4.0, 2.0**10, 2.0**16, 2.0**24)
NORMS: tuple[float, ...] = (1.0, 2.0, math.inf, 3.0, 0.5)


def slopes(rng: torch.Generator, device: torch.device) -> list[torch.Tensor]:
    """Return Gaussian gradients of four shapes."""
    return [torch.randn(shape, generator=rng).to(device) for shape in ((7, 11), (13,), (), (6, 4))]


def scaled_iteration(
    target: Target, slope: list[torch.Tensor], scale: float
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, torch.amp.GradScaler]:
    """Return parameters after backward of a scaled loss whose gradients are the slopes, their optimizer and scaler."""
    parameters = [torch.nn.Parameter(torch.ones_like(part)) for part in slope]
    scaler = torch.amp.GradScaler(target.device_type, init_scale=scale)
    products = [(part * each).sum() for part, each in zip(parameters, slope, strict=True)]
    scaler.scale(torch.stack(products).sum()).backward()
    return parameters, torch.optim.SGD(parameters, lr=1.0), scaler


@contract("AMP-CLIP-023")
def test_norm_in_the_wrong_order(case: Case, target: Target, rng: torch.Generator) -> None:
    slope = slopes(rng, target.device)
    for scale, norm_type in itertools.product(SCALES, NORMS):
        parameters, optimizer, scaler = scaled_iteration(target, slope, scale)
        wrong = torch.nn.utils.clip_grad_norm_(parameters, math.inf, norm_type)
        scaler.unscale_(optimizer)
        right = torch.nn.utils.clip_grad_norm_(parameters, math.inf, norm_type)
        what = f"scale {scale:g}, type {norm_type}"
        if norm_type in (1.0, 2.0, math.inf):
            # Sums, squares, roots and maxima scale exactly by a power of two.
            case.identical(
                f"norm before unscale_, against the norm after it times the scale, {what}", wrong, right * scale
            )
        expected = total_norm(slope, norm_type)
        for name, norm, factor in (("before", wrong, scale), ("after", right, 1.0)):
            error = abs(float(norm) / factor - expected) / expected
            case.at_most(f"error of the norm {name} unscale_, {what}", error, norm_bound(slope, norm_type), "relative")


@contract("AMP-CLIP-024")
def test_gradients_in_the_wrong_order(case: Case, target: Target, rng: torch.Generator) -> None:
    slope = slopes(rng, target.device)
    for scale, norm_type in itertools.product(SCALES, NORMS):
        norm, bound = total_norm(slope, norm_type), norm_bound(slope, norm_type) + 4 * U
        for share in (0.25, 2.0, 4 * max(scale, 1.0)):
            parameters, optimizer, scaler = scaled_iteration(target, slope, scale)
            torch.nn.utils.clip_grad_norm_(parameters, share * norm, norm_type)
            scaler.step(optimizer)
            what = f"scale {scale:g}, type {norm_type}, max_norm {share:g} of the norm"
            wrong = [part / scale for part in clipped([part * scale for part in slope], share * norm, scale * norm)]
            error = relative_distance(held(parameters), wrong)
            case.at_most(f"distance from the predicted gradients, {what}", error, bound, "relative")
            if share >= 2 * max(scale, 1.0):
                kept = [torch.equal(ours, theirs) for ours, theirs in zip(held(parameters), slope, strict=True)]
                case.equal(f"control: gradients that neither order clips, {what}", kept, [True] * len(slope))


@contract("AMP-CLIP-025")
def test_values_in_the_wrong_order(case: Case, target: Target, rng: torch.Generator) -> None:
    slope = slopes(rng, target.device)
    for scale, value in itertools.product(SCALES, (0.5, 2.0**-10, 1000.0)):
        parameters, optimizer, scaler = scaled_iteration(target, slope, scale)
        torch.nn.utils.clip_grad_value_(parameters, value)
        scaler.step(optimizer)
        pairs = zip(held(parameters), clamped(slope, value / scale), strict=True)
        wrong = [number for number, (ours, theirs) in enumerate(pairs) if not torch.equal(ours, theirs)]
        case.equal(f"gradients that are not clamped to {value:g} / {scale:g}", wrong, [])
        parameters, optimizer, scaler = scaled_iteration(target, slope, scale)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(parameters, value)
        pairs = zip(held(parameters), clamped(slope, value), strict=True)
        wrong = [number for number, (ours, theirs) in enumerate(pairs) if not torch.equal(ours, theirs)]
        case.equal(f"control: gradients that the right order does not clamp to {value:g}, scale {scale:g}", wrong, [])


@dataclass(frozen=True)
class Call:
    """One random call: shapes (None: a parameter without gradient), magnitude, norm type, threshold, implementation."""

    shapes: tuple[tuple[int, ...] | None, ...]
    power: int
    norm_type: float
    share: float
    foreach: bool | None

    @classmethod
    def random(cls, source: random.Random, implementations: tuple[bool | None, ...]) -> Call:
        shapes = [
            tuple(source.randint(1, 6) for _ in range(source.randint(0, 3))) if source.random() < 0.9 else None
            for _ in range(source.randint(1, 6))
        ]
        return cls(
            (*shapes, (source.randint(1, 40),)),
            source.randint(-12, 16),  # the powers of the largest stay within fp32 up to type 6
            source.choice([1.0, 2.0, 2.0, math.inf, 3.0, 0.5, round(source.uniform(0.5, 6.0), 2)]),
            round(10 ** source.uniform(-3, 1), 4),
            source.choice(implementations),
        )


@contract("AMP-CLIP-090")
def test_anything(case: Case, target: Target, rng: torch.Generator) -> None:
    implementations = (None, False, True) if target.device_type in ("cpu", "cuda") else (None, False)
    source = random.Random(int(torch.randint(2**31, (), generator=rng)))
    wrong: list[str] = []
    count, changed, worst = case.samples(quick=50, standard=2000, full=20000), 0, 0.0
    for _ in range(count):
        call = Call.random(source, implementations)
        made = [
            None if shape is None else (torch.randn(shape, generator=rng) * 2.0**call.power).to(target.device)
            for shape in call.shapes
        ]
        before = [one.clone() for one in made if one is not None]
        norm = total_norm(before, call.norm_type)
        if not norm:
            continue
        parameters = holding(made)
        limit = call.share * norm
        seen = torch.nn.utils.clip_grad_norm_(parameters, limit, call.norm_type, foreach=call.foreach)
        bound = norm_bound(before, call.norm_type)
        errors = (
            abs(float(seen) - norm) / norm / bound if bound else float(float(seen) != norm),
            relative_distance(held(parameters), clipped(before, limit, norm)) / (bound + 4 * U),
        )
        worst, changed = max(worst, *errors), changed + (call.share < 1)
        if max(errors) > 1 or any(
            (one.grad is None) is not (given is None) for one, given in zip(parameters, made, strict=True)
        ):
            wrong.append(f"{call}: errors {errors} of the bound")
    case.equal("calls that did not clip as documented", sorted(wrong, key=len)[:3], [])
    case.note("calls", count)
    case.note("largest error", worst, "of the bound")
    case.at_least("control: calls that clipped", changed, count // 4)
