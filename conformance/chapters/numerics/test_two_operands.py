"""Check functions of two 16-bit numbers over pairs of numbers of every size, and scans over long rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS, OTHER
from .bit_patterns import all_patterns
from .support import largest_share, slug
from .value_error import LAYOUTS
from .value_ops import named

# A loss rounds a difference, its square and a half; a quotient of 500 is rounded by a half before it is rounded down.
ROUNDINGS = 8

Binary = Callable[[Tensor, Tensor], Tensor]
_PROMOTED = (
    *("add", "sub", "mul", "div", "remainder", "fmod", "floor_divide", "pow", "atan2", "hypot", "copysign"),
    *("maximum", "minimum", "fmax", "fmin", "logaddexp", "logaddexp2", "xlogy", "nextafter"),
)


def _half(x: Tensor) -> Tensor:
    return torch.full_like(x, 0.5)


OF_PAIRS: dict[str, dict[str, Binary]] = {
    "arithmetic": {
        "add": torch.add,
        "sub": torch.sub,
        "add with alpha": lambda x, y: torch.add(x, y, alpha=-0.5),
        "rsub with alpha": lambda x, y: torch.rsub(x, y, alpha=0.5),
        "mul": torch.mul,
        "div": torch.div,
        "a number over it": lambda x, y: 3.0 / y,
        "addcmul": lambda x, y: torch.addcmul(x, y, _half(y), value=0.25),
        "addcdiv": lambda x, y: torch.addcdiv(x, y, _half(y), value=-2.0),
    },
    "remainders": {
        "remainder": torch.remainder,
        "remainder by a number": lambda x, y: x % 3.0,
        "remainder of a number": lambda x, y: 3.0 % y,
        "fmod": torch.fmod,
        "fmod by a number": lambda x, y: torch.fmod(x, -0.75),
        "floor_divide": torch.floor_divide,
        "div, rounded down": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    },
    "between": {
        "lerp by a quarter": lambda x, y: torch.lerp(x, y, 0.25),
        "lerp by three quarters": lambda x, y: torch.lerp(x, y, 0.75),
        "lerp by a tensor": lambda x, y: torch.lerp(x, y, _half(y)),
        "lerp in place": lambda x, y: x.clone().lerp_(y, 0.25),
        "lerp of lists": lambda x, y: torch._foreach_lerp([x], [y], 0.25)[0],
        "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
        "l1_loss": lambda x, y: F.l1_loss(x, y, reduction="none"),
        "huber_loss": lambda x, y: F.huber_loss(x, y, reduction="none"),
        "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    },
    "functions": {
        "hypot": torch.hypot,
        "atan2": torch.atan2,
        "pow": lambda x, y: x.abs().pow(y),
        "xlogy": lambda x, y: torch.xlogy(x, y.abs()),
        "xlog1py": lambda x, y: torch.special.xlog1py(x, y.abs()),
        "logaddexp": torch.logaddexp,
        "logaddexp2": torch.logaddexp2,
        "copysign": torch.copysign,
        "ldexp": lambda x, y: torch.ldexp(x, torch.frexp(y).exponent - torch.frexp(x).exponent),
    },
    "selections": {
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "fmax": torch.fmax,
        "fmin": torch.fmin,
        "where": lambda x, y: torch.where(x < y, x, -y),
        "less": lambda x, y: (x < y).to(x.dtype),
        "at least": lambda x, y: (x >= y).to(x.dtype),
        "less than a number": lambda x, y: (x < 0.3).to(x.dtype),
        "equality": lambda x, y: (x == y).to(x.dtype),
        "heaviside": torch.heaviside,
        "clamp": lambda x, y: x.clamp(max=y),
    },
}


@contract("AMP-NUMERICS-128", on=("cpu", "cuda", "xpu"))
@pytest.mark.parametrize("family", OF_PAIRS)
def test_pairs(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, family: str) -> None:
    patterns = all_patterns(FORMATS[amp_dtype])
    patterns = patterns[patterns.isfinite()]
    count = case.samples(quick=119, standard=301, full=1001)
    drawn = patterns[torch.randperm(len(patterns), generator=rng)[:count]]
    x, y = (side.flatten() for side in torch.meshgrid(drawn, drawn, indexing="ij"))
    given = x.to(target.device), y.to(target.device)
    for name, function in OF_PAIRS[family].items():
        exact = function(x.double(), y.double())
        # A number that float64 rounds as well, such as 0.3, is that of the type.
        in_float32 = function(*(side.float() for side in given)).cpu()
        try:
            seen = function(*given)
        except NotImplementedError as error:
            case.note(f"{name}: no kernel for {amp_dtype}", str(error).splitlines()[0][:80])
            continue
        case.equal(f"{name}: dtype", seen.dtype, amp_dtype)
        share, at = _error(seen.cpu().double(), exact, in_float32, amp_dtype)
        pair = f"{float(x[at]):g} and {float(y[at]):g}"
        case.at_most(f"{name}: error, at {pair}", share, ROUNDINGS, "roundings")
        unlike = _unlike(seen, function(*map(LAYOUTS["every second"], given)))
        found = [(float(x[at]), float(y[at])) for at in unlike.nonzero().flatten()[:3]]
        case.equal(f"{name}: pairs whose result another layout changes", found, [])


def _unlike(seen: Tensor, elsewhere: Tensor) -> Tensor:
    """Return where two results are further apart than two roundings, the least number taken for one."""
    form = torch.finfo(seen.dtype)
    beyond = form.max * (1 + form.eps / 2)  # an infinity is next to the largest number
    one, other = (result.cpu().double().nan_to_num(torch.nan, beyond, -beyond) for result in (seen, elsewhere))
    near = form.eps * one.abs().maximum(other.abs()) + 2 * form.tiny * form.eps
    return ((one - other).abs() > near) | (one.isnan() != other.isnan())


def _error(seen: Tensor, exact: Tensor, in_float32: Tensor, dtype: torch.dtype) -> tuple[float, int]:
    """Return the largest error in roundings of the exact number, and where it is.

    What is beyond half of the range, or is lost in float32 as well, whose range is bfloat16's, says nothing.
    """
    unit, most = torch.finfo(dtype).eps / 2, torch.finfo(dtype).max
    least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    judged = exact.isfinite() & (exact.abs() < most / 2) & in_float32.isfinite()
    rounding = unit * exact.abs() + least
    judged &= (in_float32.double() - exact).abs() <= rounding
    return largest_share(seen, exact, rounding, judged)


# Each gives x + 1.5 y. What is multiplied has a digit more than the type, or is beyond its range.
MULTIPLIED: dict[str, Binary] = {
    "add": lambda x, y: torch.add(x, y, alpha=1.5),
    "add in place": lambda x, y: x.clone().add_(y, alpha=1.5),
    "add of a list": lambda x, y: torch._foreach_add([x], [y], alpha=1.5)[0],
    "sub": lambda x, y: torch.sub(x, y, alpha=-1.5),
    "rsub": lambda x, y: torch.rsub(y, x, alpha=-1.5),
    "addcmul": lambda x, y: torch.addcmul(x, y, _half(y), value=3.0),
    "addcmul of a list": lambda x, y: torch._foreach_addcmul([x], [y], [_half(y)], 3.0)[0],
    "addcdiv": lambda x, y: torch.addcdiv(x, y, 4 * _half(y), value=3.0),
    "addcdiv of a list": lambda x, y: torch._foreach_addcdiv([x], [y], [4 * _half(y)], 3.0)[0],
}


@contract("AMP-NUMERICS-128", on=("cpu", "cuda", "xpu"))
@pytest.mark.parametrize("function", MULTIPLIED, ids=slug)
def test_products_that_cancel(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, function: str
) -> None:
    case.require_subnormals(target, amp_dtype)
    patterns, most = all_patterns(FORMATS[amp_dtype]), torch.finfo(amp_dtype).max
    factors = patterns[(patterns.abs() > 2**10 * torch.finfo(amp_dtype).tiny) & (patterns.abs() < most / 4)]
    factors = factors[torch.randperm(len(factors), generator=rng)[:1024]]
    operands = {"a product that is all but cancelled": ((-1.5 * factors.double()).to(amp_dtype), factors)}
    if amp_dtype is torch.float16:  # the range of bfloat16 is that of float32
        large = patterns[(patterns.abs() > most / 1.5) & patterns.isfinite()]
        large = large[: len(large) // 64 * 64]  # whole vectors, where a kernel has them
        operands["a product beyond the range"] = -large, large
    # Without them a CPU computes contiguous tensors, too, one element at a time.
    plain = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX")  # as torch 2.6 calls it
    vectors = ", without vector instructions" if plain else ""
    for kind, (x, y) in operands.items():
        exact = x.double() + 1.5 * y.double()
        for layout in ("contiguous", "every second"):
            seen = MULTIPLIED[function](*(LAYOUTS[layout](side.to(target.device)) for side in (x, y))).cpu().double()
            wrong = [(float(y[at]), float(seen[at])) for at in (seen != exact).nonzero().flatten()[:3]]
            case.equal(f"{kind}, {layout}{vectors}: y and another result than x + 1.5 y", wrong, [])


@contract("AMP-NUMERICS-128", on=("cpu", "cuda", "xpu"))
def test_neighbours(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    """nextafter gives the next number of the type, over its zeros and its least numbers too."""
    patterns = all_patterns(FORMATS[amp_dtype])
    finite = patterns[patterns.isfinite() & (patterns != 0)].sort().values
    finite = torch.cat([finite[finite < 0], finite.new_zeros(1), finite[finite > 0]])
    places = torch.randint(1, len(finite) - 1, (1000,), generator=rng)
    middle = len(finite) // 2
    places = torch.cat([places, torch.tensor([middle - 1, middle, middle + 1])])
    start = finite[places].to(target.device)
    for name, step in (("up", 1), ("down", -1)):
        beyond = torch.full_like(start, step * float("inf"))
        try:
            seen = torch.nextafter(start, beyond)
        except NotImplementedError as error:
            case.unsupported(f"{target.name}: {str(error).splitlines()[0][:80]}")
        wrong = seen.cpu() != finite[places + step]
        case.equal(f"nextafter {name}: numbers that are not the next", int(wrong.sum()), 0)


SCANS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "logcumsumexp": torch.logcumsumexp,
    "cumsum in place": lambda x, dim: x.clone().cumsum_(dim),
    "cumprod in place": lambda x, dim: x.clone().cumprod_(dim),
}


# What torch's page on types promotes to the wider one of the two.
PROMOTING: dict[str, Binary] = {
    **{name: named(name) for name in _PROMOTED},
    "rsub": torch.rsub,
    "div, rounded": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "where": lambda x, y: torch.where(x > y, x, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "clamp": lambda x, y: torch.clamp(x, y, y + 1),
    "clamp_min": lambda x, y: x.clamp_min(y),
    "clamp_max": lambda x, y: x.clamp_max(y),
    "operators": lambda x, y: (x + y) * y - x / y,
    "l1_loss": lambda x, y: F.l1_loss(x, y, reduction="none"),
    "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
}


@contract("AMP-NUMERICS-148")
@pytest.mark.parametrize("other", ["float32", "float64", "the other one", "int64"])
@pytest.mark.parametrize("order", ["first", "second"])
def test_operands_of_two_types(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, order: str, other: str
) -> None:
    """The numbers are quarters from 1/4 to 2, or whole, exact in each type; outside of a region."""
    others = {
        "the other one": OTHER[amp_dtype],
        "int64": torch.int64,
        "float32": torch.float32,
        "float64": torch.double,
    }
    case.require_arithmetic(target, amp_dtype, others[other])
    low = (torch.randint(1, 9, (6, 8), generator=rng) / 4).to(target.device, amp_dtype)
    high = torch.randint(1, 9, (6, 8), generator=rng)
    high = (high if other == "int64" else high / 4).to(target.device, others[other])
    given = (low, high) if order == "first" else (high, low)
    wider = torch.promote_types(amp_dtype, others[other])
    wrong: dict[str, str] = {}
    for name, function in PROMOTING.items():
        seen, expected = function(*given), function(*(one.to(wider) for one in given))
        if seen.dtype != expected.dtype:
            wrong[name] = f"{seen.dtype}, not {expected.dtype}"
        elif not torch.allclose(seen.cpu().double(), expected.cpu().double(), rtol=torch.finfo(wider).eps, atol=0):
            wrong[name] = "another value"
    case.equal("functions of two types that are not those of the wider one", wrong, {})


@contract("AMP-NUMERICS-129")
@pytest.mark.parametrize("scan", SCANS)
def test_scans(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, scan: str) -> None:
    factors = (torch.rand((1200, 3), generator=rng) * 0.125 + 0.9375).to(amp_dtype)
    forms = {
        "of rows": (factors.t().contiguous(), 1),
        "of columns": (factors, 0),
        "of rows of a view": (factors.t(), 1),
        "of a vector": (factors[:, 0].contiguous(), 0),
    }
    for name, (values, dim) in forms.items():
        exact = SCANS[scan](values.double(), dim)
        seen = SCANS[scan](values.to(target.device), dim)
        case.equal(f"{name}: dtype", seen.dtype, amp_dtype)
        error = (seen.cpu().double() - exact).abs() / (FORMATS[amp_dtype].unit_roundoff * exact.abs())
        case.at_most(f"{name}: largest error", float(error.max()), 2.0, "roundings")
