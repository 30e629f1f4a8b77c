"""Whether the compilers of this torch are switched on: debugging and some continuous integration switch them off."""

from __future__ import annotations

import importlib
import os

import torch


def without_torch_compile() -> str | None:
    """Return why torch.compile compiles nothing here, or None; switched off, it returns its function as it is."""
    try:
        dynamo = importlib.import_module("torch._dynamo")
        dynamo.eval_frame.check_if_dynamo_supported()
    except (ImportError, RuntimeError) as error:
        return f"torch.compile does not work here: {error}"
    if dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile is switched off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE)"
    return None


def without_torchscript() -> str | None:
    """Return why torch.jit.script and trace return their function as it is, or None."""
    return None if torch.jit._state._enabled.enabled else "TorchScript is switched off (PYTORCH_JIT)"
