"""The recipes as programs: each learns something in float32, and tells each step."""

from __future__ import annotations

import importlib

import pytest
import torch

from conformance.oracles.manual_training import Float32
from conformance.workloads import recipes

PROGRAMS = (
    *("typical", "clipping", "accumulation", "several", "custom_functions", "averaged", "transfer", "adversarial"),
    *("distillation", "scheduled", "tied", "float64_island", "zeroed", "groups", "vision", "evaluation", "loaded"),
)


def draw(*shape: int) -> torch.Tensor:
    return 0.4 * torch.randn(shape)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_moves_its_weights_and_tells_each_step(name: str) -> None:
    torch.manual_seed(0)
    steps = list(getattr(recipes, name)(Float32("cpu", torch.float16), draw, 4))

    assert len(steps) >= 4
    assert all(step.losses for step in steps)
    first, last = steps[0].values, steps[-1].values
    assert any(not torch.equal(first[name], last[name]) for name in first if name in last)


def test_the_outlier_is_far_from_the_others() -> None:
    torch.manual_seed(0)
    made = recipes.batches(draw, 4)

    sizes = [float(inputs.abs().max()) for inputs, _ in made]
    assert sizes[recipes.OUTLIER] > 2.0**95
    assert max(size for number, size in enumerate(sizes) if number != recipes.OUTLIER) < 8


def test_copies_do_not_follow_the_model() -> None:
    model = recipes.perceptron(draw)
    named = recipes.values(model=model)
    with torch.no_grad():
        model[0].weight.add_(1)

    assert not torch.equal(named["model.0.weight"], model[0].weight)


def test_signs_of_zeros_are_no_difference_of_a_step_on_integers() -> None:
    """XLA's compiler gives -0.0 as the float32 sum of negative zeros, and torch's CPU 0.0."""
    checks = importlib.import_module("conformance.chapters.recipe.test_programs")

    def step(*values: float, loss: float = 0.0) -> recipes.Step:
        return checks._without_signs_of_zero(
            recipes.Step((torch.tensor(loss),), 4.0, {"gradient": torch.tensor(values), "count": torch.tensor([1])})
        )

    assert checks.differing(step(-0.0, 1.0, loss=-0.0), step(0.0, 1.0)) == []
    assert checks.differing(step(-0.0, 1.0), step(0.0, -1.0)) == ["gradient"]
    assert step(1.0).values["count"].dtype == torch.int64
