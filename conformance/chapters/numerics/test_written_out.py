"""Check functions against their documented formulas, written out in float64."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.judge import lacks_kernel_of_dtype
from ...harness.targets import Target
from ...measure.precision import full_precision
from .drawn_ops import Draws
from .support import is_refused
from .written_out import FAMILIES, WrittenOut

pytestmark = [pytest.mark.filterwarnings("ignore")]
# Roundings of the type, of the largest element: at most 4 were seen in 16 bits, and 14 in float32.
LIMIT = {"16 bits": 32.0, "region": 32.0, "float32": 128.0}


def _weighted(result: Tensor) -> Tensor:
    """Return quarters for the elements of a result, of which neighbours in any dimension have others."""
    return (torch.arange(result.numel()) * 7 % 11 / 4 - 1.25).reshape(result.shape).to(result.device, result.dtype)


def _answers(one: WrittenOut, leaves: list[Tensor], fixed: list[object], *, exact: bool) -> dict[str, Tensor]:
    """Return the result and the gradient by each operand, on the CPU in float64; None is a gradient of zeros."""
    result = (one.formula if exact else one.call)(*leaves, *fixed, **one.options)
    found = torch.autograd.grad(result, leaves, _weighted(result), allow_unused=True)
    named = {f"gradient by operand {at}": grad for at, grad in enumerate(found) if grad is not None}
    return {name: tensor.detach().cpu().double() for name, tensor in ({"result": result} | named).items()}


def _far(seen: Tensor, exact: Tensor) -> float:
    if seen.shape != exact.shape:
        return float("inf")
    return float((seen - exact).abs().max() / exact.abs().max().clamp_min(torch.finfo(torch.float32).tiny))


@contract("AMP-NUMERICS-152")
@pytest.mark.parametrize("place", list(LIMIT))
@pytest.mark.parametrize("family", FAMILIES)
def test_formulas(case: Case, target: Target, amp_dtype: torch.dtype, family: str, place: str) -> None:
    dtype = amp_dtype if place == "16 bits" else torch.float32
    unit = torch.finfo(torch.float32 if place == "float32" else amp_dtype).eps / 2
    judged, wrong, changed = 0, {}, []
    for one in FAMILIES[family](Draws(f"written out, {family} {case.seed}")):
        given = [operand.to(target.device, dtype) for operand in one.operands]
        fixed = [each.to(target.device) if isinstance(each, Tensor) else each for each in one.fixed]
        region = target.autocast(amp_dtype) if place == "region" else contextlib.nullcontext()
        leaves = [operand.clone().requires_grad_() for operand in given]
        try:
            with full_precision(target.device_type), region:
                seen = _answers(one, leaves, fixed, exact=False)
                with torch.no_grad():
                    seen["result without gradients"] = one.call(*leaves, *fixed, **one.options).cpu().double()
        except RuntimeError as error:
            if not (is_refused(error) or lacks_kernel_of_dtype(error)):
                raise
            case.note(f"{one.described()}: refused", str(error).splitlines()[0][:80])
            continue
        judged += 1
        changed += [
            one.described() for leaf, operand in zip(leaves, given, strict=True) if not torch.equal(leaf, operand)
        ]
        exact = _answers(one, [each.cpu().double().requires_grad_() for each in given], list(one.fixed), exact=True)
        exact["result without gradients"] = exact["result"]
        for what, right in exact.items():
            roundings = _far(seen[what], right) / unit if what in seen else torch.inf
            if not roundings <= LIMIT[place]:
                wrong[f"{one.described()}: {what}"] = f"{roundings:.3g} roundings"
    case.at_least("calls (control)", judged, 5)
    case.equal("what is far from the formula", dict(list(wrong.items())[:6]), {})
    case.equal("calls that change an operand", changed, [])


@contract("AMP-NUMERICS-152")
@pytest.mark.parametrize("place", list(LIMIT))
def test_a_mask_beside_is_causal(case: Case, target: Target, amp_dtype: torch.dtype, place: str) -> None:
    """Its documentation: an error is thrown if both attn_mask and is_causal are set."""
    taken = []
    for rows in (5, 7):
        dtype = amp_dtype if place == "16 bits" else torch.float32
        query, key = (torch.ones(1, 2, size, 16, device=target.device, dtype=dtype) for size in (rows, 7))
        for mask in (torch.ones(rows, 7, dtype=torch.bool), torch.zeros(rows, 7, dtype=dtype)):
            region = target.autocast(amp_dtype) if place == "region" else contextlib.nullcontext()
            try:
                with region:
                    F.scaled_dot_product_attention(query, key, key, mask.to(target.device), is_causal=True)
            except (RuntimeError, ValueError):
                continue
            taken.append(f"{rows} queries, 7 keys, a mask of {mask.dtype}")
    case.equal("masks that are taken beside is_causal", taken, [])
