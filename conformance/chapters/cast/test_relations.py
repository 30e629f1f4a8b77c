"""Check relations over all programs of a group: mixed dtypes, calls that work outside, one dtype for all forms."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from ...harness.check import Case, contract, deep, per_target
from ...harness.targets import Target
from ...oracles.relations import groups
from ...oracles.relations.sweep import Found, Make, sweep, sweep_routes, sweep_vmap

pytestmark = pytest.mark.usefixtures("one_thread")
Sweeps = dict[tuple[Any, ...], Found]


@pytest.fixture(scope="session")
def sweeps() -> Sweeps:
    """Keep the sweeps of this process, which the contracts share."""
    return {}


def _parts(contract_id: str, target: Target, only: tuple[str, ...] = groups.GROUPS) -> Iterator[Any]:
    """Return the parts of a contract on a target as parameters, each from its level on."""
    for part in groups.parts(contract_id, target.device_type, only):
        level = part.level(target.device_type)
        yield part.id if level == "quick" else deep(level, part.id)


def _makers(case: Case, target: Target, part: groups.Part) -> dict[str, Make]:
    """Return the programs of a part; UNSUPPORTED where the run or this torch has none."""
    if part.amp_dtype not in case.supported(target):
        case.unsupported(f"{part.dtype} is not among the amp dtypes of this run")
    try:
        makers = groups.makers(part, target.device_type, case.level, case.seed)
    except ImportError as error:
        case.untestable(f"PyTorch's operator database cannot be imported: {error}")
        raise
    if not makers:
        case.unsupported(f"this torch has no {part.name} with kernels for {part.dtype}")
    return makers


def _check(case: Case, target: Target, text: str, relation: str, what: str, sweeps: Sweeps) -> None:
    """Judge one relation of a sweep, which contracts about the same programs share."""
    part = groups.part(text)
    makers = _makers(case, target, part)
    every = part.name is not None or case.level == "full"
    compare = part.name is None or relation == "differs"
    key = (target, part.amp_dtype, part.group, every, compare, *sorted(makers))
    if key not in sweeps:
        sweeps[key] = sweep(target, part.amp_dtype, makers, every=every, compare=compare)
    _judge(case, target, part, what, sweeps[key].calls[0], getattr(sweeps[key], relation))


def _judge(case: Case, target: Target, part: groups.Part, what: str, calls: int, found: dict[str, str]) -> None:
    """Judge what a part found, less the programs with a case of their own and the exceptions."""
    exempt = groups.exempt(case.contract.id, target.device_type, part) if part.name is None else frozenset()
    case.at_least("calls", calls, 1)
    case.equal(what, {name: how for name, how in found.items() if name not in exempt}, {})


@contract("AMP-CAST-090", on=("cpu", "fake"))
@per_target("part", partial(_parts, "AMP-CAST-090"))
def test_mixed_dtypes(case: Case, target: Target, part: str, sweeps: Sweeps) -> None:
    _check(case, target, part, "refused", "calls that work with one dtype and raise with mixed ones", sweeps)


@contract("AMP-CAST-091", on=("cpu", "fake"))
@per_target("part", partial(_parts, "AMP-CAST-091"))
def test_calls_that_work_outside(case: Case, target: Target, part: str, sweeps: Sweeps) -> None:
    _check(case, target, part, "broken", "calls that raise in a region only", sweeps)


@contract("AMP-CAST-092", on=("cpu", "fake"))
@per_target("part", partial(_parts, "AMP-CAST-092", only=("layouts", "operators")))
def test_dtype_of_every_form(case: Case, target: Target, part: str, sweeps: Sweeps) -> None:
    _check(case, target, part, "forms", "calls whose result dtype depends on shapes or options", sweeps)


@contract("AMP-CAST-093", on="cpu")
@per_target("part", partial(_parts, "AMP-CAST-093"))
def test_manual_casts_of_everything(case: Case, target: Target, part: str, sweeps: Sweeps) -> None:
    _check(case, target, part, "differs", "calls whose results or gradients differ from those of manual casts", sweeps)


@contract("AMP-CAST-094", on="cpu")
@per_target("part", partial(_parts, "AMP-CAST-094"))
def test_results_are_accepted(case: Case, target: Target, part: str, sweeps: Sweeps) -> None:
    _check(case, target, part, "unclosed", "calls that work in a region with float32 tensors only", sweeps)


@contract("AMP-CAST-095", on="cpu")
@per_target("part", partial(_parts, "AMP-CAST-095", only=("samples",)))
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap(case: Case, target: Target, part: str) -> None:
    one = groups.part(part)
    found = sweep_vmap(target, one.amp_dtype, _makers(case, target, one))
    _judge(
        case, target, one, "calls that vmap refuses or gives another dtype", found.calls[0], found.broken | found.forms
    )


@contract("AMP-CAST-096", on=("cpu", "fake:cuda"))
@per_target("part", partial(_parts, "AMP-CAST-096", only=("operators",)))
def test_spellings(case: Case, target: Target, part: str) -> None:
    one = groups.part(part)
    makers = _makers(case, target, one)
    spellings = groups.spellings(makers, target.device_type, one.amp_dtype)
    found = sweep_routes(target, one.amp_dtype, makers, spellings)
    _judge(case, target, one, "spellings that differ from the function", found.calls[0], found.differs)
