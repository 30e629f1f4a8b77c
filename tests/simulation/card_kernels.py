"""What a real card's kernels do otherwise than a CPU's, put behind the keys of the emulated card.

A plugin of pytest:
`python -m tests.simulation.emulated conformance --gpu -p tests.simulation.card_kernels --card-kernels NAME`.
Each entry names the source that it follows; those of `CLEAN` are a faultless card's, those of `BROKEN` a faulty one's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch

from tests.faults.breaking import kernel
from tests.simulation.matrix_units import add, cut, quantum_of

Kernel: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
CLEAN: dict[str, Kernel] = {}
BROKEN: dict[str, Kernel] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--card-kernels", nargs="+", default=[], choices=[*CLEAN, *BROKEN], help="kernels of the emulated card"
    )


def pytest_configure(config: pytest.Config) -> None:
    stack = contextlib.ExitStack()
    for name in config.getoption("--card-kernels"):
        stack.enter_context((CLEAN | BROKEN)[name]())
    config.add_cleanup(stack.close)


def _entry(table: dict[str, Kernel]) -> Callable[[Callable[[], Iterator[None]]], Kernel]:
    def add(function: Callable[[], Iterator[None]]) -> Kernel:
        made: Kernel = contextlib.contextmanager(function)
        table[function.__name__] = made
        return made

    return add


@_entry(CLEAN)
def tanh_backward() -> Iterator[None]:
    """a * (1 - b * b) in the type of the operands (aten/src/ATen/native/cuda/BinaryMiscBackwardOpsKernels.cu)."""
    with kernel("tanh_backward", lambda gradient, result: gradient * (1 - result * result), "CUDA"):
        yield


@_entry(BROKEN)
def tanh_backward_of_fewer_bits() -> Iterator[None]:
    """The last bit of tanh's result is cut off before its gradient is taken."""

    def backward(gradient: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        cut = (result.view(torch.int16) & -2).view(result.dtype)
        return gradient * (1 - cut.float().square()).to(gradient.dtype)

    with kernel("tanh_backward", backward, "CUDA"):
        yield


def _through(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to `dtype` what passes, and the gradient that comes back."""
    return x.to(dtype).float()


def _half_lstm(gate_sum: Callable[[torch.Tensor], torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """An LSTM of one layer in float16 in any region; `gate_sum` adds a gate's terms up."""
    ordinary = torch._VF.lstm

    def lstm(x: Any, states: Any, weights: Sequence[Any], *rest: Any) -> Any:
        if not torch.is_autocast_enabled("cuda"):
            return ordinary(x, states, weights, *rest)
        half = torch.float16
        with torch.autocast("cuda", enabled=False):
            inputs, inward, onward, *biases = (_through(tensor, half) for tensor in (x, *weights))
            hidden, cell = (_through(state[0], half) for state in states)
            seen = []
            time = 1 if rest[-1] else 0  # batch_first
            for row in inputs.unbind(time):
                terms = torch.stack(
                    [row @ inward.t(), hidden @ onward.t(), *(bias.expand(len(row), -1) for bias in biases)]
                )
                entry, forget, change, exit_ = gate_sum(terms).chunk(4, 1)
                cell = forget.sigmoid() * cell + entry.sigmoid() * change.tanh()
                hidden = _through(exit_.sigmoid() * cell.tanh(), half)
                seen.append(hidden)
            return torch.stack(seen, time).to(half), hidden.to(half).unsqueeze(0), cell.to(half).unsqueeze(0)

    return mock.patch.object(torch._VF, "lstm", lstm, create=True)


@_entry(CLEAN)
def cudnn_rnn_in_float16() -> Iterator[None]:
    """cuDNN's LSTM runs in float16 in any region (aten/src/ATen/cudnn/AutocastRNN.cpp, _cudnn_rnn_cast_reflatten)."""
    with _half_lstm(lambda terms: terms.sum(0)):
        yield


@_entry(CLEAN)
def cudnn_weights_in_one_buffer() -> Iterator[None]:
    """The weights of a recurrent layer are views of one buffer, each at a multiple of 128 bytes."""

    def flatten(self: torch.nn.RNNBase) -> None:
        weights = self._flat_weights
        if weights[0].device.type != "cuda":
            return
        places = [0]
        for weight in weights:
            places.append(places[-1] + -(-weight.numel() // 32) * 32)
        buffer = weights[0].new_zeros(places[-1])
        for weight, place in zip(weights, places, strict=False):
            weight.data = buffer[place : place + weight.numel()].view_as(weight).copy_(weight)

    with mock.patch.object(torch.nn.RNNBase, "flatten_parameters", flatten):
        yield


@_entry(BROKEN)
def gates_of_cudnn_rnn_miss_a_bias() -> Iterator[None]:
    """The LSTM adds one of its two biases only."""
    with _half_lstm(lambda terms: terms[:-1].sum(0)):
        yield


@_entry(CLEAN)
def log_softmax_in_float32() -> Iterator[None]:
    """Computed in fp32 and rounded once, forward and backward (aten/src/ATen/native/cuda/PersistentSoftmax.cuh)."""

    def forward(x: torch.Tensor, dim: int, to_float: bool) -> torch.Tensor:
        wide = x.float()
        result = wide - wide.logsumexp(dim, keepdim=True)
        return result if to_float else result.to(x.dtype)

    def backward(gradient: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        wide = gradient.float()
        return (wide - output.float().exp() * wide.sum(dim, keepdim=True)).to(dtype)

    with (
        kernel("_log_softmax", forward, "CUDA"),
        kernel("_log_softmax_backward_data", backward, "CUDA"),
    ):
        yield


_LOW = (torch.float16, torch.bfloat16)
Sum: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of (m, k) and (k, n) in float64: their product as a unit sums it, before it is rounded to a type."""


def _running(bits: int) -> Sum:
    """A running sum of that many bits, rounded to nearest."""

    def run(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.float64)
        for column, row in zip(left.t(), right, strict=True):
            total = add(total, torch.outer(column, row), bits, "nearest")
        return total

    return run


def _volta(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Four products at a time are aligned with the running sum, cut toward zero at its place, and added."""
    total = torch.zeros(left.shape[0], 1, right.shape[1], dtype=torch.float64)
    for start in range(0, left.shape[1], 4):
        block = left[:, start : start + 4, None] * right[None, start : start + 4]
        terms = torch.cat([total, block], 1)
        exact = cut(terms, quantum_of(terms.abs().amax(1, keepdim=True), 24), "zero").sum(1, keepdim=True)
        total = cut(exact, quantum_of(exact, 24), "zero")
    return total.squeeze(1)


def _products(sum_of: Callable[[int], Sum | None]) -> contextlib.AbstractContextManager[Any]:
    """16-bit mm, addmm and bmm whose sums over k terms a unit makes; None: that of the CPU."""

    def multiplied(left: torch.Tensor, right: torch.Tensor, added: torch.Tensor | float = 0.0) -> torch.Tensor:
        unit = sum_of(left.shape[1])
        assert unit is not None
        result = unit(left.cpu().double(), right.cpu().double())
        return (result + added).float().to(left.dtype).to(left.device)

    def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if left.dtype not in _LOW or sum_of(left.shape[1]) is None:
            return torch.ops.aten.mm.out(left, right, out=torch.empty(0, dtype=left.dtype, device=left.device))
        return multiplied(left, right)

    def bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if left.dtype not in _LOW or sum_of(left.shape[2]) is None:
            return torch.ops.aten.bmm.out(left, right, out=torch.empty(0, dtype=left.dtype, device=left.device))
        return torch.stack([multiplied(x, y) for x, y in zip(left, right, strict=True)])

    def addmm(added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if left.dtype not in _LOW or sum_of(left.shape[1]) is None or beta != 1 or alpha != 1:
            out = torch.empty(0, dtype=left.dtype, device=left.device)
            return torch.ops.aten.addmm.out(added, left, right, beta=beta, alpha=alpha, out=out)
        return multiplied(left, right, added.cpu().double())

    stack = contextlib.ExitStack()
    for name, function in (("mm", mm), ("bmm", bmm), ("addmm", addmm)):
        stack.enter_context(kernel(name, function, "CUDA"))
    return stack


@_entry(CLEAN)
def matrix_units_for_some_sizes() -> Iterator[None]:
    """Sums of 64 terms are rounded to nearest, on ordinary units; all others toward zero, on tensor cores.

    cuBLAS chooses by size and alignment; tensor cores of Volta: M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh (2021).
    """
    with _products(lambda terms: None if terms == 64 else _volta):
        yield


@_entry(BROKEN)
def sums_of_few_bits_for_some_sizes() -> Iterator[None]:
    """Sums of all lengths but 64 keep 19 bits, rounded to nearest."""
    with _products(lambda terms: None if terms == 64 else _running(19)):
        yield
