"""torch.nn modules and the parameters of each that a region casts, once, however often the module is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Casting:
    """A module and its inputs; `kept` are the parameters that no operation of the lower-precision list is given.

    Those are the ones of operations that are on no list or, of fp32 inputs, on that of fp32 or of the widest type
    (AMP op reference), and those that are handed on as views, which the weight cache does not serve.
    On other devices than that of `where` a library puts the weights in an order of its own at each call.
    """

    name: str
    module: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    kept: tuple[str, ...] = ()
    where: str = "real"

    def casts(self, parameter: str) -> bool:
        """Return whether a region casts the parameter of that name."""
        return not any(parameter.startswith(prefix) for prefix in self.kept)

    def make(self, device: torch.device, generator: torch.Generator) -> tuple[nn.Module, list[torch.Tensor]]:
        """Return the module in training and its fp32 inputs, or words where it has an embedding."""
        module = self.module().to(device).train()
        drawn: list[Any] = [torch.randn(shape, generator=generator).to(device) for shape in self.shapes]
        return module, drawn or [torch.arange(4, device=device).view(2, 2)]


ALL = ("",)
_LAYER = {"batch_first": True, "dropout": 0.0}

MODULES = (
    Casting("linear", lambda: nn.Linear(4, 3), ((2, 4),)),
    Casting("bilinear", lambda: nn.Bilinear(4, 5, 3), ((2, 4), (2, 5)), ALL),
    Casting("conv1d", lambda: nn.Conv1d(3, 4, 3), ((2, 3, 8),)),
    Casting("conv2d", lambda: nn.Conv2d(3, 4, 3), ((2, 3, 5, 5),)),
    Casting("conv3d", lambda: nn.Conv3d(3, 4, 2), ((2, 3, 3, 3, 3),)),
    Casting("conv_transpose1d", lambda: nn.ConvTranspose1d(3, 4, 3), ((2, 3, 8),)),
    Casting("conv_transpose2d", lambda: nn.ConvTranspose2d(3, 4, 3), ((2, 3, 5, 5),)),
    Casting("conv_transpose3d", lambda: nn.ConvTranspose3d(3, 4, 2), ((2, 3, 3, 3, 3),)),
    Casting("prelu", lambda: nn.PReLU(3), ((2, 3, 4),)),
    Casting("embedding", lambda: nn.Embedding(5, 3), (), ALL),
    Casting("embedding_bag", lambda: nn.EmbeddingBag(5, 3), (), ALL),
    Casting("layer_norm", lambda: nn.LayerNorm(4), ((2, 4),), ALL),
    Casting("group_norm", lambda: nn.GroupNorm(2, 4), ((2, 4, 3),), ALL),
    Casting("batch_norm", lambda: nn.BatchNorm1d(4), ((3, 4),), ALL),
    Casting("instance_norm", lambda: nn.InstanceNorm1d(4, affine=True), ((3, 4, 5),), ALL),
    Casting("rms_norm", lambda: nn.RMSNorm(4), ((3, 4),), ALL),
    # Of three inputs that are not the same tensor the projections' weight is cut into views, as their one bias below.
    Casting("attention", lambda: nn.MultiheadAttention(8, 2, batch_first=True), ((2, 4, 8),) * 3, ("in_proj",)),
    Casting(
        "attention-of-three-widths",
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=5, batch_first=True),
        ((2, 4, 8), (2, 4, 6), (2, 4, 5)),
        ("in_proj_bias",),
    ),
    Casting("encoder", lambda: nn.TransformerEncoderLayer(8, 2, 16, **_LAYER), ((2, 4, 8),), ("norm",)),
    Casting(
        "decoder",  # of its attention to memory the projections' weight is cut as well
        lambda: nn.TransformerDecoderLayer(8, 2, 16, **_LAYER),
        ((2, 4, 8), (2, 4, 8)),
        ("norm", "multihead_attn.in_proj"),
    ),
    Casting("lstm-cell", lambda: nn.LSTMCell(4, 3), ((2, 4),)),
    Casting("gru-cell", lambda: nn.GRUCell(4, 3), ((2, 4),)),
    Casting("rnn-cell", lambda: nn.RNNCell(4, 3), ((2, 4),)),
    Casting("lstm", lambda: nn.LSTM(4, 3, bidirectional=True), ((5, 2, 4),), where="cpu"),
    Casting("gru", lambda: nn.GRU(4, 3), ((5, 2, 4),), where="cpu"),
    Casting("rnn", lambda: nn.RNN(4, 3), ((5, 2, 4),), where="cpu"),
)
