"""Abilities of the processor that tests run on."""

from __future__ import annotations

import functools

import torch

LACKS_LSTM = "could not create a primitive"
"""How oneDNN's error begins where it has no LSTM in a type; a CPU region raises it then (docs/divergences.md)."""


@functools.cache
def runs_lstm() -> bool:
    """Whether an LSTM works in a bfloat16 region of the CPU: with AVX2 alone it raises."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.nn.LSTM(4, 4)(torch.ones(1, 1, 4))
    except RuntimeError as error:
        if LACKS_LSTM not in str(error):
            raise
        return False
    return True
