"""The models written out in float64, against torch's own modules in float64, and their roundings against theory."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch

from conformance.chapters.parity.float64_models import FORWARDS, Rounding, gradients
from conformance.chapters.parity.models import TASKS, batches, begin

CPU = torch.device("cpu")


def _problem(name: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    task = TASKS[name]
    model, generator = begin(task, CPU, 0)
    data = task.data()
    batch = next(batches(task, len(data.inputs), CPU, generator))
    return model, data.inputs[batch], data.labels[batch]


@pytest.mark.parametrize("name", FORWARDS)
def test_exact_gradients_are_those_of_torch_in_float64(name: str) -> None:
    model, inputs, labels = _problem(name)
    written = gradients(FORWARDS[name], dict(model.named_parameters()), inputs, labels)
    wide = copy.deepcopy(model).double()
    torch.nn.functional.cross_entropy(
        wide(inputs.double() if inputs.is_floating_point() else inputs), labels
    ).backward()

    for key, parameter in wide.named_parameters():
        torch.testing.assert_close(written[key], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_gradients_are_some_units_off(name: str, dtype: torch.dtype) -> None:
    model, inputs, labels = _problem(name)
    parameters = dict(model.named_parameters())
    exact = gradients(FORWARDS[name], parameters, inputs, labels)
    rounded = gradients(FORWARDS[name], parameters, inputs, labels, Rounding(dtype, dtype, scale=1024.0))

    unit = torch.finfo(dtype).eps / 2
    for key, gradient in exact.items():
        error = ((rounded[key] - gradient).norm() / gradient.norm()).item() / unit
        assert 0.05 < error < 20, key


def test_a_gradient_below_the_smallest_number_is_lost_without_a_scale() -> None:
    model, inputs, labels = _problem("lstm")
    parameters = dict(model.named_parameters())

    def faint(p: Mapping[str, torch.Tensor], x: torch.Tensor, q: Rounding) -> torch.Tensor:
        return FORWARDS["lstm"](p, x, q) * 2.0**-24

    half = torch.float16
    lost = gradients(faint, parameters, inputs, labels, Rounding(half, half))
    kept = gradients(faint, parameters, inputs, labels, Rounding(half, half, scale=2.0**24))

    assert lost["lstm.weight_hh_l0"].abs().max() == 0
    assert kept["lstm.weight_hh_l0"].abs().max() > 0


def test_a_loss_of_sixteen_bit_logits_takes_probabilities_from_rounded_logarithms() -> None:
    """-log 3 is -1.0986, in bfloat16 -141/128, of which the exponential is 0.33235, in bfloat16 170/512."""
    logits, labels = torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)

    def forward(p: Mapping[str, torch.Tensor], x: torch.Tensor, q: Rounding) -> torch.Tensor:
        return q(p["logits"])

    wide, narrow = (
        gradients(forward, {"logits": logits}, logits, labels, Rounding(torch.bfloat16, loss=loss))["logits"]
        for loss in (None, torch.bfloat16)
    )
    assert wide.tolist() == [[-171 / 256, 171 / 512, 171 / 512]]
    assert narrow.tolist() == [[-171 / 256, 170 / 512, 170 / 512]]
