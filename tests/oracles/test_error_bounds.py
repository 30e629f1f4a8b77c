"""The bounds hold for arithmetic as it should be and are broken by each way in which it goes wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conformance.oracles.numbers import error_bounds, exact
from conformance.oracles.numbers.formats import BF16, FORMATS, FP16, FP32, Format, rounded

NARROW = {"fp16": FP16, "bf16": BF16}
Arithmetic = Callable[[torch.Tensor, torch.Tensor, Format], torch.Tensor]


def _as_promised(left: torch.Tensor, right: torch.Tensor, form: Format) -> torch.Tensor:
    product = exact.product(rounded(left, form), rounded(right, form)).float()
    return rounded(product.double(), form)


def _narrow_accumulation(left: torch.Tensor, right: torch.Tensor, form: Format) -> torch.Tensor:
    terms = rounded(left, form).unsqueeze(-1) * rounded(right, form).unsqueeze(-3)
    total = torch.zeros_like(terms[..., 0, :])
    for at in range(terms.shape[-2]):
        total = rounded(total + terms[..., at, :], form)
    return total


def _one_wrong_element(left: torch.Tensor, right: torch.Tensor, form: Format) -> torch.Tensor:
    result = _as_promised(left, right, form)
    result[-1, -1] += 8 * form.unit_roundoff * result[-1, -1].abs() + form.unit_roundoff
    return result


def _operands_not_rounded(left: torch.Tensor, right: torch.Tensor, form: Format) -> torch.Tensor:
    return rounded(exact.product(left, right), form)


def _truncated(left: torch.Tensor, right: torch.Tensor, form: Format) -> torch.Tensor:
    product = exact.product(rounded(left, form), rounded(right, form))
    return rounded(product * (1 - form.unit_roundoff), form)


_WRONG: dict[str, Arithmetic] = {
    "sums in 16 bits": _narrow_accumulation,
    "one wrong element": _one_wrong_element,
    "operands not rounded": _operands_not_rounded,
    "truncated": _truncated,
}


def _operands(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(*shape, generator=generator).double() for shape in ((65, 97), (97, 67)))
    return left, right


def _worst_ratio(arithmetic: Arithmetic, form: Format, seed: int) -> float:
    left, right = _operands(seed)
    seen = arithmetic(left, right, form)
    left, right = rounded(left, form), rounded(right, form)
    bound = error_bounds.rounded_product_bound(left, right, form)
    return float(((seen - exact.product(left, right)).abs() / bound).max())


def _normwise(arithmetic: Arithmetic, form: Format, seed: int) -> float:
    left, right = _operands(seed)
    return error_bounds.normwise_error(arithmetic(left, right, form), exact.product(left, right))


def _gain(arithmetic: Arithmetic, form: Format, seed: int) -> float:
    left, right = _operands(seed)
    return abs(error_bounds.gain_error(arithmetic(left, right, form), exact.product(left, right)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("form", NARROW.values(), ids=NARROW)
def test_promised_arithmetic_is_within_every_bound(form: Format, seed: int) -> None:
    low, high = error_bounds.normwise_window(form)

    assert _worst_ratio(_as_promised, form, seed) <= 1
    assert low <= _normwise(_as_promised, form, seed) <= high
    assert _gain(_as_promised, form, seed) <= error_bounds.gain_bound(form, 65 * 67)


@pytest.mark.parametrize("form", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("arithmetic", _WRONG.values(), ids=_WRONG)
def test_wrong_arithmetic_breaks_the_componentwise_bound(arithmetic: Arithmetic, form: Format) -> None:
    assert _worst_ratio(arithmetic, form, seed=0) > 1


@pytest.mark.parametrize(("form", "other"), [(FP16, BF16), (BF16, FP16), (FP16, FP32), (BF16, FP32)])
def test_another_precision_leaves_the_window(form: Format, other: Format) -> None:
    low, high = error_bounds.normwise_window(form)

    assert not low <= _normwise(lambda left, right, _: _as_promised(left, right, other), form, 0) <= high


@pytest.mark.parametrize("form", NARROW.values(), ids=NARROW)
def test_truncation_has_a_gain(form: Format) -> None:
    assert _gain(_truncated, form, seed=0) > error_bounds.gain_bound(form, 65 * 67)


def test_windows_of_fp32_and_tf32_are_apart() -> None:
    tf32 = Format("tf32", 8, 10)
    low, high = error_bounds.fp32_product_window(97)

    assert low <= _normwise(_as_promised, FP32, 0) <= high
    assert _normwise(_as_promised, tf32, 0) > 3 * high


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fp32_bounds_tell_fp32_from_sixteen_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = (50 + 3 * torch.randn(7, 65, generator=generator)).float()
    through = rounded(rows.double(), FORMATS[dtype]).float()
    softmax = (torch.softmax(through, -1).double() - exact.softmax(rows)).abs() / error_bounds.softmax_bound(rows)
    sums = (through.sum(-1).double() - rows.double().sum(-1)).abs() / error_bounds.sum_bound(rows)
    norm = error_bounds.normwise_error(torch.nn.functional.layer_norm(through, (65,)), exact.layer_norm(rows))

    seen = [float(softmax.max()) <= 1, float(sums.max()) <= 1, norm <= error_bounds.layer_norm_bound(rows)]
    assert seen == [dtype is torch.float32] * 3
