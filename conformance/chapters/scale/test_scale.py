"""Check that scale() multiplies outputs of every dtype and container by the loss scale and changes nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...scaler import model as oracle
from ...workloads.third_party_optimizers import owning
from .support import iterate, started, tracker

SCALED = {
    # name: dtype of the outputs, shape, dtype of the result (type promotion with a 0-dim fp32 scale)
    "fp32-loss": (torch.float32, (), torch.float32),
    "fp32": (torch.float32, (17,), torch.float32),
    "fp32-matrix": (torch.float32, (3, 5), torch.float32),
    "bf16-loss": (torch.bfloat16, (), torch.float32),
    "bf16": (torch.bfloat16, (17,), torch.bfloat16),
    "fp16-loss": (torch.float16, (), torch.float32),
    "fp64": (torch.float64, (17,), torch.float64),
}


@contract("AMP-SCALE-010")
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("scale", [65536.0, deep("standard", 1.0), deep("standard", 2.0**-20)], ids="{:g}".format)
def test_scaled_value(case: Case, target: Target, rng: torch.Generator, name: str, scale: float) -> None:
    dtype, shape, result = SCALED[name]
    case.require_arithmetic(target, dtype)
    values = torch.randn(shape, generator=rng).to(dtype)
    seen = started(target, init_scale=scale).scale(values.to(target.device, copy=True))
    # A power of two is exact in every one of these dtypes, so all devices agree.
    case.identical("outputs times the scale", seen, (values.double() * scale).to(result))


@contract("AMP-SCALE-010")
@pytest.mark.parametrize("scale", [65535.0, deep("standard", 0.1), deep("standard", 12345.678)], ids="{:g}".format)
def test_scaled_value_is_rounded_once(case: Case, target: Target, rng: torch.Generator, scale: float) -> None:
    values = torch.randn(33, generator=rng)
    seen = started(target, init_scale=scale).scale(values.to(target.device, copy=True))
    kept = oracle.rounded(scale, oracle.FP32)
    expected = [oracle.rounded(value * kept, oracle.FP32) for value in values.tolist()]
    case.identical("outputs times the scale, in fp32", seen, torch.tensor(expected))


@contract("AMP-SCALE-010")
def test_scaling_follows_the_scale(case: Case, target: Target) -> None:
    scaler = started(target, init_scale=8.0, growth_interval=1)
    optimizer = owning(torch.ones((), device=target.device))
    loss = torch.ones((), device=target.device)
    changes: dict[str, tuple[Callable[[], Any], float]] = {
        "growth": (lambda: iterate(scaler, optimizer), 16.0),
        "backoff": (lambda: iterate(scaler, optimizer, value=math.inf), 8.0),
        "update(3.0)": (lambda: scaler.update(3.0), 3.0),
        "load_state_dict": (lambda: scaler.load_state_dict({**scaler.state_dict(), "scale": 5.0}), 5.0),
    }
    for what, (change, expected) in changes.items():
        change()
        seen = [scaler.scale(loss).item(), scaler.scale([loss])[0].item(), next(scaler.scale(iter([loss]))).item()]
        case.equal(f"a loss of 1 scaled after {what}, alone, in a list, in an iterator", seen, [expected] * 3)


def flat(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    else:
        for output in outputs:
            yield from flat(output)


def shape_of(outputs: Any) -> str:
    """Return the nesting of `outputs` as text, such as tuple[t, list[t, t]]."""
    if isinstance(outputs, torch.Tensor):
        return "t"
    inner = ", ".join(shape_of(output) for output in outputs)
    return f"{type(outputs).__name__}[{inner}]"


CONTAINERS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "list": lambda t: t,
    "tuple": tuple,
    "one": lambda t: [t[0]],
    "list-of-tuples": lambda t: [(t[0], t[1]), (t[2],), t[3]],
    "tuple-of-lists": lambda t: (t[0], [t[1], (t[2], [t[3]])]),
}


@contract("AMP-SCALE-011")
@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("fresh", [True, False], ids=["first-call", "later-call"])
def test_containers(case: Case, target: Target, rng: torch.Generator, name: str, fresh: bool) -> None:
    values = [torch.randn(shape, generator=rng).to(target.device, copy=True) for shape in ((), (3,), (2, 2), (1,))]
    outputs = CONTAINERS[name](values)
    settings = {"init_scale": 512.0}
    scaler = torch.amp.GradScaler(target.device_type, **settings) if fresh else started(target, **settings)
    scaled = scaler.scale(outputs)
    case.equal("containers", shape_of(scaled), shape_of(outputs))
    for seen, value in zip(flat(scaled), flat(outputs), strict=True):
        case.identical("an output times 512", seen, value * 512)
    case.equal("scale afterwards", scaler.get_scale(), 512.0)


@contract("AMP-SCALE-012")
@pytest.mark.parametrize(
    "make", [iter, lambda t: (x for x in t), lambda t: dict.fromkeys(t).keys()], ids=["iterator", "generator", "keys"]
)
def test_iterables(case: Case, target: Target, rng: torch.Generator, make: Callable[[Any], Any]) -> None:
    values = [torch.randn((), generator=rng).to(target.device, copy=True) for _ in range(3)]
    scaled = list(torch.amp.GradScaler(target.device_type, init_scale=512.0).scale(make(values)))
    case.equal("number of outputs", len(scaled), 3)
    for seen, value in zip(scaled, values, strict=True):
        case.identical("an output times 512", seen, value * 512)


OUTPUT = "tensor|tensors|scale|output|outputs"
"""What the error about an output that is no tensor names."""


@contract("AMP-SCALE-013")
@pytest.mark.parametrize("outputs", [1.0, 7, None, [1.0], (None,)], ids=["float", "int", "none", "list", "tuple"])
def test_not_a_tensor(case: Case, target: Target, outputs: Any) -> None:
    scaler = torch.amp.GradScaler(target.device_type)
    case.raises("scale()", ValueError, lambda: scaler.scale(outputs), names=(OUTPUT,))
    nested = [torch.ones((), device=target.device), [outputs]]
    case.raises(
        "scale(), nested next to a tensor",
        ValueError,
        lambda: scaler.scale(nested),
        names=(OUTPUT,),
    )


@contract("AMP-SCALE-014")
def test_scale_changes_nothing_else(case: Case, target: Target) -> None:
    scaler = started(target, init_scale=512.0, growth_interval=1)
    loss = torch.tensor([1.5, -2.0], device=target.device)
    outputs = [loss, (loss,)]
    first = scaler.scale(outputs)
    for _ in range(3):
        scaler.scale(loss)
    case.identical("the outputs", loss, torch.tensor([1.5, -2.0]))
    case.identical("the second scaling", scaler.scale(outputs)[0], first[0])
    case.equal("the scale", scaler.get_scale(), 512.0)
    case.equal("the growth tracker", tracker(scaler), 0)
    first[0].zero_()
    case.identical("the outputs, once the scaled ones are overwritten", loss, torch.tensor([1.5, -2.0]))


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # name: an output of a model with one leaf of two elements
    "leaf": lambda leaf: leaf,
    "loss": lambda leaf: leaf.square().sum(),
    "unreduced": lambda leaf: leaf * 3,
    "view": lambda leaf: (leaf * 3)[:1],
    "detached": lambda leaf: (leaf * 3).detach(),
}


@contract("AMP-SCALE-014")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("inside", ["alone", "list", "iterator"])
def test_scale_leaves_a_loss_of_a_model(case: Case, target: Target, name: str, inside: str) -> None:
    leaf = torch.tensor([1.5, -2.0], device=target.device, requires_grad=True)
    scaler = started(target, init_scale=512.0)
    loss = LOSSES[name](leaf)
    before = loss.detach().clone()
    node, version = loss.grad_fn, loss._version
    if inside == "alone":
        scaled = scaler.scale(loss)
    elif inside == "list":
        [scaled] = scaler.scale([loss])
    else:
        [scaled] = list(scaler.scale(iter([loss])))
    case.identical("the scaled output", scaled.detach(), before * 512)
    case.identical("the output after scale()", loss.detach(), before)
    seen = loss.grad_fn is node, loss._version, loss.requires_grad
    case.equal("node, version and requires_grad of the output", seen, (True, version, name != "detached"))
    with torch.no_grad():
        scaled.zero_()
    case.identical("the output, once the scaled one is overwritten", loss.detach(), before)


@contract("AMP-SCALE-015")
def test_gradients_are_scaled(case: Case, target: Target, rng: torch.Generator) -> None:
    values = torch.randn(5, generator=rng)
    plain = values.to(target.device, copy=True).requires_grad_()
    scaled = values.to(target.device, copy=True).requires_grad_()
    (plain * plain).sum().backward()
    started(target).scale((scaled * scaled).sum()).backward()
    case.identical("gradients of the scaled loss", scaled.grad, plain.grad * 65536)
    scaled.grad = None
    for loss in started(target).scale([(scaled * scaled).sum(), scaled.sum()]):
        loss.backward()
    case.identical("gradients of a list of scaled losses", scaled.grad, plain.grad * 65536 + 65536)
