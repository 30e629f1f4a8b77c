"""The byte counters, tried on tensors whose bytes are known."""

from __future__ import annotations

import torch

from conformance.measure.storages import (
    LiveStorages,
    PeakStorages,
    SavedForBackward,
    bytes_by_dtype,
    state_tensors,
    tensor_bytes,
    without_bookkeeping,
    without_masks,
)


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


def test_the_most_bytes_alive_are_kept_in_mind() -> None:
    with PeakStorages() as live:
        a = torch.zeros(10)
        b = a + 1
        del b
        a.add_(1)
    assert (live.peak_bytes, live.counted_bytes) == (80, 40)


def test_what_libraries_keep_for_themselves_is_left_out() -> None:
    storages = [(torch.uint8, 1 << 20), (torch.int64, 8), (torch.int64, 24), (torch.bool, 8), (torch.float16, 0)]
    assert without_bookkeeping([*storages, (torch.float32, 4)]) == [
        (torch.int64, 24),
        (torch.bool, 8),
        (torch.float32, 4),
    ]


def test_a_mask_stands_for_the_result_that_it_replaces() -> None:
    low, full, mask = (torch.bfloat16, 60), (torch.float32, 400), (torch.bool, 30)
    assert sorted(map(str, without_masks([full, mask], [low, full]))) == sorted(map(str, [low, full]))
    assert without_masks([low, mask], [low]) == [low]  # beside it
    assert without_masks([mask, mask], [low]) == [low]


def test_a_mask_excuses_nothing_else() -> None:
    low, mask = (torch.bfloat16, 60), (torch.bool, 30)
    assert without_masks([low, (torch.bool, 31)], [low]) == [low, (torch.bool, 31)]
    assert without_masks([(torch.int64, 240)], [low]) == [(torch.int64, 240)]
    assert sorted(map(str, without_masks([low, low, mask], [low]))) == sorted(map(str, [low, low]))
    assert without_masks([(torch.float32, 120), mask], [low]) == [(torch.float32, 120), low]
    assert without_masks([mask], [mask]) == [mask]
    assert without_masks([], [low]) == []
