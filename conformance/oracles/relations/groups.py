"""Name the groups of programs that a relation is tried on, and the parts of a group that are cases of their own."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...data import fixture, read_toml
from ..policy.samples import SAMPLES, Inputs
from . import programs
from .layouts import layout_programs
from .programs import Program
from .sweep import Make

# samples: the suite's own calls of listed and unlisted ops; layouts: tensors that are not dense and contiguous;
# operators, modules: torch's databases, whose import takes seconds; inference: the modules in eval mode under no_grad,
# where attention and transformers take other kernels (their fast path).
GROUPS = ("samples", "layouts", "operators", "modules", "inference")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Programs of an entry of a database: in a case of many entries, by level, and in the case of a single one.
SAMPLES_OF_MANY = {"quick": 1, "standard": 1, "full": 5}
SAMPLES_OF_ONE = 5
# Masks and options decide on a fast path: of such a module's inputs (up to 67), so many are drawn.
SAMPLES_OF_FAST_PATHS = 16
WITH_FAST_PATHS = ("cpu", "cuda")  # backends
FAST_PATHS = ("nn.MultiheadAttention", "nn.Transformer", "nn.TransformerEncoder", "nn.TransformerEncoderLayer")


@dataclass(frozen=True)
class Part:
    """What one case of a relation runs: a group in one amp dtype, less its single programs, or one such program."""

    group: str
    dtype: str
    name: str | None = None

    @property
    def id(self) -> str:
        return "-".join(filter(None, (self.dtype, self.group, self.name)))

    @property
    def amp_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def level(self, backend: str) -> str:
        """Return the level from which the part runs: devices whose rules nearly equal CUDA's, and the dtype that is
        not the device's default, run at the deeper ones."""
        depth = 0 if self.group == "samples" else 1
        depth += 1 if self.group in ("modules", "inference") and backend != "cpu" else 0
        depth += 1 if backend not in ("cpu", "cuda") else 0
        depth += 2 if (self.dtype == "bf16") != (backend == "cpu") else 0
        return ("quick", "standard", "full")[min(depth, 2)]


def part(text: str) -> Part:
    """Return the part with this id."""
    dtype, group, *name = text.split("-", 2)
    return Part(group, dtype, name[0] if name else None)


def parts(contract: str, backend: str, only: tuple[str, ...] = GROUPS) -> Iterator[Part]:
    """Return the parts of a contract on a backend: each group, and each program that some torch is known to fail."""
    for dtype in DTYPES:
        for group in (one for one in only if backend in WITH_FAST_PATHS or one != "inference"):
            yield Part(group, dtype)
            for name in _single(contract, backend, dtype, group):
                yield Part(group, dtype, name)


@functools.cache
def _table() -> dict[str, Any]:
    return read_toml(fixture("op_relations.toml"))


@functools.cache
def _single(contract: str, backend: str, dtype: str, group: str) -> tuple[str, ...]:
    return tuple(
        name
        for row in _table().get("single", ())
        if row["contract"] == contract and row["group"] == group
        if backend in row["backends"] and dtype in row["dtypes"]
        for name in row["names"]
    )


def exceptions(contract: str) -> frozenset[str]:
    """Return the programs that a contract does not judge."""
    return frozenset(name for row in _table()["exception"] if contract in row["contracts"] for name in row["names"])


def exempt(contract: str, backend: str, one: Part) -> frozenset[str]:
    """Return the programs that the case of a group does not judge: those with cases of their own, the exceptions."""
    return exceptions(contract) | frozenset(_single(contract, backend, one.dtype, one.group))


def makers(one: Part, device_type: str, level: str, seed: int, *, samples: int | None = None) -> dict[str, Make]:
    """Return makers of the programs of a part, by name: at quick of a third of the samples, which the seed chooses.

    `samples` is the number of an entry's programs, by default by level. A torch that lacks the program of a single one
    gives none. Raises ImportError where a package for the databases is missing.
    """
    found = _group(one, device_type, samples or (SAMPLES_OF_ONE if one.name else SAMPLES_OF_MANY[level]))
    if one.name is not None:
        return {one.name: found[one.name]} if one.name in found else {}
    if level == "quick":
        chosen = random.Random(seed).sample(sorted(found), len(found) // 3)
        return {name: found[name] for name in chosen}
    return found


def spellings(names: Iterable[str], device_type: str, amp_dtype: torch.dtype) -> dict[str, programs.Spellings]:
    """Return the other spellings of operators of the database, by name."""
    entries = programs.operators(device_type, amp_dtype)
    return {name: programs.routes(entries[name]) for name in names}


def _group(one: Part, device_type: str, samples: int) -> dict[str, Make]:
    if one.group == "samples":
        return {name: partial(_sample, name) for name in SAMPLES}
    if one.group == "layouts":
        return dict(layout_programs())
    with programs.quiet_database():
        if one.group == "operators":
            entries = programs.operators(device_type, one.amp_dtype)
            return {name: partial(_operators, entry, samples) for name, entry in entries.items()}
        make = _inference if one.group == "inference" else _modules
        return {name: partial(make, info, samples) for name, info in programs.modules().items()}


def _sample(name: str) -> Iterator[Program]:
    call = SAMPLES[name](Inputs((torch.float32,), torch.device("cpu")))
    yield programs.program(name, call.func, call.args, call.keywords)


def _operators(entry: Any, samples: int) -> list[Program]:
    with programs.quiet_database():
        return programs.operator_programs(entry, samples)


def _modules(info: Any, samples: int) -> list[Program]:
    with programs.quiet_database():
        return [one for training in (True, False) for one in programs.module_programs(info, training, samples)]


def _inference(info: Any, samples: int) -> list[Program]:
    with programs.quiet_database():
        fast = info.name in FAST_PATHS
        made = programs.module_programs(info, False, None if fast else samples)
    if fast:
        made = random.Random(0).sample(made, min(SAMPLES_OF_FAST_PATHS, len(made)))
    return [replace(one, function=torch.no_grad()(one.function)) for one in made]
