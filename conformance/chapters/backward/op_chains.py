"""Define short differentiable programs of listed ops that run under autocast and with manual casts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.nn import functional

Tensors: TypeAlias = Mapping[str, torch.Tensor]
Cast: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Chain:
    """A program of ops on the lower precision and float32 lists of CPU and CUDA alike.

    `shapes` are those of its float32 leaves; `run(leaves, low, high)` calls `low` on every operand of a lower
    precision op and `high` on every operand of a float32 op. Under autocast both are the identity; a manual
    run passes casts, so the two differ in nothing else.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    run: Callable[[Tensors, Cast, Cast], torch.Tensor]
    float32_ops: tuple[str, ...] = ()
    formats: Mapping[str, torch.memory_format] = field(default_factory=dict)

    def leaves(self, draw: Callable[[tuple[int, ...]], torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """Create the leaves with `draw(shape)` on the CPU, and copy them, requiring grad, to `device`."""
        return {
            name: draw(shape)
            .to(device)
            .contiguous(memory_format=self.formats.get(name, torch.contiguous_format))
            .requires_grad_()
            for name, shape in self.shapes.items()
        }

    def autocast(self, leaves: Tensors) -> torch.Tensor:
        """Run without a cast, for a region to cast."""
        return self.run(leaves, _as_is, _as_is)

    def manual(self, leaves: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """Run with every cast written out, outside any region; a leaf used twice is cast once."""
        # The originals are kept alive too: the id of a freed tensor may be reused.
        lowered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def low(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in lowered:
                lowered[id(tensor)] = tensor, tensor.to(dtype)
            return lowered[id(tensor)][1]

        return self.run(leaves, low, torch.Tensor.float)


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _linear(t: Tensors, low: Cast, high: Cast) -> torch.Tensor:
    return functional.linear(low(t["x"]), low(t["weight"]), low(t["bias"]))


def _mm(t: Tensors, low: Cast, high: Cast) -> torch.Tensor:
    return torch.mm(low(t["x"]), low(t["weight"]))


def _matmul(t: Tensors, low: Cast, high: Cast) -> torch.Tensor:
    return torch.matmul(low(t["x"]), low(t["weight"]))


def _bmm(t: Tensors, low: Cast, high: Cast) -> torch.Tensor:
    return torch.bmm(low(t["x"]), low(t["weight"]))


def _addmm(t: Tensors, low: Cast, high: Cast) -> torch.Tensor:
    return torch.addmm(low(t["bias"]), low(t["x"]), low(t["weight"]))


def _baddbmm(t: Tensors, low: Cast, high: Cast) -> torch.Tensor:
    return torch.baddbmm(low(t["bias"]), low(t["x"]), low(t["weight"]))


def _conv1d(t: Tensors, low: Cast, high: Cast) -> torch.Tensor:
    return functional.conv1d(low(t["x"]), low(t["weight"]), low(t["bias"]), padding=1)


def _conv2d(t: Tensors, low: Cast, high: Cast) -> torch.Tensor:
    return functional.conv2d(low(t["x"]), low(t["weight"]), low(t["bias"]), stride=2)


def _conv_transpose2d(t: Tensors, low: Cast, high: Cast) -> torch.Tensor:
    return functional.conv_transpose2d(low(t["x"]), low(t["weight"]), low(t["bias"]), stride=2)


def _shared(t: Tensors, low: Cast, high: Cast) -> torch.Tensor:
    return functional.linear(functional.linear(low(t["x"]), low(t["weight"])), low(t["weight"]))


def _multilayer(t: Tensors, low: Cast, high: Cast) -> torch.Tensor:
    hidden = functional.relu(functional.linear(low(t["x"]), low(t["first"]), low(t["bias"])))
    return functional.linear(hidden, low(t["second"]))


def _through_float32(t: Tensors, low: Cast, high: Cast) -> torch.Tensor:
    """Run linear, an elementwise op of the float32 list, linear: 16-bit, float32, 16-bit."""
    hidden = functional.linear(low(t["x"]), low(t["first"]))
    squared = functional.mse_loss(high(hidden), high(t["goal"]), reduction="none")
    return functional.linear(low(squared), low(t["second"]))


def _to_loss(t: Tensors, low: Cast, high: Cast) -> torch.Tensor:
    logits = functional.linear(low(t["x"]), low(t["weight"]), low(t["bias"]))
    return functional.mse_loss(high(logits), high(t["goal"]), reduction="sum")


def _after_tanh(t: Tensors, low: Cast, high: Cast) -> torch.Tensor:
    return functional.linear(low(torch.tanh(t["x"])), low(t["weight"]))


CHAINS = (
    Chain("linear", {"x": (8, 16), "weight": (6, 16), "bias": (6,)}, _linear),
    Chain("mm", {"x": (8, 16), "weight": (16, 6)}, _mm),
    Chain("matmul", {"x": (3, 5, 16), "weight": (16, 6)}, _matmul),
    Chain("bmm", {"x": (3, 5, 16), "weight": (3, 16, 6)}, _bmm),
    Chain("addmm", {"x": (8, 16), "weight": (16, 6), "bias": (6,)}, _addmm),
    Chain("baddbmm", {"x": (3, 5, 16), "weight": (3, 16, 6), "bias": (3, 5, 6)}, _baddbmm),
    Chain("conv1d", {"x": (2, 3, 10), "weight": (4, 3, 3), "bias": (4,)}, _conv1d),
    Chain("conv2d", {"x": (2, 3, 7, 7), "weight": (4, 3, 3, 3), "bias": (4,)}, _conv2d),
    Chain(
        "conv2d-channels-last",
        {"x": (2, 3, 7, 7), "weight": (4, 3, 3, 3), "bias": (4,)},
        _conv2d,
        formats={"x": torch.channels_last, "weight": torch.channels_last},
    ),
    Chain("conv_transpose2d", {"x": (2, 3, 5, 5), "weight": (3, 4, 3, 3), "bias": (4,)}, _conv_transpose2d),
    Chain("shared-weight", {"x": (8, 12), "weight": (12, 12)}, _shared),
    Chain("two-layers", {"x": (8, 16), "first": (12, 16), "bias": (12,), "second": (6, 12)}, _multilayer),
    Chain(
        "through-float32",
        {"x": (8, 16), "first": (12, 16), "goal": (8, 12), "second": (6, 12)},
        _through_float32,
        float32_ops=("aten::mse_loss", "aten::mse_loss_backward"),
    ),
    Chain(
        "to-loss",
        {"x": (8, 16), "weight": (6, 16), "bias": (6,), "goal": (8, 6)},
        _to_loss,
        float32_ops=("aten::mse_loss", "aten::mse_loss_backward"),
    ),
)
"""Every chain, single ops first."""

AFTER_AN_UNLISTED_OP = Chain("tanh", {"x": (8, 16), "weight": (6, 16)}, _after_tanh)
"""A product of what an op on no list computes in float32, which it saves for backward as it is."""
