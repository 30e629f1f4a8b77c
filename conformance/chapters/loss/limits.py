"""Losses at the limits of their options and operands, each with what its documented formula gives there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Numbers = list[Any]


@dataclass(frozen=True)
class Limit:
    """A call of the loss's operands, its results, and the gradients by the first operand of the sum of the results.

    The call takes small numbers that every type holds; labels and lengths are in the call.
    """

    call: Callable[..., Tensor]
    operands: tuple[Numbers, ...]
    results: Numbers | float
    gradients: Numbers | None = None


def _loss(name: str, **options: Any) -> Callable[..., Tensor]:
    """Return the loss of that name with options; the function is the one that there is when it is called."""
    return lambda *operands: getattr(functional, name)(*operands, **options)


_X, _Y = [1.0, 2.0, -1.0], [1.0, 0.0, -3.0]
_TWO, _MEANS = [[1.0, 2.0, 0.5], [0.0, -1.0, 2.0]], [[0.0, 2.0, 1.0], [2.0, -1.0, 0.0]]


def _gaussian(x: Numbers, y: Numbers, var: Callable[[int, int], float], eps: float = 1e-6) -> Numbers:
    """Return half of log(var) + (x - y)^2 / var, with var no less than eps."""
    return [
        [
            0.5 * (math.log(max(var(i, j), eps)) + (one - other) ** 2 / max(var(i, j), eps))
            for j, (one, other) in enumerate(zip(row, others, strict=True))
        ]
        for i, (row, others) in enumerate(zip(x, y, strict=True))
    ]


def _labels(*values: int) -> Callable[[Tensor], Tensor]:
    return lambda like: torch.tensor(values, device=like.device)


def _ctc(lengths: tuple[int, int], of_targets: tuple[int, int], **options: Any) -> Callable[[Tensor], Tensor]:
    """Return the losses of two samples of three steps and two classes, of which the first is blank."""

    def call(x: Tensor) -> Tensor:
        targets = torch.ones(2, 2, dtype=torch.long, device=x.device)
        logs = x.log_softmax(2)
        return functional.ctc_loss(logs, targets, lengths, of_targets, reduction="none", **options)

    return call


_EQUAL_LOGITS = [[[0.0, 0.0], [0.0, 0.0]]] * 3
_VARIANCES: Mapping[str, tuple[Numbers, Callable[[int, int], float]]] = {
    "of each number": ([[1.0, 2.0, 4.0], [0.5, 1.0, 2.0]], lambda i, j: ((1.0, 2.0, 4.0), (0.5, 1.0, 2.0))[i][j]),
    "of each row": ([[2.0], [0.5]], lambda i, j: (2.0, 0.5)[i]),
    "of each column": ([[1.0, 2.0, 4.0]], lambda i, j: (1.0, 2.0, 4.0)[j]),
    "of each row, without its dimension": ([2.0, 0.5], lambda i, j: (2.0, 0.5)[i]),
}

LIMITS: Mapping[str, Limit] = {
    "smooth_l1_loss, beta 0": Limit(
        _loss("smooth_l1_loss", beta=0.0, reduction="none"), (_X, _Y), [0.0, 2.0, 2.0], [0.0, 1.0, 1.0]
    ),
    "a module of smooth_l1_loss, beta 0": Limit(
        nn.SmoothL1Loss(reduction="sum", beta=0.0), (_X, _Y), 4.0, [0.0, 1.0, 1.0]
    ),
    "huber_loss at its delta": Limit(
        _loss("huber_loss", delta=2.0, reduction="none"), (_X, _Y), [0.0, 2.0, 2.0], [0.0, 2.0, 2.0]
    ),
    **{
        f"gaussian_nll_loss, a variance {name}": Limit(
            _loss("gaussian_nll_loss", reduction="none"),
            (_TWO, _MEANS, variances),
            _gaussian(_TWO, _MEANS, var),
        )
        for name, (variances, var) in _VARIANCES.items()
    },
    "gaussian_nll_loss, a variance that is a number": Limit(
        _loss("gaussian_nll_loss", var=2.0, reduction="none"), (_TWO, _MEANS), _gaussian(_TWO, _MEANS, lambda i, j: 2.0)
    ),
    "gaussian_nll_loss, a variance of 0": Limit(
        _loss("gaussian_nll_loss", eps=0.25, reduction="none"),
        (_TWO, _MEANS, [[0.0, 1.0, 0.0], [1.0, 0.0, 0.25]]),
        _gaussian(_TWO, _MEANS, lambda i, j: ((0.0, 1.0, 0.0), (1.0, 0.0, 0.25))[i][j], 0.25),
    ),
    "gaussian_nll_loss, full": Limit(
        _loss("gaussian_nll_loss", full=True, reduction="none"),
        (_X, _Y, [1.0, 1.0, 1.0]),
        [0.5 * math.log(2 * math.pi) + (a - b) ** 2 / 2 for a, b in zip(_X, _Y, strict=True)],
    ),
    "binary_cross_entropy_with_logits far from 0": Limit(
        lambda x: functional.binary_cross_entropy_with_logits(x, (x > 0).to(x), reduction="none"),
        ([80.0, -80.0, 0.0],),
        [0.0, 0.0, math.log(2)],
        [0.0, 0.0, 0.5],
    ),
    "binary_cross_entropy_with_logits of the other side": Limit(
        lambda x: functional.binary_cross_entropy_with_logits(x, (x < 0).to(x), reduction="none"),
        ([80.0, -80.0],),
        [80.0, 80.0],
        [1.0, -1.0],
    ),
    "cross_entropy, all smoothed": Limit(
        lambda x: functional.cross_entropy(x, _labels(0)(x), label_smoothing=1.0, reduction="none"),
        ([[0.0, 0.0, 0.0, 0.0]],),
        [math.log(4)],
        [[0.0, 0.0, 0.0, 0.0]],
    ),
    "cross_entropy of a certain class": Limit(
        lambda x: functional.cross_entropy(x, _labels(1, 0)(x), reduction="none"),
        ([[0.0, 200.0], [0.0, 200.0]],),
        [0.0, 200.0],
        [[0.0, 0.0], [-1.0, 1.0]],
    ),
    "cross_entropy, all ignored, summed": Limit(
        lambda x: functional.cross_entropy(x, _labels(-100, -100)(x), reduction="sum"),
        ([[1.0, 2.0], [0.0, 1.0]],),
        0.0,
        [[0.0, 0.0], [0.0, 0.0]],
    ),
    "kl_div of probabilities of 0": Limit(
        _loss("kl_div", reduction="none"),
        ([-1.0, -2.0, -0.5], [0.0, 1.0, 0.0]),
        [0.0, 2.0, 0.0],
        [0.0, -1.0, 0.0],
    ),
    "poisson_nll_loss of nothing": Limit(
        _loss("poisson_nll_loss", log_input=False, full=True, reduction="none"),
        ([1.0, 2.0, 4.0], [0.0, 1.0, 0.0]),
        [1.0, 2.0 - math.log(2.0), 4.0],
        [1.0, 0.5, 1.0],
    ),
    "ctc_loss of a sample without steps and labels": Limit(
        _ctc((3, 0), (1, 0)), (_EQUAL_LOGITS,), [-math.log(6 / 8), 0.0]
    ),
    "ctc_loss of a sample without labels": Limit(
        _ctc((3, 3), (1, 0)), (_EQUAL_LOGITS,), [-math.log(6 / 8), -math.log(1 / 8)]
    ),
    "ctc_loss of labels without steps, zero_infinity": Limit(
        _ctc((3, 0), (1, 1), zero_infinity=True), (_EQUAL_LOGITS,), [-math.log(6 / 8), 0.0]
    ),
    "ctc_loss of more labels than steps": Limit(_ctc((3, 1), (1, 2)), (_EQUAL_LOGITS,), [-math.log(6 / 8), math.inf]),
    "triplet_margin_loss of equal vectors": Limit(
        _loss("triplet_margin_loss", margin=2.0, reduction="none"),
        ([[1.0, 2.0]], [[1.0, 2.0]], [[1.0, 2.0]]),
        [2.0],
        [[0.0, 0.0]],
    ),
}

REFUSED: Mapping[str, tuple[Callable[..., Tensor], tuple[Numbers, ...]]] = {
    "smooth_l1_loss, beta -1": (_loss("smooth_l1_loss", beta=-1.0), (_X, _Y)),
    "huber_loss, delta 0": (_loss("huber_loss", delta=0.0), (_X, _Y)),
    "huber_loss, delta -1": (_loss("huber_loss", delta=-1.0), (_X, _Y)),
    "cross_entropy, label_smoothing 1.5": (
        lambda x: functional.cross_entropy(x, _labels(0, 1)(x), label_smoothing=1.5),
        (_TWO,),
    ),
    "gaussian_nll_loss, a negative variance": (_loss("gaussian_nll_loss"), (_X, _Y, [1.0, -1.0, 1.0])),
    "gaussian_nll_loss, a variance of another length": (_loss("gaussian_nll_loss"), (_TWO, _MEANS, [1.0, 1.0, 1.0])),
    "triplet_margin_loss, margin -1": (
        _loss("triplet_margin_loss", margin=-1.0),
        (_TWO, _MEANS, _TWO),
    ),
    "cross_entropy of 3 samples and 2 labels": (
        lambda x: functional.cross_entropy(x, _labels(0, 1)(x)),
        ([[1.0, 2.0]] * 3,),
    ),
    "a reduction of another name": (_loss("mse_loss", reduction="average"), (_X, _Y)),
}
"""Calls that the documentation excludes and that torch refuses with an error."""
