"""Check the training programs of the AMP examples with a compiled model or step against the same in eager."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping
from typing import Any, TypeAlias

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from ...measure.precision import repeatable_convolutions
from ...oracles.numbers.error_bounds import distance_of_chains, normwise_distance
from ...oracles.region.stack_model import observe
from ...oracles.trace.ops import OpTrace
from ...workloads import recipes
from ...workloads.recipes import Parts, Step, normal
from ...workloads.torch_amp import TorchAmp
from .support import compiler, dtypes_of, graphs, inductor

Tensors: TypeAlias = dict[str, torch.Tensor]

RECIPES: Mapping[str, recipes.Program] = {
    each.__name__: each
    for each in (
        *(recipes.typical, recipes.clipping, recipes.accumulation, recipes.several, recipes.custom_functions),
        *(recipes.evaluation, recipes.averaged, recipes.transfer, recipes.adversarial, recipes.distillation),
        *(recipes.scheduled, recipes.tied, recipes.float64_island, recipes.zeroed, recipes.groups, recipes.vision),
        recipes.loaded,
    )
}
# A graph casts a weight at each use, and sums its gradient in float32; the weight cache sums it in 16 bits. These use
# one weight twice in a region.
UNCACHED = (recipes.tied, recipes.adversarial)
# A compiled step of Adam corrects its bias on tensors, in other arithmetic than eager.
ADAM = (recipes.several, recipes.groups)
SKIPPING = (
    *(recipes.typical, recipes.clipping, recipes.accumulation, recipes.several, recipes.custom_functions),
    *(recipes.averaged, recipes.scheduled, recipes.tied, recipes.zeroed, recipes.groups),
)

SAMPLED = {"model": 2, "step": 1}
"""By part, the number of recipes of which it is compiled at level standard; at quick one model, at full all."""
COMPILED = [
    *(
        deep("quick" if (part, number) == ("model", 0) else "standard", (part, number), id=f"{part}-sample-{number}")
        for part, count in SAMPLED.items()
        for number in range(count)
    ),
    *(deep("full", (part, name), id=f"{part}-{name}") for part in SAMPLED for name in RECIPES),
]


# Batch normalization subtracts the mean, so that the gradient of a bias before it is nothing but rounding errors of
# numbers as large as the gradient of the weight.
SIZES: Mapping[recipes.Program, Mapping[str, str]] = {
    recipes.evaluation: {
        "model.0.bias": "model.0.weight",
        "gradient of model.0.bias": "gradient of model.0.weight",
    }
}


def chosen(seed: int, part: str, which: int | str) -> recipes.Program:
    """Return the recipe of that name, or the one with that number in a random order.

    Of recipes without an overflow none has its step compiled below level full: what such a step may lose is the skip.
    """
    if isinstance(which, str):
        return RECIPES[which]
    names = [name for name, recipe in RECIPES.items() if part == "model" or recipe in SKIPPING]
    return RECIPES[random.Random(f"{seed} {part}").sample(names, len(names))[which]]


def compiled(part: str, backend: str) -> Parts:
    """Return what compiles this part of a recipe."""
    return Parts(**{part: functools.partial(torch.compile, backend=backend)})


def noted(parts: Parts, outputs: list[torch.Tensor]) -> Parts:
    """Return these parts; `outputs` gets what each call of a model returns."""

    def made(model: Any) -> Any:
        call = parts.model(model)

        def noting(inputs: torch.Tensor) -> Any:
            found = call(inputs)
            outputs.extend(each.detach() for each in (found if isinstance(found, tuple) else (found,)))
            return found

        return noting

    return dataclasses.replace(parts, model=made)


def run(case: Case, target: Target, recipe: recipes.Program, dtype: torch.dtype, parts: Parts) -> list[Step]:
    """Train from a fixed random state, through a batch that overflows where the recipe has one."""
    steps = case.samples(quick=4, standard=4, full=8)
    torch.manual_seed(case.seed)
    amp = TorchAmp(target.device_type, dtype, cache_enabled=False if recipe in UNCACHED else None)
    with repeatable_convolutions():
        return list(recipe(amp, normal(target.device, case.seed), steps, parts=parts))


def tensors(step: Step) -> Tensors:
    """Return all tensors of a step by name."""
    return {**{f"loss {number}": loss for number, loss in enumerate(step.losses)}, **step.values}


def train_alike(
    case: Case, target: Target, recipe: recipes.Program, dtype: torch.dtype, parts: Parts, *, exact: bool
) -> None:
    """Train compiled and in eager; check the scale, the types and the bits, or the values, after each step.

    Where models are compiled what they return is compared as well.
    """
    outputs: tuple[list[torch.Tensor], ...] = ([], [])
    plain = recipes.PLAIN
    if parts.model is not plain.model:
        parts, plain = (noted(each, kept) for each, kept in zip((parts, plain), outputs, strict=True))
    with OpTrace() as trace:
        expected = run(case, target, recipe, dtype, plain)
    torch._dynamo.reset()
    before = graphs()
    seen = run(case, target, recipe, dtype, parts)
    what = f"{recipe.__name__} in {dtype}"
    scales = [step.scale for step in expected]
    case.at_least(f"{what}: graphs compiled (control)", graphs() - before, 1)
    case.true(f"{what}: the loss scale of eager changes (control)", len({recipes.SCALE, *scales}) > 1, scales)
    case.equal(f"{what}: loss scales", [step.scale for step in seen], scales)
    low = (torch.float16, torch.bfloat16)
    roundings = sum(any(each in low for each in op.outputs) for op in trace.ops)
    limit = None if exact else distance_of_chains(dtype, roundings)
    sizes = SIZES.get(recipe, {})
    last: tuple[Tensors, Tensors] = ({}, {})
    for number, (ours, theirs) in enumerate(zip(map(tensors, seen), map(tensors, expected), strict=True)):
        # Of weights the distance of what the step adds to them.
        moved = {name for name in theirs if not exact and f"gradient of {name}" in theirs and name in last[1]}
        pair = [
            {name: each[name] - past[name] if name in moved else each[name] for name in each}
            for each, past in ((ours, last[0]), (theirs, last[1]))
        ]
        tensors_agree(case, f"{what}, step {number}", pair[0], pair[1], limit, sizes)
        last = ours, theirs
    named = [{f"output {number}": each for number, each in enumerate(kept)} for kept in outputs]
    tensors_agree(case, f"{what}, models", named[0], named[1], limit, {})


def tensors_agree(
    case: Case, what: str, seen: Tensors, expected: Tensors, limit: float | None, sizes: Mapping[str, str]
) -> None:
    """Check the types, and the bits or, with a limit, the distance of each finite tensor.

    `sizes` names the tensor by whose size, in place of its own, the distance of a tensor is measured.
    """
    types = [{name: str(tensor.dtype) for name, tensor in each.items()} for each in (seen, expected)]
    case.equal(f"{what}: dtypes", *types)
    for name, tensor in expected.items():
        if name not in seen:  # a waiver excuses what it lacks
            continue
        if limit is None or not tensor.is_floating_point():
            case.identical(f"{what}: {name}", seen[name], tensor)
        elif not tensor.isfinite().all():
            case.equal(f"{what}: {name} is finite", bool(seen[name].isfinite().all()), False)
        else:
            distance = normwise_distance(seen[name], tensor)
            if name in sizes:
                distance *= float(tensor.norm() / expected[sizes[name]].norm())
            case.at_most(f"{what}: normwise distance of {name}", distance, limit)


@contract("AMP-COMPILE-062")
@pytest.mark.parametrize("pair", COMPILED)
def test_recipes(case: Case, target: Target, pair: tuple[str, int | str]) -> None:
    part, which = pair
    recipe = chosen(case.seed, part, which)
    with compiler(case):
        for dtype in dtypes_of(case, target):
            exact = part == "model" or recipe not in ADAM
            train_alike(case, target, recipe, dtype, compiled(part, "aot_eager"), exact=exact)


@contract("AMP-COMPILE-062")
@pytest.mark.parametrize("part", [deep("standard", "model"), deep("full", "step")])
def test_gradient_penalty(case: Case, target: Target, part: str) -> None:
    with compiler(case):
        for dtype in dtypes_of(case, target):
            train_alike(case, target, recipes.penalty, dtype, compiled(part, "eager"), exact=True)
            before = observe()
            refusing = functools.partial(run, case, target, recipes.penalty, dtype, compiled(part, "aot_eager"))
            case.raises(f"{dtype}: double backward of a graph", RuntimeError, refusing, names=("double backward",))
            case.equal(f"{dtype}: autocast state after the refusal", observe(), before)


@contract("AMP-COMPILE-063")
@needs("compiled kernels")
@pytest.mark.parametrize(
    "name", [deep("full", name) for name in ("typical", "evaluation", "custom_functions", "tied", "groups")]
)
def test_recipes_with_inductor(case: Case, target: Target, name: str) -> None:
    # Kernels take seconds to compile: one type for each recipe, the other with the next seed.
    dtypes = case.supported(target)
    dtype = dtypes[(case.seed + list(RECIPES).index(name)) % len(dtypes)]
    with compiler(case), inductor(case, fallback_random=True):
        train_alike(case, target, RECIPES[name], dtype, compiled("model", "inductor"), exact=False)
