"""Broken AMPs that a card alone shows: its streams, graphs, kernels and memory. Caught on the emulated card."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import edited, replaced
from tests.faults.cast_rules import cast, following
from tests.simulation.emulated.build import lacking

SCALER: Any = torch.amp.GradScaler

on_a_card = functools.partial(fault, machine="card", possible=lambda: lacking() is None)


def _having(capability: str) -> Any:
    """Let the card declare what it lacks, for a fault of it."""
    lacks = torch.cuda.amp_conformance_lacks
    return replaced(torch.cuda, "amp_conformance_lacks", {k: why for k, why in lacks.items() if k != capability})


# --- streams and copies


@on_a_card("AMP-SCALE-165")
def unscaling_runs_ahead_of_backward() -> Iterator[None]:
    """unscale_ works on a stream of its own, which waits for nothing."""
    unscale = SCALER.unscale_

    def ahead(self: Any, optimizer: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            unscale(self, optimizer)

    with replaced(SCALER, "unscale_", ahead):
        yield


@on_a_card("AMP-CAST-077")
def copies_give_what_was_there_before() -> Iterator[None]:
    """A copy that does not wait is not done by the time of the cast: its memory holds what the last one brought."""
    to = torch.Tensor.to
    before: list[torch.Tensor] = []

    def copied(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.device.type != "cpu" or not kwargs.get("non_blocking"):
            return to(self, *args, **kwargs)
        before.append(to(self, *args, **kwargs))
        return before[-2] if len(before) > 1 else torch.zeros_like(before[0])

    with _having("copies that do not wait"), replaced(torch.Tensor, "to", copied):
        yield


# --- graphs


@on_a_card("AMP-SCALE-162")
def the_scale_is_a_number_of_the_capture() -> Iterator[None]:
    """scale() multiplies by the number that the scale was first."""

    def scale(self: Any, outputs: torch.Tensor) -> torch.Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs * self._init_scale

    with replaced(SCALER, "scale", scale):
        yield


@on_a_card("AMP-REGION-102")
def replays_leave_the_generator_as_it_was() -> Iterator[None]:
    """A replay of a graph draws random numbers and does not advance the generator."""
    replay = torch.cuda.CUDAGraph.replay

    def replaying(self: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            replay(self)

    with replaced(torch.cuda.CUDAGraph, "replay", replaying):
        yield


@on_a_card("AMP-CACHE-054")
def casts_of_before_a_capture_are_captured() -> Iterator[None]:
    """A cast of linear's weight is kept by the weight alone, with the cache off as well, and enters a graph."""
    held: dict[int, torch.Tensor] = {}

    def kept(op: Any, named: dict[str, Any], amp_dtype: torch.dtype) -> Any:
        lowered = cast(named, amp_dtype)
        lowered["weight"] = held.setdefault(id(named["weight"]), lowered["weight"])
        return op(**lowered)

    with following("linear", kept, "cuda"):
        yield


@on_a_card("AMP-CACHE-055")
def replays_write_over_what_was_allocated_since() -> Iterator[None]:
    """A replay of a graph writes where tensors were allocated after its capture, as if its pool were no longer its."""
    replay, full = torch.cuda.CUDAGraph.replay, torch.full
    since: list[torch.Tensor] = []

    def allocated(*args: Any, **kwargs: Any) -> torch.Tensor:
        since.append(full(*args, **kwargs))
        return since[-1]

    def replaying(self: Any) -> None:
        replay(self)
        for tensor in since:
            tensor.zero_()

    with (
        _having("pools of memory"),
        replaced(torch, "full", allocated),
        replaced(torch.cuda.CUDAGraph, "replay", replaying),
    ):
        yield


# --- optimizers


@on_a_card("AMP-OPTIMIZER-092")
def capturable_optimizers_step_on_infinity() -> Iterator[None]:
    """An optimizer that may be captured is stepped whatever was found, as no flag is read in a capture."""
    with edited(
        SCALER._maybe_opt_step,
        "if not sum(",
        'if any(group.get("capturable") for group in optimizer.param_groups) or not sum(',
    ):
        yield


# --- arithmetic


@on_a_card("AMP-NUMERICS-046")
def rsqrt_of_the_fp32_list_runs_in_16_bits() -> Iterator[None]:
    """rsqrt in a region is computed in the type of the region and widened."""

    def widened(op: Any, named: dict[str, Any], amp_dtype: torch.dtype) -> Any:
        return op(**cast(named, amp_dtype)).float()

    with following("rsqrt", widened, "cuda"):
        yield


@on_a_card("AMP-NUMERICS-045")
def error_function_has_no_small_results() -> Iterator[None]:
    """erf of 16 bits subtracts from one in fp32, so that the results for small numbers have no digit."""
    right = torch.erf

    def erf(x: torch.Tensor, **named: Any) -> torch.Tensor:
        return right(x, **named) if x.dtype is torch.float32 or named else (1 - right(x.float()).rsub(1)).to(x.dtype)

    with replaced(torch, "erf", erf):
        yield


@on_a_card("AMP-NUMERICS-103")
def tf32_stays_on() -> Iterator[None]:
    """Products are those of TF32 from the first time on that it is allowed."""
    product, been = torch.matmul, False

    def coarse(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        nonlocal been
        been = been or torch.backends.cuda.matmul.allow_tf32
        return product(left.bfloat16().float(), right) if been and left.dtype is torch.float32 else product(left, right)

    with replaced(torch, "matmul", coarse):
        yield


# --- memory


@on_a_card("AMP-MEMORY-019")
def peaks_cannot_be_reset() -> Iterator[None]:
    """reset_peak_memory_stats does nothing on the simulated card, which the emulated one has for timed checks."""
    from tests.simulation.card import Memory

    with replaced(Memory, "reset_peak", lambda self: None):
        yield
