"""Check compiled functions of images and volumes in every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, by_seed, contract, deep, needs
from ...harness.judge import lacks_kernel, lacks_kernel_of_dtype
from ...harness.targets import Target
from .laid_out import IMAGE, LAYOUTS, OF_IMAGES, OF_VOLUMES, PADDED, VOLUME, Function
from .support import compiling, dtypes_of, unlike

KINDS = {"images": (OF_IMAGES, IMAGE), "padded": (PADDED, IMAGE), "volumes": (OF_VOLUMES, VOLUME)}


def _told(functions: dict[str, Function], leaves: list[Tensor], call: Callable[..., list[Tensor]]) -> dict[str, Tensor]:
    """Return the results of functions, each of a leaf of its own, and the gradients of weighted sums of them."""
    results = call(*leaves)
    incoming = [
        (torch.arange(one.numel(), device=one.device) % 5 - 2).to(one.dtype).reshape(one.shape) for one in results
    ]
    gradients = torch.autograd.grad(results, leaves, incoming)
    told = {name: one.detach() for name, one in zip(functions, results, strict=True)}
    return told | {f"gradient of {name}": one for name, one in zip(functions, gradients, strict=True)}


def _near(ours: Tensor, theirs: Tensor) -> bool:
    # Norms, means and softmax divide; all else is exact. What 16 bits round, either rounds once more.
    unit = torch.finfo(theirs.dtype).eps if theirs.is_floating_point() else 0.0
    return torch.allclose(ours, theirs, rtol=8 * unit, atol=8 * unit * float(theirs.abs().max()))


def _taken(case: Case, functions: Mapping[str, Function], x: Tensor) -> dict[str, Function]:
    """Return those that eager has kernels for, forward and backward."""
    taken = {}
    for name, run in functions.items():
        leaf = x.detach().requires_grad_()
        try:
            run(leaf).sum().backward()
        except RuntimeError as error:
            if not (lacks_kernel_of_dtype(error) or lacks_kernel(error)):
                raise
            case.note(f"{x.dtype}, {name}: no kernel", str(error).splitlines()[0][:80])
        else:
            taken[name] = run
    return taken


def _judge(case: Case, kind: str, layout: str, backend: str, drawn: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        x = LAYOUTS[layout](drawn.to(dtype))
        functions = _taken(case, KINDS[kind][0], x)
        case.at_least(f"{dtype}: functions (control)", len(functions), len(KINDS[kind][0]) // 2)

        def call(*given: Tensor, functions: dict[str, Function] = functions) -> list[Tensor]:
            return [run(x) for run, x in zip(functions.values(), given, strict=True)]

        leaves = [LAYOUTS[layout](drawn.to(dtype)).detach().requires_grad_() for _ in functions]
        expected = _told(functions, leaves, call)
        with compiling(case, backend):
            torch._dynamo.reset()
            seen = _told(functions, leaves, torch.compile(call, backend=backend, fullgraph=True))
        for name in functions:
            asked = {key: one for key, one in expected.items() if key in (name, f"gradient of {name}")}
            case.equal(f"{dtype}, {name}: what is not as in eager", unlike(seen, asked, _near), [])


def _drawn(kind: str, target: Target, rng: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, KINDS[kind][1], generator=rng).to(target.device)


@contract("AMP-COMPILE-103")
@pytest.mark.parametrize("layout", [by_seed("quick", 1, layout) for layout in LAYOUTS])
@pytest.mark.parametrize("kind", KINDS)
def test_layouts(case: Case, target: Target, rng: torch.Generator, kind: str, layout: str) -> None:
    dtypes = (torch.float32, *dtypes_of(case, target))
    _judge(case, kind, layout, "aot_eager_decomp_partition", _drawn(kind, target, rng), dtypes)


@contract("AMP-COMPILE-103")
@needs("compiled kernels")
@pytest.mark.parametrize(
    "layout", [deep("standard", "channels last"), *(deep("full", one) for one in LAYOUTS if one != "channels last")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_inductor(case: Case, target: Target, rng: torch.Generator, kind: str, layout: str) -> None:
    # A kernel takes seconds to compile.
    dtypes = (torch.float32, *(dtypes_of(case, target) if case.level == "full" else ()))
    _judge(case, kind, layout, "inductor", _drawn(kind, target, rng), dtypes)
