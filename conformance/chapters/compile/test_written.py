"""Check what compiled and exported programs write to tensors of each type, and the masks of compiled dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .support import compiler, dtypes_of, inductor, unlike
from .written_tensors import KINDS, SIZE, Writing, dropped, every, programs, views

COMPILERS = ["aot_eager", deep("standard", "aot_eager_decomp_partition"), deep("full", "inductor")]
BACKENDS = pytest.mark.parametrize("backend", COMPILERS)
MASKS = pytest.mark.parametrize("backend", [*COMPILERS, deep("standard", "eager")])


def _integers(target: Target, rng: torch.Generator) -> torch.Tensor:
    """Return a matrix of small integers, whose products and sums are exact in every type."""
    return torch.randint(-2, 3, (SIZE, SIZE), generator=rng).float().to(target.device)


@contract("AMP-COMPILE-001")
@BACKENDS
def test_written_arguments(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    """Each program on a state of each type, in one graph, called twice: eager and compiled leave the same states."""
    kinds = list(filter(target.computes_in, KINDS if case.level != "quick" else (torch.float16, torch.bfloat16)))
    for dtype in dtypes_of(case, target):
        chosen = {**programs(target.device_type, dtype), **views(target.device_type, dtype)}
        run = every(chosen)
        names = [f"{name}, {kind}" for kind in kinds for name in chosen]

        def both(x: torch.Tensor, *states: torch.Tensor, run: Any = run) -> list[torch.Tensor]:
            size = len(states) // len(kinds)
            return [one for start in range(0, len(states), size) for one in run(x, *states[start : start + size])]

        first = [_integers(target, rng).to(kind) for kind in kinds for _ in chosen]
        x = _integers(target, rng)
        with compiler(case):
            call = _made(case, both, backend)
            ours, theirs = ([one.clone() for one in first] for _ in range(2))
            for number in range(2):
                results, expected = call(x, *ours), both(x, *theirs)
                seen = [("states", ours, theirs), ("results", results, expected)]
                _alike(case, f"{dtype}, call {number}", names, seen)
                for one in (*results, *expected):
                    one.mul_(2)  # where a result is a view of a state, that is written too
                _alike(case, f"{dtype}, call {number}", names, [("states after a write to the results", ours, theirs)])
                for mine, right in zip(ours, theirs, strict=True):
                    mine.copy_(right)


def _alike(case: Case, what: str, names: list[str], seen: list[tuple[str, Any, Any]]) -> None:
    """Check by program that tensors, each of a program and a state's type, are those of eager."""
    for kind, ours, theirs in seen:
        found = unlike(dict(zip(names, ours, strict=True)), dict(zip(names, theirs, strict=True)))
        for program in dict.fromkeys(name.split(",")[0] for name in names):
            wrong = [one for one in found if one.startswith(f"{program},")]
            case.equal(f"{what}, {program}: {kind} unlike eager's", wrong[:3], [])


def _made(case: Case, call: Callable[..., Any], backend: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(call, backend=backend, fullgraph=True)
    if backend != "inductor":
        return compiled

    def inside(*given: torch.Tensor) -> Any:
        with inductor(case):
            return compiled(*given)

    return inside


@contract("AMP-COMPILE-002")
@pytest.mark.parametrize("way", ["export", deep("standard", "export-decomposed")])
def test_written_buffers(case: Case, target: Target, rng: torch.Generator, way: str) -> None:
    """The module of an exported program, called twice, has the buffers of the module that was exported."""
    from torch.export import export

    for dtype in dtypes_of(case, target):
        x = _integers(target, rng)
        chosen = programs(target.device_type, dtype)
        names = list(chosen) if case.level != "quick" else ["added"]
        for kind in KINDS if case.level == "full" else (torch.float16, torch.float32):
            for name in names:
                plain = Writing(chosen[name], _integers(target, rng).to(kind))
                with compiler(case):
                    exported = export(copy.deepcopy(plain), (x,), strict=False)
                    module = (exported.run_decompositions() if way == "export-decomposed" else exported).module()
                    for number in range(2):
                        seen, expected = {"result": module(x)}, {"result": plain(x)}
                        seen["buffer"], expected["buffer"] = module.get_buffer("state"), plain.state
                        what = f"{dtype}, {name} to {kind}, call {number}: what is unlike eager's"
                        case.equal(what, unlike(seen, expected), [])


@contract("AMP-COMPILE-042")
@BACKENDS
def test_masks_of_dropout(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    _judge_masks(case, target, rng, backend, checkpointed=False)


# The recomputation has a generator of its own, which torch's partitioner knows of these devices.
@contract("AMP-COMPILE-042", on=("cpu", "cuda", "xpu"))
@needs("compiled kernels")
@MASKS
def test_masks_of_recomputed_dropout(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    _judge_masks(case, target, rng, backend, checkpointed=True)


@contract("AMP-COMPILE-042")
@pytest.mark.parametrize("backend", [deep("standard", "aot_eager_decomp_partition"), deep("full", "inductor")])
@pytest.mark.parametrize("budget", [0.5, 0.0], ids=["half", "nothing"])
def test_masks_under_a_memory_budget(
    case: Case, target: Target, rng: torch.Generator, backend: str, budget: float
) -> None:
    """The compiler keeps a part of the activations for backward, or none, and computes the others again."""
    from torch._functorch import config

    with config.patch(activation_memory_budget=budget):
        _judge_masks(case, target, rng, backend, checkpointed=False)


def _judge_masks(case: Case, target: Target, rng: torch.Generator, backend: str, *, checkpointed: bool) -> None:
    """Backward uses the mask of forward: of a square of powers of two, x times the gradient is twice the result."""
    for dtype in dtypes_of(case, target):
        x = (2.0 ** torch.randint(-2, 3, (8, 64), generator=rng)).to(target.device).requires_grad_()
        ones = torch.ones(8, 64, device=target.device)
        for of, kept in (("dropout", 0.5), ("dropout", 0.25), ("attention", 0.5)):
            with compiler(case):
                call = _made(case, dropped(target.device_type, dtype, kept, of, checkpointed), backend)
                out = call(ones, x)
                (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
            what = f"{dtype}, {of}, {kept:g} kept"
            share = float((out != 0).float().mean())
            # 512 samples: five deviations.
            case.between(f"{what}: share that is kept (control)", share, kept - 0.12, kept + 0.12)
            mantissas = set(out.detach().float().frexp().mantissa.unique().tolist())
            case.equal(f"{what}: results are powers of two or 0 (control)", mantissas, {0.0, 0.5})
            case.identical(f"{what}: x times its gradient", x.detach() * gradient, 2 * out.detach().float())
