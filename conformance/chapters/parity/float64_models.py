"""Gradients of a CNN, an LSTM and a transformer written out in float64, with or without autocast's roundings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Parameters = Mapping[str, torch.Tensor]


class _Round(torch.autograd.Function):
    """Rounds what passes to a dtype, and its gradient, times the loss scale, as well."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
        ctx.dtype, ctx.scale = dtype, scale
        return x.to(dtype).double()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (gradient * ctx.scale).to(ctx.dtype).double() / ctx.scale, None, None


class _LogSoftmax(torch.autograd.Function):
    """Log-probabilities that are kept in a dtype, from which the gradient takes the probabilities."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        exact = x - x.logsumexp(1, keepdim=True)
        kept = exact if dtype is None else exact.to(dtype).double()
        ctx.save_for_backward(kept)
        return kept

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (kept,) = ctx.saved_tensors
        return gradient - kept.exp() * gradient.sum(1, keepdim=True), None


@dataclass(frozen=True)
class Rounding:
    """Where a region rounds: to `dtype` what ops in lower precision take and give, and gradients, times `scale`.

    `recurrent` is the type of recurrent layers, `loss` that in which the log-probabilities of the cross entropy are
    kept. None: nothing is rounded there.
    """

    dtype: torch.dtype | None = None
    recurrent: torch.dtype | None = None
    loss: torch.dtype | None = None
    scale: float = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._to(x, self.dtype)

    def of_recurrence(self, x: torch.Tensor) -> torch.Tensor:
        """Round as a recurrent layer does."""
        return self._to(x, self.recurrent)

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of rows of logits."""
        kept: torch.Tensor = _LogSoftmax.apply(logits, self.loss)
        return self._to(kept, self.loss)

    def _to(self, x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        if dtype is None:
            return x
        rounded: torch.Tensor = _Round.apply(x, dtype, self.scale)
        return rounded


Forward = Callable[[Parameters, torch.Tensor, Rounding], torch.Tensor]
EXACT = Rounding()


def gradients(
    forward: Forward,
    parameters: Parameters,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    rounding: Rounding = EXACT,
) -> dict[str, torch.Tensor]:
    """Return the gradients of the mean cross entropy by the name of the parameter, float64, on the CPU.

    `forward` is one of FORWARDS; sums are exact. What AMP's gradients differ from these by is only how it adds up, and
    where within fused ops it rounds.
    """
    leaves = {name: value.detach().cpu().double().requires_grad_() for name, value in parameters.items()}
    images = inputs.cpu()
    logits = forward(leaves, images.double() if images.is_floating_point() else images, rounding)
    target = labels.cpu().flatten()
    loss = -rounding.log_softmax(logits)[torch.arange(len(target)), target].mean()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def _linear(p: Parameters, name: str, x: torch.Tensor, q: Rounding) -> torch.Tensor:
    return q(q(x) @ q(p[f"{name}.weight"]).T + q(p[f"{name}.bias"]))


def _convolution(p: Parameters, name: str, x: torch.Tensor, q: Rounding) -> torch.Tensor:
    """3 by 3, every second pixel, with a margin of zeros: a product with the patches, [rows, channels, side, side]."""
    patches = torch.nn.functional.unfold(q(x), 3, padding=1, stride=2)
    side = math.isqrt(patches.shape[2])
    products = q(p[f"{name}.weight"]).flatten(1) @ patches
    return q(products + q(p[f"{name}.bias"]).unsqueeze(1)).unflatten(2, (side, side))


def _gelu(x: torch.Tensor, q: Rounding) -> torch.Tensor:
    return q(x * (1 + torch.erf(x / math.sqrt(2))) / 2)


def _norm(p: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred / deviation * p[f"{name}.weight"] + p[f"{name}.bias"]


def _convolutional(p: Parameters, x: torch.Tensor, q: Rounding) -> torch.Tensor:
    hidden = _gelu(_convolution(p, "1", x.view(-1, 1, 8, 8), q), q)
    hidden = _gelu(_convolution(p, "3", hidden, q), q)
    return _linear(p, "6", hidden.flatten(1), q)


def _recurrent(p: Parameters, x: torch.Tensor, q: Rounding) -> torch.Tensor:
    """torch.nn.LSTM's formulas; the gates are not rounded, nor is the cell state, as within the fused kernels."""
    r = q.of_recurrence
    inward, onward = (r(p[f"lstm.weight_{way}_l0"]) for way in ("ih", "hh"))
    bias = r(p["lstm.bias_ih_l0"]) + r(p["lstm.bias_hh_l0"])
    hidden = cell = x.new_zeros(len(x), onward.shape[1])
    for row in r(x.view(-1, 8, 8)).unbind(1):
        entry, forget, change, exit_ = (row @ inward.T + hidden @ onward.T + bias).chunk(4, 1)
        cell = forget.sigmoid() * cell + entry.sigmoid() * change.tanh()
        hidden = r(exit_.sigmoid() * cell.tanh())
    return _linear(p, "read", hidden, q)


def _transformer(p: Parameters, x: torch.Tensor, q: Rounding) -> torch.Tensor:
    """Return the attention of two heads; scaled dot product attention is one op, rounded at its end."""
    length, width = x.shape[1], p["symbol.weight"].shape[1]
    state = p["symbol.weight"][x] + p["position.weight"][:length]
    heads = _linear(p, "block.qkv", _norm(p, "block.norm_1", state), q).unflatten(2, (6, -1)).transpose(1, 2)
    query, key, value = heads.chunk(3, dim=1)
    scores = query @ key.transpose(2, 3) / math.sqrt(width // 2)
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    mixed = q((scores - scores.logsumexp(3, keepdim=True)).exp() @ value)
    state = state + _linear(p, "block.project", mixed.transpose(1, 2).flatten(2), q)
    wide = _gelu(_linear(p, "block.widen", _norm(p, "block.norm_2", state), q), q)
    state = state + _linear(p, "block.narrow", wide, q)
    return _linear(p, "read", _norm(p, "norm", state), q).flatten(0, 1)


# Without kinks: where a rounding takes a number across one, as that of ReLU, it changes a gradient by more than itself.
FORWARDS: dict[str, Forward] = {"cnn-smooth": _convolutional, "lstm": _recurrent, "transformer": _transformer}
