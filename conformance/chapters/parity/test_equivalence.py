"""Check by an equivalence test over many seeds that AMP training on real data reaches fp32's results."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.onednn import lacks_primitive
from ...measure.precision import full_precision
from . import equivalence_test, models, text_data
from .equivalence_test import Equivalence
from .models import TASKS, Run
from .stacked_models import cross_entropies

pytestmark = pytest.mark.usefixtures("one_thread")

# Pairs of the first look and of the second, which is taken only where the first decides nothing; fp32 seeds that the
# margin and the envelope are made of: twice the pairs, as MLPerf's reference convergence points are.
FIRST, LAST = 8, 16
SEEDS = 16
ALPHA = 0.05  # of both looks together
OUTSIDE = 0.001  # probability that a sound run leaves the envelope
SMALL = 2.0**-20

# Minimum for every arm on held-out rows. A guess classifies 10 % of the digits; a model that knows
# only character frequencies needs the entropy of the text.
ACCURACY = {"mlp": 97.0, "cnn": 97.0, "lstm": 95.0}
ENTROPY_SHARE = 0.8

MODELS = [deep("standard", "mlp"), deep("full", "cnn"), deep("full", "lstm"), deep("full", "transformer")]
# Tasks whose fp32 runs are judged as well, one by one (AMP-PARITY-011).
JUDGED = ("mlp", "cnn", "lstm", "transformer")

FIGURES: dict[str, Callable[[Run], float]] = {
    "log of the training loss of the last epoch": lambda run: run.curve[-1],
    "log of the test loss": lambda run: math.log(run.test_loss) if run.test_loss > 0 else math.nan,
    "test accuracy, %": lambda run: run.accuracy,
}
# An image of 355 is the resolution of the accuracy, and what may come of one rounding.
FLOORS = {"test accuracy, %": 100 / 355}


def _bf16_losses(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return cross entropies with each of their ops in bf16, of which a region of CUDA would run logsumexp in fp32."""
    with torch.autocast(output.device.type, enabled=False):
        logits = output.bfloat16()
        return (logits.logsumexp(2) - logits.gather(2, target.unsqueeze(2)).squeeze(2)).mean(1)


def _narrow(dtype: torch.dtype) -> Callable[[torch.nn.Module], None]:
    def after_step(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))

    return after_step


def _region(target: Target, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else target.autocast(dtype)


def _scaler(target: Target, dtype: torch.dtype | None, *, scales: bool = True) -> torch.amp.GradScaler | None:
    """Return the scaler of the steps; None for fp32."""
    if dtype is None:
        return None
    return torch.amp.GradScaler(target.device_type, enabled=scales and dtype == torch.float16)


@functools.cache
def _run(target: Target, task: str, dtype: torch.dtype | None, factor: float, seed: int) -> Run:
    """Return one run, of fp32 where there is no dtype; cached, as several checks ask for the same runs."""
    # fp32 products are IEEE's and sums of 16-bit ones are fp32: the flags that change that are another matter.
    with full_precision(target.device_type):
        return models.learn(
            TASKS[task],
            target.device,
            seed,
            lambda: _region(target, dtype),
            _scaler(target, dtype),
            loss=torch.nn.functional.cross_entropy,  # as it is now, not when models was imported
            factor=factor,
        )


@functools.cache
def _together(target: Target, task: str, dtype: torch.dtype | None, fault: str, factor: float, first: int) -> list[Run]:
    """Run FIRST trainings without a promise in one stacked model: fp32 references, or broken AMP."""
    with full_precision(target.device_type):
        return models.learn_together(
            TASKS[task],
            target.device,
            range(first, first + FIRST),
            lambda: _region(target, dtype),
            _scaler(target, dtype, scales=fault != "no scaler"),
            losses=_bf16_losses if fault == "bf16 loss" else cross_entropies,
            factor=factor,
            after_step=_narrow(dtype) if dtype is not None and fault == "16-bit weights" else lambda model: None,
        )


def _runs(
    case: Case, target: Target, task: str, dtype: torch.dtype | None, count: int, fault: str = "", factor: float = 1.0
) -> list[Run]:
    """Return the runs of the first `count` seeds, the same seeds for every arm."""
    first = 1_000 * case.seed
    try:
        if fault or (dtype is None and task not in JUDGED):
            stacks = (
                _together(target, task, dtype, fault, factor, start) for start in range(first, first + count, FIRST)
            )
            return list(itertools.chain.from_iterable(stacks))
        return [_run(target, task, dtype, factor, first + number) for number in range(count)]
    except text_data.NoText as error:
        case.untestable(str(error))
        raise
    except RuntimeError as error:
        if not lacks_primitive(error):
            raise
        case.unsupported(str(error))
        raise


def _fp32(case: Case, target: Target, task: str) -> list[Run]:
    """Return the fp32 runs, which must be finite if they are to be compared with."""
    runs = _runs(case, target, task, None, SEEDS)
    worst = max(abs(figure(run)) for run in runs for figure in FIGURES.values())
    case.true("fp32 training stays finite on this device (if not, it is not AMP that fails)", math.isfinite(worst))
    return runs


def _compared(
    case: Case, target: Target, task: str, dtype: torch.dtype, name: str, fault: str = "", factor: float = 1.0
) -> Equivalence:
    """Return AMP minus fp32, in one figure, pair by pair; the margin is in the report too."""
    figure, fp32 = FIGURES[name], _fp32(case, target, task)
    margin = equivalence_test.margin_of(list(map(figure, fp32)), FIRST, floor=FLOORS.get(name, 1e-6))

    def differences(count: int) -> list[float]:
        runs = _runs(case, target, task, dtype, count, fault, factor)
        return [figure(run) - figure(other) for run, other in zip(runs, fp32, strict=False)]

    found = equivalence_test.two_stages(differences, margin, first=FIRST, last=LAST, alpha=ALPHA)
    case.note(f"{name}: standard deviation over {SEEDS} fp32 seeds", statistics.stdev(map(figure, fp32)))
    case.note(f"{name}: AMP minus fp32, pair by pair", [round(d, 6) for d in differences(found.pairs)])
    case.note(
        f"{name}: mean difference, its standard deviation, power, pairs that would suffice",
        [found.mean, found.spread, found.power, found.needed],
    )
    return found


def _settle(case: Case, name: str, found: Equivalence) -> None:
    """Judge: PASS if the arms are equivalent, FAIL if they differ, INCONCLUSIVE if the pairs decide neither."""
    if found.outcome == "undecided":
        case.inconclusive(
            f"{name}: {found.pairs} pairs are undecided (interval {found.low:.3g} to {found.high:.3g}, margin "
            f"{found.margin:.3g}, power {found.power:.2f}); about {found.needed} would suffice for equal arms"
        )
    case.at_most(f"{name}: farthest end of the interval of AMP minus fp32", found.farthest, found.margin)


def _names(task: str) -> list[str]:
    # The accuracy of a character model is mostly luck: only its loss is judged.
    return [name for name in FIGURES if name not in FLOORS or task in ACCURACY]


@contract("AMP-PARITY-010")
@pytest.mark.parametrize("model", MODELS)
def test_amp_ends_where_fp32_ends(case: Case, target: Target, amp_dtype: torch.dtype, model: str) -> None:
    for name in _names(model):
        _settle(case, name, _compared(case, target, model, amp_dtype, name))
    # Two-sided: an arm with fp32's very losses did not compute in 16 bit.
    pairs = zip(_runs(case, target, model, amp_dtype, FIRST), _fp32(case, target, model), strict=False)
    same = sum(run.curve == other.curve for run, other in pairs)
    case.equal(f"AMP runs of {FIRST} with exactly the losses of fp32", same, 0)


@contract("AMP-PARITY-011")
@pytest.mark.parametrize("model", MODELS)
def test_both_arms_learn(case: Case, target: Target, amp_dtype: torch.dtype, model: str) -> None:
    arms = {
        "fp32 (if this fails, the device cannot train, with or without AMP)": _fp32(case, target, model)[:FIRST],
        "AMP": _runs(case, target, model, amp_dtype, FIRST),
    }
    for name, runs in arms.items():
        if model in ACCURACY:
            case.note(f"test accuracy by seed, {name}", [round(run.accuracy, 2) for run in runs], "%")
            mean = statistics.fmean(run.accuracy for run in runs)
            case.at_least(f"mean test accuracy over {FIRST} seeds, {name}", mean, ACCURACY[model], "%")
        else:
            text = text_data.corpus()
            case.note("SHA-256 of the text", text.digest)
            case.note("entropy of single characters of the test text", text.entropy, "bits")
            mean = statistics.fmean(run.test_loss for run in runs) / math.log(2)
            bound = ENTROPY_SHARE * text.entropy
            case.at_most(f"mean bits per character over {FIRST} seeds, {name}", mean, bound, "bits")


@contract("AMP-PARITY-012")
@pytest.mark.parametrize("model", MODELS)
def test_loss_curves_stay_in_the_envelope(case: Case, target: Target, amp_dtype: torch.dtype, model: str) -> None:
    fp32 = [run.curve for run in _fp32(case, target, model)]
    amp = [run.curve for run in _runs(case, target, model, amp_dtype, FIRST)]
    for name, curves in (("fp32", fp32), ("AMP", amp)):
        for number, curve in enumerate(curves):
            case.note(f"log of the training loss by epoch, {name}, seed {number}", [round(loss, 4) for loss in curve])
    each = equivalence_test.envelope(fp32, runs=FIRST, of=1, alpha=OUTSIDE / 2)
    case.at_most("farthest point of an AMP curve", max(map(each.excess, amp)), 1.0, "half widths of the envelope")
    middle = equivalence_test.envelope(fp32, runs=1, of=FIRST, alpha=OUTSIDE / 2)
    mean = [statistics.fmean(epoch) for epoch in zip(*amp, strict=True)]
    case.at_most("farthest point of the mean AMP curve", middle.excess(mean), 1.0, "half widths of its envelope")


# A model that a fault shows on; the loss is multiplied by a power of two, which fp32 does not notice.
CONTROLS = {
    "bf16 loss": ("mlp-shifted", 1.0),
    "16-bit weights": ("mlp-far", 1.0),
    "no scaler": ("mlp-far", SMALL),
}
LOSSES = [name for name in FIGURES if name not in FLOORS]


def _control(dtype: torch.dtype, fault: str) -> tuple[str, float]:
    model, factor = CONTROLS[fault]
    return (f"mlp-far-{models.FAR[dtype]:g}" if model == "mlp-far" else model), factor


def _check_control(case: Case, target: Target, dtype: torch.dtype, fault: str, *, broken: bool) -> None:
    task, factor = _control(dtype, fault)
    for name in LOSSES if not broken else LOSSES[:1]:
        found = _compared(case, target, task, dtype, name, fault if broken else "", factor)
        if broken and found.outcome == "undecided":
            case.inconclusive(f"{name}: {found.pairs} pairs do not detect the faulty run; about {found.needed} would")
        if broken:
            case.at_least(f"{name}: nearest end of the interval (control)", found.nearest, found.margin)
            case.note(f"{name}: nearest end of the interval", found.nearest / found.margin, "margins")
        else:
            _settle(case, name, found)


@contract("AMP-PARITY-013")
@pytest.mark.parametrize("broken", [deep("standard", False, id="sound"), deep("standard", True, id="16-bit-weights")])
def test_small_steps_need_master_weights(case: Case, target: Target, amp_dtype: torch.dtype, broken: bool) -> None:
    _check_control(case, target, amp_dtype, "16-bit weights", broken=broken)


@contract("AMP-PARITY-014", dtypes=("fp16",))
@pytest.mark.parametrize("broken", [deep("standard", False, id="sound"), deep("standard", True, id="no-scaler")])
def test_small_gradients_need_the_scaler(case: Case, target: Target, broken: bool) -> None:
    case.require(target, torch.float16)
    _check_control(case, target, torch.float16, "no scaler", broken=broken)


@contract("AMP-PARITY-015")
@pytest.mark.parametrize("broken", [deep("standard", False, id="sound"), deep("standard", True, id="bf16-loss")])
def test_large_logits_need_a_loss_in_fp32(case: Case, target: Target, amp_dtype: torch.dtype, broken: bool) -> None:
    _check_control(case, target, amp_dtype, "bf16 loss", broken=broken)
