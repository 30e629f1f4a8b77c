"""Check error bounds of reductions, normalizations and losses, element by element."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from ...harness.check import Case, contract
from ...harness.targets import Target, is_foreign
from ...oracles.numbers.formats import FORMATS, FP32
from ...oracles.policy import lists as op_policy
from ...oracles.policy.declared import followed
from . import op_error
from .bounds_loss import LOSSES
from .bounds_normalization import NORMALIZATIONS, running_statistics
from .bounds_reduction import REDUCTIONS
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
