"""Check regions of missing hardware: a PrivateUse1 backend, CUDA without bfloat16, several CUDA devices."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from ...harness.check import Case, applies, contract
from ...harness.targets import Target, device_module, is_foreign, one_device_only, second
from ...oracles.fake_hardware import (
    backend_module,
    cuda_that_computes_nothing,
    cuda_that_says,
    no_backend_module,
    third_party_backend,
)
from ...oracles.numbers.formats import OTHER
from ...oracles.region.stack_model import Setting, observe

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def setting(device_type: str) -> Setting:
    return Setting(torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))


def silently(case: Case, what: str, call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    case.equal(f"warnings of {what}", [str(warning.message) for warning in caught], [])
    return result


@contract("AMP-REGION-093")
@pytest.mark.parametrize("module", ["none", "without-the-function"])
def test_backend_that_declares_nothing(case: Case, module: str) -> None:
    before = observe()
    with no_backend_module() if module == "none" else backend_module(None) as name:
        for enabled in (True, False):
            make = partial(torch.autocast, name, enabled=enabled)
            case.raises(f"a region, enabled={enabled}", AssertionError, make, names=(name, "get_amp_supported_dtype"))
    with backend_module([torch.float16, torch.bfloat16]), torch.autocast(name):
        case.equal("enabled with a backend that declares its dtypes (control)", torch.is_autocast_enabled(name), True)
    case.equal("state that the refusal changed", observe().differences(before), [])


def lists_no_dtypes(target: Target) -> str | None:
    if is_foreign(target.device_type) and hasattr(device_module(target.device_type), "get_amp_supported_dtype"):
        return None
    return "not a third party's device whose module has get_amp_supported_dtype"


@contract("AMP-REGION-113", on="accelerator")
@applies(lists_no_dtypes)
def test_listed_dtypes_are_those_of_tensors(case: Case, target: Target) -> None:
    numbers = torch.tensor([1.5, -2.0, 0.0])  # of every floating dtype from 8 bits on
    module: Any = device_module(target.device_type)
    for dtype in module.get_amp_supported_dtype():
        try:
            made = torch.zeros(3, device=target.device, dtype=dtype)
            cast = numbers.to(target.device).to(dtype)
            back = cast.float().cpu()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            case.equal(f"what tensors of {dtype} raise", f"{type(error).__name__}: {error}", "nothing")
            continue
        case.equal(f"dtypes of a tensor and of a cast to {dtype}", [made.dtype, cast.dtype], [dtype, dtype])
        case.identical(f"numbers cast to {dtype} and back", back, numbers)


@contract("AMP-REGION-094")
@DTYPES
def test_backend_that_declares_dtypes(case: Case, dtype: torch.dtype) -> None:
    name = third_party_backend()
    before = setting(name)
    with backend_module([dtype]):
        region = silently(case, "a declared dtype", lambda: torch.autocast(name, dtype=dtype))
        with region:
            case.equal("setting in a region of a declared dtype", setting(name), Setting(True, dtype))
            with torch.autocast(name, enabled=False):
                case.equal("setting in a disabled subregion", setting(name), Setting(False, dtype))
            case.equal("setting after the subregion", setting(name), Setting(True, dtype))
            seen = torch.autocast(name, dtype=dtype, enabled=False)(lambda: setting(name))()
            case.equal("setting in a decorated function", seen, Setting(False, dtype))
        case.equal("setting after the region", setting(name), before)
        undeclared = OTHER[dtype]
        region = case.warns(
            "a dtype that is not declared",
            UserWarning,
            lambda: torch.autocast(name, dtype=undeclared),
            names=(name, str(dtype)),
        )
        with region:
            case.equal("enabled in a region of an undeclared dtype", torch.is_autocast_enabled(name), False)
    case.equal("setting after all", setting(name), before)


@contract("AMP-REGION-095")
@DTYPES
def test_cuda_device_without_bf16(case: Case, dtype: torch.dtype) -> None:
    before = setting("cuda")
    with cuda_that_says(bf16=False):
        if dtype is torch.bfloat16:
            case.raises("a region", RuntimeError, lambda: torch.autocast("cuda", dtype=dtype), names=("bfloat16",))
        else:
            with silently(case, "a float16 region (control)", lambda: torch.autocast("cuda", dtype=dtype)):
                case.equal("setting in a float16 region (control)", setting("cuda"), Setting(True, dtype))
        with silently(case, "a disabled region", lambda: torch.autocast("cuda", dtype=dtype, enabled=False)):
            case.equal("setting in a disabled region", setting("cuda"), Setting(False, dtype))
    with cuda_that_says(bf16=True):
        region = silently(case, "a region on a device with bfloat16", lambda: torch.autocast("cuda", dtype=dtype))
        with region:
            case.equal("setting in that region (control)", setting("cuda"), Setting(True, dtype))
    case.equal("setting after the regions", setting("cuda"), before)


class Observer(torch.nn.Module):
    """A module that returns its input and records the autocast state of its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Setting, bool]] = []
        self.threads: set[int] = set()
        self.devices: set[torch.device] = set()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.append((setting("cuda"), torch.is_autocast_cache_enabled()))
        self.threads.add(threading.get_ident())
        self.devices.add(inputs.device)
        return inputs


@contract("AMP-REGION-096")
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@DTYPES
def test_data_parallel_workers(case: Case, dtype: torch.dtype, cache: bool, enabled: bool) -> None:
    there = torch.cuda.is_available()
    inputs = torch.ones(1, device="cuda:0" if there else "cpu")
    observers = [Observer(), Observer()]
    with (
        contextlib.nullcontext() if there else cuda_that_computes_nothing(),
        torch.autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=cache),
    ):
        promised = setting("cuda"), torch.is_autocast_cache_enabled()
        torch.nn.parallel.parallel_apply(observers, [(inputs,), (inputs,)], devices=[0, 0])
    case.equal("setting of the caller (control)", promised, (Setting(enabled, dtype), cache))
    threads = set.union(*(observer.threads for observer in observers))
    case.equal("threads other than the caller's (control)", len(threads - {threading.get_ident()}) > 0, True)
    for number, observer in enumerate(observers):
        ((seen, seen_cache),) = observer.seen
        case.equal(f"enabled in worker {number}", seen.enabled, enabled)
        if enabled:
            case.equal(f"dtype in worker {number}", seen.dtype, dtype)
            case.equal(f"cache flag in worker {number}", seen_cache, cache)


@contract("AMP-REGION-096", on="cuda")
@applies(one_device_only)
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@DTYPES
def test_replicas_on_two_devices(case: Case, target: Target, dtype: torch.dtype, enabled: bool) -> None:
    devices = [target.device, second(target)]
    # The replicas share the recorded states.
    observer = Observer()
    replicated = torch.nn.DataParallel(observer, device_ids=devices)
    with torch.autocast("cuda", dtype=dtype, enabled=enabled):
        result = replicated(torch.tensor([[3.0], [5.0]], device=target.device))
    case.equal("result, from both devices (control)", (result.device, result.tolist()), (devices[0], [[3.0], [5.0]]))
    case.equal("devices that replicas ran on (control)", observer.devices, set(devices))
    case.equal("enabled in each", [seen.enabled for seen, _ in observer.seen], [enabled] * 2)
    if enabled:
        case.equal("dtype in each", [seen.dtype for seen, _ in observer.seen], [dtype] * 2)
