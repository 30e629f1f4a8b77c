"""The op policies that devices of third parties declare: whose lists hold for one without lists of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_FOLLOWED: dict[str, str] = {}
_UNNAMED = "privateuseone"


def declare(policies: Mapping[str, str]) -> None:
    """Let the lists and overloads of a backend (the value) hold for a device type (the key), and for no others."""
    _FOLLOWED.clear()
    _FOLLOWED.update(policies)


def followed(device_type: str) -> str:
    """Return the backend whose op policy holds for a device type: the declared one, or itself."""
    return _FOLLOWED.get(device_type, device_type)


def third_party() -> str | None:
    """Return the name under which a third party's device has taken torch's key PrivateUse1, or None."""
    name: str = torch._C._get_privateuse1_backend_name()
    return None if name == _UNNAMED else name
