"""Check that compiled normalizations with float32 parameters keep the digits of eager's statistics and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .decomposed_ops import error
from .normalizations import NORMALIZATIONS, exactly, inputs, layers, results, roundings
from .support import compiler, dtypes_of, inductor

EVALUATION = tuple(name for name in NORMALIZATIONS if "evaluation" in name)
KINDS = {
    "evaluation": EVALUATION,
    **{
        kind.lower(): tuple(name for name in NORMALIZATIONS if name.startswith(kind) and name not in EVALUATION)
        for kind in ("Batch", "Group", "Instance", "Layer", "RMS")
    },
}
IN_KERNELS = {
    "batch": ("BatchNorm2d, channels last",),
    "evaluation": EVALUATION,
    "group": ("GroupNorm",),
    "layer": ("LayerNorm",),
}


def _in_a_region(
    layers: Mapping[str, torch.nn.Module], target: Target, dtype: torch.dtype
) -> Callable[..., list[torch.Tensor]]:
    """Return a function that gives each layer its input, in a region."""

    def program(*given: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast(target.device_type, dtype=dtype, cache_enabled=False):
            return [layer(x) for layer, x in zip(layers.values(), given, strict=True)]

    return program


def _judge(case: Case, target: Target, backend: str, rng: torch.Generator, names: Sequence[str]) -> None:
    for dtype in dtypes_of(case, target):
        torch._dynamo.reset()
        made = layers(names, target.device, rng)
        given = inputs(names, dtype, target.device, rng)
        exact = exactly(made, given)
        found = []
        for compiled in (False, True):
            ours = {name: copy.deepcopy(layer) for name, layer in made.items()}
            program = _in_a_region(ours, target, dtype)
            call = torch.compile(program, backend=backend, fullgraph=True) if compiled else program
            found.append(results(ours, call, given))
        eager, seen = found
        for name, expected in eager.items():
            types = {what: one.dtype for what, one in seen[name].items()}
            case.equal(f"{dtype}: {name}: types", types, {what: one.dtype for what, one in expected.items()})
        for (name, expected), x in zip(eager.items(), given, strict=True):
            for what, theirs in expected.items():
                right = exact[name][what]
                limit = error(theirs, right) + roundings(theirs, x.numel())
                case.at_most(f"{dtype}: {name}: error of the {what}", error(seen[name][what], right), limit)


@contract("AMP-COMPILE-083")
@pytest.mark.parametrize("kind", [deep("quick" if kind == "evaluation" else "standard", kind) for kind in KINDS])
def test_decompositions(case: Case, target: Target, rng: torch.Generator, kind: str) -> None:
    with compiler(case):
        _judge(case, target, "aot_eager_decomp_partition", rng, KINDS[kind])


@contract("AMP-COMPILE-083")
@needs("compiled kernels")
@pytest.mark.parametrize("kind", [deep("full", kind) for kind in IN_KERNELS])
def test_kernels(case: Case, target: Target, rng: torch.Generator, kind: str) -> None:
    with compiler(case), inductor(case):
        _judge(case, target, "inductor", rng, IN_KERNELS[kind])
