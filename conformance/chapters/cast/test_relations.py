"""Check relations over all programs of a group: mixed dtypes, calls that work outside, one dtype for all forms."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from ...harness.check import Case, contract, deep, per_target
from ...harness.targets import Target
from ...oracles.relations import groups
from ...oracles.relations.sweep import Found, sweep

pytestmark = pytest.mark.usefixtures("one_thread")
Sweeps = dict[tuple[Any, ...], Found]


@pytest.fixture(scope="session")
def sweeps() -> Sweeps:
    """Keep the sweeps of this process, which the contracts share."""
    return {}


def _parts(contract_id: str, target: Target) -> Iterator[Any]:
    """Return the parts of a contract on a target as parameters, each from its level on."""
    for part in groups.parts(contract_id, target.device_type):
        level = part.level(target.device_type)
        yield part.id if level == "quick" else deep(level, part.id)


def _found(case: Case, target: Target, text: str, sweeps: Sweeps) -> Found:
    """Sweep the programs of a part, or return the sweep of another contract of the same programs."""
    part = groups.part(text)
    if part.amp_dtype not in case.supported(target):
        case.unsupported(f"{part.dtype} is not among the amp dtypes of this run")
    try:
        makers = groups.makers(part, target.device_type, case.level, case.seed)
    except ImportError as error:
        case.untestable(f"PyTorch's operator database cannot be imported: {error}")
        raise
    if not makers:
        case.unsupported(f"this torch has no {part.name} with kernels for {part.dtype}")
    every = part.name is not None or case.level == "full"
    key = (target, part.amp_dtype, every, *sorted(makers))
    if key not in sweeps:
        sweeps[key] = sweep(target, part.amp_dtype, makers, every=every)
    case.note("calls", sweeps[key].calls[0])
    return sweeps[key]


def _judged(case: Case, target: Target, text: str, found: dict[str, str]) -> dict[str, str]:
    """Return what a part found, less the programs with a case of their own and the exceptions."""
    part = groups.part(text)
    if part.name is not None:
        return found
    return {name: how for name, how in found.items() if name not in groups.exempt(case.contract.id, target.device_type, part)}


def _check(case: Case, target: Target, part: str, relation: str, what: str, sweeps: Sweeps) -> None:
    found: dict[str, str] = getattr(_found(case, target, part, sweeps), relation)
    case.equal(what, _judged(case, target, part, found), {})


@contract("AMP-CAST-090", on=("cpu", "fake"))
@per_target("part", partial(_parts, "AMP-CAST-090"))
def test_mixed_dtypes(case: Case, target: Target, part: str, sweeps: Sweeps) -> None:
    _check(case, target, part, "refused", "calls that work with one dtype and raise with mixed ones", sweeps)


@contract("AMP-CAST-091", on=("cpu", "fake"))
@per_target("part", partial(_parts, "AMP-CAST-091"))
def test_calls_that_work_outside(case: Case, target: Target, part: str, sweeps: Sweeps) -> None:
    _check(case, target, part, "broken", "calls that raise in a region only", sweeps)


@contract("AMP-CAST-092", on=("cpu", "fake"))
@per_target("part", partial(_parts, "AMP-CAST-092"))
def test_dtype_of_every_form(case: Case, target: Target, part: str, sweeps: Sweeps) -> None:
    _check(case, target, part, "forms", "calls whose result dtype depends on shapes or options", sweeps)


@contract("AMP-CAST-093", on=("cpu", "accelerator"))
@per_target("part", partial(_parts, "AMP-CAST-093"))
def test_manual_casts_of_everything(case: Case, target: Target, part: str, sweeps: Sweeps) -> None:
    _check(case, target, part, "differs", "calls whose results or gradients differ from those of manual casts", sweeps)
