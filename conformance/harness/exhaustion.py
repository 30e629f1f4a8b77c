"""Out-of-memory errors in a case: recognized, and the memory freed for the cases after it."""

from __future__ import annotations

import gc
import re
import traceback

import torch

# The allocators of CUDA, ROCm and XPU raise torch.OutOfMemoryError; other allocators, and drivers and libraries where
# they allocate by themselves, a RuntimeError in words.
_WORDS = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|\b[Oo]ut of memory\b|RESOURCE_EXHAUSTED"
    r"|(CUBLAS|CUDNN|HIPBLAS|CUSOLVER)_STATUS_(ALLOC_FAILED|NOT_ENOUGH_WORKSPACE)"
    r"|(miopenStatus|MIOPEN_STATUS_)AllocFailed|UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY|std::bad_alloc"
)


def ran_out(error: BaseException | None) -> bool:
    """Whether `error` says that a device or the host has no memory left."""
    named = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return named or (isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None)


def let_go(error: BaseException) -> None:
    """Drop the local variables of the frames of `error`, and of the errors before it, which pytest keeps for debuggers.

    With them go tensors, and generators that stand in a region, which leave it now.
    """
    chained: BaseException | None = error
    while chained is not None:
        traceback.clear_frames(chained.__traceback__)
        for frame, _ in traceback.walk_tb(chained.__traceback__):
            # Before Python 3.13 a frame whose locals were once asked for keeps a copy, which asking again renews.
            frame.f_locals  # noqa: B018
        chained = chained.__context__


def give_back(error: BaseException) -> None:
    """Free what the frames of `error` hold, and what the allocators keep for later, so that the next case has it."""
    let_go(error)
    gc.collect()
    for device_type in ("cuda", "xpu", "mps"):
        module = getattr(torch, device_type, None)
        if module is not None and _in_use(module):
            module.empty_cache()


def _in_use(module: object) -> bool:
    asked = getattr(module, "is_initialized", None) or getattr(module, "is_available", None)
    return bool(asked and asked())
