"""Check that modules that are rebuilt or re-parametrized take over the parameters that an optimizer holds."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.error_bounds import normwise_distance
from ...oracles.numbers.formats import FORMATS

SIZE = 3
NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(SIZE),
    "BatchNorm2d": lambda: nn.BatchNorm2d(SIZE, eps=2.0**-8, momentum=0.25),
    "BatchNorm3d": lambda: nn.BatchNorm3d(SIZE, momentum=None),
    "without affine": lambda: nn.BatchNorm2d(SIZE, affine=False),
    "without running statistics": lambda: nn.BatchNorm2d(SIZE, track_running_stats=False),
    "frozen": lambda: nn.BatchNorm2d(SIZE).requires_grad_(False).eval(),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(SIZE),
}
SETTINGS = ("num_features", "eps", "momentum", "affine", "track_running_stats", "training")


def _model(rng: torch.Generator) -> nn.Module:
    """Return norms of each kind, in containers."""
    model = nn.Module()
    for name, make in NORMS.items():
        model.add_module(name, nn.Sequential(nn.Linear(SIZE, SIZE), make()))
    model.listed = nn.ModuleList([nn.ModuleDict({"norm": nn.BatchNorm2d(SIZE)}), nn.LayerNorm(SIZE)])
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.copy_(7 * torch.rand(tensor.shape, generator=rng))
    return model


@contract("AMP-BF16-023")
@pytest.mark.parametrize("mixed", [False, True], ids=["16-bit", "float32-statistics"])
def test_conversion_to_sync_batch_norm(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, mixed: bool
) -> None:
    model = _model(rng).to(target.device, amp_dtype)
    for module in model.modules():
        if mixed and isinstance(module, nn.modules.batchnorm._BatchNorm):
            for name in ("running_mean", "running_var"):
                if (kept := getattr(module, name)) is not None:
                    setattr(module, name, kept.float())
    before: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kinds = {name: (one.dtype, one.requires_grad, one.detach().clone()) for name, one in before.items()}
    settings = _settings(model)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    case.equal("names and settings of the norms", _settings(converted), settings)
    classes = {type(one).__name__ for one in converted.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)}
    case.equal("classes of the norms", classes, {"SyncBatchNorm"})
    after: dict[str, Any] = {**dict(converted.named_parameters()), **dict(converted.named_buffers())}
    case.equal("names of the tensors", sorted(after), sorted(before))
    parameters = dict(converted.named_parameters())
    case.equal("parameters that became others", [name for name in parameters if after[name] is not before[name]], [])
    changed = [
        name
        for name, (dtype, trains, value) in kinds.items()
        if (after[name].dtype, after[name].requires_grad) != (dtype, trains) or not torch.equal(after[name], value)
    ]
    case.equal("tensors of another type, value or training", changed, [])


def _settings(model: nn.Module) -> dict[str, Any]:
    return {
        name: {key: getattr(one, key) for key in SETTINGS}
        for name, one in model.named_modules()
        if isinstance(one, nn.modules.batchnorm._BatchNorm)
    }


# How a weight is put under another name, where it is then, and how it comes back.
REPARAMETRIZED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "parametrization": (
        lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity()),
        lambda layer: layer.parametrizations.weight.original,
        lambda layer: parametrize.remove_parametrizations(layer, "weight"),
    ),
    "pruning": (
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.25),
        lambda layer: layer.weight_orig,
        lambda layer: prune.remove(layer, "weight"),
    ),
    "pruning of rows": (
        lambda layer: prune.ln_structured(layer, "weight", amount=0.25, n=1, dim=0),
        lambda layer: layer.weight_orig,
        lambda layer: prune.remove(layer, "weight"),
    ),
    "spectral norm": (
        lambda layer: parametrizations.spectral_norm(layer),
        lambda layer: layer.parametrizations.weight.original,
        lambda layer: parametrize.remove_parametrizations(layer, "weight"),
    ),
    "weight norm": (
        lambda layer: parametrizations.weight_norm(layer),
        lambda layer: None,  # magnitude and direction are new parameters
        lambda layer: parametrize.remove_parametrizations(layer, "weight"),
    ),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(4, 8),
    "Conv2d": lambda: nn.Conv2d(2, 8, 3),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(8, 4, 3),
    "Embedding": lambda: nn.Embedding(8, 4),
}


@contract("AMP-BF16-023")
@pytest.mark.parametrize("way", REPARAMETRIZED)
def test_reparametrized_weights(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, way: str
) -> None:
    begin, held, end = REPARAMETRIZED[way]
    if way == "weight norm":  # torch would take a missing kernel for a parametrization without an inverse
        ones = torch.ones(2, 2, device=target.device)
        case.with_kernels(target, {way: lambda: torch.norm_except_dim(ones, 2, 0)})
    for kind, make in MODULES.items():
        for frozen in (False, True):
            what = f"{kind}, {'frozen' if frozen else 'trained'}"
            layer: Any = make()
            layer.weight.data.copy_(1 + torch.rand(layer.weight.shape, generator=rng))
            layer = layer.to(target.device, amp_dtype).requires_grad_(not frozen)
            weight, shape = layer.weight, layer.weight.shape
            if frozen and way == "weight norm":
                continue  # torch gives a frozen weight back as a plain tensor
            begin(layer)
            taken_over = held(layer) is not None
            case.equal(
                f"{what}: type and shape of the weight", (layer.weight.dtype, layer.weight.shape), (amp_dtype, shape)
            )
            if taken_over:
                case.true(f"{what}: the parameter is the one from before", held(layer) is weight)
            types = {name: one.dtype for name, one in (*layer.named_parameters(), *layer.named_buffers())}
            case.equal(f"{what}: types", types, dict.fromkeys(types, amp_dtype))
            trains = {name: one.requires_grad for name, one in layer.named_parameters()}
            case.equal(f"{what}: trained parameters", trains, dict.fromkeys(trains, not frozen))
            seen = layer.eval().weight.detach().clone()
            end(layer)
            again = layer.weight
            case.true(f"{what}: a parameter again", isinstance(again, torch.nn.Parameter), type(again).__name__)
            kept = layer.weight.dtype, layer.weight.requires_grad
            case.equal(f"{what}: type and training afterwards", kept, (amp_dtype, not frozen))
            if taken_over:
                case.true(f"{what}: the parameter afterwards is the one from before", layer.weight is weight)
            case.identical(f"{what}: value afterwards", layer.weight.detach(), seen)


@contract("AMP-BF16-023")
@pytest.mark.parametrize("dim", [0, 1, None], ids=lambda dim: f"dim={dim}")
def test_weights_of_any_size_are_normalized(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, dim: int | None
) -> None:
    """Weights whose squares leave the range of fp16, by the parametrization and by the function that came before it."""
    ones = torch.ones(2, 2, device=target.device)
    case.with_kernels(target, {"weight norm": lambda: torch.norm_except_dim(ones, 2, 0)})
    u = FORMATS[amp_dtype].unit_roundoff
    for way, exponent in itertools.product((parametrizations.weight_norm, nn.utils.weight_norm), (-9, 0, 8)):
        layer: Any = nn.Linear(16, 8)
        layer.weight.data.copy_(torch.randn(8, 16, generator=rng) * 2.0**exponent)
        layer = layer.to(target.device, amp_dtype)
        before = layer.weight.detach().clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that the function is the old one
            way(layer, dim=dim)
        # The magnitude, the direction and their product are rounded once each.
        distance = normwise_distance(layer.weight.detach(), before)
        what = f"{way.__name__} of {way.__module__.rpartition('.')[2]}, weights of about 2**{exponent}"
        case.at_most(f"{what}: distance from the weight of before", distance, 4 * u)
