"""Take a derivative of an exact program in a region, and compare it with the exact one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...oracles.trace.ops import OpTrace
from .derivative_ways import Direction, Way
from .exact_programs import ExactProgram, exact

Region = Callable[[], AbstractContextManager[object]]
Function = Callable[..., Tensor]


def _around(f: Function, region: Region) -> tuple[Function, Region]:
    return f, region


def _inside(f: Function, region: Region) -> tuple[Function, Region]:
    def within(*inputs: Tensor) -> Tensor:
        with region():
            return f(*inputs)

    return within, contextlib.nullcontext


def _both(f: Function, region: Region) -> tuple[Function, Region]:
    return _inside(f, region)[0], region


# Where the region is: around the transform and its backward, inside the function, or both.
PLACES: dict[str, Callable[[Function, Region], tuple[Function, Region]]] = {
    "around": _around,
    "inside": _inside,
    "both": _both,
}
# Products of matrices and convolutions, forward and backward.
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "linear", "convolution")


def fault_of(
    way: Way, place: str, program: ExactProgram, region: Region, amp_dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return how a derivative of a program in a region differs from the exact one, None where it does not.

    Compared are the dtypes, the values bit for bit, and the types of the operands of each product that ran.
    """
    promised = exact(program.name)
    direction = direction_of(program, device)
    function, outer = PLACES[place](program.function, region)
    with OpTrace() if way.traced else contextlib.nullcontext() as trace:
        try:
            with outer():
                found = tree_leaves(way.take(function, program.inputs(device), direction))
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    dtype = amp_dtype if way.forward and not program.float32 else torch.float32
    if {one.dtype for one in found} != {dtype}:
        return f"dtypes {sorted({str(one.dtype) for one in found})}, expected {dtype}"
    seen, wanted = _flat(way, program, found), _wanted(way, promised, direction)
    if not torch.equal(seen, wanted):
        return f"values differ by {float((seen - wanted).abs().max()):.3g}"
    return None if trace is None else wide_products(trace, amp_dtype)


def wide_products(trace: OpTrace, amp_dtype: torch.dtype) -> str | None:
    """Return the products of a trace whose operands are not all in the amp dtype; None where there are none."""
    wide = {
        str(op)
        for op in trace.computing
        if op.name.removeprefix("aten::").removesuffix("_backward").removesuffix("_overrideable") in _PRODUCTS
        and set(op.inputs) != {amp_dtype}
    }
    return f"products in other types: {', '.join(sorted(wide))}" if wide else None


@functools.cache
def direction_of(program: ExactProgram, device: torch.device) -> Direction:
    """Return the cotangent and the tangents of a program, of ones with some signs."""
    signs = program.signs()
    output = program.function(*signs)
    places = torch.arange(output.numel(), device=device).reshape(output.shape)
    cotangent = torch.where(places % 3 == 0, -1.0, 1.0)
    return Direction(cotangent, tuple(one.float().flip(-1).to(device) for one in signs))


def _wanted(way: Way, promised: Any, direction: Direction) -> Tensor:
    cotangent = direction.cotangent.cpu().double().reshape(-1)
    tangents = torch.cat([one.cpu().double().reshape(-1) for one in direction.tangents])
    results: dict[str, Tensor] = {
        "gradient": cotangent @ promised.jacobian,
        "tangent": promised.jacobian @ tangents,
        "jacobian": promised.jacobian,
        "hvp": promised.hessian @ tangents,
        "hessian": promised.hessian,
    }
    return results[way.gives]


def _flat(way: Way, program: ExactProgram, found: Sequence[Tensor]) -> Tensor:
    """Return what a way gave in float64, in the form of `Derivatives`."""
    sizes = [one.numel() for one in program.signs()]
    plain = [one.detach().cpu().double() for one in found]
    if way.gives in ("gradient", "hvp", "tangent"):
        return torch.cat([one.reshape(-1) for one in plain])
    if way.gives == "jacobian":
        return torch.cat([one.reshape(-1, size) for one, size in zip(plain, sizes, strict=True)], 1)
    rows = (plain[at : at + len(sizes)] for at in range(0, len(plain), len(sizes)))
    return torch.cat(
        [
            torch.cat([one.reshape(height, width) for one, width in zip(row, sizes, strict=True)], 1)
            for height, row in zip(sizes, rows, strict=True)
        ]
    )
