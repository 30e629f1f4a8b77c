"""How a program is trained on several ranks: each way wraps the model, and says how its parts become whole again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ...measure.precision import repeatable_convolutions
from .programs import INTERVAL, SCALE, Batch, Program, Step

Whole: TypeAlias = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


@dataclass
class Wrapped:
    """A model made ready for one rank.

    `region` is what surrounds forward and loss, `whole` returns the gradients and parameters as one process has them,
    `accumulating` the context of a micro-batch that is not the last of its step, `clip` clips to a norm.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    whole: Callable[[], Whole]
    region: Callable[[], AbstractContextManager[Any]]
    accumulating: Callable[[], AbstractContextManager[Any]]
    clip: Callable[[float], Any]


Way: TypeAlias = Callable[[Program], Wrapped]


@repeatable_convolutions()
def train(way: str, program: Program, clip: float | None = None) -> list[Step]:
    """Train in this rank; every rank of the group has to call it. Returns what each step left."""
    wrapped = WAYS[way](program)
    return [step(wrapped, program, batches, clip) for batches in program.batches(distributed.get_rank())]


def step(wrapped: Wrapped, program: Program, batches: list[Batch], clip: float | None = None) -> Step:
    """Train on the micro-batches of one step."""
    wrapped.optimizer.zero_grad()
    losses = []
    for number, batch in enumerate(batches, 1):
        with wrapped.accumulating() if number < len(batches) else contextlib.nullcontext():
            with wrapped.region():
                loss = program.loss(wrapped.model, batch)
            wrapped.scaler.scale(loss).backward()
        losses.append(loss.detach().cpu())
    wrapped.scaler.unscale_(wrapped.optimizer)
    norm = None if clip is None else float(wrapped.clip(clip))
    wrapped.scaler.step(wrapped.optimizer)
    wrapped.scaler.update()
    gradients, parameters = ({name: one.cpu() for name, one in part.items()} for part in wrapped.whole())
    return Step(losses, gradients, parameters, wrapped.scaler.get_scale(), norm)


def scaler(program: Program) -> Any:
    """Return the scaler of every way that has no other."""
    return torch.amp.GradScaler(program.device_type, init_scale=SCALE, growth_interval=INTERVAL)


def amp_region(program: Program) -> Callable[[], AbstractContextManager[Any]]:
    """Return what opens the program's autocast region."""
    return lambda: torch.autocast(program.device_type, dtype=program.dtype)


def _plain(name: str) -> str:
    """Return the name of a parameter without what wrappers put into it."""
    for word in ("module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(word, "")
    return name


def _copies(model: nn.Module) -> Whole:
    named = {_plain(name): one for name, one in model.named_parameters()}
    gradients = {name: one.grad.clone() for name, one in named.items() if one.grad is not None}
    return gradients, {name: one.detach().clone() for name, one in named.items()}


# --- replicas


def replicated(
    program: Program,
    *,
    inside: bool = False,
    hook: Callable[..., Any] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    **options: Any,
) -> Wrapped:
    """Wrap in DistributedDataParallel; ranks start from different parameters, which it has to make equal.

    `inside` opens the region in the module's forward, as the AMP examples do for several devices.
    """
    region = amp_region(program)
    rank = distributed.get_rank()
    made = program.built(region if inside else None, seed=program.seed + rank, index=rank)
    model = DistributedDataParallel(made, **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return Wrapped(
        model,
        (optimizer or program.optimizer)(model.parameters()),
        scaler(program),
        lambda: _copies(model),
        contextlib.nullcontext if inside else region,
        model.no_sync,
        lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm),
    )


WAYS: dict[str, Way] = {}


def way(name: str) -> Callable[[Way], Way]:
    """Register a way by name."""

    def register(made: Way) -> Way:
        WAYS[name] = made
        return made

    return register


_OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp_inside": {"inside": True},
    "ddp_views": {"gradient_as_bucket_view": True},
    "ddp_static": {"static_graph": True},
    "ddp_unused": {"find_unused_parameters": True},
    "ddp_buckets": {"bucket_cap_mb": 0.0001},
}
WAYS.update({name: partial(replicated, **options) for name, options in _OPTIONS.items()})


def compression_hook(name: str) -> Callable[..., Any]:
    """Return a communication hook that compresses gradients: fp16_hook, bf16_hook, fp16_wrapper or bf16_wrapper.

    It goes by another name: DistributedDataParallel refuses the hooks of bfloat16 by theirs where torch has no NCCL,
    though they run on every backend that adds up bfloat16.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

    dtype, kind = name.split("_")
    compressed: Callable[..., Any] = getattr(hooks, f"{dtype}_compress_{kind}")
    if kind == "wrapper":
        compressed = compressed(hooks.allreduce_hook)
    return lambda group, bucket: compressed(group, bucket)


def _compressed(program: Program, name: str) -> Wrapped:
    return replicated(program, hook=compression_hook(name))


WAYS.update(
    {
        f"ddp_{name}": partial(_compressed, name=name)
        for name in ("fp16_hook", "bf16_hook", "fp16_wrapper", "bf16_wrapper")
    }
)


@way("zero")
def _zero(program: Program) -> Wrapped:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from .programs import MOMENTUM, RATE

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=RATE, momentum=MOMENTUM)

    return replicated(program, optimizer=optimizer)


# --- shards


def _is_block(module: nn.Module) -> bool:
    """Whether a module is sharded by itself where blocks are."""
    return isinstance(module, nn.Linear)


def _region(program: Program, precision: dict[str, torch.dtype] | None) -> Callable[[], AbstractContextManager[Any]]:
    """Return what opens a region, or nothing where the wrapper casts the parameters."""
    return contextlib.nullcontext if precision and "param_dtype" in precision else amp_region(program)


def fsdp1(program: Program, *, precision: dict[str, torch.dtype] | None = None, **options: Any) -> Wrapped:
    """Wrap in FullyShardedDataParallel, with autocast, or with its own mixed precision where `precision` is given."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    rank = distributed.get_rank()
    model = FullyShardedDataParallel(
        program.built(index=rank),
        device_id=program.device(rank),
        use_orig_params=True,
        mixed_precision=None if precision is None else MixedPrecision(**precision),
        **options,
    )

    def whole() -> Whole:
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return _copies(model)

    return Wrapped(
        model,
        program.optimizer(model.parameters()),
        ShardedGradScaler(program.device_type, init_scale=SCALE, growth_interval=INTERVAL),
        whole,
        _region(program, precision),
        model.no_sync,
        model.clip_grad_norm_,
    )


@way("fsdp1")
def _fsdp1(program: Program) -> Wrapped:
    return fsdp1(program)


@way("fsdp1_grad_op")
def _fsdp1_grad_op(program: Program) -> Wrapped:
    from torch.distributed.fsdp import ShardingStrategy

    return fsdp1(program, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


@way("fsdp1_whole")
def _fsdp1_whole(program: Program) -> Wrapped:
    """Wrap in FullyShardedDataParallel that shards nothing."""
    from torch.distributed.fsdp import ShardingStrategy

    return fsdp1(program, sharding_strategy=ShardingStrategy.NO_SHARD)


@way("fsdp1_blocks")
def _fsdp1_blocks(program: Program) -> Wrapped:
    return fsdp1(program, auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or _is_block(module))


def fsdp1_hybrid(program: Program, *, precision: dict[str, torch.dtype] | None = None) -> Wrapped:
    """Wrap in FullyShardedDataParallel that keeps a copy of the shards in each pair of ranks."""
    from torch.distributed.fsdp import ShardingStrategy

    strategy = ShardingStrategy.HYBRID_SHARD
    return fsdp1(program, precision=precision, sharding_strategy=strategy, device_mesh=_pairs(program))


def _pairs(program: Program) -> DeviceMesh:
    """Return a mesh whose pairs of ranks share out a model, each pair a whole one."""
    shape = (distributed.get_world_size() // 2, 2)
    return distributed.init_device_mesh(program.device_type, shape, mesh_dim_names=("replicas", "shards"))


def fsdp2(
    program: Program,
    *,
    precision: dict[str, torch.dtype] | None = None,
    blocks: bool = False,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> Wrapped:
    """Apply fully_shard, with autocast, or with its own mixed precision where `precision` is given."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = program.built(index=distributed.get_rank())
    options |= {"mp_policy": MixedPrecisionPolicy(**(precision or {}))}
    if mesh is None:
        mesh = distributed.init_device_mesh(program.device_type, (distributed.get_world_size(),))
    for module in model.modules() if blocks else ():
        if _is_block(module):
            fully_shard(module, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)

    def whole() -> Whole:
        gradients, parameters = _copies(model)
        return (
            {name: one.full_tensor() for name, one in gradients.items()},
            {name: one.full_tensor() for name, one in parameters.items()},
        )

    @contextlib.contextmanager
    def accumulating() -> Any:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    return Wrapped(
        model,
        program.optimizer(model.parameters()),
        scaler(program),
        whole,
        _region(program, precision),
        accumulating,
        lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm).full_tensor(),
    )


@way("fsdp2")
def _fsdp2(program: Program) -> Wrapped:
    return fsdp2(program)


@way("fsdp2_blocks")
def _fsdp2_blocks(program: Program) -> Wrapped:
    return fsdp2(program, blocks=True)


@way("fsdp2_kept")
def _fsdp2_kept(program: Program) -> Wrapped:
    """Apply fully_shard that keeps the parameters whole from forward to backward."""
    return fsdp2(program, blocks=True, reshard_after_forward=False)


def fsdp2_offloaded(program: Program, *, precision: dict[str, torch.dtype] | None = None) -> Wrapped:
    """Apply fully_shard that keeps parameters, gradients and the optimizer's state on the CPU, in any memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return fsdp2(program, precision=precision, blocks=True, offload_policy=CPUOffloadPolicy(pin_memory=False))


def fsdp2_hybrid(program: Program, *, precision: dict[str, torch.dtype] | None = None) -> Wrapped:
    """Apply fully_shard, with a copy of the shards in each pair of ranks."""
    return fsdp2(program, precision=precision, mesh=_pairs(program))


# The types of parameters and of reduction that are not those of autocast, by the dtype of the program.
_PRECISIONS: dict[str, Callable[[torch.dtype], dict[str, torch.dtype]]] = {
    "mixed_fp32": lambda dtype: {"param_dtype": dtype, "reduce_dtype": torch.float32},
    "mixed": lambda dtype: {"param_dtype": dtype, "reduce_dtype": dtype},
    "reduce_low": lambda dtype: {"reduce_dtype": dtype},
}


def _in_precision(shard: Callable[..., Wrapped], types: Callable[[torch.dtype], Any], program: Program) -> Wrapped:
    return shard(program, precision=types(program.dtype))


WAYS.update({shard.__name__: shard for shard in (fsdp1_hybrid, fsdp2_hybrid, fsdp2_offloaded)})
WAYS.update(
    {
        f"{shard.__name__}_{name}": partial(_in_precision, shard, types)
        for shard in (fsdp1, fsdp1_hybrid, fsdp2, fsdp2_hybrid, fsdp2_offloaded)
        for name, types in _PRECISIONS.items()
    }
)


def train_each(way: str, programs: Sequence[Program], clip: float | None = None) -> list[list[Step]]:
    """Train one program after the other in this rank."""
    return [train(way, program, clip) for program in programs]
