"""Prepare the compiler for a case, build ways to run a program, and compare what they return with eager."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from unittest import mock

import torch

from ...harness.check import Case
from ...harness.targets import Target
from ...measure.compilers import without_torch_compile, without_torchscript
from ...oracles.numbers.error_bounds import distance_of_chains
from ...oracles.numbers.formats import OTHER
from ...oracles.relations.outcomes import taken
from ...oracles.trace.ops import OpTrace
from .observation import Around, Observed, distances, observed
from .programs import AMBIENT, Amp, Program, Tensors
from .ways import WAYS, Way

Drawn = TypeVar("Drawn")


RECOMPILATIONS = 64  # of one piece of code, in one case


@contextlib.contextmanager
def compiler(case: Case, way: str = "") -> Iterator[None]:
    """Let torch.compile start without compiled code, and leave none; without it, or what `way` needs: UNTESTABLE."""
    if reason := without_torch_compile() or (without_torchscript() if way == "jit.trace" else None):
        case.untestable(reason)
    dynamo = importlib.import_module("torch._dynamo")
    _freeze()
    dynamo.reset()
    # Past the limit of recompilations code runs in eager, which agrees with eager: far away, and no end unseen.
    limited = dynamo.config.patch(cache_size_limit=RECOMPILATIONS, fail_on_cache_limit_hit=True)
    with warnings.catch_warnings(), _quiet(), _without_timed_guards(), limited:
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            dynamo.reset()


@functools.cache
def _freeze() -> None:
    """Leave the compiler, once it is imported, out of the collections of garbage: they would search all of it."""
    importlib.import_module("torch._functorch.aot_autograd")
    gc.collect()
    gc.freeze()


def _without_timed_guards() -> AbstractContextManager[Any]:
    """Leave out the timing of new guards, which is logged only: it empties the processor's cache for each graph."""
    guards = torch._dynamo.guards
    if not hasattr(guards, "profile_guard_manager"):
        return contextlib.nullcontext()
    return mock.patch.object(guards, "profile_guard_manager", _no_time)


def _no_time(*_: object) -> float:
    return 0.0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # Graph breaks and unsupported machines are logged as warnings, for each compilation. A handler of the trace, which
    # goes away by itself with the first message, would have each graph and setting written out for nobody.
    before, trace = logging.root.manager.disable, logging.getLogger("torch.__trace")
    handlers = list(trace.handlers)
    logging.disable(logging.WARNING)
    for handler in handlers:
        trace.removeHandler(handler)
    try:
        yield
    finally:
        logging.disable(before)
        for handler in handlers:
            trace.addHandler(handler)


def graphs() -> int:
    """Return how many graphs were compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def made_anew(
    way: Way, program: Program, target: Target, dtype: torch.dtype, rng: torch.Generator
) -> tuple[Tensors, Callable[..., Any], Callable[..., Any]]:
    """Return leaves, the program as a function of them without a weight cache, and what a way makes of it from anew."""
    importlib.import_module("torch._dynamo").reset()
    leaves = program.leaves(target.device, rng)
    call = bound(program, target, dtype, cache=False)
    return leaves, call, way.make(call, leaves)


def pause_of(way: Way) -> Callable[[], None]:
    """Return what a program calls between its parts in this way: a graph break, or nothing."""
    if not way.breaks:
        return _nothing
    found: Callable[[], None] = torch._dynamo.graph_break
    return found


def _nothing() -> None:
    return None


@contextlib.contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """Let torch make tensors of this type where none is given."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def drawn(found: Mapping[str, Drawn], rng: torch.Generator, number: int) -> dict[str, Drawn]:
    """Return some entries, drawn without repeats: so many, or all."""
    names = list(found)
    return {names[place]: found[names[place]] for place in torch.randperm(len(names), generator=rng)[:number].tolist()}


def refuses(case: Case, what: str, call: Callable[[], object], backend: str) -> None:
    """Check that a call which eager refuses raises compiled too."""
    torch._dynamo.reset()
    case.equal(f"{what}: compiled code takes what eager refuses", taken(torch.compile(call, backend=backend)), False)


def dtypes_of(case: Case, target: Target) -> tuple[torch.dtype, ...]:
    """Return the amp dtypes to check: both at level full, else bf16, or what the target has."""
    found = case.supported(target)
    return found if case.level == "full" else found[-1:]


def inner_type(target: Target, dtype: torch.dtype) -> torch.dtype:
    """Return the other 16-bit type, for regions inside or around those of `dtype`; `dtype` where there is no other."""
    return OTHER[dtype] if target.supports(OTHER[dtype]) else dtype


def bound(program: Program, target: Target, dtype: torch.dtype, **options: Any) -> Callable[..., Any]:
    """Return the program as a function of tensors.

    Without `cache` its regions have no weight cache: a graph casts a weight at each use, so that its gradient is summed
    in float32, with the cache in 16 bits.
    """
    amp = Amp(target.device_type, dtype, other=inner_type(target, dtype), **options)

    def call(*leaves: torch.Tensor) -> Any:
        return program.function(amp, *leaves)

    return call


def ambient(target: Target, dtype: torch.dtype, **options: Any) -> Around:
    """Return what opens a region of the target."""
    return lambda: torch.autocast(target.device_type, dtype=dtype, **options)


def same(case: Case, what: str, seen: Observed, expected: Observed) -> None:
    """Check that every tensor has the type and the bits of eager's."""
    case.equal(f"{what}: dtypes", seen.types(), expected.types())
    for name, tensor in expected.values.items():
        if tensor is not None and (ours := seen.values[name]) is not None:
            case.identical(f"{what}: {name}", ours, tensor)


def near(case: Case, what: str, seen: Observed, expected: Observed, limit: float) -> None:
    """Check the types of eager, and its values to a normwise distance."""
    case.equal(f"{what}: dtypes", seen.types(), expected.types())
    for name, distance in distances(seen, expected).items():
        case.at_most(f"{what}: normwise distance of {name}", distance, limit)


def whole_numbers(rng: torch.Generator, target: Target) -> torch.Tensor:
    """Return a float32 matrix of 4 x 4 whole numbers from -2 to 2, of which every sum and product is exact."""
    return torch.randint(-2, 3, (4, 4), generator=rng).float().to(target.device)


def unlike(
    seen: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    equal: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal,
) -> list[str]:
    """Return which tensors are not those of eager, in type or values, with the first elements of both."""

    def shown(one: torch.Tensor) -> str:
        return f"{one.dtype} {one.flatten()[:3].tolist()}"

    return [
        f"{name}: {shown(seen[name])}, in eager {shown(one)}"
        for name, one in expected.items()
        if seen[name].dtype != one.dtype or not equal(seen[name], one)
    ]


def replayed(case: Case, target: Target, what: str, found: list[str], fewest: int) -> None:
    """Check that graphs were replayed, on a device that has them."""
    if target.device_type == "cuda":
        case.at_least(f"{what}: graphs that were replayed (control)", len(found), fewest)


def distance_of_ways(call: Callable[..., Any], leaves: Tensors) -> float:
    """Return the distance of two ways to round what a program computes, forward and backward.

    Each rounds the 16-bit results that eager computes and casts, here all to the coarsest of their types.
    """
    with OpTrace() as trace:
        observed(call, leaves)
    low = [[each for each in op.outputs if each in (torch.float16, torch.bfloat16)] for op in trace.ops]
    types = {each for some in low for each in some}
    coarsest = torch.bfloat16 if torch.bfloat16 in types else torch.float16
    return distance_of_chains(coarsest, sum(map(bool, low)))


def distance_of_programs(
    programs: Sequence[Program], target: Target, dtype: torch.dtype, rng: torch.Generator
) -> float:
    """Return the largest distance of two ways to round one of these programs."""
    return max(
        distance_of_ways(bound(each, target, dtype, cache=False), each.leaves(target.device, rng)) for each in programs
    )


def same_but_for_sums(
    case: Case,
    program: Program,
    target: Target,
    dtype: torch.dtype,
    leaves: Tensors,
    seen: Observed,
    expected: Observed,
) -> None:
    """Check the outputs bit for bit, and that the gradients differ by no more than the order of their sums can."""
    outputs = {key: each for key, each in expected.values.items() if key.startswith("output")}
    same(case, f"{dtype}, outputs", Observed({key: seen.values[key] for key in outputs}), Observed(outputs))
    near(case, f"{dtype}", seen, expected, distance_of_ways(bound(program, target, dtype, cache=False), leaves))


@functools.cache
def without_inductor() -> str | None:
    """Return why inductor cannot compile for the CPU here, or None."""
    from torch._inductor import config, cpp_builder, exc

    try:
        found = cpp_builder.get_cpp_compiler() if hasattr(cpp_builder, "get_cpp_compiler") else config.cpp.cxx[-1]
    except (exc.InvalidCxxCompiler, RuntimeError, OSError) as error:
        return f"inductor finds no C++ compiler: {error}"
    if re.search(r"\s", tempfile.gettempdir()):
        return f"inductor gives its C++ compiler no path with spaces, which {tempfile.gettempdir()!r} has: set TMPDIR"
    return None if shutil.which(found) else f"inductor's C++ compiler {found} is not there"


SETTINGS: Mapping[str, Any] = {"compile_threads": 1, "cpp.vec_isa_ok": True, "fx_graph_cache": False}
"""Settings of inductor for programs that are compiled once, in one process."""

_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@contextlib.contextmanager
def inductor(case: Case, *, folder: str | None = None, **options: Any) -> Iterator[None]:
    """Let inductor compile in a folder of the run's own, in this process; without its compiler: UNTESTABLE.

    That is one of C++, and on other devices than the CPU Triton.

    It prepares the headers of its kernels once in a process, where it can: that takes as long as two kernels without
    them, and each kernel a third.
    """
    from torch._inductor import config

    if reason := without_inductor():
        case.untestable(reason)
    if not _FOLDERS:
        _FOLDERS.append(tempfile.TemporaryDirectory(prefix="amp-conformance-inductor-"))
    ours = _FOLDERS[0].name
    folder = ours if folder is None else folder
    settings = {**SETTINGS, **options}
    if hasattr(config, "cpp_cache_precompile_headers"):
        settings["cpp_cache_precompile_headers"] = True
    with (
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=os.path.join(folder, "triton")),
        _headers_in(os.path.join(ours, "headers")),
        config.patch(settings),
    ):
        try:
            yield
        except Exception as error:
            if not _lacks_triton(error):
                raise
            case.untestable("inductor makes kernels of this device with Triton, which is not there")


@contextlib.contextmanager
def compiling(case: Case, backend: str) -> Iterator[None]:
    """Let a backend compile, with what `inductor` sets where it is that one."""
    with compiler(case), inductor(case) if backend == "inductor" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def caches(case: Case, folder: str) -> Iterator[None]:
    """Let inductor and AOTAutograd keep their graphs in `folder`."""
    from torch._functorch import config

    with inductor(case, folder=folder, fx_graph_cache=True), config.patch(enable_autograd_cache=True):
        yield


def _lacks_triton(error: Exception) -> bool:
    from torch._inductor import exc

    missing = getattr(exc, "TritonMissing", ())
    return any(isinstance(one, missing) for one in (error, getattr(error, "inner_exception", None), error.__cause__))


def _headers_in(folder: str) -> AbstractContextManager[Any]:
    """Let inductor keep prepared headers in `folder`, once for all compilations: elsewhere it takes the user's."""
    from torch._inductor import codecache

    if not hasattr(codecache, "_HEADER_DIR"):
        return contextlib.nullcontext()
    return mock.patch.multiple(codecache, _HEADER_DIR=folder, _HEADER_LOCK_DIR=os.path.join(folder, "locks"))


@contextlib.contextmanager
def set_flags(kind: str, dtype: torch.dtype, *, enabled: bool = True) -> Iterator[None]:
    """Switch autocast on or off through torch's setters."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.clear_autocast_cache()


def changes(target: Target, dtype: torch.dtype) -> dict[str, Around]:
    """Return regions around a call by name; each differs from the one before in one setting."""
    kind = target.device_type
    elsewhere = "cpu" if kind == "xpu" else "xpu"
    other = inner_type(target, dtype)
    of_other = {} if other is dtype else {"a region of the other type": ambient(target, other, cache_enabled=False)}
    return {
        "no region": contextlib.nullcontext,
        "a region": ambient(target, dtype, cache_enabled=False),
        **of_other,
        "a disabled region": ambient(target, other, enabled=False, cache_enabled=False),
        "a region of another device type": lambda: torch.autocast(elsewhere, dtype=torch.bfloat16),
        "a region with the cache on": ambient(target, dtype, cache_enabled=True),
        "flags that were set": lambda: set_flags(kind, dtype),
    }


COMPILED_IN = "a region"


def under_stance(
    stance: str, target: Target, dtypes: Sequence[torch.dtype], rng: torch.Generator
) -> Iterator[tuple[str, torch.dtype, Observed, Observed]]:
    """Yield what a program that was compiled in a region gives under the stance in each region, and uncompiled."""
    for dtype in dtypes:
        leaves, call, compiled = made_anew(WAYS["aot_eager"], AMBIENT["plain_inside"], target, dtype, rng)
        opened = changes(target, dtype)
        observed(compiled, leaves, around=opened[COMPILED_IN])
        for name in (*opened, COMPILED_IN):
            around: dict[str, Any] = {"around": opened[name], "around_backward": opened[name]}
            with torch.compiler.set_stance(stance):
                seen = observed(compiled, leaves, **around)
            yield name, dtype, seen, observed(call, leaves, **around)


def called_under(stance: str, seed: int, _: Any) -> None:
    """Call the program under the stance on a CPU, in a process that may end by it."""
    rng = torch.Generator().manual_seed(seed)
    for _found in under_stance(stance, Target("cpu", "cpu", None, False), list(OTHER), rng):
        pass
