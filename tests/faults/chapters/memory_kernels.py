"""Faults of kernels that keep too much outside of regions too, or that hide behind one which does so rightly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import kernel, replaced


@fault("AMP-MEMORY-014")
def layer_norm_widens_16_bit() -> Iterator[None]:
    """layer_norm computes in fp32 whatever it is given, in regions and outside: what it keeps is fp32."""
    right = torch.nn.functional.layer_norm

    def wide(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return right(x.float(), *args, **options).to(x.dtype)

    with replaced(torch.nn.functional, "layer_norm", wide):
        yield


@fault("AMP-MEMORY-014", "AMP-MEMORY-015", "AMP-MEMORY-016")
def attention_widens_16_bit() -> Iterator[None]:
    """Attention computes in fp32 whatever it is given, in regions and outside."""
    right = torch.nn.functional.scaled_dot_product_attention

    def wide(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        return right(query.float(), key.float(), value.float(), **options).to(query.dtype)

    with replaced(torch.nn.functional, "scaled_dot_product_attention", wide):
        yield


@fault("AMP-MEMORY-014", "AMP-MEMORY-015", "AMP-MEMORY-016")
def gelu_widens_16_bit() -> Iterator[None]:
    """gelu computes in fp32 whatever it is given, in regions and outside."""
    right = torch.nn.functional.gelu
    with replaced(torch.nn.functional, "gelu", lambda x, **options: right(x.float(), **options).to(x.dtype)):
        yield


def strange_dropout(x: torch.Tensor, p: float = 0.5, *args: Any, **options: Any) -> torch.Tensor:
    """A dropout that keeps its factors in two parts, in fp32 as in 16 bit: another kernel, not a fault."""
    noise = torch.bernoulli(torch.full_like(x, 1 - p))
    return x * noise * torch.full_like(x, 1 / (1 - p))


@fault("AMP-MEMORY-015", "AMP-MEMORY-016")
def gelu_in_fp32_beside_a_strange_dropout() -> Iterator[None]:
    """gelu runs in fp32 in regions, in a network whose dropout keeps what no rule knows."""

    def wide(x: torch.Tensor, **options: Any) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.gelu(x.float(), **options).to(x.dtype)

    with replaced(torch.nn.functional, "dropout", strange_dropout), kernel("gelu", wide, "AutocastCPU"):
        yield


@fault("AMP-MEMORY-016")
def weights_copied_twice_beside_a_strange_dropout() -> Iterator[None]:
    """Each use of a weight leaves a second 16-bit copy in the region, in a network with a dropout of its own."""
    second: list[torch.Tensor] = []
    clear, right = torch.clear_autocast_cache, torch.ops.aten.linear.default

    def clearing() -> None:
        second.clear()
        clear()

    def copying(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        second.append(weight.detach().to(dtype))
        with torch.autocast("cpu", enabled=False):
            result: torch.Tensor = right(*(None if t is None else t.to(dtype) for t in (x, weight, bias)))
        return result

    with (
        replaced(torch.nn.functional, "dropout", strange_dropout),
        kernel("linear", copying, "AutocastCPU"),
        replaced(torch, "clear_autocast_cache", clearing),
    ):
        yield
    second.clear()
