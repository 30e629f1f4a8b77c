"""Check 16-bit matrix products: exact on integers, within error bounds, repeatable, with special values."""

from __future__ import annotations

import math

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers import error_bounds, exact
from ...oracles.numbers.formats import FORMATS, FP16, rounded
from .bit_patterns import unsigned_zeros
from .matmul_ops import PRODUCTS, SHAPES, cancelling_integers, gaussians, transposed_product, worst_ratio
from .matmul_spellings import integers
from .support import leaves_on, run_product, within_window


@contract("AMP-NUMERICS-040")
@pytest.mark.parametrize("op", PRODUCTS)
def test_integer_products_are_exact(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    product = PRODUCTS[op]
    for shape in SHAPES:
        for _ in range(case.samples(quick=1, standard=3, full=20)):
            operands = cancelling_integers(rng, product, shape)
            seen = run_product(target, amp_dtype, product, *(operand.to(target.device) for operand in operands))
            expected = product.expected(*operands).to(amp_dtype)
            case.identical(f"{op} of integers, m k n {shape}", unsigned_zeros(seen), unsigned_zeros(expected))


@contract("AMP-NUMERICS-011")
@pytest.mark.parametrize("op", PRODUCTS)
def test_integer_gradients_are_exact(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    product = PRODUCTS[op]
    for shape in SHAPES:
        sources = [integers(rng, 3, *size) for size in product.operands(*shape)]
        left, right, bias = leaves_on(target, *sources)
        seen = run_product(target, amp_dtype, product, left, right, bias)
        seed = integers(rng, 1, *seen.shape)
        with full_precision(target.device_type):
            seen.backward(seed.to(target.device, amp_dtype))
        expected = {
            "left": (left, transposed_product(seed, sources[1])),
            "right": (right, transposed_product(sources[0].mT, seed.mT)),
        }
        if product.bias != "none":
            expected["the bias"] = (bias, seed.sum(0) if product.bias == "row" else seed)
        for name, (leaf, gradient) in expected.items():
            what = f"{op}: gradient of {name}, m k n {shape}"
            case.identical(what, unsigned_zeros(leaf.grad), unsigned_zeros(gradient.float()))


@contract("AMP-NUMERICS-012")
@pytest.mark.parametrize("op", PRODUCTS)
def test_products_are_within_the_bound(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    product, form = PRODUCTS[op], FORMATS[amp_dtype]
    for shape in SHAPES:
        for _ in range(case.samples(quick=1, standard=3, full=20)):
            operands = gaussians(rng, *product.operands(*shape))
            seen = run_product(target, amp_dtype, product, *(operand.to(target.device) for operand in operands))
            case.equal(f"{op}: dtype", seen.dtype, amp_dtype)
            left, right, bias = (rounded(operand.double(), form) for operand in operands)
            bound = error_bounds.rounded_product_bound(left, right, form, None if product.bias == "none" else bias)
            worst = worst_ratio(seen, product.expected(left, right, bias), bound)
            case.at_most(f"{op}, m k n {shape}: worst error over its bound", worst, 1.0)


@contract("AMP-NUMERICS-013")
@pytest.mark.parametrize("op", PRODUCTS)
def test_gradients_are_within_the_bound(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    product, form = PRODUCTS[op], FORMATS[amp_dtype]
    for shape in SHAPES:
        operands = gaussians(rng, *product.operands(*shape))
        left, right, bias = leaves_on(target, *operands)
        seen = run_product(target, amp_dtype, product, left, right, bias)
        seed = rounded(torch.randn(seen.shape, generator=rng).double(), form)
        with full_precision(target.device_type):
            seen.backward(seed.to(amp_dtype).to(target.device))
        a, b = (rounded(operand.double(), form) for operand in operands[:2])
        for name, leaf, factors in (("left", left, (seed, b.mT)), ("right", right, (a.mT, seed))):
            case.equal(f"{op}: dtype of the gradient of {name}", leaf.grad.dtype, torch.float32)
            bound = error_bounds.rounded_product_bound(*factors, form)
            worst = worst_ratio(leaf.grad, exact.product(*factors), bound)
            case.at_most(f"{op}, gradient of {name}, m k n {shape}: worst error over its bound", worst, 1.0)


@contract("AMP-NUMERICS-014")
@pytest.mark.parametrize("op", PRODUCTS)
def test_products_run_in_sixteen_bits(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    product, form = PRODUCTS[op], FORMATS[amp_dtype]
    window = error_bounds.normwise_window(form)
    shape = (701, 33, 1) if product.vector else (49, 65, 45)
    operands = gaussians(rng, *product.operands(*shape))
    left, right, bias = leaves_on(target, *operands)
    seen = run_product(target, amp_dtype, product, left, right, bias)
    within_window(case, op, seen, product.expected(*operands), window, form.unit_roundoff)
    seed = torch.randn(seen.shape, generator=rng)
    with full_precision(target.device_type):
        seen.backward(seed.to(target.device, amp_dtype))
    gradients = {"left": (left.grad, transposed_product(seed, operands[1]))}
    if not product.vector:
        gradients["right"] = (right.grad, transposed_product(operands[0].mT, seed.mT))
    for name, (gradient, expected) in gradients.items():
        within_window(case, f"{op}: gradient of {name}", gradient, expected, window, form.unit_roundoff)
        stored = gradient.cpu().double()
        share = float((rounded(stored, form) == stored).double().mean())
        case.equal(f"{op}: share of the gradient of {name} that are numbers of {form.name}", share, 1.0)


@contract("AMP-NUMERICS-015")
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "addmm"])
def test_products_have_no_gain(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    product, form = PRODUCTS[op], FORMATS[amp_dtype]
    operands = gaussians(rng, *product.operands(96, 64, 80))
    left, right, bias = leaves_on(target, *operands)
    seen = run_product(target, amp_dtype, product, left, right, bias)
    seed = torch.randn(seen.shape, generator=rng)
    with full_precision(target.device_type):
        seen.backward(seed.to(target.device, amp_dtype))
    # The fewest independent roundings are those of the smallest operand.
    bound = error_bounds.gain_bound(form, 64 * 80)
    for what, tensor, expected in (
        (op, seen, product.expected(*operands)),
        (f"{op}: gradient of left", left.grad, transposed_product(seed, operands[1])),
        (f"{op}: gradient of right", right.grad, transposed_product(operands[0].mT, seed.mT)),
    ):
        case.at_most(f"{what}: systematic scale error", abs(error_bounds.gain_error(tensor, expected)), bound)


@contract("AMP-NUMERICS-029")
@pytest.mark.parametrize("op", PRODUCTS)
def test_autocast_adds_nothing_but_the_casts(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    product = PRODUCTS[op]
    sources = gaussians(rng, *product.operands(9, 65, 7))
    ours, theirs = leaves_on(target, *sources), leaves_on(target, *sources)
    seen = run_product(target, amp_dtype, product, *ours)
    with full_precision(target.device_type):
        expected = product.call(*(leaf.to(amp_dtype) for leaf in theirs))
        seed = torch.randn(seen.shape, generator=rng).to(target.device, amp_dtype)
        seen.backward(seed)
        expected.backward(seed)
    case.identical(f"{op}: under autocast and with manual casts", seen, expected)
    for name, leaf, reference in zip(("left", "right", "bias"), ours, theirs, strict=True):
        if reference.grad is not None:
            case.identical(f"{op}: gradient of {name}", leaf.grad, reference.grad)


@contract("AMP-NUMERICS-030", dtypes=("fp16",))
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "addmm"])
def test_products_keep_subnormals(case: Case, target: Target, op: str) -> None:
    case.require(target, torch.float16)
    if str(target.probe["capability"]).startswith("gfx90a"):
        case.unsupported("the matrix units of MI200 flush fp16 subnormals (torch's notes on numerical accuracy)")
    product, steps = PRODUCTS[op], torch.arange(1, 18).double() * FP16.smallest
    for what, left, right in (
        ("subnormal operand times 1", steps, 1.0),
        ("subnormal operand times 1024", steps, 1024.0),
        ("normal operands, subnormal result", torch.arange(1, 18).double() * 2.0**-12, 2.0**-12),
    ):
        (*batch, _, _), _, bias = product.operands(17, 1, 1)
        operands = (
            left.float().unsqueeze(1).expand(*batch, 17, 1),
            torch.full((*batch, 1, 1), right),
            torch.zeros(bias),
        )
        seen = run_product(target, torch.float16, product, *(operand.to(target.device) for operand in operands))
        expected = (left * right).unsqueeze(1).expand(*batch, 17, 1)
        case.identical(f"{op}: {what}", seen, expected.to(torch.float16))


@contract("AMP-NUMERICS-031")
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "addmm", "baddbmm", "mv"])
def test_products_pass_on_inf_and_nan(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str, special: float
) -> None:
    product = PRODUCTS[op]
    left, right, bias = (source.abs() + 1 for source in gaussians(rng, *product.operands(7, 33, 5)))
    # In the last place of the last row, where a kernel's tail is.
    left[..., -1, -1] = special
    seen = run_product(target, amp_dtype, product, *(operand.to(target.device) for operand in (left, right, bias)))
    last = seen[..., -1, :].cpu().double()
    kind = torch.isnan(last) if math.isnan(special) else last == special
    case.equal(f"{op}: share of the row that is {special}", float(kind.double().mean()), 1.0)
    case.equal(f"{op}: control: the other rows are finite", bool(torch.isfinite(seen[..., :-1, :]).all()), True)


@contract("AMP-NUMERICS-031")
def test_backward_passes_on_inf_and_nan(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    for special in (math.inf, -math.inf, math.nan):
        layer = torch.nn.Linear(5, 3).to(target.device)
        torch.nn.init.ones_(layer.weight)
        with target.autocast(amp_dtype):
            seen = layer(torch.ones(4, 5, device=target.device))
        seed = torch.ones_like(seen)
        seed[-1, -1] = special
        seen.backward(seed)
        for name, parameter in layer.named_parameters():
            rows = parameter.grad.cpu().double().reshape(3, -1)
            kind = torch.isnan(rows[-1]) if math.isnan(special) else rows[-1] == special
            case.equal(f"{name}: the gradient's last row is {special}", bool(kind.all()), True)
            case.equal(f"{name}: control: its other rows", rows[:-1].unique().tolist(), [4.0])


@contract("AMP-NUMERICS-032")
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "addmm"])
def test_products_repeat(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str) -> None:
    product = PRODUCTS[op]
    sources = gaussians(rng, *product.operands(65, 129, 33))
    runs = []
    for _ in range(2):
        left, right, bias = leaves_on(target, *sources)
        seen = run_product(target, amp_dtype, product, left, right, bias)
        seen.backward(torch.ones_like(seen))
        runs.append((seen, left.grad, right.grad))
    for what, first, second in zip(("result", "gradient of left", "gradient of right"), *runs, strict=True):
        case.identical(f"{op}: {what}, twice", first, second)
