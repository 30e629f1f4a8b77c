"""Stand-ins for hardware answer as told and are gone after."""

from __future__ import annotations

import pytest
import torch

from conformance.oracles.fake_hardware import backend_module, cuda_that_says, no_backend_module, third_party_backend


@pytest.mark.parametrize("bf16", [True, False])
def test_cuda_answers_as_told_and_as_before_after(bf16: bool) -> None:
    before = torch.cuda.is_available(), torch.cuda.is_bf16_supported()

    with cuda_that_says(bf16=bf16):
        assert (torch.cuda.is_available(), torch.cuda.is_bf16_supported()) == (True, bf16)
    assert (torch.cuda.is_available(), torch.cuda.is_bf16_supported()) == before


def test_backend_has_a_module_with_its_dtypes_and_none_after() -> None:
    with backend_module([torch.float16]) as name:
        assert name == third_party_backend()
        assert getattr(torch, name).get_amp_supported_dtype() == [torch.float16]
    assert not hasattr(torch, name)


def test_backend_may_lack_the_function() -> None:
    with backend_module(None) as name:
        assert not hasattr(getattr(torch, name), "get_amp_supported_dtype")


def test_a_registered_backend_is_gone_inside_and_back_after() -> None:
    with backend_module([torch.float16]) as name:
        registered = getattr(torch, name)
        with no_backend_module() as same:
            assert (same, hasattr(torch, name)) == (name, False)
        assert getattr(torch, name) is registered
    with no_backend_module():
        assert not hasattr(torch, name)
    assert not hasattr(torch, name)
