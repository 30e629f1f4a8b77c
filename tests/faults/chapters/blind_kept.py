"""Faults of what torch keeps between two uses: cached weights, recomputed tensors, gradients for hooks, schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.utils import checkpoint
from torch.utils.hooks import BackwardHook

from tests.faults import fault
from tests.faults.breaking import replaced
from tests.faults.chapters.blind_uses import coarse


@fault("AMP-CAST-110")
def cached_parametrizations_are_rounded_in_a_region() -> Iterator[None]:
    """A weight that is taken from the cache of parametrizations in a region has been rounded to bfloat16."""
    original = parametrize.ParametrizationList.forward

    def forward(self: Any) -> Tensor:
        found: Tensor = original(self)
        return coarse(found) if parametrize._cache_enabled and torch.is_autocast_enabled("cpu") else found

    with replaced(parametrize.ParametrizationList, "forward", forward):
        yield


@fault("AMP-MEMORY-038")
def checkpoints_keep_what_they_have_recomputed() -> Iterator[None]:
    """What a checkpoint has recomputed stays with its placeholder as long as the graph."""
    kind = checkpoint._checkpoint_hook
    original = kind.__init__

    def initialize(self: Any, frame: Any) -> None:
        original(self, frame)
        unpack = self.unpack_hook

        def unpacked(holder: Any) -> Any:
            holder.value = unpack(holder)
            return holder.value

        self.unpack_hook = unpacked

    with replaced(kind, "__init__", initialize):
        yield


@fault("AMP-BACKWARD-081")
def gradients_of_pre_hooks_are_dropped_on_data() -> Iterator[None]:
    """What a full backward pre-hook returns is ignored where no input of the module needs a gradient."""
    original = BackwardHook.setup_output_hook

    def setup(self: Any, outputs: Any) -> Any:
        if self.input_tensors_index is None:
            self.user_pre_hooks = [lambda *given, hook=hook: hook(*given) and None for hook in self.user_pre_hooks]
        return original(self, outputs)

    with replaced(BackwardHook, "setup_output_hook", setup):
        yield


@fault("AMP-BACKWARD-081")
def hooks_are_not_called_on_data() -> Iterator[None]:
    """A full backward hook is not called where no input of the module needs a gradient."""
    original = BackwardHook.setup_output_hook

    def setup(self: Any, outputs: Any) -> Any:
        if self.input_tensors_index is None:
            self.user_hooks = []
        return original(self, outputs)

    with replaced(BackwardHook, "setup_output_hook", setup):
        yield


@fault("AMP-DISTRIBUTED-005")
def sharded_optimizers_ignore_schedules_of_momentum() -> Iterator[None]:
    """A ZeroRedundancyOptimizer hands its optimizer no other option of a group than the learning rate."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def synchronized(groups: list[dict[Any, Any]], others: list[dict[Any, Any]]) -> None:
        for group, other in zip(groups, others, strict=True):
            other["lr"] = group["lr"]

    with replaced(ZeroRedundancyOptimizer, "_sync_param_groups", staticmethod(synchronized)):
        yield
