"""Check that the first inf or NaN appears at the predicted op, and that runs within range stay finite."""

from __future__ import annotations

import pytest
import torch

from ...harness.check import Case, contract, needs
from ...harness.targets import Target
from ...measure import nonfinite
from ...measure.precision import full_precision
from .overflow_models import CLEAN, INJECTED, Injected

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def _slug(name: str) -> str:
    return name.replace(" ", "_").replace("/", "_over_")


def _traced(target: Target, injected: Injected, dtype: torch.dtype, steps: int) -> nonfinite.Account:
    model = injected.model(target.device)
    with full_precision(target.device_type):
        return nonfinite.trace(
            model,
            injected.optimizer(model),
            injected.loss,
            [injected.batch(target.device)],
            dtype=dtype,
            steps=steps,
            scale=injected.scale,
        )


def _check(case: Case, target: Target, injected: Injected, dtype: torch.dtype) -> None:
    """Check that the first non-finite value is the injected one, and that the scaler skips every step it reaches."""
    steps = case.samples(quick=1, standard=2, full=4)
    account = _traced(target, injected, dtype, steps)
    found, name = account.first, _NAMES[dtype]
    case.note(f"{name}: first non-finite value", str(found))
    seen = (found.how, found.phase, found.kind) if found else "nothing"
    case.equal(f"{name}: how, phase and value ({found})", seen, (injected.how, injected.phase, injected.kind))
    assert found is not None
    case.true(f"{name}: in one of {list(injected.modules)}", found.module in injected.modules, found.module)
    if target.device_type in ("cpu", "cuda"):
        case.true(f"{name}: made by one of {list(injected.ops)}", found.op in injected.ops, found.op)
    if found.op.startswith("the weight"):
        return
    case.equal(f"{name}: iterations skipped", account.skipped, list(range(steps)))
    case.equal(f"{name}: weights that are not finite after it", account.bad_weight, "")


@contract("AMP-PARITY-040", dtypes=("fp16",))
@needs("storages")
@pytest.mark.parametrize("name", [name for name, model in INJECTED.items() if model.dtypes == ("fp16",)], ids=_slug)
def test_an_overflow_of_fp16_is_where_it_was_planted(case: Case, target: Target, name: str) -> None:
    case.require(target, torch.float16)
    _check(case, target, INJECTED[name], torch.float16)


@contract("AMP-PARITY-040")
@needs("storages")
@pytest.mark.parametrize("name", [name for name, model in INJECTED.items() if len(model.dtypes) == 2], ids=_slug)
def test_a_non_finite_value_is_where_it_was_planted(case: Case, target: Target, name: str) -> None:
    dtypes = case.supported(target)
    # The cause is the same in both: one at random is enough at quick.
    for dtype in dtypes[: case.samples(quick=1, standard=2, full=2)]:
        _check(case, target, INJECTED[name], dtype)


@contract("AMP-PARITY-041")
@pytest.mark.parametrize("name", CLEAN, ids=_slug)
def test_a_clean_run_stays_finite(case: Case, target: Target, amp_dtype: torch.dtype, name: str) -> None:
    injected = CLEAN[name]
    account = _traced(target, injected, amp_dtype, case.samples(quick=1, standard=4, full=20))
    case.note("largest value in float16", str(account.peak))
    case.equal("first non-finite value that reached the loss or a gradient", str(account.first), "None")
    case.equal("iterations skipped", account.skipped, [])
    case.equal("losses that are not finite", [loss for loss in account.losses if not abs(loss) < float("inf")], [])
