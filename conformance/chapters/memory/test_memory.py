"""Check the bytes that autocast saves for backward, frees, and leaves alive after training steps."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.garbage import uncollected
from ...measure.storages import LiveStorages, SavedForBackward, bytes_by_dtype, without_masks
from ...oracles.symbolic.blocks import Saved, blocks, execute, predict, tensors
from ...oracles.symbolic.op_rules import has_one_derivative_of_linear
from ...workloads.mlp import mlp
from ...workloads.training import train_step
from .python_objects import collected_apart
from .support import check_saved_storages, random_states, scaler_state, sizes

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.needs("storages")]

BLOCKS = blocks()
ELEMENTS = 128 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10  # of the perceptron that is trained


def _saved(
    target: Target,
    block: str,
    rng: torch.Generator,
    dtype: torch.dtype | None,
    *,
    cache: bool = True,
    backward: bool = True,
) -> SavedForBackward:
    """Run the block's forward pass under the counter, in a region of `dtype` (None: outside any)."""
    leaves = tensors(BLOCKS[block], target.device, rng)
    region = nullcontext() if dtype is None else target.autocast(dtype, cache_enabled=cache)
    with SavedForBackward(leaves.values()) as saved, region:
        result = execute(BLOCKS[block], leaves)
    if backward:
        result.float().sum().backward()
    return saved


def _pairs(saved: list[Saved]) -> list[tuple[torch.dtype, int]]:
    return [(item.dtype, item.nbytes) for item in saved]


def _copies(block: str, target: Target, dtype: torch.dtype) -> int:
    """Return bytes of the 16-bit copies of weights and inputs among what the policy predicts to be saved."""
    predicted = predict(BLOCKS[block], target.device_type, dtype)
    return sum(item.nbytes for item in predicted if item.role != "activation")


@contract("AMP-MEMORY-001")
@pytest.mark.parametrize("block", ["linear", "mlp", "mse", "conv", "attention", "tied", "frozen"])
def test_saved_bytes_follow_the_policy(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, block: str
) -> None:
    check_saved_storages(case, target, BLOCKS[block], amp_dtype, rng)


@contract("AMP-MEMORY-002")
@pytest.mark.parametrize("where", ["outside", "disabled", "nested"])
@pytest.mark.parametrize("block", ["mlp", "attention"])
def test_fp32_keeps_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, block: str, where: str
) -> None:
    predicted = _pairs(predict(BLOCKS[block], target.device_type, None))
    around = target.autocast(amp_dtype) if where == "nested" else nullcontext()
    inner = nullcontext() if where == "outside" else target.autocast(amp_dtype, enabled=False)
    with around, inner:
        saved = _saved(target, block, rng, None, backward=False).storages
    case.equal("every storage", sizes(without_masks(saved, predicted)), sizes(predicted))
    floating = [storage for storage in saved if storage[0].is_floating_point]
    case.equal("floating-point dtypes", sorted(bytes_by_dtype(floating)), ["float32"])


@contract("AMP-MEMORY-003")
@pytest.mark.parametrize("block", ["saves", "costs", "conv"])
def test_activations_halve(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, block: str
) -> None:
    full = [pair for pair in _saved(target, block, rng, None).storages if pair[0].is_floating_point]
    low = [pair for pair in _saved(target, block, rng, amp_dtype).storages if pair[0].is_floating_point]
    case.note("fp32: bytes saved by dtype", bytes_by_dtype(full))
    case.note("AMP: bytes saved by dtype", bytes_by_dtype(low))
    copies = _copies(block, target, amp_dtype)
    activations = sum(nbytes for _, nbytes in low) - copies
    case.at_least("activations saved in fp32", sum(nbytes for _, nbytes in full), 1, "bytes")
    case.equal("twice the activations saved under AMP", 2 * activations, sum(nbytes for _, nbytes in full))


@contract("AMP-MEMORY-005")
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("uses", [2, deep("standard", 5)])
def test_weight_copies_are_counted(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, uses: int, cache: bool
) -> None:
    weight = torch.randn(31, 31, generator=rng).to(target.device).requires_grad_()
    # Not a leaf, which the cache would serve as well.
    inputs = torch.randn(5, 31, generator=rng).to(target.device).requires_grad_() * 1.0
    with SavedForBackward([weight, inputs]) as saved, target.autocast(amp_dtype, cache_enabled=cache):
        for _ in range(uses):
            torch.nn.functional.linear(inputs, weight)
    copies = [nbytes for _, nbytes in saved.storages if nbytes == 31 * 31 * 2]
    case.equal("16-bit copies of the weight", len(copies), 1 if cache else uses)
    case.equal("16-bit copies of the input", len(saved.storages) - len(copies), uses)
    case.equal("dtypes", sorted(bytes_by_dtype(saved.storages)), [str(amp_dtype).removeprefix("torch.")])


@contract("AMP-MEMORY-006")
@pytest.mark.parametrize(("block", "sign"), [("saves", 1), ("even", 0), ("costs", -1)], ids=["saves", "even", "costs"])
def test_break_even(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, block: str, sign: int
) -> None:
    parameters, inputs = BLOCKS[block].parameters, BLOCKS[block].inputs
    if has_one_derivative_of_linear(target.device_type):
        case.unsupported(f"{target.name} has a kernel of linear, of which backward keeps both operands")
    rows, features = inputs["x"]
    hidden, outputs = parameters["w1"][0], parameters["w2"][0]
    # fp32 saves the hidden activations; AMP their 16-bit form, and copies of the input and the second weight.
    gain = 2 * (rows * hidden - rows * features - hidden * outputs)
    full = _saved(target, block, rng, None).total
    low = _saved(target, block, rng, amp_dtype).total
    case.equal("bytes that AMP saves", full - low, gain)
    case.equal("sign of the saving", (gain > 0) - (gain < 0), sign)


@contract("AMP-MEMORY-007")
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_evaluation_keeps_nothing(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, mode: str
) -> None:
    kept: dict[str, int] = {}
    for name, context in (("with gradients", nullcontext()), ("without", getattr(torch, mode)())):
        with context:
            kept[name] = _saved(target, "mlp", rng, amp_dtype, backward=False).total
    case.at_least("bytes saved with gradients (control)", kept["with gradients"], 1, "bytes")
    case.equal("bytes saved without gradients", kept["without"], 0)


@contract("AMP-MEMORY-009")
def test_backward_frees_what_forward_kept(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    leaves = tensors(BLOCKS["mlp"], target.device, rng)
    with LiveStorages(leaves.values()) as live:
        with target.autocast(amp_dtype):
            loss = execute(BLOCKS["mlp"], leaves)
        kept = live.live_bytes
        loss.backward()
        after = live.live_bytes
    predicted = sum(item.nbytes for item in predict(BLOCKS["mlp"], target.device_type, amp_dtype))
    gradients = sum(leaf.numel() * 4 for leaf in leaves.values() if leaf.requires_grad)
    case.at_least("bytes alive after the forward pass (control)", kept, predicted, "bytes")
    # The loss itself is held here: one fp32 number.
    case.equal("bytes alive after backward", after, gradients + 4)


def _plain(target: Target, dtype: torch.dtype, model: torch.nn.Sequential, inputs: torch.Tensor) -> torch.Tensor:
    with target.autocast(dtype):
        return model(inputs)


def _decorated(target: Target, dtype: torch.dtype, model: torch.nn.Sequential, inputs: torch.Tensor) -> torch.Tensor:
    return torch.autocast(target.device_type, dtype=dtype)(model.forward)(inputs)


def _nested(target: Target, dtype: torch.dtype, model: torch.nn.Sequential, inputs: torch.Tensor) -> torch.Tensor:
    with target.autocast(dtype):
        hidden = model[:2](inputs)
        with target.autocast(dtype, enabled=False):
            hidden = model[2:4](hidden.float())
        with target.autocast(dtype, cache_enabled=False):
            return model[4:](hidden)


STYLES = {"plain": _plain, "decorated": _decorated, "nested": _nested}


def _after_each_step(
    target: Target, amp_dtype: torch.dtype, rng: torch.Generator, style: str, steps: int
) -> tuple[list[int], int]:
    """Return live bytes after each training step with its gradients dropped, and those of the optimizer's state.

    One step in five overflows and is skipped.
    """
    work = mlp(target.device, rng)
    scaler = torch.amp.GradScaler(target.device_type, growth_interval=3)
    non_finite = torch.full_like(work.batches[0][0], float("inf"))
    given = [non_finite, *work.model.parameters(), *(tensor for batch in work.batches for tensor in batch)]
    alive = []
    with uncollected(), LiveStorages(given) as live:
        for step in range(steps):
            inputs, labels = work.batch(step)
            output = STYLES[style](target, amp_dtype, work.model, non_finite if step % 5 == 3 else inputs)
            loss = work.loss(output.float(), labels)
            scaler.scale(loss).backward()
            scaler.step(work.optimizer)
            scaler.update()
            work.optimizer.zero_grad(set_to_none=True)
            del output, loss
            alive.append(live.live_bytes)
    state = [value for kept in work.optimizer.state.values() for value in kept.values()]
    return alive, sum(value.nbytes for value in state if isinstance(value, torch.Tensor))


@contract("AMP-MEMORY-030")
@pytest.mark.parametrize("style", STYLES)
def test_live_bytes_do_not_grow(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, style: str
) -> None:
    steps = case.samples(quick=8, standard=50 if style == "plain" else 20, full=200)
    alive, state = _after_each_step(target, amp_dtype, rng, style, steps)
    # Adam: two moments for each element and a step counter for each of six parameters, which may be 8 bytes or none.
    case.between("bytes of the optimizer's state", state, 2 * 4 * ELEMENTS, 2 * 4 * ELEMENTS + 6 * 8, "bytes")
    case.equal("bytes alive after the first step", alive[0], state + scaler_state(target, stepped=True))
    case.equal("growth after each later step", [nbytes - alive[0] for nbytes in alive[1:]], [0] * (len(alive) - 1))


@contract("AMP-MEMORY-011")
def test_scaler_lets_go(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    scaler = torch.amp.GradScaler(target.device_type)
    with collected_apart(), LiveStorages() as live:
        work = mlp(target.device, rng)
        for step in range(2):
            train_step(work, step, lambda: target.autocast(amp_dtype), scaler)
        held = live.live_bytes
        references = [weakref.ref(work.optimizer), weakref.ref(work.model)]
        del work
        gc.collect()
        left = live.live_bytes
    case.at_least("bytes alive while model and optimizer live (control)", held, 4 * 128 * 256, "bytes")
    case.equal(
        "optimizer and model still alive",
        [reference() is not None for reference in references],
        [False, False],
    )
    case.equal("bytes alive with the scaler alone", left, scaler_state(target, stepped=True))


@contract("AMP-MEMORY-012")
def test_checkpoint_keeps_its_input(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    from torch.utils.checkpoint import checkpoint

    leaves = tensors(BLOCKS["attention"], target.device, rng)
    kept: dict[str, int] = {}
    results = {}

    def segment(*given: torch.Tensor) -> torch.Tensor:
        return execute(BLOCKS["attention"], dict(zip(leaves, given, strict=True)))

    ways: dict[str, Callable[..., torch.Tensor]] = {
        "plain": segment,
        "checkpointed": functools.partial(checkpoint, segment, use_reentrant=False),
        "reentrantly checkpointed": functools.partial(checkpoint, segment, use_reentrant=True),
    }
    for name, way in ways.items():
        with LiveStorages(leaves.values()) as live:
            with target.autocast(amp_dtype):
                results[name] = way(*leaves.values())
            kept[name] = live.live_bytes
    output = results["plain"].numel() * 2
    predicted = sum(item.nbytes for item in predict(BLOCKS["attention"], target.device_type, amp_dtype))
    case.equal("bytes alive after the plain segment (control)", kept["plain"], predicted + output)
    allowed = output + random_states(target, len(leaves))
    for name in [*ways][1:]:
        case.at_most(f"bytes alive after the {name} segment", kept[name], allowed, "bytes")
        case.identical(f"output of the {name} segment", results[name], results["plain"])
