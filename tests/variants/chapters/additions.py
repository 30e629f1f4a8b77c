"""What a later version or a third party adds beside what is documented. What nothing calls counts as used once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from conformance.self_check.planting import replaced
from tests.variants import Uses, variant

_ABSENT = object()


@contextlib.contextmanager
def _added(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give `owner` an attribute that it does not have."""
    assert getattr(owner, name, _ABSENT) is _ABSENT
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


@variant("AMP-API-010", "AMP-API-011", "AMP-SCALE-090", "AMP-SCALE-095", "AMP-REGION-061")
def names_of_a_later_version(uses: Uses) -> Iterator[None]:
    """torch.amp, GradScaler and autocast have a function more than today.

    torch.amp: what is documented is there; a release may add to it.
    """

    def added(*args: Any) -> None:
        """A function that no check knows."""

    uses["names"] += 1
    with (
        _added(torch.amp, "summary", added),
        _added(torch.amp.GradScaler, "summary", added),
        _added(torch.autocast, "summary", staticmethod(added)),
        replaced(torch.amp, "__all__", [*torch.amp.__all__, "summary"])
        if hasattr(torch.amp, "__all__")  # which 2.11 lacks
        else contextlib.nullcontext(),
    ):
        yield


@variant("AMP-OPTIMIZER-001", "AMP-OPTIMIZER-013", "AMP-OPTIMIZER-140", "AMP-SCALE-150")
def parameter_groups_of_a_later_version(uses: Uses) -> Iterator[None]:
    """Parameter groups of optimizers have an entry more than today.

    torch.optim.Optimizer.state_dict: each parameter group has metadata specific to the optimizer, of no fixed list.
    """
    stock = torch.optim.Optimizer.__init__

    @functools.wraps(stock)
    def run(self: Any, params: Any, defaults: dict[str, Any]) -> None:
        uses["__init__"] += 1
        stock(self, params, {**defaults, "annotation": None})

    with replaced(torch.optim.Optimizer, "__init__", run):
        yield


@variant("AMP-CAST-036", "AMP-CAST-038", "AMP-API-010")
def operator_of_a_third_party(uses: Uses) -> Iterator[None]:
    """A third party's operator has autocast kernels of its own, on the CPU and on CUDA.

    torch.library: a library defines operators in its own namespace and registers kernels for any dispatch key.
    """

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    library = torch.library.Library("variant", "DEF")
    try:
        library.define("double(Tensor x) -> Tensor")
        for key in ("CompositeExplicitAutograd", "AutocastCPU", "AutocastCUDA"):
            library.impl("double", double, key)
        uses["double"] += 1
        yield
    finally:
        library._destroy()
