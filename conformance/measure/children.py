"""Processes that a check starts for work of its own, which may end them."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

_MERCY = 3.0  # seconds that a forked process has for a backward pass of one number


@functools.cache
def start_method(*preloaded: str) -> str:
    """Return how processes are started that compute gradients: forked where that works, to share torch's import.

    A process in which autograd has started threads cannot run backward after a fork: one with an accelerator,
    and one whose torch counts a device that is not there. macOS's frameworks do not survive a fork. There a server
    forks them, which has imported this module and those named in `preloaded`, where it was not started before.
    """
    if not sys.platform.startswith("linux"):
        return "spawn"
    if not torch.accelerator.is_available():
        _backward()
        with contextlib.suppress(TimeoutError, EOFError):
            if started("fork", _send_whether_backward_runs, _MERCY):
                return "fork"
    multiprocessing.set_forkserver_preload([__name__, *preloaded])
    return "forkserver"


def _backward() -> None:
    torch.ones(1, requires_grad=True).sum().backward()


def _send_whether_backward_runs(sender: Any) -> None:
    try:
        _backward()
    except RuntimeError:
        sender.send(False)
    else:
        sender.send(True)


def started(method: str, work: Callable[[Any], None], patience: float) -> Any:
    """Return what `work` sends from a process started by `method`, spawn or fork; TimeoutError after `patience` s."""
    process, receiver = _child(method, work)
    try:
        if not receiver.poll(patience):
            raise TimeoutError(f"a process started by {method} said nothing within {patience:g} s")
        return receiver.recv()
    finally:
        process.kill()
        process.join(patience)


def told(work: Callable[[Any], None], patience: float, *, method: str | None = None) -> tuple[list[Any], int | None]:
    """Return all that `work` sends from a process that may end before its time, and the code with which it ends.

    `method` is spawn for a process with this one's environment; by default that of `start_method`.

    The code is negative for a signal, and None where the process says nothing for `patience` seconds, and is killed.
    """
    process, receiver = _child(method or start_method(), functools.partial(_quietly, work))
    said: list[Any] = []
    try:
        while receiver.poll(patience):
            said.append(receiver.recv())
    except EOFError:
        process.join(patience)
        return said, process.exitcode
    finally:
        process.kill()
        process.join(patience)
    return said, None


def _quietly(work: Callable[[Any], None], sender: Any) -> None:
    faulthandler.disable()  # the end of the process is what is looked for
    work(sender)


def _child(method: str, work: Callable[[Any], None]) -> tuple[BaseProcess, Connection]:
    context = torch.multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    with warnings.catch_warnings():
        # Python 3.12 and later warn at a fork of a process with threads; the child does not use them.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = context.Process(target=work, args=(sender,), daemon=True)
        process.start()
    sender.close()  # the child's copy alone is open, so that its end is seen
    return process, receiver
