"""Every option of every overload that a list names is tried at a value that is not its default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from conformance.oracles.policy import overloads
from conformance.oracles.policy.overload_calls import CALLS, MORE
from conformance.oracles.policy.overload_options import OPTIONS, option_calls
from conformance.oracles.policy.samples import Inputs

# Options that another value than the default cannot be given everywhere, and why.
LEFT_OUT = {
    ("_lu_with_info", "pivot"): "a CPU refuses it",
    ("_native_multi_head_attention", "average_attn_weights"): "of the weights, which are not asked for",
    ("_native_multi_head_attention", "mask_type"): "of a mask, which is another call",
    ("_scaled_dot_product_flash_attention", "dropout_p"): "random",
    ("_scaled_dot_product_flash_attention", "return_debug_mask"): "needs dropout",
    ("linalg_matrix_norm.str_ord", "ord"): "the nuclear norm refuses 16 bits, also where the sum is fp32",
    ("linalg_svd", "driver"): "of CUDA alone",
    ("linalg_svdvals", "driver"): "of CUDA alone",
    ("scaled_dot_product_attention", "dropout_p"): "random",
    ("stft", "align_to_window"): "not in every torch",
    ("stft.center", "align_to_window"): "not in every torch",
}


def _inputs() -> Inputs:
    return Inputs((torch.float32,), torch.device("cpu"))


def _listed() -> list[str]:
    known = {overload for backend in overloads.BACKENDS for overload in overloads.known(backend)}
    return sorted(overload for overload in known if overload in CALLS and _schema(overload) is not None)


def _schema(overload: str) -> Any:
    name, _, which = overload.partition(".")
    own = getattr(getattr(torch.ops.aten, name, None), which or "default", None)
    return own and own._schema


def _named(overload: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return {**dict(zip((argument.name for argument in _schema(overload).arguments), args, strict=False)), **keywords}


def _given(overload: str) -> Iterator[dict[str, Any]]:
    for make in (CALLS[overload], *MORE.get(overload, ()), *OPTIONS.get(overload, ())):
        args, keywords = make(_inputs())
        yield _named(overload, args, keywords)


def _is_default(value: Any, default: Any) -> bool:
    """Whether it says what the default does, in a list as many times as there are dimensions."""
    value, default = (side[0] if isinstance(side, list) and len(set(side)) == 1 else side for side in (value, default))
    return bool(value == default)


def test_options_are_of_overloads_with_a_policy() -> None:
    known = {overload for backend in overloads.BACKENDS for overload in overloads.known(backend, "2.13.0")}

    assert sorted(set(OPTIONS) - known) == []


@pytest.mark.parametrize("overload", _listed())
def test_each_option_is_tried_at_another_value(overload: str) -> None:
    given = list(_given(overload))
    untried = [
        argument.name
        for argument in _schema(overload).arguments
        if argument.has_default_value()
        and "Tensor" not in str(argument.type)
        and argument.name not in ("dtype", "generator")
        and (overload, argument.name) not in LEFT_OUT
        and all(_is_default(call.get(argument.name, argument.default_value), argument.default_value) for call in given)
    ]

    assert untried == []


@pytest.mark.parametrize("overload", sorted(name for name in OPTIONS if overloads.known("cpu").get(name)))
def test_calls_with_options_can_be_made(overload: str) -> None:
    for call in option_calls(overload, _inputs):
        call()


# Options that choose how it is computed, or what a singular matrix raises, and not what the result is.
WITHOUT_EFFECT = {
    ("_lu_with_info", "check_errors"),
    ("linalg_cholesky_ex", "check_errors"),
    ("linalg_inv_ex", "check_errors"),
    ("cdist", "compute_mode"),
    ("group_norm", "cudnn_enabled"),
    ("layer_norm", "cudnn_enable"),
}


def _calls_and_options() -> Iterator[tuple[str, str]]:
    for overload in sorted(name for name in OPTIONS if _schema(name) and overloads.known("cpu").get(name)):
        for argument in _schema(overload).arguments:
            if argument.has_default_value() and (overload, argument.name) not in WITHOUT_EFFECT:
                yield overload, argument.name


def _results(op: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    found: list[torch.Tensor] = tree_leaves(op(**arguments))
    return found


@pytest.mark.parametrize(("overload", "option"), list(_calls_and_options()))
def test_each_option_that_is_given_changes_the_result(overload: str, option: str) -> None:
    """A rule that drops an argument is noticed by what the argument changes."""
    default = next(one.default_value for one in _schema(overload).arguments if one.name == option)
    unlike = []
    # Each call is made twice, for some ops write to an argument.
    for call, again in zip(option_calls(overload, _inputs), option_calls(overload, _inputs), strict=True):
        given, others = (_named(overload, each.args, each.keywords) for each in (call, again))
        own = given.get(option, default)
        if not isinstance(own, torch.Tensor) and _is_default(own, default):
            continue
        try:
            changed = _results(again.func, {**others, option: default})
        except (RuntimeError, ValueError):
            return  # without it the call is refused
        right = _results(call.func, given)
        unlike.append(
            len(right) != len(changed)
            or any(
                ours.dtype != theirs.dtype or not torch.equal(ours.nan_to_num(nan=7.5), theirs.nan_to_num(nan=7.5))
                for ours, theirs in zip(right, changed, strict=True)
            )
        )

    assert any(unlike) or not unlike
