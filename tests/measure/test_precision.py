"""Full precision holds inside the region and every flag is back after it, whatever happens inside."""

from __future__ import annotations

import pytest
import torch

from conformance.measure.flags import writable
from conformance.measure.precision import computes_in, full_precision, repeatable_convolutions

MATMUL = torch.backends.cuda.matmul
FLAGS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def test_reduced_precision_is_off_inside_and_back_after() -> None:
    before = [getattr(MATMUL, name) for name in FLAGS]
    with full_precision("cuda"):
        inside = [getattr(MATMUL, name) for name in FLAGS]

    assert inside == [False, False]
    assert [getattr(MATMUL, name) for name in FLAGS] == before == [True, True]


def test_flags_are_set_where_writes_to_them_are_forbidden() -> None:
    before = torch.backends.cudnn.deterministic
    with writable():
        torch.backends.disable_global_flags()  # as the import of torch.testing._internal.common_utils does
        with repeatable_convolutions():
            assert torch.backends.cudnn.deterministic
        assert torch.backends.cudnn.deterministic is before
        assert torch.backends.flags_frozen()

    assert not torch.backends.flags_frozen()


def test_flags_come_back_after_an_exception() -> None:
    with pytest.raises(RuntimeError, match="spoiled"), full_precision("cuda"):
        raise RuntimeError("spoiled")

    assert [getattr(MATMUL, name) for name in FLAGS] == [True, True]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_fp32_products_are_fp32_inside(device_type: str) -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with full_precision(device_type):
            inside = torch.get_float32_matmul_precision()
        after = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision("highest")

    assert (inside, after) == ("highest", "medium")


def test_arithmetic_is_tried_and_its_refusal_is_an_answer() -> None:
    assert computes_in(torch.device("cpu"), torch.float64)
    assert not computes_in(torch.device("meta"), torch.float64)
