"""Rounding of whole tensors of patterns: held against the rounding of single ones, which tables by hand hold."""

from __future__ import annotations

import pytest
import torch

from conformance.chapters.numerics.bit_patterns import all_patterns, narrowed, widened
from conformance.oracles.numbers.formats import BF16, FP16, Format, midpoints, narrow, tensor_of, widen

FORMS = pytest.mark.parametrize("form", [FP16, BF16], ids=lambda form: form.name)


@FORMS
def test_narrowing_agrees_with_that_of_one_pattern(form: Format) -> None:
    generator = torch.Generator().manual_seed(5)
    patterns = midpoints(form, 37) + torch.randint(0, 2**32, (20_000,), generator=generator).tolist()

    expected = tensor_of([narrow(pattern, form) for pattern in patterns], form)

    assert torch.equal(narrowed(torch.tensor(patterns), form).view(torch.int16), expected.view(torch.int16))


@FORMS
def test_widening_agrees_with_that_of_one_pattern(form: Format) -> None:
    assert widened(form).tolist() == [widen(pattern, form) for pattern in range(2**16)]


@FORMS
def test_all_patterns_are_in_order(form: Format) -> None:
    assert torch.equal(all_patterns(form).view(torch.int16), tensor_of(range(2**16), form).view(torch.int16))
