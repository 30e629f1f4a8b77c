"""Check attention and other ops of nested tensors: those of each member, in every layout and mix of types."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

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


def _sizes(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return what the magnitudes of the terms add up to in the result and in the gradients of query, key and value."""
    q, k, v = (one.detach().double().abs() for one in (query, key, value))
    weights = (query.detach().double() @ key.detach().double().mT * WIDTH**-0.5).softmax(-1)
    slopes = v.sum(-1, keepdim=True).mT  # of the weights, of the sum of all results
    spread = weights * (slopes + (weights * slopes).sum(-1, keepdim=True)) * WIDTH**-0.5
    return [weights @ v, spread @ k, spread.mT @ q, weights.mT @ torch.ones_like(q)]


def _distance(seen: Tensor, wanted: Tensor, size: Tensor, unit: float) -> float:
    """Return the largest difference of two tensors over the largest size of one, in roundings of a type."""
    difference = float((seen.double() - wanted.double()).abs().max()) / float(size.max()) / unit
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
    case.equal(
        "dtypes of the gradients", [one.dtype for one in seen.gradients], [one.dtype for one in wanted.gradients]
    )
    # Both kernels round the scores, the weights and the result once each, and backward what depends on them.
    sizes = [_sizes(*members) for members in zip(*leaves, strict=True)]
    for number, pair in enumerate(zip(seen.outputs, wanted.outputs, strict=True)):
        what = f"result of sequence {number}: distance from the member alone"
        case.at_most(what, _distance(*pair, sizes[number][0], unit), 6.0, "u")
    for at, (one, other) in enumerate(zip(seen.gradients, wanted.gradients, strict=True)):
        operand, number = divmod(at, len(LENGTHS))
        what = f"gradient of the {_OPERANDS[operand]} of sequence {number}: distance from the member alone"
        case.at_most(what, _distance(one, other, sizes[number][1 + operand], unit), 6.0, "u")


_WEIGHT = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)
# Ops of a jagged tensor (or of a batch of one member), with the sequence as dimension 1: what each gives of a member.
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum of a sequence": lambda x: x.sum(dim=1),
    "mean of a sequence": lambda x: x.mean(dim=1),
    "mean of a sequence, keepdim": lambda x: x.mean(dim=1, keepdim=True),
    "sum of a sequence, keepdim": lambda x: x.sum(dim=1, keepdim=True),
    "sum of a sequence in float32": lambda x: x.sum(dim=1, dtype=torch.float32),
    "sum of a sequence in float64": lambda x: x.sum(1, dtype=torch.float64),
    "mean of a sequence in float32": lambda x: x.mean(dim=1, dtype=torch.float32),
    "largest of a sequence": lambda x: x.amax(dim=1),
    "least of a sequence": lambda x: x.amin(dim=1),
    "sum of features in float32": lambda x: x.sum(dim=-1, dtype=torch.float32),
    "sum of features": lambda x: x.sum(dim=-1),
    "mean of features": lambda x: x.mean(dim=-1),
    "softmax of a sequence": lambda x: x.softmax(dim=1),
    "softmax of features": lambda x: x.softmax(dim=-1),
    "softmax of a sequence in float32": lambda x: F.softmax(x, dim=1, dtype=torch.float32),
    "softmax of features in float32": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "log_softmax of features": lambda x: x.log_softmax(dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "linear": lambda x: F.linear(x, _WEIGHT.to(x.device, x.dtype)),
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "float32": lambda x: x.float(),
    "product": lambda x: x * 3,
    "product with a float32 row": lambda x: x * _WEIGHT[0].to(x.device),
    "product with itself in float32": lambda x: x * x.float(),
    "sum with itself": lambda x: x + x,
}


@contract("AMP-CAST-113", on="cpu")
@pytest.mark.parametrize("place", ["in a region", "outside"], ids=lambda name: name.replace(" ", "_"))
@pytest.mark.parametrize("op", OPS, ids=lambda name: name.replace(",", "").replace(" ", "_"))
def test_ops_of_jagged_tensors(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str, place: str
) -> None:
    dtype = torch.float32 if place == "in a region" else amp_dtype
    members = [torch.randn(length, WIDTH, generator=rng).to(target.device, dtype) for length in LENGTHS]
    nested = torch.nested.as_nested_tensor(members, layout=torch.jagged).requires_grad_()
    alone = [one.clone().requires_grad_() for one in members]
    with target.autocast(amp_dtype, enabled=place == "in a region"):
        try:
            results = list(OPS[op](nested).unbind())
        except (RuntimeError, NotImplementedError, ValueError) as error:
            case.unsupported(f"no {op} of jagged tensors: {str(error).splitlines()[0][:80]}")
        wanted = [OPS[op](one[None])[0] for one in alone]
    pairs = {"result": (results, wanted)}
    try:
        _squares(results).backward()
    except (RuntimeError, NotImplementedError) as error:
        case.note("exception of the gradient", f"{type(error).__name__}: {str(error).splitlines()[0][:80]}")
    else:
        _squares(wanted).backward()
        pairs["gradient"] = (list(nested.grad.unbind()), [one.grad for one in alone])
    unit = torch.finfo(amp_dtype).eps / 2
    for what, both in pairs.items():
        for number, (one, other) in enumerate(zip(*both, strict=True)):
            case.equal(f"dtype of the {what} of sequence {number}", one.dtype, other.dtype)
            size = other.detach().double().abs().clamp_min(unit)
            far = _distance(one.detach().reshape(other.shape), other.detach(), size, unit)
            limit = 4.0 if what == "result" else 16.0
            case.at_most(f"{what} of sequence {number}: distance from the member alone", far, limit, "u")


def _squares(results: list[Tensor]) -> Tensor:
    return torch.stack([one.float().square().sum() for one in results]).sum()
