"""Makes fixtures/unary.json: what 16-bit unary ops may return for each of the 65,536 inputs, by mpmath.

`python -m tests.generators.unary_reference` writes the file anew (some minutes; mpmath is the only thing it needs). An
op's entry holds, for every input pattern, the interval of acceptable results: the exact value, plus and minus what
an evaluation in fp32 may cost, rounded once to the 16-bit type. Outside the few inputs where that error straddles a
rounding boundary the interval is a single pattern, the correctly rounded result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import mpmath

from conformance.chapters.numerics.unary_functions import Intervals, encode, ordinal
from conformance.oracles.numbers.formats import BF16, FP16, Format
from tests.paths import ROOT

ULP = Fraction(1, 2**23)
"""The spacing of fp32 at 1, and the most that one unit in the last place can be of a normal number."""

TINY = Fraction(1, 2**126)
"""The smallest normal fp32 number: beyond its reciprocal an intermediate overflows, below it one may be flushed."""

FP32_MAX = (2 - ULP) * 2**127
INF, NAN = float("inf"), float("nan")

Number = Any
Values = Callable[[Number], Number]


@dataclass(frozen=True)
class Op:
    """A unary op: its exact value, and what evaluating it in fp32 may cost.

    `ulps`: units in the last place of the fp32 result, the most that any documented library may be off (see FIXTURE
    below). `absolute(x, y)`: an error beside that, of formulas that cancel. `ends`: the results at -inf and +inf.
    `domain`: outside it the result is NaN. `poles`: input to result where no number is. `zeros`: whether the sign of
    a zero result is free. `also(x, form)`: further results that a usual formula gives, with the reason beside it.
    """

    value: Values
    ulps: int = 0
    ends: tuple[float | None, float | None] = (NAN, NAN)
    absolute: Callable[[Fraction, Fraction], Fraction] | None = None
    domain: Callable[[Fraction], bool] = lambda x: True
    poles: dict[float, float] = field(default_factory=dict)
    zeros: bool = False
    also: Callable[[Fraction, Format], list[Number]] | None = None


def _overflows(limit: Fraction) -> Callable[[Fraction, Format], list[Number]]:
    """An intermediate that overflows fp32 for inputs from `limit` on, where the result would not."""
    return lambda x, form: [INF] if x >= limit else []


def _flushed(y: Fraction) -> Fraction:
    """oneDNN, which some CPUs take for gelu, flushes subnormal numbers, also on the way to small results."""
    return 4 * TINY if abs(y) < 4 * TINY else Fraction(0)


def _vanishes(x: Fraction, form: Format) -> list[Number]:
    """exp(-x) overflows fp32 from 88.72 on, so that its reciprocal is nothing."""
    return [-0.0] if x < -88 else []


def _saturated(x: Fraction, error: Fraction) -> Fraction:
    """An error of 1 + erf(x) or 1 + tanh(x), in units of x, which is gone where erf and tanh are -1 to fp32."""
    return abs(x) * error if abs(x) < 16 else Fraction(0)


def _beyond(limit: Fraction) -> Callable[[Fraction, Format], list[Number]]:
    """Infinite from `limit` on, and nothing below -16, where erf and tanh are -1."""
    return lambda x, form: [-0.0] if x < -16 else [INF] if x >= limit else []


def _hyperbolic(x: Fraction, form: Format) -> list[Number]:
    # exp(|x|) overflows fp32 from 88.72 on, half of it only from 89.41.
    return [INF] if abs(x) > Fraction(887, 10) else []


def _gelu(x: Number) -> Number:
    return x * mpmath.ncdf(x) if x > -30 else x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2


def _gelu_tanh(x: Number) -> Number:
    inner = mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)
    return x / (1 + mpmath.exp(-2 * inner))


def _selu(x: Number) -> Number:
    alpha, scale = mpmath.mpf("1.6732632423543772848170429916717"), mpmath.mpf("1.0507009873554804934193349852946")
    return scale * (x if x > 0 else alpha * mpmath.expm1(x))


def _within(low: float, high: float) -> Callable[[Fraction], bool]:
    return lambda x: low <= x <= high


def _clamped(x: Number) -> Number:
    return min(max(x + 3, 0), 6)


_POSITIVE = _within(0, FP32_MAX)  # type: ignore[arg-type]

# Of the formulas x * (1 + erf) / 2 and x * (1 + tanh) / 2: the error of 1 + erf is one of numbers up to 2.
_ERF = 4 * ULP

OPS: dict[str, Op] = {
    # 2 ulp in CUDA, 3 in OpenCL, 1 in SLEEF and in most C libraries, and one more for a result that is subnormal.
    "exp": Op(mpmath.exp, 4, (0.0, INF)),
    "exp2": Op(lambda x: mpmath.power(2, x), 4, (0.0, INF)),
    "expm1": Op(mpmath.expm1, 4, (-1.0, INF)),
    "log": Op(mpmath.log, 4, (NAN, INF), domain=_POSITIVE, poles={0.0: -INF}),
    "log2": Op(lambda x: mpmath.log(x, 2), 4, (NAN, INF), domain=_POSITIVE, poles={0.0: -INF}),
    "log10": Op(mpmath.log10, 4, (NAN, INF), domain=_POSITIVE, poles={0.0: -INF}),
    "log1p": Op(mpmath.log1p, 4, (NAN, INF), domain=lambda x: x >= -1, poles={-1.0: -INF}),
    "sin": Op(mpmath.sin, 5),
    "cos": Op(mpmath.cos, 5),
    "tan": Op(mpmath.tan, 6),
    "asin": Op(mpmath.asin, 5, domain=_within(-1, 1)),
    "acos": Op(mpmath.acos, 5, domain=_within(-1, 1)),
    "atan": Op(mpmath.atan, 6, (-1.5707963267948966, 1.5707963267948966)),
    "sinh": Op(mpmath.sinh, 5, (-INF, INF), also=lambda x, form: [_sign(x) * at for at in _hyperbolic(x, form)]),
    "cosh": Op(mpmath.cosh, 5, (INF, INF), also=_hyperbolic),
    "tanh": Op(mpmath.tanh, 6, (-1.0, 1.0)),
    "asinh": Op(mpmath.asinh, 5, (-INF, INF)),
    "acosh": Op(mpmath.acosh, 5, (NAN, INF), domain=lambda x: x >= 1),
    "atanh": Op(mpmath.atanh, 6, domain=_within(-1, 1), poles={1.0: INF, -1.0: -INF}),
    "erf": Op(mpmath.erf, 16, (-1.0, 1.0)),
    "erfc": Op(mpmath.erfc, 16, (2.0, 0.0)),
    # 2 ulp in CUDA; two steps of Newton's method on the CPU, each with the error of erf.
    "erfinv": Op(mpmath.erfinv, 16, domain=_within(-1, 1), poles={1.0: INF, -1.0: -INF}),
    # Correctly rounded in fp32 (IEEE 754; CUDA without fast mathematics), and then innocuously once more: 24 bits are
    # at least 2 * 11 + 2 (Figueroa 1995).
    "sqrt": Op(mpmath.sqrt, 0, (NAN, INF), domain=_POSITIVE),
    "reciprocal": Op(lambda x: 1 / x, 0, (-0.0, 0.0), poles={0.0: INF}),
    "rsqrt": Op(lambda x: 1 / mpmath.sqrt(x), 4, (NAN, 0.0), domain=_POSITIVE, poles={0.0: INF}),
    # exp(-x) overflows below -88.7, where the result comes to zero; exp(x) is subnormal from there on.
    "sigmoid": Op(lambda x: 1 / (1 + mpmath.exp(-x)), 8, (0.0, 1.0), zeros=True, also=_vanishes),
    "silu": Op(lambda x: x / (1 + mpmath.exp(-x)), 8, (None, INF), zeros=True, also=_vanishes),
    "mish": Op(
        lambda x: x * mpmath.tanh(mpmath.log1p(mpmath.exp(x))),
        20,
        (None, INF),
        lambda x, y: abs(x) * Fraction(8, 2**149) if -200 < x < -80 else Fraction(0),
        zeros=True,
        also=_vanishes,
    ),
    # x * (1 + erf) overflows before it is halved.
    "gelu": Op(
        _gelu,
        8,
        (None, None),
        lambda x, y: _saturated(x, _ERF) + _flushed(y),
        zeros=True,
        also=_beyond(Fraction(2**127)),
    ),
    "gelu_tanh": Op(
        _gelu_tanh,
        8,
        (None, INF),
        lambda x, y: _saturated(x, 8 * ULP) + _flushed(y),
        zeros=True,
        also=_beyond(FP32_MAX),
    ),
    "softplus": Op(lambda x: mpmath.log1p(mpmath.exp(x)), 8, (0.0, INF), zeros=True),
    "logsigmoid": Op(lambda x: -mpmath.log1p(mpmath.exp(-x)), 8, (-INF, 0.0), zeros=True),
    "elu": Op(lambda x: x if x > 0 else mpmath.expm1(x), 5, (-1.0, INF), zeros=True),
    "selu": Op(_selu, 8, (None, INF), zeros=True),
    "leaky_relu": Op(lambda x: x if x > 0 else x * mpmath.mpf("0.01"), 2, (-INF, INF), zeros=True),
    "hardsigmoid": Op(lambda x: _clamped(x) / 6, 3, (0.0, 1.0), zeros=True),
    "hardswish": Op(lambda x: x * _clamped(x) / 6, 4, (None, INF), zeros=True, also=_overflows(FP32_MAX / 6)),
    # Exact, or rounded once.
    "square": Op(lambda x: x * x, 0, (INF, INF)),
    "abs": Op(abs, 0, (INF, INF)),
    "neg": Op(lambda x: -x, 0, (INF, -INF)),
    "relu": Op(lambda x: max(x, 0), 0, (0.0, INF), zeros=True),
    "relu6": Op(lambda x: min(max(x, 0), 6), 0, (0.0, 6.0), zeros=True),
    "floor": Op(mpmath.floor, 0, (-INF, INF)),
    "ceil": Op(mpmath.ceil, 0, (-INF, INF)),
    "round": Op(mpmath.nint, 0, (-INF, INF)),
    "trunc": Op(lambda x: mpmath.floor(x) if x > 0 else mpmath.ceil(x), 0, (-INF, INF)),
    "frac": Op(lambda x: x - (mpmath.floor(x) if x > 0 else mpmath.ceil(x)), 0, (None, None), zeros=True),
}

# Zero results of the others: the sign of the input (C11, annex F), but for these.
_POSITIVE_ZEROS = {"log", "log2", "log10", "acos", "acosh", "square", "abs", "erfc", "cos"}


def _sign(x: Fraction) -> int:
    return -1 if x < 0 else 1


def _mpf(x: Fraction) -> Number:
    return mpmath.mpf(x.numerator) / x.denominator


def _fraction(y: Number) -> Fraction:
    """Return a finite mpf exactly."""
    if not isinstance(y, mpmath.mpf):
        return Fraction(y)
    sign, man, exponent, bits = y._mpf_
    # Beyond every format's range only the side counts.
    if bits + exponent > 200 or bits + exponent < -400:
        man, exponent = 1, 200 if bits + exponent > 0 else -400
    return (
        Fraction((-1 if sign else 1) * int(man) * 2 ** max(exponent, 0), 2 ** max(-exponent, 0)) if man else Fraction(0)
    )


def _nearest(y: Number, form: Format) -> int:
    """Round to a pattern of `form`, nearest and ties to even; keeps the sign of what comes to zero."""
    exact = y if isinstance(y, Fraction) else _fraction(y)
    top, bottom = abs(exact.numerator), exact.denominator
    if top == 0:
        return 0
    exponent = max(form.min_exponent, top.bit_length() - bottom.bit_length())
    if exponent > form.min_exponent and _below(exponent, top, bottom):
        exponent -= 1
    shift = exponent - form.fraction_bits
    whole, rest = divmod(top << max(-shift, 0), bottom << max(shift, 0))
    twice, whole_unit = 2 * rest, bottom << max(shift, 0)
    units = whole + (twice > whole_unit or (twice == whole_unit and whole % 2 == 1))
    # A carry goes on into the exponent field, up to infinity.
    pattern = units + ((exponent - form.min_exponent) << form.fraction_bits)
    return min(pattern, form.infinity) | ((exact < 0) << (form.width - 1))


def _below(exponent: int, top: int, bottom: int) -> bool:
    """Whether 2^exponent > top / bottom."""
    return (bottom << max(exponent, 0)) > (top << max(-exponent, 0))


def _precise(op: Op, x: Fraction, form: Format) -> Fraction:
    """Return a value of `op` that rounds as the exact one does and is good to 2^-60 of it (Ziv's strategy)."""
    for precision in (100, 300, 900):
        with mpmath.workprec(precision + (160 if abs(x) > 2**20 else 0)):
            value = _fraction(op.value(_mpf(x)))
        doubt = abs(value) / 2 ** (precision - 30)
        if _nearest(value - doubt, form) == _nearest(value + doubt, form):
            return value
    # Closer to a tie than any transcendental function comes: the value is the tie, or zero, itself.
    return value


def _special(value: float, form: Format) -> int:
    if value != value:
        return form.infinity | (1 << (form.fraction_bits - 1))
    negative = str(value).startswith("-")
    pattern = form.infinity if abs(value) == INF else _nearest(Fraction(abs(value)), form)
    return pattern | (negative << (form.width - 1))


def interval(name: str, pattern: int, form: Format) -> tuple[int, int] | None:
    """Return the first and the last acceptable ordinal for an input pattern; None where anything is."""
    op, number = OPS[name], form.value(pattern)
    if number != number:
        return (ordinal(_special(NAN, form)),) * 2
    if abs(number) == INF:
        end = op.ends[number > 0]
        return None if end is None else _around(end, op, form)
    x = Fraction(number)
    if number in op.poles:
        pole = op.poles[number] if name not in ("reciprocal", "rsqrt") or str(number)[0] != "-" else -op.poles[number]
        return (ordinal(_special(pole, form)),) * 2
    if not op.domain(x):
        return (ordinal(_special(NAN, form)),) * 2
    y = _precise(op, x, form)
    if y == 0:
        negative = (number < 0 or str(number)[0] == "-") and name not in _POSITIVE_ZEROS
        zero = -0.0 if negative != (name == "neg") else 0.0
        if name in ("relu", "relu6") and number:
            return (0, 0)
        return (-1, 0) if op.zeros else (ordinal(_special(zero, form)),) * 2
    error = op.ulps * max(ULP * abs(y), Fraction(1, 2**149))
    error += op.absolute(x, y) if op.absolute else 0
    candidates = [_nearest(y - error, form), _nearest(y + error, form)]
    for other in op.also(x, form) if op.also else ():
        candidates.append(_special(other, form) if isinstance(other, float) else _nearest(other, form))
    ordinals = [ordinal(candidate) for candidate in candidates]
    low, high = min(ordinals), max(ordinals)
    # Without an error that is absolute no result is on the other side of zero.
    if op.absolute is None:
        low, high = (max(low, 0), high) if y > 0 else (low, min(high, -1))
    return (-1 if op.zeros and low == 0 else low, 0 if op.zeros and high == -1 else high)


def _around(end: float, op: Op, form: Format) -> tuple[int, int]:
    """Return the interval at an infinite input."""
    if op.zeros and end == 0:
        return (-1, 0)
    if op.ulps and 0 < abs(end) < INF:
        ends = [ordinal(_special(end * (1 + side * op.ulps * 2.0**-23), form)) for side in (-1, 1)]
        return (min(ends), max(ends))
    return (ordinal(_special(end, form)),) * 2


def intervals(name: str, form: Format) -> Intervals:
    """Return the intervals of all 65,536 inputs."""
    return [interval(name, pattern, form) for pattern in range(2**16)]


FIXTURE = {
    "about": (
        "What 16-bit unary ops may return for each input pattern, made by "
        "tests/generators/unary_reference.py with mpmath. "
        "conformance/chapters/numerics/unary_functions.py decodes it: "
        "zlib and base64 of the acceptable results' differences."
    ),
    "sources": [
        "CUDA C++ Programming Guide, mathematical functions appendix: maximum ulp errors of single precision functions",
        "OpenCL C specification, relative error as ulps: single precision, full profile",
        "SLEEF documentation: u10 functions stay within 1.0 ulp, u15 within 1.5, u35 within 3.5",
        "Figueroa 1995, When is double rounding innocuous?",
    ],
}


def main(names: list[str]) -> None:
    path = ROOT / "fixtures" / "unary.json"
    ops = json.loads(path.read_text())["ops"] if path.is_file() else {}
    for name in names or OPS:
        ops[name] = {form.name: encode(intervals(name, form)) for form in (FP16, BF16)}
        print(name, {form: len(text) for form, text in ops[name].items()}, file=sys.stderr, flush=True)
        path.write_text(
            json.dumps({**FIXTURE, "ops": {name: ops[name] for name in OPS if name in ops}}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
