"""The same program in one process: every rank's gradient by itself, and their combination written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import TypeAlias

import torch

from ...measure.precision import repeatable_convolutions
from .programs import INTERVAL, SCALE, Batch, Program, Step, Trained

Gradients: TypeAlias = dict[str, torch.Tensor]
Combine: TypeAlias = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def mean(found: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of the ranks' gradients in their own type.

    Of two ranks it is exact but for one rounding of the sum, in whichever order: halves are exact.
    """
    return torch.stack([one / len(found) for one in found]).sum(0) if len(found) != 2 else found[0] / 2 + found[1] / 2


def mean_of_pairs(found: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of the means of each two ranks: four are combined as replicas of shards combine them."""
    return mean([mean(found[first : first + 2]) for first in range(0, len(found), 2)])


def mean_in(dtype: torch.dtype, combine: Combine = mean) -> Combine:
    """Return the mean that is computed in `dtype`, and is float32 again afterwards."""
    return lambda found: combine([one.to(dtype) for one in found]).float()


def of_autocast(model: Trained, program: Program) -> Callable[..., torch.Tensor]:
    """Return the forward of a model in an autocast region."""

    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast(program.device_type, dtype=program.dtype):
            out: torch.Tensor = model(*inputs)
            return out

    return forward


def of_autocast_uncached(model: Trained, program: Program) -> Callable[..., torch.Tensor]:
    """Return the forward of a model in an autocast region that casts a parameter at each of its uses."""

    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast(program.device_type, dtype=program.dtype, cache_enabled=False):
            out: torch.Tensor = model(*inputs)
            return out

    return forward


def of_autocast_inside(model: Trained, program: Program) -> Callable[..., torch.Tensor]:
    """Return the forward of a model that opens its region itself: nothing is around its call."""

    def forward(x: torch.Tensor, blow: torch.Tensor) -> torch.Tensor:
        with torch.autocast(program.device_type, dtype=program.dtype):
            out = model.model(x)
        return model.joined(out, blow)

    return forward


def of_casts(model: Trained, program: Program) -> Callable[..., torch.Tensor]:
    """Return the forward of a model whose parameters and inputs are cast at its entry, without autocast."""

    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        cast = {name: parameter.to(program.dtype) for name, parameter in model.named_parameters()}
        out: torch.Tensor = torch.func.functional_call(model, cast, tuple(one.to(program.dtype) for one in inputs))
        return out

    return forward


@repeatable_convolutions()
def steps(
    program: Program,
    world: int,
    *,
    forward: Callable[[Trained, Program], Callable[..., torch.Tensor]] = of_autocast,
    combine: Combine = mean,
    clip: float | None = None,
    zeros: bool = False,
) -> list[list[Step]]:
    """Train in this process on the batches of `world` ranks; return by rank the steps that each has to see.

    `combine` makes one gradient of those of the ranks; with `zeros` a parameter without one has a gradient of zeros.
    """
    model = program.built()
    optimizer = program.optimizer(model.parameters())
    scaler = torch.amp.GradScaler(program.device_type, init_scale=SCALE, growth_interval=INTERVAL)
    found: list[list[Step]] = [[] for _ in range(world)]
    for parts in zip(*(program.batches(rank, index=0) for rank in range(world)), strict=True):
        by_rank: list[Gradients] = []
        losses: list[list[torch.Tensor]] = []
        for batches in parts:
            model.zero_grad()
            losses.append([])
            for batch in batches:
                loss = program.loss(forward(model, program), batch)
                scaler.scale(loss).backward()
                losses[-1].append(loss.detach().cpu())
            by_rank.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
        for name, parameter in model.named_parameters():
            given = [one[name] for one in by_rank if name in one]
            parameter.grad = combine(given) if given else torch.zeros_like(parameter) if zeros else None
        scaler.unscale_(optimizer)
        norm = None
        if clip is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        scaler.step(optimizer)
        scaler.update()
        for rank in range(world):
            found[rank].append(Step(losses[rank], *values(model), scaler.get_scale(), norm))
    return found


@repeatable_convolutions()
def whole(program: Program, world: int) -> Step:
    """Train one step in this process on the batches of `world` ranks at once: rows after rows, one loss."""
    model = program.built()
    optimizer = program.optimizer(model.parameters())
    scaler = torch.amp.GradScaler(program.device_type, init_scale=SCALE, growth_interval=INTERVAL)
    parts = [next(program.batches(rank, index=0))[0] for rank in range(world)]
    batch = Batch(*(torch.cat(column) for column in zip(*(astuple(part) for part in parts), strict=True)))
    loss = program.loss(of_autocast(model, program), batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return Step([loss.detach().cpu()], *values(model), scaler.get_scale())


def values(model: torch.nn.Module) -> tuple[Gradients, Gradients]:
    """Return copies of the gradients and of the parameters of a model on the CPU, by name."""
    named = dict(model.named_parameters())
    gradients = {name: one.grad.clone().cpu() for name, one in named.items() if one.grad is not None}
    return gradients, {name: one.detach().clone().cpu() for name, one in named.items()}
