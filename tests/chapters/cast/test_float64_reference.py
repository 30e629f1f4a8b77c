"""The written-out references agree with torch's own float64 ops, which they do not call."""

from __future__ import annotations

import pytest
import torch

from conformance.chapters.cast.float64_reference import REFERENCES
from conformance.oracles.policy.samples import SAMPLES, Inputs


def test_every_reference_belongs_to_a_sample() -> None:
    assert set(REFERENCES) <= set(SAMPLES)


@pytest.mark.parametrize("name", list(REFERENCES))
@pytest.mark.parametrize("seed", [0, 1])
def test_a_reference_agrees_with_torch(name: str, seed: int) -> None:
    call = SAMPLES[name](Inputs((torch.float64,), torch.device("cpu"), seed))
    # float64 rounds at 1.1e-16; the samples are short sums of values near 1.
    torch.testing.assert_close(REFERENCES[name](*call.args, **call.keywords), call(), rtol=1e-12, atol=1e-13)
