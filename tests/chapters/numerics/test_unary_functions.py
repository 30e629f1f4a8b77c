"""The reference of 16-bit unary functions: decoded as it was encoded, made again alike, and right where torch is."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from conformance.chapters.numerics import unary_functions
from conformance.oracles.numbers.formats import BF16, FP16, Format, tensor_of


@pytest.mark.parametrize("form", [FP16, BF16], ids=lambda form: form.name)
def test_ordinals_grow_with_the_numbers(form: Format) -> None:
    numbers = [*range(form.infinity, -1, -1)]
    patterns = [pattern | 0x8000 for pattern in numbers] + numbers[::-1]

    found = unary_functions.ordinals(tensor_of(patterns, form))

    assert found.diff().eq(1).all()
    assert [unary_functions.ordinal(pattern) for pattern in patterns] == found.tolist()
    assert [unary_functions.pattern(ordinal) for ordinal in found.tolist()] == patterns


def test_intervals_come_back_as_they_went_in() -> None:
    choose = random.Random(1)
    intervals: unary_functions.Intervals = []
    for _ in range(2**16):
        low = choose.randrange(-(2**15), 2**15 - 300)
        intervals.append(choose.choice([(low, low), (low, low + choose.randrange(300)), None]))

    low, width = unary_functions._decode(unary_functions.encode(intervals))

    for seen, wide, interval in zip(low.tolist(), width.tolist(), intervals, strict=True):
        assert (seen, seen + wide) == interval if interval else wide < 0


@pytest.mark.parametrize("form", [FP16, BF16], ids=lambda form: form.name)
def test_a_sample_is_made_again_alike(form: Format) -> None:
    reference = pytest.importorskip("tests.generators.unary_reference", reason="needs mpmath")
    choose = random.Random(7)
    assert unary_functions.names() == list(reference.OPS)
    for name in unary_functions.names():
        low, high = unary_functions.acceptable(name, form)
        for pattern in choose.sample(range(2**16), 12):
            made = reference.interval(name, pattern, form)
            seen = int(low[pattern]), int(high[pattern])
            assert seen[0] > seen[1] if made is None else seen == made, (name, hex(pattern))


def test_the_script_rounds_as_the_oracle_does() -> None:
    reference = pytest.importorskip("tests.generators.unary_reference", reason="needs mpmath")
    choose = random.Random(3)
    for _ in range(2000):
        number = choose.choice([1, -1]) * choose.random() * 2.0 ** choose.randint(-150, 129)
        for form in (FP16, BF16):
            assert form.value(reference._nearest(Fraction(number), form)) == form.nearest(number)


@pytest.mark.parametrize("form", [FP16, BF16], ids=lambda form: form.name)
def test_what_the_intervals_leave_open(form: Format) -> None:
    """Exact functions have one result each; of the others few inputs have two, outside of formulas that cancel."""
    for name in ("sqrt", "reciprocal", "square", "abs", "neg", "floor", "ceil", "round", "trunc"):
        low, high = unary_functions.acceptable(name, form)
        assert torch.equal(low, high), name
    for name in ("exp", "log", "sin", "tanh", "acos", "exp2", "expm1", "log10", "erfc"):
        low, high = unary_functions.acceptable(name, form)
        assert int((low != high).sum()) < 400, name
        assert int((high - low).max()) <= 1 or name == "erfc", name


def test_one_wrong_result_is_seen() -> None:
    inputs = tensor_of(range(2**16), FP16)
    right = tensor_of([unary_functions.pattern(int(at)) for at in unary_functions.acceptable("exp", FP16)[0]], FP16)
    assert not unary_functions.outside(right, "exp", FP16).any()
    wrong = right.clone()
    wrong.view(torch.int16)[0x3C00] += 1

    assert unary_functions.outside(wrong, "exp", FP16).nonzero().tolist() == [[0x3C00]]
    assert float(inputs[0x3C00]) == 1.0
