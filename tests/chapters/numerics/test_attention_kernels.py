"""Attention by kernel: which one ran, which others take the inputs, and whether one fails or all do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from conformance.chapters.numerics import attention_kernels
from conformance.chapters.numerics.attention_kernels import KERNELS, attempts
from conformance.chapters.numerics.support import by_kernel, compare
from conformance.harness import catalogue
from conformance.harness.check import Case
from conformance.harness.endings import ContractViolation
from conformance.harness.targets import resolve

CPU = resolve("cpu")
PARTS = [torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0)) for _ in range(3)]


def call() -> float:
    return float(F.scaled_dot_product_attention(PARTS[0], PARTS[1], PARTS[2]).sum())


def test_the_kernel_that_ran_is_named() -> None:
    with torch.no_grad():
        (flash,) = attempts(call, "cpu")
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        (composed,) = attempts(call, "cpu")

    assert (flash.kernel, composed.kernel) == ("flash", "math")
    assert flash.found == pytest.approx(composed.found)


@pytest.mark.parametrize(
    ("operation", "kernel"),
    [
        ("_scaled_dot_product_cudnn_attention", "cudnn"),
        ("_scaled_dot_product_flash_attention", "flash"),
        ("_scaled_dot_product_flash_attention_for_cpu", "flash"),
        ("_scaled_dot_product_efficient_attention", "efficient"),
        ("_scaled_dot_product_fused_attention_overrideable", "overrideable"),
        ("scaled_dot_product", None),
        ("mm", None),
    ],
)
def test_operations_are_kernels(operation: str, kernel: str | None) -> None:
    found = attention_kernels._OPERATION.match(operation)

    assert (found and found[1]) == kernel


class Card:
    """Kernels of a card that exist as Python functions; torch would choose the first that is allowed and takes all."""

    def __init__(self, **kernels: Callable[[], float] | None) -> None:
        self._kernels = kernels
        self._allowed = list(kernels)
        self.mode: attention_kernels.Attended

    @contextlib.contextmanager
    def only(self, backend: SDPBackend) -> Iterator[None]:
        before, self._allowed = self._allowed, [name for name, each in KERNELS.items() if each == backend]
        try:
            yield
        finally:
            self._allowed = before

    def attention(self) -> float:
        for name in self._allowed:
            if (kernel := self._kernels.get(name)) is not None:
                self.mode.kernel = name
                return kernel()
        raise RuntimeError("No available kernel. Aborting execution.")

    @contextlib.contextmanager
    def there(self) -> Iterator[None]:
        card = self

        class Attended(attention_kernels.Attended):
            def __enter__(self) -> Any:
                card.mode = self
                return super().__enter__()

        with (
            mock.patch.object(attention_kernels, "sdpa_kernel", self.only),
            mock.patch.object(attention_kernels, "Attended", Attended),
        ):
            yield


def broken() -> float:
    raise RuntimeError("cuDNN Frontend error: No execution plans support the graph.")


def found_on(card: Card) -> tuple[Case, dict[str, float]]:
    case = Case(catalogue.load().contracts["AMP-NUMERICS-067"], level="quick", seed=0, substitutions={})
    on_cuda = mock.Mock(wraps=CPU, device_type="cuda")
    with card.there():
        return case, by_kernel(case, on_cuda, torch.Generator(), card.attention)


def test_each_kernel_that_takes_the_inputs_is_measured() -> None:
    case, found = found_on(Card(cudnn=lambda: 1.0, flash=None, efficient=lambda: 2.0, math=lambda: 3.0))
    compare(case, "error", found)

    assert found == {"cudnn": 1.0, "efficient": 2.0, "math": 3.0}
    told = {evidence.name: evidence.measured for evidence in case.evidence}
    assert told["attention kernel that torch chooses"] == "cudnn"
    assert told["other kernels that accept the inputs"] == ["efficient", "math"]
    assert told["error, by kernel"] == ["cudnn: 1.0", "efficient: 2.0", "math: 3.0"]


def test_a_kernel_that_raises_is_told_from_all() -> None:
    with pytest.raises(ContractViolation, match="cudnn: RuntimeError: cuDNN Frontend error"):
        found_on(Card(cudnn=broken, math=lambda: 3.0))


def test_what_all_kernels_raise_goes_on() -> None:
    with pytest.raises(RuntimeError, match="cuDNN Frontend error"):
        found_on(Card(cudnn=broken, math=broken))


def test_inputs_that_no_kernel_takes_fail() -> None:
    with pytest.raises(ContractViolation, match="an attention kernel accepts the inputs"):
        found_on(Card(cudnn=None))
