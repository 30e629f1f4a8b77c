"""Parameters and gradients of every type, shape and layout, and the step that the for-loop takes of them in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...oracles.numbers.error_bounds import largest_share
from .optimizer_configs import OptimizerConfig

Given = tuple[torch.Tensor, torch.Tensor | None]  # a parameter's value, and the gradient of one step

_SHAPES: tuple[tuple[int, ...], ...] = ((8, 9), (3, 2), (64,))  # whole vectors of 16-bit numbers and remainders
WIDE = {torch.complex64: torch.complex128, torch.complex128: torch.complex128}
# Dtypes of a real number that holds the parts of a complex one.
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a floating-point or complex dtype."""
    return torch.finfo(_PARTS.get(dtype, dtype)).eps / 2


def counts_steps(name: str, value: torch.Tensor) -> bool:
    """Return whether an entry of a state is a step counter, of a dtype that counts every step to 2^24."""
    return name == "step" and value.dtype in (torch.float32, torch.float64, torch.int32, torch.int64)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in float64 or complex128, on the CPU."""
    return tensor.detach().cpu().to(WIDE.get(tensor.dtype, torch.float64), copy=True).contiguous()


@dataclass(frozen=True)
class Draw:
    """Random values in [1, 2) and gradients in [0.5, 1.5), on a device; all shapes are matrices for Muon."""

    rng: torch.Generator
    device: torch.device
    matrices: bool = False

    def value(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._random(shape, dtype, 1.0)

    def gradient(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._random(shape, dtype, 0.5)

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype, least: float) -> torch.Tensor:
        parts = [least + torch.rand(shape, generator=self.rng, dtype=torch.float64) for _ in range(2)]
        made = torch.complex(*parts) if dtype.is_complex else parts[0]
        return made.to(dtype=dtype, device=self.device)

    def pairs(self, shapes: Sequence[tuple[int, ...]], *dtypes: torch.dtype) -> list[Given]:
        """Return pairs of these shapes; the dtypes take turns."""
        kept = [shape for shape in shapes if len(shape) == 2 or not self.matrices]
        types = [dtypes[number % len(dtypes)] for number in range(len(kept))]
        return [
            (self.value(shape, dtype), self.gradient(shape, dtype)) for shape, dtype in zip(kept, types, strict=True)
        ]


def _types(*dtypes: torch.dtype) -> Callable[[Draw], list[Given]]:
    return lambda draw: draw.pairs(_SHAPES, *dtypes)


def _shapes(*shapes: tuple[int, ...]) -> Callable[[Draw], list[Given]]:
    return lambda draw: draw.pairs(shapes, torch.float64)


def _expanded(draw: Draw) -> list[Given]:
    return [
        (value, draw.gradient((1,) * value.dim(), torch.float64).expand(value.shape))
        for value, _ in draw.pairs(_SHAPES, torch.float64)
    ]


def _strided_gradients(draw: Draw) -> list[Given]:
    return [
        (value, draw.gradient((*value.shape, 2), torch.float64)[..., 0])
        for value, _ in draw.pairs(_SHAPES, torch.float64)
    ]


def _reversed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its dimensions in reverse order, over the same memory."""
    return tensor.permute(*range(tensor.dim())[::-1])


def _transposed_gradients(draw: Draw) -> list[Given]:
    pairs = draw.pairs(_SHAPES, torch.float64)
    return [(value, _reversed(draw.gradient(tuple(value.shape[::-1]), torch.float64))) for value, _ in pairs]


def _transposed(draw: Draw) -> list[Given]:
    pairs = draw.pairs(_SHAPES, torch.float64)
    return [(_reversed(value), _reversed(draw.gradient(tuple(value.shape), torch.float64))) for value, _ in pairs]


def _missing(draw: Draw) -> list[Given]:
    pairs = draw.pairs((*_SHAPES, (4, 4)), torch.float64)
    return [(value, gradient if number % 2 else None) for number, (value, gradient) in enumerate(pairs)]


# By aspect and name: what makes the pairs of one step. Pairs of the first step give the parameters.
KINDS: Mapping[str, Mapping[str, Callable[[Draw], list[Given]]]] = {
    "real": {
        "fp32": _types(torch.float32),
        "fp64": _types(torch.float64),
        "fp32 and fp64": _types(torch.float32, torch.float64),
    },
    "16-bit": {
        "bf16": _types(torch.bfloat16),
        "fp16": _types(torch.float16),
        "all": _types(torch.float32, torch.bfloat16, torch.float16),
    },
    "complex": {
        "complex64": _types(torch.complex64),
        "complex128": _types(torch.complex128),
        "complex and real": _types(torch.complex64, torch.float32),
    },
    "shapes": {
        "0-dim": _shapes((), (3, 2)),
        "one element": _shapes((1,), (1, 1)),
        "ones among others": _shapes((1, 5), (5, 1), (7, 11), (1001,)),
    },
    "empty": {"empty first": _shapes((0,), (0, 3), (3, 2)), "empty last": _shapes((4, 2), (2, 0), (0,))},
    "layouts": {
        "transposed": _transposed,
        "transposed gradients": _transposed_gradients,
        "strided gradients": _strided_gradients,
        "expanded gradients": _expanded,
    },
    "missing": {"every other": _missing},
}


def dtypes_of(aspect: str) -> tuple[torch.dtype, ...]:
    """Return the real dtypes that an aspect computes in."""
    return (torch.bfloat16, torch.float16) if aspect == "16-bit" else (torch.float32, torch.float64)


def held(pairs: Sequence[Given]) -> list[torch.nn.Parameter]:
    """Return parameters of the values."""
    return [torch.nn.Parameter(value) for value, _ in pairs]


def attempted(optimizer: Any) -> str | None:
    """Take a step; return what it raises."""
    try:
        optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return None


@dataclass
class Step:
    """What a step of an optimizer ended with: an error, or the distances from the float64 step, in their bounds."""

    raised: Exception | None = None
    changed: list[str] = field(default_factory=list)
    far: dict[str, float] = field(default_factory=dict)

    @property
    def beyond(self) -> dict[str, float]:
        """The distances that are not within their bounds."""
        return {place: share for place, share in self.far.items() if not share <= 1}


def reference(plain: OptimizerConfig, optimizer: Any) -> Any:
    """Return the for-loop in float64 over copies of the optimizer's parameters, gradients and state."""
    copies = [torch.nn.Parameter(wide(parameter)) for parameter in parameters_of(optimizer)]
    made = plain.make(copies)
    for parameter, copy in zip(parameters_of(optimizer), copies, strict=True):
        copy.grad = None if parameter.grad is None else wide(parameter.grad)
        if state := optimizer.state.get(parameter):
            made.state[copy] = {name: _copied(name, value) for name, value in state.items()}
    return made


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _copied(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().cpu().clone() if name == "step" or value.numel() == 0 else wide(value)


def stepped(plain: OptimizerConfig, optimizer: Any, coarsest: float = 0.0) -> Step:
    """Take a step, and the step of the for-loop in float64 from the same parameters, gradients and state.

    The bound of an element: the parameter is rounded at most twice, its change in at most 32 operations
    (AMP-OPTIMIZER-047); a state is the result of fewer. Numbers that a state keeps in a smaller dtype, such as NAdam's
    mu_product, and settings in tensors, of the unit roundoff `coarsest`, round the change in theirs.
    """
    exact = reference(plain, optimizer)
    before = [wide(parameter) for parameter in parameters_of(optimizer)]
    try:
        optimizer.step()
    except Exception as error:
        kept = [torch.equal(wide(now), then) for now, then in zip(parameters_of(optimizer), before, strict=True)]
        return Step(raised=error, changed=[f"parameter {number}" for number, same in enumerate(kept) if not same])
    exact.step()
    found = Step()
    for number, (seen, right, then) in enumerate(
        zip(parameters_of(optimizer), parameters_of(exact), before, strict=True)
    ):
        state, ideal = optimizer.state.get(seen, {}), exact.state.get(right, {})
        if seen.numel() == 0:
            continue
        coarse = max([unit(seen.dtype), coarsest, *(unit(v.dtype) for k, v in state.items() if rounds(k, v))])
        way = (right.detach() - then).abs()
        bound = coarse * (2 * (right.detach().abs() + way) + 32 * way)
        found.far[f"parameter {number} ({seen.dtype})"] = largest_share(wide(seen) - right.detach(), bound)
        for name in ideal:
            found.far |= _state_distance(f"{number}/{name}", state.get(name), ideal[name], coarsest, seen.dim() == 0)
    return found


def rounds(name: str, value: Any) -> bool:
    """Whether an entry of the state is a number that the step rounds in its dtype."""
    return name != "step" and isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _state_distance(key: str, seen: Any, ideal: Any, coarsest: float, scalar: bool) -> dict[str, float]:
    """Return the distance of an entry of the state in its bound; `scalar` is for one of a parameter of one number."""
    place, name = f"state {key}", key.partition("/")[2]
    if _shape(seen) != _shape(ideal):
        return {f"{place} of shape {_shape(seen)}": float("inf")}
    if name == "step" or not isinstance(ideal, torch.Tensor) or not isinstance(seen, torch.Tensor):
        return {place: 0.0 if _number(seen) == _number(ideal) else float("inf")}
    if ideal.numel() == 0 or not (seen.dtype.is_floating_point or seen.dtype.is_complex):
        return {}
    # Single numbers are kept in fp32, whatever the dtype of the parameter, and computed from Python's floats.
    kept = unit(seen.dtype) if scalar or ideal.dim() else 0.0
    rounding = max(kept, coarsest, unit(torch.float32) if ideal.dim() == 0 else 0.0)
    bound = torch.full((), 32 * rounding * float(ideal.abs().max()), dtype=torch.float64)
    return {place: largest_share(wide(seen) - ideal, bound)}


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, (torch.Tensor, int, float)) else value
