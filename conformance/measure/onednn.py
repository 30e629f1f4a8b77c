"""What oneDNN, with which torch computes on a CPU, lacks on the processor of this machine."""

from __future__ import annotations

import functools

import torch

NO_PRIMITIVE = "could not create a primitive"
"""How oneDNN's error begins where the processor has no instruction for a dtype (dnnl_types.h, `unimplemented`)."""


def lacks_primitive(error: BaseException | str) -> bool:
    """Return whether an error, or its message, is oneDNN's for an operation that this processor cannot do."""
    return NO_PRIMITIVE in str(error)


@functools.cache
def runs_lstm(device_type: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether an `nn.LSTM` works in a region of `dtype`: on a CPU with AVX2 alone it raises (AMP-CAST-065).

    Raises whatever the LSTM raises for another reason.
    """
    with torch.random.fork_rng(devices=()):  # what is probed once must not shift the numbers of whoever asks first
        module = torch.nn.LSTM(4, 4).to(device_type)
    try:
        with torch.autocast(device_type, dtype=dtype):
            module(torch.ones(1, 1, 4, device=device_type))
    except RuntimeError as error:
        if not lacks_primitive(error):
            raise
        return False
    return True
