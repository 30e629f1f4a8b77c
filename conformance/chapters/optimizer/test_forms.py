"""Check capturable and differentiable optimizers, tensor learning rates, sparse and 16-bit gradients, at any scale."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.message_names import FP16
from ...oracles.numbers import unscaling as exact
from ...oracles.optimizer_state import differences, gradients, snapshot
from ...scaler import model as oracle
from ...workloads.linear_loss import LinearLoss, with_nonfinite
from .optimizer_configs import OptimizerConfig
from .parameter_kinds import counts_steps, unit
from .support import ALL, ROUTES, build, clones, iterate, left_on, over_optimizers, unmoved

U = 2.0**-24


def outcome(
    optimizer: Any, slopes: LinearLoss, steps: Sequence[Sequence[torch.Tensor]], scaler: Any = None
) -> str | None:
    """Take the steps; return the exception that was raised as text, or None."""
    for step in steps:
        try:
            iterate(optimizer, slopes.loss(step), scaler)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def expect_same_as_without(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, changes: Callable[[], dict[str, Any]]
) -> None:
    """Expect the steps, or exceptions, of a run without scaler with these arguments, and that skipped steps skip."""
    case.require_arithmetic(target, torch.float64)  # of the scaler, whose exceptions are compared
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    build(case, kind, slopes.copy())
    twin = slopes.copy()
    try:
        optimizer, plain = kind.make(slopes.groups(), **changes()), kind.make(twin.groups(), **changes())
    except (ValueError, RuntimeError) as error:
        case.unsupported(f"{kind.id} rejects these arguments: {error}")
    scaler = torch.amp.GradScaler(target.device_type)
    clean = [slopes.draw(rng) for _ in range(3)]
    raised = outcome(plain, twin, clean)
    if not kind.fused:
        before = snapshot(optimizer)
        case.equal(
            "what a skipped first step raises",
            outcome(optimizer, slopes, [with_nonfinite(clean[0], "first", math.nan)], scaler),
            None,
        )
        case.equal("differences after it", differences(snapshot(optimizer), before), [])
    case.equal("exception of a step through the scaler", outcome(optimizer, slopes, clean, scaler), raised)
    case.equal("differences from a run without scaler", differences(snapshot(optimizer), snapshot(plain)), [])
    if raised is None:
        before = snapshot(optimizer)
        for value in (math.inf, -math.inf, math.nan):
            iterate(optimizer, slopes.loss(with_nonfinite(clean[0], "last", value)), scaler)
            case.equal(f"differences after a step skipped for {value}", differences(snapshot(optimizer), before), [])


@contract("AMP-OPTIMIZER-023")
@over_optimizers(lambda kind: kind.accepts("capturable"), variants=None)
def test_capturable(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    expect_same_as_without(case, target, rng, kind, lambda: {"capturable": True})


@contract("AMP-OPTIMIZER-024")
@over_optimizers(
    lambda kind: kind.accepts("lr") and not (kind.optimizer in ("Adam", "AdamW") and kind.implementation == "foreach"),
    variants=None,
)
def test_rate_in_a_tensor(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    expect_same_as_without(case, target, rng, kind, lambda: {"lr": torch.tensor(0.25)})


def differentiated(
    kind: OptimizerConfig, slopes: LinearLoss, steps: Sequence[Sequence[torch.Tensor]], scaler: Any
) -> dict[str, Any]:
    """Return the parameters after the steps, and their derivatives with respect to the initial parameters."""
    start = [parameter.detach().clone().requires_grad_() for parameter in slopes.moving]
    parameters = [parameter.clone() for parameter in start]
    optimizer = kind.make(parameters, differentiable=True)
    for step in steps:
        loss = torch.ones((), device=start[0].device)
        scale = 1.0 if scaler is None else scaler.scale(loss).item()
        for parameter, slope in zip(parameters, step, strict=True):
            parameter.grad = slope * scale
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    result = torch.stack([parameter.square().sum() for parameter in parameters]).sum()
    derivatives = torch.autograd.grad(result, start)
    return {f"{what} {i}": tensor.detach() for what, tensors in (("parameter", parameters), ("derivative", derivatives))
            for i, tensor in enumerate(tensors)}  # fmt: skip


@contract("AMP-OPTIMIZER-025")
@over_optimizers(
    lambda kind: kind.accepts("differentiable") and kind.implementation == "for-loop" and kind.gradients != "sparse",
    variants="standard",
)
def test_differentiable(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    build(case, kind, slopes.copy())
    clean = slopes.draw(rng)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        plain = differentiated(kind, slopes, [clean], None)
        scaled = differentiated(kind, slopes, [clean], torch.amp.GradScaler(target.device_type))
        skipping = [with_nonfinite(clean, "first", math.nan), clean, with_nonfinite(clean, "last", math.inf)]
        skipped = differentiated(kind, slopes, skipping, torch.amp.GradScaler(target.device_type))
    case.equal("parameters and derivatives that differ from those without scaler", differences(scaled, plain), [])
    case.equal("the same with a skipped step before and after", differences(skipped, plain), [])
    flat = [name for name, value in plain.items() if name.startswith("derivative") and not value.any()]
    case.equal("control: derivatives that are zero", flat, [])


# Sparse gradients


@contract("AMP-OPTIMIZER-026")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=kind.id) for kind in ALL if kind.gradients == "sparse" and not kind.fused]
)
def test_sparse_gradients(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    build(case, kind, LinearLoss.make("sparse", target.device, rng))
    values = torch.rand((9, 3), generator=rng).to(target.device), torch.rand((3, 2), generator=rng).to(target.device)
    # SparseAdam takes no dense gradients; the others step a dense weight as well as the table of embeddings.
    used = 1 if kind.optimizer == "SparseAdam" else 2
    runs = [[torch.nn.Parameter(part.clone()) for part in values] for _ in range(2)]
    optimizer, plain = (kind.make(run[:used]) for run in runs)
    scaler = torch.amp.GradScaler(target.device_type)
    rows = torch.tensor([4, 0, 4, 4, 8], device=target.device)

    def loss(run: list[torch.nn.Parameter], slope: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.embedding(rows, run[0], sparse=True)
        return (found * slope).sum() + (found.detach() @ run[1]).sum()

    for bad in (None, math.inf, None, -math.inf, math.nan, None):
        slope = torch.randn((5, 3), generator=rng).to(target.device)
        before, bad_slope = snapshot(optimizer), slope.clone()
        if bad is None:
            iterate(plain, loss(runs[1], slope))
        else:
            bad_slope[3, 1] = bad  # in one of three entries of row 4
        iterate(optimizer, loss(runs[0], bad_slope), scaler)
        case.equal("the table's gradient is sparse", runs[0][0].grad.is_sparse, True)
        seen, expected = snapshot(optimizer), before
        if bad is None:
            seen |= gradients(runs[0][:used])
            expected = snapshot(plain) | gradients(runs[1][:used])
        what = "a run without scaler" if bad is None else "before a skipped step"
        case.equal(f"differences from {what}", differences(seen, expected), [])


# Places (sparse dimensions first) and values of gradients of a (9, 3) table.
ENTRIES: dict[str, tuple[list[list[int]], tuple[int, ...]]] = {
    "rows": ([[0, 2, 8]], (3, 3)),
    "repeated": ([[2, 2, 5]], (3, 3)),
    "none": ([[]], (0, 3)),
    "single": ([[0, 2, 8], [1, 1, 2]], (3,)),
}
# The layouts of the gradients of two parameters.
PAIRS = (
    ("rows", "dense"), ("dense", "rows"), ("none", "dense"), ("dense", "none"), ("repeated", "dense"),
    ("single", "dense"), ("rows", "none"), ("repeated", "single"), ("none", "none"),
)  # fmt: skip


@contract("AMP-OPTIMIZER-112")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=kind.id) for kind in ALL if kind.gradients == "sparse" and not kind.fused]
)
def test_layouts_of_gradients(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    build(case, kind, LinearLoss.make("sparse", target.device, rng))
    plain_kind = next(
        one
        for one in ALL
        if (one.optimizer, one.variant) == (kind.optimizer, kind.variant) and not one.flags.get("foreach")
    )
    wrong, moved = [], 0
    single, double = torch.float32, torch.float64
    dtypes = [(single, single), *([(single, double), (double, single)] if target.computes_in(double) else [])]
    for pair, types in itertools.product(PAIRS, dtypes):
        if kind.optimizer == "SparseAdam" and "dense" in pair:
            continue
        start = [torch.rand((9, 3), generator=rng).to(target.device, dtype) for dtype in types]
        ours, unscaled, theirs = ([torch.nn.Parameter(part.clone()) for part in start] for _ in range(3))
        optimizer, same, plain = kind.make(ours), kind.make(unscaled), plain_kind.make(theirs)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**10)
        scaler.scale(torch.zeros((), device=target.device))
        for _ in range(3):
            for mine, *twins, layout in zip(ours, unscaled, theirs, pair, strict=True):
                gradient = _of_layout(layout, rng).to(target.device, mine.dtype)
                mine.grad = gradient * 2.0**10
                for twin in twins:
                    twin.grad = gradient.clone()
            scaler.step(optimizer)
            scaler.update()
            same.step()
            plain.step()
        name = " and ".join(f"{layout} in {dtype}" for layout, dtype in zip(pair, types, strict=True))
        found = [f"{place}, from the for-loop" for place in _apart(ours, theirs)]
        if target.device_type == "cpu":
            states = ({k: v for k, v in snapshot(one).items() if "param_groups" not in k} for one in (optimizer, same))
            found += differences(*states)
        wrong += [f"{name}: {place}" for place in found]
        for mine, before, layout in zip(ours, start, pair, strict=True):
            moves = not torch.equal(mine, before)
            moved += moves
            if moves != (layout != "none"):
                wrong.append(f"{name}: the parameter with {layout} gradients {'moved' if moves else 'did not move'}")
    case.at_least("parameters that moved", moved, 1)
    case.equal("differences from steps without a scaler", wrong[:3], [])


def _stepped(optimizer: Any, scaler: torch.amp.GradScaler | None = None) -> str:
    """Take one step; return the class of what was raised, or ""."""
    try:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    except Exception as error:
        # What a step that raises leaves on an optimizer is the matter of AMP-OPTIMIZER-068.
        for name in left_on(optimizer):
            delattr(optimizer, name)
        return type(error).__name__
    return ""


def _give(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value.to(parameter.device, parameter.dtype) * scale


@contract("AMP-OPTIMIZER-115")
@over_optimizers(variants="full")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sparse_gradients_are_taken_or_refused(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, dtype: torch.dtype
) -> None:
    case.require_arithmetic(target, dtype, torch.float64)
    build(case, kind, LinearLoss.make(kind.gradients, target.device, rng))
    wrong, refused = [], 0
    for layouts in (("repeated",), ("repeated", "dense"), ("dense", "repeated")):
        start = [torch.rand((9, 3), generator=rng).to(target.device, dtype) for _ in layouts]
        ours, theirs = ([torch.nn.Parameter(part.clone()) for part in start] for _ in range(2))
        optimizer, plain = kind.make(ours), kind.make(theirs)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**10)
        scaler.scale(torch.zeros((), device=target.device))
        name = f"{' and '.join(layouts)}"
        before = _everything(optimizer)
        bad = [_of_layout(layout, rng) for layout in layouts]
        _give(ours, [_with_inf_in_one_entry(one) for one in bad])
        raised = _stepped(optimizer, scaler)
        if not kind.fused and (raised or differences(_everything(optimizer), before)):
            wrong.append(f"{name}: an inf in one of two entries of a row: {raised or 'the step was taken'}")
        if kind.fused and differences(_of_parameters(optimizer), _of_parameters(plain)):
            wrong.append(f"{name}: an inf in one of two entries of a row: parameters moved")
        scaler.update()
        scale = scaler.get_scale()
        wrong += [] if raised or scale == 2.0**9 else [f"{name}: the scale is {scale} after a skipped step"]
        for step in (layouts, layouts, ("dense",) * len(layouts)):
            values = [_of_layout(layout, rng) for layout in step]
            _give(ours, values, scale)
            _give(theirs, values)
            seen, expected = _stepped(optimizer, scaler), _stepped(plain)
            refused += bool(seen)
            if seen != expected:
                wrong.append(f"{name}: raised {seen or 'nothing'}, without a scaler {expected or 'nothing'}")
            scaler.update()
            on_cpu = target.device_type == "cpu"
            found = differences(_everything(optimizer), _everything(plain)) if on_cpu else _apart(ours, theirs)
            wrong += [f"{name}: {place}" for place in found]
    case.note("steps that were refused", refused)
    case.equal("differences from a run without a scaler", wrong[:3], [])


def _with_inf_in_one_entry(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with an infinity in the first of its entries, in a row that has another."""
    if not gradient.is_sparse:
        return gradient
    values = gradient._values().clone()
    values[0, 1] = math.inf
    return torch.sparse_coo_tensor(gradient._indices(), values, gradient.shape)


def _everything(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return parameters and state, without the settings of the groups."""
    return {place: value for place, value in snapshot(optimizer).items() if "param_groups" not in place}


def _of_parameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {place: value for place, value in snapshot(optimizer).items() if place.startswith("parameter")}


def _apart(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> list[str]:
    """Say which parameters are further apart than roundings: kernels of several tensors may fuse multiply and add."""
    worst = {number: _roundings(a, b) for number, (a, b) in enumerate(zip(ours, theirs, strict=True))}
    return [
        f"parameter {number}, by {roundings:.3g} roundings"
        for number, roundings in worst.items()
        if not roundings <= 32
    ]


def _roundings(seen: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the greatest difference in roundings of the expected value, or of 1 where that is larger."""
    return float(((seen - expected).abs() / expected.abs().clamp(min=1)).max()) / unit(seen.dtype)


def _but_for_roundings(seen: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot with the expected tensor in place of each that differs from it by 32 roundings at most."""

    def near(value: Any, other: Any) -> bool:
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            return False
        alike = (value.dtype, value.shape) == (other.dtype, other.shape) and value.is_floating_point()
        return alike and value.numel() > 0 and _roundings(value, other) <= 32

    return {
        place: expected[place] if place in expected and near(value, expected[place]) else value
        for place, value in seen.items()
    }


def _of_layout(layout: str, rng: torch.Generator) -> torch.Tensor:
    if layout == "dense":
        return torch.randn((9, 3), generator=rng)
    places, shape = ENTRIES[layout]
    indices = torch.tensor(places, dtype=torch.int64).reshape(len(places), -1)
    return torch.sparse_coo_tensor(indices, torch.randn(shape, generator=rng), (9, 3))


# Parameters of other dtypes


def of_dtype(slopes: LinearLoss, dtype: torch.dtype) -> LinearLoss:
    return LinearLoss(
        tuple(torch.nn.Parameter(each.detach().to(dtype)) for each in slopes.parameters), slopes.gradients
    )


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])


def elements_left(target: Target, kind: OptimizerConfig, dtype: torch.dtype) -> int:
    """Return how many of 64 elements, which are whole vectors, a step in `dtype` does not change."""
    shape = (8, 8) if kind.gradients == "matrices" else (64,)
    parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=target.device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = kind.make([parameter])
    for group in optimizer.param_groups:
        group["lr"] = torch.full_like(group["lr"], 0.5) if isinstance(group["lr"], torch.Tensor) else 0.5
    optimizer.step()
    return int((parameter.detach() == 1).sum())


@contract("AMP-OPTIMIZER-027")
@over_optimizers(lambda kind: kind.gradients != "sparse", variants="full")
@DTYPES
def test_other_dtypes(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, dtype: torch.dtype
) -> None:
    case.require_arithmetic(target, dtype)
    build(case, kind, LinearLoss.make(kind.gradients, target.device, rng))
    if still := elements_left(target, kind, dtype):
        # State that a kernel does not write is uninitialised memory in both runs.
        case.untestable(f"the {kind.id} kernel leaves {still} of 64 elements of {dtype} unchanged (AMP-OPTIMIZER-047)")
    for explicit in ROUTES:
        slopes = of_dtype(LinearLoss.make(kind.gradients, target.device, rng), dtype)
        twin = slopes.copy()
        optimizer, plain = kind.make(slopes.groups()), kind.make(twin.groups())
        scaler = torch.amp.GradScaler(target.device_type)
        for number in range(3):
            slope = [part.to(dtype) for part in slopes.draw(rng)]
            iterate(optimizer, slopes.loss(slope), scaler, explicit=explicit)
            iterate(plain, twin.loss(slope))
            if number == 0:
                before = snapshot(optimizer)
                iterate(optimizer, slopes.loss(with_nonfinite(slope, "last", math.inf)), scaler, explicit=explicit)
                case.equal("differences after a skipped step", differences(snapshot(optimizer), before), [])
        seen = {**snapshot(optimizer), **gradients(slopes.parameters)}
        expected = {**snapshot(plain), **gradients(twin.parameters)}
        case.equal(
            "parameters, state and gradients that differ from a run without scaler", differences(seen, expected), []
        )
    counters = [value for place, value in seen.items() if place.endswith("/step") and torch.is_tensor(value)]
    poor = {str(value.dtype) for value in counters if not counts_steps("step", value)}
    case.equal("dtypes of step counters that do not count every step", sorted(poor), [])


@contract("AMP-OPTIMIZER-028", dtypes=("fp16",))
@over_optimizers(lambda kind: kind.gradients != "sparse", variants=None)
def test_fp16_parameters(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    case.require_arithmetic(target, torch.float16, torch.float64)
    build(case, kind, LinearLoss.make(kind.gradients, target.device, rng))
    slopes = of_dtype(LinearLoss.make(kind.gradients, target.device, rng), torch.float16)
    twin = slopes.copy()
    optimizer, plain = kind.make(slopes.groups()), kind.make(twin.groups())
    scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**8)
    clean = [[part.half() for part in slopes.draw(rng)] for _ in range(2)]
    before = snapshot(optimizer)
    optimizer.zero_grad()
    scaler.scale(slopes.loss(clean[0])).backward()
    case.raises("unscale_()", ValueError, lambda: scaler.unscale_(optimizer), names=(FP16,))
    if not kind.scales_itself:
        case.raises("step()", ValueError, lambda: scaler.step(optimizer), names=(FP16,))
        case.equal("differences after the exceptions", differences(snapshot(optimizer), before), [])
        return
    if still := elements_left(target, kind, torch.float16):
        # State that a kernel does not write is uninitialised memory in both runs.
        case.note("elements of 64 that the kernel does not change (AMP-OPTIMIZER-047)", still)
        return
    scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**8)
    if (raised := outcome(optimizer, slopes, clean[:1], scaler)) is not None:
        case.true("step() refuses them by ValueError", raised.startswith("ValueError"), raised)
        case.equal("differences after the exception", differences(snapshot(optimizer), before), [])
        return
    iterate(plain, twin.loss(clean[0]))
    for slope in clean[1:]:
        iterate(optimizer, slopes.loss(slope), scaler)
        iterate(plain, twin.loss(slope))
    case.equal("differences from a run without scaler", differences(snapshot(optimizer), snapshot(plain)), [])
    before = snapshot(optimizer)
    iterate(optimizer, slopes.loss(with_nonfinite(clean[0], "last", math.inf)), scaler)
    case.equal("differences after a skipped step", differences(snapshot(optimizer), before), [])


@contract("AMP-OPTIMIZER-084")
@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64],
    ids=["fp16", "bf16", "fp32", "fp64"],
)
@over_optimizers(lambda kind: kind.implementation != "for-loop" and kind.gradients == "dense", variants=None)
def test_same_types_in_every_implementation(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, dtype: torch.dtype
) -> None:
    case.require_arithmetic(target, dtype)

    def accepted(one: OptimizerConfig) -> str:
        """Return that a step through the scaler is taken, or the class of its error."""
        slopes = of_dtype(LinearLoss.make(one.gradients, target.device, rng), dtype)
        optimizer = build(case, one, slopes)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**8)
        raised = outcome(optimizer, slopes, [[part.to(dtype) for part in slopes.draw(rng)]], scaler)
        return "steps" if raised is None else raised.split(":")[0]

    reference = replace(kind, implementation="for-loop")
    case.equal(f"step() for {dtype} gradients, against the for-loop", accepted(kind), accepted(reference))


@contract("AMP-OPTIMIZER-047")
@over_optimizers(lambda kind: kind.gradients == "dense", quick=(), variants=None)
def test_bf16_steps(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    expect_first_step(case, target, rng, kind, torch.bfloat16)


@contract("AMP-OPTIMIZER-047", dtypes=("fp16",))
@over_optimizers(lambda kind: kind.scales_itself, quick=(), variants=None)
def test_fp16_steps(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    expect_first_step(case, target, rng, kind, torch.float16)


def expect_first_step(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, dtype: torch.dtype
) -> None:
    """Bound the error: a first step rounds the parameter at most twice, and its change in at most 32 operations."""
    case.require_arithmetic(target, dtype)
    build(case, kind, LinearLoss.make(kind.gradients, target.device, rng))
    unit = torch.finfo(dtype).eps / 2
    # Whole vectors of 16-bit numbers and a remainder.
    values = [(1 + torch.rand(shape, generator=rng)).to(dtype) for shape in ((3, 2), (8, 9))]
    slopes = [(0.5 + torch.rand(value.shape, generator=rng)).to(dtype) for value in values]
    parameters = [torch.nn.Parameter(value.to(target.device, copy=True)) for value in values]
    wide = [torch.nn.Parameter(value.double()) for value in values]
    reference = next(one for one in ALL if (one.optimizer, one.implementation) == (kind.optimizer, "for-loop"))
    optimizer, exact_optimizer = kind.make(parameters), reference.make(wide)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**8)
    scaler.scale(torch.ones((), device=target.device))
    for parameter, other, slope in zip(parameters, wide, slopes, strict=True):
        parameter.grad = (slope * 2**8).to(target.device)
        other.grad = slope.double()
    scaler.step(optimizer)
    exact_optimizer.step()
    worst, still = 0.0, 0
    for parameter, other, value in zip(parameters, wide, values, strict=True):
        way = (other.detach() - value.double()).abs()
        bound = unit * (2 * (other.detach().abs() + way) + 32 * way)
        seen = parameter.detach().cpu()
        worst = max(worst, float(((seen.double() - other.detach()).abs() / bound).max()))
        still += int((seen == value).sum())
    case.equal("elements that did not move", still, 0)
    case.at_most("largest distance of an element from the step in float64", worst, 1.0, "of its bound")


@contract("AMP-OPTIMIZER-116")
@over_optimizers(lambda kind: kind.gradients == "dense" and kind.implementation != "for-loop")
def test_fp64_steps(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    case.require_arithmetic(target, torch.float64)
    build(case, kind, LinearLoss.make(kind.gradients, target.device, rng))
    values = [1 + torch.rand(shape, generator=rng).double() for shape in ((3, 2), (8, 9))]
    ours = [torch.nn.Parameter(value.to(target.device, copy=True)) for value in values]
    theirs = [torch.nn.Parameter(value.clone()) for value in values]
    reference = replace(kind, implementation="for-loop")
    optimizer, plain = kind.make(ours), reference.make(theirs)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**10)
    scaler.scale(torch.ones((), device=target.device))
    for _ in range(3):
        slopes = [0.5 + torch.rand(value.shape, generator=rng).double() for value in values]
        _give(ours, slopes, 2.0**10)
        _give(theirs, slopes)
        scaler.step(optimizer)
        scaler.update()
        plain.step()
    worst, single = 0.0, 0.0
    for mine, twin, value in zip(ours, theirs, values, strict=True):
        way = (twin.detach() - value).abs()
        bound = 2.0**-40 * (way + value)
        worst = max(worst, float(((mine.detach().cpu() - twin.detach()).abs() / bound).max()))
        single = max(single, float(((twin.detach().float() - twin.detach()).abs() / bound).max()))
    # Three steps of tens of operations in float64; of 1 - beta, which divides, a thousand roundings may be lost.
    case.at_most("largest distance of an element from the for-loop in float64", worst, 1.0, "of 2^-40 of its size")
    case.at_least("control: the same parameters rounded to float32", single, 100.0, "of 2^-40 of their size")


# Scales


EXPONENTS = range(-10, 25)


@contract("AMP-OPTIMIZER-039")
@over_optimizers(variants="full")
def test_any_power_of_two(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    """Compare bit for bit: gradients of 24 significant bits within 2^±20 stay normal fp32 numbers at these scales,
    whether an implementation multiplies by the reciprocal or divides by the scale."""
    start = LinearLoss.make(kind.gradients, target.device, rng)
    twin = start.copy()
    plain = build(case, kind, twin)
    slope = start.draw(rng)
    iterate(plain, twin.loss(slope))
    expected = {**snapshot(plain), **gradients(twin.parameters)}
    wrong = []
    exponents = {"quick": (*EXPONENTS[::7], 24), "standard": EXPONENTS[::3], "full": EXPONENTS}[case.level]
    for number, exponent in enumerate(exponents):
        slopes = start.copy()
        scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**exponent)
        optimizer = kind.make(slopes.groups())
        iterate(optimizer, slopes.loss(slope), scaler, explicit=number % 2 == 0)
        found = differences({**snapshot(optimizer), **gradients(slopes.parameters)}, expected)
        wrong += [f"2^{exponent}: {found}"] if found else []
    case.equal("scales whose step differs from the one without scaler", wrong[:3], [])


@contract("AMP-OPTIMIZER-043")
@over_optimizers(lambda kind: kind.gradients != "sparse", variants=None)
def test_any_other_scale(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    """Bound the error of the gradients: one rounding of the scaled one, one of the reciprocal, one of the product."""
    case.require_arithmetic(target, torch.float64)
    start = LinearLoss.make(kind.gradients, target.device, rng)
    values = start.draw(rng)
    scales = (12345.678, 3.0, 65535.0, 0.1)
    for scale in scales[: case.samples(quick=1, standard=1, full=4)]:
        kept = oracle.rounded(scale, oracle.FP32)
        scaled = [exact.unscaled(slope.cpu(), kept) for slope in values]
        products = [exact.unscaled(one, oracle.reciprocal(kept)) for one in scaled]
        quotients = [(one.double() / kept).to(one.dtype) for one in scaled]
        for explicit in ROUTES:
            slopes, twin = start.copy(), start.copy()
            optimizer, plain = build(case, kind, slopes), build(case, kind, twin)
            scaler = torch.amp.GradScaler(target.device_type, init_scale=scale)
            iterate(optimizer, slopes.loss(values), scaler, explicit=explicit)
            worst = 0.0
            for parameter, other, slope in zip(slopes.moving, twin.moving, values, strict=True):
                other.grad = parameter.grad.clone()
                true = slope.cpu().double()
                worst = max(worst, float(((parameter.grad.cpu().double() - true).abs() / true.abs()).max()))
            what = f"scale {scale}, {'unscale_ first' if explicit else 'step alone'}"
            case.at_most(f"largest relative error of a gradient ({what})", worst, 3 * U / (1 - 3 * U))
            if explicit or not kind.scales_itself:
                ways = zip(slopes.moving, products, quotients, strict=True)
                for number, (parameter, product, quotient) in enumerate(ways):
                    divided = torch.equal(parameter.grad.cpu(), quotient)  # as is documented
                    case.identical(f"gradient {number} ({what})", parameter.grad, quotient if divided else product)
            plain.step()
            seen, expected = snapshot(optimizer), snapshot(plain)
            if not explicit and kind.scales_itself:  # its kernel may keep what it divided in more bits than .grad has
                seen = _but_for_roundings(seen, expected)
            changed = differences(seen, expected)
            case.equal(f"differences from a plain step on those gradients ({what})", changed, [])
            case.equal("control: parameters that did not move", unmoved(slopes, clones(start)), [])


# Lists of parameters, groups and layouts

# Around the number of tensors that one launch of multi_tensor_apply takes with two to five lists.
COUNTS = (111, 31, *(count for count in (30, 36, 37, 48, 49, 64, 65, 110, 321)))


@contract("AMP-OPTIMIZER-044")
@over_optimizers(lambda kind: kind.implementation in ("foreach", "fused") and kind.gradients == "dense", variants=None)
def test_long_lists(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    build(case, kind, LinearLoss.make(kind.gradients, target.device, rng))
    wrong: list[str] = []
    empty = 0 if _takes_empty(kind, target) else 5
    counts = COUNTS[: case.samples(quick=1, standard=2, full=len(COUNTS))]
    for count in counts:
        lengths = [(3, 1, empty, 9, 2)[index % 5] for index in range(count)]
        values = [torch.rand(length, generator=rng).to(target.device) + 1 for length in lengths]
        slopes = [torch.randn(length, generator=rng).to(target.device) for length in lengths]
        listed = [torch.nn.Parameter(value.clone()) for value in values]
        alone = [torch.nn.Parameter(value.clone()) for value in values]
        optimizer, scaler = kind.make(listed), torch.amp.GradScaler(target.device_type)
        filled = [index for index, length in enumerate(lengths) if length]
        for bad in (None, filled[0], filled[len(filled) // 2], filled[-1]):
            before = snapshot(optimizer)
            optimizer.zero_grad()
            scaler.scale(
                torch.stack([(p * slope).sum() for p, slope in zip(listed, slopes, strict=True)]).sum()
            ).backward()
            if bad is not None:
                listed[bad].grad[-1] = math.nan
            scaler.step(optimizer)
            scaler.update()
            if bad is not None and (found := differences(snapshot(optimizer), before)):
                wrong.append(f"NaN in parameter {bad} of {count}: {found}")
            if bad is None:
                for parameter, slope in zip(alone, slopes, strict=True):
                    single = kind.make([parameter])
                    parameter.grad = slope.clone()
                    single.step()
                found = differences(numbered(listed), numbered(alone))
                wrong += [f"{count} parameters, against each alone: {found}"] if found else []
    case.equal("lists that differ from optimizers of each parameter alone", wrong[:2], [])


def numbered(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(number): tensor.detach() for number, tensor in enumerate(tensors)}


def _takes_empty(kind: OptimizerConfig, target: Target) -> bool:
    parameter = torch.nn.Parameter(torch.zeros(0, device=target.device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        kind.make([parameter]).step()
    except (ArithmeticError, RuntimeError):  # Adafactor divides by the number of elements
        return False
    return True


@contract("AMP-OPTIMIZER-045")
@over_optimizers(
    lambda kind: kind.implementation in ("foreach", "fused"), quick=("SGD", "Adam", "Adagrad"), variants=None
)
@pytest.mark.parametrize("inner", [True, False], ids=["one-group-differs", "one-group-has-it"])
def test_implementations_by_group(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, inner: bool
) -> None:
    flag = kind.implementation

    def made(slopes: LinearLoss) -> Any:
        first, second = slopes.groups()
        return kind.make([first, {**second, flag: not inner}], **{flag: inner})

    slopes = LinearLoss.make(kind.gradients, target.device, rng)
    build(case, kind, slopes.copy())
    twin = slopes.copy()
    optimizer, plain = made(slopes), made(twin)
    scaler = torch.amp.GradScaler(target.device_type)
    for number in range(2):
        slope = slopes.draw(rng)
        iterate(optimizer, slopes.loss(slope), scaler, explicit=number == 1)
        iterate(plain, twin.loss(slope))
        before = snapshot(optimizer)
        iterate(optimizer, slopes.loss(with_nonfinite(slope, "last", math.inf)), scaler, explicit=number == 1)
        case.equal("differences after a skipped step", differences(snapshot(optimizer), before), [])
    case.equal("differences from a run without scaler", differences(snapshot(optimizer), snapshot(plain)), [])


LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    # parameter and gradient, each of 48 numbers in a store of 96
    "transposed": (lambda t: t[:48].view(6, 8).t(), lambda t: t[:48].view(6, 8).t()),
    "channels-last": (
        lambda t: t[:48].view(2, 3, 2, 4).contiguous(memory_format=torch.channels_last),
        lambda t: t[:48].view(2, 3, 2, 4).contiguous(memory_format=torch.channels_last),
    ),
    "other-gradient": (lambda t: t[:48].view(8, 6), lambda t: t[:48].view(6, 8).t()),
    "gaps": (lambda t: t[::2].view(8, 6), lambda t: t[:48].view(8, 6)),
}


@contract("AMP-OPTIMIZER-046")
@pytest.mark.parametrize("layout", LAYOUTS)
@over_optimizers(
    lambda kind: kind.implementation in ("for-loop", "foreach", "fused") and kind.gradients == "dense", variants=None
)
def test_layouts(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, layout: str) -> None:
    """Bound the error as for AMP-OPTIMIZER-033, whose steps this check repeats on other strides."""
    build(case, kind, LinearLoss.make(kind.gradients, target.device, rng))
    place, placed = LAYOUTS[layout]
    numbers, slopes = 1 + torch.rand(96, generator=rng), [1 + torch.rand(96, generator=rng) for _ in range(2)]
    store = numbers.to(target.device, copy=True)
    parameter = torch.nn.Parameter(place(store))
    exact_parameter = torch.nn.Parameter(place(numbers.double()).contiguous())
    optimizer = kind.make([parameter])
    reference = next(one for one in ALL if (one.optimizer, one.implementation) == (kind.optimizer, "for-loop"))
    plain = reference.make([exact_parameter])
    scaler = torch.amp.GradScaler(target.device_type)
    scaler.scale(torch.ones((), device=target.device))
    for slope in slopes:
        parameter.grad = placed((slope * 65536).to(target.device))
        exact_parameter.grad = placed(slope.double()).contiguous()
        try:
            scaler.step(optimizer)
        except RuntimeError as error:
            case.note("rejected layout, which breaks no promise", str(error))
            case.identical("the rejected parameter", store, numbers)
            return
        scaler.update()
        plain.step()
    gaps = numbers.clone()[1::2] if layout == "gaps" else numbers[48:]
    case.identical("memory around the parameter", store[1::2] if layout == "gaps" else store[48:], gaps)
    amplified = 1 / (1 - max(kind.arguments.get("betas", (0.0,))))
    way = (exact_parameter.detach() - place(numbers.double())).abs()
    bound = 2 * U * (4 * (exact_parameter.detach().abs() + way) + 45 * amplified * way)
    worst = float(((parameter.detach().cpu().double() - exact_parameter.detach()).abs() / bound).max())
    case.at_most("largest distance of an element from a float64 run of the for-loop", worst, 1.0, "of its bound")
