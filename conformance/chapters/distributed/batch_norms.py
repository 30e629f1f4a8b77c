"""What each rank does with a synchronized batch normalization on the CPU, which torch refuses to train."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...oracles.numbers.bits import same

CHANNELS = 3


def _named(call: Callable[[], Any]) -> str:
    """Return the class of what a call raises and whether it names SyncBatchNorm: "" where it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}{', of SyncBatchNorm' * ('SyncBatchNorm' in str(error))}"
    return ""


def refusals(dtype: torch.dtype, seed: int) -> list[tuple[str, str, str, bool, bool]]:
    """Train outside of a region and in one, alone and as a replica.

    Return by place what the layer raises, what DistributedDataParallel does, whether running statistics are as they
    were, and whether autocast is.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, CHANNELS, 5, generator=generator)
    found = []
    for place in ("no region", "a region"):
        layer = nn.SyncBatchNorm(CHANNELS)
        before = [each.clone() for each in (layer.running_mean, layer.running_var) if each is not None]
        opened = torch.autocast("cpu", dtype=dtype) if place == "a region" else contextlib.nullcontext()
        with opened:
            raised = _named(functools.partial(layer, x))
            wrapped = _named(functools.partial(DistributedDataParallel, layer))
        after = [each for each in (layer.running_mean, layer.running_var) if each is not None]
        kept = all(same(one, other) for one, other in zip(after, before, strict=True))
        found.append((place, raised, wrapped, kept, torch.is_autocast_enabled("cpu")))
    return found


def evaluated(dtype: torch.dtype, seed: int) -> list[tuple[str, str, str, bool]]:
    """Convert a batch normalization and evaluate both; return by place their types and whether their bits agree."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, CHANNELS, 5, generator=generator)
    plain = nn.BatchNorm1d(CHANNELS)
    plain(x)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv1d(CHANNELS, CHANNELS, 1), plain)).eval()
    found = []
    for place in ("no region", "a region"):
        with torch.autocast("cpu", dtype=dtype) if place == "a region" else contextlib.nullcontext():
            hidden = converted[0](x)
            seen, expected = converted[1](hidden), plain.eval()(hidden)
        found.append((place, str(seen.dtype), str(expected.dtype), same(seen, expected)))
    return found
