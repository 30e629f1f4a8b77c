"""Whether the compilers of this torch are switched on: debugging and some continuous integration switch them off."""

from __future__ import annotations

import codecs
import functools
import importlib
import locale
import os

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def without_torch_compile() -> str | None:
    """Return why torch.compile compiles nothing here, or None; switched off, it returns its function as it is."""
    try:
        dynamo = importlib.import_module("torch._dynamo")
        dynamo.eval_frame.check_if_dynamo_supported()
        unreadable = _without_templates()
    except (ImportError, RuntimeError) as error:
        return f"torch.compile does not work here: {error}"
    if dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile is switched off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE)"
    return unreadable or _under_modes()


def _under_modes() -> str | None:
    """Return which modes Dynamo would trace, or refuse, with the program: ones that were in force before the case."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    names = ", ".join(type(mode).__name__ for mode in modes)
    return (
        f"torch.compile would compile a mode that is in force (TorchFunctionMode, TorchDispatchMode): {names}"
        if names
        else None
    )


@functools.cache
def _without_templates() -> str | None:
    """Return why inductor cannot be imported, or None: torch 2.13 reads its templates in the encoding of the locale."""
    encoding = locale.getpreferredencoding(False)
    if codecs.lookup(encoding).name == "utf-8":
        return None
    try:
        importlib.import_module("torch._inductor.compile_fx")
    except UnicodeError as error:
        return f"torch.compile cannot read torch's own files in the encoding of this locale: {error}; set PYTHONUTF8=1"
    return None


def without_torchscript() -> str | None:
    """Return why torch.jit.script and trace return their function as it is, or None."""
    return None if torch.jit._state._enabled.enabled else "TorchScript is switched off (PYTORCH_JIT)"
