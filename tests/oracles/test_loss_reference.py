"""The float64 losses agree with torch's own in float64, and their bounds hold for float32 and not for less."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch.nn import functional

from conformance.chapters.loss.loss_inputs import Call, Loss, Program, draw, losses
from conformance.oracles.numbers.loss_reference import gradient_bound, reference, reference_gradient
from conformance.oracles.numbers.running_error import UNIT, Rounded

PROGRAMS = [
    pytest.param(loss, program, id=f"{loss.name}-{program.id}") for loss in losses() for program in loss.programs
]
by_program = pytest.mark.parametrize(("loss", "program"), PROGRAMS)


def drawn(loss: Loss, program: Program) -> Call:
    return draw(loss.name, program, torch.Generator().manual_seed(3))


def evaluated(call: Call, reduction: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return call.evaluate(reduction)


@by_program
def test_values_are_those_of_torch_in_float64(loss: Loss, program: Program) -> None:
    call = drawn(loss, program)
    for reduction in loss.reductions:
        ours = reference(loss.name, call.arguments, call.options, reduction).value
        torch.testing.assert_close(ours, evaluated(call.cast(torch.float64), reduction), rtol=1e-9, atol=1e-9)


@by_program
def test_bounds_hold_for_float32(loss: Loss, program: Program) -> None:
    call = drawn(loss, program)
    for reduction in loss.reductions:
        ours = reference(loss.name, call.arguments, call.options, reduction)
        error = (evaluated(call, reduction).double() - ours.value).abs()
        assert bool((error <= ours.error).all())
        assert float(ours.error.max()) < 1e-3 * float(ours.value.abs().max())


@by_program
def test_gradients_are_those_of_torch_in_float64(loss: Loss, program: Program) -> None:
    if not program.smooth:
        pytest.skip("its inputs can lie on a kink, or torch's gradient presumes a log_softmax")
    call = drawn(loss, program)
    for reduction in ("mean", "sum"):
        theirs = call.cast(torch.float64).leaf()
        evaluated(theirs, reduction).backward()
        ours = reference_gradient(loss.name, call.arguments, call.options, reduction)
        torch.testing.assert_close(ours, theirs.arguments[0].grad, rtol=1e-8, atol=1e-9)
        bound = gradient_bound(ours, call.arguments, call.options, reduction, torch.float32)
        assert 0 < float(bound.max()) < 1e-4 * max(1.0, float(ours.abs().max()))


def test_values_worked_out_on_paper() -> None:
    zeros = torch.zeros(1, 2)
    assert reference("cross_entropy", (zeros, torch.tensor([1])), {}, "sum").value.item() == pytest.approx(
        math.log(2), abs=1e-15
    )
    assert reference("mse_loss", (torch.tensor([3.0]), torch.tensor([1.0])), {}, "mean").value.item() == 4
    assert reference("huber_loss", (torch.tensor([3.0]), torch.tensor([0.0])), {}, "sum").value.item() == 2.5
    labels = torch.tensor([[1, -1, 0]])
    scores = torch.tensor([[0.5, 0.25, 0.0]])
    # Label 1 alone counts: (1 - (0.25 - 0.5)) + (1 - (0.25 - 0)), over three classes.
    assert reference("multilabel_margin_loss", (scores, labels), {}, "sum").value.item() == pytest.approx(2 / 3)


def test_ctc_counts_every_path() -> None:
    # Two steps, one label and the blank, each with probability 1/2: "a" comes of aa, a- and -a.
    even = torch.full((2, 1, 2), math.log(0.5))
    arguments = (even, torch.tensor([[1]]), torch.tensor([2]), torch.tensor([1]))
    assert reference("ctc_loss", arguments, {}, "sum").value.item() == pytest.approx(-math.log(0.75), abs=1e-7)


def test_sums_in_any_order_stay_within_the_bound() -> None:
    terms = torch.rand(48, generator=torch.Generator().manual_seed(1))
    total = Rounded.exact(terms).sum()
    for order in (terms, terms.flip(0), terms.sort().values):
        single = torch.tensor(0.0)
        for term in order:
            single = single + term
        assert abs(single.double() - total.value) <= total.error
    assert abs(terms.bfloat16().sum().double() - total.value) > total.error


def test_cancellation_is_seen_by_the_bound() -> None:
    near = Rounded.exact(torch.tensor([1.0])) + 2.0**-30
    lost = near - Rounded.exact(torch.tensor([1.0]))
    single = (torch.tensor([1.0]) + 2.0**-30) - 1.0
    assert single.item() == 0.0
    assert abs(single.double() - lost.value) <= lost.error
    assert lost.error.item() >= UNIT


def test_every_loss_has_a_formula() -> None:
    there = {name for name in dir(functional) if name.endswith(("_loss", "_entropy", "_with_logits"))}
    assert there - {loss.name for loss in losses()} == set()
