"""Derived bounds on the error of 16-bit and fp32 arithmetic, and the figures that show which one ran.

Notation: u is the unit roundoff of a format (2^-11 fp16, 2^-8 bf16, 2^-24 fp32). Sources: N. J. Higham, Accuracy
and Stability of Numerical Algorithms (2002), chapters 2-4; P. Blanchard, N. J. Higham, F. Lopez, T. Mary,
S. Pranesh, Mixed precision block fused multiply-add (SIAM J. Sci. Comput. 42, 2020); M. Fasi, N. J. Higham,
M. Mikaitis, S. Pranesh, Numerical behavior of NVIDIA tensor cores (PeerJ Comput. Sci. 7, 2021).
"""

from __future__ import annotations

import math

import torch

from .exact import product_and_size, softmax
from .formats import FP32, Format


def accumulation(terms: int) -> float:
    """Return the relative error of summing `terms` products in fp32, in any order and on a tensor core.

    IEEE fp32 gives gamma_n = n * 2^-24 (Higham 2002, section 3.1). Tensor cores truncate: a block of b products
    is aligned to its largest with e extra bits, (b + 1) truncations of 2^-(23+e) and one of 2^-23, which comes to
    1.5, 0.69 and 0.33 times n * 2^-23 for V100 (b 4, e 0), A100 (8, 1) and H100 (16, 2): all below n * 2^-22.
    """
    return terms * 2.0**-22


def rounded_product_bound(
    left: torch.Tensor, right: torch.Tensor, form: Format, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Bound |C - (AB + bias)| by element, A (..., m, k), B (..., k, n) and the bias being numbers of `form`.

    Products of two 16-bit numbers are exact in fp32, so what is left is the accumulation and the rounding of the
    result (Blanchard et al. 2020, section 3): u|C| + (1 + u) n 2^-22 |A||B|, plus half the smallest subnormal. A bias
    may be where the accumulation starts, or added after the rounding to 16 bits, which rounds once more.
    """
    (result, size), terms = product_and_size(left, right), left.shape[-1]
    if bias is not None:
        size, terms = size + bias.double().abs(), terms + 1
    error = accumulation(terms) * size
    bound = form.unit_roundoff * (result.abs() + error) + error + form.smallest / 2
    if bias is None:
        return bound
    total = (result + bias.double()).abs() + bound
    return bound + form.unit_roundoff * total + form.smallest / 2


def normwise_error(seen: torch.Tensor, exact: torch.Tensor) -> float:
    """Return ||seen - exact|| / ||exact|| (Frobenius), computed in float64 on the CPU."""
    seen, exact = seen.detach().cpu().double(), exact.detach().cpu().double()
    return float((seen - exact).pow(2).sum().sqrt() / exact.pow(2).sum().sqrt())


def normwise_distance(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the normwise error of real or complex tensors; 0 where both are zero or have no elements."""
    if not wanted.any() and not seen.any():
        return 0.0
    if wanted.is_complex():
        seen, wanted = (torch.view_as_real(tensor.resolve_conj()) for tensor in (seen, wanted))
    return normwise_error(seen, wanted)


def distance_of_chains(dtype: torch.dtype, roundings: int) -> float:
    """Return the normwise distance that two ways to round what a program computes may have: `roundings` results each.

    An independent rounding has a relative error of at most 0.6u in root mean square (`normwise_window`), so that the
    distance of two chains of n is at most 0.6u sqrt(2n). Twice that is allowed for the condition of the functions on
    values of size 1.
    """
    return 2 * 0.6 * (torch.finfo(dtype).eps / 2) * (2 * roundings) ** 0.5


def largest_share(difference: torch.Tensor, bound: torch.Tensor) -> float:
    """Return the largest |difference| in its bound, by element; 0 where there is none, inf for NaN."""
    if not difference.numel():
        return 0.0
    seen, allowed = difference.abs().cpu().double(), bound.abs().cpu().double()
    share = float((seen / allowed.clamp(min=torch.finfo(torch.float64).tiny)).max())
    return math.inf if math.isnan(share) else share


def gain_error(seen: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the systematic scale error <seen, exact> / <exact, exact> - 1, which independent roundings do not have."""
    seen, exact = seen.detach().cpu().double(), exact.detach().cpu().double()
    return float((seen * exact).sum() / exact.pow(2).sum()) - 1


def normwise_window(form: Format, additions: int = 0, *, winograd: bool = False) -> tuple[float, float]:
    """Return where `normwise_error` lies for Gaussian fp32 operands cast to `form`, whatever the length of the sums.

    The relative error of one rounding has a root mean square of 0.42u (uniform over half a spacing, logarithmic
    over a binade). Two operands give 0.60u and a 16-bit result 0.73u; a fp32 product gives thousands of times less,
    a second rounding to 16 bits 0.84u. `additions` partial results that a kernel adds up in 16 bits (the taps of a
    convolution that goes through columns, the samples of its weight gradient) give 0.42u * additions / sqrt(2) over
    sqrt(additions), which is 0.3u * sqrt(additions).

    `winograd` is for a convolution that a library may compute as F(4x4, 3x3) (A. Lavin, S. Gray, Fast algorithms for
    convolutional neural networks, CVPR 2016) with both transformed operands stored in 16 bits: A', G and B' being the
    three matrices, their roundings grow by the mean over the rows of A' of sum_i A'_i^2 |G_i|^2 |B'_i|^2 / 3, which is
    10.8 (for the gradient of the weight too), so that 0.42u * sqrt(2) * 10.8 = 6.4u are added.
    """
    unit = form.unit_roundoff
    return 0.3 * unit, (1.5 + 0.5 * additions**0.5 + 8 * winograd) * unit


ATTENTION_ROUNDINGS = 7
"""Query, key, scaled logits (their scaling and their product), probabilities, value, output."""


def attention_window(form: Format, stages: int = 1) -> tuple[float, float]:
    """Return where `normwise_error` of attention lies on Gaussian operands; `stages` is 1 forward, 2 backward.

    Each of the seven roundings of `ATTENTION_ROUNDINGS`, wherever a kernel makes them, contributes 0.42u to 0.6u, so
    they come to at most sqrt(7) * 0.6u = 1.6u; the value's own rounding alone leaves 0.3u. A logit of size x turns a
    relative error into an absolute one of |x| times that, and |x| is about 1: twice the sum is allowed.
    The backward pass repeats the chain.
    """
    unit = form.unit_roundoff
    return 0.3 * unit, 2 * 0.6 * (stages * ATTENTION_ROUNDINGS) ** 0.5 * unit


def gain_bound(form: Format, elements: int, additions: int = 0, *, winograd: bool = False) -> float:
    """Bound |`gain_error`| for `elements` independent roundings: six standard deviations of a mean of that many.

    Each standard deviation is at most the top of `normwise_window`; rounding to nearest has no bias, so a mean of n
    errors shrinks with sqrt(n). Truncation (bias u/2 and more) and a wrong factor do not shrink.
    """
    return 6 * normwise_window(form, additions, winograd=winograd)[1] / elements**0.5


def fp32_product_window(terms: int) -> tuple[float, float]:
    """Return where `normwise_error` lies for a Gaussian product that is computed and returned in fp32.

    At least the rounding of the result, 0.42u of fp32, of which 0.3u are asked; at most gamma_n |A||B|, which is
    n 2^-24 (2/pi) sqrt(n) ||AB|| on Gaussian operands. TF32 (about 2^-12) and 16 bits lie far above for n up to 256.
    """
    return 0.3 * FP32.unit_roundoff, FP32.unit_roundoff * terms * 2 / math.pi * terms**0.5


def sum_bound(terms: torch.Tensor) -> torch.Tensor:
    """Bound the error of an fp32 sum over the last dimension: gamma_n sum|x| (Higham 2002, section 4.2)."""
    count = terms.shape[-1]
    return count * FP32.unit_roundoff / (1 - count * FP32.unit_roundoff) * terms.double().abs().sum(-1)


def softmax_bound(logits: torch.Tensor) -> torch.Tensor:
    """Bound the absolute error of an fp32 softmax over the last dimension, by element.

    P. Blanchard, D. J. Higham, N. J. Higham, Accurately computing the log-sum-exp and softmax functions (IMA J.
    Numer. Anal. 41, 2021), theorem 4.2 shifted: (n + 2 (max - x) + c) u p, with an exponential good to 2 ulp on
    either side and the division in c; below the smallest normal number a power may be flushed.
    """
    distance = logits.double().amax(-1, keepdim=True) - logits.double()
    factor = logits.shape[-1] + 2 * distance + 12
    return factor * FP32.unit_roundoff * softmax(logits) + FP32.smallest_normal


def layer_norm_bound(rows: torch.Tensor) -> float:
    """Bound the normwise relative error of an fp32 layer norm over the last dimension: 2 kappa gamma_(n+10)(2^-24).

    kappa = sqrt(1 + mean^2 / variance) is the condition number of centring (T. F. Chan, G. H. Golub, R. J. LeVeque,
    Algorithms for computing the sample variance, Amer. Statist. 37, 1983); mean and variance pass one such error on
    each.
    """
    rows = rows.double()
    condition = torch.sqrt(1 + rows.mean(-1).pow(2) / rows.var(-1, correction=0)).max()
    return float(2 * condition * (rows.shape[-1] + 10) * FP32.unit_roundoff)
