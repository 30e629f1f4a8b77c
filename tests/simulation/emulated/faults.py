"""Broken AMPs that a card alone shows: python -m tests.simulation.emulated conformance --gpu --fault NAME."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.faults import load
from tests.faults.breaking import edited, replaced

SCALER: Any = torch.amp.GradScaler
FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {}


def applied(name: str) -> contextlib.AbstractContextManager[None]:
    """Break torch by a fault of this module or of tests.faults."""
    return FAULTS[name]() if name in FAULTS else load()[name].applied()


def _fault(function: Callable[[], Iterator[None]]) -> Callable[[], contextlib.AbstractContextManager[None]]:
    made = FAULTS[function.__name__] = contextlib.contextmanager(function)
    return made


@_fault
def captured_steps_read_the_flag() -> Iterator[None]:
    """An optimizer that skips by itself is stepped as one that does not."""
    with edited(SCALER.step, 'if getattr(optimizer, "_step_supports_amp_scaling", False):', "if False:"):
        yield


@_fault
def unscaling_waits() -> Iterator[None]:
    """unscale_ waits until the device has done its work, and reads no value."""
    unscale = SCALER.unscale_

    def waiting(self: Any, optimizer: Any) -> None:
        unscale(self, optimizer)
        torch.cuda.synchronize()

    with replaced(SCALER, "unscale_", waiting):
        yield


@_fault
def replicas_run_without_the_region() -> Iterator[None]:
    """The threads of DataParallel run without autocast."""
    module = torch.nn.parallel.data_parallel.__globals__
    apply = module["parallel_apply"]

    def without(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", enabled=False):
            return apply(*args, **kwargs)

    module["parallel_apply"] = without
    try:
        yield
    finally:
        module["parallel_apply"] = apply


@_fault
def rates_of_the_cpu_are_moved() -> Iterator[None]:
    """Fused Adam and AdamW move a learning rate that is on the CPU too, and keep the last device's."""
    from torch.optim import adam

    with edited(
        adam._fused_adam,
        'if isinstance(lr, Tensor) and str(lr.device) != "cpu" else None',
        "if isinstance(lr, Tensor) else None",
    ):
        yield


@_fault
def rates_in_tensors_are_halved() -> Iterator[None]:
    """Fused SGD steps with half of a learning rate that is in a tensor."""
    step = torch._fused_sgd_

    def halved(*args: Any, lr: Any, **kwargs: Any) -> None:
        step(*args, lr=lr / 2 if isinstance(lr, torch.Tensor) else lr, **kwargs)

    with replaced(torch, "_fused_sgd_", halved):
        yield


@_fault
def attention_runs_fused_in_a_region() -> Iterator[None]:
    """MultiheadAttention takes its fused inference path in a region, whose kernel is on no list of CUDA."""
    with edited(torch.nn.MultiheadAttention.forward, "elif torch.is_autocast_enabled():", "elif False:"):
        yield


@_fault
def encoders_run_fused_in_a_region() -> Iterator[None]:
    """TransformerEncoderLayer takes its fused inference path in a region."""
    with edited(torch.nn.TransformerEncoderLayer.forward, "elif torch.is_autocast_enabled():", "elif False:"):
        yield
