"""Check ops of drawn sizes and options in 16 bits and in regions against float64."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import pytest
import torch

from ...harness.check import Case, contract, per_target
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers.formats import FORMATS
from ...oracles.relations.values import ALL_LAYOUTS, departures
from .drawn_ops import FAMILIES, Draws

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
# In roundings. Of 37,500 draws on torch 2.13 one was above 16, and seven above 10.
LIMIT = 32.0
# Of several ops in a row.
TOGETHER = ("attention", "recurrent", "loss")
IN_REGIONS = ("recurrent",)
# AMP-NUMERICS-063 has gradients of normalizations for each pair of layouts.
DENSE = ("as given", "shifted", "channels last")
# Times as many draws, of what has the most options.
MORE = {"normalization": 3, "softmax": 2, "reduction": 3, "pooling": 2, "product": 2}
# Of thousands of numbers each, always in 16 bits and with all gradients.
LARGE = ("adaptive_avg_pool3d", "embedding_bag of long bags", "index_reduce by means")


def _families(target: Target) -> Iterator[str]:
    """Return the families of a target; how devices other than CPUs add up thousands of numbers is written nowhere."""
    yield from (family for family in FAMILIES if family not in LARGE or target.device_type == "cpu")


def _some(draws: Draws, name: str, layout: str, positions: Collection[int]) -> Collection[int]:
    """Draw the operands that gradients are taken of, at least one."""
    if name == "batch_norm" and layout == "channels last":
        return ()
    # torch ends the process for group_norm in channels last without a gradient of its input.
    return tuple(i for i in positions if name == "group_norm" or draws.yes()) or tuple(positions)


@contract("AMP-NUMERICS-120")
@per_target("family", _families)
def test_drawn_ops(case: Case, target: Target, amp_dtype: torch.dtype, family: str) -> None:
    judged = 0
    wrong: dict[str, dict[str, str]] = {}
    count = case.samples(quick=40, standard=250, full=1500)
    region = partial(target.autocast, amp_dtype)
    for number in range(count // 20 if family in LARGE else count * MORE.get(family, 1)):
        draws = Draws(f"{family} {case.seed} {number}")
        one = FAMILIES[family](draws)
        in_region = family in IN_REGIONS or (family not in LARGE and draws.yes())
        layout = draws.one(DENSE if family == "normalization" else list(ALL_LAYOUTS))
        with full_precision(target.device_type):
            errors = departures(
                one,
                FORMATS[amp_dtype],
                LIMIT,
                layout=layout,
                device=target.device,
                region=region if in_region else None,
                together=family in TOGETHER,
                wanted=tuple if family in LARGE else partial(_some, draws, one.name, layout),
            )
        judged += errors is not None
        for what, error in (errors or {}).items():
            place = "in a region" if in_region else "outside of one"
            found = wrong.setdefault(f"{one.name}, operands {layout}: {what.split()[0]}", {})
            found[f"{what} {place}: {one.described()}"] = f"{error:.4g} roundings"
    case.at_least("programs judged", judged, 1)
    for which, found in wrong.items():
        case.equal(f"{which} that are far from exact", found, {})
