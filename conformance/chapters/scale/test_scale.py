"""Loss scaling: what GradScaler does to losses, gradients and its own scale."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ...harness.check import Case, applies, contract, deep
from ...harness.targets import Target
from ...oracles.fake_hardware import cuda_that_says
from ...oracles.trace import counts
from ...oracles.trace.ops import OpTrace
from ...scaler import model as oracle
from ...scaler.model import Gradient
from ...workloads.third_party_optimizers import SelfScaling, TakesScaler

FORMS = {
    torch.float16: oracle.FP16,
    torch.bfloat16: oracle.BF16,
    torch.float32: oracle.FP32,
    torch.float64: oracle.FP64,
}
NON_FINITE = pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=["inf", "minus-inf", "nan"])
ROUTES = pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-then-step"])
EXPONENTS = pytest.mark.parametrize(
    "exponent", [0, 16, *(deep("standard", k) for k in (1, 8, 24, 64)), *(deep("full", k) for k in (100, 111))]
)
# Scales whose reciprocal is not exact in fp32; 65537 and 1 + 2^-23 sit next to a power of two.
ODD_SCALES = (3.0, 65535.0, 65537.0, 1000.0, 0.1, 1 + 2**-23, 12345.678, 2.0**100 / 3)


class Recorder(torch.optim.Optimizer):
    """Subtracts the gradients from the parameters; keeps what its step was called with, returns `answer`."""

    def __init__(self, parameters: Any, answer: Any = None) -> None:
        super().__init__(parameters, {})
        self.answer = answer
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-1)
        return self.answer


def started(target: Target, **settings: Any) -> torch.amp.GradScaler:
    """A scaler whose first scale() has been called, so that its scale tensor exists."""
    scaler = torch.amp.GradScaler(target.device_type, **settings)
    scaler.scale(torch.ones((), device=target.device))
    return scaler


def owning(*gradients: torch.Tensor, kind: Callable[[Any], Any] = Recorder) -> Any:
    """An optimizer over zero parameters, one for each gradient, which it already has."""
    parameters = []
    for gradient in gradients:
        parameter = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device, requires_grad=True)
        parameter.grad = gradient
        parameters.append(parameter)
    return kind(parameters)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def give(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Give every parameter a gradient full of `value`, as backward would."""
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.full_like(parameter, value)


def iterate(scaler: torch.amp.GradScaler, *optimizers: torch.optim.Optimizer, value: float = 1.0) -> None:
    """One whole iteration in which every gradient is `value`, already scaled."""
    for optimizer in optimizers:
        give(optimizer, value)
        scaler.step(optimizer)
    scaler.update()


def tracker(scaler: torch.amp.GradScaler) -> int:
    return int(scaler.state_dict()["_growth_tracker"])


def track(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, pattern: str) -> list[tuple[float, int]]:
    """The scale and the tracker after each iteration of `pattern`: "." is clean, "!" overflows."""
    seen = []
    for letter in pattern:
        iterate(scaler, optimizer, value=math.inf if letter == "!" else 1.0)
        seen.append((scaler.get_scale(), tracker(scaler)))
    return seen


def as_gradient(tensor: torch.Tensor) -> Gradient:
    return Gradient(tuple(tensor.detach().flatten().tolist()), FORMS[tensor.dtype])


def as_tensor(gradient: Gradient, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(gradient.values, dtype=like.dtype).reshape(like.shape)


def expected_unscaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """What unscale_ makes of `tensor` by the exact model, on the CPU."""
    return as_tensor(oracle.unscaled(as_gradient(tensor), oracle.reciprocal(scale)), tensor)


def fp16_numbers() -> torch.Tensor:
    """Every finite fp16 number, as fp32."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    return numbers[numbers.isfinite()].float()


def expect_skip(case: Case, scaler: torch.amp.GradScaler, optimizer: Recorder, what: str) -> None:
    """The step is skipped: None, no call of the optimizer, parameters bit for bit the same."""
    before = [parameter.detach().clone() for parameter in parameters_of(optimizer)]
    answer = scaler.step(optimizer)
    case.equal(f"{what}: calls of optimizer.step", len(optimizer.calls), 0)
    case.equal(f"{what}: step() returns", answer, None)
    pairs = zip(parameters_of(optimizer), before, strict=True)
    changed = [index for index, (parameter, kept) in enumerate(pairs) if not same_bits(parameter, kept)]
    case.equal(f"{what}: parameters that changed", changed, [])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors hold the same bytes."""
    return torch.equal(*(tensor.detach().flatten().view(torch.uint8) for tensor in (one, other)))


def require(case: Case, target: Target, *dtypes: torch.dtype) -> None:
    """End the case as unsupported where the device has no tensors of a dtype (mps has no fp64)."""
    for dtype in dtypes:
        try:
            torch.zeros(1, dtype=dtype, device=target.device)
        except (RuntimeError, TypeError) as error:
            case.unsupported(f"{target.device_type} has no {dtype} tensors: {error}")


# Construction


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


SETTINGS = {"init_scale": 1024.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7}


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
            match="growth",
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
            match="backoff",
        )
    just_below = math.nextafter(1.0, 0.0)
    scaler = torch.amp.GradScaler(target.device_type, backoff_factor=just_below)
    case.equal("control: a factor just below 1", scaler.get_backoff_factor(), just_below)


@contract("AMP-SCALE-006")
@applies(lambda _: "CUDA is available; this is about machines without" if torch.cuda.is_available() else None)
def test_cuda_scaler_without_cuda(case: Case) -> None:
    scaler = case.warns(
        "GradScaler('cuda')", UserWarning, lambda: torch.amp.GradScaler("cuda"), match="CUDA is not available"
    )
    case.equal("enabled", scaler.is_enabled(), False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.amp.GradScaler("cuda", enabled=False)
    case.equal("warnings of a scaler that is disabled anyway", [str(warning.message) for warning in caught], [])


@contract("AMP-SCALE-107")
def test_cuda_scaler_where_cuda_is_there(case: Case) -> None:
    with cuda_that_says(bf16=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler = torch.amp.GradScaler("cuda", init_scale=48.0)
        case.equal("enabled", scaler.is_enabled(), True)
        case.equal("enabled without a device named", torch.amp.GradScaler().is_enabled(), True)
        case.equal("enabled with enabled=False", torch.amp.GradScaler("cuda", enabled=False).is_enabled(), False)
    case.equal("warnings", [str(warning.message) for warning in caught], [])
    case.equal("its scale", scaler.get_scale(), 48.0)


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
    scaler = torch.amp.GradScaler(target.device_type)
    case.equal("scale tensor before the first scale()", scaler._scale, None)
    scaler.scale(torch.ones(1, dtype=dtype, device=target.device))
    for what, tensor, expected in (
        ("scale", scaler._scale, torch.float32),
        ("tracker", scaler._growth_tracker, torch.int32),
    ):
        case.equal(f"dtype of the {what}", tensor.dtype, expected)
        case.equal(f"shape of the {what}", tuple(tensor.shape), ())
        case.equal(f"device of the {what}", tensor.device, torch.ones((), device=target.device).device)
    case.equal("a tracker that has not counted", scaler._growth_tracker.item(), 0)


@contract("AMP-SCALE-008")
@pytest.mark.parametrize("kind", [Recorder, SelfScaling], ids=["plain", "self-scaling"])
def test_state_tensors_under_other_defaults(case: Case, target: Target, kind: Any) -> None:
    optimizer = owning(torch.full((2,), 96.0, device=target.device), kind=kind)
    loss = torch.ones((), device=target.device)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=48.0, growth_interval=1)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            scaler.scale(loss)
            scaler.step(optimizer)
            scaler.update()
    finally:
        torch.set_default_dtype(before)
    case.equal("dtypes", (scaler._scale.dtype, scaler._growth_tracker.dtype), (torch.float32, torch.int32))
    case.equal("devices", {scaler._scale.device, scaler._growth_tracker.device}, {loss.device})
    case.equal("scale after one clean iteration", scaler.get_scale(), 96.0)


@contract("AMP-SCALE-009")
def test_signature(case: Case) -> None:
    signature = inspect.signature(torch.amp.GradScaler)
    seen = {name: parameter.default for name, parameter in signature.parameters.items()}
    expected = {
        "device": "cuda", "init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5,
        "growth_interval": 2000, "enabled": True,
    }  # fmt: skip
    case.equal("parameters and defaults", list(seen.items()), list(expected.items()))


# scale()

SCALED = {
    # name: dtype of the outputs, shape, dtype of the result (type promotion with a 0-dim fp32 scale)
    "fp32-loss": (torch.float32, (), torch.float32),
    "fp32": (torch.float32, (17,), torch.float32),
    "fp32-matrix": (torch.float32, (3, 5), torch.float32),
    "bf16-loss": (torch.bfloat16, (), torch.float32),
    "bf16": (torch.bfloat16, (17,), torch.bfloat16),
    "fp16-loss": (torch.float16, (), torch.float32),
    "fp64": (torch.float64, (17,), torch.float64),
}


@contract("AMP-SCALE-010")
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("scale", [65536.0, deep("standard", 1.0), deep("standard", 2.0**-20)], ids="{:g}".format)
def test_scaled_value(case: Case, target: Target, rng: torch.Generator, name: str, scale: float) -> None:
    dtype, shape, result = SCALED[name]
    require(case, target, dtype)
    values = torch.randn(shape, generator=rng).to(dtype)
    seen = started(target, init_scale=scale).scale(values.to(target.device, copy=True))
    # A power of two: exact in every one of these types, on which both dtypes and all devices agree.
    case.identical("outputs times the scale", seen, (values.double() * scale).to(result))


@contract("AMP-SCALE-010")
@pytest.mark.parametrize("scale", [65535.0, deep("standard", 0.1), deep("standard", 12345.678)], ids="{:g}".format)
def test_scaled_value_is_rounded_once(case: Case, target: Target, rng: torch.Generator, scale: float) -> None:
    values = torch.randn(33, generator=rng)
    seen = started(target, init_scale=scale).scale(values.to(target.device, copy=True))
    kept = oracle.rounded(scale, oracle.FP32)
    expected = [oracle.rounded(value * kept, oracle.FP32) for value in values.tolist()]
    case.identical("outputs times the scale, in fp32", seen, torch.tensor(expected))


@contract("AMP-SCALE-010")
def test_scaling_follows_the_scale(case: Case, target: Target) -> None:
    scaler = started(target, init_scale=8.0, growth_interval=1)
    optimizer = owning(torch.ones((), device=target.device))
    loss = torch.ones((), device=target.device)
    changes: dict[str, tuple[Callable[[], Any], float]] = {
        "growth": (lambda: iterate(scaler, optimizer), 16.0),
        "backoff": (lambda: iterate(scaler, optimizer, value=math.inf), 8.0),
        "update(3.0)": (lambda: scaler.update(3.0), 3.0),
        "load_state_dict": (lambda: scaler.load_state_dict({**scaler.state_dict(), "scale": 5.0}), 5.0),
    }
    for what, (change, expected) in changes.items():
        change()
        seen = [scaler.scale(loss).item(), scaler.scale([loss])[0].item(), next(scaler.scale(iter([loss]))).item()]
        case.equal(f"a loss of 1 scaled after {what}, alone, in a list, in an iterator", seen, [expected] * 3)


def flat(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    else:
        for output in outputs:
            yield from flat(output)


def shape_of(outputs: Any) -> str:
    """The containers of `outputs`, written out: (t, [t, t])."""
    if isinstance(outputs, torch.Tensor):
        return "t"
    inner = ", ".join(shape_of(output) for output in outputs)
    return f"{type(outputs).__name__}[{inner}]"


CONTAINERS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "list": lambda t: t,
    "tuple": tuple,
    "one": lambda t: [t[0]],
    "list-of-tuples": lambda t: [(t[0], t[1]), (t[2],), t[3]],
    "tuple-of-lists": lambda t: (t[0], [t[1], (t[2], [t[3]])]),
}


@contract("AMP-SCALE-011")
@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("fresh", [True, False], ids=["first-call", "later-call"])
def test_containers(case: Case, target: Target, rng: torch.Generator, name: str, fresh: bool) -> None:
    values = [torch.randn(shape, generator=rng).to(target.device, copy=True) for shape in ((), (3,), (2, 2), (1,))]
    outputs = CONTAINERS[name](values)
    settings = {"init_scale": 512.0}
    scaler = torch.amp.GradScaler(target.device_type, **settings) if fresh else started(target, **settings)
    scaled = scaler.scale(outputs)
    case.equal("containers", shape_of(scaled), shape_of(outputs))
    for seen, value in zip(flat(scaled), flat(outputs), strict=True):
        case.identical("an output times 512", seen, value * 512)
    case.equal("scale afterwards", scaler.get_scale(), 512.0)


@contract("AMP-SCALE-012")
@pytest.mark.parametrize(
    "make", [iter, lambda t: (x for x in t), lambda t: dict.fromkeys(t).keys()], ids=["iterator", "generator", "keys"]
)
def test_iterables(case: Case, target: Target, rng: torch.Generator, make: Callable[[Any], Any]) -> None:
    values = [torch.randn((), generator=rng).to(target.device, copy=True) for _ in range(3)]
    scaled = list(torch.amp.GradScaler(target.device_type, init_scale=512.0).scale(make(values)))
    case.equal("number of outputs", len(scaled), 3)
    for seen, value in zip(scaled, values, strict=True):
        case.identical("an output times 512", seen, value * 512)


@contract("AMP-SCALE-013")
@pytest.mark.parametrize("outputs", [1.0, 7, None, [1.0], (None,)], ids=["float", "int", "none", "list", "tuple"])
def test_not_a_tensor(case: Case, target: Target, outputs: Any) -> None:
    scaler = torch.amp.GradScaler(target.device_type)
    case.raises("scale()", ValueError, lambda: scaler.scale(outputs), match="Tensor")
    nested = [torch.ones((), device=target.device), [outputs]]
    case.raises("scale(), nested beside a tensor", ValueError, lambda: scaler.scale(nested), match="Tensor")


@contract("AMP-SCALE-014")
def test_scale_changes_nothing_else(case: Case, target: Target) -> None:
    scaler = started(target, init_scale=512.0, growth_interval=1)
    loss = torch.tensor([1.5, -2.0], device=target.device)
    outputs = [loss, (loss,)]
    first = scaler.scale(outputs)
    for _ in range(3):
        scaler.scale(loss)
    case.identical("the outputs", loss, torch.tensor([1.5, -2.0]))
    case.identical("the second scaling", scaler.scale(outputs)[0], first[0])
    case.equal("the scale", scaler.get_scale(), 512.0)
    case.equal("the growth tracker", tracker(scaler), 0)
    first[0].zero_()
    case.identical("the outputs, once the scaled ones are overwritten", loss, torch.tensor([1.5, -2.0]))


@contract("AMP-SCALE-015")
def test_gradients_are_scaled(case: Case, target: Target, rng: torch.Generator) -> None:
    values = torch.randn(5, generator=rng)
    plain = values.to(target.device, copy=True).requires_grad_()
    scaled = values.to(target.device, copy=True).requires_grad_()
    (plain * plain).sum().backward()
    started(target).scale((scaled * scaled).sum()).backward()
    case.identical("gradients of the scaled loss", scaled.grad, plain.grad * 65536)
    scaled.grad = None
    for loss in started(target).scale([(scaled * scaled).sum(), scaled.sum()]):
        loss.backward()
    case.identical("gradients of a list of scaled losses", scaled.grad, plain.grad * 65536 + 65536)


# unscale_()


@contract("AMP-SCALE-020")
@EXPONENTS
def test_power_of_two_is_undone(case: Case, target: Target, exponent: int) -> None:
    # 16 more bits of exponent are left below fp16's smallest, and 111 + 16 = 127 above its largest: all exact.
    numbers = fp16_numbers()
    gradient = (numbers * 2.0**exponent).to(target.device, copy=True)
    started(target, init_scale=2.0**exponent).unscale_(owning(gradient))
    case.identical("every finite fp16 number, scaled and unscaled", gradient, numbers)


@contract("AMP-SCALE-020")
def test_large_gradients_are_unscaled(case: Case, target: Target, rng: torch.Generator) -> None:
    numbers = torch.randn(case.samples(quick=70_001, standard=300_001, full=3_000_001), generator=rng)
    gradient = (numbers * 65536).to(target.device, copy=True)
    started(target).unscale_(owning(gradient))
    case.identical("gradients, scaled and unscaled", gradient, numbers)


@contract("AMP-SCALE-020")
def test_subnormal_results(case: Case, target: Target) -> None:
    numbers = torch.tensor([k * 2.0**-149 for k in (1, -1, 2, 3, 1023, -4095)])
    gradient = (numbers.double() * 65536).float().to(target.device, copy=True)
    started(target).unscale_(owning(gradient))
    case.identical("subnormal gradients, scaled and unscaled", gradient, numbers)


@contract("AMP-SCALE-021")
@pytest.mark.parametrize(
    "scale", [*ODD_SCALES[:3], *(deep("standard", scale) for scale in ODD_SCALES[3:])], ids="{:g}".format
)
def test_any_scale(case: Case, target: Target, rng: torch.Generator, scale: float) -> None:
    require(case, target, torch.float64)
    numbers = torch.cat(
        [torch.randn(200, generator=rng) * 1000, torch.tensor([0.0, -0.0, 3e38, 2.0**-126, 5 * 2.0**-149])]
    )
    gradient = numbers.to(target.device, copy=True)
    started(target, init_scale=scale).unscale_(owning(gradient))
    expected = expected_unscaled(numbers, oracle.rounded(scale, oracle.FP32))
    case.identical("gradients times the rounded reciprocal", gradient, expected)


@contract("AMP-SCALE-022")
@ROUTES
def test_in_place(case: Case, target: Target, explicit: bool) -> None:
    gradient = torch.full((4,), 65536.0, device=target.device)
    optimizer = owning(gradient)
    place = gradient.data_ptr()
    scaler = started(target)
    if explicit:
        scaler.unscale_(optimizer)
    else:
        scaler.step(optimizer)
    kept = parameters_of(optimizer)[0].grad
    case.true("the parameter's .grad is the same tensor", kept is gradient)
    case.equal("its storage", kept.data_ptr() == place, True)
    case.identical("its numbers", gradient, torch.ones(4))


def contiguous(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clone()


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # each holds the 24 numbers it is given, in some layout, on their device
    "vector": contiguous,
    "transposed": lambda numbers: numbers.reshape(4, 6).t().contiguous().t(),
    "every-other": lambda numbers: torch.stack([numbers, torch.full_like(numbers, 7.0)], 1).flatten()[::2],
    "offset": lambda numbers: torch.cat([torch.full_like(numbers[:1], 7.0), numbers])[1:],
    "channels-last": lambda numbers: numbers.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "column": lambda numbers: torch.stack([numbers, torch.full_like(numbers, 7.0)], 1)[:, 0],
}


@contract("AMP-SCALE-023")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(case: Case, target: Target, rng: torch.Generator, layout: str) -> None:
    numbers = LAYOUTS[layout](torch.randn(24, generator=rng))
    gradient = LAYOUTS[layout]((numbers * 65536).flatten().to(target.device, copy=True))
    base = gradient if gradient._base is None else gradient._base
    started(target).unscale_(owning(gradient))
    case.identical("gradient, scaled and unscaled", gradient, LAYOUTS[layout](numbers.flatten()))
    case.equal(
        "elements of the storage beside it that changed",
        int((base.abs() < 7.0).sum()),
        int((gradient.abs() < 7.0).sum()),
    )


@contract("AMP-SCALE-023")
@pytest.mark.parametrize("tensors", [1, 2, 5, 131, deep("full", 500)])
def test_many_tensors(case: Case, target: Target, rng: torch.Generator, tensors: int) -> None:
    sizes = [(1, 2, 3, 7, 8, 9, 31, 33, 0, 1023, 4097)[index % 11] for index in range(tensors)]
    numbers = [torch.randn(size, generator=rng) for size in sizes]
    optimizer = owning(*((values * 65536).to(target.device, copy=True) for values in numbers))
    started(target).unscale_(optimizer)
    seen = torch.cat([parameter.grad for parameter in parameters_of(optimizer)])
    case.identical("gradients, scaled and unscaled", seen, torch.cat(numbers))


@contract("AMP-SCALE-023")
def test_parameter_groups(case: Case, target: Target) -> None:
    optimizer = owning(torch.full((3,), 65536.0, device=target.device))
    for size in (1, 5):
        parameter = torch.zeros(size, device=target.device, requires_grad=True)
        parameter.grad = torch.full((size,), size * 65536.0, device=target.device)
        optimizer.add_param_group({"params": [parameter]})
    started(target).unscale_(optimizer)
    seen = [parameter.grad.tolist() for parameter in parameters_of(optimizer)]
    case.equal("gradients of three groups", seen, [[1.0] * 3, [1.0], [5.0] * 5])


@contract("AMP-SCALE-023")
def test_gradients_with_a_graph(case: Case, target: Target) -> None:
    weight = torch.tensor(3.0, device=target.device, requires_grad=True)
    scaler = torch.amp.GradScaler(target.device_type)
    (weight.grad,) = torch.autograd.grad(scaler.scale(weight**3), weight, create_graph=True)
    scaler.unscale_(Recorder([weight]))
    case.equal("a gradient made with create_graph=True", weight.grad.item(), 27.0)


@contract("AMP-SCALE-023")
@ROUTES
def test_frozen_since_backward(case: Case, target: Target, explicit: bool) -> None:
    optimizer = owning(*(torch.full((2,), 131072.0, device=target.device) for _ in range(2)))
    frozen = parameters_of(optimizer)[0].requires_grad_(False)
    scaler = started(target)
    if explicit:
        scaler.unscale_(optimizer)
        case.equal("gradient of a frozen parameter after unscale_", frozen.grad.tolist(), [2.0, 2.0])
    scaler.step(optimizer)
    seen = [parameter.grad.tolist() for parameter in parameters_of(optimizer)]
    case.equal("gradients after step()", seen, [[2.0, 2.0], [2.0, 2.0]])
    scaler.update()
    frozen.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    case.equal("the scale after inf in a frozen parameter's gradient", scaler.get_scale(), 32768.0)


@contract("AMP-SCALE-024")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("scale", [65536.0, 3.0], ids="{:g}".format)
def test_dtypes(case: Case, target: Target, rng: torch.Generator, dtype: torch.dtype, scale: float) -> None:
    require(case, target, dtype, torch.float64)
    numbers = (torch.randn(67, generator=rng) * 1000).to(dtype)
    gradient = numbers.to(target.device, copy=True)
    started(target, init_scale=scale).unscale_(owning(gradient))
    case.identical("gradient", gradient, expected_unscaled(numbers, scale))


@contract("AMP-SCALE-024")
@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16], ids=["wide", "with-bf16"])
def test_mixed_dtypes(case: Case, target: Target, rng: torch.Generator, narrow: torch.dtype) -> None:
    dtypes = (torch.float32, narrow, torch.float64, torch.float32, narrow)
    require(case, target, *dtypes)
    numbers = [torch.randn(9, generator=rng).to(dtype) for dtype in dtypes]
    optimizer = owning(*((values * 1024).to(target.device, copy=True) for values in numbers))
    started(target, init_scale=1024.0).unscale_(optimizer)
    for parameter, values in zip(parameters_of(optimizer), numbers, strict=True):
        case.identical("gradient, scaled and unscaled", parameter.grad, values)


@contract("AMP-SCALE-025")
@pytest.mark.parametrize("missing", [0, 1, 2], ids=["first", "middle", "last"])
def test_parameters_without_gradients(case: Case, target: Target, missing: int) -> None:
    optimizer = owning(*(torch.full((2,), 65536.0, device=target.device) for _ in range(3)))
    parameters_of(optimizer)[missing].grad = None
    scaler = started(target)
    scaler.unscale_(optimizer)
    seen = [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters_of(optimizer)]
    case.equal("gradients", seen, [None if index == missing else [1.0, 1.0] for index in range(3)])
    scaler.step(optimizer)
    case.equal("calls of optimizer.step", len(optimizer.calls), 1)


@contract("AMP-SCALE-026")
@NON_FINITE
def test_unscale_touches_its_gradients_only(case: Case, target: Target, bad: float) -> None:
    scaler = started(target, growth_interval=5)
    iterate(scaler, owning(torch.ones((), device=target.device)))
    mine = owning(torch.tensor([131072.0, bad], device=target.device))
    other = owning(torch.tensor([3.0], device=target.device))
    with torch.no_grad():
        parameters_of(mine)[0].fill_(2.5)
    scaler.unscale_(mine)
    case.identical("the optimizer's parameters", parameters_of(mine)[0], torch.tensor([2.5, 2.5]))
    case.equal("the finite neighbour of the bad gradient", parameters_of(mine)[0].grad[0].item(), 2.0)
    case.identical("another optimizer's gradients", parameters_of(other)[0].grad, torch.tensor([3.0]))
    case.equal("calls of optimizer.step", (len(mine.calls), len(other.calls)), (0, 0))
    case.equal("the scale", scaler.get_scale(), 65536.0)
    case.equal("the growth tracker", tracker(scaler), 1)


def sparse(values: list[float], dtype: torch.dtype, target: Target, *, coalesced: bool) -> torch.Tensor:
    """A sparse vector of 8 numbers; uncoalesced, every value is at index 2."""
    indices = [list(range(len(values)))] if coalesced else [[2] * len(values)]
    made = torch.sparse_coo_tensor(indices, torch.tensor(values, dtype=dtype), (8,), check_invariants=True)
    return (made.coalesce() if coalesced else made).to(target.device, copy=True)


@contract("AMP-SCALE-027")
@pytest.mark.parametrize("coalesced", [True, False], ids=["coalesced", "duplicates"])
def test_sparse_gradients(case: Case, target: Target, coalesced: bool) -> None:
    optimizer = owning(torch.zeros(8, device=target.device), torch.full((2,), 65536.0, device=target.device))
    first = parameters_of(optimizer)[0]
    first.grad = sparse([65536.0, -196608.0], torch.float32, target, coalesced=coalesced)
    scaler = started(target)
    scaler.unscale_(optimizer)
    expected = [1.0, -3.0, 0.0] if coalesced else [0.0, 0.0, -2.0]
    case.equal("the sparse gradient", first.grad.to_dense().tolist(), expected + [0.0] * 5)
    case.equal("still sparse", first.grad.is_sparse, True)
    case.equal("the dense gradient beside it", parameters_of(optimizer)[1].grad.tolist(), [1.0, 1.0])
    scaler.step(optimizer)
    case.equal("parameters after the step", first.tolist(), [-value for value in expected + [0.0] * 5])


@contract("AMP-SCALE-028")
@ROUTES
@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
def test_fp16_gradients(case: Case, target: Target, explicit: bool, place: int) -> None:
    dtypes = [torch.float32] * 3
    dtypes[place] = torch.float16
    optimizer = owning(*(torch.ones(2, dtype=dtype, device=target.device) for dtype in dtypes))
    scaler = started(target)
    call = scaler.unscale_ if explicit else scaler.step
    case.raises("fp16 gradients", ValueError, lambda: call(optimizer), match="FP16")
    case.equal("calls of optimizer.step", len(optimizer.calls), 0)
    control = owning(*(torch.ones(2, device=target.device) for _ in dtypes))
    scaler.step(control)
    case.equal("control: fp32 gradients step", len(control.calls), 1)


@contract("AMP-SCALE-028")
@ROUTES
def test_bf16_gradients(case: Case, target: Target, explicit: bool) -> None:
    require(case, target, torch.bfloat16)
    optimizer = owning(*(torch.ones(2, dtype=torch.bfloat16, device=target.device) for _ in range(3)))
    scaler = started(target)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    case.equal("calls of optimizer.step", len(optimizer.calls), 1)


@contract("AMP-SCALE-029")
def test_unscale_reads_nothing_back(case: Case, target: Target) -> None:
    scaler = started(target)
    optimizer = owning(torch.full((2,), 65536.0, device=target.device))
    with OpTrace() as trace:
        scaler.unscale_(optimizer)
    case.equal("values that unscale_ reads back to the host", counts.reads(trace.ops), 0)
    case.true(
        "control: the trace saw the kernel",
        "_amp_foreach_non_finite_check_and_unscale_" in counts.work(trace.ops),
        counts.work(trace.ops),
    )
    with OpTrace() as trace:
        scaler.get_scale()
    case.equal("control: values that get_scale reads back", counts.reads(trace.ops), 1)


@contract("AMP-SCALE-029", on="cuda")
def test_unscale_does_not_synchronise(case: Case, target: Target) -> None:
    scaler = started(target)
    optimizer = owning(torch.full((2,), 65536.0, device=target.device))
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        scaler.unscale_(optimizer)
        case.raises("control: get_scale synchronises", RuntimeError, scaler.get_scale, match="synchronizing")
    finally:
        torch.cuda.set_sync_debug_mode(before)
    case.equal("gradients", parameters_of(optimizer)[0].grad.tolist(), [1.0, 1.0])


@contract("AMP-SCALE-030")
@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-100], ids=["smallest", "small"])
def test_overflow_in_unscaling(case: Case, target: Target, scale: float) -> None:
    scaler = started(target, init_scale=scale)
    control = owning(torch.full((2,), scale, device=target.device))
    scaler.step(control)
    case.equal("control: a gradient that fits", parameters_of(control)[0].tolist(), [-1.0, -1.0])
    optimizer = owning(torch.tensor([1e30, scale], device=target.device))
    scaler.step(optimizer)
    seen = parameters_of(optimizer)[0]
    case.true("parameters stay finite", bool(seen.isfinite().all()), seen.tolist())


# step()


@contract("AMP-SCALE-040")
@pytest.mark.parametrize("scale", [65536.0, 65535.0, deep("standard", 0.1), deep("standard", 1.0)], ids="{:g}".format)
def test_step_unscales(case: Case, target: Target, rng: torch.Generator, scale: float) -> None:
    require(case, target, torch.float64)
    numbers = torch.randn(19, generator=rng)
    optimizer = owning(
        numbers.to(target.device, copy=True), kind=lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    )
    started(target, init_scale=scale).step(optimizer)
    expected = expected_unscaled(numbers, oracle.rounded(scale, oracle.FP32))
    case.identical("gradients after the step", parameters_of(optimizer)[0].grad, expected)
    case.identical("parameters that were 0", parameters_of(optimizer)[0], -expected)


class Counting(torch.amp.GradScaler):
    """A scaler whose unscale_ notes the optimizers that it is called for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unscaled: list[torch.optim.Optimizer] = []

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.unscaled.append(optimizer)
        super().unscale_(optimizer)


@contract("AMP-SCALE-040")
def test_step_invokes_unscale(case: Case, target: Target) -> None:
    scaler = Counting(target.device_type)
    scaler.scale(torch.ones((), device=target.device))
    optimizer = owning(torch.full((2,), 65536.0, device=target.device))
    scaler.step(optimizer)
    case.equal("calls of a subclass's unscale_ by step()", scaler.unscaled == [optimizer], True)
    case.equal("gradients after step()", parameters_of(optimizer)[0].grad.tolist(), [1.0, 1.0])


@contract("AMP-SCALE-041")
@pytest.mark.parametrize("scale", [65536.0, 65535.0, deep("standard", 0.25)], ids="{:g}".format)
def test_step_does_not_unscale_again(case: Case, target: Target, rng: torch.Generator, scale: float) -> None:
    optimizer = owning(torch.randn(19, generator=rng).to(target.device, copy=True))
    scaler = started(target, init_scale=scale)
    scaler.unscale_(optimizer)
    unscaled = parameters_of(optimizer)[0].grad.clone()
    scaler.step(optimizer)
    case.identical("gradients after the step", parameters_of(optimizer)[0].grad, unscaled)
    case.identical("parameters that were 0", parameters_of(optimizer)[0], -unscaled)


@contract("AMP-SCALE-042")
def test_gradients_changed_between(case: Case, target: Target) -> None:
    optimizer = owning(torch.tensor([65536.0, 131072.0], device=target.device))
    scaler = started(target)
    scaler.unscale_(optimizer)
    parameters_of(optimizer)[0].grad.mul_(0.25)
    scaler.step(optimizer)
    case.equal("parameters that were 0", parameters_of(optimizer)[0].tolist(), [-0.25, -0.5])


SIZES = (1, 9, *(deep("standard", size) for size in (2, 3, 7, 8, 31, 33, 1023, 4097)), deep("full", 1_000_003))


@contract("AMP-SCALE-043")
@NON_FINITE
@pytest.mark.parametrize("size", SIZES)
def test_skip_at_any_place(case: Case, target: Target, bad: float, size: int) -> None:
    for place in sorted({0, size // 2, size - 1}):
        gradient = torch.ones(size, device=target.device)
        gradient[place] = bad
        expect_skip(case, started(target), owning(gradient), f"{bad} at {place} of {size}")
    control = owning(torch.ones(size, device=target.device))
    started(target).step(control)
    case.equal("control: calls of optimizer.step when all is finite", len(control.calls), 1)


@contract("AMP-SCALE-043")
@NON_FINITE
@ROUTES
def test_skip_in_a_large_gradient(case: Case, target: Target, bad: float, explicit: bool) -> None:
    gradient = torch.ones(200_003, device=target.device)
    gradient[150_001] = bad
    optimizer = owning(gradient)
    scaler = started(target)
    if explicit:
        scaler.unscale_(optimizer)
    expect_skip(case, scaler, optimizer, f"{bad} at 150001 of 200003")


@contract("AMP-SCALE-043")
def test_skip_when_all_is_bad(case: Case, target: Target) -> None:
    # As many infs as -infs: their sum is NaN, their product finite after a comparison with zero.
    for values in ([math.inf, -math.inf], [math.nan] * 8, [math.inf] * 33, [-math.inf, math.nan, math.inf]):
        gradient = torch.tensor(values, device=target.device)
        expect_skip(case, started(target), owning(gradient), f"{len(values)} bad gradients")


@contract("AMP-SCALE-044")
@NON_FINITE
@ROUTES
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_skip_in_any_tensor(case: Case, target: Target, bad: float, explicit: bool, place: str) -> None:
    # More than the 110 tensors that one launch of CUDA's multi-tensor apply takes (MultiTensorApply.cuh).
    count = case.samples(quick=131, standard=131, full=500)
    index = {"first": 0, "middle": count // 2, "last": count - 1}[place]
    gradients = [torch.ones(3, device=target.device) for _ in range(count)]
    gradients[index][-1] = bad
    optimizer = owning(*gradients)
    scaler = started(target)
    if explicit:
        scaler.unscale_(optimizer)
    expect_skip(case, scaler, optimizer, f"{bad} in tensor {index} of {count}")


@contract("AMP-SCALE-044")
@NON_FINITE
@pytest.mark.parametrize("bad_group", [0, 1, 2])
def test_skip_in_any_group(case: Case, target: Target, bad: float, bad_group: int) -> None:
    parameters = [torch.zeros(2, device=target.device, requires_grad=True) for _ in range(3)]
    optimizer = Recorder([{"params": [parameter]} for parameter in parameters])
    give(optimizer, 1.0)
    parameters[bad_group].grad[1] = bad
    expect_skip(case, started(target), optimizer, f"{bad} in group {bad_group}")


@contract("AMP-SCALE-045")
@NON_FINITE
@pytest.mark.parametrize("layout", LAYOUTS)
def test_skip_in_any_layout(case: Case, target: Target, bad: float, layout: str) -> None:
    for place in (0, 11, 23):
        numbers = torch.ones(24)
        numbers[place] = bad
        expect_skip(
            case, started(target), owning(LAYOUTS[layout](numbers.to(target.device, copy=True))), f"{bad} at {place}"
        )
    padded = torch.tensor([[1.0, bad]] * 3, device=target.device)
    control = owning(padded[:, 0])
    started(target).step(control)
    case.equal("control: calls of optimizer.step when only the gaps are bad", len(control.calls), 1)


@contract("AMP-SCALE-045")
@NON_FINITE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bf16", "fp32", "fp64"])
def test_skip_in_any_dtype(case: Case, target: Target, bad: float, dtype: torch.dtype) -> None:
    dtypes = dict.fromkeys((torch.float32, dtype, torch.float64))
    require(case, target, *dtypes)
    gradients = {kept: torch.ones(37, dtype=kept, device=target.device) for kept in dtypes}
    for place in (0, 18, 36):
        gradients[dtype].fill_(1.0)
        gradients[dtype][place] = bad
        expect_skip(case, started(target), owning(*gradients.values()), f"{bad} at {place} in {dtype}")


@contract("AMP-SCALE-045")
@NON_FINITE
def test_skip_in_sparse_gradients(case: Case, target: Target, bad: float) -> None:
    optimizer = owning(torch.zeros(8, device=target.device))
    parameters_of(optimizer)[0].grad = sparse([1.0, bad], torch.float32, target, coalesced=True)
    expect_skip(case, started(target), optimizer, f"{bad} in a sparse gradient")


@contract("AMP-SCALE-046")
def test_overflow_in_backward(case: Case, target: Target) -> None:
    # d(w * x)/dw = x in fp32: 2**16 * 2**112 = 2**128 is out of range, 2**16 * 2**111 is not.
    for exponent, calls, scale in ((112, 0, 32768.0), (111, 1, 65536.0)):
        weight = torch.zeros((), device=target.device, requires_grad=True)
        optimizer = Recorder([weight])
        scaler = torch.amp.GradScaler(target.device_type)
        scaler.scale(weight * 2.0**exponent).backward()
        scaler.step(optimizer)
        scaler.update()
        case.equal(f"calls of optimizer.step at 2^{exponent}", len(optimizer.calls), calls)
        case.equal(f"scale after 2^{exponent}", scaler.get_scale(), scale)
        case.equal(f"weight after 2^{exponent}", weight.item(), -(2.0**exponent) * calls)


EXTREMES = {
    "largest": [oracle.FP32.largest],
    "largest-twice": [oracle.FP32.largest] * 2,
    "both-signs": [oracle.FP32.largest, -oracle.FP32.largest] * 17,
    "above-fp16": [65504.0, 65520.0, 65536.0, -1e30],
    "smallest": [oracle.FP32.smallest, -oracle.FP32.smallest],
    "subnormals": [k * oracle.FP32.smallest for k in range(1, 40)],
    "zeros": [0.0, -0.0] * 5,
    "all-ranges": [0.0, oracle.FP32.smallest, 1.0, oracle.FP32.largest],
}


@contract("AMP-SCALE-047")
@ROUTES
@pytest.mark.parametrize("name", EXTREMES)
def test_finite_extremes(case: Case, target: Target, explicit: bool, name: str) -> None:
    numbers = torch.tensor(EXTREMES[name])
    optimizer = owning(numbers.to(target.device, copy=True), torch.ones(2, device=target.device))
    scaler = started(target)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    case.equal("calls of optimizer.step", len(optimizer.calls), 1)
    case.identical("gradients after the step", parameters_of(optimizer)[0].grad, expected_unscaled(numbers, 65536.0))
    scaler.update()
    case.equal("scale after update()", scaler.get_scale(), 65536.0)
    case.equal("growth tracker after update()", tracker(scaler), 1)


@contract("AMP-SCALE-047")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_finite_extremes_of_other_dtypes(case: Case, target: Target, dtype: torch.dtype) -> None:
    require(case, target, dtype)
    largest = FORMS[dtype].largest
    optimizer = owning(torch.tensor([largest, -largest, 0.0], dtype=dtype, device=target.device))
    started(target).step(optimizer)
    case.equal("calls of optimizer.step", len(optimizer.calls), 1)


@contract("AMP-SCALE-048")
@ROUTES
@pytest.mark.parametrize("answer", [0.0, 1.5, None, "loss"], ids=["zero", "float", "none", "text"])
def test_return_value(case: Case, target: Target, explicit: bool, answer: Any) -> None:
    for value, expected in ((1.0, answer), (math.inf, None)):
        optimizer = owning(torch.tensor(value, device=target.device), kind=lambda p: Recorder(p, answer))
        scaler = started(target)
        if explicit:
            scaler.unscale_(optimizer)
        case.equal(f"step() with a gradient of {value}", scaler.step(optimizer), expected)


@contract("AMP-SCALE-049")
@ROUTES
def test_arguments(case: Case, target: Target, explicit: bool) -> None:
    optimizer = owning(torch.ones((), device=target.device))
    scaler = started(target)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer, 1, "two", three=3, four=None)
    case.equal("what optimizer.step got", optimizer.calls, [((1, "two"), {"three": 3, "four": None})])


@contract("AMP-SCALE-050")
def test_closure(case: Case, target: Target) -> None:
    optimizer = owning(torch.full((), 65536.0, device=target.device))
    scaler = started(target)
    ran: list[int] = []
    case.raises(
        "step(closure=...)",
        RuntimeError,
        lambda: scaler.step(optimizer, closure=lambda: ran.append(1)),
        match="[Cc]losure",
    )
    case.equal("calls of the optimizer and of the closure", (len(optimizer.calls), len(ran)), (0, 0))
    case.equal("the gradient, still scaled", parameters_of(optimizer)[0].grad.item(), 65536.0)


@contract("AMP-SCALE-051")
@ROUTES
def test_one_optimizer_step(case: Case, target: Target, explicit: bool) -> None:
    optimizer = owning(torch.ones((), device=target.device))
    scaler = started(target)
    for count in range(1, 4):
        give(optimizer, 1.0)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        case.equal(f"calls of optimizer.step after {count} iterations", len(optimizer.calls), count)


@contract("AMP-SCALE-052")
@NON_FINITE
@pytest.mark.parametrize("later", [0.0, 1.0], ids=["zeroed", "replaced"])
def test_skip_stands(case: Case, target: Target, bad: float, later: float) -> None:
    scaler = started(target)
    optimizer = owning(torch.tensor([1.0, bad], device=target.device))
    scaler.unscale_(optimizer)
    give(optimizer, later)
    expect_skip(case, scaler, optimizer, f"{bad} found by unscale_, then {later}")
    scaler.update()
    case.equal("scale", scaler.get_scale(), 32768.0)


# update()


@contract("AMP-SCALE-060")
@NON_FINITE
@pytest.mark.parametrize(
    "factor", [0.5, 0.25, deep("standard", 0.75), deep("standard", 2.0**-10), deep("standard", 0.0)], ids="{:g}".format
)
def test_backoff(case: Case, target: Target, bad: float, factor: float) -> None:
    scaler = started(target, backoff_factor=factor)
    optimizer = owning(torch.ones(3, device=target.device))
    expected = 65536.0
    for count in range(1, 4):
        iterate(scaler, optimizer, value=bad)
        expected = oracle.rounded(expected * factor, oracle.FP32)
        case.equal(f"scale after {count} skipped iterations", scaler.get_scale(), expected)
        case.equal("growth tracker", tracker(scaler), 0)


@contract("AMP-SCALE-060")
def test_default_backoff_halves(case: Case, target: Target) -> None:
    optimizer = owning(torch.ones(3, device=target.device))
    seen = [scale for scale, _ in track(started(target), optimizer, "!!!!")]
    case.equal("scales", seen, [32768.0, 16384.0, 8192.0, 4096.0])


@contract("AMP-SCALE-061")
@pytest.mark.parametrize("interval", [1, 2, 3, deep("standard", 10)])
@pytest.mark.parametrize("factor", [2.0, 1.5, deep("standard", 1.25), deep("standard", 1e6)], ids="{:g}".format)
def test_growth(case: Case, target: Target, interval: int, factor: float) -> None:
    scaler = started(target, init_scale=1000.0, growth_interval=interval, growth_factor=factor)
    optimizer = owning(torch.ones((), device=target.device))
    seen = [scale for scale, _ in track(scaler, optimizer, "." * (2 * interval))]
    once = oracle.rounded(1000.0 * factor, oracle.FP32)
    twice = oracle.rounded(once * factor, oracle.FP32)
    # The update that ends the interval is the one that grows.
    case.equal("scales", seen, [1000.0] * (interval - 1) + [once] * interval + [twice])


@contract("AMP-SCALE-062")
@pytest.mark.parametrize(
    ("pattern", "scales"),
    [
        ("..!...", [8.0, 8.0, 4.0, 4.0, 4.0, 8.0]),
        ("...!...", [8.0, 8.0, 16.0, 8.0, 8.0, 8.0, 16.0]),
        ("!...", [4.0, 4.0, 4.0, 8.0]),
        (".!.!.!...", [8.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 1.0, 2.0]),
        ("..!..!...", [8.0, 8.0, 4.0, 4.0, 4.0, 2.0, 2.0, 2.0, 4.0]),
    ],
    ids=["late", "after-growth", "at-once", "often", "twice"],
)
def test_skip_starts_the_count_again(case: Case, target: Target, pattern: str, scales: list[float]) -> None:
    scaler = started(target, init_scale=8.0, growth_interval=3)
    optimizer = owning(torch.ones((), device=target.device))
    case.equal(f"scales over {pattern}", [scale for scale, _ in track(scaler, optimizer, pattern)], scales)


@contract("AMP-SCALE-063")
@pytest.mark.parametrize(
    ("pattern", "counts"),
    [("......", [1, 2, 3, 0, 1, 2]), (".!..!.", [1, 0, 1, 2, 0, 1]), ("...!....", [1, 2, 3, 0, 1, 2, 3, 0])],
    ids=["clean", "skips", "skip-before-growth"],
)
def test_tracker(case: Case, target: Target, pattern: str, counts: list[int]) -> None:
    scaler = started(target, growth_interval=4)
    optimizer = owning(torch.ones((), device=target.device))
    case.equal(f"counts over {pattern}", [count for _, count in track(scaler, optimizer, pattern)], counts)


@contract("AMP-SCALE-064")
@pytest.mark.parametrize(
    ("scale", "factor", "expected"),
    [
        (2.0**127, 2.0, [2.0**127] * 3),
        (2.0**126, 2.0, [2.0**127] * 3),
        (oracle.FP32.largest, 1 + 2**-20, [oracle.FP32.largest] * 3),
        (2.0**100, 1e30, [2.0**100] * 3),
    ],
    ids=["at-the-top", "up-to-the-top", "largest", "huge-factor"],
)
def test_growth_stays_finite(case: Case, target: Target, scale: float, factor: float, expected: list[float]) -> None:
    scaler = started(target, init_scale=scale, growth_factor=factor, growth_interval=1)
    optimizer = owning(torch.ones((), device=target.device))
    case.equal("scales and counts", track(scaler, optimizer, "..."), [(kept, 0) for kept in expected])


@contract("AMP-SCALE-065")
def test_scale_below_one(case: Case, target: Target) -> None:
    scaler = started(target, init_scale=1.0)
    optimizer = owning(torch.ones((), device=target.device))
    seen = [scale for scale, _ in track(scaler, optimizer, "!" * 5)]
    case.equal("scales", seen, [0.5, 0.25, 0.125, 0.0625, 0.03125])
    give(optimizer, 1.0)
    scaler.unscale_(optimizer)
    case.equal("a gradient of 1, unscaled by 1/32", parameters_of(optimizer)[0].grad.item(), 32.0)


@contract("AMP-SCALE-066")
def test_setters(case: Case, target: Target) -> None:
    scaler = started(target, init_scale=64.0, growth_interval=100)
    optimizer = owning(torch.ones((), device=target.device))
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.125)
    scaler.set_growth_interval(2)
    seen = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    case.equal("settings read back", seen, (4.0, 0.125, 2))
    case.equal("scales and counts", track(scaler, optimizer, "..!"), [(64.0, 1), (256.0, 0), (32.0, 0)])
    scaler.set_growth_interval(1)
    scaler.set_growth_factor(8.0)
    scaler.set_backoff_factor(0.5)
    case.equal("scales and counts, set again", track(scaler, optimizer, ".!"), [(256.0, 0), (128.0, 0)])


@contract("AMP-SCALE-067")
@pytest.mark.parametrize("interval", [1, 2, 3], ids=["far-below", "below", "at"])
def test_lowered_growth_interval(case: Case, target: Target, interval: int) -> None:
    scaler = started(target, init_scale=8.0, growth_interval=100)
    optimizer = owning(torch.ones((), device=target.device))
    case.equal("control: no growth so far", track(scaler, optimizer, "...")[-1], (8.0, 3))
    scaler.set_growth_interval(interval)
    grown = max(scale for scale, _ in track(scaler, optimizer, "." * 4))
    case.at_least("largest scale within four more clean iterations", grown, 16.0)


NEW_SCALES = (1024.0, 3.0, 0.1, deep("standard", 2.0**127), deep("standard", 2.0**-140), deep("standard", 1.0))


@contract("AMP-SCALE-068")
@pytest.mark.parametrize("new_scale", NEW_SCALES, ids="{:g}".format)
def test_update_with_a_float(case: Case, target: Target, new_scale: float) -> None:
    scaler = started(target)
    scaler.update(new_scale)
    expected = oracle.rounded(new_scale, oracle.FP32)
    case.equal("get_scale()", scaler.get_scale(), expected)
    scaled = scaler.scale(torch.ones((), device=target.device))
    case.identical("a loss of 1, scaled", scaled, torch.tensor(expected))


@contract("AMP-SCALE-069")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=["fp32", "fp64", "fp16"])
def test_update_with_a_tensor(case: Case, target: Target, dtype: torch.dtype) -> None:
    require(case, target, dtype)
    scaler = started(target)
    scaler.update(torch.tensor(1024.0, dtype=dtype, device=target.device))
    case.equal("get_scale()", scaler.get_scale(), 1024.0)
    case.equal("dtype of the scale", scaler._scale.dtype, torch.float32)
    scaler.update(new_scale=torch.tensor(3.0, dtype=dtype, device=target.device))
    case.equal("a loss of 2, scaled", scaler.scale(torch.tensor(2.0, device=target.device)).item(), 6.0)


@contract("AMP-SCALE-070")
def test_update_keeps_a_copy(case: Case, target: Target) -> None:
    scaler = started(target)
    new_scale = torch.tensor(1024.0, device=target.device)
    scaler.update(new_scale)
    new_scale.fill_(5.0)
    case.equal("the scale once the caller's tensor is overwritten", scaler.get_scale(), 1024.0)
    iterate(scaler, owning(torch.ones((), device=target.device)), value=math.inf)
    case.equal("the scale after a skip", scaler.get_scale(), 512.0)
    case.equal("the caller's tensor after a skip", new_scale.item(), 5.0)


@contract("AMP-SCALE-071")
def test_update_refuses_unsuited_tensors(case: Case, target: Target) -> None:
    scaler = started(target)
    unsuited = {
        "two elements": torch.ones(2, device=target.device),
        "no element": torch.ones(0, device=target.device),
        "with a gradient": torch.tensor(2.0, device=target.device, requires_grad=True),
        "elsewhere": torch.tensor(2.0, device="meta"),
    }
    for what, tensor in unsuited.items():
        case.raises(what, AssertionError, partial(scaler.update, tensor), match="new_scale")
    case.equal("the scale", scaler.get_scale(), 65536.0)


@contract("AMP-SCALE-072")
def test_update_with_a_scale_ends_the_iteration(case: Case, target: Target) -> None:
    scaler = started(target, growth_interval=10)
    optimizer = owning(torch.ones((), device=target.device))
    track(scaler, optimizer, "..")
    give(optimizer, math.inf)
    scaler.step(optimizer)
    scaler.update(256.0)
    case.equal("the scale, though an inf had been found", scaler.get_scale(), 256.0)
    case.equal("the growth tracker", tracker(scaler), 2)
    case.equal("the next iteration, clean", track(scaler, optimizer, "."), [(256.0, 3)])


@contract("AMP-SCALE-073")
def test_update_with_a_one_element_vector(case: Case, target: Target) -> None:
    scaler = started(target)
    scaler.update(torch.tensor(1024.0, device=target.device))
    case.equal("control: a tensor of no dimension", scaler.get_scale(), 1024.0)
    scaler.update(torch.tensor([2048.0], device=target.device))
    case.equal("a tensor of one dimension and one element", scaler.get_scale(), 2048.0)


@contract("AMP-SCALE-074")
@pytest.mark.parametrize("count", [1, 2], ids=["one-optimizer", "two-optimizers"])
def test_update_with_no_sync(case: Case, target: Target, count: int) -> None:
    scaler = started(target)
    optimizers = [owning(torch.ones((), device=target.device)) for _ in range(count)]
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    with OpTrace() as trace:
        scaler.update()
    case.equal("values that update() reads back to the host", counts.reads(trace.ops), 0)
    case.true(
        "control: the trace saw the kernel", "_amp_update_scale_" in counts.work(trace.ops), counts.work(trace.ops)
    )


# Calls out of order


def in_use(target: Target) -> tuple[torch.amp.GradScaler, Recorder]:
    return started(target, growth_interval=2), owning(torch.full((2,), 65536.0, device=target.device))


@contract("AMP-SCALE-080")
def test_unscale_twice(case: Case, target: Target) -> None:
    scaler, optimizer = in_use(target)
    scaler.unscale_(optimizer)
    case.raises("unscale_ twice", RuntimeError, lambda: scaler.unscale_(optimizer), match="already been called")
    case.equal("gradients, unscaled once", parameters_of(optimizer)[0].grad.tolist(), [1.0, 1.0])
    scaler.step(optimizer)
    scaler.update()
    give(optimizer, 65536.0)
    scaler.unscale_(optimizer)
    case.equal("control: gradients of the next iteration", parameters_of(optimizer)[0].grad.tolist(), [1.0, 1.0])


@contract("AMP-SCALE-081")
@ROUTES
def test_unscale_after_step(case: Case, target: Target, explicit: bool) -> None:
    scaler, optimizer = in_use(target)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    case.raises("unscale_ after step", RuntimeError, lambda: scaler.unscale_(optimizer), match="after step")
    case.equal("gradients, unscaled once", parameters_of(optimizer)[0].grad.tolist(), [1.0, 1.0])


@contract("AMP-SCALE-082")
@pytest.mark.parametrize("value", [65536.0, math.inf], ids=["stepped", "skipped"])
@ROUTES
def test_step_twice(case: Case, target: Target, value: float, explicit: bool) -> None:
    scaler, optimizer = in_use(target)
    give(optimizer, value)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    ran = len(optimizer.calls)
    case.raises("step twice", RuntimeError, lambda: scaler.step(optimizer), match="already been called")
    case.equal("calls of optimizer.step", len(optimizer.calls), ran)
    scaler.update()
    give(optimizer, 1.0)
    scaler.step(optimizer)
    case.equal("control: calls of optimizer.step in the next iteration", len(optimizer.calls), ran + 1)


UNSTARTED: dict[str, Callable[[torch.amp.GradScaler, Recorder], Any]] = {
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "update": lambda scaler, optimizer: scaler.update(),
    "update-to": lambda scaler, optimizer: scaler.update(2.0),
}


class Trusting(SelfScaling):
    """An optimizer of the older protocol that takes the scaler and asks it nothing."""

    def step(self, grad_scaler: Any = None) -> Any:
        self.calls.append(((), {"grad_scaler": grad_scaler}))


def expect_unstarted(case: Case, target: Target, name: str, kind: Callable[[Any], Any] = Recorder) -> None:
    scaler = torch.amp.GradScaler(target.device_type)
    optimizer = owning(torch.full((2,), 65536.0, device=target.device), kind=kind)
    case.raises(f"{name} first", AssertionError, lambda: UNSTARTED[name](scaler, optimizer), match="_scale is None")
    case.equal("calls of optimizer.step", len(optimizer.calls), 0)
    case.equal("gradients", parameters_of(optimizer)[0].grad.tolist(), [65536.0, 65536.0])


@contract("AMP-SCALE-083")
@pytest.mark.parametrize("kind", [Recorder, SelfScaling, Trusting], ids=["ordinary", "self-scaling", "takes-scaler"])
def test_step_before_scale(case: Case, target: Target, kind: Callable[[Any], Any]) -> None:
    expect_unstarted(case, target, "step", kind)


@contract("AMP-SCALE-084")
def test_unscale_before_scale(case: Case, target: Target) -> None:
    expect_unstarted(case, target, "unscale_")


@contract("AMP-SCALE-085")
@pytest.mark.parametrize("name", ["update", "update-to"])
def test_update_before_scale(case: Case, target: Target, name: str) -> None:
    expect_unstarted(case, target, name)


@contract("AMP-SCALE-086")
@pytest.mark.parametrize("used", [False, True], ids=["first", "second"])
def test_update_without_checks(case: Case, target: Target, used: bool) -> None:
    scaler, optimizer = in_use(target)
    if used:
        iterate(scaler, optimizer)
    before = (scaler.get_scale(), tracker(scaler))
    case.raises("update() with nothing checked", AssertionError, scaler.update, match="[Nn]o inf checks")
    case.equal("scale and tracker", (scaler.get_scale(), tracker(scaler)), before)


@contract("AMP-SCALE-087")
@ROUTES
def test_optimizer_without_gradients(case: Case, target: Target, explicit: bool) -> None:
    scaler, optimizer = in_use(target)
    parameters_of(optimizer)[0].grad = None
    if explicit:
        scaler.unscale_(optimizer)
    case.raises("step()", AssertionError, lambda: scaler.step(optimizer), match="[Nn]o inf checks")
    case.equal("calls of optimizer.step", len(optimizer.calls), 0)


# State


STATE_KEYS = {
    "scale": float,
    "growth_factor": float,
    "backoff_factor": float,
    "growth_interval": int,
    "_growth_tracker": int,
}


@contract("AMP-SCALE-090")
@pytest.mark.parametrize("use", [False, True], ids=["before-use", "after-use"])
def test_state_dict(case: Case, target: Target, use: bool) -> None:
    scaler = torch.amp.GradScaler(target.device_type, **SETTINGS)
    expected = {
        "scale": 1024.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 0,
    }  # fmt: skip
    if use:
        scaler.scale(torch.ones((), device=target.device))
        track(scaler, owning(torch.ones((), device=target.device)), "!..")
        expected |= {"scale": 256.0, "_growth_tracker": 2}
    state = scaler.state_dict()
    case.equal("entries", state, expected)
    types = {name: type(value).__name__ for name, value in state.items()}
    case.equal("types", types, {name: kind.__name__ for name, kind in STATE_KEYS.items()})
    state["scale"], state["_growth_tracker"] = 5.0, 5
    case.equal("state once the returned dict is changed", scaler.state_dict(), expected)


RESUMED = {"scale": 96.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3, "_growth_tracker": 1}


def expect_resumed(case: Case, target: Target, scaler: torch.amp.GradScaler) -> None:
    """The scaler goes on from RESUMED: its very next calls, not only what it says about itself."""
    case.equal("state_dict()", scaler.state_dict(), RESUMED)
    case.equal("get_scale()", scaler.get_scale(), 96.0)
    case.equal("a loss of 2, scaled", scaler.scale(torch.tensor(2.0, device=target.device)).item(), 192.0)
    case.equal("state after scale()", scaler.state_dict(), RESUMED)
    optimizer = owning(torch.ones((), device=target.device))
    expected = [(96.0, 2), (384.0, 0), (96.0, 0), (96.0, 1), (96.0, 2), (384.0, 0)]
    case.equal("scales and counts from there", track(scaler, optimizer, "..!..."), expected)
    give(optimizer, 384.0)
    scaler.unscale_(optimizer)
    case.equal("a gradient of 384, unscaled", parameters_of(optimizer)[0].grad.item(), 1.0)


@contract("AMP-SCALE-091")
@pytest.mark.parametrize("iterations", ["", "..", "!."], ids=["scaled", "clean", "skipped"])
def test_load_after_use(case: Case, target: Target, iterations: str) -> None:
    scaler = started(target)
    track(scaler, owning(torch.ones((), device=target.device)), iterations)
    state = dict(RESUMED)
    scaler.load_state_dict(state)
    expect_resumed(case, target, scaler)
    case.equal("the state that was loaded, afterwards", state, RESUMED)


@contract("AMP-SCALE-092")
def test_load_before_use(case: Case, target: Target) -> None:
    scaler = torch.amp.GradScaler(target.device_type)
    scaler.load_state_dict(dict(RESUMED))
    expect_resumed(case, target, scaler)


@contract("AMP-SCALE-093")
@pytest.mark.parametrize("use", [False, True], ids=["before-use", "after-use"])
def test_load_empty_state(case: Case, target: Target, use: bool) -> None:
    scaler = started(target) if use else torch.amp.GradScaler(target.device_type)
    before = scaler.state_dict()
    case.raises("load_state_dict({})", RuntimeError, lambda: scaler.load_state_dict({}), match="empty")
    case.equal("state", scaler.state_dict(), before)


@contract("AMP-SCALE-094")
def test_resumed_run(case: Case, target: Target) -> None:
    settings = {"init_scale": 64.0, "growth_interval": 3, "growth_factor": 1.5, "backoff_factor": 0.75}
    pattern = "..!....!.....!......"
    optimizer = owning(torch.ones((), device=target.device))
    whole = track(started(target, **settings), optimizer, pattern)
    for stop in range(0, len(pattern), case.samples(quick=5, standard=2, full=1)):
        first = started(target, **settings)
        track(first, optimizer, pattern[:stop])
        second = torch.amp.GradScaler(target.device_type)
        second.load_state_dict(first.state_dict())
        second.scale(torch.ones((), device=target.device))
        case.equal(f"scales and counts when resumed at {stop}", track(second, optimizer, pattern[stop:]), whole[stop:])


DUPLICATES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
    "deepcopy": copy.deepcopy,
}


def expect_duplicate(case: Case, target: Target, name: str, use: bool) -> None:
    original = torch.amp.GradScaler(target.device_type)
    if use:
        # Not through load_state_dict: the scale that the scaler began with must differ from the present one.
        settings = {"init_scale": 384.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
        original = started(target, **settings)
        track(original, owning(torch.ones((), device=target.device)), "!.")
    else:
        original.load_state_dict(dict(RESUMED))
    case.equal("control: the original's state", original.state_dict(), RESUMED)
    duplicate = DUPLICATES[name](original)
    case.equal("type", type(duplicate) is type(original), True)
    case.equal("enabled", duplicate.is_enabled(), True)
    expect_resumed(case, target, duplicate)
    case.equal("the original's state after the duplicate was used", original.state_dict(), RESUMED)
    if use:
        original.update(48.0)  # which a scaler that has scaled nothing refuses
        case.equal("the original's scale after its next update(48.0)", original.get_scale(), 48.0)


@contract("AMP-SCALE-095")
@pytest.mark.parametrize("use", [False, True], ids=["before-use", "after-use"])
def test_pickle(case: Case, target: Target, use: bool) -> None:
    expect_duplicate(case, target, "pickle", use)


@contract("AMP-SCALE-096")
@pytest.mark.parametrize("use", [False, True], ids=["before-use", "after-use"])
def test_deepcopy(case: Case, target: Target, use: bool) -> None:
    expect_duplicate(case, target, "deepcopy", use)


@contract("AMP-SCALE-097")
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_pickle_within_an_iteration(case: Case, target: Target, call: str) -> None:
    scaler, optimizer = in_use(target)
    getattr(scaler, call)(optimizer)
    case.raises("pickling", AssertionError, lambda: pickle.dumps(scaler), match="pickled")
    scaler.update()
    case.equal(
        "control: state of one pickled after update()", DUPLICATES["pickle"](scaler).state_dict(), scaler.state_dict()
    )


# Disabled


def disabled(target: Target) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(target.device_type, enabled=False)


@contract("AMP-SCALE-100")
def test_disabled_scale(case: Case, target: Target) -> None:
    scaler = disabled(target)
    loss = torch.tensor(1.5, device=target.device)
    for what, outputs in (("tensor", loss), ("list", [loss]), ("tuple", (loss, [loss])), ("text", "no tensor")):
        case.true(f"scale() of a {what} returns the very object", scaler.scale(outputs) is outputs)
    case.equal("the loss", loss.item(), 1.5)


@contract("AMP-SCALE-101")
def test_disabled_step(case: Case, target: Target) -> None:
    scaler = disabled(target)
    for value in (2.0, math.inf, math.nan):
        optimizer = owning(torch.tensor(value, device=target.device), kind=lambda p: Recorder(p, "answer"))
        case.equal("step() returns", scaler.step(optimizer, 1, closure=2), "answer")
        case.equal("what optimizer.step got", optimizer.calls, [((1,), {"closure": 2})])
        case.identical("the parameter", parameters_of(optimizer)[0], torch.tensor(-value))
        scaler.step(optimizer)
        case.equal("calls after a second step", len(optimizer.calls), 2)


@contract("AMP-SCALE-102")
def test_disabled_unscale_and_update(case: Case, target: Target) -> None:
    scaler = disabled(target)
    optimizer = owning(
        torch.tensor([2.0, math.inf], device=target.device), torch.ones(1, dtype=torch.float16, device=target.device)
    )
    for what, call in (
        ("unscale_()", lambda: scaler.unscale_(optimizer)),
        ("unscale_() again", lambda: scaler.unscale_(optimizer)),
        ("update()", scaler.update),
        ("update(2.0)", lambda: scaler.update(2.0)),
    ):
        case.equal(f"{what} returns", call(), None)
        case.equal(f"gradients after {what}", parameters_of(optimizer)[0].grad.tolist(), [2.0, math.inf])
    case.equal("get_scale()", scaler.get_scale(), 1.0)


@contract("AMP-SCALE-103")
def test_disabled_reports(case: Case, target: Target) -> None:
    scaler = torch.amp.GradScaler(target.device_type, init_scale=48.0, enabled=False)
    case.equal("is_enabled()", scaler.is_enabled(), False)
    case.equal("get_scale()", scaler.get_scale(), 1.0)
    case.equal("state_dict()", scaler.state_dict(), {})


@contract("AMP-SCALE-104")
def test_disabled_load(case: Case, target: Target) -> None:
    scaler = disabled(target)
    for state in (dict(RESUMED), {}):
        case.equal("load_state_dict() returns", scaler.load_state_dict(state), None)
        case.equal("state_dict()", scaler.state_dict(), {})
        case.equal("get_scale()", scaler.get_scale(), 1.0)
    case.equal("enabled when pickled and loaded", DUPLICATES["pickle"](scaler).is_enabled(), False)


@contract("AMP-SCALE-105")
@pytest.mark.parametrize("getter", ["get_growth_factor", "get_backoff_factor", "get_growth_interval"])
def test_disabled_getters(case: Case, target: Target, getter: str) -> None:
    case.equal("control: get_scale()", disabled(target).get_scale(), 1.0)
    seen = "a number"
    try:
        getattr(disabled(target), getter)()
    except AttributeError as error:
        seen = f"AttributeError: {error}"
    case.equal(f"{getter}() of a disabled scaler", seen, "a number")


@contract("AMP-SCALE-106")
@pytest.mark.parametrize(
    "settings",
    [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_factor": 0.5, "backoff_factor": 2.0, "init_scale": 0.0}],
    ids=["growth", "backoff", "all"],
)
def test_disabled_settings(case: Case, target: Target, settings: dict[str, float]) -> None:
    case.raises(
        "an enabled scaler with these settings (control)",
        AssertionError,
        lambda: torch.amp.GradScaler(target.device_type, **settings),
    )
    scaler = torch.amp.GradScaler(target.device_type, enabled=False, **settings)
    case.equal("get_scale()", scaler.get_scale(), 1.0)
    case.equal("state_dict()", scaler.state_dict(), {})


# Several optimizers


@contract("AMP-SCALE-110")
@NON_FINITE
@pytest.mark.parametrize("dirty", [0, 1, 2])
@ROUTES
def test_only_the_bad_optimizer_skips(case: Case, target: Target, bad: float, dirty: int, explicit: bool) -> None:
    optimizers = [owning(torch.full((2,), 65536.0, device=target.device)) for _ in range(3)]
    parameters_of(optimizers[dirty])[0].grad[1] = bad
    scaler = started(target)
    if explicit:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
    for optimizer in optimizers:
        scaler.step(optimizer)
    case.equal("calls", [len(optimizer.calls) for optimizer in optimizers], [int(i != dirty) for i in range(3)])
    seen = [parameters_of(optimizer)[0].tolist() for optimizer in optimizers]
    case.equal("parameters", seen, [[0.0, 0.0] if i == dirty else [-1.0, -1.0] for i in range(3)])
    scaler.update()
    case.equal("scale", scaler.get_scale(), 32768.0)


@contract("AMP-SCALE-111")
@pytest.mark.parametrize("dirty", ["!.", ".!", "!!", "!!!"], ids=["first", "second", "both", "three"])
def test_one_backoff(case: Case, target: Target, dirty: str) -> None:
    optimizers = [owning(torch.ones(2, device=target.device)) for _ in dirty]
    scaler = started(target, growth_interval=4)
    iterate(scaler, *optimizers)
    for optimizer, letter in zip(optimizers, dirty, strict=True):
        give(optimizer, math.inf if letter == "!" else 1.0)
        scaler.step(optimizer)
    case.equal("scale before update()", scaler.get_scale(), 65536.0)
    scaler.update()
    case.equal("scale after update()", scaler.get_scale(), 32768.0)
    case.equal("growth tracker", tracker(scaler), 0)


@contract("AMP-SCALE-112")
def test_one_count(case: Case, target: Target) -> None:
    optimizers = [owning(torch.ones(2, device=target.device)) for _ in range(3)]
    scaler = started(target, growth_interval=2)
    seen = []
    for _ in range(4):
        iterate(scaler, *optimizers)
        seen.append((scaler.get_scale(), tracker(scaler)))
    case.equal("scales and counts", seen, [(65536.0, 1), (131072.0, 0), (131072.0, 1), (262144.0, 0)])


@contract("AMP-SCALE-113")
@NON_FINITE
def test_update_forgets(case: Case, target: Target, bad: float) -> None:
    one, two = (owning(torch.ones(2, device=target.device)) for _ in range(2))
    scaler = started(target, init_scale=4.0)
    give(one, bad)
    give(two, 1.0)
    scaler.step(one)
    scaler.unscale_(two)
    scaler.update()
    give(one, 2.0)
    give(two, 2.0)
    scaler.unscale_(one)
    scaler.step(one)
    scaler.step(two)
    case.equal("calls", [len(one.calls), len(two.calls)], [1, 1])
    case.equal("gradients of the second, unscaled by 2", parameters_of(two)[0].grad.tolist(), [1.0, 1.0])
    scaler.update()
    case.equal("scale, backed off once in two iterations", (scaler.get_scale(), tracker(scaler)), (2.0, 1))


@contract("AMP-SCALE-114")
@NON_FINITE
@pytest.mark.parametrize("dirty", [0, 1])
def test_inf_seen_by_unscale(case: Case, target: Target, bad: float, dirty: int) -> None:
    optimizers = [owning(torch.ones(2, device=target.device)) for _ in range(2)]
    give(optimizers[dirty], bad)
    scaler = started(target)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    scaler.step(optimizers[1 - dirty])
    scaler.update()
    case.equal("scale", scaler.get_scale(), 32768.0)
    case.equal("growth tracker", tracker(scaler), 0)


# Optimizers that unscale by themselves


@contract("AMP-SCALE-120")
@pytest.mark.parametrize("value", [2.0, math.inf, -math.inf, math.nan], ids=["finite", "inf", "minus-inf", "nan"])
def test_handed_scale_and_flag(case: Case, target: Target, value: float) -> None:
    gradients = [torch.tensor([2.0, last], device=target.device) for last in (2.0, value)]
    optimizer = owning(*gradients, kind=SelfScaling)
    scaler = started(target, init_scale=48.0)
    found = 0.0 if math.isfinite(value) else 1.0
    case.equal("step() returns", scaler.step(optimizer), "stepped")
    case.equal("scale and flag it was handed", optimizer.handed, [(48.0, found)])
    case.equal("gradients it was handed, still scaled", gradients[0].tolist(), [2.0, 2.0])
    left = [name for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)]
    case.equal("attributes left on the optimizer", left, [])
    case.raises("step twice", RuntimeError, lambda: scaler.step(optimizer), match="already been called")
    scaler.update()
    case.equal("scale and tracker", (scaler.get_scale(), tracker(scaler)), (24.0, 0) if found else (48.0, 1))


@contract("AMP-SCALE-121")
@pytest.mark.parametrize("value", [96.0, math.inf, math.nan], ids=["finite", "inf", "nan"])
def test_handed_no_scale_after_unscale(case: Case, target: Target, value: float) -> None:
    gradients = [torch.tensor([96.0], device=target.device), torch.tensor([value], device=target.device)]
    optimizer = owning(*gradients, kind=SelfScaling)
    scaler = started(target, init_scale=48.0)
    found = 0.0 if math.isfinite(value) else 1.0
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    case.equal("scale and flag it was handed", optimizer.handed, [(None, found)])
    case.equal("gradients, unscaled once", gradients[0].tolist(), [2.0])
    scaler.update()
    case.equal("scale", scaler.get_scale(), 24.0 if found else 48.0)


@contract("AMP-SCALE-121")
def test_handed_flag_stands(case: Case, target: Target) -> None:
    optimizer = owning(torch.tensor([math.inf], device=target.device), kind=SelfScaling)
    scaler = started(target)
    scaler.unscale_(optimizer)
    give(optimizer, 1.0)
    scaler.step(optimizer)
    case.equal("scale and flag after the bad gradient was replaced", optimizer.handed, [(None, 1.0)])


@contract("AMP-SCALE-122")
def test_preset_scale_multiplies(case: Case, target: Target) -> None:
    optimizer = owning(torch.ones(2, device=target.device), kind=SelfScaling)
    scaler = started(target, init_scale=48.0)
    optimizer.grad_scale = torch.tensor(4.0, device=target.device)
    scaler.step(optimizer)
    case.equal("scale and flag it was handed", optimizer.handed, [(192.0, 0.0)])
    case.equal("the scaler's own scale", scaler.get_scale(), 48.0)


@contract("AMP-SCALE-123")
@pytest.mark.parametrize("value", [96.0, math.inf], ids=["finite", "inf"])
def test_handed_scaler(case: Case, target: Target, value: float) -> None:
    optimizer = owning(torch.tensor([96.0, value], device=target.device), kind=TakesScaler)
    scaler = started(target, init_scale=48.0)
    answer = case.warns("step()", FutureWarning, lambda: scaler.step(optimizer), match="found_inf")
    case.equal("step() returns", answer, "stepped")
    found = 0.0 if math.isfinite(value) else 1.0
    case.true("what its step got is the scaler", [handed for handed, _ in optimizer.handed] == [scaler])
    case.equal(
        "the flag that it asked the scaler for, twice", [flags for _, flags in optimizer.handed], [[found, found]]
    )
    case.equal("its gradient, unscaled", parameters_of(optimizer)[0].grad[0].item(), 2.0)
    scaler.update()
    case.equal("scale and tracker", (scaler.get_scale(), tracker(scaler)), (24.0, 0) if found else (48.0, 1))


@contract("AMP-SCALE-124")
def test_fp16_sparse_gradients_are_added_first(case: Case, target: Target) -> None:
    for values, found in (([40000.0, 40000.0], 1.0), ([20000.0, 20000.0], 0.0), ([1.0, math.inf], 1.0)):
        optimizer = owning(torch.zeros(8, dtype=torch.float16, device=target.device), kind=SelfScaling)
        parameters_of(optimizer)[0].grad = sparse(values, torch.float16, target, coalesced=False)
        scaler = started(target)
        scaler.step(optimizer)
        case.equal(f"the flag for {values} at one index", optimizer.handed, [(65536.0, found)])


# Other spellings


def expect_same_scaler(case: Case, device: torch.device, old: Any, new: Any) -> None:
    """Two scalers of equal settings say and do the same; `new` is torch.amp.GradScaler's."""
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
        # The warnings are the subject of the api chapter.
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
    scaler.update(torch.tensor(48.0))  # which asks for a tensor of the scaler's device
    case.equal("the scale after update() with a tensor", scaler.get_scale(), 48.0)


@contract("AMP-SCALE-131")
@pytest.mark.parametrize("cuda", ["as-it-is", "there"])
def test_cuda_spelling(case: Case, cuda: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with contextlib.nullcontext() if cuda == "as-it-is" else cuda_that_says(bf16=True):
        expect_old_spelling(case, torch.cuda.amp.GradScaler, device, "cuda")
