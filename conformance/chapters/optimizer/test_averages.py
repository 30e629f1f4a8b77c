"""Check that averages of models keep the type of every tensor and do not depend on what stands beside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch.optim import swa_utils

from ...harness.check import Case, contract
from ...harness.targets import Target

# The ways to average, as arguments of AveragedModel.
AVERAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "swa": lambda: {"avg_fn": swa_utils.get_swa_avg_fn()},
    "multi-swa": lambda: {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "ema": lambda: {"avg_fn": swa_utils.get_ema_avg_fn(0.5)},
    "multi-ema": lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.5)},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
# Two averages of numbers of a few bits are exact in each dtype.
VALUES = (4.0, 12.0, 8.0)


class Holder(torch.nn.Module):
    """Hold tensors as parameters, integers as frozen ones, or as buffers."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, buffers: bool) -> None:
        super().__init__()
        for number, value in enumerate(tensors):
            if buffers:
                self.register_buffer(f"tensor{number}", value)
            else:
                trained = value.is_floating_point() or value.is_complex()
                self.register_parameter(f"tensor{number}", torch.nn.Parameter(value, requires_grad=trained))

    def tensors(self) -> list[torch.Tensor]:
        return [value.detach() for value in self.state_dict().values()]


def averaged(dtypes: Sequence[torch.dtype], device: torch.device, average: str, *, buffers: bool) -> list[torch.Tensor]:
    """Return the average, after each of VALUES, of one tensor of each dtype."""
    model = Holder((torch.zeros(3, device=device).to(dtype) for dtype in dtypes), buffers=buffers)
    mean = swa_utils.AveragedModel(model, use_buffers=True, **AVERAGES[average]())
    for value in VALUES:
        for number, tensor in enumerate(model.tensors()):
            tensor.fill_(value + 4 * number)
        mean.update_parameters(model)
    return [value.detach() for name, value in mean.module.state_dict().items()]


def expected(number: int, average: str) -> float:
    first, second, third = (value + 4 * number for value in VALUES)
    return ((first + second) / 2 + third) / 2 if "ema" in average else (first + second + third) / 3


@contract("AMP-OPTIMIZER-113")
@pytest.mark.parametrize("kind", ["parameters", "buffers"])
@pytest.mark.parametrize("average", AVERAGES)
def test_mixed_dtypes(case: Case, target: Target, average: str, kind: str) -> None:
    fits = [dtype for dtype in DTYPES if target.computes_in(dtype)]
    wrong, compared = [], 0
    for dtypes in itertools.permutations(fits, min(3, len(fits))):
        for number, tensor in enumerate(averaged(dtypes, target.device, average, buffers=kind == "buffers")):
            compared += 1
            right = torch.full((3,), expected(number, average)).to(dtypes[number])
            if tensor.dtype != dtypes[number] or not torch.equal(tensor.cpu(), right):
                wrong.append(f"{dtypes}: tensor {number} is {tensor[0].item()!r} in place of {right[0].item()!r}")
    case.at_least("tensors averaged", compared, 1)
    case.equal("averages that depend on the tensors beside them", wrong[:3], [])


@contract("AMP-OPTIMIZER-113")
@pytest.mark.parametrize("kind", ["parameters", "buffers"])
@pytest.mark.parametrize("average", AVERAGES)
def test_integers(case: Case, target: Target, average: str, kind: str) -> None:
    wrong = []
    for dtypes in ((torch.int64, torch.float32), (torch.float32, torch.int64), (torch.int64,)):
        try:
            tensors = averaged(dtypes, target.device, average, buffers=kind == "buffers")
        except RuntimeError as error:
            wrong.append(f"{dtypes}: {str(error)[:60]}")
            continue
        for number, tensor in enumerate(tensors):
            right = expected(number, average)
            if tensor.dtype != dtypes[number] or not torch.equal(
                tensor.cpu().double(), torch.full((3,), right).double()
            ):
                wrong.append(f"{dtypes}: tensor {number} is {tensor[0].item()!r} in place of {right!r}")
    case.equal("averages with integers that raise or are wrong", wrong[:3], [])


@contract("AMP-OPTIMIZER-113")
@pytest.mark.parametrize("average", AVERAGES)
def test_first_average_is_the_model(case: Case, target: Target, average: str, rng: torch.Generator) -> None:
    for use_buffers in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(target.device)
        mean = swa_utils.AveragedModel(model, use_buffers=use_buffers, **AVERAGES[average]())
        for _ in range(2):
            model(torch.randn((8, 4), generator=rng).to(target.device))
        mean.update_parameters(model)
        pairs = zip(mean.module.state_dict().items(), model.state_dict().values(), strict=True)
        wrong = [name for (name, ours), theirs in pairs if not torch.equal(ours, theirs)]
        case.equal(f"entries that differ from the model after one update, use_buffers={use_buffers}", wrong, [])


# Models as AveragedModel is given them after it was made of the plain one: their parameters have other names.
WRAPPED: dict[str, Callable[[torch.nn.Module], Any]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data parallel": torch.nn.DataParallel,
    "in a module": torch.nn.Sequential,
}


@contract("AMP-OPTIMIZER-113")
@pytest.mark.parametrize("average", AVERAGES)
def test_wrapped_models(case: Case, target: Target, average: str) -> None:
    def averages(wrap: Callable[[torch.nn.Module], Any], use_buffers: bool) -> dict[str, Any]:
        model = torch.nn.BatchNorm1d(3, device=target.device)
        model.num_batches_tracked = None  # an integer, of which AveragedModel has no average
        mean = swa_utils.AveragedModel(model, use_buffers=use_buffers, **AVERAGES[average]())
        for value in VALUES:
            for number, tensor in enumerate(model.state_dict().values()):
                tensor.fill_(value + 4 * number)
            mean.update_parameters(wrap(model))
        return {name: tensor.cpu().tolist() for name, tensor in mean.state_dict().items()}

    for use_buffers in (False, True):
        plain = averages(lambda model: model, use_buffers)
        for name, wrap in WRAPPED.items():
            case.equal(f"averages of a model {name}, use_buffers={use_buffers}", averages(wrap, use_buffers), plain)


DECAYS = (0.999, 0.99, 0.3)
"""Usual decays and a small one, none of them a number of 16 bits, so that one that is rounded shows."""


@contract("AMP-OPTIMIZER-113")
@pytest.mark.parametrize("several", [False, True], ids=["avg_fn", "multi_avg_fn"])
def test_decay(case: Case, target: Target, rng: torch.Generator, several: bool) -> None:
    case.require_arithmetic(target, torch.float32)
    drawn = [torch.rand(16, generator=rng) + 0.25 for _ in range(4)]
    for decay, dtype in itertools.product(DECAYS, (torch.float32, *case.supported(target))):
        values = [value.to(dtype) for value in drawn]
        model = Holder([values[0].to(target.device)], buffers=False)
        options: dict[str, Any] = (
            {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(decay)}
            if several
            else {"avg_fn": swa_utils.get_ema_avg_fn(decay)}
        )
        mean = swa_utils.AveragedModel(model, **options)
        exact = values[0].double()
        for number, value in enumerate(values):
            model.tensors()[0].copy_(value)
            mean.update_parameters(model)
            exact = value.double() if number == 0 else decay * exact + (1 - decay) * value.double()
        error = (mean.module.state_dict()["tensor0"].cpu().double() - exact).abs() / exact
        # A product, a sum and a rounded weight for each of three averages of positive numbers; 16-bit ones are stored.
        bound = (9 if dtype is torch.float32 else 12) * torch.finfo(dtype).eps / 2
        case.at_most(f"{dtype}, decay {decay}: relative error after four updates", float(error.max()), bound)


RATES = (0.9, 0.99, 0.999, 0.9999, 0.5)
MODELS = (1.0, 2.0**-10, -(2.0**9))  # powers of two, so that the weight alone is rounded


def rates(average: str) -> dict[str, tuple[dict[str, Any], int, float]]:
    """Return, by what to call it, the arguments of an average, how many models it is of, and the weight of the next."""
    if "ema" not in average:
        return {f"after {count} models": (AVERAGES[average](), count, 1 / (count + 1)) for count in (1, 2, 9, 998)}
    several = average.startswith("multi")
    made: Any = swa_utils.get_ema_multi_avg_fn if several else swa_utils.get_ema_avg_fn
    name = "multi_avg_fn" if several else "avg_fn"
    return {f"decay {decay}": ({name: made(decay)}, 1, 1 - decay) for decay in RATES}


@contract("AMP-OPTIMIZER-113")
@pytest.mark.parametrize("average", AVERAGES)
def test_weight_of_a_model(case: Case, target: Target, average: str) -> None:
    """From zero an average goes by its weight of a power of two, rounded once; the weight may be a float32 number."""
    wrong: dict[str, str] = {}
    types = [torch.float32, *case.supported(target)]
    for what, (options, count, weight) in rates(average).items():
        model = Holder((torch.zeros(len(MODELS), device=target.device).to(dtype) for dtype in types), buffers=False)
        mean = swa_utils.AveragedModel(model, **options)
        mean.update_parameters(model)
        mean.n_averaged.fill_(count)  # of models that are zero
        values = torch.tensor(MODELS, dtype=torch.float64)
        for tensor in model.tensors():
            tensor.copy_(values)
        mean.update_parameters(model)
        for dtype, seen in zip(types, mean.module.state_dict().values(), strict=True):
            normal = (weight * values).abs() >= torch.finfo(dtype).smallest_normal
            share = (seen.detach().cpu().double() / (weight * values) - 1).abs()[normal].max()
            bound = torch.finfo(dtype).eps / 2 + torch.finfo(torch.float32).eps
            if seen.dtype != dtype or not float(share) <= bound:
                wrong[f"{dtype}, {what}"] = f"{seen[0].item()!r} of {seen.dtype} in place of {weight!r}"
    case.at_least("16-bit types", len(types) - 1, 1)
    case.equal("averages that go another way than their weight of the model", wrong, {})


@contract("AMP-OPTIMIZER-113")
@pytest.mark.parametrize("average", AVERAGES)
def test_averages_go_on_after_loading(case: Case, target: Target, average: str, rng: torch.Generator) -> None:
    """An average that is loaded from the state of another goes on like that one."""
    model = torch.nn.Linear(4, 4).to(target.device)
    means = [swa_utils.AveragedModel(model, **AVERAGES[average]()) for _ in range(2)]
    for number in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randint(-8, 9, parameter.shape, generator=rng))
        if number == 2:
            means[1].load_state_dict(means[0].state_dict())
        for mean in means if number >= 2 else means[:1]:
            mean.update_parameters(model)
    case.equal("models averaged", int(means[1].n_averaged), int(means[0].n_averaged))
    for key, value in means[0].module.state_dict().items():
        case.identical(f"{key} of the average that was loaded", means[1].module.state_dict()[key], value)


@contract("AMP-OPTIMIZER-113")
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_update_bn_in_a_region(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, training: bool
) -> None:
    """Statistics are taken anew, in float32, and modes and momenta are what they were."""
    batches = [torch.randn(8, 4, generator=rng).to(target.device) + 3 for _ in range(3)]
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, momentum=0.25)).to(target.device)
    model.train(training)
    model[1].running_mean.fill_(1e4)
    types = []
    model[1].register_forward_pre_hook(lambda module, given: types.append(given[0].dtype))
    with target.autocast(amp_dtype):
        for number in range(2):  # anew after each update of the average
            batches = [batch + 4 * number for batch in batches]
            swa_utils.update_bn(batches, model)
        wanted = torch.cat([model[0](batch) for batch in batches]).float().mean(0)
    case.equal("types of the batches that are averaged", types, [amp_dtype] * 6)
    modes = [module.training for module in (model, *model)]
    case.equal("whether the model and its two layers train", modes, [training] * 3)
    case.equal("momentum", model[1].momentum, 0.25)
    case.equal("type of the statistics", model[1].running_mean.dtype, torch.float32)
    far = float((model[1].running_mean - wanted).detach().abs().max() / wanted.detach().abs().max())
    case.at_most("distance of the mean from that of all batches", far, 4 * torch.finfo(amp_dtype).eps)


LAYERS: dict[str, tuple[type[torch.nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (torch.nn.BatchNorm1d, ()),
    "BatchNorm2d": (torch.nn.BatchNorm2d, (2, 2)),
    "BatchNorm3d": (torch.nn.BatchNorm3d, (2, 1, 2)),
    "LazyBatchNorm1d": (torch.nn.LazyBatchNorm1d, (3,)),
    "LazyBatchNorm2d": (torch.nn.LazyBatchNorm2d, (1, 2)),
    "LazyBatchNorm3d": (torch.nn.LazyBatchNorm3d, (2, 1, 1)),
}
# Those of the layers of one model, first to last.
MOMENTA: tuple[tuple[float | None, ...], ...] = ((), (None,), (0.0,), (0.25, None), (0.0, 0.1), (None, 1.0, 0.0))
CHANNELS = 3


def with_norms(kind: str, momenta: Sequence[float | None], target: Target) -> torch.nn.Sequential:
    """Return layers of that kind, each in a module of its own, with old statistics, between others that have a mode."""
    made, sizes = LAYERS[kind]
    layers: list[torch.nn.Module] = [torch.nn.Dropout(0.0)]
    for momentum in momenta:
        layer: Any = made(**({} if kind.startswith("Lazy") else {"num_features": CHANNELS}), momentum=momentum)
        layers.append(torch.nn.Sequential(layer, torch.nn.ReLU()))
    model = torch.nn.Sequential(*layers)
    model(torch.ones(2, CHANNELS, *sizes))  # gives lazy layers their size
    model.to(target.device)
    for layer in norms_of(model):
        layer.running_mean.fill_(1e4)
    return model


def norms_of(model: torch.nn.Module) -> list[Any]:
    return [one for one in model.modules() if isinstance(one, torch.nn.modules.batchnorm._BatchNorm)]


@contract("AMP-OPTIMIZER-113")
@pytest.mark.parametrize("kind", LAYERS)
def test_update_bn(case: Case, target: Target, rng: torch.Generator, kind: str) -> None:
    """Statistics of no, one and several layers are those of one pass; modes and momenta are what they were."""
    case.require_arithmetic(target, torch.float32)
    batches = [torch.randn(4, CHANNELS, *LAYERS[kind][1], generator=rng) + number for number in range(3)]
    batches = [batch.to(target.device) for batch in batches]
    changed: dict[str, Any] = {}
    for momenta, training in itertools.product(MOMENTA, (True, False)):
        what = f"momenta {momenta}, {'train' if training else 'eval'}"
        model = with_norms(kind, momenta, target).train(training)
        swa_utils.update_bn(batches, model)
        modes = {type(module).__name__: module.training for module in model.modules() if module.training != training}
        if modes:
            changed[f"{what}: modes"] = modes
        kept = tuple(layer.momentum for layer in norms_of(model))
        if [(type(one), one) for one in kept] != [(type(one), one) for one in momenta]:
            changed[f"{what}: momenta"] = kept
        given = batches
        for number, layer in enumerate(norms_of(model)):
            case.equal(f"{what}, layer {number}: batches counted", int(layer.num_batches_tracked), len(batches))
            mean, variance, given = one_pass(given, layer.eps)
            for name, wanted in (("running_mean", mean), ("running_var", variance)):
                far = float((getattr(layer, name).cpu().double() - wanted).abs().max() / wanted.abs().max())
                # Sums of up to 16 numbers and three layers, each of which may enlarge the error of the one before.
                case.at_most(f"{what}, layer {number}: relative distance of {name}", far, 2.0**-16)
    case.equal("modes and momenta that are not what they were", changed, {})


def one_pass(batches: Sequence[torch.Tensor], eps: float) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return in float64 the means over all batches of their mean and variance, and the positive normalized batches."""
    wide = [batch.cpu().double() for batch in batches]
    over = [place for place in range(wide[0].dim()) if place != 1]
    means = [batch.mean(over, keepdim=True) for batch in wide]
    deviations = [batch.var(over, correction=0, keepdim=True) for batch in wide]
    unbiased = [batch.var(over, correction=1) for batch in wide]
    scaled = [
        ((batch - mean) / (variance + eps).sqrt()).relu()
        for batch, mean, variance in zip(wide, means, deviations, strict=True)
    ]
    return torch.stack(means).mean(0).flatten(), torch.stack(unbiased).mean(0), scaled


# The types of an average and of its model.
TYPES: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "fp32-of-bf16": (torch.float32, torch.bfloat16),
    "fp32-of-fp16": (torch.float32, torch.float16),
    "fp64-of-fp32": (torch.float64, torch.float32),
    "bf16-of-fp32": (torch.bfloat16, torch.float32),
}
MOVING: dict[str, Callable[[], dict[str, Any]]] = {
    **AVERAGES,
    "ema": lambda: {"avg_fn": swa_utils.get_ema_avg_fn(0.999)},
    "multi-ema": lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.999)},
}


@contract("AMP-OPTIMIZER-113")
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("average", MOVING)
def test_average_of_another_type(case: Case, target: Target, rng: torch.Generator, average: str, types: str) -> None:
    """An average that is kept in another type than the model follows its formula in the type that it is kept in."""
    kept, given = TYPES[types]
    case.require_arithmetic(target, kept, given)
    values = [(torch.rand(16, generator=rng) + 1).to(given) for _ in range(5)]
    model = Holder([values[0].to(target.device)], buffers=False)
    mean = swa_utils.AveragedModel(model, **MOVING[average]()).to(kept)
    exact = values[0].double()
    for number, value in enumerate(values):
        model.tensors()[0].copy_(value)
        mean.update_parameters(model)
        rate = (1 - 0.999) if "ema" in average else 1 / (number + 1)
        exact = exact + (rate if number else 1.0) * (value.double() - exact)
    seen = mean.module.state_dict()["tensor0"]
    case.equal("type of the average", seen.dtype, kept)
    case.equal("type of the model", model.tensors()[0].dtype, given)
    error = float(((seen.cpu().double() - exact).abs() / exact).max())
    # In each of four averages a difference, a product and a sum; avg_fn weighs the model in the model's own type.
    weighing = 4 * 0.001 * 2 * torch.finfo(given).eps if "ema" in average else 0.0
    case.at_most("relative error after five updates", error, 16 * torch.finfo(kept).eps / 2 + weighing)
