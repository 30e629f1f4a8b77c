"""Broken regions and scalers for hardware that the suite only stands in for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import edited, replaced
from tests.simulation.emulated.build import uncompiled


@fault("AMP-REGION-093")
def backend_without_a_declaration_is_taken() -> Iterator[None]:
    """A third party's backend need not say which dtypes it supports."""
    with edited(torch.autocast.__init__, "if not hasattr(self.custom_device_mod, func):", "if False:"):
        yield


@fault("AMP-REGION-094")
def declared_dtypes_of_a_backend_are_ignored() -> Iterator[None]:
    """A region of a third party's backend takes float16 and bfloat16, whatever the backend declares."""
    old = "device_supported_dtypes = self.custom_device_mod.get_amp_supported_dtype()"
    with edited(torch.autocast.__init__, old, "self.custom_device_mod.get_amp_supported_dtype()"):
        yield


@fault("AMP-REGION-095")
def bf16_is_taken_where_the_device_lacks_it() -> Iterator[None]:
    """Nobody asks whether a CUDA device has bfloat16."""
    with edited(torch.autocast.__init__, "and not torch.cuda.is_bf16_supported()", "and False"):
        yield


@fault("AMP-SCALE-107")
def scaler_for_cuda_is_never_enabled() -> Iterator[None]:
    """A scaler for CUDA disables itself without asking whether CUDA is there."""
    old = "if enabled and torch.cuda.amp.common.amp_definitely_not_available():"
    with edited(torch.amp.GradScaler.__init__, old, "if enabled:"):
        yield


@fault("AMP-SCALE-191")
def scaler_follows_the_accelerator() -> Iterator[None]:
    """A scaler for CUDA is one for the current accelerator where that is another."""
    new = (
        "follows = device == 'cuda' and torch.accelerator.is_available(); "
        "self._device = torch.accelerator.current_accelerator().type if follows else device"
    )
    with edited(torch.amp.GradScaler.__init__, "self._device = device", new):
        yield


@fault("AMP-SCALE-106")
def disabled_scaler_checks_its_factors() -> Iterator[None]:
    """A disabled scaler refuses factors that mean nothing to it."""
    with edited(torch.amp.GradScaler.__init__, "if self._enabled:", "if True:"):
        yield


@fault("AMP-REGION-096")
def data_parallel_workers_are_never_in_a_region() -> Iterator[None]:
    """The threads of DataParallel start without autocast, whatever the caller has on."""
    function = importlib.import_module("torch.nn.parallel.parallel_apply").parallel_apply
    with edited(function, "enabled=autocast_enabled", "enabled=False"):
        yield


@fault("AMP-REGION-112")
def benchmark_threads_are_never_in_a_region() -> Iterator[None]:
    """The threads of ThroughputBenchmark start without autocast, whatever the caller has on."""
    original = torch.utils.ThroughputBenchmark.benchmark

    def benchmark(self: Any, **options: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return original(self, **options)

    with replaced(torch.utils.ThroughputBenchmark, "benchmark", benchmark):
        yield


@fault("AMP-REGION-113", machine="backend", possible=lambda: uncompiled() is None)
def backend_lists_a_type_without_tensors() -> Iterator[None]:
    """A third party's backend lists float16, of which its allocator makes no tensor."""
    torch.ops.toyacc.lack(torch.float16)  # for good
    yield
