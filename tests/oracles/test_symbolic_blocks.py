"""Test predicted saved and live bytes against torch on the CPU, and against CUDA's policies applied manually."""

from __future__ import annotations

import pytest
import torch

from conformance.chapters.memory.kernel_exceptions import KernelException, kernel_exceptions
from conformance.chapters.memory.step_memory import step_bytes
from conformance.measure.storages import PeakStorages, SavedForBackward, saved_by, without_bookkeeping
from conformance.oracles import manual_cast
from conformance.oracles.symbolic.blocks import (
    Block,
    Step,
    chain,
    evaluate,
    every_block,
    execute,
    predict,
    tensors,
)
from conformance.oracles.symbolic.tensors import SymbolicRegion, Value

BLOCKS = every_block()
CPU = torch.device("cpu")


def _leaves(block: Block) -> dict[str, torch.Tensor]:
    return tensors(block, CPU, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_runs_and_is_predicted(name: str) -> None:
    leaves = _leaves(BLOCKS[name])
    with SavedForBackward(leaves.values()) as saved:
        execute(BLOCKS[name], leaves)
    predicted = [(item.dtype, item.nbytes) for item in predict(BLOCKS[name], "cpu", None)]
    assert sorted(map(str, without_bookkeeping(saved.storages))) == sorted(map(str, predicted))


# ManualCast does not follow what C++ makes of listed operations, and the CPU has no fused kernel for dropout.
_NOT_BY_HAND = ("dropout", "square")


@pytest.mark.parametrize(
    "name", [name for name, block in BLOCKS.items() if not {step.op for step in block.steps} & set(_NOT_BY_HAND)]
)
def test_the_lists_of_cuda_carried_out_by_hand_keep_what_is_predicted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eligible = manual_cast.eligible
    monkeypatch.setattr(manual_cast, "eligible", lambda value, device_type: eligible(value, "cpu"))
    leaves = _leaves(BLOCKS[name])
    with SavedForBackward(leaves.values()) as saved, manual_cast.ManualCast("cuda", torch.bfloat16):
        execute(BLOCKS[name], leaves)
    predicted = [(item.dtype, item.nbytes) for item in predict(BLOCKS[name], "cuda", torch.bfloat16)]
    assert sorted(map(str, without_bookkeeping(saved.storages))) == sorted(map(str, predicted))


def test_accelerators_keep_the_softmax_in_fp32() -> None:
    block = BLOCKS["attention"]
    cuda = predict(block, "cuda", torch.float16)
    # The fp32 probabilities for softmax, their 16-bit copy for the product that follows.
    assert sorted(item.dtype.itemsize for item in cuda if item.elements == 2 * 17 * 17) == [2, 4]
    assert [item.dtype.itemsize for item in predict(block, "cpu", torch.float16) if item.elements == 2 * 17 * 17] == [2]


def test_a_kernel_that_keeps_something_else_is_named() -> None:
    block = BLOCKS["transformer"]
    assert kernel_exceptions(evaluate(block, "cpu", torch.bfloat16), CPU, saved_by) == []
    # A GPU saves dropout's mask as bool, the CPU as noise of the input's type.
    assert kernel_exceptions(evaluate(block, "cuda", torch.bfloat16), CPU, saved_by) == [
        KernelException("dropout", None)
    ]


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("name", BLOCKS)
def test_casts_by_hand_keep_what_is_predicted(name: str, cache: bool) -> None:
    leaves = _leaves(BLOCKS[name])
    with SavedForBackward(leaves.values()) as saved, manual_cast.ManualCast("cpu", torch.bfloat16, cache=cache):
        execute(BLOCKS[name], leaves)
    predicted = [(item.dtype, item.nbytes) for item in predict(BLOCKS[name], "cpu", torch.bfloat16, cache=cache)]
    assert sorted(map(str, without_bookkeeping(saved.storages))) == sorted(map(str, predicted))


def test_the_recipe_of_the_forum_costs_what_was_reported() -> None:
    # discuss.pytorch.org/t/134442: three Linear layers of 4096 with ReLU, 512 rows, RTX 3080: 98.6 MB more under AMP.
    block = chain(512, 4096, 3)
    full, low = (step_bytes(block, "cuda", dtype).in_region for dtype in (None, torch.float16))
    assert low - full == pytest.approx(925_018_112 - 826_428_416, rel=0.03)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "width", "layers"), [(256, 64, 16), (16, 128, 3)], ids=["activations", "weights"])
def test_the_peak_lies_within_its_bounds(rows: int, width: int, layers: int, dtype: torch.dtype | None) -> None:
    block = chain(rows, width, layers)
    leaves = _leaves(block)
    with PeakStorages(leaves.values()) as live:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = execute(block, leaves)
        loss.backward()
    bounds = step_bytes(block, "cpu", dtype)
    assert bounds.low <= live.peak_bytes <= bounds.high


def test_the_bounds_of_one_layer_by_hand() -> None:
    # x 3x5, weight 7x5, no region: result 84 bytes, mean 4. Backward: gradient of the mean 4, of the result 84 (twice
    # at most), of the weight 140 (twice).
    steps = (Step("linear", ("x", "w"), "h"), Step("mean", ("h",), "loss"))
    block = Block("one", {"x": (3, 5)}, {"w": (7, 5)}, steps)
    seen = step_bytes(block, "cpu", None)
    assert (seen.in_region, seen.after_region, seen.gradients) == (4, 4, 140)
    assert seen.low == 4 + 140  # behind backward: the mean and the weight's gradient
    assert seen.high == 4 + 4 + 84 + 140 + 140


def test_nothing_is_kept_without_a_gradient() -> None:
    region = SymbolicRegion("cpu", None, cache=True)
    x = Value("x", (3,), torch.float32, False, leaf="input")
    assert not region.op((x,), (3,), torch.float32, saves_result=True).grad
    assert region.saved == {}
