"""Read the autocast surface of the installed torch: registered, documented and observed rules, and op names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from ...data import fixture, in_force, read_toml
from . import lists as op_policy
from . import overloads

# The page calls it "prefer binary_cross_entropy_with_logits over binary_cross_entropy"; ATen calls the kernel banned.
_BANNED = {"refused": "banned"}
# The prefixes of op names, the longest first.
_PREFIXES = (
    "torch.nn.functional.",
    "torch.ops.aten.",
    "torch.Tensor.",
    "torch.nn.",
    "torch.",
    "aten::",
    "aten.",
    "Tensor.",
    "nn.",
    "F.",
)


def read(
    target_of: Callable[[str], overloads.Target],
    *,
    only: Collection[str] | None = None,
    device: tuple[str, overloads.Target] | None = None,
) -> dict[str, Any]:
    """Return the surface of this torch in the form that conformance/report/surface.py describes.

    `target_of` makes a target of a name such as `fake:cuda`, on which each registered overload is run; with `only`,
    the overloads outside of it are neither run nor returned. `device` is a third party's, and the backend whose rules
    its own stand in the place of. Raises AttributeError where this torch lacks the private functions of the dispatcher
    that tell what is registered.
    """
    judged = {name: target_of(f"fake:{name}") for name in overloads.BACKENDS}
    if device is not None:
        like, target = device
        judged[like] = target
    return {
        "kind": "autocast-surface",
        "schema": 1,
        "torch": torch.__version__,
        "build": _build(),
        "backends": {
            name: {**_backend(target, only), "documented": documented(name)} for name, target in judged.items()
        },
    }


def rules(target_of: Callable[[str], overloads.Target], backend: str) -> dict[str, Any]:
    """Return the dispatch key, the default amp dtype and the overloads of each policy of one backend.

    Each overload is first tried against the policy that this version of torch is known to give it, so that a stock
    torch takes a tenth of a second; the others are observed as in `read`. A backend without fake tensors is observed on
    its device. Raises AttributeError as `read` does.
    """
    key = overloads.dispatch_key(backend)
    if not _knows(key):
        return {"key": None, "amp_dtype": None, "overloads": {}, "not_in_force": not_in_force(backend)}
    amp_dtype, known = torch.get_autocast_dtype(backend), overloads.known(backend)
    target = target_of(f"fake:{backend}" if backend in overloads.BACKENDS else backend)
    found: dict[str, list[str]] = {}
    for overload in sorted(overloads.registered(backend)):
        policy = known.get(overload)
        if policy is None or not overloads.follows(target, overload, amp_dtype, policy):
            policy = overloads.observe(target, overload, amp_dtype).policy
        found.setdefault(policy, []).append(overload)
    return {
        "key": key,
        "amp_dtype": str(amp_dtype).removeprefix("torch."),
        "overloads": {policy: found[policy] for policy in sorted(found)},
        "not_in_force": not_in_force(backend),
    }


def not_in_force(backend: str) -> dict[str, str]:
    """Return ops and overloads that autocast on `backend` in other versions of torch, each with when it does."""
    rows = sorted({*overloads.moved(backend), *op_policy.moved(backend)})
    return {
        name: f"autocasts {text} torch {version}"
        for name, since, until in rows
        for text, version in (("until", until), ("from", since))
        if version and not in_force(torch.__version__, since or None, until or None)
    }


def _build() -> dict[str, Any]:
    version = torch.version
    return {
        "cuda": version.cuda,
        "hip": version.hip,
        "xpu": getattr(version, "xpu", None),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "git": version.git_version or "",
    }


def _backend(target: overloads.Target, only: Collection[str] | None) -> dict[str, Any]:
    name = target.device_type
    key = overloads.dispatch_key(name)
    if not _knows(key):
        return {"key": None, "amp_dtype": None, "overloads": {}, "undetermined": {}}
    amp_dtype = torch.get_autocast_dtype(name)
    asked = sorted(overload for overload in overloads.registered(name) if only is None or overload in only)
    seen = {overload: overloads.observe(target, overload, amp_dtype) for overload in asked}
    unseen = {overload: one.detail for overload, one in seen.items() if one.policy == overloads.UNKNOWN}
    return {
        "key": key,
        "amp_dtype": str(amp_dtype).removeprefix("torch."),
        "overloads": {overload: one.policy for overload, one in seen.items()},
        "undetermined": {overload: f"{why}{_stock(overload, name)}" for overload, why in unseen.items()},
    }


def _stock(overload: str, backend: str) -> str:
    policy = overloads.known(backend).get(overload)
    return f" (registered as {policy} in stock torch)" if policy else ""


def _knows(key: str) -> bool:
    """Return whether this torch has the dispatch key; parsing one that it lacks gives None or raises, by version."""
    try:
        return torch._C._parse_dispatch_key(key) is not None
    except RuntimeError:
        return False


def documented(backend: str) -> dict[str, str]:
    """Return the names on PyTorch's page for `backend` with the policy that it gives; empty where it has no list."""
    rows = op_policy.listings(backend, origin="documented")
    return {row.name: _BANNED.get(row.policy, row.policy) for row in rows}


def page_ops(name: str) -> tuple[str, ...]:
    """Return the ATen ops that carry the rule of a name on PyTorch's page, mostly the op of that very name."""
    return op_policy.resolved(name)


@functools.cache
def names() -> frozenset[str]:
    """Return every ATen overload that this torch has; raises AttributeError where it no longer tells."""
    every = torch._C._dispatch_get_all_op_names()
    return frozenset(name.removeprefix("aten::") for name in every if name.startswith("aten::"))


def indirect(target_of: Callable[[str], overloads.Target], overload: str, backend: str) -> bool:
    """Return whether an overload without a rule on `backend` is composed of other ops that may have one.

    Not where a call of it was seen to come out in the types that it has without autocast.
    """
    if overload in overloads.registered(backend) or not _composite(overload):
        return False
    if overload not in overloads.CALLS or not _knows(overloads.dispatch_key(backend)):
        return True
    seen = overloads.observe(target_of(f"fake:{backend}"), overload, torch.get_autocast_dtype(backend))
    return seen.policy != overloads.UNLISTED


def _composite(overload: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{overload}", "CompositeImplicitAutograd"))


def stands_for(spelling: str) -> tuple[str, ...] | None:
    """Return the overloads that `spelling` ("layer_norm", "F.linear", "LayerNorm", "sum.dim_IntList", "@") stands for.

    Empty where it is Python code that calls other ops, None where nothing in torch is called so. Raises AttributeError
    as `names` does.
    """
    name = next((spelling.removeprefix(prefix) for prefix in _PREFIXES if spelling.startswith(prefix)), spelling)
    if name in names() and "." in name:
        return (name,)
    joined = name.replace(".", "_")
    for ops in (_spellings().get(joined, ()), op_policy.resolved(name), (joined,), _module(name)):
        if found := sorted(overload for overload in names() if overload.split(".")[0] in ops):
            return tuple(found)
    holders = (torch, torch.Tensor, torch.nn, torch.nn.functional)
    return () if any(callable(getattr(holder, name, None)) for holder in holders) else None


def _module(name: str) -> tuple[str, ...]:
    """The op whose name is that of a class of torch.nn, but for case and underscores."""
    if not isinstance(getattr(torch.nn, name, None), type):
        return ()
    return tuple(sorted({op for op in (full.split(".")[0] for full in names()) if _plain(op) == _plain(name)}))


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def spellings() -> frozenset[str]:
    """Return all names of ops, to suggest the nearest one for an unknown name."""
    listed = {name for backend in overloads.BACKENDS for name in documented(backend)}
    return frozenset({*(name.split(".")[0] for name in names()), *_spellings(), *listed})


@functools.cache
def _spellings() -> dict[str, list[str]]:
    table: dict[str, list[str]] = read_toml(fixture("op_spellings.toml"))["spellings"]
    return table
