"""Whole states of model, optimizer and scaler, taken from the ranks of one group and loaded into those of another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import distributed

from .comparison import all_of, unlike
from .programs import INTERVAL, SCALE, Program, Step
from .ways import WAYS, Wrapped, step


@dataclass
class State:
    """Parameters and momenta by name, whole, and the state of the scaler."""

    parameters: dict[str, torch.Tensor]
    momenta: dict[str, torch.Tensor]
    scaler: dict[str, Any]


def trained(way: str, program: Program, steps: int) -> State:
    """Train some steps in this rank and return the state that they left."""
    wrapped = WAYS[way](program)
    for batches in islice(program.batches(distributed.get_rank()), steps):
        step(wrapped, program, batches)
    return _taken(wrapped.model, wrapped.optimizer, wrapped.scaler)


def consolidated(program: Program, steps: int) -> dict[str, torch.Tensor]:
    """Train some steps with ZeroRedundancyOptimizer; return the momenta of its state, consolidated on this rank."""
    wrapped = WAYS["zero"](program)
    for batches in islice(program.batches(distributed.get_rank()), steps):
        step(wrapped, program, batches)
    whole: dict[int, Any] = {}
    # Every rank takes part in each consolidation, which leaves the state with one of them until the next.
    for rank in range(distributed.get_world_size()):
        wrapped.optimizer.consolidate_state_dict(to=rank)
        if rank == distributed.get_rank():
            whole = wrapped.optimizer.state_dict()["state"]
    names = [name.removeprefix("module.") for name, _ in wrapped.model.named_parameters()]
    return {name: whole[number]["momentum_buffer"].clone() for number, name in enumerate(names)}


STATES: dict[str, dict[str, bool]] = {
    "sharded": {},
    "sharded, offloaded": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "full, offloaded": {"full_state_dict": True, "cpu_offload": True},
}
"""Options of a state of a model, by what it is."""


def unlike_masters(way: str, program: Program) -> list[str]:
    """Train one step; name what states of the model, and a model that loads them, have other than its parameters."""
    from torch.distributed.checkpoint import state_dict

    wrapped = WAYS[way](program)
    step(wrapped, program, next(program.batches(distributed.get_rank())))
    _, masters = wrapped.whole()
    coarse = [name for name, one in masters.items() if torch.equal(one, one.to(program.dtype).float())]
    found = [f"{name} is exact in {program.dtype} (control)" for name in coarse if name != "tail"]
    for name, given in STATES.items():
        # FullyShardedDataParallel on a CPU reads memory that it has freed, also without mixed precision, up to 2.13.
        if name == "full, offloaded" and way.startswith("fsdp1"):
            continue
        options = state_dict.StateDictOptions(**given)
        state = state_dict.get_model_state_dict(wrapped.model, options=options)
        both, _ = state_dict.get_state_dict(wrapped.model, wrapped.optimizer, options=options)
        for which, one in {name: state, f"{name}, with the optimizer": both}.items():
            whole = _whole(one)
            # Rank 0 alone has a full state that is offloaded, and FullyShardedDataParallel's parts are ShardedTensors.
            if whole or (len(given) == 2 and distributed.get_rank() == 0):
                found += [f"{which}: {difference}" for difference in unlike(whole, masters)]
        if len(given) < 2:
            another = WAYS[way](replace(program, seed=program.seed + 1))
            state_dict.set_model_state_dict(another.model, state, options=options)
            found += [f"{name}, loaded: {one}" for one in unlike(another.whole()[1], masters)]
    return found


def _whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a state: every rank takes part. Those of ShardedTensors cannot be had on a CPU."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    parts = {name: one for name, one in state.items() if not isinstance(one, ShardedTensor)}
    return {name: all_of(one) for name, one in parts.items()}


def loaded(way: str, program: Program, state: State) -> State:
    """Load a state into a new model in this rank and return what a look at it gives."""
    return _taken(*_with(WAYS[way](program), state))


def resumed(way: str, program: Program, state: State, steps: int) -> list[Step]:
    """Load a state and train on, from the batches after the first `steps`."""
    wrapped = WAYS[way](program)
    _with(wrapped, state)
    rest = islice(program.batches(distributed.get_rank()), steps, None)
    return [step(wrapped, program, batches) for batches in rest]


def loaded_alone(program: Program, state: State) -> State:
    """Load a state into a model of this process, which is in no group."""
    model = program.built(seed=program.seed + 1)
    optimizer = program.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2 * SCALE, growth_interval=INTERVAL)
    model.load_state_dict(state.parameters)
    packed = optimizer.state_dict()
    packed["state"] = {
        number: {"momentum_buffer": state.momenta[name]} for number, (name, _) in enumerate(model.named_parameters())
    }
    optimizer.load_state_dict(packed)
    scaler.load_state_dict(state.scaler)
    return taken_alone(model, optimizer, scaler)


def taken_alone(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> State:
    """Return the state of a model of one process."""
    named = dict(model.named_parameters())
    return State(
        {name: one.detach().clone() for name, one in named.items()},
        {name: optimizer.state[one]["momentum_buffer"].clone() for name, one in named.items()},
        scaler.state_dict(),
    )


def _with(wrapped: Wrapped, state: State) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    from torch.distributed.checkpoint import state_dict

    model, optimizer = wrapped.model, wrapped.optimizer
    options = state_dict.StateDictOptions(full_state_dict=True)
    packed = state_dict.get_optimizer_state_dict(model, optimizer, options=options)
    packed["state"] = {name: {"momentum_buffer": one.clone()} for name, one in state.momenta.items()}
    whole = {name: one.clone() for name, one in state.parameters.items()}
    state_dict.set_model_state_dict(model, whole, options=options)
    state_dict.set_optimizer_state_dict(model, optimizer, packed, options=options)
    wrapped.scaler.load_state_dict(state.scaler)
    return model, optimizer, wrapped.scaler


def _taken(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> State:
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True)
    weights = state_dict.get_model_state_dict(model, options=options)
    momenta = state_dict.get_optimizer_state_dict(model, optimizer, options=options)["state"]
    return State(
        {name: one.clone() for name, one in weights.items()},
        {name: one["momentum_buffer"].clone() for name, one in momenta.items()},
        scaler.state_dict(),
    )
