"""Check the compiled step of every optimizer against the same step in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...harness.check import Case, by_seed, contract, deep, needs
from ...harness.targets import Target
from ...oracles.numbers.error_bounds import largest_share
from ...workloads.optimizer_classes import promises_fused
from .compiled_optimizers import OPTIMIZERS, OVERFLOW, PARAMETERS, STEPS, UNSCALED, Seen, Training, draw, overflowed
from .support import compiler, inductor

# Without elements these divide by their number, complex numbers they and the fused implementations refuse.
_REFUSES_SOME = ("Adafactor", "Muon")
GRAPHED = {"aot_eager": ("fp32", "complex"), "inductor": ("fp32",)}  # inductor compiles no complex numbers in 2.6
OPERATIONS = 32  # of which a change is rounded in each at most, as an entry of the state is


@contract("AMP-COMPILE-066")
@pytest.mark.parametrize("optimizer", [by_seed("standard", 6, name) for name in OPTIMIZERS])
def test_every_optimizer(case: Case, target: Target, rng: torch.Generator, optimizer: str) -> None:
    _judge(case, target, rng, optimizer, "eager")


@contract("AMP-COMPILE-066")
@pytest.mark.parametrize("optimizer", [deep("full", name) for name in OPTIMIZERS])
def test_every_optimizer_in_a_graph(case: Case, target: Target, rng: torch.Generator, optimizer: str) -> None:
    _judge(case, target, rng, optimizer, "aot_eager")


@contract("AMP-COMPILE-066")
@needs("compiled kernels")
@pytest.mark.parametrize("optimizer", [deep("full", name) for name in OPTIMIZERS])
def test_every_optimizer_with_inductor(case: Case, target: Target, rng: torch.Generator, optimizer: str) -> None:
    with inductor(case):
        _judge(case, target, rng, optimizer, "inductor")


def _judge(case: Case, target: Target, rng: torch.Generator, optimizer: str, backend: str) -> None:
    """Judge every kind of parameters at level full, else one that the seed chooses; a graph takes seconds for each."""
    name, _, implementation = optimizer.partition("-")
    if implementation == "fused" and not promises_fused(name, target.device_type):
        _try_fused(case, target, name)
    kinds = [kind for kind in PARAMETERS if kind not in ("bf16", "mixed") or target.supports(torch.bfloat16)]
    if backend != "eager":
        kinds = [kind for kind in kinds if kind in GRAPHED[backend]]
    elif case.level != "full":
        kinds = [kinds[int(torch.randint(len(kinds), (), generator=rng))]]
    with compiler(case):
        for kind in kinds:
            torch._dynamo.reset()
            _steps_agree(case, target, rng, optimizer, kind, backend)


def _try_fused(case: Case, target: Target, name: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2, device=target.device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        getattr(torch.optim, name)([parameter], fused=True).step()
    except Exception as error:
        case.unsupported(f"no fused {name} on {target.device_type}: {error}")


def _steps_agree(case: Case, target: Target, rng: torch.Generator, optimizer: str, kind: str, backend: str) -> None:
    """Step both from the same parameters and state each time; one step overflows, where a scaler takes these."""
    drawn = draw(kind, target.device, rng)
    # Muon orthogonalizes in bf16, in sums and products that compiled code may take in another order.
    coarsest = torch.finfo(torch.bfloat16).eps / 2 if optimizer.startswith("Muon") else 0.0
    values = drawn()
    try:
        plain, ours = (Training(optimizer, values, scaled=kind not in UNSCALED) for _ in range(2))
    except Exception as error:
        _expect_refusal(case, optimizer, kind, error)
        return
    ours.optimizer.step = torch.compile(ours.optimizer.step, backend=backend)
    for number in range(STEPS):
        what = f"{kind}, step {number + 1}"
        given: list[torch.Tensor | None] = list(drawn())
        if kind == "missing":
            given[1] = None
        overflows = number == OVERFLOW and kind not in UNSCALED
        if overflows:
            given = overflowed(given)
        before, wanted, seen = plain.seen(), plain.step(given), ours.step(given)
        if wanted.raised is not None:
            _expect_refusal(case, optimizer, kind, wanted.raised)
            alike = isinstance(seen.raised, type(wanted.raised))
            case.true(f"{what}: refused compiled as in eager", alike, repr(seen.raised))
            return
        case.equal(f"{what}: error", seen.raised and f"{type(seen.raised).__name__}: {seen.raised}"[:200], None)
        case.equal(f"{what}: loss scale", ours.scaler.get_scale(), plain.scaler.get_scale())
        _compare(case, what, seen, wanted, before, coarsest)
        if overflows:
            _unchanged(case, f"{what}, skipped", seen, before)
        ours.follow(plain)


def _expect_refusal(case: Case, optimizer: str, kind: str, error: Exception) -> None:
    """Expect an error of eager only for what the optimizer takes nowhere."""
    name, _, implementation = optimizer.partition("-")
    known = (
        name in _REFUSES_SOME
        if kind == "empty"
        else kind == "complex" and (name in _REFUSES_SOME or implementation == "fused")
    )
    if not known:
        raise error
    case.note(f"{kind}: refused in eager too", f"{type(error).__name__}: {error}"[:100])


def _unchanged(case: Case, what: str, seen: Seen, before: Seen) -> None:
    case.equal(f"{what}: entries of the state", _types(seen.state), _types(before.state))
    pairs = {
        f"parameter {number}": pair for number, pair in enumerate(zip(seen.parameters, before.parameters, strict=True))
    }
    pairs |= {
        f"state {place}": (seen.state[place], value) for place, value in before.state.items() if torch.is_tensor(value)
    }
    case.equal(f"{what}: changed", [place for place, (now, then) in pairs.items() if not torch.equal(now, then)], [])


def _compare(case: Case, what: str, seen: Seen, wanted: Seen, before: Seen, coarsest: float) -> None:
    case.equal(f"{what}: entries of the state", _types(seen.state), _types(wanted.state))
    far: dict[str, float] = {}
    for number, (one, right, then) in enumerate(
        zip(seen.parameters, wanted.parameters, before.parameters, strict=True)
    ):
        entries = [value for place, value in wanted.state.items() if place.startswith(f"{number}/")]
        unit = max(coarsest, *(_unit(value) for value in (right, *entries)))
        if not right.numel():
            continue
        # A change may be the difference of larger numbers, as momentum is: the largest stands for all of them.
        size, way = right.abs(), (right - then).abs().max()
        far[f"parameter {number}"] = largest_share(one - right, unit * (2 * (size + way) + OPERATIONS * way))
    for place, right in wanted.state.items():
        if isinstance(right, torch.Tensor) and right.numel() and place in seen.state:
            bound = OPERATIONS * _unit(right) * right.abs().max()
            far[f"state {place}"] = largest_share(seen.state[place] - right, bound.expand(right.shape))
    beyond = {place: share for place, share in far.items() if not share <= 1}
    case.equal(f"{what}: distances beyond what roundings explain", beyond, {})


def _types(state: dict[str, Any]) -> dict[str, str]:
    """Return the dtype and shape of each entry, or its value if it is no tensor."""
    return {
        place: f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        for place, value in state.items()
    }


def _unit(value: Any) -> float:
    """Return the unit roundoff of a tensor's dtype; 0 for a number of Python, a count and what has no elements."""
    if (
        not isinstance(value, torch.Tensor)
        or not (value.is_floating_point() or value.is_complex())
        or not value.numel()
    ):
        return 0.0
    return torch.finfo(value.dtype).eps / 2
