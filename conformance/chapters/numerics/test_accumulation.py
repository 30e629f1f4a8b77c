"""Check that sums of 16-bit products and tensors are accumulated in more than 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract, per_target
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers import exact
from ...oracles.numbers.formats import FORMATS, Format
from .matmul_ops import PRODUCTS
from .support import by_kernel, compare, run_product

TERMS = 4097


def _swamping(form: Format, *shape: int) -> Tensor:
    """Return ones along the last dimension behind one number to which the type adds a single one in vain."""
    source = torch.ones(*shape, TERMS)
    source[..., 0] = 1 / form.unit_roundoff
    return source


# Long sums of one large number and 4096 ones, in every place where AMP sums products.
LONG_SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "mm": lambda row: torch.mm(row.expand(5, -1).contiguous(), torch.ones(TERMS, 3, device=row.device)),
    "mm tall": lambda row: torch.mm(row.expand(64, -1).contiguous(), torch.ones(TERMS, 1, device=row.device)),
    "mm one": lambda row: torch.mm(row.unsqueeze(0), torch.ones(TERMS, 1, device=row.device)),
    "mm reversed": lambda row: torch.mm(
        row.flip(0).expand(5, -1).contiguous(), torch.ones(TERMS, 3, device=row.device)
    ),
    "linear": lambda row: F.linear(row.expand(5, -1).contiguous(), torch.ones(3, TERMS, device=row.device)),
    "linear vector": lambda row: F.linear(row, torch.ones(3, TERMS, device=row.device)),
    "addmm": lambda row: torch.addmm(
        torch.zeros(5, 3, device=row.device), row.expand(5, -1).contiguous(), torch.ones(TERMS, 3, device=row.device)
    ),
    "bmm": lambda row: torch.bmm(row.expand(2, 5, -1).contiguous(), torch.ones(2, TERMS, 3, device=row.device)),
    "mv": lambda row: torch.matmul(row.expand(5, -1).contiguous(), torch.ones(TERMS, device=row.device)),
    "dot": lambda row: torch.matmul(row, torch.ones(TERMS, device=row.device)),
    "conv1d": lambda row: F.conv1d(row.reshape(1, -1, 1), torch.ones(4, TERMS, 1, device=row.device)),
    "conv2d": lambda row: F.conv2d(
        row.reshape(1, -1, 1, 1).expand(2, -1, 3, 3), torch.ones(4, TERMS, 1, 1, device=row.device)
    ),
}


@contract("AMP-NUMERICS-016")
@pytest.mark.parametrize("op", LONG_SUMS, ids=lambda op: op.replace(" ", "_"))
def test_long_sums_are_not_swamped(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    form = FORMATS[amp_dtype]
    total = 1 / form.unit_roundoff + TERMS - 1
    narrow_sum = exact.sixteen_bit_sum(1 / form.unit_roundoff, 1.0, TERMS - 1, form.unit_roundoff)
    case.at_most("control: the same sum, rounded to 16 bits after each addition", narrow_sum, 0.75 * total)
    with full_precision(target.device_type), target.autocast(amp_dtype):
        seen = LONG_SUMS[op](_swamping(form).to(target.device))
    case.equal(f"{op}: dtype", seen.dtype, amp_dtype)
    case.equal(f"{op}: all sums of {TERMS} terms", seen.cpu().double().unique().tolist(), [form.nearest(total)])


# Flags that choose another implementation, by the device type that has it.
IMPLEMENTATIONS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "without-oneDNN": ("cpu", lambda: torch.backends.mkldnn.flags(enabled=False)),
    "without-NNPACK": ("cpu", lambda: torch.backends.nnpack.flags(enabled=False)),
    "without-cuDNN": ("cuda", lambda: torch.backends.cudnn.flags(enabled=False)),
}


@contract("AMP-NUMERICS-016")
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@per_target("flags", lambda target: [name for name, (kind, _) in IMPLEMENTATIONS.items() if kind == target.device_type])
def test_long_sums_in_other_implementations(case: Case, target: Target, amp_dtype: torch.dtype, flags: str) -> None:
    """In regions and outside of them, where the operands are in 16 bits already; and backward of each."""
    form = FORMATS[amp_dtype]
    right = [form.nearest(1 / form.unit_roundoff + TERMS - 1)]
    wrong: dict[str, list[float]] = {}
    with full_precision(target.device_type), IMPLEMENTATIONS[flags][1]():
        for op, call in LONG_SUMS.items():
            with target.autocast(amp_dtype):
                seen = call(_swamping(form).to(target.device))
            wrong[op] = seen.cpu().double().unique().tolist()
        layer = torch.nn.Linear(2, 3).to(target.device, amp_dtype)
        layer(torch.ones(TERMS, 2, device=target.device, dtype=amp_dtype)).backward(
            _swamping(form, 3).t().to(target.device, amp_dtype)
        )
        wrong |= {f"gradient of {n}": p.grad.cpu().double().unique().tolist() for n, p in layer.named_parameters()}
    case.equal("sums that are swamped", {op: found for op, found in wrong.items() if found != right}, {})


@contract("AMP-NUMERICS-016")
def test_long_gradient_sums_are_not_swamped(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    form = FORMATS[amp_dtype]
    layer = torch.nn.Linear(2, 3).to(target.device)
    with full_precision(target.device_type):
        with target.autocast(amp_dtype):
            seen = layer(torch.ones(TERMS, 2, device=target.device))
        seen.backward(_swamping(form, 3).t().to(target.device, amp_dtype))
    expected = [form.nearest(1 / form.unit_roundoff + TERMS - 1)]
    for name, parameter in layer.named_parameters():
        case.equal(
            f"gradient of the {name} over {TERMS} rows", parameter.grad.cpu().double().unique().tolist(), expected
        )


@contract("AMP-NUMERICS-016")
def test_attention_over_many_keys_is_not_swamped(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    form, keys = FORMATS[amp_dtype], 4096
    query, key = torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, keys, 16)
    value = torch.ones(1, 2, keys, 16)
    value[:, :, 0] = 16 / form.unit_roundoff
    mean = (16 / form.unit_roundoff + keys - 1) / keys

    def run() -> float:
        with full_precision(target.device_type), target.autocast(amp_dtype):
            seen = F.scaled_dot_product_attention(*(part.to(target.device) for part in (query, key, value)))
        return float((seen.cpu().double() / mean - 1).abs().max()) / form.unit_roundoff

    worst = by_kernel(case, target, rng, run)
    what = "mean of one large and many small values: relative error"
    compare(case, what, worst, "u")
    for kernel, error in worst.items():
        case.at_most(f"{kernel}: {what}", error, 2.0, "u")


@contract("AMP-NUMERICS-017")
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "addmm", "baddbmm", "mv"])
def test_partial_sums_may_leave_the_range(case: Case, target: Target, op: str) -> None:
    product = PRODUCTS[op]
    left_shape, right_shape, bias_shape = product.operands(5, 33, 3)
    # 300 * 300 = 90000 is beyond fp16; in pairs that cancel, 16 * 90000 - 16 * 90000 + 7 * 3 is 21.
    left = torch.full(left_shape, 300.0)
    left[..., 16:32], left[..., 32] = -300.0, 7.0
    right = torch.full(right_shape, 300.0)
    right[..., 32, :] = 3.0
    operands = [operand.to(target.device) for operand in (left, right, torch.zeros(bias_shape))]
    seen = run_product(target, torch.float16, product, *operands)
    case.equal(f"{op}: 16 products of 90000, 16 of -90000 and one of 21", seen.cpu().double().unique().tolist(), [21.0])


CONVOLUTIONS = {
    "conv1d": 1,
    "conv2d": 2,
    "conv3d": 3,
    "conv_transpose1d": 1,
    "conv_transpose2d": 2,
    "conv_transpose3d": 3,
}


@contract("AMP-NUMERICS-018")
@pytest.mark.parametrize("op", ["mm", "linear", "bmm", "addmm", *CONVOLUTIONS])
def test_results_beyond_the_range(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    form = FORMATS[amp_dtype]
    for factors, name in (((256.0, 255.875), "65504"), ((256.0, 256.0), "65536"), ((-256.0, 256.0), "-65536")):
        left, right = torch.full((3, 1), factors[0]), torch.full((1, 5), factors[1])
        exact_result = form.nearest(form.nearest(factors[0]) * form.nearest(factors[1]))
        with full_precision(target.device_type), target.autocast(amp_dtype):
            if op in CONVOLUTIONS:
                weight = right if "transpose" in op else right.t()
                inner = (1,) * CONVOLUTIONS[op]
                operands = (part.reshape(*part.shape, *inner).to(target.device) for part in (left, weight))
                seen = getattr(F, op)(*operands)
            else:
                product = PRODUCTS[op]
                (*batch, _, _), _, bias = product.operands(3, 1, 5)
                batched = (left.expand(*batch, 3, 1), right.expand(*batch, 1, 5), torch.zeros(bias))
                seen = product.call(*(operand.to(target.device) for operand in batched))
        case.equal(f"{op}: {name} in {form.name}", seen.cpu().double().unique().tolist(), [exact_result])


@contract("AMP-NUMERICS-025")
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sums_of_sixteen_bit_tensors_are_wide(case: Case, target: Target, amp_dtype: torch.dtype, op: str) -> None:
    form = FORMATS[amp_dtype]
    total = 1 / form.unit_roundoff + TERMS - 1
    narrow_sum = exact.sixteen_bit_sum(1 / form.unit_roundoff, 1.0, TERMS - 1, form.unit_roundoff)
    case.at_most("control: the same sum, rounded to 16 bits after each addition", narrow_sum, 0.75 * total)
    terms = _swamping(form, 3).to(target.device, amp_dtype)
    with target.autocast(amp_dtype):
        seen = getattr(terms, op)(-1)
    expected = total if op == "sum" else total / TERMS
    worst = float((seen.cpu().double() / expected - 1).abs().max())
    case.at_most(f"{op} of {TERMS} 16-bit terms: relative error", worst / form.unit_roundoff, 1.01, "u")
