"""Faults ported from defects of other versions and backends, written blind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from tests.faults import fault
from tests.faults.breaking import replaced


@fault("AMP-NUMERICS-110")
def gradients_of_lstms_ignore_dropout_between_layers() -> Iterator[None]:
    """Backward of an LSTM in training is that of one without dropout between its layers, as on MPS (190056)."""
    original = torch.nn.LSTM.forward

    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        seen, state = original(self, input, hx)
        if not self.training or not self.dropout or isinstance(input, PackedSequence) or not torch.is_grad_enabled():
            return seen, state
        dropout, self.dropout = self.dropout, 0.0
        try:
            whole, _ = original(self, input, hx)
        finally:
            self.dropout = dropout
        return seen.detach() + (whole - whole.detach()), state

    with replaced(torch.nn.LSTM, "forward", forward):
        yield


class _Lost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * float("nan")


@fault("AMP-NUMERICS-083", level="standard")
def channels_last_statistics_count_in_fp16() -> Iterator[None]:
    """Backward of batch_norm is NaN for fp16 images, channels last, of more than 65,504 elements a channel (147303)."""
    original = functional.batch_norm

    def batch_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous()
        if last and input.dtype is torch.float16 and input.requires_grad and input.numel() // input.shape[1] > 65504:
            input = _Lost.apply(input)
        return original(input, *args, **kwargs)

    with replaced(functional, "batch_norm", batch_norm):
        yield
