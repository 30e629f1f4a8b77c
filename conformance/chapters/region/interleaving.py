"""Interleave the regions of several actors (generators, coroutines, threads) and compare them with a model."""

from __future__ import annotations

import contextlib
import random
import types
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...oracles.region.programs import PATIENCE, Machine, call, restore_state
from ...oracles.region.stack_model import Entry, Region, RegionStack, State, dtype_of_product, observe, probe_product

ACTORS = 3


@dataclass(frozen=True)
class Step:
    """One step of an actor: `enter` a region, `leave` the innermost, or end by `close`, `throw` or `drop`."""

    actor: int
    op: str
    region: Region

    def __str__(self) -> str:
        name = "abc"[self.actor]
        if self.op == "enter":
            return f"{name}.send({call(self.region)})"
        ended = {"leave": f"{name}.send(None)", "close": f"{name}.close()", "throw": f"{name}.throw(ValueError())"}
        return ended.get(self.op, f"{name} = None")


def random_steps(generator: random.Random, regions: Sequence[Region], length: int = 16) -> list[Step]:
    """Return up to `length` random steps over `regions`."""
    ops = ("enter",) * 5 + ("leave",) * 3 + ("close", "throw", "drop")
    return [
        Step(generator.randrange(ACTORS), generator.choice(ops), generator.choice(regions))
        for _ in range(generator.randint(2, length))
    ]


def simpler(step: Step) -> list[Step]:
    """Return simpler replacements of a step, for shrinking."""
    region = step.region
    choices = [replace(region, dtype=None), replace(region, enabled=True), replace(region, cache_enabled=None)]
    return [replace(step, region=other) for other in choices if other != region] if step.op == "enter" else []


def source(kind: str, steps: Sequence[Step]) -> str:
    """Return a schedule as Python source; one of threads runs each generator in its thread."""
    head = ["# a, b and c each run in a thread of their own"] if kind == "thread" else []
    lines = ["import torch, types\n", _COROUTINE if kind == "coroutine" else _GENERATOR]
    made = [f"{name} = actor(); {name}.send(None)" for name in "abc"[:ACTORS]]
    return "\n".join([*head, *lines, *made, *map(str, steps)])


_GENERATOR = """\
def actor():
    while (region := (yield)) is not None:
        with region:
            yield from actor()
"""
_COROUTINE = """\
@types.coroutine
def command():
    return (yield)

async def actor():
    while (region := await command()) is not None:
        with region:
            await actor()
"""


def _generator() -> Generator[None, torch.autocast | None, None]:
    while (region := (yield)) is not None:
        with region:
            yield from _generator()


@types.coroutine
def _command() -> Generator[None, torch.autocast | None, torch.autocast | None]:
    return (yield)


async def _coroutine() -> None:
    while (region := await _command()) is not None:
        with region:
            await _coroutine()


class _Actor:
    """An actor on torch and in the model; all but threads share one stack of regions."""

    def __init__(
        self, stack: RegionStack, perform: Callable[[Callable[[], Any]], Any], make: Callable[[], Any]
    ) -> None:
        self.stack = stack
        self.perform = perform
        self._make = make
        self._entries: list[Entry] = []
        self._real: Any = None

    def take(self, step: Step) -> bool:
        """Take the step on torch and in the model; False where there is nothing to leave."""
        if step.op == "enter":
            self.perform(lambda: self._enter(step.region))
            self._entries.append(self.stack.enter(step.region))
            return True
        if not self._entries:
            return False
        self.perform(lambda: self._end(step.op))
        for _ in range(1 if step.op == "leave" else len(self._entries)):
            self.stack.leave(self._entries.pop())
        return True

    def finish(self) -> None:
        """End whatever is still open."""
        self.perform(lambda: self._end("close"))

    def _enter(self, region: Region) -> None:
        if self._real is None:
            self._real = self._make()
            self._real.send(None)
        self._real.send(region.open())

    def _end(self, op: str) -> None:
        if op == "leave":
            self._real.send(None)
            return
        real, self._real = self._real, None
        if op == "throw":
            with contextlib.suppress(ValueError):
                real.throw(ValueError())
        elif op == "close" and real is not None:
            real.close()
        # CPython closes a deleted generator when its last reference is gone, which is here.


class Stage:
    """Run schedules of one type of actors: `generator`, `coroutine` or `thread`."""

    def __init__(self, kind: str, machine: Machine) -> None:
        self.kind = kind
        self.machine = machine
        self._pools = [ThreadPoolExecutor(max_workers=1) for _ in range(ACTORS if kind == "thread" else 0)]

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        for pool in self._pools:
            pool.shutdown()

    def mismatch(self, steps: Sequence[Step]) -> str | None:
        """Run the steps; return the first difference of torch from the model, or None."""
        here = self.machine.stack(self.machine.base)
        actors = self._actors(here)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for number, step in enumerate(steps):
                    if actors[step.actor].take(step) and (found := self._differences(here, actors)):
                        return f"after step {number}, {step}: {'; '.join(found)}"
        finally:
            for actor in actors:
                actor.finish()
            restore_state(self.machine.base)
            for pool in self._pools:
                pool.submit(restore_state, self.machine.new_thread).result(PATIENCE)
        return None

    def _actors(self, here: RegionStack) -> list[_Actor]:
        make = _coroutine if self.kind == "coroutine" else _generator
        if not self._pools:
            return [_Actor(here, lambda action: action(), make) for _ in range(ACTORS)]
        return [_Actor(self.machine.stack(self.machine.new_thread), _in(pool), make) for pool in self._pools]

    def _differences(self, here: RegionStack, actors: Sequence[_Actor]) -> list[str]:
        found = [f"in the main thread {one}" for one in self._wrong(here.state)]
        if self._pools:
            for name, actor in zip("abc", actors, strict=True):
                wrong = actor.perform(partial(self._wrong, actor.stack.state))
                found += [f"in thread {name} {one}" for one in wrong]
        return found

    def _wrong(self, promised: State) -> list[str]:
        product, type_ = (
            dtype_of_product(probe_product(self.machine.device)),
            promised.computes_in(self.machine.device.type),
        )
        wrong = observe().differences(promised)
        return wrong if product == type_ else [*wrong, f"a product is computed in {product}, not {type_}"]


def _in(pool: ThreadPoolExecutor) -> Callable[[Callable[[], Any]], Any]:
    return lambda action: pool.submit(action).result(PATIENCE)
