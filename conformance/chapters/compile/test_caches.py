"""Check which graph inductor's caches in memory and on disk serve to programs in regions."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from ...oracles.numbers.formats import OTHER
from .observation import Around, Observed, observed
from .programs import AMBIENT, Program, Tensors
from .support import ambient, bound, caches, compiler, default_type, dtypes_of
from .ways import WAYS


def run(
    program: Program, target: Target, dtype: torch.dtype, leaves: Tensors, around: dict[str, Any], *, new: bool
) -> Observed:
    """Run the program compiled by inductor, `new` as in another process: with nothing but the caches on disk."""
    if new:
        from torch._inductor.codecache import PyCodeCache

        torch._dynamo.reset()
        PyCodeCache.cache_clear()
    call = bound(program, target, dtype, cache=False)
    return observed(WAYS["inductor"].make(call, leaves), leaves, **around)


def hits() -> int:
    """Return how many graphs came from a cache since the last reset."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])


@contract("AMP-COMPILE-050")
@needs("compiled kernels")
@pytest.mark.parametrize("name", [deep("full", "plain_inside")])
def test_cache_of_another_type(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    program = AMBIENT[name]
    with compiler(case), tempfile.TemporaryDirectory() as folder, caches(case, folder):
        for dtype in dtypes_of(case, target):
            leaves = program.leaves(target.device, rng)
            regions = {
                f"{dtype}": ambient(target, dtype, cache_enabled=False),
                f"{OTHER[dtype]}": ambient(target, OTHER[dtype], cache_enabled=False),
                "disabled": ambient(target, dtype, enabled=False),
            }
            for region, opened in (*regions.items(), *regions.items()):
                around: dict[str, Any] = {"around": opened, "around_backward": opened}
                seen = run(program, target, dtype, leaves, around, new=True)
                expected = observed(bound(program, target, dtype, cache=False), leaves, **around)
                case.equal(f"region {region}: dtypes", seen.types(), expected.types())


class _Looked(BaseException):
    """Raised in place of the lookup in the cache: no `except Exception` of the compiler stops it."""


def _product(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x)


@contextlib.contextmanager
def _caching() -> Iterator[None]:
    """Switch the caches of graphs on, which the environment may have switched off."""
    from torch._functorch import config

    with config.patch(enable_autograd_cache=True), torch._inductor.config.patch(fx_graph_cache=True):
        yield


def keys(case: Case, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, opened: Around) -> list[str]:
    """Return the keys with which AOTAutograd's cache looks for the graphs of a call in this region."""
    from torch._functorch._aot_autograd import autograd_cache

    if not hasattr(autograd_cache, "autograd_cache_key"):
        case.untestable("this torch does not tell the keys of its cache")
    found: list[str] = []
    key_of = autograd_cache.autograd_cache_key

    def looked(*args: Any, **kwargs: Any) -> Any:
        found.append(key_of(*args, **kwargs)[0])
        raise _Looked

    torch._dynamo.reset()
    seen = mock.patch.object(autograd_cache, "autograd_cache_key", looked)
    with seen, _caching(), opened(), contextlib.suppress(_Looked):
        torch.compile(call, backend="inductor")(x)
    return found


NOT_ASKED = "the backend of torch.compile asks no cache of AOTAutograd for a graph, in a region or outside"


# Keys are made of the settings of all device types alike; inductor's other inputs to them ask a card for its driver.
@contract("AMP-COMPILE-050", on="cpu")
def test_keys_of_settings(case: Case, target: Target) -> None:
    """Every setting has a key of its own: it needs no compiler of C++ and no second run."""
    with compiler(case):
        for dtype in dtypes_of(case, target):
            x = torch.randn(3, 3).to(target.device).requires_grad_()
            regions = {
                f"{dtype}": ambient(target, dtype, cache_enabled=False),
                f"{OTHER[dtype]}": ambient(target, OTHER[dtype], cache_enabled=False),
                "disabled": ambient(target, dtype, enabled=False),
            }
            found = {name: keys(case, _product, x, opened) for name, opened in regions.items()}
            if not any(found.values()) and not keys(case, _product, x, contextlib.nullcontext):
                case.untestable(NOT_ASKED)
            case.equal("lookups by region", [len(each) for each in found.values()], [1] * len(found))
            for one, other in itertools.combinations(found, 2):
                case.true(f"regions {one} and {other} have different keys", found[one] != found[other], found[one])
            low = keys(case, _product, x.detach().to(dtype).requires_grad_(), regions["disabled"])
            case.true("inputs of two types have different keys", low != found["disabled"], low)
            again = keys(case, _product, x, regions[f"{dtype}"])
            case.equal("key of the first region again (control)", again, found[f"{dtype}"])


def _made(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(3, device=x.device) * x


@contract("AMP-COMPILE-050", on="cpu")
def test_keys_of_default_types(case: Case, target: Target) -> None:
    """A program that makes a tensor of the default type has a key for each."""
    x = torch.ones(3, device=target.device)
    types = (torch.float32, torch.float16, torch.bfloat16)
    with compiler(case):
        found = {dtype: keys(case, _made, x, functools.partial(default_type, dtype)) for dtype in types}
        again = keys(case, _made, x, functools.partial(default_type, types[0]))
    if not any(found.values()):
        case.untestable(NOT_ASKED)
    case.equal("lookups by default type", [len(each) for each in found.values()], [1] * len(found))
    for one, other in itertools.combinations(types, 2):
        case.true(f"default types {one} and {other} have different keys", found[one] != found[other], found[one])
    case.equal("key of the first default type again (control)", again, found[types[0]])


@contract("AMP-COMPILE-051")
@needs("compiled kernels")
@pytest.mark.parametrize("name", [deep("full", "plain_inside"), deep("full", "island_inside")])
def test_cache_of_the_same_type(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    program = AMBIENT[name]
    with compiler(case), tempfile.TemporaryDirectory() as folder, caches(case, folder):
        for dtype in dtypes_of(case, target):
            leaves = program.leaves(target.device, rng)
            opened = ambient(target, dtype, cache_enabled=False)
            around: dict[str, Any] = {"around": opened, "around_backward": opened}
            first = run(program, target, dtype, leaves, around, new=True)
            before = hits()
            second = run(program, target, dtype, leaves, around, new=True)
            case.at_least(f"{dtype}: graphs from the cache", hits() - before, 1)
            case.equal(f"{dtype}: dtypes", second.types(), first.types())
            for key, tensor in first.values.items():
                if tensor is not None and (ours := second.values[key]) is not None:
                    case.identical(f"{dtype}: {key}", ours, tensor)


def _one(x: torch.Tensor, opened: Around) -> torch.Tensor:
    with opened():
        return torch.mm(x, x)


@contract("AMP-COMPILE-051")
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_graphs_may_be_cached(case: Case, target: Target, where: str) -> None:
    try:
        from torch._functorch._aot_autograd.autograd_cache import check_cacheable
    except ImportError as error:
        case.untestable(f"this torch does not tell which graphs its cache takes: {error}")
        raise
    with compiler(case):
        for dtype in dtypes_of(case, target):
            torch._dynamo.reset()
            graphs: list[Any] = []

            def backend(graph: Any, _: Any, graphs: list[Any] = graphs) -> Any:
                graphs.append(graph)
                return graph

            opened = ambient(target, dtype, cache_enabled=False)
            x = torch.randn(3, 3).to(target.device).requires_grad_()
            with opened() if where == "outside" else contextlib.nullcontext():
                # The compiled function opens the region itself, so that it is in the graph, or runs in one.
                inside = contextlib.nullcontext if where == "outside" else opened
                torch.compile(_one, backend=backend)(x, inside)
            case.equal(f"{dtype}: graphs", len(graphs), 1)
            refused = None
            try:
                with _caching():
                    check_cacheable(graphs[0])
            except Exception as error:
                refused = str(error).splitlines()[0][:80]
            case.equal(f"{dtype}: why a graph with the region {where} of it is not cached", refused, None)
