"""Positions and counts that are kept in the 16-bit type of the elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tests.faults import fault
from tests.faults.breaking import kernel


@fault("AMP-NUMERICS-125")
def sources_of_nearest_neighbours_are_counted_in_16_bits() -> Iterator[None]:
    """upsample_nearest1d computes its sources in the type of the elements."""

    def upsampled(x: torch.Tensor, size: Sequence[int], scales: float | None = None) -> torch.Tensor:
        sources = torch.arange(size[0]).to(x.dtype) * (x.shape[-1] / size[0])
        return x.index_select(-1, sources.floor().long().clamp(max=x.shape[-1] - 1))

    with kernel("upsample_nearest1d", upsampled, "CPU"):
        yield


@fault("AMP-NUMERICS-125")
def places_of_adaptive_pools_are_kept_in_16_bits() -> Iterator[None]:
    """adaptive_max_pool2d keeps the places of its results in the type of the elements, as torch did before 2.7."""

    def pooled(x: torch.Tensor, size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        window = [side // wanted for side, wanted in zip(x.shape[-2:], size, strict=True)]
        found, places = torch.ops.aten.max_pool2d_with_indices(x, window)
        return found, places.to(x.dtype).long()

    with kernel("adaptive_max_pool2d", pooled, "CPU"):
        yield


@fault("AMP-NUMERICS-125")
def the_place_of_the_largest_is_kept_in_16_bits() -> Iterator[None]:
    """argmax of a vector rounds the place to the type of the elements."""

    def largest(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
        place = x.flatten().max(0).indices if dim is None else x.max(dim, keepdim).indices
        return place.to(x.dtype).long()

    with kernel("argmax", largest, "CPU"):
        yield


@fault("AMP-NUMERICS-107", level="standard")
def samples_of_a_loss_are_counted_in_bf16() -> Iterator[None]:
    """nll_loss of bf16 stops counting its samples at 256; what stock torch does to fp16 there is waived."""

    def loss(
        x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignored: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float()
        lost = -(wide if wide.dim() == 1 else wide.gather(1, target[:, None]).flatten())
        count = lost.numel() if x.dtype is torch.float32 else min(lost.numel(), 256)
        found = (lost, lost.sum() / count, lost.sum())[reduction]
        return found.to(x.dtype), torch.tensor(float(count)).to(x.dtype)

    with kernel("nll_loss_forward", loss, "CPU"):
        yield
