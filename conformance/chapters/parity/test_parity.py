"""Check that training with AMP does what fp32 training does, step by step and at the end."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.determinism import deterministic_algorithms
from ...measure.precision import full_precision
from ...oracles.float64_step import Exact, ExactAdam, exact_step
from ...workloads import mlp as p2
from ...workloads.linear import linear
from ...workloads.mlp import mlp
from ...workloads.training import Region, Workload, train, train_step

pytestmark = pytest.mark.usefixtures("one_thread")

INITIAL_SCALE = 65536.0
# As long as the losses are not small, the spreads of independent roundings are those of gradients. Later the gradient
# is small against what a rounded weight changes of it in all rows alike (P2), and a limit on a norm that has the error
# in it shortens the gradient by half the square of its relative error (P1): 0.05 u at step 20, 0.6 u at step 50.
FIRST_ORDER = {"P1": 20, "P2": 40}
LR = p2.LEARNING_RATE
ADAMW_DECAY = 0.01  # torch.optim.AdamW, default of weight_decay
CHANCE = math.log(p2.CLASSES)


def _fp32_cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.float(), target)


def _p2(device: torch.device, generator: torch.Generator, *, lr: float = LR) -> Workload:
    """Return P2 with an explicit fp32 loss: off the CPU part of cross_entropy runs in 16 bits (AMP-LOSS-017)."""
    return replace(mlp(device, generator, lr=lr), loss=_fp32_cross_entropy)


PROGRAMS: dict[str, Callable[..., Workload]] = {"P1": linear, "P2": _p2}


@dataclass(frozen=True)
class Observed:
    """One training step: its loss, the parameters before and after, the gradients that the optimizer used."""

    number: int
    loss: float
    before: list[torch.Tensor]
    gradients: list[torch.Tensor]
    after: list[torch.Tensor]
    masks: list[torch.Tensor]


def _fork(rng: torch.Generator) -> torch.Generator:
    """Return a copy of `rng` in its current state, so that two runs start from the same weights and data."""
    twin = torch.Generator()
    twin.set_state(rng.get_state())
    return twin


def _scaler(target: Target, dtype: torch.dtype | None) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(target.device_type, enabled=dtype == torch.float16)


def _region(target: Target, dtype: torch.dtype | None) -> Region:
    def region() -> AbstractContextManager[object]:
        return nullcontext() if dtype is None else target.autocast(dtype)

    return region


def _observe(
    target: Target, work: Workload, dtype: torch.dtype, steps: int, after_step: Callable[[], None] = lambda: None
) -> Iterator[Observed]:
    """Train with AMP and yield each step; `after_step` may change the weights."""
    scaler, masks = _scaler(target, dtype), []
    parameters = list(work.model.parameters())
    with ExitStack() as stack:
        for layer in work.model:
            if isinstance(layer, torch.nn.ReLU):
                hook = layer.register_forward_hook(lambda module, inputs, output: masks.append(output.detach() > 0))
                stack.callback(hook.remove)
        # Sums of 16-bit products in fp32 throughout, as the bounds presume; CUDA may split sums in 16 bit by default.
        stack.enter_context(full_precision(target.device_type))
        for number in range(steps):
            masks.clear()
            before = [parameter.detach().clone() for parameter in parameters]
            loss = train_step(work, number, _region(target, dtype), scaler).item()
            gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
            after_step()
            after = [parameter.detach().clone() for parameter in parameters]
            yield Observed(number, loss, before, gradients, after, list(masks))


def _exact(work: Workload, seen: Observed, dtype: torch.dtype, *, backward: bool = True) -> Exact:
    layers = list(zip(seen.before[::2], seen.before[1::2], strict=True))
    scale = INITIAL_SCALE if dtype == torch.float16 else 1.0
    return exact_step(layers, *work.batch(seen.number), dtype, scale=scale, masks=seen.masks, backward=backward)


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _steps(case: Case, program: str) -> int:
    if program == "P1":
        return case.samples(quick=1, standard=3, full=50)
    return case.samples(quick=4, standard=12, full=100)


def _judge(case: Case, broken: bool, what: str, measured: float, bound: float, unit: str = "") -> None:
    """Check that a correct run is within the bound, or that the control, a broken run, is outside."""
    if broken:
        case.at_least(f"{what}, of the broken run (control)", measured, bound, unit)
    else:
        case.at_most(what, measured, bound, unit)


@contract("AMP-PARITY-002")
@pytest.mark.parametrize(
    ("program", "fault"),
    [("P1", ""), ("P2", ""), ("P2", "stale weights"), deep("standard", "P2", "next batch", id="P2-next-batch")],
    ids=["P1", "P2", "P2-stale-weights", None],
)
def test_losses_are_exact_up_to_rounding(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, program: str, fault: str
) -> None:
    work = PROGRAMS[program](target.device, rng)
    trained = replace(work, batches=work.batches[1:] + work.batches[:1]) if fault == "next batch" else work
    # One region around the whole loop never drops its weight copies: the network computes with stale weights.
    around = target.autocast(amp_dtype) if fault == "stale weights" else nullcontext()
    worst = 0.0
    with around:
        for seen in _observe(target, trained, amp_dtype, _steps(case, program)):
            exact = _exact(work, seen, amp_dtype, backward=False)
            case.note(
                f"loss of step {seen.number}: measured, exact, deviation", [seen.loss, exact.loss, exact.loss_spread]
            )
            worst = max(worst, _or_inf(abs(seen.loss - exact.loss) / exact.loss_spread))
    # The deviation assumes that all rows have the same error; independent rows have an eighth of it.
    _judge(case, bool(fault), "worst error of a loss", worst, 1.0, "deviations")


def _or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value


@contract("AMP-PARITY-003")
@pytest.mark.parametrize(
    ("program", "factor", "clip"),
    [("P1", 1.0, 0.02), ("P2", 1.0, None), ("P2", 1.002, None), deep("standard", "P1", 1.0, None, id="P1")],
    ids=["P1-tight-clip", "P2", "P2-gradients-0.2-percent-off", None],
)
def test_gradients_are_exact_up_to_rounding(
    case: Case,
    target: Target,
    amp_dtype: torch.dtype,
    rng: torch.Generator,
    program: str,
    factor: float,
    clip: float | None,
) -> None:
    work = PROGRAMS[program](target.device, rng)
    # P1's gradients have a norm of about 0.2, so that its own limit of 1 never acts.
    work = work if clip is None else replace(work, clip=clip)
    trained = replace(work, loss=lambda output, expected: work.loss(output, expected) * factor)
    unit = _unit(amp_dtype)
    weights, biases, slopes = [], [], []
    for seen in _observe(target, trained, amp_dtype, min(_steps(case, program), FIRST_ORDER[program])):
        exact = _exact(work, seen, amp_dtype)
        clipped = _clip_factor(exact, work.clip)
        for gradient, true, spread in zip(seen.gradients, exact.gradients, exact.spreads, strict=True):
            error = gradient.cpu().double() - clipped * true
            size = _or_inf((error.norm() / (clipped * spread).norm()).item())
            if gradient.dim() == 2:
                weights.append(size)
                slopes.append(((error * true).sum() / (clipped * true.square().sum())).item() / unit)
            else:
                biases.append(size)
    if factor == 1.0:
        # The error's norm against its expectation if every rounding had the largest variance that it can have (that
        # of sound runs is 0.58 to 0.74 of it); far below it, the step was not computed in 16 bits.
        case.at_least("smallest error of a weight's gradient", min(weights), 0.3, "deviations")
        case.at_most("largest error of a weight's gradient", max(weights), 1.25, "deviations")
        # With as few as ten elements the norm varies about its expectation.
        case.at_most("largest error of a bias's gradient", max(biases), 3.0, "deviations")
        # Roundings to nearest are unbiased: thousands of them along the gradient nearly cancel.
        case.at_most("largest error along a weight's gradient", max(map(abs, slopes)), 0.5, "u")
    mean = _or_inf(abs(statistics.fmean(slopes)))
    _judge(case, factor != 1.0, "mean error along the weights' gradients", mean, 0.18, "u")


def _clip_factor(exact: Exact, clip: float | None) -> float:
    """torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1."""
    if clip is None:
        return 1.0
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in exact.gradients))
    return min(1.0, clip / (norm + 1e-6))


@contract("AMP-PARITY-004")
@pytest.mark.parametrize(
    ("program", "fault"),
    [("P1", ""), ("P2", ""), ("P2", "lr 0.1 % off"), ("P2", "16-bit weights")],
    ids=["P1", "P2", "P2-lr-0.1-percent-off", "P2-16-bit-weights"],
)
def test_updates_are_adams(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, program: str, fault: str
) -> None:
    work = PROGRAMS[program](target.device, rng, lr=LR * 1.001 if fault.startswith("lr") else LR)
    parameters = list(work.model.parameters())

    def narrow() -> None:
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(parameter.to(amp_dtype))

    decay = ADAMW_DECAY if program == "P1" else 0.0
    adams = [ExactAdam(LR, decay) for _ in parameters]
    worst = 0.0
    change = narrow if fault == "16-bit weights" else lambda: None
    for seen in _observe(target, work, amp_dtype, _steps(case, program), change):
        for adam, before, gradient, after in zip(adams, seen.before, seen.gradients, seen.after, strict=True):
            expected, reach = adam.update(before, gradient)
            worst = max(worst, _or_inf(((after.cpu().double() - expected).abs() / reach).max().item()))
    _judge(case, bool(fault), "worst error of an updated weight", worst, 1.0, "of what fp32 arithmetic allows")


# Per cent of the learning rate. Small differences of any origin grow to one size within P2's first epoch: fp32
# runs whose initial weights were changed by 2^-8 or 2^-11 vary by 0.08 (one standard deviation) as those of AMP do.
PACES = {"P1": 0.2, "P2": 1.0}


@contract("AMP-PARITY-005")
@pytest.mark.parametrize(
    ("program", "allowed"), [("P1", PACES["P1"]), deep("standard", "P2", PACES["P2"], id="P2")], ids=["P1", None]
)
def test_amp_keeps_the_pace(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, program: str, allowed: float
) -> None:
    first, last = {"P1": (1, 4), "P2": (20, 60)}[program]
    make = PROGRAMS[program]
    losses = {
        name: train(make(target.device, _fork(rng), lr=rate), last, _region(target, dtype), _scaler(target, dtype))
        for name, dtype, rate in (("fp32", None, LR), ("AMP", amp_dtype, LR), ("faster", None, 1.02 * LR))
    }
    for name in ("fp32", "AMP"):
        case.note(f"losses, {name}", _compact(losses[name]))
    if target.device_type == "cuda":
        case.note("TF32 in fp32 products", torch.backends.cuda.matmul.allow_tf32)
    reference = _shift(losses["faster"], losses["fp32"], first, last)
    case.at_most("shift of the log loss by a learning rate 2 % higher (control)", reference, -1e-3)
    pace = 2.0 * _shift(losses["AMP"], losses["fp32"], first, last) / reference
    case.between("pace of AMP against fp32, as a change of the learning rate", pace, -allowed, allowed, "%")


def _shift(losses: list[float], others: list[float], first: int, last: int) -> float:
    """Return the mean of log(loss / other loss) over the steps from `first` to before `last`."""
    pairs = zip(losses[first:last], others[first:last], strict=True)
    return statistics.fmean(math.log(loss / other) for loss, other in pairs)


def _compact(losses: list[float]) -> list[float]:
    """Return at most 40 of the losses, evenly spaced, the last one among them, to five figures."""
    stride = -(-len(losses) // 40)
    return [float(f"{loss:.5g}") for loss in losses[::-1][::stride][::-1]]


@contract("AMP-PARITY-006")
def test_final_loss_is_within_the_seed_spread(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    epochs = case.samples(quick=3, standard=p2.EPOCHS, full=p2.EPOCHS)
    steps = epochs * p2.BATCHES
    fp32 = _fp32_losses(target, steps, case.samples(quick=3, standard=5, full=20), case.seed)
    # From the weights and on the data of the first of them.
    work = mlp(target.device, torch.Generator().manual_seed(case.seed))
    histories = {"fp32": fp32[0], "AMP": train(work, steps, _region(target, amp_dtype), _scaler(target, amp_dtype))}
    for name, losses in histories.items():
        case.note(f"losses, {name}", _compact(losses))
    finals = {name: _last_epoch(losses) for name, losses in histories.items()}
    # A model that learned nothing has the loss ln 10; the program runs 20 epochs, `quick` the first three.
    learned = {3: 0.75, p2.EPOCHS: 0.05}[epochs] * CHANCE
    for name, final in finals.items():
        case.at_most(f"mean loss of the last epoch, {name}", final, learned)
    spread = statistics.stdev(math.log(_last_epoch(losses)) for losses in fp32)
    case.note("standard deviation of the log of that loss over fp32 seeds", spread)
    difference = math.log(finals["AMP"] / finals["fp32"])
    case.between("log of the final loss, AMP against fp32", difference, -3 * spread, 3 * spread)


@functools.cache
def _fp32_losses(target: Target, steps: int, runs: int, seed: int) -> list[list[float]]:
    """Return the losses of fp32 runs, each with its own weights and data; the same for every 16-bit type."""
    rng = torch.Generator().manual_seed(seed)
    works = [mlp(target.device, rng) for _ in range(runs)]
    return [train(work, steps, _region(target, None), _scaler(target, None)) for work in works]


def _last_epoch(losses: list[float]) -> float:
    """Return the mean loss of the last epoch."""
    return statistics.fmean(losses[-p2.BATCHES :])


@contract("AMP-PARITY-007")
def test_printed_dtypes(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    work = mlp(target.device, rng)
    seen: dict[str, list[torch.dtype]] = {"Linear": [], "ReLU": []}
    for layer in work.model:
        dtypes = seen[type(layer).__name__]
        layer.register_forward_hook(lambda module, inputs, output, dtypes=dtypes: dtypes.append(output.dtype))
    loss = train_step(work, 0, _region(target, amp_dtype), _scaler(target, amp_dtype))
    case.equal("after each Linear", seen["Linear"], [amp_dtype] * 3)
    case.equal("after each ReLU", seen["ReLU"], [amp_dtype] * 2)
    case.equal("loss", loss.dtype, torch.float32)


@contract("AMP-PARITY-008", dtypes=("fp16",))
@pytest.mark.parametrize(("program", "steps"), [("P2", (10, 60, 400)), ("P1", (2, 6, 100))], ids=["P2", "P1"])
def test_no_step_is_skipped_once_calibrated(
    case: Case, target: Target, rng: torch.Generator, program: str, steps: tuple[int, int, int]
) -> None:
    case.require(target, torch.float16)
    work = PROGRAMS[program](target.device, rng)
    scaler = torch.amp.GradScaler(target.device_type)
    quick, standard, full = steps
    scales = [scaler.get_scale()]
    for number in range(case.samples(quick=quick, standard=standard, full=full)):
        train_step(work, number, _region(target, torch.float16), scaler)
        scales.append(scaler.get_scale())
    skipped = [number for number, (old, new) in enumerate(pairwise(scales)) if new < old]
    settled = next((number for number in range(len(scales) - 1) if number not in skipped), len(scales))
    case.note("steps skipped while the scale settled", settled)
    case.equal("steps skipped after the first that was taken", [step for step in skipped if step > settled], [])
    case.at_most("steps skipped while the scale settled", settled, 16)
    case.equal("scale at the end", scales[-1], INITIAL_SCALE / 2**settled)


def _without_atomics() -> AbstractContextManager[None]:
    """Use deterministic algorithms on ROCm, where products may otherwise be summed with atomics."""
    return nullcontext() if torch.version.hip is None else deterministic_algorithms(True, warn_only=True)


@contract("AMP-PARITY-016")
def test_the_same_run_gives_the_same_bits(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    works = [_p2(target.device, _fork(rng)) for _ in range(2)]
    scalers = [_scaler(target, amp_dtype) for _ in works]
    # Alternately and without seeding: a random number that AMP consumes differs in the second run.
    for number in range(case.samples(quick=2, standard=6, full=50)):
        steps = zip(works, scalers, strict=True)
        with _without_atomics():
            losses = [train_step(work, number, _region(target, amp_dtype), scaler) for work, scaler in steps]
        case.identical(f"loss of step {number}", losses[1], losses[0])
        case.equal(f"loss scale after step {number}", scalers[1].get_scale(), scalers[0].get_scale())
        first, second = (dict(work.model.named_parameters()) for work in works)
        for name, weight in first.items():
            case.identical(f"{name} after step {number}", second[name].detach(), weight.detach())


@contract("AMP-PARITY-017")
@pytest.mark.parametrize("extra", [False, True], ids=["sound", "one-number-drawn"])
def test_dropout_is_that_of_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, extra: bool
) -> None:
    steps = case.samples(quick=2, standard=4, full=20)
    arms = {None: "fp32", amp_dtype: "AMP"}
    seen = {name: _dropped(target, _p2(target.device, _fork(rng)), dtype, steps, extra) for dtype, name in arms.items()}
    differences = [int((ours != theirs).sum()) for ours, theirs in zip(seen["AMP"], seen["fp32"], strict=True)]
    if extra:
        case.at_least("dropped elements and random numbers that differ (control)", sum(differences), 1)
    else:
        case.equal("dropped elements and random numbers that differ, by step", differences, [0] * len(differences))


def _dropped(target: Target, work: Workload, dtype: torch.dtype | None, steps: int, extra: bool) -> list[torch.Tensor]:
    """Return the inputs after dropout, step by step, and the next random numbers, on the device and on the CPU.

    It is the inputs that dropout acts on, which are fp32 in both arms: another type may be dropped otherwise.
    """
    seen: list[torch.Tensor] = []
    dropout = torch.nn.Dropout(0.5)
    dropout.register_forward_hook(lambda module, inputs, output: seen.append(output.cpu()))
    work = replace(work, model=torch.nn.Sequential(dropout, *work.model))
    scaler = _scaler(target, dtype)
    torch.manual_seed(1)
    for number in range(steps):
        if extra and dtype is not None:
            torch.rand((), device=target.device)  # consumed by the control and not by fp32
        train_step(work, number, _region(target, dtype), scaler)
        seen += [torch.rand(4, device=target.device).cpu(), torch.rand(4)]
    return seen
