"""Check that hooks of tensors and modules in compiled programs act as they do in eager."""

from __future__ import annotations

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .hooked import PROGRAMS, SAVING, Program
from .support import compiling, dtypes_of

AT_QUICK = ("product", "two-uses", "then-breaks", "backward")


@contract("AMP-COMPILE-096")
@pytest.mark.parametrize("backend", ["aot_eager", deep("standard", "inductor"), deep("full", "eager")])
@pytest.mark.parametrize("name", [one if one in AT_QUICK else deep("standard", one) for one in PROGRAMS])
def test_hooks(case: Case, target: Target, rng: torch.Generator, name: str, backend: str) -> None:
    x, w = (torch.randint(1, 3, (4, 4), generator=rng).float().to(target.device) for _ in range(2))
    plain = x.sum(0)[:, None].expand(4, 4) * 3
    with compiling(case, backend):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            program = PROGRAMS[name]()
            seen = _ran(target, dtype, torch.compile(program, backend=backend), x, w)
            expected = _ran(target, dtype, program, x, w)
            acts = not torch.equal(expected["gradient of the weight"], plain) or len(expected) == 3
            case.true(f"{dtype}: the hook acts in eager (control)", acts is (name != "removed"))
            case.equal(f"{dtype}: what has a gradient", list(seen), list(expected))
            for what in [one for one in expected if one in seen]:
                case.identical(f"{dtype}: {what}", seen[what], expected[what])


def _ran(
    target: Target, dtype: torch.dtype, program: Program, x: torch.Tensor, w: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the loss and the gradients of a program that is run in a region."""
    weight = w.clone().requires_grad_()
    with target.autocast(dtype):
        made = program(x, weight)
    loss, kept = made if isinstance(made, tuple) else (made, None)
    loss.backward()
    found = {"loss": loss.detach(), "gradient of the weight": weight.grad}
    found |= {} if kept is None else {"gradient that is retained": kept.grad}
    return {what: one.detach() for what, one in found.items() if one is not None}


def _saved(call: Program, target: Target, dtype: torch.dtype, x: torch.Tensor, w: torch.Tensor) -> list[list[float]]:
    """Return the gradient of the weight where each tensor that forward saves comes back doubled."""
    weight = w.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved * 2), target.autocast(dtype):
        loss = call(x, weight)
    loss.backward()
    return [] if weight.grad is None else weight.grad.tolist()


@contract("AMP-COMPILE-096")
@pytest.mark.parametrize("backend", ["aot_eager", deep("standard", "inductor"), deep("full", "eager")])
@pytest.mark.parametrize("name", SAVING)
def test_hooks_of_saved_tensors(case: Case, target: Target, rng: torch.Generator, name: str, backend: str) -> None:
    """Hooks around the call, as those that offload or compress what backward needs."""
    x, w = (torch.randint(1, 3, (4, 4), generator=rng).float().to(target.device) for _ in range(2))
    program = SAVING[name]
    twice = (x.sum(0)[:, None].expand(4, 4) * 2).tolist()
    with compiling(case, backend):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            expected = _saved(program, target, dtype, x, w)
            case.equal(f"{dtype}: the hooks double the gradient in eager (control)", expected, twice)
            seen = _saved(torch.compile(program, backend=backend), target, dtype, x, w)
            case.equal(f"{dtype}: gradient of the weight", seen, expected)
