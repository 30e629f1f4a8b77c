"""Set the precision flags and kernel selection for measured products and convolutions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# "CUDA semantics", sections on TF32 and on reduced precision reductions in fp16 and bf16 GEMMs, and fp16 accumulation.
_CUDA_FLAGS = (
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_fp16_accumulation"),
    (torch.backends.cudnn, "allow_tf32"),
)


def computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device has arithmetic in `dtype`: MPS and some of Intel's GPUs have no float64."""
    try:
        return float(torch.ones(1, dtype=dtype, device=device) + 1) == 2.0
    except (RuntimeError, TypeError, NotImplementedError):
        return False


@contextlib.contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Have fp32 products computed in fp32 and 16-bit ones accumulated in fp32, as the flags of torch promise.

    Puts every flag back. On a device type other than cuda only the precision of fp32 products is a flag.
    """
    before = torch.get_float32_matmul_precision()
    flags = [(owner, name) for owner, name in _CUDA_FLAGS if device_type == "cuda" and hasattr(owner, name)]
    values = [getattr(owner, name) for owner, name in flags]
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        for owner, name in flags:
            setattr(owner, name, False)
        yield
    finally:
        for (owner, name), value in zip(flags, values, strict=True):
            setattr(owner, name, value)
        if before != "highest":
            torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def repeatable_convolutions() -> Iterator[None]:
    """Have cuDNN (MIOpen) give the same bits each time for the same convolution and its gradients.

    By default it may choose kernels that add with atomics, transposed convolutions and gradients in particular, or
    another kernel each time ("Reproducibility" in torch's notes). Puts both flags back.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
