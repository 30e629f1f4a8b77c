"""Parity: where a run leaves the finite numbers, and that a run that need not does not."""

from __future__ import annotations

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure import nonfinite
from ...measure.precision import full_precision
from .overflow_models import CLEAN, PLANTED, Planted

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def _slug(name: str) -> str:
    return name.replace(" ", "_").replace("/", "_over_")


def _traced(target: Target, planted: Planted, dtype: torch.dtype, steps: int) -> nonfinite.Account:
    model = planted.model(target.device)
    with full_precision(target.device_type):
        return nonfinite.trace(
            model,
            planted.optimizer(model),
            planted.loss,
            [planted.batch(target.device)],
            dtype=dtype,
            steps=steps,
            scale=planted.scale,
        )


def _hold(case: Case, target: Target, planted: Planted, dtype: torch.dtype) -> None:
    """The first non-finite value of the run is the planted one, and the scaler leaves out every step that it spoils."""
    steps = case.samples(quick=1, standard=2, full=4)
    account = _traced(target, planted, dtype, steps)
    found, name = account.first, _NAMES[dtype]
    case.note(f"{name}: first non-finite value", str(found))
    seen = (found.how, found.phase, found.kind) if found else "nothing"
    case.equal(f"{name}: how, when and what ({found})", seen, (planted.how, planted.phase, planted.kind))
    assert found is not None
    case.true(f"{name}: in one of {list(planted.modules)}", found.module in planted.modules, found.module)
    if target.device_type in ("cpu", "cuda"):
        case.true(f"{name}: made by one of {list(planted.ops)}", found.op in planted.ops, found.op)
    if found.op.startswith("the weight"):
        return
    case.equal(f"{name}: iterations skipped", account.skipped, list(range(steps)))
    case.equal(f"{name}: weights that are not finite after it", account.bad_weight, "")


@contract("AMP-PARITY-040", dtypes=("fp16",))
@pytest.mark.parametrize("name", [name for name, one in PLANTED.items() if one.dtypes == ("fp16",)], ids=_slug)
def test_an_overflow_of_fp16_is_where_it_was_planted(case: Case, target: Target, name: str) -> None:
    _hold(case, target, PLANTED[name], torch.float16)


@contract("AMP-PARITY-040")
@pytest.mark.parametrize("name", [name for name, one in PLANTED.items() if len(one.dtypes) == 2], ids=_slug)
def test_a_non_finite_value_is_where_it_was_planted(case: Case, target: Target, name: str) -> None:
    dtypes = [dtype for dtype in case.amp_dtypes if target.supports(dtype)]
    if not dtypes:
        case.unsupported(f"{target.name} does not compute in the amp dtypes of this run")
    # The cause is the same in both: one at random is enough at quick.
    for dtype in dtypes[: case.samples(quick=1, standard=2, full=2)]:
        _hold(case, target, PLANTED[name], dtype)


@contract("AMP-PARITY-041")
@pytest.mark.parametrize("name", CLEAN, ids=_slug)
def test_a_clean_run_stays_finite(case: Case, target: Target, amp_dtype: torch.dtype, name: str) -> None:
    planted = CLEAN[name]
    account = _traced(target, planted, amp_dtype, case.samples(quick=1, standard=4, full=20))
    case.note("largest value in float16", str(account.peak))
    case.equal("first non-finite value that reached the loss or a gradient", str(account.first), "None")
    case.equal("iterations skipped", account.skipped, [])
    case.equal("losses that are not finite", [loss for loss in account.losses if not abs(loss) < float("inf")], [])
