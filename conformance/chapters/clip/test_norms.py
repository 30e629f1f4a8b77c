"""Check norms and clipping for every norm type, size, dtype and layout, and on several devices."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from ...harness.check import Case, applies, contract
from ...harness.targets import Target, one_device_only, second
from ...oracles.fake_devices import PaperDevices, PaperTensor
from ...workloads.gradients import LAYOUTS, holding
from .reference import U, clamped, clipped, norm_bound, relative_distance, total_norm
from .support import CHUNK, NONFINITE, implementations

# The exact norms of 4**m elements of 2**k or -2**k, a square number in each tensor.
EXACT: dict[float, Callable[[int, int], float]] = {
    1.0: lambda k, m: 2.0 ** (k + 2 * m),
    2.0: lambda k, m: 2.0 ** (k + m),
    math.inf: lambda k, m: 2.0**k,
}
FOUR = {5: 4, 4: 4, 40: 4, 7: 4}  # sizes of four tensors, and their numbers of nonzero elements


def marked(
    counts: Mapping[int, int] | Sequence[tuple[int, int]],
    k: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Return zeros of these sizes with `count` elements of 2**k or -2**k, first at the ends and at chunk borders."""
    made = []
    for size, count in counts.items() if isinstance(counts, Mapping) else counts:
        edges = [at % size for at in (-1, 0, CHUNK - 1, CHUNK, 2 * CHUNK) if -size <= at < size]
        places = list(dict.fromkeys([*edges, *range(min(size, 32))]))[:count]
        values = torch.zeros(size, dtype=dtype)
        values[places] = torch.tensor([math.ldexp(1.0 if at % 3 else -1.0, k) for at in places], dtype=dtype)
        made.append(values.to(device))
    return made


def wrong_places(seen: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[str]:
    """Describe the first difference of each of the first three tensors that differ."""
    if _equal_at_once(seen, expected):
        return []
    found = []
    for number, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            found.append(f"tensor {number}: {ours.dtype} {ours.shape} in place of {theirs.dtype} {theirs.shape}")
        elif not torch.equal(ours, theirs):
            at = int((ours != theirs).flatten().nonzero()[0])
            values = f"{ours.flatten()[at].item()!r} in place of {theirs.flatten()[at].item()!r}"
            found.append(f"tensor {number}, element {at}: {values}")
    return found[:3]


def _equal_at_once(seen: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Compare tensors of one type and device together, as a device is waited for at each comparison."""
    if [one.shape for one in seen] != [one.shape for one in expected]:
        return False
    if len({(one.dtype, one.device) for one in (*seen, *expected)}) != 1:
        return False
    ours, theirs = (torch.cat([one.flatten() for one in tensors]) for tensors in (seen, expected))
    return torch.equal(ours, theirs)


def clips_in_any_order(
    case: Case, what: str, gradients: list[torch.Tensor], norm_type: float, norm: float, foreach: bool | None
) -> torch.Tensor:
    """Clip n tensors as `clips_exactly` does, where their norms may be combined in groups; return the norm.

    The 2-norm of a part of them may be irrational. That of each tensor is exact, and n - 1 combinations of two remain.
    Each rounds its root, and its squares and their sum, of whose error the root halves: 2u. The addition and division
    of the coefficient round once each, and so do the coefficient and the product in the type of the gradient.
    """
    if norm_type != 2.0:
        return clips_exactly(case, what, gradients, norm_type, norm, foreach)
    expected = [one.double().cpu() / 8 for one in gradients]
    seen = torch.nn.utils.clip_grad_norm_(holding(gradients), norm / 8, norm_type, foreach=foreach)
    combined = 2 * (len(gradients) - 1)
    case.at_most(f"error of the norm, {what}", abs(float(seen) / norm - 1), combined * _unit(seen.dtype), "relative")
    wrong = [
        number
        for number, (one, exact) in enumerate(zip(gradients, expected, strict=True))
        for bound in [(combined + 2) * _unit(seen.dtype) + 2 * _unit(one.dtype)]
        if not bool(((one.double().cpu() - exact).abs() <= bound * exact.abs()).all())
    ]
    case.equal(f"clipped gradients that are not an eighth within their rounding, {what}", wrong, [])
    return seen


def _unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff."""
    return torch.finfo(dtype).eps / 2


def clips_exactly(
    case: Case, what: str, gradients: list[torch.Tensor], norm_type: float, norm: float, foreach: bool | None
) -> torch.Tensor:
    """Clip to an eighth of a power-of-two norm, so that norm, coefficient and gradients are exact; return the norm."""
    expected = [one / 8 for one in gradients]
    parameters = holding(gradients)
    seen = torch.nn.utils.clip_grad_norm_(parameters, norm / 8, norm_type, foreach=foreach)
    case.equal(f"norm, {what}", float(seen), norm)
    case.equal(f"clipped gradients that are not an eighth, {what}", wrong_places(gradients, expected), [])
    kept = [one.grad is gradient for one, gradient in zip(parameters, gradients, strict=True)]
    case.equal(f"gradients that are the same tensors, {what}", kept.count(True), len(gradients))
    return seen


# Sizes


@contract("AMP-CLIP-044")
def test_sizes_around_the_chunk(case: Case, target: Target) -> None:
    counts = {1: 1, 15: 1, 16: 1, 17: 9, CHUNK - 1: 9, CHUNK: 9, CHUNK + 1: 9, 2 * CHUNK + 3: 25}
    norms = (2.0,) if case.level == "quick" else tuple(EXACT)
    for norm_type, foreach in itertools.product(norms, implementations(target)):
        gradients = marked(counts, 20, target.device)
        clips_in_any_order(
            case, f"type {norm_type}, foreach={foreach}", gradients, norm_type, EXACT[norm_type](20, 3), foreach
        )


@contract("AMP-CLIP-044")
def test_thousands_of_tensors(case: Case, target: Target) -> None:
    m = case.samples(quick=5, standard=6, full=7)
    counts = [(1 + number % 3, 1) for number in range(4**m)]
    norms = (2.0,) if case.level == "quick" else tuple(EXACT)
    for norm_type, foreach in itertools.product(norms, implementations(target)):
        gradients = marked(counts, 20, target.device)
        what = f"{4**m} tensors, type {norm_type}, foreach={foreach}"
        clips_in_any_order(case, what, gradients, norm_type, EXACT[norm_type](20, m), foreach)


@contract("AMP-CLIP-045")
@pytest.mark.parametrize("norm_type", EXACT, ids=str)
def test_magnitudes(case: Case, target: Target, norm_type: float) -> None:
    # The squares of a 2-norm must stay between 2**-126 and 2**127; other norms have the range of fp32 itself.
    powers = (-62, -40, 0, 40, 58, 61) if norm_type == 2.0 else (-110, -62, 0, 62, 100, 120)
    for k, foreach in itertools.product(powers, implementations(target)):
        gradients = marked(FOUR, k, target.device)
        norm, what = EXACT[norm_type](k, 2), f"elements of 2**{k}, type {norm_type}, foreach={foreach}"
        if k >= 40:
            clips_exactly(case, what, gradients, norm_type, norm, foreach)
            continue
        before = [one.clone() for one in gradients]
        seen = torch.nn.utils.clip_grad_norm_(holding(gradients), 2.0**125, norm_type, foreach=foreach)
        case.equal(f"norm, {what}", float(seen), norm)
        case.equal(f"gradients changed below the threshold, {what}", wrong_places(gradients, before), [])
        limit = 1e-9  # a coefficient of 1e-3, for which no gradient is subnormal, which a device may flush
        torch.nn.utils.clip_grad_norm_(holding(gradients), limit, norm_type, foreach=foreach)
        error = relative_distance(gradients, clipped(before, limit, norm))
        case.at_most(f"error of gradients clipped to {limit:g}, {what}", error, 4 * U, "relative")


# Powers of two that gradients of about 1 are multiplied by: squares or cubes leave the range of fp32, they do not.
RANGES = {"huge": (64, 80, 100, 115), "tiny": (-70, -85, -100)}


@contract("AMP-CLIP-095")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf], ids=str)
@pytest.mark.parametrize("size", RANGES)
def test_norms_over_the_range_of_the_type(
    case: Case, target: Target, rng: torch.Generator, size: str, norm_type: float
) -> None:
    dtypes = [torch.float32, *(dtype for dtype in (torch.bfloat16,) if target.supports(dtype))]
    wrong, compared = [], 0
    for dtype, k, foreach in itertools.product(dtypes, RANGES[size], implementations(target)):
        values = [torch.randn(shape, generator=rng).to(dtype) for shape in ((9,), (4, 8), (64,))]
        exact = float(torch.linalg.vector_norm(torch.cat([one.double().flatten() for one in values]), norm_type))
        gradients = [(one * 2.0**k).to(target.device) for one in values]
        parameters = holding(gradients)
        seen = float(torch.nn.utils.clip_grad_norm_(parameters, math.ldexp(exact, k - 3), norm_type, foreach=foreach))
        relative = abs(math.ldexp(seen, -k) / exact - 1) if math.isfinite(seen) else math.inf
        # Clipping adds 1e-6 to the norm, so that gradients of a tiny norm are not scaled by max_norm / norm.
        error = 0.0 if size == "tiny" else relative_distance(gradients, [one * 2.0 ** (k - 3) for one in values])
        bound = 4 * torch.finfo(dtype).eps
        compared += 1
        if not relative <= bound or not error <= bound:
            wrong.append(f"{dtype}, foreach={foreach}, times 2**{k}: norm {seen:g}, error of the gradients {error:g}")
    case.at_least("norms compared", compared, len(RANGES[size]))
    case.equal("gradients whose norm or clipped values depend on their size", wrong[:3], [])


@contract("AMP-CLIP-096")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf], ids=str)
def test_norms_of_split_gradients(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, norm_type: float
) -> None:
    whole = torch.randn(4096, generator=rng).to(amp_dtype)
    exact = float(torch.linalg.vector_norm(whole.double(), norm_type))
    splits = {
        "whole": [whole],
        "2 halves": whole.split(2048),
        "64 rows": whole.view(64, 64).unbind(0),
        "64 columns": whole.view(64, 64).unbind(1),
        "512 parts": whole.split(8),
        "unlike parts": whole.split([1, 7, 1000, 3, 3085]),
    }
    for (name, parts), foreach in itertools.product(splits.items(), implementations(target)):
        gradients = holding([part.to(target.device) for part in parts])
        seen = float(torch.nn.utils.clip_grad_norm_(gradients, 1e9, norm_type, foreach=foreach))
        # The norm of each part and that of the norms are rounded to the type of the gradients.
        error = abs(seen / exact - 1) / (torch.finfo(amp_dtype).eps / 2)
        case.at_most(f"{name}, foreach={foreach}: error of the norm", error, 3.0, "u")


@contract("AMP-CLIP-046")
def test_norms_of_double_precision(case: Case, target: Target) -> None:
    """Check fp64 norms beyond 2**64, where fp32 squares overflow."""
    case.require_arithmetic(target, torch.float64)
    for (norm_type, norm), k in itertools.product(EXACT.items(), (40, 64, 200, 480)):
        for foreach in implementations(target):
            gradients = marked(FOUR, k, target.device, torch.float64)
            what = f"fp64 elements of 2**{k}, type {norm_type}, foreach={foreach}"
            seen = clips_in_any_order(case, what, gradients, norm_type, norm(k, 2), foreach)
            case.equal(f"dtype of the norm, {what}", seen.dtype, torch.float64)


@contract("AMP-CLIP-046")
def test_norms_of_several_dtypes(case: Case, target: Target) -> None:
    half, brief, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64
    groups = [(half,), (brief,), (single,), (half, brief), (single, half), (brief, single), (half, single, brief)]
    fits = [dtype for dtype in (half, brief, double) if target.computes_in(dtype)]
    groups = [group for group in groups if set(group) <= {*fits, single}]
    with_double = [(double, single), (single, double), (single, brief, double)]
    for group in [*groups, *(each for each in with_double if set(each) <= {*fits, single})]:
        k = 40 if double in group else 6
        for (norm_type, norm), foreach in itertools.product(EXACT.items(), implementations(target)):
            parts = marked(FOUR, k, target.device)
            gradients = [part.to(dtype) for part, dtype in zip(parts, itertools.cycle(group), strict=False)]
            names = "+".join(str(dtype).removeprefix("torch.") for dtype in group)
            what = f"{names}, type {norm_type}, foreach={foreach}"
            seen = clips_in_any_order(case, what, gradients, norm_type, norm(k, 2), foreach)
            expected = (functools.reduce(torch.promote_types, group), torch.Size([]), target.device_type)
            case.equal(f"norm's dtype, shape and device, {what}", (seen.dtype, seen.shape, seen.device.type), expected)


# Layouts


@contract("AMP-CLIP-043")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def test_layouts(case: Case, target: Target, layout: str) -> None:
    shape = (2, 3, 4, 5)
    for (norm_type, norm), foreach in itertools.product(EXACT.items(), implementations(target)):
        values = [part.view(shape) for part in marked([(120, 16)] * 4, 20, target.device)]
        gradients = [LAYOUTS[layout](part) for part in values]
        strides = [one.stride() for one in gradients]
        bases = [one if one._base is None else one._base for one in gradients]
        around = [int((base == 7.0).sum()) for base in bases]
        what = f"type {norm_type}, foreach={foreach}"
        clips_in_any_order(case, what, gradients, norm_type, norm(20, 3), foreach)
        case.equal(f"strides after clipping, {what}", [one.stride() for one in gradients], strides)
        torch.nn.utils.clip_grad_value_(holding(gradients), 1000.0, foreach)
        expected = [part.sign() * 1000.0 for part in values]
        worst = [float((one - theirs).abs().max()) for one, theirs in zip(gradients, expected, strict=True)]
        case.equal(f"distance from gradients clipped by value, {what}", worst, [0.0] * 4)
        left = [int((base == 7.0).sum()) for base in bases]
        case.equal(f"unchanged elements around the gradients, {what}", left, around)


@contract("AMP-CLIP-042")
def test_tied_parameters(case: Case, target: Target) -> None:
    first, second = (torch.nn.Linear(4, 4, bias=False, device=target.device) for _ in range(2))
    second.weight = first.weight
    model = torch.nn.Sequential(first, second, torch.nn.Linear(4, 2, bias=False, device=target.device))
    shared, own = model[0].weight, model[2].weight
    shared.grad = torch.full_like(shared, 2.0**10)
    own.grad = torch.full_like(own, 2.0**10)
    own.grad[:, 2:] = 0.0  # 16 + 4 elements; the norm of 20 or 36 elements is not a power of two
    shared.grad[3, :] = 0.0
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler(target.device_type)
    scaler.scale(torch.zeros((), device=target.device))
    for parameter in (shared, own):
        parameter.grad *= 65536.0
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0**9)
    case.equal("norm, the shared weight counted once", float(norm), 2.0**12)
    case.equal("shared gradient, clipped once", shared.grad.unique().tolist(), [0.0, 2.0**7])
    case.equal("the other gradient", own.grad.unique().tolist(), [0.0, 2.0**7])


@contract("AMP-CLIP-059")
def test_sparse_gradients(case: Case, target: Target) -> None:
    dense = [[0.0, 3.0], [4.0, 0.0]]
    clips: dict[str, tuple[Callable[..., Any], list[list[float]]]] = {
        "clip_grad_norm_": (torch.nn.utils.clip_grad_norm_, [[0.0, 1.5], [2.0, 0.0]]),
        "clip_grad_value_": (torch.nn.utils.clip_grad_value_, [[0.0, 2.5], [2.5, 0.0]]),
    }
    for (name, (clip, right)), foreach in itertools.product(clips.items(), implementations(target)):
        gradient = torch.tensor(dense, device=target.device).to_sparse()
        parameter = torch.nn.Parameter(torch.zeros(2, 2, device=target.device))
        parameter.grad = gradient
        what = f"{name}, foreach={foreach}"
        expected = torch.tensor(right)
        try:
            clip([parameter], 2.5, foreach=foreach)
        except (RuntimeError, TypeError) as error:  # NotImplementedError is a RuntimeError
            case.note(f"error of {what}", str(error).splitlines()[0][:80])
            expected = torch.tensor(dense)
        left = parameter.grad.to_dense().cpu()
        case.at_most(f"distance from the expected gradients after {what}", float((left - expected).abs().max()), 1e-6)
    plain = holding([torch.tensor(dense, device=target.device)])
    torch.nn.utils.clip_grad_norm_(plain, 2.5)
    case.at_most(
        "control: distance of a dense gradient",
        float((plain[0].grad.cpu() - torch.tensor(clips["clip_grad_norm_"][1])).abs().max()),
        1e-6,
    )


@contract("AMP-CLIP-048")
def test_empty_gradients(case: Case, target: Target) -> None:
    for norm_type, foreach in itertools.product((1.0, 2.0), implementations(target)):
        gradients = [torch.zeros(shape, device=target.device) for shape in ((0,), (3, 0))]
        gradients[1:1] = marked(FOUR, 20, target.device)
        what = f"type {norm_type}, foreach={foreach}"
        clips_exactly(case, what, gradients, norm_type, EXACT[norm_type](20, 2), foreach)
        torch.nn.utils.clip_grad_value_(holding(gradients), 1.0, foreach)
        case.equal(
            f"largest element after clipping by value, {what}", max(float(g.abs().max()) for g in gradients[1:-1]), 1.0
        )
        alone = torch.nn.utils.get_total_norm(gradients[:1], norm_type, foreach=foreach)
        case.equal(f"norm of an empty gradient alone, {what}", float(alone), 0.0)


@contract("AMP-CLIP-049")
def test_infinity_norm_with_an_empty_gradient(case: Case, target: Target) -> None:
    gradients = [torch.tensor([3.0, -4.0], device=target.device), torch.zeros(0, device=target.device)]
    control = torch.nn.utils.get_total_norm(gradients[:1], math.inf)
    case.equal("control: norm without the empty gradient", float(control), 4.0)
    for foreach in implementations(target):
        norm = torch.nn.utils.clip_grad_norm_(holding(gradients), 100.0, math.inf, foreach=foreach)
        case.equal(f"norm with the empty gradient, foreach={foreach}", float(norm), 4.0)


@contract("AMP-CLIP-049")
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize(("norm_type", "expected"), [(math.inf, 4.0), (-math.inf, 3.0)], ids=["inf", "minus-inf"])
def test_infinity_norms_around_an_empty_gradient(
    case: Case, target: Target, norm_type: float, expected: float, place: str
) -> None:
    gradients = [torch.tensor([3.0, -4.0], device=target.device), torch.zeros(2, 0, device=target.device)]
    control = torch.nn.utils.get_total_norm(gradients[:1], norm_type)
    case.equal("control: norm without the empty gradient", float(control), expected)
    for foreach in implementations(target):
        norm = torch.nn.utils.get_total_norm(gradients[:: 1 if place == "last" else -1], norm_type, foreach=foreach)
        case.equal(f"norm with the empty gradient, foreach={foreach}", float(norm), expected)


# Norm types


@contract("AMP-CLIP-058")
def test_types_of_norms(case: Case, target: Target, rng: torch.Generator) -> None:
    shapes = ((7, 11), (13,), (), (6, 4))
    for norm_type in (0.25, 0.5, 0.75, 1.5, 2.5, 3.0, 4.0, 10.0):
        slopes = [torch.randn(shape, generator=rng).to(target.device) for shape in shapes]
        norm, bound = total_norm(slopes, norm_type), norm_bound(slopes, norm_type)
        for foreach, share in itertools.product(implementations(target), (0.25, 4.0)):
            gradients = [one.clone() for one in slopes]
            seen = torch.nn.utils.clip_grad_norm_(holding(gradients), share * norm, norm_type, foreach=foreach)
            what = f"type {norm_type}, foreach={foreach}, max_norm {share} of the norm"
            case.at_most(f"error of the norm, {what}", abs(float(seen) - norm) / norm, bound, "relative")
            error = relative_distance(gradients, clipped(slopes, share * norm, norm))
            case.at_most(f"error of a clipped gradient, {what}", error, bound + 4 * U if share < 1 else 0.0, "relative")


@contract("AMP-CLIP-057")
def test_types_below_zero(case: Case, target: Target, rng: torch.Generator) -> None:
    slopes = [(1 + torch.rand(shape, generator=rng)).to(target.device) for shape in ((7, 11), (13,), ())]
    for norm_type, foreach in itertools.product((-1.0, -2.0, -math.inf), implementations(target)):
        norm = total_norm(slopes, norm_type)
        seen = float(torch.nn.utils.get_total_norm(slopes, norm_type, foreach=foreach))
        error = abs(seen - norm) / norm
        case.at_most(f"error of type {norm_type}, foreach={foreach}", error, norm_bound(slopes, norm_type), "relative")
    case.equal(
        "type -inf", float(torch.nn.utils.get_total_norm(slopes, "-inf")), min(float(one.min()) for one in slopes)
    )


@contract("AMP-CLIP-056")
def test_type_zero(case: Case, target: Target) -> None:
    gradients = [torch.tensor([3.0, 0.0, -1.0], device=target.device), torch.tensor([0.0, 2.0], device=target.device)]
    alone = torch.linalg.vector_norm(torch.cat(gradients), 0)
    case.equal("control: torch.linalg.vector_norm of the elements as one vector", float(alone), 3.0)
    for foreach in implementations(target):
        norm = torch.nn.utils.get_total_norm(gradients, 0, foreach=foreach)
        case.equal(f"norm of type 0, foreach={foreach}", float(norm), 3.0)


@contract("AMP-CLIP-055")
def test_extreme_thresholds(case: Case, target: Target) -> None:
    for norm_type, foreach in itertools.product(EXACT, implementations(target)):
        for name, threshold, expected in (("0", 0, 0.0), ("0.0", 0.0, 0.0), ("inf", math.inf, 2.0**20)):
            gradients = marked(FOUR, 20, target.device)
            torch.nn.utils.clip_grad_norm_(holding(gradients), threshold, norm_type, foreach=foreach)
            largest = max(float(one.abs().max()) for one in gradients)
            case.equal(f"largest element, max_norm {name}, type {norm_type}, foreach={foreach}", largest, expected)
            gradients = marked(FOUR, 20, target.device)
            torch.nn.utils.clip_grad_value_(holding(gradients), threshold, foreach)
            largest = max(float(one.abs().max()) for one in gradients)
            case.equal(f"largest element, clip_value {name}, foreach={foreach}", largest, expected)


# Non-finite norms


_OVERFLOWS = {
    "finite elements, each at the end of fp32": [3e38, 3e38, 3e38],
    "finite elements beyond 2**64": [2.0**100] * 4,
    "inf": [1.0, math.inf],
    "minus inf": [-math.inf, 2.0],
    "nan": [math.nan, 0.0],
    "nan and inf": [math.nan, -math.inf],
    "finite": [3.0, 4.0],
}


@contract("AMP-CLIP-035")
def test_the_total_norm_is_what_is_judged(case: Case, target: Target) -> None:
    refused, accepted = 0, 0
    for (name, values), norm_type, foreach in itertools.product(
        _OVERFLOWS.items(), (1.0, 2.0, 3.0, math.inf, -math.inf), implementations(target)
    ):
        what = f"{name}, type {norm_type}, foreach={foreach}"
        gradients = [torch.tensor(values, device=target.device), torch.ones(3, device=target.device)]
        before = [one.clone() for one in gradients]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type, False, foreach)
        calls = {
            "get_total_norm": functools.partial(torch.nn.utils.get_total_norm, gradients, norm_type, True, foreach),
            "clip_grad_norm_": functools.partial(
                torch.nn.utils.clip_grad_norm_, holding(gradients), math.inf, norm_type, True, foreach
            ),
        }
        for function, call in calls.items():
            if bool(norm.isfinite()):
                accepted += 1
                case.equal(f"norm returned by {function}, {what}", float(call()), float(norm))
            else:
                refused += 1
                case.raises(f"{function}, {what}", RuntimeError, call, names=(NONFINITE,))
                same = [
                    bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(gradients, before, strict=True)
                ]
                case.equal(f"unchanged gradients after {function}, {what}", same, [True, True])
    case.at_least("control: calls that raised", refused, 1)
    case.at_least("control: calls accepted", accepted, 1)
    infinite = [torch.tensor(_OVERFLOWS["inf"], device=target.device)]
    seen = torch.nn.utils.get_total_norm(infinite, -math.inf, error_if_nonfinite=True)
    case.equal("norm of type -inf of 1 and inf, with error_if_nonfinite", float(seen), 1.0)


@contract("AMP-CLIP-036")
def test_refusal_says_why(case: Case, target: Target) -> None:
    for norm_type, spelled in ((3, "3|3.0"), (2.0, "2|2.0"), ("inf", "inf")):
        names = (spelled, "error_if_nonfinite")
        bad = holding([torch.tensor([1.0, math.nan], device=target.device)])
        for foreach in implementations(target):
            call = functools.partial(torch.nn.utils.clip_grad_norm_, bad, 1.0, norm_type, True, foreach)
            case.raises(f"the error for NaN, type {norm_type!r}, foreach={foreach}", RuntimeError, call, names=names)


# Several devices


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor, on a fake device or a real one."""
    return tensor.numbers if isinstance(tensor, PaperTensor) else tensor


def numbers(parameters: Sequence[torch.nn.Parameter]) -> list[list[float]]:
    """Return the gradients as lists, on fake devices or real ones."""
    return [bare(parameter.grad).tolist() for parameter in parameters if parameter.grad is not None]


@contract("AMP-CLIP-047")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (2, 3, 1, 0)], ids=["first", "second", "cpu"])
def test_devices_on_paper(case: Case, order: tuple[int, ...]) -> None:
    """Use the CPU and two fake devices, whose operations reject operands on different devices as real ones do."""
    slopes = ([2.0**20] * 4, [-(2.0**20)] * 4, [2.0**20, 0.0] * 4, [0.0, 2.0**20] * 4)
    for (norm_type, exact), foreach in itertools.product(EXACT.items(), (None, False)):
        with PaperDevices() as devices:
            made = [devices.tensor(slopes[0], 0), devices.tensor(slopes[1], 1), torch.tensor(slopes[2])]
            made.append(devices.tensor(slopes[3], 1))
            gradients = [made[place] for place in order]
            parameters = holding(gradients)
            norm = torch.nn.utils.clip_grad_norm_(parameters, exact(20, 2) / 8, norm_type, foreach=foreach)
            what = f"type {norm_type}, foreach={foreach}"
            case.equal(f"device of the norm, {what}", norm.device, gradients[0].device)
            case.equal(
                f"devices from which a number was read, {what}", [d for d in devices.reads if d.type != "cpu"], []
            )
            case.at_most(f"copies between devices, {what}", len(devices.moves), 6)
            case.equal(f"norm, {what}", bare(norm).item(), exact(20, 2))
            kept = [parameter.grad is gradient for parameter, gradient in zip(parameters, gradients, strict=True)]
            case.equal(f"gradients that are the same tensors, {what}", kept, [True] * 4)
            expected = [[value / 8 for value in slopes[place]] for place in order]
            case.equal(f"clipped gradients, {what}", numbers(parameters), expected)
            again = torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, torch.tensor(4.0), foreach)
            case.equal(f"result of clip_grads_with_norm_, {what}", again, None)
            torch.nn.utils.clip_grad_value_(parameters, 1000.0, foreach)
            expected = [[math.copysign(min(abs(v), 1000.0), v) for v in slopes[place]] for place in order]
            case.equal(f"gradients clipped by value, {what}", numbers(parameters), expected)


def clips_over(case: Case, one: torch.device, other: torch.device) -> None:
    """Clip gradients with the first and the last on one device and the others on another, in both orders."""
    for (norm_type, exact), foreach in itertools.product(EXACT.items(), (None, False)):
        for first, then in ((one, other), (other, one)):
            devices = (first, then, then, first)
            gradients = [each.to(device) for each, device in zip(marked(FOUR, 20, first), devices, strict=True)]
            what = f"{first} and {then}, type {norm_type}, foreach={foreach}"
            norm = clips_exactly(case, what, gradients, norm_type, exact(20, 2), foreach)
            case.equal(f"device of the norm, {what}", norm.device, gradients[0].device)


@contract("AMP-CLIP-047", on="accelerator")
def test_accelerator_and_cpu(case: Case, target: Target) -> None:
    clips_over(case, target.device, torch.device("cpu"))


@contract("AMP-CLIP-047", on="accelerator")
@applies(one_device_only)
def test_two_devices(case: Case, target: Target) -> None:
    clips_over(case, target.device, second(target))


# By value


@contract("AMP-CLIP-062")
def test_values_of_several_dtypes(case: Case, target: Target) -> None:
    values = [0.0, 0.25, -0.5, 0.5, 0.75, -3.0, 1000.0, -1000.0]
    every = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    dtypes = [dtype for dtype in every if target.computes_in(dtype)]
    for order, foreach in itertools.product((dtypes, dtypes[::-1]), implementations(target)):
        gradients = [torch.tensor(values, dtype=dtype, device=target.device) for dtype in order]
        expected = clamped(gradients, 0.5)
        answer = torch.nn.utils.clip_grad_value_(holding(gradients), 0.5, foreach)
        case.equal(f"gradients that are not clamped, foreach={foreach}", wrong_places(gradients, expected), [])
        case.equal("result", answer, None)


@contract("AMP-CLIP-063")
def test_values_without_gradients(case: Case, target: Target) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3, device=target.device)) for _ in range(2)]
    case.equal(
        "control: clip_grad_norm_ without gradients", float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)), 0.0
    )
    for given in (parameters, []):
        answer: Any = torch.nn.utils.clip_grad_value_(given, 1.0)
        case.equal(f"result of clip_grad_value_ for {len(given)} parameters without gradients", answer, None)
    case.equal("gradients after the call", [parameter.grad for parameter in parameters], [None, None])


@contract("AMP-CLIP-097")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf], ids=str)
def test_clipping_beyond_the_range(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, norm_type: float
) -> None:
    # Gradients up to an eighth of the largest number: the sum of squares of 512 of them is beyond the type, and the
    # norm of float32 copies is not beyond float32.
    _check_large(case, target, amp_dtype, rng, norm_type, 12 if amp_dtype is torch.float16 else 60)


@contract("AMP-CLIP-097")
@pytest.mark.parametrize("norm_type", [2.0, 3.0], ids=str)
def test_clipping_where_powers_are_beyond_the_range(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, norm_type: float
) -> None:
    # The squares of fp16 gradients are beyond fp16, and their norm is not; bf16 has the range of fp32.
    _check_large(case, target, amp_dtype, rng, norm_type, 8)


def _check_large(
    case: Case, target: Target, dtype: torch.dtype, rng: torch.Generator, norm_type: float, exponent: int
) -> None:
    whole = ((1 + torch.rand(512, generator=rng)) * 2.0**exponent).to(dtype)
    splits = {"whole": [whole], "8 rows": whole.view(8, 64).unbind(0), "unlike parts": whole.split([1, 7, 100, 404])}
    exact = float(torch.linalg.vector_norm(whole.double(), norm_type))
    limits = torch.finfo(dtype)
    unit = limits.eps / 2
    # Roundings of the part's norm, of the norm of norms, of the coefficient and of the product; max_norm / norm is
    # computed as max_norm * (1 / norm), of which a subnormal factor is rounded to a multiple of the smallest number,
    # by smallest_normal * norm units of the factor at most.
    allowed = 4.0 + (limits.smallest_normal * exact if exact <= limits.max else 0.0)
    for (name, parts), foreach in itertools.product(splits.items(), implementations(target)):
        gradients = [part.clone().to(target.device) for part in parts]
        torch.nn.utils.clip_grad_norm_(holding(gradients), 64.0, norm_type, foreach=foreach)
        expected = [part.double() * (64.0 / exact) for part in parts]
        error = relative_distance(gradients, expected) / unit
        case.at_most(f"{name}, foreach={foreach}: error of the clipped gradients", error, allowed, "u")
