"""Check each listed op with one of its tensors at a time in another form, against manual casts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ...harness.check import Case, by_rules, contract, deep
from ...harness.targets import Target
from ...oracles.policy.lists import repeatable
from ..op_comparison import Arm, backward, bits, difference, operands, side_by_side, tensors_of, with_operands
from .support import channels_last


def _wider(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor as part of a larger one, neither its first nor its only elements."""
    whole = x.new_zeros(tuple(size + 2 for size in x.shape))
    inner = whole[tuple(slice(1, -1) for _ in x.shape)]
    return inner.copy_(x)


class _Subclass(torch.Tensor):
    """A tensor of a class that changes nothing."""


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda x: x.narrow(0, 0, 1).expand_as(x) if x.dim() else x,
    "one of the first dimension": lambda x: x.narrow(0, 0, 1) if x.dim() else x,
    "none of the first dimension": lambda x: x.narrow(0, 0, 0) if x.dim() else x,
    "part of a larger one": _wider,
    "turned": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "channels last": channels_last,
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


def _seen(form: str, arm: Arm, call: partial[Any]) -> dict[str, tuple[Any, ...]]:
    """Return by the tensor that has the form what the op gives, and the gradients of its tensors."""
    leaves = operands(call)
    found: dict[str, tuple[Any, ...]] = {}
    for number, leaf in enumerate(leaves[: 1 if form in RESIZED else TENSORS]):
        changed = FORMS[form](leaf)

        def formed(value: Any, leaf: torch.Tensor = leaf, changed: torch.Tensor = changed) -> Any:
            return changed if value is leaf else value

        for one in leaves:
            one.grad = None
        torch.manual_seed(0)
        where = f"tensor {number} {form}"
        try:
            with arm():
                made = tensors_of(with_operands(call, formed)())
        except (RuntimeError, ValueError, IndexError):
            found[where] = ("raises",)
            continue
        backward([each for each in made if each.requires_grad])
        found |= {f"{where}: result {place}": bits(each) for place, each in enumerate(made)}
        learning = [(place, one) for place, one in enumerate(leaves) if one.requires_grad]
        found |= {f"{where}: gradient {place}": bits(one.grad) for place, one in learning}
    return found


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
        wrong = {
            what: difference(seen.get(what, ("absent",)), one) for what, one in manual.items() if seen.get(what) != one
        }
        if wrong:
            case.equal(f"{name}: what differs from manual casts", wrong, {})
    case.at_least("results judged", judged, 1)
