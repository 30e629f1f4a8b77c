"""Check each listed op with one of its tensors at a time in another form, against manual casts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ...harness.check import Case, by_rules, contract, deep
from ...harness.targets import Target
from ...measure.generators import seed_torch
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
    "negated lazily": lambda x: torch._neg_view(-x),
    "sparse": lambda x: x.detach().to_sparse() if x.dim() == 2 else x,
}
RESIZED = ("one of the first dimension", "none of the first dimension")
SEEN_ELSEWHERE = ("turned", "channels last", "without a gradient", "result of an operation")  # at quick
TENSORS = 4  # of which each in turn has the form; of those of another size the first, as batches have


def _parameters() -> Iterator[Any]:
    for form in FORMS:
        name = form.replace(" ", "_")
        level = "standard" if form in SEEN_ELSEWHERE else "quick"
        yield deep(level, form, "lower_precision", id=f"{name}-lower_precision")
        if form == "sparse":  # most ops of the other lists refuse it
            continue
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
        seed_torch(0)
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
    if form == "of a subclass" and (reason := target.lacks("plain tensors")):
        case.unsupported(reason)
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


Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


# Of complex matrices (3, 3), both of which have the form.
COMPLEX: dict[str, Operation] = {
    "mm": torch.mm,
    "matmul": torch.matmul,
    "operator": lambda a, b: a @ b,
    "matrix by vector": lambda a, b: torch.matmul(a, b[0]),
    "vector by matrix": lambda a, b: torch.matmul(a[0], b),
    "mv": lambda a, b: torch.mv(a, b[0]),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "vdot": lambda a, b: torch.vdot(a[0], b[0]),
    "bmm": lambda a, b: torch.bmm(a.expand(2, 3, 3), b.expand(2, 3, 3)),
    "addmm": lambda a, b: torch.addmm(a, a, b, beta=0.5, alpha=2.0),
    "addmv": lambda a, b: torch.addmv(a[0], a, b[0]),
    "addbmm": lambda a, b: torch.addbmm(a, a[None], b[None]),
    "baddbmm": lambda a, b: torch.baddbmm(a[None], a[None], b[None]),
    "chain_matmul": lambda a, b: torch.linalg.multi_dot([a, b, a]),
    "linear": torch.nn.functional.linear,
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "conv1d": lambda a, b: torch.conv1d(a[None], b[..., None]),
    "prod": lambda a, b: torch.prod(a * b, 1),
    "sum": lambda a, b: torch.sum(a, 1) + torch.cumsum(b, 1)[0],
    "stack": lambda a, b: torch.stack([a, b]),
    "cat": lambda a, b: torch.cat([a, b]),
    "tensordot": lambda a, b: torch.tensordot(a, b, 1),
}
LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conj": lambda x: x.conj(),
    "mH": lambda x: x.mH,
    "conj of a part": lambda x: x.conj()[:, ::2].repeat_interleave(2, 1)[:, :3],
    "imag of conj": lambda x: x.conj().imag,
    "neg_view": torch._neg_view,
}


def _resolved(x: torch.Tensor) -> torch.Tensor:
    return 0 + x.resolve_conj().resolve_neg().contiguous()


@contract("AMP-CAST-115", on=("cpu", "cuda", "xpu", "mps"))
@pytest.mark.parametrize("lazy", LAZY, ids=lambda name: name.replace(" ", "_"))
def test_lazy_signs(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, lazy: str) -> None:
    # Products and sums of small integers are exact, whatever the order.
    pair = torch.view_as_complex(torch.randint(-3, 4, (2, 3, 3, 2), generator=rng).float())
    case.require_call(target, "make complex tensors", lambda: pair.to(target.device).conj().resolve_conj() + 1)
    a, b = pair.to(target.device)

    def result(operation: Operation, left: torch.Tensor, right: torch.Tensor) -> tuple[Any, ...]:
        try:
            with target.autocast(amp_dtype):
                return bits(_resolved(operation(left, right)))
        except (RuntimeError, NotImplementedError) as error:
            return (f"raises {type(error).__name__}",)

    wrong, judged = {}, 0
    for name, operation in COMPLEX.items():
        for which, left, right in (
            ("both", LAZY[lazy](a), LAZY[lazy](b)),
            ("left", LAZY[lazy](a), b),
            ("right", a, LAZY[lazy](b)),
        ):
            if left.is_complex() != right.is_complex():
                continue
            wanted = result(operation, _resolved(left), _resolved(right))
            seen = result(operation, left, right)
            judged += len(wanted) > 1
            if seen != wanted:
                wrong[f"{name}, {which}"] = f"{seen[:2]} in place of {wanted[:2]}"
    case.equal("ops that differ from resolved operands", wrong, {})
    case.at_least("results judged", judged, 3)
