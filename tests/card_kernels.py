"""What a real card's kernels do otherwise than a CPU's, put behind the keys of the emulated card.

A plugin of pytest: `python -m tests.emulated conformance --gpu -p tests.card_kernels --card-kernels NAME ...`. Each
entry names the source that it follows; those of `CLEAN` are a faultless card's, those of `BROKEN` a faulty one's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
import torch

from tests.faults._tools import kernel

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
