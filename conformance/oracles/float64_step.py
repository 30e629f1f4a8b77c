"""One training step in float64: loss, gradients, their deviations by 16-bit rounding, and the update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Layers = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Exact:
    """The exact loss and gradients of a step, and the standard deviations that rounding to 16 bit gives them.

    `gradients` and `spreads` are in the order of the model's parameters (weight, bias, weight, ...), float64;
    `outputs` and `output_spreads` hold what every Linear returns, [rows, features].
    """

    loss: float
    loss_spread: float
    gradients: list[torch.Tensor]
    spreads: list[torch.Tensor]
    outputs: list[torch.Tensor]
    output_spreads: list[torch.Tensor]


def exact_step(
    layers: Layers,
    inputs: torch.Tensor,
    target: torch.Tensor,
    dtype: torch.dtype,
    *,
    scale: float = 1.0,
    masks: list[torch.Tensor] | None = None,
    backward: bool = True,
) -> Exact:
    """Return loss and gradients of Linear layers with a ReLU between each two, in float64, written out.

    Integer `target` [rows] means cross entropy, a floating one [rows, outputs] the mean squared error. `masks` says
    where each ReLU let its input pass in the run that is judged, as a kink is no rounding error; without it the exact
    outputs decide. `scale` is the loss scale, which lifts the gradients out of the subnormal numbers. Without
    `backward` there are no gradients and no spreads of them.

    Spreads propagate variances to first order: each rounding to `dtype` (inputs, weights, biases, the product, its sum
    with the bias, each gradient) is an independent error of at most one unit roundoff u, whose variance is at most
    (u x)^2 / 3, or a third of half the smallest subnormal squared. The model of independent roundings is that of
    Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41 (2019).
    """
    noise, scaled = _Noise(dtype), _Noise(dtype, scale)
    target = target.cpu()
    hidden = _float64(inputs)
    spread = noise.of(hidden)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    outputs: list[torch.Tensor] = []
    variances: list[torch.Tensor] = []
    passed: list[torch.Tensor] = []
    for number, (weight, bias) in enumerate(layers):
        w, b = _float64(weight), _float64(bias)
        kept.append((hidden, spread))
        output = hidden @ w.T + b
        variance = noise.of_product(hidden, spread, w.T) + noise.of(b) + 2 * noise.of(output)
        outputs.append(output)
        variances.append(variance)
        if number < len(layers) - 1:
            passed.append((output > 0) if masks is None else masks[number].cpu())
            hidden, spread = output * passed[-1], variance * passed[-1]
    loss, loss_spread, slope, slope_variance = _loss(outputs[-1], variances[-1], target)
    gradients: list[torch.Tensor] = []
    gradient_variances: list[torch.Tensor] = []
    for number in reversed(range(len(layers) if backward else 0)):
        slope_variance = slope_variance + scaled.of(slope)
        hidden, spread = kept[number]
        weight_gradient = slope.T @ hidden
        if number:
            weight_variance = slope_variance.T @ hidden.square() + slope.square().T @ spread
        else:  # the inputs, whose spread is that of one rounding
            weight_variance = noise.of_product(slope.T, slope_variance.T, hidden)
        bias_gradient = slope.sum(0)
        bias_variance = slope_variance.sum(0) + scaled.of(bias_gradient)
        gradients = [weight_gradient, bias_gradient, *gradients]
        gradient_variances = [weight_variance + scaled.of(weight_gradient), bias_variance, *gradient_variances]
        if number:
            w = _float64(layers[number][0])
            slope_variance = noise.of_product(slope, slope_variance, w) * passed[number - 1]
            slope = (slope @ w) * passed[number - 1]
    return Exact(
        loss,
        loss_spread,
        gradients,
        [variance.sqrt() for variance in gradient_variances],
        outputs,
        [variance.sqrt() for variance in variances],
    )


def _float64(tensor: torch.Tensor) -> torch.Tensor:
    # On the CPU: there are accelerators without float64.
    return tensor.detach().cpu().double()


class _Noise:
    """Variance of one rounding to a dtype, by the values that are rounded while multiplied by `scale`."""

    def __init__(self, dtype: torch.dtype, scale: float = 1.0) -> None:
        facts = torch.finfo(dtype)
        self.relative = (facts.eps / 2) ** 2 / 3
        self.absolute = (facts.smallest_normal * facts.eps / 2 / scale) ** 2 / 3

    def of(self, values: torch.Tensor) -> torch.Tensor:
        return self.relative * values.square() + self.absolute

    def of_product(self, values: torch.Tensor, variance: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Return variance of `values @ factor`, where the values have a variance and the factor is rounded.

        variance @ factor^2 + values^2 @ of(factor), in one product.
        """
        squares = values.square()
        return (variance + self.relative * squares) @ factor.square() + self.absolute * squares.sum(1, keepdim=True)


def _loss(
    output: torch.Tensor, variance: torch.Tensor, target: torch.Tensor
) -> tuple[float, float, torch.Tensor, torch.Tensor]:
    """Return the loss, its standard deviation, its gradient in `output`, and that gradient's variance.

    Rows share the roundings of the weights, so their spreads are averaged as if they were one error.
    """
    if target.is_floating_point():
        difference = output - target.double()
        slope = 2 * difference / difference.numel()
        spread = (slope.square() * variance).sum(1).sqrt().sum()
        return difference.square().mean().item(), spread.item(), slope, variance * (2 / difference.numel()) ** 2
    rows = torch.arange(len(target))
    logs = output - output.logsumexp(1, keepdim=True)
    slope = logs.exp()
    # Softmax: d p_i = p_i (d z_i - sum_j p_j d z_j).
    shared = (slope.square() * variance).sum(1, keepdim=True)
    slope_variance = slope.square() * (variance * (1 - 2 * slope) + shared) / len(target) ** 2
    slope[rows, target] -= 1
    spread = (slope.square() * variance).sum(1).sqrt().mean()
    slope /= len(target)
    return -logs[rows, target].mean().item(), spread.item(), slope, slope_variance.clamp(min=0)


@dataclass
class ExactAdam:
    """torch.optim.Adam and AdamW for one parameter in float64 (the algorithm boxes of their docstrings)."""

    lr: float
    decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    steps: int = 0
    moments: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """Of the gradient, of its square and of its size."""

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the parameter after one step, and how far fp32 arithmetic may be from it, elementwise, float64.

        By then each moment was rounded at most twice a step, the first relative to the moment of |gradient|; the
        second's error is halved by the root; eight more roundings make the step, three the decay factor, the
        decayed and the new parameter (u = 2^-24 each, first order).
        """
        gradient, parameter = _float64(gradient), _float64(parameter)
        unit = 2.0**-24
        first, second = self.betas
        self.steps += 1
        if self.moments is None:
            self.moments = torch.zeros_like(gradient), torch.zeros_like(gradient), torch.zeros_like(gradient)
        mean, square, size = self.moments
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).add_(gradient.square(), alpha=1 - second)
        size.mul_(first).add_(gradient.abs(), alpha=1 - first)
        root = square.sqrt().div_(math.sqrt(1 - second**self.steps)).add_(self.eps)
        rate = root.reciprocal_().mul_(self.lr / (1 - first**self.steps))
        updated = (parameter * (1 - self.lr * self.decay)).sub_(rate * mean)
        reach = torch.maximum(parameter.abs(), updated.abs()).mul_(3 * unit)
        return updated, reach.add_(rate.mul_(size), alpha=(3 * self.steps + 8) * unit)
