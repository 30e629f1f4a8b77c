"""Check values and gradients of PyTorch's own databases of operators and modules in 16 bits, with every option."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from ...harness.check import Case, contract, deep, per_target
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers.formats import FORMATS
from ...oracles.relations import groups
from ...oracles.relations.values import sweep

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
CONTRACT = "AMP-NUMERICS-119"
# Nearly all entries have fewer, some have hundreds. Made are all, since the options change slowly.
MOST = 64
EVERY = 1000


def _parts(target: Target) -> Iterator[Any]:
    for part in groups.parts(CONTRACT, target.device_type, only=("operators", "modules")):
        yield deep("standard", part.id)


@contract("AMP-NUMERICS-119")
@per_target("part", _parts)
def test_values_of_the_database(case: Case, target: Target, part: str) -> None:
    one = groups.part(part)
    if one.amp_dtype not in case.supported(target):
        case.unsupported(f"{one.dtype} is not among the amp dtypes of this run")
    try:
        makers = groups.makers(one, target.device_type, case.level, case.seed, samples=EVERY)
    except ImportError as error:
        case.untestable(f"PyTorch's databases cannot be imported: {error}")
        raise
    if not makers:
        case.unsupported(f"this torch has no {one.name} with kernels for {one.dtype}")
    region = partial(target.autocast, one.amp_dtype) if one.group == "modules" else None
    # Most of what the CPU is known to fail are formulas of every backend; no card has told yet which are its own.
    exempt = groups.exempt(CONTRACT, "cpu", one) if one.name is None else frozenset()
    with full_precision(target.device_type):
        swept = sweep(
            target.device,
            FORMATS[one.amp_dtype],
            {name: make for name, make in makers.items() if name not in exempt},
            samples=MOST if one.name else case.samples(quick=2, standard=12, full=MOST),
            seed=case.seed,
            region=region,
        )
    case.at_least("programs judged", swept.judged, 1)
    case.equal("results and gradients that are far from exact", swept.found, {})
