"""The emulated card in this process: importing this module loads it, which has to come before torch."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from tests.simulation.emulated.build import library, torch_folder

# What the functions of card.cpp return, where it is not an int.
_RESULTS: dict[Any, tuple[str, ...]] = {
    ctypes.c_char_p: ("replay", "begin_capture"),
    ctypes.c_void_p: ("record", "end_capture"),
    ctypes.c_double: ("time", "now"),
    ctypes.c_int64: ("new_stream", "stream", "memory", "peak"),
}


def _load() -> ctypes.CDLL:
    if "torch" in sys.modules:  # its own hooks of CUDA would be found first
        raise RuntimeError("the emulated card has to be loaded before torch")
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    card = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
    for result, names in _RESULTS.items():
        for name in names:
            getattr(card, f"emulated_{name}").restype = result
    return card


CARD = _load()
