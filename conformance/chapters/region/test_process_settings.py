"""Check that entering and leaving a region changes no process state except autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.flags import writable
from .process_settings import changes, keeps_subnormals, observe
from .support import Interruption


@contextlib.contextmanager
def other_numbers() -> Iterator[None]:
    """Set flushed subnormals where the processor supports it, float64 by default, and warnings instead of errors."""
    before, debug = torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    torch.set_flush_denormal(True)
    torch.set_default_dtype(torch.float64)
    torch.set_deterministic_debug_mode("warn")  # which imports less than use_deterministic_algorithms
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(debug)
        torch.set_default_dtype(before)
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def other_kernels() -> Iterator[None]:
    """Set lower float32 precision, and libraries to disabled or benchmarking."""
    matmul, cudnn, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
    others: list[tuple[Any, str, Any]] = [
        (matmul, "allow_fp16_reduced_precision_reduction", False),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
        (cudnn, "enabled", False),
        (cudnn, "benchmark", True),
        (cudnn, "deterministic", True),
        (mkldnn, "enabled", False),
    ]
    # From torch 2.9 on, the call below sets these as well, and the call that ends it does not restore them.
    products = (matmul, getattr(mkldnn, "matmul", None))
    others += [(one, "fp32_precision", "tf32") for one in products if hasattr(one, "fp32_precision")]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in others]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with writable():
            for owner, name, value in others:
                setattr(owner, name, value)
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        with writable():
            for owner, name, value in before:
                setattr(owner, name, value)


AROUND: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "default-device": lambda: torch.device("meta"),
    "numbers": other_numbers,
    "kernels": other_kernels,
}


@contract("AMP-REGION-061")
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("around", AROUND)
def test_settings_of_the_process_stay(case: Case, target: Target, around: str) -> None:
    with AROUND[around]():
        before = observe(target.device)
        case.note("settings that are compared", len(before))
        for enabled in (True, False):

            def region(enabled: bool = enabled) -> torch.autocast:
                return torch.autocast(target.device_type, dtype=case.amp_dtypes[0], enabled=enabled)

            def compared(what: str, enabled: bool = enabled) -> None:
                found = changes(before, observe(target.device))
                case.equal(f"enabled={enabled}: what is not as it was {what}", found, [])

            with region():
                compared("inside")
                with region(not enabled):
                    compared("inside another region")
            compared("after")
            region()(compared)("in a decorated function")
            compared("after the call")
            with contextlib.suppress(Interruption), region():
                raise Interruption
            compared("after an exception")
    if around == "nothing":
        torch.rand(1)
        found = changes(before, observe(target.device))
        case.at_least("control: settings that differ after a random number is generated", len(found), 1)
        case.equal("control: subnormal numbers are kept", keeps_subnormals(), True)
