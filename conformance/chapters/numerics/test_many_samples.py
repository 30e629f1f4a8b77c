"""Check calls on more samples than 16 bits count: each is what it is of the sample alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from .drawn_ops import Draws
from .many_samples import CALLS, LIMIT, answers, chosen, drawn
from .support import is_refused, too_far

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@contract("AMP-NUMERICS-151")
def test_many_samples(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    """Judge the first samples, those around the 65,536th and the last; the gradient of the others is zero."""
    step, judged, wrong = case.samples(quick=3, standard=1, full=1), 0, {}
    for name in list(CALLS)[case.seed % step :: step]:
        draws, one = Draws(f"{name} {case.seed}"), CALLS[name]
        count = LIMIT + 4 + draws.number(0, 40)
        places, operands = chosen(count), drawn(one, count, draws.generator)
        incoming = torch.zeros(count).index_put((places,), torch.arange(1.0, len(places) + 1))
        alone = [operands[0][places], *operands[1:]]
        exact = answers(one.call, [operand.double() for operand in alone], incoming[places])
        try:
            with full_precision(target.device_type):
                seen = answers(one.call, [operand.to(target.device, amp_dtype) for operand in operands], incoming)
        except RuntimeError as error:
            if not is_refused(error):
                wrong[name] = f"raises: {str(error).splitlines()[0][:80]}"
                continue
            case.note(name, f"raises: {str(error).splitlines()[0][:80]}")
            continue
        judged += 1
        if found := _far({what: tensor.cpu().double() for what, tensor in seen.items()}, exact, places, amp_dtype):
            wrong[name] = found
    case.equal("calls on many samples of which some are not as alone", wrong, {})
    case.enough(target, "calls judged", judged)


def _far(seen: dict[str, Tensor], exact: dict[str, Tensor], places: Tensor, dtype: torch.dtype) -> str:
    """Return what is far from what it is of the samples alone, and by how much."""
    for what, wanted in exact.items():
        found = seen[what]
        if what in ("result", "gradient by the samples"):
            others, found = found, found[places]
            if what != "result" and others.count_nonzero() != found.count_nonzero():
                return "gradient by samples that the loss does not depend on"
        if far := too_far(found, wanted, dtype, gradient=what != "result"):
            return f"{what}: {far}"
    return ""
