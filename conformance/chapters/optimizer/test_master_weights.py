"""Check that parameters, gradients and optimizer state stay fp32 in mixed precision."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...workloads.linear_loss import LinearLoss
from ...workloads.mlp import mlp
from ...workloads.training import Workload, train_step
from .optimizer_configs import OptimizerConfig
from .parameter_kinds import counts_steps
from .support import build, iterate, over_optimizers


@contract("AMP-OPTIMIZER-034")
@over_optimizers(lambda kind: kind.gradients != "sparse", variants=None)
def test_master_weights_and_state_are_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, kind: OptimizerConfig
) -> None:
    layer = torch.nn.Linear(8, 4, bias=kind.gradients == "dense").to(target.device)
    trial = LinearLoss.make(kind.gradients, target.device, rng)
    build(case, kind, trial)
    optimizer, scaler = kind.make(layer.parameters()), torch.amp.GradScaler(target.device_type, init_scale=256.0)
    inputs = torch.randn(6, 8, generator=rng).to(target.device)
    for _ in range(2):
        with target.autocast(amp_dtype):
            outputs = layer(inputs)
            loss = outputs.float().square().mean()
        iterate(optimizer, loss, scaler)
    case.equal("control: dtype of the layer's output", outputs.dtype, amp_dtype)
    dtypes = {
        "parameter": {p.dtype for p in layer.parameters()},
        "gradient": {p.grad.dtype for p in layer.parameters()},
    }
    dtypes["state"] = {
        value.dtype
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not counts_steps(name, value)
    } | {torch.float32}
    for name, seen in dtypes.items():
        case.equal(f"dtypes of every {name}", sorted(map(str, seen)), ["torch.float32"])
    case.equal("scale after two clean steps", scaler.get_scale(), 256.0)


# Optimizers by name, with the number of state tensors of a parameter's shape that each keeps.
STATE_COPIES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), 0),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
    "adam": (lambda p: torch.optim.Adam(p), 2),
    "adamw": (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
    "rmsprop": (lambda p: torch.optim.RMSprop(p), 1),
}


def bytes_by_dtype(tensors: Iterable[torch.Tensor]) -> dict[torch.dtype, int]:
    """Return the number of bytes that the elements of `tensors` take, by dtype."""
    found: collections.Counter[torch.dtype] = collections.Counter()
    for tensor in tensors:
        found[tensor.dtype] += tensor.numel() * tensor.element_size()
    return dict(found)


@contract("AMP-OPTIMIZER-034")
@pytest.mark.parametrize("name", ["momentum", "adam", deep("standard", "sgd"), deep("standard", "adamw"), "rmsprop"])
def test_masters_keep_their_bytes(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str
) -> None:
    make, copies = STATE_COPIES[name]
    work = mlp(target.device, rng)
    work = Workload(work.model, make(work.model.parameters()), work.loss, work.batches)
    scaler = torch.amp.GradScaler(target.device_type, enabled=amp_dtype == torch.float16)
    for step in range(2):
        train_step(work, step, lambda: target.autocast(amp_dtype), scaler)
    parameters = list(work.model.parameters())
    elements = sum(parameter.numel() for parameter in parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # Step counters, which have other shapes, are left out.
    state = [
        value
        for parameter, entries in work.optimizer.state.items()
        for value in entries.values()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]
    case.equal("bytes of the parameters", bytes_by_dtype(parameters), {torch.float32: 4 * elements})
    case.equal("bytes of the gradients", bytes_by_dtype(gradients), {torch.float32: 4 * elements})
    expected = {torch.float32: 4 * elements * copies} if copies else {}
    case.equal("bytes of the optimizer state", bytes_by_dtype(state), expected)


BF16_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


@contract("AMP-OPTIMIZER-034", dtypes=("bf16",))
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", deep("standard", "Adam"), deep("standard", "Adagrad")])
def test_weights_and_state_stay_fp32(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, optimizer: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.GELU(), torch.nn.Linear(16, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) / 4)
    rows = torch.randn(32, 12, generator=rng).to(target.device)
    classes = torch.randint(0, 5, (32,), generator=rng).to(target.device)
    model.to(target.device)
    parameters = list(model.parameters())
    held = BF16_OPTIMIZERS[optimizer](parameters)
    for _ in range(case.samples(quick=4, standard=8, full=50)):
        with target.autocast(amp_dtype):
            loss = torch.nn.functional.cross_entropy(model(rows), classes)
        iterate(held, loss)
    entries = [
        value
        for state in held.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not counts_steps(name, value)
    ]
    case.equal("dtypes of the weights", {parameter.dtype for parameter in parameters}, {torch.float32})
    case.equal("dtypes of the gradients", {parameter.grad.dtype for parameter in parameters}, {torch.float32})
    case.equal("dtypes of the optimizer state", {value.dtype for value in entries}, {torch.float32})
    # In value as well: weights that only hold bf16 numbers would have no bit below bf16's.
    share = [float((parameter.detach().view(torch.int32) & 0xFFFF != 0).float().mean()) for parameter in parameters]
    case.at_least("share of the weights with bits below bf16's", min(share), 0.5)
