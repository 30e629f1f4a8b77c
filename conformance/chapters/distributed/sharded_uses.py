"""What one rank computes with sharded layers that are not all used, or trained, in each micro-batch."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from .comparison import all_of

FEATURES = 8

# The layers that the forward of each micro-batch uses, and "frozen" or "no_grad" where it is for inference, or
# WEIGHTS where the weights alone are trained.
WEIGHTS = "weights"
Use: TypeAlias = tuple[str, str]
HISTORIES: dict[str, tuple[Use, ...]] = {
    "all-all": (("ab", ""), ("ab", "")),
    "one-all": (("a", ""), ("ab", "")),
    "all-one": (("ab", ""), ("a", "")),
    "one-other": (("a", ""), ("b", "")),
    "one-one-all": (("a", ""), ("a", ""), ("ab", "")),
    "inference-first": (("ab", "no_grad"), ("ab", "")),
    "frozen-first": (("ab", "frozen"), ("ab", "")),
    "weights-weights": (("ab", WEIGHTS), ("ab", WEIGHTS)),
}


class Layers(nn.Module):
    """Two Linear layers of which each forward uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        for name in used:
            x = getattr(self, name)(x)
        return x


def built(seed: int) -> Layers:
    """Return the layers with parameters of this seed."""
    model, generator = Layers(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def batches(history: str, seed: int, rank: int) -> Iterator[tuple[torch.Tensor, Use]]:
    """Yield the micro-batches of one rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for use in HISTORIES[history]:
        yield torch.randn((4, FEATURES), generator=generator), use


def _freeze(model: nn.Module, mode: str) -> None:
    for name, one in model.named_parameters():
        one.requires_grad_(mode != "frozen" and not (mode == WEIGHTS and "bias" in name))


def sharded(history: str, dtype: torch.dtype, seed: int, blocks: bool) -> dict[str, torch.Tensor]:
    """Return the whole gradients after a history under fully_shard with parameters in `dtype`, reduced in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = built(seed)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    _freeze(model, HISTORIES[history][0][1])
    for layer in (model.a, model.b) if blocks else ():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    every = list(batches(history, seed, distributed.get_rank()))
    for number, (x, (used, mode)) in enumerate(every, 1):
        _freeze(model, mode)
        model.set_requires_gradient_sync(number == len(every))
        with torch.no_grad() if mode == "no_grad" else contextlib.nullcontext():
            out = model(x, used)
        if mode in ("", WEIGHTS):
            out.float().square().sum().backward()
    return {name: one.grad.full_tensor() for name, one in model.named_parameters() if one.grad is not None}


def by_hand(history: str, dtype: torch.dtype, seed: int, world: int) -> dict[str, torch.Tensor]:
    """Return the mean over the ranks of float32 sums of the gradients of parameters that are cast to `dtype`."""
    total: dict[str, torch.Tensor] = {}
    for rank in range(world):
        master = built(seed)
        low = built(seed).to(dtype)
        for x, (used, mode) in batches(history, seed, rank):
            if mode not in ("", WEIGHTS):
                continue
            _freeze(low, mode)
            low.zero_grad()
            low(x.to(dtype), used).float().square().sum().backward()
            for (name, _), one in zip(master.named_parameters(), low.parameters(), strict=True):
                if one.grad is not None:
                    total[name] = total.get(name, torch.zeros(one.shape)) + one.grad.float() / world
    return total


# Inputs of forward


@dataclass
class Held:
    """A dataclass with a tensor."""

    tensor: torch.Tensor


Named = collections.namedtuple("Named", ["tensor"])


Containers: TypeAlias = dict[str, Callable[[torch.Tensor], Any]]


def containers() -> Containers:
    """Return what puts a tensor into a container, by what that is."""
    return {
        "tuple": lambda one: (one,),
        "list": lambda one: [one],
        "dictionary": lambda one: {"tensor": one},
        "named tuple": Named,
        "dataclass": Held,
        "nested": lambda one: [{"tensor": (one,)}],
    }


def inputs(kind: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return arguments of a forward that hold a tensor, by what they are; those in containers are of that kind."""
    one = torch.ones(2, dtype=kind)
    return {
        "float32": one.float(),
        "float64": one.double(),
        "float16": one.half(),
        "integer": one.long(),
        "boolean": one.bool(),
        **{name: container(one.clone()) for name, container in containers().items()},
    }


def held(value: Any) -> torch.Tensor:
    """Return the tensor that an argument holds."""
    while not isinstance(value, torch.Tensor):
        value = _inner(value)
    return value


def _inner(value: Any) -> Any:
    if isinstance(value, dict):
        return value["tensor"]
    return value.tensor if hasattr(value, "tensor") else value[0]


class _Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: dict[str, str] = {}

    def forward(self, arguments: Sequence[Any], **named: Any) -> torch.Tensor:
        return self.look(arguments, **named)

    def look(self, arguments: Sequence[Any], **named: Any) -> torch.Tensor:
        names = list(inputs())
        self.seen = {name: str(held(one).dtype) for name, one in zip(names, arguments, strict=True)}
        self.seen |= {f"{name}, by name": str(held(one).dtype) for name, one in named.items()}
        self.seen["the parameter"] = str(self.weight.dtype)
        return self.weight.sum()

    encode = look


def _casting(model: Any, way: str, dtype: torch.dtype, cast: bool) -> Any:
    """Shard a module so that it casts its inputs, or does not."""
    from torch.distributed import fsdp

    if way == "fsdp2":
        policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=cast)
        mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
        fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    precision = fsdp.MixedPrecision(param_dtype=dtype, cast_forward_inputs=cast, cast_root_forward_inputs=cast)
    return fsdp.FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True, mixed_precision=precision
    )


class _Adding(nn.Module):
    """Add up what is given, and nothing of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, arguments: Sequence[Any], **named: Any) -> torch.Tensor:
        parts = [held(one) for one in (*arguments, *named.values())]
        return torch.stack([part.float().sum() for part in parts]).sum() + 0 * self.weight.float().sum()


def input_gradients(way: str, dtype: torch.dtype, cast: bool) -> dict[str, str]:
    """Return what is wrong with the gradients of inputs that a layer in front made, by input: each has ones."""
    wrapped = _casting(_Adding(), way, dtype, cast)
    placed, named = inputs(), inputs()
    every = {**placed, **{f"{name}, by name": value for name, value in named.items()}}
    leaves = {name: held(one) for name, one in every.items() if held(one).is_floating_point()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    wrapped(list(placed.values()), **named).backward()
    wrong = {}
    for name, leaf in leaves.items():
        if leaf.grad is None:
            wrong[name] = "no gradient"
        elif leaf.grad.dtype != leaf.dtype or not torch.equal(leaf.grad, torch.ones_like(leaf)):
            wrong[name] = f"{leaf.grad.dtype} {leaf.grad.tolist()}"
    return wrong


def recomputed_gradients(way: str, dtype: torch.dtype, seed: int) -> dict[str, str]:
    """Return, by kind of checkpoint around a sharded module that casts its inputs, which gradients it changes."""
    found = {}
    for reentrant in (True, False):
        gradients = []
        for recomputed in (False, True):
            torch.manual_seed(seed)
            front, layer = nn.Linear(4, 4), nn.Linear(4, 4)
            sharded = _casting(layer, way, dtype, True)
            x = torch.randn(2, 4, requires_grad=True)
            run = partial(checkpoint, sharded, use_reentrant=reentrant) if recomputed else sharded
            run(front(x)).float().square().sum().backward()
            gradients.append([one.grad for one in (x, *front.parameters())] + [all_of(layer.weight.grad)])
        if not all(torch.equal(one, other) for one, other in zip(*gradients, strict=True)):
            found[f"use_reentrant={reentrant}"] = f"{gradients[1]} in place of {gradients[0]}"
    return found


def input_types(way: str, dtype: torch.dtype, cast: bool) -> dict[str, str]:
    """Return the dtypes that forward sees of each input, with the casts of inputs on or off.

    In fully_shard so does another method that is registered as a forward.
    """
    from torch.distributed import fsdp

    model: Any = _Seeing()
    wrapped = _casting(model, way, dtype, cast)
    if way == "fsdp2":
        fsdp.register_fsdp_forward_method(model, "encode")
    wrapped(list(inputs().values()), **inputs())
    seen = dict(model.seen)
    if way == "fsdp2":
        model.encode(list(inputs().values()), **inputs())
        seen |= {f"{name}, in another method": kind for name, kind in model.seen.items()}
    return seen


class _Giving(nn.Module):
    """Return what is given, beside a product with the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, value: Any) -> Any:
        self.layer(held(value).float())
        return value


def output_types(given: torch.dtype, asked: torch.dtype) -> dict[str, str]:
    """Return the dtypes that come out of fully_shard with output_dtype `asked`, of containers of `given` tensors."""
    from torch.distributed import fsdp

    model: Any = _Giving()
    policy = fsdp.MixedPrecisionPolicy(output_dtype=asked, cast_forward_inputs=False)
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
    found = {}
    for name, value in inputs(given).items():
        found[name] = str(held(model(value)).dtype)
    return found


# Parameters that are sharded over one dimension of a mesh and replicated over the other


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.norm(x)).relu())


class _Reductions(TorchDispatchMode):
    """Record the dtype and the shape of each tensor that is reduced over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_reduce" in str(func):
            found = args[0][0] if isinstance(args[0], list) else args[0]
            self.seen.append((tuple(found.shape), found.dtype))
        return func(*args, **(kwargs or {}))


def reductions_of_replicated_parameters(dtype: torch.dtype, seed: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of what backward reduces by all_reduce on a mesh of two by two ranks.

    The layer norm's parameters are replicated over the tensor parallel ranks, of which each has half of the sequence.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model: Any = _Block()
    plan = {
        "norm": SequenceParallel(),
        "a": ColwiseParallel(input_layouts=Shard(1)),
        "b": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"], mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
    x = torch.randn((2, 4, FEATURES), generator=torch.Generator().manual_seed(seed))
    out = model(DTensor.from_local(x, mesh["tensor"], [Shard(1)]))
    with _Reductions() as reductions:
        (out.to_local() if isinstance(out, DTensor) else out).float().square().sum().backward()
    return reductions.seen


def parallel_losses(dtype: torch.dtype, seed: int) -> list[str]:
    """Name what loss_parallel makes otherwise of logits that are sharded over classes, alone and in a region."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn((4, 8), generator=generator)
    labels = torch.arange(4)
    weight = torch.rand(8, generator=generator) + 0.5
    options: dict[str, dict[str, Any]] = {
        "": {},
        "ignoring a class": {"ignore_index": 2},
        "summed": {"reduction": "sum", "ignore_index": 1},
        "of each row": {"reduction": "none", "ignore_index": 3},
        "weighted": {"weight": weight, "ignore_index": 0},
    }
    found = []
    # exp of the larger logits is beyond every type.
    for within, (size, (name, how)) in itertools.product(
        (False, True), ((64.0, ("", {})), *itertools.product((1.0,), options.items()))
    ):
        logits = (drawn * size).to(dtype)
        given = {key: one.to(dtype) if isinstance(one, torch.Tensor) else one for key, one in how.items()}
        plain, ours = (
            logits.clone().requires_grad_(),
            distribute_tensor(logits.clone(), mesh, [Shard(1)]).requires_grad_(),
        )
        region = torch.autocast("cpu", dtype=dtype) if within else contextlib.nullcontext()
        with region:
            expected = nn.functional.cross_entropy(plain, labels, **given)
        expected.sum().backward()
        with loss_parallel():
            with region:
                loss = nn.functional.cross_entropy(ours, labels, **given)
            all_of(loss).sum().backward() if loss.dim() else loss.backward()
        where = f"{'in a region' if within else 'outside of regions'}, logits of {size:g}{f', {name}' if name else ''}"
        loss = all_of(loss.detach())
        if loss.dtype != expected.dtype:
            found.append(f"{where}: loss in {loss.dtype} in place of {expected.dtype}")
        unit = torch.finfo(expected.dtype).eps
        # The loss is a mean of logarithms of sums, the gradient a softmax: a few roundings of either.
        if not bool(((loss - expected.detach()).abs() <= 4 * unit * expected.detach().abs()).all()):
            found.append(f"{where}: loss {loss.tolist()} in place of {expected.tolist()}")
        seen = ours.grad.full_tensor()
        apart = float((seen - plain.grad).abs().max())
        if seen.dtype != dtype or not apart <= 4 * torch.finfo(dtype).eps * float(weight.max() if how else 1):
            found.append(f"{where}: gradient in {seen.dtype}, {apart} apart")
    return found
