"""Check the settings, defaults and state tensors of a new GradScaler, and its deprecated classes."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ...harness.check import Case, applies, contract
from ...harness.targets import Target
from ...measure.flags import held
from ...oracles.fake_hardware import accelerator_that_is, cuda_that_says
from ...workloads.third_party_optimizers import Ordinary, SelfScaling, owning, parameters_of
from .support import SETTINGS, has_tensor, has_xla, iterate, scale_dtype, started, track, tracker

# Settings and state tensors


@contract("AMP-SCALE-001")
def test_initial_scale(case: Case, target: Target) -> None:
    scaler = torch.amp.GradScaler(target.device_type)
    case.equal("scale of a new scaler", scaler.get_scale(), 65536.0)
    scaled = scaler.scale(torch.tensor(3.0, device=target.device))
    case.equal("a loss of 3, scaled", scaled.item(), 3 * 65536.0)
    case.equal("scale after the first scale()", scaler.get_scale(), 65536.0)


@contract("AMP-SCALE-002")
def test_default_settings(case: Case, target: Target) -> None:
    scaler = torch.amp.GradScaler(target.device_type)
    case.equal("enabled", scaler.is_enabled(), True)
    case.equal("growth factor", scaler.get_growth_factor(), 2.0)
    case.equal("backoff factor", scaler.get_backoff_factor(), 0.5)
    case.equal("growth interval", scaler.get_growth_interval(), 2000)
    case.equal("growth tracker", tracker(scaler), 0)


@contract("AMP-SCALE-002")
def test_default_growth_interval_counts_to_2000(case: Case, target: Target) -> None:
    scaler = started(target)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 1998})
    optimizer = owning(torch.zeros((), device=target.device))
    case.equal("after 1999 and 2000", track(scaler, optimizer, ".."), [(65536.0, 1999), (131072.0, 0)])


@contract("AMP-SCALE-003")
@pytest.mark.parametrize("positional", [False, True], ids=["keywords", "positions"])
def test_settings(case: Case, target: Target, positional: bool) -> None:
    if positional:
        scaler = torch.amp.GradScaler(target.device_type, *SETTINGS.values(), True)
    else:
        scaler = torch.amp.GradScaler(device=target.device_type, enabled=True, **SETTINGS)
    case.equal("enabled", scaler.is_enabled(), True)
    seen = {
        "init_scale": scaler.get_scale(),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }
    case.equal("settings", seen, SETTINGS)


@contract("AMP-SCALE-004")
def test_growth_factor_above_one(case: Case, target: Target) -> None:
    for factor in (1.0, 0.999, 0.5, 0.0, -2.0):
        case.raises(
            f"growth_factor={factor}",
            AssertionError,
            partial(torch.amp.GradScaler, target.device_type, growth_factor=factor),
            names=("growth|growth_factor",),
        )
    just_above = math.nextafter(1.0, 2.0)
    scaler = torch.amp.GradScaler(target.device_type, growth_factor=just_above)
    case.equal("control: a factor just above 1", scaler.get_growth_factor(), just_above)


@contract("AMP-SCALE-005")
def test_backoff_factor_below_one(case: Case, target: Target) -> None:
    for factor in (1.0, 1.001, 2.0):
        case.raises(
            f"backoff_factor={factor}",
            AssertionError,
            partial(torch.amp.GradScaler, target.device_type, backoff_factor=factor),
            names=("backoff|backoff_factor",),
        )
    just_below = math.nextafter(1.0, 0.0)
    scaler = torch.amp.GradScaler(target.device_type, backoff_factor=just_below)
    case.equal("control: a factor just below 1", scaler.get_backoff_factor(), just_below)


@contract("AMP-SCALE-006")
@applies(lambda _: "CUDA, or torch_xla in its place, is available" if torch.cuda.is_available() or has_xla() else None)
def test_cuda_scaler_without_cuda(case: Case) -> None:
    scaler = case.warns("GradScaler('cuda')", UserWarning, lambda: torch.amp.GradScaler("cuda"), names=("CUDA",))
    case.equal("enabled", scaler.is_enabled(), False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.amp.GradScaler("cuda", enabled=False)
    case.equal("warnings of a disabled scaler", [str(warning.message) for warning in caught], [])


@contextlib.contextmanager
def _no_tensors_of_absent(case: Case, *device_types: str) -> Iterator[None]:
    """End as UNTESTABLE where a scaler makes a tensor as soon as it is made, on a device that is there in name only."""
    try:
        yield
    except Exception as error:
        for device_type in device_types:
            try:
                torch.tensor(1.0, device=device_type)
            except Exception as reason:
                if (type(error), str(error)) == (type(reason), str(reason)):
                    case.untestable(f"a new GradScaler makes tensors on its device, which is not here: {reason}")
        raise


@contract("AMP-SCALE-107")
def test_cuda_scaler_where_cuda_is_there(case: Case) -> None:
    with cuda_that_says(bf16=True), _no_tensors_of_absent(case, "cuda"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler = torch.amp.GradScaler("cuda", init_scale=48.0)
        case.equal("enabled", scaler.is_enabled(), True)
        case.equal("enabled with no device argument", torch.amp.GradScaler().is_enabled(), True)
        case.equal("enabled with enabled=False", torch.amp.GradScaler("cuda", enabled=False).is_enabled(), False)
    case.equal("warnings", [str(warning.message) for warning in caught], [])
    case.equal("its scale", scaler.get_scale(), 48.0)


ACCELERATORS = (None, "xpu", "mps", "mtia", "privateuseone", "cuda")


@contract("AMP-SCALE-191")
@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=str)
def test_scaler_without_a_device(case: Case, rng: torch.Generator, accelerator: str | None) -> None:
    argument = inspect.signature(torch.amp.GradScaler).parameters["device"]
    case.equal("default of the argument device", argument.default, "cuda")
    is_there = accelerator == "cuda" or has_xla()
    warned = []
    with accelerator_that_is(accelerator), _no_tensors_of_absent(case, "cuda", *filter(None, (accelerator,))):
        for arguments in ((), ("cuda",)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                scaler = torch.amp.GradScaler(*arguments)
            case.equal(f"GradScaler{arguments!r}: enabled", scaler.is_enabled(), is_there)
            warned.append([issubclass(warning.category, UserWarning) for warning in caught])
        # A class of its own is one that filters of UserWarning find as well.
        case.equal("whether each warning is a UserWarning", warned, [[]] * 2 if is_there else [[True]] * 2)
        other = "cpu" if accelerator in (None, "cuda") else str(accelerator)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            case.equal(f"control: GradScaler({other!r}) is enabled", torch.amp.GradScaler(other).is_enabled(), True)
        if not is_there:
            _runs_unscaled(case, scaler, rng)


def _runs_unscaled(case: Case, scaler: torch.amp.GradScaler, rng: torch.Generator) -> None:
    """Check that a disabled scaler leaves the loss, the gradients and the step as they are, inf or not."""
    for bad in (1.0, math.inf):
        slope = torch.rand(3, generator=rng) + 0.5
        slope[1] *= bad
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        loss = (parameter * slope).sum()
        case.true("scale() returns the loss itself", scaler.scale(loss) is loss, "another")
        loss.backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        case.identical("parameters after the step", parameter.detach(), 1 - 0.5 * slope)
    case.equal("scale", scaler.get_scale(), 1.0)


@contract("AMP-SCALE-007")
def test_scale_before_first_use(case: Case, target: Target) -> None:
    scaler = torch.amp.GradScaler(target.device_type, init_scale=48.0)
    case.equal("get_scale() before the first scale()", scaler.get_scale(), 48.0)
    case.equal("type", type(scaler.get_scale()).__name__, "float")
    scaler.scale(torch.ones((), device=target.device))
    case.equal("get_scale() after the first scale()", scaler.get_scale(), 48.0)
    case.equal("type", type(scaler.get_scale()).__name__, "float")


@contract("AMP-SCALE-008")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_state_tensors(case: Case, target: Target, dtype: torch.dtype) -> None:
    case.require_arithmetic(target, dtype)
    scaler = torch.amp.GradScaler(target.device_type)
    scaled = scaler.scale(torch.ones(1, dtype=dtype, device=target.device))
    case.equal("dtype of the scale", scale_dtype(scaler, target.device), torch.float32)
    case.equal("device of the scaled output", scaled.device, torch.ones((), device=target.device).device)
    case.equal("the scale, which fp16 cannot hold", scaler.get_scale(), 65536.0)
    case.equal("the tracker before the first iteration", tracker(scaler), 0)
    for what, name, expected in (
        ("scale", "_scale", torch.float32),
        ("tracker", "_growth_tracker", torch.int32),
    ):
        if not has_tensor(scaler, name):
            continue
        tensor = getattr(scaler, name)
        case.equal(f"dtype of the {what}", tensor.dtype, expected)
        case.equal(f"shape of the {what}", tuple(tensor.shape), ())
        case.equal(f"device of the {what}", tensor.device, torch.ones((), device=target.device).device)


@contract("AMP-SCALE-008")
@pytest.mark.parametrize("kind", [Ordinary, SelfScaling], ids=["plain", "self-scaling"])
def test_state_tensors_under_other_defaults(case: Case, target: Target, kind: Any) -> None:
    optimizer = owning(torch.full((2,), 96.0, device=target.device), kind=kind)
    loss = torch.ones((), device=target.device)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=48.0, growth_interval=1)
    with held("torch.get_default_dtype", torch.bfloat16), torch.device("meta"):
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()
    if has_tensor(scaler, "_scale") and has_tensor(scaler, "_growth_tracker"):
        case.equal("dtypes", (scaler._scale.dtype, scaler._growth_tracker.dtype), (torch.float32, torch.int32))
        case.equal("devices", {scaler._scale.device, scaler._growth_tracker.device}, {loss.device})
    case.equal("device of a scaled output", scaler.scale(loss).device, loss.device)
    case.equal("scale after one clean iteration", scaler.get_scale(), 96.0)


# Deprecated classes


def expect_same_scaler(case: Case, device: torch.device, old: Any, new: Any) -> None:
    """Expect equal answers and iterations of two scalers with equal settings; `new` is a torch.amp.GradScaler."""
    case.equal("is_enabled()", old.is_enabled(), new.is_enabled())
    case.true("is a torch.amp.GradScaler", isinstance(old, torch.amp.GradScaler), type(old).__name__)
    case.equal("state_dict()", old.state_dict(), new.state_dict())
    optimizers = [owning(torch.ones(3, device=device)) for _ in range(2)]
    for scaler, optimizer in zip((old, new), optimizers, strict=True):
        scaler.scale(torch.ones((), device=device))
        for letter in "..!...!":
            iterate(scaler, optimizer, value=math.inf if letter == "!" else 96.0)
    case.equal("state_dict() after seven iterations", old.state_dict(), new.state_dict())
    case.equal("get_scale() after seven iterations", old.get_scale(), new.get_scale())
    case.identical("parameters", *(parameters_of(optimizer)[0] for optimizer in optimizers))


def expect_old_spelling(case: Case, kind: Any, device: torch.device, device_type: str) -> None:
    with warnings.catch_warnings():
        # The warnings are checked by the api chapter.
        warnings.simplefilter("ignore")
        expect_same_scaler(case, device, kind(), torch.amp.GradScaler(device_type))
        named = {**SETTINGS, "growth_interval": 2}
        expect_same_scaler(case, device, kind(**named), torch.amp.GradScaler(device_type, **named))
        expect_same_scaler(case, device, kind(*named.values()), torch.amp.GradScaler(device_type, **named))
        off = torch.amp.GradScaler(device_type, **named, enabled=False)
        expect_same_scaler(case, device, kind(*named.values(), False), off)


@contract("AMP-SCALE-130")
def test_cpu_spelling(case: Case) -> None:
    expect_old_spelling(case, torch.cpu.amp.GradScaler, torch.device("cpu"), "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = torch.cpu.amp.GradScaler()
    scaler.scale(torch.ones(()))
    scaler.update(torch.tensor(48.0))  # requires a tensor on the scaler's device
    case.equal("the scale after update() with a tensor", scaler.get_scale(), 48.0)


@contract("AMP-SCALE-131")
@pytest.mark.parametrize("cuda", ["as-it-is", "there"])
def test_cuda_spelling(case: Case, cuda: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with (
        contextlib.nullcontext() if cuda == "as-it-is" else cuda_that_says(bf16=True),
        _no_tensors_of_absent(case, "cuda"),
    ):
        expect_old_spelling(case, torch.cuda.amp.GradScaler, device, "cuda")
