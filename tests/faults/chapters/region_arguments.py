"""Arguments of autocast that are accepted and ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.faults import fault
from tests.faults.chapters.region import initialised


@fault("AMP-REGION-110")
def dtype_of_other_devices_is_ignored() -> Iterator[None]:
    """A region for XPU takes the default dtype, whatever was asked for."""

    def change(original: Any, self: Any, device_type: Any, dtype: Any, enabled: Any, cache_enabled: Any) -> None:
        original(self, device_type, None if device_type == "xpu" else dtype, enabled, cache_enabled)

    with initialised(change):
        yield


@fault("AMP-REGION-111")
def index_disables_the_region() -> Iterator[None]:
    """A device string with an index opens a disabled region without a warning."""

    def change(original: Any, self: Any, device_type: Any, dtype: Any, enabled: Any, cache_enabled: Any) -> None:
        plain = str(device_type).split(":")[0] if isinstance(device_type, str) else device_type
        original(self, plain, dtype, enabled and plain == device_type, cache_enabled)

    with initialised(change):
        yield
