"""Check second derivatives in 16 bits, and gradients of elements that an index names several times."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from ...harness.check import Case, contract, deep
from ...harness.judge import lacks_kernel, lacks_kernel_of_dtype, lacks_tangent
from ...harness.targets import Target, is_foreign
from ...measure.determinism import deterministic_algorithms
from ...measure.precision import full_precision
from ...oracles.numbers.formats import FORMATS
from ...oracles.relations.values import ALL_LAYOUTS
from . import special_points
from .second_derivatives import (
    Derivatives,
    Layout,
    derivatives,
    draw,
    first_derivatives,
    forward_over_reverse,
    reverse_over_forward,
    reverse_over_reverse,
    tangent,
    tangent_by_reverse,
)
from .support import slug
from .twice_ops import CONVOLUTIONS, FAMILIES, SAME_TANGENT, TWICE, Twice

Found = TypeVar("Found")
# As AMP-NUMERICS-083 for first derivatives: up to eight 16-bit results follow each other, of four roundings each.
ROUNDINGS = 32
DIFFERENCES = {"fast_mode": True, "atol": 1e-4, "rtol": 1e-3}
QUICK = (
    *("gelu", "silu", "tanh", "linear", "matmul", "bilinear", "layer_norm", "batch_norm", "attention"),
    *(name for name in CONVOLUTIONS if "of groups" in name or name in ("conv1d", "conv2d", "conv2d depthwise")),
)


def _by_depth() -> Iterator[Any]:
    for name in TWICE:
        yield pytest.param(name, id=slug(name)) if name in QUICK else deep("standard", name, id=slug(name))


@contract("AMP-NUMERICS-117")
@pytest.mark.parametrize("op", list(_by_depth()))
def test_second_derivatives(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str) -> None:
    values = [value.to(amp_dtype) for value in TWICE[op].operands(rng)]
    state = rng.get_state()
    exact = dict(derivatives(TWICE[op], [value.double() for value in values], rng, contextlib.nullcontext))
    on_device = [value.to(target.device) for value in values]
    region = partial(target.autocast, amp_dtype)

    def measure() -> Derivatives:
        rng.set_state(state)
        with full_precision(target.device_type):
            return dict(derivatives(TWICE[op], on_device, rng, region))

    case.require_call(target, f"take second derivatives of {op}", measure)
    seen = measure()
    case.equal("second derivatives", sorted(seen), sorted(exact))
    _near(case, op, seen, exact, amp_dtype)


def _with_gaps(x: Tensor) -> Tensor:
    """Return every second element of a tensor of twice as many."""
    return torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0]


TURNED = ALL_LAYOUTS["turned"]  # with its dimensions the other way around
LAYOUTS: dict[str, Layout] = {
    "turned": TURNED,
    "channels last": special_points.LAYOUTS["channels last"],
    "with gaps": _with_gaps,
}


@contract("AMP-NUMERICS-117")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "layout", [deep("quick" if layout == "turned" else "standard", layout, id=slug(layout)) for layout in LAYOUTS]
)
def test_layouts(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, layout: str, family: str
) -> None:
    """Compare with contiguous operands on the same device: a sum that cancels is rounded alike in both."""
    region, judged = partial(target.autocast, amp_dtype), 0
    for name, op in FAMILIES[family].items():
        values = [value.to(amp_dtype) for value in op.operands(rng)]
        state = rng.get_state()
        try:
            # Raises where the op refuses that layout, as max_pool3d does without a batch.
            dict(derivatives(op, [value.double() for value in values], rng, contextlib.nullcontext, LAYOUTS[layout]))
        except RuntimeError:
            continue
        placed = [value.to(target.device) for value in values]
        found = []
        for lie in (Tensor.contiguous, LAYOUTS[layout]):
            rng.set_state(state)
            call = partial(dict[str, Tensor], derivatives(op, placed, rng, region, lie))
            found.append(_taken(case, target, call, name, f"{name}: what the derivatives raise"))
        expected, seen = found
        if expected is None or seen is None:
            continue
        judged += 1
        _near(case, name, seen, {term: one.cpu().double() for term, one in expected.items()}, amp_dtype)
    case.enough(target, "ops judged", judged)


@contract("AMP-NUMERICS-117", on="cpu")
def test_exact_second_derivatives(case: Case, target: Target, rng: torch.Generator) -> None:
    """What 16 bits are compared with are the derivatives of gradients, by differences of these in float64."""
    wrong: dict[str, str] = {}
    for name, op in TWICE.items():
        # Not of 16-bit numbers, of which two may be a whole number apart, where the slope of a loss has a kink.
        values = [value.double() + 1e-4 * (not op.at) for value in op.operands(rng)]
        try:
            torch.autograd.gradgradcheck(op.call, [value.requires_grad_() for value in values], **DIFFERENCES)
        except RuntimeError as error:
            wrong[name] = str(error).splitlines()[0]
    case.equal("ops whose second derivatives in float64 are not those of differences", wrong, {})


def _near(case: Case, op: str, seen: Derivatives, exact: Derivatives, dtype: torch.dtype) -> None:
    # What is zero is held against the size of the largest, and what all gradients add up to against its largest term.
    sizes = {name: float(one.norm()) for name, one in exact.items()}
    floor = max(sizes.values()) / 16
    for name, one in exact.items():
        error = float((seen[name].cpu().double() - one).norm())
        _, of_all, operand = name.partition("all gradients")
        size = max(sizes[other] for other in sizes if other == name or (of_all and other.endswith(operand)))
        bound = ROUNDINGS * FORMATS[dtype].unit_roundoff * max(size, floor)
        case.at_most(f"{op}: error of {name}", error if error == error else float("inf"), bound)


BY_FAMILY = pytest.mark.parametrize(
    "family",
    [family if family in ("activations", "products") else deep("standard", family, id=family) for family in FAMILIES],
)
ORDERS = {"forward over reverse": forward_over_reverse, "reverse over forward": reverse_over_forward}


# Ops with a case of their own.
NORMALIZATIONS = ("layer_norm", "batch_norm", "instance_norm")
ALONE = (*NORMALIZATIONS, "det", "prod of two zeros")


@contract("AMP-NUMERICS-126")
@pytest.mark.parametrize("op", [deep("quick" if op in NORMALIZATIONS else "standard", op, id=slug(op)) for op in ALONE])
@pytest.mark.parametrize("order", [pytest.param(order, id=slug(order)) for order in ORDERS])
def test_orders_of_one_op(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, order: str, op: str
) -> None:
    _judge_order(case, target, amp_dtype, rng, order, {op: TWICE[op]})


@contract("AMP-NUMERICS-126")
@BY_FAMILY
@pytest.mark.parametrize("order", [pytest.param(order, id=slug(order)) for order in ORDERS])
def test_orders_of_modes(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, order: str, family: str
) -> None:
    others = {name: op for name, op in FAMILIES[family].items() if name not in ALONE}
    _judge_order(case, target, amp_dtype, rng, order, others)


def _judge_order(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, order: str, ops: Mapping[str, Twice]
) -> None:
    compute, judged = ORDERS[order], 0
    region = partial(target.autocast, amp_dtype)
    for name, op in ops.items():
        values = [value.to(amp_dtype) for value in op.operands(rng)]
        along = [draw(value, rng) for value in values]
        incoming = draw(op.call(*(value.double() for value in values)), rng)
        given = ([one.double() for one in values], [one.double() for one in along], incoming)
        try:
            compute(op, *given, contextlib.nullcontext)  # raises where torch has no formula for any type
            # The formulas that it has may be as wrong in float64.
            exact = reverse_over_reverse(op, *given)
        except RuntimeError:
            continue
        placed = ([one.to(target.device) for one in values], [one.to(target.device) for one in along])
        call = partial(compute, op, *placed, incoming.to(target.device, amp_dtype), region)
        seen = _taken(case, target, call, f"{name}: {order}", f"{name}: what the derivatives raise")
        if seen is None:
            continue
        judged += 1
        _near(case, name, seen, exact, amp_dtype)
    case.enough(target, "ops judged", judged)


@contract("AMP-NUMERICS-147")
@BY_FAMILY
@pytest.mark.parametrize("operands", ["learnt", "given"])
def test_tangents(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, operands: str, family: str
) -> None:
    _judge_tangents(case, target, amp_dtype, rng, family, learning=operands == "learnt")


@contract("AMP-NUMERICS-147")
@BY_FAMILY
@pytest.mark.parametrize("tangents", ["laid out alike", "contiguous"])
def test_tangents_of_layouts(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, tangents: str, family: str
) -> None:
    of_tangents = TURNED if tangents == "laid out alike" else Tensor.contiguous
    _judge_tangents(case, target, amp_dtype, rng, family, learning=True, layouts=(TURNED, of_tangents))


def _judge_tangents(
    case: Case,
    target: Target,
    amp_dtype: torch.dtype,
    rng: torch.Generator,
    family: str,
    *,
    learning: bool,
    layouts: tuple[Layout, Layout] = (Tensor.contiguous, Tensor.contiguous),
) -> None:
    """Compare the tangents of ops, of operands and tangents in these layouts, with those of backward in float64."""
    judged = 0
    region = partial(target.autocast, amp_dtype)
    for name, op in FAMILIES[family].items():
        values = [layouts[0](value.to(amp_dtype)) for value in op.operands(rng)]
        along = [layouts[1](draw(value, rng)) for value in values]
        try:
            doubled = [one.double() for one in values], [one.double() for one in along]
            # Raises where torch has no formula for any type.
            tangent(op, *doubled, contextlib.nullcontext, learning=True)
            exact, size = tangent_by_reverse(op, *([one.contiguous() for one in part] for part in doubled))
        except RuntimeError:
            continue
        placed = [one.to(target.device) for one in values], [one.to(target.device) for one in along]
        call = partial(tangent, op, *placed, region, learning=learning)
        seen = _taken(case, target, call, f"{name}: tangent", f"{name}: what the tangent raises")
        if seen is None:
            continue
        judged += 1
        off = float((seen.cpu().double() - exact).norm())
        bound = ROUNDINGS * FORMATS[amp_dtype].unit_roundoff * size
        case.at_most(f"{name}: error of the tangent", off if off == off else math.inf, bound)
    case.enough(target, "ops judged", judged)


@contract("AMP-NUMERICS-147")
@pytest.mark.parametrize("place", ["in", "outside"])
def test_written_results_leave_the_tangent(case: Case, target: Target, amp_dtype: torch.dtype, place: str) -> None:
    region = partial(target.autocast, amp_dtype) if place == "in" else contextlib.nullcontext
    wrong: dict[str, list[float]] = {}
    for name, function in SAME_TANGENT.items():
        given = torch.ones(3, 4, device=target.device, dtype=amp_dtype)
        with forward_ad.dual_level(), region():
            dual = forward_ad.make_dual(given, torch.ones_like(given))
            function(dual).mul_(2)
            found = [float(one) for part in forward_ad.unpack_dual(dual) for one in part.unique()]
        if found != [1.0, 1.0]:
            wrong[name] = found
    case.equal("operands and tangents that a write to the result changes", wrong, {})


def _taken(case: Case, target: Target, call: Callable[[], Found], what: str, raises: str) -> Found | None:
    """Return what a call in forward mode returns, None where it lacks a kernel, which is noted, or raises."""
    try:
        with full_precision(target.device_type):
            return call()
    except RuntimeError as error:
        untyped = is_foreign(target.device_type) and lacks_kernel_of_dtype(error)
        if lacking := lacks_kernel(error) or lacks_tangent(error, target.device_type) or (untyped and "this type"):
            case.note(what, f"no kernel of {lacking}, or no forward derivative")
        else:
            case.equal(raises, str(error).splitlines()[0], None)
        return None


# By which the operands are multiplied; a scaled result is multiplied as a scaler does it to a loss.
SIZES = {"large": 16.0, "small": 1 / 16, "scaled": 1.0, "scaled outside": 1.0}


@contract("AMP-NUMERICS-127")
@BY_FAMILY
@pytest.mark.parametrize("size", [pytest.param(size, id=slug(size)) for size in SIZES])
def test_finite_second_derivatives(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, size: str, family: str
) -> None:
    region = contextlib.nullcontext if size == "scaled outside" else partial(target.autocast, amp_dtype)
    most = torch.finfo(amp_dtype).max / 2
    judged = 0
    for name, op in FAMILIES[family].items():
        values = [(value * SIZES[size]).to(amp_dtype) for value in op.operands(rng)]
        if size.startswith("scaled"):
            values = [torch.where(torch.rand(one.shape, generator=rng) < 0.2, one / 32, one) for one in values]
            op = _scaled(op, values, rng, most / 8)
        if _largest(op, values) > most:
            continue  # its result, or a gradient, is beyond the type
        state = rng.get_state()
        exact = dict(derivatives(op, [value.double() for value in values], rng, contextlib.nullcontext))
        rng.set_state(state)
        try:
            with full_precision(target.device_type):
                seen = dict(derivatives(op, [value.to(target.device) for value in values], rng, region))
        except RuntimeError as error:
            lacking = lacks_kernel(error)
            if lacking is None and size != "scaled outside":  # no op has to have 16-bit kernels outside of a region
                raise
            case.note(name, f"no kernel of {lacking}" if lacking else str(error).splitlines()[0])
            continue
        judged += 1
        wrong = {}
        for term, one in exact.items():
            inside = (one.abs() <= most) & ~seen[term].cpu().isfinite()
            if inside.any():
                wrong[term] = f"{int(inside.sum())} of {one.numel()}, such as {float(one[inside][0]):.3g}"
        case.equal(f"{name}: finite second derivatives that are infinite or NaN", wrong, {})
    case.enough(target, "ops judged", judged)


def _largest(op: Twice, values: list[Tensor]) -> float:
    return max(float(one.abs().max()) for one in first_derivatives(op, [value.double() for value in values]))


def _scaled(op: Twice, values: list[Tensor], rng: torch.Generator, most: float) -> Twice:
    """Return `op` with its result multiplied by the largest scale that leaves all of its derivatives below `most`."""
    state = rng.get_state()
    found = derivatives(op, [value.double() for value in values], rng, contextlib.nullcontext)
    largest = max(_largest(op, values), *(float(one.abs().max()) for _, one in found))
    rng.set_state(state)
    power = math.floor(math.log2(most / largest)) if largest else 0
    scale = 2.0 ** min(max(power, 0), 14)
    return replace(op, call=lambda *given: op.call(*given) * scale)


Index = Callable[[Tensor, Tensor], Tensor]
# Of rows (7, 5) and an index (40,) that names some of them often.
INDEXED: dict[str, Index] = {
    "x[index]": lambda x, i: x[i],
    "x[index, :]": lambda x, i: x[i, :],
    "x[index, 2]": lambda x, i: x[i, 2],
    "x[:, columns]": lambda x, i: x[:, i % 5],
    "x[index, columns]": lambda x, i: x[i, i % 5],
    "x[matrix]": lambda x, i: x[i.view(4, 10)],
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(40, 5)),
    "gather columns": lambda x, i: x.gather(1, (i % 5).expand(7, 40)),
    "gather by a transposed index": lambda x, i: x.gather(1, (i % 5).view(4, 10)[:, :7].t()),
    "gather by every second number": lambda x, i: x.gather(0, i.view(4, 10)[:, ::2]),
    "take": lambda x, i: x.take(i),
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i[:, None], 0),
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding, padding_idx": lambda x, i: F.embedding(i, x, padding_idx=6),
    "embedding_bag": lambda x, i: F.embedding_bag(i.view(4, 10), x, mode="sum"),
    "embedding by an expanded index": lambda x, i: F.embedding(i[:10, None].expand(10, 3), x),
    "embedding, sparse": lambda x, i: F.embedding(i, x, sparse=True),
    "repeat_interleave": lambda x, i: x.repeat_interleave(i[:7] + 1, 0),
    "unfold": lambda x, i: x.unfold(0, 3, 1),
    "stack": lambda x, i: torch.stack([x[int(n)] for n in i[:6]]),
}
# The sums of the rows of y (40, 5) for each number of an index.
ADDED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, i, y: x.index_add(0, i, y),
    "scatter_add": lambda x, i, y: x.scatter_add(0, i[:, None].expand(40, 5), y),
    "scatter_reduce": lambda x, i, y: x.scatter_reduce(0, i[:, None].expand(40, 5), y, "sum"),
    "scatter, add": lambda x, i, y: x.scatter(0, i[:, None].expand(40, 5), y, reduce="add"),
    "index_put": lambda x, i, y: x.index_put((i,), y, accumulate=True),
    "index_put_": lambda x, i, y: x.clone().index_put_((i,), y, accumulate=True),
    "index_add_": lambda x, i, y: x.clone().index_add_(0, i, y),
    "scatter_add_ of a part": lambda x, i, y: F.pad(x, (1, 1))[:, 1:-1].scatter_add_(0, i[:, None].expand(40, 5), y),
}


@contract("AMP-NUMERICS-085")
@pytest.mark.parametrize("algorithms", ["any", "deterministic"])
def test_repeated_indices(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, algorithms: str
) -> None:
    # Sums of up to 40 numbers of up to 3 are exact in both types, in every order.
    rows = torch.randint(-3, 4, (7, 5), generator=rng).float()
    more = torch.randint(-3, 4, (40, 5), generator=rng).float()
    index = torch.randint(0, 3, (40,), generator=rng)
    index[:2] = torch.tensor([6, 5])
    wrong, misread, judged = {}, {}, 0

    def read(call: Index, x: Tensor, i: Tensor, region: Any) -> tuple[Tensor, Tensor]:
        """Return what is read by the index, and the gradient."""
        leaf = x.detach().requires_grad_()
        with region:
            result = call(leaf, i)
        steps = (torch.arange(result.numel(), device=x.device) % 5 - 2).reshape(result.shape)
        (found,) = torch.autograd.grad(result, leaf, steps.to(result.dtype))
        return result.detach(), found.to_dense()

    for given in (amp_dtype, torch.float32):
        for name, call in INDEXED.items():
            elements, wanted = read(call, rows.double(), index, contextlib.nullcontext())
            try:
                with deterministic_algorithms(algorithms == "deterministic"):
                    x, i = rows.to(target.device, given), index.to(target.device)
                    result, seen = read(call, x, i, target.autocast(amp_dtype))
            except (RuntimeError, NotImplementedError) as error:  # no kernel, or none that is deterministic
                case.note(f"{name} of {given}", str(error).splitlines()[0][:80])
                continue
            judged += 1
            if seen.dtype != given or not torch.equal(seen.cpu().double() + 0, wanted + 0):
                wrong[f"gradient of {name} of {given}"] = seen.dtype
            if result.dtype != given or not torch.equal(result.cpu().double(), elements):
                misread[f"{name} of {given}"] = result.dtype
        for name, add in ADDED.items():
            wanted = add(rows.double(), index, more.double())
            try:
                with deterministic_algorithms(algorithms == "deterministic"), target.autocast(amp_dtype):
                    x, y = (each.to(target.device, given) for each in (rows, more))
                    seen = add(x, index.to(target.device), y)
            except (RuntimeError, NotImplementedError) as error:
                case.note(f"{name} of {given}", str(error).splitlines()[0][:80])
                continue
            judged += 1
            if seen.dtype != given or not torch.equal(seen.cpu().double() + 0, wanted + 0):
                wrong[f"{name} of {given}"] = seen.dtype
    case.equal("sums over a repeated index that are not exact", wrong, {})
    case.equal("what is read by an index that is not the elements", misread, {})
    case.enough(target, "sums judged", judged, 20)
