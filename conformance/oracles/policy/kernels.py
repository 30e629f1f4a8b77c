"""Where the dispatcher's autocast kernels come from: torch itself, or an extension that registered its own."""

from __future__ import annotations

import re
from collections import Counter

import torch

from .overloads import dispatch_key, registered

# autocast_mode.cpp, and in builds for CUDA cudnn/AutocastRNN.cpp.
_OF_TORCH = re.compile(r"(^|/)aten/src/ATen/[\w/]+\.\w+$")


def foreign_sources(device_type: str) -> dict[str, int]:
    """Return the files outside of torch whose autocast kernels are in force for `device_type`: file -> overloads.

    A kernel of torch that an extension replaced is counted for the extension. Raises AttributeError where this torch
    lacks the private functions of the dispatcher that tell it.
    """
    key = dispatch_key(device_type)
    found = Counter(source(overload, key) for overload in registered(device_type))
    return {file: count for file, count in sorted(found.items()) if not _OF_TORCH.search(file)}


def source(overload: str, key: str) -> str:
    """Return the file that registered the kernel in force of an overload ("mm") under a dispatch key."""
    # One line for each kernel; those that were replaced follow their key with "(inactive)".
    text: str = torch._C._dispatch_dump(f"aten::{overload}")
    found = re.search(rf"^{key}(?:\[\w+\])?: registered at (.*?)(?::\d+)? ::", text, re.MULTILINE)
    return found.group(1) if found else "an unknown file"
