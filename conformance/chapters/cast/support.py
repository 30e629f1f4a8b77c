"""Sample calls of listed ops, in a region and with manual casts, and comparisons that several checks share."""

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
from ...measure.precision import repeatable_convolutions
from ...oracles.numbers.error_bounds import normwise_distance
from ...oracles.policy.lists import (
    Listing,
    composite,
    listings,
    sets_dtype,
)
from ...oracles.policy.overloads import Seen, run
from ...oracles.policy.samples import SAMPLES, Inputs, spell
from ...oracles.trace.casts import Cast, CastTrace
from ...oracles.trace.ops import DtypeStream

CUDA = ("fake:cuda", "cuda")


CUDA_OR_CPU = ("cpu", "fake:cuda", "cuda")


Make = Callable[[Inputs], "partial[Any]"]

# u of fp32 times 128: less than a fifth of the least that one rounding to 16 bits makes (0.3 u of fp16 by norm), and
# room for the roundings of the longest sample (40 terms) and a condition number of a few.
FP32_ERROR = 128 * 2.0**-24


def make_inputs(target: Target, dtypes: Iterable[torch.dtype], rng: torch.Generator, **options: Any) -> Inputs:
    return Inputs(tuple(dtypes), target.device, rng.initial_seed(), target.is_fake, **options)


def run_sample(target: Target, call: partial[Any], amp_dtype: torch.dtype | None) -> Seen:
    """Run `call` in a region of `amp_dtype`, or outside any where that is None; what it lacks is told, not raised."""
    with repeatable_convolutions():
        seen = run(target, call, amp_dtype)
    if seen.exception is not None and seen.lacking is None:
        raise seen.exception
    return seen


def chosen(backend: str, policy: str | None, fits: Callable[[Listing], bool], *quick: str) -> list[Any]:
    """The listings that fit, as parameters; those that are not in `quick` from the standard level on."""
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
    """The type that a floating, complex or other output has, of an op that runs in `real`."""
    if tensor.is_complex():
        return real.to_complex()
    return real if tensor.is_floating_point() else tensor.dtype


# The region is entered by its state, so that the snippet shows the op's policy without the hardware too.
SNIPPET = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
kind = "$device".split(":")[0]
torch.set_autocast_dtype(kind, $amp_dtype)
torch.set_autocast_enabled(kind, True)
with FakeTensorMode(), torch.no_grad():
    seen = {call}
print([getattr(leaf, "dtype", leaf) for leaf in torch.utils._pytree.tree_leaves(seen)], "promised: {promised}")
"""


@contextlib.contextmanager
def reproduced(case: Case, call: partial[Any], promised: str) -> Iterator[None]:
    """Give a case that fails inside the very call as its snippet, where it can be written down."""
    try:
        yield
    except Exception:
        text = spell(call)
        if text is not None:
            case.reproduce(SNIPPET.format(call=text, promised=promised))
        raise


def run_manually_cast(
    target: Target, row: Listing, dtypes: tuple[torch.dtype, ...], to: torch.dtype, rng: torch.Generator
) -> Seen:
    """The sample call outside any region, its inputs cast by hand, or fp32 asked for where autocast does that."""
    if sets_dtype(row):
        call = SAMPLES[row.sample](make_inputs(target, dtypes, rng))
        return run_sample(target, partial(call, dtype=to), None)
    return run_sample(target, SAMPLES[row.sample](make_inputs(target, dtypes, rng, hand_cast=to)), None)


def casts_of_arguments(casts: list[Cast], promised: list[Cast]) -> list[str]:
    """The casts of arguments; those from one wide or complex type to another are the op's own."""
    sources = {cast.source for cast in promised}
    return cast_texts(cast for cast in casts if cast.argument is not None and (not sources or cast.source in sources))


def cast_texts(casts: Iterable[Cast]) -> list[str]:
    return sorted(map(str, casts))


def check_same(case: Case, exact: bool, what: str, seen: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same bits or, of an op that does not repeat its own bits, the same up to a few roundings of its type."""
    if exact or not (wanted.is_floating_point() or wanted.is_complex()):
        case.identical(what, seen, wanted)
    else:
        case.equal(f"type of {what}", seen.dtype, wanted.dtype)
        case.equal(f"shape of {what}", seen.shape, wanted.shape)
        case.at_most(f"distance of {what} by norm", normwise_distance(seen, wanted), 64 * torch.finfo(wanted.dtype).eps)


def dtype_names(casts: Iterable[Cast]) -> list[str]:
    return sorted(f"{cast.source} to {cast.target}" for cast in casts)


@contextlib.contextmanager
def ops_below_autocast(target: Target) -> Iterator[DtypeStream]:
    """Watch what runs below autocast; fake kernels that ask for hardware are answered without it."""
    with CastTrace(partial(tuple)) if target.is_fake else contextlib.nullcontext(), DtypeStream() as stream:
        yield stream


def floating_tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
