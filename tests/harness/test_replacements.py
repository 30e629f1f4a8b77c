"""The report names functions of torch that another package put its own in place of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.harness.replacements import replaced_functions
from tests.conftest import Toy

_OURS = __name__


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def ours(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return ours


def test_torch_as_it_is_has_none() -> None:
    assert replaced_functions() == {}


@pytest.mark.parametrize(
    ("place", "name", "said"),
    [
        (torch.nn.utils, "clip_grad_norm_", "torch.nn.utils.clip_grad_norm_"),
        (torch.nn.functional, "layer_norm", "torch.nn.functional.layer_norm"),
        (torch.amp.GradScaler, "step", "torch.amp.GradScaler.step"),
        (torch.Tensor, "backward", "torch.Tensor.backward"),
        (torch.optim.Adam, "step", "torch.optim.Adam.step"),
    ],
)
def test_function_or_method_in_place_of_torchs_is_named(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, said: str
) -> None:
    monkeypatch.setattr(place, name, _wrapped(getattr(place, name)))

    assert replaced_functions() == {_OURS: [said]}


def test_class_in_place_of_torchs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class GradScaler(torch.amp.GradScaler):
        pass

    monkeypatch.setattr(torch.cpu.amp, "GradScaler", GradScaler)

    assert replaced_functions() == {_OURS: ["torch.cpu.amp.GradScaler"]}


def test_report_and_heading_name_it(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.contract("AMP-API-001")
    toy.checks("@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.equal('x', 1, 1)\n")
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", _wrapped(torch.nn.utils.clip_grad_norm_))

    outcome = toy.run()

    assert f"not torch's but of {_OURS}: torch.nn.utils.clip_grad_norm_" in outcome.output
    assert outcome.report["header"]["replaced_functions"] == {_OURS: ["torch.nn.utils.clip_grad_norm_"]}
