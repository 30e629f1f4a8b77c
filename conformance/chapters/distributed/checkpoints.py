"""What checkpoints hold that one rank and the others save by each route: types as recorded, and bits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from .comparison import all_of

KINDS = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.int64, torch.int32, torch.uint8, torch.bool),
)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SHAPES = ((), (0,), (7,), (3, 5))
_MODEL_OPTIONS: dict[str, dict[str, bool]] = {
    "of a model": {},
    "of a model, offloaded": {"cpu_offload": True},
    "of a model, full": {"full_state_dict": True},
    "of a model, full and offloaded": {"full_state_dict": True, "cpu_offload": True},
}


def drawn(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a tensor of a type, of drawn numbers that fp8 holds."""
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64) * 37
    return (numbers > 0) if dtype is torch.bool else numbers.abs().to(dtype)


def live(seed: int) -> dict[str, Any]:
    """Return a state: tensors of each type and shape, alike on each rank, parts of larger ones, and DTensors."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    generator = torch.Generator().manual_seed(seed)
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    found: dict[str, Any] = {}
    for dtype in (*KINDS, *_FP8):
        for shape in _SHAPES:
            found[f"{dtype}, {shape}"] = drawn(dtype, shape, generator)
        found[f"{dtype}, transposed"] = drawn(dtype, (3, 5), generator).t()
        found[f"{dtype}, a part"] = drawn(dtype, (9,), generator)[2:5]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        whole = drawn(dtype, (4, 2), generator)
        found[f"{dtype}, replicated"] = distribute_tensor(whole, mesh, [Replicate()])
        found[f"{dtype}, sharded"] = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    return found


def _of_a_model(state: dict[str, Any], options: dict[str, bool]) -> dict[str, Any]:
    """Return what get_model_state_dict makes of a model whose parameters and buffers are the state."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = nn.Module()
    for name, one in state.items():
        plain = name.replace(".", "_")
        if one.is_floating_point():
            model.register_parameter(plain, nn.Parameter(one))
        else:
            model.register_buffer(plain, one)
    made = get_model_state_dict(model, options=StateDictOptions(**options))
    return {name: made[plain] for name in state if (plain := name.replace(".", "_")) in made}


def stagers() -> dict[str, Callable[[], Any]]:
    """Return what makes the stagers that this torch has on a CPU, by name; None is its own choice.

    Those that pin memory, and a blocking one that keeps its copies, need an accelerator.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import staging

    own: dict[str, Callable[[], Any]] = {
        "the stager of torch": lambda: None,
        "the writer stages": lambda: None,
    }
    if "async_stager" not in inspect.signature(checkpoint.async_save).parameters:
        return own
    found: dict[str, Callable[[], Any]] = own | {
        "BlockingAsyncStager": staging.BlockingAsyncStager,
        "BlockingAsyncStager, checked": partial(staging.BlockingAsyncStager, type_check=True),
    }
    if hasattr(staging, "DefaultStager"):
        for shared, later in ((False, False), (True, False), (False, True), (True, True)):
            options = staging.StagingOptions(False, shared, later, False)
            name = f"DefaultStager{', shared memory' * shared}{', in a thread' * later}"
            found[name] = partial(staging.DefaultStager, options)
    return found


SYNCHRONOUS = ("save", *_MODEL_OPTIONS)
STAGERS = (
    *("the writer stages", "the stager of torch", "BlockingAsyncStager", "BlockingAsyncStager, checked"),
    *(f"DefaultStager{shared}{later}" for later in ("", ", in a thread") for shared in ("", ", shared memory")),
)


def unlike_saved(route: str, folder: str, seed: int, times: int) -> list[str]:
    """Save so often by a route; name the tensors that the checkpoint has in another type or with other bits.

    An asynchronous save copies the state before it returns, or says when it has: other values afterwards do not count.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    staged = stagers().get(route)
    stager: Any = staged() if staged else None
    found = []
    for number in range(times):
        place = f"{folder}/{number}"
        state = live(seed + number)
        expected = {name: all_of(one.detach()).clone() for name, one in state.items()}
        if route in _MODEL_OPTIONS:
            state = _of_a_model(state, _MODEL_OPTIONS[route])
            # Rank 0 alone has a full state that is offloaded.
            if distributed.get_rank() == 0 or len(_MODEL_OPTIONS[route]) < 2:
                seen = {name: all_of(one.detach()) for name, one in state.items()}
                found += [f"state, {one}" for one in _unlike(seen, expected)]
        if staged:
            how: dict[str, Any] = {"checkpoint_id": place}
            if route == "the writer stages":
                how = {"storage_writer": checkpoint.FileSystemWriter(place)}
            answer: Any = checkpoint.async_save(dict(state), **how, **({"async_stager": stager} if stager else {}))
            if hasattr(answer, "staging_completion"):
                answer.staging_completion.result()
            for one in state.values():
                _zero(one)
            getattr(answer, "upload_completion", answer).result()
        else:
            checkpoint.save(dict(state), checkpoint_id=place)
        distributed.barrier()
        recorded = checkpoint.FileSystemReader(place).read_metadata().state_dict_metadata
        for name, one in expected.items():
            kind = getattr(getattr(recorded.get(name), "properties", None), "dtype", None)
            if kind != one.dtype:
                found.append(f"save {number}, {name}: recorded as {kind} in place of {one.dtype}")
        if distributed.get_rank() == 0:
            dcp_to_torch_save(place, Path(folder) / f"{number}.pt")
            found += [f"save {number}, {one}" for one in _unlike(torch.load(Path(folder) / f"{number}.pt"), expected)]
        distributed.barrier()
    if hasattr(stager, "close"):
        stager.close()
    return found


def _zero(tensor: Any) -> None:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local.detach().view(-1 if local.is_contiguous() else local.shape).copy_(torch.zeros((), dtype=local.dtype))


def _unlike(seen: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Name each tensor that is missing, or has another type, shape or other bits."""
    found = []
    for name, wanted in expected.items():
        one = seen.get(name)
        if one is None:
            found.append(f"{name} is missing")
        elif (one.dtype, one.shape) != (wanted.dtype, wanted.shape):
            found.append(f"{name}: {one.dtype} {tuple(one.shape)} in place of {wanted.dtype} {tuple(wanted.shape)}")
        elif not torch.equal(_bits(one), _bits(wanted)):
            found.append(f"{name}: other bits")
    return found


def unlike_loaded(folder: str, seed: int) -> list[str]:
    """Name the DTensors, by their placement when saved and loaded, that torch.distributed.checkpoint.load changes.

    The rows, one less than two for each rank, divide by no number of ranks.
    """
    from torch.distributed import checkpoint
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    world, generator = distributed.get_world_size(), torch.Generator().manual_seed(seed)
    mesh = distributed.init_device_mesh("cpu", (world,))
    places = (Replicate(), Shard(0), Shard(1))
    whole = {str(kind): drawn(kind, (2 * world - 1, 3), generator) for kind in KINDS if kind.is_floating_point}

    def placed(place: Any, *, zeros: bool) -> dict[str, Any]:
        return {
            name: distribute_tensor(torch.zeros_like(one) if zeros else one.clone(), mesh, [place])
            for name, one in whole.items()
        }

    checkpoint.save({str(place): placed(place, zeros=False) for place in places}, checkpoint_id=folder)
    found = []
    for shift in range(len(places)):
        state = {str(place): placed(places[(at + shift) % len(places)], zeros=True) for at, place in enumerate(places)}
        checkpoint.load(state, checkpoint_id=folder)
        for before, tensors in state.items():
            for name, one in tensors.items():
                seen = one.full_tensor()
                if seen.dtype != whole[name].dtype or not torch.equal(_bits(seen), _bits(whole[name])):
                    found.append(f"{name} of {before} into {one.placements[0]}")
    return found


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
