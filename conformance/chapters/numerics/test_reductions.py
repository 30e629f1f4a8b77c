"""Check error bounds of reductions, normalizations and losses, element by element."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target, is_foreign
from ...oracles.numbers.formats import FORMATS, FP32
from ...oracles.policy import lists as op_policy
from ...oracles.policy.declared import followed
from . import op_error
from .bounds_loss import LOSSES
from .bounds_normalization import NORMALIZATIONS, running_statistics
from .bounds_reduction import REDUCTIONS
from .long_rows import DEVIATIONS, drawn_length, far_from_zero
from .op_error import Op
from .special_points import LAYOUTS, layouts
from .support import by_loss, by_name, control, hold, is_listed, runs

# Ops whose fp32 results AMP-NUMERICS-023 speaks of.
KEPT_IN_FP32 = {
    name: table[name]
    for table, names in (
        (NORMALIZATIONS, ("softmax", "log_softmax", "layer_norm")),
        (REDUCTIONS, ("sum", "sum of all")),
    )
    for name in names
}


def _forward(case: Case, target: Target, rng: torch.Generator, op: Op) -> None:
    found = [one for _, some in runs(case, target, rng, op, backward=False) for one in some]
    hold(case, op.name, found)
    control(case, op, rng)


@contract("AMP-NUMERICS-060")
@by_name(REDUCTIONS)
def test_reductions_are_within_the_bound(case: Case, target: Target, rng: torch.Generator, op: Op) -> None:
    _forward(case, target, rng, op)


# A result of each element of a row, which one element decides.
OF_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "softmax of columns": lambda x: x.t().contiguous().softmax(0).t(),
    "softmin": lambda x: F.softmin(-x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-5),
    "group_norm": lambda x: F.group_norm(x.unsqueeze(1), 1).squeeze(1),
    "normalize": lambda x: F.normalize(x, dim=-1),
}
# Around vectors, blocks and what one block keeps of a row.
LENGTHS = (9, 33, 257, 513, 517, 1025, 1030, 2051)
ROUNDINGS_OF_A_ROW = 16.0  # of the softmax of columns, whose exponentials the CPU rounds to the type of the result


@contract("AMP-NUMERICS-062")
@pytest.mark.parametrize("name", OF_ROWS)
def test_large_element_anywhere(case: Case, target: Target, amp_dtype: torch.dtype, name: str) -> None:
    """Place the one large element of a row at its ends, in its middle and around its blocks."""
    case.require_arithmetic(target, amp_dtype)
    form, wrong = FORMATS[amp_dtype], {}
    for length in LENGTHS:
        places = sorted({place % length for place in (0, 1, 7, 8, length // 2, 256, 512, -9, -2, -1)})
        rows = torch.zeros(len(places), length)
        rows[torch.arange(len(places)), torch.tensor(places)] = 6
        exact = OF_ROWS[name](rows.double())
        seen = OF_ROWS[name](rows.to(target.device, amp_dtype)).cpu().double()
        far = ((seen - exact).abs() / exact.abs().clamp(min=form.smallest_normal)).amax(1) / form.unit_roundoff
        for place, distance in zip(places, far.tolist(), strict=True):
            if not distance <= ROUNDINGS_OF_A_ROW:
                wrong[f"{length} elements, the large one at {place}"] = distance
    case.equal("rows that are not those of float64, in roundings", wrong, {})


def _by_channels(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights of one and biases of zero, a pair for each row, as mixed precision has them: in float32."""
    wide = x.dtype if x.dtype is torch.float64 else torch.float32
    return x.new_ones(len(x), dtype=wide), x.new_zeros(len(x), dtype=wide)


def _batch_norm(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    images = x[None, :, :, None].contiguous(memory_format=memory_format)
    return F.batch_norm(images, None, None, *_by_channels(x), training=True)[0, :, :, 0]


# Statistics of each row, and what they make of its elements.
STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: OF_ROWS[name] for name in ("layer_norm", "rms_norm", "group_norm")},
    "group_norm of groups": lambda x: F.group_norm(x.repeat(1, 2)[None], len(x))[0, :, : x.shape[1]],
    "instance_norm": lambda x: F.instance_norm(x[None], None, None, *_by_channels(x))[0],
    "batch_norm": lambda x: F.batch_norm(x.t().contiguous(), None, None, *_by_channels(x), training=True).t(),
    "batch_norm of images": _batch_norm,
    "batch_norm of channels last": lambda x: _batch_norm(x, torch.channels_last),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "var": lambda x: x.var(-1, keepdim=True),
    "std": lambda x: x.std(-1, keepdim=True),
}
# Rows of whole vectors and blocks, which kernels take by another path, and rows between them.
LENGTHS_OF_STATISTICS = (64, 129, 512, 517, 640, 1024, 2051, 4096)
ROUNDINGS_OF_STATISTICS = 2.0


@contract("AMP-NUMERICS-062")
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_of_long_rows(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str
) -> None:
    """Rows far from zero, whose mean and variance would lose digits if they were added up in 16 bits."""
    case.require_arithmetic(target, amp_dtype)
    op, form = STATISTICS[name], FORMATS[amp_dtype]
    for length in (*LENGTHS_OF_STATISTICS, drawn_length(rng)):
        x = far_from_zero(length, amp_dtype, rng)
        given = x.to(target.device)
        case.require_call(target, f"compute {name} of {form.name}", functools.partial(op, given))
        exact = op(x.double())
        # In fp32, in any order: n kappa u of the mean and the variance, kappa being the mean in deviations.
        lost = length * (DEVIATIONS + 1) * FP32.unit_roundoff * (1 + exact.abs())
        allowed = form.unit_roundoff * exact.abs() + lost
        error = float(((op(given).cpu().double() - exact).abs() / allowed).max())
        case.at_most(f"{length} elements: worst error", error, ROUNDINGS_OF_STATISTICS, "of what fp32 allows")


@contract("AMP-NUMERICS-062")
@by_name(NORMALIZATIONS)
def test_normalisations_are_within_the_bound(case: Case, target: Target, rng: torch.Generator, op: Op) -> None:
    _forward(case, target, rng, op)


@contract("AMP-NUMERICS-062")
def test_running_statistics_of_a_batch_norm(case: Case, target: Target, rng: torch.Generator) -> None:
    op = NORMALIZATIONS["batch_norm of running statistics"]
    known = followed(target.device_type) in op_policy.BACKENDS
    for dtype in case.supported(target):
        for form in (FP32, FORMATS[dtype]) if known else (FP32,):
            image, weight, bias, mean, variance = op_error.operands(op, "plain", form, rng)
            running = mean.to(target.device, copy=True), variance.to(target.device, copy=True)
            with target.autocast(dtype):
                F.batch_norm(image.to(target.device), *running, weight.to(target.device), bias.to(target.device), True)
            for name, seen, expected in zip(
                ("mean", "variance"), running, running_statistics(image, mean, variance), strict=True
            ):
                what = f"running {name} of {form.name} images: worst error"
                case.at_most(what, op_error.error_ratio(seen, expected), 1.0, "of the bound")


@contract("AMP-NUMERICS-064")
@by_loss()
def test_losses_are_within_the_bound(case: Case, target: Target, rng: torch.Generator, loss: str) -> None:
    for op in (op for name, op in LOSSES.items() if name.split(" ")[0] == loss):
        found = [one for _, some in runs(case, target, rng, op, backward=False, is_loss=True) for one in some]
        hold(case, op.name, found)
        if "(none" in op.name:
            control(case, op, rng)
    case.note("programs of this loss", sum(name.split(" ")[0] == loss for name in LOSSES))


@contract("AMP-NUMERICS-023")
@by_name(KEPT_IN_FP32)
def test_fp32_operands_stay_fp32(case: Case, target: Target, rng: torch.Generator, op: Op) -> None:
    found = []
    for dtype in case.supported(target):
        for kind in op.kinds:
            found += op_error.measure(
                op, kind, FP32, rng, target.device, functools.partial(target.autocast, dtype), backward=False
            )
    hold(case, op.name, found)
    control(case, op, rng)


@contract("AMP-NUMERICS-024")
@by_name({"prod of all": REDUCTIONS["prod of all"]})
def test_products_of_sixteen_bit_numbers_are_fp32(case: Case, target: Target, rng: torch.Generator, op: Op) -> None:
    if not is_listed(op, target):
        case.unsupported(f"prod is not on the fp32 list of {target.device_type}")
    for dtype in case.supported(target):
        form = FORMATS[dtype]
        found = op_error.measure(op, "off_grid", form, rng, target.device, functools.partial(target.autocast, dtype))
        hold(case, f"product of 74 numbers of {form.name}", found)


SPECIAL = (
    "sum",
    "sum of all",
    "mean",
    "norm",
    "logsumexp",
    "cumsum",
    "softmax",
    "log_softmax",
    "layer_norm",
    "group_norm",
    "batch_norm",
    "instance_norm",
    "rms_norm",
)


def _computes(case: Case, target: Target, op: Op, layout: str, first: torch.Tensor, *rest: torch.Tensor) -> bool:
    """Whether the device computes the op in a layout; a third party's may not, outside of regions either."""
    if layout != "contiguous" and is_foreign(target.device_type):
        try:
            op.call(LAYOUTS[layout](first.to(target.device)), *(tensor.to(target.device) for tensor in rest))
        except (RuntimeError, NotImplementedError) as error:
            case.note(f"{op.name}, {layout}: refused", str(error).splitlines()[0][:80])
            return False
    return True


@contract("AMP-NUMERICS-069")
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
def test_special_values_survive(case: Case, target: Target, rng: torch.Generator, special: float) -> None:
    for name in SPECIAL:
        op = {**REDUCTIONS, **NORMALIZATIONS}[name]
        first, *rest = op_error.operands(op, "plain", FP32, rng)
        # In the last element of the last row, where a kernel's tail is.
        first.flatten()[-1] = special
        expected = op.call(*(tensor.double() for tensor in (first, *rest)))
        unlike: dict[str, list[str]] = {}
        laid_out = [layout for layout in layouts(first) if _computes(case, target, op, layout, first, *rest)]
        for dtype, layout in itertools.product(case.supported(target), laid_out):
            laid = LAYOUTS[layout](first.to(target.device))
            with target.autocast(dtype):
                seen = op.call(laid, *(tensor.to(target.device) for tensor in rest))
            for what, test in (("NaN", torch.isnan), ("infinite", torch.isinf)):
                same = torch.equal(test(seen).cpu(), test(expected))
                if layout == "contiguous":
                    case.equal(f"{name}: elements that are {what}", int(test(seen).sum()), int(test(expected).sum()))
                    case.true(f"{name}: the same elements are {what}", same, "others")
                elif not same:
                    unlike.setdefault(layout, []).append(f"{what}, {FORMATS[dtype].name}")
        case.equal(f"{name}: layouts in which other elements are", unlike, {})
