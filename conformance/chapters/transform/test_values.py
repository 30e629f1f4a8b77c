"""Check that what transforms return beside a derivative, the value and aux, is what the function returned."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...harness.check import Case, contract, deep
from ...harness.targets import Target

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch compiles its first jvp with it
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]
Function = Callable[..., Any]
Given = tuple[Tensor, ...]
Argnums: TypeAlias = int | tuple[int, ...]
ARGNUMS: tuple[Argnums, ...] = (0, 1, (0, 1), (1, 0))
BATCHED = ("grad_and_value", "grad", "jacrev", "jacfwd")


def _program(loss: torch.dtype) -> tuple[Function, Function]:
    """Return functions with a scalar value in that type, large and of more bits than a narrower type holds.

    The first returns the value, the second aux of several types too. All is exact but for the product with `size`.
    """

    size = 1.001 * (2.0**10 if loss is torch.float16 else 2.0**17)

    def scaled(product: Tensor) -> Tensor:
        return product.to(loss) * torch.full((), size, device=product.device).to(loss)

    def aux_of(a: Tensor, b: Tensor, product: Tensor) -> dict[str, Any]:
        return {
            "wide": -scaled(product.detach()),
            "own": (a.detach(), b.detach()),
            "integers": product.detach().to(torch.int64),
            "flags": [product.detach() > 2],
        }

    def both(a: Tensor, b: Tensor) -> tuple[Tensor, dict[str, Any]]:
        product = torch.mm(a.float(), b.float())  # in the amp dtype in a region
        return scaled(product).amax(), aux_of(a, b, product)

    return lambda *given: both(*given)[0], both


def _ones(given: Given) -> Given:
    return tuple(torch.ones_like(one) for one in given)


def _ways(
    f: Function, both: Function, given: Given, argnums: Sequence[Argnums], batched: Sequence[str]
) -> dict[str, tuple[Callable[[], Any], str]]:
    """Return, by name, calls that give what the function gives, and what of it: its value, its aux or both.

    Under vmap are those that `batched` names.
    """
    func, old = torch.func, torch.autograd.functional
    found: dict[str, tuple[Callable[[], Any], str]] = {
        "vjp": (lambda: func.vjp(f, *given)[0], "value"),
        "vjp with aux": (lambda: func.vjp(both, *given, has_aux=True)[::2], "both"),
        "jvp": (lambda: func.jvp(f, given, _ones(given))[0], "value"),
        "jvp with aux": (lambda: func.jvp(both, given, _ones(given), has_aux=True)[::2], "both"),
        "functional.vjp": (lambda: old.vjp(f, given)[0], "value"),
        "functional.jvp": (lambda: old.jvp(f, given, _ones(given))[0], "value"),
        "functional.vhp": (lambda: old.vhp(f, given, _ones(given))[0], "value"),
        "vmap": (lambda: _alone(func.vmap(both)(*_batch(given))), "both"),
        "functionalize": (lambda: func.functionalize(both)(*given), "both"),
    }
    for at in argnums:
        found[f"grad_and_value, {at}"] = functools.partial(_beside, "grad_and_value", f, at, given, aux=False), "value"
        for name in BATCHED:
            wanted = "both" if name == "grad_and_value" else "aux"
            found[f"{name} with aux, {at}"] = functools.partial(_beside, name, both, at, given), wanted
            if name in batched:
                found[f"vmap of {name}, {at}"] = functools.partial(_beside_batch, name, both, at, given), wanted
    return found


def _batch(given: Given) -> Given:
    return tuple(one[None] for one in given)


def _alone(tree: Any) -> Any:
    return pytree.tree_map(lambda one: one[0], tree)


def _beside(name: str, f: Function, at: Argnums, given: Given, *, aux: bool = True) -> Any:
    """Return what a transform gives beside the derivative."""
    return getattr(torch.func, name)(f, at, has_aux=aux)(*given)[1]


def _beside_batch(name: str, f: Function, at: Argnums, given: Given) -> Any:
    made = getattr(torch.func, name)(f, at, has_aux=True)
    return _alone(torch.func.vmap(made)(*_batch(given))[1])


def _linearized(f: Function, given: Given) -> Any:
    return torch.func.linearize(f, *given)[0]


def _unlike(seen: Any, expected: Any) -> str | None:
    """Return the first leaf that differs in type or bits, or None."""
    ours, theirs = pytree.tree_leaves(seen), pytree.tree_leaves(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors in place of {len(theirs)}"
    for one, other in zip(ours, theirs, strict=True):
        if one.dtype != other.dtype or not torch.equal(one.detach(), other.detach()):
            values = [f"{each.flatten()[0].item()!r} of {each.dtype}" for each in (one, other)]
            return " in place of ".join(values)
    return None


@contract("AMP-TRANSFORM-023")
@pytest.mark.parametrize("region", ["none", "around", deep("standard", "inside")])
def test_values_and_aux(case: Case, target: Target, amp_dtype: torch.dtype, region: str) -> None:
    types = [torch.float32, amp_dtype]
    samples = case.samples(quick=1, standard=4, full=4)
    wrong: dict[str, str] = {}
    for number, (kind, loss) in enumerate(itertools.product(types, types)):
        f, both = _program(loss)
        if region == "inside":
            f, both = (_inside(target, amp_dtype, one) for one in (f, both))
        other = types[(types.index(kind) + number) % 2]  # the type of the second argument
        given = (torch.tensor([[1.0, 2.0]], device=target.device).to(kind), _column(target, other))
        argnums = (*ARGNUMS[number:], *ARGNUMS[:number])
        batched = (*BATCHED[number:], *BATCHED[:number])
        with target.autocast(amp_dtype) if region == "around" else contextlib.nullcontext():
            value, aux = both(*given)
            expected = {"value": value, "aux": aux, "both": (value, aux)}
            ways = _ways(f, both, given, argnums[:samples], batched[:samples])
            if samples > 1 or (kind, loss) == (amp_dtype, torch.float32):  # linearize traces the function
                ways["linearize"] = functools.partial(_linearized, f, given), "value"
            for way, (take, part) in ways.items():
                if different := _unlike(take(), expected[part]):
                    wrong[f"{way}: arguments of {kind} and {other}, value of {loss}"] = different
    case.equal("values and aux that are not those of the function", wrong, {})


def _column(target: Target, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[1.0], [2.0]], device=target.device).to(dtype)


def _inside(target: Target, amp_dtype: torch.dtype, f: Function) -> Function:
    def within(*given: Tensor) -> Any:
        with target.autocast(amp_dtype):
            return f(*given)

    return within
