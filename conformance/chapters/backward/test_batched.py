"""Check gradients of several vectors at once through the normalizations of a region."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd.functional import jacobian

from ...harness.check import Case, contract, deep, per_target
from ...harness.targets import Target

NORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "layer": lambda: torch.nn.LayerNorm(3),
    "group": lambda: torch.nn.GroupNorm(2, 4),
    "batch": lambda: torch.nn.BatchNorm1d(4),
    "batch-eval": lambda: torch.nn.BatchNorm1d(4).eval(),
    "instance": lambda: torch.nn.InstanceNorm1d(4, affine=True),
    "rms": lambda: torch.nn.RMSNorm(3),
}
QUICK = ("layer", "group")


def _distance(seen: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest distance as a part of the largest expected element."""
    return float((seen - expected).abs().max() / expected.abs().max())


def _ways(target: Target) -> list[str]:
    # What vmap of autograd.grad gives on accelerators has not been seen: stock torch raises for some norms on a CPU.
    return ["is_grads_batched", "jacobian", *(["vmap"] if target.device_type == "cpu" else [])]


@contract("AMP-BACKWARD-073")
@per_target("way", _ways)
@pytest.mark.parametrize("given", ["float32", "16-bit"])
@pytest.mark.parametrize("norm", [name if name in QUICK else deep("standard", name) for name in NORMS])
@pytest.mark.filterwarnings("ignore")
def test_batched_gradients(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, norm: str, given: str, way: str
) -> None:
    module = NORMS[norm]().to(target.device)
    x = torch.randn(2, 4, 3, generator=rng).to(target.device).requires_grad_()

    def normalized(x: torch.Tensor) -> torch.Tensor:
        with target.autocast(amp_dtype):
            result: torch.Tensor = module(x.to(amp_dtype) if given == "16-bit" else x)
        return result

    y = normalized(x)
    vectors = torch.eye(y.numel(), dtype=y.dtype, device=y.device).reshape(-1, *y.shape)

    def single(vector: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(y, x, vector, retain_graph=True)[0]

    def batched() -> torch.Tensor:
        if way == "vmap":
            return torch.vmap(single)(vectors)
        if way == "jacobian":
            return jacobian(normalized, x.detach(), vectorize=True).reshape(-1, *x.shape)
        return torch.autograd.grad(y, x, vectors, retain_graph=True, is_grads_batched=True)[0]

    expected = torch.stack([single(vector) for vector in vectors])
    try:
        seen, error = batched(), None
    except RuntimeError as raised:
        seen, error = expected, f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    case.equal("error of a batch of vectors", error, None)
    case.equal("dtype of the gradients", seen.dtype, expected.dtype)
    # A rule for batches may round each of about ten intermediate results to the dtype of the output.
    unit = torch.finfo(y.dtype).eps
    case.at_most("largest difference, as a part of the largest gradient", _distance(seen, expected), 16 * unit)
