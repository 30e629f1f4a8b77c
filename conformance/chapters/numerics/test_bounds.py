"""Check error bounds of products, convolutions and attention at sizes and on data that distinguish kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers.formats import FORMATS, FP32
from . import op_error
from .bounds_convolution import (
    ATTENTIONS,
    CONVOLUTIONS,
    Attention,
    Convolution,
    measure_attention,
    measure_convolution,
    measure_one_rounding,
)
from .bounds_matmul import KINDS, LONGER, PRODUCTS, SHAPES, Product, measure_product
from .op_error import Measured
from .support import by_kernel, compare, hold, keeps_subnormals, slug

# The cases that distinguish kernels in the least time: at quick only these, on four ops.
_EVERYWHERE = (("odd", "wide"), ("odd", "subnormal"), ("tiles", "plain"))
TELLING = (("long", "grid"), ("long", "grid_same_sign"), *_EVERYWHERE)
TELLING_BACKWARD = (("tall", "grid_same_sign"), ("tall", "grid"), *_EVERYWHERE)
QUICK = ("mm", "linear", "addmm", "bmm")
LAYOUTS = ("linear of a stored weight", "bmm of a transposed right", "bmm of a transposed left")

# Kernels of backward products are those of mm and bmm.
QUICK_BACKWARD = ("linear", "bmm")
QUICK_CONVOLUTIONS = ("channels last", "not contiguous", "many channels", "grouped", "one dimension", "transposed")


def _by_name(what: str, table: Mapping[str, object], quick: Sequence[str]) -> pytest.MarkDecorator:
    """Return one case for each row of the table, those not named `quick` from standard on."""
    rows = [
        pytest.param(row, id=slug(name)) if name in quick else deep("standard", row, id=slug(name))
        for name, row in table.items()
    ]
    return pytest.mark.parametrize(what, rows)


by_product = _by_name("product", PRODUCTS, (*QUICK, *LAYOUTS))
by_backward_product = _by_name("product", PRODUCTS, QUICK_BACKWARD)
by_convolution = _by_name("convolution", CONVOLUTIONS, QUICK_CONVOLUTIONS)
by_attention = pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=map(slug, ATTENTIONS))


def _plan(case: Case, product: Product, *, backward: bool) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield kinds of data and shapes of this depth: TELLING ones, two kinds a shape at standard, all at full."""
    yield from ((kind, SHAPES[shape]) for shape, kind in (TELLING_BACKWARD if backward else TELLING))
    if case.level == "quick":
        return
    shapes = {**SHAPES, **LONGER} if product.name in QUICK else SHAPES
    for _ in range(case.samples(quick=0, standard=1, full=6)):
        for place, shape in enumerate(shapes.values()):
            kinds = KINDS if case.level == "full" else (KINDS[place % len(KINDS)], KINDS[(place + 3) % len(KINDS)])
            yield from ((kind, shape) for kind in kinds)


def _rounds_before_a_bias(target: Target) -> bool:
    """Return whether kernels may round a sum of products before they add a bias, which AMP-NUMERICS-068 judges.

    cuBLAS does on Hopper (nvjet kernels that add C) and in the reduction of split-K products with a bias epilogue;
    torch adds the bias of a convolution to what cuDNN has rounded.
    """
    return target.device_type != "cpu"


def _products(case: Case, target: Target, rng: torch.Generator, product: Product, *, backward: bool) -> list[Measured]:
    found = []
    with full_precision(target.device_type):
        for dtype in case.supported(target):
            for kind, shape in _plan(case, product, backward=backward):
                if kind == "subnormal" and not keeps_subnormals(target, dtype):
                    continue
                region = functools.partial(target.autocast, dtype)
                form = FORMATS[dtype]
                found += measure_product(
                    product,
                    kind,
                    shape,
                    form,
                    rng,
                    target.device,
                    region,
                    result=not backward,
                    backward=backward,
                    rounds_sum=_rounds_before_a_bias(target),
                )
    return found


@contract("AMP-NUMERICS-012")
@by_product
def test_long_and_odd_products(case: Case, target: Target, rng: torch.Generator, product: Product) -> None:
    found = _products(case, target, rng, product, backward=False)
    case.equal("dtypes", sorted({str(one.dtype) for one in found}), sorted(map(str, case.supported(target))))
    hold(case, product.name, found)


@contract("AMP-NUMERICS-013")
@by_backward_product
def test_gradients_of_long_and_odd_products(case: Case, target: Target, rng: torch.Generator, product: Product) -> None:
    found = _products(case, target, rng, product, backward=True)
    for operand, name in enumerate(("left", "right", "bias")):
        if of_operand := [one for one in found if one.operand == operand]:
            case.equal(f"dtype of the gradient of {name}", {one.dtype for one in of_operand}, {torch.float32})
            hold(case, f"{product.name}: gradient of {name}", of_operand)


def _seen(found: list[Measured]) -> int:
    return sum(one.share is not None for one in found)


@contract("AMP-NUMERICS-014")
@by_product
def test_products_round_each_operand(case: Case, target: Target, rng: torch.Generator, product: Product) -> None:
    for dtype in case.supported(target):
        form = FORMATS[dtype]
        with full_precision(target.device_type):
            found = measure_product(
                product,
                "plain",
                SHAPES["tiles"],
                form,
                rng,
                target.device,
                functools.partial(target.autocast, dtype),
                rounds_sum=_rounds_before_a_bias(target),
            )
        case.equal(f"{form.name}: results and gradients with a measured share", _seen(found), 3)
        share, where = op_error.worst(found, lambda one: one.share)
        case.at_most(
            f"{form.name}: share of an operand's rounding, distance from 1 ({where})", share, 1.0, "of the bound"
        )
        sizes = [one.size for one in found if one.size is not None]
        case.at_least(f"{form.name}: normwise error of the result", 0.3 * min(sizes), 0.3, "u")


@contract("AMP-NUMERICS-022")
@pytest.mark.parametrize("name", QUICK)
def test_long_fp32_products(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    found = []
    with full_precision(target.device_type):
        for dtype in case.supported(target):
            for kind, shape in (("off_grid", "long"), ("wide", "tiles"), ("plain", "odd"), ("cancelling", "tiles")):
                region = functools.partial(target.autocast, dtype, enabled=False)
                with target.autocast(dtype):
                    found += measure_product(
                        PRODUCTS[name], kind, SHAPES[shape], FP32, rng, target.device, region, backward=False
                    )
    case.equal("dtypes", {one.dtype for one in found}, {torch.float32})
    hold(case, f"{name} with autocast disabled", found)


@contract("AMP-NUMERICS-068", on=("cpu", "cuda", "xpu"))
@pytest.mark.parametrize("name", ["addmm", "linear", "baddbmm"])
def test_bias_is_added_before_the_rounding(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    found = []
    with full_precision(target.device_type):
        for dtype in case.supported(target):
            for shape in ("row", "odd", "tiles", "long"):
                region = functools.partial(target.autocast, dtype)
                found += measure_product(
                    PRODUCTS[name], "bias", SHAPES[shape], FORMATS[dtype], rng, target.device, region, backward=False
                )
    hold(case, f"{name} and a bias that nearly cancels it", found)


@contract("AMP-NUMERICS-070", dtypes=("fp16",))
@pytest.mark.parametrize("name", ["mm", "linear", "bmm"])
def test_operands_have_the_range_of_fp16(case: Case, target: Target, name: str) -> None:
    case.require(target, torch.float16)
    # TF32 has the fraction of fp16 and the exponent of fp32: only the range distinguishes them.
    product = PRODUCTS[name]
    batch = (product.batch,) if product.batch else ()
    for what, large, factor, expected in (
        ("an operand of 2^17, times 2^-10", 2.0**17, 2.0**-10, float("inf")),
        ("an operand of 2^-26, times 2^14", 2.0**-26, 2.0**14, 0.0),
        ("control: an operand of 2^-20, times 2^14", 2.0**-20, 2.0**14, 2.0**-6),
    ):
        left, right = torch.full((*batch, 16, 1), large), torch.full((*batch, 1, 16), factor)
        bias = torch.zeros(16)
        with full_precision(target.device_type), target.autocast(torch.float16):
            seen = product.call(*(operand.to(target.device) for operand in (left, right, bias)))
        case.equal(f"{name}: {what}", seen.cpu().double().unique().tolist(), [expected])


# --- convolutions and attention ---------------------------------------------------------------------------------


@contract("AMP-NUMERICS-020")
@by_convolution
def test_convolutions_of_every_layout(
    case: Case, target: Target, rng: torch.Generator, convolution: Convolution
) -> None:
    found = []
    kinds = ("plain", "wide", "same_sign")[: case.samples(quick=1, standard=3, full=3)]
    with full_precision(target.device_type):
        for dtype in case.supported(target):
            for kind in kinds * case.samples(quick=1, standard=1, full=5):
                region = functools.partial(target.autocast, dtype)
                some = measure_convolution(
                    convolution,
                    kind,
                    FORMATS[dtype],
                    rng,
                    target.device,
                    region,
                    rounds_sum=_rounds_before_a_bias(target),
                )
                case.equal(f"{some[0].what}: dtype", some[0].dtype, dtype)
                found += some
    share, where = op_error.worst(found, lambda one: one.share)
    case.at_most(f"share of an operand's rounding, distance from 1 ({where})", share, 1.0, "of the bound")
    for operand, name in (
        (None, "result"),
        (0, "gradient of the input"),
        (1, "gradient of the weight"),
        (2, "gradient of the bias"),
    ):
        hold(case, f"{convolution.name}: {name}", [one for one in found if one.operand == operand])


# On a CPU bf16 is multiplied and added up in fp32, which is what its instructions give (VDPBF16PS, BFDOT); libraries
# for ARM keep sums of fp16 in fp16, and those of a GPU go through transforms.
@contract("AMP-NUMERICS-020", on="cpu", dtypes=("bf16",))
@pytest.mark.parametrize("name", ["depthwise", "dilated", "grouped", "strided"])
def test_results_are_rounded_once(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    case.require(target, torch.bfloat16)
    form, convolution = FORMATS[torch.bfloat16], CONVOLUTIONS[name]
    ratio, control = measure_one_rounding(convolution, form, rng, target.device, lambda: target.autocast(form.dtype))
    case.at_most(f"{name}: norm of the error of the whole result", ratio, 1.0, "of the bound")
    case.at_least("control: halves of the sum rounded by themselves, norm of the error", control, 1.0, "of the bound")


@contract("AMP-NUMERICS-067")
@by_attention
def test_logits_are_not_rounded(case: Case, target: Target, rng: torch.Generator, attention: Attention) -> None:
    def run() -> list[Measured]:
        found = []
        with full_precision(target.device_type):
            for dtype in case.supported(target):
                for _ in range(case.samples(quick=1, standard=3, full=20)):
                    region = functools.partial(target.autocast, dtype)
                    flushes = dtype is torch.float16 and not keeps_subnormals(target, dtype)
                    found += measure_attention(attention, FORMATS[dtype], rng, target.device, region, flushes=flushes)
        return found

    ran = by_kernel(case, target, rng, run)
    names = {None: "result", 0: "gradient of query", 1: "gradient of key", 2: "gradient of value"}
    for operand, name in names.items():
        errors = {kernel: max(one.error for one in found if one.operand == operand) for kernel, found in ran.items()}
        compare(case, f"{attention.name}: {name}: worst error", errors, "of the bound")
    for kernel, found in ran.items():
        for operand, name in names.items():
            hold(case, f"{kernel}, {attention.name}: {name}", [one for one in found if one.operand == operand])
