"""Check that float32 targets, weights and variances of a loss take part in a region as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ...harness.check import Case, contract
from ...harness.targets import Target

# What rounding to 24 bits a few dozen times leaves; rounding to 11 or 8 is 2^-12 or more.
_FLOAT32 = 2.0**-17
_CLASSES = torch.tensor([0, 1, 2, 3, 4, 0])
# Losses of float32 inputs x and of targets, weights or variances t between 0 and 1.
WITH_FLOAT32_TARGETS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy, probabilities": lambda x, t: functional.cross_entropy(x, t / t.sum(1, keepdim=True)),
    "cross_entropy, smoothed": lambda x, t: functional.cross_entropy(
        x, t / t.sum(1, keepdim=True), label_smoothing=0.1
    ),
    "cross_entropy, weight": lambda x, t: functional.cross_entropy(x, _CLASSES.to(x.device), weight=t[0]),
    "nll_loss, weight": lambda x, t: functional.nll_loss(x.log_softmax(1), _CLASSES.to(x.device), weight=t[0]),
    "mse_loss": functional.mse_loss,
    "l1_loss": functional.l1_loss,
    "smooth_l1_loss": functional.smooth_l1_loss,
    "huber_loss": functional.huber_loss,
    "kl_div": lambda x, t: functional.kl_div(x.log_softmax(1), t, reduction="batchmean"),
    "kl_div, log_target": lambda x, t: functional.kl_div(
        x.log_softmax(1), t.log(), reduction="batchmean", log_target=True
    ),
    "binary_cross_entropy_with_logits": functional.binary_cross_entropy_with_logits,
    "binary_cross_entropy_with_logits, weights": lambda x, t: functional.binary_cross_entropy_with_logits(
        x, (t > 0.5).to(t), weight=t, pos_weight=t[0] + 1
    ),
    "poisson_nll_loss": functional.poisson_nll_loss,
    "gaussian_nll_loss": lambda x, t: functional.gaussian_nll_loss(x, t, t + 0.5),
    "triplet_margin_loss": lambda x, t: functional.triplet_margin_loss(x, t, t.flip(0)),
    "soft_margin_loss": functional.soft_margin_loss,
    "multilabel_soft_margin_loss": functional.multilabel_soft_margin_loss,
}


@contract("AMP-LOSS-019")
@pytest.mark.parametrize("name", WITH_FLOAT32_TARGETS, ids=lambda name: name.replace(", ", "-"))
def test_float32_targets_are_not_rounded(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str
) -> None:
    call = WITH_FLOAT32_TARGETS[name]
    x = torch.randn(6, 5, generator=rng)
    t = 0.1 + 0.8 * torch.rand(6, 5, generator=rng)
    given, exact = x.to(target.device).requires_grad_(), x.double().requires_grad_()
    with target.autocast(amp_dtype):
        seen = call(given, t.to(target.device))
    wanted = call(exact, t.double())
    case.equal("dtype of the loss", seen.dtype, torch.float32)
    case.at_most("relative error of the loss", float((seen.detach().cpu() / wanted.detach() - 1).abs()), _FLOAT32)
    (slope,), (exact_slope,) = torch.autograd.grad(seen, given), torch.autograd.grad(wanted, exact)
    far = (slope.cpu().double() - exact_slope).abs().max() / exact_slope.abs().max()
    case.at_most("error of the gradient, of its largest element", float(far), _FLOAT32)
