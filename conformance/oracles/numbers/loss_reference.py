"""Every loss of torch.nn.functional, written out in elementary float64 operations."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .running_error import UNIT, Rounded

ORDER = 2.0
"""A kernel may evaluate an equivalent form of the documented formula in another order; each rounding of the
form written here then stands for up to two of the kernel's. Bounds are multiplied by this."""


@dataclass(frozen=True)
class Terms:
    """A loss before its reduction: one term per output element, and what the mean divides their sum by."""

    terms: Rounded
    divisor: Rounded
    averaged: Rounded | None = None
    batch: int = 0

    def reduced(self, reduction: str) -> Rounded:
        """Reduce as torch documents: `none`, `sum`, `mean`, and `batchmean` for kl_div."""
        if reduction == "none":
            return self.terms
        if reduction == "mean":
            return (self.averaged or self.terms).sum() / self.divisor
        total = self.terms.sum()
        return total if reduction == "sum" else total / Rounded.exact(torch.tensor(self.batch))


def reference(loss: str, arguments: Sequence[torch.Tensor], options: Mapping[str, object], reduction: str) -> Rounded:
    """Evaluate `loss` on tensors of any dtype in float64, with a bound on the error of a float32 evaluation.

    `arguments` are positional, `options` the keywords without `reduction`; tensors among them are exact.
    Source: the formulas of torch.nn's loss classes.
    """
    return references(loss, arguments, options, (reduction,))[reduction]


def references(
    loss: str, arguments: Sequence[torch.Tensor], options: Mapping[str, object], reductions: Iterable[str]
) -> dict[str, Rounded]:
    """Evaluate `reference` for several reductions of the same terms."""
    terms = FORMULAS[loss](*arguments, **options)
    results = {reduction: terms.reduced(reduction) for reduction in reductions}
    return {reduction: Rounded(result.value, ORDER * result.error) for reduction, result in results.items()}


def _plain(terms: Rounded) -> Terms:
    return Terms(terms, Rounded.exact(torch.tensor(terms.value.numel())), batch=len(terms.value))


def _exact(tensor: torch.Tensor) -> Rounded:
    return Rounded.exact(tensor)


def _weighted(terms: Rounded, weight: torch.Tensor | None) -> Rounded:
    return terms if weight is None else terms * _exact(weight)


def _log_softmax(logits: Rounded) -> Rounded:
    """Return the log-sum-exp over dimension 1, shifted by the maximum as every implementation does."""
    top = logits.value.detach().amax(1, keepdim=True)
    shifted = logits - Rounded.exact(top)
    return shifted - shifted.exp().sum(1).log().view(lambda tensor: tensor.unsqueeze(1))


def _softplus_of_negative(margin: Rounded) -> Rounded:
    """log(1 + exp(-margin)) without overflow: max(-margin, 0) + log1p(exp(-|margin|))."""
    return (-margin).clamp_min(0.0) + (-margin.abs()).exp().log1p()


def _squared(x: Rounded) -> Rounded:
    return x * x


def _weighted_mean(terms: Rounded, weight: torch.Tensor | None) -> Terms:
    """Reduce weighted l1_loss and mse_loss, which divide by the sum of the weights, unlike the other losses."""
    if weight is None:
        return _plain(terms)
    return Terms(terms * _exact(weight), _exact(weight).sum())


def mse_loss(x: torch.Tensor, y: torch.Tensor, *, weight: torch.Tensor | None = None) -> Terms:
    return _weighted_mean(_squared(_exact(x) - _exact(y)), weight)


def l1_loss(x: torch.Tensor, y: torch.Tensor, *, weight: torch.Tensor | None = None) -> Terms:
    return _weighted_mean((_exact(x) - _exact(y)).abs(), weight)


def smooth_l1_loss(x: torch.Tensor, y: torch.Tensor, *, beta: float = 1.0) -> Terms:
    gap = (_exact(x) - _exact(y)).abs()
    if beta == 0:
        return _plain(gap)
    return _plain((_squared(gap) * 0.5 / beta).where(gap.value < beta, gap - 0.5 * beta))


def huber_loss(x: torch.Tensor, y: torch.Tensor, *, delta: float = 1.0, weight: torch.Tensor | None = None) -> Terms:
    gap = (_exact(x) - _exact(y)).abs()
    near, far = _squared(gap) * 0.5, (gap - 0.5 * delta) * delta
    return _plain(_weighted(near.where(gap.value <= delta, far), weight))


def binary_cross_entropy(p: torch.Tensor, y: torch.Tensor, *, weight: torch.Tensor | None = None) -> Terms:
    # The logarithms are clamped at -100 (torch.nn.BCELoss).
    chance, target = _exact(p), _exact(y)
    hit = target * chance.log().clamp_min(-100.0)
    miss = (-target + 1.0) * (-chance).log1p().clamp_min(-100.0)
    return _plain(_weighted(-(hit + miss), weight))


def binary_cross_entropy_with_logits(
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    pos_weight: torch.Tensor | None = None,
) -> Terms:
    logit, target = _exact(x), _exact(y)
    hit = -target * -_softplus_of_negative(logit)
    if pos_weight is not None:
        hit = hit * _exact(pos_weight)
    miss = (-target + 1.0) * (logit + _softplus_of_negative(logit))
    return _plain(_weighted(hit + miss, weight))


def soft_margin_loss(x: torch.Tensor, y: torch.Tensor) -> Terms:
    # Documented as log(1 + exp(-y x)); where 1 + exp rounds, the form matters, so it is kept.
    return _plain(((-(_exact(y) * _exact(x))).exp() + 1.0).log())


def multilabel_soft_margin_loss(x: torch.Tensor, y: torch.Tensor, *, weight: torch.Tensor | None = None) -> Terms:
    logit, target = _exact(x), _exact(y)
    terms = target * _softplus_of_negative(logit) + (-target + 1.0) * _softplus_of_negative(-logit)
    return _plain(_weighted(terms, weight).sum(1) / float(x.shape[1]))


def hinge_embedding_loss(x: torch.Tensor, y: torch.Tensor, *, margin: float = 1.0) -> Terms:
    distance = _exact(x)
    return _plain(distance.where(y.double() > 0, (-distance + margin).clamp_min(0.0)))


def margin_ranking_loss(first: torch.Tensor, second: torch.Tensor, y: torch.Tensor, *, margin: float = 0.0) -> Terms:
    ordered = _exact(y) * (_exact(first) - _exact(second))
    return _plain((-ordered + margin).clamp_min(0.0))


def cosine_embedding_loss(first: torch.Tensor, second: torch.Tensor, y: torch.Tensor, *, margin: float = 0.0) -> Terms:
    a, b = _exact(first), _exact(second)
    cosine = (a * b).sum(1) / ((_squared(a).sum(1) + 1e-12) * (_squared(b).sum(1) + 1e-12)).sqrt()
    return _plain((-cosine + 1.0).where(y.double() > 0, (cosine - margin).clamp_min(0.0)))


def _distance(a: Rounded, b: Rounded, p: float, eps: float) -> Rounded:
    gap = ((a - b) + eps).abs()
    return gap.sum(-1) if p == 1 else _squared(gap).sum(-1).sqrt()


def triplet_margin_loss(
    anchor: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
    *,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
) -> Terms:
    a, near, far = _exact(anchor), _exact(positive), _exact(negative)
    apart = _distance(a, far, p, eps)
    if swap:
        apart = apart.minimum(_distance(near, far, p, eps))
    return _plain((_distance(a, near, p, eps) - apart + margin).clamp_min(0.0))


def triplet_margin_with_distance_loss(
    anchor: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
    *,
    margin: float = 1.0,
    swap: bool = False,
) -> Terms:
    return triplet_margin_loss(anchor, positive, negative, margin=margin, swap=swap)


def kl_div(x: torch.Tensor, y: torch.Tensor, *, log_target: bool = False) -> Terms:
    log_q, target = _exact(x), _exact(y)
    return _plain(target.exp() * (target - log_q) if log_target else target * (target.log() - log_q))


def poisson_nll_loss(
    x: torch.Tensor, y: torch.Tensor, *, log_input: bool = True, full: bool = False, eps: float = 1e-8
) -> Terms:
    rate, target = _exact(x), _exact(y)
    terms = rate.exp() - target * rate if log_input else rate - target * (rate + eps).log()
    if full:
        stirling = target * target.log() - target + (target * (2 * math.pi)).log() * 0.5
        terms = terms + stirling.where(target.value > 1, 0.0)
    return _plain(terms)


def gaussian_nll_loss(
    x: torch.Tensor, y: torch.Tensor, var: torch.Tensor, *, full: bool = False, eps: float = 1e-6
) -> Terms:
    spread = _exact(var).clamp_min(eps)
    terms = (spread.log() + _squared(_exact(x) - _exact(y)) / spread) * 0.5
    return _plain(terms + 0.5 * math.log(2 * math.pi) if full else terms)


def _class_terms(log_chance: Rounded, classes: torch.Tensor, weight: torch.Tensor | None, ignored: int) -> Terms:
    """-w[y] log p[y] at every position, zero where y is ignored; the mean divides by the sum of w[y]."""
    kept = classes != ignored
    index = classes.where(kept, torch.zeros_like(classes))
    picked = log_chance.view(lambda tensor: tensor.gather(1, index.unsqueeze(1)).squeeze(1))
    weights = torch.ones(log_chance.value.shape[1], dtype=torch.float64) if weight is None else weight.double()
    weights = (weights[index] * kept).detach()
    return Terms(-picked * _exact(weights), _exact(weights).sum())


def nll_loss(
    log_p: torch.Tensor,
    classes: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> Terms:
    return _class_terms(_exact(log_p), classes, weight, ignore_index)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Terms:
    log_p = _log_softmax(_exact(logits))
    count = logits.shape[1]
    scales = None if weight is None else _per_class(weight, logits)
    if target.is_floating_point():
        chances = _exact(target) * (1 - label_smoothing) + label_smoothing / count
        terms = -(_weighted(log_p, scales) * chances).sum(1)
        return Terms(terms, Rounded.exact(torch.tensor(terms.value.numel())))
    hard = _class_terms(log_p, target, weight, ignore_index)
    if not label_smoothing:
        return hard
    even = -_weighted(log_p, scales).sum(1)
    even = even.where(target != ignore_index, 0.0)
    return Terms(hard.terms * (1 - label_smoothing) + even * (label_smoothing / count), hard.divisor)


def _per_class(weight: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return weight.view(1, -1, *[1] * (logits.dim() - 2))


def multi_margin_loss(
    x: torch.Tensor,
    classes: torch.Tensor,
    *,
    p: int = 1,
    margin: float = 1.0,
    weight: torch.Tensor | None = None,
) -> Terms:
    scores = _exact(x)
    own = scores.view(lambda tensor: tensor.gather(1, classes.unsqueeze(1)))
    slack = (scores - own + margin).clamp_min(0.0)
    slack = slack if p == 1 else _squared(slack)
    if weight is not None:
        slack = slack * _exact(weight[classes].unsqueeze(1))
    others = torch.arange(x.shape[1]) != classes.unsqueeze(1)
    return _plain(slack.where(others, 0.0).sum(1) / float(x.shape[1]))


def multilabel_margin_loss(x: torch.Tensor, labels: torch.Tensor) -> Terms:
    """Return the loss; a row's labels end at its first -1, and each is compared with every class that is no label."""
    count = x.shape[1]
    valid = (labels < 0).cumsum(1) == 0
    chosen = torch.zeros(len(x), count + 1, dtype=torch.bool)
    chosen.scatter_(1, labels.where(valid, torch.full_like(labels, count)), True)
    is_label = chosen[:, :count]
    scores = _exact(x)
    gaps = scores.view(lambda tensor: tensor.unsqueeze(1)) - scores.view(lambda tensor: tensor.unsqueeze(2))
    pairs = is_label.unsqueeze(2) & ~is_label.unsqueeze(1)
    return _plain((gaps + 1.0).clamp_min(0.0).where(pairs, 0.0).sum(1, 2) / float(count))


def ctc_loss(
    log_p: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    *,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Terms:
    """-log of the sum of the probabilities of every path that collapses to the target, one by one.

    log_p is (T, N, C) with C ** T small; targets are rows of labels, or the labels of all samples one after the other.
    The mean divides each term by its target's length
    (torch.nn.CTCLoss).
    The bound takes what the usual forward recursion does: T steps of a three-term log-sum-exp.
    """
    rows = []
    each = targets.split(target_lengths.tolist()) if targets.dim() == 1 else targets
    for sample in range(log_p.shape[1]):
        steps, length = int(input_lengths[sample]), int(target_lengths[sample])
        paths = _paths(steps, log_p.shape[2], blank, tuple(each[sample][:length].tolist()))
        if paths:
            scores = log_p[:steps, sample].double()[torch.arange(steps), torch.tensor(paths)].sum(1)
            rows.append(-torch.logsumexp(scores, 0))
        else:
            rows.append(torch.tensor(0.0 if zero_infinity else math.inf, dtype=torch.float64))
    value = torch.stack(rows)
    sizes = log_p.detach().double().abs().sum(0).amax(1)
    terms = Rounded(value, _ctc_error(log_p.shape[0], sizes))
    return Terms(terms, Rounded.exact(torch.tensor(len(rows))), averaged=terms / _exact(target_lengths.clamp_min(1)))


def _ctc_error(steps: int, sizes: torch.Tensor) -> torch.Tensor:
    """Return what the forward recursion loses over `steps` three-term log-sum-exps of numbers of at most `sizes`.

    In each, three sums round numbers of that size; exponentials, their two sums and the logarithm of a number
    between 1 and 3 add at most 4 + 2 + 4 log 3 units.
    """
    return steps * UNIT * (3 * sizes + 11)


@functools.cache
def _paths(steps: int, symbols: int, blank: int, wanted: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return all sequences of `steps` symbols that become `wanted` once repeats are merged and blanks dropped."""
    return [
        path
        for path in itertools.product(range(symbols), repeat=steps)
        if tuple(label for label, _ in itertools.groupby(path) if label != blank) == wanted
    ]


FORMULAS: dict[str, Callable[..., Terms]] = {
    formula.__name__: formula
    for formula in (
        binary_cross_entropy,
        binary_cross_entropy_with_logits,
        cosine_embedding_loss,
        cross_entropy,
        ctc_loss,
        gaussian_nll_loss,
        hinge_embedding_loss,
        huber_loss,
        kl_div,
        l1_loss,
        margin_ranking_loss,
        mse_loss,
        multi_margin_loss,
        multilabel_margin_loss,
        multilabel_soft_margin_loss,
        nll_loss,
        poisson_nll_loss,
        smooth_l1_loss,
        soft_margin_loss,
        triplet_margin_loss,
        triplet_margin_with_distance_loss,
    )
}
"""The formula of each loss by the name of its function in torch.nn.functional."""


UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
"""Unit roundoff of each type: half its spacing at 1."""

GRADIENT_ROUNDINGS = 64.0
"""A gradient formula of these losses takes at most 16 float32 operations of at most 4 units each."""


def reference_gradient(
    loss: str, arguments: Sequence[torch.Tensor], options: Mapping[str, object], reduction: str
) -> torch.Tensor:
    """Differentiate the reduced loss by its first argument: float64 autograd through the formula above."""
    first = arguments[0].detach().double().requires_grad_()
    result = FORMULAS[loss](first, *arguments[1:], **options).reduced(reduction).value
    (gradient,) = torch.autograd.grad(result, first)
    return gradient


def gradient_bound(
    exact: torch.Tensor,
    arguments: Sequence[torch.Tensor],
    options: Mapping[str, object],
    reduction: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Bound the error of a gradient computed in float32 and rounded once to `dtype`.

    The float32 terms cancel (softmax minus target), so their error is absolute: relative to the largest
    gradient or to the incoming one, whichever is larger.
    """
    weights = [value for value in options.values() if isinstance(value, torch.Tensor)]
    largest = max([1.0, *(float(weight.abs().max()) for weight in weights)])
    incoming = largest if reduction == "sum" else largest / arguments[0].shape[0]
    scale = max(float(exact.abs().max()), incoming)
    rounding = 0.0 if dtype is torch.float32 else UNITS[dtype] + UNITS[dtype] * 2.0**-10
    # Half the smallest subnormal of fp16; bf16's are beyond float32's own.
    underflow = 2.0**-25 if dtype is torch.float16 else 0.0
    return rounding * exact.abs() + underflow + GRADIENT_ROUNDINGS * 2.0**-24 * scale
