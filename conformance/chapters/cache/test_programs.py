"""Check random and enumerated programs of weight uses against the cache model, and when casts are freed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from ...harness.check import Case, contract
from ...harness.targets import Target, is_foreign
from ...measure.storages import LiveStorages
from ...measure.threads import one_thread
from ...oracles.region.programs import WAYS, Jump, Open, Program
from ...oracles.region.stack_model import Region
from ...oracles.shrinking import shortest
from ...oracles.symbolic.blocks import blocks, execute, tensors
from ...oracles.trace.casts import alive
from ...oracles.trace.ops import OpTrace
from . import cache_model
from .cache_model import FLOATS, FORMS, LOW, MODES, UPDATES, Setting, Step, WeightSpec, random_steps
from .cache_runner import CachePlayer

# Seconds after which a thread is considered dead.
PATIENCE = 60.0

# Three that are cached, and one of each kind that is not.
WEIGHTS = (
    WeightSpec(),
    WeightSpec(parameter=True),
    WeightSpec(),
    WeightSpec(requires_grad=False),
    WeightSpec(view=True),
    WeightSpec(torch.float16),
    WeightSpec(torch.bfloat16),
    WeightSpec(torch.float64),
)


def region_on(target: Target) -> Callable[[Setting], AbstractContextManager[Any]]:
    """Return a function that opens regions on the target, and `elsewhere` ones on a device type without hardware."""
    neighbour = "cpu" if target.device_type == "xpu" else "xpu"

    def opened(given: Setting) -> AbstractContextManager[Any]:
        if given.elsewhere:
            return torch.autocast(neighbour, given.dtype, given.enabled, given.cache_enabled)
        return target.autocast(given.dtype, enabled=given.enabled, cache_enabled=given.cache_enabled)

    return opened


def explored(case: Case) -> int:
    """Return the seed of random programs: fixed below level full."""
    return case.seed if case.level == "full" else 0


def functions_on(target: Target) -> tuple[str, ...]:
    """Return the functions of the model that are on the target's lists."""
    return {
        "cpu": ("linear", "mse_loss", "cat"),
        "cuda": ("linear", "mse_loss", "tensordot"),
        "xpu": ("linear", "mse_loss", "tensordot"),
    }.get(target.device_type, ("linear",))


def player_on(case: Case, target: Target, kinds: Sequence[WeightSpec]) -> CachePlayer:
    """Return a player for weights of those kinds; unsupported where the device lacks a dtype (mps has no fp64)."""
    for dtype in FLOATS:
        try:
            torch.zeros(1, dtype=dtype, device=target.device)
        except (RuntimeError, TypeError) as error:
            case.unsupported(f"{target.device_type} has no {dtype} tensors: {error}")
    return CachePlayer(target.device, region_on(target), kinds)


def programs(case: Case, target: Target, count: int, **options: Any) -> None:
    """Check casts, results, gradients and live casts of random programs against the model."""
    tried: list[int] = []
    kinds = tuple(kind for kind in WEIGHTS if kind.dtype not in LOW or target.supports(kind.dtype))
    dtypes = tuple(filter(target.supports, LOW))
    with one_thread():
        player = player_on(case, target, kinds)

        def differs(steps: Sequence[Step]) -> bool:
            tried.append(len(steps))
            return player.mismatch(steps) is not None

        found = shortest(
            lambda generator: random_steps(generator, len(kinds), functions_on(target), dtypes, **options),
            differs,
            count=count,
            seed=explored(case),
            simpler=cache_model.simpler,
        )
        seen = None if found is None else player.mismatch(found)
    for what, number in (("programs", len(tried)), ("uses", player.uses), ("casts", player.casts)):
        case.note(f"{what} compared", number)
    case.note("seed", explored(case))
    if found is not None:
        case.reproduce(player.script(found))
    case.equal("first difference of the shortest program found from the model", seen, None)


def all_of(case: Case, target: Target, whole: Iterator[tuple[WeightSpec, list[Step]]], quick: int) -> None:
    """Check short programs over one weight against the model; a random sample of them below level full."""
    listed, wrong = list(whole), []
    count = case.samples(quick=quick, standard=6 * quick, full=len(listed))
    chosen = random.Random(case.seed).sample(listed, min(count, len(listed)))
    with one_thread():
        players = {kind: player_on(case, target, (kind,)) for kind in dict(chosen)}
        for kind, steps in chosen:
            if found := players[kind].mismatch(steps):
                wrong.append((found, players[kind].script(steps)))
    case.note("programs compared", len(chosen))
    if wrong:
        case.reproduce(min((script for _, script in wrong), key=len))
    case.equal("first differences of programs from the model", [found for found, _ in wrong[:3]], [])


@contract("AMP-CACHE-050")
def test_programs(case: Case, target: Target) -> None:
    programs(case, target, case.samples(quick=40, standard=400, full=10000))


def two_uses(target: Target) -> Iterator[tuple[WeightSpec, list[Step]]]:
    """Yield two uses of every kind of weight in every form and function, by the region's dtype and cache flag."""
    dtypes = [dtype for dtype in LOW if target.supports(dtype)]
    everything = itertools.product(
        [dtype for dtype in FLOATS if dtype not in LOW or dtype in dtypes],
        (True, False),
        (WeightSpec(), WeightSpec(parameter=True), WeightSpec(view=True)),
        FORMS,
        functions_on(target),
        dtypes,
        (True, False),
    )
    for dtype, requires_grad, kind, form, function, region, cache in everything:
        made = WeightSpec(dtype, requires_grad, kind.parameter, kind.view)
        used = Step("use", form=form, function=function)
        yield made, [Step("enter", setting=Setting(region, cache_enabled=cache)), used, used]


@contract("AMP-CACHE-050")
def test_two_uses(case: Case, target: Target) -> None:
    all_of(case, target, two_uses(target), 80)


# Events between two uses, other than regions and modes.
EVENTS = (
    [Step("clear")],
    [Step("replace")],
    [Step("freeze"), Step("use"), Step("freeze", choice=1)],
    *([Step("update", choice=number)] for number in range(len(UPDATES))),
    *([Step("retype", choice=number), Step("use"), Step("retype")] for number in range(len(FLOATS))),
)


def one_event(target: Target) -> Iterator[tuple[WeightSpec, list[Step]]]:
    """Yield a use in a region, an event, and a use again: twice, with an update in between."""
    for dtype, cache, event in itertools.product(filter(target.supports, LOW), (True, False), EVENTS):
        opened = Step("enter", setting=Setting(dtype, cache_enabled=cache))
        once = [opened, Step("use"), *event, Step("use"), Step("leave")]
        yield WeightSpec(), [*once, Step("update"), *once]


@contract("AMP-CACHE-050")
def test_one_event(case: Case, target: Target) -> None:
    all_of(case, target, one_event(target), 56)


def two_regions(target: Target) -> Iterator[tuple[WeightSpec, list[Step]]]:
    """Yield a use, a nested region with or without uses, and a use again: twice, with an update in between."""
    settings = [
        Setting(*given)
        for given in itertools.product(filter(target.supports, LOW), (True, False), (None, True, False), (False, True))
    ]
    for outer, inner, uses, end in itertools.product(settings, settings, (0, 2), ("leave", "raise")):
        nested = [Step("enter", setting=inner), *[Step("use")] * uses, Step(end)]
        once = [Step("enter", setting=outer), Step("use"), *nested, Step("use"), Step("leave")]
        yield WeightSpec(), [*once, Step("update"), *once]


@contract("AMP-CACHE-050")
def test_two_regions(case: Case, target: Target) -> None:
    all_of(case, target, two_regions(target), 150)


@contract("AMP-CACHE-051")
def test_programs_with_modes(case: Case, target: Target) -> None:
    programs(case, target, case.samples(quick=40, standard=400, full=10000), modes=True)


def three_modes(target: Target) -> Iterator[tuple[WeightSpec, list[Step]]]:
    """Yield uses in every order of three grad modes, in one region, by its dtype and cache flag."""
    for modes in itertools.product(range(len(MODES)), repeat=3):
        for dtype, cache in itertools.product(filter(target.supports, LOW), (True, False)):
            steps = [Step("enter", setting=Setting(dtype, cache_enabled=cache))]
            for mode in modes:
                steps += [Step("mode", choice=mode), Step("use"), Step("leave"), Step("use")]
            yield WeightSpec(), steps


@contract("AMP-CACHE-051")
def test_three_modes(case: Case, target: Target) -> None:
    all_of(case, target, three_modes(target), 40)


@contract("AMP-CACHE-001")
def test_tied_weights(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    encoder, decoder, twin = (torch.nn.Linear(4, 4, bias=False, device=target.device) for _ in range(3))
    decoder.weight = encoder.weight
    twin.weight = torch.nn.Parameter(encoder.weight.data)
    features = torch.ones(3, 4, device=target.device)
    with target.autocast(amp_dtype), OpTrace() as trace:
        outputs = [layer(features) for layer in (encoder, decoder, twin, decoder, twin)]
    case.equal("casts of a weight that two modules share", len(trace.casts_of(encoder.weight)), 1)
    case.equal("casts of another parameter that lies in its memory", len(trace.casts_of(twin.weight)), 1)
    case.true("all outputs are the same", all(torch.equal(output, outputs[0]) for output in outputs))


# Memory


@contract("AMP-CACHE-015")
@pytest.mark.parametrize("kind", ["ends", "raises"])
def test_nothing_survives_in_any_way(case: Case, target: Target, rng: torch.Generator, kind: str) -> None:
    features = torch.randn(3, 4, generator=rng).to(target.device)
    held, inside = {}, set()
    for way in WAYS:
        weight = torch.randn(5, 4, generator=rng).to(target.device).requires_grad_()
        trace = OpTrace()

        def see(place: str, weight: torch.Tensor = weight, trace: OpTrace = trace) -> None:
            if place.startswith("in "):
                with trace:
                    linear(features, weight)
                inside.add(len(alive(trace.casts_of(weight))))

        body = (Jump(1, "KeyboardInterrupt"),) if kind == "raises" else ()
        code = Program((Open(0, way, Region(target.device_type), body),)).code
        with contextlib.suppress(KeyboardInterrupt):
            exec(code, {"torch": torch, "contextlib": contextlib, "functools": functools, "sys": sys, "see": see})
        if alive(trace.casts_of(weight)):
            held[way] = len(alive(trace.casts_of(weight)))
    case.note("ways to open a region", len(WAYS))
    case.equal("casts alive in the regions (control)", inside, {1})
    case.equal("casts alive after a region, by the way it was opened", held, {})


@contract("AMP-CACHE-015")
@pytest.mark.parametrize("kind", ["closed", "dropped", "interleaved"])
def test_nothing_survives_a_generator(case: Case, target: Target, rng: torch.Generator, kind: str) -> None:
    features = torch.randn(3, 4, generator=rng).to(target.device)
    weight = torch.randn(5, 4, generator=rng).to(target.device).requires_grad_()

    def work() -> Generator[None, None, None]:
        with torch.autocast(target.device_type):
            linear(features, weight)
            yield

    first, second = work(), work()
    with OpTrace() as trace:
        next(first)
        if kind == "interleaved":
            next(second)
        case.equal("casts alive while the generator is suspended (control)", len(alive(trace.casts_of(weight))), 1)
        if kind == "dropped":
            del first
        else:
            first.close()
        if kind == "interleaved":
            # It restores the state of its entry, which is the first one's region: see AMP-REGION-039.
            second.close()
            torch.set_autocast_enabled(target.device_type, False)
    case.equal("casts alive after the last generator", len(alive(trace.casts_of(weight))), 0)


@contract("AMP-CACHE-015")
def test_nothing_survives_a_thread(case: Case, target: Target, rng: torch.Generator) -> None:
    (amp_dtype, *_) = case.supported(target)  # of a thread, the default may be one that the device lacks
    features = torch.randn(3, 4, generator=rng).to(target.device)
    weight = torch.randn(5, 4, generator=rng).to(target.device).requires_grad_()
    trace = OpTrace()

    def work() -> int:
        with torch.autocast(target.device_type, dtype=amp_dtype), trace:
            linear(features, weight)
            return len(alive(trace.casts_of(weight)))

    with ThreadPoolExecutor(max_workers=1) as pool:
        case.equal("casts alive in the thread's region (control)", pool.submit(work).result(PATIENCE), 1)
        case.equal("casts alive after it, while the thread lives", len(alive(trace.casts_of(weight))), 0)


@contract("AMP-CACHE-015")
def test_nothing_survives_a_deleted_weight(case: Case, target: Target, rng: torch.Generator) -> None:
    features = torch.randn(3, 4, generator=rng).to(target.device)
    casts = []
    with torch.autocast(target.device_type):
        for _ in range(3):
            weight = torch.randn(5, 4, generator=rng).to(target.device).requires_grad_()
            with OpTrace() as trace:
                linear(features, weight)
            casts += trace.casts_of(weight)
            del weight
        case.note("casts of deleted weights that are held in the region", len(alive(casts)))
    case.equal("casts of deleted weights alive after it", len(alive(casts)), 0)


@pytest.mark.usefixtures("one_thread")
@contract("AMP-CACHE-015")
@pytest.mark.parametrize("way", ["exit", "exception", "nested"])
def test_leaving_the_region_frees_the_copies(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, way: str
) -> None:
    weights = [torch.randn(41, 41, generator=rng).to(target.device).requires_grad_() for _ in range(3)]
    inputs = torch.randn(5, 41, generator=rng).to(target.device)
    with LiveStorages() as counted:
        kept = [inputs + 1]
    if is_foreign(target.device_type) and not counted.live_bytes:
        case.unsupported(f"the storages of {target.name} do not tell their bytes")
    kept.clear()
    seen: list[int] = []
    inner = target.autocast(amp_dtype) if way == "nested" else contextlib.nullcontext()
    with LiveStorages([*weights, inputs]) as live:
        try:
            with target.autocast(amp_dtype):
                with inner:
                    for weight in weights:
                        torch.nn.functional.linear(inputs, weight)
                    seen.append(live.live_bytes)
                if way == "exception":
                    raise KeyError(way)
        except KeyError:
            pass
        after = live.live_bytes
    case.equal("bytes alive inside the region (control)", seen, [3 * 41 * 41 * 2])
    case.equal("bytes alive after the outermost region", after, 0)


@pytest.mark.usefixtures("one_thread")
@contract("AMP-CACHE-015")
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_evaluation_leaves_nothing_alive(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, mode: str
) -> None:
    leaves = tensors(blocks()["mlp"], target.device, rng)
    with LiveStorages(leaves.values()) as live:
        for _ in range(3):
            with target.autocast(amp_dtype):
                with getattr(torch, mode)():
                    execute(blocks()["mlp"], leaves)
                inside = live.live_bytes
        after = live.live_bytes
    case.note("bytes of weight copies alive at the end of a region", inside, "bytes")
    case.equal("bytes alive after three regions", after, 0)


# Threads


@contract("AMP-CACHE-052")
def test_one_cache_for_all_threads(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    features = torch.randn(3, 4, generator=rng).to(target.device)
    weight = torch.randn(5, 4, generator=rng).to(target.device).requires_grad_()

    def casts_of_a_use() -> int:
        with OpTrace() as trace:
            linear(features, weight)
        return len(trace.casts_of(weight))

    def aside() -> tuple[int, int]:
        with target.autocast(amp_dtype):
            return casts_of_a_use(), casts_of_a_use()

    with ThreadPoolExecutor(max_workers=1) as pool, target.autocast(amp_dtype):
        case.equal("casts of the first use here", casts_of_a_use(), 1)
        case.equal("casts of two uses in another thread's region", pool.submit(aside).result(PATIENCE), (0, 0))
        case.equal("casts of the next use here, after that region", casts_of_a_use(), 1)
        case.equal("casts of one more use here", casts_of_a_use(), 0)
