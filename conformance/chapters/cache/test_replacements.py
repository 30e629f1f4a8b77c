"""Check that a layer whose weight is another tensor from now on is used with that one, within the same region."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...harness.check import Case, contract
from ...harness.targets import Target

# What has another weight from now on, made of a layer and that weight.
Replacement = Callable[[nn.Linear, Tensor], Callable[[Tensor], Tensor]]


class _Plus(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + 1.0


def _assigned(layer: nn.Linear, new: Tensor) -> nn.Linear:
    layer.weight = nn.Parameter(new)
    return layer


def _deleted(layer: nn.Linear, new: Tensor) -> nn.Linear:
    del layer.weight
    layer.register_parameter("weight", nn.Parameter(new))
    return layer


def _loaded(layer: nn.Linear, new: Tensor) -> nn.Linear:
    layer.load_state_dict({"weight": new}, assign=True)
    return layer


def _parametrized(layer: nn.Linear, new: Tensor) -> nn.Linear:
    parametrize.register_parametrization(layer, "weight", _Plus())
    return layer


def _functional(layer: nn.Linear, new: Tensor) -> Callable[[Tensor], Tensor]:
    weight = new.requires_grad_()
    return lambda features: torch.func.functional_call(layer, {"weight": weight}, (features,))


def _copied(layer: nn.Linear, new: Tensor) -> nn.Linear:
    twin = copy.deepcopy(layer)
    twin.weight.data = new
    return twin


def _in_a_container(layer: nn.Linear, new: Tensor) -> nn.Sequential:
    model = nn.Sequential(layer)
    model[0] = _assigned(nn.Linear(*reversed(new.shape), bias=False, device=new.device), new)
    return model


def _plain(layer: nn.Linear, new: Tensor) -> nn.Linear:
    del layer.weight
    layer.weight = new.requires_grad_()  # a leaf that is no parameter, as after fusing
    return layer


REPLACEMENTS: dict[str, Replacement] = {
    "assigned": _assigned,
    "deleted and registered": _deleted,
    "loaded with assign=True": _loaded,
    "parametrized": _parametrized,
    "given to functional_call": _functional,
    "copied layer": _copied,
    "replaced layer": _in_a_container,
    "leaf that is no parameter": _plain,
}


@contract("AMP-CACHE-058")
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("way", REPLACEMENTS, ids=lambda name: name.replace(" ", "_"))
def test_replaced_weight(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, way: str, cache: bool
) -> None:
    weight = torch.randint(-2, 3, (5, 4), generator=rng).float().to(target.device)
    features = torch.randint(-2, 3, (3, 4), generator=rng).float().to(target.device)
    layer = _assigned(nn.Linear(4, 5, bias=False, device=target.device), weight)
    with target.autocast(amp_dtype, cache_enabled=cache):
        before, again = layer(features), layer(features)
        replaced = REPLACEMENTS[way](layer, weight + 1.0)
        after = replaced(features)
    # Products and sums of small integers are exact.
    case.identical("control: before", before, (features @ weight.t()).to(amp_dtype))
    case.identical("control: before, once more", again, before)
    case.identical("with the new weight", after, (features @ (weight + 1.0).t()).to(amp_dtype))
    case.true("the new output needs a gradient", after.requires_grad)
