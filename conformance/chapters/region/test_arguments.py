"""Check the errors and warnings of regions with invalid or unsupported arguments."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ...harness.check import Case, applies, contract, deep
from ...harness.targets import Target
from ...measure.compilers import without_torchscript
from ...oracles.policy.devices import DeviceType
from ...oracles.region.stack_model import (
    observe,
    probe_product,
    product_in,
)
from ...oracles.relations.outcomes import taken
from .support import DEVICES, cuda_is_there, is_in_force, region


@contract("AMP-REGION-050")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("device_type", ["cpu", "xpu", deep("standard", "mps"), deep("standard", "hpu")])
def test_unsupported_dtype(case: Case, device_type: str, dtype: torch.dtype) -> None:
    def enter() -> tuple[bool, torch.Tensor]:
        with torch.autocast(device_type, dtype=dtype):
            return torch.is_autocast_enabled(device_type), probe_product("cpu")

    names = (device_type, "bfloat16", "float16")
    enabled, product = case.warns(f"a region of {dtype}", UserWarning, enter, names=names)
    case.equal("enabled inside", enabled, False)
    case.identical("a product inside", product, product_in(torch.float32))
    case.equal("enabled after", torch.is_autocast_enabled(device_type), False)


@contract("AMP-REGION-051")
def test_disabled_region_does_not_warn(case: Case, target: Target) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for dtype in (torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype=dtype):
                pass
        for dtype in (None, torch.float32, torch.float64):
            with torch.autocast("cpu", dtype=dtype, enabled=False), torch.autocast("cuda", enabled=False):
                pass
    case.equal("warnings", [str(warning.message) for warning in caught], [])


@contract("AMP-REGION-052")
@pytest.mark.parametrize(
    "device_type",
    [torch.device("cpu"), None, 0, b"cpu"],
    ids=["device", "none", "index", "bytes"],
)
def test_device_type_is_no_string(case: Case, device_type: object) -> None:
    case.raises(
        f"torch.autocast({device_type!r})",
        ValueError,
        lambda: torch.autocast(device_type),
        names=("device_type|device type", type(device_type).__name__),
    )
    with torch.autocast("cpu"):
        case.equal("enabled with a string (control)", torch.is_autocast_enabled("cpu"), True)


@contract("AMP-REGION-053")
@pytest.mark.parametrize("name", ["nonsense", "CPU", "", "gpu"], ids=["nonsense", "capitals", "empty", "gpu"])
def test_unknown_device_type(case: Case, name: str) -> None:
    before = observe()
    case.raises(f"torch.autocast({name!r})", RuntimeError, lambda: torch.autocast(name))
    case.raises(f"torch.autocast({name!r}, dtype)", RuntimeError, lambda: torch.autocast(name, torch.bfloat16))
    is_in_force(case, "after the error", before)


@contract("AMP-REGION-054")
@pytest.mark.parametrize("device", [device for device in DEVICES.values() if device.dtype is None], ids=str)
def test_device_type_without_autocast(case: Case, device: DeviceType) -> None:
    before = observe()
    case.raises(
        f"torch.autocast({device.type!r}, torch.bfloat16)",
        RuntimeError,
        lambda: torch.autocast(device.type, torch.bfloat16),
        names=(device.type,),
    )
    case.raises(f"torch.autocast({device.type!r})", RuntimeError, lambda: torch.autocast(device.type))
    is_in_force(case, "after the error", before)


@contract("AMP-REGION-055")
@applies(cuda_is_there)
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=["default", "fp16", "bf16"])
def test_cuda_without_cuda(case: Case, dtype: torch.dtype | None) -> None:
    before = observe()
    instance = case.warns(
        "torch.autocast('cuda')",
        UserWarning,
        lambda: torch.autocast("cuda", dtype=dtype),
        names=("CUDA",),
    )
    with instance:
        case.equal("enabled inside", torch.is_autocast_enabled("cuda"), False)
        case.equal("dtype inside", torch.get_autocast_dtype("cuda"), dtype or torch.float16)
        runs_in_fake_cuda(case, torch.float32)
    is_in_force(case, "after the region", before)


def runs_in_fake_cuda(case: Case, dtype: torch.dtype) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        ones = torch.ones(2, 2, device="cuda")
        case.equal("dtype of a product of fake CUDA tensors", (ones @ ones).dtype, dtype)


@contract("AMP-REGION-056")
@pytest.mark.parametrize("thing", [3, "text", None], ids=["int", "str", "none"])
def test_decorating_what_cannot_be_called(case: Case, thing: object) -> None:
    case.raises(
        f"torch.autocast('cpu')({thing!r})",
        TypeError,
        lambda: torch.autocast("cpu")(thing),
        names=(type(thing).__name__,),
    )


WRONG = {"cache_enabled": (1, "on"), "enabled": (1, "yes"), "dtype": ("float16", 16)}


@contract("AMP-REGION-057")
@pytest.mark.parametrize("argument", list(WRONG))
def test_region_that_fails_to_open(case: Case, target: Target, amp_dtype: torch.dtype, argument: str) -> None:
    def entered(value: object) -> None:
        with torch.autocast(target.device_type, **{argument: value}):
            pass

    for around in (contextlib.nullcontext(), region(target, amp_dtype)):
        with warnings.catch_warnings(), around:
            warnings.simplefilter("ignore")
            before = observe()
            for value in WRONG[argument]:
                opening = functools.partial(entered, value)
                if value != 1 or not taken(opening):  # which an implementation may take for True
                    case.raises(f"{argument}={value!r}", TypeError, opening)
                is_in_force(case, f"after {argument}={value!r}", before)


@contract("AMP-REGION-058")
def test_warnings_point_at_the_caller(case: Case) -> None:
    calls: dict[str, Callable[[], object]] = {
        "cpu": lambda: torch.autocast("cpu", dtype=torch.float32),
        "xpu": lambda: torch.autocast("xpu", dtype=torch.int8),
        "torch.cuda.amp.autocast": lambda: torch.cuda.amp.autocast(enabled=False),
        "torch.cuda.amp.GradScaler": lambda: torch.cuda.amp.GradScaler(enabled=False),
        "torch.cuda.amp.custom_fwd": lambda: torch.cuda.amp.custom_fwd(print),
        "torch.cuda.amp.custom_bwd": lambda: torch.cuda.amp.custom_bwd(print),
        "torch.cpu.amp.autocast": lambda: torch.cpu.amp.autocast(enabled=False),
        "torch.cpu.amp.GradScaler": lambda: torch.cpu.amp.GradScaler(enabled=False),
    }
    if not torch.cuda.is_available():
        calls["cuda"] = lambda: torch.autocast("cuda")
        calls["GradScaler"] = lambda: torch.amp.GradScaler("cuda")
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        case.equal(
            f"{name}: files that the warnings name", [Path(one.filename).name for one in caught], [Path(__file__).name]
        )


@contract("AMP-REGION-059")
def test_scripted_decorated_function(case: Case) -> None:
    if reason := without_torchscript():
        case.untestable(reason)

    def script(decorated: Callable[..., object]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.script(decorated)

    case.raises(
        "torch.jit.script of a decorated function",
        RuntimeError,
        lambda: script(torch.autocast("cpu")(probe_product)),
        names=("autocast",),
    )
