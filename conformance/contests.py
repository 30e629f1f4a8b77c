"""Contests of fp32 and AMP on a device: measured once a run, told in the evidence, judged by what is expected of it."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from conformance.harness.check import DEPTHS, Case, SuiteError, deep
from conformance.harness.expectations import OPERATION_SIZES, STEP_SIZES, DeviceClass, Expectation, Expectations
from conformance.harness.targets import DTYPE_NAMES, Target, device_module
from conformance.harness.waivers import today
from conformance.measure import caches, ceilings, clocks, comparison, conditions, diagnosis, intervals, profile
from conformance.oracles.op_policy import BACKENDS, listings, resolved
from conformance.workloads.timed_operations import Operation, linear, operation
from conformance.workloads.timed_steps import STEPS, Step, step

Subject = Operation | Step
Work = clocks.Work

BASELINES = ("fp32", "tf32")
ALWAYS = ("matmul/compute", "step-mlp/compute")  # those of AMP-SPEED-001 to 004, which every level measures
ROWS, WIDTH = (16, 64, 256, 1024, 4096), 4096  # of the Linear whose break-even is looked for
SHRINKS = 3  # a subject that does not fit is halved that often at most: an eighth still shows what it is bound by
SAMPLED = 10  # pairs between two looks at the device's clocks, which take the driver some time
FEW = 5  # runs whose median is good enough for a diagnosis

# A CPU's figures are for information: enough pairs for an interval, in a fraction of a second.
CPU_PLANS = {
    "quick": comparison.Plan(pilot=9, most=9, width=1.0, budget=1.0, warm_ups=2),
    "standard": comparison.Plan(pilot=9, most=9, width=1.0, budget=1.0, warm_ups=2),
    "full": comparison.Plan(pilot=12, most=96, width=0.1, budget=4.0, warm_ups=5),
}

# Only of these is it certain that fp32 without TF32 runs on the ordinary units: attention's fp32 kernels add up TF32
# products (OpMultiplyAddFastF32 in aten/native/transformers/cuda/mem_eff_attention), convolutions have others.
_ORDINARY = ("matmul", "linear", "bmm", "step-mlp")


@dataclass(frozen=True)
class Contest:
    """Which subject is to be measured, in which AMP dtype and against which baseline."""

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
        """The subject, its batch halved `shrink` times."""
        if self.is_step:
            return step(self.subject, self.size, device_type, shrink)
        return operation(self.subject, self.size, device_type, shrink)


def sizes_of(subject: str) -> tuple[str, ...]:
    """The names of a subject's sizes on an accelerator, from the smallest."""
    return STEP_SIZES if subject in STEPS else OPERATION_SIZES


def depth(subject: str, size: str, baseline: str) -> str:
    """The level from which on a measurement is taken: first what decides most."""
    if f"{subject}/{size}" in ALWAYS:
        return "quick"
    # What is bound by launches cares for no unit, TF32's or other, so that one baseline tells all.
    by_launches = size in ("launch", "small") and baseline == "fp32"
    return "standard" if size == "compute" or by_launches else "full"


def matrix(subjects: Iterable[str]) -> list[Any]:
    """Parameter sets of subject, size and baseline, each left out below its level."""
    return [
        deep(depth(subject, size, baseline), subject, size, baseline, id=f"{subject}-{size}-{baseline}")
        for subject in subjects
        for size in sizes_of(subject)
        for baseline in BASELINES
    ]


def measured_at(level: str, subject: str, dtype: torch.dtype) -> list[Contest]:
    """All contests of a subject that a run at `level` measures."""
    return [
        Contest(subject, size, dtype, baseline)
        for size in sizes_of(subject)
        for baseline in BASELINES
        if DEPTHS.index(depth(subject, size, baseline)) <= DEPTHS.index(level)
    ]


@dataclass(frozen=True)
class Measurement:
    """What a contest came to: `speedup` has the noise floor in it, `spoiled` says why it decides nothing, if so."""

    contest: Contest
    clock: str
    comparison: comparison.Comparison
    speedup: intervals.Interval
    floor: float
    figures: diagnosis.Figures
    spoiled: str | None
    facts: dict[str, object]
    shrink: int

    @property
    def diagnosis(self) -> str:
        return diagnosis.line(self.figures)

    def told(self) -> dict[str, object]:
        """The figures as the report has them."""
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
            "spoiled": self.spoiled,
            **self.facts,
            "diagnosis": self.diagnosis,
        }
        return {name: value for name, value in known.items() if value is not None}


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _tera(rate: float | None) -> float | None:
    return None if rate is None else rate / ceilings.TERA


class Contests:
    """The measurements of a module's cases, each taken once, and the noise floors that they are widened by."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str], Measurement] = {}
        self._floors: dict[tuple[str, str, str], float] = {}
        self._trusted: set[tuple[str, str]] = set()

    def measure(self, case: Case, target: Target, contest: Contest) -> Measurement:
        """Measure a contest, or give what was measured before; ends the case where that cannot be done.

        Where the subject needs more memory than is free its batch is halved, thrice at most.
        """
        known = self._measured.get((target.name, contest.key))
        if known is None:
            known = self._measured[target.name, contest.key] = self._in_the_memory_there_is(case, target, contest)
        return known

    def _in_the_memory_there_is(self, case: Case, target: Target, contest: Contest) -> Measurement:
        for shrink in range(SHRINKS + 1):
            subject = contest.make(target.device_type, shrink)
            free = free_bytes(target)
            if free is not None and subject.nbytes > free:
                continue
            try:
                return self._measured_now(case, target, contest, subject, shrink)
            except torch.OutOfMemoryError:
                pass  # what it held is given back below, when the exception is gone
            release(target)
        whole, least = (contest.make(target.device_type, shrink).nbytes for shrink in (0, SHRINKS))
        case.untestable(
            f"{contest.key} needs {_gib(whole)} of memory, {_gib(least)} at {2**SHRINKS} times less of a batch, "
            f"and {_gib(free_bytes(target))} are free"
        )
        raise AssertionError  # the case has ended

    def _measured_now(self, case: Case, target: Target, contest: Contest, subject: Subject, shrink: int) -> Measurement:
        module = device_module(target.device_type)
        on_device = clocks.device_clock(target.device_type, module)
        by_host = clocks.step_clock(target.device_type, module)
        clock = by_host if contest.is_step else on_device
        plan = plan_of(case, target)
        with precision(case, target, contest.baseline):
            baseline, amp = arms(target, contest, subject)
            before = None if contest.is_step else flush(target)
            _try(case, target, contest, amp)
            self._trust(case, target, clock, contest, amp)
            with conditions.Watch(target.device) as watch, broken_timing():
                floor = self._floor(target, clock, contest, amp, plan, before)
                progress = _shown(case, contest, watch)
                seen = comparison.compare(clock, baseline, amp, plan, before=before, progress=progress)
            if not seen.baseline:
                case.inconclusive(f"{contest.key}: no time is left for a pair; a deeper level has more")
            taken = profile.observe(amp, target.device_type, fp32_ops(target.device_type))
            device = _device_seconds(target, contest, seen, taken, on_device, amp)
            step_seconds = statistics.median(seen.candidate) if contest.is_step else _median(by_host, amp)
        bounds = ceilings.ceilings(target.device)
        rates = [_rate(contest, subject, arm, bounds, mode) for arm, mode in _modes(contest, seen)]
        speedup = seen.speedup.widened(floor)
        facts = watch.facts()
        figures = diagnosis.Figures(
            baseline=contest.baseline,
            speedup=speedup.estimate,
            step_seconds=step_seconds,
            device_seconds=device,
            cast_share=taken.cast_share if taken else None,
            fp32_share=taken.fp32_share if taken else None,
            largest_fp32_op=taken.largest_fp32_op if taken else None,
            rows=subject.rows,
            break_even=break_even(target, contest, bounds),
            rate=rates[1],
            baseline_rate=rates[0],
            ceiling=peaks(target, bounds).low_flops,
            clock_mhz=clock_mhz(facts),
            matrix_units=None if target.device_type == "cpu" else bool(target.probe["tensor_cores"]),
            has_tf32=_has_tf32_flags(target),
        )
        return Measurement(contest, clock.name, seen, speedup, floor, figures, watch.spoiled(), facts, shrink)

    def _trust(self, case: Case, target: Target, clock: clocks.Clock, contest: Contest, work: Work) -> None:
        """Try each clock once, on work that takes long enough; one that does not wait breaks the suite."""
        if target.device_type == "cpu" or contest.size in ("launch", "small"):
            return
        if (target.name, clock.name) in self._trusted:
            return
        held: list[Any] = []

        def kept() -> None:
            held[:] = [work()]

        with broken_timing():
            growth = clocks.check_clock(clock, kept, read=lambda: held[0].flatten()[0].item(), tries=3)
        case.note(f"{clock.name}: growth of the time with four times the work", growth)
        self._trusted.add((target.name, clock.name))

    def _floor(
        self,
        target: Target,
        clock: clocks.Clock,
        contest: Contest,
        work: Work,
        plan: comparison.Plan,
        before: Callable[[], object] | None,
    ) -> float:
        """The noise floor of this clock at this size: what two equal arms differ by, measured once."""
        place = (target.name, clock.name, contest.size)
        if place not in self._floors:
            equal = comparison.compare(clock, work, work, replace(plan, budget=plan.budget / 4), before=before)
            self._floors[place] = intervals.noise_floor(equal.speedup)
        return self._floors[place]


def arms(target: Target, contest: Contest, subject: Subject) -> tuple[Work, Work]:
    """The work of both arms on the target."""

    def region() -> AbstractContextManager[None]:
        return target.autocast(contest.dtype)

    if isinstance(subject, Step):
        return subject.arms(target.device, region, scaled=contest.dtype == torch.float16)
    return subject.arms(target.device, region)


def _try(case: Case, target: Target, contest: Contest, amp: Work) -> None:
    """End the case where a CPU has no kernel for the type: oneDNN's of fp16 need AVX512_FP16 or AMX."""
    if target.device_type != "cpu":
        return
    try:
        amp()
    except RuntimeError as error:
        case.unsupported(
            f"torch has no {contest.subject} in {contest.dtype} for this CPU: {str(error).splitlines()[0]}"
        )


def plan_of(case: Case, target: Target) -> comparison.Plan:
    """How long to measure at this level, within what is left to the case."""
    plan = (CPU_PLANS if target.device_type == "cpu" else comparison.PLANS)[case.level]
    # Building, warming up, profiling and the noise floor take as long again.
    return replace(plan, budget=min(plan.budget, case.allowance / 2))


def flush(target: Target) -> Callable[[], object] | None:
    """What empties the last-level cache before a run; nothing on a CPU, where the caches belong to all its work."""
    if target.device_type == "cpu":
        return None
    return caches.Flush(target.device, caches.last_level_bytes(target.device)[0])


def _shown(case: Case, contest: Contest, watch: conditions.Watch) -> Callable[[comparison.Progress], object]:
    def show(now: comparison.Progress) -> None:
        if now.done % SAMPLED == 0:
            watch.sample()
        known = now.interval
        ratio = f", ratio {known.estimate:.3g} in [{known.low:.3g}, {known.high:.3g}]" if known else ""
        left = f", {now.seconds_left:.0f} s left" if math.isfinite(now.seconds_left) else ""
        case.progress(f"{contest.key}: {now.done} of {now.planned} pairs{ratio}{left}")

    return show


def _median(clock: clocks.Clock, work: Work) -> float:
    return statistics.median(clock.seconds(work) for _ in range(FEW))


def _device_seconds(
    target: Target,
    contest: Contest,
    seen: comparison.Comparison,
    taken: profile.Profile | None,
    clock: clocks.Clock,
    amp: Work,
) -> float | None:
    """How long the device works for the AMP arm; None where host and device are one."""
    if target.device_type == "cpu":
        return None
    if not contest.is_step:
        return statistics.median(seen.candidate)
    # A step waits for the device in its middle, so that events around it see the host's pauses as well.
    return taken.total if taken is not None and taken.where == "device" else _median(clock, amp)


def _modes(contest: Contest, seen: comparison.Comparison) -> list[tuple[tuple[float, ...], str]]:
    return [(seen.baseline, contest.baseline), (seen.candidate, DTYPE_NAMES[contest.dtype])]


def _rate(
    contest: Contest, subject: Subject, seconds: tuple[float, ...], bounds: ceilings.Ceilings, mode: str
) -> float:
    """Operations a second, as defined; work that outran the hardware breaks the suite."""
    median = statistics.median(seconds)
    bound = bounds.flops(mode if contest.subject in _ORDINARY else "low")
    with broken_timing():
        ceilings.rate(subject.least_flops, median, bound)
    return subject.flops / median


@contextmanager
def broken_timing() -> Iterator[None]:
    """Turn a clock that cannot be believed into an error of the suite: it says nothing about AMP."""
    try:
        yield
    except clocks.BrokenTiming as broken:
        raise SuiteError(str(broken)) from None


def peaks(target: Target, bounds: ceilings.Ceilings) -> ceilings.Ceilings:
    """The published rates of the device, or where its name is in no table, what it cannot exceed."""
    found = ceilings.published(str(target.probe["name"]))
    return bounds if found.low_flops is None else found


def break_even(target: Target, contest: Contest, bounds: ceilings.Ceilings) -> float | None:
    """Rows per weight from which AMP can win, None where the device's rates are not known."""
    known = peaks(target, bounds)
    slow, fast, bandwidth = known.flops(contest.baseline), known.low_flops, known.bytes_per_second
    if slow is None or fast is None or bandwidth is None:
        return None
    return ceilings.break_even_rows(
        slow, fast, bandwidth, scaler=contest.dtype == torch.float16, training=contest.is_step
    )


def clock_mhz(facts: dict[str, object]) -> float | None:
    """The clock of the processors at the end of a measurement, where the conditions tell it."""
    found = facts.get("clock after, MHz")
    return float(found) if isinstance(found, (int, float)) else None


def fp32_ops(device_type: str) -> frozenset[str]:
    """The ops that autocast runs in fp32 on that device type, by the names that a profile shows."""
    backend = device_type if device_type in BACKENDS else "cuda"
    names = {listing.name for listing in listings(backend, "fp32")}
    return frozenset(names | {op for name in names for op in resolved(name)})


def free_bytes(target: Target) -> int | None:
    """Memory that a subject could take on the target; None where the device does not tell."""
    module = device_module(target.device_type)
    tell = getattr(module, "mem_get_info", None)
    if target.device_type == "cpu" or tell is None:
        return None
    cached = int(module.memory_reserved(target.device)) - int(module.memory_allocated(target.device))  # type: ignore[union-attr]
    return int(tell(target.device)[0]) + cached


def release(target: Target) -> None:
    """Give what failed work held back to the device."""
    gc.collect()
    empty = getattr(device_module(target.device_type), "empty_cache", None)
    if target.device_type != "cpu" and empty is not None:
        empty()


def _gib(nbytes: int | None) -> str:
    return "an unknown amount" if nbytes is None else f"{nbytes / 2**30:.1f} GiB"


@contextmanager
def precision(case: Case, target: Target, baseline: str) -> Iterator[None]:
    """TF32 in fp32 products and convolutions on or off, as the baseline is named, and seen to be so.

    On other devices than CUDA's there is only off.
    """
    on = baseline == "tf32"
    if not _has_tf32_flags(target):
        if on:
            case.unsupported("TF32 is a mode of CUDA devices")
        yield
        return
    flags = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [flag.allow_tf32 for flag in flags]
    try:
        for flag in flags:
            flag.allow_tf32 = on
        seen = tf32_in_effect(target.device)
        if on and not seen:
            case.unsupported("the device has no TF32")
        case.equal("TF32 in effect in the fp32 arm, as seen in a product", seen, on)
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


def _has_tf32_flags(target: Target) -> bool:
    return target.device_type == "cuda" and torch.version.hip is None


def tf32_in_effect(device: torch.device) -> bool:
    """Whether products read 10 bits of mantissa only: 1 + 2^-13 is then 1."""
    # Large enough that a library has no reason to prefer the ordinary units where TF32 is allowed.
    factor = torch.full((1024, 1024), 1 + 2.0**-13, device=device)
    ones = torch.ones(1024, 1024, device=device)
    return bool((torch.matmul(factor, ones) == 1024).all())


def record(case: Case, measurement: Measurement) -> None:
    """Put a measurement into the evidence, and hand its times to pytest-benchmark."""
    tell(case, measurement)
    case.timings(measurement.comparison.candidate, {"key": measurement.contest.key, **measurement.told()})


def tell(case: Case, measurement: Measurement) -> None:
    """Put a measurement into the evidence; ends the case where there was no time for an interval."""
    speedup, key = measurement.speedup, measurement.contest.key
    if not 0 < speedup.low <= speedup.high < math.inf:
        case.note(f"{key}: ratio of the medians", speedup.estimate)
        case.inconclusive(
            f"{key}: in the time that is left to it there were {len(measurement.comparison.baseline)} pairs, "
            "too few for an interval; a deeper level has more time, --contract leaves fewer cases"
        )
    case.speedup(key, measurement.told())


def device_class(case: Case, target: Target, expectations: Expectations) -> DeviceClass:
    """What is expected of the target; ends the case where nothing is."""
    if not target.probe["tensor_cores"]:
        case.unsupported("the device has no tensor cores, and nothing is promised without them")
    device = (target.device_type, str(target.probe["name"]), target.probe["capability"])
    found = expectations.of(*device, today())
    if found is None:
        case.unsupported(f"{expectations.why_none(*device, today())}: its speed-ups are recorded, not judged")
    assert found is not None
    return found


def judge(
    case: Case, target: Target, contests: Contests, expectations: Expectations, candidates: Iterable[Contest]
) -> None:
    """Hold every contest of which something is expected against it; ends the case where there is none.

    A failure counts before a measurement that decides nothing, and that before those that hold.
    """
    known = device_class(case, target, expectations)
    expected = [(contest, wanted) for contest in candidates if (wanted := known.expected(contest.key)) is not None]
    if not expected:
        case.unsupported(f"the expectations for {known.id} say nothing of this: its speed-ups are recorded, not judged")
    undecided = [
        reason
        for contest, wanted in expected
        if (reason := _judged(case, target, contests.measure(case, target, contest), wanted)) is not None
    ]
    if undecided:
        case.inconclusive("; ".join(undecided))


def _judged(case: Case, target: Target, seen: Measurement, wanted: Expectation) -> str | None:
    """Hold one measurement against what is expected; raises where it misses, returns why it decides nothing."""
    key = seen.contest.key
    tell(case, seen)
    case.note(f"{key}: expected", str(wanted))
    if seen.spoiled is not None:
        return f"{key}: {seen.spoiled}"
    if seen.shrink:
        needed = _gib(seen.contest.make(target.device_type).nbytes)
        return (
            f"{key} needs {needed} of memory, which the device does not have; "
            f"at a batch {2**seen.shrink} times smaller it was recorded, not judged"
        )
    verdict = seen.speedup.judge(wanted.factor)
    if verdict is None:
        ends = f"[{seen.speedup.low:.3g}, {seen.speedup.high:.3g}]"
        return f"{key}: the ratio of {seen.speedup.estimate:.3g} lies in {ends}, and {wanted.factor:.4g} is inside"
    # Of a ratio that misses, the end that is nearest to what is expected.
    end, value = ("low", seen.speedup.low) if verdict else ("high", seen.speedup.high)
    case.at_least(f"{key}: {end} end of the ratio; {seen.diagnosis}", value, wanted.factor)
    return None


def equal_arms(case: Case, target: Target, kind: str) -> None:
    """Record how far two equal arms differ, on the clock of the device or of whole steps."""
    subject = "matmul" if kind == "device" else "step-mlp"
    contest = Contest(subject, "middle" if kind == "device" else "small", torch.float16, "fp32")
    module = device_module(target.device_type)
    clock = (clocks.device_clock if kind == "device" else clocks.step_clock)(target.device_type, module)
    plan = plan_of(case, target)
    work, _ = arms(target, contest, contest.make(target.device_type))
    with conditions.Watch(target.device) as watch, broken_timing():
        seen = comparison.compare(clock, work, work, plan, before=flush(target) if kind == "device" else None)
    speedup = seen.speedup
    case.note("clock", clock.name)
    case.note("pairs", len(seen.baseline))
    case.note("ratio of two equal arms: low end, median, high end", [speedup.low, speedup.estimate, speedup.high])
    case.note("confidence of the interval", speedup.coverage)
    for name, value in watch.facts().items():
        case.note(name, value)
    case.timings(seen.candidate, {"low": speedup.low, "ratio": speedup.estimate, "high": speedup.high})


def sweep(case: Case, target: Target, dtype: torch.dtype, baseline: str) -> None:
    """Record from how many rows on a Linear of width 4096 is faster under AMP, and what its rates predict."""
    clock = clocks.device_clock(target.device_type, device_module(target.device_type))
    plan = replace(comparison.PLANS["quick"], budget=min(2.0, case.allowance / (2 * len(ROWS))))
    contest = Contest("linear", "compute", dtype, baseline)
    bounds = ceilings.ceilings(target.device)
    ratios: dict[int, intervals.Interval] = {}
    with precision(case, target, baseline), broken_timing():
        before = flush(target)
        for rows in ROWS:
            case.progress(f"break-even of a Linear: {rows} rows")
            ratios[rows] = comparison.compare(
                clock, *arms(target, contest, linear(rows, WIDTH, WIDTH)), plan, before=before
            ).speedup
    for rows, ratio in ratios.items():
        case.note(f"{rows} rows: low end, median, high end of the ratio", [ratio.low, ratio.estimate, ratio.high])
    won = [rows for rows, ratio in ratios.items() if ratio.low >= 1]
    lost = [rows for rows, ratio in ratios.items() if ratio.high < 1]
    case.note("AMP is faster from this many rows on, of those tried", min(won, default="none"))
    case.note("AMP is slower up to this many rows, of those tried", max(lost, default="none"))
    predicted = break_even(target, contest, bounds)
    case.note("break-even as the device's rates predict it", "unknown" if predicted is None else predicted, "rows")
