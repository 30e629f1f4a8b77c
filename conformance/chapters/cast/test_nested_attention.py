"""Check attention of nested tensors in a region: that of each member, in every layout and mix of types."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]

HEADS, LENGTHS, WIDTH = 2, (3, 5, 1), 8
# Which of query, key and value are in the amp dtype; the others are float32.
MIXES: dict[str, tuple[bool, bool, bool]] = {
    "float32": (False, False, False),
    "low": (True, True, True),
    "low-query": (True, False, False),
    "low-value": (False, False, True),
}
_OPERANDS = ("query", "key", "value")


@dataclass(frozen=True)
class Ran:
    """The results of each sequence and, with gradients, those of each leaf: of query, key and value in turn."""

    outputs: list[Tensor]
    gradients: list[Tensor]


def _jagged(members: list[Tensor], offsets: Tensor) -> Tensor:
    # A sequence is a row of the jagged dimension, which attention takes between heads and features.
    values = torch.cat([one.transpose(0, 1) for one in members])
    nested: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return nested.transpose(1, 2)


def _ran(leaves: list[list[Tensor]], layout: str, target: Target, dtype: torch.dtype, gradients: bool) -> Ran | str:
    """Attend in a region, as nested tensors of `layout` or "dense", one after the other; what torch raises as text."""
    offsets = torch.tensor([0, *(sum(LENGTHS[: at + 1]) for at in range(len(LENGTHS)))], device=target.device)
    try:
        with target.autocast(dtype), torch.set_grad_enabled(gradients), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attend = torch.nn.functional.scaled_dot_product_attention
            if layout == "dense":
                outputs = [attend(*(one[None] for one in members))[0] for members in zip(*leaves, strict=True)]
            else:
                join = torch.nested.as_nested_tensor if layout == "strided" else (lambda one: _jagged(one, offsets))
                outputs = list(attend(*(join(members) for members in leaves)).unbind())
        found: list[Tensor] = []
        if gradients:
            total = torch.stack([one.float().sum() for one in outputs]).sum()
            found = list(torch.autograd.grad(total, [one for members in leaves for one in members]))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return Ran([one.detach() for one in outputs], found)


def _distance(seen: Tensor, wanted: Tensor, unit: float) -> float:
    """Return the largest difference of two tensors over the largest magnitude, in roundings of a type."""
    scale = max(float(wanted.double().abs().max()), unit)
    difference = float((seen.double() - wanted.double()).abs().max()) / scale / unit
    return math.inf if math.isnan(difference) else difference


@contract("AMP-CAST-113", on="cpu")
@pytest.mark.parametrize("gradients", [True, deep("standard", False)], ids=["training", "no-grad"])
@pytest.mark.parametrize("mix", [mix if mix in ("float32", "low-value") else deep("standard", mix) for mix in MIXES])
@pytest.mark.parametrize("layout", ["jagged", "strided"])
def test_attention_of_nested_tensors(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, layout: str, mix: str, gradients: bool
) -> None:
    leaves = [
        [
            torch.randn(HEADS, length, WIDTH, generator=rng)
            .to(target.device, amp_dtype if low else torch.float32)
            .requires_grad_(gradients)
            for length in LENGTHS
        ]
        for low in MIXES[mix]
    ]
    wanted = _ran(leaves, "dense", target, amp_dtype, gradients)
    seen = _ran(leaves, layout, target, amp_dtype, gradients)
    case.equal("exception of the members alone (control)", wanted if isinstance(wanted, str) else None, None)
    case.equal("exception of the nested tensors", seen if isinstance(seen, str) else None, None)
    assert isinstance(wanted, Ran)
    assert isinstance(seen, Ran)  # the judgements hold
    unit = torch.finfo(amp_dtype).eps / 2
    case.equal("dtypes of the results", {str(one.dtype) for one in seen.outputs}, {str(amp_dtype)})
    names = [f"{operand} of sequence {number}" for operand in _OPERANDS for number in range(len(LENGTHS))]
    case.equal(
        "dtypes of the gradients", [one.dtype for one in seen.gradients], [one.dtype for one in wanted.gradients]
    )
    # Both kernels round the scores, the weights and the result once each, and backward what depends on them.
    for number, pair in enumerate(zip(seen.outputs, wanted.outputs, strict=True)):
        case.at_most(f"result of sequence {number}: distance from the member alone", _distance(*pair, unit), 8.0, "u")
    for name, one, other in zip(names if gradients else [], seen.gradients, wanted.gradients, strict=True):
        case.at_most(f"gradient of the {name}: distance from the member alone", _distance(one, other, unit), 16.0, "u")
