"""Check that a module converted to 16 bits keeps what is tied, shared, and of no floating-point type."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ...harness.check import Case, contract
from ...harness.targets import Target
from .swapped import swapping


def _swapped(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    with swapping():
        return module.to(dtype)


CONVERSIONS: dict[str, Callable[[torch.nn.Module, torch.dtype], torch.nn.Module]] = {
    "method": lambda module, dtype: module.bfloat16() if dtype is torch.bfloat16 else module.half(),
    "to": lambda module, dtype: module.to(dtype),
    "to-device": lambda module, dtype: module.to(next(module.parameters()).device, dtype),
    "to, swapping": _swapped,
}


def _module(device: torch.device) -> torch.nn.Module:
    """Return a module with tied weights, a frozen one, gradients, and buffers of several types."""
    module = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    module.append(torch.nn.Linear(4, 5, bias=False))
    module.register_buffer("counts", torch.tensor([2**24 + 1, 257], dtype=torch.int64))
    module.register_buffer("mask", torch.tensor([True, False]))
    module.register_buffer("scale", torch.tensor([0.1]))
    module.to(device)  # which unties weights where the device's tensors cannot take the place of others
    module[3].weight = module[0].weight
    module[1].bias.requires_grad_(False)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.1)
    return module


@contract("AMP-BF16-010")
@pytest.mark.parametrize("way", list(CONVERSIONS))
def test_conversion_of_a_module(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    module = _module(target.device)
    parameters = dict(module.named_parameters())
    optimizer = torch.optim.SGD([one for one in parameters.values() if one.requires_grad], lr=0.5)
    before = {key: value.detach().clone() for key, value in module.state_dict().items()}
    returned = CONVERSIONS[way](module, amp_dtype)
    case.true("the module itself is returned", returned is module)
    now = dict(module.named_parameters())
    case.equal("parameters that became others", [key for key in now if now[key] is not parameters.get(key)], [])
    case.true("tied weights are tied", module[3].weight is module[0].weight)
    wanted = {key: amp_dtype if value.is_floating_point() else value.dtype for key, value in before.items()}
    case.equal("types", {key: value.dtype for key, value in module.state_dict().items()}, wanted)
    for key, value in module.state_dict().items():
        case.identical(key, value, before[key].to(wanted[key]))
    case.equal("trained parameters", [key for key in now if now[key].requires_grad], [k for k in now if k != "1.bias"])
    slopes = {key: None if one.grad is None else one.grad.dtype for key, one in now.items()}
    case.equal("types of gradients", slopes, {key: None if key == "1.bias" else amp_dtype for key in now})
    optimizer.step()
    for key, one in now.items():
        if one.requires_grad:
            right = before[key].to(amp_dtype).cpu().double() - 0.5 * one.grad.cpu().double()
            far = float((one.detach().cpu().double() - right).abs().max() / right.abs().max())
            case.at_most(f"{key} after a step of the optimizer that was made before", far, torch.finfo(amp_dtype).eps)


@contract("AMP-BF16-010")
@pytest.mark.parametrize("saved", ["16-bit", "float32"])
def test_loading_keeps_types(case: Case, target: Target, amp_dtype: torch.dtype, saved: str) -> None:
    """A state of another type is copied into the module's tensors, unless it is told to assign them."""
    given, taken = (amp_dtype, torch.float32) if saved == "16-bit" else (torch.float32, amp_dtype)
    source = _module(target.device).to(given)
    whole = source.state_dict()
    part = {key: value for key, value in whole.items() if key != "1.weight"} | {"other": torch.zeros(2)}
    for how, state, strict in (("strict", whole, True), ("not strict", whole, False), ("a part", part, False)):
        module = _module(target.device).to(taken)
        parameters = dict(module.named_parameters())
        before = {key: value.clone() for key, value in module.state_dict().items()}
        module.load_state_dict(state, strict=strict)
        now = dict(module.named_parameters())
        others = [key for key in now if now[key] is not parameters.get(key)]
        case.equal(f"{how}: parameters that became others", others, [])
        for key, value in module.state_dict().items():
            wanted = state[key] if key in state else before[key]
            case.identical(f"{how}: {key}", value, wanted.to(taken) if wanted.is_floating_point() else wanted)
    assigned = _module(target.device).to(taken)
    assigned.load_state_dict(source.state_dict(), assign=True)
    types = {str(one.dtype) for one in assigned.parameters()}
    case.equal("types of parameters that are assigned", types, {str(given)})


LAYOUTS: dict[str, tuple[Callable[[], torch.nn.Module], torch.memory_format]] = {
    "Conv2d": (lambda: nn.Conv2d(3, 4, 2), torch.channels_last),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 2), torch.channels_last),
    "Conv3d": (lambda: nn.Conv3d(3, 4, 2), torch.channels_last_3d),
}


@contract("AMP-BF16-010")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_type_and_layout(case: Case, target: Target, amp_dtype: torch.dtype, kind: str) -> None:
    """A module takes a type and a layout in one call, or one after the other, and keeps the first."""
    make, layout = LAYOUTS[kind]
    module: Any = make().to(target.device)
    calls: dict[str, Callable[[Any], Any]] = {
        "type and layout": lambda one: one.to(dtype=amp_dtype, memory_format=layout),
        "device, type and layout": lambda one: one.to(target.device, amp_dtype, memory_format=layout),
        "type, then layout": lambda one: one.to(amp_dtype).to(memory_format=layout),
        "layout, then type": lambda one: one.to(memory_format=layout).to(amp_dtype),
        "layout, then type by its method": lambda one: CONVERSIONS["method"](one.to(memory_format=layout), amp_dtype),
        "layout, then type and back": lambda one: one.to(memory_format=layout).to(amp_dtype).float().to(amp_dtype),
    }
    for how, call in calls.items():
        weight = call(copy.deepcopy(module)).weight.detach()
        case.true(f"{how}: the weight has the layout", weight.is_contiguous(memory_format=layout))
        case.identical(f"{how}: weight", weight, module.weight.detach().to(amp_dtype))


def _averaged(module: Any, image: torch.Tensor) -> None:
    module.update_parameters(module.module)


# What counts, and how it counts one more.
COUNTING: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], Any]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), lambda module, image: module(image[:, :, 0, 0])),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), lambda module, image: module(image)),
    "BatchNorm2d of plain averages": (lambda: nn.BatchNorm2d(3, momentum=None), lambda module, image: module(image)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), lambda module, image: module(image[..., None])),
    "AveragedModel": (lambda: AveragedModel(nn.Linear(2, 2)), _averaged),
    "AveragedModel by EMA": (
        lambda: AveragedModel(nn.Linear(2, 2), multi_avg_fn=get_ema_multi_avg_fn(0.5)),
        _averaged,
    ),
}
COUNTERS = ("n_averaged", "num_batches_tracked")
# Beside what bf16, fp16 and float32 count to.
STARTS = (0, 255, 2047, 2**24 - 1)


@contract("AMP-BF16-010")
@pytest.mark.parametrize("way", list(CONVERSIONS))
def test_counters_of_a_module(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, way: str
) -> None:
    wrong: dict[str, Any] = {}
    image = torch.rand(2, 3, 2, 2, generator=rng).to(target.device)
    for name, (make, count) in COUNTING.items():
        module = make().to(target.device)
        module = CONVERSIONS[way](module, amp_dtype)
        loaded = copy.deepcopy(module)
        loaded.load_state_dict(module.state_dict())
        for kind, one in (("", module), (" that is loaded", loaded)):
            counters = {key: value for key, value in one.named_buffers() if key.split(".")[-1] in COUNTERS}
            own = [key for key in counters if "." not in key]  # that of an averaged model follows the model's
            for start in STARTS:
                for key in own:
                    counters[key].fill_(start)
                for _ in range(3):
                    count(one, image.to(amp_dtype))
                seen = {key: value.item() for key, value in one.named_buffers() if key in own}
                if seen != dict.fromkeys(own, start + 3) or not own:
                    wrong[f"{name}{kind}, from {start}"] = seen
            types = {value.dtype for key, value in one.named_buffers() if key in counters}
            if types != {torch.int64}:
                wrong[f"{name}{kind}"] = types
    case.equal("counters that are no integers, or count wrongly", wrong, {})
