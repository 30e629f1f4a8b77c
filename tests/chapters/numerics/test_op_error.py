"""The oracle of the bounded checks: formulas against autograd, figures against arithmetic done by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from conformance.chapters.numerics import op_error
from conformance.chapters.numerics.bounds_convolution import (
    ATTENTIONS,
    CONVOLUTIONS,
    measure_attention,
    measure_convolution,
)
from conformance.chapters.numerics.bounds_loss import LOSSES
from conformance.chapters.numerics.bounds_matmul import PRODUCTS, measure_product, share_ratio
from conformance.chapters.numerics.bounds_normalization import NORMALIZATIONS
from conformance.chapters.numerics.bounds_reduction import REDUCTIONS
from conformance.chapters.numerics.op_error import (
    Op,
    error_ratio,
    gain_ratio,
    half_spacing,
    is_exact_in_any_order,
    stored_in,
    total,
)
from conformance.oracles.numbers import exact
from conformance.oracles.numbers.formats import BF16, FORMATS, FP16, FP32, Format, rounded
from conformance.oracles.numbers.running_error import Rounded

OPS = {**REDUCTIONS, **NORMALIZATIONS, **LOSSES}
CPU = torch.device("cpu")


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.gradient is not None], ids=lambda op: op.name)
def test_gradients_are_those_of_autograd(op: Op) -> None:
    rng = torch.Generator().manual_seed(1)
    inputs = op_error.operands(op, op.kinds[-1], FP32, rng)
    store = stored_in(FP32)
    leaves = [x.double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    result = op.formula(store, *(Rounded.exact(x) if x.is_floating_point() else x for x in leaves)).value
    seed = torch.randn(result.shape, generator=rng).double()
    result.backward(seed)
    assert op.gradient is not None
    operands = [Rounded.exact(x) if x.is_floating_point() else x for x in inputs]
    for leaf, expected in zip(leaves, op.gradient(store, Rounded.exact(seed), *operands), strict=True):
        if expected is not None:
            assert leaf.grad is not None
            torch.testing.assert_close(expected.value, leaf.grad, rtol=1e-9, atol=1e-12)


# The same op by a kernel that is exact in float64: the one for channels last loses half the digits (one-pass variance).
_EXACT = {"group_norm of channels last and a large mean": "group_norm"}


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_formulas_are_those_of_torch(op: Op) -> None:
    inputs = op_error.operands(op, op.kinds[-1], FP32, torch.Generator().manual_seed(1))
    call = OPS[_EXACT.get(op.name, op.name)].call
    expected = call(*(x.double() if x.is_floating_point() else x for x in inputs))
    operands = [Rounded.exact(x) if x.is_floating_point() else x for x in inputs]
    # Beyond 20 torch's softplus is x.
    torch.testing.assert_close(op.formula(stored_in(FP32), *operands).value, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_half_a_spacing(form: Format) -> None:
    numbers = [form.smallest, form.smallest_normal, 1.0, 1.5, 2.0, 3.0, form.largest]
    seen = half_spacing(torch.tensor(numbers, dtype=torch.float64), form).tolist()
    assert seen == [form.ulp(number) / 2 for number in numbers]


@pytest.mark.parametrize(
    ("terms", "holds"),
    [
        ([1.0, 2.0**23], True),
        ([1.0, 2.0**24], False),
        ([0.5, 2.0**23], False),
        ([0.0, 0.0], True),
        ([0.75, -0.25], True),
    ],
)
def test_sums_that_no_order_rounds(terms: list[float], holds: bool) -> None:
    tensor = torch.tensor(terms, dtype=torch.float64)
    assert is_exact_in_any_order(tensor, (0,)) is holds
    assert bool(total(Rounded.exact(tensor), 0).error == 0) is holds


@pytest.mark.parametrize(
    ("seen", "value", "ratio"),
    [
        (1.0, 1.0, 0.0),
        (1.0, 1 + 2.0**-12, 0.5),
        (math.inf, 65520.0, 0.0),
        (math.inf, 65000.0, math.inf),
        (-math.inf, 65520.0, math.inf),
        (math.nan, math.nan, 0.0),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (math.inf, math.inf, 0.0),
    ],
)
def test_errors_over_the_bound(seen: float, value: float, ratio: float) -> None:
    exactly = torch.tensor([value], dtype=torch.float64)
    found = error_ratio(torch.tensor([seen], dtype=torch.float16), Rounded(exactly, torch.zeros(1).double()))
    assert min(found, 1e300) == pytest.approx(min(ratio, 1e300), rel=1e-9)


@pytest.mark.parametrize("form", [FP16, BF16], ids=["fp16", "bf16"])
def test_a_thousandth_is_seen(form: Format) -> None:
    value = torch.randn(8192, generator=torch.Generator().manual_seed(3)).double()
    reference = Rounded(value, torch.zeros_like(value))
    assert gain_ratio(value.to(form.dtype), reference) < 1
    assert gain_ratio((value * 1.001).to(form.dtype), reference) > 2


def test_equal_significands_are_one_rounding() -> None:
    value = torch.full((4096,), 1 + 2.0**-12, dtype=torch.float64) * 2.0 ** torch.arange(-6, 6).repeat(342)[:4096]
    assert gain_ratio(value.to(torch.float16), Rounded(value, torch.zeros_like(value))) <= 1


def test_a_small_term_beside_one_that_repeats_does_not_change_how_it_is_rounded() -> None:
    value = 1 + 0.3 * 2.0**-10 + 1e-6 * torch.rand(65536, dtype=torch.float64)

    assert value.unique().numel() > 60000
    assert gain_ratio(value.to(torch.float16), Rounded(value, torch.zeros_like(value))) <= 1


@pytest.mark.parametrize("form", [FP16, BF16], ids=["fp16", "bf16"])
def test_operands_that_were_not_rounded_are_seen(form: Format) -> None:
    rng = torch.Generator().manual_seed(5)
    left, right = torch.randn(32, 64, generator=rng).double(), torch.randn(64, 32, generator=rng).double()
    narrow, other = rounded(left, form), rounded(right, form)
    reference = Rounded(exact.product(narrow, other), torch.zeros(32, 32).double())
    without = exact.product(left, other)
    low = share_ratio(reference.value.to(form.dtype), without, reference, form)
    wide = share_ratio(without.to(form.dtype), without, reference, form)
    assert low is not None
    assert wide is not None
    assert low < 1 < 2 < wide


def _rounded_first(to: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return an addmm in fp16 that rounds the product, and then `to` what `to` returns, before it adds the bias."""

    def call(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return to(a.half() @ b.half()) + c.half()

    return call


@pytest.mark.parametrize("kind", ["grid", "bias"])
def test_a_product_may_be_rounded_once_before_its_bias_is_added(kind: str) -> None:
    once, coarse = _rounded_first(lambda x: x), _rounded_first(lambda x: x.bfloat16().half())
    found = {}
    for name, call in (("once", once), ("coarse", coarse)):
        for allowed in (False, True):
            product = dataclasses.replace(PRODUCTS["addmm"], call=call)
            rng = torch.Generator().manual_seed(2)
            (seen,) = measure_product(
                product,
                kind,
                (48, 512, 48),
                FP16,
                rng,
                CPU,
                contextlib.nullcontext,
                backward=False,
                rounds_sum=allowed,
            )
            found[name, allowed] = seen.worst
    assert found["once", True] <= 1 < found["once", False]
    assert found["coarse", True] > 1


def test_a_convolution_may_be_rounded_once_before_its_bias_is_added() -> None:
    plain = CONVOLUTIONS["pointwise"]

    def call(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, coarse: bool = False) -> torch.Tensor:
        seen = F.conv2d(image.half(), weight.half())
        return (seen.bfloat16().half() if coarse else seen) + bias.half().view(1, -1, 1, 1)

    found = {}
    for coarse in (False, True):
        for allowed in (False, True):
            convolution = dataclasses.replace(plain, call=functools.partial(call, coarse=coarse))
            rng = torch.Generator().manual_seed(3)
            seen, *_ = measure_convolution(
                convolution, "same_sign", FP16, rng, CPU, contextlib.nullcontext, rounds_sum=allowed
            )
            found[coarse, allowed] = seen.worst
    assert found[False, True] <= 1 < found[False, False]
    assert found[True, True] > 1


def test_fp32_in_the_place_of_16_bits_is_out_of_bounds() -> None:
    """Each family, run without autocast where a 16-bit run is promised."""
    rng = torch.Generator().manual_seed(2)
    product = measure_product(PRODUCTS["mm"], "plain", (48, 64, 48), FP16, rng, CPU, contextlib.nullcontext)
    convolution = measure_convolution(CONVOLUTIONS["one sample"], "plain", FP16, rng, CPU, contextlib.nullcontext)
    for found in (product, convolution):
        assert (found[0].share or 0) > 2
        assert found[0].dtype is torch.float32
    attention = measure_attention(ATTENTIONS["causal"], BF16, rng, CPU, contextlib.nullcontext)
    assert all(one.error <= 1 for one in attention)
