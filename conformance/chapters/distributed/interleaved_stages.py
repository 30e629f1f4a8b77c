"""Pipelines with several stages on each rank, against the same stages in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from .comparison import unlike

IN_TURN = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
"""Schedules that take several stages of each rank, and place them in turn on the ranks."""
THERE_AND_BACK = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""Schedules that take two stages of each rank, and place the second ones in the opposite order."""
SCHEDULES = IN_TURN + THERE_AND_BACK
SIZE = 4
PER_RANK = 2


class _Doubled(torch.autograd.Function):
    """Twice a product, in the region of its forward."""

    @staticmethod
    @partial(torch.amp.custom_fwd, device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * (x @ weight)

    @staticmethod
    @partial(torch.amp.custom_bwd, device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * gradient @ weight.t(), 2 * x.t() @ gradient


Call = Callable[[nn.ModuleDict, Tensor], Tensor]
STAGES: Mapping[str, Call] = {
    "one layer": lambda own, x: own["first"](x),
    "two layers": lambda own, x: own["second"](own["first"](x).relu()),
    "a layer used twice": lambda own, x: own["first"](own["first"](x).relu()),
    "a layer used side by side": lambda own, x: own["first"](x) + own["first"](-x).relu(),
    "a residual": lambda own, x: x + own["second"](own["first"](x)),
    "a frozen layer": lambda own, x: own["frozen"](own["first"](x)),
    "a frozen weight": lambda own, x: own["bias alone"](x),
    "a custom function": lambda own, x: _Doubled.apply(x, own["first"].weight),
    "a checkpoint": lambda own, x: checkpoint(own["first"], x, use_reentrant=False),
}
"""What a stage computes of its layers and of what it is given; layers that it leaves out get no gradient."""


class _Stage(nn.Module):
    """A stage in a region of its own, which passes float32 on."""

    def __init__(self, name: str, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.call, self.dtype = STAGES[name], dtype
        names = ("first", "second", "frozen", "bias alone")
        self.own = nn.ModuleDict({one: nn.Linear(SIZE, SIZE) for one in names})
        with torch.no_grad():
            for layer in self.own.values():
                # Each output is an input or its negative, and a small integer: nothing rounds, however many stages.
                signs = torch.randint(0, 2, (SIZE, 1), generator=generator) * 2 - 1
                layer.weight.copy_(torch.eye(SIZE)[torch.randperm(SIZE, generator=generator)] * signs)
                layer.bias.copy_(torch.randint(-1, 2, (SIZE,), generator=generator))
        self.own["frozen"].requires_grad_(False)
        self.own["bias alone"].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            return self.call(self.own, x).float()


def _loss(out: Tensor, goal: Tensor) -> Tensor:
    return (out * goal).sum()


def unlike_one_process(schedule: str, name: str, dtype: torch.dtype, seed: int) -> list[str]:
    """Run a step of a schedule; name the parameters of this rank's stages with other gradients than in one process."""
    from torch.distributed import pipelining

    rank, world = distributed.get_rank(), distributed.get_world_size()
    count = world * PER_RANK
    generator = torch.Generator().manual_seed(seed)
    whole = [_Stage(name, dtype, generator) for _ in range(count)]
    parts = max(4, count)  # DualPipeV needs one for each stage
    shape = (2 * parts, SIZE)
    x, goal = (torch.randint(-2, 3, shape, generator=generator).float() for _ in range(2))
    back = schedule in THERE_AND_BACK
    places = [rank, count - 1 - rank] if back else list(range(rank, count, world))
    mine = [copy.deepcopy(whole[place]) for place in places]

    for part, wanted in zip(x.chunk(parts), goal.chunk(parts), strict=True):
        _loss(nn.Sequential(*whole)(part), wanted).backward()

    cpu = torch.device("cpu")
    stages = [pipelining.PipelineStage(one, place, count, cpu) for one, place in zip(mine, places, strict=True)]
    run = getattr(pipelining, schedule)(stages, n_microbatches=parts, loss_fn=_loss, scale_grads=False)
    given = {"target": goal, "losses": []} if rank == (0 if back else world - 1) else {}
    run.step(*((x,) if rank == 0 else ()), **given)
    return [
        f"stage {place}: {difference}"
        for one, place in zip(mine, places, strict=True)
        for difference in unlike(_gradients(one), _gradients(whole[place]))
    ]


def _gradients(stage: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad for name, one in stage.named_parameters() if one.grad is not None}
