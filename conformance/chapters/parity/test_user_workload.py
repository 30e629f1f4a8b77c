"""Check the parity of a user's model with fp32."""

from __future__ import annotations

import functools
import math
import statistics
from contextlib import nullcontext
from itertools import pairwise

import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure import nonfinite
from ...workloads.training import train_step
from ...workloads.user_workload import Builder
from . import equivalence_test

SETTLING = 16  # halvings from 65536 to 1
RARE = 0.05  # of the steps may be skipped once the scale has settled
WATCHED = 40  # steps that are trained again to find what went wrong in them
INITIAL_SCALE = 65536.0
SEED_OF_DROPOUT = 1
SHOWN = 3  # parameters whose gradients are farthest from fp32's


def _train(
    target: Target, own: Builder, seed: int, dtype: torch.dtype | None, steps: int
) -> tuple[list[float], list[float], str]:
    """Train; return losses, the loss scale before the first and after each step, and the first non-finite weight."""
    work = own.build(target.device, seed).workload()
    scaler = torch.amp.GradScaler(target.device_type, enabled=dtype == torch.float16)
    losses, scales = [], [scaler.get_scale()]
    for number in range(steps):
        # Both arms use the same dropout.
        torch.manual_seed(SEED_OF_DROPOUT + number)
        losses.append(
            train_step(work, number, lambda: nullcontext() if dtype is None else target.autocast(dtype), scaler)
        )
        scales.append(scaler.get_scale())
    bad = (name for name, weight in work.model.named_parameters() if not bool(weight.isfinite().all()))
    return [loss.item() for loss in losses], scales, next(bad, "")


@contract("AMP-PARITY-050")
def test_training_ends_at_the_same_loss(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    if words := own.raises(target.device, lambda: target.autocast(amp_dtype)):
        case.untestable(words)
    steps = case.samples(quick=40, standard=100, full=400)
    first, last = case.samples(quick=6, standard=8, full=12), case.samples(quick=12, standard=16, full=24)

    @functools.cache
    def learned(seed: int, dtype: torch.dtype | None) -> float:
        """Return how far the loss falls from the first step to the last quarter of them."""
        losses, _, _ = _train(target, own, case.seed + seed, dtype, steps)
        return losses[0] - statistics.fmean(losses[-steps // 4 :])

    # Twice as many fp32 runs as pairs at the first look: the margin is made before any difference is seen.
    fp32 = [learned(seed, None) for seed in range(2 * first)]
    case.note(f"fall of the loss within {steps} steps, fp32, by seed", fp32)
    if not all(map(math.isfinite, fp32)):
        case.inconclusive("a fp32 run of the model does not stay finite, so there is nothing to compare AMP with")
    if len(set(fp32)) == 1:
        case.inconclusive("fp32 runs from all seeds are alike: initialize the weights from torch's global generator")
    margin = equivalence_test.margin_of(fp32, first)
    if statistics.fmean(fp32) < 2 * margin:
        case.inconclusive(
            f"in fp32 the loss falls by {statistics.fmean(fp32):.3g} in {steps} steps, and the spread of seeds allows "
            f"a difference of {margin:.3g}: AMP could learn nothing undetected; a higher learning rate or a "
            f"deeper --level would decide"
        )
    seen = equivalence_test.two_stages(
        lambda pairs: [learned(seed, amp_dtype) - learned(seed, None) for seed in range(pairs)],
        margin,
        first=first,
        last=last,
        alpha=0.05,
    )
    case.note("pairs of runs, steps of each", [seen.pairs, steps])
    case.note("mean difference AMP - fp32, ends of its interval, margin", [seen.mean, seen.low, seen.high, margin])
    case.note("power of the test", seen.power)
    if seen.outcome == "undecided":
        case.inconclusive(
            f"after {seen.pairs} pairs the difference lies in [{seen.low:.3g}, {seen.high:.3g}] and the margin is "
            f"{margin:.3g}: about {seen.needed} pairs would decide"
        )
    infinite = [seed for seed in range(seen.pairs) if not math.isfinite(learned(seed, amp_dtype))]
    case.equal("seeds whose AMP run does not stay finite", infinite, [])
    if seen.outcome == "different":
        case.at_most("difference of the falls, its nearest end", seen.nearest, margin)
    case.at_most("difference of the falls, its farthest end", seen.farthest, margin)


@contract("AMP-PARITY-051")
def test_training_stays_finite(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    if words := own.raises(target.device, lambda: target.autocast(amp_dtype)):
        case.untestable(words)
    steps = case.samples(quick=20, standard=100, full=400)
    plain, _, _ = _train(target, own, case.seed, None, steps)
    if not all(map(math.isfinite, plain)):
        case.inconclusive(f"in fp32 the loss is not finite either, from step {_infinite(plain)[0]} on")
    losses, scales, weight = _train(target, own, case.seed, amp_dtype, steps)
    if amp_dtype == torch.float16:
        case.history("loss scale", scales)
    infinite = _infinite(losses)
    skipped = [number for number, (old, new) in enumerate(pairwise(scales)) if new < old]
    settled = next((number for number in range(steps) if number not in skipped), steps)
    later = [number for number in skipped if number > settled]
    cause = ""
    if infinite or weight or settled > SETTLING or len(later) > RARE * steps:
        # What overflows while the scale settles is no cause of a loss that is not finite later.
        cause = f"; first of all {_first_cause(case, target, own, amp_dtype, infinite[0] if infinite else 0)}"
    case.equal(f"steps whose loss is not finite{cause}", infinite[:5], [])
    case.equal(f"the first weight that is not finite at the end{cause}", weight, "")
    case.at_most(f"steps skipped while the scale settled{cause}", settled, SETTLING)
    case.at_most(f"share of the later steps that were skipped{cause}", len(later) / steps, RARE)


def _infinite(losses: list[float]) -> list[int]:
    return [number for number, loss in enumerate(losses) if not math.isfinite(loss)]


def _first_cause(case: Case, target: Target, own: Builder, dtype: torch.dtype, since: int) -> str:
    """Train the model again under trace; name the first op with a non-finite result from iteration `since` on."""
    built = own.build(target.device, case.seed)
    steps = max(WATCHED, since + 1)
    account = nonfinite.trace(
        built.model,
        built.optimizer,
        built.loss,
        built.batches,
        dtype=dtype,
        steps=steps,
        scale=INITIAL_SCALE if dtype == torch.float16 else None,
        clip=built.clip,
    )
    found = next((cause for cause in account.causes if cause.iteration >= since), account.first)
    return str(found) if found is not None else f"nothing is seen within {steps} steps"


@contract("AMP-PARITY-052")
def test_first_gradients(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    if words := own.raises(target.device, lambda: target.autocast(amp_dtype)):
        case.untestable(words)
    full, _ = _gradients(target, own, case.seed, None)
    low, scale = _gradients(target, own, case.seed, amp_dtype)
    case.note("loss scale of these gradients", scale)
    rows = []
    lost = 0
    for name, wide in full.items():
        narrow = low[name]
        lost += int(((narrow == 0) & (wide != 0)).sum())
        size = float(wide.norm() * narrow.norm())
        if size > 0:
            rows.append((float((wide * narrow).sum()) / size, float(narrow.norm() / wide.norm()), name))
    case.note("entries of the gradients", sum(wide.numel() for wide in full.values()))
    case.note("entries that are zero with AMP and not in fp32", lost)
    for cosine, ratio, name in sorted(rows)[:SHOWN]:
        case.note(f"{name.removeprefix('model.')} (of {len(full)}): cosine, ratio of norms", [cosine, ratio])


def _gradients(
    target: Target, own: Builder, seed: int, dtype: torch.dtype | None
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the first gradients by parameter (unscaled, float64, CPU) and the largest scale without overflow."""
    for halvings in range(SETTLING + 1):
        work = own.build(target.device, seed).workload()
        scale = INITIAL_SCALE / 2**halvings if dtype == torch.float16 else 1.0
        torch.manual_seed(SEED_OF_DROPOUT)
        inputs, expected = work.batch(0)
        with nullcontext() if dtype is None else target.autocast(dtype):
            loss = work.loss(work.model(inputs), expected)
        (loss * scale).backward()
        named = work.model.named_parameters()
        found = {name: weight.grad for name, weight in named if weight.grad is not None}
        found = {
            name: (grad.to_dense() if grad.is_sparse else grad).cpu().double() / scale for name, grad in found.items()
        }
        if all(bool(grad.isfinite().all()) for grad in found.values()):
            break
    return found, scale
