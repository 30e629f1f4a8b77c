"""The optimizer chapter's oracles: the table, the comparison of states, the written algorithms and the workload."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from conformance.chapters.optimizer import optimizer_configs
from conformance.chapters.optimizer.float64_updates import UPDATES, steps
from conformance.chapters.optimizer.optimizer_configs import configs, listed, reached, takes_closure
from conformance.oracles.optimizer_state import differences, gradients, same, snapshot
from conformance.workloads.linear_loss import LinearLoss, with_nonfinite
from conformance.workloads.optimizer_classes import present


class Newcomer(torch.optim.SGD):
    """An optimizer that nobody has listed."""


def test_table_covers_every_optimizer_and_implementation() -> None:
    everything = list(configs())

    assert {kind.optimizer for kind in everything} == {name for name in present() if not takes_closure(name)}
    adams = {kind.implementation for kind in everything if kind.optimizer == "Adam"}
    assert adams == {"for-loop", "foreach", "fused"}
    assert len({kind.id for kind in everything}) == len(everything)
    assert all(kind.listed for kind in everything)
    assert [takes_closure(name) for name in ("LBFGS", "Adam")] == [True, False]


def test_unlisted_optimizer_is_tried_with_default_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "Newcomer", Newcomer, raising=False)

    new = [kind for kind in configs() if kind.optimizer == "Newcomer"]

    assert [(kind.variant, kind.implementation, kind.listed) for kind in new] == [
        ("default", "for-loop", False),
        ("default", "foreach", False),
        ("default", "fused", False),
    ]
    assert not any(kind.promised_on("cpu") for kind in new)
    assert isinstance(new[1].make([torch.nn.Parameter(torch.ones(2))]), Newcomer)


def test_implementation_flag_reaches_the_optimizer() -> None:
    for kind in configs(implementations=("foreach", "fused")):
        parameter = torch.nn.Parameter(torch.ones(2, 2))
        assert kind.make([parameter]).defaults[kind.implementation] is True, kind.id


def test_versions_compare_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")

    assert [reached(version) for version in ("", "2.6", "2.9", "2.13", "2.14", "3.0")] == [True] * 4 + [False] * 2
    assert listed()["Muon"] == "2.9"
    assert optimizer_configs.OptimizerConfig("Adagrad", "", "fused", {}).scales_itself  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "expected", "equal"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1e-45]), torch.tensor([0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0]).double(), False),
        (torch.tensor([1.0]), torch.tensor(1.0), False),
        (torch.tensor([1]), torch.tensor([1]), True),
        (1, True, False),
        (None, None, True),
    ],
)
def test_same(seen: Any, expected: Any, equal: bool) -> None:
    assert same(seen, expected) is equal


def test_snapshot_is_a_copy_and_departures_name_the_place() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.5, foreach=False)
    before = snapshot(optimizer)
    parameter.grad = torch.ones(2)
    optimizer.step()
    after = snapshot(optimizer)

    found = differences(after, before)

    assert before["parameter/0/0"].tolist() == [1.0, 1.0]
    assert any(line.startswith("parameter/0/0: float32(2,) [0.5") for line in found)
    assert "state/0/exp_avg: new" in found
    assert differences(after, snapshot(optimizer)) == []
    optimizer.state[parameter]["step"] += 1
    assert differences(snapshot(optimizer), after) == [
        "state/0/step: float32() [2.0] on cpu in place of float32() [1.0] on cpu"
    ]
    assert differences({}, {str(place): place for place in range(9)})[-1] == "and 5 more"
    assert list(gradients([parameter, torch.nn.Parameter(torch.ones(1))]).values())[1] is None


def test_written_algorithms_on_figures_worked_out_by_hand() -> None:
    momentum = {"lr": 0.5, "momentum": 0.5, "dampening": 0.5, "weight_decay": 1.0}
    # buffer 1 + 1 = 2, parameter 1 - 1 = 0; buffer 0.5 * 2 + 0.5 * 1 = 1.5, parameter -0.75
    assert steps("SGD", 1.0, [1.0, 1.0], momentum) == [0.0, -0.75]
    assert steps("SGD", 1.0, [2.0], {"lr": 0.5, "momentum": 0.5, "nesterov": True}) == [1.0 - 0.5 * 3.0]
    # the first step of Adam moves by lr * g / (|g| + eps), whatever the averages' rates
    assert steps("Adam", 1.0, [3.0], {"lr": 0.5, "eps": 1.0}) == pytest.approx([1 - 0.5 * 3 / 4])
    assert steps("AdamW", 1.0, [3.0], {"lr": 0.5, "eps": 1.0, "weight_decay": 0.5}) == pytest.approx([0.75 - 0.375])
    # sum 0.75 + 1 = 1.75; rate 0.5, then 0.25
    adagrad = {"lr": 0.5, "lr_decay": 1.0, "initial_accumulator_value": 3.0, "eps": 0.0, "maximize": True}
    assert steps("Adagrad", 1.0, [1.0, 0.0], adagrad) == pytest.approx([1.25, 1.25])
    falling = {"lr": 1.0, "betas": (0.0, 0.5), "eps": 0.0, "amsgrad": True}
    # squares 8, then 4: the largest stays 8, corrected by 1/2 and 3/4
    expected = [1 - 4 / math.sqrt(16), 1 - 4 / math.sqrt(16) - 0.0]
    assert steps("Adam", 1.0, [4.0, 0.0], falling) == pytest.approx(expected)


def test_written_algorithms_agree_with_torch_in_float64() -> None:
    for kind in (kind for kind in configs(implementations=("for-loop",)) if kind.optimizer in UPDATES):
        parameter = torch.nn.Parameter(torch.tensor([1.5], dtype=torch.float64))
        optimizer = kind.make([parameter])
        chosen = [0.75, 1.25, 0.5]
        for gradient in chosen:
            parameter.grad = torch.tensor([gradient], dtype=torch.float64)
            optimizer.step()
        assert steps(kind.optimizer, 1.5, chosen, kind.arguments)[-1] == pytest.approx(parameter.item(), rel=1e-14), (
            kind
        )


@pytest.mark.parametrize("kind", ["dense", "matrices", "sparse"])
def test_gradients_of_the_workload_are_its_slopes(kind: str) -> None:
    slopes = LinearLoss.make(kind, torch.device("cpu"), torch.Generator().manual_seed(1))
    chosen = slopes.draw(torch.Generator().manual_seed(2))

    slopes.loss(chosen).backward()

    assert slopes.parameters[-1].grad is None
    for parameter, slope in zip(slopes.moving, chosen, strict=True):
        expected = slope
        if kind == "sparse":
            expected = torch.zeros_like(parameter).index_add_(0, torch.tensor([3, 0, 3, 1]), slope)
        assert parameter.grad is not None
        assert parameter.grad.is_sparse == (kind == "sparse")
        torch.testing.assert_close(parameter.grad.to_dense(), expected, rtol=1e-6, atol=0)


def test_spoilt_slopes_are_copies() -> None:
    chosen = [torch.ones(2), torch.ones(3)]

    assert with_nonfinite(chosen, "first", math.inf)[0].tolist() == [math.inf, 1.0]
    assert with_nonfinite(chosen, "last", -math.inf)[1].tolist() == [1.0, 1.0, -math.inf]
    assert chosen[0].tolist() == [1.0, 1.0]
