"""Check ops that draw random numbers in checkpoints and under saved-tensor hooks: the gradients are those without."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.generators import seed_torch

SHAPE = (2, 4, 6, 6)
# By name what each does with a tensor of that shape; each is all of a segment, so what it saves is saved last.
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.4),
    "dropout, in place": lambda x: functional.dropout(x * 1, 0.4, inplace=True),
    "dropout1d": lambda x: functional.dropout1d(x[0], 0.4),
    "dropout2d": lambda x: functional.dropout2d(x, 0.4),
    "dropout3d": lambda x: functional.dropout3d(x, 0.4),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: functional.feature_alpha_dropout(x, 0.4, training=True),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "rrelu, in place": lambda x: functional.rrelu(x * 1, training=True, inplace=True),
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x),
    "gumbel_softmax, hard": lambda x: functional.gumbel_softmax(x, hard=True),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x * torch.randn(x.shape, dtype=x.dtype, device=x.device),
    "randint_like": lambda x: x * torch.randint_like(x, 4),
    "normal": lambda x: x * torch.normal(torch.zeros_like(x), 1.0),
    "normal_": lambda x: x * torch.empty_like(x).normal_(),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(1, 2),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(),
    "randperm": lambda x: x[..., torch.randperm(x.shape[-1], device=x.device)],
    "multinomial": lambda x: x[torch.multinomial(torch.ones(x.shape[0], device=x.device), 1)],
    "fractional_max_pool2d": lambda x: functional.fractional_max_pool2d(x, 2, output_size=3),
    "attention with dropout": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
}
each_op = pytest.mark.parametrize("op", OPS, ids=lambda name: name.replace(",", "").replace(" ", "_"))


def _gradient(
    op: str, around: Callable[..., torch.Tensor], x: torch.Tensor, region: contextlib.AbstractContextManager[None]
) -> torch.Tensor:
    """Return the gradient of `x`; sums of it are of small integers times what the op multiplies by."""
    seed_torch(1)
    leaf = x.clone().requires_grad_()
    with region:
        output = around(OPS[op], leaf)
    # What comes between forward and backward draws numbers too.
    torch.rand(3, device=x.device)
    weights = torch.arange(output.numel(), device=x.device).remainder(5).sub(2).view(output.shape)
    (output.float() * weights).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def _judge(
    case: Case, op: str, target: Target, rng: torch.Generator, around: Callable[..., torch.Tensor], what: str
) -> None:
    """Compare the gradients with those of a plain call, of float32 in a region and of 16 bits outside."""
    x = torch.randn(SHAPE, generator=rng).to(target.device)
    for low in case.supported(target):
        for where, given in (("in a region", x), ("outside", x.to(low))):
            enabled = where == "in a region"
            try:
                wanted = _gradient(op, lambda call, x: call(x), given, target.autocast(low, enabled=enabled))
            except (RuntimeError, NotImplementedError) as error:
                case.note(f"{low} {where}: exception", f"{type(error).__name__}: {str(error).splitlines()[0][:80]}")
                continue
            seen = _gradient(op, around, given, target.autocast(low, enabled=enabled))
            case.identical(f"{low} {where}: gradient {what}", seen, wanted)


@contract("AMP-BACKWARD-059")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@each_op
def test_random_ops_in_checkpoints(case: Case, target: Target, rng: torch.Generator, op: str, reentrant: bool) -> None:
    _judge(case, op, target, rng, functools.partial(checkpoint, use_reentrant=reentrant), "through a checkpoint")


@contract("AMP-BACKWARD-049")
@each_op
def test_random_ops_under_hooks(case: Case, target: Target, rng: torch.Generator, op: str) -> None:
    def copied(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(torch.clone, lambda kept: kept):
            return call(x)

    _judge(case, op, target, rng, copied, "of copies of what was saved")
