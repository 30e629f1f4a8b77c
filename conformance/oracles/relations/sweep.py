"""Sweep programs of a database over every mix of dtypes, and collect what breaks a relation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..manual_cast import ManualCast
from ..policy.overloads import LACKING, Target, mode_of, quiet
from .outcomes import Outcome, difference, run
from .programs import Program, Spellings, is_dense, mixes, placed_on, vmapped


@dataclass(frozen=True)
class Found:
    """What a sweep found, as texts by the name of the program, and how many calls it made.

    refused: a call with mixed dtypes raises, though both calls of one dtype work.
    broken: a call raises in a region only.
    forms: calls of one dtype return another dtype for other shapes or options.
    differs: outputs or gradients are not those of manual casts.
    unclosed: a call works in a region with float32 tensors and raises there with 16-bit ones (real targets only).
    """

    refused: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    forms: dict[str, str] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)
    unclosed: dict[str, str] = field(default_factory=dict)
    calls: list[int] = field(default_factory=lambda: [0])


VMAP_KINDS = ("float32", "16-bit", "argument 0 16-bit")
Make = Callable[[], Iterable[Program]]


def sweep(
    target: Target, amp_dtype: torch.dtype, makers: dict[str, Make], *, every: bool = False, compare: bool = True
) -> Found:
    """Run the programs of each maker on `target` in a region of `amp_dtype`.

    On a real target gradients are taken as well and, with `compare`, results are compared with those of manual casts.
    `every` adds mixes of both 16-bit dtypes.
    """
    found = Found()
    for name, make in makers.items():
        forms: dict[tuple[str, str], tuple[str, str]] = {}
        for one in make():
            if target.is_fake and not is_dense(one):
                continue  # a fake device has dense tensors only
            with mode_of(target), quiet():
                placed = one.changed(partial(placed_on, target))
                _judge(target, amp_dtype, name, mixes(placed, amp_dtype, every=every), found, forms, compare)
    return found


def _judge(
    target: Target,
    amp_dtype: torch.dtype,
    name: str,
    kinds: dict[str, Program],
    found: Found,
    forms: dict[tuple[str, str], tuple[str, str]],
    compare: bool,
) -> None:
    # Without a gradient outside (bsr products, inference), the call is judged without.
    gradients = not target.is_fake and run(kinds["float32"], gradients=True).error is None
    region = partial(target.autocast, amp_dtype)
    outside = {kind: run(kinds[kind], gradients=gradients) for kind in ("float32", "16-bit")}
    inside = {kind: run(kinds[kind], region, gradients=gradients) for kind in ("float32", "16-bit")}
    found.calls[0] += 1
    for kind, plain in outside.items():
        if plain.error is not None:
            continue
        what = f"{kind}: {kinds[kind].described()}"
        if _is_lacking(inside[kind]):
            return
        if inside[kind].error is not None:
            found.broken.setdefault(name, f"{what}: {inside[kind].error}")
            continue
        form = forms.setdefault((kind, plain.dtypes), (inside[kind].dtypes, what))
        if form[0] != inside[kind].dtypes:
            found.forms.setdefault(name, f"{form[1]}: {form[0]}; {what}: {inside[kind].dtypes}")
    low = inside["16-bit"]
    if inside["float32"].error is None and low.error is not None and not _is_lacking(low) and not target.is_fake:
        found.unclosed.setdefault(name, f"{kinds['16-bit'].described()}: {low.error}")
    works = all(one.error is None for one in (*outside.values(), *inside.values()))
    for kind, program in kinds.items():
        seen = inside.get(kind) or run(program, region, gradients=gradients)
        found.calls[0] += 1
        what = f"{kind}: {program.described()}"
        if works and seen.error is not None and not _is_lacking(seen):
            found.refused.setdefault(name, f"{what}: {seen.error}")
        if compare and not target.is_fake and seen.error is None and outside["float32"].error is None:
            text = _against_manual(target, amp_dtype, program, seen, gradients)
            if text is not None:
                found.differs.setdefault(name, f"{what}: {text}")


def sweep_vmap(target: Target, amp_dtype: torch.dtype, makers: dict[str, Make]) -> Found:
    """Compare torch.func.vmap of each program in a region with the program there: dtypes, and per-sample gradients.

    broken: vmap raises in a region only. forms: it returns another dtype than the program.
    """
    found = Found()
    region = partial(target.autocast, amp_dtype)
    for name, make in makers.items():
        for one in make():
            if not one.tensors or not is_dense(one):
                continue
            for kind, placed in mixes(one.changed(partial(placed_on, target)), amp_dtype).items():
                if kind not in VMAP_KINDS:
                    continue
                plain = run(placed, region, gradients=True)
                if plain.error is not None:
                    continue
                for transform, wanted in (("vmap", plain.dtypes), ("vmap of grad", _argument_dtypes(placed))):
                    batched = vmapped(placed, gradients=transform != "vmap")
                    if run(batched).error is not None:
                        continue  # vmap does not support the call
                    seen = run(batched, region)
                    found.calls[0] += 1
                    what = f"{transform}, {kind}: {placed.described()}"
                    if seen.error is not None:
                        found.broken.setdefault(name, f"{what}: {seen.error}")
                    elif seen.dtypes != wanted:
                        found.forms.setdefault(name, f"{what}: {seen.dtypes}; without vmap: {wanted}")
    return found


def _argument_dtypes(one: Program) -> str:
    return ", ".join(str(one.leaves[index].dtype).removeprefix("torch.") for index in one.tensors)


def sweep_routes(
    target: Target, amp_dtype: torch.dtype, makers: dict[str, Make], spellings: dict[str, Spellings]
) -> Found:
    """Compare each program in a region with the same call in its other spellings: `differs` holds what is unequal."""
    found = Found()
    for name, make in makers.items():
        for one in make():
            if target.is_fake and not is_dense(one):
                continue
            with mode_of(target), quiet():
                placed = one.changed(partial(placed_on, target))
                made = mixes(placed, amp_dtype)
                for kind in ("float32", "16-bit", "argument 0 16-bit"):
                    if kind in made:
                        _judge_routes(target, amp_dtype, kind, made[kind], spellings[name], found)
    return found


def _judge_routes(
    target: Target,
    amp_dtype: torch.dtype,
    kind: str,
    one: Program,
    spellings: Spellings,
    found: Found,
) -> None:
    call = partial(run, region=partial(target.autocast, amp_dtype), gradients=not target.is_fake)
    wanted = call(one)
    found.calls[0] += 1
    for spelling, function in spellings.items():
        other = replace(one, function=function)
        if run(other).error is not None and run(one).error is None:
            continue  # this spelling does not take these arguments
        seen = call(other)
        found.calls[0] += 1
        text = difference(seen, wanted, wanted)
        text = text and difference(seen, wanted, call(one))
        if text is not None:
            found.differs.setdefault(one.name, f"{spelling}, {kind}: {one.described()}: {text}")


def _is_lacking(outcome: Outcome) -> bool:
    """Return whether a call raised because the machine lacks a library or an instruction: no promise of autocast."""
    return outcome.error is not None and LACKING.search(outcome.error) is not None


def _against_manual(
    target: Target, amp_dtype: torch.dtype, program: Program, seen: Outcome, gradients: bool
) -> str | None:
    manual = partial(run, program, partial(ManualCast, target.device_type, amp_dtype), gradients=gradients)
    wanted = manual()
    text = difference(seen, wanted, wanted)
    return None if text is None else difference(seen, wanted, manual())
