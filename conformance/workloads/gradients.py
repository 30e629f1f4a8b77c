"""Parameters with assigned gradients, in every layout that a backward pass can produce."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import MappingProxyType

import torch

NON_FINITE = MappingProxyType({"inf": math.inf, "minus-inf": -math.inf, "nan": math.nan})


def holding(gradients: Iterable[torch.Tensor | None]) -> list[torch.nn.Parameter]:
    """Return zero parameters, one for each gradient and of its dtype, shape and device, that hold these very tensors.

    For None the parameter has two elements and no gradient.
    """
    made = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.zeros(2) if gradient is None else torch.zeros_like(gradient))
        parameter.grad = gradient
        made.append(parameter)
    return made


def held(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Copy the gradients of those parameters that have one."""
    return [parameter.grad.detach().clone() for parameter in parameters if parameter.grad is not None]


def _every_other(values: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*values.shape[:-1], 2 * values.shape[-1]), 7.0, dtype=values.dtype, device=values.device)
    view = wide[..., ::2]
    view.copy_(values)
    return view


def _inside(values: torch.Tensor) -> torch.Tensor:
    buffer = torch.full((values.numel() + 6,), 7.0, dtype=values.dtype, device=values.device)
    view = buffer[3:-3].view(values.shape)
    view.copy_(values)
    return view


# Each turns a contiguous tensor of four dimensions into one of equal values in another layout.
LAYOUTS: MappingProxyType[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "contiguous": lambda values: values.clone(),
        "transposed": lambda values: values.transpose(0, 1).contiguous().transpose(0, 1),
        "channels last": lambda values: values.contiguous(memory_format=torch.channels_last),
        "every other element": _every_other,
        "part of a flat buffer": _inside,
    }
)
