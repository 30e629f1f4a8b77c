"""The order of casts that is read from an op's call in a region."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from conformance.oracles.cast_order import CastOrder
from conformance.oracles.manual_cast import ManualCast

LOW = torch.bfloat16


class _Region(TorchFunctionMode):
    """Cast the positional arguments of every op but casts in the order that its name has."""

    def __init__(self, orders: dict[str, Sequence[int]]) -> None:
        super().__init__()
        self._orders = orders
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in self._orders:
            return func(*args, **kwargs or {})
        self.calls += 1
        values = list(args)
        for place in self._orders[name]:
            values[place] = values[place].to(LOW)
        return func(*values, **kwargs or {})


def _linear(*inputs: torch.Tensor) -> partial[Any]:
    return partial(torch._C._nn.linear, *(inputs or (torch.ones(2, 2), torch.ones(2, 2), torch.ones(2))))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_order_of_each_op_is_its_own(order: list[int]) -> None:
    known = CastOrder(lambda: _Region({"linear": order, "mm": [1, 0]}))

    assert known.of("linear", _linear(), [0, 1, 2]) == order
    assert known.of("mm", partial(torch.mm, torch.ones(2, 2), torch.ones(2, 2)), [0, 1]) == [1, 0]


def test_one_tensor_given_twice_is_two_inputs() -> None:
    x = torch.ones(2, 2, requires_grad=True)

    assert CastOrder(lambda: _Region({"mm": [1, 0]})).of("mm", partial(torch.mm, x, x), [0, 1]) == [1, 0]


def test_an_op_is_called_once_for_inputs_of_the_same_types() -> None:
    region = _Region({"linear": [2, 1, 0]})
    known = CastOrder(lambda: region)
    for _ in range(3):
        known.of("linear", _linear(), [0, 1, 2])
    assert region.calls == 1

    known.of("linear", _linear(torch.ones(2, 2, dtype=LOW), torch.ones(2, 2), torch.ones(2)), [1, 2])
    assert region.calls == 2


def test_a_single_cast_needs_no_call() -> None:
    region = _Region({"linear": [2, 1, 0]})

    assert CastOrder(lambda: region).of("linear", _linear(), [1]) == [1]
    assert region.calls == 0


def test_a_call_that_raises_in_a_region_keeps_the_order_of_its_inputs() -> None:
    known = CastOrder(lambda: _Region({"linear": [0]}))  # types that differ are refused

    assert known.of("linear", _linear(), [0, 1, 2]) == [0, 1, 2]


def test_inputs_without_a_cast_come_last() -> None:
    same_types = CastOrder(lambda: _Region({"addcmul": [2, 1]}))  # the op itself promotes

    assert same_types.of("addcmul", partial(torch.addcmul, *(torch.ones(2) for _ in range(3))), [0, 1, 2]) == [2, 1, 0]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_manual_casts_are_made_in_this_order(order: list[int]) -> None:
    x, y = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    known = CastOrder(lambda: _Region({"mm": order}))
    with ManualCast("cpu", LOW, order=known) as casts:
        torch.mm(x, y)

    assert [id(leaf) for leaf, _ in casts.copies.values()] == [id((x, y)[place]) for place in order]
