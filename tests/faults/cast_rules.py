"""What autocast may do with an op, each rule as a kernel in Python: written without a look at the suite's oracles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.faults.breaking import dropped, kernel

Rule = Callable[[Any, dict[str, Any], torch.dtype], Any]

DROPPED, IDLE, PARTIAL = "dropped", "idle", "partial"
CASTING = ("lower_precision", "fp32", "widest")  # the policies that cast arguments


def aten(overload: str) -> Any:
    """Return the operator of an overload ("mm", "sum.dim_IntList")."""
    name, _, which = overload.partition(".")
    return getattr(getattr(torch.ops.aten, name), which or "default")


def rules(overload: str) -> list[str]:
    """Return the rules that a kernel of the overload can follow: not those that ask for a type it cannot take."""
    op = aten(overload)
    cannot = set() if _has_optional_dtype(op) else {"fp32_set_dtype"}
    if _with_dtype(op) is None:
        cannot.add("fp32_append_dtype")
    return [rule for rule in (DROPPED, *RULES) if rule not in cannot]


def ruled(overload: str, rule: str, device_type: str) -> AbstractContextManager[None]:
    """Let the overload follow one of the rules, by its name, in regions of the device type."""
    if rule == DROPPED:
        return dropped(overload, _key(device_type))
    return following(overload, RULES[rule], device_type)


def partly_ruled(overload: str, policy: str, spared: int, device_type: str) -> AbstractContextManager[None]:
    """Let the overload cast as `policy` says, but for the castable argument of number `spared`."""
    return following(overload, _casting(policy, spared), device_type)


@contextmanager
def following(overload: str, rule: Rule, device_type: str) -> Iterator[None]:
    """Let `rule(op below autocast, its arguments by name, the region's dtype)` be what autocast does with the op."""
    op, key = aten(overload), _key(device_type)
    names = [argument.name for argument in op._schema.arguments]
    below = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below):
            return rule(op, {**dict(zip(names, args, strict=False)), **kwargs}, torch.get_autocast_dtype(device_type))

    with kernel(overload, run, key):
        yield


def _key(device_type: str) -> str:
    return f"Autocast{device_type.upper()}"


def _has_optional_dtype(op: Any) -> bool:
    return any(argument.name == "dtype" and argument.has_default_value() for argument in op._schema.arguments)


def _with_dtype(op: Any) -> Any:
    """The overload that takes the same arguments and a dtype besides; None where there is none."""
    ours = _types(op)
    siblings = (getattr(op.overloadpacket, which) for which in op.overloadpacket.overloads())
    return next((one for one in siblings if "dtype" not in ours and _types(one) == {**ours, "dtype": "int"}), None)


def _types(op: Any) -> dict[str, str]:
    """The types of its arguments; an order of a norm that may be left out is still a number."""
    return {
        argument.name: re.sub(r"^Optional\[(.*)\]$", r"\1", str(argument.type)) for argument in op._schema.arguments
    }


def is_castable(leaf: Any) -> bool:
    """Whether autocast may cast it: a tensor, floating, and not float64."""
    return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16, torch.float32)


def castable(tree: Any) -> list[int]:
    """Return which of the leaves of nested arguments autocast may cast: floating tensors that are not float64."""
    return [index for index, leaf in enumerate(tree_leaves(tree)) if is_castable(leaf)]


def cast(named: dict[str, Any], dtype: torch.dtype, spared: int | None = None) -> dict[str, Any]:
    """The arguments with all that is castable cast, but for the one of number `spared` among them."""
    leaves, form = tree_flatten(named)
    for number, index in enumerate(castable(named)):
        if number != spared:
            leaves[index] = leaves[index].to(dtype)
    done: dict[str, Any] = tree_unflatten(leaves, form)
    return done


def _type_of(policy: str, named: dict[str, Any], amp_dtype: torch.dtype) -> torch.dtype:
    if policy == "widest":
        # prioritize in autocast_mode.h: float32 where any argument is, else the type of the region
        wide = any(is_castable(leaf) and leaf.dtype is torch.float32 for leaf in tree_leaves(named))
        return torch.float32 if wide else amp_dtype
    return {"lower_precision": amp_dtype, "fp32": torch.float32}[policy]


def _casting(policy: str, spared: int | None = None) -> Rule:
    """A rule that casts what is castable, but for the one of number `spared`."""
    return lambda op, named, amp_dtype: op(**cast(named, _type_of(policy, named, amp_dtype), spared))


def _idle(op: Any, named: dict[str, Any], amp_dtype: torch.dtype) -> Any:
    return op(**named)


def _fp32_set_dtype(op: Any, named: dict[str, Any], amp_dtype: torch.dtype) -> Any:
    asked = named.get("dtype") is not None or not is_castable(next(iter(named.values())))
    return op(**named) if asked else op(**{**named, "dtype": torch.float32})


def _fp32_append_dtype(op: Any, named: dict[str, Any], amp_dtype: torch.dtype) -> Any:
    first = next(iter(named.values()))
    filled = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()} | named
    return _with_dtype(op)(**filled, dtype=torch.float32 if is_castable(first) else first.dtype)


def _banned(op: Any, named: dict[str, Any], amp_dtype: torch.dtype) -> Any:
    raise RuntimeError(f"{op} is unsafe to autocast")


RULES: dict[str, Rule] = {
    IDLE: _idle,
    "lower_precision": _casting("lower_precision"),
    "fp32": _casting("fp32"),
    "fp32_set_dtype": _fp32_set_dtype,
    "fp32_append_dtype": _fp32_append_dtype,
    "widest": _casting("widest"),
    "banned": _banned,
}
