"""Check optimizers that step in hooks of their parameters' gradients, which free each gradient at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from ...harness.check import Case, contract
from ...harness.targets import Target

ITERATIONS = 3
DTYPES = {"float32": lambda amp_dtype: torch.float32, "16-bit": lambda amp_dtype: amp_dtype}


class _Model(nn.Module):
    """Two layers, of which the first is used twice."""

    def __init__(self, rng: torch.Generator, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.randn(6, 6, generator=rng).to(device, dtype) / 2) for _ in range(2))

    def forward(self, features: Tensor) -> Tensor:
        return nn.functional.linear(features @ self.first @ self.first, self.last)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.125, momentum=0.5),
    "AdamW": partial(torch.optim.AdamW, lr=0.125),
}


@contract("AMP-BACKWARD-084")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("of", DTYPES)
def test_optimizer_in_backward(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, of: str, kind: str
) -> None:
    dtype = DTYPES[of](amp_dtype)
    batches = [torch.randn(5, 6, generator=rng).to(target.device, dtype) for _ in range(ITERATIONS)]
    model = _Model(rng, target.device, dtype)
    twin = _Model(rng, target.device, dtype)
    twin.load_state_dict(model.state_dict())
    ordinary = OPTIMIZERS[kind](list(model.parameters()))
    optimizers = {parameter: OPTIMIZERS[kind]([parameter]) for parameter in twin.parameters()}
    calls: list[torch.dtype] = []

    def hook(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        calls.append(parameter.grad.dtype if parameter.grad is not None else torch.bool)
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in twin.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for number, batch in enumerate(batches):
        for one in (model, twin):
            with target.autocast(amp_dtype):
                loss = one(batch).float().square().mean()
            loss.backward()
        left = [name for name, parameter in twin.named_parameters() if parameter.grad is not None]
        case.equal(f"iteration {number}: gradients that are left", left, [])
        case.equal(f"iteration {number}: types of gradients in the hooks", calls, [dtype] * 2)
        calls.clear()
        ordinary.step()
        ordinary.zero_grad()
        for name, parameter in twin.named_parameters():
            case.identical(f"iteration {number}: {name}, as in a loop", parameter, model.get_parameter(name).detach())
