"""Recipes: whole training programs, held bit for bit against mixed precision written out by hand."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import warnings
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

by_program = pytest.mark.parametrize("program", PROGRAMS)


def twins(program: str, target: Target, rng: torch.Generator) -> tuple[Workload, Workload]:
    """Two workloads with the same initial weights and data."""
    first = PROGRAMS[program](target.device, rng)
    return first, copy.deepcopy(first)


def steps(case: Case, program: str) -> int:
    """As many as the source has at full depth (P1 100, P2 20 epochs of 20, P3 3 epochs); P1 and P2 are slow."""
    long = {"P1": 100, "P2": 400, "P3": 3, "P4": 60}[program]
    short = {"P1": 2, "P2": 3, "P3": 3, "P4": 8}[program]
    return case.samples(quick=short, standard=2 * short if program == "P4" else short, full=long)


def loss_of_16_bit(work: Workload, target: Target, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """The loss for the loop by hand: of its outputs cast to float32.

    cross_entropy is such a loss on the CPU only (AMP-LOSS-017); elsewhere it alone is left to a region, so that
    these contracts speak of all the rest.
    """
    if work.loss is not functional.cross_entropy or target.device_type == "cpu":
        return lambda outputs, labels: work.loss(outputs.float(), labels)

    def in_a_region(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with target.autocast(dtype):
            return work.loss(outputs, labels)

    return in_a_region


def by_hand(work: Workload, target: Target, count: int, dtype: torch.dtype, scale: HandScale) -> list[float]:
    batches = [work.batch(step) for step in range(count)]
    loss = loss_of_16_bit(work, target, dtype)
    return train_by_hand(work.model, work.optimizer, loss, batches, dtype, scale, work.clip)


def hand_scale(dtype: torch.dtype) -> HandScale:
    """fp16 is scaled, bf16 is not, as the source's programs do."""
    return HandScale() if dtype is torch.float16 else HandScale(scale=None)


def run(work: Workload, count: int, spelling: Spelling, dtype: torch.dtype) -> tuple[list[float], float]:
    """Train as the source writes it: fp16 with a scaler, bf16 with the scaler off. The losses and the last scale."""
    scaler = spelling.scaler(enabled=dtype is torch.float16)
    losses = train(work, count, lambda: spelling.region(dtype, True), scaler)
    return losses, scaler.get_scale()


def same_weights(case: Case, what: str, seen: torch.nn.Module, expected: torch.nn.Module) -> None:
    theirs = dict(expected.named_parameters())
    for name, parameter in seen.named_parameters():
        case.identical(f"{what}: {name}", parameter.detach(), theirs[name].detach())


def small_model(target: Target, rng: torch.Generator, outputs: int = 4) -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, outputs))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.2)
    return model.to(target.device)


@by_program
@contract("AMP-RECIPE-001")
def test_loss_falls(case: Case, program: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    work = PROGRAMS[program](target.device, rng)
    del work.batches[case.samples(quick=2, standard=2, full=len(work.batches)) :]
    before = {name: parameter.detach().clone() for name, parameter in work.model.named_parameters()}
    # Room for two steps that overflow at the first scale.
    count = steps(case, program) + 3
    losses, scale = run(work, count + len(work.batches), new_spelling(target.device_type), amp_dtype)
    case.note("losses", [round(loss, 6) for loss in losses])
    case.note("last scale", scale)
    # The first batch comes again after an epoch, so that equal data are compared.
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
    scale = hand_scale(amp_dtype)
    losses, last = run(ours, steps(case, program), new_spelling(target.device_type), amp_dtype)
    case.equal("losses", losses, by_hand(theirs, target, steps(case, program), amp_dtype, scale))
    same_weights(case, "weights", ours.model, theirs.model)
    case.equal("last scale", last, 1.0 if scale.scale is None else scale.scale)


@by_program
@contract("AMP-RECIPE-003", on=("cpu", "cuda"))
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


@contract("AMP-RECIPE-005")
def test_decorated_forward(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    class Decorated(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        @torch.autocast(target.device_type, dtype=amp_dtype)
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(inputs)
            return result

    model = small_model(target, rng)
    inputs = torch.randn(8, 16, generator=rng).to(target.device)
    output = Decorated(model)(inputs)
    case.equal("enabled after the call", torch.is_autocast_enabled(target.device_type), False)
    with target.autocast(amp_dtype):
        expected = model(inputs)
    case.equal("dtype of the output", output.dtype, amp_dtype)
    case.identical("output", output.detach(), expected.detach())


@contract("AMP-RECIPE-006")
def test_device_type_in_the_old_spelling(case: Case) -> None:
    for name, module in (("cuda", torch.cuda.amp), ("cpu", torch.cpu.amp)):
        printed = functools.partial(module.autocast, device_type=name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            case.raises(f"torch.{name}.amp.autocast(device_type=...)", TypeError, printed, "device_type")
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
        case.equal("control: torch.autocast takes it", torch.is_autocast_enabled("cpu"), True)


@contract("AMP-RECIPE-007", dtypes=("fp16",))
def test_overflowing_start(case: Case, target: Target, rng: torch.Generator) -> None:
    ours, theirs = twins("P4", target, rng)
    count = case.samples(quick=40, standard=40, full=80)
    start, interval = 2.0**40, 5
    scaler = torch.amp.GradScaler(target.device_type, init_scale=start, growth_interval=interval)
    region = new_spelling(target.device_type).region
    losses, scales = [], []
    for step in range(count):
        losses.append(train_step(ours, step, lambda: region(torch.float16, True), scaler).item())
        scales.append(scaler.get_scale())
    hand = HandScale(scale=start, growth_interval=interval)
    expected, expected_scales = [], []
    loss = loss_of_16_bit(theirs, target, torch.float16)
    for step in range(count):
        batch = [theirs.batch(step)]
        expected += train_by_hand(theirs.model, theirs.optimizer, loss, batch, torch.float16, hand)
        expected_scales.append(hand.scale)
    case.equal("losses", losses, expected)
    case.equal("scale after each step", scales, expected_scales)
    case.history("loss scale", [start, *scales])
    same_weights(case, "weights", ours.model, theirs.model)
    case.at_least("skipped steps", sum(hand.skipped), 3)
    case.at_least("steps taken", count - sum(hand.skipped), 3)
    case.at_least("growths", sum(later > earlier for earlier, later in itertools.pairwise(scales)), 1)


@pytest.mark.parametrize("parts", [2, 4])
@contract("AMP-RECIPE-008")
def test_accumulation(case: Case, parts: int, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    # Small integers, a batch and a number of parts that are powers of two: every number is exact in 16 bit, so
    # the parts must add up to the whole batch to the bit.
    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=rng).float().to(target.device)

    inputs, goal, start = integers(16, 8), integers(16, 4), integers(4, 8)

    def stepped(pieces: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = start.clone().requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=4.0)
        for x, y in zip(inputs.chunk(pieces), goal.chunk(pieces), strict=True):
            with target.autocast(amp_dtype):
                loss = functional.mse_loss(functional.linear(x, weight), y) / pieces
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert weight.grad is not None
        gradient = weight.grad.clone()
        scaler.step(optimizer)
        scaler.update()
        return gradient, weight.detach()

    gradient, weight = stepped(parts)
    exact = 2 / goal.numel() * (inputs @ start.T - goal).T.double().cpu() @ inputs.double().cpu()
    case.identical("accumulated gradient", gradient.cpu().double(), exact)
    case.identical("weight after the step", weight.cpu().double(), start.cpu().double() - 0.5 * exact)
    whole_gradient, whole_weight = stepped(1)
    case.identical("gradient, against the whole batch", gradient, whole_gradient)
    case.identical("weight, against the whole batch", weight, whole_weight)


@contract("AMP-RECIPE-009")
def test_gradient_penalty(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    ours, inputs = small_model(target, rng), torch.randn(8, 16, generator=rng).to(target.device)
    theirs = copy.deepcopy(ours)
    goal = torch.randn(8, 4, generator=rng).to(target.device)
    scale = 1024.0

    def by_autocast() -> tuple[torch.Tensor, float]:
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.125)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=scale)
        with target.autocast(amp_dtype):
            loss = functional.mse_loss(ours(inputs), goal)
        scaled = torch.autograd.grad(scaler.scale(loss), list(ours.parameters()), create_graph=True)
        inner = [gradient * (1.0 / scaler.get_scale()) for gradient in scaled]
        with target.autocast(amp_dtype):
            norm = sum(gradient.pow(2).sum() for gradient in inner).sqrt()
            loss = loss + norm
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), float(sum(gradient.detach().pow(2).sum() for gradient in scaled) ** 0.5)

    def written_out() -> tuple[torch.Tensor, torch.Tensor]:
        loss = functional.mse_loss(forward_by_hand(theirs, inputs, amp_dtype).float(), goal)
        scaled = torch.autograd.grad(loss * scale, list(theirs.parameters()), create_graph=True)
        norm = sum((gradient * (1.0 / scale)).pow(2).sum() for gradient in scaled).sqrt()
        loss = loss + norm
        (loss * scale).backward()
        with torch.no_grad():
            for parameter in theirs.parameters():
                assert parameter.grad is not None
                parameter -= 0.125 * (parameter.grad * (1.0 / scale))
        return loss.detach(), norm.detach()

    seen, forgotten = by_autocast()
    expected, norm = written_out()
    case.identical("loss with the penalty", seen, expected)
    same_weights(case, "weights", ours, theirs)
    case.at_least("control: the norm where unscaling is forgotten", forgotten, 512 * float(norm))


@pytest.mark.parametrize("poisoned", [False, True], ids=["clean", "one-overflows"])
@contract("AMP-RECIPE-010")
def test_several_models(
    case: Case, poisoned: bool, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    models = [small_model(target, rng) for _ in range(2)]
    hand = copy.deepcopy(models)
    inputs = torch.randn(8, 16, generator=rng).to(target.device)
    goal = torch.randn(8, 4, generator=rng).to(target.device)
    before = copy.deepcopy(models[1])
    optimizers = [
        torch.optim.Adam(models[0].parameters(), lr=2.0**-6),
        torch.optim.SGD(models[1].parameters(), lr=2.0**-4, momentum=0.5),
    ]
    scaler = torch.amp.GradScaler(target.device_type, init_scale=256.0)
    with target.autocast(amp_dtype):
        first, second = models[0](inputs), models[1](inputs)
        losses = functional.mse_loss(2 * first + 3 * second, goal), functional.mse_loss(first, goal)
    scaler.scale(losses[0]).backward(retain_graph=True)
    scaler.scale(losses[1]).backward()
    if poisoned:
        list(models[1].parameters())[-1].grad[-1] = float("inf")
    scaler.unscale_(optimizers[0])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()

    first, second = (forward_by_hand(model, inputs, amp_dtype) for model in hand)
    scaled = (
        functional.mse_loss((2 * first + 3 * second).float(), goal) * 256.0,
        functional.mse_loss(first.float(), goal) * 256.0,
    )
    scaled[0].backward(retain_graph=True)
    scaled[1].backward()
    for model in hand:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 / 256.0)
    torch.optim.Adam(hand[0].parameters(), lr=2.0**-6).step()
    torch.optim.SGD(hand[1].parameters(), lr=2.0**-4, momentum=0.5).step()
    same_weights(case, "first model", models[0], hand[0])
    same_weights(case, "second model", models[1], before if poisoned else hand[1])
    case.equal("scale after one update", scaler.get_scale(), 128.0 if poisoned else 256.0)


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


@contract("AMP-RECIPE-012", dtypes=("fp16",))
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
    case.equal("losses", losses, by_hand(theirs, target, steps(case, "P4"), amp_dtype, HandScale(scale=None)))
    same_weights(case, "weights", ours.model, theirs.model)


@by_program
@contract("AMP-RECIPE-014")
def test_scaler_alone(case: Case, program: str, target: Target, rng: torch.Generator) -> None:
    # 65536 is a power of two, and no float32 gradient here comes near the ends of its range.
    ours, theirs = twins(program, target, rng)
    count = steps(case, program)
    losses = train(ours, count, contextlib.nullcontext, torch.amp.GradScaler(target.device_type))
    case.equal("losses", losses, plain_losses(theirs, count))
    same_weights(case, "weights", ours.model, theirs.model)


def plain_losses(work: Workload, count: int) -> list[float]:
    """Train in float32 with nothing of torch.amp."""
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


@contract("AMP-RECIPE-017")
def test_evaluation_within_the_region(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    model = small_model(target, rng)
    inputs = torch.randn(8, 16, generator=rng).to(target.device)
    with target.autocast(amp_dtype):
        with torch.no_grad():
            teacher = model(inputs)
        student = model(inputs)
        loss = functional.mse_loss(student, torch.ones_like(student))
    loss.backward()
    case.equal("the teacher requires grad", teacher.requires_grad, False)
    case.identical("outputs", student.detach(), teacher)
    reached = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    case.equal("parameters that a gradient reaches", len(reached), 4)
    seen = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    hand = forward_by_hand(model, inputs, amp_dtype)
    functional.mse_loss(hand.float(), torch.ones_like(hand).float()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert seen[name] is not None
        case.identical(f"gradient of {name}", seen[name], parameter.grad)


@contract("AMP-RECIPE-018")
def test_step_past_the_scaler(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    start = small_model(target, rng)
    inputs = torch.randn(8, 16, generator=rng).to(target.device)
    goal = torch.randn(8, 4, generator=rng).to(target.device)
    scale = 1024.0

    def moved(*, directly: bool, poison: bool = False) -> tuple[list[torch.Tensor], float]:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=scale)
        with target.autocast(amp_dtype):
            loss = functional.mse_loss(model(inputs), goal)
        scaler.scale(loss).backward()
        if poison:
            list(model.parameters())[-1].grad[-1] = float("inf")
        if directly:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        change = [b.detach() - a.detach() for a, b in zip(start.parameters(), model.parameters(), strict=True)]
        return change, scaler.get_scale()

    def size(change: list[torch.Tensor]) -> float:
        return float(torch.stack([part.norm() for part in change]).norm())

    right, wrong = moved(directly=False)[0], moved(directly=True)[0]
    # Adding a step to a float32 weight and taking the difference rounds each to 2^-24 of the weight.
    case.between("control: the step past the scaler is larger by", size(wrong) / size(right), 1000.0, 1050.0)
    skipped, halved = moved(directly=False, poison=True)
    poisoned, kept = moved(directly=True, poison=True)
    case.equal("change of the weights after an overflow", size(skipped), 0.0)
    case.equal("scale after an overflow", halved, scale / 2)
    case.equal("control: finite past the scaler", bool(torch.isfinite(poisoned[-1]).all()), False)
    case.equal("control: scale past the scaler", kept, scale)


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
        products = [op for op in trace.computing if op.name in ("aten::mm", "aten::addmm")]
        types = {str(dtype) for op in products for dtype in op.inputs + op.outputs}
        case.equal(f"step {step}: types of the matrix products", sorted(types), [str(amp_dtype)])
        layers = sum(isinstance(layer, torch.nn.Linear) for layer in work.model)
        # Forward, the weight's gradient, and, but for the first layer, the input's.
        case.equal(f"step {step}: matrix products", len(products), 3 * layers - 1)
    for name, dtype in outputs.items():
        case.equal(f"output of {name}", dtype, amp_dtype)
    state = {
        (key, str(value.dtype))
        for entry in work.optimizer.state.values()
        for key, value in entry.items()
        if isinstance(value, torch.Tensor)
    }
    case.equal("16-bit optimizer state", sorted(pair for pair in state if "float32" not in pair[1]), [])


@contract("AMP-RECIPE-020")
def test_close_to_float32(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    ours, theirs = twins("P3", target, rng)
    # At this scale no fp16 gradient of this problem overflows, so that both runs take every step.
    scaler = torch.amp.GradScaler(target.device_type, init_scale=1024.0, enabled=amp_dtype is torch.float16)
    losses = train(ours, 3, lambda: torch.autocast(target.device_type, dtype=amp_dtype), scaler)
    expected = plain_losses(theirs, 3)
    bounds = difference_bounds(ours, theirs, expected, {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[amp_dtype])
    for epoch, (seen, exact, bound) in enumerate(zip(losses, expected, bounds, strict=True)):
        case.at_most(f"epoch {epoch}: difference of the losses", abs(seen - exact), bound)
        case.note(f"epoch {epoch}: the float32 loss, beside that bound", exact)


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
    # Gradient descent moves monotonically between the start and the solution; twice the end's reach covers both.
    rounding = 4.1 * unit * float((design.abs().sum(1) * 2 * reach).norm())
    drift, bounds = 0.0, []
    for loss in losses:
        residual = (rows * loss) ** 0.5
        off = largest * drift + rounding
        bounds.append((2 * residual * off + off**2) / rows + 2.0**-20 * loss)
        own = 3.1 * unit * float(design.norm()) * (residual + off)
        drift += rate * 2 / rows * (largest * rounding + own)
    return bounds
