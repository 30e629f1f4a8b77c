"""Hold the values and gradients of 16-bit programs against the same programs in float64, whatever they compute."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..numbers.binary import Format
from ..numbers.conditioned_error import moved, roundings
from . import outcomes
from .outcomes import Outcome, Region
from .programs import Program, is_dense
from .sweep import Make

# In roundings. Kernels of torch 2.6 to 2.15 that are not known to fail stay below 30 of them, nearly all below 3; an
# option that is ignored, a wrong branch or element gives hundreds in float16.
LIMIT = 35.0
_SEEDS_ITSELF = "wrapper_set_seed"  # how the database calls an op that draws, whose draws differ by type and device
# Results of moved operands, which tell how the exact one moves: so many that none of a million numbers stays by chance.
NEAR = 8


def weights(output: Tensor) -> Tensor:
    """Return weights from 1 to 5, exact in every type, that neighbours do not share; they lie as the output does."""
    numbers = torch.arange(output.numel()) * 7 % 5 + 1  # on the CPU: the device may lack the kernel of remainders
    made = numbers.reshape(output.shape).to(output.device, output.dtype)
    return torch.empty_like(output).copy_(made) if output.layout is torch.strided else made


def _shifted(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def _gaps(tensor: Tensor) -> Tensor:
    return tensor.new_empty((*tensor.shape, 2))[..., 0].copy_(tensor)


def _turned(tensor: Tensor) -> Tensor:
    order = tuple(reversed(range(tensor.dim())))
    return tensor.new_empty([tensor.shape[i] for i in order]).permute(order).copy_(tensor)


def _channels_last(tensor: Tensor) -> Tensor:
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return tensor.clone() if form is None else tensor.clone(memory_format=form)


def _channels_last_shifted(tensor: Tensor) -> Tensor:
    strides = _channels_last(tensor.contiguous()).stride()
    return tensor.new_empty(tensor.numel() + 1).as_strided(tensor.shape, strides, 1).copy_(tensor)


# How operands lie in memory: as the database has them, not aligned, with gaps, dimensions turned around.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as given": torch.clone,
    "shifted": _shifted,
    "with gaps": _gaps,
    "turned": _turned,
    "channels last": _channels_last,
}
# The parts of images in channels last are views that start anywhere.
ALL_LAYOUTS = LAYOUTS | {"channels last, shifted": _channels_last_shifted}


@dataclass(frozen=True)
class Inexact:
    """Hold what a sweep found: the number of programs judged, and the worst error of each entry above the limit."""

    judged: int
    found: dict[str, str]


def sweep(
    device: torch.device,
    form: Format,
    makers: dict[str, Make],
    *,
    samples: int,
    seed: int,
    region: Region | None = None,
) -> Inexact:
    """Judge so many programs of each public entry, spread over all that it has, each in one of the layouts.

    With `region` an entry is a module, which does several ops in a row.
    """
    judge = partial(departures, form=form, limit=LIMIT, device=device, region=region, together=region is not None)
    judged = 0
    found = {}
    layouts = itertools.cycle(LAYOUTS)
    for name, make in makers.items():
        if any(word.startswith("_") and not word.startswith("__") for word in name.split(".")):
            continue
        programs = list(make())
        step = max(len(programs) / samples, 1.0)
        worst = (LIMIT, "")
        for number in range(min(samples, len(programs))):
            one = programs[(int(number * step) + seed) % len(programs)]
            # Models meet no other layout of images as often as channels last.
            images = any(isinstance(leaf, Tensor) and leaf.dim() in (4, 5) for leaf in one.leaves)
            for layout in {next(layouts), "channels last"} if images else {next(layouts)}:
                errors = judge(one, layout=layout)
                judged += errors is not None
                for what, error in (errors or {}).items():
                    text = f"{what} is {error:.4g} roundings from exact, operands {layout}: {one.described()}"
                    worst = max(worst, (error, text))
        if worst[1]:
            found[name] = worst[1]
    return Inexact(judged, found)


def departures(
    program: Program,
    form: Format,
    limit: float,
    *,
    layout: str,
    device: torch.device,
    region: Region | None = None,
    together: bool = False,
    wanted: Callable[[Collection[int]], Collection[int]] = tuple,
    by_layout: bool = True,
) -> dict[str, float] | None:
    """Return the errors of a program's results and gradients above `limit`, in roundings to `form`, by name.

    The program's float32 arguments are rounded to `form` and lie in a layout of ALL_LAYOUTS; with `region` they are
    float32 numbers that the region casts. `together` is for several ops in a row; `wanted` chooses the arguments that
    gradients are taken of; `by_layout` is false of a program whose results do not depend on how its arguments lie. The
    reference is the program in float64 on the CPU. None where nothing can be judged: no float64 or 16-bit kernel, a
    type that the device has no tensors of, tensors that are not strided, or results that are drawn.
    """
    if not is_dense(program) or _SEEDS_ITSELF in getattr(getattr(program.function, "__code__", None), "co_names", ()):
        return None
    low = program.cast(dict.fromkeys(program.tensors, form.dtype))
    wide = low.cast(dict.fromkeys(program.tensors, torch.float64))
    positions, exact = _reference(wide, wanted)
    if exact.exception is not None or not torch.equal(torch.default_generator.get_state(), _seeded()):
        return None
    copy = ALL_LAYOUTS[layout]
    given = low if region is None else low.cast(dict.fromkeys(program.tensors, torch.float32))
    try:
        placed = given.changed(lambda tensor: tensor.to(device))
    except (RuntimeError, TypeError):
        return None
    run = partial(outcomes.run, gradients=positions, weights=weights, arguments=True)
    seen = run(placed, region or contextlib.nullcontext, copy=copy)
    if seen.exception is not None:
        return None
    errors_of = partial(_errors, form, together=together)
    errors = errors_of(seen, exact)
    if max(errors.values(), default=0.0) <= limit:
        return {}
    # What is above the limit may move with its operands, or depend on how they lie (as_strided).
    exact = run(wide, copy=copy) if by_layout else exact
    single = run(low.cast(dict.fromkeys(program.tensors, torch.float32)), copy=copy)
    near = [_near(run, wide, form, number, copy) for number in range(NEAR)]
    if any(one.exception is not None for one in (exact, single, *near)):
        return None
    return {name: error for name, error in errors_of(seen, exact, near, single).items() if error > limit}


def _reference(wide: Program, wanted: Callable[[Collection[int]], Collection[int]]) -> tuple[Collection[int], Outcome]:
    """Return the positions of the arguments that have gradients and are wanted, and the float64 outcome with these."""
    positions = wanted(wide.tensors)
    outcome = outcomes.run(wide, gradients=positions, weights=weights, arguments=True)
    if outcome.exception is None:
        return positions, outcome
    alone = {i: outcomes.run(wide, gradients=(i,), weights=weights) for i in positions}
    positions = tuple(i for i, one in alone.items() if one.exception is None)
    return positions, outcomes.run(wide, gradients=positions, weights=weights, arguments=True)


def _near(
    run: Callable[..., Outcome], wide: Program, form: Format, number: int, copy: Callable[[Tensor], Tensor]
) -> Outcome:
    """Run a float64 program with its operands, and what it keeps for backward, moved by up to a rounding."""
    generator = torch.Generator().manual_seed(number)

    def kept(tensor: Tensor) -> Tensor:
        return moved(tensor, form, generator) if tensor.dtype is torch.float64 else tensor

    with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
        return run(wide, copy=lambda tensor: copy(moved(tensor, form, generator)))


@functools.cache
def _seeded() -> Tensor:
    """Return the state of a generator of seed 0 that has drawn nothing."""
    return torch.Generator().manual_seed(0).get_state()


def _errors(
    form: Format,
    seen: Outcome,
    exact: Outcome,
    near: Sequence[Outcome] = (),
    single: Outcome | None = None,
    *,
    together: bool,
) -> dict[str, float]:
    """Return the errors of the tensors that are float64 in the reference: inf where one lacks or has another shape."""
    found = {}
    for what in ("outputs", "gradients"):
        others = [getattr(one, what) for one in near]
        for number, (one, other) in enumerate(zip(getattr(seen, what), getattr(exact, what), strict=True)):
            if other is None or other.dtype is not torch.float64 or other.layout is not torch.strided:
                continue
            if other.device.type != "cpu":  # some samples move to the device
                continue
            if one is None or one.shape != other.shape:
                found[f"{what} {number}"] = math.inf
            elif one.layout is torch.strided:
                close = [each[number] for each in others]
                if single is not None:
                    close.append(_noisy(getattr(single, what)[number], other))
                found[f"{what} {number}"] = roundings(one.cpu(), other, form, close, together=together)
    return found


def _noisy(single: Tensor | None, exact: Tensor) -> Tensor:
    """Return the float32 tensor as float64, less what is more than the noise of terms of the size of the largest."""
    if single is None or single.shape != exact.shape:
        return exact
    largest = float(torch.where(exact.isfinite(), exact, 0.0).abs().max()) if exact.numel() else 0.0
    noise = 64 * torch.finfo(torch.float32).eps * largest
    return exact + (single.double() - exact).nan_to_num(nan=0.0).clamp(-noise, noise)
