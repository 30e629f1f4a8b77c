"""What one rank has of sharded parameters of every number of rows: exact gradients, states, and what is ignored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed, nn

from .comparison import all_of, unlike
from .precision_settings import Settings

COLUMNS = 2
ROWS = (1, 2, 3, 4, 5, 7)
# A number that float32 holds and no 16-bit type does.
FINE = 1 + 2.0**-20


def policies(dtype: torch.dtype) -> tuple[Settings, ...]:
    """Return types of parameters and of reduction: those of float32, of one 16-bit type, and of both."""
    types: tuple[Settings, ...] = (
        {},
        {"param_dtype": dtype},
        {"param_dtype": dtype, "reduce_dtype": torch.float32},
        {"reduce_dtype": dtype},
    )
    return types


class Rows(nn.Module):
    """Parameters of each number of rows; the gradient of each is what the module is given for it."""

    def __init__(self, value: float = 0.0, sizes: Sequence[int] = ROWS) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.full((rows, COLUMNS), value) for rows in sizes)

    def forward(self, slopes: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(one * slope).sum() for one, slope in zip(self.rows, slopes, strict=True)]).sum()


def _slopes(rank: int) -> list[torch.Tensor]:
    """Return even integers of place and rank, of which every type holds the mean and the sum of a few."""
    return [2.0 * (torch.arange(rows * COLUMNS).reshape(rows, COLUMNS) % 7 + rank) for rows in ROWS]


def _factors(module: Any) -> tuple[float | None, ...]:
    """Return what the gradients are divided by; None is the number of ranks, and all that an older torch has."""
    needed = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")
    return (None, 1.0, 4.0) if all(hasattr(module, name) for name in needed) else (None,)


class Columns(nn.Module):
    """Parameters of several shapes, whose columns are sharded; the gradient of each is what the module is given."""

    def __init__(self) -> None:
        super().__init__()
        columns = 2 * distributed.get_world_size()
        self.rows = nn.ParameterList(torch.zeros(rows, columns, *more) for rows, more in ((1, ()), (3, ()), (4, (2,))))

    def slopes(self, rank: int) -> list[torch.Tensor]:
        return [2.0 * (torch.arange(one.numel()).reshape(one.shape) % 7 + rank) for one in self.rows]

    def forward(self, slopes: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(one * slope).sum() for one, slope in zip(self.rows, slopes, strict=True)]).sum()


def values_of_columns(dtype: torch.dtype) -> list[str]:
    """Name the policies with which parameters sharded by columns have other gradients, or are used otherwise."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    rank, world = distributed.get_rank(), distributed.get_world_size()
    mesh = distributed.init_device_mesh("cpu", (world,))
    found = []
    for given in policies(dtype):
        slopes = Columns().slopes
        model: Any = Columns()
        fully_shard(
            model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**given), shard_placement_fn=lambda parameter: Shard(1)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sums = [sum(each) for each in zip(*map(slopes, range(world)), strict=True)]
        model(slopes(rank)).float().backward()
        seen = {str(number): all_of(one.grad) for number, one in enumerate(model.parameters())}
        expected = {str(number): one / world for number, one in enumerate(sums)}
        found += [f"{_named(given)}: gradient of {one}" for one in unlike(seen, expected)]
        # After a step of one the parameters are minus their gradients; each slope picks elements of one of them.
        optimizer.step()
        for number, one in enumerate(sums):
            picked = [torch.zeros_like(each) for each in sums]
            picked[number].view(-1)[1::3] = 1.0
            right = -float((one / world).view(-1)[1::3].sum())
            if (used := float(model(picked))) != right:
                found.append(f"{_named(given)}: a sum of elements of {number} is {used} in place of {right}")
    return found


def gradients_of_rows(dtype: torch.dtype) -> list[str]:
    """Name the policies, factors and micro-batches with which fully_shard's gradients are not the exact quotient."""
    world = distributed.get_world_size()
    mesh = distributed.init_device_mesh("cpu", (world,))
    return [
        one
        for batches in (1, 2)
        for given in policies(dtype)
        for one in _unlike_quotients(mesh, given, range(world), batches)
    ]


def gradients_of_one_shard(dtype: torch.dtype, reduced: str) -> list[str]:
    """As of rows, where one rank has the whole of each parameter: alone, and as one of the replicas of it.

    `reduced` is `in float16`, `in a wider type`, or `by a sum`, which both can be.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    grid = distributed.init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))
    meshes = {"alone": (grid["shards"], [rank]), "replicas": (grid, range(world))}
    return [
        f"{name}, {one}"
        for name, (mesh, ranks) in meshes.items()
        for given in policies(torch.float16 if reduced == "in float16" else dtype)
        if reduced == "by a sum" or (_reduced_in(given) is torch.float16) == (reduced == "in float16")
        for one in _unlike_quotients(mesh, given, ranks, 1, by_sum=reduced == "by a sum")
    ]


def _reduced_in(given: Settings) -> torch.dtype:
    return given.get("reduce_dtype") or given.get("param_dtype") or torch.float32


def _unlike_quotients(
    mesh: Any, given: Settings, ranks: Sequence[int], batches: int, *, by_sum: bool = True
) -> list[str]:
    """Name the factors with which gradients are not the sum over the ranks of a mesh, divided."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    found = []
    probe: Any = fully_shard(Rows(), mesh=mesh)
    for factor in _factors(probe):
        model: Any = fully_shard(Rows(), mesh=mesh, mp_policy=MixedPrecisionPolicy(**given))
        if factor is not None:
            model.set_gradient_divide_factor(factor)
            model.set_force_sum_reduction_for_comms(by_sum)
        for number in range(batches):
            model.set_requires_gradient_sync(number == batches - 1)
            model(_slopes(distributed.get_rank())).float().backward()
        sums = [sum(each) for each in zip(*map(_slopes, ranks), strict=True)]
        expected = {str(number): one * batches / (factor or len(ranks)) for number, one in enumerate(sums)}
        seen = {str(number): all_of(one.grad) for number, one in enumerate(model.parameters())}
        what = f"{_named(given)}, divided by {factor or 'the ranks'}, {batches} micro-batches"
        found += [f"{what}: {one}" for one in unlike(seen, expected)]
    return found


def _named(given: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in given.items()) or "float32"


def steps_of_rows(dtype: torch.dtype) -> list[str]:
    """Name the policies of fully_shard with which forward does not use the parameters of the step before.

    The parameters stay gathered after forward, or do not.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    world = distributed.get_world_size()
    mesh = distributed.init_device_mesh("cpu", (world,))
    found = []
    for given, reshard in itertools.product(policies(dtype), (True, False)):
        model: Any = Rows()
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**given), reshard_after_forward=reshard)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ones = [torch.ones(rows, COLUMNS) for rows in ROWS]
        # Each step takes 1 of each of the parameters, so that their sum goes down by their number.
        sums = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(ones).float()
            loss.backward()
            optimizer.step()
            sums.append(float(loss))
        expected = [-float(number * COLUMNS * sum(ROWS)) for number in range(3)]
        if sums != expected:
            stays = "gathered after forward" if not reshard else "sharded after forward"
            found.append(f"{_named(given)}, {stays}: sums {sums} in place of {expected}")
    return found


# --- FullyShardedDataParallel


def _fsdp1(module: nn.Module, given: Settings, **options: Any) -> Any:
    from torch.distributed import fsdp

    return fsdp.FullyShardedDataParallel(
        module,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        mixed_precision=fsdp.MixedPrecision(**given),
        **options,
    )


def changed_by_looking(dtype: torch.dtype) -> list[str]:
    """Name the policies with which summon_full_params or optim_state_dict has other bits than what is sharded."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = []
    for given in policies(dtype):
        model = _fsdp1(Rows(FINE), given)
        whole = {f"rows.{number}": torch.full((rows, COLUMNS), FINE) for number, rows in enumerate(ROWS)}
        for writeback in (False, True):
            with FullyShardedDataParallel.summon_full_params(model, writeback=writeback):
                seen = {_plain(name): one.detach().clone() for name, one in model.named_parameters()}
            found += [f"{_named(given)}, summoned, writeback={writeback}: {one}" for one in unlike(seen, whole)]
        out = model([torch.ones(rows, COLUMNS) for rows in ROWS])
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            seen = {_plain(name): one.detach().clone() for name, one in model.named_parameters()}
        out.float().backward()
        found += [f"{_named(given)}, summoned between forward and backward: {one}" for one in unlike(seen, whole)]
        found += [f"{_named(given)}, state of the optimizer: {one}" for one in _states(given)]
    return found


def _plain(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def _states(given: Settings) -> list[str]:
    """Name what optim_state_dict has otherwise than the optimizers, each with its part of one parameter."""
    from torch.distributed import fsdp

    rank, world = distributed.get_rank(), distributed.get_world_size()
    model = _fsdp1(Rows(FINE, (2 * world,)), given)
    optimizer = torch.optim.Adam(model.parameters())
    model([torch.full((2 * world, COLUMNS), 1.0 + rank)]).float().backward()
    optimizer.step()
    (own,) = optimizer.state.values()
    # A state that is offloaded is read from memory that was freed, on a CPU, up to 2.13.
    kind = fsdp.StateDictType.FULL_STATE_DICT
    configs: Any = fsdp.FullStateDictConfig(), fsdp.FullOptimStateDictConfig(offload_to_cpu=False)
    with fsdp.FullyShardedDataParallel.state_dict_type(model, kind, *configs):
        (whole,) = fsdp.FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"].values()
    found = []
    for name in ("exp_avg", "exp_avg_sq"):
        part = whole[name].flatten().chunk(world)[rank]
        found += [f"{name}: {one}" for one in unlike({"": part}, {"": own[name].flatten()})]
    return found


class _Noting(nn.Module):
    """A product by a parameter that records the types that it meets."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [str(x.dtype), str(self.weight.dtype)]
        return x * self.weight


class _First(_Noting):
    pass


class _Second(_Noting):
    pass


def types_of_ignored_classes(dtype: torch.dtype) -> list[str]:
    """Name the modules that MixedPrecision with an auto_wrap_policy runs in another type than it is to.

    Modules of the classes that it is to ignore, by default batch norms, are in float32, and others in its type.
    """
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy

    found = []
    policies = {"always_wrap_policy": always_wrap_policy, "ModuleWrapPolicy": ModuleWrapPolicy({nn.Linear})}
    ignored = ((_First,), (_Second,), (_First, _Second), (_Noting,), ())
    for (policy, wraps), classes in itertools.product(policies.items(), ignored):
        layers = [nn.Linear(COLUMNS, COLUMNS), _First(COLUMNS), nn.Linear(COLUMNS, COLUMNS), _Second(COLUMNS)]
        given: Settings = {"param_dtype": dtype, "_module_classes_to_ignore": classes}
        model = _fsdp1(nn.Sequential(*layers), given, auto_wrap_policy=wraps)
        out = model(torch.ones(2, COLUMNS))
        out.float().sum().backward()
        for one in layers:
            if isinstance(one, _Noting):
                right = str(torch.float32 if isinstance(one, classes) else dtype)
                if one.seen != [right] * 2:
                    names = [each.__name__ for each in classes]
                    what = f"{policy}: {type(one).__name__} where {names} are ignored"
                    found.append(f"{what}: {one.seen} in place of {right}")
    return found + list(_batch_norms(dtype))


def _batch_norms(dtype: torch.dtype) -> Iterator[str]:
    from torch.distributed.fsdp.wrap import always_wrap_policy

    norm, seen = nn.BatchNorm1d(COLUMNS), list[torch.dtype]()
    layers = nn.Sequential(nn.Linear(COLUMNS, COLUMNS), norm, nn.Linear(COLUMNS, COLUMNS))
    model = _fsdp1(layers, {"param_dtype": dtype}, auto_wrap_policy=always_wrap_policy)
    # The hook is behind the one that casts the input.
    norm.register_forward_pre_hook(lambda module, given: seen.extend([given[0].dtype, module.weight.dtype]))
    out = model(torch.eye(COLUMNS))
    if set(seen) != {torch.float32} or out.dtype is not dtype:
        yield f"BatchNorm1d: {[str(one) for one in seen]}, and an output in {out.dtype}"
