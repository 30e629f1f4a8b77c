"""Check that what overflows apart from an optimizer's gradients decides nothing about its step."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...workloads.third_party_optimizers import Ordinary, SelfScaling
from .support import tracker


@dataclass
class Run:
    """A training of one vector of weights, and what it has at hand apart from them."""

    target: Target
    amp_dtype: torch.dtype
    scaler: torch.amp.GradScaler
    weight: nn.Parameter
    other: nn.Parameter

    @property
    def huge(self) -> Tensor:
        """A matrix whose products with itself overflow in every type."""
        return torch.full((4, 4), torch.finfo(torch.float32).max / 2, device=self.target.device)

    def region(self, enabled: bool = True) -> torch.autocast:
        return self.target.autocast(self.amp_dtype, enabled=enabled)

    def loss(self) -> Tensor:
        # Its gradient is a vector of small integers times the scale, whatever the weight.
        return (self.weight * torch.arange(1.0, 5.0, device=self.weight.device)).sum()


# What makes an inf or a NaN of a huge matrix.
OVERFLOWS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, x),
    "linear with bias": lambda x: F.linear(x, x, x[0]),
    "a batch of products": lambda x: torch.bmm(x[None], x[None]),
    "convolution": lambda x: F.conv2d(x[None, None], x[None, None]),
    "transposed convolution": lambda x: F.conv_transpose2d(x[None, None], x[None, None]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "exp": lambda x: torch.exp(x),
    "softmax": lambda x: F.softmax(x * math.inf, 0),
    "norm": lambda x: F.layer_norm(x, (4,), x[0]),
    "loss": lambda x: F.mse_loss(x, -x),
    "sum": lambda x: x.sum() * 2,
    "cast": lambda x: x.half(),
}


def _evaluation(mode: Callable[[], Any], cast: bool, run: Run) -> list[str]:
    """Evaluate what overflows, in or outside of a region; return what did."""
    overflowed = []
    for name, op in OVERFLOWS.items():
        with contextlib.suppress(RuntimeError, NotImplementedError), mode(), run.region(cast):
            result = op(run.huge if cast else run.huge.to(run.amp_dtype))
            if not result.isfinite().all():
                overflowed.append(name)
    return overflowed


def _discarded_loss(run: Run) -> None:
    """Compute an infinite loss of the very weights, and scale it, for no backward."""
    with run.region():
        loss = (run.weight * run.huge).sum() + F.linear(run.huge, run.weight[None]).sum()
    run.scaler.scale([loss * math.inf, loss])


def _discarded_gradients(run: Run) -> None:
    """Ask for infinite gradients of the very weights, which do not become theirs."""
    with run.region():
        loss = F.linear(run.huge, run.weight[None] * math.inf).sum()
    torch.autograd.grad(run.scaler.scale(loss), run.weight)


def _another_model(run: Run) -> None:
    """Train another model, whose gradients are infinite, without a scaler."""
    run.other.grad = None
    with run.region():
        loss = F.linear(run.huge, run.other[None]).sum()
    (loss * math.inf).backward()
    nn.utils.clip_grad_norm_([run.other], 1.0)


def _another_scaler(run: Run) -> None:
    """Train another model with another scaler, whose step is skipped."""
    scaler, optimizer = torch.amp.GradScaler(run.target.device_type), torch.optim.SGD([run.other], lr=1.0)
    scaler.scale((run.other * math.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def _no_gradient_reaches(run: Run) -> None:
    """Backpropagate past activations that are NaN: a detached one, and one that is not selected."""
    with run.region():
        activation = F.linear(run.huge, run.huge) * 0
        nothing = activation.detach().sum() * 0
    chosen = torch.where(torch.ones_like(run.weight, dtype=torch.bool), run.weight, activation[0].float())
    del nothing
    torch.autograd.grad(run.scaler.scale(chosen.sum()), run.weight)


def _states(run: Run) -> None:
    """Keep inf and NaN in tensors that are no gradient of the optimizer's."""
    run.other.data.fill_(math.nan)
    run.other.grad = torch.full_like(run.other, math.inf)
    run.scaler.scale(torch.full((2,), math.inf, device=run.target.device))
    run.weight.register_hook(lambda gradient: torch.nan_to_num(gradient))


def _an_error(run: Run) -> None:
    """Leave a region, and an anomaly, by an exception after an overflow."""
    with contextlib.suppress(RuntimeError), run.region(), torch.autograd.set_detect_anomaly(True, check_nan=True):
        other = F.linear(run.huge, run.other[None]).sum()
        (other * math.nan).backward()


APART: dict[str, Callable[[Run], object]] = {
    "evaluation under no_grad": partial(_evaluation, torch.no_grad, True),
    "evaluation in inference mode": partial(_evaluation, torch.inference_mode, True),
    "evaluation with gradients": partial(_evaluation, contextlib.nullcontext, True),
    "evaluation in 16 bits": partial(_evaluation, torch.no_grad, False),
    "a discarded loss": _discarded_loss,
    "discarded gradients": _discarded_gradients,
    "another model": _another_model,
    "another scaler": _another_scaler,
    "activations that no gradient reaches": _no_gradient_reaches,
    "tensors that are no gradients": _states,
    "an exception": _an_error,
}
PLACES = ("before the loss", "before unscale_", "before step", "before update", "after update")
KINDS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "ordinary": Ordinary,
    "self-scaling": SelfScaling,
    "SGD": lambda weights: torch.optim.SGD(weights, lr=1.0),
    "Adam": lambda weights: torch.optim.Adam(weights, lr=1.0),
}


def _start(target: Target, dtype: torch.dtype) -> Run:
    scaler = torch.amp.GradScaler(target.device_type, init_scale=1024.0, growth_interval=2)
    weight, other = torch.arange(4.0, device=target.device), torch.ones(4, device=target.device)
    return Run(target, dtype, scaler, nn.Parameter(weight), nn.Parameter(other))


def _trained(
    target: Target,
    dtype: torch.dtype,
    kind: str,
    place: str | None,
    apart: Callable[[Run], object],
    *,
    bad: bool = False,
) -> list[tuple[Any, ...]]:
    """Return weights, scale and tracker after each of three iterations, in the second of which something overflows."""
    run = _start(target, dtype)
    weight, scaler = run.weight, run.scaler
    optimizer = KINDS[kind]([weight])
    seen: list[tuple[Any, ...]] = []

    def at(here: str) -> None:
        if here == place and number == 1:
            apart(run)

    for number in range(3):
        optimizer.zero_grad()
        at("before the loss")
        scaler.scale(run.loss() * (math.inf if bad and number == 1 else 1.0)).backward()
        at("before unscale_")
        if kind != "self-scaling":
            scaler.unscale_(optimizer)
        at("before step")
        scaler.step(optimizer)
        at("before update")
        scaler.update()
        at("after update")
        seen.append((weight.tolist(), scaler.get_scale(), tracker(scaler)))
    return seen


@contract("AMP-SCALE-195")
@pytest.mark.parametrize("kind", [*list(KINDS)[:2], *(deep("standard", kind) for kind in list(KINDS)[2:])])
def test_what_overflows_apart(case: Case, target: Target, amp_dtype: torch.dtype, kind: str) -> None:
    case.require_arithmetic(target, torch.float64)
    clean = _trained(target, amp_dtype, kind, None, _states)
    # The gradients are 1 to 4, and the scale grows after two clean iterations.
    growing = [(1024.0, 1), (2048.0, 0), (2048.0, 1)]
    case.equal("scale and tracker where nothing overflows", [one[1:] for one in clean], growing)
    skipped = _trained(target, amp_dtype, kind, None, _states, bad=True)
    case.equal("scales where the gradients are infinite (control)", [one[1] for one in skipped], [1024.0, 512.0, 512.0])
    for cast in (True, False):
        overflowed = _evaluation(torch.no_grad, cast, _start(target, amp_dtype))
        case.enough(target, f"ops that overflow {'in' if cast else 'outside of'} a region (control)", len(overflowed))
    wrong = {}
    for place, (name, apart) in itertools.product(PLACES, APART.items()):
        if (seen := _trained(target, amp_dtype, kind, place, apart)) != clean:
            wrong[f"{name}, {place}"] = seen
    case.equal("weights, scale and tracker that are not as without", wrong, {})
