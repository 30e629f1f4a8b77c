"""Numerics of reductions, normalisations and losses: derived bounds on the error of every element that comes out."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS, FP32, Format
from ...oracles.policy import lists as op_policy
from . import op_error
from .bounds_loss import LOSSES
from .bounds_normalization import NORMALISATIONS, running_statistics
from .bounds_reduction import REDUCTIONS
from .op_error import Measured, Op

# Ops whose fp32 results AMP-NUMERICS-023 speaks of.
KEPT_IN_FP32 = {
    name: table[name]
    for table, names in (
        (NORMALISATIONS, ("softmax", "log_softmax", "layer_norm")),
        (REDUCTIONS, ("sum", "sum of all")),
    )
    for name in names
}

# A control must be out of bounds by more than the slack between a bound's first order and the truth.
TELLING = 2.0


def slug(name: str) -> str:
    """A name as part of a case id."""
    return name.replace(" ", "_")


def by_name(table: dict[str, Op]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("op", list(table.values()), ids=map(slug, table))


def by_loss() -> pytest.MarkDecorator:
    """One case for each loss function, whatever its options."""
    return pytest.mark.parametrize("loss", list(dict.fromkeys(name.split(" ")[0] for name in LOSSES)))


def dtypes(case: Case, target: Target) -> list[torch.dtype]:
    """The amp dtypes that the run judges and the target has; without any the case is unsupported."""
    found = [dtype for dtype in case.amp_dtypes if target.supports(dtype)]
    if not found:
        case.unsupported("the device has none of the amp dtypes of this run")
    return found


def is_listed(op: Op, target: Target) -> bool:
    """Whether autocast turns a 16-bit input of the op into an fp32 result on this target."""
    return any(one.name == op.policy for one in op_policy.listings(target.device_type, "fp32"))


def formats(op: Op, target: Target, amp_dtype: torch.dtype, *, is_loss: bool = False) -> list[Format]:
    """Return the types of operands that something is promised for.

    fp32 everywhere. 16 bits where the op is listed as fp32, and where the device is known to keep the statistics of a
    16-bit tensor in fp32 without a list; neither is known of third parties' devices.
    """
    known = target.device_type in op_policy.BACKENDS and not is_loss and op.policy != "rms_norm"
    return [FP32, FORMATS[amp_dtype]] if known or is_listed(op, target) else [FP32]


def runs(
    case: Case, target: Target, rng: torch.Generator, op: Op, *, backward: bool, is_loss: bool = False
) -> Iterator[tuple[Format, list[Measured]]]:
    """Measure the op on the data of this depth, in regions of every amp dtype; yield the type of the operands too."""
    kinds = op.kinds[: case.samples(quick=1 if is_loss else 2, standard=9, full=9)]
    for dtype in dtypes(case, target):
        for form in formats(op, target, dtype, is_loss=is_loss):
            for kind in kinds:
                for _ in range(case.samples(quick=1, standard=3, full=25)):
                    region = functools.partial(target.autocast, dtype)
                    found = op_error.measure(op, kind, form, rng, target.device, region, backward=backward)
                    _type_of_result(case, target, op, form, found[0])
                    yield form, found


def _type_of_result(case: Case, target: Target, op: Op, form: Format, result: Measured) -> None:
    if form is FP32 or is_listed(op, target):
        case.equal(f"{result.what}: dtype", result.dtype, torch.float32)


def hold(case: Case, what: str, found: Sequence[Measured]) -> None:
    """Hold the worst of everything measured against its bounds."""
    for figure, name in (
        (lambda one: one.error, "error of an element"),
        (lambda one: one.gain, "systematic scale error"),
    ):
        ratio, where = op_error.worst(found, figure)
        case.at_most(f"{what}: worst {name} of {len(found)} tensors ({where})", ratio, 1.0, "of the bound")


def control(case: Case, op: Op, rng: torch.Generator) -> None:
    """Lowering the operands of an fp32 op to 16 bits on the way is out of bounds."""
    for dtype in case.amp_dtypes:
        ratio = max(op_error.lowered(op, kind, FORMATS[dtype], rng) for kind in op.kinds)
        case.at_least(f"control: operands lowered to {FORMATS[dtype].name}, error", ratio, TELLING, "of the bound")


def _forward(case: Case, target: Target, rng: torch.Generator, op: Op) -> None:
    found = [one for _, some in runs(case, target, rng, op, backward=False) for one in some]
    hold(case, op.name, found)
    control(case, op, rng)


@contract("AMP-NUMERICS-060")
@by_name(REDUCTIONS)
def test_reductions_are_within_the_bound(case: Case, target: Target, rng: torch.Generator, op: Op) -> None:
    _forward(case, target, rng, op)


@contract("AMP-NUMERICS-062")
@by_name(NORMALISATIONS)
def test_normalisations_are_within_the_bound(case: Case, target: Target, rng: torch.Generator, op: Op) -> None:
    _forward(case, target, rng, op)


@contract("AMP-NUMERICS-062")
def test_running_statistics_of_a_batch_norm(case: Case, target: Target, rng: torch.Generator) -> None:
    op = NORMALISATIONS["batch_norm of running statistics"]
    known = target.device_type in op_policy.BACKENDS
    for dtype in dtypes(case, target):
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
    for dtype in dtypes(case, target):
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
        case.note(f"prod on {target.device_type}", "not on the fp32 list")
        return
    for dtype in dtypes(case, target):
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
)


@contract("AMP-NUMERICS-069")
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
def test_special_values_survive(case: Case, target: Target, rng: torch.Generator, special: float) -> None:
    for name in SPECIAL:
        op = {**REDUCTIONS, **NORMALISATIONS}[name]
        first, *rest = op_error.operands(op, "plain", FP32, rng)
        # In the last element of the last row, where a kernel's tail is.
        first.flatten()[-1] = special
        expected = op.call(*(tensor.double() for tensor in (first, *rest)))
        for dtype in dtypes(case, target):
            with target.autocast(dtype):
                seen = op.call(*(tensor.to(target.device) for tensor in (first, *rest)))
            for what, test in (("NaN", torch.isnan), ("infinite", torch.isinf)):
                case.equal(f"{name}: elements that are {what}", int(test(seen).sum()), int(test(expected).sum()))
                same = torch.equal(test(seen).cpu(), test(expected))
                case.true(f"{name}: the same elements are {what}", same, "others")
