"""Fakes of missing hardware for AMP's own Python code; no tensor is ever placed on them."""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

_CUDA = ("current_stream", "device", "stream")
_ACCELERATOR = ("current_stream", "device_index")


@contextlib.contextmanager
def cuda_that_says(*, bf16: bool) -> Iterator[None]:
    """Make torch report a CUDA device, with or without bfloat16, inside the block.

    Source of the questions: torch.cuda.amp.common.amp_definitely_not_available and torch.amp.autocast_mode, autocast.
    """
    with _answering(torch.cuda, "is_available", True), _answering(torch.cuda, "is_bf16_supported", bf16):
        yield


@contextlib.contextmanager
def accelerator_that_is(device_type: str | None) -> Iterator[None]:
    """Make torch report this as the current accelerator inside the block, or none, and CUDA only if it is that."""
    device = None if device_type is None else torch.device(device_type)
    with (
        _answering(torch.accelerator, "current_accelerator", device),
        _answering(torch.accelerator, "is_available", device is not None),
        _answering(torch.cuda, "is_available", device_type == "cuda"),
        _answering(torch.cuda, "is_bf16_supported", device_type == "cuda"),
    ):
        yield


@contextlib.contextmanager
def cuda_that_computes_nothing() -> Iterator[None]:
    """Let threads select CUDA devices and streams inside the block, for work that runs on the CPU.

    What torch.nn.parallel.parallel_apply asks for: of torch.cuda in older versions, of torch.accelerator in newer ones.
    """
    module = importlib.import_module("torch.nn.parallel.parallel_apply")
    with contextlib.ExitStack() as stack:
        stack.enter_context(cuda_that_says(bf16=True))
        stack.enter_context(mock.patch.object(module, "_get_device_index", lambda device, *_: device))
        for owner, names in ((torch.cuda, _CUDA), (torch.accelerator, _ACCELERATOR)):
            for name in names:
                stack.enter_context(_answering(owner, name, contextlib.nullcontext()))
        stack.enter_context(_answering(torch.accelerator, "is_available", True))
        stack.enter_context(_answering(torch.accelerator, "current_accelerator", torch.device("cuda")))
        # Without an argument 2.15 asks for the accelerator that is there, and older versions for CUDA.
        enabled = torch.is_autocast_enabled
        stack.enter_context(mock.patch.object(torch, "is_autocast_enabled", lambda kind="cuda": enabled(kind)))
        yield


def _answering(owner: Any, name: str, answer: Any) -> Any:
    """Return a patch by a plain function: one made by `mock` itself takes a millisecond, and these are many."""

    def function(*arguments: Any, **options: Any) -> Any:
        return answer

    return mock.patch.object(owner, name, function, create=True)


def third_party_backend() -> str:
    """Return the name that torch has for a third party's backend: privateuseone until one is registered."""
    return str(torch._C._get_privateuse1_backend_name())


@contextlib.contextmanager
def backend_module(dtypes: Sequence[torch.dtype] | None) -> Iterator[str]:
    """Give the third party's backend a module inside the block; yield its name.

    The module declares `dtypes` as those of autocast; None leaves that function out.
    """
    name = third_party_backend()
    module: Any = types.ModuleType(name)
    if dtypes is not None:
        module.get_amp_supported_dtype = lambda: list(dtypes)
    with mock.patch.object(torch, name, module, create=True):
        yield name


@contextlib.contextmanager
def no_backend_module() -> Iterator[str]:
    """Leave the third party's backend without a module inside the block, where one is registered; yield its name."""
    name = third_party_backend()
    with mock.patch.object(torch, name) if hasattr(torch, name) else contextlib.nullcontext() as module:
        if module is not None:
            delattr(torch, name)
        yield name
