"""Check that ops along any dimension, and over any set of them, give what they give along the last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from . import along_dimensions
from .along_dimensions import EXACT, KEPT, LARGE, PICKED, REDUCED, SHAPES

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
# The same number, rounded by two kernels.
ROUNDINGS = 2

Answers = tuple[Tensor, Tensor | None]


def _answers(call: Callable[[Tensor], Tensor], x: Tensor) -> Answers:
    """Return the result, and the gradient of its sum with weights that tell elements apart."""
    x = x.detach().requires_grad_()
    result = call(x)
    if not result.requires_grad:
        return result.cpu(), None
    (gradient,) = torch.autograd.grad((result * (result.detach().abs() % 3 + 1)).sum(), x)
    return result.detach().cpu(), gradient.cpu()


def _unlike(seen: Answers, right: Answers, roundings: int = ROUNDINGS, left: float = 0.0) -> str:
    """Say how answers differ by more than two kernels round, or nothing; `left` is what terms that cancel may leave."""
    for what, one, other in zip(("result", "gradient"), seen, right, strict=True):
        if one is None or other is None:
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{what}: {one.dtype} of {tuple(one.shape)}, not {other.dtype} of {tuple(other.shape)}"
        near, least = 0.0, 0.0
        if other.is_floating_point():
            form = torch.finfo(other.dtype)
            near, least = roundings * form.eps, left + roundings * form.eps * form.tiny
        if what == "gradient":  # a difference of numbers of its size
            least += 4 * near * float(other.abs().max())
        wrong = ~torch.isclose(one.double(), other.double(), rtol=near, atol=least, equal_nan=True)
        if wrong.any():
            at = int(wrong.flatten().int().argmax())
            return f"{what}: {float(one.flatten()[at]):g} in place of {float(other.flatten()[at]):g}"
    return ""


def _moved(function: Callable[[Tensor, int], Tensor], x: Tensor, dim: int, *, back: bool) -> Tensor:
    """Call the op along the last dimension of a contiguous copy in which it is the dimension `dim`."""
    result = function(x.movedim(dim, -1).contiguous(), -1)
    return result.movedim(-1, dim) if back else result


@contract("AMP-NUMERICS-134")
@pytest.mark.parametrize("op", [*PICKED, *KEPT])
def test_one_dimension(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str) -> None:
    function, wrong, compared = {**PICKED, **KEPT}[op], {}, 0
    for shape in SHAPES:
        x = along_dimensions.distinct(shape, amp_dtype, rng).to(target.device)
        for dim in range(-1, len(shape) - 1):  # the last one, and the others from the front
            try:
                right = _answers(lambda given, d=dim: _moved(function, given, d, back=op in KEPT), x)  # type: ignore[misc]
            except (NotImplementedError, RuntimeError) as error:
                case.note(f"no kernel for {amp_dtype}", str(error).splitlines()[0][:80])
                continue
            for layout, given in along_dimensions.layouts(x).items():
                compared += 1
                seen = _answers(lambda given, d=dim: function(given, d), given)  # type: ignore[misc]
                if told := _unlike(seen, right):
                    wrong[f"{shape}, dim {dim}, {layout}"] = told
    case.enough(target, "calls compared", compared)
    case.equal("what differs from the last dimension", wrong, {})


@contract("AMP-NUMERICS-134")
@pytest.mark.parametrize("op", REDUCED)
def test_sets(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str) -> None:
    """The exact sums of these integers are rounded once, so that the order of the terms is in no result."""
    function, wrong, compared = REDUCED[op], {}, 0
    for shape in (*SHAPES[1:], LARGE):
        x = along_dimensions.whole(shape, amp_dtype, rng).to(target.device)
        # A mean that is updated with each term is not exact: one of zero is a rounding of the terms, in float32.
        left = 0.0 if op in EXACT else torch.finfo(torch.float32).eps * float(x.abs().max())
        for number, dims in enumerate(along_dimensions.sets_of_dimensions(len(shape))):
            gone = sorted(dim % len(shape) for dim in dims)
            kept = [dim for dim in range(len(shape)) if dim not in gone]
            keep = number % 2 == 0 and op != "count_nonzero"
            flat = x.permute(*kept, *gone).reshape(*(shape[dim] for dim in kept), -1)
            try:
                right, _ = _answers(lambda given: function(given, (-1,), False), flat)
            except (NotImplementedError, RuntimeError) as error:
                case.note(f"no kernel for {amp_dtype}", str(error).splitlines()[0][:80])
                continue
            for layout, given in along_dimensions.layouts(x).items():
                compared += 1
                result, _ = _answers(lambda given, d=dims, k=keep: function(given, d, k), given)  # type: ignore[misc]
                roundings = 0 if op in EXACT else ROUNDINGS
                if told := _unlike((result.flatten(), None), (right.flatten(), None), roundings, left):
                    wrong[f"{shape}, dims {dims}, {layout}"] = told
    case.enough(target, "calls compared", compared)
    case.equal("what differs from the sum over one dimension", wrong, {})
