"""Check exact results over the whole device, repeatedly, at sizes that use every multiprocessor."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers.bits import bits
from ...oracles.numbers.formats import FORMATS, Format
from .bit_patterns import all_patterns, narrowed
from .matmul_spellings import BIASED, PLACES, PLAIN, through
from .tiled_matmul import checksums, tiled
from .unary_functions import outside

PRODUCTS = {
    "torch.mm": PLAIN["functions"]["torch.mm"],
    "F.linear": BIASED["F.linear"],
    "conv2d over places": PLAIN["convolutions"]["conv2d over places"],
}


@dataclass
class Watch:
    """Result of a run of repeats: the number of wrong repeats and elements, and the first position."""

    repeats: int = 0
    elements: int = 0
    wrong_repeats: int = 0
    wrong_elements: int = 0
    first: str = ""

    def look(self, name: str, seen: Tensor, expected: Tensor, sums: Tensor) -> None:
        """Compare the checksums of one repeat with `sums`; look at the elements only where they differ."""
        self.repeats += 1
        self.elements += seen.numel()
        if seen.dtype == expected.dtype and torch.equal(checksums(seen), sums):
            return
        self.wrong_repeats += 1
        if seen.dtype != expected.dtype:
            self.first = self.first or f"{name}: {seen.dtype} in place of {expected.dtype}"
            return
        ours, theirs = bits(seen).cpu(), bits(expected).cpu()
        places = (ours != theirs).nonzero()
        self.wrong_elements += len(places)
        if not self.first and len(places):
            row, column = (int(place) for place in places[0])
            found, promised = int(ours[row, column]) & 0xFFFF, int(theirs[row, column]) & 0xFFFF
            self.first = (
                f"{name}, repeat {self.repeats}, row {row}, column {column}: 0x{found:04X} in place of 0x{promised:04X}"
                f" (bits 0x{found ^ promised:04X})"
            )
        self.first = self.first or f"{name}, repeat {self.repeats}: the checksums alone"

    @property
    def verdict(self) -> str:
        if not self.wrong_repeats:
            return "none"
        return f"{self.wrong_elements} elements in {self.wrong_repeats} of {self.repeats} repeats; first {self.first}"


@dataclass(frozen=True)
class Job:
    """One repeated computation, its expected result and that result's checksums."""

    name: str
    call: Callable[[], Tensor]
    expected: Tensor
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums", checksums(self.expected))


def _side(case: Case, target: Target) -> int:
    """Return how many rows and columns the results have: some thousands on an accelerator, as its memory allows."""
    if target.device_type == "cpu":
        return case.samples(quick=389, standard=1021, full=2039)
    # A dozen matrices of that size, half of them in fp32, in an eighth of the memory; 8,192 fill any device.
    fits = int((int(target.probe["memory_bytes"] or 2**32) / 8 / 12 / 4) ** 0.5)
    return min(fits, case.samples(quick=1021, standard=4099, full=8191))


def _jobs(case: Case, target: Target, form: Format, rng: torch.Generator) -> list[Job]:
    side, depth = _side(case, target), case.samples(quick=64, standard=256, full=1024)
    operands = tiled(rng, form, side, depth, side, target.device)

    def product(name: str, place: str) -> Job:
        def call() -> Tensor:
            seen = through(PRODUCTS[name], place, operands.left, operands.right, lambda: target.autocast(form.dtype))
            return seen.to(form.dtype)

        return Job(f"{name}: {place}", call, operands.expected)

    jobs = [product("torch.mm", place) for place in PLACES] + [product("F.linear", "result")]
    # The gradient of a convolution's weight may be added up in 16 bits (AMP-NUMERICS-033).
    jobs.append(product("conv2d over places", "result"))
    return jobs + _pointwise(target, form, rng, side)


def _pointwise(target: Target, form: Format, rng: torch.Generator, side: int) -> list[Job]:
    """Return casts, copies and functions of `side` rows of 4096 numbers: every pattern, or random ones."""
    numbers = torch.randint(0, 2**32, (16, 4096), generator=rng)
    wide = torch.where(numbers >= 2**31, numbers - 2**32, numbers).to(torch.int32).view(torch.float32)
    # NaNs have no one pattern.
    wide = torch.where(wide.isnan(), torch.ones_like(wide), wide)
    cast = narrowed(wide.view(torch.int32).long() & 0xFFFF_FFFF, form)
    rows = torch.arange(side, device=target.device) % 16
    source, stored = (part.to(target.device).index_select(0, rows).contiguous() for part in (wide, cast))
    patterns = all_patterns(form).to(target.device).view(16, 4096).index_select(0, rows).contiguous()
    finite = torch.where(patterns.isnan(), torch.zeros_like(patterns), patterns)
    exponentials = finite.exp()
    return [
        Job("cast", lambda: source.to(form.dtype), stored),
        Job("copy", lambda: stored.clone(), stored),
        Job("sum with zero", lambda: stored + 0.0, stored.clone().masked_fill_(stored == 0, 0.0)),
        # Right in itself (looked at before), and then the same bits each time.
        Job("exp", lambda: finite.exp(), exponentials),
    ]


@contract("AMP-NUMERICS-051")
def test_exact_results_over_the_whole_device(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    case.require_subnormals(target, amp_dtype)
    form, watch = FORMATS[amp_dtype], Watch()
    jobs = _jobs(case, target, form, rng)
    # A minute for both types on a CPU, two on an accelerator; below full each job is done once.
    seconds = case.samples(quick=0, standard=0, full=30 if target.device_type == "cpu" else 60)
    begin = time.monotonic()
    rounds = 0
    with full_precision(target.device_type):
        while rounds == 0 or time.monotonic() - begin < seconds:
            for job in jobs:
                watch.look(job.name, job.call(), job.expected, job.sums)
            rounds += 1
    case.note("rounds", rounds)
    case.note("elements checked", watch.elements)
    case.note("checksum of what is expected", sum(int(job.sums.sum()) for job in jobs) % 2**32)
    case.equal(f"wrong results of {', '.join(job.name for job in jobs)}", watch.verdict, "none")
    if len(jobs[-1].expected) >= 16:
        every = jobs[-1].expected[:16].flatten()
        wrong = outside(every, "exp", form) & ~all_patterns(form).isnan()
        case.equal("exp, where it is the same each time: wrong results for 65536 inputs", int(wrong.sum()), 0)
