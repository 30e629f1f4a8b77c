"""Casts in whole models, in composites of several ops, and through every documented way to call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from conformance.harness.check import Case, contract, deep
from conformance.harness.targets import Target
from conformance.measure.precision import repeatable_convolutions
from conformance.oracles.cast_trace import CastTrace
from conformance.oracles.dtype_stream import DtypeStream, Op, first_difference
from conformance.oracles.hand_cast import HandCast, casts_last_first
from conformance.oracles.op_samples import Inputs
from conformance.workloads.cast_models import Program, programs

EVERYWHERE = ("cpu", "fake:cuda", "cuda", "fake:xpu", "xpu")
CUDA_OR_CPU = ("cpu", "fake:cuda", "cuda")
REAL = ("cpu", "cuda", "xpu")


@functools.cache
def _mode(target: Target) -> contextlib.AbstractContextManager[Any]:
    """One mode for all cases of a target: making a fake mode formats the whole stack of its caller."""
    return target.mode()


@functools.cache
def _last_first(target: Target) -> bool:
    """The order of casts does not depend on the values or the case, so it is read once."""
    with _mode(target):
        return casts_last_first(target.device, lambda: target.autocast(torch.bfloat16))


@contextlib.contextmanager
def _below(target: Target) -> Iterator[DtypeStream]:
    """Watch what runs below autocast; fake kernels that ask for hardware are answered without it."""
    with CastTrace(partial(tuple)), DtypeStream() as stream:
        yield stream


@dataclass(frozen=True)
class Ran:
    """One forward and backward pass of a program: its streams, and what came of it by name."""

    forward: list[Op]
    backward: list[Op]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Given:
    """A program, what it is given, and where."""

    program: Program
    target: Target
    amp_dtype: torch.dtype
    seed: int
    inputs: torch.dtype = torch.float32
    lowered: bool = False

    def run(self, *, by_hand: bool) -> Ran:
        """Run it in a region, or with the casts written in, on the same values each time."""
        target, amp_dtype = self.target, self.amp_dtype
        with _mode(target), repeatable_convolutions(), _attention(target):
            weights, inputs = self._tensors()
            region = (
                HandCast(target.device_type, amp_dtype, last_first=_last_first(target))
                if by_hand
                else target.autocast(amp_dtype)
            )
            with region, _below(target) as ahead:
                output, loss = self.program(weights, inputs)
            tensors = {"the output": output, "the loss": loss}
            if target.is_fake:
                return Ran(ahead.floating, [], tensors)
            with _below(target) as back:
                loss.backward()
            buffers = {name: weight for name, weight in weights.items() if not weight.requires_grad}
            gradients = {
                f"the gradient of {name}": weight.grad for name, weight in weights.items() if weight.requires_grad
            }
            return Ran(ahead.floating, back.floating, {**tensors, **buffers, **gradients})

    def _tensors(self) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        draw = Inputs([torch.float32], self.target.device, self.seed, self.target.is_fake).f
        low = self.program.lowered if self.lowered else ()
        weights = {
            name: weight.to(self.amp_dtype) if name.startswith(tuple(low)) and weight.is_floating_point() else weight
            for name, weight in self.program.weights(draw).items()
        }
        trained = () if self.target.is_fake else [name for name, _ in self.program.network.named_parameters()]
        for name in trained:
            weights[name].requires_grad_()
        inputs = self.program.inputs(draw, self.target.device)
        return weights, tuple(x.to(self.inputs) if x.is_floating_point() else x for x in inputs)


@contextlib.contextmanager
def _attention(target: Target) -> Iterator[None]:
    """Attention by the CPU's own choice; elsewhere written out, since fused backward passes may add with atomics.

    To choose a kernel, torch 2.6 to 2.8 asks the hardware that fake tensors lack.
    """
    if target.device_type == "cpu":
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


MODELS = ["cnn", "transformer", "lstm", "dlrm"]


def _given(model: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, **types: Any) -> Given:
    return Given(programs()[model], target, amp_dtype, rng.initial_seed(), **types)


def _same_stream(case: Case, what: str, seen: list[Op], predicted: list[Op]) -> None:
    case.at_least(f"ops of {what}", len(seen), 10)
    case.equal(f"first op of {what} that is not as predicted", first_difference(seen, predicted), None)


def _low(stream: list[Op], amp_dtype: torch.dtype) -> int:
    return sum(op.computes and amp_dtype in op.outputs for op in stream)


@contract("AMP-CAST-060", on=EVERYWHERE)
@pytest.mark.parametrize("model", MODELS)
def test_forward_stream(case: Case, target: Target, amp_dtype: torch.dtype, model: str, rng: torch.Generator) -> None:
    given = _given(model, target, amp_dtype, rng)
    seen, predicted = given.run(by_hand=False), given.run(by_hand=True)
    _same_stream(case, "the forward pass", seen.forward, predicted.forward)
    case.at_least(f"ops that give {amp_dtype}", _low(seen.forward, amp_dtype), 3)


@contract("AMP-CAST-061", on=REAL)
@pytest.mark.parametrize("model", MODELS)
def test_backward_stream(case: Case, target: Target, amp_dtype: torch.dtype, model: str, rng: torch.Generator) -> None:
    given = _given(model, target, amp_dtype, rng)
    seen, predicted = given.run(by_hand=False), given.run(by_hand=True)
    _same_stream(case, "the backward pass", seen.backward, predicted.backward)
    case.at_least(f"ops that give {amp_dtype}", _low(seen.backward, amp_dtype), 3)


def _same_bits(case: Case, seen: Ran, wanted: Ran) -> None:
    case.equal("what came of it", list(seen.tensors), list(wanted.tensors))
    for name, tensor in seen.tensors.items():
        case.identical(name, tensor, wanted.tensors[name])


@contract("AMP-CAST-062", on=REAL)
@pytest.mark.parametrize("model", MODELS)
def test_model_values(case: Case, target: Target, amp_dtype: torch.dtype, model: str, rng: torch.Generator) -> None:
    given = _given(model, target, amp_dtype, rng)
    _same_bits(case, given.run(by_hand=False), given.run(by_hand=True))


def _check_whole(case: Case, given: Given) -> None:
    """The forward pass op for op; on a real target the backward pass and every value too."""
    seen, predicted = given.run(by_hand=False), given.run(by_hand=True)
    _same_stream(case, "the forward pass", seen.forward, predicted.forward)
    if not given.target.is_fake:
        _same_stream(case, "the backward pass", seen.backward, predicted.backward)
        _same_bits(case, seen, predicted)


MIXTURES = {"inputs": (True, False), "weights": (False, True), "both": (True, True)}


def _mixed(
    model: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, inputs: bool, weights: bool
) -> Given:
    return _given(model, target, amp_dtype, rng, inputs=amp_dtype if inputs else torch.float32, lowered=weights)


@contract("AMP-CAST-063", on=EVERYWHERE)
@pytest.mark.parametrize("mixture", ["inputs", "weights", deep("standard", "both")])
@pytest.mark.parametrize("model", MODELS)
def test_mixed_types(
    case: Case, target: Target, amp_dtype: torch.dtype, model: str, mixture: str, rng: torch.Generator
) -> None:
    _check_whole(case, _mixed(model, target, amp_dtype, rng, *MIXTURES[mixture]))


@contract("AMP-CAST-064", on=CUDA_OR_CPU)
@pytest.mark.parametrize("weights", [False, deep("standard", True)], ids=["float32", "mixed"])
def test_fused_attention(
    case: Case, target: Target, amp_dtype: torch.dtype, weights: bool, rng: torch.Generator
) -> None:
    _check_whole(case, _mixed("transformer-sdpa", target, amp_dtype, rng, False, weights))
