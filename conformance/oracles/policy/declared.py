"""The op policies that devices of third parties declare: whose lists hold for one without lists of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .declaration import Declaration

_DECLARED: dict[str, Declaration] = {}
_UNNAMED = "privateuseone"


def declare(policies: Mapping[str, Declaration]) -> None:
    """Let the lists and overloads that are declared for a device type (the key) hold for it, and for no other."""
    _DECLARED.clear()
    _DECLARED.update(policies)


def followed(device_type: str) -> str:
    """Return the backend whose op policy holds for a device type: the declared one, or itself."""
    declaration = _DECLARED.get(device_type)
    return device_type if declaration is None else declaration.backend


def overloads(device_type: str) -> Mapping[str, str] | None:
    """Return the policies by overload that hold for a device type in place of its lists, or None."""
    declaration = _DECLARED.get(device_type)
    return None if declaration is None or not declaration.overloads else declaration.overloads


def source_of_rules(device_type: str) -> str:
    """Return the words for what holds for a device type in place of lists."""
    declaration = _DECLARED.get(device_type)
    if declaration is None or declaration.surface is not None:
        return f"the surface that is declared for {device_type}"
    return f"the op policy of {declaration.backend}"


def changed(device_type: str) -> frozenset[str]:
    """Return the ops ("mm") to which the surface declared for a device type gives another rule than its lists have."""
    declaration = _DECLARED.get(device_type)
    return frozenset() if declaration is None else declaration.changed


def declaration(device_type: str) -> Declaration | None:
    """Return what is declared for a device type, None where its own lists hold."""
    return _DECLARED.get(device_type)


def third_party() -> str | None:
    """Return the name under which a third party's device has taken torch's key PrivateUse1, or None."""
    name: str = torch._C._get_privateuse1_backend_name()
    return None if name == _UNNAMED else name
