"""Gradient clipping in plain Python: norms summed exactly in float64, the documented coefficient, and clamping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

U = 2.0**-24


def total_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> float:
    """Return the p-norm of all elements as one vector, exactly summed (math.fsum), as a float64.

    p = -inf gives the smallest element, p = 0 the number of nonzero elements; for p < 0 one zero gives 0.
    Source: torch.nn.utils.clip_grad_norm_ docstring: total norm of the parameter gradients (viewed as a single
    vector); torch.linalg.vector_norm for what each p means.
    """
    elements = [
        abs(element) for gradient in gradients for element in gradient.detach().cpu().double().flatten().tolist()
    ]
    if math.isinf(norm_type):
        return max(elements, default=0.0) if norm_type > 0 else min(elements)
    if norm_type == 0:
        return float(sum(element != 0 for element in elements))
    if norm_type < 0 and 0.0 in elements:
        return 0.0
    return math.fsum(element**norm_type for element in elements) ** (1 / norm_type)


def norm_bound(gradients: Sequence[torch.Tensor], norm_type: float, unit: float = U) -> float:
    """Bound the relative error of a norm computed in fp32, in any order, with each tensor's norm rounded to `unit`.

    The sum of n nonnegative terms has gamma_n (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section
    4.2), the powers before it up to 8 ulp on a GPU (CUDA C++ Programming Guide, Mathematical Functions: powf), and the
    root divides what came before it by p. Twice: in each tensor and over the tensors' norms. The maximum is exact.
    """
    if math.isinf(norm_type):
        return unit if unit > U else 0.0
    terms = max(gradient.numel() for gradient in gradients) + len(gradients) + 32
    return max(1.0, 1 / abs(norm_type)) * terms * U + (2 * unit if unit > U else 0.0)


def clipped(gradients: Sequence[torch.Tensor], max_norm: float, norm: float) -> list[torch.Tensor]:
    """Return the gradients, in float64 on the CPU, times min(max_norm / (norm + 1e-6), 1).

    Source: torch.nn.utils.clip_grads_with_norm_ docstring.
    """
    return [gradient.detach().cpu().double() * min(max_norm / (norm + 1e-6), 1.0) for gradient in gradients]


def clamped(gradients: Sequence[torch.Tensor], value: float) -> list[torch.Tensor]:
    """Return the gradients with every element beyond +-value set to it; NaN stays NaN. Exact, in the same dtype.

    Source: torch.nn.utils.clip_grad_value_ docstring.
    """

    def clamp(element: float) -> float:
        return math.copysign(value, element) if abs(element) > value else element

    return [
        torch.tensor([clamp(element) for element in gradient.detach().flatten().tolist()], dtype=gradient.dtype)
        .reshape(gradient.shape)
        .to(gradient.device)
        for gradient in gradients
    ]


def relative_distance(seen: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Return the largest |seen - exact| / |exact| over all elements; inf if only one of them is zero or finite."""
    worst = 0.0
    for one, other in zip(seen, exact, strict=True):
        pairs = zip(
            one.detach().cpu().double().flatten().tolist(), other.cpu().double().flatten().tolist(), strict=True
        )
        for a, b in pairs:
            if a != b:
                worst = max(worst, abs(a - b) / abs(b) if b and math.isfinite(a) and math.isfinite(b) else math.inf)
    return worst
