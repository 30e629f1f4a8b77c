"""Signatures are read as they are written down, and every name of the tables is one that torch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.chapters.api.documented_api import deprecated, is_optional, lookup, parameters, signatures
from conformance.oracles.policy.devices import device_types


def _plain(first: int, second: str = "text") -> None: ...
def _named(first: int, *, second: float = 2.0) -> None: ...
def _gathered(*arguments: int, second: bool = True, **options: str) -> None: ...


class _Method:
    def method(self, first: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "written"),
    [
        (_plain, ["first", "second='text'"]),
        (_named, ["first", "*", "second=2.0"]),
        (_gathered, ["*arguments", "second=True", "**options"]),
        (_Method.method, ["first"]),
        (_Method, []),
    ],
)
def test_parameters(function: Callable[..., Any], written: list[str]) -> None:
    assert parameters(function) == written


def test_is_optional() -> None:
    assert [is_optional(text) for text in ("first", "second=2.0", "*", "*arguments", "**options")] == [
        False,
        True,
        True,
        True,
        True,
    ]


def test_lookup() -> None:
    assert lookup("torch.amp.GradScaler.step") is torch.amp.GradScaler.step
    with pytest.raises(AttributeError, match="nonsense"):
        lookup("torch.amp.nonsense")


def test_tables_name_what_torch_has() -> None:
    names = [signature.name for signature in signatures()] + [entry.name for entry in deprecated()]

    assert [name for name in names if lookup(name) is None] == []


def test_device_types_fit_the_running_torch() -> None:
    found = {device.type: device.dtype for device in device_types()}

    assert (found["cpu"], found["cuda"], found["meta"]) == (torch.bfloat16, torch.float16, None)
    assert [device.type for device in device_types() if device.documented] == ["cpu", "cuda"]
