"""Test memory checks with kernels that save other tensors than predicted: waste by AMP still fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from conformance.chapters.memory.support import check_saved_storages, step_as_predicted
from conformance.harness import catalogue, targets
from conformance.harness.check import Case
from conformance.harness.endings import ContractViolation, Unsupported
from conformance.oracles.symbolic.blocks import blocks
from tests import faults
from tests.faults.breaking import replaced
from tests.faults.chapters.memory_kernels import strange_dropout

TRANSFORMER = blocks()["transformer"]


def _kept(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    check_saved_storages(case, targets.resolve("cpu"), TRANSFORMER, torch.bfloat16, generator, whole=True)


def _step(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    step_as_predicted(case, targets.resolve("cpu"), TRANSFORMER, torch.bfloat16, generator)


@pytest.fixture
def case() -> Case:
    contract = catalogue.load().contracts["AMP-MEMORY-015"]
    return Case(contract, level="quick", seed=0, substitutions={}, amp_dtypes=(torch.bfloat16,))


@pytest.mark.parametrize("judge", [_kept, _step])
def test_a_kernel_that_differs_in_fp32_too_is_no_fault(case: Case, judge: Callable[[Case], None]) -> None:
    with (
        replaced(torch.nn.functional, "dropout", strange_dropout),
        pytest.raises(Unsupported, match=r"dropout saves other tensors .* in fp32 as well"),
    ):
        judge(case)


@pytest.mark.parametrize(
    ("name", "judge"),
    [
        ("gelu_in_fp32_beside_a_strange_dropout", _kept),
        ("gelu_in_fp32_beside_a_strange_dropout", _step),
        ("weights_copied_twice_beside_a_strange_dropout", _step),
    ],
)
def test_what_the_region_adds_fails_beside_such_a_kernel(case: Case, name: str, judge: Callable[[Case], None]) -> None:
    with faults.load()[name].applied(), pytest.raises(ContractViolation, match="manual casts"):
        judge(case)


@pytest.mark.parametrize("judge", [_kept, _step])
def test_a_kernel_that_differs_in_16_bit_alone_fails(case: Case, judge: Callable[[Case], None]) -> None:
    with faults.load()["attention_widens_16_bit"].applied(), pytest.raises(ContractViolation, match="given 16-bit"):
        judge(case)


def test_attention_without_a_fused_kernel_of_16_bit_is_no_fault(case: Case) -> None:
    right = torch.nn.functional.scaled_dot_product_attention

    def composed(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        fused = query.dtype == torch.float32
        with nullcontext() if fused else sdpa_kernel(SDPBackend.MATH):
            return right(query, *others)

    with (
        replaced(torch.nn.functional, "scaled_dot_product_attention", composed),
        replaced(torch, "_fused_sdp_choice", lambda *operands: SDPBackend.MATH.value),
        pytest.raises(Unsupported, match="in bf16 as well"),
    ):
        _kept(case)


@pytest.mark.parametrize("judge", [_kept, _step])
def test_a_network_that_differs_in_fp32_too_is_no_fault(case: Case, judge: Callable[[Case], None]) -> None:
    right = torch.nn.functional.scaled_dot_product_attention
    with (
        replaced(torch.nn.functional, "scaled_dot_product_attention", lambda *given: right(*given).contiguous()),
        pytest.raises(Unsupported, match="network saves other tensors"),
    ):
        judge(case)


@pytest.mark.parametrize("judge", [_kept, _step])
def test_what_the_region_adds_fails_in_such_a_network(case: Case, judge: Callable[[Case], None]) -> None:
    right = torch.nn.functional.scaled_dot_product_attention

    def copied(*given: torch.Tensor) -> torch.Tensor:
        """Make the result contiguous, and in a region keep another copy of it for backward."""
        result = right(*given).contiguous()
        return result * result.detach().sign().abs() if torch.is_autocast_enabled("cpu") else result

    with (
        replaced(torch.nn.functional, "scaled_dot_product_attention", copied),
        pytest.raises(ContractViolation, match="manual casts"),
    ):
        judge(case)
