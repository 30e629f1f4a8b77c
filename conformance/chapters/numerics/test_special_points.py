"""Check results and gradients at kinks, ties and poles in 16 bits against those in float32."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...harness.check import Case, applies, contract, deep
from ...harness.targets import Target, is_foreign
from ...measure.precision import full_precision
from ...oracles.relations.values import weights
from .special_points import FAMILIES, LAYOUTS, LEAST, OF_PICTURES, Point, layouts

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
# In roundings of the type.
LIMIT = 4
MOVES = 2  # of the operands, for forward mode
NEAR = 64 * 2.0**-24  # of the terms of a sum, for rounding in float32
QUICK_PICTURES = (
    *("pools of pictures", "norms of pictures", "softmaxes of pictures", "activations of pictures"),
    *("sizes of pictures", "pools of volumes", "norms of volumes"),
)


def _families() -> Iterator[Any]:
    """Yield each family in regions and outside; regions leave those of pictures in float32."""
    for place in ("in", "outside"):
        for family in FAMILIES:
            quick = family not in OF_PICTURES or (place == "outside" and family in QUICK_PICTURES)
            yield deep("quick" if quick else "standard", place, family, id=f"{place}-{family}")


@contract("AMP-NUMERICS-122")
@pytest.mark.parametrize(("place", "family"), list(_families()))
def test_special_points(case: Case, target: Target, amp_dtype: torch.dtype, place: str, family: str) -> None:
    """Operands are 16-bit outside of a region, and float32 in one; the numbers are exact in both."""
    compared, wrong = 0, {}
    region = partial(target.autocast, amp_dtype) if place == "in" else contextlib.nullcontext
    dtype = torch.float32 if place == "in" else amp_dtype
    for name, point in FAMILIES[family].items():
        in_float32 = partial(_answers, point, target.device, torch.float32, contextlib.nullcontext)
        with full_precision(target.device_type):
            plain = in_float32()
            laid = layouts(*point.operands)
            if case.level == "quick" and family != "products":
                laid = laid[:2]
            seen = {layout: _answers(point, target.device, dtype, region, layout) for layout in laid}
        for layout, answers in seen.items():
            if isinstance(answers, str) or isinstance(plain, str):
                case.note(f"{name}, {layout}: {amp_dtype} {place}", answers if isinstance(answers, str) else plain)
                if not isinstance(plain, str) and not isinstance(seen["contiguous"], str):
                    with full_precision(target.device_type):
                        if not isinstance(in_float32(layout), str):
                            wrong[f"{name}, {layout}"] = answers
                continue
            compared += 1
            unlike = _unlike(answers, plain, amp_dtype, point.rounds)
            if unlike and layout != "contiguous":
                # A kernel for the layout may differ in float32 as well.
                with full_precision(target.device_type):
                    alike = in_float32(layout)
                if not isinstance(alike, str) and not _unlike(answers, alike, amp_dtype, point.rounds):
                    case.note(f"{name}, {layout}: as in float32 of that layout", unlike)
                    continue
            wrong.update({f"{name}, {layout}, {what}": one for what, one in unlike.items()})
    case.enough(target, "calls compared", compared)
    case.equal("results and gradients that are not float32's", wrong, {})


def _tried_on(target: Target) -> str | None:
    """Say that nobody has compared the float32 of this kind of device with a CPU's float64, or return None."""
    kind = target.device_type
    return None if kind == "cpu" or is_foreign(kind) else f"{kind}: what else its float32 may answer is not known"


@contract("AMP-NUMERICS-122")
@applies(_tried_on)
@pytest.mark.parametrize(
    "family", [deep("quick" if one not in OF_PICTURES else "standard", one) for one in FAMILIES], ids=list(FAMILIES)
)
def test_answers_of_float32(case: Case, target: Target, family: str) -> None:
    """What 16 bits are compared with has the answers of float64 on the CPU, so that no kernel is wrong in all types."""
    compared, wrong = 0, {}
    for name, point in FAMILIES[family].items():
        if name.startswith("prod") and target.lacks("plain tensors"):
            continue  # autograd has another formula for a subclass (isTensorSubclassLike)
        # Whether a gradient at a NaN is one depends on the place in a vector (hardtanh, hardswish).
        plain = replace(point, skips_nan=True)
        exact = _answers(plain, torch.device("cpu"), torch.float64, contextlib.nullcontext)
        with full_precision(target.device_type):
            seen = _answers(plain, target.device, torch.float32, contextlib.nullcontext)
        if isinstance(seen, str) or isinstance(exact, str):
            case.note(f"{name}: float32, and float64 on the CPU", [str(one)[:80] for one in (seen, exact)])
            continue
        compared += 1
        wrong.update(
            {f"{name}, {what}": one for what, one in _unlike(seen, exact, torch.float16, point.rounds).items()}
        )
    case.enough(target, "calls compared", compared)
    case.equal("results and gradients of float32 that are not float64's", wrong, {})


@contract("AMP-NUMERICS-153")
@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in OF_PICTURES and one != "not numbers"])
def test_forward_mode(case: Case, target: Target, family: str) -> None:
    """How a weighted sum of the result moves is the gradient times the move, of float32 operands."""
    compared = 0
    for name, point in FAMILIES[family].items():
        if point.picks or any(bool(operand.isnan().any()) for operand in point.operands):
            continue  # no rule says how what is no number moves
        operands = [_placed(operand, target.device, torch.float32) for operand in point.operands]
        for first in range(MOVES):
            moves = [_move(operand, first + MOVES * number) for number, operand in enumerate(operands)]
            try:
                with full_precision(target.device_type):
                    wanted, size = _moved_by_backward(point, operands, moves)
                    seen = _moved_forward(point, operands, moves)
            except (NotImplementedError, RuntimeError) as error:
                case.note(name, str(error).splitlines()[0][:80])
                break
            compared += 1
            alike = seen == wanted or (seen != seen and wanted != wanted)
            off = 0.0 if alike else abs(seen - wanted)
            case.at_most(f"{name}: move {first} apart from backward", off if off == off else math.inf, NEAR * size)
    case.enough(target, "moves compared", compared)


def _move(operand: Tensor, number: int) -> Tensor:
    """Return steps of 1 to 2 in size, other ones for each number, so that those of two operands do not cancel."""
    places = torch.arange(operand.numel())
    steps = (1 + (places * 7 + number * 5) % 9 / 8) * (1 - 2 * ((places * 3 + number * (places + 1)) % 2))
    return steps.view(operand.shape).to(operand.device, operand.dtype)


def _moved_by_backward(point: Point, operands: list[Tensor], moves: list[Tensor]) -> tuple[float, float]:
    """Return the sum of the gradients times the moves, and that of the sizes of its terms."""
    leaves = [operand.clone().requires_grad_() for operand in operands]
    result = point.call(*leaves)
    gradients = torch.autograd.grad(result, leaves, weights(result), allow_unused=True)
    terms = [one * move for one, move in zip(gradients, moves, strict=True) if one is not None]
    size = sum(float(one.abs().nan_to_num(0, 0, 0).sum()) for one in terms)
    return sum(float(one.sum()) for one in terms), size


def _moved_forward(point: Point, operands: list[Tensor], moves: list[Tensor]) -> float:
    with forward_ad.dual_level():
        leaves = [operand.clone().requires_grad_() for operand in operands]
        result = point.call(*map(forward_ad.make_dual, leaves, moves))
        tangent = forward_ad.unpack_dual(result).tangent
        return 0.0 if tangent is None else float((tangent.float() * weights(result)).sum())


@contract("AMP-NUMERICS-122")
@pytest.mark.parametrize("place", ["in", "outside", "float32"])
def test_gradients_of_least_norm(case: Case, target: Target, amp_dtype: torch.dtype, place: str) -> None:
    region = partial(target.autocast, amp_dtype) if place == "in" else contextlib.nullcontext
    dtype = amp_dtype if place == "outside" else torch.float32
    judged = 0
    wrong: dict[str, str] = {}
    for name, (point, gradient) in LEAST.items():
        with full_precision(target.device_type):
            answers = _answers(point, target.device, dtype, region)
        if isinstance(answers, str):
            case.note(name, answers)
            continue
        judged += 1
        if unlike := _unlike(answers[1:], [gradient], amp_dtype, rounds=False):
            (wrong[name],) = unlike.values()
    case.enough(target, "calls judged", judged)
    case.equal("gradients that are not those of least norm", wrong, {})


def _answers(
    point: Point,
    device: torch.device,
    dtype: torch.dtype,
    region: Callable[[], contextlib.AbstractContextManager[object]],
    layout: str = "contiguous",
) -> list[Tensor] | str:
    """Return the result and its gradients in float32, or what the call is refused with."""
    leaves = [LAYOUTS[layout](_placed(operand, device, dtype)).requires_grad_() for operand in point.operands]
    try:
        with region():
            result = point.call(*leaves)
        gradients: tuple[Tensor | None, ...] = ()
        if result.requires_grad and not point.picks:
            gradients = torch.autograd.grad(result, leaves, torch.ones_like(result), allow_unused=True)
    except (NotImplementedError, RuntimeError) as error:
        return str(error).splitlines()[0][:80]
    given = [torch.zeros((), device=device) if gradient is None else gradient for gradient in gradients]
    if point.skips_nan and given:
        given = [gradient.masked_fill(leaf.isnan(), 0.0) for gradient, leaf in zip(given, leaves, strict=True)]
    return [each.detach().to("cpu", torch.float32) for each in (result, *given)]


def _placed(operand: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a copy in this type whose NaNs keep their signs, which conversions may change and CUDA sorts by."""
    signs = torch.where(operand.signbit(), -1.0, 1.0).to(dtype)
    return operand.to(dtype).copysign(signs).to(device)


def _unlike(answers: list[Tensor], exact: list[Tensor], dtype: torch.dtype, rounds: bool) -> dict[str, str]:
    """Return which of the result and its gradients are not the exact ones, with some of their elements."""
    return {
        f"gradient {what}" if what else "result": _shown(one, other, rounds)
        for what, (one, other) in enumerate(zip(answers, exact, strict=True))
        if not _near(one, other, dtype, rounds)
    }


def _shown(seen: Tensor, exact: Tensor, rounds: bool) -> str:
    """Return some elements, those first that differ most in kind or by number."""
    if seen.shape != exact.shape:
        return f"{tuple(seen.shape)}, in float32 {tuple(exact.shape)}"
    same = _kind(seen) == _kind(exact) if rounds else torch.isclose(seen, exact, rtol=2**-5, atol=0, equal_nan=True)
    first = same.flatten().to(torch.int).argsort(stable=True)[:8]
    return f"{seen.flatten()[first].tolist()}, in float32 {exact.flatten()[first].tolist()}"


def _kind(tensor: Tensor) -> Tensor:
    """Return 0 for a finite number, 1 or -1 for an infinity and 2 for what is no number."""
    return torch.where(tensor.isnan(), 2, torch.where(tensor.isinf(), tensor.sign(), 0))


def _near(seen: Tensor, exact: Tensor, dtype: torch.dtype, rounds: bool) -> bool:
    if rounds:
        # A number beyond the range of the type may be its largest one or infinite.
        kinds = _kind(seen)
        return bool(((kinds == _kind(exact)) | (kinds == _kind(exact.to(dtype)))).all())
    rounding, least = torch.finfo(dtype).eps / 2, torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    return bool(torch.isclose(seen, exact, rtol=LIMIT * rounding, atol=least, equal_nan=True).all())
