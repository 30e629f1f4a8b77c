"""Check single steps of the documented patterns against manual casts and scaling."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from torch.nn import functional

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.manual_training import forward_by_hand
from .support import same_weights


def small_model(target: Target, rng: torch.Generator, outputs: int = 4) -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, outputs))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.2)
    return model.to(target.device)


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
            case.raises(f"torch.{name}.amp.autocast(device_type=...)", TypeError, printed, names=("device_type",))
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
        case.equal("control: torch.autocast accepts it", torch.is_autocast_enabled("cpu"), True)


@pytest.mark.parametrize("parts", [2, 4])
@contract("AMP-RECIPE-023")
def test_accumulation(case: Case, parts: int, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    # Small integers, and powers of two as sizes of the batch and its parts: every number is exact in 16 bit, so the
    # parts must add up to the whole batch bit for bit.
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


@contract("AMP-RECIPE-024")
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

    seen, not_unscaled = by_autocast()
    expected, norm = written_out()
    case.identical("loss with the penalty", seen, expected)
    same_weights(case, "weights", ours, theirs)
    case.at_least("control: the norm without unscaling", not_unscaled, 512 * float(norm))


@pytest.mark.parametrize("poisoned", [False, True], ids=["clean", "one-overflows"])
@contract("AMP-RECIPE-025")
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
    # Adding a step to a float32 weight and subtracting again rounds each to 2^-24 of the weight.
    case.between("control: optimizer.step() alone moves farther by", size(wrong) / size(right), 1000.0, 1050.0)
    skipped, halved = moved(directly=False, poison=True)
    poisoned, kept = moved(directly=True, poison=True)
    case.equal("change of the weights after an overflow", size(skipped), 0.0)
    case.equal("scale after an overflow", halved, scale / 2)
    case.equal("control: finite after optimizer.step() alone", bool(torch.isfinite(poisoned[-1]).all()), False)
    case.equal("control: scale after optimizer.step() alone", kept, scale)
