"""What of torch.cuda and torch.accelerator a CPU build of torch lacks, on the emulated card."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import torch

BYTES = 80 << 30
# An H100 SXM, as torch.cuda.get_device_properties tells it.
PROPERTIES = SimpleNamespace(
    name="emulated card",
    major=9,
    minor=0,
    total_memory=BYTES,
    multi_processor_count=132,
    clock_rate=1_980_000,
    memory_clock_rate=2_619_000,
    memory_bus_width=5120,
    L2_cache_size=50 << 20,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    is_integrated=False,
    is_multi_gpu_board=False,
)
SYNC_DEBUG_MODES = ("default", "warn", "error")


class Event:
    """An event on the host's clock: whatever is recorded has been done."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1e3


class Stream:
    """The one stream there is."""

    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _SyncDebugMode:
    def __init__(self) -> None:
        self._mode = 0

    def set(self, mode: int | str) -> None:
        self._mode = mode if isinstance(mode, int) else SYNC_DEBUG_MODES.index(mode)
        torch.ops.emulated_card.set_sync_debug_mode(self._mode)

    def get(self) -> int:
        return self._mode


def install() -> None:
    """Put the functions in place, for as long as the process lives."""
    stream, waits = Stream(), _SyncDebugMode()
    shared: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_stream": lambda device=None: stream,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
    }
    cuda = {
        **shared,
        "_lazy_init": lambda: None,
        "_initialized": True,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_sleep": lambda cycles: None,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "default_stream": lambda device=None: stream,
        "stream": lambda given: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "is_current_stream_capturing": lambda: False,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (BYTES, BYTES),
        "ipc_collect": lambda: None,
        "set_sync_debug_mode": waits.set,
        "get_sync_debug_mode": waits.get,
    }
    accelerator = {
        **shared,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
    }
    for module, table in ((torch.cuda, cuda), (torch.accelerator, accelerator)):
        for name, value in table.items():
            setattr(module, name, value)
    _give_storages_a_card()


def _give_storages_a_card() -> None:
    """Storages copy themselves by a constructor that a CPU build compiles without CUDA; here by way of tensors."""
    ordinary = torch.UntypedStorage.clone

    def moved(storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
        numbers = torch.empty(0, dtype=torch.uint8, device=storage.device)
        numbers.set_(storage, 0, (storage.nbytes(),), (1,))
        return torch.empty_like(numbers, device=device).copy_(numbers).untyped_storage()

    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        return moved(self, "cuda") if self.device.type == "cuda" else ordinary(self)

    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        wanted = torch.device(device).type
        return self if wanted == self.device.type else moved(self, wanted)

    storage: Any = torch.UntypedStorage
    storage.clone = clone
    storage.to = to
    storage.cpu = lambda self: to(self, device="cpu")
    storage.is_cuda = property(lambda self: self.device.type == "cuda")
