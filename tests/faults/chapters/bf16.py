"""Loss scaling that takes every 16-bit type for fp16."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults import fault
from tests.faults.chapters.scale import _unscale_kernel


@fault("AMP-BF16-005")
def gradients_pass_through_fp16() -> Iterator[None]:
    """Gradients are rounded to fp16 before they are checked and unscaled."""
    with _unscale_kernel(
        "if not torch.isfinite(grad).all()", "grad.copy_(grad.half())\n        if not torch.isfinite(grad).all()"
    ):
        yield
