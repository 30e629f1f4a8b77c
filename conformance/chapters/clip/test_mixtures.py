"""Check that clipping treats gradients of every type alike in every implementation, or refuses them as a whole."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...workloads.gradients import holding
from .reference import U, norm_bound, total_norm

HALF, BRIEF, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
NARROW, BROAD = torch.complex64, torch.complex128
REAL = {NARROW: SINGLE, BROAD: DOUBLE}
SHAPES = ((4, 5), (3,), (), (7, 1))

MIXTURES: dict[str, tuple[torch.dtype, ...]] = {
    "complex64": (NARROW,),
    "complex128": (BROAD,),
    "complex64+fp32": (NARROW, SINGLE),
    "fp32+complex64": (SINGLE, NARROW),
    "complex64+fp64": (NARROW, DOUBLE),
    "fp16+complex64": (HALF, NARROW),
    "complex64+complex128": (NARROW, BROAD),
    "fp16+bf16+fp32": (HALF, BRIEF, SINGLE),
    "fp16+fp64": (HALF, DOUBLE),
}
NORMS = (2.0, 1.0, 0.5, 3.0, math.inf, -math.inf)


def implementations(target: Target) -> tuple[bool | None, ...]:
    """Return the values of foreach that torch documents for the device."""
    return (None, False, True) if target.device_type in ("cpu", "cuda") else (None, False)


def real(dtype: torch.dtype) -> torch.dtype:
    return REAL.get(dtype, dtype)


def unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def drawn(target: Target, rng: torch.Generator, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Return gradients whose magnitudes are between 0.5 and 3; the dtypes take turns."""
    made = []
    for shape, dtype in zip(SHAPES, itertools.cycle(dtypes), strict=False):
        parts = [0.5 + torch.rand(shape, generator=rng, dtype=DOUBLE) for _ in range(2)]
        made.append((torch.complex(*parts) if dtype.is_complex else parts[0]).to(dtype=dtype, device=target.device))
    return made


def magnitudes(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the magnitudes in float64; a complex number counts by its absolute value."""
    return [gradient.detach().cpu().to(BROAD).abs() for gradient in gradients]


@contract("AMP-CLIP-092")
@pytest.mark.parametrize("mixture", [*MIXTURES])
def test_mixtures(case: Case, target: Target, rng: torch.Generator, mixture: str) -> None:
    """Bound the norm as AMP-CLIP-058 does, in the widest type, with each tensor's norm rounded in its own; each
    gradient is rounded once more, and its coefficient in the type of the norm."""
    dtypes = MIXTURES[mixture]
    case.require_arithmetic(target, *(real(dtype) for dtype in dtypes))
    coarse = max(unit(real(dtype)) for dtype in dtypes)
    expected = functools.reduce(torch.promote_types, map(real, dtypes))
    norms = NORMS if case.level != "quick" else NORMS[int(torch.randint(3, (), generator=rng)) :: 3]
    for norm_type, foreach in itertools.product(norms, implementations(target)):
        gradients = drawn(target, rng, dtypes)
        before = [gradient.detach().cpu().to(BROAD, copy=True) for gradient in gradients]
        norm, bound = (
            total_norm(magnitudes(gradients), norm_type),
            norm_bound(gradients, norm_type, coarse) + 2 * coarse,
        )
        what = f"type {norm_type}, foreach={foreach}"
        seen = torch.nn.utils.clip_grad_norm_(holding(gradients), norm / 4, norm_type, foreach=foreach)
        case.equal(f"dtype and shape of the norm, {what}", (seen.dtype, seen.shape), (expected, torch.Size([])))
        case.at_most(f"error of the norm, {what}", abs(float(seen) - norm) / norm, bound, "relative")
        worst = 0.0
        for gradient, then in zip(gradients, before, strict=True):
            share = (norm / 4) / (norm + 1e-6)
            error = ((gradient.detach().cpu().to(BROAD) - then * share).abs() / (then * share).abs()).max()
            worst = max(worst, float(error) / (bound + 8 * max(U, unit(real(gradient.dtype)), unit(expected))))
        case.at_most(f"largest error of a gradient, {what}", worst, 1.0, "of its bound")
        kept = [gradient.dtype for gradient in gradients]
        given = [dtype for dtype, _ in zip(itertools.cycle(dtypes), SHAPES, strict=False)]
        case.equal(f"dtypes of the gradients, {what}", kept, given)


FORMS: dict[str, Callable[[Sequence[torch.Tensor]], Any]] = {
    "a tuple": tuple,
    "a generator": lambda tensors: (each for each in tensors),
    "the values of a dict": lambda tensors: dict(enumerate(tensors)).values(),
    "an iterator": iter,
}


def clip_in_two_steps(given: Callable[[Sequence[torch.Tensor]], Any], held: Sequence[Any], foreach: bool | None) -> Any:
    norm = torch.nn.utils.get_total_norm(given([each.grad for each in held]), foreach=foreach)
    torch.nn.utils.clip_grads_with_norm_(given(held), 1.0, norm, foreach=foreach)
    return norm


CLIPPERS: dict[str, Callable[[Callable[[Sequence[torch.Tensor]], Any], Sequence[Any], bool | None], Any]] = {
    "clip_grad_norm_": lambda form, held, foreach: torch.nn.utils.clip_grad_norm_(form(held), 1.0, foreach=foreach),
    "clip_grads_with_norm_": clip_in_two_steps,
    "clip_grad_value_": lambda form, held, foreach: torch.nn.utils.clip_grad_value_(form(held), 1.0, foreach=foreach),
}


@contract("AMP-CLIP-092")
@pytest.mark.parametrize("function", CLIPPERS)
def test_mixtures_in_any_iterable(case: Case, target: Target, rng: torch.Generator, function: str) -> None:
    """Clip each mixture in iterables of each kind, which can be read once, as in a list."""
    compared, wrong = 0, []
    mixtures = {
        name: dtypes
        for name, dtypes in MIXTURES.items()
        if all(target.computes_in(real(dtype)) for dtype in dtypes)
        and not (function == "clip_grad_value_" and any(dtype.is_complex for dtype in dtypes))
    }
    if not mixtures:
        case.unsupported(f"{target.name} has no mixture of types for {function}")
    for (name, dtypes), foreach in itertools.product(mixtures.items(), implementations(target)):
        first = drawn(target, rng, dtypes)
        listed = [gradient.clone() for gradient in first]
        norm = CLIPPERS[function](list, holding(listed), foreach)
        if all(torch.equal(now, then) for now, then in zip(listed, first, strict=True)):
            wrong.append(f"{name}, foreach={foreach}: a list is not clipped (control)")
        for form, make in FORMS.items():
            gradients = [gradient.clone() for gradient in first]
            seen = CLIPPERS[function](make, holding(gradients), foreach)
            compared += len(gradients)
            same = [torch.equal(now, then) for now, then in zip(gradients, listed, strict=True)]
            if not all(same) or (norm is not None and not torch.equal(seen, norm)):
                wrong.append(f"{name} in {form}, foreach={foreach}: equal to those of a list: {same}")
    case.at_least("gradients compared", compared, 1)
    case.equal("mixtures that are clipped in another way than in a list", wrong[:3], [])


LARGE: dict[str, tuple[torch.dtype, ...]] = {
    "fp16": (HALF,),
    "fp16+fp32": (HALF, SINGLE),
    "fp32+fp16": (SINGLE, HALF),
    "fp16+bf16": (HALF, BRIEF),
    "bf16": (BRIEF,),
    "fp32": (SINGLE,),
}


@contract("AMP-CLIP-093")
@pytest.mark.parametrize("count", [4, deep("standard", 4096)], ids=["few", "many"])
@pytest.mark.parametrize("mixture", LARGE)
def test_large_gradients(case: Case, target: Target, mixture: str, count: int) -> None:
    dtypes = LARGE[mixture]
    case.require_arithmetic(target, *dtypes)
    for norm_type, foreach in itertools.product((2.0, 1.0), implementations(target)):
        # The norm of each tensor is above the largest fp16 number, 65504.
        gradients = [torch.full((count,), 49152.0, dtype=dtype, device=target.device) for dtype in (*dtypes, *dtypes)]
        torch.nn.utils.clip_grad_norm_(holding(gradients), 16.0, norm_type, foreach=foreach)
        seen = total_norm(magnitudes(gradients), norm_type)
        # A coefficient and a product of 16 bits, or a few numbers of fp32, in each gradient.
        slack = 16.0 * 8 * max(unit(dtype) for dtype in dtypes) + 16.0 * count * 2**-24 / 16
        case.between(
            f"norm after clipping to 16, type {norm_type}, foreach={foreach}", seen, 16.0 - slack, 16.0 + slack
        )


def sparse(device: torch.device) -> torch.Tensor:
    return torch.tensor([[0.0, 3.0], [4.0, 0.0]], device=device).to_sparse()


def complex_one(device: torch.device) -> torch.Tensor:
    return torch.tensor([3 + 4j, 0.5 + 0j], device=device)


STRANGE: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "sparse": sparse,
    "complex": complex_one,
    "expanded": lambda device: torch.tensor(3.0, device=device).expand(4),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
    "clip_grad_value_": torch.nn.utils.clip_grad_value_,
}


STRANGERS = [
    pytest.param(function, strange, id=f"{function}-{strange}")
    for function, strange in itertools.product(FUNCTIONS, STRANGE)
    if (function, strange) != ("clip_grad_value_", "sparse")
]


@contract("AMP-CLIP-094")
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize(("function", "strange"), STRANGERS)
def test_refused_whole(case: Case, target: Target, function: str, strange: str, place: str) -> None:
    expect_whole(case, target, function, strange, place)


# Which kernel an accelerator takes for a list of dense and sparse gradients has not been seen on one.
@contract("AMP-CLIP-094", on="cpu")
@pytest.mark.parametrize("place", ["first", "last"])
def test_sparse_values_refused_whole(case: Case, target: Target, place: str) -> None:
    expect_whole(case, target, "clip_grad_value_", "sparse", place)


def expect_whole(case: Case, target: Target, function: str, strange: str, place: str) -> None:
    """Expect that the call clips, or raises and changes no gradient, alike in all implementations."""
    errors: dict[bool | None, type[Exception] | None] = {}
    for foreach in implementations(target):
        gradients = [STRANGE[strange](target.device), torch.tensor([3.0, -4.0], device=target.device)]
        gradients = gradients if place == "first" else gradients[::-1]
        before = [gradient.to_dense().clone() for gradient in gradients]
        try:
            FUNCTIONS[function](holding(gradients), 2.0, foreach=foreach)
        except (RuntimeError, TypeError, ValueError) as error:
            errors[foreach] = RuntimeError if isinstance(error, RuntimeError) else type(error)
            same = [torch.equal(now.to_dense(), then) for now, then in zip(gradients, before, strict=True)]
            case.equal(f"gradients unchanged by the refusal, foreach={foreach}", same, [True, True])
        else:
            errors[foreach] = None
            norm = total_norm(magnitudes([one.to_dense() for one in gradients]), 2.0)
            largest = max(float(one.to_dense().abs().max()) for one in gradients)
            seen = norm if function == "clip_grad_norm_" else largest
            case.at_most(f"norm, or largest element, after clipping, foreach={foreach}", seen, 2.0 * (1 + 16 * U))
    case.equal("implementations that refuse what another one takes", len(set(errors.values())), 1)


BESIDE: dict[str, tuple[torch.dtype, ...]] = {
    "fp16+fp32": (HALF, SINGLE),
    "fp32+fp16": (SINGLE, HALF),
    "bf16+fp32": (BRIEF, SINGLE),
    "fp32+bf16": (SINGLE, BRIEF),
    "bf16+fp16+fp32": (BRIEF, HALF, SINGLE),
}


@contract("AMP-CLIP-046")
@pytest.mark.parametrize("mixture", [*BESIDE])
def test_norms_beside_exact_ones(case: Case, target: Target, rng: torch.Generator, mixture: str) -> None:
    """16-bit gradients of 3 and 4, whose norms are exact, leave to those in fp32 their precision and their range."""
    case.require_arithmetic(target, *BESIDE[mixture])
    for size, norm_type, foreach in itertools.product((1.0, 2.0**20), (1.0, 2.0, math.inf), implementations(target)):
        gradients = [
            (torch.randn(33, generator=rng) * size if dtype is SINGLE else torch.tensor([3.0, -4.0])).to(
                target.device, dtype
            )
            for dtype in BESIDE[mixture]
        ]
        before = magnitudes(gradients)
        norm = total_norm(before, norm_type)
        bound = norm_bound([one for one in gradients if one.dtype is SINGLE], norm_type)
        what = f"of numbers around {size:g}, type {norm_type}, foreach={foreach}"
        alone = torch.nn.utils.get_total_norm(gradients, norm_type, foreach=foreach)
        seen = torch.nn.utils.clip_grad_norm_(holding(gradients), norm / 4, norm_type, foreach=foreach)
        case.at_most(f"error of the norm {what}", abs(float(seen) - norm) / norm, bound, "relative")
        case.at_most(f"error of get_total_norm {what}", abs(float(alone) - norm) / norm, bound, "relative")
        for dtype, now, then in zip(BESIDE[mixture], magnitudes(gradients), before, strict=True):
            exact = then * (norm / 4 / (norm + 1e-6))
            error = float(((now - exact).abs() / exact).max())
            # The coefficient may be rounded to the type of the gradient before the product is.
            limit = bound + 8 * U + (2 * unit(dtype) if dtype is not SINGLE else 0)
            case.at_most(f"error of a {dtype} gradient {what}", error, limit, "relative")
