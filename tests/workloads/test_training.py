"""The programs that are trained, and the float64 oracle of one training step."""

from __future__ import annotations

import pytest
import torch

from conformance.oracles.float64_step import ExactAdam, exact_step
from conformance.workloads.linear import linear
from conformance.workloads.mlp import mlp
from conformance.workloads.training import Workload, train, train_step

CPU = torch.device("cpu")
MAKERS = {"P1": linear, "P2": mlp}


def _seeded(name: str, seed: int = 0, **options: float) -> Workload:
    return MAKERS[name](CPU, torch.Generator().manual_seed(seed), **options)


def _plain() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", enabled=False)


def _fp32() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


def test_p2_is_the_program_of_the_source_material() -> None:
    work = _seeded("P2")
    shapes = [tuple(parameter.shape) for parameter in work.model.parameters()]
    assert shapes == [(256, 128), (256,), (256, 256), (256,), (10, 256), (10,)]
    assert len(work.batches) == 20
    assert {(tuple(x.shape), tuple(y.shape)) for x, y in work.batches} == {((64, 128), (64,))}
    assert type(work.optimizer) is torch.optim.Adam
    assert work.optimizer.param_groups[0]["lr"] == 1e-3


def test_p1_is_the_program_of_the_source_material() -> None:
    work = _seeded("P1")
    assert [tuple(parameter.shape) for parameter in work.model.parameters()] == [(512, 1024), (512,)]
    assert tuple(work.batch(7)[0].shape) == (256, 1024)
    assert type(work.optimizer) is torch.optim.AdamW
    assert work.clip == 1.0


@pytest.mark.parametrize("name", MAKERS)
def test_one_seed_makes_one_workload(name: str) -> None:
    one, other, third = _seeded(name, 1), _seeded(name, 1), _seeded(name, 2)
    for first, second, different in zip(
        one.model.parameters(), other.model.parameters(), third.model.parameters(), strict=True
    ):
        assert torch.equal(first, second)
        assert not torch.equal(first, different)
    assert torch.equal(one.batch(0)[0], other.batch(0)[0])


def test_batches_go_round() -> None:
    work = _seeded("P2")
    assert work.batch(23)[0] is work.batches[3][0]


@pytest.mark.parametrize(("name", "steps"), [("P1", 3), ("P2", 20)])
def test_the_loss_falls(name: str, steps: int) -> None:
    losses = train(_seeded(name), steps, _fp32, _plain())
    assert len(losses) == steps
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", MAKERS)
def test_the_oracle_agrees_with_autograd_in_float64(name: str) -> None:
    work = _seeded(name)
    work.model.double()
    parameters = list(work.model.parameters())
    inputs, target = work.batch(0)
    inputs = inputs.double()
    target = target.double() if target.is_floating_point() else target
    loss = work.loss(work.model(inputs), target)
    loss.backward()
    layers = [(weight.detach(), bias.detach()) for weight, bias in zip(parameters[::2], parameters[1::2], strict=True)]
    exact = exact_step(layers, inputs, target, torch.float16)
    assert exact.loss == pytest.approx(loss.item(), rel=1e-12)
    for gradient, parameter in zip(exact.gradients, parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-15)


def test_spreads_grow_with_the_unit_roundoff() -> None:
    work = _seeded("P2")
    parameters = [parameter.detach() for parameter in work.model.parameters()]
    layers = list(zip(parameters[::2], parameters[1::2], strict=True))
    coarse, fine = (exact_step(layers, *work.batch(0), dtype) for dtype in (torch.bfloat16, torch.float16))
    assert coarse.loss == fine.loss
    assert coarse.loss_spread / fine.loss_spread == pytest.approx(8, rel=0.01)


def test_spreads_predict_the_error_of_real_roundings() -> None:
    work = _seeded("P1")
    weight, bias = (parameter.detach() for parameter in work.model.parameters())
    inputs, target = work.batch(0)
    exact = exact_step([(weight, bias)], inputs, target, torch.bfloat16)
    rounded = (inputs.bfloat16().double() @ weight.bfloat16().double().T + bias.bfloat16().double()).bfloat16()
    error = (rounded.double() - exact.outputs[0]).norm() / exact.output_spreads[0].norm()
    assert 0.4 <= error <= 1.0


@pytest.mark.parametrize("name", MAKERS)
def test_exact_adam_follows_torch(name: str) -> None:
    work = _seeded(name)
    decay = 0.01 if name == "P1" else 0.0
    adams = [ExactAdam(1e-3, decay) for _ in work.model.parameters()]
    for step in range(4):
        before = [parameter.detach().clone() for parameter in work.model.parameters()]
        train_step(work, step, _fp32, _plain())
        for adam, old, parameter in zip(adams, before, work.model.parameters(), strict=True):
            assert parameter.grad is not None
            expected, reach = adam.update(old, parameter.grad)
            assert ((parameter.detach().double() - expected).abs() <= reach).all()


def test_exact_adam_sees_a_learning_rate_a_thousandth_off() -> None:
    work = _seeded("P2", lr=1.001e-3)
    parameter = next(work.model.parameters())
    before = parameter.detach().clone()
    train_step(work, 0, _fp32, _plain())
    assert parameter.grad is not None
    expected, reach = ExactAdam(1e-3).update(before, parameter.grad)
    assert ((parameter.detach().double() - expected).abs() > reach).any()
