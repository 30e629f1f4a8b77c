"""Check that the loss of a sample, and its gradient, are those of the sample alone, whatever the others are."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ...harness.check import Case, contract
from ...harness.targets import Target

SAMPLES, STEPS, CLASSES = 6, 7, 5
# What rounding to 24 bits a few dozen times leaves.
_FLOAT32 = 2.0**-17
_IGNORED = -100
_LABELS = torch.tensor([0, _IGNORED, 2, 1, 3, _IGNORED])
_SIDES = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, 1.0])
# One sample has no path, as a blank must lie between equal labels; lengths differ.
_WORDS = torch.tensor([[1, 2, 3, 4], [2, 2, 2, 2], [3, 1, 1, 4], [4, 4, 4, 4], [1, 3, 2, 1], [2, 1, 4, 3]])
_LENGTHS = torch.tensor([4, 3, 2, 4, 1, 3])
_FRAMES = torch.tensor([7, 4, 7, 7, 5, 6])

# The losses of samples, one each, from inputs x and numbers t between 0 and 1, both (samples, steps, classes), and the
# places of the samples.
Each = Callable[[Tensor, Tensor, Tensor], Tensor]


def _ctc(x: Tensor, t: Tensor, at: Tensor) -> Tensor:
    rows = x.log_softmax(-1).transpose(0, 1)
    words, frames, lengths = _WORDS[at].to(x.device), _FRAMES[at].to(x.device), _LENGTHS[at].to(x.device)
    return functional.ctc_loss(rows, words, frames, lengths, reduction="none", zero_infinity=True)


def _of_steps(losses: Tensor) -> Tensor:
    return losses.flatten(1).sum(1)


EACH: dict[str, Each] = {
    "cross_entropy": lambda x, t, at: functional.cross_entropy(
        x[:, 0], _LABELS[at].to(x.device), weight=t.new_tensor([1, 2, 0.5, 1, 3]), reduction="none"
    ),
    "cross_entropy, smoothed": lambda x, t, at: functional.cross_entropy(
        x[:, 0], _LABELS[at].to(x.device), label_smoothing=0.2, reduction="none"
    ),
    "cross_entropy, steps": lambda x, t, at: _of_steps(
        functional.cross_entropy(
            x.transpose(1, 2), _LABELS[at][:, None].repeat(1, STEPS).to(x.device), reduction="none"
        )
    ),
    "nll_loss": lambda x, t, at: functional.nll_loss(
        x[:, 0].log_softmax(-1), _LABELS[at].to(x.device), ignore_index=_IGNORED, reduction="none"
    ),
    "ctc_loss": _ctc,
    "multi_margin_loss": lambda x, t, at: functional.multi_margin_loss(
        x[:, 0], _LABELS[at].clamp(min=0).to(x.device), reduction="none"
    ),
    "multilabel_soft_margin_loss": lambda x, t, at: functional.multilabel_soft_margin_loss(
        x[:, 0], (t[:, 0] > 0.5).to(x), reduction="none"
    ),
    "triplet_margin_loss": lambda x, t, at: functional.triplet_margin_loss(
        x[:, 0], x[:, 1], t[:, 0], margin=4.0, swap=True, reduction="none"
    ),
    "cosine_embedding_loss": lambda x, t, at: functional.cosine_embedding_loss(
        x[:, 0], t[:, 0], _SIDES[at].to(x.device), margin=-0.9, reduction="none"
    ),
    "hinge_embedding_loss": lambda x, t, at: _of_steps(
        functional.hinge_embedding_loss(x, _SIDES[at, None, None].expand(x.shape).to(x.device), reduction="none")
    ),
    "margin_ranking_loss": lambda x, t, at: functional.margin_ranking_loss(
        x[:, 0, 0], x[:, 0, 1], _SIDES[at].to(x.device), margin=0.5, reduction="none"
    ),
    "gaussian_nll_loss": lambda x, t, at: _of_steps(functional.gaussian_nll_loss(x, t, t + 0.5, reduction="none")),
    "poisson_nll_loss": lambda x, t, at: _of_steps(functional.poisson_nll_loss(x, 3 * t, full=True, reduction="none")),
    "kl_div": lambda x, t, at: _of_steps(functional.kl_div(x.log_softmax(-1), t, reduction="none")),
    "binary_cross_entropy_with_logits": lambda x, t, at: _of_steps(
        functional.binary_cross_entropy_with_logits(x, t, pos_weight=t.new_tensor([1, 2, 0.5, 1, 3]), reduction="none")
    ),
    "mse_loss": lambda x, t, at: _of_steps(functional.mse_loss(x, t, reduction="none")),
    "smooth_l1_loss": lambda x, t, at: _of_steps(functional.smooth_l1_loss(x, t, beta=0.3, reduction="none")),
    "huber_loss": lambda x, t, at: _of_steps(functional.huber_loss(x, t, delta=0.7, reduction="none")),
}


@contract("AMP-LOSS-020")
@pytest.mark.parametrize("name", EACH, ids=lambda name: name.replace(", ", "-"))
def test_samples_are_independent(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str
) -> None:
    x = torch.randn(SAMPLES, STEPS, CLASSES, generator=rng).to(target.device)
    t = (0.1 + 0.8 * torch.rand(SAMPLES, STEPS, CLASSES, generator=rng)).to(target.device)
    incoming = (0.5 + torch.rand(SAMPLES, generator=rng)).to(target.device)

    def run(places: list[int]) -> tuple[Tensor, Tensor]:
        leaf = x[places].clone().requires_grad_()
        with target.autocast(amp_dtype):
            losses = EACH[name](leaf, t[places], torch.tensor(places))
        (gradient,) = torch.autograd.grad((losses.float() * incoming[places]).sum(), leaf)
        return losses.detach().cpu().double(), gradient.cpu().double()

    losses, gradients = run(list(range(SAMPLES)))
    case.equal("samples whose gradient is not finite", _places(~gradients.flatten(1).isfinite().all(1)), [])
    alone = [run([at]) for at in range(SAMPLES)]
    for what, seen, wanted in (
        ("loss", losses, torch.cat([loss for loss, _ in alone])),
        ("gradient", gradients, torch.cat([gradient for _, gradient in alone])),
    ):
        near = _FLOAT32 * wanted.flatten(1).abs().amax(1) if wanted.dim() > 1 else _FLOAT32 * wanted.abs()
        apart = (seen - wanted).abs().reshape(SAMPLES, -1).amax(1)
        case.equal(f"samples whose {what} is not that of the sample alone", _places(~(apart <= near)), [])


# Of (samples, classes) and of (samples, classes, 3) logits; labels beside the classes, and one of them.
IGNORED = (-100, -1, 255, 2)
_OF_LABELS: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda x, y, **of: functional.cross_entropy(x, y, **of),
    "cross_entropy, smoothed": lambda x, y, **of: functional.cross_entropy(x, y, label_smoothing=0.2, **of),
    "nll_loss": lambda x, y, **of: functional.nll_loss(x.log_softmax(1), y, **of),
}


@contract("AMP-LOSS-020")
@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize("name", _OF_LABELS, ids=lambda name: name.replace(", ", "-"))
def test_ignored_samples_change_no_other(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str, ignored: int
) -> None:
    """Of dozens of samples a third is ignored, so that what is written for them by a wrong place meets others."""

    def run(x: Tensor, y: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
        leaf = x.to(target.device).requires_grad_()
        with target.autocast(amp_dtype):
            loss = _OF_LABELS[name](leaf, y.to(target.device), ignore_index=ignored, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach().cpu(), gradient.cpu()

    wrong: dict[str, str] = {}
    for classes, reduction, steps in itertools.product((5, 50), ("mean", "sum"), ((), (3,))):
        x = torch.randn(64, classes, *steps, generator=rng)
        y = torch.randint(0, classes, (64, *steps), generator=rng)
        left = torch.rand(64, generator=rng) < 1 / 3
        y[left] = ignored
        kept = (y != ignored).flatten(1).any(1) if steps else y != ignored
        all_rows = run(x, y, reduction)
        few = run(x[kept], y[kept], reduction)
        wanted = torch.zeros_like(x)
        wanted[kept] = few[1]
        near = (all_rows[1] - wanted).abs() <= _FLOAT32 * few[1].abs().max()
        far = ~near.flatten(1).all(1)
        what = f"{classes} classes, {reduction}, {'steps' if steps else 'samples'}"
        if not (all_rows[0] - few[0]).abs() <= _FLOAT32 * few[0].abs():
            wrong[what] = f"loss {float(all_rows[0])}, of the kept alone {float(few[0])}"
        elif far.any():
            wrong[what] = f"gradients of samples {_places(far)[:4]}"
    case.equal("losses and gradients that ignored samples change", wrong, {})


def _places(mask: Tensor) -> list[int]:
    return [int(at) for at in mask.nonzero().flatten()]
