"""`--self-check`: before the scored run, plant faults and see that the contracts notice which have to."""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from _pytest.runner import runtestprotocol

from ..report import values
from ..report.verdicts import Verdict
from ..self_check.planting import NotPlanted, NotRestored, Whole
from ..self_check.registry import Fault, faults
from . import parallel, state
from .items import facts, of_case
from .targets import Target

if TYPE_CHECKING:
    from .run import Run

_CANNOT_BE_JUDGED = frozenset({Verdict.UNSUPPORTED, Verdict.UNTESTABLE})


class Spoilt(Exception):
    """The process is not as it was before the self-check, so nothing can be judged in it."""


def self_check(session: pytest.Session, run: Run) -> values.SelfCheck:
    """Plant each fault on each target that it concerns, and say which case noticed it; raises Spoilt."""
    begun = time.monotonic()
    concerned = [fault for fault in faults() if set(fault.contracts) & set(run.contracts)]
    items = _items(session, run, concerned)
    outcomes: list[values.PlantedFault] = []
    with _left_as_it_was(run), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a kernel is replaced
        for fault in concerned:
            for target in run.targets:
                if cases := _cases(fault, target, items):
                    outcomes.append(_Trial(session, run, fault, target).outcome(cases))
    return values.SelfCheck(tuple(outcomes), round(time.monotonic() - begun, 3))


def _items(session: pytest.Session, run: Run, concerned: Sequence[Fault]) -> list[pytest.Item]:
    """Return the cases of the faults' contracts: of the run, or where workers run those, collected here as well."""
    contracts = {contract for fault in concerned for contract in fault.contracts} & set(run.contracts)
    if parallel.is_controller(session.config):
        items = parallel.collected_here(session, run, contracts)
    else:
        items = session.items
    found = [(item, facts(item)) for item in items]
    return [item for item, fact in found if fact is not None and fact.contract in contracts and not fact.alone]


def _cases(fault: Fault, target: Target, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the cases at depth quick that have to notice a fault on `target`, the likeliest first."""
    if target.is_fake and fault.kind == "real":
        return []
    mine = [item for item in items if of_case(item).contract in fault.contracts and of_case(item).depth == 0]
    mine = [item for item in mine if of_case(item).target == target]
    return sorted(mine, key=lambda item: fault.first not in item.name)


@dataclass(frozen=True)
class _Trial:
    """One fault on one target."""

    session: pytest.Session
    run: Run
    fault: Fault
    target: Target

    def outcome(self, cases: Sequence[pytest.Item]) -> values.PlantedFault:
        """Run the cases on the broken torch until one fails, which has to pass as soon as torch is restored."""
        seen: list[tuple[Verdict, str]] = []
        for item in cases:
            try:
                with self.fault.planted(self.target.device_type):
                    broken = self._judge(item)
            except (NotPlanted, AttributeError) as error:
                return self._noted("not planted", None, f"this torch lacks what it replaces: {error}")
            except NotRestored as error:
                raise Spoilt(f"after {self.fault.name}, {error}") from None
            if broken[0] is Verdict.FAIL:
                whole = self._judge(item)
                if whole[0] is Verdict.PASS:
                    return self._noted("caught", of_case(item).id, "")
                broken = whole[0], "without the fault as well"
            seen.append(broken)
        others = [
            f"{of_case(item).id} is {verdict.value}{': ' * bool(reason)}{reason}"
            for item, (verdict, reason) in zip(cases, seen, strict=True)
            if verdict is not Verdict.PASS
        ]
        if {verdict for verdict, _ in seen} <= _CANNOT_BE_JUDGED:
            return self._noted("not planted", None, f"no case can be judged here: {others[0]}")
        passed = sum(verdict is Verdict.PASS for verdict, _ in seen)
        return self._noted("missed", None, "; ".join([f"{passed} of {len(seen)} cases pass", *others[:1]]))

    def _noted(self, state: values.SelfCheckState, case: str | None, reason: str) -> values.PlantedFault:
        fault = self.fault
        return values.PlantedFault(fault.name, fault.summary, self.target.name, fault.contracts, state, case, reason)

    def _judge(self, item: pytest.Item) -> tuple[Verdict, str]:
        """Run a case and return its verdict; no plugin hears of it, and nothing is kept that was computed meanwhile."""
        properties, sections = list(item.user_properties), list(item._report_sections)
        with _forgetting():
            reports = runtestprotocol(item, log=False, nextitem=None)
        item.user_properties[:] = properties
        item._report_sections[:] = sections
        for report in reports:
            if (lost := getattr(report, "lost_device", None)) is not None:
                self.run.lose(lost)
                raise Spoilt(lost)
        records = [record for report in reports if (record := getattr(report, "conformance", None)) is not None]
        if len(records) != 1:
            raise Spoilt(f"{of_case(item).id} left {len(records)} records in place of one")
        return Verdict(records[0]["verdict"]), records[0]["reason"]


@contextmanager
def _left_as_it_was(run: Run) -> Iterator[None]:
    """See that torch is whole and its state restored at the end; raises Spoilt."""
    device_types = [target.device_type for target in run.targets]
    before, snapshot = Whole.now(device_types), state.Snapshot()
    yield
    if leaks := snapshot.leaks():
        raise Spoilt(f"the state of torch is not what it was: {'; '.join(leaks)}")
    snapshot.restore()
    if changed := Whole.now(device_types).changed_since(before):
        raise Spoilt(f"not what it was: {', '.join(changed)}")


@contextmanager
def _forgetting() -> Iterator[None]:
    """Empty the caches of the suite's functions that grow inside the block: what they hold is of a broken torch."""
    before = {cache: cache.cache_info().misses for cache in _caches()}
    try:
        yield
    finally:
        for cache in _caches():
            if cache.cache_info().misses != before.get(cache, 0):
                cache.cache_clear()


def _caches() -> list[functools._lru_cache_wrapper[object]]:
    package = __name__.split(".")[0]
    return [
        value
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == package
        for value in list(vars(module).values())
        if isinstance(value, functools._lru_cache_wrapper)
    ]
