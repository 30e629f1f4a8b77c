"""Fixtures that checks ask for: the case, its target and dtype, random numbers, the user's workload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from .check import Case
from .execution import seed_of
from .items import of_case
from .keys import CASE, RUN

if TYPE_CHECKING:
    import torch

    from ..workloads.user_workload import Builder
    from .expectations import Expectations
    from .targets import Target


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Target:
    """The target of this case."""
    found: Target = request.param
    return found


@pytest.fixture
def amp_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The autocast dtype of this case: torch.float16 or torch.bfloat16."""
    dtype: torch.dtype = request.param
    return dtype


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    """The case: records the evidence and judges it."""
    item = request.node
    run, found = request.config.stash[RUN], of_case(item)
    device = getattr(found.target, "name", "cpu").removeprefix("fake:")
    dtypes = run.dtypes_for(found.dtypes)
    dtype = found.parameters.get("amp_dtype") or run.amp_dtype(dtypes[0])
    made = Case(
        run.catalogue.contracts[found.contract],
        level=run.options.level,
        seed=run.options.seed,
        substitutions={"device": device, "amp_dtype": str(dtype)},
        amp_dtypes=tuple(run.amp_dtype(name) for name in dtypes),
        waivers=run.waivers_for(found.contract, found.id, found.target_name),
    )
    item.stash[CASE] = made
    return made


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A generator on the CPU, seeded from --seed and the case, the same on every device."""
    import torch

    return torch.Generator().manual_seed(seed_of(request.node))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for torch's CPU operations, for checks whose work is too small to share."""
    from ..measure import threads

    with threads.one_thread():
        yield


@pytest.fixture
def expectations(request: pytest.FixtureRequest) -> Expectations:
    """What speed-ups are held against."""
    return request.config.stash[RUN].expectations


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Builder:
    """What builds the user's workload."""
    found = request.config.stash[RUN].own
    assert found is not None, "the contract of a check that asks for `own` needs a workload"
    return found
