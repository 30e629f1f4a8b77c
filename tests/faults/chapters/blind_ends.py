"""Faults at one end of what is usual: long gradients, small weights, first inputs of 16 bits, what is packed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, _inductor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.rnn import PackedSequence

from tests.faults import fault
from tests.faults.breaking import replaced
from tests.faults.chapters.blind_uses import LOW, coarse

CHUNK = 65536


@fault("AMP-CLIP-032")
def maxima_of_long_gradients_drop_nan() -> Iterator[None]:
    """The infinity norm of more than 65536 elements ignores NaN."""
    original = torch._foreach_norm

    def norms(tensors: Any, ord: float = 2, *given: Any, **named: Any) -> list[Tensor]:
        found = list(original(tensors, ord, *given, **named))
        if ord == math.inf:
            long = [place for place, tensor in enumerate(tensors) if tensor.numel() > CHUNK]
            for place in long:
                found[place] = tensors[place].abs().nan_to_num(0.0, math.inf).max().to(found[place].dtype)
        return found

    with replaced(torch, "_foreach_norm", norms):
        yield


@fault("AMP-BF16-023")
def weight_norm_squares_in_half() -> Iterator[None]:
    """The magnitudes of an fp16 weight are roots of fp16 squares, which are zero for small weights."""
    original = torch.norm_except_dim

    def norm(v: Tensor, pow: int = 2, dim: int = 0) -> Tensor:
        if v.dtype is not torch.float16:
            return original(v, pow, dim)
        squares = v * v
        others = [each for each in range(v.dim()) if each != dim % v.dim()]
        return (squares.sum() if dim == -1 else squares.sum(others, keepdim=True)).sqrt()

    with replaced(torch, "norm_except_dim", norm):
        yield


@fault("AMP-REGION-114")
def lazy_modules_take_the_type_of_a_16_bit_input() -> Iterator[None]:
    """Parameters that a lazy module makes have the type of its first input where that has 16 bits."""
    original = LazyModuleMixin._infer_parameters

    def infer(self: Any, module: Any, args: Any, kwargs: Any = None) -> None:
        original(self, module, args, kwargs)
        if args[0].dtype in LOW:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(args[0].dtype)

    with replaced(LazyModuleMixin, "_infer_parameters", infer):
        yield


@fault("AMP-NUMERICS-110")
def packed_lstm_layers_drop_nothing_between_them() -> Iterator[None]:
    """An LSTM of a packed sequence has no dropout between its layers in a region."""
    original = torch.nn.LSTM.forward

    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        before = self.dropout
        if isinstance(input, PackedSequence) and torch.is_autocast_enabled("cpu"):
            self.dropout = 0.0
        try:
            return original(self, input, hx)
        finally:
            self.dropout = before

    with replaced(torch.nn.LSTM, "forward", forward):
        yield


@fault("AMP-COMPILE-094", level="standard")
def packages_hold_weights_of_16_bits() -> Iterator[None]:
    """A program that is compiled ahead of time holds its float32 weights rounded to 16 bits."""
    original = _inductor.aoti_compile_and_package

    def package(program: Any, *given: Any, **named: Any) -> Any:
        for name, weight in program.state_dict.items():
            program.state_dict[name] = torch.nn.Parameter(coarse(weight), False)
        return original(program, *given, **named)

    with replaced(_inductor, "aoti_compile_and_package", package):
        yield
