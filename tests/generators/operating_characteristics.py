"""How often the speed chapter's measurements err, by simulation: writes the table of docs/measuring.md."""

from __future__ import annotations

import argparse
import random
import re
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tabulate import tabulate

from conformance.chapters.speed.clocks import repeated, step_clock
from conformance.chapters.speed.intervals import CONFIDENCE, Interval, noise_floor
from conformance.chapters.speed.paired_comparison import PLANS, Comparison, Plan, compare
from conformance.measure.threads import one_thread
from tests.simulation.clocks import NOISES, Machine

SLOWER = 1.1  # the candidate that has to be found takes 10 % longer
RUN = 1e-3  # seconds that a run of either arm takes without noise
_VERDICTS = {True: "PASS", False: "FAIL", None: "INCONCLUSIVE"}
_PAGE = Path(__file__).parents[1] / "docs" / "measuring.md"


@dataclass
class Characteristics:
    """What came of `trials` simulated measurements of equal arms, and as many of unequal ones, counted."""

    trials: int = 0
    told_apart: int = 0  # intervals of equal arms that exclude 1: false alarms before any floor
    covered: int = 0  # intervals, of equal and unequal arms, that hold the true ratio
    equal: Counter[str] = field(default_factory=Counter)  # verdicts against 1, widened by the floor of an A/A run
    slower: Counter[str] = field(default_factory=Counter)
    pairs: list[int] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)


def measured(noise: str, seed: str, plan: Plan, slower: float = 1.0) -> Comparison:
    """One measurement on a simulated machine, of a candidate that takes `slower` times as long."""
    machine = Machine(NOISES[noise](random.Random(seed)))
    return compare(machine, machine.work(RUN), machine.work(RUN * slower), plan, now=lambda: machine.now, seed=seed)


def simulate(noise: str, trials: int, plan: Plan) -> Characteristics:
    """Measure `trials` times: an A/A run for the floor, equal arms, and a candidate that is slower by a tenth."""
    seen = Characteristics(trials)
    for trial in range(trials):
        floor = noise_floor(measured(noise, f"{noise} {trial} floor", plan).speedup)
        for slower, verdicts in ((1.0, seen.equal), (SLOWER, seen.slower)):
            taken = measured(noise, f"{noise} {trial} {slower}", plan, slower)
            interval = taken.speedup
            seen.covered += interval.low <= 1 / slower <= interval.high
            seen.told_apart += slower == 1.0 and not interval.low <= 1 <= interval.high
            verdicts[_VERDICTS[interval.widened(floor).judge(1.0)]] += 1
            seen.pairs.append(len(taken.baseline))
            seen.widths.append(interval.width)
    return seen


def here(trials: int, plan: Plan) -> str:
    """The same on the processor of this machine, as busy as it is: ten products against ten, and against eleven."""
    factor = torch.randn(96, 96, generator=torch.Generator().manual_seed(0))
    ten, eleven = (repeated(lambda: torch.matmul(factor, factor), times) for times in (10, 11))
    clock = step_clock("cpu", None)
    told_apart, covered, equal, slower = 0, 0, Counter[str](), Counter[str]()
    with one_thread():
        for trial in range(trials):
            floor, same, longer = (
                compare(clock, ten, other, plan, seed=f"{name} {trial}").speedup
                for name, other in (("floor", ten), ("equal", ten), ("slower", eleven))
            )
            told_apart += not same.low <= 1 <= same.high
            covered += longer.low <= 10 / 11 <= longer.high
            equal[_VERDICTS[same.widened(noise_floor(floor)).judge(1.0)]] += 1
            slower[_VERDICTS[longer.widened(noise_floor(floor)).judge(1.0)]] += 1
    return (
        f"{trials} measurements: {told_apart} of equal arms told apart; equal arms {dict(equal)}; "
        f"10 % slower {dict(slower)}, {covered} intervals of which hold 10/11"
    )


def in_blocks(noise: str, seed: str, pairs: int) -> Interval:
    """The control: all runs of one arm, then all of the other, of equal arms."""
    machine = Machine(NOISES[noise](random.Random(seed)))
    work = machine.work(RUN)
    arms = [tuple(machine.seconds(work) for _ in range(pairs)) for _ in range(2)]
    return Comparison(arms[0], arms[1]).speedup


def in_fixed_order(noise: str, seed: str, pairs: int) -> Interval:
    """The other control: equal arms in the order ABBA throughout."""
    machine = Machine(NOISES[noise](random.Random(seed)))
    work = machine.work(RUN)
    arms: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for arm in (0, 1) if pair % 2 == 0 else (1, 0):
            arms[arm].append(machine.seconds(work))
    return Comparison(tuple(arms[0]), tuple(arms[1])).speedup


def table(trials: int, plan: Plan) -> str:
    """The characteristics under each kind of noise, and those of the two controls."""
    rows = []
    for noise in NOISES:
        seen = simulate(noise, trials, plan)
        controls = [
            sum(not end.low <= 1 <= end.high for end in (control(noise, f"{noise} {i}", 36) for i in range(trials)))
            for control in (in_blocks, in_fixed_order)
        ]
        shares = [
            seen.told_apart / trials,
            seen.equal["FAIL"] / trials,
            seen.slower["FAIL"] / trials,
            seen.slower["PASS"] / trials,
            seen.covered / (2 * trials),
            *(count / trials for count in controls),
        ]
        middle = statistics.median(seen.pairs), statistics.median(seen.widths)
        rows.append([noise, *(f"{share:.2%}" for share in shares), f"{middle[0]:g}", f"{middle[1]:.1%}"])
    columns = [
        "noise",
        "equal arms told apart",
        "equal arms FAIL",
        "10 % slower: FAIL",
        "10 % slower: PASS",
        "coverage",
        "told apart A..A B..B",
        "told apart ABBA",
        "pairs",
        "width",
    ]
    return tabulate(rows, headers=columns, tablefmt="github", disable_numparse=True)


def main(argv: list[str] | None = None) -> None:
    """Print the table, or put it into its place in docs/measuring.md."""
    parser = argparse.ArgumentParser(prog="python -m tests.generators.operating_characteristics", description=__doc__)
    parser.add_argument("--trials", type=int, default=1000, help="measurements of each kind (default: 1000)")
    parser.add_argument("--level", choices=PLANS, default="standard", help="whose plan (default: standard)")
    parser.add_argument("--write", action="store_true", help=f"into {_PAGE.name}, in the place of the table there")
    parser.add_argument("--here", action="store_true", help="measure on this machine's processor instead")
    arguments = parser.parse_args(argv)
    if arguments.here:
        print(here(arguments.trials, PLANS[arguments.level]))
        return
    text = table(arguments.trials, PLANS[arguments.level])
    if not arguments.write:
        print(text)
        return
    note = f"{arguments.trials} measurements of each kind at `{arguments.level}`, intervals of {CONFIDENCE:.0%}:"
    begin, end = "<!-- simulated -->", "<!-- end of simulated -->"
    page = _PAGE.read_text(encoding="utf-8")
    new = re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{note}\n\n{text}\n{end}", page, flags=re.DOTALL)
    _PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
