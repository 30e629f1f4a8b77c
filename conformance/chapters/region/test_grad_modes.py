"""Check functions that are decorated with a grad mode and called in a region, as loops of evaluation are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target

DECORATORS: dict[str, tuple[Callable[[], Callable[[Any], Any]], tuple[bool, bool]]] = {
    "no_grad": (lambda: torch.no_grad(), (False, False)),
    "no_grad without brackets": (lambda: torch.no_grad, (False, False)),
    "enable_grad": (lambda: torch.enable_grad(), (True, False)),
    "set_grad_enabled(False)": (lambda: torch.set_grad_enabled(False), (False, False)),
    "inference_mode": (lambda: torch.inference_mode(), (False, True)),
    "inference_mode(False)": (lambda: torch.inference_mode(False), (True, False)),
}
"""What decorates, and whether gradients are recorded, and inference mode is on, in the body."""

Modes = tuple[bool, bool]
Seen = tuple[list[Modes], list[Modes]]


def _modes() -> Modes:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _recursive(decorate: Callable[[Any], Any]) -> Seen:
    inside: list[Modes] = []

    def body(depth: int) -> None:
        inside.append(_modes())
        if depth:
            decorated(depth - 1)
        inside.append(_modes())

    decorated = decorate(body)
    decorated(2)
    return inside, [_modes()]


def _called_by_another(decorate: Callable[[Any], Any]) -> Seen:
    """The function is called by one that is decorated with the other mode of recording."""
    inside: list[Modes] = []
    inner = decorate(lambda: inside.append(_modes()))
    after: list[Modes] = []

    @torch.no_grad()
    def outer() -> None:
        inner()
        after.append((not torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    outer()
    return inside, [*after, _modes()]


def _raising(decorate: Callable[[Any], Any]) -> Seen:
    inside: list[Modes] = []

    def body() -> None:
        inside.append(_modes())
        raise KeyError

    with pytest.raises(KeyError):
        decorate(body)()
    return inside, [_modes()]


def _yielding() -> Iterator[Modes]:
    for _ in range(3):
        yield _modes()


def _generator(decorate: Callable[[Any], Any]) -> Seen:
    inside, outside = [], []
    for seen in decorate(_yielding)():
        inside.append(seen)
        outside.append(_modes())
    return inside, [*outside, _modes()]


def _closed_generator(decorate: Callable[[Any], Any]) -> Seen:
    numbers = decorate(_yielding)()
    inside = [next(numbers)]
    numbers.close()
    return inside, [_modes()]


def _sent_to(decorate: Callable[[Any], Any]) -> Seen:
    """A value is sent into the generator, and an exception thrown, which it handles."""

    def body() -> Any:
        inside = [_modes()]
        try:
            while True:
                yield inside
                inside.append(_modes())
        except KeyError:
            inside.append(_modes())
            yield inside

    numbers = decorate(body)()
    next(numbers)
    numbers.send(1)
    outside = [_modes()]
    inside = numbers.throw(KeyError())
    return inside, [*outside, _modes()]


WAYS: dict[str, Callable[[Callable[[Any], Any]], Seen]] = {
    "recursive": _recursive,
    "called_by_another": _called_by_another,
    "raising": _raising,
    "generator": _generator,
    "closed_generator": _closed_generator,
    "sent_to": _sent_to,
}


@contract("AMP-REGION-118")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DECORATORS)
def test_decorated_functions(case: Case, target: Target, amp_dtype: torch.dtype, name: str, way: str) -> None:
    make, promised = DECORATORS[name]
    with torch.inference_mode(False), torch.enable_grad(), target.autocast(amp_dtype):
        inside, outside = WAYS[way](make())
        product = torch.ones(2, 2, device=target.device) @ torch.ones(2, 2, device=target.device)
    case.equal("recording of gradients and inference mode in the body", set(inside), {promised})
    case.equal("recording of gradients and inference mode outside of it", set(outside), {(True, False)})
    case.equal("type of a product after it", product.dtype, amp_dtype)
