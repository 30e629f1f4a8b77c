"""Hooks that collect: which modules are imported, how checks become cases, which cases run, and in what order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..report import rollup
from . import benchmarks, cost, parallel
from .check import DEPTHS
from .items import CHAPTERS, Facts, depth, facts
from .keys import RUN
from .measuring import TIMED

if TYPE_CHECKING:
    from .run import Run

_ABSENT = "none"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the modules of chapters that were not asked for, or of which another process runs all, unimported."""
    chapter = _chapter(collection_path)
    if chapter is None or not collection_path.name.startswith("test_"):
        return None
    run = config.stash[RUN]
    if run.sought is not None:
        return None if _names_any(collection_path, run.sought) else True
    if parallel.is_controller(config) and _module(collection_path) not in run.left_to_the_controller:
        return True
    return True if chapter not in run.chapters else None


def _names_any(path: Path, contracts: Collection[str]) -> bool:
    """Whether a module of checks names one of the contracts; importing it to find out takes longer."""
    source = path.read_text(encoding="utf-8")
    return any(f'"{contract}"' in source for contract in contracts)


def _chapter(path: Path) -> str | None:
    """The chapter in whose folder a module of checks lies; None of another module."""
    return path.parent.name if path.parent.parent == CHAPTERS else None


def _module(path: Path) -> str:
    """Name a module of checks, `<chapter>/test_<subject>.py`, whatever folder the suite lies in."""
    return f"{path.parent.name}/{path.name}"


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """Leave out the checks of contracts that were not selected, before they are multiplied into cases."""
    named = [mark.args[0] for mark in getattr(obj, "pytestmark", ()) if mark.name == "contract"]
    run = collector.config.stash[RUN]
    return [] if named and named[0] not in (run.contracts if run.sought is None else run.sought) else None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("contract")
    if mark is None:
        return
    run = metafunc.config.stash[RUN]
    metafunc.definition.own_markers = [_prune(own, run, mark.args[0]) for own in metafunc.definition.own_markers]
    run.note_nothing_to_try(mark.args[0], mark.kwargs["on"])
    own = metafunc.definition.get_closest_marker("per_target")
    if own is not None:
        _parametrize_per_target(metafunc, run, mark, own)
    elif "target" in metafunc.fixturenames:
        targets = run.targets_for(mark.kwargs["on"])
        _parametrize(metafunc, "target", targets, [run.slot(target) for target in targets])
    if "amp_dtype" in metafunc.fixturenames:
        names = run.dtypes_for(mark.kwargs["dtypes"])
        _parametrize(metafunc, "amp_dtype", [run.amp_dtype(name) for name in names], names)


def _parametrize_per_target(metafunc: pytest.Metafunc, run: Run, mark: pytest.Mark, own: pytest.Mark) -> None:
    """Parametrise a check by its targets and, for each, by the values that belong to it."""
    name, values_of = own.args
    sets: list[Any] = []
    deeper: list[Any] = []
    for target in run.targets_for(mark.kwargs["on"]):
        values = list(values_of(target))
        if not values and not target.is_fake:
            run.nothing_to_try.setdefault(target.name, set()).add(mark.args[0])
        for value in values:
            plain, marks = (value.values[0], value.marks) if hasattr(value, "marks") else (value, ())
            made = pytest.param(target, plain, marks=marks, id=f"{run.slot(target)}-{plain}")
            (sets if depth(marks) <= run.depth else deeper).append(made)
    if deeper:
        run.shallow.add(mark.args[0])
    # If every one is left out, a placeholder of the lowest level stays, so that the report can give the reason.
    sets = sets or sorted(deeper, key=lambda each: depth(each.marks))[:1] or [pytest.param(None, None, id=_ABSENT)]
    metafunc.parametrize(("target", name), sets, indirect=["target"])


def _prune(mark: pytest.Mark, run: Run, contract: str) -> pytest.Mark:
    """Take the parameters that the level leaves out from a parametrize mark, before they become items.

    If every one is left out, a placeholder of the lowest level stays, so that the report can give the reason.
    """
    if mark.name != "parametrize":
        return mark
    names, values, *rest = mark.args
    values = list(values)
    depths = [depth(getattr(value, "marks", ())) for value in values]
    left_out = _not_drawn(values, run, f"{contract} {names}")
    kept = [place for place, own in enumerate(depths) if place not in left_out and own <= run.depth]
    kept = kept or [depths.index(min(depths))]
    if len(kept) == len(values):
        return mark
    run.shallow.add(contract)
    kwargs = dict(mark.kwargs)
    if isinstance(kwargs.get("ids"), (list, tuple)):
        kwargs["ids"] = [kwargs["ids"][place] for place in kept]
    return pytest.mark.parametrize(names, [values[place] for place in kept], *rest, **kwargs).mark


def _not_drawn(values: list[Any], run: Run, what: str) -> set[int]:
    """Return the places of the parameters that the seed of the run leaves out below full (`by_seed` of check.py)."""
    if run.depth == len(DEPTHS) - 1:
        return set()
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, value in enumerate(values):
        for mark in getattr(value, "marks", ()):
            if mark.name == "by_seed":
                groups.setdefault(mark.args, []).append(place)
    found: set[int] = set()
    for (level, count), places in groups.items():
        draw = random.Random(f"{run.options.seed} {what} {level}")
        found |= set(places) - set(draw.sample(places, min(count, len(places))))
    return found


def _parametrize(metafunc: pytest.Metafunc, name: str, values: list[Any], ids: list[str]) -> None:
    """Parametrise a fixture; without values, collect a placeholder, so that the report can give the reason."""
    metafunc.parametrize(name, values or [None], ids=ids or [_ABSENT], indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    run = config.stash[RUN]
    if run.sought is not None:
        items[:] = [item for item in items if (found := facts(item)) is not None and _runs(item, found, run)]
        return
    kept, dropped, timed = [], [], []
    deeper: dict[str, int] = {}
    for item in items:
        found = facts(item)
        if parallel.elsewhere(config, found is not None and found.alone):
            run.left_to_the_controller.add(_module(item.path))
            continue
        if found is None:
            kept.append(item)
            continue
        absent = _absent(found)
        reason = absent or _left_out(item, found, run)
        if reason is None:
            kept.append(item)
            timed += [found] if found.timed else []
        else:
            dropped.append(item)
            run.reasons.setdefault(found.contract, reason)
            if absent is None and reason.startswith(rollup.DEEPER):
                deeper[found.contract] = min(found.depth, deeper.get(found.contract, found.depth))
        if absent is not None:
            run.not_applicable[found.id] = absent
        if not found.stand_in:
            run.collected.append((found.contract, found.id, found.target_name))
    # Of several reasons the lowest level: the one that the reader can act on, whatever the order of the cases.
    run.reasons.update((contract, f"{rollup.DEEPER}{DEPTHS[depth]}") for contract, depth in deeper.items())
    _refuse_repeated_ids(run)
    run.time_limit.plan(found.steps.get("fewest", 1) for item in kept if (found := facts(item)) and found.own)
    run.deadlines.plan((run.catalogue.contracts[found.contract], found.target.device_type) for found in timed)
    # Stable: whatever order a plugin made is kept, but what needs an idle machine runs after all else, and what shares
    # a deadline in the order of the files, so that each run divides it alike: what is judged before information.
    kept.sort(key=_lateness)
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note which cases are to leave a record, after every plugin that leaves some out."""
    run = session.config.stash[RUN]
    if run.sought is None:
        run.scheduled.update(found.id for item in session.items if (found := facts(item)) is not None)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Say what the judgement of the user's workload takes, by its pace, and what limits it."""
    run = config.stash[RUN]
    own = [found for item in items if (found := facts(item)) is not None and found.own]
    return cost.lines(run, own) if own and run.own is not None else []


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    with parallel.without_collections():
        return (yield)


def _refuse_repeated_ids(run: Run) -> None:
    counts = Counter(id for _, id, _ in run.collected)
    if repeated := [id for id, count in counts.items() if count > 1]:
        raise pytest.UsageError(f"two cases have the id {repeated[0]}: give the checks or their parameters other names")


def _lateness(item: pytest.Item) -> tuple[Any, ...]:
    chapter, found = _chapter(item.path), facts(item)
    if chapter not in TIMED:
        return (0 if found is None else int(found.alone),)
    if found is None or not found.timed:
        return (TIMED.index(chapter) + 2,)
    callspec = getattr(item, "callspec", None)
    indices = () if callspec is None else tuple(callspec.indices.values())
    judged = item.config.stash[RUN].catalogue.contracts[found.contract].judges
    return (TIMED.index(chapter) + 2, not judged, item.path.name, item.location[1], indices)


def _runs(item: pytest.Item, found: Facts, run: Run) -> bool:
    return _absent(found) is None and _left_out(item, found, run) is None


def _absent(found: Facts) -> str | None:
    return None if found.absent is None else found.absent(found.target)


def _left_out(item: pytest.Item, found: Facts, run: Run) -> str | None:
    """Say why an item is no case of this run, or None where it is one."""
    if found.parameters.get("target", "") is None:
        if found.by_target and run.targets_for(found.kinds):
            return f"has nothing to try on {run.target_names()}{run.without_policy()}"
        return f"{rollup.OTHER_TARGET}{', '.join(found.kinds)} only; this run has {run.target_names()}"
    if not run.dtypes_for(found.dtypes):
        return f"is about {', '.join(found.dtypes)} only, which --amp-dtype leaves out"
    if found.depth > run.depth:
        return f"{rollup.DEEPER}{DEPTHS[found.depth]}"
    return benchmarks.left_out(item)
