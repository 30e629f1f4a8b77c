"""Faults of ops along one dimension or over several: kernels that are right for the last one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import kernel

LOW = (torch.float16, torch.bfloat16)
_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _on_the_cpu(op: Any, change: Callable[..., Any]) -> Any:
    """Replace a CPU kernel by what `change` makes of it."""
    overload = op.name().removeprefix("aten::")
    return kernel(overload, lambda *given, **named: change(op, *given, **named), "CPU")
