"""What the speed chapter times: its costs on paper against torch's own count, and its two arms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conformance.chapters.speed import operations, training_steps
from conformance.chapters.speed.experiment import Experiment
from conformance.chapters.speed.operations import operation
from conformance.chapters.speed.training_steps import step
from conformance.harness.expectations import KEYS, OPERATION_SIZES, OPERATIONS, STEP_SIZES, STEPS
from conformance.measure.allocator import WORKSPACES
from conformance.measure.onednn import runs_lstm
from conformance.measure.storages import LiveStorages

CPU, META = torch.device("cpu"), torch.device("meta")
KINDS = ("cpu", "cuda")


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    yield


def _require(name: str) -> None:
    """Skip where the region of a CPU cannot run the subject (AMP-CAST-065 is waived there)."""
    if "lstm" in name and not runs_lstm():
        pytest.skip("oneDNN has no bfloat16 LSTM on this processor, and the region raises")


def _counted(work: Any) -> float:
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", OPERATION_SIZES)
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "lstm"])
def test_operations_cost_what_torch_counts(name: str, size: str, kind: str) -> None:
    subject = operation(name, size, kind)
    assert _counted(subject.arms(META, _outside)[0]) == subject.flops
    assert subject.least_flops <= subject.flops


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", STEP_SIZES)
@pytest.mark.parametrize("name", [name for name in STEPS if name != "step-lstm"])
def test_steps_cost_what_torch_counts(name: str, size: str, kind: str) -> None:
    subject = step(name, size, kind)
    work = subject.make(META)
    inputs, target = work.batch(0)
    counted = _counted(lambda: work.loss(work.model(inputs), target).backward())
    if name == "step-transformer":
        # torch counts both halves of the scores, of which causal attention needs one.
        batch, length, width = inputs.shape
        counted -= 6.0 * batch * length * length * width
    assert counted == subject.flops


@pytest.mark.parametrize("name", ["lstm", "step-lstm"])
def test_recurrent_layers_cost_their_products(name: str) -> None:
    """One product of all weights for each row, forward, and two backward but for the first layer's input."""
    if name == "lstm":
        assert operation(name, "compute", "cuda").flops == 2 * 64 * 512 * (4 * 1024 * 2 * 1024)
    else:
        weights = 2 * 4 * 1024 * 2 * 1024
        assert step(name, "compute", "cuda").flops == 2 * 64 * 256 * (3 * weights - 4 * 1024 * 1024)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STEPS)
def test_weights_are_counted_but_for_biases_and_norms(name: str, kind: str) -> None:
    subject = step(name, "compute", kind)
    parameters = list(subject.make(META).model.parameters())
    matrices = sum(parameter.numel() for parameter in parameters if parameter.ndim > 1)
    assert matrices <= subject.weights <= sum(parameter.numel() for parameter in parameters)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_both_arms_of_a_step_train(name: str, scaled: bool, seed: int) -> None:
    _require(name)
    dtype = torch.float16 if scaled and name != "step-lstm" else torch.bfloat16
    torch.manual_seed(seed)
    for arm in step(name, "small", "cpu").arms(CPU, lambda: torch.autocast("cpu", dtype), scaled=scaled):
        losses = [arm() for _ in range(2)]
        assert all(isinstance(loss, torch.Tensor) and bool(loss.isfinite()) for loss in losses)
        # A step that overflows is skipped, changes nothing, and takes less time.
        assert losses[0].item() != losses[1].item()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_amp_arm_of_an_operation_runs_in_low_precision(name: str) -> None:
    _require(name)
    fp32, amp = operation(name, "middle", "cpu").arms(CPU, lambda: torch.autocast("cpu", torch.bfloat16))
    full, low = fp32(), amp()
    assert isinstance(full, torch.Tensor)
    assert isinstance(low, torch.Tensor)
    assert (full.dtype, low.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(low.float(), full, rtol=0.1, atol=0.1 * float(full.abs().max()))


@pytest.mark.parametrize("name", [*OPERATIONS, *STEPS])
def test_either_arm_fits_into_the_memory_that_is_asked_for(name: str) -> None:
    _require(name)
    subject = Experiment(name, "compute", torch.bfloat16, "fp32").make("cpu")

    def region() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    with LiveStorages() as live:
        if isinstance(subject, training_steps.Step):
            arms = subject.arms(CPU, region, scaled=False)
        else:
            arms = subject.arms(CPU, region)
        results = [arm() for arm in arms]
        assert live.live_bytes <= subject.nbytes
    del results


@pytest.mark.parametrize("name", [*OPERATIONS, *STEPS])
def test_halving_the_batch_halves_the_cost(name: str) -> None:
    make = training_steps.step if name in STEPS else operations.operation
    whole, half = (make(name, "compute", "cuda", shrink) for shrink in (0, 1))
    parts = 8 if name == "matmul" else 2  # a square product has no batch
    assert half.flops == pytest.approx(whole.flops / parts, rel=1e-6)
    assert half.nbytes < whole.nbytes


def test_names_are_those_of_expectations() -> None:
    assert operations.OPERATIONS == OPERATIONS
    assert training_steps.STEPS == STEPS
    for subject, sizes in [(name, OPERATION_SIZES) for name in OPERATIONS] + [(name, STEP_SIZES) for name in STEPS]:
        for size in sizes:
            spec = Experiment(subject, size, torch.float16, "fp32")
            assert spec.key in KEYS
            assert spec.make("cpu").size == spec.make("cuda").size == size


def test_libraries_take_what_they_take_elsewhere() -> None:
    assert operations.WORKSPACE == WORKSPACES
