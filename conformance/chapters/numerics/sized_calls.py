"""Judge drawn products and convolutions: whole numbers, and how far what is not finite spreads."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...measure.children import told
from ...measure.precision import full_precision
from .drawn_ops import Draws
from .drawn_sizes import MOST, SIZED, Sized
from .support import is_refused

# Seconds of silence after which a process is considered dead.
PATIENCE = 120.0
OPERANDS = ("left", "right", "what is added")
# What an element of each operand of a convolution reaches, by the axis that it stays within: a tap meets the zeros of
# the padding too, and libraries compute several taps at once.
WITHIN = {("left", "result"): 0, ("right", "result"): 1, ("incoming gradient", "gradient by left"): 0}

# What a call does wrong, by what it is of; None where it cannot be judged.
Wrong = dict[str, str] | None
Judge = Callable[[Draws, Sized, torch.device, torch.dtype], Wrong]


def judged(
    judge: Judge, family: str, seed: int, count: int, device: torch.device, amp_dtype: torch.dtype
) -> Iterator[tuple[str, str, Wrong]]:
    """Yield the kind of so many drawn calls, their sizes, and what they do wrong.

    On a CPU they run in a process of their own, which some of them end.
    """
    if device.type != "cpu":
        for number in range(count):
            draws, one = _drawn(family, seed, number)
            yield one.kind, one.described(), judge(draws, one, device, amp_dtype)
        return
    begin = 0
    while begin < count:
        said, code = told(partial(_send, judge, family, seed, range(begin, count), amp_dtype), PATIENCE)
        answers = {number: answer for number, *answer in said}
        for kind, sizes, wrong in answers.values():
            yield kind, sizes, {"the process": f"ends with {code}"} if wrong == _BEGUN else wrong
        if code == 0:
            return
        if not said or (code is not None and code > 0):
            raise RuntimeError(f"the process that judges calls ended with {code}")
        begin = max(answers) + 1


_BEGUN = "begun"


def _send(judge: Judge, family: str, seed: int, numbers: range, amp_dtype: torch.dtype, sender: Any) -> None:
    """Send the number, kind and sizes of each call before it is made, and then with what it does wrong."""
    torch.set_num_threads(1)
    for number in numbers:
        draws, one = _drawn(family, seed, number)
        call = (number, one.kind, one.described())
        sender.send((*call, _BEGUN))
        try:
            wrong = judge(draws, one, torch.device("cpu"), amp_dtype)
        except RuntimeError as error:
            wrong = {"what it raises": str(error).splitlines()[0]}
        sender.send((*call, wrong))


def _computed(
    one: Sized, operands: list[Tensor], incoming: Tensor, region: AbstractContextManager[Any]
) -> dict[str, Tensor]:
    """Return the result and the gradient by each operand, on the CPU."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    with region:
        result = one.call(*leaves)
    gradients = torch.autograd.grad(result, leaves, incoming.to(result.device, result.dtype))
    names = ("result", *(f"gradient by {operand}" for operand in OPERANDS))
    return {name: tensor.detach().cpu().double() for name, tensor in zip(names, (result, *gradients), strict=False)}


def _drawn(family: str, seed: int, number: int) -> tuple[Draws, Sized]:
    draws = Draws(f"sizes of {family} {seed} {number}")
    return draws, SIZED[family](draws)


def wrong_numbers(draws: Draws, one: Sized, device: torch.device, amp_dtype: torch.dtype) -> Wrong:
    """Compare a call of whole numbers with the same in float64, in a region or of 16-bit operands."""
    in_region = draws.yes()
    if one.transformed and device.type != "cpu":
        return None
    exact = _computed(one, [operand.double() for operand in one.operands], one.incoming, contextlib.nullcontext())
    if max(float(tensor.abs().max()) for tensor in exact.values()) > MOST:
        return None
    given = [operand.to(device, None if in_region else amp_dtype) for operand in one.operands]
    region = torch.autocast(device.type, dtype=amp_dtype) if in_region else contextlib.nullcontext()
    try:
        with full_precision(device.type):
            seen = _computed(one, given, one.incoming, region)
    except RuntimeError as error:
        if in_region or not is_refused(error):
            raise
        return None
    wrong = {}
    for what, right in exact.items():
        off = seen[what].round() != right
        if off.any():
            first = f"{float(seen[what][off][0]):g} for {float(right[off][0]):g}"
            wrong[what] = f"{'in a region' if in_region else 'outside of one'}: {_share(off)}, such as {first}"
    return wrong


def spread(draws: Draws, one: Sized, device: torch.device, amp_dtype: torch.dtype) -> Wrong:
    """Look at which elements of a result and its gradients one that is not finite reaches, in a region."""
    place = draws.one(("left", "right", "incoming gradient"))
    special = draws.one((math.nan, math.inf, -math.inf))
    if one.transformed and device.type != "cpu":
        return None
    if place == "right" and one.options.get("padding"):
        return None  # a tap may meet zeros of the padding alone, which a kernel may leave out or not
    reads, given, incoming = _marked(draws, one, place, special)
    if not any(reading.any() for reading in reads.values()):
        return None
    moved = [operand.to(device) for operand in given]
    with full_precision(device.type):
        seen = _computed(one, moved, incoming, torch.autocast(device.type, dtype=amp_dtype))
    wrong = {}
    for what, reading in reads.items():
        infinite = ~seen[what].isfinite()
        beyond = infinite & ~reading
        if one.options:  # a convolution
            axis = WITHIN.get((place, what))
            others = [other for other in range(reading.dim()) if other != axis]
            beyond = torch.zeros(0) if axis is None else infinite.amax(others) & ~reading.amax(others)
        if beyond.any():
            wrong[f"{what}, others"] = f"{special} in the {place}: {_share(beyond)}"
        if (lost := reading & ~infinite).any():
            wrong[f"{what}, lost"] = f"{special} in the {place}: {_share(lost)}"
    return wrong


def _share(off: Tensor) -> str:
    return f"{int(off.sum())} of {off.numel()}"


def _marked(draws: Draws, one: Sized, place: str, special: float) -> tuple[dict[str, Tensor], list[Tensor], Tensor]:
    """Return what reads an element of one operand, and operands and incoming gradient of ones, but for that element.

    What reads it is where the result or the gradient is not zero, if that operand is zero everywhere else.
    """
    ones = [torch.ones_like(operand) for operand in one.operands]
    incoming = torch.ones_like(one.incoming)
    index = OPERANDS.index(place) if place in OPERANDS else None
    changed = incoming if index is None else ones[index]
    at = draws.one((0, draws.number(0, changed.numel() - 1), changed.numel() - 1))

    def with_mark(rest: float, mark: float) -> tuple[list[Tensor], Tensor]:
        flat = torch.full((changed.numel(),), rest)
        flat[at] = mark
        # In the layout of the operand.
        made = torch.empty_like(changed).copy_(flat.view(changed.shape))
        if index is None:
            return ones, made
        return [made if number == index else other for number, other in enumerate(ones)], incoming

    operands, slope = with_mark(0.0, 1.0)
    # What is added would make every result other than zero.
    alone = [operand.double() * (number < 2) for number, operand in enumerate(operands)]
    reads = {
        what: tensor != 0 for what, tensor in _computed(one, alone, slope.double(), contextlib.nullcontext()).items()
    }
    # The result is of the operands alone, the gradient by one of the others, and that of what is added of none.
    of_others = ("result",) if index is None else (f"gradient by {place}", f"gradient by {OPERANDS[2]}")
    for what in of_others:
        if what in reads:
            reads[what] = torch.zeros_like(reads[what])
    return reads, *with_mark(1.0, special)
