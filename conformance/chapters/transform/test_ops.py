"""Check every op's sample call under vmap, vjp and forward mode in a region against the call alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep, per_target
from ...harness.targets import Target
from ...oracles.policy.samples import SAMPLES
from .departures import departures, exceptions
from .op_sweep import sweep

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch compiles its first jvp with it
]
_OTHERS = "others"  # all ops, less the ways that a case of its own judges
_FIRST = ("cpu", "cuda")  # backends; the rules of the others are those of CUDA, or fewer


def _cases(relation: str, target: Target) -> Iterator[Any]:
    """Return the cases of a relation on a target: one of many ops, and one for each op that some torch fails."""
    first = target.device_type in _FIRST
    yield _OTHERS if first else deep("standard", _OTHERS)
    for name in departures(relation, target.device_type):
        yield deep("standard" if first and relation != "forward" else "full", name)


def _names(case: Case, target: Target, relation: str) -> list[str]:
    """Return the ops of this run: all at full, else some that the seed chooses."""
    names = sorted(SAMPLES.keys() - exceptions(relation))
    parts = {"quick": 24, "standard": 16, "full": 1}[case.level]
    if case.level == "standard" and target.device_type in _FIRST:
        parts = 3 if target.device_type == "cpu" else 6
    return random.Random(case.seed).sample(names, len(names) // parts)


def _check(case: Case, target: Target, relation: str, op: str, what: str) -> None:
    known = departures(relation, target.device_type)
    dtypes = case.supported(target)
    default = torch.get_autocast_dtype(target.device_type)
    chosen = dtypes if case.level == "full" or default not in dtypes else (default,)
    names = _names(case, target, relation) if op == _OTHERS else [op]
    found = {}
    for dtype in chosen:
        for name, way, text in sweep(target, dtype, names, relation):
            if (way in known.get(name, ())) == (op != _OTHERS):
                found[f"{name}, {way}, {dtype}"] = text
    case.at_least("ops", len(names), 1)
    case.equal(what, found, {})


@contract("AMP-TRANSFORM-003", on=("cpu", "fake"))
@per_target("op", partial(_cases, "vmap"))
def test_vmap_of_ops(case: Case, target: Target, op: str) -> None:
    _check(case, target, "vmap", op, "calls whose vmap is not a loop over them")


@contract("AMP-TRANSFORM-004", on="cpu")
@per_target("op", partial(_cases, "vjp"))
def test_vjp_of_ops(case: Case, target: Target, op: str) -> None:
    _check(case, target, "vjp", op, "calls whose vjp is not their backward")


@contract("AMP-TRANSFORM-005", on="cpu")
@per_target("op", partial(_cases, "forward"))
def test_forward_mode_of_ops(case: Case, target: Target, op: str) -> None:
    _check(case, target, "forward", op, "calls whose forward derivatives are wrong")
