"""Conversions of modules by the future default that swaps tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def swapping() -> Iterator[None]:
    """Let conversions swap the tensors of parameters and gradients in place of their data."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
