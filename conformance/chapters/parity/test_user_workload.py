"""Check the parity of a user's model with fp32."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import torch

from ...harness.check import Case, contract, trains
from ...harness.targets import DTYPE_NAMES, Target
from ...measure import nonfinite
from ...workloads.training import train_step
from ...workloads.user_workload import Builder, Own, Pace, seed_all
from . import equivalence_test

HALVINGS = 16  # from 65536 to 1
RARE = 0.05  # of the steps may be skipped once the scale has settled
WATCHED = 40  # steps that are trained again to find what went wrong in them
INITIAL_SCALE = 65536.0
SEED_OF_DROPOUT = 1
SHOWN = 3  # parameters whose gradients are farthest from fp32's


@dataclass(frozen=True)
class Plan:
    """How many steps each run has, and the pairs of runs of the first and of the last look."""

    steps: int
    first: int
    last: int

    def seconds(self, full: Pace, low: Pace) -> float:
        """Return what both looks take, before the first of which there are twice as many fp32 runs as pairs."""
        return max(2 * self.first, self.last) * full.run(self.steps) + self.last * low.run(self.steps)


LEAST = Plan(10, 4, 8)


def _plans(case: Case) -> tuple[Plan, ...]:
    """Return the plan of the level and smaller ones: with fewer steps, then with fewer runs."""
    steps = case.samples(quick=40, standard=100, full=400)
    first, last = case.samples(quick=6, standard=8, full=12), case.samples(quick=12, standard=16, full=24)
    smaller = Plan(steps, first, last), Plan(steps // 2, first, last), Plan(steps // 2, 6, 12), Plan(steps // 4, 6, 12)
    plans = {*(plan for plan in smaller if plan.steps >= LEAST.steps), Plan(2 * LEAST.steps, 4, 8), LEAST}
    return tuple(sorted(plans, key=lambda plan: plan.steps * plan.last, reverse=True))


def _train(
    case: Case,
    target: Target,
    own: Builder,
    seed: int,
    dtype: torch.dtype | None,
    steps: int,
    what: str,
) -> tuple[list[float], list[float], str]:
    """Train; return losses, the loss scale before the first and after each step, and the first non-finite weight.

    It ends early where the case has no time left.
    """
    built = own.build(target.device, seed)
    work, scaler = built.workload(), built.scaler(dtype)
    losses, scales = [], [scaler.get_scale()]
    for number in range(steps):
        if not case.allowance:
            break
        # Both arms use the same dropout.
        seed_all(SEED_OF_DROPOUT + number)
        losses.append(train_step(work, number, lambda: built.region(dtype), scaler))
        scales.append(scaler.get_scale())
        name = "fp32" if dtype is None else DTYPE_NAMES[dtype]
        case.progress(f"{what}in {name}, seed {seed - case.seed}, step {number + 1} of {steps}")
    bad = (name for name, weight in work.model.named_parameters() if not bool(weight.isfinite().all()))
    return [loss.item() for loss in losses], scales, next(bad, "")


@contract("AMP-PARITY-050")
@trains(fewest=160, quick=960, standard=3200, full=19200)
def test_training_ends_at_the_same_loss(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    if words := own.raises(target.device, amp_dtype):
        case.untestable(words)
    if own.repeats(target.device, case.seed, case.seed + 1):
        case.inconclusive(
            "two seeds give the same weights and the same batches, so that the spread of runs is unknown: the function "
            "seeds itself, or draws nothing; leave seeding to the suite, and draw weights or batches from torch's "
            "global generator"
        )
    full, low = (own.paces[target.device, dtype] for dtype in (None, amp_dtype))
    plans = _plans(case)
    plan = next((plan for plan in plans if plan.seconds(full, low) < case.allowance), None)
    if plan is None:
        case.out_of_time(f"the smallest test, {LEAST.last} pairs of {LEAST.steps} steps,", LEAST.seconds(full, low))
        return
    steps, first, last = plan.steps, plan.first, plan.last
    began, runs, cut = case.now(), max(2 * first, last) + last, plan != plans[0]
    done: Counter[torch.dtype | None] = Counter()

    @functools.cache
    def learned(seed: int, dtype: torch.dtype | None) -> float:
        """Return how far the loss falls from the first step to the last quarter of them."""
        what = f"run {sum(done.values()) + 1} of at most {runs}, "
        losses, _, _ = _train(case, target, own, case.seed + seed, dtype, steps, what)
        if len(losses) < steps:
            taken = (case.now() - began) / max(1, sum(done.values()) + len(losses) / steps)
            case.out_of_time(f"after {sum(done.values())} of {runs} runs no time is left: all", taken * runs)
        done[dtype] += 1
        return losses[0] - statistics.fmean(losses[-(steps // 4) :])

    # Twice as many fp32 runs as pairs at the first look: the margin is made before any difference is seen.
    fp32 = [learned(seed, None) for seed in range(2 * first)]
    case.note(f"fall of the loss within {steps} steps, fp32, by seed", fp32)
    if cut:
        case.note("the time limit leaves fewer steps or runs than the level has, steps and most pairs", [steps, last])
    if not all(map(math.isfinite, fp32)):
        case.inconclusive("a fp32 run of the model does not stay finite, so there is nothing to compare AMP with")
    if len(set(fp32)) == 1:
        case.inconclusive("fp32 runs from all seeds are alike: initialize the weights from torch's global generator")
    margin = equivalence_test.margin_of(fp32, first)
    if statistics.fmean(fp32) < 2 * margin:
        case.inconclusive(
            f"in fp32 the loss falls by {statistics.fmean(fp32):.3g} in {steps} steps, and the spread of seeds allows "
            f"a difference of {margin:.3g}: AMP could learn nothing undetected; a higher learning rate or a "
            f"deeper --level would decide{_more(case, plans[0], full, low) if cut else ''}"
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
            f"{margin:.3g}: about {seen.needed} pairs would decide{_more(case, plans[0], full, low) if cut else ''}"
        )
    infinite = [seed for seed in range(seen.pairs) if not math.isfinite(learned(seed, amp_dtype))]
    case.equal("seeds whose AMP run does not stay finite", infinite, [])
    if seen.outcome == "different":
        case.at_most("difference of the falls, its nearest end", seen.nearest, margin)
    case.at_most("difference of the falls, its farthest end", seen.farthest, margin)


def _more(case: Case, plan: Plan, full: Pace, low: Pace) -> str:
    """Say what the plan of the level would take, where a smaller one was followed."""
    assert case.allotment is not None
    return f" (of {plan.last} pairs of {plan.steps} steps: {case.allotment.needs(plan.seconds(full, low))})"


@contract("AMP-PARITY-051")
@trains(fewest=40, quick=40, standard=200, full=800)
def test_training_stays_finite(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    if words := own.raises(target.device, amp_dtype):
        case.untestable(words)
    full, low = (own.paces[target.device, dtype] for dtype in (None, amp_dtype))
    most, least = case.samples(quick=20, standard=100, full=400), 20
    fitting = (number for number in range(most, least - 1, -1) if full.run(number) + low.run(number) < case.allowance)
    if (steps := next(fitting, 0)) == 0:
        case.out_of_time(f"training for {least} steps in both precisions", full.run(least) + low.run(least))
    plain, _, _ = _train(case, target, own, case.seed, None, steps, "training ")
    if not all(map(math.isfinite, plain)):
        case.inconclusive(f"in fp32 the loss is not finite either, from step {_infinite(plain)[0]} on")
    losses, scales, weight = _train(case, target, own, case.seed, amp_dtype, len(plain), "training ")
    if len(losses) < least and not _infinite(losses) and not weight:
        case.out_of_time(f"training for {least} steps in both precisions", full.run(least) + low.run(least))
    steps = len(losses)
    case.note("steps", steps)
    if amp_dtype == torch.float16:
        case.history("loss scale", scales)
    infinite = _infinite(losses)
    skipped = [number for number, (old, new) in enumerate(pairwise(scales)) if new < old]
    settled = next((number for number in range(steps) if number not in skipped), steps)
    later = [number for number in skipped if number > settled]
    settling = _settling(own.build(target.device, case.seed))
    cause = ""
    if infinite or weight or settled > settling or len(later) > RARE * steps:
        # What overflows while the scale settles is no cause of a loss that is not finite later.
        cause = f"; first of all {_first_cause(case, target, own, amp_dtype, infinite[0] if infinite else 0)}"
    case.equal(f"steps whose loss is not finite{cause}", infinite[:5], [])
    case.equal(f"the first weight that is not finite at the end{cause}", weight, "")
    case.at_most(f"steps skipped while the scale settled{cause}", settled, settling)
    case.at_most(f"share of the later steps that were skipped{cause}", len(later) / steps, RARE)


def _settling(built: Own) -> int:
    """Return how many steps may be skipped until the scale has fallen from its first value to 1."""
    scale, backoff = built.settings.get("init_scale", INITIAL_SCALE), built.settings.get("backoff_factor", 0.5)
    return max(1, math.ceil(math.log(scale) / -math.log(backoff) - 1e-9))


def _infinite(losses: list[float]) -> list[int]:
    return [number for number, loss in enumerate(losses) if not math.isfinite(loss)]


def _first_cause(case: Case, target: Target, own: Builder, dtype: torch.dtype, since: int) -> str:
    """Train the model again under trace; name the first op with a non-finite result from iteration `since` on."""
    built = own.build(target.device, case.seed)
    steps = max(WATCHED if case.allowance else 1, since + 1)
    account = nonfinite.trace(
        built.model,
        built.optimizers[0],
        built.loss,
        built.batches,
        dtype=dtype,
        steps=steps,
        scale=built.settings.get("init_scale", INITIAL_SCALE) if dtype == torch.float16 else None,
        **built.loop(),
    )
    found = next((cause for cause in account.causes if cause.iteration >= since), account.first)
    return str(found) if found is not None else f"nothing is seen within {steps} steps"


@contract("AMP-PARITY-052")
@trains(fewest=3, quick=3, standard=3, full=3)
def test_first_gradients(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    if words := own.raises(target.device, amp_dtype):
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
    for halvings in range(HALVINGS + 1):
        built = own.build(target.device, seed)
        work = built.workload()
        scale = INITIAL_SCALE / 2**halvings if dtype == torch.float16 else 1.0
        seed_all(SEED_OF_DROPOUT)
        inputs, expected = work.batch(0)
        with built.region(dtype):
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
