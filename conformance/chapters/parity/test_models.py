"""Check CNN, LSTM and transformer gradients step by step against float64 models."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.onednn import lacks_primitive
from ...measure.precision import full_precision
from ...oracles.symbolic.tensors import KEEP, policy_of
from . import text_data
from .float64_models import FORWARDS, Rounding, gradients
from .models import TASKS, Recurrent, batches, begin, learn

pytestmark = pytest.mark.usefixtures("one_thread")

# So that no gradient of these models overflows or is lost in fp16.
SCALE = 1024.0
# As in torch._dynamo.utils.same for 16 bits: the error against float64, over that of sound 16-bit arithmetic.
FACTOR = 3.0
SLOPE = 1.0  # u; independent roundings all but cancel along the gradient, and 1 % is 2.6 u of bf16 and 20 u of fp16


@contract("AMP-PARITY-018")
@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("cnn-smooth", ""),
        ("lstm", ""),
        ("transformer", ""),
        deep("standard", "cnn-smooth", "1 percent", id="cnn-smooth-1-percent"),
        deep("standard", "lstm", "1 percent", id="lstm-1-percent"),
        deep("standard", "transformer", "1 percent", id="transformer-1-percent"),
        deep("standard", "cnn-smooth", "fp32", id="cnn-smooth-in-fp32"),
        deep("standard", "lstm", "fp32", id="lstm-in-fp32"),
        deep("standard", "transformer", "fp32", id="transformer-in-fp32"),
    ],
    ids=["cnn-smooth", "lstm", "transformer", *[None] * 6],
)
def test_gradients_of_models_are_exact_up_to_rounding(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, model: str, fault: str
) -> None:
    found = _observed(case, target, amp_dtype, rng, model, fault)
    worst, middle, slope = _worst(found), _middle(found), _slope(found, amp_dtype)
    if fault == "fp32":
        case.at_most("error of the gradients of an fp32 run, of that of 16 bit (control)", middle, 1 / FACTOR)
    elif fault:
        case.at_least("mean error along the gradients of matrices, of a run 1 % off (control)", abs(slope), SLOPE, "u")
    else:
        case.at_most("largest error of a gradient", worst, 1.0, "of the bound")
        case.at_least("error of the gradients, of that of 16 bit", middle, 1 / FACTOR)
        case.at_most("mean error along the gradients of matrices", abs(slope), SLOPE, "u")


# Per step and parameter: AMP's gradient, the exact one, and that of sound 16-bit arithmetic.
Found = list[dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]


def _observed(case: Case, target: Target, dtype: torch.dtype, rng: torch.Generator, name: str, fault: str) -> Found:
    """Train for some steps and compare the gradients of each with those that its weights have."""
    task, found = TASKS[name], []
    with _possible(case):
        model, generator = begin(task, target.device, rng.initial_seed())
    data = task.data().to(target.device)
    images = _tempting(data.inputs) if name == "lstm" else data.inputs
    optimizer = torch.optim.Adam(model.parameters(), lr=task.rate)
    rounding = _rounding(case, target, dtype, model, images)
    scaler = torch.amp.GradScaler(target.device_type, init_scale=SCALE, enabled=rounding.scale != 1.0)
    steps = case.samples(quick=1, standard=3, full=5)
    for _, batch in zip(range(steps), batches(task, len(images), target.device, generator), strict=False):
        inputs, labels = images[batch], data.labels[batch]
        if name == "lstm":
            _tempt(model)
        parameters = dict(model.named_parameters())
        exact = gradients(FORWARDS[name], parameters, inputs, labels)
        rounded = gradients(FORWARDS[name], parameters, inputs, labels, rounding)
        optimizer.zero_grad()
        with full_precision(target.device_type), _possible(case):
            with nullcontext() if fault == "fp32" else target.autocast(dtype):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            scaler.scale(loss * 1.01 if fault == "1 percent" else loss).backward()
        scaler.unscale_(optimizer)
        found.append({key: (p.grad.cpu().double(), exact[key], rounded[key]) for key, p in parameters.items()})
        scaler.step(optimizer)
        scaler.update()
    return found


def _rounding(case: Case, target: Target, dtype: torch.dtype, model: torch.nn.Module, images: torch.Tensor) -> Rounding:
    """Return the types in which a region computes on the target; in float16 with a loss scale."""
    recurrent = dtype
    if isinstance(model, Recurrent):
        with torch.no_grad(), _possible(case), target.autocast(dtype):
            seen = model.lstm(images[:1].unflatten(1, (8, 8)))[0].dtype
        case.note("type of the recurrent layer", str(seen))
        # Whatever the region's type is, in float16 where cuDNN runs it (aten/src/ATen/cudnn/AutocastRNN.cpp).
        recurrent = torch.float16 if seen is torch.float16 and target.device_type == "cuda" else dtype
    # On no list it is composed of log_softmax, which is given 16 bits (aten/src/ATen/native/LossNLL.cpp).
    loss = dtype if policy_of("cross_entropy", target.device_type) == KEEP else None
    return Rounding(dtype, recurrent, loss, SCALE if torch.float16 in (dtype, recurrent) else 1.0)


def _tempt(model: torch.nn.Module) -> None:
    """Have every gate's sum rise to 32 with the first pixel of a row and come down with the last.

    Both products are exact, in each step anew. A sum in fp32 loses nothing to speak of on the way, one in 16 bit loses
    the other pixels.
    """
    weight = model.get_parameter("lstm.weight_ih_l0")
    with torch.no_grad():
        weight[:, 0], weight[:, -1] = 32.0, -32.0


def _tempting(images: torch.Tensor) -> torch.Tensor:
    """Return images whose rows begin and end with a pixel of 1."""
    rows = images.unflatten(1, (8, 8)).clone()
    rows[..., 0] = rows[..., -1] = 1.0
    return rows.flatten(1)


@contextmanager
def _possible(case: Case) -> Iterator[None]:
    """Where oneDNN has no primitive for a type the processor lacks it; some Pythons come without the text."""
    try:
        yield
    except text_data.NoText as error:
        case.untestable(str(error))
    except RuntimeError as error:
        if not lacks_primitive(error):
            raise
        case.unsupported(str(error))


def _worst(found: Found) -> float:
    """Return the largest error over its bound: FACTOR times that of sound arithmetic, and room for few elements.

    The norm of n independent errors scatters by 1/sqrt(2n) in its logarithm, the ratio of two by 1/sqrt(n): 4 of those.
    The gradient of a convolution's weight may be summed image by image in 16 bit, as torch's fp16 kernel for the CPU
    does: each of n partial sums k/n of the whole is rounded, which makes sqrt(n/3) roundings of the whole.
    """
    images = math.sqrt(TASKS["cnn-smooth"].rows / 3)
    ratios = [
        _ratio(seen, exact, rounded)
        / (FACTOR * math.exp(4 / math.sqrt(exact.numel())) * (images if exact.dim() == 4 else 1.0))
        for step in found
        for seen, exact, rounded in step.values()
    ]
    return max(math.inf if math.isnan(ratio) else ratio for ratio in ratios)


def _middle(found: Found) -> float:
    return statistics.median(_ratio(*tensors) for step in found for tensors in step.values())


def _ratio(seen: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> float:
    return ((seen - exact).norm() / (rounded - exact).norm()).item()


def _slope(found: Found, dtype: torch.dtype) -> float:
    """The mean of the errors along the exact gradient, relative to it, over parameters of two dimensions or more.

    Beyond those of sound 16-bit arithmetic, which are no independent ones where a loss keeps log-probabilities in 16
    bits: at the beginning all are near one number, and are rounded alike.
    """
    slopes = [
        ((seen - rounded) * exact).sum().item() / exact.square().sum().item()
        for step in found
        for seen, exact, rounded in step.values()
        if exact.dim() > 1
    ]
    return statistics.fmean(slopes) / (torch.finfo(dtype).eps / 2)


@contract("AMP-PARITY-016", on="cpu")
@pytest.mark.parametrize("model", [deep("standard", name, id=name) for name in ("cnn", "lstm", "transformer")])
def test_the_same_run_of_a_model_gives_the_same_bits(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, model: str
) -> None:
    """On a CPU; the backward of convolutions, attention and LSTMs may add with atomics elsewhere."""
    task = replace(TASKS[model], epochs=1, batches=case.samples(quick=1, standard=3, full=20))
    runs = []
    for _ in range(2):
        scaler = torch.amp.GradScaler(target.device_type, enabled=amp_dtype == torch.float16)
        with _possible(case):
            runs.append(learn(task, target.device, rng.initial_seed(), lambda: target.autocast(amp_dtype), scaler))
    case.equal("training loss, test loss and accuracy of the second run", runs[1], runs[0])
