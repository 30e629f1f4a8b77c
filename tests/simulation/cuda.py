"""What of torch.cuda and torch.accelerator the checks call, on a simulated card."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

from tests.simulation.card import Card, Simulation, Timeline


class Event:
    """torch.cuda.Event on the clock of a card, which a subclass names."""

    timeline: Timeline

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing
        self.at: float | None = None

    def record(self, stream: Any = None) -> None:
        self.at = self.timeline.mark()

    def synchronize(self) -> None:
        self.timeline.host = max(self.timeline.host, self.at or 0.0)

    def query(self) -> bool:
        return self.at is None or self.at <= self.timeline.host

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        if self.at is None or end.at is None or not (self.enable_timing and end.enable_timing):
            raise RuntimeError("Both events must be recorded, with timing enabled, before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")  # cudaErrorNotReady
        # cudaEventElapsedTime has a resolution of about half a microsecond.
        return round((end.at - self.at) / 5e-7) * 5e-4


class Stream:
    """The one stream there is."""

    timeline: Timeline

    device_index = 0

    def synchronize(self) -> None:
        self.timeline.wait()

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def is_capturing(self) -> bool:
        return False


def _properties(card: Card) -> Any:
    return SimpleNamespace(
        name=card.name,
        major=card.capability[0],
        minor=card.capability[1],
        total_memory=card.memory_bytes,
        multi_processor_count=card.processors,
        clock_rate=int(card.hertz / 1e3),
        L2_cache_size=card.cache_bytes,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        is_integrated=False,
        is_multi_gpu_board=False,
    )


def cuda(simulation: Simulation) -> dict[str, Any]:
    """The functions of torch.cuda on the card; where a check needs one more it belongs here."""
    card, memory, timeline = simulation.card, simulation.memory, simulation.timeline
    event, streams = type("Event", (Event,), {"timeline": timeline}), type("Stream", (Stream,), {"timeline": timeline})
    stream = streams()
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda given: contextlib.nullcontext(),
        "Stream": streams,
        "Event": event,
        "synchronize": lambda device=None: timeline.wait(),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
        "set_rng_state_all": lambda states: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "is_current_stream_capturing": lambda: False,
        "_sleep": lambda cycles: timeline.occupy(cycles / card.hertz),
        "get_device_properties": lambda device=None: _properties(card),
        "get_device_name": lambda device=None: card.name,
        "get_device_capability": lambda device=None: card.capability,
        "is_bf16_supported": lambda including_emulation=True: card.bf16 or including_emulation,
        "memory_allocated": lambda device=None: memory.allocated,
        "max_memory_allocated": lambda device=None: memory.peak,
        "memory_reserved": lambda device=None: memory.reserved,
        "max_memory_reserved": lambda device=None: memory.reserved,
        "reset_peak_memory_stats": lambda device=None: None if simulation.peaks_are_stuck else memory.reset_peak(),
        "memory_stats": lambda device=None: memory.statistics(),
        "mem_get_info": lambda device=None: (memory.total - memory.reserved, memory.total),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "utilization": _no_library,
        "temperature": _no_library,
        "power_draw": _no_library,
        "clock_rate": _no_library,
    }


def _no_library(device: Any = None) -> Any:
    raise ModuleNotFoundError("pynvml does not seem to be installed or it can't be imported.")


def accelerator(simulation: Simulation) -> dict[str, Any]:
    """The functions of torch.accelerator on the card."""
    table = cuda(simulation)
    same = ("is_available", "device_count", "current_stream", "synchronize", "memory_allocated", "max_memory_allocated")
    more = ("memory_reserved", "max_memory_reserved", "reset_peak_memory_stats", "memory_stats", "empty_cache")
    return {
        **{name: table[name] for name in (*same, *more)},
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
    }
