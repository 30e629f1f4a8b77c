"""Check regions around a user's model."""

from __future__ import annotations

import torch

from ...harness.check import Case, contract, trains
from ...harness.targets import Target
from ...workloads.training import train_step
from ...workloads.user_workload import Builder
from .lowered_calls import ListedCalls


@contract("AMP-REGION-100")
@trains(fewest=3, quick=3, standard=3, full=3)
def test_products_run_in_the_type_of_the_region(
    case: Case, target: Target, amp_dtype: torch.dtype, own: Builder
) -> None:
    built = own.build(target.device, case.seed)
    work = built.workload()
    inputs, expected = work.batch(0)
    with ListedCalls(target.device_type) as plain:
        work.loss(work.model(inputs), expected)
    with ListedCalls(target.device_type) as seen, built.region(amp_dtype):
        loss = work.loss(work.model(inputs), expected)
    loss.backward()  # an exception here is reported by another check
    if not seen.inside:
        why = "switches autocast off around them all" if seen.outside else "calls none from Python"
        case.unsupported(f"nothing of the model is lowered: of the ops on the lower-precision list it {why}")
    case.note("calls where the model itself switches autocast off", len(seen.outside))
    case.note(f"calls in {amp_dtype}", sum(call.dtype == amp_dtype for call in seen.inside))
    # The model may open regions itself, in another dtype.
    wrong = [str(call) for call in seen.inside if call.dtype != call.promised]
    case.equal("listed ops that did not run in the type of the region", wrong[:3], [])
    lowered = [str(call) for call in plain.outside if call.dtype != torch.float32]
    case.equal("control: listed ops in 16 bit without a region", lowered[:3], [])


@contract("AMP-REGION-101")
@trains(fewest=4, quick=4, standard=4, full=4)
def test_a_training_step_leaves_nothing_of_its_region(
    case: Case, target: Target, amp_dtype: torch.dtype, own: Builder
) -> None:
    if words := own.raises(target.device, amp_dtype):
        case.untestable(words)
    before, again = (_fp32(target, own, case.seed) for _ in range(2))
    built = own.build(target.device, case.seed)
    train_step(built.workload(), 0, lambda: built.region(amp_dtype), built.scaler(amp_dtype))
    case.equal("autocast after the step", torch.is_autocast_enabled(target.device_type), False)
    after = _fp32(target, own, case.seed)
    case.note("loss and gradients in fp32, before the step", len(before))
    if not _equal(before, again):
        case.inconclusive("two fp32 steps from one seed differ, so a third cannot tell what a region left")
    case.equal("a fp32 step after the region has the bits of one before it", _equal(before, after), True)


def _fp32(target: Target, own: Builder, seed: int) -> list[torch.Tensor]:
    """Return loss and gradients of a step outside any region."""
    work = own.build(target.device, seed).workload()
    inputs, expected = work.batch(0)
    loss = work.loss(work.model(inputs), expected)
    loss.backward()
    gradients = [weight.grad for weight in work.model.parameters() if weight.grad is not None]
    return [loss.detach(), *(grad.to_dense() if grad.is_sparse else grad for grad in gradients)]


def _equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
