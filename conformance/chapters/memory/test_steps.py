"""Check that steps, evaluation and failed steps leak no memory, and that nothing is copied twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ...harness.check import Case, contract, deep
from ...harness.exhaustion import ran_out
from ...harness.targets import Target
from ...measure.garbage import uncollected
from ...measure.storages import LiveStorages, PeakStorages
from ...oracles.symbolic.blocks import blocks, execute, tensors
from .networks import Net, net
from .support import random_states, scaler_state

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.needs("storages")]

BLOCKS = blocks()
IMPOSSIBLE = 1 << 60  # bytes: more than any address space that torch allocates from


@pytest.fixture
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector out, so that what only it would free counts as a leak."""
    with uncollected():
        yield


def _step(target: Target, dtype: torch.dtype, work: Net, scaler: torch.amp.GradScaler, number: int) -> None:
    """A step with its gradients clipped; one in five overflows and is skipped, one in four adds up two batches."""
    for part in range(2 if number % 4 == 1 else 1):
        with target.autocast(dtype):
            loss = work.loss(number + part) * (float("inf") if number % 5 == 3 else 0.5)
        scaler.scale(loss).backward()
    scaler.unscale_(work.optimizer)
    torch.nn.utils.clip_grad_norm_(work.model.parameters(), 1.0)
    scaler.step(work.optimizer)
    scaler.update()
    work.optimizer.zero_grad(set_to_none=True)


@contract("AMP-MEMORY-030")
@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize(
    "name", ["convolutions", "transformer", deep("standard", "lstm"), deep("full", "checkpointed")]
)
def test_networks_do_not_grow(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    dtypes = case.supported(target)
    work = net(name, target.device, rng)
    scaler = torch.amp.GradScaler(target.device_type, growth_interval=3)
    alive = []
    with LiveStorages(work.held()) as live:
        for number in range(case.samples(quick=8, standard=50, full=200)):
            _step(target, dtypes[number % len(dtypes)], work, scaler, number)
            alive.append(live.live_bytes)
    state = [value for kept in work.optimizer.state.values() for value in kept.values()]
    expected = sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
    expected += scaler_state(target, stepped=True)
    case.equal("bytes alive after the first step", alive[0], expected)
    case.equal(f"growth over {len(alive)} steps", [now - alive[0] for now in alive[1:]], [0] * (len(alive) - 1))


def _weights(device: torch.device, rng: torch.Generator) -> dict[str, torch.Tensor]:
    shapes = {"used": (41, 31), "twice": (31, 31), "bias": (41,), "unused": (29, 31), "frozen": (23, 31)}
    weights = {name: torch.randn(shape, generator=rng).to(device).requires_grad_() for name, shape in shapes.items()}
    weights["frozen"].requires_grad_(False)
    weights["viewed"] = torch.randn(38, 31, generator=rng).to(device).requires_grad_()
    weights["view"] = weights["viewed"][::2]
    return weights


@contract("AMP-MEMORY-031")
@pytest.mark.parametrize("mode", ["enable_grad", "no_grad"])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
def test_cache_holds_one_copy_of_what_it_may(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, mode: str, cache: bool
) -> None:
    weights = _weights(target.device, rng)
    x = torch.randn(5, 31, generator=rng).to(target.device)
    linear = torch.nn.functional.linear
    with LiveStorages([*weights.values(), x]) as live:
        with target.autocast(amp_dtype, cache_enabled=cache):
            with getattr(torch, mode)():
                for _ in range(3):
                    linear(x, weights["used"], weights["bias"])
                    linear(linear(x, weights["twice"]), weights["twice"])
                    linear(x, weights["frozen"])
                    linear(x, weights["view"])
            inside = live.live_bytes
        after = live.live_bytes
    case.equal("bytes that the cache holds in the region", inside, 2 * (41 * 31 + 41 + 31 * 31) if cache else 0)
    case.equal("bytes alive after it", after, 0)


@contract("AMP-MEMORY-032")
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize(
    "model", ["transformer", *(deep("standard", name) for name in ("mlp", "residual", "language"))]
)
def test_evaluation_holds_no_copies(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, model: str, mode: str
) -> None:
    block = BLOCKS[model]
    leaves = tensors(block, target.device, rng)
    alive = []
    with PeakStorages(leaves.values()) as live:
        for _ in range(3):
            with getattr(torch, mode)(), target.autocast(amp_dtype):
                loss = execute(block, leaves)
            del loss
            alive.append(live.live_bytes)
        with target.autocast(amp_dtype):
            kept = execute(block, leaves)
            with_gradients = live.live_bytes
    case.equal("bytes alive after each of three evaluations", alive, [0, 0, 0])
    case.at_least("bytes alive after a forward pass with gradients (control)", with_gradients, 1, "bytes")
    case.true("the control has a graph", kept.requires_grad)


@contract("AMP-MEMORY-032")
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_evaluation_takes_no_more_for_more_layers(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, mode: str
) -> None:
    weights = [torch.randn(16, 16, generator=rng).to(target.device) for _ in range(12)]
    x = torch.randn(64, 16, generator=rng).to(target.device)
    peaks = []
    for layers in (3, 12):
        # Nothing of weights without a gradient is cached, so each copy lives as long as its layer runs.
        with PeakStorages([*weights, x]) as live, getattr(torch, mode)(), target.autocast(amp_dtype):
            h = x
            for weight in weights[:layers]:
                h = torch.nn.functional.linear(h, weight)
            del h
        peaks.append(live.peak_bytes)
    # Two activations and a weight in 16 bit at a time, in the first layer the input's copy for one of the former.
    case.equal("peak of evaluation with 3 and with 12 layers", peaks, [2 * (2 * 64 * 16 + 16 * 16)] * 2)


@contract("AMP-MEMORY-034")
def test_micro_batches_keep_gradients_alone(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    block = BLOCKS["residual"]
    leaves = tensors(block, target.device, rng)
    gradients = sum(leaf.nbytes for leaf in leaves.values() if leaf.requires_grad)
    scaler = torch.amp.GradScaler(target.device_type)
    alive = []
    with LiveStorages(leaves.values()) as live:
        for _ in range(4):
            with target.autocast(amp_dtype):
                loss = execute(block, leaves)
            scaler.scale(loss).backward()
            del loss
            alive.append(live.live_bytes)
    expected = gradients + scaler_state(target)
    case.equal("bytes alive after each micro-batch: gradients and the scaler's state", alive, [expected] * 4)


@contract("AMP-MEMORY-036")
@pytest.mark.parametrize("scale", [1.0, 2.0**16], ids=["1", "65536"])
def test_unscaling_copies_no_gradient(case: Case, target: Target, rng: torch.Generator, scale: float) -> None:
    weights = [torch.randn(64, 32 + number, generator=rng).to(target.device).requires_grad_() for number in range(3)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=scale)
    scaler.scale(sum((weight.sum() for weight in weights), torch.zeros((), device=target.device))).backward()
    with PeakStorages(weight.grad for weight in weights if weight.grad is not None) as live:
        scaler.unscale_(optimizer)
    # The reciprocal of the scale in float64 and float32, found_inf, and what a check for infinities reduces to.
    case.at_most("peak of bytes made while gradients are unscaled", live.peak_bytes, 256, "bytes")
    case.equal("bytes of the smallest gradient (what a copy would take)", 4 * 64 * 32, min(w.nbytes for w in weights))
    case.identical("a gradient", torch.as_tensor(weights[0].grad), torch.ones_like(weights[0]))


@contract("AMP-MEMORY-038")
@pytest.mark.parametrize("reentrant", [False, deep("standard", True)], ids=["", "reentrant"])
@pytest.mark.parametrize("model", ["mlp", "transformer", deep("standard", "residual"), deep("standard", "language")])
def test_checkpointed_network_keeps_its_loss(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, model: str, reentrant: bool
) -> None:
    block = BLOCKS[model]
    leaves = tensors(block, target.device, rng)
    names = list(leaves)

    def body(*values: torch.Tensor) -> torch.Tensor:
        return execute(block, dict(zip(names, values, strict=True)))

    def plain() -> torch.Tensor:
        return body(*leaves.values())

    def checkpointed() -> torch.Tensor:
        made: torch.Tensor = checkpoint(body, *leaves.values(), use_reentrant=reentrant, preserve_rng_state=states > 0)
        return made

    states = random_states(target, len(leaves))
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for arm, run in (("plain", plain), ("checkpointed", checkpointed)):
        torch.manual_seed(case.seed)
        for leaf in leaves.values():
            leaf.grad = None
        with LiveStorages(leaves.values()) as live:
            with target.autocast(amp_dtype):
                loss = run()
            after = live.live_bytes
        loss.backward()
        gradients[arm] = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        if arm == "plain":
            # Nothing in it is random: where the states of generators would hide what is kept, none are stored.
            states = states if after > states else 0
            case.at_least("plain: bytes alive after the region (control)", after, states + 1, "bytes")
        else:
            case.between("checkpointed: bytes alive after the region", after, 4, 4 + states, "bytes")
    case.equal("leaves with a gradient", sorted(gradients["checkpointed"]), sorted(gradients["plain"]))
    if target.device_type != "cpu" and model != "mlp":
        return  # backward of attention, convolutions and embeddings adds up in no fixed order there
    for name, gradient in gradients["plain"].items():
        case.identical(f"gradient of {name}", gradients["checkpointed"][name], gradient)


@contract("AMP-MEMORY-038")
@pytest.mark.parametrize("stops", [True, False], ids=["stops", "runs-on"])
@pytest.mark.usefixtures("_uncollected")
def test_recomputed_tensors_are_freed(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, stops: bool
) -> None:
    """Two backward passes of one graph, which keeps no tensor that the first has recomputed for the second."""
    leaves = [torch.randn(64, 64, generator=rng).to(target.device).requires_grad_() for _ in range(2)]
    recomputed: list[int] = []

    def part(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(functional.linear(x, weight))
            recomputed.append(x.nbytes)
        return x * 2

    gradients = sum(leaf.nbytes for leaf in leaves)
    with LiveStorages(leaves) as live:
        with set_checkpoint_early_stop(stops), target.autocast(amp_dtype):
            loss = checkpoint(part, *leaves, use_reentrant=False).float().sum()
        start = live.live_bytes
        for number, kept in enumerate((True, False), 1):
            before = len(recomputed)
            loss.backward(retain_graph=kept)
            case.at_least(f"tensors recomputed for backward {number} (control)", len(recomputed) - before, 2)
            alive = live.live_bytes - start - gradients
            case.at_most(f"bytes alive after backward {number}, but for gradients", alive, recomputed[0] // 2)


def _exhausted(device: torch.device) -> None:
    try:
        torch.empty(IMPOSSIBLE, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError) as error:
        if ran_out(error):
            raise
    # Some allocators refuse such a size as no size at all.
    raise torch.OutOfMemoryError("out of memory")


def _fails_forward(target: Target, work: Net) -> AbstractContextManager[object]:
    """Make the model run out of memory in its last layer."""
    return work.last.register_forward_pre_hook(lambda *_: _exhausted(target.device))


def _fails_backward(target: Target, work: Net) -> AbstractContextManager[object]:
    """Make backward run out of memory when it comes to the input of the last layer."""

    def hook(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        inputs[0].register_hook(lambda gradient: _exhausted(target.device))

    return work.last.register_forward_pre_hook(hook)


FAILURES: dict[str, Callable[[Target, Net], AbstractContextManager[object]]] = {
    "forward": _fails_forward,
    "backward": _fails_backward,
}


@contract("AMP-MEMORY-035")
@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("name", ["transformer", deep("standard", "convolutions")])
def test_a_step_that_ran_out_leaves_nothing(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str, where: str
) -> None:
    state = scaler_state(target)
    work = net(name, target.device, rng, dropout=0.0)
    scaler = torch.amp.GradScaler(target.device_type)
    with LiveStorages(work.held()) as live:
        with target.autocast(amp_dtype):
            before = work.loss(0)
        expected = live.live_bytes
        with FAILURES[where](target, work):
            case.true("the failed step ran out of memory (control)", _runs_out(target, amp_dtype, work, scaler))
        _let_backward_end(target)
        gradients = sum(p.grad.nbytes for p in work.model.parameters() if p.grad is not None)
        # The scaler's state is made where the failed step came to scale its loss.
        left = live.live_bytes - expected - gradients - (state if where == "backward" else 0)
        case.equal("bytes left by the failed step, but for gradients and the scaler's state", left, 0)
        work.optimizer.zero_grad(set_to_none=True)
        with target.autocast(amp_dtype):
            again = work.loss(0)
        if target.device_type == "cpu" or name == "transformer":
            case.identical("loss of the next step", again, before)
        else:  # a library may choose another algorithm for convolutions where less memory is free
            case.true("the loss of the next step is finite", bool(again.isfinite()))
    case.equal("autocast after the failed step", torch.is_autocast_enabled(target.device_type), False)
    case.equal("loss scale after the failed step", scaler.get_scale(), 65536.0)


def _let_backward_end(target: Target) -> None:
    """Wait for a backward that failed: autograd's thread for a device reports it before it frees its tensors.

    It takes its next task when it has (Engine::thread_main, torch/csrc/autograd/engine.cpp).
    """
    torch.ones((), device=target.device, requires_grad=True).backward()


def _runs_out(target: Target, dtype: torch.dtype, work: Net, scaler: torch.amp.GradScaler) -> bool:
    try:
        with target.autocast(dtype):
            loss = work.loss(0)
        scaler.scale(loss).backward()
    except (RuntimeError, MemoryError) as error:
        return ran_out(error)
    return False
