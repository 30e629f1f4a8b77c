"""Check the values of 16-bit results and gradients of whatever op a model meets in a region, against float64."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep, per_target
from ...harness.targets import Target, is_foreign
from ...measure.precision import full_precision
from ...oracles.numbers.formats import FORMATS, Format, rounded
from ...oracles.numbers.running_error import UNIT
from . import sum_spellings, value_error, value_ops
from .sum_spellings import FEW, REPEATS, ROWS, ROWS_OF_NUMBERS, SPELLINGS
from .support import slug, without_kernels
from .value_error import LAYOUTS, MAGNITUDES, OPPOSED, ORDINARY, Run
from .value_ops import (
    FUNCTIONS,
    GRADIENTS_OFF_CARDS,
    LARGE_GRADIENTS_OFF_CARDS,
    LARGE_OFF_CARDS,
    LONG,
    NO_GRADIENT,
    OF_TWO,
    OFF_CARDS,
    OPPOSED_GRADIENTS_OFF_CARDS,
    OPPOSED_OFF_CARDS,
    OPS,
    RESULTS_OFF_CARDS,
    Call,
    ValueOp,
)

# One thread, so that the order of every sum is that of one kernel, and most of these are small.
pytestmark = pytest.mark.usefixtures("one_thread")

SHORT_SHAPE, ONE, EMPTY = (37, 33), (3, 1), (3, 0)
QUICK_SIZES = ("huge", "small", "tiny")
DATA = {**ORDINARY, **MAGNITUDES}
Plan = Iterator[tuple[str, str, tuple[int, ...]]]

WIDE: dict[str, Call] = {**{name: op.call for name, op in OPS.items() if op.wide}, **FUNCTIONS}
DIFFERENTIABLE = [name for name in WIDE if name not in NO_GRADIENT]
QUICK = value_ops.QUICK | sum_spellings.QUICK
BY_SLUG = {slug(name): name for table in (OPS, FUNCTIONS, SPELLINGS, REPEATS) for name in table}


def _ops(
    names: Iterable[str], off_cards: Collection[str], *, functions: bool = False
) -> Callable[[Target], Iterator[str]]:
    """Return the ids of the ops of a target: all on a CPU, and on other devices those that these are asked.

    Functions of one element run at full, or at standard where functions are all that there is.
    """

    def of(target: Target) -> Iterator[str]:
        for name in names:
            level = "full" if name in FUNCTIONS and name not in OF_TWO and not functions else "standard"
            if target.device_type == "cpu" or name not in off_cards:
                yield slug(name) if name in QUICK else deep(level, slug(name))

    return of


class _Tried:
    """The runs of one op in every type of the case, and which types its kernels refuse."""

    def __init__(self, case: Case, target: Target, name: str) -> None:
        self.case, self.target, self.name = case, target, name
        self.refused: dict[str, str] = {}
        self.judged = 0

    def run(
        self, call: Call, x: Tensor, layout: str = "contiguous", incoming: tuple[float, float] | None = None
    ) -> Run | None:
        """Return the run, or that of the gradient for an `incoming` one from low to high; None where there is none."""
        region = functools.partial(self.target.autocast, x.dtype)
        try:
            with full_precision(self.target.device_type):
                found = value_error.called(call, x, LAYOUTS[layout], self.target.device, region)
                if incoming is None:
                    return found
                return found.gradients(*incoming) if found.is_differentiable else None
        except (RuntimeError, NotImplementedError) as error:
            reason = value_error.refusal(error) or self._lacks(call, x, layout)
            if reason is None:
                raise
            self.refused[FORMATS[x.dtype].name] = reason
            return None

    def _lacks(self, call: Call, x: Tensor, layout: str) -> str | None:
        """Return why a third party's device cannot do the call in float32, outside of regions, either."""
        if not is_foreign(self.target.device_type):
            return None
        try:
            value_error.called(call, x.float(), LAYOUTS[layout], self.target.device, contextlib.nullcontext)
        except (RuntimeError, NotImplementedError) as error:
            return f"without autocast too: {str(error).splitlines()[0][:100]}"
        return None

    def close(self) -> None:
        """Record the types without a kernel; end the case if there is no other."""
        if self.refused:
            self.case.note(f"{self.name}: types without a kernel", sorted(self.refused.items()))
        if not self.judged:
            why = "; ".join(sorted(set(self.refused.values()))) or "its result has no gradient"
            self.case.unsupported(f"{self.target.name} computes no {self.name} of a 16-bit tensor: {why}")


def _drawn(draw: value_error.Draw, form: Format, rng: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return rounded(draw(form, rng, shape), form).to(form.dtype)


def _layouts(case: Case, rng: torch.Generator, place: int) -> list[str]:
    """Return the layouts of the operand: below full columns first for the first data, then one at random."""
    names = list(LAYOUTS)
    if case.level == "full":
        return names
    return ["transposed"] if place == 0 else [names[int(torch.randint(len(names), (1,), generator=rng))]]


def _finite(
    case: Case,
    target: Target,
    rng: torch.Generator,
    name: str,
    sizes: dict[str, value_error.Draw],
    *,
    backward: bool,
    near: bool = False,
) -> None:
    """Judge whether results or gradients are finite, and whether results are `near` those of float64, within half."""
    tried = _Tried(case, target, name)
    incoming = (1.0, 1.0) if backward else None
    for dtype in case.supported(target):
        form, wrong, far = FORMATS[dtype], [], []
        for _ in range(case.samples(quick=1, standard=1, full=4)):
            # Sizes share the layouts; one that is alone has all of them.
            for place, (size, draw) in enumerate(sizes.items()):
                for layout in _layouts(case, rng, place) if len(sizes) > 1 else LAYOUTS:
                    run = tried.run(WIDE[name], _drawn(draw, form, rng, SHORT_SHAPE), layout, incoming)
                    if run is not None:
                        tried.judged += 1
                        wrong += [(size, seen, exact) for seen, exact in value_error.lost(run, form)[:2]]
                        if near:
                            far += [(size, seen, exact) for seen, exact in value_error.misplaced(run, form)[:2]]
        if form.name not in tried.refused:
            what = "gradients" if backward else "results"
            case.equal(f"{name}: {form.name} {what} that are not finite, size of operands, seen, exact", wrong[:4], [])
            if near:
                case.equal(f"{name}: {form.name} results that are off by half, seen, exact", far[:4], [])
    tried.close()


@contract("AMP-NUMERICS-080")
@per_target("op", _ops(WIDE, LARGE_OFF_CARDS))
def test_results_are_finite(case: Case, target: Target, rng: torch.Generator, op: str) -> None:
    _finite(case, target, rng, BY_SLUG[op], MAGNITUDES, backward=False, near=True)


@contract("AMP-NUMERICS-081")
@per_target("op", _ops(DIFFERENTIABLE, LARGE_GRADIENTS_OFF_CARDS))
def test_gradients_are_finite(case: Case, target: Target, rng: torch.Generator, op: str) -> None:
    sizes = {size: draw for size, draw in MAGNITUDES.items() if case.level == "full" or size in QUICK_SIZES}
    _finite(case, target, rng, BY_SLUG[op], sizes, backward=True)


@contract("AMP-NUMERICS-108")
@per_target("op", _ops(WIDE, OPPOSED_OFF_CARDS))
def test_results_of_differences_are_finite(case: Case, target: Target, rng: torch.Generator, op: str) -> None:
    _finite(case, target, rng, BY_SLUG[op], OPPOSED, backward=False)


@contract("AMP-NUMERICS-109")
@per_target("op", _ops(DIFFERENTIABLE, OPPOSED_GRADIENTS_OFF_CARDS))
def test_gradients_of_differences_are_finite(case: Case, target: Target, rng: torch.Generator, op: str) -> None:
    _finite(case, target, rng, BY_SLUG[op], OPPOSED, backward=True)


def _plan(case: Case, rng: torch.Generator, op: ValueOp, form: Format, *, backward: bool) -> Plan:
    """Yield kinds of data, layouts and shapes: below full the telling ones and one at random."""
    kinds = (["plain"] if op.centred else ["same sign", "plain"]) if backward else list(ORDINARY)
    if case.level != "full" and len(kinds) > 1:
        another = kinds[1 + int(torch.randint(len(kinds) - 1, (1,), generator=rng))]
        kinds = kinds[:1] if backward else [kinds[0], another]
    for _ in range(case.samples(quick=1, standard=1, full=4)):
        for place, kind in enumerate(kinds):
            yield from ((kind, layout, SHORT_SHAPE) for layout in _layouts(case, rng, place))
            if op.long and (place == 0 or case.level == "full"):
                yield kind, "contiguous", (2, LONG[form.dtype])
    if op.single and not (backward and op.scale_free):
        yield "plain", "contiguous", ONE
        yield "wide", "contiguous", ONE
    if op.empty and not backward:
        yield "plain", "contiguous", EMPTY


def _within(case: Case, target: Target, rng: torch.Generator, op: ValueOp, *, backward: bool) -> None:
    tried = _Tried(case, target, op.name)
    for dtype in case.supported(target):
        form, worst = FORMATS[dtype], (0.0, "nothing")
        for kind, layout, shape in _plan(case, rng, op, form, backward=backward):
            x = _drawn(DATA[kind], form, rng, shape)
            run = tried.run(op.call, x, layout, (0.5, 1.5) if backward else None)
            if run is None:
                continue
            tried.judged += 1
            ratio, what = value_error.gradient_error(run, form) if backward else value_error.result_error(run, op, form)
            worst = max(worst, (ratio, f"{kind}, {'x'.join(map(str, shape))}, {layout}: {what}"))
        if form.name not in tried.refused:
            case.at_most(f"{op.name}: {form.name}, worst error ({worst[1]})", worst[0], 1.0, "of the bound")
    tried.close()


@contract("AMP-NUMERICS-082")
@per_target("op", _ops(OPS, RESULTS_OFF_CARDS))
def test_results_are_within_the_bound(case: Case, target: Target, rng: torch.Generator, op: str) -> None:
    _within(case, target, rng, OPS[BY_SLUG[op]], backward=False)


@contract("AMP-NUMERICS-083")
@per_target("op", _ops([name for name, op in OPS.items() if op.smooth], GRADIENTS_OFF_CARDS))
def test_gradients_are_within_the_bound(case: Case, target: Target, rng: torch.Generator, op: str) -> None:
    _within(case, target, rng, OPS[BY_SLUG[op]], backward=True)


def _sums(case: Case, target: Target, rng: torch.Generator, op: str, *, region: bool) -> None:
    name = BY_SLUG[op]
    spelling = SPELLINGS[name]
    tried = _Tried(case, target, name)
    for dtype in case.supported(target):
        form = FORMATS[dtype]
        kinds = ROWS_OF_NUMBERS if spelling.of == 1 else {**ROWS_OF_NUMBERS, **sum_spellings.AVERAGED}
        for kind, draw in kinds.items():
            rows = draw(rng)
            try:
                with full_precision(target.device_type), target.autocast(dtype, enabled=region):
                    seen = spelling.call(rows.to(target.device, dtype)).detach().cpu().double()
            except (RuntimeError, NotImplementedError) as error:
                if region or value_error.refusal(error) is None:
                    raise
                tried.refused[form.name] = str(value_error.refusal(error))
                break
            tried.judged += 1
            expected = (rows[: spelling.rows].sum(-1) / spelling.of).unsqueeze(1)
            bound = (value_error.ROUNDINGS * form.unit_roundoff + sum_spellings.LONG * UNIT) * expected
            error_of_each = (seen.reshape(spelling.rows, -1) - expected).abs() / (bound + 2 * form.smallest)
            first = f"{float(seen.flatten()[0]):.6g} for {float(expected[0]):.6g}"
            what = f"{name}: {form.name}, {sum_spellings.LONG} numbers, {kind}: error of a sum ({first})"
            case.at_most(what, float(error_of_each.nan_to_num(nan=float("inf")).max()), 1.0, "of the bound")
    tried.close()


@contract("AMP-NUMERICS-084")
@per_target("op", _ops(SPELLINGS, [name for name, one in SPELLINGS.items() if not one.on_cards]))
def test_sums_agree(case: Case, target: Target, rng: torch.Generator, op: str) -> None:
    _sums(case, target, rng, op, region=True)


@contract("AMP-NUMERICS-107", on="cpu")
@pytest.mark.parametrize(
    "op", [slug(name) if name in sum_spellings.QUICK_OUTSIDE else deep("standard", slug(name)) for name in SPELLINGS]
)
def test_sums_agree_outside_of_regions(case: Case, target: Target, rng: torch.Generator, op: str) -> None:
    _sums(case, target, rng, op, region=False)


@contract("AMP-NUMERICS-085")
@per_target("op", _ops(REPEATS, [name for name, one in REPEATS.items() if not one.on_cards]))
def test_gradients_of_repeated_elements(case: Case, target: Target, rng: torch.Generator, op: str) -> None:
    name = BY_SLUG[op]
    tried = _Tried(case, target, name)
    for dtype in case.supported(target):
        form = FORMATS[dtype]
        x = _drawn(ORDINARY["same sign"], form, rng, (ROWS, FEW))
        run = tried.run(REPEATS[name].call, x, "contiguous", (0.5, 1.5))
        if run is not None:
            tried.judged += 1
            ratio, what = value_error.gradient_error(run, form)
            kernels = without_kernels(target, dtype) if "conv" in name else ""
            case.at_most(
                f"{name}: {form.name}{kernels}, worst error of the gradient ({what})", ratio, 1.0, "of the bound"
            )
    tried.close()


# Where functions have an edge, and on both sides of it.
POINTS = (-6.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0, math.inf, -math.inf, math.nan)
TIMES = 67
"""How often all of them follow each other: in whole vectors, and in the tail that fills none."""
PLACES = ("contiguous", "every second")
"""Kernels read the second one element by element."""
FLOAT32_OF_ONE = 2.0**-24
"""What is left of a difference of numbers near 1, as in the gradient of GELU at -6, has one rounding of float32."""


@contract("AMP-NUMERICS-086")
@per_target("op", _ops([name for name in FUNCTIONS if name != "glu"], OFF_CARDS, functions=True))
def test_elements_are_alike(case: Case, target: Target, op: str) -> None:
    name = BY_SLUG[op]
    tried = _Tried(case, target, name)
    for dtype in case.supported(target):
        x = torch.tensor(POINTS, dtype=dtype).repeat(TIMES, 1)
        for what, incoming in (("result", None), ("gradient", (1.0, 1.0))):
            runs = [tried.run(FUNCTIONS[name], x, layout, incoming) for layout in PLACES]
            if seen := [run.seen.detach().cpu() for run in runs if run is not None]:
                tried.judged += 1
                unlike = _unlike(x, torch.cat(seen))
                for kind, finite in (("equal operands", True), ("operands that are not finite", False)):
                    of_kind = [(point, found) for point, found in unlike if math.isfinite(point) is finite]
                    case.equal(f"{name}: {FORMATS[dtype].name} {what}s of {kind} that differ", of_kind, [])
    tried.close()


def _unlike(x: Tensor, seen: Tensor) -> list[tuple[float, list[str]]]:
    """Return the operands whose results are further apart than the roundings, and those results."""
    of_each = seen.double().view(-1, x.shape[1])
    finite = of_each.nan_to_num(0.0, 0.0, 0.0)
    near = 2 * FORMATS[x.dtype].unit_roundoff * finite.abs().amax(0) + FLOAT32_OF_ONE
    apart = finite.amax(0) - finite.amin(0) > near
    for kind in (of_each.isnan(), of_each.isposinf(), of_each.isneginf()):
        apart |= kind.any(0) != kind.all(0)
    return [
        (float(x[0, place]), [*dict.fromkeys(map(repr, of_each[:, place].tolist()))])
        for place in apart.nonzero().flatten().tolist()
    ]
