"""Casts, overload by overload: every autocast kernel of every backend, against the policy it is registered with."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from conformance.harness.check import Case, contract, deep, per_target
from conformance.harness.targets import FAKE_DEVICE_TYPES, Target
from conformance.measure.precision import repeatable_convolutions
from conformance.oracles import overloads
from conformance.oracles.error_bounds import normwise_distance
from conformance.oracles.op_policy import BACKENDS, listings, repeatable, resolved
from conformance.oracles.op_samples import spell
from conformance.oracles.overload_calls import CALLS

ANY = ("cpu", "accelerator", "fake")

# What torch says where a library or an instruction behind an op is missing: no promise of autocast.
_LACKING = re.compile("could not create a primitive|not (compiled|built) with|LAPACK|MAGMA")


def _callable(policy: str | None, *quick: str) -> Callable[[Target], Iterator[Any]]:
    """The overloads of a policy (None: of any) on a target; with `quick`, the others from the standard level on."""

    def of(target: Target) -> Iterator[Any]:
        for overload, own in overloads.known(target.device_type).items():
            if policy in (None, own) and overload in CALLS and overloads.built(overload):
                yield overload if not quick or overload in quick else deep("standard", overload)

    return of


def _amp_dtypes(case: Case, target: Target) -> list[torch.dtype]:
    """The amp dtypes to try: at quick the backend's own default, of those that the run judges and the target has."""
    dtypes = [dtype for dtype in case.amp_dtypes if target.supports(dtype)]
    if not dtypes:
        case.unsupported(f"{target.name} has none of {_names(case.amp_dtypes)}")
    usual = torch.bfloat16 if target.device_type == "cpu" else torch.float16
    return dtypes if case.level != "quick" else [usual if usual in dtypes else dtypes[0]]


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _policy(target: Target, overload: str) -> str:
    return overloads.known(target.device_type)[overload]


def _judge(
    case: Case, target: Target, overload: str, what: str, call: partial[Any], amp_dtype: torch.dtype
) -> overloads.Seen:
    """One call does what its policy promises, in casts, types and layout and, on a real target, in every bit."""
    with repeatable_convolutions():
        seen = overloads.run(target, call, amp_dtype)
        promise = overloads.promise(target, _policy(target, overload), overload, call, amp_dtype)
    with _reproduced(case, target, call, amp_dtype, promise):
        case.equal(
            f"{overload} of {what} in a region of {_names([amp_dtype])}",
            overloads.difference(promise, seen) or "as promised",
            "as promised",
        )
        if promise.hand is not None and not target.is_fake:
            for index, (ours, theirs) in enumerate(zip(seen.outputs, promise.hand.outputs, strict=True)):
                _same(case, overload, f"output {index} of {overload} of {what}", ours, theirs)
    return seen


def _same(case: Case, overload: str, what: str, seen: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same bits or, of an op that does not repeat its own bits, the same up to a few roundings of its type."""
    if repeatable(overload.split(".")[0]) or not (wanted.is_floating_point() or wanted.is_complex()):
        case.identical(what, seen, wanted)
    else:
        case.at_most(f"distance of {what} by norm", normwise_distance(seen, wanted), 64 * torch.finfo(wanted.dtype).eps)


# The region is entered by its state, so that the snippet shows the overload's policy without the hardware too.
_SNIPPET = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
torch.set_autocast_dtype("{kind}", {amp_dtype})
torch.set_autocast_enabled("{kind}", True)
with FakeTensorMode(), torch.no_grad(){guard}:
    seen = {call}
print([leaf.dtype for leaf in torch.utils._pytree.tree_leaves(seen) if isinstance(leaf, torch.Tensor)])
print("promised: {promised}")
"""
_MAIA = ', torch._C._IncludeDispatchKeyGuard(torch._C._dispatch_key_parse("AutocastMAIA"))'


@contextlib.contextmanager
def _reproduced(
    case: Case, target: Target, call: partial[Any], amp_dtype: torch.dtype, promise: overloads.Promise
) -> Iterator[None]:
    """Give a case that fails inside the very call as its snippet."""
    try:
        yield
    except AssertionError:
        hand = promise.hand
        promised = "autocast refuses the call" if hand is None else hand.error or [x.dtype for x in hand.outputs]
        kind = target.device_type
        guard = _MAIA if kind == "maia" else ""
        text = _SNIPPET.format(kind=kind, amp_dtype=amp_dtype, guard=guard, call=spell(call), promised=promised)
        case.reproduce(text)
        raise


def _check_policy(case: Case, target: Target, overload: str) -> None:
    """The overload has its kernel, and does with float32, the amp dtype and both what its policy promises."""
    with contextlib.suppress(AttributeError):  # without the private functions, what it does still tells
        case.equal("an autocast kernel is registered", overloads.is_registered(overload, target.device_type), True)
    kinds = overloads.DECIDING[_policy(target, overload)] if case.level == "quick" else overloads.KINDS
    for amp_dtype in _amp_dtypes(case, target):
        for what, call in overloads.calls(target, overload, amp_dtype, kinds, case.seed).items():
            _finished(case, target, _judge(case, target, overload, what, call, amp_dtype))


def _finished(case: Case, target: Target, seen: overloads.Seen) -> None:
    """The call gave a result, unless it is refused, or fake tensors lack what it needs."""
    if seen.error is None or seen.refused:
        return
    if not target.is_fake and _LACKING.search(seen.error):
        case.unsupported(seen.error)
    case.true("fake tensors lack what the call needs", overloads.missing(seen) is not None, seen.error)


@contract("AMP-CAST-038", on=ANY)
@per_target("overload", _callable("lower_precision"))
def test_lower_precision(case: Case, target: Target, overload: str) -> None:
    _check_policy(case, target, overload)


@contract("AMP-CAST-039", on=ANY)
@per_target("overload", _callable("fp32"))
def test_fp32(case: Case, target: Target, overload: str) -> None:
    _check_policy(case, target, overload)


@contract("AMP-CAST-040", on=ANY)
@per_target("overload", _callable("fp32_set_dtype"))
def test_fp32_set_dtype(case: Case, target: Target, overload: str) -> None:
    _check_policy(case, target, overload)


@contract("AMP-CAST-041", on=ANY)
@per_target("overload", _callable("fp32_append_dtype"))
def test_fp32_append_dtype(case: Case, target: Target, overload: str) -> None:
    _check_policy(case, target, overload)


@contract("AMP-CAST-042", on=ANY)
@per_target("overload", _callable("widest"))
def test_widest(case: Case, target: Target, overload: str) -> None:
    _check_policy(case, target, overload)


@contract("AMP-CAST-043", on=ANY)
@per_target("overload", _callable("banned"))
def test_banned(case: Case, target: Target, overload: str) -> None:
    _check_policy(case, target, overload)


def _registered(case: Case, backend: str) -> frozenset[str]:
    try:
        return overloads.registered(backend)
    except AttributeError as error:
        case.untestable(f"this torch does not tell its autocast registrations: {error}")
        raise


@contract("AMP-CAST-035")
@pytest.mark.parametrize("backend", BACKENDS)
def test_documented_ops_are_registered(case: Case, backend: str) -> None:
    registered = {overload.split(".")[0] for overload in _registered(case, backend)}
    rows = listings(backend, origin="documented")
    names = list(dict.fromkeys(row.name for row in rows if overloads.built(row.name)))
    case.note("documented names", len(names))
    missing = [name for name in names if not registered.issuperset(resolved(name))]
    case.equal("documented names without an autocast kernel", missing, [])


@contract("AMP-CAST-036")
@pytest.mark.parametrize("backend", FAKE_DEVICE_TYPES)
def test_overloads_are_registered(case: Case, backend: str) -> None:
    known = set(filter(overloads.built, overloads.known(backend)))
    case.equal("known overloads without an autocast kernel", sorted(known - _registered(case, backend)), [])


@contract("AMP-CAST-037")
@pytest.mark.parametrize("backend", FAKE_DEVICE_TYPES)
def test_every_kernel_is_accounted_for(case: Case, backend: str) -> None:
    registered = _registered(case, backend)
    strange = sorted(registered.difference(overloads.known(backend)))
    case.note("overloads registered", len(registered))
    case.note("overloads called", len(registered.intersection(CALLS)))
    for overload in strange:
        case.note(f"new: {overload}", str(torch._C._get_schema(f"aten::{overload.split('.')[0]}", _which(overload))))
    case.equal("overloads with an autocast kernel that the suite does not know", strange, [])


def _which(overload: str) -> str:
    return overload.partition(".")[2]
