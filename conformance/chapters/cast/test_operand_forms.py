"""Check each listed op with one of its tensors at a time in another form, against manual casts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from ...harness.check import Case, by_rules, contract, deep
from ...harness.targets import Target
from ...oracles.policy.lists import repeatable
from ..op_comparison import Arm, side_by_side, tensors_of


def _wider(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor as part of a larger one, neither its first nor its only elements."""
    whole = x.new_zeros(tuple(size + 2 for size in x.shape))
    inner = whole[tuple(slice(1, -1) for _ in x.shape)]
    return inner.copy_(x)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


class _Subclass(torch.Tensor):
    """A tensor of a class that changes nothing."""


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda x: x.narrow(0, 0, 1).expand_as(x) if x.dim() else x,
    "one of the first dimension": lambda x: x.narrow(0, 0, 1) if x.dim() else x,
    "none of the first dimension": lambda x: x.narrow(0, 0, 0) if x.dim() else x,
    "part of a larger one": _wider,
    "turned": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "channels last": _channels_last,
    "without a gradient": lambda x: x.detach(),
    "result of an operation": lambda x: x * 1,
    "of a subclass": lambda x: x.as_subclass(_Subclass),
}
RESIZED = ("one of the first dimension", "none of the first dimension")
SEEN_ELSEWHERE = ("turned", "channels last", "without a gradient", "result of an operation")  # at quick
TENSORS = 4  # of which each in turn has the form; of those of another size the first, as batches have


def _parameters() -> Iterator[Any]:
    for form in FORMS:
        name = form.replace(" ", "_")
        level = "standard" if form in SEEN_ELSEWHERE else "quick"
        yield deep(level, form, "lower_precision", id=f"{name}-lower_precision")
        if form not in RESIZED:  # for which a kernel of these lists may end the process: pdist of none
            for policy in ("fp32", "widest"):
                yield deep("standard", form, policy, id=f"{name}-{policy}")


def _seen(form: str, arm: Arm, call: partial[Any]) -> dict[str, Any]:
    """Return by the tensor that has the form what the op gives, and the gradients of its tensors."""
    leaves = [tensor for tensor in tensors_of((call.args, call.keywords)) if tensor.is_floating_point()]
    found: dict[str, Any] = {}
    for number, leaf in enumerate(leaves[: 1 if form in RESIZED else TENSORS]):
        changed = FORMS[form](leaf)

        def formed(value: Any, leaf: torch.Tensor = leaf, changed: torch.Tensor = changed) -> Any:
            return changed if value is leaf else value

        for one in leaves:
            one.grad = None
        torch.manual_seed(0)
        try:
            with arm():
                made = tensors_of(call.func(*tree_map(formed, call.args), **tree_map(formed, call.keywords)))
        except (RuntimeError, ValueError, IndexError):
            found[f"tensor {number} {form}"] = "raises"
            continue
        learning = [each for each in made if each.requires_grad]
        if learning:
            torch.autograd.backward(learning, [torch.ones_like(each) for each in learning])
        found |= {f"tensor {number} {form}: result {place}": _bits(each.detach()) for place, each in enumerate(made)}
        found |= {
            f"tensor {number} {form}: gradient {place}": "missing" if one.grad is None else _bits(one.grad)
            for place, one in enumerate(leaves)
            if one.requires_grad
        }
    return found


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = tensor.as_subclass(torch.Tensor).cpu()
    values = plain.nan_to_num(nan=math.pi) if plain.is_floating_point() else plain
    return plain.dtype, tuple(plain.shape), bytes(values.contiguous().reshape(-1).view(torch.uint8).tolist())


def _difference(seen: Any, manual: Any) -> str:
    ours, theirs = (one if isinstance(one, str) else one and one[:2] for one in (seen, manual))
    return "other values" if ours == theirs else f"{ours} in place of {theirs}"


@pytest.mark.filterwarnings("ignore::UserWarning")  # of deprecated ops, and of losses whose targets are broadcast
@by_rules
@contract("AMP-CAST-115", on=("cpu", "cuda", "xpu", "mps", "mtia", "maia"))
@pytest.mark.parametrize(("form", "policy"), list(_parameters()))
def test_operands_in_turn(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, form: str, policy: str
) -> None:
    judged = 0
    measure = partial(_seen, form)
    # An ATen op that no module calls without a sequence, and leaves its states unwritten there.
    undefined = ("mkldnn_rnn_layer",) if form == "none of the first dimension" else ()
    for name, seen, manual in side_by_side(target, policy, amp_dtype, rng.initial_seed(), measure):
        if name in undefined or not repeatable(name.split(".")[0]):
            continue
        judged += len(manual)
        wrong = {what: _difference(seen[what], one) for what, one in manual.items() if seen.get(what) != one}
        if wrong:
            case.equal(f"{name}: what differs from manual casts", wrong, {})
    case.at_least("results judged", judged, 1)
