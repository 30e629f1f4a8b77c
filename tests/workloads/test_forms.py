"""Forms that a user's training may have: each works, or ends with one line."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from conformance.measure import nonfinite
from conformance.workloads import user_workload
from conformance.workloads.training import train_step
from conformance.workloads.user_workload import Builder, OwnError
from tests.workloads.conftest import Runner

CPU = torch.device("cpu")
_BASE = """
import copy, random
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
    def forward(self, x):
        return self.last(torch.relu(self.first(x)))

def build(device):
    model = Net()
    x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))
    batches = list(zip(x.split(4), y.split(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.cross_entropy
    more = {}
    {{here}}
    return {"model": model, "optimizer": optimizer, "loss": loss, "batches": batches, **more}
"""

_WORK = {
    "several terms": "loss = lambda o, t: nn.functional.cross_entropy(o, t) + 0.01 * o.square().mean()",
    "accumulation": "more['accumulate'] = 2",
    "several optimizers": (
        "optimizer = [torch.optim.SGD(model.first.parameters(), 0.1), torch.optim.AdamW(model.last.parameters())]\n"
        "    more['clip'] = 1.0"
    ),
    "scheduler": "more['scheduler'] = torch.optim.lr_scheduler.StepLR(optimizer, 1)",
    "no scheduler": "more['scheduler'] = None",
    "average of weights": (
        "average = torch.optim.swa_utils.AveragedModel(model)\n"
        "    more['after_step'] = lambda: average.update_parameters(model)"
    ),
    "settings of the scaler": "more['scaler'] = {'init_scale': 1024.0, 'growth_interval': 10}",
    "settings of autocast": "more['autocast'] = {'cache_enabled': False}",
    "frozen part": "model.first.requires_grad_(False)",
    "adapters on a 16-bit base": (
        "model.first.requires_grad_(False).to(torch.bfloat16)\n"
        "    model.forward = lambda x: model.last(torch.relu(nn.functional.linear(x, model.first.weight.float())))"
    ),
    "checkpoint": (
        "model.forward = lambda x: model.last(checkpoint(lambda h: torch.relu(model.first(h)), x, use_reentrant=False))"
    ),
    "compiled": "model = torch.compile(model, backend='eager')",
    "own region": (
        "inner = model.first.forward\n"
        "    def forward(x):\n"
        "        with torch.autocast('cpu', enabled=False):\n"
        "            return inner(x.float())\n"
        "    model.first.forward = forward"
    ),
    "numbers of Python": "batches = [(x * random.random(), y)]",
    "own seed": "torch.manual_seed(0)",
}

_LINES = {
    "mixed weights": ("model.last.to(torch.bfloat16)", "last.weight of the model is bfloat16; AMP trains float32"),
    "loss of parts": ("loss = lambda o, t: {'a': o.sum()}", "the loss is a dict; .* return the weighted sum"),
    "optimizer without gradient": (
        "model.idle = nn.Linear(2, 2)\n    optimizer = [optimizer, torch.optim.SGD(model.idle.parameters(), 0.1)]",
        "optimizer 1 has no gradient to step by with batch 0",
    ),
    "optimizer of another model": (
        "optimizer = [optimizer, torch.optim.SGD(Net().parameters(), 0.1)]",
        "optimizer 1 steps none of the model's parameters",
    ),
    "plateau": (
        "more['scheduler'] = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)",
        "ReduceLROnPlateau, whose step\\(\\) needs a metric",
    ),
    "no scheduler at all": ("more['scheduler'] = 3", "scheduler is a int, which has no step"),
    "after step": ("more['after_step'] = 3", "after_step is a int, not a function"),
    "raises after a step": ("more['after_step'] = lambda: 1 / 0", "after each step raised ZeroDivisionError.*line"),
    "no optimizer": ("optimizer = []", "optimizer is a NoneType"),
    "accumulate": ("more['accumulate'] = 0", "accumulate is 0, not a number of batches"),
    "a scaler": ("more['scaler'] = torch.amp.GradScaler('cpu')", "scaler is a GradScaler; give its settings as a dict"),
    "setting of the scaler": ("more['scaler'] = {'scale': 2.0}", "scaler has an unknown setting 'scale'"),
    "number of the scaler": ("more['scaler'] = {'init_scale': -1}", "init_scale is -1, not a positive number"),
    "factors of the scaler": ("more['scaler'] = {'growth_factor': 0.5}", "growth_factor must be above 1"),
    "setting of autocast": ("more['autocast'] = {'enabled': False}", "autocast has an unknown setting 'enabled'"),
    "dtype of autocast": ("more['autocast'] = {'dtype': torch.float64}", "autocast: dtype is torch.float64"),
    "cache of autocast": ("more['autocast'] = {'cache_enabled': 1}", "cache_enabled is 1, not True or False"),
    "state outside": (
        "global COUNT\n    COUNT = globals().get('COUNT', 0)\n"
        "    def loss(o, t):\n        global COUNT\n        COUNT += 1\n"
        "        return nn.functional.cross_entropy(o, t) * COUNT",
        "other losses with batch 0 .* keeps state outside of the module",
    ),
    "generator of its own": (
        "build.calls = getattr(build, 'calls', 0) + 1; generator = torch.Generator().manual_seed(build.calls)\n"
        "    model.forward = lambda x: model.last(model.first(x) + 9 * torch.randn(len(x), 8, generator=generator))",
        "or has a generator of its own",
    ),
}


def _builder(tmp_path: Path, here: str) -> Builder:
    (tmp_path / "mine.py").write_text(_BASE.replace("{{here}}", here))
    return Builder("mine.py:build", user_workload.load("mine.py:build", tmp_path))


@pytest.mark.parametrize("name", _WORK)
def test_it_trains_with_amp_and_without(name: str, tmp_path: Path) -> None:
    builder = _builder(tmp_path, _WORK[name])

    user_workload.probe(builder, CPU)

    for dtype in (torch.bfloat16, torch.float16):
        assert builder.raises(CPU, dtype) == ""
        built = builder.build(CPU)
        scaler, work = built.scaler(dtype), built.workload()
        region = functools.partial(built.region, dtype)
        losses = [train_step(work, step, region, scaler).item() for step in range(3)]
        assert torch.tensor(losses).isfinite().all()
    assert set(builder.paces) == {(CPU, None), (CPU, torch.bfloat16), (CPU, torch.float16)}
    built = builder.build(CPU)
    if name != "compiled":
        account = nonfinite.trace(
            built.model,
            built.optimizers[0],
            built.loss,
            built.batches,
            dtype=torch.bfloat16,
            scale=None,
            **built.loop(),
        )
        assert not account.spoiled


@pytest.mark.parametrize("name", _LINES)
def test_it_ends_with_one_line(name: str, tmp_path: Path) -> None:
    here, said = _LINES[name]

    with pytest.raises(OwnError, match=said) as raised:
        user_workload.probe(_builder(tmp_path, here), CPU)
    assert "\n" not in str(raised.value)


def test_accumulated_gradients_are_those_of_one_batch(tmp_path: Path) -> None:
    parts = _builder(tmp_path, "more['accumulate'] = 4").build(CPU)
    whole = _builder(tmp_path, "batches = [(x, y)]").build(CPU)

    losses = [
        train_step(own.workload(), 0, functools.partial(own.region, None), own.scaler(None)) for own in (parts, whole)
    ]

    torch.testing.assert_close(*losses)
    torch.testing.assert_close(parts.model.first.weight, whole.model.first.weight)


def test_each_optimizer_schedule_and_hook_has_its_turn(tmp_path: Path) -> None:
    here = (
        f"{_WORK['several optimizers']}\n    seen = model.seen = []\n    more['after_step'] = lambda: seen.append(1)\n"
        "    more['scheduler'] = [torch.optim.lr_scheduler.StepLR(one, 1) for one in optimizer]"
    )
    own = _builder(tmp_path, here).build(CPU)
    before = [weight.clone() for weight in own.model.parameters()]

    train_step(own.workload(), 0, functools.partial(own.region, torch.float16), own.scaler(torch.float16))

    assert all(not torch.equal(old, new) for old, new in zip(before, own.model.parameters(), strict=True))
    assert [group["lr"] for one in own.optimizers for group in one.param_groups] == pytest.approx([0.01, 0.0001])
    assert own.model.seen == [1]


def test_settings_reach_scaler_and_region(tmp_path: Path) -> None:
    here = "more['scaler'] = {'init_scale': 8.0}; more['autocast'] = {'cache_enabled': False, 'dtype': torch.bfloat16}"
    own = _builder(tmp_path, here).build(CPU)

    assert own.scaler(torch.float16).get_scale() == 8.0
    assert own.dtype is torch.bfloat16
    with own.region(torch.bfloat16):
        assert not torch.is_autocast_cache_enabled()
    assert own.loop()["scaler"] == {"init_scale": 8.0}


def test_frozen_base_that_calls_share_is_told(tmp_path: Path) -> None:
    here = "global BASE\n    BASE = globals().get('BASE') or nn.Linear(6, 8)\n    model.first = BASE"

    with pytest.raises(OwnError, match="two calls give models that share weights"):
        user_workload.probe(_builder(tmp_path, here), CPU)


def test_only_what_was_tried_in_time_is_used(tmp_path: Path) -> None:
    builder = _builder(tmp_path, "")
    user_workload.probe(builder, CPU, 0.0)

    assert builder.tried[CPU] == 2
    assert len(builder.build(CPU).batches) == 2


def test_other_dtype_than_that_of_the_settings_is_unsupported(runner: Runner) -> None:
    edit = ('"clip": 1.0', '"clip": 1.0, "autocast": {"dtype": torch.bfloat16}, "scaler": {"init_scale": 256.0}')

    report = runner.run(edit, contract="AMP-PARITY-051")

    verdicts = {case["parameters"]["amp_dtype"]: (case["verdict"], case["reason"]) for case in report["cases"]}
    assert verdicts["bf16"][0] == "PASS"
    assert verdicts["fp16"][0] == "UNSUPPORTED"
    assert "settings have the dtype torch.bfloat16" in verdicts["fp16"][1]
