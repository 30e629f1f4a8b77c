"""Check ops over all combinations of their options in 16 bits against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers.formats import FORMATS
from ...oracles.relations.programs import Program
from ...oracles.relations.values import departures
from .drawn_ops import Draws
from .number_grids import NUMBER_GRIDS
from .option_grids import GRIDS
from .support import Findings

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
# In roundings, as for AMP-NUMERICS-120.
LIMIT = 32.0
TOGETHER = ("attention", "losses", "pairs", "recurrences")
LAYOUTS = ("as given", "turned")
QUICK = 5  # quick takes one combination of so many: a step in which options of two, three or four values alternate


@contract("AMP-NUMERICS-135")
@pytest.mark.parametrize("layout", ["as given", "channels last"])
@pytest.mark.parametrize("grid", GRIDS)
def test_every_combination(case: Case, target: Target, amp_dtype: torch.dtype, grid: str, layout: str) -> None:
    programs = GRIDS[grid](Draws(f"{grid} {case.seed}"))
    _judge(case, target, amp_dtype, ((one, layout) for one in programs), together=grid in TOGETHER)


@contract("AMP-NUMERICS-136")
@pytest.mark.parametrize("grid", NUMBER_GRIDS)
def test_every_combination_of_numbers(case: Case, target: Target, amp_dtype: torch.dtype, grid: str) -> None:
    programs = NUMBER_GRIDS[grid](Draws(f"{grid} {case.seed}"))
    if case.level == "quick":
        programs = itertools.islice(programs, case.seed % QUICK, None, QUICK)
    judged: Iterable[tuple[Program, str]]
    if case.level == "full":
        judged = itertools.product(programs, LAYOUTS)
    else:
        layouts = itertools.islice(itertools.cycle(LAYOUTS), case.seed % len(LAYOUTS), None)
        judged = zip(programs, layouts)  # noqa: B905 (the layouts have no end)
    _judge(case, target, amp_dtype, judged, together=grid in TOGETHER)


def _judge(
    case: Case, target: Target, amp_dtype: torch.dtype, programs: Iterable[tuple[Program, str]], *, together: bool
) -> None:
    findings = Findings()
    for one, layout in programs:
        with full_precision(target.device_type):
            errors = departures(one, FORMATS[amp_dtype], LIMIT, layout=layout, device=target.device, together=together)
        if errors is None:
            findings.leave_out(one, target.device)
            continue
        findings.judged += 1
        for what, error in errors.items():
            kind = f"{one.name.split()[0]}: {what.split()[0]}"
            findings.add(kind, f"{what}, {layout}: {one.described()}", f"{error:.4g} roundings")
    findings.hold(case, target, "programs judged", "{} that are far from exact")
