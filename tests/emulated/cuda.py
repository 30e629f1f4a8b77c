"""What of torch.cuda and torch.accelerator a CPU build of torch lacks, on the emulated card."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import torch

BYTES = 80 << 30
CLOCK_KHZ = 1_980_000
# An H100 SXM, as torch.cuda.get_device_properties describes it.
PROPERTIES = SimpleNamespace(
    name="emulated card",
    major=9,
    minor=0,
    total_memory=BYTES,
    multi_processor_count=132,
    clock_rate=CLOCK_KHZ,
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


def _index(card: Any, device: Any) -> int:
    """Return the index of a card by a device, a string, an index or None (the current one)."""
    if device is None:
        return int(card.emulated_current())
    if isinstance(device, int):
        return device if device >= 0 else int(card.emulated_current())
    found = torch.device(device).index
    return int(card.emulated_current()) if found is None else int(found)


def _streams(card: Any) -> tuple[type[Any], type[Any]]:
    """Make the classes Event and Stream."""

    class Event:
        """What its stream has done when it is recorded, and when a card would be done with it."""

        def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
            self._timing = enable_timing
            self._recorded: ctypes.c_void_p | None = None

        def record(self, stream: Any = None) -> None:
            stream = stream if stream is not None else torch.cuda.current_stream()
            self._forget()
            self._recorded = ctypes.c_void_p(card.emulated_record(stream.device_index, ctypes.c_int64(stream.stream_id)))

        def wait(self, stream: Any = None) -> None:
            stream = stream if stream is not None else torch.cuda.current_stream()
            if self._recorded is not None:
                card.emulated_block(self._recorded, stream.device_index, ctypes.c_int64(stream.stream_id))

        def query(self) -> bool:
            return self._recorded is None or card.emulated_time(self._recorded) <= card.emulated_now()

        def synchronize(self) -> None:
            if self._recorded is not None:
                card.emulated_wait(self._recorded)

        def elapsed_time(self, end: Any) -> float:
            if self._recorded is None or end._recorded is None or not (self._timing and end._timing):
                raise RuntimeError("Both events must be recorded, with timing enabled, before calculating elapsed time.")
            if not (self.query() and end.query()):
                raise RuntimeError("Both events must be completed before calculating elapsed time.")
            return float(card.emulated_time(end._recorded) - card.emulated_time(self._recorded)) * 1e3

        def _forget(self) -> None:
            if self._recorded is not None:
                card.emulated_forget(self._recorded)
                self._recorded = None

        def __del__(self) -> None:
            self._forget()

    class Stream:
        """A stream of a card; operations of several are ordered by events alone."""

        def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> None:
            self.device_index = _index(card, device)
            self.stream_id = card.emulated_new_stream(self.device_index) if stream_id is None else stream_id
            self.priority = priority

        device = property(lambda self: torch.device("cuda", self.device_index))
        cuda_stream = property(lambda self: self.stream_id)

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, other: Any) -> None:
            self.wait_event(other.record_event())

        def synchronize(self) -> None:
            self.record_event().synchronize()

        def query(self) -> bool:
            return bool(self.record_event().query())

        def is_capturing(self) -> bool:
            return bool(card.emulated_is_capturing())

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and self._key() == other._key()

        def __hash__(self) -> int:
            return hash(self._key())

        def _key(self) -> tuple[int, int]:
            return self.device_index, self.stream_id

        def __enter__(self) -> Any:
            self._before = torch.cuda.current_stream(self.device)
            torch.cuda.set_stream(self)
            return self

        def __exit__(self, *_: object) -> None:
            torch.cuda.set_stream(self._before)

    return Stream, Event


def _graph(card: Any) -> type[Any]:
    """Make the class CUDAGraph."""

    class CUDAGraph:
        """The operations that were called in a capture, repeated on the same memory by each replay."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._captured: ctypes.c_void_p | None = None
            self._pool: Any = None

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
            self._pool = pool if pool is not None else torch.cuda.graph_pool_handle()
            _raise(card.emulated_begin_capture())

        def capture_end(self) -> None:
            captured = card.emulated_end_capture()
            if captured is None:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            self._captured = ctypes.c_void_p(captured)

        def replay(self) -> None:
            if self._captured is None:
                raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
            _raise(card.emulated_replay(self._captured))

        def instantiate(self) -> None:
            pass

        def reset(self) -> None:
            if self._captured is not None:
                card.emulated_drop_graph(self._captured)
                self._captured = None

        def pool(self) -> Any:
            return self._pool

        def __del__(self) -> None:
            self.reset()

    return CUDAGraph


def _raise(message: bytes | None) -> None:
    if message is not None:
        raise RuntimeError(message.decode())


class _SyncDebugMode:
    def __init__(self, card: Any) -> None:
        self._card = card
        self._mode = 0

    def set(self, mode: int | str) -> None:
        self._mode = mode if isinstance(mode, int) else SYNC_DEBUG_MODES.index(mode)
        self._card.emulated_set_sync_mode(self._mode)

    def get(self) -> int:
        return self._mode


def _devices(card: Any) -> dict[str, Any]:
    """Which cards there are, and which one is the current one."""

    def exchange(device: int) -> int:
        before = int(card.emulated_current())
        if device >= 0:
            card.emulated_set_current(device)
        return before

    return {
        "device_count": lambda: card.emulated_cards(),
        "current_device": lambda: card.emulated_current(),
        "set_device": lambda device: exchange(_index(card, device)) and None,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "can_device_access_peer": lambda device, peer: True,
    }


def _work(card: Any) -> dict[str, Any]:
    """Streams, events, graphs and waiting."""
    stream, event = _streams(card)
    waits, pools = _SyncDebugMode(card), iter(range(1, 1 << 62))

    def current(device: Any = None) -> Any:
        index = _index(card, device)
        return stream(index, stream_id=card.emulated_stream(index))

    def synchronize(device: Any = None) -> None:
        if card.emulated_is_capturing():
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        card.emulated_synchronize(_index(card, device))

    def sleep(cycles: int) -> None:
        card.emulated_delay(card.emulated_current(), ctypes.c_double(cycles / (CLOCK_KHZ * 1e3)))

    return {
        "Stream": stream,
        "Event": event,
        "current_stream": current,
        "default_stream": lambda device=None: stream(device, stream_id=0),
        "set_stream": lambda given: card.emulated_set_stream(given.device_index, ctypes.c_int64(given.stream_id)),
        "synchronize": synchronize,
        "_sleep": sleep,
        "set_sync_debug_mode": waits.set,
        "get_sync_debug_mode": waits.get,
        "CUDAGraph": _graph(card),
        "graph_pool_handle": lambda: (next(pools), 0),
        "is_current_stream_capturing": lambda: bool(card.emulated_is_capturing()),
    }


def _memory(card: Any) -> dict[str, Any]:
    """Bytes of the tensors on a card, each rounded up as CUDA's allocator does it; nothing is kept in reserve."""
    return {
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: card.emulated_memory(_index(card, device)),
        "memory_reserved": lambda device=None: card.emulated_memory(_index(card, device)),
        "max_memory_allocated": lambda device=None: card.emulated_peak(_index(card, device)),
        "max_memory_reserved": lambda device=None: card.emulated_peak(_index(card, device)),
        "reset_peak_memory_stats": lambda device=None: card.emulated_reset_peak(_index(card, device)),
        "memory_stats": lambda device=None: {
            f"{pool}_bytes.all.{at}": getattr(card, function)(_index(card, device))
            for pool in ("allocated", "active", "reserved")
            for at, function in (("current", "emulated_memory"), ("peak", "emulated_peak"))
        },
        "mem_get_info": lambda device=None: (BYTES - card.emulated_memory(_index(card, device)), BYTES),
        "ipc_collect": lambda: None,
    }


def _random(card: Any) -> dict[str, Any]:
    """Random numbers of every card are those of the CPU's generator, which torch.manual_seed seeds."""
    return {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * card.emulated_cards(),
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }


def install(card: ctypes.CDLL) -> None:
    """Put the functions in place, for as long as the process lives."""
    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "_lazy_init": lambda: None,
        "_initialized": True,
        **_devices(card),
        **_work(card),
        **_memory(card),
        **_random(card),
    }
    shared = ("is_available", "device_count", "current_stream", "synchronize", "empty_cache", "memory_allocated")
    more = ("max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats", "reset_peak_memory_stats")
    accelerator = {
        **{name: cuda[name] for name in (*shared, *more)},
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": cuda["current_device"],
    }
    graphs = {name: cuda[name] for name in ("CUDAGraph", "graph_pool_handle", "is_current_stream_capturing")}
    for module, table in ((torch.cuda, cuda), (torch.cuda.graphs, graphs), (torch.accelerator, accelerator)):
        for name, value in table.items():
            setattr(module, name, value)
    torch._C._host_emptyCache = lambda: None
    _give_storages_a_card()


def _give_storages_a_card() -> None:
    """Storages copy themselves by a constructor that a CPU build compiles without CUDA; here by way of tensors."""
    ordinary = torch.UntypedStorage.clone

    def moved(storage: torch.UntypedStorage, device: Any) -> torch.UntypedStorage:
        numbers = torch.empty(0, dtype=torch.uint8, device=storage.device)
        numbers.set_(storage, 0, (storage.nbytes(),), (1,))
        return torch.empty_like(numbers, device=device).copy_(numbers).untyped_storage()

    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        return moved(self, self.device) if self.device.type == "cuda" else ordinary(self)

    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        wanted = torch.device(device)
        here = wanted.type == self.device.type and wanted.index in (None, self.device.index)
        return self if here else moved(self, wanted)

    storage: Any = torch.UntypedStorage
    storage.clone = clone
    storage.to = to
    storage.cpu = lambda self: to(self, device="cpu")
    storage.is_cuda = property(lambda self: self.device.type == "cuda")
