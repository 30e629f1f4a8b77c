"""Check AMP training steps of which a part is compiled against the same steps in eager."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ...harness.check import Case, applies, by_seed, contract, deep, needs
from ...harness.targets import Target, one_device_only, second
from ...oracles.numbers.formats import FORMATS
from .amp_steps import BATCHES, LEARNING_RATE, MOMENTUM, OPTIMIZERS, OVERFLOW, PARTS, RATE, train
from .cuda_graphs import MODE, replays
from .support import compiler, dtypes_of, inductor, replayed

BY_INDUCTOR = ("inductor", MODE)
# Outside of these compiled code steps in other arithmetic than eager: Adam's bias correction is done on tensors.
EXACT = ("SGD", "SGD-foreach", "Adam-fused")


@contract("AMP-COMPILE-060")
@pytest.mark.parametrize(
    "part", [deep("standard", part) if part == "iteration" else by_seed("standard", 1, part) for part in PARTS]
)
@pytest.mark.parametrize("optimizer", ["SGD-foreach", *(deep("full", n) for n in OPTIMIZERS if n != "SGD-foreach")])
@pytest.mark.parametrize("backend", [deep("full", "eager"), "aot_eager"])
def test_training(case: Case, target: Target, part: str, optimizer: str, backend: str) -> None:
    steps_agree(case, target, part, optimizer, backend)


LIMIT = 8.0
# The sizes of gradients: below the limit, above it, far below it, and with an infinity.
SIZES = {"below": 0.5, "above": 2.0**7, "far below": 2.0**-20, "infinite": float("inf")}
CLIPS: dict[str, Callable[[list[torch.nn.Parameter]], torch.Tensor | None]] = {
    "clip_grad_norm_": lambda given: torch.nn.utils.clip_grad_norm_(given, LIMIT),
    "clip_grad_norm_, largest": lambda given: torch.nn.utils.clip_grad_norm_(given, LIMIT, float("inf")),
    "clip_grad_norm_, single": lambda given: torch.nn.utils.clip_grad_norm_(given, LIMIT, 1.0, foreach=False),
    "clip_grad_value_": lambda given: torch.nn.utils.clip_grad_value_(given, LIMIT),
}


def gradients_of(device: torch.device, size: float) -> list[torch.nn.Parameter]:
    """Return parameters of several types and shapes, one without a gradient, with gradients of this size."""
    found = []
    for number, dtype in enumerate((torch.float32, torch.float32, torch.bfloat16)):
        parameter = torch.nn.Parameter(torch.ones(2, 3 + number, dtype=dtype, device=device))
        parameter.grad = torch.linspace(-1.0, 1.0, parameter.numel(), device=device).view_as(parameter).to(dtype)
        found.append(parameter)
    found[-1].grad.view(-1)[-1] = size
    return [*found, torch.nn.Parameter(torch.ones(2, device=device))]


@contract("AMP-COMPILE-060")
@pytest.mark.parametrize("backend", ["eager", deep("standard", "aot_eager")])
@pytest.mark.parametrize("clip", ["clip_grad_norm_", *(deep("standard", name) for name in list(CLIPS)[1:])])
def test_clipping(case: Case, target: Target, clip: str, backend: str) -> None:
    with compiler(case):
        compiled = torch.compile(CLIPS[clip], backend=backend)
        for name, size in SIZES.items():
            ours, theirs = (gradients_of(target.device, size) for _ in range(2))
            seen, expected = compiled(ours), CLIPS[clip](theirs)
            if isinstance(expected, torch.Tensor):
                case.identical(f"norm, gradients {name} the limit", seen, expected)
            for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                what = f"gradient {number}, {name} the limit"
                case.equal(f"{what}, is there", one.grad is not None, other.grad is not None)
                if one.grad is not None and other.grad is not None:
                    case.identical(what, one.grad, other.grad)


@contract("AMP-COMPILE-061")
@pytest.mark.parametrize(
    "optimizer",
    [deep("standard" if name in ("AdamW-foreach", "Adam-fused") else "full", name) for name in OPTIMIZERS],
)
def test_skipped_step_of_a_compiled_optimizer(case: Case, target: Target, optimizer: str) -> None:
    steps_agree(case, target, "optimizer", optimizer, "eager")


@contract("AMP-COMPILE-061")
@needs("compiled kernels")
@pytest.mark.parametrize("optimizer", [deep("full", name) for name in OPTIMIZERS])
def test_skipped_step_with_inductor(case: Case, target: Target, optimizer: str) -> None:
    with inductor(case):
        steps_agree(case, target, "optimizer", optimizer, "inductor")


@contract("AMP-COMPILE-077")
@needs("compiled kernels")
@pytest.mark.parametrize("optimizer", [deep("full", name) for name in ("Adam-fused", "AdamW-foreach")])
@pytest.mark.parametrize("part", ["loss", "iteration"])
def test_training_by_replays(case: Case, target: Target, part: str, optimizer: str) -> None:
    """Graphs that were recorded before skip the step that overflows, and follow the scale."""
    with inductor(case), replays() as found:
        steps_agree(case, target, part, optimizer, MODE)
    replayed(case, target, part, found, 1)


RATE_IN_A_TENSOR = 2.0**-4
ON_TWO_DEVICES: dict[str, dict[str, Any]] = {
    f"{name}-{implementation}": {"kind": getattr(torch.optim, name), implementation: True}
    for name in ("SGD", "Adam", "AdamW")
    for implementation in ("foreach", "fused")
}


@contract("AMP-COMPILE-061")
@applies(one_device_only)
@pytest.mark.parametrize("optimizer", [deep("standard", name) for name in ON_TWO_DEVICES])
def test_rate_in_a_tensor_on_two_devices(case: Case, target: Target, optimizer: str) -> None:
    """The step of an optimizer with its rate in a CPU tensor and parameters on two devices, compiled or not."""
    settings = dict(ON_TWO_DEVICES[optimizer])
    kind: Any = settings.pop("kind")
    if "Adam" in optimizer:
        settings["capturable"] = True
    found: list[list[torch.Tensor]] = []
    with compiler(case):
        for rate, compile in itertools.product((RATE_IN_A_TENSOR, torch.tensor(RATE_IN_A_TENSOR)), (False, True)):
            torch._dynamo.reset()
            given = [torch.tensor([0.5, -1.25, 2.0], device=device) for device in (target.device, second(target))]
            parameters = [torch.nn.Parameter(one.clone()) for one in given]
            made = kind(parameters, lr=rate, **settings)
            scaler = torch.amp.GradScaler(target.device_type, init_scale=2.0**10)
            if compile:
                made.step = torch.compile(made.step, backend="eager")
            for overflows in (False, True, False):
                scale = float(scaler.scale(torch.ones((), device=target.device)))
                for number, (parameter, gradient) in enumerate(zip(parameters, given, strict=True)):
                    parameter.grad = gradient * (float("inf") if overflows and number == 0 else scale)
                scaler.step(made)
                scaler.update()
            found.append([parameter.detach().cpu() for parameter in parameters])
    names = ("a number, compiled", "a tensor", "a tensor, compiled")
    for name, seen in zip(names, found[1:], strict=True):
        for number, (ours, theirs) in enumerate(zip(seen, found[0], strict=True)):
            case.identical(f"parameter of device {number} with the rate in {name}", ours, theirs)


def steps_agree(case: Case, target: Target, part: str, optimizer: str, backend: str) -> None:
    """Check scales, losses and weights of each iteration, and that the one that overflows is skipped."""
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            how = "mode" if backend == MODE else "backend"
            compile = functools.partial(torch.compile, **{how: backend})
            expected = list(train(target.device, dtype, optimizer, case.seed))
            seen = list(train(target.device, dtype, optimizer, case.seed, compile, part))
            scales = [each.scale for each in expected]
            case.true(
                f"{dtype}: the overflow halves the scale of eager (control)", scales[OVERFLOW] < scales[0], scales
            )
            case.equal(f"{dtype}: loss scales", [each.scale for each in seen], scales)
            for number, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
                for name, tensor in theirs.tensors.items():
                    what = f"{dtype}: {name} after iteration {number}"
                    if optimizer in EXACT and backend not in BY_INDUCTOR:
                        case.identical(what, ours.tensors[name], tensor)
                    else:
                        bound = drift(dtype, tensor, optimizer)
                        case.at_most(what, float((ours.tensors[name] - tensor).abs().max()), bound)
            for name, tensor in seen[OVERFLOW].tensors.items():
                case.identical(f"{dtype}: {name} after the skipped step", tensor, seen[OVERFLOW - 1].tensors[name])


def drift(dtype: torch.dtype, weight: torch.Tensor, optimizer: str) -> float:
    """Bound the difference of a weight after steps whose updates are rounded otherwise.

    A step of Adam moves a weight by about the learning rate, one of SGD by at most the rate times the sum of all that
    momentum keeps of clipped gradients. Two float32 roundings of the weight at each step may change its 16-bit cast by
    one rounding, and with it the relative size of the next update by two.
    """
    update = RATE / (1 - MOMENTUM) if optimizer.startswith("SGD") else LEARNING_RATE
    rounded = 2 * 2.0**-24 * float(weight.abs().max())
    return BATCHES * (rounded + 2 * update * FORMATS[dtype].unit_roundoff)
