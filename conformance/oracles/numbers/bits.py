"""Equality of tensors bit for bit."""

from __future__ import annotations

import torch

from ...measure.pending import run_pending

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bit patterns of a floating-point or complex tensor as integers, of others the tensor itself.

    A contiguous tensor is not copied; of a complex one the last dimension holds real and imaginary part.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def equal_elements(seen: torch.Tensor, expected: torch.Tensor) -> torch.Tensor | None:
    """Return by element whether two tensors of one dtype and shape are equal, or None where all are.

    Integers are compared, not floats: -0.0 is not 0.0, and no flush-to-zero mode can hide a subnormal. NaNs are equal.
    """
    run_pending(seen.device.type)
    ours, theirs = bits(seen), bits(expected)
    if torch.equal(ours, theirs):
        return None
    equal = ours == theirs
    if seen.is_complex():
        equal = equal.all(-1)
    if seen.is_floating_point() or seen.is_complex():
        equal = equal | (seen.isnan() & expected.isnan())
    return None if bool(equal.all()) else equal


def same(seen: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits; NaNs are equal."""
    return seen.dtype == expected.dtype and seen.shape == expected.shape and equal_elements(seen, expected) is None
