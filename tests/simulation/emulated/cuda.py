"""What of torch.cuda and torch.accelerator a CPU build of torch lacks, on the emulated card."""

from __future__ import annotations

import ctypes
import itertools
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from tests.simulation.emulated.loading import CARD
from tests.simulation.emulated.streams import CUDAGraph, Event, Stream, index_of

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
# What the card cannot show, by names of conformance.harness.targets.CAPABILITIES; checks of these are UNSUPPORTED.
LACKS = {
    "copies that do not wait": "a copy is done when the call returns, so that nothing can come too early",
    "pools of memory": "memory that is given back is not used again, so that nothing can lie in another's",
    "child processes": "a process that is started by itself finds no card",
    "compiled kernels": "what inductor compiles is for the processors of a real card",
}
SYNC_DEBUG_MODES = ("default", "warn", "error")


class _SyncDebugMode:
    def __init__(self) -> None:
        self._mode = 0

    def set(self, mode: int | str) -> None:
        self._mode = mode if isinstance(mode, int) else SYNC_DEBUG_MODES.index(mode)
        CARD.emulated_set_sync_mode(self._mode)

    def get(self) -> int:
        return self._mode


def _devices() -> dict[str, Any]:
    """Which cards there are, and which one is the current one."""

    def exchange(device: int) -> int:
        before = int(CARD.emulated_current())
        if device >= 0:
            CARD.emulated_set_current(device)
        return before

    return {
        "device_count": lambda: CARD.emulated_cards(),
        "current_device": lambda: CARD.emulated_current(),
        "set_device": lambda device: exchange(index_of(device)) and None,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "can_device_access_peer": lambda device, peer: True,
    }


def _work() -> dict[str, Any]:
    """Streams, events, graphs and waiting."""
    waits, pools = _SyncDebugMode(), itertools.count(1)

    def current(device: Any = None) -> Stream:
        index = index_of(device)
        return Stream(index, stream_id=CARD.emulated_stream(index))

    def synchronize(device: Any = None) -> None:
        if CARD.emulated_is_capturing():
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        CARD.emulated_synchronize(index_of(device))

    def sleep(cycles: int) -> None:
        CARD.emulated_delay(CARD.emulated_current(), ctypes.c_double(cycles / (CLOCK_KHZ * 1e3)))

    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": current,
        "default_stream": lambda device=None: Stream(device, stream_id=0),
        "set_stream": lambda given: CARD.emulated_set_stream(*given.key),
        "synchronize": synchronize,
        "_sleep": sleep,
        "set_sync_debug_mode": waits.set,
        "get_sync_debug_mode": waits.get,
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": lambda: (next(pools), 0),
        "is_current_stream_capturing": lambda: bool(CARD.emulated_is_capturing()),
    }


def _memory() -> dict[str, Any]:
    """Bytes of the tensors on a card, each rounded up as CUDA's allocator does it; nothing is kept in reserve."""
    return {
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: CARD.emulated_memory(index_of(device)),
        "memory_reserved": lambda device=None: CARD.emulated_memory(index_of(device)),
        "max_memory_allocated": lambda device=None: CARD.emulated_peak(index_of(device)),
        "max_memory_reserved": lambda device=None: CARD.emulated_peak(index_of(device)),
        "reset_peak_memory_stats": lambda device=None: CARD.emulated_reset_peak(index_of(device)),
        "memory_stats": lambda device=None: {
            f"{pool}_bytes.all.{at}": getattr(CARD, function)(index_of(device))
            for pool in ("allocated", "active", "reserved")
            for at, function in (("current", "emulated_memory"), ("peak", "emulated_peak"))
        },
        "mem_get_info": lambda device=None: (BYTES - CARD.emulated_memory(index_of(device)), BYTES),
        "ipc_collect": lambda: None,
    }


def _random() -> dict[str, Any]:
    """Random numbers of every card are those of the CPU's generator, which torch.manual_seed seeds."""
    return {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * CARD.emulated_cards(),
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }


def _between() -> dict[str, Any]:
    """What torch.nn.parallel.comm calls to copy between cards."""

    def scatter(tensor: Any, devices: Any, sizes: Any, dim: int, streams: Any) -> list[Any]:
        parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(list(sizes), dim)
        copies = []
        for part, device, stream in zip(parts, devices, streams or [None] * len(devices), strict=False):
            with torch.cuda.stream(stream):
                copies.append(part.contiguous().to(torch.device("cuda", device), non_blocking=True))
        return copies

    def gather(tensors: Any, dim: int, destination: int | None) -> Any:
        index = torch.cuda.current_device() if destination is None else destination
        device = torch.device("cpu") if index == -1 else torch.device("cuda", index)
        return torch.cat([tensor.to(device) for tensor in tensors], dim)

    def broadcast_coalesced(tensors: Any, devices: Any, buffer_size: int) -> list[list[Any]]:
        return [[tensor.to(torch.device("cuda", device)) for tensor in tensors] for device in devices]

    return {"_scatter": scatter, "_gather": gather, "_broadcast_coalesced": broadcast_coalesced}


def install() -> None:
    """Put the functions in place, for as long as the process lives."""
    cuda = {
        "amp_conformance_lacks": LACKS,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "_lazy_init": lambda: None,
        "_initialized": True,
        **_devices(),
        **_work(),
        **_memory(),
        **_random(),
    }
    shared = ("is_available", "device_count", "current_stream", "synchronize", "empty_cache", "memory_allocated")
    more = ("max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats", "reset_peak_memory_stats")
    accelerator = {
        **{name: cuda[name] for name in (*shared, *more)},
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": cuda["current_device"],
    }
    graphs = {name: cuda[name] for name in ("CUDAGraph", "graph_pool_handle", "is_current_stream_capturing")}
    bound = {"_host_emptyCache": lambda: None, **_between()}
    places: tuple[tuple[Any, dict[str, Any]], ...] = (
        *((torch.cuda, cuda), (torch.cuda.graphs, graphs), (torch.accelerator, accelerator), (torch._C, bound)),
    )
    for module, table in places:
        for name, value in table.items():
            # Dynamo has one rule for each function, and refuses a function that has two names.
            setattr(module, name, _copied(value) if isinstance(value, FunctionType) else value)
    _give_storages_a_card()


def _copied(function: Any) -> Any:
    return lambda *given, **named: function(*given, **named)


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
