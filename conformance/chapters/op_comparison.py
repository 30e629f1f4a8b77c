"""Measure every listed op in a region and with manually cast operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..harness.targets import Target
from ..measure.generators import seed_torch
from ..oracles.cast_order import CastOrder
from ..oracles.manual_cast import ManualCast
from ..oracles.policy import declared
from ..oracles.policy.lists import backend_of, composite, listings
from ..oracles.policy.samples import SAMPLES, Inputs

# The types of the operands, of which each but those on no list is one that the policy casts.
_GIVEN: dict[str, Callable[[torch.dtype], tuple[torch.dtype, ...]]] = {
    "lower_precision": lambda low: (torch.float32,),
    "fp32": lambda low: (low,),
    "widest": lambda low: (low, torch.float32),
    "unlisted": lambda low: (low,),
}

Arm = Callable[[], AbstractContextManager[Any]]
Call = Callable[[], Any]
T = TypeVar("T")


def side_by_side(
    target: Target, policy: str, amp_dtype: torch.dtype, seed: int, measure: Callable[[Arm, partial[Any]], T]
) -> Iterator[tuple[str, T, T]]:
    """Yield the name of each op on that list of the target, and its measurements in a region and with manual casts.

    `measure` is given an arm, which it enters, and a call on new leaves of types that the list casts, each time of the
    same values. Manual casts are those of the op lists and of the rule of the weight cache. Left out is what has no
    cast of its own, as it is made of other listed operations (`cross_entropy` on CUDA), and what runs manually neither
    on leaves with gradients nor on others: the device has no such kernel. Where no op is left, the last such error is
    raised.
    """
    device_type = target.device_type
    backend = device_type if declared.changed(device_type) else backend_of(device_type)
    given = _GIVEN[policy](amp_dtype)
    region = partial(target.autocast, amp_dtype)
    manual_casts = partial(ManualCast, target.device_type, amp_dtype, order=CastOrder(region))
    yielded, refusal = False, None
    for listing in listings(backend, policy):
        if composite(listing):
            continue
        for wanted in (True, False):
            make = partial(_leaves, listing.sample, partial(Inputs, given, target.device, seed), wanted)
            try:
                with manual_casts():
                    make()()  # unmeasured: the order of the op's casts is read
                manual = measure(manual_casts, make())
            except (RuntimeError, NotImplementedError) as error:
                refusal = error
                continue
            seen = measure(region, make())
            # One-time constants exist by now.
            yield listing.sample, seen if seen == manual else measure(region, make()), manual
            yielded = True
            break
    if refusal is not None and not yielded:
        raise refusal


def run(arm: Arm, call: Call, uses: int) -> list[torch.Tensor]:
    """Return the results with a gradient of some calls in one `arm`, with the same random numbers each time."""
    seed_torch(0)
    with arm():
        results = [call() for _ in range(uses)]
    return [result for result in tensors_of(results) if result.requires_grad]


def backward(results: list[torch.Tensor]) -> None:
    """Run backward from gradients of ones."""
    if results:
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])


def operands(call: partial[Any]) -> list[torch.Tensor]:
    """Return the floating-point tensors of a call."""
    return [tensor for tensor in tensors_of((call.args, call.keywords)) if tensor.is_floating_point()]


def with_operands(call: partial[Any], change: Callable[[Any], Any]) -> partial[Any]:
    """Return the call with each of its arguments, and of those in containers, changed."""
    return partial(call.func, *tree_map(change, call.args), **tree_map(change, call.keywords))


def bits(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    """Return type, shape and bits of a tensor, which compare by ==, each NaN as one; of None that it is missing."""
    if tensor is None:
        return ("missing",)
    plain = tensor.as_subclass(torch.Tensor).detach().to_dense().cpu()
    kept = plain.masked_fill(plain.isnan(), math.nan).contiguous() if plain.is_floating_point() else plain.contiguous()
    return kept.dtype, tuple(kept.shape), bytes(kept.reshape(-1).view(torch.uint8).tolist())


def difference(seen: tuple[Any, ...], manual: tuple[Any, ...]) -> str:
    """Say how what `bits` returned of two tensors differs."""
    return "other values" if seen[:2] == manual[:2] else f"{seen[:2]} in place of {manual[:2]}"


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _leaves(sample: str, inputs: Callable[[], Inputs], wanted: bool) -> partial[Any]:
    def leaf(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().requires_grad_(wanted) if floating else value

    call = SAMPLES[sample](inputs())
    return partial(call.func, *tree_map(leaf, call.args), **tree_map(leaf, call.keywords))
