"""Check checkpoints, inference, float32 accumulation, and loops that omit a part of the scaler's protocol."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.manual_training import HandScale, ManualAmp
from ...oracles.message_names import STEPPED
from ...oracles.numbers.bits import same
from ...workloads.recipes import FEATURES, HIDDEN, OUTPUTS, ROWS, Batches, batches, normal, perceptron
from .support import dtypes_of

INTERVAL, SCALE = 2, 2.0**8


@dataclass
class Run:
    """A training run that can be stopped and resumed: the parts of its checkpoint, and the tensors of each step."""

    model: torch.nn.Sequential
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    target: Target
    dtype: torch.dtype | None

    def train(self, part: Batches) -> list[list[torch.Tensor]]:
        """Train; return for each step the loss, the scale, every parameter and every tensor of optimizer state.

        They are returned on the CPU: counts of steps stay on the device that a checkpoint was loaded to
        (Optimizer._process_value_according_to_param_policy), and the optimizers take them from either.
        """
        steps = []
        for inputs, goal in part:
            self.optimizer.zero_grad()
            with self.target.autocast(self.dtype or torch.bfloat16, enabled=self.dtype is not None):
                loss = functional.mse_loss(self.model(inputs), goal)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            state = self.optimizer.state_dict()["state"]
            tensors = [loss, torch.tensor(self.scaler.get_scale()), *self.model.parameters()]
            tensors += [value for entry in state.values() for value in entry.values() if torch.is_tensor(value)]
            steps.append([tensor.detach().clone().cpu() for tensor in tensors])
        return steps

    def stored(self) -> io.BytesIO:
        """Return a checkpoint as the AMP recipe writes it."""
        written = io.BytesIO()
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, written)
        written.seek(0)
        return written

    def restore(self, stored: io.BytesIO, *names: str, **options: Any) -> None:
        """Load the named parts of a checkpoint."""
        stored.seek(0)
        kept = torch.load(stored, **options)
        for name in names:
            getattr(self, name).load_state_dict(kept[name])


PARTS = ("model", "optimizer", "scaler")


def started(case: Case, target: Target, dtype: torch.dtype | None, seed: int = 0, **options: Any) -> Run:
    """Return a run with new random weights and Adam, or `optimizer`."""
    model = perceptron(normal(target.device, case.seed + seed))
    make: Callable[..., torch.optim.Optimizer] = options.pop(
        "optimizer", functools.partial(torch.optim.Adam, lr=2.0**-6)
    )
    scaler = torch.amp.GradScaler(target.device_type, **{"init_scale": SCALE, "growth_interval": INTERVAL, **options})
    return Run(model, make(model.parameters()), scaler, target, dtype)


def differing(seen: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> list[str]:
    """Describe the steps, and the tensors in them, whose bits differ."""
    found = [] if len(seen) == len(expected) else [f"{len(seen)} steps, not {len(expected)}"]
    for number, (mine, other) in enumerate(zip(seen, expected, strict=False)):
        places = [place for place, pair in enumerate(zip(mine, other, strict=False)) if not same(*pair)]
        if places or len(mine) != len(other):
            found.append(f"step {number}: tensors {places[:4]}")
    return found


OPTIMIZERS = {
    "Adam": functools.partial(torch.optim.Adam, lr=2.0**-6),
    "AdamW with amsgrad": functools.partial(torch.optim.AdamW, lr=2.0**-6, amsgrad=True),
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=2.0**-4, momentum=0.5),
}


@contract("AMP-RECIPE-039")
def test_resume_after_every_step(case: Case, target: Target) -> None:
    # Long enough for two growths and, at the outlier, a skip, so that the tracker is saved in every state.
    count = case.samples(quick=5, standard=10, full=24)
    compared = 0
    for dtype in dtypes_of(case, target):
        data = batches(normal(target.device, case.seed + 1), count)
        for name, optimizer in OPTIMIZERS.items() if case.level != "quick" else [("Adam", OPTIMIZERS["Adam"])]:
            make = functools.partial(started, case, target, dtype, optimizer=optimizer)
            whole = make()
            stores = [whole.stored()]
            expected = []
            for step in range(count):
                expected += whole.train(data[step : step + 1])
                stores.append(whole.stored())
            for step, stored in enumerate(stores[:-1]):
                # A new or used scaler whose settings differ from the saved ones.
                resumed = make(seed=5, init_scale=2.0**14, growth_interval=7, growth_factor=4.0, backoff_factor=0.25)
                if step % 2:
                    resumed.train(data[:1])
                    resumed.optimizer = optimizer(resumed.model.parameters())
                resumed.restore(stored, *PARTS, weights_only=True, map_location=target.device if step % 3 else "cpu")
                seen = resumed.train(data[step:])
                differs = differing(seen, expected[step:])
                case.equal(f"{dtype}, {name}, stopped before step {step}: differences", differs, [])
                compared += len(seen)
            case.equal(f"{dtype}, {name}: scale at the end", resumed.scaler.state_dict(), whole.scaler.state_dict())
    case.note("resumed steps compared", compared)


@contract("AMP-RECIPE-040")
def test_state_of_the_scaler_forgotten(case: Case, target: Target) -> None:
    for dtype in case.supported(target):
        data = batches(normal(target.device, case.seed + 1), 8)
        whole = started(case, target, dtype)
        expected = whole.train(data)
        first = started(case, target, dtype)
        first.train(data[:4])
        stored = first.stored()
        for name, parts, differs in (("stored", PARTS, False), ("forgotten", PARTS[:2], True)):
            resumed = started(case, target, dtype, seed=5)
            resumed.restore(stored, *parts, weights_only=True)
            scales = [float(step[1]) for step in resumed.train(data[4:])]
            promised = [float(step[1]) for step in expected[4:]]
            what = f"{dtype}, state of the scaler {name}: its scales differ from those of the uninterrupted run"
            case.equal(what, scales != promised, differs)


@contract("AMP-RECIPE-041")
def test_switching_between_float32_and_amp(case: Case, target: Target) -> None:
    for dtype in case.supported(target):
        data = batches(normal(target.device, case.seed + 1), 6, outlier=None)
        plain = started(case, target, None, enabled=False)
        plain.train(data[:3])
        # To AMP: model and optimizer of the float32 run, and a new scaler.
        amp, control = started(case, target, dtype, seed=5), started(case, target, dtype)
        amp.restore(plain.stored(), "model", "optimizer", weights_only=True)
        control.model.load_state_dict(plain.model.state_dict())
        control.optimizer.load_state_dict(plain.optimizer.state_dict())
        case.equal(f"{dtype}: float32 into AMP", differing(amp.train(data[3:]), control.train(data[3:])), [])
        # From AMP: a disabled scaler ignores the saved scaler state.
        back, plain = started(case, target, None, seed=6, enabled=False), started(case, target, None, enabled=False)
        back.restore(amp.stored(), *PARTS, weights_only=True)
        plain.model.load_state_dict(amp.model.state_dict())
        plain.optimizer.load_state_dict(amp.optimizer.state_dict())
        case.equal(f"{dtype}: AMP into float32", differing(back.train(data[:3]), plain.train(data[:3])), [])
        case.equal(f"{dtype}: state of a disabled scaler", back.scaler.state_dict(), {})


@contract("AMP-RECIPE-042")
def test_inference(case: Case, target: Target) -> None:
    for dtype in case.supported(target):
        draw = normal(target.device, case.seed)
        model, inputs = perceptron(draw), draw(ROWS, FEATURES)
        stored = {name: value.clone() for name, value in model.state_dict().items()}
        manual = ManualAmp(target.device_type, dtype)
        with torch.no_grad(), manual.region():
            expected = model(inputs)
        lowered = perceptron(draw).to(dtype)
        lowered.load_state_dict(stored)
        found = {}
        for name, guard in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
            model.eval()
            with guard(), target.autocast(dtype):
                found[name] = model(inputs)
                found[f"{name}, again"] = model(inputs)
            with target.autocast(dtype), guard():
                found[f"{name}, inside"] = model(inputs)
            with guard(), target.autocast(dtype, cache_enabled=False):
                found[f"{name}, uncached"] = model(inputs)
        with torch.no_grad():
            found["control: a model cast to 16 bit"] = lowered(inputs.to(dtype))
        wrong = [name for name, output in found.items() if not same(output, expected)]
        case.equal(f"{dtype}: outputs that differ from manual casts", wrong, [])
        case.equal(
            f"{dtype}: outputs that require grad", [n for n, output in found.items() if output.requires_grad], []
        )
        kept = [name for name, value in model.state_dict().items() if not same(value, stored[name])]
        case.equal(f"{dtype}: parameters that inference changed", kept, [])
        with target.autocast(dtype):
            model(inputs).float().sum().backward()
        case.equal(f"{dtype}: parameters that train afterwards", sum(p.grad is not None for p in model.parameters()), 4)
    case.note("combinations", sorted(found))


@contract("AMP-RECIPE-043")
def test_update_is_forgotten(case: Case, target: Target) -> None:
    for dtype in case.supported(target):
        run = started(case, target, dtype)
        inputs, goal = batches(normal(target.device, case.seed), 1)[0]

        def step(run: Run = run, inputs: torch.Tensor = inputs, goal: torch.Tensor = goal) -> None:
            run.optimizer.zero_grad()
            with target.autocast(run.dtype or torch.bfloat16):
                loss = functional.mse_loss(run.model(inputs), goal)
            run.scaler.scale(loss).backward()
            run.scaler.step(run.optimizer)

        step()
        before = [parameter.detach().clone() for parameter in run.model.parameters()]
        case.raises(f"{dtype}: the second step without update", RuntimeError, step, names=(STEPPED,))
        moved = [not same(a, b) for a, b in zip(before, run.model.parameters(), strict=True)]
        case.equal(f"{dtype}: parameters that it moved", any(moved), False)
        run.scaler.update()
        step()
        moved = [not same(a, b) for a, b in zip(before, run.model.parameters(), strict=True)]
        case.equal(f"control, {dtype}: parameters that a step after update moves", sum(moved), 4)


@contract("AMP-RECIPE-023")
def test_accumulation_in_float32(case: Case, target: Target) -> None:
    # Each micro-batch has one row and the loss is a weighted sum, so each gradient is that row: exact in 16 bit.
    sizes = (1.0, 2.0**-9, 3 * 2.0**-12, -(2.0**-14), 5 * 2.0**-13)
    generator = torch.Generator().manual_seed(case.seed)
    rows = [torch.randint(1, 8, (1, 8), generator=generator) * size for size in sizes]
    exact = sum(row.double() for row in rows)
    for dtype in case.supported(target):
        weight = torch.zeros(2, 8, device=target.device).requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=16.0)
        for row in rows:
            with target.autocast(dtype):
                loss = functional.linear(row.to(target.device), weight).float().sum()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        case.identical(f"{dtype}: weight after the step", -weight.detach().cpu().double(), exact.expand(2, 8))
        lowered = torch.zeros(1, 8, dtype=dtype)
        for row in rows:
            lowered += row.to(dtype)
        case.at_least(f"control, {dtype}: elements that are wrong in a 16-bit sum", int((lowered != exact).sum()), 1)


@contract("AMP-RECIPE-044")
def test_three_steps_of_mixed_precision(case: Case, target: Target) -> None:
    # 16-bit compute, float32 accumulation into the master weights and loss scaling each matter here.
    generator = torch.Generator().manual_seed(case.seed)
    rows = torch.randint(1, 4, (HIDDEN, 8), generator=generator).float().to(target.device)
    for dtype in case.supported(target):
        tiny = 2.0 ** (-27 if dtype == torch.float16 else -20)
        master, rule = torch.ones(OUTPUTS, 8, device=target.device).requires_grad_(), HandScale(scale=2.0**12)
        optimizer = torch.optim.SGD([master], lr=1.0)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**12)
        for row in rows:
            optimizer.zero_grad()
            with target.autocast(dtype):
                output = functional.linear(row[None], master)
            scaler.scale(output.float().sum() * tiny * 2.0**4).backward()
            scaler.step(optimizer)
            scaler.update()
            rule.update(finite=True)
        exact = 1 - tiny * 2.0**4 * rows.cpu().double().sum(0).expand(OUTPUTS, 8)
        # Each update is a multiple of the float32 spacing below 1, so nothing is rounded.
        case.identical(f"{dtype}: weights", master.detach().cpu().double(), exact.contiguous())
        case.at_least(f"{dtype}: elements that moved", int((master != 1).sum()), OUTPUTS * 8)
        case.equal(f"{dtype}: loss scale", scaler.get_scale(), rule.scale)
        lowered = torch.ones(OUTPUTS, 8, dtype=dtype)
        for row in rows.cpu():
            lowered -= (tiny * 2.0**4 * row).to(dtype)
        case.equal(f"control, {dtype}: elements that 16-bit weights move", int((lowered != 1).sum()), 0)
        unscaled = torch.ones(OUTPUTS, 8, device=target.device).requires_grad_()
        with target.autocast(dtype):
            output = functional.linear(rows[:1], unscaled)
        (output.float().sum() * tiny * 2.0**-2).backward()
        assert unscaled.grad is not None
        reached = int((unscaled.grad != 0).sum())
        promised = 0 if dtype == torch.float16 else OUTPUTS * 8
        case.equal(
            f"control, {dtype}: elements of a gradient of 2^-29 or 2^-22 that survive unscaled", reached, promised
        )
