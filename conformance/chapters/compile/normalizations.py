"""Normalizations with float32 parameters of 16-bit numbers far from zero, and how far their results are from exact."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ...oracles.numbers.formats import FORMATS

Made: TypeAlias = tuple[Callable[[], nn.Module], tuple[int, ...], bool]

NORMALIZATIONS: Mapping[str, Made] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), (5, 6, 8), False),
    "BatchNorm1d of rows": (lambda: nn.BatchNorm1d(6), (40, 6), False),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6), (4, 6, 3, 3), False),
    "BatchNorm2d, channels last": (lambda: nn.BatchNorm2d(6), (4, 6, 3, 3), True),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), (3, 4, 2, 3, 2), False),
    "BatchNorm1d in evaluation": (lambda: nn.BatchNorm1d(6).eval(), (5, 6, 8), False),
    "BatchNorm2d in evaluation, channels last": (lambda: nn.BatchNorm2d(6).eval(), (4, 6, 3, 3), True),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), (4, 6, 5), False),
    "GroupNorm, channels last": (lambda: nn.GroupNorm(3, 6), (4, 6, 3, 3), True),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(6, affine=True), (4, 6, 10), False),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), (3, 4, 4, 4), False),
    "InstanceNorm1d in evaluation": (
        lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True).eval(),
        (4, 6, 10),
        False,
    ),
    "LayerNorm": (lambda: nn.LayerNorm(16), (8, 16), False),
    "LayerNorm of matrices": (lambda: nn.LayerNorm((4, 6)), (5, 4, 6), False),
    "RMSNorm": (lambda: nn.RMSNorm(16, eps=1e-5), (8, 16), False),
}
"""Layers, each with the shape of its input and whether that has its channels last."""

MEAN = 30.0
"""The mean of the inputs, whose deviation is 1. A mean of a group that is rounded to 16 bits is off by 1/16 in bf16."""


def layers(names: Sequence[str], device: torch.device, generator: torch.Generator) -> dict[str, nn.Module]:
    """Return these layers with parameters and running statistics that differ from channel to channel.

    Running means are near those of the inputs, so that the results of an evaluation are small differences.
    """
    found = {}
    for name in names:
        layer = NORMALIZATIONS[name][0]()
        with torch.no_grad():
            for kind, one in (*layer.named_parameters(), *layer.named_buffers()):
                if one.is_floating_point():
                    offset = MEAN if kind == "running_mean" else 0.0
                    one.copy_(torch.rand(one.shape, generator=generator) + 0.5 + offset)
        found[name] = layer.to(device)
    return found


def inputs(names: Sequence[str], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> list[Tensor]:
    """Return an input of each of these layers in a 16-bit type."""
    found = []
    for name in names:
        _, shape, channels_last = NORMALIZATIONS[name]
        x = (MEAN + torch.randn(shape, generator=generator)).to(dtype)
        found.append((x.contiguous(memory_format=torch.channels_last) if channels_last else x).to(device))
    return found


def results(
    of: Mapping[str, nn.Module],
    call: Callable[..., Sequence[Tensor]],
    given: Sequence[Tensor],
) -> dict[str, dict[str, Tensor]]:
    """Return outputs, gradients and running statistics of layers, from a call of all of them."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    outputs = call(*leaves)
    losses = [(one.double() * _weights(one)).sum() for one in outputs]
    parameters = [dict(layer.named_parameters()) for layer in of.values()]
    every = [*leaves, *(one for some in parameters for one in some.values())]
    gradients = iter(torch.autograd.grad(torch.stack([one.cpu() for one in losses]).sum(), every))
    found: dict[str, dict[str, Tensor]] = {}
    for name, output in zip(of, outputs, strict=True):
        buffers = {kind: one.detach().clone() for kind, one in of[name].named_buffers() if one.is_floating_point()}
        found[name] = {"output": output.detach(), **buffers, "gradient of the input": next(gradients)}
    for name, some in zip(of, parameters, strict=True):
        found[name] |= {f"gradient of the {kind}": next(gradients) for kind in some}
    return found


def _weights(output: Tensor) -> Tensor:
    """Return weights of an output that are 16-bit numbers, and differ from element to element."""
    count = output.numel()
    return (torch.arange(count, dtype=torch.float64) * 7 % 31 - 11).div(8).reshape(output.shape).to(output.device)


def exactly(of: Mapping[str, nn.Module], given: Sequence[Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return what `results` does, computed in float64 on the CPU."""
    wide = {name: copy.deepcopy(layer).cpu().double() for name, layer in of.items()}

    def call(*inputs: Tensor) -> list[Tensor]:
        return [layer(x) for layer, x in zip(wide.values(), inputs, strict=True)]

    return results(wide, call, [x.detach().cpu().double() for x in given])


def roundings(found: Tensor, elements: int) -> float:
    """Return how far a result may be off beside eager's: it is rounded once to 16 bits, or is a sum in float32.

    Each term of the sum is off by the roundings of the mean, which is MEAN deviations, and there are fewer terms than
    elements of the input. An eighth is for the parts of what is rounded to 16 bits.
    """
    unit = FORMATS[found.dtype].unit_roundoff
    return elements * (1 + MEAN) * unit if found.dtype is torch.float32 else 1.125 * unit
