"""Check bf16 training: the exponent range of fp32, no loss scaling, three fraction bits less than fp16."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers import error_bounds, exact
from ...oracles.numbers.formats import FORMATS
from . import small_gradients

BOTH = (torch.bfloat16, torch.float16)


# --- no scaler needed -------------------------------------------------------------------------------------------


@contract("AMP-BF16-001")
def test_trains_without_a_scaler(case: Case, target: Target, rng: torch.Generator) -> None:
    case.require(target, *BOTH)
    state, steps = rng.get_state(), case.samples(quick=20, standard=40, full=40)

    def arm(dtype: torch.dtype | None, *, scaled: bool = False) -> small_gradients.Outcome:
        scaler = torch.amp.GradScaler(target.device_type) if scaled else None
        generator = torch.Generator().set_state(state)
        return small_gradients.train(target.device, generator, dtype=dtype, scaler=scaler, steps=steps)

    reference = arm(None)
    case.at_most("fp32: last loss over first", reference.progress, 0.5)

    unscaled = arm(torch.float16)
    case.equal("fp16 without a scaler: share of gradients lost to underflow", unscaled.lost(reference), 1.0)
    for number, (after, before) in enumerate(zip(unscaled.after, unscaled.before, strict=True)):
        case.identical(f"fp16 without a scaler: weight {number} at the end", after, before)
    case.equal("fp16 without a scaler: last loss over first", unscaled.progress, 1.0)

    for name, outcome in (
        ("fp16 with a scaler", arm(torch.float16, scaled=True)),
        ("bf16 without a scaler", arm(torch.bfloat16)),
    ):
        case.at_most(f"{name}: share of gradients lost to underflow", outcome.lost(reference), 0.01)
        case.at_most(f"{name}: last loss over first", outcome.progress, 0.5)
        # Rounding moves a loss of this size by 0.5 % at most; underflow changes the loss by orders of magnitude.
        case.between(f"{name}: last loss over fp32's", outcome.losses[-1] / reference.losses[-1], 0.9, 1.1)


def _gradient(target: Target, dtype: torch.dtype, factor: float) -> Tensor:
    """Return the gradient of a weight of ones whose 16-bit output receives a gradient of `factor`."""
    weight = torch.ones(3, 5, device=target.device, requires_grad=True)
    with target.autocast(dtype):
        seen = F.linear(torch.ones(1, 5, device=target.device), weight)
        loss = (seen.float() * factor).sum()
    loss.backward()
    assert weight.grad is not None
    return weight.grad


@contract("AMP-BF16-002")
@pytest.mark.parametrize("exponent", [-30, -26, -60, -100, deep("standard", -40), deep("standard", -120)])
def test_small_gradients_survive(case: Case, target: Target, exponent: int) -> None:
    case.require(target, *BOTH)
    for dtype, expected in ((torch.bfloat16, 2.0**exponent), (torch.float16, 0.0)):
        seen = _gradient(target, dtype, 2.0**exponent)
        case.identical(f"{dtype}: gradients at 2^{exponent}", seen, torch.full((3, 5), expected))


@contract("AMP-BF16-003")
@pytest.mark.parametrize("exponent", [16, 30, 100, deep("standard", 60), deep("standard", 120)])
def test_large_gradients_stay_finite(case: Case, target: Target, exponent: int) -> None:
    case.require(target, *BOTH)
    for dtype, expected in ((torch.bfloat16, 2.0**exponent), (torch.float16, float("inf"))):
        seen = _gradient(target, dtype, 2.0**exponent)
        case.identical(f"{dtype}: gradients at 2^{exponent}", seen, torch.full((3, 5), expected))


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


def _train(
    case: Case,
    target: Target,
    generator: torch.Generator,
    optimizer_name: str,
    scaler: torch.amp.GradScaler | None,
) -> tuple[list[Tensor], list[Tensor], torch.optim.Optimizer, torch.nn.Module]:
    """Train a small network in bf16; return losses (scaled and unscaled again), last gradients, optimizer and model."""
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.GELU(), torch.nn.Linear(16, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    rows = torch.randn(32, 12, generator=generator).to(target.device)
    classes = torch.randint(0, 5, (32,), generator=generator).to(target.device)
    model.to(target.device)
    optimizer, losses = OPTIMIZERS[optimizer_name](list(model.parameters())), []
    for _ in range(case.samples(quick=4, standard=8, full=50)):
        optimizer.zero_grad()
        with target.autocast(torch.bfloat16):
            loss = F.cross_entropy(model(rows), classes)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            loss = scaler.scale(loss)
            loss.backward()
            loss = loss / scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.detach())
    return losses, [parameter.grad for parameter in model.parameters()], optimizer, model


def _same_training(case: Case, target: Target, rng: torch.Generator, name: str, scaler: torch.amp.GradScaler) -> None:
    """Train without a scaler and with `scaler` from the same start and compare everything, bit for bit."""
    again = torch.Generator().set_state(rng.get_state())
    plain_losses, plain_gradients, plain_optimizer, plain_model = _train(case, target, rng, name, None)
    losses, gradients, optimizer, model = _train(case, target, again, name, scaler)
    case.identical("losses", torch.stack(losses), torch.stack(plain_losses))
    for (path, seen), expected in zip(model.named_parameters(), plain_model.parameters(), strict=True):
        case.identical(f"weight {path}", seen, expected)
    for number, (gradient, expected) in enumerate(zip(gradients, plain_gradients, strict=True)):
        case.identical(f"last gradient {number}", gradient, expected)
    state, plain_state = (held.state_dict()["state"] for held in (optimizer, plain_optimizer))
    for number, entries in plain_state.items():
        for key, expected in entries.items():
            case.identical(
                f"optimizer state {number}.{key}", torch.as_tensor(state[number][key]), torch.as_tensor(expected)
            )


@contract("AMP-BF16-004", dtypes=("bf16",))
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", deep("standard", "Adam"), deep("standard", "Adagrad")])
def test_disabled_scaler_changes_nothing(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, optimizer: str
) -> None:
    _same_training(case, target, rng, optimizer, torch.amp.GradScaler(target.device_type, enabled=False))


@contract("AMP-BF16-005", dtypes=("bf16",))
@pytest.mark.parametrize("exponent", [16, 40, deep("standard", 0)])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", deep("standard", "Adam"), deep("standard", "Adagrad")])
def test_enabled_scaler_is_harmless(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, optimizer: str, exponent: int
) -> None:
    # The scale doubles on the way as well: a growth interval of three is shorter than the run.
    scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**exponent, growth_interval=3)
    _same_training(case, target, rng, optimizer, scaler)
    steps = case.samples(quick=4, standard=8, full=50)
    case.equal("loss scale at the end: no step was skipped", scaler.get_scale(), 2.0 ** (exponent + steps // 3))


@contract("AMP-BF16-006")
def test_no_scale_overflows_bf16(case: Case, target: Target) -> None:
    case.require(target, *BOTH)
    for dtype, moved in ((torch.bfloat16, True), (torch.float16, False)):
        weight = torch.ones(3, 5, device=target.device, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**40)
        with target.autocast(dtype):
            loss = F.linear(torch.ones(1, 5, device=target.device), weight).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        expected = torch.full((3, 5), 0.5 if moved else 1.0)
        case.identical(f"{dtype} at a scale of 2^40: weight after the step", weight, expected)
        case.equal(f"{dtype}: scale afterwards", scaler.get_scale(), 2.0 ** (40 if moved else 39))


# --- range ------------------------------------------------------------------------------------------------------

# Each computes (m, k) times (k, n) by an op of the lower precision list.
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": torch.mm,
    "linear": lambda left, right: F.linear(left, right.t()),
    "bmm": lambda left, right: torch.bmm(left.unsqueeze(0), right.unsqueeze(0)).squeeze(0),
    "conv1d": lambda left, right: F.conv1d(left.unsqueeze(-1), right.t().unsqueeze(-1)).squeeze(-1),
}


@contract("AMP-BF16-008")
@pytest.mark.parametrize("exponent", [-3, 3])
def test_deep_chains_keep_their_size(case: Case, target: Target, exponent: int) -> None:
    case.require(target, *BOTH)
    layers = 12
    gone = 0.0 if exponent < 0 else math.inf
    for dtype in BOTH:
        start = torch.ones(4, 1, device=target.device, requires_grad=True)
        weight = torch.full((1, 1), 2.0**exponent, device=target.device)
        with target.autocast(dtype):
            seen = start
            for _ in range(layers):
                seen = F.linear(seen, weight)
        (gradient,) = torch.autograd.grad(seen, start, torch.ones_like(seen))
        expected = torch.full((4, 1), 2.0 ** (exponent * layers) if dtype is torch.bfloat16 else gone)
        case.identical(f"{dtype}: signal after {layers} layers of 2^{exponent}", seen, expected.to(dtype))
        case.identical(f"{dtype}: gradient through them", gradient, expected)


# --- precision --------------------------------------------------------------------------------------------------


@contract("AMP-BF16-009")
@pytest.mark.parametrize("op", PRODUCTS)
def test_bf16_is_less_precise_than_fp16(case: Case, target: Target, rng: torch.Generator, op: str) -> None:
    case.require(target, *BOTH)
    left, right = torch.randn(65, 97, generator=rng), torch.randn(97, 67, generator=rng)
    expected, errors = exact.product(left, right), {}
    for dtype in BOTH:
        with full_precision(target.device_type), target.autocast(dtype):
            seen = PRODUCTS[op](left.to(target.device), right.to(target.device))
        errors[dtype] = error_bounds.normwise_error(seen, expected)
        low, high = error_bounds.normwise_window(FORMATS[dtype])
        case.between(f"{op} in {dtype}: normwise error", errors[dtype], low, high)
    # Three fraction bits less: a factor of 8, as sharp as two errors of a few thousand elements each are.
    case.between(f"{op}: error in bf16 over error in fp16", errors[torch.bfloat16] / errors[torch.float16], 6.0, 10.5)


@contract("AMP-BF16-009")
def test_small_additions_are_lost_in_bf16_first(case: Case, target: Target) -> None:
    case.require(target, *BOTH)
    layer = torch.nn.Linear(4, 3).to(target.device)
    torch.nn.init.constant_(layer.weight, 64.0)
    torch.nn.init.ones_(layer.bias)
    for dtype, expected in ((torch.float16, 257.0), (torch.bfloat16, 256.0)):
        with target.autocast(dtype):
            seen = layer(torch.ones(5, 4, device=target.device))
        case.identical(f"256 + 1 in {dtype}", seen, torch.full((5, 3), expected, dtype=dtype))
