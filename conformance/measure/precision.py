"""Set the precision flags and kernel selection for measured products and convolutions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from .flags import FLAGS, flag, kept


def computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device has arithmetic in `dtype`: MPS and some of Intel's GPUs have no float64."""
    try:
        return float(torch.ones(1, dtype=dtype, device=device) + 1) == 2.0
    except (RuntimeError, TypeError, NotImplementedError):
        return False


@functools.cache
def flushes_subnormals(device: torch.device) -> bool:
    """Return whether the device takes subnormal float32 numbers for zero, as an operand or as a result."""
    least = torch.tensor([2.0**-126, 2.0**-130], device=device)
    return bool(((least * torch.tensor([0.5, 2.0], device=device)).cpu() == 0).any())


@contextlib.contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Have fp32 products computed in fp32 and 16-bit ones accumulated in fp32, as the flags of torch promise.

    Puts every flag back. On a device type other than cuda only the precision of fp32 products is a flag.
    """
    flags = [each for each in FLAGS if device_type == "cuda" and each.reduces and each.present]
    precision = flag("torch.get_float32_matmul_precision")
    if precision.read() != "highest":
        flags.append(precision)
    with kept(*flags):
        for each in flags:
            each.write("highest" if each is precision else False)
        yield


@contextlib.contextmanager
def repeatable_convolutions() -> Iterator[None]:
    """Have cuDNN (MIOpen) give the same bits each time for the same convolution and its gradients.

    By default it may choose kernels that add with atomics, transposed convolutions and gradients in particular, or
    another kernel each time ("Reproducibility" in torch's notes). Puts both flags back.
    """
    deterministic, benchmark = flag("torch.backends.cudnn.deterministic"), flag("torch.backends.cudnn.benchmark")
    with kept(deterministic, benchmark):
        deterministic.write(True)
        benchmark.write(False)
        yield
