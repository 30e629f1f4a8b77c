"""Check the distribution of what is drawn at random in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.generators import seed_torch

SIGMAS = 6.0
DRAWS = 2**21  # of which a normal distribution has 66 on either side beyond four standard deviations
FEW = 4  # of a million: what a waiver of an event that is rarer does not excuse

Shares = Callable[[float], float]


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _between(low: float, high: float) -> Shares:
    return lambda x: min(max((x - low) / (high - low), 0.0), 1.0)


def _truncated(x: float) -> float:
    return _between(_normal(-2.0), _normal(2.0))(_normal(x))


@dataclass(frozen=True)
class Draw:
    """A call that fills a tensor at random, and the documented distribution of what it draws."""

    call: Callable[[Tensor], Tensor]
    below: Shares
    """The share of draws that are at most a number."""
    at: tuple[float, ...]
    """The numbers at which the shares are compared."""
    least: float = -math.inf
    most: float = math.inf
    without_least: bool = False
    without_most: bool = False


_TAILS = (-4.0, -3.0, -2.0, -1.0, -0.25, 0.25, 1.0, 2.0, 3.0, 4.0)
_QUARTERS = (0.125, 0.25, 0.5, 0.75, 0.9375)
_init = torch.nn.init

DRAWN: dict[str, Draw] = {
    "rand": Draw(lambda x: torch.rand_like(x), _between(0, 1), _QUARTERS, 0.0, 1.0, without_most=True),
    "uniform": Draw(lambda x: x.uniform_(-2, 2), _between(-2, 2), (-1.75, -1.0, 0.0, 1.0, 1.75), -2.0, 2.0),
    "randn": Draw(lambda x: torch.randn_like(x), _normal, _TAILS),
    "normal": Draw(lambda x: x.normal_(1, 2), lambda x: _normal((x - 1) / 2), tuple(1 + 2 * at for at in _TAILS)),
    "exponential": Draw(
        lambda x: x.exponential_(),
        lambda x: -math.expm1(-x),
        (2.0**-10, 2.0**-8, 0.0625, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
        least=0.0,
        without_least=True,
    ),
    "log_normal": Draw(
        lambda x: x.log_normal_(0, 1), lambda x: _normal(math.log(x)), (0.03125, 0.125, 0.5, 1.0, 2.0, 8.0, 32.0), 0.0
    ),
    "cauchy": Draw(
        lambda x: x.cauchy_(), lambda x: 0.5 + math.atan(x) / math.pi, (-64.0, -8.0, -1.0, -0.25, 0.25, 1.0, 8.0, 64.0)
    ),
    "geometric": Draw(
        lambda x: x.geometric_(0.25), lambda x: 1 - 0.75 ** math.floor(x), (1.5, 2.5, 4.5, 8.5, 16.5), least=1.0
    ),
    "bernoulli": Draw(lambda x: x.bernoulli_(0.3), lambda x: 0.7, (0.5,), 0.0, 1.0),
    "bernoulli of a tensor": Draw(lambda x: torch.bernoulli(x.fill_(0.25)), lambda x: 0.75, (0.5,), 0.0, 1.0),
    "trunc_normal": Draw(
        lambda x: _init.trunc_normal_(x), _truncated, (-1.875, -1.0, -0.25, 0.25, 1.0, 1.875), -2.0, 2.0
    ),
    "trunc_normal of few deviations": Draw(
        lambda x: _init.trunc_normal_(x, std=0.03125),
        lambda x: _normal(32 * x),
        tuple(at / 32 for at in _TAILS),
        # Beyond eight standard deviations there is one in 10**15.
        least=-0.25,
        most=0.25,
    ),
    "xavier_uniform": Draw(
        lambda x: _init.xavier_uniform_(x.view(2048, -1), gain=math.sqrt((2048 + DRAWS // 2048) / 6)),
        _between(-1, 1),
        (-0.875, -0.5, 0.0, 0.5, 0.875),
        -1.0,
        1.0,
    ),
}


@contract("AMP-NUMERICS-114")
@pytest.mark.parametrize("draw", DRAWN)
def test_distributions(case: Case, target: Target, amp_dtype: torch.dtype, draw: str) -> None:
    chosen = DRAWN[draw]
    torch.manual_seed(case.seed)
    drawn = chosen.call(torch.empty(DRAWS, dtype=amp_dtype, device=target.device))
    case.equal("type", drawn.dtype, amp_dtype)
    values = drawn.float().cpu().flatten()
    outside = (values < chosen.least) | (values > chosen.most) | values.isnan()
    outside |= (values == chosen.least) & chosen.without_least | (values == chosen.most) & chosen.without_most
    case.at_most("draws outside of the distribution, if it happens by chance", int(outside.sum()), FEW)
    case.equal("draws outside of the distribution", int(outside.sum()), 0)
    for at in chosen.at:
        # A draw is the number that an exact one rounds to: it counts on either side of its own place.
        seen = [float((values < at).double().mean()), float((values <= at).double().mean())]
        step = abs(at) * torch.finfo(amp_dtype).eps
        low, high = chosen.below(at - step), chosen.below(at + step)
        case.at_most(f"standard deviations by which too many are below {at:g}", _beyond(seen[0], high), SIGMAS)
        case.at_most(f"standard deviations by which too few are below {at:g}", _beyond(1 - seen[1], 1 - low), SIGMAS)


def _beyond(seen: float, promised: float) -> float:
    """Return by how many standard deviations a share of the draws is above the promised one."""
    return (seen - promised) / math.sqrt(max(promised * (1 - promised), 1 / DRAWS) / DRAWS)


# Weights, and how many of them are drawn in a row.
CLASSES = {"with replacement": (1, True), "one": (1, False), "without replacement": (2, False)}


@contract("AMP-NUMERICS-114")
@pytest.mark.parametrize("way", CLASSES)
def test_classes(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    """Classes of probability zero, in rows as long as a vocabulary, and the shares of a few others."""
    number, replacement = CLASSES[way]
    torch.manual_seed(case.seed)
    rows = torch.zeros(256, 4096, dtype=amp_dtype)
    rows[:, :number] = 1
    drawn = torch.multinomial(rows.to(target.device), number, replacement=replacement)
    wrong = int((drawn >= number).sum())
    case.at_most("classes of probability zero that are drawn, if it happens by chance", wrong, FEW)
    case.equal("classes of probability zero that are drawn", wrong, 0)

    rows = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0], dtype=amp_dtype).expand(2**17, 5).contiguous()
    first = torch.multinomial(rows.to(target.device), number, replacement=replacement)[:, 0].cpu()
    shares = torch.bincount(first, minlength=5).double() / len(first)
    for place, share in enumerate((0.0, 0.125, 0.25, 0.0, 0.625)):
        allowed = SIGMAS * math.sqrt(share * (1 - share) / len(first))
        case.at_most(f"class {place}: distance of its share from {share:g}", abs(float(shares[place]) - share), allowed)


MANY = 4096  # more classes than either 16-bit type counts in ones


@contract("AMP-NUMERICS-114")
@pytest.mark.parametrize("kind", ["equal", "falling"])
def test_many_classes(case: Case, target: Target, amp_dtype: torch.dtype, kind: str) -> None:
    """The shares of quarters of a vocabulary, in which each class is rarer than a rounding of 1."""
    torch.manual_seed(case.seed)
    weights = torch.ones(MANY) if kind == "equal" else torch.linspace(2, 0.5, MANY)
    weights = weights.to(amp_dtype)
    drawn = torch.multinomial(weights.to(target.device), 2**18, replacement=True).cpu()
    shares = weights.double().view(4, -1).sum(1) / weights.double().sum()
    seen = torch.bincount(drawn // (MANY // 4), minlength=4).double() / len(drawn)
    for quarter, (share, found) in enumerate(zip(shares.tolist(), seen.tolist(), strict=True)):
        allowed = SIGMAS * math.sqrt(share * (1 - share) / len(drawn))
        case.at_most(f"quarter {quarter}: distance of its share from {share:.3f}", abs(found - share), allowed)


_FILLS: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("uniform_", "normal_", "exponential_", "log_normal_", "cauchy_"), ()),
    "bernoulli_": (0.5,),
    "geometric_": (0.25,),
}
_INITIAL = (
    *("normal_", "uniform_", "trunc_normal_", "xavier_normal_", "xavier_uniform_"),
    *("kaiming_normal_", "kaiming_uniform_"),
)


def _filled(name: str, *given: Any) -> Tensor:
    *numbers, x, generator = given
    filled: Tensor = getattr(x.clone(), name)(*numbers, generator=generator)
    return filled


def _initial(name: str, x: Tensor, generator: torch.Generator | None) -> Tensor:
    filled: Tensor = getattr(_init, name)(x.clone().view(8, 8), generator=generator)
    return filled


# Calls that take a generator, of a tensor of probabilities.
GENERATED: dict[str, Callable[[Tensor, torch.Generator | None], Tensor]] = {
    "rand": lambda x, g: torch.rand(64, generator=g, dtype=x.dtype, device=x.device),
    "randn": lambda x, g: torch.randn(64, generator=g, dtype=x.dtype, device=x.device),
    "normal": lambda x, g: torch.normal(x, x, generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x, generator=g),
    "multinomial": lambda x, g: torch.multinomial(x, 8, generator=g),
    "multinomial with replacement": lambda x, g: torch.multinomial(x, 8, True, generator=g),
    "poisson": lambda x, g: torch.poisson(8 * x, generator=g),
    **{name: partial(_filled, name, *given) for name, given in _FILLS.items()},
    **{f"init.{name}": partial(_initial, name) for name in _INITIAL},
}


@contract("AMP-NUMERICS-114")
def test_generators(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    """Draw twice from generators of one seed, between which the default generator has another one."""
    probabilities = torch.full((64,), 0.25, dtype=amp_dtype, device=target.device)
    calls = {name: partial(call, probabilities, _generator(target, 0)) for name, call in GENERATED.items()}
    unlike, alike, moved, repeated = [], [], [], []
    for name in case.with_kernels(target, calls):
        drawn, call = [], partial(GENERATED[name], probabilities)
        for number, seed in enumerate((1, 1, 2)):
            seed_torch(number)
            before = torch.get_rng_state()
            drawn.append(call(_generator(target, seed)))
            if not torch.equal(torch.get_rng_state(), before):
                moved.append(name)
        unlike += [] if torch.equal(drawn[0], drawn[1]) else [name]
        alike += [name] if torch.equal(drawn[0], drawn[2]) else []
        generator = _generator(target, 1)
        first, state, second = call(generator), generator.get_state(), call(generator)
        generator.set_state(state)
        again = [] if torch.equal(second, call(generator)) else [f"{name}, of a restored state"]
        repeats = {"one generator": (first, second), "the default generator": (call(None), call(None))}
        repeated += again + [f"{name}, of {which}" for which, pair in repeats.items() if torch.equal(*pair)]
    case.at_least("calls judged", len(GENERATED), 1)
    case.equal("calls that draw other numbers from a generator of the same seed", unlike, [])
    case.equal("control: calls that draw the same numbers from one of another seed", alike, [])
    case.equal("calls that draw from the default generator of the CPU", sorted(set(moved)), [])
    case.equal("calls that draw the same numbers a second time, or others from a restored state", repeated, [])


def _generator(target: Target, seed: int) -> torch.Generator:
    return torch.Generator(target.device).manual_seed(seed)


def _gradient(case: Case, call: Callable[[Tensor], Tensor], leaf: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of a call whose draws are those of the case's seed, and the gradient, both in float32."""
    seed_torch(case.seed)
    result = call(leaf)
    (slope,) = torch.autograd.grad(result, leaf, weights.to(result))
    return result.detach().float().cpu(), slope.float().cpu()


@contract("AMP-NUMERICS-114")
def test_drawn_slopes(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    """The gradient of rrelu is the slope that was drawn, between its bounds."""
    x = -torch.ones(512, device=target.device, dtype=amp_dtype).requires_grad_()
    try:
        seen, slopes = _gradient(case, lambda y: F.rrelu(y, 0.125, 0.875, training=True), x, torch.ones_like(x))
    except (NotImplementedError, RuntimeError) as error:
        case.unsupported(f"{target.name} has no rrelu of {amp_dtype}: {str(error)[:80]}")
    case.equal("gradients that are not the slopes of the result", int((slopes != -seen).sum()), 0)
    case.between("least slope", float(slopes.min()), 0.125, 0.25)
    case.between("largest slope", float(slopes.max()), 0.75, 0.875)


@contract("AMP-NUMERICS-114")
def test_hard_samples(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    """Hard samples of gumbel_softmax pick one class and have the gradients of the soft ones with the same draws."""
    x = torch.randn(64, 8, generator=rng).to(target.device, amp_dtype).requires_grad_()
    weights = torch.arange(x.numel(), device=target.device).view_as(x) % 5 - 2.0
    for region in (False, True):
        with target.autocast(amp_dtype, enabled=region):
            soft, wanted = _gradient(case, lambda y: F.gumbel_softmax(y), x, weights)
            hard, slopes = _gradient(case, lambda y: F.gumbel_softmax(y, hard=True), x, weights)
        place = "in a region" if region else "outside"
        case.equal(f"classes picked {place}", hard.argmax(1).tolist(), soft.argmax(1).tolist())
        # The soft sample is subtracted and added again.
        error = float((hard - F.one_hot(soft.argmax(1), 8)).abs().max())
        case.at_most(f"distance from a whole class {place}", error, torch.finfo(amp_dtype).eps)
        case.equal(f"gradients {place} that are not those of the soft samples", int((slopes != wanted).sum()), 0)
        case.at_least(f"control: largest gradient {place}", float(wanted.abs().max()), 2.0**-6)
