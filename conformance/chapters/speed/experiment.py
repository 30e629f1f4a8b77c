"""Experiments of fp32 and AMP on a device: each measured once a run, with what explains it."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...harness import exhaustion
from ...harness.check import DEPTHS, Case, deep
from ...harness.endings import SuiteError
from ...harness.expectations import OPERATION_SIZES, STEP_SIZES
from ...harness.targets import DTYPE_NAMES, Target, device_module
from ...measure.allocator import Allocator
from ...oracles.policy.lists import backend_of, listings, resolved
from . import clocks, diagnosis, intervals, paired_comparison, peak_rates, profile, tf32, timing
from .operations import Operation, operation, product
from .training_steps import STEPS, Step, step

Subject = Operation | Step
Work = clocks.Work

BASELINES = ("fp32", "tf32")
ALWAYS = ("matmul/compute", "step-mlp/compute")  # those of AMP-SPEED-001 to 004, which every level measures
SHRINKS = 3  # a subject that does not fit is halved that often at most: an eighth still shows what it is bound by
FEWEST_WARM_UPS = 3  # runs of each arm before the pilot: one, and two that are no faster
LONG = 2e-3  # seconds, beside which the host's own hundred microseconds do not show
FEW = 5  # runs whose median is good enough for a diagnosis
PRODUCTS = (128, 256, 512, 1024, 2048, 4096)  # of which the first that takes so long tells a device's rate

CPU_SIZES = {False: ("middle", "compute"), True: ("small", "compute")}  # of operations, and of steps
# A CPU's figures are for information: enough pairs that some interruptions don't show, in a fraction of a second.
CPU_PLANS = {
    "quick": paired_comparison.Plan(pilot=20, most=20, width=1.0, budget=1.0, warm_ups=3),
    "standard": paired_comparison.Plan(pilot=20, most=40, width=0.2, budget=0.5, warm_ups=3),
    "full": paired_comparison.Plan(pilot=20, most=160, width=0.05, budget=3.0, warm_ups=5),
}
LEAST_SECONDS = 0.3  # for twenty pairs of what takes some milliseconds

# Only of these is it certain that fp32 without TF32 runs on the ordinary units: attention's fp32 kernels add up TF32
# products (OpMultiplyAddFastF32 in aten/native/transformers/cuda/mem_eff_attention), convolutions have others.
_ORDINARY = ("matmul", "linear", "bmm", "step-mlp")


@dataclass(frozen=True)
class Experiment:
    """The subject, size, AMP dtype and baseline of a speed experiment."""

    subject: str
    size: str
    dtype: torch.dtype
    baseline: str

    @property
    def key(self) -> str:
        """`<subject>/<size>/<dtype>/<baseline>`, as expectations and reports name it."""
        return f"{self.subject}/{self.size}/{DTYPE_NAMES[self.dtype]}/{self.baseline}"

    @property
    def is_step(self) -> bool:
        return self.subject in STEPS

    def make(self, device_type: str, shrink: int = 0) -> Subject:
        """Return the subject, its batch halved `shrink` times."""
        if self.is_step:
            return step(self.subject, self.size, device_type, shrink)
        return operation(self.subject, self.size, device_type, shrink)


def sizes_of(subject: str) -> tuple[str, ...]:
    """Return the names of a subject's sizes on an accelerator, from the smallest."""
    return STEP_SIZES if subject in STEPS else OPERATION_SIZES


def depth(subject: str, size: str, baseline: str) -> str:
    """Return the level from which on a measurement is taken: first what decides most."""
    if f"{subject}/{size}" in ALWAYS:
        return "quick"
    # What is bound by launches does not depend on TF32, so that one baseline is enough.
    by_launches = size in ("launch", "small") and baseline == "fp32"
    return "standard" if size == "compute" or by_launches else "full"


def matrix(subjects: Iterable[str]) -> list[Any]:
    """Return parameter sets of subject, size and baseline, each left out below its level."""
    return [
        deep(depth(subject, size, baseline), subject, size, baseline, id=f"{subject}-{size}-{baseline}")
        for subject in subjects
        for size in sizes_of(subject)
        for baseline in BASELINES
    ]


def measured_at(level: str, subject: str, dtype: torch.dtype) -> list[Experiment]:
    """Return all experiments on a subject that a run at `level` measures."""
    return [
        Experiment(subject, size, dtype, baseline)
        for size in sizes_of(subject)
        for baseline in BASELINES
        if DEPTHS.index(depth(subject, size, baseline)) <= DEPTHS.index(level)
    ]


def measured_on_a_cpu(level: str, subjects: Sequence[str], dtype: torch.dtype) -> list[Experiment]:
    """Return the experiments that a run at `level` measures on a CPU: one subject at quick, mostly small sizes."""
    return [
        Experiment(subject, size, dtype, "fp32")
        for subject in (subjects[:1] if level == "quick" else subjects)
        for size in (CPU_SIZES[subject in STEPS] if level == "full" else CPU_SIZES[subject in STEPS][:1])
    ]


@dataclass(frozen=True)
class Measurement:
    """Result of an experiment: `speedup` includes the noise floor, `invalid` is the reason why it decides nothing."""

    experiment: Experiment
    clock: str
    comparison: paired_comparison.Comparison
    speedup: intervals.Interval
    floor: float
    figures: diagnosis.Figures
    invalid: str | None
    facts: dict[str, object]
    shrink: int

    @property
    def has_interval(self) -> bool:
        """Whether there was time for an interval, and for the noise floor in it."""
        return 0 < self.speedup.low <= self.speedup.high < math.inf

    @property
    def diagnosis(self) -> str:
        return diagnosis.line(self.figures)

    def reported(self) -> dict[str, object]:
        """Return the figures as the report has them."""
        figures = self.figures
        known = {
            "ratio": self.speedup.estimate,
            "low": self.speedup.low,
            "high": self.speedup.high,
            "coverage": self.speedup.coverage,
            "noise": self.floor,
            "pairs": len(self.comparison.baseline),
            "stopped by": self.comparison.stopped,
            "clock of the ratio": self.clock,
            "baseline ms": statistics.median(self.comparison.baseline) * 1e3,
            "AMP ms": statistics.median(self.comparison.candidate) * 1e3,
            "AMP device ms": _milli(figures.device_seconds),
            "AMP step ms": _milli(figures.step_seconds),
            "host share": figures.host_share,
            "cast share": figures.cast_share,
            "fp32 list share": figures.fp32_share,
            "baseline TFLOP/s": _tera(figures.baseline_rate),
            "AMP TFLOP/s": _tera(figures.rate),
            "ceiling TFLOP/s": _tera(figures.ceiling),
            "share of peak": figures.peak_share,
            "rows a weight": figures.rows,
            "break-even rows": figures.break_even,
            "batch halved": self.shrink or None,
            "spoiled": self.invalid,
            **self.facts,
            "diagnosis": self.diagnosis,
        }
        return {name: value for name, value in known.items() if value is not None}


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _tera(rate: float | None) -> float | None:
    return None if rate is None else rate / peak_rates.TERA


@dataclass(frozen=True)
class _Bench:
    """A subject set up on its target: its clocks, both arms, and what empties the cache before a run."""

    target: Target
    experiment: Experiment
    subject: Subject
    shrink: int
    plan: paired_comparison.Plan
    on_device: clocks.Clock
    by_host: clocks.Clock
    baseline: Work
    amp: Work
    before: Callable[[], object] | None

    @property
    def clock(self) -> clocks.Clock:
        """The clock of the ratio: whole steps are what the host waits for, operations what the device works."""
        return self.by_host if self.experiment.is_step else self.on_device

    def pair(self) -> float:
        """Return the seconds that both arms take once, after a run that loads and compiles."""
        self.baseline()
        self.amp()
        return sum(paired_comparison.seconds(self.clock, arm) for arm in (self.baseline, self.amp))


def _bench(target: Target, spec: Experiment, subject: Subject, shrink: int, plan: paired_comparison.Plan) -> _Bench:
    module = device_module(target.device_type)
    return _Bench(
        target,
        spec,
        subject,
        shrink,
        plan,
        clocks.device_clock(target.device_type, module),
        clocks.step_clock(target.device_type, module),
        *arms(target, spec, subject),
        None if spec.is_step else timing.flush(target),
    )


def _affordable(case: Case, bench: _Bench) -> bool:
    """Return whether the pilot's pairs, and as many runs to warm up as it takes, fit into the plan's budget.

    Only of an accelerator's large sizes is that asked: all others are as small as they are useful. The smallest of them
    is measured even if fewer pairs fit; the case ends where not one does.
    """
    if bench.target.device_type == "cpu" or bench.experiment.size != "compute":
        return True
    pair, plan = bench.pair(), bench.plan
    if bench.shrink == SHRINKS:
        if pair > plan.budget:
            case.out_of_time(bench.experiment.key, pair * plan.pilot)
        return True
    return pair * (plan.pilot + FEWEST_WARM_UPS) <= plan.budget


class Experiments:
    """The measurements of a module's cases, each taken once, and their noise floors."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str], Measurement] = {}
        self._floors: dict[tuple[str, str, str, str], float] = {}
        self._trusted: set[tuple[str, str]] = set()
        self._repeated: set[tuple[str, str]] = set()
        self._rates: dict[tuple[str, torch.dtype], float] = {}

    def measure(self, case: Case, target: Target, spec: Experiment, among: int = 1) -> Measurement:
        """Measure an experiment, or return its earlier measurement; ends the case if that is impossible.

        The case's remaining time is for `among` experiments.

        Where the subject needs more memory than is free, or more time than is left, its batch is halved, thrice at
        most. An invalid one, or one without time for an interval, is repeated once, when it is requested again: that
        is independent of its ratio, so the coverage holds.
        """
        place = (target.name, spec.key)
        known = self._measured.get(place)
        if known is not None and place not in self._repeated and not (known.has_interval and known.invalid is None):
            self._repeated.add(place)
            known = None
        if known is None:
            plan = plan_of(case, target, spec, among)
            known = self._measured[place] = self._as_large_as_fits(case, target, spec, plan)
        return known

    def _as_large_as_fits(
        self, case: Case, target: Target, spec: Experiment, plan: paired_comparison.Plan
    ) -> Measurement:
        self.demand_time(case, target, spec.key, spec.make(target.device_type, SHRINKS).flops, spec.dtype, plan)
        for shrink in range(SHRINKS + 1):
            subject = spec.make(target.device_type, shrink)
            if not _fits(target, subject) or self._pair(case, target, subject.flops, spec.dtype) > plan.budget:
                continue
            try:
                if (found := self._in_time(case, target, spec, subject, shrink, plan)) is not None:
                    return found
            except Exception as error:
                if not exhaustion.ran_out(error):
                    raise
                exhaustion.give_back(error)
        whole, least = (spec.make(target.device_type, shrink).nbytes for shrink in (0, SHRINKS))
        case.untestable(
            f"{spec.key} needs {_gib(whole)} of memory, {_gib(least)} at {2**SHRINKS} times less of a batch, "
            f"and {_gib(free_bytes(target))} are free"
        )
        raise AssertionError  # the case has ended

    def demand_time(
        self, case: Case, target: Target, name: str, flops: float, dtype: torch.dtype, plan: paired_comparison.Plan
    ) -> None:
        """End the case before work of so many operations whose first run alone outlasts the plan, by the device's rate.

        A device in software, or one without 16-bit arithmetic, needs minutes for what keeps a card busy for a
        millisecond, and no run can be stopped midway. Products are what a device computes fastest: nothing that it can
        do in time is left out.
        """
        pair = self._pair(case, target, flops, dtype)
        if pair > paired_comparison.PLANS["full"].budget:
            case.untestable(f"at the rate of its matrix products this device takes {pair:.0f} s for a pair of {name}")
        if pair > plan.budget:
            case.out_of_time(name, pair * plan.pilot)

    def _pair(self, case: Case, target: Target, flops: float, dtype: torch.dtype) -> float:
        """Return the seconds that a pair of that much work takes at least, by the rate of the device's products."""
        if target.device_type == "cpu":
            return 0.0  # its sizes take a millisecond or so
        if (place := (target.name, dtype)) not in self._rates:
            self._rates[place] = rate_of_products(target, dtype, case.now)
        return flops / self._rates[place]

    def _in_time(
        self, case: Case, target: Target, spec: Experiment, subject: Subject, shrink: int, plan: paired_comparison.Plan
    ) -> Measurement | None:
        """Set up the subject and measure it; return None if it is too slow. Its memory is freed at the end."""
        with tf32.precision(case, target, spec.baseline), broken_timing():
            bench = _bench(target, spec, subject, shrink, plan)
            _try(case, target, spec, bench)
            return self._measured_on(case, bench) if _affordable(case, bench) else None

    def _measured_on(self, case: Case, bench: _Bench) -> Measurement:
        spec, clock = bench.experiment, bench.clock
        self._trust(case, bench)
        taken = timing.take(
            case,
            bench.target,
            clock,
            (bench.baseline, bench.amp),
            bench.plan,
            name=spec.key,
            before=bench.before,
            floor=lambda: self._floor(case, bench),
        )
        seen = taken.comparison
        if not seen.baseline:
            case.inconclusive(f"{spec.key}: no time is left for a pair; a deeper level has more")
        figures = _figures(bench, seen, taken.facts)
        return Measurement(
            spec, clock.name, seen, taken.speedup, taken.floor, figures, taken.invalid, taken.facts, bench.shrink
        )

    def _trust(self, case: Case, bench: _Bench) -> None:
        """Check each clock once, on work that takes long enough; one that does not synchronize is an ERROR."""
        place = (bench.target.name, bench.clock.name)
        if bench.target.device_type == "cpu" or bench.experiment.size != "compute" or place in self._trusted:
            return
        held: list[Any] = []

        def kept() -> None:
            held[:] = [bench.amp()]

        def read() -> None:
            held[0][(0,) * held[0].ndim].item()

        kept()
        # What the host needs to queue the work and to read its result must not show beside it.
        short = paired_comparison.seconds(bench.clock, kept) < LONG
        growth = clocks.check_clock(bench.clock, clocks.repeated(kept, 4 if short else 1), read=read, tries=3)
        case.note(f"{bench.clock.name}: growth of the time with four times the work", growth)
        self._trusted.add(place)

    def _floor(self, case: Case, bench: _Bench) -> float:
        """Return the noise floor: what two equal arms of that size differ by, measured once.

        On an accelerator of each subject by itself; of a CPU, whose figures are for information, the first one's.
        """
        spec = bench.experiment
        subject = "" if bench.target.device_type == "cpu" else spec.subject
        place = (bench.target.name, bench.clock.name, spec.size, subject)
        if place not in self._floors:
            found = timing.noise_floor(case, bench.clock, bench.amp, bench.plan, name=spec.key, before=bench.before)
            if not math.isfinite(found):
                return found  # there was no time for it; the next one may have more
            self._floors[place] = found
        return self._floors[place]


def _figures(bench: _Bench, seen: paired_comparison.Comparison, facts: dict[str, Any]) -> diagnosis.Figures:
    """Return what explains a comparison: where the time of the AMP arm went, and what the device could do."""
    target, spec = bench.target, bench.experiment
    taken = profile.observe(bench.amp, target.device_type, fp32_ops(target.device_type))
    bounds = peak_rates.ceilings(target.device)
    modes = (spec.baseline, DTYPE_NAMES[spec.dtype])
    slow, fast = (
        _rate(spec, bench.subject, statistics.median(seconds), bounds, mode)
        for seconds, mode in zip((seen.baseline, seen.candidate), modes, strict=True)
    )
    return diagnosis.Figures(
        baseline=spec.baseline,
        speedup=seen.speedup.estimate,
        step_seconds=statistics.median(seen.candidate) if spec.is_step else _median(bench.by_host, bench.amp),
        device_seconds=_device_seconds(bench, seen, taken),
        cast_share=taken.cast_share if taken else None,
        fp32_share=taken.fp32_share if taken else None,
        largest_fp32_op=taken.largest_fp32_op if taken else None,
        rows=bench.subject.rows,
        break_even=break_even(target, spec, bounds),
        rate=fast,
        baseline_rate=slow,
        ceiling=peaks(target, bounds).low_flops,
        clock_mhz=clock_mhz(facts),
        matrix_units=matrix_units(target),
        has_tf32=tf32.has_tf32_flags(target),
    )


def matrix_units(target: Target) -> bool | None:
    """Whether the device has units for 16-bit products; None where no driver tells: of a CPU, MPS and third parties."""
    return bool(target.probe["tensor_cores"]) if target.device_type in ("cuda", "xpu") else None


def arms(target: Target, spec: Experiment, subject: Subject) -> tuple[Work, Work]:
    """Return the work of both arms on the target."""

    def region() -> AbstractContextManager[None]:
        return target.autocast(spec.dtype)

    if isinstance(subject, Step):
        return subject.arms(target.device, region, scaled=spec.dtype == torch.float16)
    return subject.arms(target.device, region)


def rate_of_products(target: Target, dtype: torch.dtype, now: Callable[[], float]) -> float:
    """Return the FLOP/s of matrix products, each run in fp32 and in a region, of the first size that tells it.

    By the host, until an element of the result is there: no clock of the device has been checked yet.
    """
    spec = Experiment("matmul", "compute", dtype, "fp32")
    for size in PRODUCTS:
        subject = product(size)
        works = [lambda work=work: work()[0, 0].item() for work in arms(target, spec, subject)]
        for work in works:
            work()  # which loads and compiles
        start = now()
        for work in works:
            work()
        taken = now() - start
        if taken >= timing.ARITHMETIC:
            break
    return subject.flops / taken if taken > 0 else math.inf


def _try(case: Case, target: Target, spec: Experiment, bench: _Bench) -> None:
    """End the case where a CPU has no kernel for the type: oneDNN's of fp16 need AVX512_FP16 or AMX."""
    if target.device_type != "cpu":
        return
    try:
        bench.amp()
    except RuntimeError as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        case.unsupported(f"torch has no {spec.subject} in {spec.dtype} for this CPU: {reason}")


def plan_of(case: Case, target: Target, spec: Experiment | None = None, among: int = 1) -> paired_comparison.Plan:
    """Return how long to measure at this level, within what is left to the case, which has so many to measure.

    Those that decide most may take more than their share of the chapter's time, on a device on which that is short.
    """
    plan = (CPU_PLANS if target.device_type == "cpu" else paired_comparison.PLANS)[case.level]
    favoured = spec is not None and f"{spec.subject}/{spec.size}" in ALWAYS
    least = case.samples(quick=1, standard=3, full=20) if favoured else LEAST_SECONDS
    # Building, warming up, profiling and the noise floor take as long again.
    return timing.within(plan, max(least, case.allowance / (2 * among)))


def _median(clock: clocks.Clock, work: Work) -> float:
    return statistics.median(clock.seconds(work) for _ in range(FEW))


def _device_seconds(bench: _Bench, seen: paired_comparison.Comparison, taken: profile.Profile | None) -> float | None:
    """How long the device works for the AMP arm; None where no clock or profile tells it from the host's time."""
    if taken is not None and taken.where == "device" and bench.experiment.is_step:
        # A step waits for the device in its middle, so that events around it would see the host's pauses as well.
        return taken.total
    if bench.target.device_type == "cpu" or bench.on_device.name == bench.by_host.name:
        return None
    return _median(bench.on_device, bench.amp) if bench.experiment.is_step else statistics.median(seen.candidate)


def _rate(spec: Experiment, subject: Subject, seconds: float, bounds: peak_rates.Ceilings, mode: str) -> float:
    """Return operations a second, as defined; raises BrokenTiming for work that outran the hardware."""
    bound = bounds.flops(mode if spec.subject in _ORDINARY else "low")
    peak_rates.rate(subject.least_flops, seconds, bound)
    return subject.flops / seconds


@contextmanager
def broken_timing() -> Iterator[None]:
    """Turn a clock that cannot be believed into an error of the suite: it says nothing about AMP."""
    try:
        yield
    except clocks.BrokenTiming as broken:
        raise SuiteError(str(broken)) from None


def peaks(target: Target, bounds: peak_rates.Ceilings) -> peak_rates.Ceilings:
    """Return the published rates of the device, or where its name is in no table, what it cannot exceed."""
    found = peak_rates.published(str(target.probe["name"]))
    return bounds if found.low_flops is None else found


def break_even(target: Target, spec: Experiment, bounds: peak_rates.Ceilings) -> float | None:
    """Return rows per weight from which AMP can win, None where the device's rates are not known."""
    known = peaks(target, bounds)
    slow, fast, bandwidth = known.flops(spec.baseline), known.low_flops, known.bytes_per_second
    if slow is None or fast is None or bandwidth is None:
        return None
    return peak_rates.break_even_rows(slow, fast, bandwidth, scaler=spec.dtype == torch.float16, training=spec.is_step)


def clock_mhz(facts: dict[str, object]) -> float | None:
    """Return the clock of the processors at the end of a measurement, if the conditions have it."""
    found = facts.get("clock after, MHz")
    return float(found) if isinstance(found, (int, float)) else None


def fp32_ops(device_type: str) -> frozenset[str]:
    """Return the ops that autocast runs in fp32 on that device type, by the names that a profile shows."""
    backend = backend_of(device_type)
    names = {listing.name for listing in listings(backend, "fp32")}
    return frozenset(names | {op for name in names for op in resolved(name)})


def free_bytes(target: Target) -> int | None:
    """Return memory that a subject could take on the target; None if the device does not report it."""
    counters = None if target.device_type == "cpu" else Allocator.of(device_module(target.device_type), target.device)
    return None if counters is None else counters.free()


def _fits(target: Target, subject: Subject) -> bool:
    """Return whether there is memory enough for the subject, after a second look."""
    for _ in range(2):
        free = free_bytes(target)
        if free is None or subject.nbytes <= free:
            return True
        gc.collect()  # models and their optimizers hold each other
    return False


def _gib(nbytes: int | None) -> str:
    return "an unknown amount" if nbytes is None else f"{nbytes / 2**30:.1f} GiB"
