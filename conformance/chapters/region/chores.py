"""What programs do around forward and backward passes, none of it by a listed op: copies, files, states, first values.

Each chore is done in a region that it is given, and yields what it left with what it should have left.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import swa_utils

from ...measure.flags import held
from ...measure.generators import seed_torch

Region: TypeAlias = Callable[[], AbstractContextManager[Any]]
Pair: TypeAlias = tuple[str, "torch.Tensor | None", "torch.Tensor | None"]
Chore: TypeAlias = Callable[[torch.device, Region], Iterator[Pair]]

SEED = 7


def _model(device: torch.device, *, trained: bool = True) -> nn.Sequential:
    """Return a model with numbers that no 16-bit type has, buffers and, where it is `trained`, gradients."""
    seed_torch(SEED)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.PReLU(), nn.Linear(5, 5), nn.LayerNorm(5))
    model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())  # not as it would be made
    model.to(device)
    if trained:
        model(torch.randn(4, 6).to(device)).square().sum().backward()
        model[0].bias.requires_grad_(False).grad = None
    return model


def _held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters, buffers and gradients by name."""
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found | {f"gradient of {name}": value.clone() for name, value in gradients.items() if value is not None}


def _spoil(model: nn.Module) -> None:
    """Overwrite what the model holds, so that who shares it does not keep it."""
    with torch.no_grad():
        for tensor in (*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)):
            tensor.fill_(3)


def _pairs(seen: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[Pair]:
    for name in {**wanted, **seen}:
        yield name, seen.get(name), wanted.get(name)


def _named(where: str, seen: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[Pair]:
    for name, one, other in _pairs(seen, wanted):
        yield f"{where}: {name}", one, other


def _copied(way: Callable[[nn.Module], nn.Module], device: torch.device, region: Region) -> Iterator[Pair]:
    model = _model(device)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}  # a copy has no gradients
    with region():
        made = way(model)
    _spoil(model)
    yield from _pairs(_held(made), wanted)


def _pickled(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


def _saved(device: torch.device, region: Region) -> Iterator[Pair]:
    model, file = _model(device, trained=False), io.BytesIO()
    with region():
        torch.save(model.state_dict(), file)
        file.seek(0)
        found = torch.load(file, weights_only=True)
    yield from _pairs(found, _held(model))


def _loaded(assign: bool, device: torch.device, region: Region) -> Iterator[Pair]:
    model, other = _model(device, trained=False), nn.Sequential(*(copy.deepcopy(each) for each in _model(device)))
    wanted = _held(model)
    _spoil(other)
    other.zero_grad()
    with region():
        other.load_state_dict(model.state_dict(), assign=assign)
    yield from _pairs(_held(other), wanted)


def _state_loaded(device: torch.device, region: Region) -> Iterator[Pair]:
    for kind in (torch.optim.SGD, torch.optim.Adam):
        made: Any = partial(kind, lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        models = [_model(device), _model(device)]
        ours, theirs = (made(model.parameters()) for model in models)
        theirs.step()
        with region():
            ours.load_state_dict(theirs.state_dict())
        for number, (state, wanted) in enumerate(zip(ours.state.values(), theirs.state.values(), strict=True)):
            yield from _named(f"{kind.__name__}, parameter {number}", state, wanted)


def _converted(device: torch.device, region: Region) -> Iterator[Pair]:
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "half()": lambda model: model.half(),
        "bfloat16()": lambda model: model.bfloat16(),
        "float()": lambda model: model.float(),
        "to(channels_last)": lambda model: model.to(memory_format=torch.channels_last),
        "to('cpu')": lambda model: model.to("cpu"),
        "requires_grad_()": lambda model: model.requires_grad_(),
    }
    for name, way in ways.items():
        wanted = _held(way(_model(device)))
        model = _model(device)
        with region():
            way(model)
        yield from _named(name, _held(model), wanted)


_FIRST_VALUES: dict[str, tuple[Callable[[torch.Tensor], object], tuple[int, ...]]] = {
    "uniform_": (nn.init.uniform_, (5, 4)),
    "normal_": (nn.init.normal_, (5, 4)),
    "trunc_normal_": (nn.init.trunc_normal_, (5, 4)),
    "constant_": (partial(nn.init.constant_, val=0.1), (5,)),
    "eye_": (nn.init.eye_, (5, 4)),
    "dirac_": (nn.init.dirac_, (4, 4, 3)),
    "xavier_uniform_": (nn.init.xavier_uniform_, (5, 4)),
    "xavier_normal_": (nn.init.xavier_normal_, (5, 4)),
    "kaiming_uniform_": (nn.init.kaiming_uniform_, (5, 4)),
    "kaiming_normal_": (nn.init.kaiming_normal_, (5, 4)),
    "sparse_": (partial(nn.init.sparse_, sparsity=0.5), (5, 4)),
}
_MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": partial(nn.Linear, 4, 3),
    "Bilinear": partial(nn.Bilinear, 4, 3, 2),
    "Conv2d": partial(nn.Conv2d, 3, 4, 3),
    "ConvTranspose1d": partial(nn.ConvTranspose1d, 3, 4, 3),
    "LSTM": partial(nn.LSTM, 4, 3),
    "GRUCell": partial(nn.GRUCell, 4, 3),
    "Embedding": partial(nn.Embedding, 5, 3, padding_idx=1),
    "EmbeddingBag": partial(nn.EmbeddingBag, 5, 3),
    "BatchNorm2d": partial(nn.BatchNorm2d, 3),
    "MultiheadAttention": partial(nn.MultiheadAttention, 8, 2),
    "TransformerDecoderLayer": partial(nn.TransformerDecoderLayer, 8, 2, 16),
}


def _first_values(device: torch.device, region: Region) -> Iterator[Pair]:
    for name, (fill, shape) in _FIRST_VALUES.items():
        found = []
        for around in (contextlib.nullcontext, region):
            seed_torch(SEED)
            tensor = torch.empty(shape, device=device)
            with around():
                fill(tensor)
            found.append(tensor)
        yield name, found[1], found[0]


def _built(device: torch.device, region: Region) -> Iterator[Pair]:
    for name, make in _MODULES.items():
        seed_torch(SEED)
        wanted = _held(make().to(device))
        seed_torch(SEED)
        with region():
            made = make().to(device)
        yield from _named(name, _held(made), wanted)


def _first_call(device: torch.device, region: Region) -> Iterator[Pair]:
    """Give a lazy module its first input: float32, and in a region also what an op of its list returns."""
    for name, (make, shape) in _LAZY.items():
        given = torch.ones(shape, device=device)
        wanted = _after_a_call(make, given, contextlib.nullcontext)
        yield from _named(name, _after_a_call(make, given, region), wanted)
        with region():
            lowered = torch.is_autocast_enabled(device.type)
            low = given.to(torch.get_autocast_dtype(device.type))
        if lowered:
            yield from _named(f"{name} given {low.dtype}", _after_a_call(make, low, region), wanted)


def _after_a_call(make: Callable[[], nn.Module], given: torch.Tensor, region: Region) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings(), held("torch.__future__.get_swap_module_params_on_conversion", False):
        warnings.simplefilter("ignore")  # that lazy modules are new
        module = make().to(given.device)
    seed_torch(SEED)
    with region():
        module(given)
    return _held(module)


_LAZY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LazyLinear": (partial(nn.LazyLinear, 3), (2, 4)),
    "LazyConv1d": (partial(nn.LazyConv1d, 4, 3), (2, 3, 5)),
    "LazyConv3d": (partial(nn.LazyConv3d, 4, 2), (2, 3, 2, 3, 2)),
    "LazyConvTranspose2d": (partial(nn.LazyConvTranspose2d, 4, 3), (2, 3, 4, 4)),
    "LazyBatchNorm1d": (nn.LazyBatchNorm1d, (2, 3)),
    "LazyBatchNorm2d": (nn.LazyBatchNorm2d, (2, 3, 4, 4)),
    "LazyInstanceNorm1d": (partial(nn.LazyInstanceNorm1d, affine=True), (2, 3, 4)),
}


def _averaged(device: torch.device, region: Region) -> Iterator[Pair]:
    for name, options in {"mean": {}, "moving average": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)}}.items():
        found = []
        for around in (contextlib.nullcontext, region):
            model = _model(device)
            averages = swa_utils.AveragedModel(model, **options)
            averages.update_parameters(model)
            _spoil(model)
            with around():
                averages.update_parameters(model)
            found.append(dict(averages.state_dict()))
        yield from _named(name, found[1], found[0])


def _flattened(device: torch.device, region: Region) -> Iterator[Pair]:
    model, other = _model(device)[:3], _model(device)[:3]  # parameters_to_vector takes contiguous ones alone
    wanted = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    _spoil(other)
    with region():
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector, other.parameters())
    yield "parameters_to_vector", vector.detach(), wanted
    yield "vector_to_parameters", torch.cat([each.detach().flatten() for each in other.parameters()]), wanted


def _computed(device: torch.device, region: Region) -> Iterator[Pair]:
    class Symmetric(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.triu() + weight.triu(1).t()

    ways: dict[str, Callable[[Any], object]] = {
        "weight_norm": parametrizations.weight_norm,
        "a parametrization": lambda module: parametrize.register_parametrization(module, "weight", Symmetric()),
        "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.4),
    }
    for name, way in ways.items():
        seed_torch(SEED)
        module: Any = nn.Linear(5, 5).to(device)
        way(module)
        module(torch.ones(2, 5, device=device))  # a pruned weight is computed before each call
        wanted = module.weight.detach().clone()
        with region():
            module(torch.ones(2, 5, device=device))
            seen = module.weight
        yield name, seen.detach(), wanted


CHORES: dict[str, Chore] = {
    "deepcopy": partial(_copied, copy.deepcopy),
    "pickle": partial(_copied, _pickled),
    "save and load": _saved,
    "load_state_dict": partial(_loaded, False),
    "load_state_dict with assign": partial(_loaded, True),
    "load_state_dict of optimizers": _state_loaded,
    "conversions": _converted,
    "init functions": _first_values,
    "constructors": _built,
    "first call of lazy modules": _first_call,
    "averages": _averaged,
    "vectors of parameters": _flattened,
    "computed weights": _computed,
}
