"""Check that the weight cache serves every op of the lower precision list as it serves linear."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ..op_comparison import Arm, backward, bits, difference, operands, side_by_side, tensors_of, with_operands

Program: TypeAlias = "Callable[[Arm, partial[Any]], list[Any]]"


class _Interruption(Exception):
    """Raised to leave a region early."""


def _twice(region: Arm, call: partial[Any]) -> list[Any]:
    with region():
        return [call(), call()]


def _after(mode: Callable[[], Any], region: Arm, call: partial[Any]) -> list[Any]:
    with region():
        with mode():
            call()
        return [call()]


def _slices(region: Arm, call: partial[Any]) -> list[Any]:
    """Use the halves of one tensor, as a model does whose projections lie in one weight."""

    def half(number: int) -> Callable[[Any], Any]:
        return lambda value: whole[id(value)][number] if id(value) in whole else value

    whole = {id(leaf): torch.stack([leaf, leaf.flip(0)]) for leaf in operands(call)}
    halves = [with_operands(call, half(number)) for number in range(2)]
    with region():
        return [one() for one in (*halves, *halves)]


def _beside_itself(region: Arm, call: partial[Any]) -> list[Any]:
    """Use each tensor by an op on no list too, before and after, as a head does that is tied to an embedding."""
    with region():
        return [*(leaf * 1 for leaf in operands(call)), call(), *(leaf * 3 for leaf in operands(call))]


def _halve(call: partial[Any]) -> None:
    with torch.no_grad():
        for leaf in operands(call):
            leaf.mul_(0.5)


def _changed(region: Arm, call: partial[Any]) -> list[Any]:
    with region():
        call()
    _halve(call)
    with region():
        return [call()]


def _changed_after_an_exception(region: Arm, call: partial[Any]) -> list[Any]:
    with contextlib.suppress(_Interruption), region():
        call()
        raise _Interruption
    return _changed(region, call)


def _unfrozen(region: Arm, call: partial[Any]) -> list[Any]:
    learning = [leaf for leaf in operands(call) if leaf.requires_grad]
    with region():
        for leaf in learning:
            leaf.requires_grad_(False)
        call()
        for leaf in learning:
            leaf.requires_grad_()
        return [call(), call()]


PROGRAMS: dict[str, Program] = {
    "twice": _twice,
    "after no_grad": partial(_after, torch.no_grad),
    "after inference_mode": partial(_after, torch.inference_mode),
    "of slices": _slices,
    "beside other uses": _beside_itself,
    "after a change": _changed,
    "after an exception": _changed_after_an_exception,
    "after it was frozen": _unfrozen,
}


def _seen(program: Program, region: Arm, call: partial[Any]) -> dict[str, tuple[Any, ...]]:
    """Return types, shapes and bits of the results, and of the gradients of the op's tensors."""
    torch.manual_seed(0)
    results = [result for result in tensors_of(program(region, call)) if result.is_floating_point()]
    backward([result for result in results if result.requires_grad])
    found = {f"result {number}": bits(result) for number, result in enumerate(results)}
    leaves = enumerate(operands(call))
    return found | {f"gradient {number}": bits(leaf.grad) for number, leaf in leaves if leaf.requires_grad}


@contract("AMP-CACHE-057", on=("cpu", "cuda", "xpu", "mps", "mtia", "maia"))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda name: name.replace(" ", "_"))
def test_listed_ops(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, program: str) -> None:
    judged = 0
    measure = partial(_seen, PROGRAMS[program])
    for name, seen, manual in side_by_side(target, "lower_precision", amp_dtype, rng.initial_seed(), measure):
        judged += 1
        wrong = {what: difference(seen[what], one) for what, one in manual.items() if seen[what] != one}
        if wrong:
            case.equal(f"{name} {program}: what differs from manual casts", wrong, {})
    case.at_least("operations judged", judged, 1)
