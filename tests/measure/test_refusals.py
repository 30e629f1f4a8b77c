"""What a device says of tensors that it does not have is learned by asking it for some."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from conformance.measure.refusals import dtype_refusals, sparse_refusals


def test_refusals_are_what_a_device_without_the_type_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    device, ones = torch.device("cpu"), torch.ones

    def refusing(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
        if dtype == torch.float64:
            raise TypeError("npu has no double")
        return ones(*shape, dtype=dtype, **options)

    assert dtype_refusals(device, torch.float64) == frozenset()
    dtype_refusals.cache_clear()
    monkeypatch.setattr(torch, "ones", refusing)
    try:
        assert dtype_refusals(device, torch.float64) == {(TypeError, "npu has no double")}
    finally:
        dtype_refusals.cache_clear()


def test_refusals_of_sparse_tensors_are_learned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")

    def refusing(self: torch.Tensor, *args: Any) -> torch.Tensor:
        raise NotImplementedError("npu has strided tensors only")

    assert sparse_refusals(device) == frozenset()
    sparse_refusals.cache_clear()
    monkeypatch.setattr(torch.Tensor, "to_sparse", refusing)
    try:
        assert sparse_refusals(device) == {(NotImplementedError, "npu has strided tensors only")}
    finally:
        sparse_refusals.cache_clear()


def test_warnings_are_no_refusals() -> None:
    dtype_refusals.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dtype_refusals(torch.device("cpu"), torch.complex32) == frozenset()
