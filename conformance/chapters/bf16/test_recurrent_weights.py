"""Check that a recurrent layer computes with the weights that it has, in whatever way they came to it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, vector_to_parameters

from ...harness.check import Case, contract
from ...harness.targets import Target
from .swapped import swapping

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "RNN": lambda: nn.RNN(3, 4),
    "GRU": lambda: nn.GRU(3, 4, num_layers=2),
    "LSTM": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
}
State = Mapping[str, Tensor]  # the new weights, float32
Way = Callable[[Any, State, torch.dtype], nn.Module]


def _by_name(put: Callable[[Any, str, Tensor], None], *, convert: bool = False) -> Way:
    """Return a way that treats one weight after the other, in a layer that is converted first or not."""

    def replace(layer: Any, state: State, dtype: torch.dtype) -> nn.Module:
        if convert:
            layer.to(dtype)
        with torch.no_grad():
            for name, value in state.items():
                put(layer, name, value.detach().to(dtype, copy=True))
        return layer

    return replace


def _deleted(layer: Any, name: str, value: Tensor) -> None:
    delattr(layer, name)
    layer.register_parameter(name, nn.Parameter(value))


def _loaded(then: Callable[[Any, torch.dtype], nn.Module]) -> Way:
    """Return a way that loads the state in float32, and then converts the layer."""

    def replace(layer: Any, state: State, dtype: torch.dtype) -> nn.Module:
        layer.load_state_dict(state)
        return then(layer, dtype)

    return replace


def _load(layer: Any, state: State, dtype: torch.dtype, **options: Any) -> nn.Module:
    layer.load_state_dict({name: value.to(dtype) for name, value in state.items()}, **options)
    return layer


def _swapped(layer: Any, dtype: torch.dtype) -> nn.Module:
    with swapping():
        converted: nn.Module = layer.to(dtype)
    return converted


def _saved(layer: Any, dtype: torch.dtype) -> Any:
    file = io.BytesIO()
    torch.save(layer.to(dtype), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _vector(layer: Any, state: State, dtype: torch.dtype) -> nn.Module:
    layer.to(dtype)
    vector_to_parameters(torch.cat([value.flatten() for value in state.values()]).to(dtype), layer.parameters())
    return layer


def _each(
    layer: Any, dtype: torch.dtype, begin: Callable[[Any, str], Any], end: Callable[[Any, str], Any] | None = None
) -> nn.Module:
    names = [name for name, _ in layer.to(dtype).named_parameters()]
    for change in (begin, end):
        for name in names if change else ():
            assert change is not None
            change(layer, name)
    return layer


def _parametrized(layer: Any, name: str) -> None:
    parametrize.register_parametrization(layer, name, nn.Identity())


WAYS: dict[str, Way] = {
    "load_state_dict": lambda layer, state, dtype: _load(layer.to(dtype), state, dtype),
    "load_state_dict of float32": lambda layer, state, dtype: _load(layer.to(dtype), state, torch.float32),
    "load_state_dict, assign": lambda layer, state, dtype: _load(layer, state, dtype, assign=True),
    "load_state_dict after to_empty": lambda layer, state, dtype: _load(
        layer.to("meta").to_empty(device=next(iter(state.values())).device).to(dtype), state, dtype
    ),
    "setattr": _by_name(lambda layer, name, value: setattr(layer, name, nn.Parameter(value))),
    "delattr and register_parameter": _by_name(_deleted),
    "data": _by_name(lambda layer, name, value: setattr(getattr(layer, name), "data", value)),
    "copy_": _by_name(lambda layer, name, value: getattr(layer, name).copy_(value), convert=True),
    "vector_to_parameters": _vector,
    "to": _loaded(lambda layer, dtype: layer.to(dtype)),
    "method": _loaded(lambda layer, dtype: layer.bfloat16() if dtype is torch.bfloat16 else layer.half()),
    "to, swapping": _loaded(_swapped),
    "deepcopy": _loaded(lambda layer, dtype: copy.deepcopy(layer.to(dtype))),
    "deepcopy that loads": lambda layer, state, dtype: _load(copy.deepcopy(layer).to(dtype), state, dtype),
    "pickle": _loaded(lambda layer, dtype: pickle.loads(pickle.dumps(layer.to(dtype)))),
    "save and load": _loaded(_saved),
    "parametrizations": _loaded(lambda layer, dtype: _each(layer, dtype, _parametrized)),
    "removed parametrizations": _loaded(
        lambda layer, dtype: _each(layer, dtype, _parametrized, parametrize.remove_parametrizations)
    ),
    "pruning": _loaded(lambda layer, dtype: _each(layer, dtype, prune.identity)),
    "removed pruning": _loaded(lambda layer, dtype: _each(layer, dtype, prune.identity, prune.remove)),
}


def _made(kind: str, target: Target, rng: torch.Generator) -> Any:
    layer = LAYERS[kind]()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) / 2)
    return layer.to(target.device)


def _far(seen: Tensor, wanted: Tensor, target: Target) -> bool:
    """Whether results differ: on a CPU at all, elsewhere by more than roundings of another kernel."""
    if seen.dtype != wanted.dtype:
        return True
    bound = 0.0 if target.device_type == "cpu" else 8 * torch.finfo(wanted.dtype).eps
    return not float((seen.detach().float() - wanted.detach().float()).abs().max()) <= bound


@contract("AMP-BF16-022")
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("kind", LAYERS)
def test_replaced_weights(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, kind: str) -> None:
    """Compare a layer that has run with other weights before with one that has had these from the start."""
    own, other = _made(kind, target, rng), _made(kind, target, rng)
    state = {name: value.clone() for name, value in other.state_dict().items()}
    fresh = LAYERS[kind]().to(target.device, amp_dtype)
    fresh.load_state_dict(state)
    signal = torch.randn(5, 2, 3, generator=rng).to(target.device)
    given = signal.to(amp_dtype)
    wanted = fresh(given)[0]
    before = own(signal)[0]
    case.true("control: other weights give another result", _far(before.to(amp_dtype), wanted, target))
    wrong: dict[str, str] = {}
    for name, replace in WAYS.items():
        layer: Any = copy.deepcopy(own)
        layer(signal)[0].sum().backward()
        layer.zero_grad()
        try:
            layer = replace(layer, state, amp_dtype)
        except RuntimeError:
            if not ("parametrizations" in name and target.lacks("plain tensors")):
                raise
            continue  # torch swaps tensors of a subclass, but none to which a layer holds a weak reference
        try:
            seen = layer(given)[0]
            seen.float().sum().backward()
        except Exception as error:
            wrong[name] = repr(error)[:100]
            continue
        if _far(seen, wanted, target):
            wrong[name] = f"another result, of {seen.dtype}"
        untrained = [key for key, one in layer.named_parameters() if one.grad is None or one.grad.dtype != amp_dtype]
        if untrained:
            wrong[f"{name}, gradients"] = f"none of the type for {', '.join(untrained)}"
    case.equal("ways of replacing the weights after which others are used or trained", wrong, {})
    given_state = {name: value.to(amp_dtype) for name, value in state.items()}
    called = torch.func.functional_call(own, given_state, (given,))[0]
    case.true("functional_call computes with the given weights", not _far(called, wanted, target))
    case.true("and the next call with the layer's own", not _far(own(signal)[0], before, target))
