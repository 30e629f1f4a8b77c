"""Check that a copy of a module with 16-bit tensors is the module again: types, ties, storages and frozen weights."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ...harness.check import Case, contract, needs
from ...harness.targets import Target
from ...measure.storages import storage_of
from .swapped import swapping


def _file(thing: Any, read: Mapping[str, Any], **write: Any) -> Any:
    """Save and load through a file in memory."""
    file = io.BytesIO()
    torch.save(thing, file, **write)
    file.seek(0)
    return torch.load(file, **read)


def _mapped(thing: Any, **read: Any) -> Any:
    """Save and load through a mapped file, whose tensors are copied before the file goes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved.pt"
        torch.save(thing, path)
        return copy.deepcopy(torch.load(path, mmap=True, **read))


def _assigned(module: nn.Module) -> nn.Module:
    """Return a copy in another type that takes over the tensors of a saved state."""
    made = copy.deepcopy(module).float()
    for name, one in module.named_buffers():
        if "unsaved" in name:
            setattr(made, name, one.clone())
    made.load_state_dict(_file(module.state_dict(), {"weights_only": True}), assign=True)
    return made


def _copied_into(module: nn.Module) -> nn.Module:
    made = copy.deepcopy(module)
    for tensor in made.state_dict().values():
        tensor.zero_()
    made.load_state_dict(module.state_dict())
    return made


WHOLE = {"weights_only": False}
# Ways to copy a module, and of which of its tensors those that share a storage still do.
COPIES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "deepcopy": (copy.deepcopy, "buffers"),
    "AveragedModel": (lambda module: AveragedModel(module).module, "buffers"),
    "pickle": (lambda module: pickle.loads(pickle.dumps(module)), "none"),
    "save and load": (lambda module: _file(module, WHOLE), "all"),
    "save and load, mapped file": (lambda module: _mapped(module, **WHOLE), "buffers"),
    "load_state_dict": (_copied_into, "buffers"),
    "load_state_dict, assign": (_assigned, "all"),
}
STATES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "save and load": lambda state: _file(state, {"weights_only": True}),
    "save and load, older file": lambda state: _file(
        state, {"weights_only": True}, _use_new_zipfile_serialization=False
    ),
    "save and load, mapped file": lambda state: _mapped(state, weights_only=True),
    "save and load, map_location": lambda state: _file(
        state, {"weights_only": True, "map_location": next(iter(state.values())).device}
    ),
}


def _loaded(module: nn.Module) -> nn.Module:
    module.load_state_dict(copy.deepcopy(module.state_dict()))
    return module


def _swapping(call: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Let a conversion swap the tensors of the parameters in place of their data."""

    def swapped(module: nn.Module) -> nn.Module:
        with swapping():
            return call(module)

    return swapped


# Calls after which a module has the parameters from before, and whether these have values.
IN_PLACE: dict[str, tuple[Callable[[nn.Module], nn.Module], bool]] = {
    "to": (lambda module: module.to(next(module.parameters()).device), True),
    "to, swapping": (_swapping(lambda module: module.to(next(module.parameters()).device)), True),
    "to(memory_format)": (lambda module: module.to(memory_format=torch.preserve_format), True),
    "_apply": (lambda module: module._apply(lambda tensor: tensor.clone()), True),
    "_apply, swapping": (_swapping(lambda module: module._apply(lambda tensor: tensor.clone())), True),
    "to_empty": (lambda module: module.to_empty(device=next(module.parameters()).device), False),
    "share_memory": (lambda module: module.share_memory(), True),
    "load_state_dict": (_loaded, True),
}


class _Mixed(nn.Module):
    """Parameters and buffers of several types: tied, frozen, transposed, channels-last, and views of one storage."""

    def __init__(self, dtype: torch.dtype, rng: torch.Generator) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3, dtype=dtype)
        self.base = nn.Linear(3, 4, dtype=dtype).requires_grad_(False)
        self.adapter = nn.Linear(3, 2)
        self.image = nn.Conv2d(3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(3)
        self.frozen_norm = nn.BatchNorm1d(3, dtype=dtype).requires_grad_(False).eval()
        self.listed = nn.ParameterList([nn.Parameter(torch.zeros(3, 2, dtype=dtype).t(), requires_grad=False)])
        self.scale = nn.Parameter(torch.zeros((), dtype=dtype))
        self.empty = nn.Parameter(torch.zeros(0, 2, dtype=dtype), requires_grad=False)
        for name, kind in (("low", dtype), ("full", torch.float32), ("count", torch.int64), ("mask", torch.bool)):
            flat = (8 * torch.rand(12, generator=rng)).to(kind)
            self.register_buffer(f"{name}_flat", flat)
            self.register_buffer(f"{name}_view", flat[2:10].view(2, 4).t())
            self.register_buffer(f"{name}_unsaved", flat.clone(), persistent=False)
        for name, kind in (("low", dtype), ("full", torch.float32)):
            flat = torch.zeros(12, dtype=kind)
            self.register_parameter(f"{name}_first", nn.Parameter(flat[:4]))
            self.register_parameter(f"{name}_second", nn.Parameter(flat[4:].view(2, 4), requires_grad=False))
        self.head = nn.Linear(3, 4, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=rng))


def _mixed(target: Target, dtype: torch.dtype, rng: torch.Generator) -> _Mixed:
    module = _Mixed(dtype, rng)
    if target.device_type != "cpu":
        module.to(target.device)
    return module


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    trains = tensor.requires_grad, tensor.is_leaf
    return type(tensor).__name__, tensor.dtype, tensor.device.type, tuple(tensor.shape), tensor.stride(), *trains


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: _kind(tensor) for name, tensor in tensors.items()}


def _same_kinds(case: Case, tensors: Mapping[str, Tensor], kinds: Mapping[str, tuple[Any, ...]]) -> None:
    other = {name: kind for name, kind in _kinds(tensors).items() if kind != kinds[name]}
    case.equal("tensors of another class, type, shape, stride or training", other, {})


def _same_values(case: Case, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    different = [name for name, one in tensors.items() if not torch.equal(one.detach(), values[name].detach())]
    case.equal("tensors of other values", different, [])


def _groups(tensors: Mapping[str, Tensor], key: Callable[[Tensor], Any]) -> list[list[str]]:
    """Return the names of the tensors that have the same key."""
    found: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            found.setdefault(key(tensor), []).append(name)
    return sorted(names for names in found.values() if len(names) > 1)


@contract("AMP-BF16-021")
@pytest.mark.parametrize("way", COPIES)
def test_copy_of_a_module(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, way: str) -> None:
    make, shared = COPIES[way]
    module = _mixed(target, amp_dtype, rng)
    before = _tensors(module)
    made = make(module)
    after = _tensors(made)
    case.equal("names of the tensors", list(after), list(before))
    _same_kinds(case, after, _kinds(before))
    if "assign" not in way:  # whose tied parameters are several over one storage
        case.equal("tied parameters", _groups(after, id), _groups(before, id))
    if target.device_type == "cpu":  # to() a device copies views one by one
        chosen = [name for name in before if shared == "all" or (shared == "buffers" and "_view" in name)]
        chosen += [name.replace("_view", "_flat") for name in chosen if "_view" in name and shared != "all"]
        ours, theirs = ({name: one[name] for name in sorted(chosen)} for one in (after, before))
        case.equal("tensors that share a storage", _groups(ours, storage_of), _groups(theirs, storage_of))
    taken = {storage_of(tensor) for tensor in before.values() if tensor.numel()}
    case.equal("tensors over a storage of the module", [n for n, one in after.items() if storage_of(one) in taken], [])
    _same_values(case, after, before)
    modes = [one.training for one in module.modules()]
    case.equal("training modes", [one.training for one in made.modules()], modes)


@contract("AMP-BF16-021")
@needs("plain tensors")  # those of a subclass are copied one by one, whatever they share
@pytest.mark.parametrize("way", STATES)
def test_copy_of_a_state(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, way: str) -> None:
    module = _mixed(target, amp_dtype, rng)
    before = module.state_dict()
    after = STATES[way](before)
    case.equal("names of the tensors", list(after), list(before))
    _same_kinds(case, after, _kinds(before))
    case.equal("tensors that share a storage", _groups(after, storage_of), _groups(before, storage_of))
    _same_values(case, after, before)


@contract("AMP-BF16-023")
@pytest.mark.parametrize("way", IN_PLACE)
def test_calls_in_place(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, way: str) -> None:
    call, valued = IN_PLACE[way]
    module = _mixed(target, amp_dtype, rng)
    before = _tensors(module)
    kinds = _kinds(before)
    values = {name: tensor.detach().clone() for name, tensor in before.items()}
    case.true("the module itself is returned", call(module) is module)
    after = _tensors(module)
    other = [name for name, _ in module.named_parameters(remove_duplicate=False) if after[name] is not before[name]]
    case.equal("parameters that became others", other, [])
    _same_kinds(case, after, kinds)
    if valued:
        _same_values(case, after, values)
