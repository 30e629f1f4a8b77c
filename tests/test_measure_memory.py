"""The byte counters, tried on tensors whose bytes are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conformance.measure.memory import (
    LiveStorages,
    SavedForBackward,
    bytes_by_dtype,
    counts_peaks,
    peak_above_start,
    peak_bounds,
    state_tensors,
    tensor_bytes,
)
from conformance.oracles.saved import blocks, chain, execute, predict, tensors


def test_saved_bytes_are_counted_once_per_storage() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    with SavedForBackward([x]) as saved:
        y = x.exp()  # keeps its result: 140 bytes
        y.view(7, 5).tanh().sum()  # keeps its result: 140 bytes; the view adds nothing
        (x * x).sum()  # keeps x, which is excluded
    assert saved.storages == [(torch.float32, 140), (torch.float32, 140)]
    assert saved.total == 280
    assert bytes_by_dtype(saved.storages) == {"float32": 280}


def test_bytes_sum_by_dtype_in_order() -> None:
    pairs = [(torch.float32, 4), (torch.bfloat16, 2), (torch.float32, 8)]
    assert bytes_by_dtype(pairs) == {"bfloat16": 2, "float32": 12}


def test_counting_leaves_gradients_alone() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    with SavedForBackward():
        loss = x.square().sum()
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach())


def test_live_storages_come_and_go() -> None:
    given = torch.ones(3)
    with LiveStorages([given]) as live:
        a = torch.zeros(10)
        b = a + 1
        view = b[2:]
        given.add_(1)
        assert (live.live_bytes, live.live_storages) == (80, 2)
        del b
        assert live.live_bytes == 80
        del view
        assert live.live_bytes == 40
    assert live.live_bytes == 40
    del a
    assert live.live_bytes == 0


def test_a_leak_of_one_tensor_a_step_is_seen() -> None:
    leaked: list[torch.Tensor] = []
    alive = []
    with LiveStorages() as live:
        for _ in range(4):
            leaked.append(torch.ones(8) * 2)
            alive.append(live.live_bytes)
    assert alive == [32, 64, 96, 128]


def test_optimizer_state_is_weighed_without_its_counters() -> None:
    weight = torch.nn.Parameter(torch.ones(6, 5))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    assert tensor_bytes(state_tensors(optimizer)) == {"float32": 2 * 6 * 5 * 4}


class FakeAllocator:
    """A device module that counts bytes; `step` allocates and frees."""

    def __init__(self) -> None:
        self.allocated = self.peak = 1000

    def take(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def synchronize(self) -> None:
        pass

    def reset_peak_memory_stats(self, device: object) -> None:
        self.peak = self.allocated

    def memory_allocated(self, device: object) -> int:
        return self.allocated

    def max_memory_allocated(self, device: object) -> int:
        return self.peak


def test_the_peak_is_that_of_the_second_step() -> None:
    allocator = FakeAllocator()
    workspace = iter([512, 0])

    def step() -> None:
        allocator.take(next(workspace))
        allocator.take(300)
        allocator.take(-300)

    assert counts_peaks(allocator)  # type: ignore[arg-type]
    assert peak_above_start(allocator, torch.device("cpu"), step, []) == 300
    assert not counts_peaks(None)


def _peak(mode: LiveStorages, work: Callable[[], None]) -> int:
    """The most bytes alive after any operation of `work`: an allocator without rounding."""
    seen = [0]
    dispatch = mode.__torch_dispatch__

    class Watch(LiveStorages):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = dispatch(func, types, args, kwargs)
            seen[0] = max(seen[0], mode.live_bytes)
            return result

    with Watch():
        work()
    return seen[0]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "width", "layers"), [(256, 64, 16), (16, 128, 3)], ids=["activations", "weights"])
def test_the_peak_lies_within_its_bounds(rows: int, width: int, layers: int, dtype: torch.dtype | None) -> None:
    block = chain(rows, width, layers)
    leaves = tensors(block, torch.device("cpu"), torch.Generator().manual_seed(0))

    def step() -> None:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            result = execute(block, leaves)
        result.float().sum().backward()

    kept = sum(item.nbytes for item in predict(block, "cpu", dtype))
    weights = layers * width * width
    bounds = peak_bounds(kept, 4 * weights, 0 if dtype is None else 2 * weights, 4 * rows * width)
    seen = _peak(LiveStorages(leaves.values()), step)
    assert bounds.low <= seen <= bounds.high - (1 << 21)


def test_every_block_runs_and_is_predicted() -> None:
    for block in blocks().values():
        leaves = tensors(block, torch.device("cpu"), torch.Generator().manual_seed(0))
        with SavedForBackward(leaves.values()) as saved:
            execute(block, leaves)
        assert sorted(nbytes for _, nbytes in saved.storages) == sorted(
            item.nbytes for item in predict(block, "cpu", None)
        )


def test_accelerators_keep_the_softmax_in_fp32() -> None:
    block = blocks()["attention"]
    cuda = predict(block, "cuda", torch.float16)
    # The fp32 probabilities for softmax, their 16-bit copy for the product that follows.
    assert sorted(item.dtype.itemsize for item in cuda if item.elements == 2 * 17 * 17) == [2, 4]
    assert [item.dtype.itemsize for item in predict(block, "cpu", torch.float16) if item.elements == 2 * 17 * 17] == [2]
