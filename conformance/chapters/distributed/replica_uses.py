"""What one rank computes with replicas: containers of outputs, exceptions in no_sync, parameters of every type."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ...measure.precision import repeatable_convolutions
from .comparison import unlike
from .programs import Program, Step
from .sharded_uses import Containers, containers, held
from .tensors import LAST_BIT, contributed
from .ways import WAYS, compression_hook, step

WIDTH = 2
RATE = 0.5
BUCKETS = (1, 2, 3, 8, 17, 1025)


# --- outputs


class _Containing(nn.Module):
    """Return the outputs of one of two layers in a container, in the type that the region gives, or in float32."""

    def __init__(self, container: Callable[[torch.Tensor], Any], wide: bool) -> None:
        super().__init__()
        self.container, self.wide = container, wide
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.used(x)
        return self.container(out.float() if self.wide else out)


def gradients_of_outputs(dtype: torch.dtype, option: str) -> list[str]:
    """Name the containers of outputs with which a replica's gradients are not the mean over the ranks, by step.

    An option of DistributedDataParallel is on. It is not documented that static_graph looks into dataclasses.
    Each rank's inputs are twice its number, so that the gradients of the weight are the mean of small integers.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    expected = {"weight": torch.full((WIDTH, WIDTH), float(world - 1)), "bias": torch.ones(WIDTH)}
    found = []
    forms: Containers = {"tensor": lambda one: one} | containers()
    for (name, container), wide in itertools.product(forms.items(), (False, True)):
        if (name, option) == ("dataclass", "static_graph"):
            continue
        options: dict[str, Any] = {option: True}
        model = DistributedDataParallel(_Containing(container, wide), **options)
        for number in range(2):
            model.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                out = held(model(torch.full((1, WIDTH), 2.0 * rank)))
            out.float().sum().backward()
            seen = {key: one.grad for key, one in model.module.used.named_parameters() if one.grad is not None}
            what = f"{out.dtype} in a {name}, step {number}"
            found += [f"{what}: {one}" for one in unlike(seen, expected)]
    return found


# --- several forwards before one backward


class _Buffered(nn.Module):
    """A layer whose outputs are multiplied by a buffer, which backward needs again, and a norm where asked."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor([0.5, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.layer(x)) * self.scale
        return out


def gradients_of_several_forwards(dtype: torch.dtype, seed: int) -> list[str]:
    """Name the uses of a replica with buffers whose gradients are not the mean over the ranks.

    Some forwards, on batches of their own, precede one backward, in a region or outside; the ranks are two.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found = []
    flags = (False, True)
    for norm, training, count, within, sent in itertools.product(flags, flags, (1, 3), flags, flags):
        torch.manual_seed(seed)
        plain = _Buffered(norm).train(training)
        model = DistributedDataParallel(copy.deepcopy(plain), broadcast_buffers=sent)
        batches = torch.randn(world, count, 4, WIDTH)

        def learn(learner: nn.Module, own: torch.Tensor, within: bool = within) -> dict[str, torch.Tensor]:
            learner.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=within):
                losses = [learner(one).float().pow(2).sum() for one in own]
            torch.stack(losses).sum().backward()
            return {name.removeprefix("module."): one.grad.clone() for name, one in learner.named_parameters()}

        each = [learn(copy.deepcopy(plain), own) for own in batches]
        expected = {name: sum(one[name] for one in each) / world for name in each[0]}
        what = f"{count} forwards {'in' if within else 'outside'} a region, broadcast_buffers={sent}"
        what += f"{', batch norm' * norm}{', training' * training}"
        try:
            seen = learn(model, batches[rank])
        except RuntimeError as error:
            found.append(f"{what}: {str(error).splitlines()[0][:120]}")
            continue
        found += [f"{what}: {one}" for one in unlike(seen, expected)]
    return found


# --- inputs that end earlier on some ranks


def gradients_of_uneven_inputs(dtype: torch.dtype) -> list[str]:
    """Name the steps under join() whose gradients are not what the ranks with inputs left add up, divided as asked.

    Rank r has r + 1 inputs; all are small integers.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found = []
    for by_all, views in itertools.product((True, False), (False, True)):
        model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH, bias=False), gradient_as_bucket_view=views)
        seen = []
        with model.join(divide_by_initial_world_size=by_all):
            for _ in range(rank + 1):
                model.zero_grad(set_to_none=False)
                with torch.autocast("cpu", dtype=dtype):
                    out = model(torch.full((1, WIDTH), 4.0 * (rank + 1)))
                out.float().sum().backward()
                seen.append(model.module.weight.grad.clone())
        for number, one in enumerate(seen):
            left = range(number, world)
            total = sum(4.0 * (each + 1) for each in left)
            expected = torch.full((WIDTH, WIDTH), total / (world if by_all else len(left)))
            what = f"divide_by_initial_world_size={by_all}{', views of buckets' * views}, step {number}"
            found += [f"{what}: {line}" for line in unlike({"": one}, {"": expected})]
    return found


# --- sizes of buckets


class _Weighted(nn.Module):
    """A weight of so many elements, whose gradient is what the module is given."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, slopes: torch.Tensor) -> torch.Tensor:
        return (self.weight * slopes).sum()


def gradients_of_hooks(names: Sequence[str]) -> list[str]:
    """Name the compression hooks and sizes of a bucket whose gradients are not the mean over the ranks.

    Rank and place make a small even integer, so that the mean is exact in every type. From the second step on
    gradients can be views of the buckets.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found = []
    for name, size, views in itertools.product(names, BUCKETS, (False, True)):
        model = DistributedDataParallel(_Weighted(size), gradient_as_bucket_view=views)
        model.register_comm_hook(None, compression_hook(name))
        places = torch.arange(size) % 7
        expected = 2.0 * places + (world - 1)
        for number in range(2):
            model.zero_grad(set_to_none=False)
            model(2.0 * (places + rank)).backward()
            what = f"{name}, {size} elements{', views of the bucket' * views}, step {number}"
            found += [f"{what}: {one}" for one in unlike({"": model.module.weight.grad}, {"": expected})]
    return found


class _AllWeighted(nn.Module):
    """A weight of each size of a bucket in turn of each of two types."""

    def __init__(self, types: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.zeros(size, dtype=types[number % len(types)]) for number, size in enumerate(BUCKETS)
        )

    def forward(self, slopes: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(one * slope).sum().float() for one, slope in zip(self.weights, slopes, strict=True)]).sum()


def gradients_of_buckets(names: Sequence[str]) -> list[str]:
    """Name the hooks, types and steps in which gradients of several buckets are not the mean over the ranks.

    Without a hook DistributedDataParallel reduces by itself; allreduce_hook does what it does then.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    rank, world = distributed.get_rank(), distributed.get_world_size()
    found = []
    for name in ("no hook", "allreduce_hook", *names):
        for types in MIXES if name in ("no hook", "allreduce_hook") else ((torch.float32,),):
            model = DistributedDataParallel(_AllWeighted(types), bucket_cap_mb=1e-5)
            if name == "allreduce_hook":
                model.register_comm_hook(None, default_hooks.allreduce_hook)
            elif name != "no hook":
                model.register_comm_hook(None, compression_hook(name))
            places = [torch.arange(size) % 7 for size in BUCKETS]
            # The buckets are made anew after the first step.
            for number in range(2):
                model.zero_grad()
                slopes = [(2.0 * (each + rank)) for each in places]
                model([one.to(own.dtype) for one, own in zip(slopes, model.parameters(), strict=True)]).backward()
                expected = {
                    str(index): (2.0 * each + (world - 1)).to(own.dtype)
                    for index, (each, own) in enumerate(zip(places, model.parameters(), strict=True))
                }
                seen = {str(index): own.grad for index, own in enumerate(model.parameters())}
                what = f"{name}, {_names(types)}, step {number}"
                found += [f"{what}: {one}" for one in unlike(seen, expected)]
    return found


# --- exceptions


@repeatable_convolutions()
def trained_after_an_exception(way: str, program: Program, forward: bool) -> list[Step]:
    """Raise in a micro-batch without synchronization, after its forward or before it; then train."""
    wrapped = WAYS[way](program)
    rank = distributed.get_rank()
    with contextlib.suppress(FloatingPointError), wrapped.accumulating(), wrapped.region():
        if forward:
            program.loss(wrapped.model, next(program.batches(rank))[0])
        raise FloatingPointError
    return [step(wrapped, program, batches) for batches in program.batches(rank)]


# --- parameters of each type


def _parameters(kind: torch.dtype, seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn((size, 2), generator=generator).to(kind)) for size in (3, 4, 5, 1)]


def _groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the parameters in two groups of different learning rates."""
    return [{"params": list(parameters[0::2]), "lr": RATE}, {"params": list(parameters[1::2]), "lr": RATE / 4}]


def updates_of_sharded_optimizer(name: str, seed: int) -> list[str]:
    """Name what ZeroRedundancyOptimizer makes of parameters of each type otherwise than its optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind: Any = getattr(torch.optim, name)
    found = []
    for dtype, views in itertools.product(LAST_BIT, (False, True)):
        ours, plain = _parameters(dtype, seed), _parameters(dtype, seed)
        optimizers = (
            ZeroRedundancyOptimizer(_groups(ours), kind, parameters_as_bucket_view=views, lr=RATE),
            kind(_groups(plain), lr=RATE),
        )
        for number in range(2):
            generator = torch.Generator().manual_seed(seed + number + 1)
            for one, other in zip(ours, plain, strict=True):
                other.grad = torch.randn(other.shape, generator=generator).to(dtype)
                one.grad = other.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
            what = f"{dtype}{', views of buckets' * views}, step {number}"
            found += [f"{what}: {one}" for one in unlike(_numbered(ours), _numbered(plain))]
    return found


def _names(types: Sequence[torch.dtype]) -> str:
    return " and ".join(str(one).removeprefix("torch.") for one in types)


def _numbered(parameters: Sequence[nn.Parameter]) -> dict[str, torch.Tensor]:
    return {str(number): one.detach() for number, one in enumerate(parameters)}


MIXES: tuple[tuple[torch.dtype, ...], ...] = (
    *((kind,) for kind in LAST_BIT),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float16, torch.float32),
    tuple(LAST_BIT),
)


def averages_of_models() -> list[str]:
    """Name what the averagers of models return of parameters of several types, other than their exact means."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found = []
    for types in MIXES:
        expected = {
            str(number): torch.full((3,), sum(contributed(one, kind) for one in range(world)) / world, dtype=kind)
            for number, kind in enumerate(types)
        }
        for name, average in _averagers():
            parameters = [nn.Parameter(torch.full((3,), contributed(rank, kind), dtype=kind)) for kind in types]
            for one in parameters:
                one.grad = torch.zeros_like(one)
            average(parameters)
            found += [f"{name} of {_names(types)}: {one}" for one in unlike(_numbered(parameters), expected)]
    return found


def steps_between_averages() -> list[str]:
    """Name the steps of an optimizer with an averager that average its parameters and should not, or the other way."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    rank, world = distributed.get_rank(), distributed.get_world_size()
    found = []
    for warmup, period in ((0, 1), (0, 2), (1, 3)):
        parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD(parameters, lr=RATE), PeriodicModelAverager(period=period, warmup_steps=warmup)
        )
        for number in range(7):
            for parameter in parameters:
                parameter.data.fill_(rank)
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            averaged = number >= warmup and (number - warmup) % period == 0
            expected = (world - 1) / 2 if averaged else float(rank)
            seen = [parameter.unique().tolist() for parameter in parameters]
            if seen != [[expected]] * 3:
                found.append(f"warmup {warmup}, period {period}, step {number}: {seen}, not {expected}")
    return found


def _averagers() -> Iterator[tuple[str, Callable[[list[nn.Parameter]], Any]]]:
    from torch.distributed.algorithms.model_averaging import averagers, utils
    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    def periodic() -> Any:
        return averagers.PeriodicModelAverager(period=1, warmup_steps=0)

    def stepped(parameters: list[nn.Parameter]) -> None:
        PostLocalSGDOptimizer(torch.optim.SGD(parameters, lr=RATE), periodic()).step()

    def hierarchical(parameters: list[nn.Parameter]) -> None:
        levels = OrderedDict([(1, distributed.get_world_size())])
        HierarchicalModelAverager(period_group_size_dict=levels, warmup_steps=0).average_parameters(parameters)

    yield "PeriodicModelAverager", lambda parameters: periodic().average_parameters(parameters)
    yield "PeriodicModelAverager, groups", lambda parameters: periodic().average_parameters([{"params": parameters}])
    yield "HierarchicalModelAverager", hierarchical
    yield "PostLocalSGDOptimizer", stepped
    yield "average_parameters", lambda parameters: utils.average_parameters(iter(parameters), distributed.group.WORLD)
