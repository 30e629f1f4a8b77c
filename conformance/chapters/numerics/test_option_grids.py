"""Check ops over all combinations of their options in 16 bits against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers.formats import FORMATS
from ...oracles.relations.values import departures
from .drawn_ops import Draws
from .option_grids import GRIDS
from .support import call_for_refusal

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
# In roundings, as for AMP-NUMERICS-120.
LIMIT = 32.0
TOGETHER = ("attention", "losses")


@contract("AMP-NUMERICS-135")
@pytest.mark.parametrize("layout", ["as given", "channels last"])
@pytest.mark.parametrize("grid", GRIDS)
def test_every_combination(case: Case, target: Target, amp_dtype: torch.dtype, grid: str, layout: str) -> None:
    judged, left_out = 0, {}
    wrong: dict[str, dict[str, str]] = {}
    for one in GRIDS[grid](Draws(f"{grid} {case.seed}")):
        with full_precision(target.device_type):
            errors = departures(
                one, FORMATS[amp_dtype], LIMIT, layout=layout, device=target.device, together=grid in TOGETHER
            )
        judged += errors is not None
        if errors is None:
            left_out[one.name] = partial(call_for_refusal, one, target.device)
        for what, error in (errors or {}).items():
            found = wrong.setdefault(f"{one.name.split()[0]}: {what.split()[0]}", {})
            found[f"{what}: {one.described()}"] = f"{error:.4g} roundings"
    if not judged:
        case.with_kernels(target, left_out)
    case.enough(target, "programs judged", judged)
    for which, found in wrong.items():
        case.equal(f"{which} that are far from exact", found, {})
