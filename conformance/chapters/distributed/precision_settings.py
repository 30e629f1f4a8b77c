"""What one rank sees of each setting of a policy of mixed precision, and of means near the end of float16's range."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...data import in_force
from .ways import compression_hook

FEATURES = 4
# Twice this is beyond the range of float16, which holds it and its quarter.
LARGE = 40960.0

Settings: TypeAlias = dict[str, Any]
"""The arguments of MixedPrecision or of MixedPrecisionPolicy; one that is not there has its default."""


def _of_fsdp1(given: Settings) -> bool:
    return not given["keep_low_precision_grads"]


def _kept(given: Settings) -> bool:
    return given["keep_low_precision_grads"] and _reduced(given) is _computed(given)


def _kept_in_another_type(given: Settings) -> bool:
    return given["keep_low_precision_grads"] and _reduced(given) is not _computed(given)


GROUPS: dict[str, tuple[str, Callable[[Settings], bool]]] = {
    "fsdp2": ("fsdp2", lambda given: True),
    "fsdp1": ("fsdp1", _of_fsdp1),
    "fsdp1-SHARD_GRAD_OP": ("fsdp1-SHARD_GRAD_OP", _of_fsdp1),
    "fsdp1-NO_SHARD": ("fsdp1-NO_SHARD", _of_fsdp1),
    "fsdp1-kept_gradients": ("fsdp1", _kept),
    "fsdp1-kept_gradients_of_another_type": ("fsdp1", _kept_in_another_type),
}
"""The settings that a case judges, by name: what they are settings of, and whether one is among them."""


def sampled(group: str, dtype: torch.dtype, seed: int) -> list[Settings]:
    """Return combinations in which each two values of two settings are together, in an order that the seed draws."""
    every = list(settings(group, dtype))
    random.Random(f"{seed} {group} {dtype}").shuffle(every)
    missing = {pair for given in every for pair in _pairs(given)}
    found: list[Settings] = []
    while missing:
        best = max(every, key=lambda given: len(missing & _pairs(given)))
        found.append(best)
        missing -= _pairs(best)
    return found


def _pairs(given: Settings) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(given.items(), 2))


def settings(group: str, dtype: torch.dtype) -> Iterator[Settings]:
    """Yield the combinations of settings of a group."""
    shard, among = GROUPS[group]
    low, types = (None, dtype), (None, dtype, torch.float32)
    grid: dict[str, tuple[Any, ...]] = {"param_dtype": low, "reduce_dtype": types}
    if shard.startswith("fsdp1"):
        grid |= {"buffer_dtype": low, "keep_low_precision_grads": (False, True)}
    else:
        grid |= {"output_dtype": types, "cast_forward_inputs": (True, False)}
    for values in itertools.product(*grid.values()):
        given = dict(zip(grid, values, strict=True))
        if among(given):
            yield given


def _computed(given: Settings) -> torch.dtype:
    found: torch.dtype = given["param_dtype"] or torch.float32
    return found


def _reduced(given: Settings) -> torch.dtype:
    """Return the type of the reduction; without a setting, fully_shard's is the parameter's own from 2.15 on."""
    by_default = _computed(given)
    if "output_dtype" in given and in_force(torch.__version__, since="2.15"):
        by_default = torch.float32
    found: torch.dtype = given["reduce_dtype"] or by_default
    return found


def promised(given: Settings) -> dict[str, str]:
    """Return by part of a training step the dtype that the settings name for it, and what buffers come to."""
    computed, reduced = _computed(given), _reduced(given)
    cast = given.get("cast_forward_inputs", True)
    kept = given.get("keep_low_precision_grads", False)
    found = {
        "parameter in forward": computed,
        "input in forward": computed if cast else torch.float32,
        "buffer in forward": given.get("buffer_dtype") or torch.float32,
        "buffer of a module without parameters in forward": given.get("buffer_dtype") or torch.float32,
        "output": given.get("output_dtype") or computed,
        "reduction": reduced,
        "gradient": reduced if kept else torch.float32,
        "parameter after backward": torch.float32,
        "parameter in state_dict": torch.float32,
        "buffer in state_dict": torch.float32,
    }
    if "buffer_dtype" in given:
        found["buffer of an ignored module"] = torch.float32
    numbers = {"buffer": torch.ones(1), "bare.buffer": torch.full((1,), 2.0)}
    return {name: str(one) for name, one in found.items()} | {"buffers in state_dict": _numbers(numbers)}


def _numbers(buffers: dict[str, torch.Tensor]) -> str:
    """Return by name the numbers of buffers, of which each has one."""
    return ", ".join(f"{name} of {one.unique().tolist()}" for name, one in buffers.items())


_SAVED = {"parameter": "weight", "buffer": "buffer"}


class _Seeing(nn.Module):
    """A product that records the dtypes of what its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES, FEATURES))
        self.buffer: torch.Tensor
        self.register_buffer("buffer", torch.ones(FEATURES))
        self.ignored = nn.BatchNorm1d(FEATURES, affine=False)
        self.bare = nn.Module()
        self.bare.register_buffer("buffer", torch.full((FEATURES,), 2.0))
        self.seen: dict[str, str] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = {"parameter": self.weight, "input": x, "buffer": self.buffer}
        parts["buffer of a module without parameters"] = self.bare.get_buffer("buffer")
        self.seen = {f"{name} in forward": str(one.dtype) for name, one in parts.items()}
        return nn.functional.linear(x.to(self.weight.dtype), self.weight)


class _Reductions(TorchDispatchMode):
    """Record the dtypes of the tensors that ranks add up."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce" in str(func) and str(func).startswith(("c10d", "_c10d")):
            self.seen |= {str(one.dtype) for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def wrapped(module: nn.Module, shard: str, given: Settings, ignored: Sequence[nn.Module] = ()) -> Any:
    """Return the module under FullyShardedDataParallel or fully_shard with a policy of these settings.

    Of the former some modules may be `ignored`.
    """
    from torch.distributed import fsdp

    if shard.startswith("fsdp1"):
        _, _, strategy = shard.partition("-")
        return fsdp.FullyShardedDataParallel(
            module,
            sharding_strategy=fsdp.ShardingStrategy[strategy or "FULL_SHARD"],
            device_id=torch.device("cpu"),
            use_orig_params=True,
            ignored_modules=ignored,
            mixed_precision=fsdp.MixedPrecision(**given),
        )
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    fsdp.fully_shard(module, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**given))
    return module


def types_of(shard: str, given: Settings) -> dict[str, str]:
    """Return by part of a training step the dtype that it has with these settings."""
    module = _Seeing()
    model = wrapped(module, shard, given, [module.ignored])
    out = model(torch.ones(2, FEATURES))
    with _Reductions() as reductions:
        out.float().sum().backward()
    found = dict(module.seen)
    found["output"] = str(out.dtype)
    found["reduction"] = ", ".join(sorted(reductions.seen))
    (parameter,) = model.parameters()
    found["gradient"] = str(parameter.grad.dtype)
    found["parameter after backward"] = str(parameter.dtype)
    saved = model.state_dict()
    found |= {f"{part} in state_dict": str(saved[name].dtype) for part, name in _SAVED.items()}
    found["buffers in state_dict"] = _numbers({name: saved[name] for name in ("buffer", "bare.buffer")})
    if shard.startswith("fsdp1"):
        found["buffer of an ignored module"] = str(module.ignored.running_mean.dtype)
    return found


def every_type(group: str, combinations: list[Settings]) -> list[dict[str, str]]:
    """Return the dtypes of a step with each of these settings of a group."""
    return [types_of(GROUPS[group][0], given) for given in combinations]


# Means that float16 holds, of gradients whose sum it does not


def _hooked(module: nn.Module, name: str) -> Any:
    model = nn.parallel.DistributedDataParallel(module)
    model.register_comm_hook(None, compression_hook(name))
    return model


class _Linear(nn.Module):
    """A sum of parameters times LARGE."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def mean_of_large(name: str) -> list[float]:
    """Return this rank's gradients of a parameter whose gradient on each rank is LARGE, reduced in float16."""
    module = _Linear()
    sharded = name.startswith("fsdp")
    model = wrapped(module, name, {"reduce_dtype": torch.float16}) if sharded else _hooked(module, name)
    model(torch.full((FEATURES,), LARGE)).backward()
    found: list[float] = []
    for one in model.parameters():
        gradient = one.grad.to_local() if hasattr(one.grad, "to_local") else one.grad
        found += gradient.tolist()
    return found
