"""Check operations on unaligned 16-bit views."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...harness.check import Case, contract, per_target
from ...harness.targets import Target
from ...measure.precision import full_precision
from .attention_kernels import KERNELS, attempt_on
from .misaligned_views import OPERATIONS, PLACEMENTS
from .support import slug

BY_SLUG = {slug(name): name for name in OPERATIONS}


def _names(target: Target) -> Iterator[str]:
    """Return the operations; on CUDA attention on each of its kernels, as each loads in its own way."""
    on_cuda = target.device_type == "cuda"
    for name in BY_SLUG:
        yield from (f"{name}-{kernel}" for kernel in KERNELS) if on_cuda and name == "attention" else (name,)


@contract("AMP-NUMERICS-105")
@per_target("name", _names)
def test_misaligned_views(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, name: str) -> None:
    name, _, kernel = name.partition("-")
    operation = OPERATIONS[BY_SLUG[name]]
    operands = operation.draw(rng)
    with torch.no_grad():
        seed = torch.randint(-1, 2, operation.formula(*operands).shape, generator=rng).float()
    right = operation.expected(operands, seed)
    sources = [operand.to(target.device, amp_dtype) for operand in operands]
    names = ("result", *(f"gradient {place}" for place in range(len(operands))))
    for placement, place in PLACEMENTS.items():
        with full_precision(target.device_type):
            region = functools.partial(target.autocast, amp_dtype)
            measure = functools.partial(operation.measure, sources, seed.to(target.device), region, place)
            seen = _on_kernel(case, kernel, measure) if kernel else measure()
        for what, tensor, expected in zip(names, seen, right, strict=True):
            case.equal(f"{name}, {placement}: dtype of the {what}", tensor.dtype, amp_dtype)
            # A zero may have either sign.
            case.identical(f"{name}, {placement}: {what}", tensor.cpu().double() + 0.0, expected + 0.0)


def _on_kernel(case: Case, kernel: str, measure: Callable[[], list[Tensor]]) -> list[Tensor]:
    attempt = attempt_on(kernel, measure)
    if attempt.raised is not None:
        raise attempt.raised
    if (found := attempt.found) is None:
        case.unsupported(f"the {kernel} kernel of attention declines these inputs")
    return found
