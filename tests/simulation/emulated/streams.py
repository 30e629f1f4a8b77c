"""Streams, events and graphs of the emulated card, as torch.cuda has them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from tests.simulation.emulated.loading import CARD


def index_of(device: Any) -> int:
    """Return the index of a card by a device, a string, an index or None (the current one)."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return int(CARD.emulated_current() if index is None or index < 0 else index)


def raise_error(message: bytes | None) -> None:
    if message is not None:
        raise RuntimeError(message.decode())


class Event:
    """What its stream has done when it is recorded, and when a card would be done with it."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timing = enable_timing
        self._past: ctypes.c_void_p | None = None

    def record(self, stream: Any = None) -> None:
        stream = stream if stream is not None else torch.cuda.current_stream()
        self._forget()
        self._past = ctypes.c_void_p(CARD.emulated_record(*stream.key))

    def wait(self, stream: Any = None) -> None:
        stream = stream if stream is not None else torch.cuda.current_stream()
        if self._past is not None:
            CARD.emulated_block(self._past, *stream.key)

    def query(self) -> bool:
        return self._past is None or CARD.emulated_time(self._past) <= CARD.emulated_now()

    def synchronize(self) -> None:
        if self._past is not None:
            CARD.emulated_wait(self._past)

    def elapsed_time(self, end: Any) -> float:
        if self._past is None or end._past is None or not (self._timing and end._timing):
            raise RuntimeError("Both events must be recorded, with timing, before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(CARD.emulated_time(end._past) - CARD.emulated_time(self._past)) * 1e3

    def _forget(self) -> None:
        if self._past is not None:
            CARD.emulated_forget(self._past)
            self._past = None

    def __del__(self) -> None:
        self._forget()


class Stream:
    """A stream of a card; the operations of several are ordered by events alone."""

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> None:
        self.device_index = index_of(device)
        self.stream_id = int(CARD.emulated_new_stream(self.device_index) if stream_id is None else stream_id)
        self.priority = priority
        self._before: Stream | None = None

    device = property(lambda self: torch.device("cuda", self.device_index))
    cuda_stream = property(lambda self: self.stream_id)

    @property
    def key(self) -> tuple[int, ctypes.c_int64]:
        """The stream as the card takes it."""
        return self.device_index, ctypes.c_int64(self.stream_id)

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
        return bool(CARD.emulated_is_capturing())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.device, self.stream_id) == (other.device, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))

    def __enter__(self) -> Stream:
        self._before = torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)


class CUDAGraph:
    """The operations that are called in a capture, repeated on the same memory by each replay."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._captured: ctypes.c_void_p | None = None
        self._pool: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        self._pool = pool if pool is not None else torch.cuda.graph_pool_handle()
        raise_error(CARD.emulated_begin_capture())

    def capture_end(self) -> None:
        captured = CARD.emulated_end_capture()
        if captured is None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._captured = ctypes.c_void_p(captured)

    def replay(self) -> None:
        if self._captured is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        raise_error(CARD.emulated_replay(self._captured))

    def register_generator_state(self, generator: torch.Generator) -> None:
        """A replay draws from the generators that were drawn from in the capture, as they are by then."""

    def instantiate(self) -> None:
        pass

    def reset(self) -> None:
        if self._captured is not None:
            CARD.emulated_drop_graph(self._captured)
            self._captured = None

    def pool(self) -> Any:
        return self._pool

    def __del__(self) -> None:
        self.reset()
