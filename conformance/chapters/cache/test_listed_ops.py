"""Check that the weight cache serves every op of the lower precision list as it serves linear."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.generators import seed_torch
from ...oracles.policy import declared
from ...oracles.policy.lists import backend_of, composite, listings
from ...oracles.policy.samples import SAMPLES, Inputs
from ...oracles.trace.ops import OpTrace
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
    seed_torch(0)
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


def _dense(order: Callable[[int], Sequence[int]], tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers in memory whose dimensions lie in that order."""
    dimensions = list(order(tensor.dim()))
    back = [dimensions.index(place) for place in range(tensor.dim())]
    return tensor.permute(dimensions).contiguous().permute(back)


def _channels_first_after_batch(dimensions: int) -> list[int]:
    return [0, *range(2, dimensions), 1] if dimensions > 2 else list(range(dimensions))


# How the elements of a weight lie in memory.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "channels last": partial(_dense, _channels_first_after_batch),
    "transposed": partial(_dense, lambda dimensions: range(dimensions)[::-1]),
    "every other": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "part of a larger one": lambda tensor: torch.stack([tensor, tensor])[1],
}


def _leaf(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a leaf of these numbers that is no view: views are not cached."""
    laid = LAYOUTS[layout](tensor.detach())
    leaf = torch.empty(0, dtype=laid.dtype, device=laid.device)
    leaf.set_(laid.untyped_storage(), laid.storage_offset(), laid.size(), laid.stride())
    return leaf.requires_grad_()


def _casts(call: partial[Any], region: Arm) -> tuple[list[int], int]:
    """Return the casts of each operand in two uses of the call, and those of any float32 tensor."""
    with region(), OpTrace() as trace:
        for _ in range(2):
            call()
    wide = sum(one.source == torch.float32 for one in trace.conversions)
    return [len(trace.casts_of(leaf)) for leaf in operands(call)], wide


@contract("AMP-CACHE-001", on=("cpu", "cuda", "xpu", "mps", "mtia", "maia"))
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda name: name.replace(" ", "_"))
def test_one_cast_in_any_layout(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, layout: str
) -> None:
    block = torch.ones(1, device=target.device)
    case.require_call(target, "share a storage", lambda: torch.empty_like(block).set_(block.untyped_storage()))
    device_type = target.device_type
    backend = device_type if declared.changed(device_type) else backend_of(device_type)
    wrong, judged = {}, 0
    for listing in listings(backend, "lower_precision"):
        plain = SAMPLES[listing.sample](Inputs((torch.float32,), target.device, rng.initial_seed()))
        call = with_operands(plain, lambda value: _leaf(value, layout) if _is_floating(value) else value)
        narrow = with_operands(call, lambda value: value.detach().to(amp_dtype) if _is_floating(value) else value)
        if composite(listing) or not _runs(narrow):
            continue
        judged += 1
        # What the op itself casts inside, such as the math kernel of attention.
        _, inside = _casts(narrow, contextlib.nullcontext)
        each, total = _casts(call, partial(target.autocast, amp_dtype))
        if set(each) != {1} or total - inside != len(each):
            wrong[listing.sample] = (each, total - inside)
    case.equal("ops that cast an operand not once: casts of each, and of all", wrong, {})
    case.at_least("operations judged", judged, 1)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _runs(call: partial[Any]) -> bool:
    """Say whether the device has a kernel of the op for such operands."""
    try:
        call()
    except (RuntimeError, NotImplementedError):
        return False
    return True
