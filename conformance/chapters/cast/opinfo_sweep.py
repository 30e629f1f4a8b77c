"""Find the ops of PyTorch's operator database (op_db) that autocast changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ...data import fixture, read_toml
from ...oracles.policy import overloads
from ...oracles.policy.overloads import Seen, Target
from ...oracles.relations.programs import quiet_database


@dataclass(frozen=True)
class Swept:
    """Hold the result of a sweep: the number of ops and calls compared, and the ops that autocast changed."""

    ops: int
    calls: int
    changed: dict[str, str]


def sweep(target: Target, amp_dtype: torch.dtype, entries: list[Any], samples: int) -> Swept:
    """Call each entry with float32 and with the amp dtype, in a region and outside, and compare casts and types.

    A call that torch cannot make outside a region either counts for nothing.
    """
    with quiet_database():
        return _sweep(target, amp_dtype, entries, samples)


def _sweep(target: Target, amp_dtype: torch.dtype, entries: list[Any], samples: int) -> Swept:
    changed: dict[str, str] = {}
    swept, calls = set(), 0
    for entry, dtype in itertools.product(entries, (torch.float32, amp_dtype)):
        for call in _calls(target, entry, dtype, samples):
            outside = _seeded(target, call, None)
            if outside.error is not None:
                continue
            inside = _seeded(target, call, amp_dtype)
            plain = inside if target.is_fake else _seeded(target, call, amp_dtype, traced=False)
            if plain.error is not None and _seeded(target, call, None, traced=False).error is not None:
                continue  # only the trace can make it: a backend's own kernel of the whole may be missing
            swept.add(entry.name)
            calls += 1
            types = [[leaf.dtype for leaf in one.outputs] for one in (plain, outside)]
            if overloads.difference(overloads.Promise([], outside), inside) is not None or types[0] != types[1]:
                changed.setdefault(entry.name, f"{dtype}: {overloads.describe(inside)}; untraced: {types[0]}")
    return Swept(len(swept), calls, changed)


def explained(entry: str, backend: str) -> bool:
    """Return whether an entry is a listed op of `backend`, or is implemented with one."""
    listed = {overload.split(".")[0] for overload in overloads.known(backend)}
    own = entry.removeprefix("nn.functional.").replace(".", "_")
    return not listed.isdisjoint([own, *read_toml(fixture("op_sweep.toml"))["calls"].get(entry, [])])


def _seeded(target: Target, call: partial[Any], amp_dtype: torch.dtype | None, *, traced: bool = True) -> Seen:
    """Run a call from the same seed each time, since it may use random numbers."""
    torch.default_generator.manual_seed(0)
    return overloads.run(target, call, amp_dtype, traced=traced)


def _calls(target: Target, entry: Any, dtype: torch.dtype, samples: int) -> Iterator[partial[Any]]:
    """Create the entry's first samples on the CPU and copy them to the target."""
    if dtype not in entry.dtypes:
        return
    try:
        made = list(itertools.islice(entry.sample_inputs("cpu", dtype, requires_grad=False), samples))
    except (RuntimeError, NotImplementedError):  # LAPACK has no 16-bit routines to create a sample with
        return
    for sample in made:
        with overloads.mode_of(target):
            args, kwargs = tree_map(partial(_moved, target), ((sample.input, *sample.args), dict(sample.kwargs)))
        if "device" in kwargs:
            kwargs["device"] = target.device
        yield partial(entry.op, *args, **kwargs)


def _moved(target: Target, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return leaf
    if target.is_fake:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=target.device)
    return leaf.to(target.device)
