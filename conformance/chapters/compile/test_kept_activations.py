"""Check that compiled backward functions compute from the float32 activations that eager ones compute from."""

from __future__ import annotations

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .kept_activations import SIZE, gradients, program
from .support import compiling, dtypes_of

ROUNDINGS = 32
"""Roundings of float32 that a gradient may be apart, of its largest element: those of a function and its derivative."""


def _judge(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    x, weight = (torch.randn(SIZE, SIZE, generator=rng).to(target.device) for _ in range(2))
    for dtype in dtypes_of(case, target):
        run = program(target.device_type, dtype)
        expected = gradients(run, weight, x)
        with compiling(case, backend):
            seen = gradients(torch.compile(run, backend=backend, fullgraph=True), weight, x)
        for name, wanted in expected.items():
            apart = float((seen[name] - wanted).abs().max() / wanted.abs().max()) * 2**24
            case.at_most(f"{name}, {dtype}: distance of the gradient from eager's", apart, ROUNDINGS, "roundings")


@contract("AMP-COMPILE-090")
def test_kept_activations(case: Case, target: Target, rng: torch.Generator) -> None:
    _judge(case, target, rng, "aot_eager_decomp_partition")


@contract("AMP-COMPILE-090")
@needs("compiled kernels")
@pytest.mark.parametrize("backend", [deep("standard", "inductor")])
def test_activations_that_kernels_keep(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    _judge(case, target, rng, backend)
