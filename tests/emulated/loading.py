"""Loading the emulated card into a process, which has to come before torch."""

from __future__ import annotations

import ctypes
import sys

from tests.emulated.build import library, torch_folder

_NAMED = {
    "emulated_replay": ctypes.c_char_p,
    "emulated_begin_capture": ctypes.c_char_p,
    "emulated_end_capture": ctypes.c_void_p,
    "emulated_record": ctypes.c_void_p,
    "emulated_time": ctypes.c_double,
    "emulated_now": ctypes.c_double,
    "emulated_new_stream": ctypes.c_int64,
    "emulated_stream": ctypes.c_int64,
    "emulated_memory": ctypes.c_int64,
    "emulated_peak": ctypes.c_int64,
}


def load() -> ctypes.CDLL:
    """Load the card; raises RuntimeError where torch is there already, whose own hooks of CUDA would be found first."""
    if "torch" in sys.modules:
        raise RuntimeError("the emulated card has to be loaded before torch")
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    card = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
    for name, result in _NAMED.items():
        getattr(card, name).restype = result
    return card
