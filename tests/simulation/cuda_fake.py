"""What of torch.cuda the GPU checks call, for tensors of the CPU: graphs, streams, and the debug mode for waits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class _Recorder(TorchDispatchMode):
    """Notes every operation with its operands and results, and what it is going to change."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ == "_local_scalar_dense":
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        for each in tree_flatten((args, kwargs))[0]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in self.before:
                self.before[each.untyped_storage().data_ptr()] = (each, each.detach().clone())
        result = func(*args, **kwargs)
        results = [each for each in tree_flatten(result)[0] if isinstance(each, torch.Tensor)]
        self.calls.append((func, args, kwargs, results))
        return result


class Graph:
    """A CUDA graph of operations on the CPU: capturing changes nothing, a replay does all again on the same memory."""

    left_out: tuple[str, ...] = ()  # operations that a faulty graph forgets

    def __init__(self) -> None:
        self._recorder = _Recorder()
        self.shared: Graph | None = None

    @contextlib.contextmanager
    def capture(self, shared: Graph | None) -> Iterator[None]:
        self.shared = shared
        with self._recorder:
            yield
        with torch.no_grad():
            for tensor, value in self._recorder.before.values():
                with torch.autograd._unsafe_preserve_version_counter(tensor):  # as capturing ran nothing
                    tensor.copy_(value)

    @property
    def results(self) -> list[torch.Tensor]:
        """What its operations made, in the graph's memory."""
        return [each for _, _, _, results in self._recorder.calls for each in results]

    def pool(self) -> Graph:
        """Its memory pool, of which the graph itself is the token."""
        return self

    def register_generator_state(self, generator: torch.Generator) -> None:
        pass

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, results in self._recorder.calls:
                if func.overloadpacket.__name__ in self.left_out:
                    continue
                again = [each for each in tree_flatten(func(*args, **kwargs))[0] if isinstance(each, torch.Tensor)]
                for old, new in zip(results, again, strict=True):
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)


class Stream:
    """A stream that runs at once; `log` says what waited for what."""

    log: list[str]

    def __init__(self, name: str = "side") -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        type(self).log.append(f"{self.name} waits for {other.name}")


class _Waits(TorchDispatchMode):
    """Raises where a number is read back, as CUDA's debug mode does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero"):
            raise RuntimeError("called a synchronizing CUDA operation")
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class FakeCuda:
    """The stand-in, as it was set up; `graph` is the class that torch.cuda.CUDAGraph has become."""

    graph: type[Graph]
    devices: int = 1
    mode: str | int = "default"
    _waits: Any = None

    def set_sync_debug_mode(self, mode: str | int) -> None:
        if self._waits is not None:
            self._waits.__exit__(None, None, None)
            self._waits = None
        if mode == "error":
            self._waits = _Waits()
            self._waits.__enter__()
        self.mode = mode


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Put the stand-in in the place of torch.cuda's functions."""
    graph = type("CUDAGraph", (Graph,), {})
    fake = FakeCuda(graph)
    current = Stream("current")
    monkeypatch.setattr(Stream, "log", [], raising=False)
    replaced = {
        "CUDAGraph": graph,
        "graph": lambda made, pool=None, **options: made.capture(pool),
        "graph_pool_handle": lambda: None,
        "synchronize": lambda device=None: None,
        "_sleep": lambda cycles: None,
        "Stream": Stream,
        "current_stream": lambda: current,
        "stream": lambda stream: contextlib.nullcontext(),
        "device_count": lambda: fake.devices,
        "get_sync_debug_mode": lambda: fake.mode,
        "set_sync_debug_mode": fake.set_sync_debug_mode,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    monkeypatch.setattr(torch.cuda.graphs, "graph_pool_handle", torch.cuda.graph_pool_handle)
    monkeypatch.setattr(torch, "get_device_module", lambda device: torch.cuda)
    return fake
