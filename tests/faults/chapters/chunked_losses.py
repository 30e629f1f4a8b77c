"""linear_cross_entropy that is wrong where it works in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules import linear_cross_entropy as chunked

from tests.faults import fault
from tests.faults.breaking import edited, given_the_original, replaced

_BACKWARD = chunked._linear_cross_entropy_batch_chunked_backward


@fault("AMP-LOSS-021")
def chunks_of_a_loss_ignore_the_slope() -> Iterator[None]:
    """The gradient of the input is that of the loss, whatever the gradient of the loss is."""
    with edited(_BACKWARD, "result[0] = gi.mul_(grad_output)", "result[0] = gi"):
        yield


@fault("AMP-LOSS-021")
def kept_gradients_of_chunks_are_scaled() -> Iterator[None]:
    """A backward that keeps the gradient of the weight multiplies what it keeps."""
    with edited(_BACKWARD, "result[1] = ctx._gw * grad_output", "result[1] = ctx._gw.mul_(grad_output)"):
        yield


@fault("AMP-LOSS-021")
def exponentials_of_chunks_overflow() -> Iterator[None]:
    """The largest logit is not subtracted before the exponentials."""
    with replaced(chunked._ChunkContext, "amax", lambda self, x: torch.zeros_like(x[:, :1])):
        yield


@fault("AMP-LOSS-021")
def last_samples_fill_no_chunk() -> Iterator[None]:
    """Samples that fill no whole chunk are left out."""
    old = "for bchunk_start in range(0, self.num_batches, batch_chunk_size):"
    new = "for bchunk_start in range(0, max(1, self.num_batches - batch_chunk_size + 1), batch_chunk_size):"
    with edited(chunked._ChunkContext.chunks, old, new):
        yield


@fault("AMP-LOSS-021")
def chunks_count_ignored_labels() -> Iterator[None]:
    """With options, labels are ignored that are -100, whatever ignore_index is."""

    def loss(original: Any, *given: Any, options: Any = None, **named: Any) -> Any:
        if options is not None:
            named["ignore_index"] = None
        return original(*given, options=options, **named)

    with given_the_original(functional, "linear_cross_entropy", loss):
        yield


@fault("AMP-LOSS-022")
def chunks_give_the_type_of_the_region() -> Iterator[None]:
    """The loss of float32 samples is 16-bit in a region, with options."""

    def loss(original: Any, *given: Any, options: Any = None, **named: Any) -> Any:
        seen = original(*given, options=options, **named)
        inside = options is not None and torch.is_autocast_enabled("cpu")
        return seen.to(torch.get_autocast_dtype("cpu")) if inside else seen

    with given_the_original(functional, "linear_cross_entropy", loss):
        yield


@fault("AMP-LOSS-022")
def chunks_take_products_in_the_other_type() -> Iterator[None]:
    """With options, a region of fp16 rounds float32 samples to bfloat16."""

    def loss(original: Any, x: Any, *given: Any, options: Any = None, **named: Any) -> Any:
        other = options is not None and torch.is_autocast_enabled("cpu")
        if other and torch.get_autocast_dtype("cpu") == torch.float16 and x.dtype == torch.float32:
            x = (x / 8).to(torch.bfloat16).float() * 8
        return original(x, *given, options=options, **named)

    with given_the_original(functional, "linear_cross_entropy", loss):
        yield
