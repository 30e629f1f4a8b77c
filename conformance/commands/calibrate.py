"""The command `calibrate`: measures this machine and writes expectations that machines like it are judged by."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from ..invocation import COMMAND, RUN
from ..report import document, speed, text
from ..report.speed import Speedup
from ..report.values import Report, Target
from .console import OK, USAGE, UsageError, show, write

_PACKAGE = Path(__file__).resolve().parent.parent
_LEVELS = ("quick", "standard", "full")
_YEAR = 365
_MOST_DAYS = 3650
_CHAPTER = "speed"
# Evidence of a speed-up besides its ratio and interval, as conformance/chapters/speed/experiment.py names it.
_NOISE, _PAIRS, _SPOILED, _HALVED = "noise", "pairs", "spoiled", "batch halved"
# What the keys of a step of a user's model (--workload) begin with, as conformance/chapters/speed/test_user_workload.py
# names them: another model has another speed, so that no class of devices is judged by it.
_OF_A_WORKLOAD = "own/"
_RATES = {"AMP TFLOP/s": "dtype", "baseline TFLOP/s": "baseline"}


@dataclass(frozen=True)
class _Source:
    """A report, and by what its bytes are known."""

    report: Report
    digest: str

    @property
    def day(self) -> datetime.date:
        return datetime.date.fromisoformat(self.report.header.started[:10])


@dataclass(frozen=True)
class _Factor:
    """What machines like those that were measured have to reach in one measurement, and what it is made of."""

    key: str
    at_least: float
    seen: tuple[float, float, float]  # low end, median, high end
    noise: float
    pairs: int


@dataclass(frozen=True)
class _Class:
    """What was measured on devices of one name: the factors, the highest rates, and what is of no use, with why."""

    target: Target
    sources: tuple[_Source, ...]
    factors: tuple[_Factor, ...]
    machines: Mapping[str, int]  # how many were measured, by key
    reached: dict[str, float]
    unused: tuple[str, ...]


def add(commands: Any) -> None:
    """Add `calibrate` to the parser's commands."""
    command = commands.add_parser(
        "calibrate",
        help="measure this machine's speed-ups and write the expectations that machines like it are judged by",
        description="Without REPORT: run the speed chapter on this machine and write an expectations "
        "file of what it reached. With reports: write it from these, one for each machine of a kind; the least that "
        "any of them reached counts. Judge by it with " + RUN + " --expectations FILE. Exit status: 0 written; "
        "4 nothing that could be written, with the reason.",
    )
    command.add_argument("reports", nargs="*", metavar="REPORT", help="a report that holds the speed chapter")
    command.add_argument("-o", "--output", metavar="FILE", help="write to FILE (default: standard output)")
    command.add_argument(
        "--device",
        action="append",
        metavar="D",
        help="measure on this device (default: the accelerator, else the CPU)",
    )
    command.add_argument("--level", choices=_LEVELS, help="depth of the run (default standard)")
    command.add_argument("--folder", metavar="DIR", help="where the run puts its report")
    command.add_argument(
        "--margin",
        type=float,
        default=0.0,
        metavar="M",
        help="let machines be slower by this share, beyond noise and interval: 0.05 for 5 %% (default 0)",
    )
    command.add_argument(
        "--valid-days", type=int, default=_YEAR, metavar="N", help=f"how long the file counts (default {_YEAR})"
    )
    command.set_defaults(run=_calibrate)


def _calibrate(arguments: argparse.Namespace) -> int:
    from ..harness import expectations

    if not 0 <= arguments.margin < 1:
        raise UsageError(f"--margin {arguments.margin:g}: a share from 0 to below 1")
    if not 1 <= arguments.valid_days <= _MOST_DAYS:
        raise UsageError(f"--valid-days {arguments.valid_days}: from 1 to {_MOST_DAYS}")
    output = None if arguments.output is None else Path(arguments.output)
    paths = list(map(document.locate, arguments.reports))
    if output is not None and any(
        os.path.exists(path) and os.path.exists(output) and output.samefile(path) for path in paths
    ):
        raise UsageError(f"--output {output} is a report itself; name another file")
    if not paths:
        for device in arguments.device or ():
            if device.strip().lower().startswith("fake"):
                raise UsageError(f"--device {device}: nothing computes on a fake device; name a real one")
        ran = _run(arguments.device or (), arguments.level or "standard", arguments.folder)
        if isinstance(ran, int):
            return ran
        paths = [ran]
    elif arguments.device or arguments.level or arguments.folder:
        raise UsageError("--device, --level and --folder are for measuring; a report is measured already")
    sources = _sources(paths)
    classes = _classes(sources, expectations.KEYS, expectations.LARGEST_FACTOR, arguments.margin)
    last = max(source.day for source in sources) + datetime.timedelta(days=arguments.valid_days)
    if last < expectations.date_of_today():
        raise UsageError(f"these expectations ended on {last} already: measure anew, or give more --valid-days")
    page = "\n".join(_page(classes, last, arguments.margin))
    if output is None:
        show(page.rstrip("\n"))
    else:
        write(output, page)
    for line in _told(classes, last):
        print(line, file=sys.stderr)
    return OK


# --- measuring --------------------------------------------------------------------------------------------------


def _run(devices: Sequence[str], level: str, folder: str | None) -> Path | int:
    """Run the speed chapter; its report, or the exit status of a run that could not begin or was stopped.

    What the run prints goes to standard error: standard output is for the expectations.
    """
    from ..harness import requirements

    if (problem := requirements.torch_problem()) is not None:
        raise UsageError(problem)
    if not devices:
        from ..harness import targets

        devices = (targets.accelerator() or "cpu",)
    now = datetime.datetime.now(datetime.timezone.utc)
    report = Path(folder or Path("conformance-reports", f"calibration-{now:%Y%m%dT%H%M%S}"))
    command = [sys.executable, "-m", "pytest", str(_PACKAGE), "-p", "no:cacheprovider"]
    command += ["--chapter", _CHAPTER, "--level", level, "--report", str(report.resolve())]
    command += [word for device in devices for word in ("--device", device)]
    status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    if status not in (0, 1):
        print(f"calibrate: the run of the speed chapter ended with status {status}", file=sys.stderr)
        return USAGE
    return document.locate(report)


# --- from reports to factors ------------------------------------------------------------------------------------


def _sources(paths: Sequence[Path]) -> list[_Source]:
    """Read the reports; raises UsageError for one that no machine may be judged by."""
    found: list[_Source] = []
    for path in paths:
        source = _Source(document.read(path), hashlib.sha256(path.read_bytes()).hexdigest())
        if any(source.digest == other.digest for other in found):
            raise UsageError(f"{path}: the same report twice is no second machine")
        if (why := _unfit(source.report)) is not None:
            raise UsageError(f"{path}: {text.line(why)}")
        found.append(source)
    return found


def _unfit(report: Report) -> str | None:
    """Why nothing may be judged by a report."""
    if report.footer is None or report.footer.interrupted:
        return "the run did not end, so the machine's figures are not whole"
    for case in report.cases:
        if report.contracts[case.contract].chapter == _CHAPTER and case.verdict.value in ("FAIL", "ERROR"):
            found = {"FAIL": "failed", "ERROR": "broke"}[case.verdict.value]
            return f"{case.id} {found} on {case.target}: a machine that is in doubt is no measure for others"
    return None


def _classes(sources: Sequence[_Source], keys: Sequence[str], largest: float, margin: float) -> list[_Class]:
    """Join the speed-ups of all devices of one name; raises UsageError where there are none."""
    measured: dict[tuple[str, str, str], list[tuple[_Source, Target, Speedup]]] = {}
    for source in sources:
        targets = {target.name: target for target in source.report.header.targets if not target.fake}
        for row in speed.speedups(source.report):
            target = targets.get(row.case.target)
            if target is not None:
                identity = (target.device_type, _name(target), str(target.probe.get("capability")))
                measured.setdefault(identity, []).append((source, target, row))
    found = [_class(rows, keys, largest, margin) for rows in measured.values()]
    if found and all(row.key.startswith(_OF_A_WORKLOAD) for rows in measured.values() for _, _, row in rows):
        raise UsageError(
            "only a model of a user (--workload) was timed, and expectations are of the operations and steps of the "
            f"chapter speed: run {RUN} --chapter speed without --workload; {COMMAND} diff OLD NEW compares the model's "
            "speed in two reports"
        )
    if not found:
        raise UsageError(f"no speed-up was measured: run {RUN} --chapter speed, with --gpu where there is one")
    for one in found:
        if not one.factors:
            raise UsageError(text.line(f"nothing measured on {_name(one.target)} is of use: {one.unused[0]}"))
    return found


def _class(rows: list[tuple[_Source, Target, Speedup]], keys: Sequence[str], largest: float, margin: float) -> _Class:
    factors: dict[str, _Factor] = {}
    machines: Counter[str] = Counter()
    unused: dict[str, str] = {}
    reached: dict[str, float] = {}
    for _, _, row in rows:
        if (why := _unusable(row, keys, largest)) is not None:
            unused[row.key] = f"{row.key}: {why}"
            continue
        factor = _factor(row, margin)
        machines[row.key] += 1
        if row.key not in factors or factor.at_least < factors[row.key].at_least:
            factors[row.key] = factor
        for figure, place in _RATES.items():
            rate = row.figures.get(figure)
            if isinstance(rate, (int, float)):
                mode = getattr(row, place)
                reached[mode] = max(reached.get(mode, 0.0), float(rate))
    order = [factors[key] for key in keys if key in factors]
    sources = {source.digest: source for source, _, _ in rows}
    left_out = [why for key, why in unused.items() if key not in factors]
    return _Class(rows[0][1], tuple(sources.values()), tuple(order), machines, reached, tuple(left_out))


def _unusable(row: Speedup, keys: Sequence[str], largest: float) -> str | None:
    """Why nothing can be expected after this speed-up."""
    if row.key.startswith(_OF_A_WORKLOAD):
        return "of a user's model (--workload), by which no other machine is judged"
    if row.key not in keys:
        return "no measurement that this suite knows"
    if row.figures.get(_SPOILED):
        return f"the measurement was invalid: {row.figures[_SPOILED]}"
    if row.figures.get(_HALVED):
        return "its batch was halved, for want of memory or time"
    if row.high >= speed.WIDE * row.low:
        return f"the interval [{row.low:.3g}, {row.high:.3g}] is too wide to judge others by"
    if row.high > largest:
        return f"a ratio of {row.high:.4g} is more than any device reaches"
    return None


def _factor(row: Speedup, margin: float) -> _Factor:
    """The low end of what was measured, less what two measurements of one machine differ by.

    In logarithms the interval reaches down by its own half-width and the noise floor, and the difference of two such
    medians has sqrt(2) times that half-width. What is judged has its own interval and floor below its median again.
    """
    noise, pairs = row.figures.get(_NOISE), row.figures.get(_PAIRS)
    noise = float(noise) if isinstance(noise, (int, float)) and 0 <= noise <= 10 else 0.0
    half_width = max(math.log(row.ratio / row.low) - noise, 0.0)
    return _Factor(
        row.key,
        row.low * math.exp(-math.sqrt(2) * half_width) * (1 - margin),
        (row.low, row.ratio, row.high),
        noise,
        pairs if type(pairs) is int and pairs > 0 else 1,
    )


def _name(target: Target) -> str:
    return str(target.probe.get("name", target.device_type))


# --- the file ---------------------------------------------------------------------------------------------------


def _page(classes: Sequence[_Class], last: datetime.date, margin: float) -> Iterator[str]:
    """The expectations file, line by line."""
    yield f"# Written by `{COMMAND} calibrate`: the low end of what machines of a kind were seen to reach,"
    yield "# less what two measurements of one machine differ by" + (
        f", and a margin of {margin:.3g}." if margin else "."
    )
    yield f"# Judge a machine by it: {RUN} --expectations FILE, on the same device and --level."
    for one in classes:
        environments = [source.report.header.environment for source in one.sources]
        levels = _joined(source.report.header.options.level for source in one.sources)
        suites = _joined(source.report.header.suite.version for source in one.sources)
        capability = one.target.probe.get("capability")
        yield ""
        yield "[[class]]"
        yield f"id = {_quoted(re.sub(r'[^a-z0-9]+', '-', _name(one.target).lower()).strip('-') + '-calibrated')}"
        yield f"device_type = {_quoted(one.target.device_type)}"
        yield f"names = [{_quoted(escape(_name(one.target)))}]"
        if capability is not None:
            yield f"capability = [{_quoted(str(capability))}]"
        yield 'how = "calibrated"'
        yield f"source = {_quoted(f'amp-conformance {suites}, chapter speed at level {levels}')}"
        yield f"torch = {_quoted(_joined(environment.torch for environment in environments))}"
        yield f"driver = {_quoted(_joined(environment.driver or 'unknown' for environment in environments))}"
        yield f"reports = [{', '.join(_quoted(source.digest) for source in one.sources)}]"
        yield f"date = {max(source.day for source in one.sources)}"
        yield f"expires = {last}"
        if one.reached:
            rates = ", ".join(f"{mode} = {rate:.4g}" for mode, rate in sorted(one.reached.items()))
            yield f"reached = {{ {rates} }} # TFLOP/s, highest seen"
        for factor in one.factors:
            yield ""
            yield "[[class.ratio]]"
            yield f"keys = [{_quoted(factor.key)}]"
            yield f"at_least = {factor.at_least:.6g}"
            yield f"seen = [{', '.join(f'{end:.6g}' for end in factor.seen)}]"
            yield f"noise = {factor.noise:.6g}"
            yield f"pairs = {factor.pairs}"
    yield ""


def _joined(words: Iterator[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _quoted(words: str) -> str:
    """A basic string of TOML: as in JSON, but no half of a character, and nothing that a terminal would obey."""
    whole = json.dumps(words.encode("utf-8", errors="replace").decode("utf-8"), ensure_ascii=False)
    return "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in whole)


def _told(classes: Sequence[_Class], last: datetime.date) -> Iterator[str]:
    """What was written, for the person who asked for it."""
    for one in classes:
        name, sources = text.line(_name(one.target)), text.count(len(one.sources), "report")
        yield f"{name}: {text.count(len(one.factors), 'expectation')} from {sources}, to {last}"
        # A machine fails where its whole interval, as wide as this one, lies below.
        found = statistics.median(1 - factor.at_least / factor.seen[2] for factor in one.factors)
        yield f"  fails a machine whose ratio is {found:.1%} less than the one measured (median of the expectations)"
        if alone := sum(one.machines[factor.key] == 1 for factor in one.factors):
            whole = "all" if alone == len(one.factors) else f"{alone} of {len(one.factors)}"
            yield (
                f"  {whole} rest on one machine, which does not show how machines differ: give a report of each of "
                "several, or a --margin"
            )
        for words in one.unused:
            yield f"  left out: {text.line(words)}"
