"""The optimizers of a history of scaler calls, their parameters and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .model import BF16, FP16, FP32, FP64, Format, Gradient, rounded

DTYPES = {FP16: torch.float16, BF16: torch.bfloat16, FP32: torch.float32, FP64: torch.float64}
FORM_NAMES = {dtype: form.name for form, dtype in DTYPES.items()}
# The elements of a gradient relative to its first, distinct so that a number at a wrong index shows.
PATTERN = (1.0, -1.0, 0.5, 0.25)


@dataclass(frozen=True)
class Slot:
    """A parameter: its group, format and shape. An `optional` one has a gradient only if `Backward.narrow`."""

    group: int
    form: Format
    shape: tuple[int, ...]
    optional: bool = False

    @property
    def size(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


PLAIN, SGD, FUSED = range(3)
NAMES = ("plain", "sgd", "fused")
SLOTS: tuple[tuple[Slot, ...], ...] = (
    (
        Slot(0, FP32, (3,)),
        Slot(0, BF16, (2,)),
        Slot(0, FP32, (0,)),
        Slot(1, FP64, (2,)),
        Slot(1, FP32, (2, 2)),
        Slot(1, FP32, (4,)),
        Slot(1, FP16, (2,), optional=True),
    ),
    (Slot(0, FP32, ()), Slot(1, FP32, (2,))),
    (Slot(0, FP32, (2,)), Slot(0, FP32, (0,)), Slot(1, FP16, (2,), optional=True)),
)
LAYOUTS = ("dense", "strided", "sparse", "duplicates")


@dataclass(frozen=True)
class Backward:
    """The gradients that one optimizer gets: multiples of `base`, with `bad`, if any, at index `place`.

    `absent` are the slots that get none; the optional slots get one if `narrow`. The layout is that of the slots that
    can have it: "strided" the matrix, "sparse" and "duplicates" the vector of four.
    """

    which: int
    base: float = 1.0
    bad: float | None = None
    place: int = 0
    absent: tuple[int, ...] = ()
    layout: str = "dense"
    narrow: bool = False

    def gradients(self) -> list[Gradient | None]:
        """Return the gradient of each slot of the optimizer, or None."""
        return list(_gradients_of(self))

    def _made(self) -> list[Gradient | None]:
        slots = SLOTS[self.which]
        found: list[Gradient | None] = []
        for number, slot in enumerate(slots):
            if number in self.absent or (slot.optional and not self.narrow):
                found.append(None)
                continue
            numbers = (rounded(self.base * PATTERN[k % 4], slot.form) for k in range(slot.size))
            found.append(Gradient(tuple(numbers), slot.form))
        return found if self.bad is None else with_bad(found, self.bad, self.place)


@lru_cache(maxsize=4096)
def _gradients_of(given: Backward) -> tuple[Gradient | None, ...]:
    return tuple(given._made())


def with_bad(gradients: list[Gradient | None], bad: float, place: int) -> list[Gradient | None]:
    """Put `bad` at element `place` (counted over all gradients, modulo their size), if there is any element."""
    places = [(k, j) for k, gradient in enumerate(gradients) if gradient for j in range(len(gradient.values))]
    if not places:
        return gradients
    slot, element = places[place % len(places)]
    result = list(gradients)
    before = gradients[slot]
    assert before is not None
    values = (*before.values[:element], bad, *before.values[element + 1 :])
    result[slot] = Gradient(values, before.form)
    return result


class Plain(torch.optim.Optimizer):
    """An optimizer that subtracts its gradients, records the arguments of step() and returns the number of calls."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})
        self.calls: list[str] = []

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(f"step{args}{kwargs}")
        subtract(self)
        return len(self.calls)


class Fused(torch.optim.Optimizer):
    """A self-scaling optimizer, like torch's fused ones, that records the scale and the flag that it receives.

    It subtracts its gradients without unscaling them, unless the flag is set.
    """

    _step_supports_amp_scaling = True

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})
        self.calls: list[str] = []

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        received = None if scale is None else float(scale), None if found is None else float(found)
        self.calls.append(f"step{args}{kwargs} with scale {received[0]} and flag {received[1]}")
        if not received[1]:
            subtract(self)
        return len(self.calls)


def subtract(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.sub_(as_dense(parameter.grad).to(parameter.device, parameter.dtype))


def as_dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient as a dense tensor on the CPU, another as it is.

    CUDA adds the values of an index up with atomics on float32 in memory, which take subnormal numbers for zeros
    (atom.add.f32 in the PTX ISA); the operation that is judged left these numbers.
    """
    return gradient.cpu().to_dense() if gradient.is_sparse else gradient


class CountedSGD(torch.optim.SGD):
    """SGD with a learning rate of 1 that counts its steps."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=1.0)
        self.calls: list[str] = []

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(f"step{args}{kwargs}")
        return super().step(*args, **kwargs)


KINDS: tuple[Callable[[Any], Any], ...] = (Plain, CountedSGD, Fused)


def tensor_of(gradient: Gradient, slot: Slot, layout: str, device: torch.device) -> torch.Tensor:
    """Return the gradient as a tensor of the slot's shape in that layout.

    "duplicates" is sparse, with each index twice, the second time with a zero.
    """
    dense = torch.tensor(gradient.values, dtype=DTYPES[slot.form], device=device).reshape(slot.shape)
    if layout == "strided":
        return dense.t().contiguous().t()
    if layout in ("sparse", "duplicates"):
        again = 2 if layout == "duplicates" else 1
        indices = torch.arange(slot.size, device=device).repeat(again)[None]
        values = torch.cat([dense, torch.zeros_like(dense)][:again])
        # Not coalesced, which would require sorted indices: the zeros come last.
        return torch.sparse_coo_tensor(indices, values, slot.shape, is_coalesced=again == 1)
    return dense


def fitting(slot: Slot) -> tuple[str, ...]:
    """Return the layouts that a gradient of the slot can have."""
    if slot.shape == (2, 2):
        return ("dense", "strided")
    return LAYOUTS if slot.shape == (4,) else ("dense",)


def spelled(gradient: Gradient, slot: Slot, layout: str) -> str:
    values = repr(list(gradient.values)) if slot.shape else repr(gradient.values[0])
    text = f"torch.tensor({values}, dtype={DTYPES[slot.form]})"
    if layout in ("sparse", "duplicates"):
        return f"{text}.to_sparse()" + ("  # and each index again, with a zero" if layout == "duplicates" else "")
    shaped = f"{text}.reshape{slot.shape}" if len(slot.shape) > 1 else text
    return f"{shaped}.t().contiguous().t()" if layout == "strided" else shaped
