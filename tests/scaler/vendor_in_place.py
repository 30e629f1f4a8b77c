"""Puts the vendor's scaler in the place of torch's classes when it is imported, as `--import` does."""

from __future__ import annotations

import sys

import torch

from tests.scaler.vendor_scaler import GradScaler, old_spelling

for _place, _kind in {"amp": GradScaler, "cuda.amp": old_spelling("cuda"), "cpu.amp": old_spelling("cpu")}.items():
    for _module in (f"torch.{_place}", f"torch.{_place}.grad_scaler"):
        sys.modules[_module].GradScaler = _kind  # type: ignore[attr-defined]
torch.GradScaler = GradScaler
