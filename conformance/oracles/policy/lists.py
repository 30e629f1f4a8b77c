"""Read the op lists of the AMP op reference for the installed torch, and predict dtypes from them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...data import fixture, in_force, read_toml
from . import declared
from .samples import SAMPLES

POLICIES = ("lower_precision", "fp32", "widest", "banned", "unlisted")
BACKENDS = ("cuda", "cpu", "xpu")  # those that the op reference has lists for
ORIGINS = ("documented", "registered", "chosen")


@dataclass(frozen=True)
class Listing:
    """One op name on one list: `sample` is its key in SAMPLES, `name` the name as the list spells it."""

    name: str
    sample: str
    backend: str
    policy: str
    origin: str
    source: str


def listings(
    backend: str, policy: str | None = None, *, origin: str | None = None, version: str | None = None
) -> tuple[Listing, ...]:
    """Return what torch `version` (the one at hand) lists for `backend`, in the order of fixtures/op_lists.toml.

    A name that has several samples ("norm", "norm.nuclear") is returned once for each of them. A device type whose
    declared policy is that of another backend has the lists of that one; one that declares a surface, or is of a
    backend without lists, has of them the names whose ops have one policy there, with that policy.
    """
    if not declared.changed(backend):
        return _listings(declared.followed(backend), policy, origin, version)
    found = (by_surface(row, backend) for row in _listings(backend_of(backend), None, origin, version))
    return tuple(row for row in found if row is not None and policy in (None, row.policy))


def by_surface(row: Listing, device_type: str, ops: Iterable[str] | None = None) -> Listing | None:
    """Return a row of the backend by the rules that hold for a device type in place of its lists, or None.

    `ops` are the ATen ops that carry its rule, by default those of its name.
    """
    carrying = resolved(row.name) if ops is None else tuple(ops)
    if row.backend != (own := declared.followed(device_type)):
        row = dataclasses.replace(row, backend=own)
    if declared.changed(device_type).isdisjoint(carrying):
        return row
    policies = set().union(*(declared_policies(op, device_type) for op in carrying))
    if len(policies) != 1 or composite(row):
        return None
    changed = dataclasses.replace(row, policy=policies.pop())
    return changed if changed.policy in _CASTING and not sets_dtype(changed) else None


# The policies of an overload that casts its arguments, or none of them, in the words of the lists.
_CASTING = ("lower_precision", "fp32", "widest")


def declared_policies(op: str, device_type: str) -> frozenset[str]:
    """Return the policies that hold for the overloads of an ATen op on a device type in place of its lists.

    In the words of overloads.POLICIES, or `unlisted`; without those that the surface could not observe.
    """
    overloads = declared.overloads(device_type) or {}
    found = {policy for overload, policy in overloads.items() if overload.split(".")[0] == op}
    return frozenset(found or {"unlisted"}) - {"unknown"}


def backend_of(device_type: str) -> str:
    """Return the backend whose lists hold for a device type: its own, the one it declares, else CUDA's."""
    followed = declared.followed(device_type)
    return followed if followed in BACKENDS else "cuda"


@functools.cache
def _listings(backend: str, policy: str | None, origin: str | None, version: str | None) -> tuple[Listing, ...]:
    return tuple(
        Listing(name, sample, table["backend"], table["policy"], table["origin"], table["source"])
        for table in _tables()["list"]
        if table["backend"] == backend and policy in (None, table["policy"]) and origin in (None, table["origin"])
        for name in _names(table, version or torch.__version__)
        for sample in _samples(name)
    )


def resolved(name: str) -> tuple[str, ...]:
    """Return the ATen ops that carry the autocast rule of a listed name, mostly the op of that very name."""
    return tuple(_tables()["resolves"].get(name, [name]))


def sets_dtype(listing: Listing) -> bool:
    """Return whether the op's autocast kernel passes dtype=float32 instead of casting the input."""
    return listing.policy == "fp32" and listing.name in _by_backend("set_dtype", listing.backend)


def composite(listing: Listing) -> bool:
    """Return whether the name denotes several ops, so that no single cast of its arguments is promised."""
    return listing.name in _by_backend("composite", listing.backend)


def multilinear(listing: Listing) -> bool:
    """Return whether the op is linear in each input, so that |op(x) - exact| <= c u op(|x|) bounds its error."""
    return listing.name in _tables()["reference"]["multilinear"]


def repeatable(name: str) -> bool:
    """Return whether the op is deterministic bit for bit; ops that use LAPACK may not be."""
    return name not in _tables()["reference"]["lapack"]


def definite(listing: Listing) -> bool:
    """Return whether the op has one well-conditioned result on its sample, which float64 can compute."""
    return listing.name not in _tables()["reference"]["indefinite"]


def run_dtype(policy: str, dtypes: Iterable[torch.dtype], amp_dtype: torch.dtype) -> torch.dtype:
    """Predict the floating type that an op of `policy` runs in, given those of its eligible inputs."""
    if policy == "lower_precision":
        return amp_dtype
    if policy == "fp32":
        return torch.float32
    return functools.reduce(wider, dtypes)


@functools.cache
def wider(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype that two are promoted to; cached, since each call passes through the fake mode."""
    return torch.promote_types(one, other)


def eligible(value: Any, device_type: str) -> bool:
    """Return whether autocast on `device_type` may cast an argument: floating and not float64 ("Op Eligibility")."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and value.device.type == device_type
    )


def _by_backend(table: str, backend: str) -> list[str]:
    names: dict[str, list[str]] = _tables()[table]
    return names.get(backend, names["cuda"])


@functools.cache
def _tables() -> dict[str, Any]:
    return read_toml(fixture("op_lists.toml"))


def moved(backend: str) -> set[tuple[str, str, str]]:
    """Return the names listed for some versions only: name, first version, version of the end ("": none)."""
    rows = (row for table in _tables()["list"] if table["backend"] == backend for row in table.get("moved", []))
    return {(row["op"], row.get("since", ""), row.get("until", "")) for row in rows}


def _names(table: dict[str, Any], version: str) -> list[str]:
    return [*table["ops"], *(row["op"] for row in table.get("moved", []) if _holds(row, version))]


def _holds(row: dict[str, str], version: str) -> bool:
    return in_force(version, row.get("since"), row.get("until"))


def _samples(name: str) -> list[str]:
    return _samples_by_prefix().get(name, [])


@functools.cache
def _samples_by_prefix() -> dict[str, list[str]]:
    """Return the samples of each name and of each part of a name that ends before a dot: of `norm` also `norm.dim`."""
    found: dict[str, list[str]] = {}
    for sample in SAMPLES:
        for place in (*(at for at, letter in enumerate(sample) if letter == "."), len(sample)):
            found.setdefault(sample[:place], []).append(sample)
    return found
