"""Check that distributed checkpoints hold tensors of every type as they are."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.utils._pytree import keystr, tree_flatten_with_path

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .checkpoints import KINDS, STAGERS, SYNCHRONOUS, drawn, stagers, unlike_loaded, unlike_saved
from .processes import Groups
from .support import LISTED, answers


def _state(seed: int | None) -> dict[str, dict[str, Tensor]]:
    """Return tensors of each type, of no, one and two dimensions, of drawn bits, or of zeros to load into."""
    generator = torch.Generator().manual_seed(seed or 0)
    made: dict[str, dict[str, Tensor]] = {}
    for dtype in KINDS:
        for shape in ((), (7,), (3, 5)):
            value = drawn(dtype, shape, generator)
            made.setdefault(str(dtype), {})[f"{len(shape)}-d"] = value if seed is not None else torch.zeros_like(value)
    return made


@contract("AMP-DISTRIBUTED-032", on="cpu")
@pytest.mark.parametrize("together", [True, False], ids=["together", "by-type"])
def test_checkpoint_of_each_type(case: Case, target: Target, together: bool) -> None:
    if not distributed.is_available():
        case.untestable("this torch is built without torch.distributed")
    from torch.distributed import checkpoint

    saved, loaded = _state(case.seed + 1), _state(None)
    parts = [list(saved)] if together else [[kind] for kind in saved]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it saves on one process
        for number, kinds in enumerate(parts):
            place = f"{folder}/{number}"
            checkpoint.save({kind: dict(saved[kind]) for kind in kinds}, checkpoint_id=place)
            checkpoint.load({kind: loaded[kind] for kind in kinds}, checkpoint_id=place)
    for kind, tensors in saved.items():
        for name, tensor in tensors.items():
            case.identical(f"{kind}, {name}", loaded[kind][name], tensor)


def _training(seed: int, scale: float) -> dict[str, Any]:
    """Return the state of a run after some steps, which another seed gives other settings, counts and values."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    for parameter in model.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1), betas=(0.8 + seed / 100, 0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5 + seed / 10)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3 + seed)
    for _ in range(2 + 2 * seed):
        scaler.scale(model(torch.rand(2, 4, generator=generator)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
    progress = {
        "step": seed,
        "best": 0.5 + seed,
        "name": f"run {seed}",
        "done": bool(seed),
        "losses": [1.0 + seed, seed],
    }
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "scheduler": scheduler.state_dict(),
        "progress": {**progress, "deeper": {"still": {"number": 3.5 + seed}}},
    }


@contract("AMP-DISTRIBUTED-034", on="cpu")
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_checkpoint_of_a_training(case: Case, target: Target, depth: int) -> None:
    """The state of one run is loaded over that of another one, in so many dictionaries one in the other."""
    if not distributed.is_available():
        case.untestable("this torch is built without torch.distributed")
    from torch.distributed import checkpoint

    saved, loaded = _training(1, 8.0), _training(0, 4.0)
    for _ in range(depth):
        saved, loaded = {"part": saved}, {"part": loaded}
    before, inner = _leaves(loaded), dict(loaded)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it saves on one process
        checkpoint.save(saved, checkpoint_id=folder)
        checkpoint.load(loaded, checkpoint_id=folder)
    expected, seen = _leaves(saved), _leaves(loaded)
    case.at_least(
        "values that differ between the runs (control)", sum(before[each] != expected[each] for each in before), 20
    )
    case.equal(
        "values that are not those saved",
        {each: seen.get(each) for each in expected if seen.get(each) != expected[each]},
        {},
    )
    # Who holds one of the dictionaries in it hands that to the optimizer.
    held = _leaves(inner)
    case.equal(
        "values that are not those saved in the dictionaries that were given",
        {each: held.get(each) for each in expected if held.get(each) != expected[each]},
        {},
    )


def _leaves(state: Any) -> dict[str, tuple[str, Any]]:
    """Return the type and value of each number, string and tensor by its place."""
    return {
        keystr(place): (type(one).__name__, one.tolist() if isinstance(one, Tensor) else one)
        for place, one in tree_flatten_with_path(state)[0]
    }


@contract("AMP-DISTRIBUTED-032", on="cpu")
@pytest.mark.parametrize("route", [STAGERS[0], *(deep("standard", one) for one in (*SYNCHRONOUS, *STAGERS[1:]))])
def test_checkpoint_by_each_route(case: Case, target: Target, ranks: Groups, route: str) -> None:
    if route in STAGERS and route not in stagers():
        case.unsupported(f"async_save of this torch has no {route}")
    times = case.samples(quick=1, standard=2, full=3)
    with tempfile.TemporaryDirectory() as folder:
        for rank, found in enumerate(answers(case, ranks, 2, unlike_saved, route, folder, case.seed + 2, times)):
            case.equal(f"rank {rank}: what the checkpoint has in other types or bits", found[:LISTED], [])


@contract("AMP-DISTRIBUTED-032", on="cpu")
@pytest.mark.parametrize("world", [2, deep("full", 4)])
def test_checkpoint_into_other_placements(case: Case, target: Target, ranks: Groups, world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank, found in enumerate(answers(case, ranks, world, unlike_loaded, folder, case.seed + 3)):
            case.equal(f"rank {rank}: what is loaded with other bits", found[:LISTED], [])
