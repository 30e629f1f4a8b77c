"""The plain-Python model of GradScaler: its arithmetic against exact fractions, its rules against written-out runs."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from conformance.scaler.model import (
    BF16,
    FP16,
    FP32,
    FP64,
    Format,
    Gradient,
    GradScalerModel,
    NewScale,
    Output,
    Stage,
    check_and_unscale,
    reciprocal,
    rounded,
    unscaled,
    update_scale,
)

FIXED = hypothesis_settings(derandomize=True, deadline=None, database=None, max_examples=300)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def nearest(value: float, form: Format) -> float:
    """Round by its definition, in fractions: the nearer neighbour, on a tie the one with an even significand."""
    exact = abs(Fraction(value))
    spacing = Fraction(2) ** form.smallest_exponent
    while exact >= spacing * 2**form.precision:
        spacing *= 2
    below = exact // spacing
    rest = exact / spacing - below
    significand = below + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1))
    result = significand * spacing
    return math.copysign(math.inf if result > Fraction(form.largest) else float(result), value)


@pytest.mark.parametrize("form", [FP16, BF16, FP32], ids=lambda form: form.name)
@given(value=st.one_of(FINITE, FINITE.map(lambda value: math.ldexp(math.frexp(value)[0], -130))))
@FIXED
def test_rounding_is_to_nearest_even(form: Format, value: float) -> None:
    assert repr(rounded(value, form)) == repr(nearest(value, form))


@pytest.mark.parametrize(("form", "code"), [(FP16, "<e"), (FP32, "<f")], ids=["fp16", "fp32"])
@given(value=FINITE)
@FIXED
def test_rounding_agrees_with_pythons_own(form: Format, code: str, value: float) -> None:
    try:
        expected = struct.unpack(code, struct.pack(code, value))[0]
    except OverflowError:
        expected = math.copysign(math.inf, value)
    assert repr(rounded(value, form)) == repr(expected)


@pytest.mark.parametrize("form", [FP16, BF16, FP32, FP64], ids=lambda form: form.name)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0, -0.0])
def test_special_numbers_stay(form: Format, value: float) -> None:
    assert repr(rounded(value, form)) == repr(value)


@pytest.mark.parametrize(
    ("form", "value", "expected"),
    [
        (FP16, 65519.996, 65504.0),
        (FP16, 65520.0, math.inf),
        (FP16, 2.0**-25, 0.0),
        (FP16, 3 * 2.0**-25, 2.0**-23),
        (BF16, 257.0, 256.0),
        (BF16, 259.0, 260.0),
        (FP32, 2.0**128, math.inf),
        (FP32, 2.0**-150, 0.0),
        (FP32, math.nextafter(2.0**-150, 1), 2.0**-149),
    ],
)
def test_rounding_at_the_edges(form: Format, value: float, expected: float) -> None:
    assert rounded(value, form) == expected
    assert rounded(-value, form) == -expected


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(65536.0, 2.0**-16), (3.0, 11184811 * 2.0**-25), (0.0, math.inf), (-0.0, -math.inf), (math.inf, 0.0)],
)
def test_reciprocal(scale: float, expected: float) -> None:
    assert repr(reciprocal(scale)) == repr(expected)


def test_a_16_bit_gradient_is_multiplied_in_fp32() -> None:
    # 3 * fp32(1/3) is 1 + 2^-25 before rounding: 1 in fp32, while a bf16 reciprocal would give 1.0078125.
    assert unscaled(Gradient((3.0, 1.0), BF16), reciprocal(3.0)).values == (1.0, rounded(1 / 3, BF16))


def test_a_gradient_is_rounded_to_its_own_format() -> None:
    value, factor = 1 + 2.0**-40, 0.75
    assert unscaled(Gradient((value,), FP64), factor).values == (value * factor,)
    # 0.75 + 1.5 * 2^-24 lies halfway between two fp32 numbers.
    assert unscaled(Gradient((1 + 2.0**-23,), FP32), factor).values == (0.75 + 2.0**-23,)
    assert unscaled(Gradient((2.0**-24,), FP16), 0.25).values == (0.0,)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_flag_is_raised_and_never_cleared(bad: float) -> None:
    clean, dirty = Gradient((1.0, 2.0)), Gradient((1.0, bad))
    assert check_and_unscale([clean], 0.0, 0.5) == ([Gradient((0.5, 1.0))], 0.0)
    assert check_and_unscale([clean], 1.0, 0.5)[1] == 1.0
    assert check_and_unscale([clean, dirty, clean], 0.0, 0.5)[1] == 1.0


def test_a_product_that_overflows_does_not_raise_the_flag() -> None:
    # As the kernels have it: they look at the number before it is multiplied.
    gradients, found = check_and_unscale([Gradient((1e30,))], 0.0, 2.0**126)
    assert gradients == [Gradient((math.inf,))]
    assert found == 0.0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((8.0, 5, 1.0, 2.0, 0.5, 3), (4.0, 0)),
        ((8.0, 5, 2.0, 2.0, 0.25, 3), (2.0, 0)),
        ((8.0, 0, 0.0, 2.0, 0.5, 3), (8.0, 1)),
        ((8.0, 2, 0.0, 2.0, 0.5, 3), (16.0, 0)),
        ((8.0, 0, 0.0, 1.5, 0.5, 1), (12.0, 0)),
        ((2.0**127, 0, 0.0, 2.0, 0.5, 1), (2.0**127, 0)),
        ((2.0**-149, 0, 1.0, 2.0, 0.5, 1), (0.0, 0)),
    ],
)
def test_update_scale(arguments: tuple[float, int, float, float, float, int], expected: tuple[float, int]) -> None:
    assert update_scale(*arguments) == expected


def ended(scaler: GradScalerModel, letter: str) -> tuple[float, int]:
    """One iteration, clean (".") or overflowing ("!"); returns scale and tracker after it."""
    scaler.scale(1.0)
    scaler.step("optimizer", [Gradient((math.inf if letter == "!" else 1.0,))])
    scaler.update()
    return scaler.get_scale(), scaler.get_growth_tracker()


def test_a_run() -> None:
    scaler = GradScalerModel(init_scale=8.0, growth_interval=2)
    seen = [ended(scaler, letter) for letter in "..!.!.."]
    assert seen == [(8.0, 1), (16.0, 0), (8.0, 0), (8.0, 1), (4.0, 0), (4.0, 1), (8.0, 0)]


def test_step_unscales_once() -> None:
    scaler = GradScalerModel()
    scaler.scale(1.0)
    gradients = scaler.unscale_("optimizer", [Gradient((65536.0,))])
    step = scaler.step("optimizer", gradients)
    assert (step.ran, step.gradients) == (True, [Gradient((1.0,))])


def test_scale_keeps_containers() -> None:
    scaler = GradScalerModel(init_scale=4.0)
    assert not scaler.started
    assert scaler.scale([1.0, (2.0, [0.5])]) == [4.0, (8.0, [2.0])]
    assert scaler.started
    with pytest.raises(ValueError, match="numbers"):
        scaler.scale(["text"])


@pytest.mark.parametrize(
    ("calls", "error", "message"),
    [
        (("step",), AssertionError, "has not been called"),
        (("unscale_",), AssertionError, "has not been called"),
        (("update",), AssertionError, "has not been called"),
        (("scale", "update"), AssertionError, "prior to update"),
        (("scale", "empty step"), AssertionError, "for this optimizer"),
        (("scale", "unscale_", "unscale_"), RuntimeError, "already been called"),
        (("scale", "step", "unscale_"), RuntimeError, "after step"),
        (("scale", "step", "step"), RuntimeError, "already been called"),
        (("scale", "fp16 step"), ValueError, "fp16"),
        (("scale", "step", "copy"), AssertionError, "between iterations"),
        (("scale", "load nothing"), RuntimeError, "empty"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, tuple) else "",
)
def test_calls_out_of_order(calls: tuple[str, ...], error: type[Exception], message: str) -> None:
    scaler = GradScalerModel()
    gradients = [Gradient((1.0,))]
    does = {
        "scale": lambda: scaler.scale(1.0),
        "step": lambda: scaler.step("optimizer", gradients),
        "empty step": lambda: scaler.step("optimizer", []),
        "fp16 step": lambda: scaler.step("optimizer", [Gradient((1.0,), FP16)]),
        "unscale_": lambda: scaler.unscale_("optimizer", gradients),
        "update": scaler.update,
        "copy": scaler.copy,
        "load nothing": lambda: scaler.load_state_dict({}),
    }
    for name in calls[:-1]:
        does[name]()
    with pytest.raises(error, match=message):
        does[calls[-1]]()


@pytest.mark.parametrize("settings", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}], ids=str)
def test_settings_that_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(AssertionError, match="factor"):
        GradScalerModel(**settings)  # type: ignore[arg-type]
    assert GradScalerModel(enabled=False, **settings).get_scale() == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [False, True], ids=["loaded", "copied"])
def test_state_moves_to_another(copied: bool) -> None:
    scaler = GradScalerModel(init_scale=8.0, growth_factor=1.5, backoff_factor=0.25, growth_interval=3)
    for letter in ".!..":
        ended(scaler, letter)
    if copied:
        other = scaler.copy()
    else:
        other = GradScalerModel()
        other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict() == {
        "scale": 2.0, "growth_factor": 1.5, "backoff_factor": 0.25, "growth_interval": 3, "_growth_tracker": 2,
    }  # fmt: skip
    assert ended(other, ".") == ended(scaler, ".") == (3.0, 0)


def test_optimizers_are_judged_alone_and_count_once() -> None:
    scaler = GradScalerModel(init_scale=8.0)
    scaler.scale(1.0)
    assert not scaler.step("one", [Gradient((math.nan,))]).ran
    assert scaler.step("two", [Gradient((8.0,))]).ran
    scaler.update()
    assert (scaler.get_scale(), scaler.get_growth_tracker()) == (4.0, 0)


def test_new_scale() -> None:
    scaler = GradScalerModel(growth_interval=10)
    ended(scaler, ".")
    scaler.step("optimizer", [Gradient((math.inf,))])
    scaler.update(0.1)
    assert (scaler.get_scale(), scaler.get_growth_tracker()) == (rounded(0.1, FP32), 1)


def test_disabled() -> None:
    scaler = GradScalerModel(enabled=False)
    gradients = [Gradient((math.inf,))]
    assert scaler.scale("anything") == "anything"
    assert scaler.unscale_("optimizer", gradients) == gradients
    assert scaler.step("optimizer", gradients).ran
    scaler.update()
    scaler.load_state_dict({})
    assert (scaler.get_scale(), scaler.get_growth_tracker(), scaler.state_dict()) == (1.0, 0, {})


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (Output(1.0, FP16), Output(65536.0, FP32)),
        (Output(1.0, FP16, 1), Output(math.inf, FP16, 1)),
        (Output(1.0, BF16), Output(65536.0, FP32)),
        (Output(3.0, BF16, 2), Output(196608.0, BF16, 2)),
        (Output(0.1, FP64), Output(0.1 * 65536, FP64)),
        (Output(2.0**120), Output(math.inf)),
    ],
)
def test_outputs_keep_their_type_but_for_narrow_losses(output: Output, expected: Output) -> None:
    scaler = GradScalerModel()
    assert scaler.scale(output) == expected
    assert scaler.scale([output, (output,)]) == [expected, (expected,)]


@pytest.mark.parametrize(
    "new_scale",
    [NewScale(()), NewScale((1.0, 2.0)), NewScale((1.0,), requires_grad=True), NewScale((1.0,), elsewhere=True)],
)
def test_unsuited_new_scales_are_refused_and_change_nothing(new_scale: NewScale) -> None:
    scaler = GradScalerModel()
    scaler.scale(1.0)
    scaler.unscale_("optimizer", [Gradient((1.0,))])
    with pytest.raises(AssertionError, match="one number"):
        scaler.update(new_scale)
    assert (scaler.get_scale(), scaler.stage("optimizer")) == (65536.0, Stage.UNSCALED)
    scaler.update(NewScale((0.1,)))
    assert (scaler.get_scale(), scaler.stage("optimizer")) == (rounded(0.1, FP32), Stage.READY)


def test_an_optimizer_that_unscales_by_itself() -> None:
    scaler = GradScalerModel(init_scale=48.0)
    scaler.scale(1.0)
    bad, clean = [Gradient((math.inf, 96.0), FP16)], [Gradient((96.0,))]
    assert scaler.step("one", bad, unscales=True).received == (48.0, 1.0)
    step = scaler.step("two", clean, unscales=True, preset=4.0)
    assert (step.ran, step.gradients, step.received) == (True, clean, (192.0, 0.0))
    assert scaler.within_iteration
    scaler.update()
    assert (scaler.get_scale(), scaler.found_inf("one"), scaler.within_iteration) == (24.0, None, False)
    gradients = scaler.unscale_("two", clean)
    assert gradients == [Gradient((4.0,))]
    assert scaler.step("two", gradients, unscales=True).received == (None, 0.0)


def test_a_closure_is_refused_before_anything_else() -> None:
    scaler = GradScalerModel()
    with pytest.raises(RuntimeError, match="closures"):
        scaler.step("optimizer", [], closure=True)
    assert not scaler.within_iteration
    assert GradScalerModel(enabled=False).step("optimizer", [], closure=True).ran
