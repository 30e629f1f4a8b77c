"""The oracle of random programs: what it draws, what it promises, and that its gradients are right."""

from __future__ import annotations

import random

import pytest
import torch

from conformance.chapters.backward.random_programs import (
    INSTRUCTIONS,
    RESIDUALS,
    Instruction,
    exact,
    leaves,
    predicted,
    random_program,
    simpler,
)


def test_programs_are_short_and_add_little() -> None:
    generator = random.Random(1)
    programs = [random_program(generator) for _ in range(300)]

    assert {step.kind for program in programs for step in program} == set(INSTRUCTIONS)
    assert max(len(program) for program in programs) == 8
    assert max(sum(step.kind == "residual" for step in program) for program in programs) == RESIDUALS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_everything_exact_fits_16_bit_twofold(dtype: torch.dtype) -> None:
    generator = random.Random(2)
    for seed in range(200):
        given = leaves(torch.Generator().manual_seed(seed))
        promised = exact(random_program(generator), given, dtype)
        for part in (promised.output, *promised.gradients.values()):
            assert float(part.abs().max()) <= 128
            assert torch.equal(part, part.round())


def test_gradients_are_those_of_the_products_written_out() -> None:
    given = leaves(torch.Generator().manual_seed(0))
    program = [Instruction("linear", "a"), Instruction("save"), Instruction("mm", "a"), Instruction("residual")]
    promised = exact(program, given, torch.float16)

    x, a, goal = (given[name].double() for name in ("x", "a", "goal"))
    assert torch.equal(promised.output, x @ a.T + x @ a.T @ a)
    into_first = goal + goal @ a.T
    assert torch.equal(promised.gradients["x"], into_first @ a)
    assert torch.equal(promised.gradients["a"], into_first.T @ x + (x @ a.T).T @ goal)
    assert not promised.gradients["b"].any()


def test_types_are_those_of_the_op_reference() -> None:
    half, single = torch.float16, torch.float32

    assert predicted("linear", single, single, half) == half
    assert predicted("island", half, half, half) == single
    assert predicted("residual", half, single, half) == single
    assert predicted("residual", half, half, half) == half
    assert predicted("relu", half, single, half) == half


def test_a_product_has_simpler_ones() -> None:
    assert list(simpler(Instruction("mm", "b"))) == [Instruction("mm", "a"), Instruction("linear")]
    assert list(simpler(Instruction("relu"))) == []
