"""Check modules whose weight is computed anew in each forward pass: normed, orthogonal, pruned."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.generators import seed_torch
from ...oracles.numbers.error_bounds import normwise_error
from ...oracles.numbers.formats import FORMATS

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 4), (5, 6)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), (2, 3, 8)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(3, 4, 2), (2, 3, 4, 4, 4)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 6, 6)),
}
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight_norm of hooks": nn.utils.weight_norm,
    "spectral_norm of hooks": nn.utils.spectral_norm,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", amount=0.25),
}
# Roundings to 16 bits between weights and outputs: those of the weight's own arithmetic, the casts and the product.
_ROUNDINGS = 24
_WARM_UPS = 5
# What they are made of is on no list of the CPU; CUDA lists mv, of which spectral_norm is made (pytorch issue 125544).
_FLOAT32_WEIGHTS = ("weight_norm", "spectral_norm")


@contract("AMP-CAST-110")
@pytest.mark.parametrize("layer", [name if name == "linear" else deep("standard", name) for name in LAYERS])
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda name: name.replace(" ", "_"))
def test_parametrized_modules(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, wrapper: str, layer: str
) -> None:
    make, shape = LAYERS[layer]
    plain = make().to(target.device)
    _require_inverse(case, target, plain, WRAPPERS[wrapper])
    x = torch.randn(shape, generator=rng).to(target.device)
    with target.autocast(amp_dtype):
        promised = plain(x).dtype
    for training in (True, False):
        try:
            outside, inside = (_wrapped(plain, wrapper, rng.initial_seed(), x).train(training) for _ in range(2))
            expected = outside(x)
            largest = float(expected.detach().abs().max())
            (expected / largest).square().mean().backward()
        except RuntimeError as error:
            case.unsupported(f"{target.name} cannot train it outside of a region: {error}")
        mode = "training" if training else "evaluation"
        before = copy.deepcopy(inside.state_dict())
        with target.autocast(amp_dtype):
            output = inside(x)
        moved = [name for name, one in inside.state_dict().items() if not torch.equal(one, before[name])]
        if training:
            moved = [name for name in moved if name in dict(inside.named_parameters())]
        case.equal(f"parameters, and buffers in evaluation, that the call has changed, {mode}", moved, [])
        (output.float() / largest).square().mean().backward()
        case.equal(f"dtype of the output, {mode}", output.dtype, promised)
        distance = normwise_error(output.detach().cpu().double(), expected.detach().cpu().double())
        case.at_most(
            f"error of the output, {mode}", distance, _ROUNDINGS * FORMATS[amp_dtype].unit_roundoff, "normwise"
        )
        ours, theirs = dict(inside.named_parameters()), dict(outside.named_parameters())
        lost = [name for name, one in theirs.items() if (one.grad is None) != (ours[name].grad is None)]
        case.equal(f"parameters whose gradient is there in one of both, {mode}", lost, [])
        kinds = {one.grad.dtype for one in ours.values() if one.grad is not None}
        case.equal(f"dtypes of gradients, {mode}", kinds, {torch.float32})
        bad = [name for name, one in ours.items() if one.grad is not None and not bool(one.grad.isfinite().all())]
        case.equal(f"gradients that are not finite, {mode}", bad, [])
        if wrapper in _FLOAT32_WEIGHTS and target.device_type == "cpu":
            with target.autocast(amp_dtype):
                weight = inside.weight.detach()
            case.identical(f"the weight that the wrapper computes, {mode}", weight, outside.weight.detach())
        state = {name: tensor.dtype for name, tensor in inside.state_dict().items()}
        case.equal(f"dtypes of the state, {mode}", state, {n: t.dtype for n, t in outside.state_dict().items()})
        for factor in (-0.5, 2.0):  # as a step would, of the weight that is computed once for each use of the cache
            with torch.no_grad():
                for one in (*inside.parameters(), *outside.parameters()):
                    one.mul_(factor)
                with target.autocast(amp_dtype), parametrize.cached():
                    changed = inside(x)
                distance = normwise_error(changed.cpu().double(), outside(x).cpu().double())
            case.at_most(
                f"error of parameters times {factor}, {mode}",
                distance,
                _ROUNDINGS * FORMATS[amp_dtype].unit_roundoff,
                "normwise",
            )


def _wrapped(plain: nn.Module, wrapper: str, seed: int, x: torch.Tensor) -> nn.Module:
    """Return the module wrapped, with the same random state each time.

    Some forwards bring spectral_norm's vectors near the singular ones: of random ones, which evaluation keeps, the
    estimate of the norm may be a difference that cancels.
    """
    seed_torch(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the hooks are deprecated
        made = WRAPPERS[wrapper](copy.deepcopy(plain))
    with torch.no_grad():
        for _ in range(_WARM_UPS):
            made(x)
    return made


# Norms over other dimensions than that of the outputs.
NORMED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "parametrization": parametrizations.weight_norm,
    "parametrization over inputs": partial(parametrizations.weight_norm, dim=1),
    "parametrization over all": partial(parametrizations.weight_norm, dim=None),
    "hooks": nn.utils.weight_norm,
    "hooks over inputs": partial(nn.utils.weight_norm, dim=1),
    "hooks over all": partial(nn.utils.weight_norm, dim=None),
}


@contract("AMP-CAST-110")
@pytest.mark.parametrize("way", NORMED, ids=lambda name: name.replace(" ", "_"))
def test_normed_weights_of_16_bits(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, way: str
) -> None:
    """Compare the weight, and the gradients through it, with those of a float64 module of the same tensors."""
    _require_inverse(case, target, nn.Linear(2, 2).to(target.device), NORMED[way])
    seed_torch(rng.initial_seed())
    unit, errors = FORMATS[amp_dtype].unit_roundoff, {}
    for layer, (make, _) in LAYERS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the hooks are deprecated
            low = NORMED[way](make().to(target.device, amp_dtype))
            exact = NORMED[way](make().double())
        for one in low.parameters():
            with torch.no_grad():
                one.copy_(torch.rand(one.shape, generator=rng) + 0.5)  # of one sign: no sum of a gradient cancels
        exact.load_state_dict({name: value.cpu() for name, value in low.state_dict().items()})
        weights = [_weight(one) for one in (low, exact)]
        slope = (torch.rand(weights[1].shape, generator=rng) + 0.5).to(amp_dtype)
        for weight in weights:
            weight.backward(slope.to(weight))
        errors[layer] = _far(*weights)
        theirs = dict(exact.named_parameters())
        for name, one in low.named_parameters():
            if theirs[name].grad is not None:
                errors[f"{layer}, gradient of {name}"] = _far(one.grad, theirs[name].grad)
    for what, error in errors.items():
        # A norm, a quotient and a product of the weight; a gradient is a difference of two of a third of their size.
        case.at_most(
            f"error of the weight of {what}", error, (_ROUNDINGS if "gradient" in what else 4) * unit, "normwise"
        )


class _Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


# With weights that no op casts, and one of a product.
CACHED: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], torch.Tensor]]] = {
    "Linear": (lambda: nn.Linear(6, 4), lambda rng: torch.randn(5, 6, generator=rng)),
    "Embedding": (lambda: nn.Embedding(6, 4), lambda rng: torch.randint(6, (5,), generator=rng)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(6, 4), lambda rng: torch.randint(6, (5, 2), generator=rng)),
    "LayerNorm": (lambda: nn.LayerNorm(6), lambda rng: torch.randn(5, 6, generator=rng)),
    "PReLU": (lambda: nn.PReLU(6), lambda rng: torch.randn(5, 6, generator=rng)),
}


@contract("AMP-CAST-110")
@pytest.mark.parametrize("layer", CACHED)
def test_cached_weights(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, layer: str) -> None:
    """In the cache of parametrizations each use of a weight gives what it gives without the cache."""
    make, draw = CACHED[layer]
    module: Any = make().to(target.device)
    x = draw(rng).to(target.device)
    case.with_kernels(target, {layer: lambda: module(x).float().sum().backward()})
    with torch.no_grad():
        module.weight.copy_(torch.randn(module.weight.shape, generator=rng))
    parametrize.register_parametrization(module, "weight", _Halved())
    original = module.parametrizations.weight.original

    def use() -> dict[str, torch.Tensor]:
        original.grad = None
        output = module(x)
        output.float().square().sum().backward(retain_graph=True)
        return {"weight": module.weight.detach(), "output": output.detach(), "gradient of the weight": original.grad}

    with target.autocast(amp_dtype, cache_enabled=False):
        expected = use()
        with parametrize.cached():
            uses = [use() for _ in range(3)]
    for number, seen in enumerate(uses, 1):
        for what, wanted in expected.items():
            case.identical(f"use {number} of the cached {layer}: {what}", seen[what], wanted)


def _require_inverse(case: Case, target: Target, plain: Any, wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """End the case where a device lacks a kernel of a parametrization's inverse: torch takes it for one without any."""

    def inverse() -> None:
        made: Any = wrapper(copy.deepcopy(plain).cpu())
        if hasattr(made, "parametrizations"):
            made.parametrizations.weight[0].to(target.device).right_inverse(plain.weight.detach())

    case.with_kernels(target, {"right_inverse": inverse})


def _weight(module: Any) -> torch.Tensor:
    """Return the weight as a forward computes it, with its graph."""
    for hook in module._forward_pre_hooks.values():
        hook(module, None)
    weight: torch.Tensor = module.weight
    return weight


def _far(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    return normwise_error(seen.detach().cpu().double(), wanted.detach().double())
