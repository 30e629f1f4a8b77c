"""Check the bytes that ops and networks save, the live bytes at each point of a step, and its peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.storages import PeakStorages
from ...oracles.symbolic.blocks import UNARY, Block, after_linear, blocks, chain, predict, tensors
from .step_memory import UPDATES, whole_step
from .support import SCALARS, Training, check_saved_storages, held, network_exception, region, step_as_predicted

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.needs("storages")]

BLOCKS = blocks()
SEVERAL = [name.removeprefix("op-") for name in BLOCKS if name.startswith("op-")]
MODELS = ("residual", "transformer", "language", "lstm", "upsampler")
# Those that a quick run tries: one of each kind.
QUICK = {
    *("relu", "gelu", "tanh", "softmax", "log_softmax", "pow", "dropout", "mm", "conv1d", "layer_norm", "batch_norm"),
    *("embedding", "cat", "mul", "nll_loss", "residual", "transformer", "saves", "costs"),
}
# rows, width and layers of a chain: activations outweigh the copies, are as heavy, and are lighter.
REGIMES = {"saves": (96, 16, 6), "even": (32, 16, 4), "costs": (8, 32, 4)}


def _by_depth(*names: str) -> list[Any]:
    return [name if name in QUICK else deep("standard", name) for name in names]


@contract("AMP-MEMORY-014")
@pytest.mark.parametrize("op", _by_depth(*UNARY, *SEVERAL))
def test_operation_keeps_what_its_list_says(case: Case, target: Target, rng: torch.Generator, op: str) -> None:
    block = BLOCKS.get(f"op-{op}") or after_linear(op)
    for dtype in case.supported(target):
        check_saved_storages(case, target, block, dtype, rng)
        check_saved_storages(case, target, block, dtype, rng, cache=False)
    # The control: outside of a region the same rules hold, with nothing cast.
    check_saved_storages(case, target, block, None, rng)


@contract("AMP-MEMORY-015")
@pytest.mark.parametrize("model", MODELS)
def test_network_keeps_what_its_operations_do(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, model: str
) -> None:
    block = BLOCKS[model]
    check_saved_storages(case, target, block, amp_dtype, rng, whole=True)
    full = sum(item.nbytes for item in predict(block, target.device_type, None))
    low = sum(item.nbytes for item in predict(block, target.device_type, amp_dtype))
    case.note("bytes saved under AMP over fp32", round(low / full, 4))


def _block(name: str) -> Block:
    return chain(*REGIMES[name]) if name in REGIMES else BLOCKS[name]


@contract("AMP-MEMORY-016")
@pytest.mark.parametrize("cache", [True, deep("standard", False)], ids=["cache", "no-cache"])
@pytest.mark.parametrize("model", _by_depth("mlp", *MODELS))
def test_bytes_alive_at_each_point(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, model: str, cache: bool
) -> None:
    block = BLOCKS[model]
    for arm, dtype in (("AMP", amp_dtype), ("fp32", None)):
        seen, predicted = step_as_predicted(case, target, block, dtype, rng, cache=cache)
        case.equal(f"{arm}: at the end of the forward pass, in the region", seen.in_region, predicted.in_region)
        case.equal(f"{arm}: after the region", seen.after_region, predicted.after_region)
        case.equal(f"{arm}: after backward", seen.gradients, predicted.gradients)


@contract("AMP-MEMORY-017")
@pytest.mark.parametrize("model", _by_depth("mlp", *MODELS, *REGIMES))
def test_peak_of_live_bytes(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, model: str
) -> None:
    block = _block(model)
    for arm, dtype in (("AMP", amp_dtype), ("fp32", None)):
        seen, predicted = step_as_predicted(case, target, block, dtype, rng)
        case.between(f"{arm}: peak of a step", seen.high, predicted.low, predicted.high, "bytes")


@contract("AMP-MEMORY-017")
@pytest.mark.parametrize("regime", ["costs", deep("standard", "saves")])
@pytest.mark.parametrize("optimizer", UPDATES)
def test_peak_of_a_step_with_its_optimizer(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, optimizer: str, regime: str
) -> None:
    block = chain(*REGIMES[regime])

    def step(dtype: torch.dtype | None, *, manual: bool = False) -> tuple[int, int]:
        leaves = tensors(block, target.device, rng)
        with PeakStorages(leaves.values()) as live:
            training = Training(target, block, dtype, leaves, optimizer, manual=manual)
            training.step()
            state = live.counted_bytes
            live.peak_bytes = 0
            training.step()
        return state, live.peak_bytes

    words = network_exception(target, block, tensors(block, target.device, rng))
    for arm, dtype in (("AMP", amp_dtype), ("fp32", None)):
        predicted = whole_step(block, target.device_type, dtype, UPDATES[optimizer])
        state, peak = step(dtype)
        most = predicted.state + SCALARS
        case.between(f"{arm}: the optimizer's state", state, predicted.state, most, "bytes")
        if words:
            case.at_most(
                f"{arm}: peak of a second step, and with the same manual casts", peak, step(dtype, manual=True)[1]
            )
            continue
        low, high = predicted.state + predicted.low, most + predicted.high
        case.between(f"{arm}: peak of a second step", peak, low, high, "bytes")


@contract("AMP-MEMORY-018")
@pytest.mark.parametrize("regime", REGIMES)
def test_gain_of_a_chain(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, regime: str) -> None:
    rows, width, layers = REGIMES[regime]
    block = chain(rows, width, layers)
    arms = region(target, None), region(target, amp_dtype)
    full, low = (held(target, block, opened, tensors(block, target.device, rng)) for opened in arms)
    # fp32 saves a ReLU's result for each layer but the last, in four bytes; AMP in two, plus a copy of the input and
    # one of each weight in two bytes. The mean is of four bytes and of two.
    gain = 2 * rows * width * (layers - 2) - 2 * width * width * layers + 2
    case.equal("bytes that AMP saves at the end of the forward pass", full.in_region - low.in_region, gain)
    case.equal("kind of regime", {True: "saves", False: "costs"}[gain > 2] if abs(gain) > 2 else "even", regime)
    case.note("bytes that AMP saves at the peak", full.high - low.high, "bytes")
    case.note("fp32: peak of a step", full.high, "bytes")
    case.note("AMP: peak of a step", low.high, "bytes")
