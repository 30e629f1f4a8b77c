"""Check programs that torch.compile runs as CUDA graphs, on cards that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .cuda_graphs import MODE, replays
from .observation import Around, observed
from .programs import PROGRAMS, together
from .support import ambient, bound, compiler, distance_of_programs, dtypes_of, inductor, inner_type, near, replayed

# A graph is compiled at the first call, recorded at the second, and replayed from then on.
CALLS = 4
SIDE = 4


class Product(torch.nn.Module):
    """A product with a weight whose results and gradients, of small integers, are exact in 16 bits."""

    def __init__(self, device: torch.device, rng: torch.Generator) -> None:
        super().__init__()
        self.rng = rng
        self.weight = torch.nn.Parameter(self.integers(device))

    def integers(self, device: torch.device) -> torch.Tensor:
        return torch.randint(-3, 4, (SIDE, SIDE), generator=self.rng).float().to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight) * 2

    def iteration(self, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, around: Around) -> Any:
        """Return the output of a call, products by eager before and after it, and the gradient of all."""
        self.weight.grad = None
        with around():
            before = torch.mm(x, self.weight)
            output = call(x)
            after = torch.mm(x, self.weight)
        (before.float() + output.float() + 3 * after.float()).sum().backward()
        named = {"before": before, "output": output, "after": after, "gradient": self.weight.grad}
        return {name: tensor.detach().clone() for name, tensor in named.items()}


@contract("AMP-COMPILE-077")
@needs("compiled kernels")
@pytest.mark.parametrize("cache", [deep("standard", True), deep("full", False)], ids=["cache", "without-cache"])
def test_regions_around_replays(case: Case, target: Target, rng: torch.Generator, cache: bool) -> None:
    """The region around changes between calls, and the weight is written to in place."""
    with compiler(case), inductor(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            model = Product(target.device, rng)
            compiled = torch.compile(model, mode=MODE, fullgraph=True)
            regions = {
                f"{dtype}": ambient(target, dtype, cache_enabled=cache),
                "the other type": ambient(target, inner_type(target, dtype), cache_enabled=cache),
                "disabled": ambient(target, dtype, enabled=False),
            }
            with replays() as found:
                for name, around in (*regions.items(), *reversed(regions.items())):
                    for call in range(CALLS):
                        torch.compiler.cudagraph_mark_step_begin()
                        x = model.integers(target.device)
                        seen, expected = (model.iteration(each, x, around) for each in (compiled, model))
                        for key, tensor in expected.items():
                            case.identical(f"region {name}, call {call}: {key}", seen[key], tensor)
                        with torch.no_grad():
                            model.weight.copy_(model.integers(target.device))
            replayed(case, target, f"{dtype}", found, 2 * len(regions) * (CALLS - 2))


# Batch normalization writes to its buffers, which no graph is recorded for. The losses have another type by their
# decompositions (AMP-COMPILE-004).
RECORDED = tuple(name for name in PROGRAMS if name not in ("convolution", "mixed_losses", "fused"))


@contract("AMP-COMPILE-077")
@needs("compiled kernels")
@pytest.mark.parametrize("way", [deep("full", way) for way in (MODE, "cudagraphs")])
def test_replayed_programs(case: Case, target: Target, rng: torch.Generator, way: str) -> None:
    """The programs in one graph, on other numbers at each call."""
    if way == "cudagraphs" and target.device_type != "cuda":
        case.unsupported("the backend cudagraphs is for CUDA")
    programs = [PROGRAMS[name] for name in RECORDED]
    program = together(programs)
    options: dict[str, Any] = {"mode": MODE} if way == MODE else {"backend": way}
    with compiler(case), inductor(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            call = bound(program, target, dtype, cache=False)
            compiled = torch.compile(call, fullgraph=True, **options)
            limit = distance_of_programs(programs, target, dtype, rng)
            with replays() as found:
                for number in range(CALLS):
                    torch.compiler.cudagraph_mark_step_begin()
                    leaves = program.leaves(target.device, rng)
                    seen, expected = observed(compiled, leaves), observed(call, leaves)
                    near(case, f"{dtype}, call {number}", seen, expected, limit)
            replayed(case, target, f"{dtype}", found, CALLS - 2)
