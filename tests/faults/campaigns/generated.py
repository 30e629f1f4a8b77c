"""Every autocast registration lost, and moved to each other policy, held against the contracts of each overload."""

from __future__ import annotations

import argparse
import datetime
import itertools
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from conformance.harness import catalogue
from conformance.harness.check import Case
from conformance.harness.endings import Inconclusive, Unsupported, Untestable
from conformance.harness.targets import FAKE_DEVICE_TYPES, Target, resolve
from conformance.oracles.policy import overloads
from tests.faults.cast_rules import CASTING, DROPPED, PARTIAL, RULES, castable, partly_ruled, ruled, rules

KINDS = (DROPPED, *RULES, PARTIAL)
BATCH = 40
COLUMNS = (
    "key",
    "fault",
    "made",
    "caught",
    "by the contract of its policy",
    "at level standard only",
    "with failures of other overloads",
    "indistinguishable",
    "missed",
)
POLICY_CONTRACTS = {
    "lower_precision": "AMP-CAST-038",
    "fp32": "AMP-CAST-039",
    "fp32_set_dtype": "AMP-CAST-040",
    "fp32_append_dtype": "AMP-CAST-041",
    "widest": "AMP-CAST-042",
    "banned": "AMP-CAST-043",
}
_PAGE = """# Faults of the op policy, generated

Written by `python -m tests.faults.campaigns.generated -o docs/evidence/op-policy-faults.md` on {date} with torch
{torch}: {made} faults in {minutes} minutes, {workers} processes.

Each registration of each autocast dispatch key is broken in turn: `dropped` takes its kernel away, `idle` puts one in
its place that casts nothing, `partial` one that casts all but one of the arguments that are to be cast (each of them in
turn, of the suite's sample call), and each other kind one that follows that policy. While it is broken, the accounting
(AMP-CAST-036, AMP-CAST-037) and the checks of all overloads of the key (AMP-CAST-038 to AMP-CAST-043) are run at level
quick, and the overload's own at level standard if none of them sees it. A fault is caught where a contract fails for
the very overload that is broken. Beside them stand two controls: nothing fails with nothing broken, and nothing where
the same kind of kernel follows the policy that the overload has.

{counts}

## Missed, or with failures elsewhere

{complaints}

## Indistinguishable, and why

{listed}
"""


@dataclass(frozen=True, order=True)
class Generated:
    """One registration broken: an overload follows another rule than its policy, in the regions of one backend."""

    backend: str
    overload: str
    kind: str
    spared: int | None = None

    def __str__(self) -> str:
        spared = "" if self.spared is None else f", all but castable argument {self.spared}"
        return f"{self.overload} on {self.backend}: {self.kind}{spared}"

    def applied(self) -> AbstractContextManager[None]:
        """Break the registration inside the block."""
        if self.spared is None:
            return ruled(self.overload, self.kind, self.backend)
        return partly_ruled(self.overload, self.policy, self.spared, self.backend)

    @property
    def policy(self) -> str:
        """The policy that the overload has, and the fault takes from it."""
        return overloads.known(self.backend)[self.overload]


@dataclass(frozen=True)
class Outcome:
    """What the contracts said: at which level the fault was seen, by which of them, and which others complained."""

    fault: Generated
    level: str | None
    contracts: tuple[str, ...]
    others: tuple[str, ...]


def faults(backends: Sequence[str] = FAKE_DEVICE_TYPES) -> list[Generated]:
    """Return every fault there is with the registrations of the torch at hand."""
    made = []
    for backend in backends:
        policies, registered = overloads.known(backend), overloads.registered(backend)
        for overload in sorted(registered.intersection(policies)):
            policy = policies[overload]
            made += [Generated(backend, overload, kind) for kind in rules(overload) if kind != policy]
            count = _castable_arguments(backend, overload) if policy in CASTING else 0
            # Of a single one, nothing being cast is the fault "idle".
            made += [Generated(backend, overload, PARTIAL, spared) for spared in range(count) if count > 1]
    return made


def _castable_arguments(backend: str, overload: str) -> int:
    if overloads.uncallable(overload):
        return 0
    call = overloads.sample(_target(backend), overload, (torch.float32,))
    return len(castable((call.args, call.keywords)))


def _target(backend: str) -> Target:
    return resolve("cpu" if backend == "cpu" else f"fake:{backend}")


def sample(whole: Sequence[Generated], count: int, seed: int = 0) -> list[Generated]:
    """Return `count` of the faults, the same each time, evenly from all backends and kinds."""
    shuffled = random.Random(seed).sample(sorted(whole), len(whole))
    heaps: dict[tuple[str, str], list[Generated]] = {}
    for fault in shuffled:
        heaps.setdefault((fault.backend, fault.kind), []).append(fault)
    rounds = itertools.zip_longest(*(heaps[key] for key in sorted(heaps)))
    return sorted(itertools.islice((fault for one in rounds for fault in one if fault), count))


def indistinguishable(fault: Generated) -> str | None:
    """Say why no check of an overload can see the fault, None where one can."""
    return None if fault.kind == DROPPED else overloads.uncallable(fault.overload)


class _Checks:
    """The checks of single overloads and of the accounting, called as pytest would, for one backend."""

    def __init__(self, backend: str) -> None:
        # Not at the top: a run of the suite in a process that looks up faults imports its checks itself.
        from conformance.chapters.cast import test_overloads as checks

        self._accounting = (checks.test_overloads_are_registered, checks.test_every_kernel_is_accounted_for)
        self._policies = {policy: getattr(checks, f"test_{policy}") for policy in overloads.POLICIES}
        self._catalogue = catalogue.load().contracts
        self.backend = backend
        self.target = _target(backend)

    def whole(self) -> Iterator[tuple[str, str, str]]:
        """Run everything at level quick; yield overload, contract and message of what fails."""
        for check in self._accounting:
            if found := self._fails(check, "quick", self.backend):
                contract, message, names = found
                yield from ((overload, contract, message) for overload in names)
        for check in self._policies.values():
            (values,) = (mark.args[1] for mark in check.pytestmark if mark.name == "per_target")
            for overload in values(self.target):
                if found := self._fails(check, "quick", self.target, overload):
                    yield overload, *found[:2]

    def own(self, overload: str, level: str) -> str | None:
        """Run the check of the overload's own policy; return the contract where it fails."""
        if overloads.uncallable(overload):
            return None
        check = self._policies[overloads.known(self.backend)[overload]]
        found = self._fails(check, level, self.target, overload)
        return found and found[0]

    def _fails(self, check: Any, level: str, *parameters: Any) -> tuple[str, str, Any] | None:
        (contract,) = (mark.args[0] for mark in check.pytestmark if mark.name == "contract")
        case = Case(
            self._catalogue[contract],
            level=level,
            seed=0,
            substitutions={},
            amp_dtypes=(torch.float16, torch.bfloat16),
        )
        try:
            check(case, *parameters)
        except (Unsupported, Untestable, Inconclusive):
            return None
        except Exception as error:  # as in a run: whatever a check raises is a failure of its contract
            measured = case.evidence[-1].measured if case.evidence else []
            return contract, f"{type(error).__name__}: {error}", measured
        return None


def judge(checks: _Checks, fault: Generated) -> Outcome:
    """Break torch, run the checks of the whole backend, and put it back."""
    with fault.applied():
        failed = list(checks.whole())
        own = {contract for overload, contract, _ in failed if overload == fault.overload}
        level = "quick" if own else None
        if not own and (deeper := checks.own(fault.overload, "standard")):
            own, level = {deeper}, "standard"
    if level == "standard" and checks.own(fault.overload, "standard"):
        raise RuntimeError(f"the check of {fault.overload} fails at level standard on an unbroken torch")
    others = tuple(f"{overload}: {message}" for overload, _, message in failed if overload != fault.overload)
    return Outcome(fault, level, tuple(sorted(own)), others)


def judge_batch(batch: Sequence[Generated]) -> list[Outcome]:
    """Judge faults of one backend, after controls: nothing fails with nothing broken, nor where an overload follows its
    own policy by a kernel of `_rules`, so that what fails later does so for the policy and not for the kernel."""
    checks = _Checks(batch[0].backend)
    if failed := list(checks.whole()):
        raise RuntimeError(f"fails on an unbroken torch: {failed}")
    for overload in sorted({fault.overload for fault in batch}):
        with ruled(overload, overloads.known(checks.backend)[overload], checks.backend):
            if contract := checks.own(overload, "standard"):
                raise RuntimeError(f"{contract} fails where {overload} on {checks.backend} follows its own policy")
    return [judge(checks, fault) for fault in batch]


def _settle() -> None:
    """Make ready a process of the campaign."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # that a kernel is overridden
    # What torch says of deprecated ops, past Python's own warnings; what breaks reaches the caller as an exception.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def run(chosen: Iterable[Generated], workers: int = 1) -> Iterator[Outcome]:
    """Judge the faults, in processes of their own."""
    batches = [
        own[start : start + BATCH]
        for _, group in itertools.groupby(sorted(chosen), key=lambda fault: fault.backend)
        for own in [list(group)]
        for start in range(0, len(own), BATCH)
    ]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _settle) as pool:
        for outcomes in pool.map(judge_batch, batches):
            yield from outcomes


def wrong(outcomes: Sequence[Outcome]) -> list[str]:
    """Say of each outcome that is not as it must be what is wrong with it."""
    found = []
    for outcome in outcomes:
        excused = indistinguishable(outcome.fault) is not None
        if outcome.level is None and not excused:
            found.append(f"MISSED {outcome.fault}")
        if outcome.level is not None and excused:
            found.append(f"LISTED as indistinguishable, yet caught at {outcome.level}: {outcome.fault}")
        found += [f"FALSE ALARM of {outcome.fault}: {other}" for other in outcome.others]
    return found


def table(outcomes: Sequence[Outcome]) -> str:
    """Count what was made, caught and missed, by backend and kind."""
    rows = []
    for backend in (*FAKE_DEVICE_TYPES, "all"):
        for kind in (*KINDS, "all"):
            ours = [
                one for one in outcomes if backend in (one.fault.backend, "all") and kind in (one.fault.kind, "all")
            ]
            if ours:
                rows.append([backend, kind, *_counts(ours)])
    return tabulate(rows, headers=COLUMNS, tablefmt="github")


def _policy_contract(outcome: Outcome) -> str:
    return POLICY_CONTRACTS[outcome.fault.policy]


def _counts(outcomes: Sequence[Outcome]) -> list[int]:
    caught = [one for one in outcomes if one.level]
    excused = [one for one in outcomes if not one.level and indistinguishable(one.fault)]
    return [
        len(outcomes),
        len(caught),
        sum(_policy_contract(one) in one.contracts for one in caught),
        sum(one.level == "standard" for one in caught),
        sum(bool(one.others) for one in outcomes),
        len(excused),
        len(outcomes) - len(caught) - len(excused),
    ]


def page(outcomes: Sequence[Outcome], counts: str, complaints: Sequence[str], seconds: float, workers: int) -> str:
    """Write the page of the documentation that says what was tried and what came of it."""
    by_reason: dict[str, list[str]] = {}
    for fault in sorted(outcome.fault for outcome in outcomes):
        if reason := indistinguishable(fault):
            by_reason.setdefault(reason, []).append(f"`{fault}`")
    listed = [f"- {reason}: {', '.join(names)}" for reason, names in by_reason.items()]
    return _PAGE.format(
        date=datetime.date.today(),
        torch=torch.__version__,
        made=len(outcomes),
        minutes=f"{seconds / 60:.1f}",
        workers=workers,
        counts=counts,
        complaints="\n".join(f"- {complaint}" for complaint in complaints) or "None.",
        listed="\n".join(listed) or "None.",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign, or a sample of it; 1 where a fault is missed or something else fails."""
    parser = argparse.ArgumentParser("python -m tests.faults.campaigns.generated", description=__doc__)
    parser.add_argument("--backend", action="append", choices=FAKE_DEVICE_TYPES, help="this one alone; repeatable")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of the faults, evenly from all kinds")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the page of the documentation")
    options = parser.parse_args(arguments)
    whole = faults(options.backend or FAKE_DEVICE_TYPES)
    chosen = whole if options.sample is None else sample(whole, options.sample)
    start, outcomes = time.monotonic(), []
    for outcome in run(chosen, options.workers):
        outcomes.append(outcome)
        if len(outcomes) % 100 == 0:
            print(f"{len(outcomes)} of {len(chosen)}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    counts, complaints = table(outcomes), wrong(outcomes)
    print(counts, *complaints, f"{time.monotonic() - start:.0f} s", sep="\n")
    if options.output:
        seconds = time.monotonic() - start
        options.output.write_text(page(outcomes, counts, complaints, seconds, options.workers), encoding="utf-8")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
