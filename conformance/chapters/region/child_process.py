"""Report the autocast state of a child process, and autocast's behaviour for a PrivateUse1 backend in it."""

from __future__ import annotations

import types
import warnings
from typing import Any

import torch

from ...oracles.region.stack_model import State, dtype_of_product, observe, probe_product

BACKEND = "conformant"  # the name of the PrivateUse1 backend in the child


def send_state(sender: Any) -> None:
    """Send the state that the process started with."""
    sender.send(observe())


def send_everything(sender: Any) -> None:
    """Send the state, the dtype of products, and the results of a PrivateUse1 backend, which stays renamed."""
    torch.set_num_threads(1)
    found: tuple[State, torch.dtype | None] = (observe(), dtype_of_product(probe_product("cpu")))
    sender.send((*found, backend_registration()))


def backend_registration() -> dict[str, Any]:
    """Rename the PrivateUse1 backend, register its module in steps, and report `torch.autocast` after each.

    Call it in a separate process: a backend can be renamed once.
    """
    torch.utils.rename_privateuse1_backend(BACKEND)
    story: dict[str, Any] = {"without a module": _refusal()}
    module: Any = types.ModuleType(f"torch.{BACKEND}")
    torch._register_device_module(BACKEND, module)
    story["without the function"] = _refusal()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float64]
    for dtype in (torch.bfloat16, torch.float64, torch.float16):
        story[str(dtype)] = _region(dtype)
    story["after the regions"] = torch.is_autocast_enabled(BACKEND)
    return story


def _refusal() -> tuple[str, str]:
    try:
        torch.autocast(BACKEND)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _region(dtype: torch.dtype) -> tuple[bool, torch.dtype, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autocast(BACKEND, dtype=dtype):
            inside = torch.is_autocast_enabled(BACKEND), torch.get_autocast_dtype(BACKEND)
    return (*inside, [str(warning.message) for warning in caught])
