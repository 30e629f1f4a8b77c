"""Check that the programs P1 to P4 train under AMP as with manual mixed precision, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.manual_training import HandScale, forward_by_hand, train_by_hand
from ...oracles.trace.ops import OpTrace
from ...workloads.training import Workload, train, train_step
from .small_programs import PROGRAMS, Spelling, new_spelling, old_spelling
from .support import same_weights

by_program = pytest.mark.parametrize("program", PROGRAMS)


def twins(program: str, target: Target, rng: torch.Generator) -> tuple[Workload, Workload]:
    """Return two workloads with the same initial weights and data."""
    first = PROGRAMS[program](target.device, rng)
    return first, copy.deepcopy(first)


def steps(case: Case, program: str) -> int:
    """Return the number of steps: at level full those of the program (P1 100, P2 20 epochs of 20, P3 3 epochs)."""
    long = {"P1": 100, "P2": 400, "P3": 3, "P4": 60}[program]
    short = {"P1": 2, "P2": 3, "P3": 3, "P4": 8}[program]
    return case.samples(quick=short, standard=2 * short if program == "P4" else short, full=long)


def loss_of_16_bit(work: Workload, target: Target, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return the loss for the manual loop, of outputs cast to float32.

    cross_entropy is such a loss on the CPU only (AMP-LOSS-017); elsewhere it runs in a region, so that these contracts
    check everything else.
    """
    if work.loss is not functional.cross_entropy or target.device_type == "cpu":
        return lambda outputs, labels: work.loss(outputs.float(), labels)

    def in_a_region(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with target.autocast(dtype):
            return work.loss(outputs, labels)

    return in_a_region


def manual_losses(work: Workload, target: Target, count: int, dtype: torch.dtype, scale: HandScale) -> list[float]:
    batches = [work.batch(step) for step in range(count)]
    loss = loss_of_16_bit(work, target, dtype)
    return train_by_hand(work.model, work.optimizer, loss, batches, dtype, scale, work.clip)


def manual_scale(dtype: torch.dtype) -> HandScale:
    """Return the scale of the manual loop: fp16 is scaled, bf16 is not, as in the AMP examples."""
    return HandScale() if dtype is torch.float16 else HandScale(scale=None)


def run(work: Workload, count: int, spelling: Spelling, dtype: torch.dtype) -> tuple[list[float], float]:
    """Train fp16 with a scaler, bf16 with a disabled one; return the losses and the last scale."""
    scaler = spelling.scaler(enabled=dtype is torch.float16)
    losses = train(work, count, lambda: spelling.region(dtype, True), scaler)
    return losses, scaler.get_scale()


@by_program
@contract("AMP-RECIPE-001")
def test_loss_falls(case: Case, program: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    work = PROGRAMS[program](target.device, rng)
    del work.batches[case.samples(quick=2, standard=2, full=len(work.batches)) :]
    before = {name: parameter.detach().clone() for name, parameter in work.model.named_parameters()}
    # Two more steps, which may overflow at the initial scale, and one.
    count = steps(case, program) + 3
    losses, scale = run(work, count + len(work.batches), new_spelling(target.device_type), amp_dtype)
    case.note("losses", [round(loss, 6) for loss in losses])
    case.note("last scale", scale)
    # The first batch is repeated after an epoch, so that equal data are compared.
    again = max(step for step in range(len(losses)) if step % len(work.batches) == 0)
    case.at_most("loss of the first batch at its last visit", losses[again], losses[0] * (1 - 2.0**-7))
    moved = sum(bool((parameter != before[name]).any()) for name, parameter in work.model.named_parameters())
    case.equal("parameters that moved", moved, len(before))


@by_program
@contract("AMP-RECIPE-002")
def test_equals_the_loop_by_hand(
    case: Case, program: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    ours, theirs = twins(program, target, rng)
    scale = manual_scale(amp_dtype)
    losses, last = run(ours, steps(case, program), new_spelling(target.device_type), amp_dtype)
    case.equal("losses", losses, manual_losses(theirs, target, steps(case, program), amp_dtype, scale))
    same_weights(case, "weights", ours.model, theirs.model)
    case.equal("last scale", last, 1.0 if scale.scale is None else scale.scale)


@by_program
@contract("AMP-RECIPE-003", on=("torch.cpu", "torch.cuda"))
def test_old_spelling(case: Case, program: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    ours, theirs = twins(program, target, rng)
    old = old_spelling(target.device_type)
    assert old is not None
    losses, scale = run(ours, steps(case, program), old, amp_dtype)
    expected, expected_scale = run(theirs, steps(case, program), new_spelling(target.device_type), amp_dtype)
    case.equal("losses", losses, expected)
    case.equal("last scale", scale, expected_scale)
    same_weights(case, "weights", ours.model, theirs.model)


@contract("AMP-RECIPE-004")
def test_decorator_equals_context_manager(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    ours, theirs = twins("P4", target, rng)

    @torch.autocast(target.device_type, dtype=amp_dtype)
    def loss_of(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ours.loss(ours.model(inputs), labels)

    scaler = torch.amp.GradScaler(target.device_type, enabled=amp_dtype is torch.float16)
    losses = []
    for step in range(steps(case, "P4")):
        ours.optimizer.zero_grad()
        loss = loss_of(*ours.batch(step))
        scaler.scale(loss).backward()
        scaler.step(ours.optimizer)
        scaler.update()
        losses.append(loss.item())
    expected, _ = run(theirs, steps(case, "P4"), new_spelling(target.device_type), amp_dtype)
    case.equal("losses", losses, expected)
    same_weights(case, "weights", ours.model, theirs.model)


@contract("AMP-RECIPE-007", dtypes=("fp16",))
def test_overflowing_start(case: Case, target: Target, rng: torch.Generator) -> None:
    case.require(target, torch.float16)
    ours, theirs = twins("P4", target, rng)
    count = case.samples(quick=40, standard=40, full=80)
    start, interval = 2.0**40, 5
    scaler = torch.amp.GradScaler(target.device_type, init_scale=start, growth_interval=interval)
    region = new_spelling(target.device_type).region
    losses, scales = [], []
    for step in range(count):
        losses.append(train_step(ours, step, lambda: region(torch.float16, True), scaler).item())
        scales.append(scaler.get_scale())
    manual = HandScale(scale=start, growth_interval=interval)
    expected, expected_scales = [], []
    loss = loss_of_16_bit(theirs, target, torch.float16)
    for step in range(count):
        batch = [theirs.batch(step)]
        expected += train_by_hand(theirs.model, theirs.optimizer, loss, batch, torch.float16, manual)
        expected_scales.append(manual.scale)
    case.equal("losses", losses, expected)
    case.equal("scale after each step", scales, expected_scales)
    case.history("loss scale", [start, *scales])
    same_weights(case, "weights", ours.model, theirs.model)
    case.at_least("skipped steps", sum(manual.skipped), 3)
    case.at_least("steps taken", count - sum(manual.skipped), 3)
    case.at_least("growths", sum(later > earlier for earlier, later in itertools.pairwise(scales)), 1)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@contract("AMP-RECIPE-011")
def test_checkpointed_training(
    case: Case, reentrant: bool, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    ours, theirs = twins("P4", target, rng)

    class Checkpointed(torch.nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            # A reentrant checkpoint needs an input that requires grad to reach the weights.
            inputs = inputs.detach().requires_grad_()
            result: torch.Tensor = checkpoint(super().forward, inputs, use_reentrant=reentrant)
            return result

    wrapped = Workload(Checkpointed(*ours.model), ours.optimizer, ours.loss, ours.batches, ours.clip)
    losses, scale = run(wrapped, steps(case, "P4"), new_spelling(target.device_type), amp_dtype)
    expected, expected_scale = run(theirs, steps(case, "P4"), new_spelling(target.device_type), amp_dtype)
    case.equal("losses", losses, expected)
    case.equal("last scale", scale, expected_scale)
    same_weights(case, "weights", ours.model, theirs.model)


@contract("AMP-RECIPE-039", dtypes=("fp16",))
def test_save_and_resume(case: Case, target: Target, rng: torch.Generator) -> None:
    ours, theirs = twins("P4", target, rng)
    region = new_spelling(target.device_type).region
    half = case.samples(quick=7, standard=7, full=30)

    def scaler(start: float) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(target.device_type, init_scale=start, growth_interval=5)

    def losses(work: Workload, numbers: range, scale: torch.amp.GradScaler) -> list[float]:
        return [train_step(work, n, lambda: region(torch.float16, True), scale).item() for n in numbers]

    uninterrupted = scaler(2.0**8)
    expected = losses(theirs, range(2 * half), uninterrupted)
    first = scaler(2.0**8)
    seen = losses(ours, range(half), first)
    stored = io.BytesIO()
    parts = {"model": ours.model, "optimizer": ours.optimizer, "scaler": first}
    torch.save({name: part.state_dict() for name, part in parts.items()}, stored)
    stored.seek(0)
    state = torch.load(stored, weights_only=True)
    resumed = PROGRAMS["P4"](target.device, rng)
    resumed = Workload(resumed.model, resumed.optimizer, ours.loss, ours.batches, ours.clip)
    second = scaler(2.0**12)
    resumed.model.load_state_dict(state["model"])
    resumed.optimizer.load_state_dict(state["optimizer"])
    second.load_state_dict(state["scaler"])
    seen += losses(resumed, range(half, 2 * half), second)
    case.equal("losses", seen, expected)
    case.equal("last scale", second.get_scale(), uninterrupted.get_scale())
    case.equal("state of the scaler", second.state_dict(), uninterrupted.state_dict())
    same_weights(case, "weights", resumed.model, theirs.model)
    case.true(
        "control: without its state the scaler would differ",
        uninterrupted.get_scale() != 2.0**12,
        uninterrupted.get_scale(),
    )


@contract("AMP-RECIPE-013")
def test_autocast_alone(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    ours, theirs = twins("P4", target, rng)
    losses = []
    for step in range(steps(case, "P4")):
        inputs, labels = ours.batch(step)
        ours.optimizer.zero_grad()
        with torch.autocast(target.device_type, dtype=amp_dtype):
            loss = ours.loss(ours.model(inputs), labels)
        loss.backward()
        ours.optimizer.step()
        losses.append(loss.item())
    case.equal("losses", losses, manual_losses(theirs, target, steps(case, "P4"), amp_dtype, HandScale(scale=None)))
    same_weights(case, "weights", ours.model, theirs.model)


@by_program
@contract("AMP-RECIPE-014")
def test_scaler_alone(case: Case, program: str, target: Target, rng: torch.Generator) -> None:
    # 65536 is a power of two, and the float32 gradients here neither overflow nor underflow.
    ours, theirs = twins(program, target, rng)
    count = steps(case, program)
    losses = train(ours, count, contextlib.nullcontext, torch.amp.GradScaler(target.device_type))
    case.equal("losses", losses, plain_losses(theirs, count))
    same_weights(case, "weights", ours.model, theirs.model)


def plain_losses(work: Workload, count: int) -> list[float]:
    """Train in float32 without torch.amp; return the losses."""
    losses = []
    for step in range(count):
        inputs, target = work.batch(step)
        work.optimizer.zero_grad()
        loss = work.loss(work.model(inputs), target)
        loss.backward()
        if work.clip is not None:
            torch.nn.utils.clip_grad_norm_(work.model.parameters(), work.clip)
        work.optimizer.step()
        losses.append(loss.item())
    return losses


@by_program
@contract("AMP-RECIPE-015")
def test_switched_off(case: Case, program: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    ours, theirs = twins(program, target, rng)
    count = steps(case, program)
    spelling = new_spelling(target.device_type)
    losses = train(ours, count, lambda: spelling.region(amp_dtype, False), spelling.scaler(enabled=False))
    case.equal("losses", losses, plain_losses(theirs, count))
    same_weights(case, "weights", ours.model, theirs.model)


@pytest.mark.parametrize("guard", ["no_grad", "inference_mode"])
@contract("AMP-RECIPE-016")
def test_evaluation(case: Case, guard: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    ours, theirs = twins("P4", target, rng)
    spelling = new_spelling(target.device_type)
    inputs = ours.batch(0)[0]
    off: Callable[[], contextlib.AbstractContextManager[object]] = getattr(torch, guard)

    def evaluate(model: torch.nn.Module) -> torch.Tensor:
        model.eval()
        with off(), spelling.region(amp_dtype, True):
            output: torch.Tensor = model(inputs)
        model.train()
        return output

    losses = []
    for _ in range(3):
        output = evaluate(ours.model)
        case.equal("requires grad", output.requires_grad, False)
        case.identical("output", output.clone(), forward_by_hand(ours.model, inputs, amp_dtype).detach())
        losses += run(ours, 1, spelling, amp_dtype)[0]
    expected = [run(theirs, 1, spelling, amp_dtype)[0][0] for _ in range(3)]
    case.equal("losses of the steps between", losses, expected)
    same_weights(case, "weights", ours.model, theirs.model)


@by_program
@contract("AMP-RECIPE-019")
def test_types_during_a_program(
    case: Case, program: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    work = PROGRAMS[program](target.device, rng)
    spelling = new_spelling(target.device_type)
    scaler = spelling.scaler(enabled=amp_dtype is torch.float16)
    outputs: dict[str, torch.dtype] = {}
    for name, layer in work.model.named_children():
        layer.register_forward_hook(
            lambda module, given, result, name=name: outputs.__setitem__(
                f"{type(module).__name__} {name}", result.dtype
            )
        )
    for step in range(2):
        with OpTrace() as trace:
            loss = train_step(work, step, lambda: spelling.region(amp_dtype, True), scaler)
        for name, parameter in work.model.named_parameters():
            case.equal(f"step {step}: {name}", parameter.dtype, torch.float32)
            assert parameter.grad is not None
            case.equal(f"step {step}: gradient of {name}", parameter.grad.dtype, torch.float32)
        case.equal(f"step {step}: loss", loss.dtype, torch.float32)
        products = trace.matrix_products
        types = {str(dtype) for op in products for dtype in op.inputs + op.outputs}
        case.equal(f"step {step}: dtypes of the matrix products", sorted(types), [str(amp_dtype)])
        layers = sum(isinstance(layer, torch.nn.Linear) for layer in work.model)
        # Forward, the weight's gradient, and, except for the first layer, the input's.
        case.equal(f"step {step}: matrix products", len(products), 3 * layers - 1)
    for name, dtype in outputs.items():
        case.equal(f"output of {name}", dtype, amp_dtype)
    state = {
        (key, str(value.dtype))
        for entry in work.optimizer.state.values()
        for key, value in entry.items()
        # A counter of steps may be wider.
        if isinstance(value, torch.Tensor) and value.dtype != torch.float32 and (key != "step" or value.itemsize < 4)
    }
    case.equal("optimizer state that is not float32", sorted(state), [])


@contract("AMP-RECIPE-020")
def test_close_to_float32(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    ours, theirs = twins("P3", target, rng)
    # At this scale no fp16 gradient of P3 overflows, so both runs take every step.
    scaler = torch.amp.GradScaler(target.device_type, init_scale=1024.0, enabled=amp_dtype is torch.float16)
    losses = train(ours, 3, lambda: torch.autocast(target.device_type, dtype=amp_dtype), scaler)
    expected = plain_losses(theirs, 3)
    bounds = difference_bounds(ours, theirs, expected, {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[amp_dtype])
    for epoch, (seen, exact, bound) in enumerate(zip(losses, expected, bounds, strict=True)):
        case.at_most(f"epoch {epoch}: difference of the losses", abs(seen - exact), bound)
        case.note(f"epoch {epoch}: the float32 loss", exact)


def difference_bounds(ours: Workload, theirs: Workload, losses: list[float], unit: float) -> list[float]:
    """Bound the difference that 16-bit rounding makes to the losses of P3, a linear least squares problem.

    With X the inputs and a column of ones, r the residuals and d their rounding error: d is at most 4.1 u times the
    sizes of the terms (input, weight or bias, product, sum rounded); the gradient 2/n X'r is off by that of d and by
    3.1 u for its own roundings; a step of gradient descent below 2 / largest curvature enlarges no earlier error
    of the weights.
    """
    inputs = ours.batch(0)[0].cpu().double()
    design = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], 1)
    rows, largest = len(design), float(torch.linalg.matrix_norm(design, 2))
    rate = ours.optimizer.defaults["lr"]
    assert rate * 2 / rows * largest**2 < 2
    reach = max(
        float(parameter.detach().abs().max()) for work in (ours, theirs) for parameter in work.model.parameters()
    )
    # Gradient descent is monotonic between the start and the solution; twice the final magnitude bounds both.
    rounding = 4.1 * unit * float((design.abs().sum(1) * 2 * reach).norm())
    drift, bounds = 0.0, []
    for loss in losses:
        residual = (rows * loss) ** 0.5
        off = largest * drift + rounding
        bounds.append((2 * residual * off + off**2) / rows + 2.0**-20 * loss)
        own = 3.1 * unit * float(design.norm()) * (residual + off)
        drift += rate * 2 / rows * (largest * rounding + own)
    return bounds
