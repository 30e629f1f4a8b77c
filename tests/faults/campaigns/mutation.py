"""Runs the suite on mutants of torch's sources, of AMP if none is named, and says which contract catches each."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.util
import io
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess as Process
from pathlib import Path
from typing import Any

import pytest
import torch
from tabulate import tabulate

from conformance.data import read_toml
from conformance.harness import catalogue
from tests.faults.campaigns.campaign import fresh_checks
from tests.faults.campaigns.mutants import MODULES, Mutant, functions, mutants
from tests.paths import ROOT

PATIENCE = 600  # seconds; a mutant may make a check wait for ever
# The chapters that speak of a function, by the beginning of its name, the longest that fits: they are run first.
HOMES = {
    "torch.amp.grad_scaler": ("scale", "optimizer"),
    "torch.amp.autocast_mode": ("region", "cache", "backward"),
    "torch.amp.autocast_mode.is_autocast_available": ("api", "region"),
    "torch.amp.autocast_mode.custom_": ("backward",),
    "torch.amp.autocast_mode._cast": ("backward",),
    "torch.nn.utils.clip_grad": ("clip",),
    "torch.cuda.amp.grad_scaler": ("scale", "api"),
    "torch.cpu.amp.grad_scaler": ("scale", "api"),
    "torch.cuda.amp.autocast_mode": ("region", "api"),
    "torch.cuda.amp.autocast_mode.custom_": ("backward", "api"),
    "torch.cpu.amp.autocast_mode": ("region", "api"),
}
CHAPTERS = ("scale", "optimizer", "region", "cache", "backward", "clip", "recipe", "api", "bf16", "loss", "parity")
LEVELS = ("quick", "standard")
_FORK = multiprocessing.get_context("fork")
_UNNEEDED = ("cacheprovider", "randomly", "xdist", "unraisableexception", "threadexception", "faulthandler")
_PAGE = """# Mutants of torch's AMP sources

Written by `python -m tests.faults.campaigns.mutation -o docs/evidence/mutants.md` on {date} with torch {torch}:
{made} mutants in {minutes} minutes, {workers} processes.

Every branch, constant, comparison, call and statement of the modules below is changed in turn, one at a time, and the
chapters {chapters} are run, those first that speak of the function: at level quick,
and at level standard where nothing failed; of those listed as equivalent only the chapters that speak of the function,
at quick. A mutant is caught where a contract fails; the first one counts, and checks
that saw other mutants of the same function are run before the rest. Functions are changed in place, so what runs only
while torch is imported is not tried, and neither are the texts of messages.

{counts}

## Operators

{operators}

## Equivalent, and why

{equivalent}

## Survivors

{survivors}
"""


@dataclass(frozen=True)
class Outcome:
    """What a mutant came to: the contract that failed first, and at which level; None where no contract did."""

    mutant: Mutant
    contract: str | None
    level: str | None

    @property
    def at_home(self) -> bool:
        """Whether the contract is of a chapter that speaks of the function."""
        contract = self.contract or ""  # or how the process ended, in brackets
        return contract.startswith("AMP-") and _chapter(contract) in homes(self.mutant)


Tell = Callable[[Outcome], None]


def every(modules: Sequence[str] = MODULES) -> list[Mutant]:
    """Return the mutants of those modules."""
    return [mutant for module in modules for mutant in mutants(module)]


def sample(whole: Sequence[Mutant], count: int, seed: int = 0) -> list[Mutant]:
    """Return `count` of the mutants, the same each time."""
    return random.Random(seed).sample(list(whole), min(count, len(whole)))


def equivalent(mutant: Mutant) -> str | None:
    """Say why no contract can see a mutant, None where one can: by the rows of `mutants.toml`."""
    name = str(mutant).removeprefix(f"{mutant.home}: ")
    for row in _rows():
        here = _fits(mutant.home, row["function"]) and _fits(mutant.where, row.get("where", "*"))
        if here and any(_fits(name, pattern) for pattern in row["mutants"]):
            return str(row["reason"])
    return None


def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_toml(Path(__file__).with_name("mutants.toml"))["equivalent"]
    return rows


def _fits(text: str, pattern: str) -> bool:
    """Whether a text is as the pattern says, in which only `*` stands for something: brackets are common in Python."""
    return fnmatchcase(text, pattern.replace("[", "[[]"))


def homes(mutant: Mutant) -> tuple[str, ...]:
    """Return the chapters that speak of the function."""
    return HOMES[max((start for start in HOMES if mutant.home.startswith(start)), key=len)]


class _Campaign:
    """A pytest plugin that runs, in place of the session, a fork of it for each mutant, until a contract fails there.

    The checks are collected once, with torch whole. A fork may hang or crash and harm nobody. Checks that saw other
    mutants of the same function are run first.
    """

    def __init__(self, chosen: Sequence[Mutant], workers: int, level: str, tell: Tell) -> None:
        self.outcomes: dict[Mutant, Outcome] = {}
        self._waiting = list(reversed(chosen))
        self._workers = workers
        self._level = level
        self._tell = tell
        self._seen: Counter[tuple[str, str]] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.freeze()  # so that the forks go on sharing what is there already
        running: dict[Connection, tuple[Mutant, Process, float]] = {}
        while self._waiting or running:
            while self._waiting and len(running) < self._workers:
                mutant = self._waiting.pop()
                receiver, sender = _FORK.Pipe(duplex=False)
                process = _FORK.Process(target=self._child, args=(session, mutant, sender))
                process.start()
                sender.close()
                running[receiver] = mutant, process, time.monotonic() + PATIENCE
            ready = wait(running, timeout=1.0)
            for receiver, (mutant, process, end) in list(running.items()):
                if receiver in ready or time.monotonic() > end:
                    del running[receiver]
                    self._conclude(mutant, process, receiver if receiver in ready else None)
        gc.unfreeze()
        return True

    def _conclude(self, mutant: Mutant, process: Process, receiver: Connection | None) -> None:
        if receiver is None:
            process.kill()
            answer: str | None = "(hangs)"
        else:
            try:
                answer = receiver.recv()
            except EOFError:
                answer = "(ends the process)"
            receiver.close()
        process.join()
        if answer:
            self._seen[mutant.home, answer] += 1
        self.outcomes[mutant] = outcome = Outcome(mutant, answer, self._level if answer else None)
        self._tell(outcome)

    def _child(self, session: pytest.Session, mutant: Mutant, sender: Connection) -> None:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        error = None
        with mutant.applied():
            for item in self._in_order(session.items, mutant):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                told = dict(item.user_properties)
                if told.get("verdict") == "FAIL":
                    sender.send(told["contract"])
                    os._exit(0)
                if told.get("verdict") == "ERROR":
                    error = error or f"(error in {told['contract']})"
        sender.send(error)
        os._exit(0)

    def _in_order(self, items: Sequence[pytest.Item], mutant: Mutant) -> list[pytest.Item]:
        own = homes(mutant)

        def rank(item: pytest.Item) -> tuple[bool, int]:
            contract = _contract(item)
            return _chapter(contract) not in own, -self._seen[mutant.home, contract]

        ours = (item for item in items if _contract(item))
        if equivalent(mutant):
            ours = (item for item in ours if _chapter(_contract(item)) in own)
        return sorted(ours, key=rank)


def _chapter(contract: str) -> str:
    return contract.split("-")[1].lower()


def _contract(item: pytest.Item) -> str:
    return next((mark.args[0] for mark in item.iter_markers("contract")), "")


def run(
    chosen: Sequence[Mutant],
    workers: int = 2,
    levels: Sequence[str] = LEVELS,
    tell: Tell = lambda _: None,
    chapters: Sequence[str] = CHAPTERS,
) -> list[Outcome]:
    """Judge the mutants, several at a time: at one level after the other, those that no contract has seen yet."""
    outcomes: dict[Mutant, Outcome] = {}
    left = list(chosen)
    for level in levels:
        campaign = _Campaign(left, workers, level, tell)
        asked = [argument for chapter in chapters for argument in ("--chapter", chapter)]
        plugins = [argument for name in _UNNEEDED for argument in ("-p", f"no:{name}")]
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), fresh_checks():
            arguments = [str(ROOT / "conformance"), "-q", *plugins, "--level", level, "--report", folder]
            pytest.main([*arguments, *asked], plugins=[campaign])
        outcomes.update(campaign.outcomes)
        left = [mutant for mutant in left if outcomes[mutant].contract is None and not equivalent(mutant)]
        if not left:
            break
    return [outcomes[mutant] for mutant in chosen]


def wrong(outcomes: Sequence[Outcome]) -> list[str]:
    """Say of each outcome that is not as it must be what is wrong with it; a hang or a crash is no contract."""
    found = []
    for outcome in outcomes:
        excused = equivalent(outcome.mutant) is not None
        if outcome.contract is None and not excused:
            found.append(f"SURVIVED line {outcome.mutant.line}, in `{outcome.mutant.where}`: {outcome.mutant}")
        if outcome.contract is not None and outcome.contract.startswith("("):
            found.append(f"NO CONTRACT, {outcome.contract}: {outcome.mutant}")
        elif outcome.contract is not None and excused:
            found.append(f"LISTED as equivalent, yet caught by {outcome.contract}: {outcome.mutant}")
    return found


def counts(outcomes: Sequence[Outcome]) -> str:
    """Count by function what was made, caught, equivalent and survived."""
    rows = []
    for name in (*dict.fromkeys(outcome.mutant.home for outcome in outcomes), "all"):
        ours = [outcome for outcome in outcomes if name in (outcome.mutant.home, "all")]
        caught = [outcome for outcome in ours if outcome.contract]
        contracts = Counter(str(outcome.contract) for outcome in caught)
        excused = sum(outcome.contract is None and equivalent(outcome.mutant) is not None for outcome in ours)
        rows.append(
            [
                f"`{name}`",
                len(ours),
                len(caught),
                sum(outcome.at_home for outcome in caught),
                sum(outcome.level == "standard" for outcome in caught),
                excused,
                len(ours) - len(caught) - excused,
                ", ".join(contract for contract, _ in contracts.most_common(3)) if name != "all" else "",
            ]
        )
    headers = ("function", "made", "caught", "by its chapters", "at standard only", "equivalent", "survived", "most by")
    return tabulate(rows, headers=headers, tablefmt="github")


def operators(outcomes: Sequence[Outcome]) -> str:
    """Count by operator what was made and caught."""
    made = Counter(outcome.mutant.operator for outcome in outcomes)
    caught = Counter(outcome.mutant.operator for outcome in outcomes if outcome.contract)
    rows = [(name, made[name], caught[name]) for name in sorted(made)]
    return tabulate(rows, headers=("operator", "made", "caught"), tablefmt="github")


def page(outcomes: Sequence[Outcome], seconds: float, workers: int) -> str:
    """Write the page of the documentation that says what was tried and what came of it."""
    by_reason: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.contract is None and (reason := equivalent(outcome.mutant)):
            by_reason.setdefault(reason, []).append(f"`{outcome.mutant}`")
    return _PAGE.format(
        date=datetime.date.today(),
        torch=torch.__version__,
        made=len(outcomes),
        chapters=", ".join(CHAPTERS),
        minutes=f"{seconds / 60:.0f}",
        workers=workers,
        counts=counts(outcomes),
        operators=operators(outcomes),
        equivalent="\n".join(
            f"- {reason}\n" + "\n".join(f"  - {name}" for name in names) for reason, names in by_reason.items()
        )
        or "None.",
        survivors="\n".join(f"- {complaint}" for complaint in wrong(outcomes)) or "None.",
    )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it is not there
        return False


def _tell(outcome: Outcome) -> None:
    verdict = f"{outcome.contract} at {outcome.level}" if outcome.contract else "not seen"
    print(f"{verdict}: line {outcome.mutant.line}: {outcome.mutant}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign, or a part of it; 1 where a mutant survives that is not listed as equivalent."""
    parser = argparse.ArgumentParser("python -m tests.faults.campaigns.mutation", description=__doc__)
    parser.add_argument(
        "--module", action="append", metavar="MODULE", help=f"this one alone, such as {MODULES[0]}; repeatable"
    )
    parser.add_argument(
        "--home",
        action="append",
        metavar="CHAPTER",
        choices=[chapter.name for chapter in catalogue.load().chapters],
        help="a chapter that speaks of the modules that are named, run in place of those for AMP's own; repeatable",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="those whose name matches, such as '*GradScaler.step: *'; repeatable",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, drawn at random, always the same")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--level", choices=LEVELS, default="standard", help="up to this one (standard)")
    parser.add_argument("--list", action="store_true", help="name the mutants and run nothing")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the page of the documentation")
    options = parser.parse_args(arguments)
    modules = tuple(options.module or MODULES)
    if missing := [module for module in modules if not _is_there(module)]:
        parser.error(f"there is no module {missing[0]}")
    if options.home is None and (unknown := sorted({*modules} - {*MODULES})):
        parser.error(f"--home has to name the chapters that speak of {', '.join(unknown)}")
    if options.home is not None:
        HOMES.update(dict.fromkeys(modules, tuple(options.home)))
    chosen = [
        mutant
        for mutant in every(modules)
        if options.only is None or any(_fits(str(mutant), pattern) for pattern in options.only)
    ]
    if options.sample is not None:
        chosen = sample(chosen, options.sample)
    if options.list:
        print(*chosen, sep="\n")
        return 0
    torch.set_num_threads(1)  # what is forked may not have threads
    warnings.simplefilter("ignore")
    for module in modules:
        functions(module)
    start = time.monotonic()
    levels = LEVELS[: LEVELS.index(options.level) + 1]
    outcomes = run(chosen, options.workers, levels, _tell, options.home or CHAPTERS)
    seconds = time.monotonic() - start
    complaints = wrong(outcomes)
    print(counts(outcomes), *complaints, f"{seconds:.0f} s", sep="\n")
    if options.output:
        options.output.write_text(page(outcomes, seconds, options.workers), encoding="utf-8")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
