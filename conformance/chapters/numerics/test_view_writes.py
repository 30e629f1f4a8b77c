"""Check that a write into a view of a 16-bit tensor changes the numbers of the view, and no others."""

from __future__ import annotations

import itertools

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import OTHER
from .drawn_ops import Draws
from .view_writes import SOURCES, VIEWS, WRITES, numbers, written

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@contract("AMP-NUMERICS-150")
@pytest.mark.parametrize("name", VIEWS)
def test_writes_into_views(case: Case, target: Target, amp_dtype: torch.dtype, name: str) -> None:
    draws, view = Draws(f"{name} {case.seed}"), VIEWS[name]
    every = list(itertools.product(SOURCES, (amp_dtype, torch.float32, OTHER[amp_dtype])))
    judged, wrong = 0, {}
    for word, write in WRITES.items():
        base, source = numbers(draws.generator), numbers(draws.generator)
        for how, dtype in every:
            exact = written(base.double(), view, write, SOURCES[how](source.double(), view))
            whole = base.to(target.device, amp_dtype)
            try:
                write(view(whole), SOURCES[how](source.to(target.device, dtype), view))
            except NotImplementedError as error:
                case.note(word, f"raises: {str(error).splitlines()[0][:80]}")
                break
            judged += 1
            if places := int((whole.cpu().double() != exact).sum()):
                wrong[f"{word} of {dtype}, {how}"] = f"{places} numbers"
    case.equal("writes after which numbers are not as they must be", wrong, {})
    case.enough(target, "writes judged", judged)
