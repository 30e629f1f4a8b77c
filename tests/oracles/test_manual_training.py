"""The loop by hand keeps the documented rules of the loss scale, and is plain training where nothing is lowered."""

from __future__ import annotations

import copy

import torch
from torch.nn import functional

from conformance.oracles.manual_training import Float32, HandScale, HandScaler, train_by_hand


def widened(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(outputs.float(), target)


def test_the_scale_halves_and_doubles() -> None:
    scale = HandScale(scale=8.0, growth_interval=2)
    history = []
    for finite in (True, True, True, False, True, True):
        scale.update(finite)
        history.append(scale.scale)

    assert history == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0]
    assert scale.skipped == [False, False, False, True, False, False]


def test_in_float32_it_is_plain_training() -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    theirs = copy.deepcopy(ours)
    batches = [(torch.randn(5, 4), torch.randn(5, 2)) for _ in range(3)]
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)

    losses = train_by_hand(ours, optimizer, functional.mse_loss, batches, torch.float32, HandScale())

    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for seen, (inputs, target) in zip(losses, batches, strict=True):
        plain.zero_grad()
        loss = functional.mse_loss(theirs(inputs), target)
        loss.backward()
        plain.step()
        assert loss.item() == seen
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_overflow_is_skipped() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    before = copy.deepcopy(model.state_dict())
    scale = HandScale(scale=2.0**30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    batch = (torch.full((1, 1), 100.0), torch.full((1, 1), -100.0))
    train_by_hand(model, optimizer, widened, [batch], torch.float16, scale)

    assert scale.scale == 2.0**29
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_scaler_by_hand_skips_each_optimizer_for_itself() -> None:
    ones = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([one], lr=1.0) for one in ones]
    scaler = HandScaler(8.0, 2)
    ones[0].grad, ones[1].grad = torch.full((2,), 4.0), torch.tensor([4.0, float("inf")])

    scaler.unscale_(optimizers[0])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()

    assert [one.tolist() for one in ones] == [[0.5, 0.5], [1.0, 1.0]]
    assert scaler.get_scale() == 4.0


def test_programs_in_float32_scale_nothing() -> None:
    amp = Float32("cpu", torch.float16)
    scaler = amp.scaler(1024.0, 2)

    with amp.region():
        assert functional.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype == torch.float32
    scaler.update()

    assert scaler.get_scale() == 1.0
    assert scaler.scale(torch.tensor(3.0)).item() == 3.0
