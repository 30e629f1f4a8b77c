"""Check products and calls on rows of every length around the widths of vectors and blocks, in 16 bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from .channel_calls import CHANNEL_CALLS, images
from .channel_calls import LAYOUTS as IMAGE_LAYOUTS
from .drawn_ops import Draws
from .row_calls import FAMILIES, LAYOUTS, Kind, answers, laid, rows
from .support import too_far

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
LENGTHS = range(1, 131)
COUNTS = range(1, 67)
CHANNELS = range(1, 67)
POWERS = range(7, 14)  # of two, between which a long row ends
SHORT = 17
# Of a left and a right matrix and of a bias; what none has is 0.
PRODUCTS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mm": lambda left, right, bias: left @ right + 0 * bias,
    "addmm": lambda left, right, bias: torch.addmm(bias, left, right),
    "linear": lambda left, right, bias: functional.linear(left, right.t(), bias),
    "bmm": lambda left, right, bias: torch.baddbmm(bias, left[None], right[None])[0],
    "mv": lambda left, right, bias: torch.stack([left @ one for one in right.unbind(1)], 1) + bias,
}
HEIGHTS, WIDTHS = (1, 2, 5), (1, 3, 17)
LONG = (515, 1031, 2049)


@contract("AMP-NUMERICS-142")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_length(case: Case, target: Target, amp_dtype: torch.dtype, family: str) -> None:
    """Rows of each length, one to three of them; and each number of rows of one length."""
    shapes = [(1 + (number + case.seed) % 3, length) for number, length in enumerate(LENGTHS)]
    shapes += [(count, SHORT) for count in COUNTS]
    draws = Draws(f"{family} {case.seed}")
    made = [(rows(draws.generator, *shape), draws.one(LAYOUTS)) for shape in shapes]
    _judge(case, target, amp_dtype, FAMILIES[family], made, LAYOUTS)


@contract("AMP-NUMERICS-142")
@pytest.mark.parametrize("family", FAMILIES)
def test_long_lengths(case: Case, target: Target, amp_dtype: torch.dtype, family: str) -> None:
    """Rows of a drawn length between each two powers of two."""
    draws = Draws(f"long {family} {case.seed}")
    made = []
    for number, power in enumerate(POWERS):
        length = 2**power + 1 + int(torch.randint(2**power - 1, (), generator=draws.generator))
        made.append((rows(draws.generator, 1 + (number + case.seed) % 3, length), draws.one(LAYOUTS)))
    _judge(case, target, amp_dtype, FAMILIES[family], made, LAYOUTS, quick=3)


@contract("AMP-NUMERICS-142")
def test_every_number_of_channels(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    draws = Draws(f"channels {case.seed}")
    made = [(images(draws.generator, number), draws.one(IMAGE_LAYOUTS)) for number in CHANNELS]
    _judge(case, target, amp_dtype, CHANNEL_CALLS, made, IMAGE_LAYOUTS)


def _judge(
    case: Case,
    target: Target,
    amp_dtype: torch.dtype,
    kinds: Mapping[str, Kind],
    made: Sequence[tuple[tuple[Tensor, ...], str]],
    layouts: Sequence[str],
    quick: int = 5,
) -> None:
    """Judge each call on what was made, at level quick on one of so many of them."""
    step, judged = case.samples(quick=quick, standard=1, full=1), 0
    for turn, (name, kind) in enumerate(kinds.items()):
        wrong: dict[str, str] = {}
        for given, layout in made[(turn + case.seed) % step :: step]:
            for one in layouts if case.level == "full" else [layout]:
                try:
                    with full_precision(target.device_type):
                        seen = _answers(kind, given, one, target.device, amp_dtype)
                except NotImplementedError as error:
                    case.note(name, f"raises: {str(error).splitlines()[0][:80]}")
                    break
                expected = _answers(kind, given, "as given", torch.device("cpu"), torch.float64)
                judged += 1
                if found := _far(seen, expected, amp_dtype, given[0].shape[1] >= kind.from_length):
                    wrong[f"{list(given[0].shape)}, {one}"] = found
        case.equal(f"{name} of {amp_dtype}: shapes of which a result or gradient is far from float64's", wrong, {})
    case.enough(target, "calls judged", judged)


def _answers(
    kind: Kind, given: tuple[Tensor, ...], layout: str, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    x, weight, incoming = (one.to(device, dtype) for one in given)
    return [one.cpu().double() for one in answers(kind.call, laid(x, layout), laid(weight, "as given"), incoming)]


def _far(seen: list[Tensor], expected: list[Tensor], dtype: torch.dtype, with_gradients: bool) -> str:
    """Return what is far from float64's, and by how much."""
    for number, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        if number and not with_gradients:
            break
        what = f"gradient {number}" if number else "result"
        if ours.shape != theirs.shape:
            return f"{what}: {list(ours.shape)}, in float64 {list(theirs.shape)}"
        if far := too_far(ours, theirs, dtype, gradient=bool(number)):
            return f"{what}: {far}"
    return ""


@contract("AMP-NUMERICS-040")
@pytest.mark.parametrize("product", PRODUCTS)
def test_every_inner_size(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, product: str
) -> None:
    """Of -1, 0 and 1, so that every sum is a number of both types, for each pair of layouts."""
    step = case.samples(quick=3, standard=1, full=1)
    wrong: dict[str, str] = {}
    for inner in LENGTHS[case.seed % step :: step]:
        for height, width in itertools.product(HEIGHTS, WIDTHS):
            sizes = ((height, inner), (inner, width), (width,))
            left, right, bias = (torch.randint(-1, 2, size, generator=rng).double() for size in sizes)
            operands = [one.to(target.device, amp_dtype) for one in (left, right)]
            laid_out = [(one, one.t().contiguous().t()) for one in operands]
            seen = []
            for pair in itertools.product(*laid_out):
                with full_precision(target.device_type), target.autocast(amp_dtype):
                    seen.append(PRODUCTS[product](pair[0], pair[1], bias.to(target.device, amp_dtype)))
            exact = (left @ right + bias * (product != "mm")).to(amp_dtype)
            for number, one in enumerate(torch.stack(seen).cpu()):
                if not torch.equal(one, exact):
                    wrong[f"{height} x {inner} times {inner} x {width}, layouts {number}"] = _beside(one, exact)
    case.equal(f"{product}: products that are not exact", wrong, {})


@contract("AMP-NUMERICS-040")
def test_expanded_operands(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    """Operands without an element of their own for each place, as is the gradient that a sum passes on."""
    wrong: dict[str, str] = {}
    for inner, (name, call) in itertools.product(LONG, PRODUCTS.items()):
        left, right = (torch.randint(0, 8, size, generator=rng).double() for size in ((3, inner), (inner, 5)))
        expanded = {
            "one column": (left[:, :1].expand(-1, inner), right),
            "one row": (left[:1].expand(3, -1), right),
            "one column of the right": (left, right[:, :1].expand(-1, 5)),
            "one row of the right": (left, right[:1].expand(inner, -1)),
            "one number": (left[:1, :1].expand(3, inner), right),
        }
        for what, pair in expanded.items():
            ours = []
            for one in pair:
                stored = one[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in one.stride())]
                ours.append(stored.to(target.device, amp_dtype).expand(one.shape))
            with full_precision(target.device_type), target.autocast(amp_dtype):
                seen = call(*ours, torch.zeros(5, device=target.device, dtype=amp_dtype)).cpu()
            exact = (pair[0] @ pair[1]).to(amp_dtype)
            if not torch.equal(seen, exact):
                wrong[f"{name}, {what}, inner size {inner}"] = _beside(seen, exact)
        weight = torch.zeros(5, 3, device=target.device, requires_grad=True)
        with full_precision(target.device_type):
            with target.autocast(amp_dtype):
                result = functional.linear(left.t().to(target.device, amp_dtype), weight)
            result.sum().backward()
        assert weight.grad is not None
        exact = left.sum(1).expand(5, 3).to(amp_dtype).float()
        if not torch.equal(seen := weight.grad.cpu(), exact):
            wrong[f"gradient of a weight from a sum, {inner} rows"] = _beside(seen, exact)
    case.equal("products of expanded operands that are not exact", wrong, {})


def _beside(seen: Tensor, exact: Tensor) -> str:
    return f"{seen.flatten()[:3].tolist()}, exact {exact.flatten()[:3].tolist()}"
