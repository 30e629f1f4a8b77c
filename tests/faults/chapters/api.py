"""Public names that lost a warning, a default, a check or their meaning."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from tests.faults import fault
from tests.faults.breaking import edited, replaced


def warned(message: str, category: type[Warning], result: Callable[..., Any]) -> Callable[..., Any]:
    """A function that warns and then does what `result` does."""

    def function(*arguments: Any, **options: Any) -> Any:
        warnings.warn(message, category, stacklevel=2)
        return result(*arguments, **options)

    return function


@fault("AMP-API-001")
def deprecated_scaler_is_silent() -> Iterator[None]:
    """torch.cuda.amp.GradScaler no longer warns."""

    class GradScaler(torch.amp.GradScaler):
        def __init__(
            self,
            init_scale: float = 2.0**16,
            growth_factor: float = 2.0,
            backoff_factor: float = 0.5,
            growth_interval: int = 2000,
            enabled: bool = True,
        ) -> None:
            super().__init__("cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    with replaced(torch.cuda.amp, "GradScaler", GradScaler):
        yield


@fault("AMP-API-001")
def deprecation_names_no_replacement() -> Iterator[None]:
    """torch.cuda.amp.custom_fwd says that it is deprecated, not what to use."""

    def custom_fwd(fwd: Any = None, *, cast_inputs: Any = None) -> Any:
        warnings.warn("`torch.cuda.amp.custom_fwd(args...)` is deprecated.", FutureWarning, stacklevel=2)
        return torch.amp.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)

    with replaced(torch.cuda.amp, "custom_fwd", custom_fwd):
        yield


@fault("AMP-API-001")
def deprecation_warns_once() -> Iterator[None]:
    """torch.cuda.amp.custom_bwd warns at its first use only."""
    used: list[None] = []
    old = torch.cuda.amp.custom_bwd

    def custom_bwd(bwd: Any) -> Any:
        used.append(None)
        return old(bwd) if len(used) == 1 else torch.amp.custom_bwd(bwd, device_type="cuda")

    with replaced(torch.cuda.amp, "custom_bwd", custom_bwd):
        yield


@fault("AMP-API-002")
def deprecated_getter_is_silent() -> Iterator[None]:
    """torch.get_autocast_gpu_dtype no longer warns."""
    with replaced(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cuda")):
        yield


@fault("AMP-API-003")
def deprecated_getter_reads_another_device() -> Iterator[None]:
    """torch.get_autocast_gpu_dtype returns the CPU's dtype."""
    message = "torch.get_autocast_gpu_dtype() is deprecated. Please use torch.get_autocast_dtype('cuda') instead."
    wrong = warned(message, DeprecationWarning, lambda: torch.get_autocast_dtype("cpu"))
    with replaced(torch, "get_autocast_gpu_dtype", wrong):
        yield


@fault("AMP-API-003")
def deprecated_setter_does_nothing() -> Iterator[None]:
    """torch.set_autocast_cpu_enabled warns and sets nothing."""
    message = (
        "torch.set_autocast_cpu_enabled(enabled) is deprecated. "
        "Please use torch.set_autocast_enabled('cpu', enabled) instead."
    )
    with replaced(torch, "set_autocast_cpu_enabled", warned(message, DeprecationWarning, lambda enabled: None)):
        yield


@fault("AMP-API-004")
def current_scaler_warns() -> Iterator[None]:
    """torch.amp.GradScaler gives a deprecation warning."""
    original = torch.amp.GradScaler.__init__
    with edited(original, "self._device = device", "warnings.warn('deprecated', FutureWarning); self._device = device"):
        yield


@fault("AMP-API-005")
def deprecated_scaler_is_another_class() -> Iterator[None]:
    """torch.cpu.amp.GradScaler does not derive from torch.amp.GradScaler."""
    message = "`torch.cpu.amp.GradScaler(args...)` is deprecated. Please use `torch.amp.GradScaler('cpu', args...)`"
    with replaced(torch.cpu.amp, "GradScaler", warned(message, FutureWarning, lambda **options: object())):
        yield


@fault("AMP-API-010")
def scaler_starts_lower() -> Iterator[None]:
    """GradScaler's default init_scale is 32768."""
    defaults: tuple[Any, ...] = torch.amp.GradScaler.__init__.__defaults__ or ()
    torch.amp.GradScaler.__init__.__defaults__ = (defaults[0], 32768.0, *defaults[2:])
    try:
        yield
    finally:
        torch.amp.GradScaler.__init__.__defaults__ = defaults


@fault("AMP-API-010")
def autocast_takes_its_flag_first() -> Iterator[None]:
    """torch.autocast takes enabled before dtype."""
    original = torch.autocast.__init__

    def initialise(
        self: Any, device_type: Any, enabled: bool = True, dtype: Any = None, cache_enabled: bool | None = None
    ) -> None:
        original(self, device_type, dtype, enabled, cache_enabled)

    with replaced(torch.autocast, "__init__", initialise):
        yield


@fault("AMP-API-011")
def autocast_is_two_classes() -> Iterator[None]:
    """torch.amp.autocast is not torch.autocast."""
    with replaced(torch.amp, "autocast", type("autocast", (torch.autocast,), {})):
        yield


@fault("AMP-API-013")
def older_name_is_removed() -> Iterator[None]:
    """torch.cpu.amp has no GradScaler."""
    with replaced(torch.cpu.amp, "GradScaler", None):
        yield


@fault("AMP-API-020")
def availability_asks_for_the_hardware() -> Iterator[None]:
    """is_autocast_available is true only for the CPU and for what is in the machine."""
    available = torch.amp.is_autocast_available

    def here(device_type: str) -> bool:
        return available(device_type) and (device_type == "cpu" or torch.accelerator.is_available())

    with replaced(torch.amp, "is_autocast_available", here):
        yield


@fault("AMP-API-021")
def default_dtype_of_hpu_is_changed() -> Iterator[None]:
    """The default of hpu is float16."""
    before = torch.get_autocast_dtype("hpu")
    torch.set_autocast_dtype("hpu", torch.float16)
    try:
        yield
    finally:
        torch.set_autocast_dtype("hpu", before)


@fault("AMP-API-022")
def setting_a_dtype_reaches_another_device() -> Iterator[None]:
    """torch.set_autocast_dtype for CUDA sets xpu's dtype too."""
    write = torch.set_autocast_dtype

    def both(device_type: str, dtype: torch.dtype) -> None:
        write(device_type, dtype)
        if device_type == "cuda":
            write("xpu", dtype)

    with replaced(torch, "set_autocast_dtype", both):
        yield


@fault("AMP-API-023")
def switching_off_does_nothing() -> Iterator[None]:
    """torch.set_autocast_enabled(device_type, False) sets nothing for xpu."""
    write = torch.set_autocast_enabled

    def on_only(*arguments: Any) -> None:
        if arguments != ("xpu", False):
            write(*arguments)

    with replaced(torch, "set_autocast_enabled", on_only):
        yield


@fault("AMP-API-024")
def no_device_type_means_any() -> Iterator[None]:
    """torch.is_autocast_enabled() is true where autocast is on for the CPU, too."""
    read = torch.is_autocast_enabled

    def anywhere(*arguments: Any) -> bool:
        return read(*arguments) if arguments else read("cuda") or read("cpu")

    with replaced(torch, "is_autocast_enabled", anywhere):
        yield


@fault("AMP-API-025")
def cache_flag_reads_on() -> Iterator[None]:
    """torch.is_autocast_cache_enabled is always true."""
    with replaced(torch, "is_autocast_cache_enabled", lambda: True):
        yield


@fault("AMP-API-026")
def nesting_counter_returns_nothing() -> Iterator[None]:
    """torch.autocast_increment_nesting returns the depth before."""
    increment = torch.autocast_increment_nesting
    with replaced(torch, "autocast_increment_nesting", lambda: increment() - 1):
        yield


@fault("AMP-API-030")
def dtype_may_be_text() -> Iterator[None]:
    """torch.set_autocast_dtype takes the name of a dtype."""
    write = torch.set_autocast_dtype

    def by_name(device_type: str, dtype: Any) -> None:
        write(device_type, getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    with replaced(torch, "set_autocast_dtype", by_name):
        yield


@fault("AMP-API-032")
def unknown_device_type_is_not_available() -> Iterator[None]:
    """is_autocast_available is false for a string that is no device type."""
    available = torch.amp.is_autocast_available

    def forgiving(device_type: str) -> bool:
        with contextlib.suppress(RuntimeError):
            return available(device_type)
        return False

    with replaced(torch.amp, "is_autocast_available", forgiving):
        yield


@fault("AMP-API-012")
def star_import_lacks_a_name() -> Iterator[None]:
    """torch.amp.__all__ does not have custom_bwd."""
    with mock.patch.object(torch.amp, "__all__", ["autocast", "GradScaler", "custom_fwd"], create=True):
        yield
