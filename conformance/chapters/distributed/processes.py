"""Ranks: processes in one group that run functions of this package, and end with the run.

The group is of gloo on the CPU, and of the collectives of their devices where each rank has an accelerator.
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from ...measure.children import start_method

_USED = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.sharded_grad_scaler",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
)
PATIENCE = 60.0
"""Seconds that ranks may take for one call. The longest takes less than two on an idle machine."""
_MERCY = 3.0
"""Seconds that the other ranks have to answer, once one has raised or died: they may wait for it in a collective."""
_LOOK = 0.5
"""Seconds between two looks of a rank at its parent."""


@dataclass(frozen=True)
class Raised:
    """An exception that ended a call in one rank: its classes, the most derived first, its message, its traceback."""

    kinds: tuple[str, ...]
    message: str
    trace: str


class Unjoined(Raised):
    """What kept one rank out of the process group: the machine's doing, or torch's, before any work began."""


class NoGroup(Exception):
    """The processes cannot form a group, here; the message has the reason of the first that could not join."""


class RankLost(Exception):
    """A rank died or said nothing: the message names it. The group is gone; the next call needs a new one.

    `answers` has what the others said, by rank.
    """

    def __init__(self, message: str, answers: Mapping[int, Any]) -> None:
        super().__init__(message)
        self.answers = answers


def lacking(device_type: str = "cpu") -> str | None:
    """Say what this torch or system lacks for several processes on devices of that type, or return None."""
    if not distributed.is_available():
        return "this torch was built without torch.distributed"
    backend = backend_of(device_type)
    if backend is None:
        return f"torch knows no collectives of {device_type} (torch.distributed.Backend.register_backend)"
    if not getattr(distributed, f"is_{backend}_available", lambda: True)():
        return f"this torch was built without {backend}"
    return None


def backend_of(device_type: str) -> str | None:
    """Return the backend of torch.distributed that devices of a type have by default."""
    found: str | None = distributed.Backend.default_device_backend_map.get(device_type)
    return found


class Ranks:
    """Processes 0 to `world` - 1 of one process group, each on its own device; `call` runs a function in each."""

    def __init__(self, world: int, method: str | None = None, device_type: str = "cpu") -> None:
        self.world = world
        self.alive = True
        self._folder = tempfile.mkdtemp(prefix="amp-conformance-ranks-")
        context: Any = multiprocessing.get_context(method or start_method(__name__))
        store = str(Path(self._folder) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        with warnings.catch_warnings():
            # Python 3.12 and later warn at a fork of a process with threads; ranks use none of the parent's.
            warnings.simplefilter("ignore", DeprecationWarning)
            for name in _USED:  # forked ranks then have them already; torch's own modules warn of one another
                importlib.import_module(name)
            for rank in range(world):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, world, store, device_type, theirs), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    @property
    def pids(self) -> list[int | None]:
        """The ids of the processes, by rank."""
        return [process.pid for process in self._processes]

    def call(self, work: Callable[..., Any], *arguments: Any, patience: float = PATIENCE) -> list[Any]:
        """Run `work(*arguments)` in every rank; return by rank what it returned, or `Raised`.

        `work` is a function of a module. Raises RankLost where a rank dies or does not answer within `patience`
        seconds, NoGroup where one could not join. After that, and after `Raised`, the group is closed, since its
        ranks may be out of step.
        """
        request = pickle.dumps((work, arguments))
        for pipe in self._pipes:
            try:
                pipe.send_bytes(request)
            except OSError:
                continue  # the rank is dead, which the wait for its answer names
        answers: dict[int, Any] = {}
        lost: dict[int, str] = {}
        end = time.monotonic() + patience
        while len(answers) + len(lost) < self.world and (left := end - time.monotonic()) > 0:
            open_pipes = {id(pipe): rank for rank, pipe in enumerate(self._pipes) if rank not in answers | lost}
            waited: list[Any] = [self._pipes[rank] for rank in open_pipes.values()]
            for ready in wait(waited, timeout=left):
                rank = open_pipes[id(ready)]
                try:
                    answers[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    lost[rank] = self._ending(rank)
                if rank in lost or isinstance(answers[rank], Raised):
                    end = min(end, time.monotonic() + _MERCY)
        silent = [rank for rank in range(self.world) if rank not in answers | lost]
        raised = {rank: answer for rank, answer in answers.items() if isinstance(answer, Raised)}
        if lost or silent or raised:
            self.close()
        for rank, answer in raised.items():
            if isinstance(answer, Unjoined):
                line = (answer.message.strip().splitlines() or [""])[0]
                raise NoGroup(f"rank {rank} of {self.world} cannot join a process group: {answer.kinds[0]}: {line}")
        if lost or (silent and not raised):
            raise RankLost(_account(work.__name__, self.world, lost, silent, patience), answers)
        return [answers.get(rank) for rank in range(self.world)]

    def close(self) -> None:
        """End the processes and wait for them; remove what they shared."""
        if not self.alive:
            return
        self.alive = False
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ending(self, rank: int) -> str:
        self._processes[rank].join(_MERCY)
        status = self._processes[rank].exitcode
        if status is None:
            return "closed its pipe"
        return f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"


class Groups:
    """The groups of a run by their number of ranks: each is started when first asked for, and again when lost."""

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type
        self._by_world: dict[int, Ranks] = {}

    def __call__(self, world: int) -> Ranks:
        """Return the group of `world` ranks."""
        found = self._by_world.get(world)
        if found is None or not found.alive:
            found = self._by_world[world] = Ranks(world, device_type=self.device_type)
        return found

    def close(self) -> None:
        """End every group."""
        for group in self._by_world.values():
            group.close()
        self._by_world.clear()


def _account(work: str, world: int, lost: dict[int, str], silent: list[int], patience: float) -> str:
    said = [f"rank {rank} of {world} {how}" for rank, how in sorted(lost.items())]
    if silent:
        said.append(f"{', '.join(f'rank {rank}' for rank in silent)} of {world} did not answer within {patience:g} s")
    return f"{work}: {'; '.join(said)}"


def _serve(rank: int, world: int, store: str, device_type: str, pipe: Connection) -> None:
    """Be one rank: join the group, then run what the parent sends until the pipe closes."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _stay_quiet()
    torch.set_num_threads(1)
    try:
        _join(rank, world, store, device_type)
        failed = None
    except Exception as error:
        failed = _raised(error, Unjoined)
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        pipe.send_bytes(pickle.dumps(failed or _answer(request)))


def _join(rank: int, world: int, store: str, device_type: str) -> None:
    if device_type != "cpu":
        torch.get_device_module(device_type).set_device(rank)
    # Gloo otherwise looks up the name of the host, which need not have an address.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    if sys.platform == "win32":
        del os.environ["GLOO_SOCKET_IFNAME"]
    # TORCH_DISTRIBUTED_DEBUG=DETAIL checks each collective, under which DDP on gloo dies of signal 11, in float32 too.
    distributed.set_debug_level(distributed.DebugLevel.OFF)
    distributed.init_process_group(
        backend_of(device_type),
        store=distributed.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )


def _answer(request: bytes) -> Any:
    try:
        work, arguments = pickle.loads(request)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work(*arguments)
    except Exception as error:
        return _raised(error)


def _raised(error: Exception, kind: type[Raised] = Raised) -> Raised:
    return kind(tuple(one.__name__ for one in type(error).__mro__), str(error), traceback.format_exc())


def _end_with(parent: int) -> None:
    """End this process when its parent has, however that ended."""
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(_LOOK)
    os._exit(0)


def _stay_quiet() -> None:
    """Leave Ctrl-C to the parent, which ends its ranks."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
