"""Check that the programs of the AMP examples run without a warning about AMP, in torch's own helpers too."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...workloads import recipes
from ...workloads.recipes import Draw, Precision, Step, normal
from ...workloads.torch_amp import TorchAmp
from .support import dtypes_of, run

# Warnings of others, such as of the Python that runs torch, are not about AMP.
_ABOUT_AMP = re.compile(r"autocast|GradScaler|\bamp\b|custom_(fwd|bwd)|lr_scheduler|optimizer\.step", re.IGNORECASE)


def _checkpointed(amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Train with a checkpointed layer, of both kinds."""
    for reentrant in (False, True):
        yield from _with(functools.partial(checkpoint, use_reentrant=reentrant), amp, draw, steps)


def _replicated(amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Train through DataParallel, which on the CPU calls the module itself."""
    return _with(lambda model, x: torch.nn.DataParallel(model)(x), amp, draw, steps)


def _with(
    call: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor], amp: Precision, draw: Draw, steps: int
) -> Iterator[Step]:
    model = recipes.perceptron(draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-3)
    scaler = amp.scaler(recipes.SCALE, recipes.INTERVAL)
    for inputs, goal in recipes.batches(draw, steps):
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(call(model, inputs.requires_grad_()), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield Step((loss.detach(),), scaler.get_scale(), {})


RECIPES = (
    recipes.typical, recipes.clipping, recipes.accumulation, recipes.penalty, recipes.several, recipes.custom_functions,
    recipes.evaluation, recipes.averaged, recipes.transfer, recipes.distillation, recipes.scheduled, recipes.tied,
    recipes.float64_island, recipes.groups, _checkpointed, _replicated,
)  # fmt: skip


@contract("AMP-RECIPE-050")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__.strip("_"))
def test_no_warning_about_amp(case: Case, target: Target, recipe: recipes.Recipe) -> None:
    if recipe is _replicated and target.device_type != "cpu" and not hasattr(torch._C, "_scatter"):
        case.unsupported("this build of torch cannot scatter tensors over devices, as DataParallel does")
    if recipe is recipes.distillation:  # in regions of both types: torch warns of one that the device does not support
        case.require(target, torch.float16, torch.bfloat16)
    if recipe is recipes.float64_island:
        case.require_arithmetic(target, torch.float64)
    for dtype in dtypes_of(case, target):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            taken = list(run(recipe, TorchAmp(target.device_type, dtype), normal(target.device, case.seed), 4))
        told = [f"{one.category.__name__}: {one.message}" for one in caught if _ABOUT_AMP.search(str(one.message))]
        case.at_least(f"{dtype}: steps taken", len(taken), 1)
        case.equal(f"{dtype}: warnings about AMP", told, [])
