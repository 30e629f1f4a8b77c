"""Programs held against themselves in float64: what is near, wrong, drawn, lost, or depends on the layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.oracles.numbers.formats import FORMATS
from conformance.oracles.relations.programs import program
from conformance.oracles.relations.values import ALL_LAYOUTS, LIMIT, departures, sweep

CPU = torch.device("cpu")


def _departures(function: Callable[..., Any], *args: Any, layout: str = "as given", **options: Any) -> Any:
    one = program("one", function, args, {})
    return departures(one, FORMATS[torch.float16], LIMIT, layout=layout, device=CPU, **options)


def _low(x: Tensor, wrong: Callable[[Tensor], Tensor]) -> Tensor:
    return wrong(x) if x.dtype is torch.float16 else x


X = torch.linspace(-2, 3, 24).reshape(2, 3, 4)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("function", [torch.tanh, torch.relu, partial(torch.sum, dim=1), lambda x: x.softmax(-1)])
def test_what_torch_computes_is_near(function: Callable[..., Any], layout: str) -> None:
    assert _departures(function, X, layout=layout) == {}


def test_wrong_results_have_a_name() -> None:
    assert set(_departures(lambda x: (x, _low(x, torch.neg)), X)) == {"outputs 1", "gradients 0"}


def test_wrong_in_float32_too_is_wrong() -> None:
    assert set(_departures(lambda x: x if x.dtype is torch.float64 else x.neg(), X)) == {"outputs 0", "gradients 0"}


def test_gradients_that_are_lost_are_infinitely_far() -> None:
    found = _departures(lambda x: (x * 1, _low(x, Tensor.detach) * 2), X)

    assert found == {"gradients 0": pytest.approx(found["gradients 0"])}
    assert found["gradients 0"] > 100
    one_of_two = _departures(lambda x, y: x + _low(y, Tensor.detach), X, X + 1)
    assert one_of_two == {"gradients 1": float("inf")}


def test_wrong_in_one_layout() -> None:
    def wrong(x: Tensor) -> Tensor:
        return _low(x * 1, lambda y: y * 2 if not x.is_contiguous() else y)

    assert _departures(wrong, X) == {}
    assert set(_departures(wrong, X, layout="with gaps")) == {"outputs 0", "gradients 0"}


def test_results_that_depend_on_the_layout_are_compared_in_it() -> None:
    assert _departures(lambda x: x * x.stride(0), X, layout="turned") == {}


def test_draws_and_calls_that_raise_are_not_judged() -> None:
    assert _departures(lambda x: x * torch.rand(()), X) is None
    assert _departures(lambda x: _low(x, lambda _: torch.ones(2).view(3)), X) is None


def test_other_shapes_are_infinitely_far() -> None:
    assert _departures(lambda x: _low(x, lambda y: y[:1]), X)["outputs 0"] == float("inf")


def test_arguments_without_a_gradient_are_left_out() -> None:
    running = torch.zeros(3), torch.ones(3)

    assert _departures(lambda x, m, v: torch.nn.functional.batch_norm(x, m, v), X, *running) == {}


def test_region_of_float32_operands() -> None:
    region = partial(torch.autocast, "cpu", dtype=torch.float16)

    def wrong(x: Tensor) -> Tensor:
        return x @ x.mT * (2 if torch.is_autocast_enabled("cpu") else 1)

    assert _departures(lambda x: x @ x.mT, X, region=region) == {}
    assert _departures(wrong, X) == {}
    assert set(_departures(wrong, X, region=region)) == {"outputs 0", "gradients 0"}


def test_sweep_names_the_worst_program_of_public_entries() -> None:
    def wrong(x: Tensor, factor: float) -> Tensor:
        return _low(x, lambda y: y * factor)

    def make() -> list[Any]:
        return [program("op", wrong, (X, factor), {}) for factor in (1.0, 3.0, 2.0)]

    swept = sweep(CPU, FORMATS[torch.float16], {"op": make, "_private": make}, samples=3, seed=1)

    assert swept.judged == 3
    assert list(swept.found) == ["op"]
    assert "float16" not in swept.found["op"]
    assert swept.found["op"].endswith("float32[2, 3, 4], 3.0")
    assert sweep(CPU, FORMATS[torch.float16], {"op": make}, samples=1, seed=0).found == {}
