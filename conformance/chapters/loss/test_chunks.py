"""Check linear_cross_entropy with options, which takes the product and the loss for a few samples at a time."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ...harness.check import Case, contract, deep
from ...harness.targets import Target

_SAMPLES, _FEATURES, _CLASSES, _IGNORED = 23, 16, 41, 7
_REDUCTIONS = ("mean", "sum", "none")
# Times the roundings of the largest logit and of the loss; at most 2.9 were seen, with torch 2.13 on a CPU.
_LOSS = 5.0
# The same of gradients, of 16 bits (0.5 were seen) and of float32, whose sums are rounded as products are (1.8).
_GRADIENT, _GRADIENT_OF_FLOAT32 = 1.0, 4.0
# The size of samples whose logits are so far apart that their exponentials overflow float32; for logits above _CLOSE a
# gradient may be a small difference of large numbers.
_FAR, _CLOSE = 32.0, 8.0


def policies() -> list[str]:
    """Return the names that acc_policy takes in this torch; before 2.13, where no contract asks, one of them."""
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    return ["auto"] if options is None else list(get_args(get_type_hints(options)["acc_policy"]))


@dataclass(frozen=True)
class Problem:
    """A problem in float64: the tensors that get gradients, the labels, and the weights of the classes if any."""

    tensors: dict[str, Tensor]
    labels: Tensor
    weight: Tensor | None

    def call(
        self, device: torch.device, of_x: torch.dtype, of_weight: torch.dtype, options: Any, reduction: str
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and its leaves; bias and class weights are of the dtype of the linear weight."""
        leaves = {
            name: one.to(device, of_x if name == "x" else of_weight, copy=True).requires_grad_()
            for name, one in self.tensors.items()
        }
        loss = functional.linear_cross_entropy(
            leaves["x"], leaves["linear_weight"], self.labels.to(device),
            linear_bias=leaves.get("linear_bias"),
            weight=None if self.weight is None else self.weight.to(device, of_weight),
            ignore_index=None if self.weight is None else _IGNORED,
            reduction=reduction, options=options,
        )  # fmt: skip
        return loss, list(leaves.values())


def problems(rng: torch.Generator, dtype: torch.dtype, spread: float) -> Iterator[tuple[str, Problem]]:
    """Yield problems whose numbers `dtype` holds, with and without bias, class weights and labels that are ignored."""
    for plain, alone in itertools.product((True, False), (False, True)):
        shape = (_FEATURES,) if alone else (_SAMPLES, _FEATURES)
        tensors = {
            "x": torch.randn(shape, generator=rng) * spread,
            "linear_weight": torch.randn(_CLASSES, _FEATURES, generator=rng) / 4,
        }
        # One sample is not the one that is ignored: the mean of no sample is NaN.
        labels = torch.randint(0, _IGNORED if alone else _CLASSES, shape[:-1], generator=rng)
        weight = None
        if not plain:
            tensors["linear_bias"] = torch.randn(_CLASSES, generator=rng)
            weight = (0.1 + torch.rand(_CLASSES, generator=rng)).to(dtype).double()
            if not alone:
                labels[::5] = _IGNORED
        held = {name: one.to(dtype).double() for name, one in tensors.items()}
        names = ["plain" if plain else "bias, class weights, ignored labels", *(["one sample"] if alone else [])]
        yield ", ".join(names), Problem(held, labels, weight)


def judged(
    wrong: list[str],
    name: str,
    problem: Problem,
    seen: tuple[Tensor, list[Tensor]],
    reduction: str,
    dtype: torch.dtype,
    rng: torch.Generator,
) -> None:
    """Compare a loss and its gradients with those of float64, by what roundings to `dtype` make of the logits."""
    (loss, leaves), unit = seen, torch.finfo(dtype).eps / 2
    exact, points = problem.call(torch.device("cpu"), torch.float64, torch.float64, None, reduction)
    logits = functional.linear(points[0].detach(), points[1].detach(), problem.tensors.get("linear_bias"))
    largest = float(logits.abs().max())
    bound = _LOSS * unit * (largest + exact.detach().abs())
    off = float(((loss.detach().cpu().double() - exact.detach()).abs() / bound).max())
    if not off <= 1:
        wrong.append(f"{name}: loss: {off:.3g} bounds")
    slope = (0.25 + torch.rand(exact.shape, generator=rng)).to(loss.dtype)
    gradients = torch.autograd.grad(loss, leaves, slope.to(loss.device))
    wanted = torch.autograd.grad(exact, points, slope.double())
    roundings = _GRADIENT_OF_FLOAT32 if dtype == torch.float32 else _GRADIENT
    for which, one, right in zip(problem.tensors, gradients, wanted, strict=True):
        distance = float((one.cpu().double() - right).norm() / right.norm()) / (roundings * unit * (1 + largest))
        if not (math.isfinite(distance) if largest > _CLOSE else distance <= 1):
            wrong.append(f"{name}: gradient of {which}: {distance:.3g} bounds")


_CHUNKS: tuple[dict[str, Any], ...] = (
    {},
    {"chunking_method": None, "batch_chunk_size": 5},
    {"chunking_method": None},
    {"chunking_method": "aspect_ratio"},
)


@contract("AMP-LOSS-021")
@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
def test_chunks(case: Case, target: Target, rng: torch.Generator, dtype: torch.dtype, policy: str) -> None:
    case.require_arithmetic(target, dtype)
    wrong: list[str] = []
    every = [
        (f"{name}, {chunks or 'automatic'}, {reduction}, x {spread:g}", problem, chunks, reduction)
        for spread in (1.0, _FAR)
        for (name, problem), chunks, reduction in itertools.product(problems(rng, dtype, spread), _CHUNKS, _REDUCTIONS)
    ]
    for index in torch.randperm(len(every), generator=rng)[: case.samples(quick=12, standard=48, full=len(every))]:
        name, problem, chunks, reduction = every[index]
        options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy, **chunks)
        seen = problem.call(target.device, dtype, dtype, options, reduction)
        judged(wrong, name, problem, seen, reduction, dtype, rng)
    case.equal("losses and gradients beyond their bounds", wrong[:5], [])


@contract("AMP-LOSS-021")
def test_gradients_are_kept_where_asked_for(case: Case, target: Target, rng: torch.Generator) -> None:
    for (name, problem), reduction in itertools.product(problems(rng, torch.float32, 1.0), _REDUCTIONS):
        for keeps in (True, False):
            options = torch.nn.LinearCrossEntropyOptions(allow_retain_graph=keeps)
            loss, leaves = problem.call(target.device, torch.float32, torch.float32, options, reduction)
            factors = [torch.full_like(loss, factor) for factor in (4.0, 1.0)]
            first = torch.autograd.grad(loss, leaves, factors[0], retain_graph=True)
            copies = [one.clone() for one in first]
            try:
                second = torch.autograd.grad(loss, leaves, factors[1])
            except RuntimeError:
                case.true(f"{name}, {reduction}: a second backward is refused where it was not allowed", not keeps)
                continue
            for which, one, again in zip(problem.tensors, copies, second, strict=True):
                what = f"{name}, {reduction}, allowed {keeps}: distance from a quarter of the gradient of {which}"
                case.at_most(what, float((again - one / 4).norm() / (one / 4).norm()), 1e-5)


@contract("AMP-LOSS-022")
@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("given", ["fp32-fp32", "region-fp32", deep("standard", "region-region")])
def test_chunks_in_a_region(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, policy: str, given: str
) -> None:
    wrong, types = list[str](), set[str]()
    of_x, of_weight = (amp_dtype if name == "region" else torch.float32 for name in given.split("-"))
    options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy, chunking_method=None, batch_chunk_size=5)
    every = list(itertools.product(problems(rng, amp_dtype, 1.0), _REDUCTIONS))
    count = case.samples(quick=4, standard=len(every), full=len(every))
    for index in torch.randperm(len(every), generator=rng)[:count]:
        (name, problem), reduction = every[index]
        try:
            with target.autocast(amp_dtype):
                seen = problem.call(target.device, of_x, of_weight, options, reduction)
            judged(wrong, f"{name}, {reduction}", problem, seen, reduction, amp_dtype, rng)
            types.add(str(seen[0].dtype))
        except RuntimeError as error:
            types.add(f"none, but {str(error).splitlines()[0]}")
    case.equal("types of the losses that have gradients", sorted(types), ["torch.float32"])
    case.equal("losses and gradients beyond their bounds", wrong[:5], [])


_SCALES = (2.0**8, 2.0**12)
# Times the roundings of float16: of the operands, the probabilities and the sum (2.1 were seen without options).
_OF_SCALED = 16.0


@contract("AMP-LOSS-024", dtypes=("fp16",))
@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("place", ["outside", deep("standard", "region")])
def test_scaled_chunks(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, place: str, policy: str
) -> None:
    x = (torch.randn(256, 16, generator=rng) / 2).to(amp_dtype)
    # Gradients of a sample are about 2^-28, of which float16 has nothing.
    weight = (torch.randn(64, 16, generator=rng) / 2**12).to(amp_dtype)
    labels = torch.randint(0, 64, (256,), generator=rng)

    def gradients(device: torch.device, dtype: torch.dtype, scale: float, options: Any) -> list[Tensor]:
        leaves = [one.to(device, dtype).requires_grad_() for one in (x, weight)]
        region = contextlib.nullcontext() if place == "outside" else target.autocast(amp_dtype)
        with region if dtype == amp_dtype else contextlib.nullcontext():
            loss = functional.linear_cross_entropy(*leaves, labels.to(device), options=options)
        found = torch.autograd.grad(loss.to(dtype if dtype == torch.float64 else torch.float32) * scale, leaves)
        return [one.cpu().double() / scale for one in found]

    exact = gradients(torch.device("cpu"), torch.float64, 1.0, None)
    options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy, chunking_method=None, batch_chunk_size=64)
    limit = _OF_SCALED * torch.finfo(amp_dtype).eps / 2
    for scale in _SCALES:
        for what, chosen in (("without options (control)", None), ("in chunks", options)):
            found = gradients(target.device, amp_dtype, scale, chosen)
            for name, one, right in zip(("x", "linear_weight"), found, exact, strict=True):
                distance = float((one - right).norm() / right.norm())
                case.at_most(f"{what}, scaled by {scale:g}: distance of the gradient of {name}", distance, limit)


@contract("AMP-LOSS-021")
@pytest.mark.parametrize("policy", policies())
def test_labels_that_are_all_ignored(case: Case, target: Target, rng: torch.Generator, policy: str) -> None:
    for (name, problem), reduction in itertools.product(problems(rng, torch.float32, 1.0), _REDUCTIONS):
        if problem.weight is None or problem.labels.dim() == 0:
            continue
        ignored = Problem(problem.tensors, torch.full_like(problem.labels, _IGNORED), problem.weight)
        told = []
        for options in (None, torch.nn.LinearCrossEntropyOptions(acc_policy=policy)):
            loss, leaves = ignored.call(target.device, torch.float32, torch.float32, options, reduction)
            gradients = torch.autograd.grad(loss, leaves, torch.ones_like(loss))
            told.append([str(loss.detach().unique().tolist()), *(bool((one == 0).all()) for one in gradients)])
        case.equal(f"{name}, {reduction}: loss, and whether each gradient is 0", told[1], told[0])


@contract("AMP-LOSS-021")
@pytest.mark.parametrize("policy", policies())
def test_smoothed_labels(case: Case, target: Target, rng: torch.Generator, policy: str) -> None:
    options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy)
    for name, problem in problems(rng, torch.float32, 1.0):
        x, weight = (problem.tensors[one].float().to(target.device) for one in ("x", "linear_weight"))
        bias, labels = problem.tensors.get("linear_bias"), problem.labels.to(target.device)
        bias = None if bias is None else bias.float().to(target.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a way that has no chunks
            seen = functional.linear_cross_entropy(
                x, weight, labels, linear_bias=bias, label_smoothing=0.25, options=options
            )
        wanted = functional.cross_entropy(functional.linear(x, weight, bias), labels, label_smoothing=0.25)
        case.at_most(f"{name}: relative error of the smoothed loss", abs(seen.item() / wanted.item() - 1), 1e-5)
