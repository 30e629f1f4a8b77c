"""Check Jacobians and Hessians with respect to arguments of several types, and of results of several types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch compiles its first jvp with it
]
SIZES = {"low": 2, "full": 3, "other": 2, "wide": 1}
# A number has these roundings in float32, and is then rounded to the type of the derivative.
ROUNDINGS = 64 * 2.0**-24
Values = Mapping[str, Tensor]


def _program(values: Values, compute: torch.dtype, narrow: torch.dtype) -> dict[str, Tensor]:
    """Return results in two types of computations in one: polynomials with positive factors, without cancellation."""
    inner = {name: 0.3 * one.to(compute).square().sum() for name, one in values.items() if name != "full"}
    full = values["full"].to(compute)
    found = (1.001 * full.square() + sum(inner.values())) * (0.7 + full * (1.1 + inner["low"] * inner["other"]))
    return {"narrow": (0.37 * found[:2]).to(narrow), "full": found}


def _total(values: Values, compute: torch.dtype) -> Tensor:
    return _program(values, compute, compute)["full"].sum()


Names = tuple[str, ...]
Function = Callable[..., Any]
Derivative = Callable[[Function, tuple[Any, ...], tuple[int, ...]], Any]
# How Jacobians are taken of a function of several arguments, and whether they have the types of the results.
JACOBIANS: dict[str, tuple[Derivative, bool]] = {
    "jacrev": (lambda f, given, at: torch.func.jacrev(f, at)(*given), False),
    "jacrev in chunks": (lambda f, given, at: torch.func.jacrev(f, at, chunk_size=2)(*given), False),
    "jacrev with has_aux": (
        lambda f, given, at: torch.func.jacrev(lambda *some: (f(*some), ()), at, has_aux=True)(*given)[0],
        False,
    ),
    "jacfwd": (lambda f, given, at: torch.func.jacfwd(f, at)(*given), True),
    "jacfwd with has_aux": (
        lambda f, given, at: torch.func.jacfwd(lambda *some: (f(*some), ()), at, has_aux=True)(*given)[0],
        True,
    ),
}
# Of a scalar: the Hessian has the types of the first derivatives' arguments, of the second ones', or of the result.
HESSIANS: dict[str, tuple[Derivative, str]] = {
    "hessian": (lambda f, given, at: torch.func.hessian(f, at)(*given), "row"),
    "jacfwd of jacrev": (lambda f, given, at: torch.func.jacfwd(torch.func.jacrev(f, at), at)(*given), "row"),
    "jacrev of jacrev": (lambda f, given, at: torch.func.jacrev(torch.func.jacrev(f, at), at)(*given), "column"),
    "jacrev of jacfwd": (lambda f, given, at: torch.func.jacrev(torch.func.jacfwd(f, at), at)(*given), "column"),
    "jacfwd of jacfwd": (lambda f, given, at: torch.func.jacfwd(torch.func.jacfwd(f, at), at)(*given), "result"),
    "jacrev of grad": (lambda f, given, at: torch.func.jacrev(torch.func.grad(f, at), at)(*given), "column"),
    "jacfwd of grad": (lambda f, given, at: torch.func.jacfwd(torch.func.grad(f, at), at)(*given), "row"),
}
OLD_JACOBIANS: dict[str, dict[str, Any]] = {
    "functional.jacobian": {},
    "functional.jacobian, vectorized": {"vectorize": True},
    "functional.jacobian, forward": {"vectorize": True, "strategy": "forward-mode"},
}
OLD_HESSIANS: dict[str, tuple[dict[str, Any], str]] = {
    "functional.hessian": ({}, "column"),
    "functional.hessian, vectorized": ({"vectorize": True}, "column"),
    "functional.hessian, forward": ({"vectorize": True, "outer_jacobian_strategy": "forward-mode"}, "row"),
}


def _values(target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> dict[str, Tensor]:
    """Return arguments of both 16-bit types, of float32 and of float64, where the target has them."""
    other = torch.float16 if amp_dtype is torch.bfloat16 else torch.bfloat16
    wide = torch.float64 if target.computes_in(torch.float64) else torch.float32
    types = {"low": amp_dtype, "full": torch.float32, "other": other, "wide": wide}
    return {
        name: (0.5 + torch.rand(SIZES[name], generator=rng)).to(target.device, kind) for name, kind in types.items()
    }


def _orders(case: Case) -> list[Names]:
    names = tuple(SIZES)
    turns = range(case.samples(quick=2, standard=len(names), full=len(names)))
    return [names[turn:] + names[:turn] for turn in turns]


def _judge(found: dict[str, str], what: str, seen: Any, kind: torch.dtype, exact: Tensor) -> None:
    """Note a derivative of another type, or beyond the roundings of float32 and one to its type and back."""
    if not isinstance(seen, Tensor) or seen.dtype != kind or seen.shape != exact.shape:
        found[what] = f"{getattr(seen, 'dtype', type(seen))}, {tuple(getattr(seen, 'shape', ()))} in place of {kind}"
        return
    bound = (ROUNDINGS + torch.finfo(kind).eps) * float(exact.abs().max())
    if not (far := float((seen.detach().cpu().double() - exact).abs().max())) <= bound:
        found[what] = f"{far:.3g} from float64 in place of at most {bound:.3g}"


def _called(names: Names, function: Callable[[Values], Any]) -> Function:
    return lambda *given: function(dict(zip(names, given, strict=True)))


def _require(case: Case, target: Target) -> None:
    """Ask for both 16-bit types, and for tangents of a product with a number, which torch makes float64 on a device."""

    def tangent() -> object:
        x = torch.ones(2, device=target.device)
        return torch.func.jvp(lambda one: 0.3 * one.square().sum(), (x,), (x,))

    case.require_arithmetic(target, torch.float16, torch.bfloat16)
    case.require_call(target, "take tangents of a product with a number", tangent)


@contract("AMP-TRANSFORM-021")
def test_jacobians(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    _require(case, target)
    values = _values(target, amp_dtype, rng)
    exact = _exact_jacobian(values)
    narrow = {"narrow": amp_dtype, "full": torch.float32}
    run = partial(_program, compute=torch.float32, narrow=amp_dtype)
    wrong: dict[str, str] = {}
    every = tuple(range(len(values)))
    for number, names in enumerate(_orders(case)):
        given = tuple(values[name] for name in names)
        for at in (every,) if number else (every, (3, 1), (2,)):
            for way, (take, forward) in JACOBIANS.items():
                seen = take(_called(names, run), given, at)
                for result, rows in seen.items():
                    for place, one in zip(at, rows, strict=True):
                        kind = narrow[result] if forward else values[names[place]].dtype
                        what = f"{way}, of {result} to {names[place]}, argument {place} of {names}, argnums {at}"
                        _judge(wrong, what, one, kind, exact[result][names[place]])
        for way, options in OLD_JACOBIANS.items():
            ordered = _called(names, lambda some: tuple(run(some).values()))
            seen = torch.autograd.functional.jacobian(ordered, given, **options)
            for result, rows in zip(narrow, seen, strict=True):
                for name, one in zip(names, rows, strict=True):
                    kind = narrow[result] if "strategy" in options else values[name].dtype
                    _judge(wrong, f"{way}, of {result} to {name} of {names}", one, kind, exact[result][name])
    for way, (take, forward) in JACOBIANS.items():
        seen = take(run, (values,), (0,))  # of one argument that is a mapping
        for result, (row,) in seen.items():
            for name, one in row.items():
                kind = narrow[result] if forward else values[name].dtype
                _judge(wrong, f"{way}, of {result} to {name} in a mapping", one, kind, exact[result][name])
    case.equal("Jacobians of another type, shape or precision", wrong, {})


def _exact_jacobian(values: Values) -> dict[str, dict[str, Tensor]]:
    wide = {name: one.cpu().double() for name, one in values.items()}
    names = tuple(wide)
    whole = _called(names, lambda some: tuple(_program(some, torch.float64, torch.float64).values()))
    found: Any = torch.autograd.functional.jacobian(whole, tuple(wide.values()))
    return {result: dict(zip(names, rows, strict=True)) for result, rows in zip(("narrow", "full"), found, strict=True)}


@contract("AMP-TRANSFORM-021")
def test_hessians(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    _require(case, target)
    values = _values(target, amp_dtype, rng)
    wide = tuple(one.cpu().double() for one in values.values())
    whole = _called(tuple(values), lambda some: _total(some, torch.float64))
    rows: Any = torch.autograd.functional.hessian(whole, wide)
    exact = {name: dict(zip(values, row, strict=True)) for name, row in zip(values, rows, strict=True)}
    slopes = dict(zip(values, torch.autograd.functional.jacobian(whole, wide), strict=True))
    wrong: dict[str, str] = {}
    every = tuple(range(len(values)))
    for names in _orders(case):
        given = tuple(values[name] for name in names)
        total = _called(names, lambda some: _total(some, torch.float32))
        taken = {way: (take(total, given, every), kind) for way, (take, kind) in HESSIANS.items()}
        for way, (options, kind) in OLD_HESSIANS.items():
            taken[way] = torch.autograd.functional.hessian(total, given, **options), kind
        for way, (seen, kind) in taken.items():
            for row, line in zip(names, seen, strict=True):
                for column, one in zip(names, line, strict=True):
                    dtype = {"row": values[row], "column": values[column], "result": torch.ones(())}[kind].dtype
                    _judge(wrong, f"{way}, {row} and {column} of {names}", one, dtype, exact[row][column])
        for at in (every, every[::-1]):  # gradients come in the order of argnums
            for place, one in zip(at, torch.func.grad(total, at)(*given), strict=True):
                name = names[place]
                _judge(wrong, f"grad, {name} of {names}, argnums {at}", one, values[name].dtype, slopes[name])
        _, tangent = torch.func.jvp(total, given, tuple(torch.ones_like(one) for one in given))
        promised = torch.stack([one.sum() for one in slopes.values()]).sum()
        _judge(wrong, f"jvp, {names}", tangent, torch.float32, promised)
    case.equal("Hessians, gradients and tangents of another type, shape or precision", wrong, {})
