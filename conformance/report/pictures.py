"""Pictures of a report as inline SVG: loss curves, loss scales, speed-ups, memory, errors, and the op policy table.

They are drawn here and not by a plotting library, so that a page needs no package and no script, follows the reader's
colours and stays small.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import explain, rollup, scale_history, speed, text
from .markup import Child, Markup, tag
from .values import Case, Evidence, Report
from .verdicts import Verdict

_WIDTH = 720.0
_LEFT, _RIGHT, _BOTTOM = 60.0, 28.0, 34.0
_CURVES, _HISTORIES, _SPEEDUPS, _DOTS, _POINTS = 12, 40, 80, 1500, 400
_WIDEST = 1.5  # of an interval that is a prediction, its high end over its low end
_LARGEST = 1e300  # of what is drawn, so that differences are finite
_BACKENDS = ("cpu", "cuda", "xpu", "mps", "mtia", "maia")
_CURVE = re.compile(r"(?P<what>.+), (?P<arm>fp32|AMP)(?:, seed \d+)?")
_TYPES = re.compile(r"types of the outputs for (?P<inputs>b?float\d+(?:, b?float\d+)*)")
_POLICIES = {
    "lower_precision": "16 bit",
    "fp32": "fp32",
    "fp32_set_dtype": "fp32",
    "fp32_append_dtype": "fp32",
    "widest": "widest",
    "banned": "error",
    "unlisted": "as given",
    "unknown": "unknown",
}


@dataclass(frozen=True)
class Picture:
    """A picture with its title, and in words what it shows."""

    title: str
    words: str
    drawing: Markup


class _Axis:
    """Places of numbers from `low` to `high` between the coordinates `start` and `end`."""

    def __init__(self, numbers: Iterable[float], start: float, end: float, *, base: int | None = None) -> None:
        found = list(numbers)
        self._base = base
        low, high = min(found), max(found)
        if base:
            low, high = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
        if high <= low:
            low, high = low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)
        self._low, self._high, self._start, self._end = low, high, start, end

    def __call__(self, number: float) -> float:
        if self._base:
            number = math.log(number, self._base)
        share = (number - self._low) / (self._high - self._low)
        return self._start + min(max(share, 0.0), 1.0) * (self._end - self._start)

    def ticks(self) -> list[tuple[float, str]]:
        """Return some numbers to write at the axis, each with its coordinate."""
        span = self._high - self._low
        if self._base:
            step = max(1, math.ceil(span / 6))
            powers = range(math.ceil(self._low), math.floor(self._high) + 1, step)
            numbers = [float(self._base) ** power for power in powers if abs(power * math.log10(self._base)) < 300]
            words = [_power(number, self._base) for number in numbers]
        else:
            step_of = 10.0 ** math.floor(math.log10(span / 4))
            step_of *= next(factor for factor in (1, 2, 5, 10) if span / (step_of * factor) <= 5)
            first = math.ceil(self._low / step_of)
            numbers = [number * step_of for number in range(first, math.floor(self._high / step_of) + 1)]
            words = [text.value(float(f"{number:.6g}")) for number in numbers]
        return [(self(number), word) for number, word in zip(numbers, words, strict=True)]


def _power(number: float, base: int) -> str:
    if base == 2:
        return explain.number(number)
    exponent = round(math.log10(number))
    return text.value(number) if abs(exponent) < 5 else f"10^{exponent}"


def _frame(x: _Axis, y: _Axis | None, height: float, x_name: str, y_name: str = "") -> Iterator[Markup]:
    bottom = height - _BOTTOM
    for place, word in x.ticks():
        yield tag("line", x1=place, x2=place, y1=8.0, y2=bottom, class_="grid")
        yield tag("text", word, x=place, y=bottom + 14, class_="tick middle")
    yield tag("text", x_name, x=(_LEFT + _WIDTH - _RIGHT) / 2, y=height - 4, class_="name middle")
    for place, word in y.ticks() if y else ():
        yield tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=place, y2=place, class_="grid")
        yield tag("text", word, x=_LEFT - 6, y=place + 4, class_="tick end")
    if y_name:
        yield tag("text", y_name, x=12.0, y=bottom / 2, class_="name middle", transform=f"rotate(-90 12 {bottom / 2})")


def _svg(height: float, title: str, words: str, *children: Child, width: float = _WIDTH) -> Markup:
    return tag(
        "svg",
        *children,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="img",
        aria_label=f"{title}. {words}",
        xmlns="http://www.w3.org/2000/svg",
    )


def _number(value: Any) -> float | None:
    """Return a number that can be drawn, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < _LARGEST else None


def _numbers(value: Any) -> list[float] | None:
    if not isinstance(value, tuple) or not 3 <= len(value) <= _POINTS:
        return None
    found = [number for number in map(_number, value) if number is not None]
    return found if len(found) == len(value) else None


def _path(xs: Sequence[float], ys: Sequence[float], class_: str) -> Markup:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    return tag("polyline", points=points, class_=class_)


# --- training ---------------------------------------------------------------------------------------------------


def loss_curves(report: Report) -> list[Picture]:
    """Draw the loss curves of AMP over the range of those of fp32, a picture for each case that has both."""
    found: list[Picture] = []
    for case in report.cases:
        groups: dict[str, dict[str, list[list[float]]]] = {}
        for evidence in case.evidence:
            name = _CURVE.fullmatch(evidence.name) if evidence.relation is None else None
            if name and (curve := _numbers(evidence.measured)) is not None:
                groups.setdefault(name["what"], {}).setdefault(name["arm"], []).append(curve)
        for what, arms in groups.items():
            if len(arms) == 2 and len(found) < _CURVES:
                found.append(_curves(case, what, arms["fp32"], arms["AMP"]))
    return sorted(found, key=lambda picture: "shaded" not in picture.words)


def _curves(case: Case, what: str, fp32: list[list[float]], amp: list[list[float]]) -> Picture:
    length = min(map(len, [*fp32, *amp]))
    low = [min(curve[at] for curve in fp32) for at in range(length)]
    high = [max(curve[at] for curve in fp32) for at in range(length)]
    middle = [sum(curve[at] / len(fp32) for curve in fp32) for at in range(length)]
    height = 260.0
    x = _Axis([1, length], _LEFT, _WIDTH - _RIGHT)
    every = [number for curve in [*fp32, *amp] for number in curve[:length]]
    y = _Axis(every, height - _BOTTOM, 8.0)
    xs = [x(at + 1) for at in range(length)]
    band = [*zip(xs, map(y, high), strict=True), *reversed([*zip(xs, map(y, low), strict=True)])]
    title = f"{case.contract} on {case.target}: {what}, {_parameters(case)}"
    envelope = f"shaded: the range of {len(fp32)} fp32 curves; " if len(fp32) > 1 else ""
    farthest = [text.seen(found) for found in case.evidence if "envelope" in found.unit]
    apart = max(abs(curve[at] - middle[at]) for curve in amp for at in range(length))
    words = f"{envelope}dashed: fp32{', their mean' * (len(fp32) > 1)}; "
    words += f"solid: {text.count(len(amp), 'AMP curve')}, at most {apart:.3g} from it"
    words = "; ".join([words, *farthest])
    return Picture(
        title,
        words,
        _svg(
            height,
            title,
            words,
            _frame(x, y, height, "epoch" if "epoch" in what else "iteration"),
            tag("polygon", points=" ".join(f"{px:.1f},{py:.1f}" for px, py in band), class_="band"),
            [_path(xs, [y(curve[at]) for at in range(length)], "amp") for curve in amp],
            _path(xs, list(map(y, middle)), "fp32"),
        ),
    )


def _parameters(case: Case) -> str:
    return " ".join(case.parameters.values()) or "no parameters"


def loss_scales(report: Report) -> list[Picture]:
    """Draw each history of a loss scale, small; iterations that were skipped are marked below."""
    return [
        _history(history)
        for history in list(scale_history.histories(report))[:_HISTORIES]
        if len(history.scales) > 1 and all(0 < scale < math.inf for scale in history.scales)
    ]


def _history(history: scale_history.ScaleHistory) -> Picture:
    width, height, step = 230.0, 96.0, max(1, len(history.scales) // _POINTS)
    scales = list(history.scales)[::step]
    x = _Axis([0, len(history.scales) - 1], 40.0, width - 6)
    y = _Axis(scales, height - 12, 8.0, base=2)
    xs: list[float] = []
    ys: list[float] = []
    for at, scale in enumerate(scales):
        xs += [x(at * step)] * (2 if at else 1)
        ys += [*([ys[-1]] if at else []), y(scale)]
    skipped = [at + 1 for at, event in enumerate(history.events) if event == "skipped"]
    ticks = y.ticks()
    title = f"{history.case.contract}, {_parameters(history.case)}: {history.name}"
    words = (
        f"{text.count(history.iterations, 'iteration')}, {len(skipped)} skipped, from "
        f"{explain.number(history.scales[0])} to {explain.number(history.scales[-1])}"
    )
    drawing = _svg(
        height,
        title,
        words,
        [
            tag("text", word, x=36.0, y=place + 3, class_="tick end")
            for place, word in dict.fromkeys((ticks[0], ticks[-1]))
        ],
        [tag("line", x1=40.0, x2=width - 6, y1=place, y2=place, class_="grid") for place, _ in ticks],
        _path(xs, ys, "amp"),
        [
            tag("line", x1=x(at), x2=x(at), y1=height - 10, y2=height - 2, class_="skipped")
            for at in skipped[:: max(1, len(skipped) // _POINTS)]
        ],
        width=width,
    )
    return Picture(title, words, drawing)


# --- speed, memory, errors --------------------------------------------------------------------------------------


def speedups(report: Report) -> list[Picture]:
    """Draw the speed-ups of each device with their intervals, and what is expected of them where that is known."""
    targets: dict[str, list[speed.Speedup]] = {}
    for row in speed.speedups(report):
        targets.setdefault(row.case.target, []).append(row)
    expected = _expected(report)
    return [_speedups(target, rows, expected) for target, rows in targets.items()]


def _expected(report: Report) -> dict[tuple[str, str], Evidence]:
    """Return what judged a speed-up, by target and key."""
    keys = {(row.case.target, row.key) for row in speed.speedups(report)}
    return {
        (case.target, evidence.name.split(":")[0]): evidence
        for case in report.cases
        for evidence in case.evidence
        if evidence.relation in ("<=", ">=") and (case.target, evidence.name.split(":")[0]) in keys
    }


def _speedups(target: str, rows: list[speed.Speedup], expected: dict[tuple[str, str], Evidence]) -> Picture:
    shown = sorted(rows, key=lambda row: (row.baseline, row.dtype, row.ratio))[:_SPEEDUPS]
    left, pitch = 230.0, 17.0
    height = 16 + pitch * len(shown) + _BOTTOM
    bounds = {row.key: _number(found.bound) for row in shown if (found := expected.get((target, row.key)))}
    x = _Axis(
        [1.0, *(end for row in shown for end in (row.low, row.high)), *(one for one in bounds.values() if one)],
        left,
        _WIDTH - _RIGHT,
        base=2,
    )
    marks: list[Child] = []
    for place, row in enumerate(shown):
        y = 18 + place * pitch
        judged = expected.get((target, row.key))
        class_ = "doubt" if row.doubt else "fail" if judged and not judged.holds else "amp"
        wanted = bounds.get(row.key)
        marks.append(
            tag(
                "g",
                tag("title", f"{row.key}: {row.interval}{f', expected {wanted:g}' if wanted else ''}"),
                tag("text", row.key, x=left - 8, y=y + 4, class_="tick end"),
                tag("line", x1=x(row.low), x2=x(row.high), y1=y, y2=y, class_=f"interval {class_}"),
                tag("circle", cx=x(row.ratio), cy=y, r=3.5, class_=f"dot {class_}"),
                tag("line", x1=x(wanted), x2=x(wanted), y1=y - 7, y2=y + 7, class_="wanted") if wanted else None,
            )
        )
    title = f"Speed of AMP over fp32 on {target}"
    words = f"{text.count(len(rows), 'measurement')}, each with its interval; right of 1 AMP is faster"
    words += f"; bars: expected of {len(bounds)}" if bounds else "; no expectation is known for this device"
    words += f"; the first {len(shown)} are shown" if len(shown) < len(rows) else ""
    one = tag("line", x1=x(1.0), x2=x(1.0), y1=8.0, y2=height - _BOTTOM, class_="bound")
    return Picture(title, words, _svg(height, title, words, _frame(x, None, height, "times as fast"), one, marks))


def memory(report: Report) -> list[Picture]:
    """Draw the bytes that were measured over those that were predicted."""
    chapters = {id for id, contract in report.contracts.items() if contract.chapter == "memory"}
    dots: dict[tuple[float, float], tuple[str, bool]] = {}
    for case in report.cases:
        if case.contract in chapters:
            for evidence in case.evidence:
                for predicted, measured in _bytes(evidence):
                    known = dots.get((predicted, measured))
                    if known is None or not evidence.holds:
                        dots[predicted, measured] = (f"{case.contract}: {evidence.name}", evidence.holds)
    if not dots:
        return []
    height = 420.0
    every = [number for pair in dots for number in pair]
    x, y = _Axis(every, _LEFT, _WIDTH - _RIGHT, base=10), _Axis(every, height - _BOTTOM, 8.0, base=10)
    off = sum(not holds for _, holds in dots.values())
    title = "Memory: bytes measured over bytes predicted"
    words = f"{text.count(len(dots), 'pair')}, of which {off} outside their bounds; on the line they agree"
    marks = [
        tag(
            "circle",
            tag("title", f"{name}: predicted {text.value(pair[0])}, measured {text.value(pair[1])}"),
            cx=x(pair[0]),
            cy=y(pair[1]),
            r=3.0 if holds else 5.0,
            class_=f"dot {'amp' if holds else 'fail'}",
        )
        for pair, (name, holds) in sorted(dots.items(), key=lambda item: item[1][1])[:_DOTS]
    ]
    line = tag("line", x1=x(min(every)), y1=y(min(every)), x2=x(max(every)), y2=y(max(every)), class_="bound")
    frame = _frame(x, y, height, "bytes predicted", "bytes measured")
    return [Picture(title, words, _svg(height, title, words, frame, line, marks))]


def _bytes(evidence: Evidence) -> Iterator[tuple[float, float]]:
    """Yield pairs of bytes predicted and measured, above zero; of a narrow interval its middle is the prediction."""
    if "bytes" not in (evidence.unit, *evidence.name.split()):
        return
    bound, measured = evidence.bound, evidence.measured
    if evidence.relation == "in" and isinstance(bound, tuple) and len(bound) == 2:
        low, high = (_number(end) or 0.0 for end in bound)
        pairs = [(low / 2 + high / 2 if 0 < high <= _WIDEST * low else None, _number(measured))]
    elif evidence.relation == "==" and isinstance(bound, tuple) and isinstance(measured, tuple):
        pairs = [(_number(one), _number(other)) for one, other in zip(bound, measured, strict=False)]
    elif evidence.relation == "==":
        pairs = [(_number(bound), _number(measured))]
    else:
        return
    yield from ((one, other) for one, other in pairs if one and other and one > 0 and other > 0)


def errors(report: Report) -> list[Picture]:
    """Draw how near each contract came to its bounds: its largest measured value as a share of the bound."""
    worst: dict[str, float] = {}
    for case in report.cases:
        for evidence in case.evidence:
            bound, measured = _number(evidence.bound), _number(evidence.measured)
            if evidence.relation == "<=" and bound and measured is not None and bound > 0 and measured >= 0:
                worst[case.contract] = max(worst.get(case.contract, 0.0), measured / bound)
    if not worst:
        return []
    verdicts = rollup.verdicts(report)
    waived = {id for id in worst if verdicts[id] is Verdict.WAIVED}
    left, pitch = 110.0, 24.0
    chapters = [one for one in report.header.chapters if any(report.contracts[id].chapter == one.name for id in worst)]
    height = 12 + pitch * len(chapters) + _BOTTOM
    least = 1e-4
    drawn = [share for share in worst.values() if least < share < _LARGEST]
    x = _Axis([least, 2.0, *drawn], left, _WIDTH - _RIGHT, base=10)
    marks: list[Child] = []
    for place, chapter in enumerate(chapters):
        y = 22 + place * pitch
        marks.append(tag("text", chapter.name, x=left - 8, y=y + 4, class_="tick end"))
        for id, share in worst.items():
            if report.contracts[id].chapter == chapter.name:
                words = f"{id}: {share:.3g} of its bound at most"
                dot = tag(
                    "circle",
                    tag("title", words),
                    cx=x(max(share, least)),
                    cy=y,
                    r=4.0 if share <= 1 else 5.0,
                    class_=f"dot {'amp' if share <= 1 else 'waived' if id in waived else 'fail'}",
                )
                marks.append(tag("a", dot, href=f"#{id}", tabindex=-1, aria_label=words))
    off = sum(share > 1 for share in worst.values())
    title = "Error against bound"
    words = (
        f"the largest measured value of each of {text.count(len(worst), 'contract')} as a share of what is allowed; "
        f"{off} beyond a bound, failed or waived"
    )
    limit = tag("line", x1=x(1.0), x2=x(1.0), y1=8.0, y2=height - _BOTTOM, class_="bound")
    frame = _frame(x, None, height, "measured over allowed")
    return [Picture(title, words, _svg(height, title, words, frame, limit, marks))]


# --- the op policy ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What autocast does to an op on a backend, and the worst verdict of the cases about it (None: no case)."""

    policy: str
    verdict: Verdict | None


def op_policy(report: Report) -> dict[str, dict[str, Cell]]:
    """Return the rules that the run observed: of each op, what autocast does to it on each backend.

    They are those of the header where it has them, else those that the evidence of the cast chapter shows.
    """
    backends = {target.name: target.device_type for target in report.header.targets}
    casts = {id for id, contract in report.contracts.items() if contract.chapter == "cast"}
    types: dict[tuple[str, str], dict[str, str]] = {}
    verdicts: dict[tuple[str, str], set[Verdict]] = {}
    for case in report.cases:
        op = case.parameters.get("op")
        if op and case.contract in casts and case.target in backends:
            place = op, backends[case.target]
            verdicts.setdefault(place, set()).add(case.verdict)
            for row in case.evidence:
                if (name := _TYPES.fullmatch(row.name)) is not None:
                    types.setdefault(place, {})[name["inputs"]] = _output(row)
    policies = _registered(report) or {place: _observed(found) for place, found in types.items()}
    rows: dict[str, dict[str, Cell]] = {}
    for (op, backend), policy in sorted(policies.items()):
        judged = verdicts.get((op, backend), set())
        worst = Verdict.worst(judged - {Verdict.UNSUPPORTED} or judged) if judged else None
        rows.setdefault(op, {})[backend] = Cell(policy, worst)
    return rows


def _registered(report: Report) -> dict[tuple[str, str], str]:
    """Return the rule of each op and backend in the header; of overloads with several rules, all."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for backend, rules in (report.header.op_policy or {}).items():
        for policy, overloads in rules.overloads.items():
            for overload in overloads:
                op = overload.rpartition("::")[2].split(".")[0]
                found.setdefault((op, backend), {})[_POLICIES.get(policy, policy)] = None
    return {place: " or ".join(policies) for place, policies in found.items()}


def _output(evidence: Evidence) -> str:
    measured = evidence.measured[0] if isinstance(evidence.measured, tuple) and evidence.measured else ""
    return str(measured).removeprefix("torch.")


def _observed(outputs: dict[str, str]) -> str:
    """Return a rule from the types that went in and came out."""
    if any(len(set(inputs.split(", "))) > 1 for inputs in outputs):
        return "widest"
    if outputs.get("float32") in ("float16", "bfloat16"):
        return "16 bit"
    fp32 = any(inputs != "float32" and given == "float32" for inputs, given in outputs.items())
    return "fp32" if fp32 else "as given"


def backends(rows: dict[str, dict[str, Cell]]) -> list[str]:
    """Return the backends of an op policy, the CPU first."""
    found = {backend for cells in rows.values() for backend in cells}
    known = [backend for backend in _BACKENDS if backend in found]
    return [*known, *sorted(found - set(known))]
