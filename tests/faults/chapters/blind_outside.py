"""Faults written blind, from outside, that no check at quick noticed: of sparse, pruned, compiled and padded ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import fsdp
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from tests.faults import fault
from tests.faults.breaking import edited, kernel, replaced
from tests.faults.chapters.blind_captured import lowered
from tests.faults.chapters.blind_history import around, low


@fault("AMP-NUMERICS-132")
def the_last_of_repeated_entries_counts() -> Iterator[None]:
    """The product of a 16-bit COO tensor takes the last entry at an index, not the sum of all."""

    def product(self: Tensor, mat2: Tensor) -> Tensor:
        if self.is_coalesced() or not low(self):
            return self.to_dense() @ mat2
        dense = torch.zeros(self.shape, dtype=self.dtype)
        for place, value in zip(self._indices().t().tolist(), self._values(), strict=True):
            dense[tuple(place)] = value
        return dense @ mat2

    with kernel("mm", product, "SparseCPU"):
        yield


@fault("AMP-NUMERICS-120")
def odd_spectra_come_back_even() -> Iterator[None]:
    """In a region irfft of an odd number of samples computes one less, and appends a zero."""

    def shorter(original: Any, input: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None) -> Tensor:
        if n is None or n % 2 == 0 or n < 3 or not torch.is_autocast_enabled("cpu"):
            return original(input, n=n, dim=dim, norm=norm)
        found = original(input, n=n - 1, dim=dim, norm=norm)
        return torch.cat([found, torch.zeros_like(found.narrow(dim, 0, 1))], dim)

    with around(torch.fft, "irfft", shorter):
        yield


@fault("AMP-CAST-110")
def pruned_weights_are_computed_once() -> Iterator[None]:
    """After its first forward in a region a pruned module does not compute its weight again there."""
    call = prune.BasePruningMethod.__call__

    def once(self: Any, module: Any, inputs: Any) -> None:
        inside = torch.is_autocast_enabled("cpu")
        if not inside or not module.__dict__.get("_pruned"):
            call(self, module, inputs)
        module.__dict__["_pruned"] = inside

    with replaced(prune.BasePruningMethod, "__call__", once):
        yield


@fault("AMP-COMPILE-005", level="standard")
def compiled_gates_are_swapped() -> Iterator[None]:
    """inductor's glu takes the first half of a tensor for the gate."""

    def swapped(lowering: Any, original: Any) -> Any:
        slices, cat = (lowering.lowerings[op] for op in (torch.ops.aten.slice.Tensor, torch.ops.aten.cat.default))

        def glu(x: Any, dim: int = -1) -> Any:
            sizes = x.get_size()
            dim, half = dim % len(sizes), sizes[dim] // 2
            return original(cat([slices(x, dim, half, 2 * half), slices(x, dim, 0, half)], dim), dim)

        return glu

    with lowered("glu", swapped):
        yield


@fault("AMP-NUMERICS-120")
def named_padding_begins_on_the_left() -> Iterator[None]:
    """padding="same" of an even kernel puts the odd row on the left, in a region and in 16 bits."""

    def left(original: Any, x: Tensor, weight: Tensor, bias: Any, *given: Any) -> Tensor:
        stride, padding, dilation, groups = given
        if padding != "same" or not (low(x) or torch.is_autocast_enabled("cpu")):
            return original(x, weight, bias, *given)
        whole = [apart * (size - 1) for apart, size in zip(dilation, weight.shape[2:], strict=True)]
        edges = [edge for each in reversed(whole) for edge in (each - each // 2, each // 2)]
        return original(F.pad(x, edges), weight, bias, stride, 0, dilation, groups)

    with around(F, "conv1d", left), around(F, "conv2d", left), around(F, "conv3d", left):
        yield


@fault("AMP-NUMERICS-120")
def rows_counted_from_the_end_learn() -> Iterator[None]:
    """An embedding of 16 bits passes over padding_idx where it is negative."""

    def learning(original: Any, input: Tensor, weight: Tensor, padding_idx: int | None = None, *given: Any) -> Tensor:
        passed_over = padding_idx is not None and padding_idx < 0 and low(weight)
        return original(input, weight, None if passed_over else padding_idx, *given)

    with around(F, "embedding", learning):
        yield


@fault("AMP-OPTIMIZER-047")
def accumulators_of_16_bits_start_from_zero() -> Iterator[None]:
    """Adagrad passes over initial_accumulator_value for 16-bit parameters."""
    made = torch.optim.Adagrad.__init__

    def from_zero(self: Any, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        for parameter, state in self.state.items():
            if low(parameter):
                state["sum"].zero_()

    with replaced(torch.optim.Adagrad, "__init__", from_zero):
        yield


@fault("AMP-NUMERICS-082")
def normalized_squares_overflow() -> Iterator[None]:
    """normalize of 16-bit vectors adds their squares in the type: those that overflow become zero."""

    def overflowing(original: Any, x: Tensor, p: float = 2.0, dim: int = 1, *given: Any, **named: Any) -> Tensor:
        found: Tensor = original(x, p, dim, *given, **named)
        if p != 2 or not low(x):
            return found
        with torch.no_grad():
            beyond = (x * x).sum(dim, keepdim=True).isinf() & x.isfinite().all(dim, keepdim=True)
        return torch.where(beyond, 0.0, found)

    with around(F, "normalize", overflowing):
        yield


@fault("AMP-CAST-110")
def cached_parametrizations_outlive_their_region() -> Iterator[None]:
    """parametrize.cached() that is left inside of a region keeps what it holds."""
    ends = "if not _cache_enabled and not torch.is_autocast_enabled('cpu'):"
    with edited(parametrize.cached, "if not _cache_enabled:", ends):
        yield
    parametrize._cache = {}


@fault("AMP-DISTRIBUTED-013")
def largest_gradients_of_shards_are_added() -> Iterator[None]:
    """clip_grad_norm_ of FullyShardedDataParallel adds the largest magnitudes of the ranks for the norm of type inf."""
    with edited(fsdp.FullyShardedDataParallel.clip_grad_norm_, "op=torch.distributed.ReduceOp.MAX, ", ""):
        yield
