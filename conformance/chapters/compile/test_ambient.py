"""Check that a compiled program sees each change of the region around it, and which region its backward runs in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.formats import OTHER
from .observation import Around, observed
from .programs import AMBIENT
from .support import ambient, bound, changes, compiler, dtypes_of, inner_type, pause_of, same, set_flags
from .ways import WAYS

# Each change compiles the program again.
FIRST = {
    ("eager", "getters_inside"): "quick",
    ("aot_eager", "plain_inside"): "standard",
}
CHANGING = [
    deep(FIRST.get((way, name), "full"), (way, name), id=f"{name}-{way}")
    for name in ("plain_inside", "getters_inside")
    for way in ("eager", "eager-breaks", "aot_eager", "aot_eager-breaks")
]


@contract("AMP-COMPILE-020")
@pytest.mark.parametrize("pair", CHANGING)
def test_changes_between_calls(case: Case, target: Target, rng: torch.Generator, pair: tuple[str, str]) -> None:
    way, chosen = pair[0], AMBIENT[pair[1]]
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            leaves = chosen.leaves(target.device, rng)
            call = bound(chosen, target, dtype, cache=False)
            pausing = bound(chosen, target, dtype, pause=pause_of(WAYS[way]), cache=False)
            compiled = WAYS[way].make(pausing, leaves)
            opened = changes(target, dtype)
            # There and back, so that code of every setting is there when each is called again.
            for name in (*opened, *reversed(opened)):
                around: dict[str, Any] = {"around": opened[name], "around_backward": opened[name]}
                expected = observed(call, leaves, **around)
                same(case, f"{dtype}, {name}", observed(compiled, leaves, **around), expected)


@contract("AMP-COMPILE-020")
@pytest.mark.parametrize("way", [deep("full", "eager"), "aot_eager"])
def test_changes_at_a_graph_break(case: Case, target: Target, rng: torch.Generator, way: str) -> None:
    """A function that is not compiled, and leaves the flags changed, is called between two compiled parts."""
    kind = target.device_type
    x, w = (torch.randn(4, 4, generator=rng).to(target.device) for _ in range(2))
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            wanted: list[tuple[bool, torch.dtype]] = [(False, dtype)]

            def switch(wanted: list[tuple[bool, torch.dtype]] = wanted) -> None:
                torch.set_autocast_enabled(kind, wanted[0][0])
                torch.set_autocast_dtype(kind, wanted[0][1])

            def program(x: torch.Tensor, w: torch.Tensor, switch: Callable[[], None] = switch) -> torch.Tensor:
                y = x + w
                switch()
                return torch.mm(y, w)

            compiled = torch.compile(functools.partial(program, switch=torch.compiler.disable(switch)), backend=way)
            for flags in (
                (False, dtype),
                (True, dtype),
                (True, inner_type(target, dtype)),
                (False, dtype),
                (True, dtype),
            ):
                wanted[0] = flags
                results = []
                for call in (compiled, program):
                    with torch.autocast(kind, enabled=False):  # which restores the flags, and does not set them
                        results.append(call(x, w))
                case.identical(f"{dtype}: a product after the flags became {flags}", *results)


# What a region that is opened in a region says of itself: what it leaves open is that of the region around it.
LEFT_OPEN: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "nothing": ((), {}),
    "dtype=None": ((), {"dtype": None}),
    "enabled=True": ((), {"enabled": True}),
    "cache_enabled=False": ((), {"cache_enabled": False}),
    "None, True": ((None, True), {}),
    "enabled=False": ((), {"enabled": False}),
}


@contract("AMP-COMPILE-020")
@pytest.mark.parametrize("said", LEFT_OPEN, ids=lambda said: said.replace(", ", "-"))
@pytest.mark.parametrize("backend", ["eager", deep("standard", "aot_eager")])
def test_what_inner_regions_leave_open(case: Case, target: Target, said: str, backend: str) -> None:
    """An inner region without dtype, which is compiled once and called in regions of several types."""
    case.require(target, torch.float16, torch.bfloat16)
    kind, (given, named) = target.device_type, LEFT_OPEN[said]

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast(kind, *given, **named):
            product = x @ x
            told = x.to(torch.get_autocast_dtype(kind))
            on = x + 1 if torch.is_autocast_enabled(kind) else x - 1
            kept = x + 1 if torch.is_autocast_cache_enabled() else x - 1
        return product, told, on, kept

    x = torch.ones(4, 4, device=target.device)
    around = [
        *(ambient(target, dtype) for dtype in (torch.float16, torch.bfloat16)),
        ambient(target, torch.float16, enabled=False),
        ambient(target, torch.bfloat16, cache_enabled=False),
        lambda: set_flags(kind, torch.float16, enabled=False),
    ]
    answers = set()
    with compiler(case):
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        for number, region in enumerate((*around, *reversed(around))):
            with region():
                expected, seen = program(x), compiled(x)
            answers.add(tuple(one.dtype for one in expected[:2]))
            for what, ours, theirs in zip(("a product", "dtype", "enabled", "cache"), seen, expected, strict=True):
                case.identical(f"{what}, in region {number}", ours, theirs)
    case.equal("different types of eager (control)", len(answers), 2)


# The device types that one program asks about: each change compiles it again, of which Dynamo allows eight.
ASKED = {"documented": ("cpu", "cuda", "xpu", "mps"), "further": ("hpu", "xla", "privateuseone")}
CHANGED_STATE = ("enabled", "dtype", "dtype while disabled")
Flags: TypeAlias = dict[str, tuple[bool, torch.dtype]]


def flags_in_turn(kinds: tuple[str, ...], changed: str) -> list[Flags]:
    """Return settings of autocast by device type: a first one, and for each type one that differs there alone."""
    first = changed == "dtype", torch.float16
    other = {"enabled": (True, torch.float16), "dtype": (True, torch.bfloat16)}.get(changed, (False, torch.bfloat16))
    return [{kind: other if kind == one else first for kind in kinds} for one in (None, *kinds)]


@contextlib.contextmanager
def each_flag_set(flags: Flags) -> Iterator[None]:
    """Set autocast of several device types."""
    with contextlib.ExitStack() as stack:
        for kind, (enabled, dtype) in flags.items():
            stack.enter_context(set_flags(kind, dtype, enabled=enabled))
        yield


@contract("AMP-COMPILE-020")
@pytest.mark.parametrize("changed", [*CHANGED_STATE[:2], *(deep("standard", name) for name in CHANGED_STATE[2:])])
@pytest.mark.parametrize("group", ["documented", deep("standard", "further")])
@pytest.mark.parametrize("backend", ["eager", deep("full", "aot_eager")])
def test_state_of_each_device_type(case: Case, target: Target, group: str, changed: str, backend: str) -> None:
    """A program that asks for the autocast state of several device types, of which one changes between its calls."""
    case.require(target, torch.float16, torch.bfloat16)
    kinds = ASKED[group]

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = []
        for kind in kinds:
            y = x + 1 if torch.is_autocast_enabled(kind) else x - 1
            found.append(y.to(torch.get_autocast_dtype(kind)))
        return tuple(found)

    x = torch.zeros(2, device=target.device)
    results = []
    with compiler(case):
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        settings = flags_in_turn(kinds, changed)
        for flags in (*settings, *settings):
            with each_flag_set(flags):
                seen, expected = compiled(x), program(x)
            results.append([(each.dtype, float(each[0])) for each in expected])
            for kind, ours, theirs in zip(kinds, seen, expected, strict=True):
                enabled, dtype = flags[kind]
                case.identical(f"answer for {kind}, enabled {enabled}, {dtype}, others {flags}", ours, theirs)
    distinct = {tuple(each) for each in results}
    case.equal("different answers of eager (control)", len(distinct), len(settings))


# Getters in the spellings before torch 2.4, each with the device type that it is about; the cache's is about none.
GETTERS = {
    "is_autocast_enabled": "cuda",
    "get_autocast_gpu_dtype": "cuda",
    "is_autocast_cpu_enabled": "cpu",
    "get_autocast_cpu_dtype": "cpu",
    "is_autocast_xla_enabled": "xla",
    "get_autocast_xla_dtype": "xla",
    "is_autocast_cache_enabled": "cpu",
}
ASKED_AT_QUICK = ("is_autocast_enabled", "get_autocast_cpu_dtype", "is_autocast_cache_enabled")


@contextlib.contextmanager
def set_cache(enabled: bool) -> Iterator[None]:
    """Switch the weight cache on or off through torch's setter."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contract("AMP-COMPILE-020")
@pytest.mark.filterwarnings("ignore:torch.(is|get)_autocast:DeprecationWarning")
@pytest.mark.parametrize("getter", [name if name in ASKED_AT_QUICK else deep("standard", name) for name in GETTERS])
def test_getters_of_old(case: Case, target: Target, getter: str) -> None:
    """A program that asks by an older getter, in a graph or beside it, when what it tells changes between two calls."""
    case.require(target, torch.float16, torch.bfloat16)
    kind, ask = GETTERS[getter], getattr(torch, getter)

    def program(x: torch.Tensor) -> torch.Tensor:
        told = ask()
        return x.to(told) if isinstance(told, torch.dtype) else x + 1 if told else x - 1

    x = torch.zeros(2, device=target.device)
    settings = [(False, torch.float16, True), (True, torch.float16, True), (True, torch.bfloat16, False)]
    answers = set()
    with compiler(case):
        compiled = torch.compile(program, backend="eager")
        for enabled, dtype, cache in (*settings, *reversed(settings)):
            with set_flags(kind, dtype, enabled=enabled), set_cache(cache):
                seen, expected = compiled(x), program(x)
            answers.add((expected.dtype, float(expected[0])))
            case.identical(f"enabled {enabled}, {dtype}, cache {cache}", seen, expected)
    case.equal("different answers of eager (control)", len(answers), 2)


class Holder:
    """An object that holds a region."""

    region: Any = None


REGION: Any = None


def _by_global(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with REGION:
        return torch.mm(x, w)


def region_users(holder: Holder) -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Return functions that enter a region which was made outside of them, by where they take it from."""

    def by_attribute(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with holder.region:
            return torch.mm(x, w)

    return {"an attribute": by_attribute, "a global": _by_global}


@contract("AMP-COMPILE-021")
@pytest.mark.parametrize("place", ["an attribute", deep("standard", "a global")])
def test_other_region_objects(case: Case, target: Target, place: str) -> None:
    global REGION
    holder = Holder()
    call = region_users(holder)[place]
    x, w = torch.randn(2, 4, 4).to(target.device)
    with compiler(case):
        compiled = torch.compile(call, backend="eager")
        for dtype in dtypes_of(case, target):
            made = {
                f"{dtype}": torch.autocast(target.device_type, dtype=dtype),
                f"{OTHER[dtype]}": torch.autocast(target.device_type, dtype=OTHER[dtype]),
                "disabled": torch.autocast(target.device_type, enabled=False),
            }
            try:
                for name in (*made, *made):
                    holder.region = REGION = made[name]
                    case.identical(f"a product in the region {name} of {place}", compiled(x, w), call(x, w))
            finally:
                REGION = None


# The settings of a region object that a program may set between two calls, and their values in turn.
CHANGED: dict[str, tuple[str, Callable[[torch.dtype], tuple[Any, ...]]]] = {
    "dtype": ("fast_dtype", lambda dtype: (dtype, OTHER[dtype], dtype)),
    "enabled": ("_enabled", lambda dtype: (True, False, True)),
}


@contract("AMP-COMPILE-021")
@pytest.mark.parametrize("setting", CHANGED)
@pytest.mark.parametrize("place", ["an attribute", deep("standard", "a global")])
def test_other_settings_of_one_object(case: Case, target: Target, place: str, setting: str) -> None:
    global REGION
    holder = Holder()
    call = region_users(holder)[place]
    x, w = torch.randn(2, 4, 4).to(target.device)
    attribute, values = CHANGED[setting]
    with compiler(case):
        for dtype in dtypes_of(case, target):
            case.require(target, *values(dtype) if setting == "dtype" else ())
            torch._dynamo.reset()
            compiled = torch.compile(call, backend="eager")
            holder.region = REGION = torch.autocast(target.device_type, dtype=dtype)
            try:
                for value in values(dtype):
                    setattr(REGION, attribute, value)
                    what = f"a product in the region of {place} with {setting} {value}"
                    case.identical(what, compiled(x, w), call(x, w))
            finally:
                REGION = None


SETTINGS = ("same_as_forward", "off", "list")


@contract("AMP-COMPILE-022")
@pytest.mark.parametrize("setting", [deep("standard", name) for name in SETTINGS])
@pytest.mark.parametrize("program", ["island_inside", deep("full", "plain_inside"), deep("full", "siblings_inside")])
def test_backward_pass_autocast(case: Case, target: Target, rng: torch.Generator, setting: str, program: str) -> None:
    chosen = AMBIENT[program]
    with compiler(case):
        from torch._functorch import config

        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            other = {"device_type": target.device_type, "dtype": OTHER[dtype], "cache_enabled": False}
            value = [other] if setting == "list" else setting
            around = ambient(target, dtype, cache_enabled=False)
            backward: dict[str, Around] = {
                "same_as_forward": around,
                "off": contextlib.nullcontext,
                "list": functools.partial(torch.autocast, **other),
            }
            leaves = chosen.leaves(target.device, rng)
            call = bound(chosen, target, dtype, cache=False)
            expected = observed(call, leaves, around=around, around_backward=backward[setting])
            with config.patch(backward_pass_autocast=value):
                compiled = WAYS["aot_eager"].make(call, leaves)
                # The region in which backward is called does not matter: the graph was made before.
                seen = observed(compiled, leaves, around=around)
            same(case, f"{dtype}, backward_pass_autocast={value!r}", seen, expected)


@contract("AMP-COMPILE-023")
@pytest.mark.parametrize(
    "program",
    [
        "island_inside",
        *(
            deep("standard" if name == "getters_inside" else "full", name)
            for name in AMBIENT
            if name != "island_inside"
        ),
    ],
)
def test_backward_after_the_region(case: Case, target: Target, rng: torch.Generator, program: str) -> None:
    chosen = AMBIENT[program]
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            leaves = chosen.leaves(target.device, rng)
            call = bound(chosen, target, dtype, cache=False)
            around = ambient(target, dtype, cache_enabled=False)
            expected = observed(call, leaves, around=around)
            seen = observed(WAYS["aot_eager"].make(call, leaves), leaves, around=around)
            same(case, f"{dtype}, backward outside", seen, expected)
