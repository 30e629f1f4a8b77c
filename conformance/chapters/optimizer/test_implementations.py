"""Check that all implementations of an optimizer take the same steps with the same state, whatever the parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure import flags
from ...oracles.optimizer_state import differences, snapshot
from ...workloads.linear_loss import LinearLoss, with_nonfinite
from .optimizer_configs import OptimizerConfig
from .parameter_kinds import KINDS, Draw, Given, attempted, dtypes_of, held, rounds, stepped, unit, wide
from .support import ALL, ROUTES, build, demand, iterate, uninitialised_memory_is_nan

SHARED = tuple(kind for kind in ALL if kind.accepts("foreach") and kind.gradients == "dense")
IMPLEMENTATIONS = ("for-loop", "foreach", "fused")
QUICK = ("SGD", "Adam")
CLEAR = (TypeError, ValueError, RuntimeError)


def every(kind: OptimizerConfig, value: Any) -> bool:
    return True


def over(
    chosen: Callable[[OptimizerConfig, Any], bool] = every, *second: Any, quick: Collection[Any] = ()
) -> list[Any]:
    """Return parameters for the implementations of the first variant of each optimizer, by `second` values.

    The other variants run at the level full. At quick there are two optimizers, and by the values of `quick` the
    for-loop of every one.
    """
    cells: list[Any] = []
    for kind in SHARED:
        for value in second or (None,):
            shallow = kind.optimizer in QUICK or (value in quick and kind.implementation == "for-loop")
            level = "full" if not kind.first else "quick" if shallow else "standard"
            # The default eps of variants that are not the first vanish in fp16 (AMP-OPTIMIZER-106).
            small = value == "16-bit" and not kind.first
            if kind.implementation in IMPLEMENTATIONS and chosen(kind, value) and not small:
                id = kind.id if value is None else f"{kind.id}-{value}"
                cells.append(deep(level, *((kind,) if value is None else (kind, value)), id=id))
    return cells


def each(*names: str, cells: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(names if len(names) > 1 else names[0], cells)


def loop(kind: OptimizerConfig) -> OptimizerConfig:
    """Return the for-loop with the same arguments."""
    return next(
        one
        for one in ALL
        if (one.optimizer, one.variant, one.implementation) == (kind.optimizer, kind.variant, "for-loop")
    )


def require(case: Case, target: Target, kind: OptimizerConfig, aspect: str, rng: torch.Generator) -> Draw:
    """Return the source of parameters; end the case if the device computes in none of the dtypes or has no kernels."""
    case.require_arithmetic(target, *dtypes_of(aspect))
    build(case, kind, LinearLoss.make(kind.gradients, target.device, rng))
    return Draw(rng, target.device)


def give(parameters: Sequence[torch.Tensor], pairs: Sequence[Given], scale: float = 1.0) -> None:
    for parameter, (_, gradient) in zip(parameters, pairs, strict=True):
        parameter.grad = None if gradient is None else gradient * scale if scale != 1.0 else gradient.clone()


# The steps


@contract("AMP-OPTIMIZER-103")
@each("kind", "aspect", cells=over(every, *KINDS, quick=("16-bit",)))
def test_steps(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, aspect: str) -> None:
    draw = require(case, target, kind, aspect, rng)
    for name, make in KINDS[aspect].items():
        parameters = held(make(draw))
        try:
            optimizer = kind.make(parameters)
        except CLEAR as error:
            case.true(f"{name}: refused by the constructor, and not the for-loop", kind.implementation != "for-loop")
            case.note(f"{name}: error of the constructor", repr(error)[:100])
            continue
        for number in range(case.samples(quick=2, standard=2, full=4)):
            pairs = make(draw)
            for parameter, (_, gradient) in zip(parameters, pairs, strict=True):
                parameter.grad = gradient
            step = stepped(loop(kind), optimizer)
            if step.raised is not None:
                expect_refusal(case, kind, f"{aspect}, {name}", number, step.raised)
                case.equal(f"{name}: parameters that the refused step changed", step.changed, [])
                break
            case.equal(f"{name}, step {number + 1}: distances beyond their bounds", step.beyond, {})


FORMS = ("differentiable", "capturable")


def has_form(kind: OptimizerConfig, form: str) -> bool:
    """Whether there is such a step: autograd records none of foreach, and those of fused kernels are one kernel."""
    return kind.accepts(form) and kind.implementation in ("for-loop", "foreach")[: FORMS.index(form) + 1]


@contract("AMP-OPTIMIZER-103")
@each("kind", "form", cells=over(has_form, *FORMS, quick=FORMS))
def test_steps_of_other_forms(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, form: str
) -> None:
    """Steps that autograd or a CUDA graph may record, of parameters that are already on their way."""
    build(case, kind, LinearLoss.make(kind.gradients, target.device, rng))
    draw = Draw(rng, target.device)
    # What the step differentiates through need not itself require a gradient.
    parameters = [value.clone() for value, _ in draw.pairs(((8, 9), (3,)), torch.float32)]
    try:
        optimizer = kind.make(parameters, **{form: True})
    except CLEAR as error:
        case.unsupported(f"the {kind.implementation} implementation of {kind.optimizer} has no {form} form: {error}")
    # A capturable step computes 1 - beta ** step in float32, the others in Python's numbers.
    beta = max(optimizer.defaults.get("betas", (0.0,))) if form == "capturable" else 0.0
    coarsest = unit(torch.float32) / (1 - beta)
    for number in range(3):
        for parameter, (_, gradient) in zip(parameters, draw.pairs(((8, 9), (3,)), torch.float32), strict=True):
            parameter.grad = gradient
        step = stepped(loop(kind), optimizer, coarsest)
        if form == "capturable" and isinstance(step.raised, AssertionError) and number == 0:
            case.unsupported(f"no capturable steps on {target.device_type}: {step.raised}")
        case.equal(f"step {number + 1}: what it raises", step.raised, None)
        case.equal(f"step {number + 1}: distances beyond their bounds", step.beyond, {})


def expect_refusal(case: Case, kind: OptimizerConfig, what: str, number: int, error: Exception) -> None:
    """Expect an error of a first step that names what it does not take: complex numbers, or strides on a device."""
    plain = isinstance(error, RuntimeError) and number == 0
    named = "complex" in str(error) if "complex" in what else "layouts" in what and kind.fused
    case.true(f"{what}: step {number + 1} is taken, or refused by name", plain and named, repr(error)[:100])


# Other parameters


MAGNITUDES = {"ones": 1.0, "small": 2.0**-12}  # of gradients, whose squares vanish beside an eps of 16 bits


@contract("AMP-OPTIMIZER-107")
@each("kind", "magnitude", cells=over(every, *MAGNITUDES))
def test_order(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, magnitude: str) -> None:
    """Compare three steps of parameters of four dtypes, in several orders, with those of each of them alone."""
    case.require_arithmetic(target, *FLOATS.values())
    build(case, kind, LinearLoss.make(kind.gradients, target.device, rng))
    made: Any = getattr(torch.optim, kind.optimizer)
    draw = Draw(rng, target.device)
    given = {name: draw.pairs(((8, 9),), dtype)[0] for name, dtype in FLOATS.items()}

    def trained(names: Sequence[str]) -> dict[str, torch.Tensor]:
        pairs = [given[name] for name in names]
        parameters = held([(value.clone(), gradient) for value, gradient in pairs])
        optimizer = made(parameters, **kind.flags)  # torch's defaults, among which eps may depend on the dtype
        for _ in range(3):
            give(parameters, pairs, MAGNITUDES[magnitude])
            optimizer.step()
        return {name: value.detach() for name, value in zip(names, parameters, strict=True)}

    alone = {name: trained([name])[name] for name in FLOATS}
    names = list(FLOATS)
    for order in (names, names[::-1], names[2:] + names[:2]):
        seen = trained(order)
        other = [name for name in order if not torch.equal(seen[name].nan_to_num(), alone[name].nan_to_num())]
        case.equal(f"order {', '.join(order)}: parameters with other steps than alone", other, [])


@contract("AMP-OPTIMIZER-107")
@each("kind", cells=over())
def test_first_gradient_comes_late(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    draw = require(case, target, kind, "real", rng)
    pairs = draw.pairs(((8, 9), (8, 9)), torch.float32)
    early, late = held([(value.clone(), slope) for value, slope in pairs])
    (alone,) = held([(value.clone(), slope) for value, slope in pairs[1:]])
    both, own = kind.make([early, late]), kind.make([alone])
    give([early], pairs[:1])
    both.step()
    for step in (1, 2):
        give([early, late], pairs)
        give([alone], pairs[1:])
        case.equal(f"error of step {step} of the later parameter", attempted(both), None)
        own.step()
    case.identical("the later parameter, against one in an optimizer of its own", late.detach(), alone.detach())


# Skipped steps


HISTORIES = ("!.!L.", ".!.", "..!!L!.", "!!!", "L!.L.!")


def bad(pairs: Sequence[Given], value: float) -> list[Given]:
    """Return the pairs with a non-finite last element in the last gradient that has elements."""
    made = [(parameter, None if slope is None else slope.clone()) for parameter, slope in pairs]
    last = [slope for _, slope in made if slope is not None and slope.numel()][-1]
    last[(-1,) * last.dim()] = value
    return made


def reloaded(kind: OptimizerConfig, optimizer: Any) -> Any:
    """Return an optimizer over the same parameters that continues from the saved state."""
    made = kind.make([parameter for group in optimizer.param_groups for parameter in group["params"]])
    made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return made


def takes(kind: OptimizerConfig, aspect: str, name: str) -> bool:
    """Whether a scaler is documented to take these gradients, and the optimizer these parameters."""
    if kind.optimizer == "Adafactor" and aspect in ("complex", "empty"):
        return False  # AMP-OPTIMIZER-103
    if kind.fused and aspect in ("complex", "layouts"):
        return False  # refused by the constructor; AMP-OPTIMIZER-046
    return kind.scales_itself or name not in ("fp16", "all")  # AMP-SCALE-028


def takes_some(kind: OptimizerConfig, aspect: Any) -> bool:
    return any(takes(kind, aspect, name) for name in KINDS[aspect])


SKIPPED = [aspect for aspect in KINDS if aspect not in ("16-bit", "complex")]


@contract("AMP-OPTIMIZER-104")
@each("kind", "aspect", cells=over(takes_some, *SKIPPED))
def test_skips(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, aspect: str) -> None:
    expect_no_trace(case, target, rng, kind, aspect)


@contract("AMP-OPTIMIZER-104", dtypes=("bf16", "fp16"))
@each("kind", "aspect", cells=over(takes_some, "16-bit"))
def test_skips_of_16_bits(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, aspect: str) -> None:
    expect_no_trace(case, target, rng, kind, aspect)


@contract("AMP-OPTIMIZER-104")
@each("kind", "aspect", cells=over(takes_some, "complex"))
def test_skips_of_complex(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, aspect: str) -> None:
    expect_no_trace(case, target, rng, kind, aspect)


def expect_no_trace(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, aspect: str) -> None:
    case.require_arithmetic(target, torch.float64)  # of the scaler
    draw = require(case, target, kind, aspect, rng)
    other = HISTORIES[1 + int(torch.randint(len(HISTORIES) - 1, (), generator=rng))]
    names = [name for name in KINDS[aspect] if takes(kind, aspect, name)]
    if case.level != "full":
        names = [names[int(torch.randint(len(names), (), generator=rng))]]
    for name in names:
        for history in HISTORIES if case.level == "full" else (HISTORIES[0], other):
            pairs = KINDS[aspect][name](draw)
            ours, theirs = held(pairs), [torch.nn.Parameter(value.clone()) for value, _ in pairs]
            what = f"{name}, history {history}"
            case.equal(f"{what}: error", failed(case, target, draw, kind, (aspect, name), history, ours, theirs), None)


def failed(
    case: Case,
    target: Target,
    draw: Draw,
    kind: OptimizerConfig,
    made: tuple[str, str],
    history: str,
    ours: list[torch.nn.Parameter],
    theirs: list[torch.nn.Parameter],
) -> str | None:
    """Train both, one through a scaler with skips; return the error that was raised, and expect no difference."""
    optimizer, plain = kind.make(ours), kind.make(theirs)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**10)
    scaler.scale(torch.ones((), device=target.device))
    for number, letter in enumerate(history):
        if letter == "L":
            optimizer = reloaded(kind, optimizer)
            plain = reloaded(kind, plain)
            continue
        pairs = KINDS[made[0]][made[1]](draw)
        give(
            ours,
            bad(pairs, (math.inf, -math.inf, math.nan)[number % 3]) if letter == "!" else pairs,
            scaler.get_scale(),
        )
        before = snapshot(optimizer)
        try:
            with uninitialised_memory_is_nan():
                scaler.step(optimizer)
                scaler.update()
        except Exception as error:
            return f"{type(error).__name__} in iteration {number + 1}: {str(error)[:80]}"
        if letter == "!":
            moved = differences(_only(snapshot(optimizer)), _only(before))
            case.equal(f"{made[1]}, history {history}: parameters that skip {number + 1} changed", moved, [])
        else:
            give(theirs, pairs)
            plain.step()
            seen, wanted = snapshot(optimizer), snapshot(plain)
            found = differences(seen, wanted)
            case.equal(f"{made[1]}, history {history}: differences after iteration {number + 1}", found, [])
    return None


def _only(copied: dict[str, Any]) -> dict[str, Any]:
    return {place: value for place, value in copied.items() if place.startswith("parameter")}


@contract("AMP-OPTIMIZER-097")
@each("kind", cells=over())
def test_gradients_after_a_skip(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig) -> None:
    for explicit in ROUTES:
        slopes = LinearLoss.make(kind.gradients, target.device, rng)
        optimizer, scaler = build(case, kind, slopes), torch.amp.GradScaler(target.device_type)
        slope = slopes.draw(rng)
        iterate(optimizer, slopes.loss(with_nonfinite(slope, "last", math.inf)), scaler, explicit=explicit)
        kept = slopes.moving[0].grad
        assert kept is not None
        route = "unscale_ first" if explicit else "step alone"
        case.equal(
            f"largest unscaled gradient after a skip ({route})", float(kept.abs().max()), float(slope[0].abs().max())
        )


# The state


@contextmanager
def defaults(name: str) -> Iterator[None]:
    """Change torch's default dtype or device."""
    dtype = {"float64-default": torch.float64, "bf16-default": torch.bfloat16}.get(name, torch.get_default_dtype())
    device = torch.device("meta") if name == "meta-default" else nullcontext()
    with flags.held("torch.get_default_dtype", dtype), device:
        yield


DEFAULTS = ("usual-default", "float64-default", "bf16-default", "meta-default")


def described(optimizer: Any) -> dict[str, Any]:
    """Describe each entry of the state by its dtype, shape and device; a step counter by its value."""
    found: dict[str, Any] = {}
    for place, value in snapshot(optimizer).items():
        if not place.startswith("state/"):
            continue
        if place.endswith("/step"):
            found[place] = float(value), single(value)
        elif isinstance(value, torch.Tensor):
            found[place] = (
                single(value) if value.dim() == 0 else str(value.dtype),
                tuple(value.shape),
                value.device.type,
            )
        else:
            found[place] = type(value).__name__
    return found


def single(value: Any) -> str:
    """Return the dtype of a single number, float64 like float32: which of them goes by the default dtype.

    Source: torch.optim.optimizer._get_scalar_dtype.
    """
    kind = str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
    return "32 or 64 bits" if kind in ("torch.float32", "torch.float64") else kind


@contract("AMP-OPTIMIZER-100")
@each("kind", "default", cells=over(every, *DEFAULTS))
def test_state(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, default: str) -> None:
    case.require_arithmetic(target, *([torch.float64] if default.startswith("float64") else []))
    build(case, kind, LinearLoss.make(kind.gradients, target.device, rng))
    dtypes = [dtype for dtype in (torch.float32, torch.float64, torch.bfloat16) if target.computes_in(dtype)]
    for dtype in dtypes:
        pairs = Draw(rng, target.device).pairs(((8, 9), (0,), ()), dtype)
        if kind.optimizer == "Adafactor":
            pairs = [pair for pair in pairs if pair[0].numel()]  # AMP-OPTIMIZER-103
        seen = []
        for one, name in ((loop(kind), "usual-default"), (kind, default)):
            parameters = [torch.nn.Parameter(value.clone()) for value, _ in pairs]
            with defaults(name):
                seen.append(states(one, parameters, pairs))
        case.equal(f"state over {dtype}, against the for-loop's", seen[1], seen[0])


def states(kind: OptimizerConfig, parameters: list[torch.nn.Parameter], pairs: Sequence[Given]) -> Any:
    """Return the described state after two steps, or the error as text, and the keys of the settings."""
    try:
        optimizer = kind.make(parameters)
        for _ in range(2):
            give(parameters, pairs)
            optimizer.step()
        finite = all(bool(parameter.isfinite().all()) for parameter in parameters)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return finite, sorted(optimizer.state_dict()["param_groups"][0]), described(optimizer)


# Saved and loaded states


def sources(kind: OptimizerConfig) -> list[OptimizerConfig]:
    """Return the other implementations with the same arguments, and torch's default one."""
    same = [one for one in ALL if (one.optimizer, one.variant) == (kind.optimizer, kind.variant)]
    return [one for one in same if one.implementation != kind.implementation]


LOADS = [
    deep("full" if not kind.first else "quick" if kind.optimizer in QUICK else "standard", kind, source,
         id=f"{kind.id}-from-{source.implementation}")
    for kind in SHARED
    if kind.implementation in IMPLEMENTATIONS
    for source in sources(kind)
]  # fmt: skip


@contract("AMP-OPTIMIZER-101")
@pytest.mark.parametrize(("kind", "source"), LOADS)
def test_loaded_from_another(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, source: OptimizerConfig
) -> None:
    draw = require(case, target, kind, "real", rng)
    build(case, source, LinearLoss.make(kind.gradients, target.device, rng))
    saved = trained(draw, source, 2)
    parameters = [torch.nn.Parameter(p.detach().clone()) for p in saved.param_groups[0]["params"]]
    optimizer = kind.make(parameters)
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    case.equal("values that changed with the load", changed_values(saved, optimizer), [])
    scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**10)
    scaler.scale(torch.ones((), device=target.device))
    pairs = KINDS["real"]["fp64"](draw)
    give(parameters, bad(pairs, math.inf), 2.0**10)
    before = snapshot(optimizer)
    error: Exception | None = None
    try:
        scaler.step(optimizer)
        scaler.update()
    except Exception as raised:
        error = raised
    case.equal("error of a skipped step through the scaler", repr(error), "None")
    case.equal("differences after the skip", differences(snapshot(optimizer), before), [])
    for number in range(2):
        give(parameters, KINDS["real"]["fp64"](draw))
        step = stepped(loop(kind), optimizer)
        case.equal(f"error of step {number + 1} after the load", repr(step.raised), "None")
        case.equal(f"distances beyond their bounds in step {number + 1} after the load", step.beyond, {})


def trained(draw: Draw, kind: OptimizerConfig, steps: int) -> Any:
    """Return an optimizer over float64 parameters after some steps."""
    parameters = held(KINDS["real"]["fp64"](draw))
    optimizer = kind.make(parameters)
    for _ in range(steps):
        give(parameters, KINDS["real"]["fp64"](draw))
        optimizer.step()
    return optimizer


def changed_values(saved: Any, loaded: Any) -> list[str]:
    """Say which entries of the state differ in value, or are missing or new."""
    ours, theirs = ({k: v for k, v in snapshot(one).items() if k.startswith("state/")} for one in (loaded, saved))
    found = sorted(ours.keys() ^ theirs.keys())
    for place in ours.keys() & theirs.keys():
        a, b = (torch.as_tensor(one).detach().cpu().double() for one in (ours[place], theirs[place]))
        found += [] if torch.equal(a, b) else [place]
    return found


COUNTERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda step: int(step),
    "float": lambda step: float(step),
    "int64": lambda step: torch.as_tensor(step).to(torch.int64),
    "float64": lambda step: torch.as_tensor(step).to(torch.float64),
}


@contract("AMP-OPTIMIZER-098")
@each("kind", "counter", cells=over(lambda kind, _: kind.optimizer != "SGD", *COUNTERS))
def test_loaded_counters(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, counter: str) -> None:
    draw = require(case, target, kind, "real", rng)
    saved = trained(draw, kind, 2)
    parameters = [torch.nn.Parameter(p.detach().clone()) for p in saved.param_groups[0]["params"]]
    state = copy.deepcopy(saved.state_dict())
    counted = [entry for entry in state["state"].values() if "step" in entry]
    case.equal("control: parameters whose steps are counted", len(counted), len(parameters))
    for entry in counted:
        entry["step"] = COUNTERS[counter](entry["step"])
    optimizer = kind.make(parameters)
    optimizer.load_state_dict(state)
    for number in range(2):
        pairs = KINDS["real"]["fp64"](draw)
        for one, holders in ((saved, saved.param_groups[0]["params"]), (optimizer, parameters)):
            give(holders, pairs)
            error = attempted(one)
            case.equal(f"error of step {number + 1} with counters that are {counter}", error, None)
    counts = {float(optimizer.state[parameter]["step"]) for parameter in parameters}
    case.equal("steps counted", counts, {4.0})
    pairs_of = zip(parameters, saved.param_groups[0]["params"], strict=True)
    worst = max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs_of)
    # Three steps in less than a thousand roundings, of float64 or of the smaller numbers that a state keeps.
    rounding = max(
        unit(value.dtype) for entry in saved.state.values() for name, value in entry.items() if rounds(name, value)
    )
    case.at_most("distance from the run that was not interrupted, of the largest", worst, 1000 * rounding)


SAVED: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    # name: dtype of the parameters, and of the floating-point state of their shape if it is another one
    "fp32": (torch.float32, None),
    "fp64": (torch.float64, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "bf16-with-fp32-state": (torch.bfloat16, torch.float32),
    "fp32-with-bf16-state": (torch.float32, torch.bfloat16),
}


def _loads(kind: OptimizerConfig, saved: str) -> bool:
    """Whether the implementation is tried, and has averages that can be of another type."""
    averages = kind.optimizer != "SGD" or "momentum" in kind.arguments
    return kind.implementation in ("for-loop", "fused") and (averages or SAVED[saved][1] is None)


@contract("AMP-OPTIMIZER-102")
@each("kind", "saved", cells=over(_loads, *SAVED))
def test_loaded_dtypes(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, saved: str) -> None:
    dtype, other = SAVED[saved]
    case.require_arithmetic(target, dtype)
    demand(case, kind, target.device)
    pairs = Draw(rng, target.device).pairs(((8, 9), (3, 2)), dtype)
    parameters = [torch.nn.Parameter(value.clone()) for value, _ in pairs]
    optimizer = kind.make(parameters)
    for _ in range(2):
        give(parameters, pairs)
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    moved = False
    for entry in state["state"].values():
        for name, value in entry.items():
            if other is not None and isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point():
                entry[name], moved = value.to(other), True
    case.equal("control: the state has averages of another dtype", moved, other is not None)
    loaded = kind.make([torch.nn.Parameter(value.clone()) for value, _ in pairs])
    loaded.load_state_dict(copy.deepcopy(state))
    ours, theirs = (_flat_state(one) for one in (loaded.state_dict(), state))
    found = differences(ours, {name: _beside(value, ours.get(name), dtype) for name, value in theirs.items()})
    case.equal(
        "entries of the state that are not the saved ones, in their dtype or the parameter's wider one", found, []
    )


@contract("AMP-OPTIMIZER-102")
@each("kind", "counter", cells=over(lambda kind, _: kind.optimizer != "SGD", "float64-step", "capturable-float64-step"))
def test_loaded_float64_counters(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, counter: str
) -> None:
    arguments = {"capturable": True} if counter.startswith("capturable") else {}
    if arguments and (kind.fused or not kind.accepts("capturable")):
        case.unsupported(f"{kind.optimizer} has no capturable {kind.implementation} implementation")
    draw = require(case, target, kind, "real", rng)
    saved = trained(draw, loop(kind), 1)
    state = copy.deepcopy(saved.state_dict())
    # Beyond 2**24 = 16,777,216 fp32 does not hold every integer.
    count = torch.tensor(2.0**25 + 3, dtype=torch.float64)
    counted = [entry for entry in state["state"].values() if "step" in entry]
    case.equal("control: parameters whose steps are counted", len(counted), len(saved.param_groups[0]["params"]))
    for entry in counted:
        entry["step"] = count.clone()
    state["param_groups"][0] |= {"fused": kind.fused or None, **arguments}
    loaded = kind.make(
        [torch.nn.Parameter(one.detach().clone()) for one in saved.param_groups[0]["params"]], **arguments
    )
    loaded.load_state_dict(state)
    seen = {float(entry["step"]) for entry in loaded.state.values()}
    case.equal("numbers of steps after the load", seen, {float(count)})


def _beside(saved: Any, loaded: Any, dtype: torch.dtype) -> Any:
    """Return what a saved entry is to be beside a parameter of `dtype`: no narrower than either of the two.

    An average takes the wider type, as the next step computes in it; a single number may also stay as it is.
    """
    if not isinstance(saved, torch.Tensor) or not saved.is_floating_point():
        return saved
    if not saved.dim() and isinstance(loaded, torch.Tensor) and loaded.dtype == saved.dtype:
        return saved
    return saved.to(torch.promote_types(saved.dtype, dtype))


def _flat_state(state: Any) -> dict[str, Any]:
    """Return the entries of the state by number and name, on the CPU: a load may put them beside the parameter."""
    return {
        f"{number}/{name}": value.cpu() if isinstance(value, torch.Tensor) else value
        for number, entry in state["state"].items()
        for name, value in entry.items()
    }


# Settings in tensors


SETTINGS: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "lr": lambda device: {"lr": torch.tensor(0.25, dtype=torch.float64)},
    "lr-fp32": lambda device: {"lr": torch.tensor(0.25)},
    "lr-vector": lambda device: {"lr": torch.tensor([0.25], dtype=torch.float64, device=device)},
    "betas": lambda device: {"betas": (torch.tensor(0.75, dtype=torch.float64), torch.tensor(0.875))},
}
PLAIN_SETTINGS: dict[str, dict[str, Any]] = {
    "lr": {"lr": 0.25}, "lr-fp32": {"lr": 0.25}, "lr-vector": {"lr": 0.25}, "betas": {"betas": (0.75, 0.875)},
}  # fmt: skip


@contract("AMP-OPTIMIZER-105")
@each(
    "kind",
    "setting",
    cells=over(lambda kind, setting: kind.accepts(setting.split("-")[0]), *SETTINGS, quick=("lr-fp32", "betas")),
)
def test_settings_in_tensors(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, setting: str
) -> None:
    draw = require(case, target, kind, "real", rng)
    parameters = held(KINDS["real"]["fp64"](draw))
    twins = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    try:
        optimizer = kind.make(parameters, **SETTINGS[setting](target.device))
    except CLEAR as error:
        # Each is documented as a number or a tensor; foreach of optimizers that cannot be captured takes numbers alone.
        case.note("refusal", repr(error)[:100])
        case.equal(f"implementation that refuses {setting} in a tensor", kind.implementation, "foreach")
        return
    plain = kind.make(twins, **PLAIN_SETTINGS[setting])
    for number in range(4):
        if number == 2:  # in place, as a scheduler changes a rate
            for one in (optimizer, plain):
                _halve(one, setting.split("-")[0])
        pairs = KINDS["real"]["fp64"](draw)
        give(parameters, pairs)
        give(twins, pairs)
        case.equal(f"error of step {number + 1} with {setting} in a tensor", attempted(optimizer), None)
        plain.step()
    worst = max(
        float(((ours - theirs).abs() / (theirs.abs() + 1)).max())
        for ours, theirs in zip(parameters, twins, strict=True)
    )
    # The settings are exact in fp32, in which a tensor may be computed with: four steps of 32 operations.
    case.at_most("distance from the run with the same numbers", worst, 4 * 32 * unit(torch.float32))


FLOATS = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
# Just below the middle of two numbers of the type: rounded to it, they would be short by this share.
SHORT = {"bf16": 2.0**-8, "fp16": 2.0**-11}
ELEMENTS = 4096


@contract("AMP-OPTIMIZER-105")
@each("kind", "dtype", cells=over(lambda kind, _: kind.implementation != "foreach", *SHORT))
def test_rates_in_tensors_are_not_rounded(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, dtype: str
) -> None:
    """Judge the mean of many updates, each rounded to 16 bits; foreach also rounds the product with the rate."""
    case.require_arithmetic(target, FLOATS[dtype])
    build(case, kind, LinearLoss.make(kind.gradients, target.device, rng))
    rate = 2.0**-6 * (1 + 0.98 * SHORT[dtype])
    gradient = (torch.randn(ELEMENTS, generator=rng).sign() * (1 + torch.rand(ELEMENTS, generator=rng))).to(
        target.device, FLOATS[dtype]
    )

    def update(start: torch.Tensor, lr: Any) -> torch.Tensor:
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind.make([parameter], lr=lr)
        parameter.grad = gradient.clone()
        optimizer.step()
        return wide(parameter) - wide(start)

    size = float(update(torch.zeros_like(gradient), rate).abs().mean())
    start = (torch.randn(ELEMENTS, generator=rng) * size).to(target.device, FLOATS[dtype])
    plain = update(start, rate)
    case.true("a rate in a number moves parameters", bool(plain.any()))
    for made in (torch.tensor(rate), torch.tensor(rate, dtype=torch.float64)):
        try:
            seen = update(start, made)
        except CLEAR as error:
            case.true(f"a rate in a tensor of {made.dtype} is refused by name", "lr" in str(error), repr(error)[:100])
            continue
        short = abs(float((seen @ plain) / (plain @ plain)) - 1)
        case.at_most(f"share by which a rate in a tensor of {made.dtype} is off", short, SHORT[dtype] / 4)


def _halve(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Halve a setting, in place where it is in tensors."""
    for group in optimizer.param_groups:
        found = group[name] if isinstance(group[name], tuple) else (group[name],)
        halves = tuple(one.mul_(0.5) if isinstance(one, torch.Tensor) else 0.5 * one for one in found)
        group[name] = halves if isinstance(group[name], tuple) else halves[0]


# Zeros


ZEROS = ("zero-gradients", "zero-rate", "zero-gradients-and-rate")


@contract("AMP-OPTIMIZER-106")
@each("kind", "dtype", cells=over(every, *FLOATS))
def test_zeros(case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, dtype: str) -> None:
    case.require_arithmetic(target, FLOATS[dtype])
    build(case, kind, LinearLoss.make(kind.gradients, target.device, rng))
    for zeros in ZEROS:
        changes: dict[str, Any] = {"lr": 0.0} if "rate" in zeros else {}
        for arguments in ({}, dict(kind.arguments)):  # torch's defaults and the suite's
            pairs = Draw(rng, target.device).pairs(((8, 9), (3,)), FLOATS[dtype])
            expect_finite(case, kind, pairs, zeros, {**arguments, **changes}, differentiable=False)


@contract("AMP-OPTIMIZER-106")
@each(
    "kind", "dtype",
    cells=over(lambda kind, _: kind.implementation == "for-loop" and kind.accepts("differentiable"), "differentiable"),
)  # fmt: skip
def test_zeros_differentiable(
    case: Case, target: Target, rng: torch.Generator, kind: OptimizerConfig, dtype: str
) -> None:
    for zeros in ZEROS:
        changes: dict[str, Any] = {"lr": 0.0} if "rate" in zeros else {}
        pairs = Draw(rng, target.device).pairs(((8, 9), (3,)), torch.float32)
        expect_finite(case, kind, pairs, zeros, changes, differentiable=True)


def expect_finite(
    case: Case,
    kind: OptimizerConfig,
    pairs: Sequence[Given],
    zeros: str,
    arguments: dict[str, Any],
    *,
    differentiable: bool,
) -> None:
    """Expect that three steps leave finite parameters, and with a rate of zero the same ones."""
    made = getattr(torch.optim, kind.optimizer)
    leaves = [torch.nn.Parameter(value.clone()) for value, _ in pairs]
    parameters = [leaf.clone() if differentiable else leaf for leaf in leaves]
    optimizer = made(parameters, **{**kind.flags, **arguments, **({"differentiable": True} if differentiable else {})})
    for _ in range(case.samples(quick=1, standard=1, full=3)):
        for parameter, (_, gradient) in zip(parameters, pairs, strict=True):
            assert gradient is not None
            parameter.grad = torch.zeros_like(gradient) if "gradients" in zeros else gradient.clone()
        optimizer.step()
    what = f"{zeros}, {arguments}"
    finite = all(bool(parameter.isfinite().all()) for parameter in parameters)
    case.equal(f"parameters are finite ({what})", finite, True)
    if "rate" in zeros and kind.optimizer != "Rprop":  # whose step sizes do not go by the rate alone
        same = [torch.equal(now, then) for now, (then, _) in zip(parameters, pairs, strict=True)]
        case.equal(f"parameters that did not move ({what})", same, [True] * len(same))
