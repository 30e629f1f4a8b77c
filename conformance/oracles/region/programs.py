"""Generate programs of nested autocast regions, run them on torch and on the model, and compare."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, TypeAlias

import torch

from .stack_model import Region, RegionStack, State, dtype_of_product, observe, probe_product

PATIENCE = 60.0  # seconds after which a thread is considered dead


@dataclass(frozen=True)
class Way:
    """A way to run a body in a region: source with placeholders for `{region}`, `{body}` and the step's `{number}`."""

    source: str
    is_function: bool = True


WAYS = {
    "with": Way("with {region}:\n    {body}", is_function=False),
    "function": Way("@{region}\ndef work():\n    {body}\nwork()"),
    "by hand": Way(
        "opened_{number} = {region}\nopened_{number}.__enter__()\n"
        "try:\n    {body}\nfinally:\n    opened_{number}.__exit__(*sys.exc_info())",
        is_function=False,
    ),
    "exit stack": Way(
        "with contextlib.ExitStack() as stack:\n    stack.enter_context({region})\n    {body}", is_function=False
    ),
    "context manager": Way(
        "@contextlib.contextmanager\ndef opened():\n    with {region}:\n        yield\n\nwith opened():\n    {body}",
        is_function=False,
    ),
    "method": Way("class Work:\n    @{region}\n    def work(self):\n        {body}\n\nWork().work()"),
    "class method": Way(
        "class Work:\n    @classmethod\n    @{region}\n    def work(cls):\n        {body}\n\nWork.work()"
    ),
    "static method": Way(
        "class Work:\n    @staticmethod\n    @{region}\n    def work():\n        {body}\n\nWork.work()"
    ),
    "property": Way("class Work:\n    @property\n    @{region}\n    def work(self):\n        {body}\n\nWork().work"),
    "__call__": Way("class Work:\n    @{region}\n    def __call__(self):\n        {body}\n\nWork()()"),
    "module": Way("class Work(torch.nn.Module):\n    @{region}\n    def forward(self):\n        {body}\n\nWork()()"),
    "lambda": Way("def work():\n    {body}\n\n{region}(lambda: work())()"),
    "partial": Way("def work(number):\n    {body}\n\n{region}(functools.partial(work, 1))()"),
    "callable object": Way("class Work:\n    def __call__(self):\n        {body}\n\n{region}(Work())()"),
    "bound method": Way("class Work:\n    def work(self):\n        {body}\n\n{region}(Work().work)()"),
    "class": Way("class Work:\n    def __init__(self):\n        {body}\n\n{region}(Work)()"),
    "in a coroutine": Way(
        "async def work():\n    with {region}:\n        {body}\n\n"
        "with contextlib.suppress(StopIteration):\n    work().send(None)"
    ),
    "in a generator": Way("def work():\n    with {region}:\n        {body}\n    yield\n\nfor _ in work():\n    pass"),
}
"""Every way in which a region is opened around a body, by name."""

EXCEPTIONS: dict[str, type[BaseException]] = {
    "ValueError": ValueError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": SystemExit,
}


@dataclass(frozen=True)
class Open:
    """A region around a body; `shared` is the number of an instance that was made when the program began."""

    number: int
    way: str
    region: Region
    body: tuple[Statement, ...]
    shared: int | None = None


@dataclass(frozen=True)
class Block:
    """A body in a `function`, a `loop` of two rounds, a `thread`, or a `try` that `catches` an exception or nothing."""

    number: int
    kind: str
    body: tuple[Statement, ...]
    catches: str | None = None


@dataclass(frozen=True)
class Jump:
    """`return`, `break`, `continue`, or the name of an exception that is raised."""

    number: int
    kind: str


@dataclass(frozen=True)
class Set:
    """A call of one of torch's setters."""

    number: int
    device_type: str
    value: bool | torch.dtype
    cache: bool = False


Statement: TypeAlias = Open | Block | Jump | Set


@dataclass(frozen=True)
class Program:
    """Statements, and the instances that are made before the first of them."""

    statements: tuple[Statement, ...]
    shared: tuple[Region, ...] = ()

    @property
    def source(self) -> str:
        """The program in Python; `see` is called after each step."""
        made = [f"made = [{', '.join(map(call, self.shared))}]"] if self.shared else []
        return "\n".join([*made, *_lines(self.statements, _spelt), "see('end')"])

    @property
    def code(self) -> CodeType:
        """Compile `source` for exec().

        exec(str) re-raises a caught KeyboardInterrupt as SIGINT when the process ends (run_eval_code_obj in
        Python/pythonrun.c).
        """
        return compile(self.source, "<program>", "exec")

    def script(self, device: str) -> str:
        """Return the program as a script that needs only torch; `see` prints the getters."""
        threads = _IN_THREAD if "in_thread(" in self.source else ""
        return f"{_SEE.replace('DEVICE', device)}{threads}\n\n{self.source}"

    @property
    def parametric_source(self) -> str:
        """Return the source with each region's arguments in `regions[number]`, so that one text serves many regions."""
        lines = _lines(self.statements, lambda opened: f"torch.autocast(**regions[{opened.number}])")
        return "\n".join([*lines, "see('end')"])

    def regions(self) -> dict[int, Region]:
        """Return the regions by the numbers of the statements that open them."""
        return {one.number: one.region for one in _every(self.statements) if isinstance(one, Open)}


_SEE = """\
import contextlib, functools, sys, torch

def see(place):
    device = torch.device("DEVICE").type
    print(place, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
"""
_IN_THREAD = """
def in_thread(work):
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
"""


def call(region: Region) -> str:
    """Return the call that makes the region."""
    arguments = [repr(region.device_type), *(f"{name}={value}" for name, value in options(region).items())]
    return f"torch.autocast({', '.join(arguments)})"


def options(region: Region) -> dict[str, Any]:
    """Return the named arguments of the region, leaving out those that have their default."""
    given = {"dtype": region.dtype, "enabled": region.enabled, "cache_enabled": region.cache_enabled}
    return {name: value for name, value in given.items() if value is not (True if name == "enabled" else None)}


def _every(statements: Sequence[Statement]) -> Iterator[Statement]:
    for one in statements:
        yield one
        if isinstance(one, (Open, Block)):
            yield from _every(one.body)


def _spelt(opened: Open) -> str:
    return call(opened.region) if opened.shared is None else f"made[{opened.shared}]"


def _lines(statements: Sequence[Statement], spell: Callable[[Open], str]) -> list[str]:
    lines = []
    for one in statements:
        if isinstance(one, Jump):
            lines.append(f"raise {one.kind}" if one.kind in EXCEPTIONS else one.kind)
            continue
        if isinstance(one, Set):
            lines.append(_setter(one))
        else:
            body = "\n".join([f"see('in {one.number}')", *_lines(one.body, spell)])
            source = WAYS[one.way].source if isinstance(one, Open) else _block(one)
            if isinstance(one, Open):
                source = source.replace("{region}", spell(one)).replace("{number}", str(one.number))
            lines += _filled(source, body)
        lines.append(f"see('after {one.number}')")
    return lines


def _filled(source: str, body: str) -> list[str]:
    """Put `body` in the place of `{body}`, as deep as that is."""
    lines: list[str] = []
    for line in source.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.indent(body, indent).splitlines() if line.strip() == "{body}" else [line]
    return lines


def _block(block: Block) -> str:
    if block.kind == "function":
        return "def work():\n    {body}\n\nwork()"
    if block.kind == "thread":
        return "def work():\n    {body}\n\nin_thread(work)"
    if block.kind == "loop":
        return "for _ in range(2):\n    {body}"
    if block.catches is None:
        return f"try:\n    {{body}}\nfinally:\n    see('finally {block.number}')"
    return f"try:\n    {{body}}\nexcept {block.catches}:\n    see('caught {block.number}')"


def _setter(one: Set) -> str:
    if one.cache:
        return f"torch.set_autocast_cache_enabled({one.value})"
    name = "enabled" if isinstance(one.value, bool) else "dtype"
    return f"torch.set_autocast_{name}({one.device_type!r}, {one.value})"


# Observations


@dataclass(frozen=True)
class Sight:
    """The observation at one place of a program: the state, and the dtype of products."""

    place: str
    state: State
    product: torch.dtype | None

    def differences(self, promised: Sight) -> list[str]:
        """Say in what this differs from `promised`; empty where they agree."""
        if self.place != promised.place:
            return [f"{self.place} is reached, not {promised.place}"]
        found = self.state.differences(promised.state)
        if self.product != promised.product:
            found.append(f"a product of float32 tensors is computed in {self.product}, not {promised.product}")
        return [f"{self.place}: {one}" for one in found]


def parting(seen: Sequence[Sight], promised: Sequence[Sight]) -> str | None:
    """Return the first difference of `seen` from `promised`, or None."""
    for here, there in zip(seen, promised, strict=False):
        if differences := here.differences(there):
            return "; ".join(differences)
    if len(seen) != len(promised):
        return f"{len(seen)} places are reached, not {len(promised)}"
    return None


# On the model


@dataclass(frozen=True)
class Machine:
    """The initial conditions of a program: the state here and in a new thread, and the device types available here."""

    device: torch.device
    base: State
    new_thread: State
    absent: frozenset[str] = frozenset()
    unrestricted: frozenset[str] = frozenset()

    def stack(self, state: State) -> RegionStack:
        """Return a stack of regions that starts from `state`."""
        return RegionStack(state, self.absent, self.unrestricted)


class _Left(Exception):
    """The model's exception: a jump that leaves blocks."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def predicted(program: Program, machine: Machine) -> list[Sight]:
    """Return the predicted observations of a program, from the rules of regions and of Python's statements."""
    return _Model(program, machine).run()


class _Model:
    def __init__(self, program: Program, machine: Machine) -> None:
        self._program = program
        self._machine = machine
        self._stack = machine.stack(machine.base)
        self._made = [self._stack.settled(region) for region in program.shared]
        self._sights: list[Sight] = []

    def run(self) -> list[Sight]:
        try:
            self._all(self._program.statements)
            self._see("end")
        except _Left as left:
            self._see(left.kind)
        return self._sights

    def _see(self, place: str) -> None:
        state = self._stack.state
        self._sights.append(Sight(place, state, state.computes_in(self._machine.device.type)))

    def _all(self, statements: Sequence[Statement]) -> None:
        for one in statements:
            if isinstance(one, Jump):
                raise _Left(one.kind)
            if isinstance(one, Set):
                self._set(one)
            elif isinstance(one, Open):
                self._open(one)
            else:
                getattr(self, f"_{one.kind}")(one)
            self._see(f"after {one.number}")

    def _set(self, one: Set) -> None:
        if one.cache:
            self._stack.set_cache_enabled(bool(one.value))
        elif isinstance(one.value, bool):
            self._stack.set_enabled(one.device_type, one.value)
        else:
            self._stack.set_dtype(one.device_type, one.value)

    def _body(self, one: Open | Block) -> None:
        self._see(f"in {one.number}")
        self._all(one.body)

    def _open(self, one: Open) -> None:
        entry = self._stack.enter(one.region if one.shared is None else self._made[one.shared])
        try:
            self._body(one)
        except _Left as left:
            if not (WAYS[one.way].is_function and left.kind == "return"):
                raise
        finally:
            self._stack.leave(entry)

    def _function(self, one: Block) -> None:
        try:
            self._body(one)
        except _Left as left:
            if left.kind != "return":
                raise

    def _thread(self, one: Block) -> None:
        here, self._stack = self._stack, self._machine.stack(self._machine.new_thread)
        try:
            self._function(one)
        finally:
            self._stack = here

    def _loop(self, one: Block) -> None:
        for _ in range(2):
            try:
                self._body(one)
            except _Left as left:
                if left.kind == "break":
                    break
                if left.kind != "continue":
                    raise

    def _try(self, one: Block) -> None:
        try:
            self._body(one)
        except _Left as left:
            if one.catches is None or left.kind not in EXCEPTIONS or one.catches not in (left.kind, "BaseException"):
                raise
            self._see(f"caught {one.number}")
        finally:
            if one.catches is None:
                self._see(f"finally {one.number}")


# On torch


class Player:
    """Run programs on torch; all of them use one second thread, whose state is restored before each use."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        # A new thread starts a thread team for its first product, which is slow and unrelated to autocast.
        self._pool = ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def mismatch(self, program: Program) -> str | None:
        """Run the program on torch and on the model; return the first difference, or None."""
        return parting(self.played(program.code), predicted(program, self.machine))

    def played(self, code: CodeType, regions: Mapping[int, Region] | None = None) -> list[Sight]:
        """Run the code of a program and return its observations; the state is restored to the machine's base."""
        sights: list[Sight] = []

        def see(place: str) -> None:
            sights.append(Sight(place, observe(), dtype_of_product(probe_product(self.machine.device))))

        arguments = {at: {"device_type": one.device_type, **options(one)} for at, one in (regions or {}).items()}
        names = {
            "torch": torch,
            "contextlib": contextlib,
            "functools": functools,
            "sys": sys,
            "see": see,
            "in_thread": self._in_thread,
            "regions": arguments,
        }
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(code, names)
        except tuple(EXCEPTIONS.values()) as error:
            see(type(error).__name__)
        except Exception as error:
            see(f"{type(error).__name__}: {error}")
        finally:
            restore_state(self.machine.base)
        return sights

    def _in_thread(self, work: Callable[[], Any]) -> Any:
        self._pool.submit(restore_state, self.machine.new_thread).result(PATIENCE)
        return self._pool.submit(work).result(PATIENCE)


def restore_state(state: State) -> None:
    """Restore `state` in the calling thread by torch's setters."""
    for device_type, setting in state.settings.items():
        torch.set_autocast_enabled(device_type, setting.enabled)
        torch.set_autocast_dtype(device_type, setting.dtype)
    torch.set_autocast_cache_enabled(state.cache_enabled)
    torch.clear_autocast_cache()
    while (depth := observe().depth) != state.depth:
        (torch.autocast_decrement_nesting if depth > state.depth else torch.autocast_increment_nesting)()


# Random programs


@dataclass(frozen=True)
class Token:
    """One element of the flat list form of a program; fields that it does not need are ignored."""

    op: str
    way: str
    region: Region
    flag: bool


# Regions and their ends are what most programs are made of.
_RARE = ("reuse", "raise", "return", "finally", "loop", "jump", "thread")
_OPS = ("open",) * 5 + ("end",) * 3 + ("set", "try") * 2 + _RARE


def random_tokens(generator: random.Random, regions: Sequence[Region], length: int = 16) -> list[Token]:
    """Return up to `length` random tokens over `regions`."""
    ways = tuple(WAYS)
    return [
        Token(generator.choice(_OPS), generator.choice(ways), generator.choice(regions), generator.random() < 0.5)
        for _ in range(generator.randint(2, length))
    ]


def simpler(token: Token) -> list[Token]:
    """Return simpler replacements of a token, for shrinking."""
    region = token.region
    ways = [] if token.way == "with" else [replace(token, way="with"), replace(token, way="function")]
    plainer = [replace(region, dtype=None), replace(region, enabled=True), replace(region, cache_enabled=None)]
    return [other for other in (*ways, *(replace(token, region=one) for one in plainer)) if other != token]


@dataclass
class _Frame:
    """A block under construction; `inside` names its surroundings, up to its function."""

    make: Callable[[tuple[Statement, ...]], Statement]
    inside: frozenset[str]
    body: list[Statement] = field(default_factory=list)
    shared: int | None = None


def program_of(tokens: Sequence[Token]) -> Program:
    """Convert a flat list of tokens to a program; tokens that are illegal at their position are omitted.

    The instances that are made beforehand are of the regions of the first and of the last token.
    """
    frames = [_Frame(lambda body: Block(-1, "function", body), frozenset())]
    for number, token in enumerate(tokens):
        top = frames[-1]
        if token.op == "end":
            _close(frames)
        elif token.op in ("open", "reuse"):
            frames += _opened(frames, number, token)
        elif token.op in ("raise", "return", "jump"):
            kind = _jump(token, top.inside)
            if kind is not None:
                top.body.append(Jump(number, kind))
                if len(frames) == 1:
                    break
                _close(frames)  # what followed would never run
        elif token.op == "set":
            top.body.append(_set(number, token))
        elif token.op != "thread" or "thread" not in top.inside:
            frames.append(_blocked(number, token, top.inside))
    while len(frames) > 1:
        _close(frames)
    used = [one.shared for one in _every(frames[0].body) if isinstance(one, Open) and one.shared is not None]
    return Program(tuple(frames[0].body), (tokens[0].region, tokens[-1].region) if used else ())


def _close(frames: list[_Frame]) -> None:
    if len(frames) > 1:
        done = frames.pop()
        frames[-1].body.append(done.make(tuple(done.body)))


def _opened(frames: list[_Frame], number: int, token: Token) -> list[_Frame]:
    shared = None
    if token.op == "reuse":
        shared = int(token.flag)
        # AMP-REGION-008 covers an instance that is open already.
        if shared in [frame.shared for frame in frames]:
            return []
    opened = Open(number, token.way, token.region, (), shared)
    inside = _in_function(frames[-1].inside) if WAYS[token.way].is_function else frames[-1].inside
    return [_Frame(lambda body: replace(opened, body=body), inside, shared=shared)]


def _blocked(number: int, token: Token, inside: frozenset[str]) -> _Frame:
    if token.op in ("try", "finally"):
        catches = None if token.op == "finally" else ("ValueError" if token.flag else "BaseException")
        return _Frame(lambda body: Block(number, "try", body, catches), inside)
    if token.op == "loop":
        return _Frame(lambda body: Block(number, "loop", body), inside | {"loop"})
    if token.op == "thread" and token.flag:
        return _Frame(lambda body: Block(number, "thread", body), frozenset({"function", "thread"}))
    return _Frame(lambda body: Block(number, "function", body), _in_function(inside))


def _in_function(outside: frozenset[str]) -> frozenset[str]:
    return frozenset({"function"}) | (outside & {"thread"})


def _jump(token: Token, inside: frozenset[str]) -> str | None:
    if token.op == "raise":
        return "ValueError" if token.flag else ("SystemExit" if token.region.enabled else "KeyboardInterrupt")
    if token.op == "return":
        return "return" if "function" in inside else None
    return ("break" if token.flag else "continue") if "loop" in inside else None


def _set(number: int, token: Token) -> Set:
    region = token.region
    if region.cache_enabled is not None:
        return Set(number, region.device_type, region.cache_enabled, cache=True)
    if region.dtype in (torch.float16, torch.bfloat16) and token.flag:
        return Set(number, region.device_type, region.dtype)
    return Set(number, region.device_type, region.enabled)
