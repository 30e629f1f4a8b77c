"""Check that a layer that is fused with its batch norm keeps its types, its frozen weights and its function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.error_bounds import largest_share

# A layer of 4 to 6 channels with or without a bias, its norm, and the shape of an input.
LAYERS: dict[str, tuple[Callable[[bool], Any], type[nn.Module], tuple[int, ...]]] = {
    "Conv1d": (lambda bias: nn.Conv1d(4, 6, 3, bias=bias), nn.BatchNorm1d, (2, 4, 5)),
    "Conv2d": (lambda bias: nn.Conv2d(4, 6, 3, groups=2, bias=bias), nn.BatchNorm2d, (2, 4, 5, 5)),
    "Conv3d": (lambda bias: nn.Conv3d(4, 6, 2, bias=bias), nn.BatchNorm3d, (2, 4, 3, 3, 3)),
    "ConvTranspose2d": (lambda bias: nn.ConvTranspose2d(4, 6, 3, bias=bias), nn.BatchNorm2d, (2, 4, 3, 3)),
    "Linear": (lambda bias: nn.Linear(4, 6, bias=bias), nn.BatchNorm1d, (3, 4)),
}
ROUNDINGS = 8  # at most, where the numbers of the norm are 16-bit too: eps, root, products, sum


def _fill(module: nn.Module, rng: torch.Generator) -> None:
    """Give every floating-point tensor numbers of [0.5, 1.5)."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=rng))


@contract("AMP-BF16-020")
@pytest.mark.parametrize("layer", LAYERS)
def test_fusion_with_batch_norm(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, layer: str
) -> None:
    make, norms, shape = LAYERS[layer]
    unit = torch.finfo(amp_dtype).eps / 2
    for bias in (True, False):
        for norm_dtype in (torch.float32, amp_dtype):
            for frozen in (False, True):
                what = f"bias {bias}, norm of {norm_dtype}, {'frozen' if frozen else 'trained'}"
                one: Any = make(bias).eval().requires_grad_(not frozen)
                norm: Any = norms(6).eval()
                _fill(one, rng)
                _fill(norm, rng)
                one.to(target.device, amp_dtype)
                norm.to(target.device, norm_dtype)
                before = [tensor.detach().clone() for tensor in (*one.parameters(), *norm.parameters())]
                fused: Any = _fused(one, norm)
                types = {name: parameter.dtype for name, parameter in fused.named_parameters()}
                case.equal(f"{what}: types", types, dict.fromkeys(("weight", "bias"), amp_dtype))
                trains = {name: p.requires_grad for name, p in fused.named_parameters() if name == "weight" or bias}
                case.equal(f"{what}: trained parameters", trains, dict.fromkeys(trains, not frozen))
                after = [tensor.detach() for tensor in (*one.parameters(), *norm.parameters())]
                case.true(f"{what}: the given modules are unchanged", all(map(torch.equal, before, after)))
                weight, offset, size = _exact(one, norm)
                bound = (1 if norm_dtype is torch.float32 else ROUNDINGS) * 1.01 * unit
                # fuse_linear_bn_weights rounds the factor, and then the product.
                wide = 2 * bound if layer == "Linear" else bound
                share = largest_share(fused.weight.detach().cpu().double() - weight, wide * weight.abs())
                case.at_most(f"{what}: error of the weight in its bound", share, 1.0)
                share = largest_share(fused.bias.detach().cpu().double() - offset, bound * size)
                case.at_most(f"{what}: error of the bias in its bound", share, 1.0)
                result = fused(torch.ones(shape, dtype=amp_dtype, device=target.device))
                case.equal(f"{what}: type of a result", result.dtype, amp_dtype)


def _fused(layer: Any, norm: Any) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return fuse_linear_bn_eval(layer, norm)
    return fuse_conv_bn_eval(layer, norm, transpose=isinstance(layer, nn.ConvTranspose2d))


def _exact(layer: Any, norm: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight and bias of the fused layer in float64, and the sum of the sizes that make the bias."""
    held = [each.detach().cpu().double() for each in (norm.running_mean, norm.running_var, norm.weight, norm.bias)]
    mean, variance, scale, shift = held
    factor = scale / (variance + norm.eps).sqrt()
    weight = layer.weight.detach().cpu().double()
    rows = [1] * weight.dim()
    rows[1 if isinstance(layer, nn.ConvTranspose2d) else 0] = -1
    own = torch.zeros(6, dtype=torch.float64) if layer.bias is None else layer.bias.detach().cpu().double()
    offset = (own - mean) * factor + shift
    return weight * factor.reshape(rows), offset, (own.abs() + mean.abs()) * factor + shift.abs()
