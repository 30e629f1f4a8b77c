"""Switch TF32 off or on for a measurement, and verify that it is in effect."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...harness.check import Case
from ...harness.targets import Target

AMPERE = 8  # the first capability with TF32 (CUDA C++ Programming Guide, compute capabilities)


@contextmanager
def precision(case: Case, target: Target, baseline: str) -> Iterator[None]:
    """Set TF32 for fp32 products and convolutions as the baseline requires, and verify it.

    On other devices than CUDA's there is only off, which on an accelerator is seen as well: ROCm's and XPU's libraries
    have a mode like it. Ends the case where TF32 is allowed and not in effect.
    """
    on = baseline == "tf32"
    if on and not has_tf32_flags(target):
        case.unsupported("TF32 is a mode of CUDA devices")
    with _switched(target, on):
        if target.device_type != "cpu":
            seen = tf32_in_effect(target.device)
            if on and not seen:
                _end(case, target)
            case.equal("TF32 in effect in the fp32 arm, as seen in a product", seen, on)
        if has_tf32_flags(target) and not on:  # allowed is not demanded: which kernel convolves is the library's choice
            case.equal("TF32 in effect in the fp32 arm, as seen in a convolution", tf32_convolves(target.device), False)
        yield


@contextmanager
def _switched(target: Target, on: bool) -> Iterator[None]:
    if target.device_type != "cuda":
        yield
        return
    flags = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [flag.allow_tf32 for flag in flags]
    named = torch.get_float32_matmul_precision()
    try:
        for flag in flags:
            flag.allow_tf32 = on
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value
        if named == "medium":  # of which the flag knows no more than that TF32 is on
            torch.set_float32_matmul_precision(named)


def _end(case: Case, target: Target) -> None:
    """End the case for want of TF32: UNSUPPORTED only where device or user declare that there is none."""
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        case.unsupported("NVIDIA_TF32_OVERRIDE=0 takes TF32 from every library")
    if int(str(target.probe["capability"]).partition(".")[0]) < AMPERE:
        case.unsupported("the device has no TF32")
    case.inconclusive(
        "TF32 is allowed and not in effect, as seen in a product: this build or its libraries chose other units, "
        "so there is no such baseline to compare with"
    )


def has_tf32_flags(target: Target) -> bool:
    """Return whether torch can switch TF32 on and off for the target: on CUDA devices of NVIDIA's."""
    return target.device_type == "cuda" and torch.version.hip is None


def tf32_in_effect(device: torch.device) -> bool:
    """Return whether products read 10 bits of mantissa only: 1 + 2^-13 is then 1."""
    # Large enough that a library has no reason to prefer the ordinary units where TF32 is allowed.
    factor = torch.full((1024, 1024), 1 + 2.0**-13, device=device)
    ones = torch.ones(1024, 1024, device=device)
    return bool((torch.matmul(factor, ones) == 1024).all())


def tf32_convolves(device: torch.device) -> bool:
    """Return whether convolutions read 10 bits of mantissa only."""
    images = torch.full((8, 1024, 16, 16), 1 + 2.0**-13, device=device)
    kernels = torch.ones(256, 1024, 1, 1, device=device)
    return bool((torch.nn.functional.conv2d(images, kernels) == 1024).all())
