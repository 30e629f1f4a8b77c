"""Figures of a measured speed-up, and the diagnosis of a low one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

MOST = 0.5  # a part that is more than all others together
LEAST = 0.1  # a part below this explains nothing
SHORT = 2e-5  # seconds: some launches of a kernel, each of which takes the host and the device 2 to 5 µs on CUDA
SATURATED = 0.45  # of the ceiling: large products reach 0.5 to 0.9 of it ("maximum achievable matmul FLOPS" tables)
ALIKE = 1.1  # rates that differ by less are alike

BASELINES = {"fp32": "fp32 with TF32 off", "tf32": "fp32 with TF32 on"}


@dataclass(frozen=True)
class Figures:
    """What was measured of one speed-up; None where it is not known.

    `speedup` is baseline over AMP. `device_seconds` are those that the device works for the AMP arm, `step_seconds`
    those that the host waits for it from idle to idle. Shares are parts of the device's time. `rows` is how often each
    weight is used and `break_even` how often it has to be for AMP to win. `rate`, `baseline_rate` and `ceiling` are
    operations a second, the first two measured.
    """

    baseline: str
    speedup: float
    step_seconds: float
    device_seconds: float | None = None
    cast_share: float | None = None
    fp32_share: float | None = None
    largest_fp32_op: str | None = None
    rows: int | None = None
    break_even: float | None = None
    rate: float | None = None
    baseline_rate: float | None = None
    ceiling: float | None = None
    clock_mhz: float | None = None
    matrix_units: bool | None = None
    has_tf32: bool = True  # whether the device has a TF32 that could be on or off

    @property
    def host_share(self) -> float | None:
        """The part of a step in which the device has nothing to do."""
        if self.device_seconds is None or self.step_seconds <= 0:
            return None
        return max(0.0, 1 - self.device_seconds / self.step_seconds)

    @property
    def peak_share(self) -> float | None:
        """The rate of the AMP arm as a part of the ceiling."""
        return None if self.rate is None or not self.ceiling else self.rate / self.ceiling


def words(figures: Figures) -> tuple[str, ...]:
    """Return the causes of the speed-up, the most important first; empty if none stands out."""
    return tuple(_words(figures))


def _words(figures: Figures) -> Iterator[str]:
    if figures.matrix_units is False:
        yield "no tensor cores"
    elif figures.break_even is not None and math.isinf(figures.break_even):
        yield "16-bit units no faster than the baseline's"
    host_bound = (figures.host_share or 0.0) >= MOST
    if host_bound:
        yield "host-bound"
    eaten = _eaten(figures)
    yield from eaten
    too_small = _too_small(figures)
    if too_small:
        yield "too small"
    if figures.baseline == "tf32":
        yield "TF32 baseline"
    if host_bound or eaten:
        return
    if _slower(figures):
        yield "16-bit kernels slower than the baseline's"
    elif not too_small and _alike(figures):
        yield "16-bit units not used"
    elif (figures.peak_share or 0.0) >= SATURATED:
        yield "bound by arithmetic"


def _too_small(figures: Figures) -> bool:
    """Whether weights are used too seldom for their casts to pay, or the device is done as soon as it is started."""
    if figures.rows is not None and figures.break_even is not None and figures.rows < figures.break_even < math.inf:
        return True
    return figures.device_seconds is not None and figures.device_seconds < SHORT


def _eaten(figures: Figures) -> list[str]:
    """Return what takes most of the AMP arm, or turns its gain into a loss."""
    found = []
    if figures.largest_fp32_op is not None and _explains(figures.fp32_share, figures.speedup):
        found.append(f"fp32 list op dominates ({figures.largest_fp32_op})")
    if _explains(figures.cast_share, figures.speedup):
        found.append("cast-bound")
    return found


def _explains(share: float | None, speedup: float) -> bool:
    """Return whether a part of the AMP arm is most of it, or whether without that part a loss would be none."""
    if share is None:
        return False
    return share >= MOST or (share >= LEAST and 1 - share <= speedup < 1)


def _slower(figures: Figures) -> bool:
    """Whether AMP would lose without its casts and without what it runs in fp32, so that its kernels are to blame."""
    if figures.cast_share is None or figures.fp32_share is None:
        return False
    return ALIKE * figures.speedup < 1 - figures.cast_share - figures.fp32_share


def _alike(figures: Figures) -> bool:
    """Return whether the 16-bit arm computes at the rate of plain fp32 where there are units for more."""
    if figures.rate is None or figures.baseline_rate is None or not figures.matrix_units:
        return False
    if figures.break_even is not None and math.isinf(figures.break_even):
        return False
    return figures.baseline == "fp32" and figures.rate <= ALIKE * figures.baseline_rate


def line(figures: Figures) -> str:
    """All figures that are known, and the words, in one line; `report.speed` takes it apart at the last colon."""
    return f"{', '.join(_told(figures))}: {', '.join(words(figures)) or 'nothing stands out'}"


def _told(figures: Figures) -> Iterator[str]:
    if figures.device_seconds is not None:
        yield f"device {_time(figures.device_seconds)}"
    yield f"step {_time(figures.step_seconds)}"
    listed = f" ({figures.largest_fp32_op})" if figures.largest_fp32_op else ""
    for name, share, tail in (
        ("host", figures.host_share, ""),
        ("casts", figures.cast_share, ""),
        ("fp32 list", figures.fp32_share, listed),
    ):
        if share is not None:
            yield f"{name} {share:.0%}{tail}"
    if figures.rows is not None:
        yield f"{figures.rows} rows a weight{_break_even(figures.break_even)}"
    if figures.rate is not None:
        yield _rate(figures.rate, figures.ceiling)
    if figures.clock_mhz is not None:
        yield f"clock {figures.clock_mhz:.0f} MHz"
    if figures.has_tf32:
        yield f"baseline {BASELINES[figures.baseline]}"


def _break_even(rows: float | None) -> str:
    if rows is None:
        return ""
    return f" against a break-even of {rows:.0f}" if math.isfinite(rows) else " against no break-even"


def _rate(rate: float, ceiling: float | None) -> str:
    if not ceiling:
        return f"{rate / 1e12:.3g} TFLOP/s"
    return f"{rate / 1e12:.3g} of at most {ceiling / 1e12:.3g} TFLOP/s ({rate / ceiling:.0%})"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
