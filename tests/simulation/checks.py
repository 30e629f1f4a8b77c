"""Runs checks of the suite on a simulated card, case by case, as the plugin would on a real one."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import itertools
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from conformance.chapters.speed import clocks, machine_conditions, paired_comparison, peak_rates, profile
from conformance.chapters.speed.experiment import Experiments
from conformance.harness import catalogue, expectations, judge, targets
from conformance.harness.check import DEPTHS, Allotment, Case
from conformance.harness.evidence import Evidence
from conformance.harness.measuring import DEADLINES, Deadlines
from tests.simulation.card import Card, Disturbance, jitter
from tests.simulation.gpu import TARGET, Simulation, simulated

_catalogue = functools.cache(catalogue.load)
_shipped = functools.cache(expectations.load)
NOISE = 0.01  # a steady card's kernels differ by about a per cent from one run to the next
_REAL = ("real", "accelerator", "cuda")


@dataclass(frozen=True)
class Outcome:
    """What a case on a simulated card came to."""

    contract: str
    name: str
    verdict: str
    reason: str
    evidence: tuple[Evidence, ...]

    def __str__(self) -> str:
        return f"{self.contract}[{self.name}] {self.verdict} {self.reason}"


@contextlib.contextmanager
def machine(
    card: Card | Simulation, *disturbances: Disturbance, noise: float = NOISE, seed: int = 0
) -> Iterator[Simulation]:
    """The card, with its noise and what else disturbs it; the clocks of the suite go by its time."""
    with contextlib.ExitStack() as stack:
        simulation = stack.enter_context(simulated(card))
        now = simulation.timeline.now
        simulation.timeline.disturbances = [jitter(noise, seed), *disturbances]
        for function in (
            clocks.HostClock.__init__,
            clocks.EventClock.__init__,
            clocks.check_clock,
            paired_comparison.compare,
        ):
            stack.enter_context(_given(function, "now", now))
        for patch in _quiet(simulation):
            stack.enter_context(patch)
        stack.callback(_reset)
        # Checks collect garbage, which takes long with all of torch's modules in memory.
        gc.freeze()
        stack.callback(gc.unfreeze)
        yield simulation


def _reset() -> None:
    """Put back what a fault may have left of autocast's state."""
    torch.set_autocast_cache_enabled(True)
    torch.set_autocast_enabled("cuda", False)
    torch.clear_autocast_cache()


def _quiet(simulation: Simulation) -> Iterator[Any]:
    """What would look at this machine in place of the card's: its processors, its driver, and torch's profiler."""
    idle = machine_conditions._Processor(0.0, 0, 0.0, 0.0)
    yield mock.patch.object(machine_conditions._Processor, "read", classmethod(lambda cls: idle))
    for module in (machine_conditions, peak_rates):
        yield mock.patch.object(module, "nvml", return_value=None)
    yield mock.patch.object(profile, "observe", functools.partial(_observed, simulation))


def _observed(
    simulation: Simulation, work: Callable[[], object], device_type: str, fp32_ops: Collection[str]
) -> profile.Profile | None:
    """A profile of the work by the kernels that the card ran."""
    timeline = simulation.timeline
    timeline.spend(simulation.profiling)
    timeline.keep, timeline.kernels = True, []
    try:
        work()
    finally:
        timeline.keep = False
    ops: dict[str, float] = {}
    casts = total = 0.0
    for kernel in timeline.kernels:
        name = kernel.op.strip("_").removeprefix("native_").removesuffix("_data").removesuffix("_backward")
        total += kernel.seconds
        casts += kernel.seconds * (kernel.op == "_to_copy")
        if name in fp32_ops:
            ops[name] = ops.get(name, 0.0) + kernel.seconds
    return profile.Profile(total, casts, ops) if total else None


@contextlib.contextmanager
def _given(function: Any, name: str, value: Any) -> Iterator[None]:
    """Give a parameter of a function another default."""
    parameters = inspect.signature(function).parameters
    if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY:
        with mock.patch.dict(function.__kwdefaults__, {name: value}):
            yield
        return
    optional = [key for key, each in parameters.items() if each.default is not each.empty]
    before = function.__defaults__
    function.__defaults__ = tuple(value if key == name else old for key, old in zip(optional, before, strict=True))
    try:
        yield
    finally:
        function.__defaults__ = before


def checks(module: str) -> dict[str, Callable[..., None]]:
    """The checks of `conformance.chapters.<module>` that a GPU runs, by name, without those of a user's workload."""
    found = importlib.import_module(f"conformance.chapters.{module}")
    return {
        name: check
        for name, check in vars(found).items()
        if name.startswith("test_")
        and "own" not in inspect.signature(check).parameters
        and (mark := _mark(check, "contract"))
        and set(mark.kwargs["on"]) & set(_REAL)
    }


def _mark(check: Any, name: str) -> Any:
    return next((mark for mark in getattr(check, "pytestmark", []) if mark.name == name), None)


def parameters(check: Any, level: str = "quick", dtypes: tuple[str, ...] = ("fp16", "bf16")) -> list[dict[str, Any]]:
    """The sets of parameters that a check has at that level, each with an `id`."""
    axes: list[list[tuple[str, dict[str, Any]]]] = []
    for mark in getattr(check, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0].split(",") if isinstance(mark.args[0], str) else list(mark.args[0])
            rows = [_row([name.strip() for name in names], given, level) for given in mark.args[1]]
            ids = mark.kwargs.get("ids")
            named = [(ids[number] if ids and not callable(ids) else None, row) for number, row in enumerate(rows)]
            axes.append([(given or row[0], row[1]) for given, row in named if row is not None])
    if "amp_dtype" in inspect.signature(check).parameters:
        mark = _mark(check, "contract")
        axes.append([(d, {"amp_dtype": targets.AMP_DTYPES[d]}) for d in dtypes if d in mark.kwargs["dtypes"]])
    cases = []
    for combination in itertools.product(*axes):
        merged: dict[str, Any] = {}
        for _, row in combination:
            merged |= row
        cases.append({**merged, "id": "-".join([_short(check), *(name for name, _ in combination)])})
    return cases


def cases(module: str, level: str = "quick", dtypes: tuple[str, ...] = ("fp16", "bf16")) -> Iterator[tuple[Any, Any]]:
    """All cases of the module's checks at that level: a check and its parameters."""
    for check in checks(module).values():
        for given in parameters(check, level, dtypes):
            yield check, given


def whole(
    card: Card,
    chosen: Sequence[tuple[Any, Any]],
    level: str,
    *disturbances: Disturbance,
    planned: Sequence[tuple[Any, Any]] | None = None,
    profiling: float = 0.0,
) -> list[Outcome]:
    """Run those cases one after another on one card, which share the deadline of their chapter as in a run.

    `planned` are those among which it is shared, where the run has more cases than are chosen.
    """
    measured = Experiments()
    with machine(card, *disturbances) as simulation:
        simulation.profiling = profiling
        deadlines = Deadlines(level, simulation.timeline.now)
        ordered = sorted(chosen, key=lambda row: bool(_mark(row[0], "timed")) and not contract_of(row[0]).judges)
        deadlines.plan((contract_of(check), "cuda") for check, _ in planned or chosen if _mark(check, "timed"))
        return [
            run(check, given, simulation, level=level, measured=measured, deadlines=deadlines)
            for check, given in ordered
        ]


def contract_of(check: Any) -> catalogue.Contract:
    """The contract that a check asserts."""
    return _catalogue().contracts[_mark(check, "contract").args[0]]


def case_of(module: str, name: str, level: str = "quick") -> tuple[Any, Any]:
    """The case with that name, without "test_": a check and its parameters."""
    return next((check, given) for check, given in cases(module, level) if given["id"] == name)


def _short(check: Any) -> str:
    return str(check.__name__).removeprefix("test_")


def _row(names: list[str], given: Any, level: str) -> tuple[str, dict[str, Any]] | None:
    """One set of parameters, None where it is deeper than `level`."""
    values = given
    name = None
    if hasattr(given, "marks"):
        depth = next((mark.args[0] for mark in given.marks if mark.name == "depth"), "quick")
        if DEPTHS.index(depth) > DEPTHS.index(level):
            return None
        values, name = given.values, given.id
        values = values[0] if len(names) == 1 else values
    row = {names[0]: values} if len(names) == 1 else dict(zip(names, values, strict=True))
    return name or "-".join(str(value) for value in row.values()), row


def run(
    check: Any,
    given: dict[str, Any],
    simulation: Simulation,
    *,
    level: str = "quick",
    expected: expectations.Expectations | None = None,
    measured: Experiments | None = None,
    deadlines: Deadlines | None = None,
) -> Outcome:
    """Run one case of a check in the simulation that is in force, judged by what the suite expects if nothing else.

    It has its share of `deadlines`; without any, all that the level gives its chapter.
    """
    contract = _catalogue().contracts[_mark(check, "contract").args[0]]
    given = dict(given)
    name = given.pop("id")
    substitutions = {"device": "cuda:0", "amp_dtype": "torch.float16"}
    types = tuple(targets.AMP_DTYPES.values())
    case = Case(contract, level=level, seed=0, substitutions=substitutions, amp_dtypes=types)
    now = simulation.timeline.now
    offered = {
        "case": case,
        "target": TARGET,
        "rng": torch.Generator().manual_seed(zlib.crc32(name.encode())),
        "expectations": expected or _shipped(),
        "measured": measured or Experiments(),
        **given,
    }
    error: BaseException | None = None
    torch.manual_seed(0)
    try:
        if "amp_dtype" in given and not TARGET.supports(given["amp_dtype"]):
            case.unsupported("the device lacks that type")
        ends = now() + DEADLINES["accelerator"][level]
        if deadlines is not None and _mark(check, "timed"):
            ends = deadlines.begin(contract)
        case.allotment = Allotment(ends, lambda words: None, lambda *_: None, now)
        check(**{key: offered[key] for key in inspect.signature(check).parameters})
    except Exception as raised:
        error = raised
    if deadlines is not None and _mark(check, "timed") and case.allotment is not None:
        deadlines.end(contract, case.allotment.ends)
    judged = judge.judge(case, error)
    return Outcome(contract.id, name, judged.verdict.value, judged.detail or judged.reason, tuple(case.evidence))
