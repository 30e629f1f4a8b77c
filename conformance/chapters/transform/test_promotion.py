"""Check the types that vmap promotes to against a loop, and types of forward derivatives against the results'."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from ...harness.check import Case, contract
from ...harness.targets import Target

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch compiles its first jvp with it
]
Two: TypeAlias = Callable[[Tensor, Tensor], Tensor]
One: TypeAlias = Callable[[Tensor], Tensor]
SAMPLES = 3
# A kernel for whole vectors may round a function otherwise than the one for a number: by units in the last place.
ULPS = 4

_OF_TWO: Mapping[str, Two] = {
    "add": lambda a, b: torch.add(a, b),
    "sub": lambda a, b: torch.sub(a, b),
    "mul": lambda a, b: torch.mul(a, b),
    "div": lambda a, b: torch.div(a, b),
    "floor_divide": lambda a, b: torch.floor_divide(a, b),
    "fmod": lambda a, b: torch.fmod(a, b),
    "remainder": lambda a, b: torch.remainder(a, b),
    "pow": lambda a, b: torch.pow(a, b),
    "maximum": lambda a, b: torch.maximum(a, b),
    "minimum": lambda a, b: torch.minimum(a, b),
    "atan2": lambda a, b: torch.atan2(a, b),
    "copysign": lambda a, b: torch.copysign(a, b),
    "eq": lambda a, b: torch.eq(a, b),
    "lt": lambda a, b: torch.lt(a, b),
}
PROMOTING: Mapping[str, Mapping[str, Two]] = {
    "two-operands": _OF_TWO,
    **{
        name: {name: op}
        for name, op in {
            "where": lambda a, b: torch.where(a > 3, a, b),
            "addcmul": lambda a, b: torch.addcmul(a, b, b),
            "addcdiv": lambda a, b: torch.addcdiv(a, b, b),
            "clamp": lambda a, b: torch.clamp(a, b, b + 1),
            "clamp-from-below": lambda a, b: torch.clamp(a, min=b),
            "lerp": lambda a, b: torch.lerp(a, a, b),
            "heaviside": lambda a, b: torch.heaviside(a, b),
            "binary_cross_entropy_with_logits": lambda a, b: F.binary_cross_entropy_with_logits(a, b),
        }.items()
    },
}
"""Ops of operands of two types by case: those that some torch promotes otherwise under vmap have one of their own."""


def _types(case: Case, target: Target, rng: torch.Generator) -> list[torch.dtype]:
    """Return the types of the operands: at quick a 16-bit one and two more, of which one is drawn."""
    low = [torch.bfloat16, torch.float16]
    found = [kind for kind in (*low, torch.float32, torch.float64, torch.int64) if target.computes_in(kind)]
    if case.level == "quick" and len(found) > 3:
        return [*found[:2], found[2 + int(torch.randint(len(found) - 2, (), generator=rng))]]
    return found


def _operand(target: Target, kind: torch.dtype, rank: int, batched: bool, start: int) -> Tensor:
    """Return small integers from `start` on, of samples or of one, of numbers or of rows of two."""
    rows = torch.arange(start, start + 2 * SAMPLES).reshape(SAMPLES, 2)
    samples = (rows if rank else rows[:, 0]).to(target.device, kind)
    return samples if batched else samples[0]


def _result(call: Callable[[], Tensor]) -> Tensor | None:
    """Return what a call returns, None if it refuses."""
    try:
        return call()
    except (RuntimeError, NotImplementedError, ValueError):
        return None


def _unlike(op: Two, a: Tensor, b: Tensor, batched: tuple[bool, bool]) -> str:
    """Say how vmap of an op differs from the loop over the samples, or nothing."""
    dims = tuple(0 if one else None for one in batched)

    def looped() -> Tensor:
        pairs = ((a[at] if batched[0] else a, b[at] if batched[1] else b) for at in range(SAMPLES))
        return torch.stack([op(*pair) for pair in pairs])

    expected, seen = _result(looped), _result(lambda: torch.func.vmap(op, in_dims=dims)(a, b))
    if expected is None or seen is None:
        return "" if expected is seen else "refused" if seen is None else f"{seen.dtype}, which the loop refuses"
    if seen.dtype != expected.dtype:
        return f"{seen.dtype} in place of {expected.dtype}"
    places = ULPS * torch.finfo(seen.dtype).eps if seen.is_floating_point() else 0.0
    alike = torch.allclose(seen.double().cpu(), expected.double().cpu(), rtol=places, atol=0.0, equal_nan=True)
    return "" if alike else f"{seen.tolist()} in place of {expected.tolist()}"


@contract("AMP-TRANSFORM-024", on="cpu")
@pytest.mark.parametrize("ops", list(PROMOTING))
def test_vmap_promotes(case: Case, target: Target, rng: torch.Generator, ops: str) -> None:
    wrong: dict[str, str] = {}
    types = _types(case, target, rng)
    for name, op in PROMOTING[ops].items():
        for one, other in itertools.product(types, types):
            for ranks in itertools.product((0, 1), repeat=2):
                for batched in ((True, True), (True, False), (False, True)):
                    given = zip((one, other), ranks, batched, (1, 2), strict=True)
                    a, b = (_operand(target, *each) for each in given)
                    if text := _unlike(op, a, b, batched):
                        shown = [f"rank {rank}{', batched' * each}" for rank, each in zip(ranks, batched, strict=True)]
                        wrong[f"{name} of {one}, {shown[0]}, and {other}, {shown[1]}"] = text
    case.at_least("types", len(types), 2)
    case.equal("calls whose vmap is not the loop over them", dict(list(wrong.items())[:6]), {})


_WITH_NUMBERS: Mapping[str, One] = {
    "plus": lambda x: x + 1.5,
    "number plus": lambda x: 1.5 + x,
    "minus": lambda x: x - 1.5,
    "number minus": lambda x: 1.5 - x,
    "times": lambda x: x * 0.5,
    "number times": lambda x: 0.5 * x,
    "over": lambda x: x / 0.5,
    "number over": lambda x: 0.5 / x,
    "to a power": lambda x: x**2.0,
    "power": lambda x: 2.0**x,
    "integer times": lambda x: 2 * x,
    "where": lambda x: torch.where(x > 0, x, 2.0),
    "clamp": lambda x: x.clamp(0.25, 8.0),
}
RANKS: Mapping[str, One] = {
    "rows": lambda x: x * x,
    "an-element": lambda x: x[0] * x[1],
    "a-sum": lambda x: x.sum(),
    "a-mean": lambda x: x.mean(),
}
"""Parts of programs before the number of Python."""
AT_QUICK = ("plus", "number times", "over", "power")


@contract("AMP-TRANSFORM-021")
@pytest.mark.parametrize("part", list(RANKS))
def test_jacobians_with_numbers(case: Case, target: Target, amp_dtype: torch.dtype, part: str) -> None:
    wrong: dict[str, str] = {}
    quick = case.level == "quick"
    for kind in (amp_dtype,) if quick else (amp_dtype, torch.float32):
        x = torch.tensor([1.0, 2.0, 0.5], dtype=kind, device=target.device)
        for name in AT_QUICK if quick else _WITH_NUMBERS:

            def program(x: Tensor, op: One = _WITH_NUMBERS[name]) -> Tensor:
                return op(RANKS[part](x))

            promised = torch.func.jacrev(program)(x.double().cpu())
            case.require_call(target, "take a Jacobian", partial(torch.func.jacrev(program), x))
            for way, take in (("jacfwd", torch.func.jacfwd), ("jacrev", torch.func.jacrev)):
                seen = take(program)(x)
                if seen.dtype != program(x).dtype:
                    wrong[f"{way}, {name}, of {kind}"] = f"{seen.dtype} in place of {program(x).dtype}"
                elif not torch.allclose(seen.cpu().double(), promised, rtol=8 * torch.finfo(kind).eps):
                    wrong[f"{way}, {name}, of {kind}"] = f"{seen.tolist()} in place of {promised.tolist()}"
    case.equal("Jacobians of another type or value", dict(list(wrong.items())[:6]), {})


_FURTHER: Mapping[str, One] = {
    "times, in place": lambda x: x.clone().mul_(2.5),
    "plus, in place": lambda x: x.clone().add_(1.5),
    "remainder": lambda x: x % 8.0,
    "alpha": lambda x: torch.add(x, x, alpha=0.5),
    "value of addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "weight of lerp": lambda x: torch.lerp(x, torch.ones_like(x), 0.25),
    "tensor": lambda x: x * torch.tensor(2.5, device=x.device).to(x.dtype),
    "none": lambda x: -x,
}


@contract("AMP-TRANSFORM-005")
@pytest.mark.parametrize("shape", [(), (1,), (3, 2)], ids=["no-dimensions", "one-element", "matrix"])
def test_tangents_of_arithmetic_with_numbers(
    case: Case, target: Target, amp_dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Such as a loss times a scale, of twos, whose results and tangents are exact; the power of two is not."""
    for given in (torch.float32, amp_dtype):
        for name, op in {**_WITH_NUMBERS, **_FURTHER}.items():
            if name == "power":
                continue
            x = torch.full(shape, 2.0, device=target.device, dtype=given)
            wide = x.cpu().double()
            exact = torch.func.jvp(op, (wide,), (torch.ones_like(wide),))[1]
            with target.autocast(amp_dtype), forward_ad.dual_level():
                primal, seen = forward_ad.unpack_dual(op(forward_ad.make_dual(x, torch.ones_like(x))))
                seen = torch.zeros_like(primal) if seen is None else seen
            with target.autocast(amp_dtype):
                _, by_jvp = torch.func.jvp(op, (x,), (torch.ones_like(x),))
            for how, one in (("dual numbers", seen), ("jvp", by_jvp)):
                case.equal(f"{name}, {given}: type of the tangent by {how}", one.dtype, primal.dtype)
                case.equal(f"{name}, {given}: tangent by {how}", one.tolist(), exact.tolist())


_GIVEN: Mapping[str, One] = {
    "sum": lambda x: x.sum(dtype=torch.float32),
    "mean": lambda x: x.mean(dtype=torch.float32),
    "nansum": lambda x: x.nansum(dtype=torch.float32),
    "prod": lambda x: x.prod(dtype=torch.float32),
    "cumsum": lambda x: x.cumsum(0, dtype=torch.float32),
    "cumprod": lambda x: x.cumprod(0, dtype=torch.float32),
    "softmax": lambda x: x.softmax(0, dtype=torch.float32),
    "log_softmax": lambda x: x.log_softmax(0, dtype=torch.float32),
    "to": lambda x: x.to(torch.float32),
    "cat": lambda x: torch.cat([x, torch.ones(2, device=x.device)]),
    "add": lambda x: x + torch.ones(3, device=x.device),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros(3, device=x.device)),
}
WIDENING: Mapping[str, Mapping[str, One]] = {
    "others": _GIVEN,
    "vector_norm": {"vector_norm": lambda x: torch.linalg.vector_norm(x, dtype=torch.float32)},
    "copy_": {"copy_": lambda x: torch.zeros(3, device=x.device).copy_(x)},
}
"""Ops of a 16-bit tensor whose results are float32, by case: those whose tangents are not in some torch stand alone."""


def _tangents(target: Target, kind: torch.dtype, ops: Mapping[str, One]) -> Iterator[tuple[str, torch.dtype, Any]]:
    """Give the name of each op, the type of its result, and that of its tangent."""
    x = torch.tensor([1.0, 2.0, 0.5], dtype=kind, device=target.device)
    for name, op in ops.items():
        with forward_ad.dual_level():
            result = _result(partial(op, forward_ad.make_dual(x, torch.ones_like(x))))
            if result is not None:  # some ops have no forward derivative
                value, tangent = forward_ad.unpack_dual(result)
                yield name, value.dtype, None if tangent is None else tangent.dtype


@contract("AMP-TRANSFORM-005", on="cpu")
@pytest.mark.parametrize("op", list(WIDENING))
def test_tangents_of_wider_results(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    found = list(_tangents(target, amp_dtype, WIDENING[op]))
    case.at_least("ops", len(found), 1)
    for name, value, tangent in found:
        case.equal(f"type of the result of {name} (control)", value, torch.float32)
        case.equal(f"type of the tangent of {name}", tangent, value)
