"""Every optimizer of torch.optim in each implementation, with parameters of several types, compiled and in eager."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...workloads.optimizer_classes import present

STEPS, OVERFLOW = 4, 1
SHAPES = ((8, 6), (3, 5), (4, 4))  # matrices, which Muon demands
PARAMETERS = ("fp32", "bf16", "mixed", "complex", "empty", "missing")
"""Kinds of parameters: of one type or two, some without elements, some without gradients."""
UNSCALED = ("bf16", "mixed", "complex")  # whose gradients a scaler takes on no device, or not on each
# Compiled code takes 1 - beta**step in float32: of these betas without an error that counts.
SETTINGS = {"lr": 2.0**-4, "momentum": 0.875, "weight_decay": 2.0**-5, "betas": (0.875, 0.9375)}
_OTHER_CALLS = ("LBFGS", "SparseAdam")  # which step with a closure, or with sparse gradients alone
_DTYPES = {"bf16": (torch.bfloat16,), "mixed": (torch.float32, torch.bfloat16), "complex": (torch.complex64,)}


def implementations() -> Iterator[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]]:
    """Yield the name, class and arguments of each implementation of each optimizer that this torch has."""
    for name in present():
        if name in _OTHER_CALLS:
            continue
        kind = getattr(torch.optim, name)
        accepted = inspect.signature(kind).parameters
        settings = {setting: value for setting, value in SETTINGS.items() if setting in accepted}
        yield f"{name}-for-loop", kind, settings | ({"foreach": False} if "foreach" in accepted else {})
        for flag in ("foreach", "fused"):
            if flag in accepted:
                yield f"{name}-{flag}", kind, settings | {flag: True}


OPTIMIZERS = {name: (kind, settings) for name, kind, settings in implementations()}


@dataclass
class Seen:
    """What a step left: the error that it raised, and parameters and state by their places."""

    raised: Exception | None = None
    parameters: list[torch.Tensor] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


class Training:
    """An optimizer over copies of `values`, stepped by a GradScaler, which is enabled if they are to be `scaled`."""

    def __init__(self, optimizer: str, values: Sequence[torch.Tensor], scaled: bool) -> None:
        kind, settings = OPTIMIZERS[optimizer]
        self.parameters = [torch.nn.Parameter(value.clone()) for value in values]
        made: Any = kind
        self.optimizer: Any = made(self.parameters, **settings)
        device = self.parameters[0].device
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**3, enabled=scaled)
        self.scaler.scale(torch.ones((), device=device))

    def step(self, gradients: Sequence[torch.Tensor | None]) -> Seen:
        scale = self.scaler.get_scale()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient * scale
        try:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        except Exception as error:
            return Seen(raised=error)
        return self.seen()

    def seen(self) -> Seen:
        # On the CPU: dynamo moves counts of steps to the device of the parameter (OptimizerVariable.move_step_if_cpu).
        state = {
            f"{number}/{name}": value.detach().clone().cpu() if isinstance(value, torch.Tensor) else value
            for number, parameter in enumerate(self.parameters)
            for name, value in self.optimizer.state.get(parameter, {}).items()
        }
        return Seen(parameters=[parameter.detach().clone() for parameter in self.parameters], state=state)

    def follow(self, other: Training) -> None:
        """Take over the parameters and the state of another, in place, so that the next steps start from the same."""
        with torch.no_grad():
            for ours, theirs in zip(self.parameters, other.parameters, strict=True):
                ours.copy_(theirs)
                mine, given = self.optimizer.state.get(ours, {}), other.optimizer.state.get(theirs, {})
                for name, value in given.items():
                    if isinstance(value, torch.Tensor):
                        mine[name].copy_(value)


def draw(kind: str, device: torch.device, rng: torch.Generator) -> Callable[[], list[torch.Tensor]]:
    """Return what draws tensors of a kind of parameters: their values, or the gradients of a step."""
    dtypes = itertools.cycle(_DTYPES.get(kind, (torch.float32,)))
    shapes = ((0, 3), *SHAPES, (2, 0)) if kind == "empty" else SHAPES
    each = list(zip(shapes, dtypes, strict=False))

    def one(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        parts = [torch.randn(shape, generator=rng) for _ in range(2)]
        return (torch.complex(*parts) if dtype.is_complex else parts[0]).to(dtype=dtype, device=device)

    return lambda: [one(*shape_and_dtype) for shape_and_dtype in each]


def overflowed(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return the gradients with an infinity in one of them that has elements."""
    spoilt = list(gradients)
    place = next(number for number, each in enumerate(spoilt) if each is not None and each.numel())
    spoilt[place] = torch.full_like(gradients[place], float("inf"))
    return spoilt
