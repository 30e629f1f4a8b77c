"""The histories of scaler calls: that the enumerated ones hold all they claim, and how mismatches are shrunk."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch

from conformance.scaler import enumeration, state_machine
from conformance.scaler.capabilities import CAPABILITIES, lacking
from conformance.scaler.differential import World, mismatch
from conformance.scaler.model import FP16, Gradient, Output
from conformance.scaler.optimizers import FUSED, LAYOUTS, PLAIN, SGD, SLOTS, Backward, tensor_of, with_bad

CPU = torch.device("cpu")
SETTINGS = enumeration.SETTINGS


def torch_scaler(**settings: Any) -> Any:
    return torch.amp.GradScaler("cpu", **settings)


class Forgetful(torch.amp.GradScaler):
    """Forgets the growth tracker where a scale is loaded below 8."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({**state, "_growth_tracker": 0} if state and state["scale"] < 8 else state)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_patterns_hold_every_pattern(length: int) -> None:
    for settings, calls in enumeration.patterns(length):
        letters = [call[1].bad is not None for call in calls if call[0] == "backward"]
        stretches = {tuple(letters[start : start + length]) for start in range(len(letters) - length + 1)}
        assert stretches == set(itertools.product((False, True), repeat=length))
        assert settings["growth_interval"] in range(1, 6)


def test_orders_hold_every_order() -> None:
    ((_, calls),) = enumeration.orders((PLAIN, FUSED), 2, 4)
    names = [call[:2] for call in calls if call[0] in ("unscale_", "step", "update")]
    symbols = {("unscale_", PLAIN), ("unscale_", FUSED), ("step", PLAIN), ("step", FUSED), ("update",)}
    assert set(itertools.product(symbols, repeat=2)) <= set(itertools.pairwise(names))
    pairs = zip(_given(calls, PLAIN), _given(calls, FUSED), strict=True)
    dirt = {tuple(given.bad is not None for _, given in pair) for pair in pairs}
    assert dirt == {(False, False), (True, False), (False, True), (True, True)}


def _given(calls: Any, which: int) -> list[Any]:
    return [call for call in calls if call[0] == "backward" and call[1].which == which]


def test_bad_numbers_hold_every_element() -> None:
    ((_, calls),) = enumeration.bad_numbers(("dense",))
    for which, slots in enumerate(SLOTS):
        seen = set()
        for _, given in _given(calls, which):
            for slot, gradient in enumerate(given.gradients()):
                values = gradient.values if gradient else ()
                seen |= {(slot, place, repr(v)) for place, v in enumerate(values) if not math.isfinite(v)}
        sizes = [(slot, place) for slot, one in enumerate(slots) if not one.optional for place in range(one.size)]
        assert seen == {(*where, bad) for where in sizes for bad in ("inf", "-inf", "nan")}


def test_refusals_are_refused_somewhere_and_allowed_somewhere() -> None:
    raised: dict[str, set[bool]] = {name: set() for name in enumeration.ATTEMPTS}
    for reached, (name, attempt) in itertools.product(enumeration.POINTS.values(), enumeration.ATTEMPTS.items()):
        world = World(torch_scaler, CPU, SETTINGS)
        for call in reached:
            world.play(call)
        raised[name].add(any(world._refused(call[0], list(call[1:])) or world.play(call) for call in attempt))
    always = {"no tensor", "no tensors", "an empty state", "two new scales", "a new scale with a gradient"}
    assert all(True in outcomes for name, outcomes in raised.items() if name != "a closure")
    assert {name for name, outcomes in raised.items() if False not in outcomes} <= always | {
        "no gradients",
        "no gradients, unscaled",
        "fp16 gradients",
        "fp16 gradients of an own one",
    }


def test_search_is_the_same_for_the_same_seed() -> None:
    find = functools.partial(state_machine.search, torch_scaler, CPU, histories=5, length=6)

    assert find(seed=1) == find(seed=1)
    assert find(seed=1) != find(seed=2)
    assert find(seed=1).histories >= 5


def test_departure_is_shrunk_to_the_calls_that_matter() -> None:
    found = state_machine.search(functools.partial(Forgetful, "cpu"), CPU, histories=60, length=20)

    assert found.mismatch is not None
    assert len(found.mismatch.calls) <= 6
    assert found.mismatch.calls[-1][0] in ("load", "load_state")
    assert found.mismatch.differences[0].what == "state_dict()"


def test_shrinking_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    played = 0

    def counted(*arguments: Any) -> Any:
        nonlocal played
        played += len(arguments[3])
        return mismatch(*arguments)

    monkeypatch.setattr(state_machine, "mismatch", counted)
    monkeypatch.setattr(state_machine, "SHRINK_CALLS", 50)
    found = state_machine.search(functools.partial(Forgetful, "cpu"), CPU, histories=60, length=20)

    assert found.mismatch is not None
    assert played <= 50


def test_departure_that_comes_and_goes_is_reported_as_it_was_seen() -> None:
    made = 0

    def factory(**settings: Any) -> Any:
        nonlocal made
        made += 1
        scaler = torch_scaler(**settings)
        if made == 3:
            scaler.get_growth_interval = lambda: -1
        return scaler

    found = state_machine.search(factory, CPU, histories=20, length=6)

    assert found.mismatch is not None
    assert found.mismatch.differences[0].what == "get_growth_interval()"


def test_scales_that_overflow_in_unscaling_are_kept_out() -> None:
    calls = (("scale", Output(1.0)), ("update_to", 2.0**-149), ("backward", Backward(SGD, 1.0)), ("step", SGD))
    world = World(torch_scaler, CPU, SETTINGS)

    assert [world.play(call) for call in calls] == [[]] * 4
    assert "sgd_p[0].grad = torch.tensor(inf, dtype=torch.float32)" in world.program
    assert world.expected[SGD].calls == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_every_layout_hold_the_same_numbers(layout: str) -> None:
    for slot in SLOTS[PLAIN]:
        if {"strided": (2, 2), "sparse": (4,), "duplicates": (4,)}.get(layout, slot.shape) != slot.shape:
            continue
        values = tuple(float(k + 1) for k in range(slot.size))
        tensor = tensor_of(Gradient(values, slot.form), slot, layout, CPU)
        assert tensor.shape == slot.shape
        assert tuple(tensor.to_dense().flatten().tolist()) == values
        assert tensor.is_sparse == (layout in ("sparse", "duplicates"))
        if tensor.is_sparse:
            assert tensor.is_coalesced() == (layout == "sparse")


def test_bad_number_goes_to_the_place_counted_through_all_gradients() -> None:
    gradients: list[Gradient | None] = [Gradient((1.0, 2.0)), None, Gradient(()), Gradient((3.0,))]
    assert with_bad(gradients, math.inf, 2)[3] == Gradient((math.inf,))
    assert with_bad(gradients, math.inf, 4)[0] == Gradient((1.0, math.inf))
    assert with_bad([None, Gradient(())], math.inf, 0) == [None, Gradient(())]


@pytest.mark.parametrize(
    ("call", "need"),
    [
        (("update_to", 2.0), "new_scale"),
        (("update_to", 0.0), "extremes"),
        (("step", PLAIN, (), (("closure", 0),)), "closure"),
        (("step", PLAIN, (3,), ()), "arguments"),
        (("step", FUSED), "self_scaling"),
        (("step", PLAIN), None),
        (("scale", [Output(1.0)]), "containers"),
        (("scale", Output(1.0, FP16)), "narrow_losses"),
        (("scale", Output(1.0, FP16, 1)), None),
        (("pickle",), "pickles"),
        (("update",), None),
    ],
)
def test_what_a_call_needs(call: Any, need: str | None) -> None:
    assert lacking(call, frozenset([need] if need else CAPABILITIES)) == need
