"""Error bounds for losses with their options, forward and backward, on data that exposes 16-bit intermediates.

Formulas and the bounds on their fp32 evaluation are those of `loss_reference`. Kinds: `plain`; `large` logits (near
1000 or beyond 30, where exponentials without a shift overflow and log(sigmoid(x)) is -inf or 0); `off_grid` numbers,
which lowering to 16 bits rounds all to the same side, so that it does not average out of a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...oracles.numbers.formats import BF16, FP32, Format, rounded
from ...oracles.numbers.loss_reference import gradient_bound, reference
from ...oracles.numbers.running_error import Rounded
from .bounds_reduction import DATA, plain
from .op_error import ORDER, Op, Store

SAMPLES, CLASSES = 17, 11

Draw = Callable[[str, Format, torch.Generator], tuple[Tensor, ...]]


def _logits(kind: str, form: Format, rng: torch.Generator) -> Tensor:
    noise = 3 * plain(form, rng, SAMPLES, CLASSES)
    return 1000 + noise if kind == "large" else noise


def _classes(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    return _logits(kind, form, rng), torch.randint(CLASSES, (SAMPLES,), generator=rng)


def _weighted_classes(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    return *_classes(kind, form, rng), DATA["off_grid"](form, rng, CLASSES)


def _chances(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    logits, classes = _classes(kind, form, rng)
    return logits.log_softmax(1), classes


def _binary(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    size = 40.0 if kind == "large" else 1.0
    return size * plain(form, rng, SAMPLES, CLASSES), torch.rand(SAMPLES, CLASSES, generator=rng).double()


def _weighted_binary(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    return *_binary(kind, form, rng), DATA["off_grid"](form, rng, CLASSES)


def _pairs(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    """Return gaps up to five, on either side of every delta and beta; targets are numbers of either 16-bit type."""
    return 2 * DATA[kind](form, rng, SAMPLES, CLASSES), rounded(plain(form, rng, SAMPLES, CLASSES), BF16)


def _distributions(kind: str, form: Format, rng: torch.Generator) -> tuple[Tensor, ...]:
    one, other = (plain(form, rng, SAMPLES, CLASSES).log_softmax(1) for _ in range(2))
    return one, other.exp()


# Options that are tensors are operands after the first two.
_NAMES = {"cross_entropy": "weight", "nll_loss": "weight", "binary_cross_entropy_with_logits": "pos_weight"}


def _options(loss: str, options: Mapping[str, object], rest: Sequence[Tensor]) -> dict[str, object]:
    return {**options, **({_NAMES[loss]: rest[0]} if rest else {})}


def _reference(loss: str, options: Mapping[str, object], reduction: str, tensors: Sequence[Tensor]) -> Rounded:
    first, target, *rest = tensors
    found = reference(loss, (first, target), _options(loss, options, rest), reduction)
    # What it allows for other orders is allowed again by whoever compares.
    return Rounded(found.value, found.error.detach() / ORDER)


def _values(operands: Sequence[Rounded | Tensor]) -> list[Tensor]:
    return [operand.value if isinstance(operand, Rounded) else operand for operand in operands]


def _op(
    loss: str,
    draw: Draw,
    kinds: tuple[str, ...],
    reduction: str = "mean",
    wide: tuple[int, ...] = (),
    **options: object,
) -> Op:
    function = getattr(F, loss)

    def call(first: Tensor, target: Tensor, *rest: Tensor) -> Tensor:
        settled = [tensor.detach() for tensor in rest]
        result: Tensor = function(first, target.detach(), **_options(loss, options, settled), reduction=reduction)
        return result

    def formula(store: Store, *operands: Rounded | Tensor) -> Rounded:
        return _reference(loss, options, reduction, _values(operands))

    def gradient(store: Store, seed: Rounded, *operands: Rounded | Tensor) -> list[Rounded | None]:
        first, target, *rest = _values(operands)
        leaf = first.detach().clone().requires_grad_()
        result = _reference(loss, options, reduction, (leaf, target, *rest)).value
        (exact,) = torch.autograd.grad(result, leaf, torch.ones_like(result))
        bound = gradient_bound(exact, (first, target), _options(loss, options, rest), reduction, FP32.dtype)
        # The incoming gradient multiplies it, by element where nothing is reduced.
        factor = (
            seed.value
            if seed.value.dim() < leaf.dim() - 1 or seed.value.shape == leaf.shape
            else seed.value.unsqueeze(1)
        )
        return [Rounded(exact * factor, (bound * factor.abs()) / ORDER), *[None] * (len(operands) - 1)]

    extra = "".join(f", {name} {value}" for name, value in options.items())
    weighted = f", {_NAMES[loss]}" if draw in (_weighted_classes, _weighted_binary) else ""
    name = f"{loss} ({reduction}{weighted}{extra})"
    # The CPU lists cross_entropy under its ATen name. Elsewhere it is composed, and log_softmax stays in the type of
    # the logits (AMP-LOSS-017), for which there is no bound.
    return Op(
        name, call, draw, formula, gradient, kinds, "cross_entropy_loss" if loss == "cross_entropy" else loss, wide
    )


_REDUCED = ("mean", "sum", "none")


def _table() -> list[Op]:
    ce, nll, bce = "cross_entropy", "nll_loss", "binary_cross_entropy_with_logits"
    every: list[Op] = []
    for reduction in _REDUCED:
        every.append(_op(ce, _classes, ("large", "plain"), reduction))
        every.append(_op(bce, _binary, ("large", "plain"), reduction))
        every.append(_op("mse_loss", _pairs, ("off_grid", "plain"), reduction))
    return [
        *every,
        _op(ce, _weighted_classes, ("plain",)),
        _op(ce, _weighted_classes, ("plain",), "sum", (2,)),
        _op(ce, _classes, ("large", "plain"), label_smoothing=0.1),
        _op(nll, _chances, ("plain",)),
        _op(nll, _weighted_classes, ("plain",), "none"),
        _op(bce, _weighted_binary, ("large", "plain")),
        _op("l1_loss", _pairs, ("off_grid", "plain")),
        _op("huber_loss", _pairs, ("off_grid", "plain")),
        _op("huber_loss", _pairs, ("off_grid", "plain"), delta=2.5),
        _op("huber_loss", _pairs, ("off_grid", "plain"), "sum", delta=0.3),
        _op("smooth_l1_loss", _pairs, ("off_grid", "plain"), beta=0.25),
        _op("smooth_l1_loss", _pairs, ("off_grid", "plain"), beta=0.7),
        _op("kl_div", _distributions, ("plain",), "batchmean"),
        _op(
            "kl_div",
            lambda *some: (_distributions(*some)[0], _distributions(*some)[1].log()),
            ("plain",),
            "sum",
            log_target=True,
        ),
        _op(
            "soft_margin_loss", lambda *some: (_binary(*some)[0], plain(*some[1:], SAMPLES, CLASSES).sign()), ("plain",)
        ),
        _op(
            "poisson_nll_loss", lambda *some: (_binary(*some)[0], plain(*some[1:], SAMPLES, CLASSES).abs()), ("plain",)
        ),
    ]


LOSSES: dict[str, Op] = {op.name: op for op in _table()}
