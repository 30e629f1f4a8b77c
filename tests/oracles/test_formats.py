"""The integer model of fp16, bf16 and fp32: patterns worked out by hand, exhaustive round trips, exact fractions."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.data import fixture, read_toml
from conformance.oracles.numbers.formats import BF16, FP16, FP32, Format, midpoints, narrow, rounded, tensor_of, widen

NARROW = {"fp16": FP16, "bf16": BF16}
ROWS = [(name, row) for name, rows in read_toml(fixture("casts.toml")).items() for row in rows]


def _fp32_pattern(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[f"{name} {row['group']} {row['value']}" for name, row in ROWS])
def test_hand_written_casts(name: str, row: dict[str, Any]) -> None:
    assert narrow(_fp32_pattern(float.fromhex(row["value"])), NARROW[name]) == row["pattern"]


@pytest.mark.parametrize(
    ("form", "largest", "overflow", "smallest", "normal", "unit"),
    [
        (FP16, 65504.0, 65520.0, 2.0**-24, 2.0**-14, 2.0**-11),
        (BF16, (2 - 2.0**-7) * 2.0**127, (2 - 2.0**-8) * 2.0**127, 2.0**-133, 2.0**-126, 2.0**-8),
        (FP32, (2 - 2.0**-23) * 2.0**127, (2 - 2.0**-24) * 2.0**127, 2.0**-149, 2.0**-126, 2.0**-24),
    ],
    ids=["fp16", "bf16", "fp32"],
)
def test_figures_of_a_format(
    form: Format, largest: float, overflow: float, smallest: float, normal: float, unit: float
) -> None:
    assert (form.largest, form.overflow, form.smallest, form.smallest_normal, form.unit_roundoff) == (
        largest,
        overflow,
        smallest,
        normal,
        unit,
    )


@pytest.mark.parametrize("form", NARROW.values(), ids=NARROW)
def test_widening_and_narrowing_every_pattern(form: Format) -> None:
    numbers = [pattern for pattern in range(2**16) if not form.is_nan(pattern)]

    assert [narrow(widen(pattern, form), form) for pattern in numbers] == numbers
    assert all(FP32.value(widen(pattern, form)) == form.value(pattern) for pattern in numbers)
    assert all(FP32.is_nan(widen(pattern, form)) for pattern in range(2**16) if form.is_nan(pattern))


@pytest.mark.parametrize("form", NARROW.values(), ids=NARROW)
def test_midpoints_are_ties(form: Format) -> None:
    below, tie, above = (midpoints(form, stride=101)[start::3] for start in range(3))
    low = list(form.finite_patterns()[::101])

    assert [narrow(pattern, form) for pattern in below[: len(low)]] == low
    assert [narrow(pattern, form) for pattern in tie[: len(low)]] == [pattern + pattern % 2 for pattern in low]
    assert [narrow(pattern, form) for pattern in above[: len(low)]] == [pattern + 1 for pattern in low]


@pytest.mark.parametrize("form", NARROW.values(), ids=NARROW)
@given(pattern=st.integers(0, 2**32 - 1))
@settings(derandomize=True, max_examples=300)
def test_integers_agree_with_fractions(form: Format, pattern: int) -> None:
    seen = narrow(pattern, form)
    value = FP32.value(pattern)

    if not math.isfinite(value):
        assert form.is_nan(seen) if math.isnan(value) else form.value(seen) == value
    else:
        assert form.value(seen) == form.nearest(Fraction(value))


@pytest.mark.parametrize("form", NARROW.values(), ids=NARROW)
def test_tensors_round_like_patterns(form: Format) -> None:
    patterns = [pattern for pattern in midpoints(form, stride=211) if FP32.value(pattern) < math.inf]
    source = torch.tensor([FP32.value(pattern) for pattern in patterns], dtype=torch.float64)

    assert rounded(source, form).tolist() == [form.value(narrow(pattern, form)) for pattern in patterns]


def test_tensors_of_special_values_round_to_themselves() -> None:
    source = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 65520.0], dtype=torch.float64)

    assert str(rounded(source, FP16).tolist()) == "[inf, -inf, nan, 0.0, -0.0, inf]"


def test_ulp_is_the_distance_to_the_next_number() -> None:
    for pattern in FP16.finite_patterns()[:-1:37]:
        assert FP16.ulp(FP16.value(pattern)) == FP16.value(pattern + 1) - FP16.value(pattern)


def test_tensor_of_keeps_signs_and_payloads() -> None:
    assert tensor_of([0x8000, 0x7C01, 0x0001], FP16).view(torch.int16).tolist() == [-0x8000, 0x7C01, 1]
    assert tensor_of([0x8000_0000], FP32).item() == 0.0
