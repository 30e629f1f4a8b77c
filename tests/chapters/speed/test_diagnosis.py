"""Diagnoses: which words follow from which figures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from conformance.chapters.speed.diagnosis import Figures, line, words

# A large product on an H100: 14 times as fast as fp32, at four fifths of the peak.
GOOD = Figures(
    baseline="fp32",
    speedup=14.0,
    step_seconds=1.5e-3,
    device_seconds=1.4e-3,
    cast_share=0.1,
    fp32_share=0.0,
    rows=8192,
    break_even=72.0,
    rate=7.9e14,
    baseline_rate=5.6e13,
    ceiling=9.9e14,
    clock_mhz=1755.0,
    matrix_units=True,
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ("bound by arithmetic",)),
        ({"baseline": "tf32", "speedup": 1.8}, ("TF32 baseline", "bound by arithmetic")),
        ({"matrix_units": False, "rate": 1e12, "speedup": 0.9, "cast_share": 0.2}, ("no tensor cores", "cast-bound")),
        ({"step_seconds": 2.9e-3}, ("host-bound",)),
        ({"cast_share": 0.55, "speedup": 2.0}, ("cast-bound",)),
        ({"cast_share": 0.3, "speedup": 0.8}, ("cast-bound",)),  # 0.8 / (1 - 0.3) is no loss
        ({"fp32_share": 0.6, "largest_fp32_op": "layer_norm"}, ("fp32 list op dominates (layer_norm)",)),
        ({"fp32_share": 0.25, "largest_fp32_op": "softmax", "speedup": 0.8}, ("fp32 list op dominates (softmax)",)),
        ({"rows": 16, "rate": 1e12}, ("too small",)),
        ({"device_seconds": 8e-6, "step_seconds": 1e-5, "rate": 1e12}, ("too small",)),
        ({"device_seconds": 8e-6, "step_seconds": 4e-5, "rate": 1e12}, ("host-bound", "too small")),
        ({"break_even": math.inf, "rate": 1e13}, ("16-bit units no faster than the baseline's",)),
        ({"speedup": 1.0, "rate": 5.7e13}, ("16-bit units not used",)),
        ({"speedup": 0.5, "rate": 2.8e13}, ("16-bit kernels slower than the baseline's",)),
        ({"baseline": "tf32", "speedup": 0.99, "cast_share": 0.0, "rate": 3e14}, ("TF32 baseline",)),
        ({"speedup": 0.98, "cast_share": 0.03, "rate": 1e14}, ()),
        ({"speedup": 4.0, "rate": 2.2e14}, ()),
        ({"ceiling": None, "break_even": None, "cast_share": None, "fp32_share": None}, ()),
    ],
)
def test_words(change: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert words(replace(GOOD, **change)) == expected


def test_the_line_holds_every_figure() -> None:
    assert line(GOOD) == (
        "device 1.4 ms, step 1.5 ms, host 7%, casts 10%, fp32 list 0%, 8192 rows a weight against a break-even of 72, "
        "790 of at most 990 TFLOP/s (80%), clock 1755 MHz, baseline fp32 with TF32 off: bound by arithmetic"
    )


def test_what_is_unknown_is_left_out() -> None:
    told = line(Figures(baseline="fp32", speedup=1.0, step_seconds=2e-5, rows=8, rate=1e9, has_tf32=False))

    assert told == "step 20 µs, 8 rows a weight, 0.001 TFLOP/s: nothing stands out"


def test_without_a_break_even_none_is_told() -> None:
    assert "8192 rows a weight against no break-even" in line(replace(GOOD, break_even=math.inf))


def test_the_device_cannot_work_longer_than_the_step() -> None:
    assert replace(GOOD, device_seconds=2e-3).host_share == 0.0
    assert replace(GOOD, device_seconds=None).host_share is None
