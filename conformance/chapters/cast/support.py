"""Provide sample calls of listed ops, in a region and with manual casts, and comparisons for several checks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ...harness.check import Case, deep
from ...harness.targets import Target
from ...measure.flags import held
from ...measure.precision import repeatable_convolutions
from ...oracles.numbers.error_bounds import normwise_distance
from ...oracles.policy import declared
from ...oracles.policy.lists import (
    Listing,
    backend_of,
    composite,
    listings,
    sets_dtype,
)
from ...oracles.policy.overloads import Seen, run
from ...oracles.policy.samples import SAMPLES, Inputs, spell
from ...oracles.trace.casts import Cast

CUDA = ("fake:cuda", "cuda")


CUDA_OR_CPU = ("cpu", "fake:cuda", "cuda")


# What holds of CUDA's ops on its own devices, and on others that declare its lists.
LIKE_CUDA = ("cuda", "like:cuda")


Make = Callable[[Inputs], "partial[Any]"]

# 128 u of fp32: below a fifth of the smallest normwise error of one rounding to 16 bits (0.3 u of fp16), and above the
# roundings of the longest sample or sum (100 terms) times a small condition number.
FP32_ERROR = 128 * 2.0**-24


def make_inputs(target: Target, dtypes: Iterable[torch.dtype], rng: torch.Generator, **options: Any) -> Inputs:
    """Return inputs on the target, or on the CPU where they are cast to float64 and the target has none."""
    wide = options.get("cast_to") is torch.float64 and not target.computes_in(torch.float64)
    device = torch.device("cpu") if wide else target.device
    return Inputs(tuple(dtypes), device, rng.initial_seed(), target.is_fake, **options)


def fused_inference() -> contextlib.AbstractContextManager[None]:
    """Allow modules of attention their fused inference, which the process may have switched off."""
    return held("torch.backends.mha.get_fastpath_enabled", True)


def run_sample(target: Target, call: partial[Any], amp_dtype: torch.dtype | None) -> Seen:
    """Run `call` in a region of `amp_dtype`, or outside any where None; a missing capability is recorded."""
    with repeatable_convolutions():
        seen = run(target, call, amp_dtype)
    if seen.exception is not None and seen.lacking is None:
        raise seen.exception
    return seen


def require_rule(case: Case, target: Target, row: Listing) -> None:
    """End the case as UNSUPPORTED where the device has another rule for the op than its lists."""
    if declared.overloads(target.device_type) is not None and row not in listings(target.device_type):
        case.unsupported(f"{declared.source_of_rules(target.device_type)} has another rule for {row.name}")


def rule_of(case: Case, target: Target, sample: str) -> Listing | None:
    """Return the row of a sample call on the lists of a target, None where it is on none.

    Ends the case as UNSUPPORTED where the rules that hold for the device in their place take the op off them.
    """
    device_type = target.device_type
    found = next((row for row in listings(device_type) if row.sample == sample), None)
    if found is None and any(row.sample == sample for row in listings(backend_of(device_type))):
        case.unsupported(f"{declared.source_of_rules(device_type)} has no one rule of a list for {sample}")
    return found


def policy_of(case: Case, target: Target, sample: str) -> str:
    """Return the list that a sample call is on, `unlisted` where on none; ends the case as `rule_of` does."""
    row = rule_of(case, target, sample)
    return "unlisted" if row is None else row.policy


def listed_rule(case: Case, target: Target, sample: str) -> Listing:
    """Return the row of a sample call that every backend lists; ends the case as `rule_of` does."""
    row = rule_of(case, target, sample)
    assert row is not None
    return row


def chosen(backend: str, policy: str | None, fits: Callable[[Listing], bool], *quick: str) -> list[Any]:
    """Return the listings that fit as parameters; those not in `quick` run from the standard level on."""
    return [
        pytest.param(row, id=row.sample) if row.sample in quick else deep("standard", row, id=row.sample)
        for row in listings(backend, policy)
        if fits(row)
    ]


def is_single(row: Listing) -> bool:
    return row.policy in ("lower_precision", "fp32", "widest") and not composite(row)


def is_any(row: Listing) -> bool:
    return True


def own_type(tensor: torch.Tensor, real: torch.dtype) -> torch.dtype:
    """Return the dtype of a floating-point, complex or other output of an op that runs in `real`."""
    if tensor.is_complex():
        return real.to_complex()
    return real if tensor.is_floating_point() else tensor.dtype


# The snippet sets the autocast state directly: torch.autocast disables itself without the hardware.
SNIPPET = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
device_type = torch.device("$device").type
torch.set_autocast_dtype(device_type, $amp_dtype)
torch.set_autocast_enabled(device_type, True)
with FakeTensorMode(), torch.no_grad():
    result = {call}
print([getattr(leaf, "dtype", leaf) for leaf in torch.utils._pytree.tree_leaves(result)], "promised: {promised}")
"""
# Where a dtype is promised of every floating-point output.
JUDGEMENT = """\
leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
if any(leaf.is_floating_point() and leaf.dtype != {promised} for leaf in leaves):
    raise SystemExit("an output has another dtype")
"""


@contextlib.contextmanager
def reproduced(case: Case, call: partial[Any], promised: str) -> Iterator[None]:
    """Set the failing call as the snippet of the case, where it can be written as source."""
    try:
        yield
    except Exception:
        text = spell(call)
        if text is not None:
            judgement = JUDGEMENT if promised.startswith("torch.") else ""
            case.reproduce((SNIPPET + judgement).format(call=text, promised=promised))
        raise


def run_manually_cast(
    target: Target, row: Listing, dtypes: tuple[torch.dtype, ...], to: torch.dtype, rng: torch.Generator
) -> Seen:
    """Run the call outside any region on manually cast inputs, or with dtype=float32 where autocast passes it."""
    if sets_dtype(row):
        call = SAMPLES[row.sample](make_inputs(target, dtypes, rng))
        return run_sample(target, partial(call, dtype=to), None)
    return run_sample(target, SAMPLES[row.sample](make_inputs(target, dtypes, rng, cast_to=to)), None)


def casts_of_arguments(casts: list[Cast], promised: list[Cast]) -> list[str]:
    """Return the casts of arguments; the op itself makes those between wide or complex dtypes."""
    sources = {cast.source for cast in promised}
    return cast_texts(cast for cast in casts if cast.argument is not None and (not sources or cast.source in sources))


def cast_texts(casts: Iterable[Cast]) -> list[str]:
    return sorted(map(str, casts))


def check_same(case: Case, exact: bool, what: str, seen: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare bit for bit or, for an op that is not deterministic, up to a few roundings of its dtype."""
    if exact or not (wanted.is_floating_point() or wanted.is_complex()):
        case.identical(what, seen, wanted)
    else:
        case.equal(f"type of {what}", seen.dtype, wanted.dtype)
        case.equal(f"shape of {what}", seen.shape, wanted.shape)
        case.at_most(f"distance of {what} by norm", normwise_distance(seen, wanted), 64 * torch.finfo(wanted.dtype).eps)


def dtype_names(casts: Iterable[Cast]) -> list[str]:
    return sorted(f"{cast.source} to {cast.target}" for cast in casts)


def floating_tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the channels-last format of its rank, as it is where there is none."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x
